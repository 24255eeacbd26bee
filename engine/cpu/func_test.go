package cpu_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/tensor"
)

func newHost(memory int64) *cpu.Host {
	return cpu.NewHost(cpu.HostConfig{MemoryBytes: memory, Workers: 3})
}

var anyShape = []int64{engine.AnyAxes}

func bytesTensor(dtype tensor.DataType, shape ...int64) tensor.Tensor {
	d := tensor.Desc{DType: dtype, Shape: shape}
	n, err := d.Bytes()
	if err != nil {
		panic(err)
	}
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(i*7 + i>>8)
	}
	return tensor.Tensor{Desc: d, Data: data}
}

// weave makes two outputs of two split inputs and a Whole key: the bytes of a
// and b added, and each row of b summed, both plus the key. Rows per block are odd.
func weave(rows int64) cpu.RowFunc {
	return cpu.RowFunc{
		Info: engine.Info{
			Name: "weave", Rows: 1, BlockRows: rows,
			Inputs: []engine.Port{
				{Name: "a", DTypes: []tensor.DataType{tensor.Uint8}, Shape: []int64{engine.Free, 10}},
				{Name: "key", DTypes: []tensor.DataType{tensor.Uint8}, Shape: []int64{3}, Whole: true},
				{Name: "b", DTypes: []tensor.DataType{tensor.Uint8}, Shape: []int64{engine.Free, 2, 5}},
			},
			Outputs: []engine.Port{
				{Name: "added", Shape: []int64{engine.Free, 10}},
				{Name: "summed", Shape: []int64{engine.Free}},
			},
		},
		Outs: func(in []tensor.Desc, _ map[string]string) ([]tensor.Desc, error) {
			return []tensor.Desc{in[0], {DType: tensor.Uint8, Shape: in[0].Shape[:1]}}, nil
		},
		Rows: func(_ context.Context, b cpu.RowBlock) error {
			key := b.Whole[1][0] + b.Whole[1][1] + b.Whole[1][2]
			clear(b.Out[1])
			for i, x := range b.In[0] {
				b.Out[0][i] = x + b.In[2][i] + key
				b.Out[1][i/10] += b.In[2][i] + key
			}
			return nil
		},
	}
}

func weaveInputs(rows int64) []tensor.Tensor {
	return []tensor.Tensor{bytesTensor(tensor.Uint8, rows, 10), bytesTensor(tensor.Uint8, 3), bytesTensor(tensor.Uint8, rows, 2, 5)}
}

func woven(in []tensor.Tensor) ([]tensor.Tensor, error) {
	added, _ := tensor.New(in[0].Desc, make([]byte, len(in[0].Data)))
	summed, err := tensor.New(tensor.Desc{DType: tensor.Uint8, Shape: in[0].Shape[:1]}, make([]byte, in[0].Shape[0]))
	key := in[1].Data[0] + in[1].Data[1] + in[1].Data[2]
	for i, x := range in[0].Data {
		added.Data[i] = x + in[2].Data[i] + key
		summed.Data[i/10] += in[2].Data[i] + key
	}
	return []tensor.Tensor{added, summed}, err
}

// plus adds n to every byte, in place or not; rows is what its Info says.
func plus(name string, n byte, rows int, inPlace bool) cpu.RowFunc {
	return cpu.RowFunc{
		Info: engine.Info{
			Name: name, Rows: rows, BlockRows: 3,
			Inputs:  []engine.Port{{Name: "x", Shape: anyShape}},
			Outputs: []engine.Port{{Name: "y", Shape: anyShape}},
		},
		InPlace: inPlace,
		Rows: func(_ context.Context, b cpu.RowBlock) error {
			for i, x := range b.In[0] {
				b.Out[0][i] = x + n
			}
			return nil
		},
	}
}

// reverse turns all bytes of a tensor round, for which it needs them all.
var reverse = cpu.Func{
	Info: engine.Info{
		Name:    "reverse",
		Inputs:  []engine.Port{{Name: "x", Shape: anyShape}},
		Outputs: []engine.Port{{Name: "y", Shape: anyShape}},
	},
	Memory: func(in []tensor.Desc, _ map[string]string) (int64, error) { return in[0].Bytes() },
	Call: func(_ context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
		y := make([]byte, len(in[0].Data))
		for i, b := range in[0].Data {
			y[len(y)-1-i] = b
		}
		t, err := tensor.New(in[0].Desc, y)
		return []tensor.Tensor{t}, err
	},
}

