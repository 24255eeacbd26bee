package cpu

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/tensor"
)

// byteModel adds 1 to every byte of [rows width] tensors.
func byteModel(t testing.TB, h *Host, blockRows int64, inPlace bool, before func(context.Context, RowBlock) error) engine.Model {
	t.Helper()
	port := []engine.Port{{Name: "x", Shape: []int64{engine.Free, engine.Free}}}
	f := RowFunc{
		Info:    engine.Info{Name: "bytes", Rows: 1, BlockRows: blockRows, Inputs: port, Outputs: port, Params: []engine.Param{{Name: "run"}}},
		InPlace: inPlace,
		Rows: func(ctx context.Context, b RowBlock) error {
			if before != nil {
				if err := before(ctx, b); err != nil {
					return err
				}
			}
			for i, x := range b.In[0] {
				b.Out[0][i] = x + 1
			}
			return nil
		},
	}
	m, err := h.engine.Model(blocks.Model{Info: f.Info, Bind: func(c engine.Call) (blocks.Bound, error) {
		b, err := f.bind(c)
		b.Program = restingRows(f.Rows) // as that of a stack model
		return b, err
	}})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func openBytes(ctx context.Context, t testing.TB, m engine.Model, rows, width, chunk int64) engine.Run {
	t.Helper()
	d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{rows, width}}
	r, err := m.Open(ctx, engine.Call{Inputs: []engine.Input{{Port: "x", Desc: d, ChunkBytes: chunk}}})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func idle(t testing.TB, h *Host) {
	t.Helper()
	if used, _, _ := h.Budget().Used(); used != 0 {
		t.Errorf("%d bytes of the budget are still held", used)
	}
	if slabs, _ := h.Pool().Live(); slabs != 0 {
		t.Errorf("%d slabs are still held", slabs)
	}
}

// filledRun opens a run of three blocks, fills one and leaves the rest.
func filledRun(t *testing.T, h *Host, before func(context.Context, RowBlock) error, inPlace bool) engine.Run {
	t.Helper()
	r := openBytes(t.Context(), t, byteModel(t, h, 1, inPlace, before), 3, 5, 5)
	b, err := r.Borrow(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.Filled(b)
	return r
}

func TestBlocksNotStartedAreDroppedWithTheirRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHost(HostConfig{Workers: 1})
		defer h.Close()
		hold := make(chan struct{})
		first := filledRun(t, h, func(context.Context, RowBlock) error { <-hold; return nil }, true)
		synctest.Wait() // the only worker is taken
		computed := 0
		count := func(context.Context, RowBlock) error { computed++; return nil }
		second, third := filledRun(t, h, count, false), filledRun(t, h, count, true)
		if err := second.Close(); err != nil { // returns although the worker is taken
			t.Error(err)
		}
		close(hold)
		for _, r := range []engine.Run{first, third} {
			o, err := r.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			o.Release()
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		}
		if computed != 1 {
			t.Errorf("%d blocks were computed, want the third run's only", computed)
		}
		idle(t, h)
	})
}

func TestABlockBehindOneThatWokeNoWorkerIsComputed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHost(HostConfig{Workers: 4})
		defer h.Close()
		synctest.Wait() // the workers wait for blocks
		hold := make(chan struct{})
		filled := func(width int64, before func(context.Context, RowBlock) error) engine.Run {
			r := openBytes(t.Context(), t, byteModel(t, h, 1, true, before), 1, width, width)
			b, err := r.Borrow(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			r.Filled(b)
			return r
		}
		slow := filled(10, func(context.Context, RowBlock) error { <-hold; return nil })
		synctest.Wait()
		if len(h.workers.waiting) == 0 {
			t.Fatal("the block of a small call woke a worker")
		}
		fast := filled((1 << 20), nil)
		for _, r := range []engine.Run{fast, slow} { // the slow one still runs when the fast one has ended
			o, err := r.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			o.Release()
			if r == fast {
				close(hold)
			}
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		}
		idle(t, h)
	})
}

func TestRunsTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHost(HostConfig{Workers: 1})
		defer h.Close()
		var order []byte
		hold := make(chan struct{})
		note := func(name byte) func(context.Context, RowBlock) error {
			return func(context.Context, RowBlock) error { <-hold; order = append(order, name); return nil }
		}
		big := openBytes(t.Context(), t, byteModel(t, h, 1, true, note('b')), 100, (1 << 10), (1 << 10))
		small := openBytes(t.Context(), t, byteModel(t, h, 1, true, note('s')), 1, (1 << 10), (1 << 10))
		fill := func(r engine.Run) {
			b, err := r.Borrow(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			r.Filled(b)
		}
		slots := 0
		for ; ; slots++ {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond) // none is overlong yet
			b, err := big.Borrow(ctx)
			cancel()
			if err != nil {
				break // every slot is filled
			}
			big.Filled(b)
		}
		fill(small)
		close(hold)
		for done := range 100 {
			o, err := big.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			o.Release()
			if done+slots < 100 {
				fill(big)
			}
		}
		if at := bytes.IndexByte(order, 's'); at < 0 || at > 2 {
			t.Errorf("the small run came after %d blocks of the big one, which has %d slots, want the one that was computed, and one", at, slots)
		}
		o, err := small.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		o.Release()
		for _, r := range []engine.Run{big, small} {
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestAClosedHostFailsItsRuns(t *testing.T) {
	h := NewHost(HostConfig{Workers: 1})
	m := byteModel(t, h, 1, true, nil)
	r := openBytes(t.Context(), t, m, 3, 5, 5)
	b, err := r.Borrow(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	h.Close()
	r.Filled(b)
	if _, err := r.Next(t.Context()); !errors.Is(err, engine.ErrClosed) {
		t.Errorf("Next returned %v, want ErrClosed", err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	idle(t, h)
}

func BenchmarkRun(b *testing.B) {
	for _, block := range []int64{4 * (1 << 10), (1 << 20)} {
		b.Run("block="+map[int64]string{4 * (1 << 10): "4KiB", (1 << 20): "1MiB"}[block], func(b *testing.B) {
			h := NewHost(HostConfig{Workers: 1})
			defer h.Close()
			port := []engine.Port{{Name: "x", Shape: []int64{engine.AnyAxes}}}
			m, err := RowFunc{
				Info: engine.Info{Name: "nothing", Rows: engine.AllAxes, Inputs: port, Outputs: port}, InPlace: true,
				Rows: func(context.Context, RowBlock) error { return nil },
			}.Model(h)
			if err != nil {
				b.Fatal(err)
			}
			r := openBytes(b.Context(), b, m, 1<<39, 1, block)
			b.SetBytes(block)
			b.ReportAllocs()
			for b.Loop() {
				l, err := r.Borrow(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				r.Filled(l)
				o, err := r.Next(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				o.Release()
			}
			if err := r.Close(); err != nil {
				b.Error(err)
			}
		})
	}
}

func TestAResultComesWhoeverWaitsFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHost(HostConfig{Workers: 1})
		defer h.Close()
		for _, rows := range []int64{0, 1, 3, 64 * (1 << 10), 64*(1<<10) + 1} {
			for _, inPlace := range []bool{true, false} {
				r := openBytes(t.Context(), t, byteModel(t, h, 1<<20, inPlace, nil), rows, 1, (1 << 20))
				b, err := r.Borrow(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				go func() {
					synctest.Wait() // Next waits
					r.Filled(b)
				}()
				o, err := r.Next(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				o.Release()
				if err := r.Close(); err != nil {
					t.Error(err)
				}
			}
		}
	})
}
