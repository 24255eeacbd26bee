package cpu

import (
	"context"
	"encoding/binary"
	"fmt"
	"strconv"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/engine/builtin"
	"github.com/tensorferry/tensorferry/tensor"
)

// Builtins returns the models that need no files, made ready on h.
//
//	echo    x -> y      the same bytes; any data type and shape
//	relu    x -> y      max(x, 0); floats and signed integers
//	affine  x -> y      a·x + b with params "a" (1 if absent) and "b" (0); float32, float64
//	slow    x -> y      echo, after param "delay" (a Go duration, 0 to 1m) per block; a
//	                    block that holds row "fail_at", if given, fails
//	sink    x -> bytes  the size of x, which it takes whole, as a uint64 scalar
//
// All but sink are elementwise and compute in place. A param that a model does not
// know is refused.
func Builtins(h *Host) []engine.Model {
	var models []engine.Model
	for _, m := range []struct {
		info engine.Info
		bind func(engine.Call) (RowsFunc, error)
	}{
		{builtin.Echo, bindRows(echo)}, {builtin.ReLU, bindReLU}, {builtin.Affine, bindAffine}, {builtin.Slow, bindSlow}, {builtin.Sink, bindRows(sink)},
	} {
		b := blocks.Model{Info: m.info, Bind: func(c engine.Call) (b blocks.Bound, err error) {
			if m.info.Rows != 0 {
				b.Results = blocks.InPlace
			}
			b.Outs = builtin.Outs(m.info, c)
			if err = builtin.CheckParams(m.info, c); err == nil {
				b.Program, err = m.bind(c)
			}
			return b, err
		}}
		made, err := h.model(b)
		if err != nil {
			panic("cpu: built-in model: " + err.Error()) // only a mistake in the table above
		}
		models = append(models, made)
	}
	return models
}

func bindRows(f RowsFunc) func(engine.Call) (RowsFunc, error) {
	return func(engine.Call) (RowsFunc, error) { return f, nil }
}

func sink(_ context.Context, b RowBlock) error {
	binary.LittleEndian.PutUint64(b.Out[0], uint64(len(b.In[0])))
	return nil
}

func echo(context.Context, RowBlock) error { return nil }

func bindReLU(c engine.Call) (RowsFunc, error) {
	r := builtin.WordsOf(c.Inputs[0].Desc.DType)
	return func(_ context.Context, b RowBlock) error {
		relu(r, b.Out[0])
		return nil
	}, nil
}

func bindAffine(c engine.Call) (RowsFunc, error) {
	a, b, err := builtin.AffineOf(c)
	if err != nil {
		return nil, err
	}
	if c.Inputs[0].Desc.DType == tensor.Float32 {
		return func(_ context.Context, rb RowBlock) error { return affine(rb.Out[0], float32(a), float32(b)) }, nil
	}
	return func(_ context.Context, rb RowBlock) error { return affine(rb.Out[0], a, b) }, nil
}

func affine[T float32 | float64](data []byte, a, b T) error {
	xs, err := elements[T](data)
	if err != nil {
		return err
	}
	for i, x := range xs {
		xs[i] = T(a*x) + b // the conversion keeps the compiler from fusing, which rounds differently
	}
	return nil
}

// elements views a block as numbers.
func elements[T tensor.Element](data []byte) ([]T, error) {
	return tensor.Slice[T](tensor.Tensor{Desc: tensor.Desc{DType: tensor.DataTypeOf[T]()}, Data: data})
}

func bindSlow(c engine.Call) (RowsFunc, error) {
	var delay time.Duration
	failAt := int64(-1)
	var err error
	if text, ok := c.Params["delay"]; ok {
		if delay, err = time.ParseDuration(text); err != nil || delay < 0 || delay > builtin.MaxDelay {
			return nil, fmt.Errorf("param \"delay\": wanted a duration from 0s to %v, got %q", builtin.MaxDelay, text)
		}
	}
	if text, ok := c.Params["fail_at"]; ok {
		if failAt, err = strconv.ParseInt(text, 10, 64); err != nil || failAt < 0 {
			return nil, fmt.Errorf("param \"fail_at\": wanted a row, got %q", text)
		}
	}
	return func(ctx context.Context, b RowBlock) error {
		if delay > 0 {
			sleep := time.NewTimer(delay)
			defer sleep.Stop()
			select {
			case <-sleep.C:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		if failAt >= b.Row && failAt-b.Row < b.Rows {
			return engine.Publicf("asked to fail at row %d", failAt)
		}
		return nil
	}, nil
}