// widen doubles every row of its 2-dimensional input: [n w] becomes [n 2w].
var widen = cpu.RowFunc{
	Info: engine.Info{
		Name: "widen", Rows: engine.AllButLast,
		Inputs:  []engine.Port{{Name: "x", Shape: []int64{engine.Free, engine.Free}}},
		Outputs: []engine.Port{{Name: "y", Shape: []int64{engine.Free, engine.Free}}},
	},
	Outs: func(in []tensor.Desc, _ map[string]string) ([]tensor.Desc, error) {
		y := in[0].Clone()
		y.Shape[1] *= 2
		return []tensor.Desc{y}, nil
	},
	Rows: func(_ context.Context, b cpu.RowBlock) error {
		w := len(b.In[0]) / int(b.Rows)
		for r := range int(b.Rows) {
			row := b.In[0][r*w : (r+1)*w]
			copy(b.Out[0][2*r*w:], row)
			copy(b.Out[0][(2*r+1)*w:], row)
		}
		return nil
	},
}

type maker interface {
	Model(*cpu.Host) (engine.Model, error)
}

func one(m maker) func(*cpu.Host) (engine.Model, error) { return m.Model }

func plain(f func(x []byte) []byte, widened int64) func([]tensor.Tensor) ([]tensor.Tensor, error) {
	return func(in []tensor.Tensor) ([]tensor.Tensor, error) {
		d := in[0].Desc.Clone()
		if widened > 1 {
			d.Shape[1] *= widened
		}
		t, err := tensor.New(d, f(in[0].Data))
		return []tensor.Tensor{t}, err
	}
}

func add(n byte) func([]byte) []byte {
	return func(x []byte) []byte {
		y := make([]byte, len(x))
		for i := range x {
			y[i] = x[i] + n
		}
		return y
	}
}

func reversed(x []byte) []byte {
	y := make([]byte, len(x))
	for i := range x {
		y[len(y)-1-i] = x[i]
	}
	return y
}

func doubled(row int) func([]byte) []byte {
	return func(x []byte) (y []byte) {
		for ; len(x) > 0; x = x[row:] {
			y = append(append(y, x[:row]...), x[:row]...)
		}
		return y
	}
}

func TestFunctionsPassTheSuite(t *testing.T) {
	x := []tensor.Tensor{bytesTensor(tensor.Int16, 61, 9)}
	empty := []tensor.Tensor{bytesTensor(tensor.Int16, 0, 9)}
	scalar := []tensor.Tensor{bytesTensor(tensor.Float32)}
	for name, c := range map[string]struct {
		build  func(*cpu.Host) (engine.Model, error)
		want   func([]tensor.Tensor) ([]tensor.Tensor, error)
		inputs [3][]tensor.Tensor
	}{
		"RowFunc of many ports":          {one(weave(7)), woven, [3][]tensor.Tensor{weaveInputs(500), weaveInputs(0)}},
		"RowFunc of single rows":         {one(weave(1)), woven, [3][]tensor.Tensor{weaveInputs(200), weaveInputs(0)}},
		"RowFunc over whole batch items": {one(plus("p", 1, 1, false)), plain(add(1), 1), [3][]tensor.Tensor{x, empty, scalar}},
		"RowFunc in place":               {one(plus("p", 1, engine.AllAxes, true)), plain(add(1), 1), [3][]tensor.Tensor{x, empty, scalar}},
		"RowFunc of all rows at once":    {one(plus("p", 1, 0, false)), plain(add(1), 1), [3][]tensor.Tensor{x, empty, scalar}},
		"RowFunc of wider rows":          {one(widen), plain(doubled(18), 2), [3][]tensor.Tensor{x, empty}},
		"Func":                           {one(reverse), plain(reversed, 1), [3][]tensor.Tensor{x, empty, scalar}},
	} {
		t.Run(name, func(t *testing.T) {
			enginetest.Run(t, enginetest.Case{
				New: enginetest.On(newHost, c.build), Inputs: c.inputs[0], Empty: c.inputs[1], Scalar: c.inputs[2], Want: c.want,
			})
		})
	}
}

// swap returns its two inputs the other way round: results that share the memory
// of the inputs. The second is taken as a Whole one.
type swap struct{}

func (swap) Model(h *cpu.Host) (engine.Model, error) {
	return cpu.Func{
		Info: engine.Info{
			Name:    "swap",
			Inputs:  []engine.Port{{Name: "a", Shape: anyShape}, {Name: "b", Shape: anyShape, Whole: true}},
			Outputs: []engine.Port{{Name: "b", Shape: anyShape}, {Name: "a", Shape: anyShape}},
		},
		Call: func(_ context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
			return []tensor.Tensor{in[1], in[0]}, nil
		},
	}.Model(h)
}

func swapped(f func([]tensor.Tensor) ([]tensor.Tensor, error)) func([]tensor.Tensor) ([]tensor.Tensor, error) {
	return func(in []tensor.Tensor) ([]tensor.Tensor, error) {
		out, err := f(in)
		return []tensor.Tensor{out[1], out[0]}, err
	}
}

