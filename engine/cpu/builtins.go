package cpu

import (
	"context"
	"encoding/binary"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/builtin"
	"github.com/tensorferry/tensorferry/engine/stack"
	"github.com/tensorferry/tensorferry/tensor"
)

// Builtins returns the models that need no files, made ready on h: echo, relu, affine
// and sink, as package builtin says. All but sink compute in place.
func Builtins(h *Host) []engine.Model {
	var models []engine.Model
	for _, f := range []RowFunc{
		{Info: builtin.Echo, Rows: echo, InPlace: true},
		{Info: builtin.ReLU, Bind: bindReLU, InPlace: true},
		{Info: builtin.Affine, Bind: bindAffine, InPlace: true},
		{Info: builtin.Sink, Rows: sink, Outs: func([]tensor.Desc, map[string]string) ([]tensor.Desc, error) {
			return builtin.Outs(builtin.Sink, engine.Call{}), nil
		}},
	} {
		f.quick = f.InPlace
		made, err := f.Model(h)
		if err != nil {
			panic("cpu: built-in model: " + err.Error()) // only a mistake in the table above
		}
		models = append(models, made)
	}
	return models
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
	switch dtype := c.Inputs[0].Desc.DType; dtype {
	case tensor.Float64:
		return func(_ context.Context, rb RowBlock) error { return affine(rb.Out[0], a, b) }, nil
	case tensor.Float32:
		return func(_ context.Context, rb RowBlock) error { return affine(rb.Out[0], float32(a), float32(b)) }, nil
	default:
		f, _ := stack.FloatOf(dtype) // as its port says
		return func(_ context.Context, rb RowBlock) error {
			affineHalf(f, rb.Out[0], float32(a), float32(b))
			return nil
		}, nil
	}
}

func affine[T float32 | float64](data []byte, a, b T) error {
	xs, err := tensor.Slice[T](tensor.Tensor{Desc: tensor.Desc{DType: tensor.DataTypeOf[T]()}, Data: data})
	if err != nil {
		return err
	}
	affineAll(xs, a, b)
	return nil
}

func affineAll[T float32 | float64](xs []T, a, b T) {
	for i, x := range xs {
		xs[i] = T(a*x) + b // the conversion keeps the compiler from fusing, which rounds differently
	}
}

// affineHalf goes by way of float32, a few elements at a time.
func affineHalf(f stack.Float, data []byte, a, b float32) {
	xs := make([]float32, 256)
	for ; len(data) > 0; data = data[len(xs)*f.Bytes:] {
		xs = xs[:min(len(xs), len(data)/f.Bytes)]
		f.Load(xs, data)
		affineAll(xs, a, b)
		f.Store(data, xs)
	}
}

// relu overwrites data, which holds whole elements, as r says: with two float32 in a word it
// runs at several GB/s per core where a loop over elements mispredicts every other sign.
func relu(r builtin.Words, data []byte) {
	sign, nan, shift := r.Sign, r.NaN, r.Shift&63
	for len(data) >= 32 {
		d := data[:32]
		a, b := binary.LittleEndian.Uint64(d), binary.LittleEndian.Uint64(d[8:])
		e, f := binary.LittleEndian.Uint64(d[16:]), binary.LittleEndian.Uint64(d[24:])
		binary.LittleEndian.PutUint64(d, reluWord(a, sign, nan, shift))
		binary.LittleEndian.PutUint64(d[8:], reluWord(b, sign, nan, shift))
		binary.LittleEndian.PutUint64(d[16:], reluWord(e, sign, nan, shift))
		binary.LittleEndian.PutUint64(d[24:], reluWord(f, sign, nan, shift))
		data = data[32:]
	}
	for len(data) > 0 {
		var word [8]byte
		n := copy(word[:], data)
		binary.LittleEndian.PutUint64(word[:], reluWord(binary.LittleEndian.Uint64(word[:]), sign, nan, shift))
		copy(data, word[:n])
		data = data[n:]
	}
}

func reluWord(x, sign, nan uint64, shift uint) uint64 {
	keep := ((x&^sign + nan) | ^x) & sign
	return x & (keep | (keep - keep>>(shift&63)))
}
