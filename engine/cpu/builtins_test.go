package cpu

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/x448/float16"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/builtin"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/tensor"
)

func newHost(memory int64) *Host {
	return NewHost(HostConfig{MemoryBytes: memory, Workers: 3})
}

func find(h *Host, name string) engine.Model {
	for _, m := range append(Builtins(h), Slow(h)) {
		if m.Info().Name == name {
			return m
		}
	}
	return nil
}

func onHost(name string) func(testing.TB, int64) enginetest.Subject {
	return enginetest.On(newHost, func(h *Host) (engine.Model, error) { return find(h, name), nil })
}

func same(in []tensor.Tensor) ([]tensor.Tensor, error) { return in, nil }

func TestTheBuiltInModelsPassTheSuite(t *testing.T) {
	x := []tensor.Tensor{floatTensor(1, 3, 40, 25)}
	empty := []tensor.Tensor{{Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{4, 0, 2}}, Data: []byte{}}}
	scalar := []tensor.Tensor{floatTensor(2)}
	for name, c := range map[string]enginetest.Case{
		"echo": {Want: same},
		"slow": {Want: same, Params: map[string]string{"delay": "0s"}},
		"relu": {Want: onFloats(func(x float32) float32 { return float32(math.Max(float64(x), 0)) })},
		"affine": {
			Params: map[string]string{"a": "-1.5", "b": "0.3"},
			Want:   onFloats(func(x float32) float32 { return float32(-1.5*float64(x)) + float32(0.3) }),
		},
		"sink": {Want: func(in []tensor.Tensor) ([]tensor.Tensor, error) {
			n := tensor.Tensor{Desc: tensor.Desc{DType: tensor.Uint64}, Data: make([]byte, 8)}
			binary.LittleEndian.PutUint64(n.Data, uint64(len(in[0].Data)))
			return []tensor.Tensor{n}, nil
		}},
	} {
		t.Run(name, func(t *testing.T) {
			c.New, c.Inputs, c.Empty, c.Scalar = onHost(name), x, empty, scalar
			enginetest.Run(t, c)
		})
	}
}

func onFloats(f func(float32) float32) func([]tensor.Tensor) ([]tensor.Tensor, error) {
	return func(in []tensor.Tensor) ([]tensor.Tensor, error) {
		xs, err := tensor.Slice[float32](in[0])
		if err != nil {
			return nil, err
		}
		ys := make([]float32, len(xs))
		for i, x := range xs {
			ys[i] = f(x)
		}
		y, err := tensor.Of(ys, in[0].Shape...)
		return []tensor.Tensor{y}, err
	}
}

// naive says per data type whether the element that ends at its sign bit is kept.
var naive = map[tensor.DataType]func(b []byte) bool{
	tensor.Int8:  func(b []byte) bool { return int8(b[0]) > 0 },
	tensor.Int16: func(b []byte) bool { return int16(binary.LittleEndian.Uint16(b)) > 0 },
	tensor.Int32: func(b []byte) bool { return int32(binary.LittleEndian.Uint32(b)) > 0 },
	tensor.Int64: func(b []byte) bool { return int64(binary.LittleEndian.Uint64(b)) > 0 },
	tensor.Float16: func(b []byte) bool {
		v := float16.Frombits(binary.LittleEndian.Uint16(b)).Float32()
		return v > 0 || v != v
	},
	tensor.BFloat16: func(b []byte) bool {
		v := math.Float32frombits(uint32(binary.LittleEndian.Uint16(b)) << 16)
		return v > 0 || v != v
	},
	tensor.Float32: func(b []byte) bool {
		v := math.Float32frombits(binary.LittleEndian.Uint32(b))
		return v > 0 || v != v
	},
	tensor.Float64: func(b []byte) bool {
		v := math.Float64frombits(binary.LittleEndian.Uint64(b))
		return v > 0 || v != v
	},
}

func TestReLUEqualsTheNaiveOneForEveryBitPattern(t *testing.T) {
	if types := builtin.ReLU.Inputs[0].DTypes; len(naive) != len(types) {
		t.Fatalf("%d data types are tested, %d implemented", len(naive), len(types))
	}
	for d, keep := range naive {
		t.Run(d.String(), func(t *testing.T) {
			size := d.Bits() / 8
			x := make([]byte, 1<<17+6*size) // all 16-bit patterns, and a tail of no whole word
			fill(x, 1)
			for i := range 1 << 16 { // in the upper half of an element: signs, infinities, NaNs
				at := i * 2
				if size > 2 {
					at = i%(len(x)/size)*size + size - 2
				}
				binary.LittleEndian.PutUint16(x[at:], uint16(i*40503)) // odd: every value once
			}
			for i, bits := range [][]byte{{0, 0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0, 0xf0, 0xff}, {1, 0, 0, 0, 0, 0, 0xf0, 0xff}, {0, 0, 0, 0, 0, 0, 0, 0x80}, {0, 0, 0x80, 0xff, 1, 0, 0x80, 0xff}} {
				copy(x[64*i:], bits)
			}
			y := append([]byte(nil), x...)
			relu(builtin.WordsOf(d), y)
			for i := 0; i < len(x); i += size {
				want := make([]byte, size)
				if keep(x[i : i+size]) {
					want = x[i : i+size]
				}
				if string(y[i:i+size]) != string(want) {
					t.Fatalf("relu of the bytes %x is %x, want %x", x[i:i+size], y[i:i+size], want)
				}
			}
		})
	}
}

