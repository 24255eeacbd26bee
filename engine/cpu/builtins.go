package cpu

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/engine"
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
	anyShape := []int64{engine.AnyAxes}
	elementwise := func(name string, dtypes []tensor.DataType, bind bind, params ...engine.Param) RowFunc {
		return RowFunc{
			Info: engine.Info{
				Name: name, Version: "1", Rows: engine.AllAxes, Params: params,
				Inputs:  []engine.Port{{Name: "x", DTypes: dtypes, Shape: anyShape}},
				Outputs: []engine.Port{{Name: "y", DTypes: dtypes, Shape: anyShape}},
			},
			InPlace: true, Bind: bind,
		}
	}
	var reluTypes []tensor.DataType
	for _, d := range tensor.DataTypes() {
		if _, ok := relus[d]; ok {
			reluTypes = append(reluTypes, d)
		}
	}
	funcs := []RowFunc{
		elementwise("echo", nil, bindRows(echo)),
		elementwise("relu", reluTypes, bindReLU),
		elementwise("affine", []tensor.DataType{tensor.Float32, tensor.Float64}, bindAffine,
			engine.Param{Name: "a", Kind: "number", Default: "1", Meaning: "factor of x"},
			engine.Param{Name: "b", Kind: "number", Default: "0", Meaning: "added to the product"}),
		elementwise("slow", nil, bindSlow,
			engine.Param{Name: "delay", Kind: "duration", Default: "0s", Meaning: "sleep before each block, at most " + maxDelay.String()},
			engine.Param{Name: "fail_at", Kind: "row", Meaning: "the block that holds this row fails"}),
		{
			Info: engine.Info{
				Name: "sink", Version: "1",
				Inputs:  []engine.Port{{Name: "x", Shape: anyShape}},
				Outputs: []engine.Port{{Name: "bytes", DTypes: []tensor.DataType{tensor.Uint64}}},
			},
			Outs: func([]tensor.Desc, map[string]string) ([]tensor.Desc, error) {
				return []tensor.Desc{{DType: tensor.Uint64}}, nil
			},
			Bind: bindRows(func(_ context.Context, b RowBlock) error {
				binary.LittleEndian.PutUint64(b.Out[0], uint64(len(b.In[0])))
				return nil
			}),
		},
	}
	models := make([]engine.Model, len(funcs))
	for i, f := range funcs {
		f.Bind = knowing(f.Info, f.Bind)
		m, err := f.Model(h)
		if err != nil {
			panic("cpu: built-in model: " + err.Error()) // only a mistake in the table above
		}
		models[i] = m
	}
	return models
}

// bind makes what computes the rows of one call.
type bind = func(engine.Call) (RowsFunc, error)

func bindRows(f RowsFunc) bind {
	return func(engine.Call) (RowsFunc, error) { return f, nil }
}

// knowing is bind, but refuses params that the model's info does not have.
func knowing(info engine.Info, bind bind) bind {
	var params []string
	for _, p := range info.Params {
		params = append(params, p.Name)
	}
	known := "it takes none"
	if len(params) > 0 {
		known = "known are " + strings.Join(params, ", ")
	}
	return func(c engine.Call) (RowsFunc, error) {
		for _, p := range slices.Sorted(maps.Keys(c.Params)) {
			if !slices.Contains(params, p) {
				return nil, fmt.Errorf("no param %q; %s", p, known)
			}
		}
		return bind(c)
	}
}

func echo(context.Context, RowBlock) error { return nil }

func bindReLU(c engine.Call) (RowsFunc, error) {
	r := relus[c.Inputs[0].Desc.DType]
	return func(_ context.Context, b RowBlock) error {
		r.apply(b.Out[0])
		return nil
	}, nil
}

func bindAffine(c engine.Call) (RowsFunc, error) {
	dtype := c.Inputs[0].Desc.DType
	number := func(param, absent string) (float64, error) {
		text, ok := c.Params[param]
		if !ok {
			text = absent
		}
		v, err := strconv.ParseFloat(text, dtype.Bits())
		if err != nil {
			return 0, fmt.Errorf("param %q: wanted a %v, got %q", param, dtype, text)
		}
		return v, nil
	}
	a, err := number("a", "1")
	if err != nil {
		return nil, err
	}
	b, err := number("b", "0")
	if err != nil {
		return nil, err
	}
	if dtype == tensor.Float32 {
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
		if delay, err = time.ParseDuration(text); err != nil || delay < 0 || delay > maxDelay {
			return nil, fmt.Errorf("param \"delay\": wanted a duration from 0s to %v, got %q", maxDelay, text)
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
