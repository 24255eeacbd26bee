package cpu

import (
	"context"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/stack"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// resting is a model whose blocks take so long, and rest every millisecond.
func resting(t *testing.T, h *Host, takes time.Duration, charged bool, began func()) engine.Model {
	return byteModel(t, h, 1, true, func(ctx context.Context, _ RowBlock) error {
		began()
		for range takes / time.Millisecond {
			if rest(ctx, charged) {
				return context.Cause(ctx)
			}
			time.Sleep(time.Millisecond)
		}
		return nil
	})
}

func TestLongBlocksTakeTurnsAndLetOthersPass(t *testing.T) {
	for _, width := range []int64{1, wide} {
		t.Run(strconv.FormatInt(width, 10), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const callers, takes = 12, time.Second
				h := NewHost(HostConfig{Workers: 2})
				defer h.Close()
				begin := time.Now()
				var all sync.WaitGroup
				open := func() {
					for range callers {
						r := blockOf(t, slab.NewPrincipal("long"), resting(t, h, takes, true, func() {}), width)
						all.Go(func() { takeAll(t, r) })
					}
				}
				open()
				all.Wait()
				if took := time.Since(begin); took < callers*takes/2-takes/10 || took > callers*takes/2+takes/10 {
					t.Errorf("with nobody else, long blocks of %v on two workers took %v", callers*takes, took)
				}
				open()
				synctest.Wait()
				time.Sleep(callers * turnTime) // each has begun
				for range 100 {
					begin = time.Now()
					takeAll(t, blockOf(t, slab.NewPrincipal("other"), byteModel(t, h, 1, true, nil), width))
					if waited := time.Since(begin); waited != 0 {
						t.Errorf("a block of another waited for %v", waited)
					}
					time.Sleep(time.Millisecond)
				}
				h.workers.mu.Lock()
				if going := h.workers.long - len(h.workers.resting); going != 1 {
					t.Errorf("%d long blocks are computed beside blocks of others, want one, which leaves a core", going)
				}
				h.workers.mu.Unlock()
				all.Wait()
				synctest.Wait()
				if room, more := h.workers.room(); room != 2 || more != 2 {
					t.Errorf("there is room for %d blocks and %d more", room, more)
				}
				idle(t, h)
			})
		})
	}
}

func TestACallerHasNoMoreBlocksBegunThanThereAreWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHost(HostConfig{Workers: 2})
		defer h.Close()
		var mu sync.Mutex
		var begun int
		m := resting(t, h, time.Second, true, func() { mu.Lock(); defer mu.Unlock(); begun++ })
		one := slab.NewPrincipal("one")
		var all sync.WaitGroup
		for range 6 {
			r := blockOf(t, one, m, wide)
			all.Go(func() { takeAll(t, r) })
		}
		for second := 1; second <= 3; second++ {
			time.Sleep(time.Second / 2)
			mu.Lock()
			if begun != 2*second {
				t.Errorf("in second %d, %d blocks have begun, want %d", second, begun, 2*second)
			}
			mu.Unlock()
			time.Sleep(time.Second / 2)
		}
		all.Wait()
		idle(t, h)
	})
}

func TestALongBlockThatRestsEndsWithItsRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHost(HostConfig{Workers: 1})
		defer h.Close()
		var runs []engine.Run
		for range 3 {
			runs = append(runs, blockOf(t, slab.NewPrincipal("long"), resting(t, h, time.Minute, true, func() {}), wide))
		}
		time.Sleep(time.Second)
		for _, r := range runs {
			begin := time.Now()
			if err := r.Close(); err != nil || time.Since(begin) > 2*time.Millisecond {
				t.Errorf("Close returned %v after %v", err, time.Since(begin))
			}
		}
		idle(t, h)
	})
}

// Their tiles are charged to no call: so few are in use at a time.
func TestFewLongBlocksRestWhoseMemoryIsNotCharged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHost(HostConfig{Workers: 1})
		defer h.Close()
		var runs []engine.Run
		for range 20 {
			runs = append(runs, blockOf(t, slab.NewPrincipal("long"), resting(t, h, time.Hour, false, func() {}), wide))
		}
		time.Sleep(time.Minute)
		h.workers.mu.Lock()
		if n := h.workers.long; n != longPerWorker {
			t.Errorf("%d blocks are long, want %d", n, longPerWorker)
		}
		h.workers.mu.Unlock()
		for _, r := range runs {
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		}
		idle(t, h)
	})
}

// counted counts what rests.
type counted struct {
	context.Context
	rests *int
}

func (c counted) Value(key any) any {
	if key == (seatKey{}) {
		*c.rests++
	}
	return c.Context.Value(key)
}

func TestLongLayersRestBetweenRows(t *testing.T) {
	h := NewHost(HostConfig{Workers: 1})
	defer h.Close()
	const positions, panels = 4096, 20
	weights := map[string]tensor.Tensor{
		"in": zeros(6, 2), "out": zeros(2, 2), "up": zeros(4, 2), "down": zeros(2, 2), "wide": zeros(panels*panelWidth, 2), "narrow": zeros(2, panels*panelWidth),
	}
	for name, tc := range map[string]struct {
		layers []stack.Layer
		rows   int64
		want   int
	}{
		"attention": {[]stack.Layer{{Kind: "attention", Heads: 2, Weight: "in", OutWeight: "out"}}, positions, 2 * positions / tileRows},
		"softmax":   {[]stack.Layer{{Kind: "attention", Heads: 1, Weight: "in", OutWeight: "out"}, {Kind: "softmax"}}, positions, 2 * positions / tileRows},
		"gated":     {[]stack.Layer{{Kind: "attention", Heads: 1, Weight: "in", OutWeight: "out"}, {Kind: "linear", Weight: "up"}, {Kind: "gated", Activation: "silu"}, {Kind: "linear", Weight: "down"}}, positions, 4 * positions / tileRows},
		"linear":    {[]stack.Layer{{Kind: "linear", Weight: "wide"}, {Kind: "linear", Weight: "narrow"}}, 64, panels},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := stack.New(stack.Spec{Format: 2, Name: "long", Layers: tc.layers}, weights)
			if err != nil {
				t.Fatal(err)
			}
			x := zeros(1, tc.rows, 2)
			b, err := compile(s).bind(engine.Call{Inputs: []engine.Input{{Port: "x", Desc: x.Desc, ChunkBytes: 1 << 20}}}, 1)
			if err != nil {
				t.Fatal(err)
			}
			rows, _, _ := x.Rows(s.Info().Axes(3))
			rests := 0
			row := RowBlock{Rows: rows, In: [][]byte{x.Data}, Out: [][]byte{x.Data}, Descs: []tensor.Desc{x.Desc}, OutDescs: b.Outs}
			if err := b.Program.(restingRows)(counted{t.Context(), &rests}, row); err != nil {
				t.Fatal(err)
			}
			if rests < tc.want {
				t.Errorf("it rests %d times, want %d or more", rests, tc.want)
			}
		})
	}
}

func zeros(shape ...int64) tensor.Tensor {
	d := tensor.Desc{DType: tensor.Float32, Shape: shape}
	n, _ := d.Bytes()
	return tensor.Tensor{Desc: d, Data: make([]byte, n)}
}
