package blocks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// passing makes a model of [rows width] bytes, whose device is the test: it computes nothing itself.
func passing(t testing.TB, h *host, blockRows int64, results Results) *model {
	t.Helper()
	port := []engine.Port{{Name: "x", Shape: []int64{engine.Free, engine.Free}}}
	m, err := h.Model(Model{
		Info: engine.Info{Name: "bytes", Rows: 1, BlockRows: blockRows, Inputs: port, Outputs: port},
		Bind: func(c engine.Call) (Bound, error) { return Bound{Outs: c.Descs(), Results: results}, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	return m.(*model)
}

// peer sends a tensor of bytes through a run as somebody does who has a whole chunk, or nothing, and
// who keeps what comes back until a chunk of that is whole. It computes each block when it is started.
func peer(h *host, r *run, total, width, chunk int64, apart bool) error {
	var lent, ready int64 // input that has a place, and results that have come in a row
	var open []*engine.Block
	var held []engine.Out
	came := make([]bool, total+1)
	for at := int64(0); at < total; at += chunk {
		end := min(at+chunk, total)
		for lent < end {
			b, err := r.borrow()
			if b == nil {
				return errors.Join(fmt.Errorf("no block has room for byte %d of %d", lent, total), err)
			}
			lent = (b.Row + b.Rows) * width
			open = append(open, b)
		}
		for _, b := range open {
			for i := range b.In[0] {
				b.In[0][i] = byte(b.Row*width + int64(i))
			}
		}
		open = slices.DeleteFunc(open, func(b *engine.Block) bool {
			full := (b.Row+b.Rows)*width <= end
			if full {
				r.Filled(b)
			}
			return full
		})
		for moved := true; moved; {
			moved = false
			for len(h.queue) > 0 {
				w := <-h.queue
				to := w.Out[0]
				if r.bound.Results == Given {
					if to = w.In[0]; apart {
						to = make([]byte, len(w.In[0]))
					}
					w.Give([]tensor.Tensor{{Desc: w.Descs[0], Data: to}}, nil)
				}
				for i, x := range w.In[0] {
					to[i] = x + 1
				}
				w.Done(nil, Times{})
				moved = true
			}
			for o, ok, err := r.pop(); ok || err != nil && !errors.Is(err, io.EOF); o, ok, err = r.pop() {
				if err != nil {
					return err
				}
				for i, x := range o.Data {
					if x != byte(o.Off+int64(i))+1 {
						return fmt.Errorf("byte %d of the result is %d", o.Off+int64(i), x)
					}
					came[o.Off+int64(i)] = true
				}
				held = append(held, o)
			}
			for came[ready] {
				ready++
			}
			whole := ready / chunk * chunk
			if ready == total {
				whole = total
			}
			for len(held) > 0 && held[0].Off+int64(len(held[0].Data)) <= whole {
				held[0].Release()
				held, moved = held[1:], true
			}
		}
	}
	if ready != total {
		return fmt.Errorf("the results end with byte %d of %d", ready, total)
	}
	return r.Close()
}

// ways are where results lie. Those that are given lie in the input, or apart from it.
var ways = []struct {
	results Results
	apart   bool
}{{Own, true}, {InPlace, false}, {Given, false}, {Given, true}}

// The budget has no byte more than a run needs. A chunk may end anywhere in a block.
func TestARunEndsWithTheLeastMemoryWhereverChunksEnd(t *testing.T) {
	for _, way := range ways {
		for _, blockRows := range []int64{1, 2, 3, 4, 7} {
			for _, chunk := range []int64{1, 2, 3, 4, 5, 6, 7, 10, 21, 39, 64} {
				const rows, width = 150, 2
				plan, _, err := passing(t, newHost(t, config{}), blockRows, way.results).plan(bytesCall(rows, width, chunk))
				if err != nil {
					t.Fatal(err)
				}
				h := newHost(t, config{MemoryBytes: plan.least()})
				r := openBytes(t.Context(), t, passing(t, h, blockRows, way.results), rows, width, chunk)
				if err := peer(h, r, rows*width, width, chunk, way.apart); err != nil {
					t.Fatalf("%+v, blocks of %d rows, chunks of %d bytes: %v", way, blockRows, chunk, err)
				}
				idle(t, h)
			}
		}
	}
}

// There are more blocks than a run can tell apart at a time.
func TestARunOfTwoThousandBlocksEnds(t *testing.T) {
	for _, way := range ways {
		for _, chunk := range []int64{1, 3, 64} {
			h := newHost(t, config{})
			r := openBytes(t.Context(), t, passing(t, h, 1, way.results), 2*maxSlots, 1, chunk)
			ended := make(chan error, 1)
			go func() { ended <- peer(h, r, 2*maxSlots, 1, chunk, way.apart) }() // what spins does not end with the test
			testkit.Eventually(t, func() bool { return len(ended) > 0 }, "the end of the run")
			if err := <-ended; err != nil {
				t.Fatalf("%+v, chunks of %d bytes: %v", way, chunk, err)
			}
			idle(t, h)
		}
	}
}

// openGiven opens a run of blocks of a row each, with results that are given and of outWidth bytes a row.
func openGiven(t *testing.T, h *host, rows, width int64) *run {
	t.Helper()
	port := []engine.Port{{Name: "x", DTypes: []tensor.DataType{tensor.Uint8}, Shape: []int64{engine.Free, engine.Free}}}
	m, err := h.Model(Model{
		Info: engine.Info{Name: "given", Rows: 1, BlockRows: 1, Inputs: port, Outputs: port},
		Bind: func(engine.Call) (Bound, error) { return Bound{Results: Given}, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	return openBytes(t.Context(), t, m.(*model), rows, width, width)
}

func TestSmallResultsThatAreGivenAreSoManyThatAChunkIsWhole(t *testing.T) {
	const rows, width = 40, 256 << 10
	h := newHost(t, config{})
	r := openGiven(t, h, rows, width)
	var held []engine.Out
	for range rows { // of which all results together are less than a chunk
		b, err := r.borrow()
		if b == nil {
			t.Fatalf("after %d blocks there is no room for the next: %v", len(held), err)
		}
		r.Filled(b)
		if len(h.queue) == 0 {
			t.Fatalf("block %d is not started while the results of those before it are held", len(held))
		}
		w := <-h.queue
		w.Give(bytesOfShape(make([]byte, width/1000), rows, width/1000), nil)
		w.Done(nil, Times{})
		o, ok, err := r.pop()
		if !ok {
			t.Fatalf("the result of block %d does not come: %v", len(held), err)
		}
		held = append(held, o)
	}
	for _, o := range held {
		o.Release()
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	idle(t, h)
}

func TestAWholeInputInUseStaysChargedAfterClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, config{})
		split := engine.Port{Name: "x", Shape: []int64{engine.Free, engine.Free}}
		m, err := h.Model(Model{
			Info: engine.Info{Name: "keyed", Rows: 1, BlockRows: 1, Inputs: []engine.Port{split, {Name: "key", Shape: []int64{engine.Free}, Whole: true}}, Outputs: []engine.Port{split}},
			Bind: func(c engine.Call) (Bound, error) { return Bound{Outs: c.Descs()[:1]}, nil },
		})
		if err != nil {
			t.Fatal(err)
		}
		c := bytesCall(3, 5, 5)
		c.Inputs = append(c.Inputs, engine.Input{Port: "key", Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{20_000}}, ChunkBytes: 20_000})
		r, err := m.Open(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // the key, and a block
			b, err := r.Borrow(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			r.Filled(b)
		}
		w := <-h.queue
		lost, ok := errors.AsType[*engine.LostError](r.Close())
		if !ok {
			t.Fatal("a run with a block at the device is not lost")
		}
		used, _, _ := h.Budget().Used()
		if slabs, live := h.Pool().Live(); slabs != 3 || used != live {
			t.Errorf("%d slabs of %d bytes are in use, and %d bytes are charged; wanted the key, a block and its result", slabs, live, used)
		}
		if len(w.Whole[1]) != 20_000 || w.Whole[1][19_999] != 0 {
			t.Error("the key is gone")
		}
		w.Done(nil, Times{})
		<-lost.Ended
		idle(t, h)
	})
}

func TestWhatALostRunWasGivenIsLetGo(t *testing.T) {
	h := newHost(t, config{})
	r, works := given(t, h)
	released := make([]int, len(works))
	for i, w := range works {
		w.Give(bytesOfShape(make([]byte, 8), 6, 4), func() { released[i]++ })
	}
	works[0].Done(nil, Times{}) // and nobody takes its result
	h.Lost(errors.New("gone"))
	if !slices.Equal(released, []int{0, 1, 1}) {
		t.Errorf("with the device, results were let go of %v times, want those that were not done", released)
	}
	works[1].Done(context.Canceled, Times{}) // late
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if !slices.Equal(released, []int{1, 1, 1}) {
		t.Errorf("after Close, results were let go of %v times, want once each", released)
	}
	idle(t, h)
}
