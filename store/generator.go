package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store/generate"
	"github.com/tensorferry/tensorferry/tensor"
)

// ErrParams is wrapped when a source does not take the parameters it was given.
var ErrParams = errors.New("store: bad parameters")

// generatorParams are what a Generator knows.
var generatorParams = []string{"dtype", "fill", "seed", "shape"}

// Generator returns a Source of tensors as package generate makes them. Its parameters are
// shape, such as 1000,64 (empty for a scalar), which is required; dtype, float32 by
// default; seed, 0 by default; fill, as for generate.ParseFill. Only held views take memory.
func Generator() Source {
	pool := slab.NewPool(generatorCache, slab.System)
	return func(_ context.Context, params map[string]string) (Reader, error) {
		r := &generated{pool: pool}
		if err := r.parse(params); err != nil {
			return nil, err
		}
		return r, nil
	}
}

// generated is a tensor that is made as it is read.
type generated struct {
	pool *slab.Pool
	desc tensor.Desc
	size int64
	seed uint64
	fill generate.Fill
}

func (g *generated) parse(params map[string]string) (err error) {
	for key := range params {
		if !slices.Contains(generatorParams, key) {
			return fmt.Errorf("%w: no parameter %.*q; known are %s", ErrParams, quoted, key, strings.Join(generatorParams, ", "))
		}
	}
	shape, shaped := params["shape"]
	if !shaped {
		return fmt.Errorf("%w: shape is missing; give one such as 1000,64, or an empty one for a scalar", ErrParams)
	}
	if g.desc.Shape, err = tensor.ParseShape(shape); err != nil {
		return fmt.Errorf("%w: shape %.*q: %w", ErrParams, quoted, shape, err)
	}
	g.desc.DType = tensor.Float32
	if name, given := params["dtype"]; given {
		if g.desc.DType, err = tensor.ParseDataType(name); err != nil {
			return fmt.Errorf("%w: dtype: %w", ErrParams, err)
		}
	}
	if g.size, err = g.desc.Bytes(); err != nil {
		return fmt.Errorf("%w: %w", ErrParams, err)
	}
	if text, given := params["seed"]; given {
		if g.seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			return fmt.Errorf("%w: seed %.*q is not a whole number from 0 to 2^64-1", ErrParams, quoted, text)
		}
	}
	if g.fill, err = generate.ParseFill(params["fill"], g.desc.DType); err != nil {
		return fmt.Errorf("%w: %w", ErrParams, err)
	}
	return nil
}

func (g *generated) Info() Info { return Info{Desc: g.desc.Clone()} }
func (g *generated) Release()   {}

func (g *generated) View(ctx context.Context, off, n int64) ([]byte, Releaser, error) {
	if err := checkView(ctx, off, n, g.size); err != nil {
		return nil, nil, err
	}
	s, err := g.pool.Get(int(n))
	if err != nil {
		return nil, nil, fmt.Errorf("store: generated tensor: %w", err)
	}
	generate.Bytes(s.Bytes(), off, g.desc.DType, g.seed, g.fill)
	return s.Bytes(), s, nil
}