func TestAFuncMayReturnItsInputs(t *testing.T) {
	enginetest.Run(t, enginetest.Case{
		New:    enginetest.On(newHost, swap{}.Model),
		Inputs: []tensor.Tensor{bytesTensor(tensor.Int16, 50, 9), bytesTensor(tensor.Int8, 30)},
		Want:   swapped(func(in []tensor.Tensor) ([]tensor.Tensor, error) { return in, nil }),
	})
}

func ports(n int) []engine.Port {
	ps := make([]engine.Port, n)
	for i := range ps {
		ps[i].Name = fmt.Sprint("p", i)
	}
	return ps
}

func TestAModelHasUpTo64PortsEachWay(t *testing.T) {
	h := cpu.NewHost(cpu.HostConfig{Workers: 1})
	defer h.Close()
	f := plus("p", 1, 0, false)
	f.Info.Inputs, f.Info.Outputs = ports(64), ports(64)
	if _, err := f.Model(h); err != nil {
		t.Error(err)
	}
}

func TestModelsThatContradictThemselvesAreRefused(t *testing.T) {
	h := cpu.NewHost(cpu.HostConfig{Workers: 1})
	defer h.Close()
	change := func(f func(*cpu.RowFunc)) error {
		bad := plus("p", 1, 0, false)
		f(&bad)
		_, err := bad.Model(h)
		return err
	}
	for name, err := range map[string]error{
		"no function":              change(func(f *cpu.RowFunc) { f.Rows = nil }),
		"no name":                  change(func(f *cpu.RowFunc) { f.Info.Name = "" }),
		"a control character":      change(func(f *cpu.RowFunc) { f.Info.Name = "a\nb" }),
		"a name that is no UTF-8":  change(func(f *cpu.RowFunc) { f.Info.Name = "a\xff" }),
		"a name of 513 bytes":      change(func(f *cpu.RowFunc) { f.Info.Name = string(make([]byte, 513)) }),
		"rows of -3":               change(func(f *cpu.RowFunc) { f.Info.Rows = -3 }),
		"negative block rows":      change(func(f *cpu.RowFunc) { f.Info.BlockRows = -1 }),
		"only a Whole input":       change(func(f *cpu.RowFunc) { f.Info.Inputs[0].Whole = true }),
		"no output":                change(func(f *cpu.RowFunc) { f.Info.Outputs = nil }),
		"more outputs than inputs": change(func(f *cpu.RowFunc) { f.Info.Outputs = make([]engine.Port, 2) }),
		"a port without a name":    change(func(f *cpu.RowFunc) { f.Info.Inputs[0].Name = "" }),
		"a param without a name":   change(func(f *cpu.RowFunc) { f.Info.Params = []engine.Param{{}} }),
		"65 inputs":                change(func(f *cpu.RowFunc) { f.Info.Inputs = ports(65) }),
		"65 outputs":               change(func(f *cpu.RowFunc) { f.Info.Inputs, f.Info.Outputs = ports(64), ports(65) }),
		"a data type of 99":        change(func(f *cpu.RowFunc) { f.Info.Inputs[0].DTypes = []tensor.DataType{99} }),
		"AnyAxes in the middle":    change(func(f *cpu.RowFunc) { f.Info.Inputs[0].Shape = []int64{2, engine.AnyAxes} }),
		"two ports of one name": func() error {
			_, err := cpu.Func{
				Info: engine.Info{Name: "f", Inputs: []engine.Port{{Name: "x"}, {Name: "x"}}, Outputs: reverse.Info.Outputs}, Call: reverse.Call,
			}.Model(h)
			return err
		}(),
		"a Func with rows": func() error {
			bad := reverse
			bad.Info.Rows = 1
			_, err := bad.Model(h)
			return err
		}(),
	} {
		if !errors.Is(err, engine.ErrInfo) {
			t.Errorf("%s: got %v, want ErrInfo", name, err)
		}
	}
}