func TestParamsThatMakeNoSenseAreRefused(t *testing.T) {
	h := NewHost(HostConfig{Workers: 1})
	defer h.Close()
	x := []tensor.Tensor{floatTensor(1, 4)}
	for name, c := range map[string]struct{ model, param, value string }{
		"a that is no number":     {"affine", "a", "two"},
		"b beyond float32":        {"affine", "b", "1e300"},
		"a that is none":          {"affine", "a", "NaN"},
		"a that has no end":       {"affine", "a", "-Infinity"},
		"a delay without unit":    {"slow", "delay", "5"},
		"a negative delay":        {"slow", "delay", "-1s"},
		"a delay over the limit":  {"slow", "delay", "61s"},
		"a row that is no number": {"slow", "fail_at", "x"},
		"a negative row":          {"slow", "fail_at", "-1"},
		"one affine has not":      {"affine", "c", "2"},
		"one relu has not":        {"relu", "a", "2"},
		"one echo has not":        {"echo", "a", "2"},
		"one slow has not":        {"slow", "a", "2"},
		"one sink has not":        {"sink", "a", "2"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := enginetest.Compute(t.Context(), find(h, c.model), x, map[string]string{c.param: c.value}, 64, 0)
			if !errors.Is(err, engine.ErrParam) {
				t.Errorf("got %v, want ErrParam", err)
			}
		})
	}
}

func TestAffineComputesInFloat64ForFloat64(t *testing.T) {
	h := NewHost(HostConfig{Workers: 1})
	defer h.Close()
	x, err := tensor.Of([]float64{1, 2, math.NaN()})
	if err != nil {
		t.Fatal(err)
	}
	out, err := enginetest.Compute(t.Context(), find(h, "affine"), []tensor.Tensor{x}, map[string]string{"a": "0.1", "b": "1e-17"}, 64, 0)
	if err != nil {
		t.Fatal(err)
	}
	ys, err := tensor.Slice[float64](out[0])
	if err != nil {
		t.Fatal(err)
	}
	if a := 0.1; ys[0] != a+1e-17 || ys[1] != 2*a+1e-17 || !math.IsNaN(ys[2]) {
		t.Errorf("got %v", ys)
	}
}

// TestAffineOfHalfTypesIsThatOfFloat32Rounded for every value there is.
func TestAffineOfHalfTypesIsThatOfFloat32Rounded(t *testing.T) {
	h := NewHost(HostConfig{Workers: 1})
	defer h.Close()
	for _, d := range []tensor.DataType{tensor.Float16, tensor.BFloat16} {
		x := tensor.Tensor{Desc: tensor.Desc{DType: d, Shape: tensor.Shape{1 << 16}}, Data: make([]byte, 1<<17)}
		for i := range 1 << 16 {
			binary.LittleEndian.PutUint16(x.Data[2*i:], uint16(i))
		}
		ys := make([]float32, 1<<16)
		toFloats(d, ys, x.Data)
		for i, v := range ys {
			ys[i] = float32(float32(-1.7)*v) + 0.3
		}
		wide, err := tensor.Of(ys)
		if err != nil {
			t.Fatal(err)
		}
		out, err := enginetest.Compute(t.Context(), find(h, "affine"), []tensor.Tensor{x}, map[string]string{"a": "-1.7", "b": "0.3"}, 1000, 1)
		if err == nil {
			err = enginetest.Equal(out, []tensor.Tensor{as(d, wide)})
		}
		if err != nil {
			t.Errorf("%v: %v", d, err)
		}
	}
}

func TestSlowFailsAtTheRowItIsAskedTo(t *testing.T) {
	h := NewHost(HostConfig{Workers: 1})
	defer h.Close()
	x := []tensor.Tensor{floatTensor(1, 100)}
	for row, fails := range map[string]bool{"0": true, "99": true, "100": false} {
		_, err := enginetest.Compute(t.Context(), find(h, "slow"), x, map[string]string{"fail_at": row}, 40, 0)
		if errors.Is(err, engine.ErrModel) != fails {
			t.Errorf("fail_at %s of 100 rows: %v", row, err)
		}
	}
}

func TestSlowSleepsPerBlockAndStopsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHost(HostConfig{Workers: 1})
		defer h.Close()
		m := find(h, "slow")
		x := []tensor.Tensor{floatTensor(1, 30)}
		params := map[string]string{"delay": "10s"}
		begin := time.Now()
		if _, err := enginetest.Compute(t.Context(), m, x, params, 40, 0); err != nil { // three blocks, at once
			t.Error(err)
		}
		if took := time.Since(begin); took != 10*time.Second {
			t.Errorf("three blocks took %v, want 10s", took)
		}

		ctx, cancel := context.WithCancel(t.Context())
		r, err := m.Open(ctx, enginetest.Call(m, x, params, 1<<20))
		if err != nil {
			t.Fatal(err)
		}
		b, err := r.Borrow(ctx)
		if err != nil {
			t.Fatal(err)
		}
		r.Filled(b)
		synctest.Wait() // the block waits
		begin = time.Now()
		cancel()
		if _, err := r.Next(t.Context()); !errors.Is(err, context.Canceled) {
			t.Errorf("Next returned %v, want Canceled", err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if took := time.Since(begin); took != 0 {
			t.Errorf("the model went on for %v after the cancel", took)
		}
	})
}

func TestWhatIsComputedAtOnceIsWhatARunComputes(t *testing.T) {
	h := NewHost(HostConfig{Workers: 1})
	defer h.Close()
	for _, name := range []string{"echo", "relu", "affine"} {
		m := find(h, name)
		for _, d := range []tensor.DataType{tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64} {
			for _, bytes := range []int64{8, 1000, helped} {
				x := tensor.Tensor{Desc: tensor.Desc{DType: d, Shape: tensor.Shape{bytes / int64(d.Bits()/8)}}, Data: make([]byte, bytes)}
				for i := range x.Data {
					x.Data[i] = byte(i * i % 251)
				}
				c := engine.Call{Inputs: []engine.Input{{Port: "x", Desc: x.Desc, ChunkBytes: bytes}}}
				if name == "affine" {
					c.Params = map[string]string{"a": "-1.5", "b": "0.3"}
				}
				want, err := engine.Compute(t.Context(), m, c.Params, x)
				if err != nil {
					t.Fatal(err)
				}
				if !m.(engine.Immediate).AtOnce(c, x.Data) {
					t.Fatalf("%s of %v, %d bytes, is not computed at once", name, d, bytes)
				}
				if err := enginetest.Equal([]tensor.Tensor{x}, want); err != nil {
					t.Errorf("%s of %v, %d bytes: %v", name, d, bytes, err)
				}
			}
		}
	}
}

func TestNothingIsComputedAtOnceThatIsWrongOrLargeOrWouldHaveToWait(t *testing.T) {
	h := NewHost(HostConfig{Workers: 1})
	call := func(d tensor.DataType, n int64, params map[string]string) engine.Call {
		return engine.Call{Params: params, Inputs: []engine.Input{{Port: "x", Desc: tensor.Desc{DType: d, Shape: tensor.Shape{n}}, ChunkBytes: n}}}
	}
	for name, c := range map[string]struct {
		model string
		call  engine.Call
		bytes int
	}{
		"it takes its input whole": {"sink", call(tensor.Uint8, 8, nil), 8},
		"it may sleep":             {"slow", call(tensor.Uint8, 8, nil), 8},
		"too large":                {"echo", call(tensor.Uint8, wide, nil), wide},
		"empty":                    {"echo", call(tensor.Uint8, 0, nil), 0},
		"another data type":        {"relu", call(tensor.Bool, 8, nil), 8},
		"a param that it has not":  {"relu", call(tensor.Float32, 2, map[string]string{"a": "1"}), 8},
		"a param out of range":     {"affine", call(tensor.Float32, 2, map[string]string{"a": "x"}), 8},
	} {
		if m, can := find(h, c.model).(engine.Immediate); can && m.AtOnce(c.call, make([]byte, c.bytes)) {
			t.Errorf("%s: it was computed", name)
		}
	}
	m, c, data := find(h, "relu").(engine.Immediate), call(tensor.Float32, 2, nil), make([]byte, 8)
	busy := func(n int) {
		h.workers.mu.Lock()
		h.workers.begun += n
		h.workers.mu.Unlock()
	}
	if busy(1); m.AtOnce(c, data) {
		t.Error("the only worker computes")
	}
	if busy(-1); !m.AtOnce(c, data) {
		t.Error("nobody computes")
	}
	if h.Close(); m.AtOnce(c, data) {
		t.Error("the host is closed")
	}
}