func TestAModelThatBreaksItsWordFailsTheCall(t *testing.T) {
	x := []tensor.Tensor{bytesTensor(tensor.Int16, 6, 9)}
	desc := func(outs ...tensor.Desc) func([]tensor.Desc, map[string]string) ([]tensor.Desc, error) {
		return func([]tensor.Desc, map[string]string) ([]tensor.Desc, error) { return outs, nil }
	}
	d := func(dtype tensor.DataType, shape ...int64) tensor.Desc {
		return tensor.Desc{DType: dtype, Shape: shape}
	}
	rows := func(f func(*cpu.RowFunc)) maker {
		bad := plus("p", 1, 1, false)
		f(&bad)
		return bad
	}
	call := func(out []tensor.Tensor, err error) maker {
		bad := reverse
		bad.Info.Outputs = []engine.Port{{Name: "y", Shape: []int64{6, 9}}}
		bad.Call = func(context.Context, []tensor.Tensor, map[string]string) ([]tensor.Tensor, error) { return out, err }
		return bad
	}
	oops := errors.New("oops")
	for name, c := range map[string]struct {
		maker
		want error
	}{
		"no output described":       {rows(func(f *cpu.RowFunc) { f.Outs = desc() }), engine.ErrModel},
		"an output of no data type": {rows(func(f *cpu.RowFunc) { f.Outs = desc(d(0, 6)) }), engine.ErrModel},
		"an output of other rows":   {rows(func(f *cpu.RowFunc) { f.Outs = desc(d(tensor.Int8, 5)) }), engine.ErrModel},
		"an output of another shape": {rows(func(f *cpu.RowFunc) {
			f.Outs = desc(d(tensor.Int8, 6))
			f.Info.Outputs[0].Shape = []int64{6, 1}
		}), engine.ErrModel},
		"in place with other bytes": {rows(func(f *cpu.RowFunc) { f.InPlace, f.Outs = true, desc(d(tensor.Int8, 6, 9)) }), engine.ErrModel},
		"Outs refuses": {rows(func(f *cpu.RowFunc) {
			f.Outs = func([]tensor.Desc, map[string]string) ([]tensor.Desc, error) { return nil, oops }
		}), engine.ErrInput},
		"Outs panics": {rows(func(f *cpu.RowFunc) {
			f.Outs = func([]tensor.Desc, map[string]string) ([]tensor.Desc, error) { panic("oops") }
		}), engine.ErrModel},
		"Bind refuses": {rows(func(f *cpu.RowFunc) {
			f.Bind = func(engine.Call) (cpu.RowsFunc, error) { return nil, oops }
		}), engine.ErrInput},
		"Rows fails": {rows(func(f *cpu.RowFunc) {
			f.Rows = func(context.Context, cpu.RowBlock) error { return oops }
		}), oops},
		"Rows panics": {rows(func(f *cpu.RowFunc) {
			f.Rows = func(context.Context, cpu.RowBlock) error { panic(oops) }
		}), engine.ErrModel},
		"Memory is negative":                      {cpu.Func{Info: reverse.Info, Call: reverse.Call, Memory: func([]tensor.Desc, map[string]string) (int64, error) { return -1, nil }}, engine.ErrInput},
		"Memory refuses":                          {cpu.Func{Info: reverse.Info, Call: reverse.Call, Memory: func([]tensor.Desc, map[string]string) (int64, error) { return 0, oops }}, oops},
		"Call returns no output":                  {call(nil, nil), engine.ErrModel},
		"Call fails":                              {call(nil, oops), oops},
		"Call returns bytes that are no tensor":   {call([]tensor.Tensor{{Desc: d(tensor.Int8, 6, 9)}}, nil), engine.ErrModel},
		"Call returns another shape than its own": {call([]tensor.Tensor{bytesTensor(tensor.Int8, 9, 6)}, nil), engine.ErrModel},
	} {
		t.Run(name, func(t *testing.T) {
			s := enginetest.On(newHost, c.Model)(t, 1<<20)
			_, err := enginetest.Compute(t.Context(), s.Model, x, nil, 18, 1)
			if !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			if err := s.Idle(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAPanicIsAnErrorWithItsStackApart(t *testing.T) {
	f := plus("p", 1, 1, false)
	f.Rows = func(context.Context, cpu.RowBlock) error { panic("boom") }
	s := enginetest.On(newHost, f.Model)(t, 1<<20)
	_, err := enginetest.Compute(t.Context(), s.Model, []tensor.Tensor{bytesTensor(tensor.Int8, 4)}, nil, 4, 0)
	var p *engine.PanicError
	if !errors.As(err, &p) || p.Value != "boom" || len(p.Stack) == 0 || p.Model != "p" {
		t.Errorf("got %#v", err)
	}
}

func TestSetupRunsOnceInModel(t *testing.T) {
	h := cpu.NewHost(cpu.HostConfig{Workers: 1})
	defer h.Close()
	f := plus("p", 1, 1, false)
	setups := 0
	f.Setup = func() error { setups++; return nil }
	if _, err := f.Model(h); err != nil || setups != 1 {
		t.Errorf("%d set-ups, %v", setups, err)
	}
	oops := errors.New("oops")
	f.Setup = func() error { return oops }
	if _, err := f.Model(h); !errors.Is(err, oops) || !errors.Is(err, engine.ErrModel) {
		t.Errorf("got %v", err)
	}
	f.Setup = func() error { panic(oops) }
	if _, err := f.Model(h); !errors.Is(err, engine.ErrModel) {
		t.Errorf("got %v", err)
	}
}
