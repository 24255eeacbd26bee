package blocks

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// config is how much memory a host has, 64 MiB if it does not say, and how many
// blocks it computes at a time.
type config struct {
	MemoryBytes int64
	Workers     int
}

// host is an engine whose device computes on workers of its own.
type host struct {
	*Engine
	queue chan *Work
}

// compute is the Program of its models.
type compute func(context.Context, RowBlock) error

func newHost(t testing.TB, c config) *host {
	if c.MemoryBytes == 0 {
		c.MemoryBytes = 64 * mib
	}
	h := &host{queue: make(chan *Work, 1<<12)}
	h.Engine = New(Config{Name: "test", Device: h, Pool: slab.NewPool(c.MemoryBytes, slab.System), Budget: slab.NewBudget("memory", c.MemoryBytes)})
	var workers sync.WaitGroup
	for range c.Workers {
		workers.Go(func() {
			for w := range h.queue {
				err := context.Cause(w.Context())
				if err == nil {
					err = w.Program.(compute)(w.Context(), w.RowBlock)
				}
				w.Done(err, Times{})
			}
		})
	}
	t.Cleanup(func() {
		close(h.queue)
		workers.Wait()
	})
	return h
}

func (h *host) Start(w *Work) { h.queue <- w }

func (h *host) Pool() *slab.Pool { return h.cfg.Pool }

func (h *host) Budget() *slab.Budget { return h.cfg.Budget }

// byteModel adds 1 to every byte of [rows width] tensors.
func byteModel(t testing.TB, h *host, blockRows int64, inPlace bool, before func(context.Context, RowBlock) error) *model {
	t.Helper()
	port := []engine.Port{{Name: "x", Shape: []int64{engine.Free, engine.Free}}}
	m, err := h.Model(Model{
		Info: engine.Info{Name: "bytes", Rows: 1, BlockRows: blockRows, Inputs: port, Outputs: port},
		Bind: func(c engine.Call) (Bound, error) {
			return Bound{Outs: c.Descs(), Results: map[bool]Results{true: InPlace}[inPlace], Program: compute(func(ctx context.Context, b RowBlock) error {
				if before != nil {
					if err := before(ctx, b); err != nil {
						return err
					}
				}
				for i, x := range b.In[0] {
					b.Out[0][i] = x + 1
				}
				return nil
			})}, nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return m.(*model)
}

func bytesCall(rows, width, chunk int64) engine.Call {
	return engine.Call{Inputs: []engine.Input{{Port: "x", Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{rows, width}}, ChunkBytes: chunk}}}
}

func openBytes(ctx context.Context, t testing.TB, m *model, rows, width, chunk int64) *run {
	t.Helper()
	r, err := m.Open(ctx, bytesCall(rows, width, chunk))
	if err != nil {
		t.Fatal(err)
	}
	return r.(*run)
}

func idle(t testing.TB, h *host) {
	t.Helper()
	if used, _, _ := h.Budget().Used(); used != 0 {
		t.Errorf("%d bytes of the budget are still held", used)
	}
	if slabs, _ := h.Pool().Live(); slabs != 0 {
		t.Errorf("%d slabs are still held", slabs)
	}
}

// FuzzRun drives a run by a script and predicts, from what was filled, taken and
// released, when a block can be lent and when a result must come.
func FuzzRun(f *testing.F) {
	f.Add([]byte{20, 3, 2, 9, 0, 0, 0, 1, 1, 2, 2, 3, 3, 0, 1, 2, 3})
	f.Add([]byte{9, 1, 1, 1, 1, 0, 0, 0, 1, 2, 65, 33, 2, 3, 3, 2, 3})
	f.Add([]byte{40, 2, 5, 30, 0, 0, 1, 0, 1, 0, 1, 2, 2, 2, 4})
	h := newHost(f, config{MemoryBytes: 4 * mib, Workers: 2})
	gone := errors.New("gone")
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) < 5 {
			return
		}
		rows, blockRows, width, chunk := int64(script[0]%60), 1+int64(script[1]%5), 1+int64(script[2]%9), 1+int64(script[3])
		inPlace := script[4]&1 == 1
		outer, stop := context.WithTimeout(t.Context(), 20*time.Second)
		defer stop()
		ctx, cancel := context.WithCancelCause(outer)
		r := openBytes(ctx, t, byteModel(t, h, blockRows, inPlace, nil), rows, width, chunk)
		blocks := r.plan.blocks

		// The model: what has become of each block, and how many are below done.
		const (
			lent = iota + 1
			filled
			taken
			released
		)
		state := make([]int, blocks)
		var low, next int64
		var open []*engine.Block
		var held []engine.Out
		src, got := make([]byte, rows*width), make([]byte, rows*width)
		for i := range src {
			src[i] = byte(i * 31)
		}
		comes := func(i int64) bool { // its result has come, or will without further ado
			return state[i] >= taken || state[i] == filled && (inPlace || i < low+r.window)
		}
		lend := func() {
			busy := 0
			for i := range next {
				if inPlace && state[i] != released || !inPlace && !comes(i) {
					busy++
				}
			}
			if next == blocks {
				if b, err := r.borrow(); b != nil || !errors.Is(err, io.EOF) {
					t.Fatalf("after the last block, Borrow returned %v, %v", b, err)
				}
				return
			}
			if busy == len(r.slots) {
				if b, err := r.borrow(); b != nil || err != nil {
					t.Fatalf("with no slot free, Borrow returned %v, %v", b, err)
				}
				return
			}
			b, err := r.Borrow(outer)
			if err != nil {
				t.Fatalf("%d of %d slots are busy, Borrow returned %v", busy, len(r.slots), err)
			}
			if b.Row != next*r.plan.blockRows || int64(len(b.In[0])) != b.Rows*width {
				t.Fatalf("block %d is [%d,+%d) in %d bytes", next, b.Row, b.Rows, len(b.In[0]))
			}
			state[next] = lent
			next++
			open = append(open, b)
		}
		fill := func(pick int) {
			if len(open) == 0 {
				return
			}
			i := pick % len(open)
			b := open[i]
			open = slices.Delete(open, i, i+1)
			copy(b.In[0], src[b.Row*width:])
			state[b.Row/r.plan.blockRows] = filled
			r.Filled(b)
		}
		take := func() {
			due := false
			ended := true
			for i := range blocks {
				due = due || state[i] == filled && comes(i)
				ended = ended && state[i] >= taken
			}
			if !due {
				o, ok, err := r.pop()
				if ok || err != nil != ended || ended && !errors.Is(err, io.EOF) {
					t.Fatalf("nothing is due, all taken is %v, Next returned %v, %v", ended, o, err)
				}
				return
			}
			o, err := r.Next(outer)
			if err != nil {
				t.Fatal(err)
			}
			i := int64(0)
			if width > 0 && rows > 0 {
				i = o.Off / (r.plan.blockRows * width)
			}
			if state[i] != filled {
				t.Fatalf("block %d came in state %d", i, state[i])
			}
			state[i] = taken
			copy(got[o.Off:], o.Data)
			held = append(held, o)
		}
		release := func(pick int) {
			if len(held) == 0 {
				return
			}
			i := pick % len(held)
			o := held[i]
			held = slices.Delete(held, i, i+1)
			if rows > 0 {
				if !bytes.Equal(o.Data, got[o.Off:o.Off+int64(len(o.Data))]) {
					t.Fatalf("the result at %d changed while it was held", o.Off)
				}
				state[o.Off/(r.plan.blockRows*width)] = released
			} else {
				state[0] = released
			}
			o.Release()
			for low < blocks && state[low] == released {
				low++
			}
		}
		for _, op := range script[5:] {
			switch op % 8 {
			case 0, 4:
				lend()
			case 1, 5:
				fill(int(op / 8))
			case 2, 6:
				take()
			case 3:
				release(int(op / 8))
			case 7:
				if op != 255 {
					continue
				}
				cancel(gone)
				if _, err := r.Next(outer); !errors.Is(err, io.EOF) && !errors.Is(err, gone) {
					t.Fatalf("cancelled, Next returned %v", err)
				}
				if _, err := r.Borrow(outer); !errors.Is(err, io.EOF) && !errors.Is(err, gone) {
					t.Fatalf("cancelled, Borrow returned %v", err)
				}
				for len(held) > 0 {
					release(0)
				}
				if err := r.Close(); err != nil {
					t.Fatal(err)
				}
				idle(t, h)
				return
			}
		}
		for low < blocks { // everything left, one step of each at a time
			lend()
			fill(0)
			take()
			release(0)
		}
		take()
		cancel(gone)
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		for i := range got {
			if got[i] != src[i]+1 {
				t.Fatalf("byte %d is %d, want %d", i, got[i], src[i]+1)
			}
		}
		idle(t, h)
	})
}

func TestABlockAllocatesNothing(t *testing.T) {
	for name, inPlace := range map[string]bool{"in place": true, "with results of its own": false} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, config{Workers: 1})
			r := openBytes(t.Context(), t, byteModel(t, h, 0, inPlace, nil), 1<<20, 64, 64*(1<<10))
			step := func() {
				b, err := r.Borrow(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				r.Filled(b)
				o, err := r.Next(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				o.Release()
			}
			for range 2 * preferredSlots {
				step() // takes the slabs
			}
			if n := testing.AllocsPerRun(100, step); n != 0 {
				t.Errorf("%v allocations per block", n)
			}
			if err := r.Close(); err != nil {
				t.Error(err)
			}
			idle(t, h)
		})
	}
}

func TestEveryOtherResultComesWhileABlockIsMissing(t *testing.T) {
	for _, missing := range []int64{0, 5, 9} {
		h := newHost(t, config{Workers: 2})
		r := openBytes(t.Context(), t, byteModel(t, h, 0, true, nil), 10*64, (1 << 10), 64*(1<<10)) // ten blocks of a chunk
		var late *engine.Block
		for i := range int64(10) {
			b, err := r.Borrow(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if i == missing {
				late = b
				continue
			}
			r.Filled(b)
			o, err := r.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if o.Off != i*64*(1<<10) {
				t.Errorf("the result at %d came, want %d", o.Off, i*64*(1<<10))
			}
			o.Release()
		}
		r.Filled(late)
		if o, err := r.Next(t.Context()); err != nil || o.Off != missing*64*(1<<10) {
			t.Errorf("the last result is %v, %v", o, err)
		} else {
			o.Release()
		}
		if _, err := r.Next(t.Context()); !errors.Is(err, io.EOF) {
			t.Errorf("the end is %v", err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestAHugeTensorIsNeverHeld(t *testing.T) {
	h := newHost(t, config{MemoryBytes: 64 * mib, Workers: 1})
	r := openBytes(t.Context(), t, byteModel(t, h, 0, true, func(context.Context, RowBlock) error { return nil }), 1<<30, 16, mib) // 16 GiB
	for range 30 {
		b, err := r.Borrow(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		r.Filled(b)
		o, err := r.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		o.Release()
	}
	if _, peak, _ := h.Budget().Used(); peak > preferredSlots*mib {
		t.Errorf("took %d bytes of memory", peak)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

func panics(t *testing.T, what string, f func()) {
	t.Helper()
	defer func() {
		if recover() == nil {
			t.Errorf("%s does not panic", what)
		}
	}()
	f()
}

func TestMistakesOfTheCallerPanic(t *testing.T) {
	h := newHost(t, config{Workers: 1})
	r := openBytes(t.Context(), t, byteModel(t, h, 1, true, nil), 3, 5, 5)
	b, err := r.Borrow(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.Filled(b)
	panics(t, "Filled twice", func() { r.Filled(b) })
	o, err := r.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	o.Release()
	panics(t, "Release twice", o.Release)
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if err := r.Close(); !errors.Is(err, engine.ErrClosed) {
		t.Errorf("a second Close returned %v, want ErrClosed", err)
	}
	idle(t, h)
}

// filledRun opens a run of three blocks, fills one and leaves the rest.
func filledRun(t *testing.T, h *host, before func(context.Context, RowBlock) error, inPlace bool) *run {
	t.Helper()
	r := openBytes(t.Context(), t, byteModel(t, h, 1, inPlace, before), 3, 5, 5)
	b, err := r.Borrow(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.Filled(b)
	return r
}

func TestCloseWaitsForWhatIsInUse(t *testing.T) {
	for name, inPlace := range map[string]bool{"in place": true, "with results of its own": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost(t, config{Workers: 1})

				r := filledRun(t, h, nil, inPlace)
				o, err := r.Next(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				time.AfterFunc(time.Second, o.Release)
				begin := time.Now()
				if err := r.Close(); err != nil || time.Since(begin) != time.Second {
					t.Errorf("with a result held for a second, Close returned %v after %v", err, time.Since(begin))
				}
				idle(t, h)

				r = filledRun(t, h, func(context.Context, RowBlock) error { time.Sleep(2 * time.Second); return nil }, inPlace)
				synctest.Wait()
				begin = time.Now()
				if err := r.Close(); err != nil || time.Since(begin) != 2*time.Second {
					t.Errorf("with a block that runs for two seconds, Close returned %v after %v", err, time.Since(begin))
				}
				idle(t, h)
			})
		})
	}
}

func TestCloseDoesNotWaitForEverForWhatIsNotGivenBack(t *testing.T) {
	for name, inPlace := range map[string]bool{"in place": true, "with results of its own": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost(t, config{Workers: 1})
				late := func(r *run, slabs int64) (err error) {
					t.Helper()
					begin := time.Now()
					if err = r.Close(); time.Since(begin) != CloseWait {
						t.Errorf("Close returned after %v", time.Since(begin))
					}
					if used, _, _ := h.Budget().Used(); used != slabs*4096 {
						t.Errorf("%d bytes of the budget are held for %d slabs in use", used, slabs)
					}
					if live, _ := h.Pool().Live(); live != slabs {
						t.Errorf("%d slabs are in use, want %d", live, slabs)
					}
					return err
				}
				r := filledRun(t, h, nil, inPlace)
				o, err := r.Next(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if err := late(r, 1); err != nil {
					t.Errorf("with a result that nobody releases, Close returned %v", err)
				}
				if !bytes.Equal(o.Data, make([]byte, 5)) && o.Data[0] == 0 {
					t.Error("the result held was overwritten")
				}
				o.Release() // far too late, but not lost
				idle(t, h)

				running := int64(2) // its input and its result
				if inPlace {
					running = 1
				}
				r = filledRun(t, h, func(context.Context, RowBlock) error { time.Sleep(time.Minute); return nil }, inPlace)
				synctest.Wait()
				lost, ok := errors.AsType[*engine.LostError](late(r, running))
				if !ok || !errors.Is(lost, engine.ErrLost) {
					t.Fatal("the run that does not stop is not lost")
				}
				select {
				case <-lost.Ended:
					t.Error("the run has ended while its block runs")
				default:
				}
				<-lost.Ended
				idle(t, h)
			})
		})
	}
}

func TestADeviceThatHangsEndsItsRunsAndKeepsTheirMemory(t *testing.T) {
	for name, lost := range map[string]bool{"until it answers": false, "until it is lost": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, hold, silence := newHost(t, config{Workers: 1}), make(chan struct{}), errors.New("silence")
				r := filledRun(t, h, func(context.Context, RowBlock) error { <-hold; return nil }, false)
				synctest.Wait()
				h.Hung(silence)
				if _, err := r.Next(t.Context()); !errors.Is(err, engine.ErrUnavailable) || !errors.Is(err, silence) {
					t.Errorf("Next returned %v, want ErrUnavailable and why", err)
				}
				if _, err := byteModel(t, h, 1, false, nil).Open(t.Context(), bytesCall(1, 1, 1)); !errors.Is(err, silence) {
					t.Errorf("Open returned %v, want why it does not open", err)
				}
				if lost {
					h.Lost(errors.New("reset"))
				}
				if err := r.Close(); errors.Is(err, engine.ErrLost) == lost {
					t.Errorf("Close returned %v", err)
				}
				if slabs, _ := h.Pool().Live(); slabs != map[bool]int64{false: 2, true: 0}[lost] {
					t.Errorf("after Close %d slabs are held", slabs)
				}
				close(hold)
				synctest.Wait()
				idle(t, h)
				h.Back()
				if err := openBytes(t.Context(), t, byteModel(t, h, 1, false, nil), 1, 1, 1).Close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// given opens a run of [6 3] bytes in blocks of 2 rows, whose results are known when they
// are given, with all its blocks started.
func given(t *testing.T, h *host) (*run, []*Work) {
	t.Helper()
	port := []engine.Port{{Name: "x", DTypes: []tensor.DataType{tensor.Uint8}, Shape: []int64{engine.Free, engine.Free}}}
	m, err := h.Model(Model{
		Info: engine.Info{Name: "given", Rows: 1, BlockRows: 2, Inputs: port, Outputs: port},
		Bind: func(engine.Call) (Bound, error) { return Bound{Results: Given}, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	r, err := m.Open(t.Context(), bytesCall(6, 3, 6))
	if err != nil {
		t.Fatal(err)
	}
	var works []*Work
	for range 3 {
		b, err := r.Borrow(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		r.Filled(b)
		works = append(works, <-h.queue)
	}
	return r.(*run), works
}

func bytesOfShape(data []byte, shape ...int64) []tensor.Tensor {
	return []tensor.Tensor{{Desc: tensor.Desc{DType: tensor.Uint8, Shape: shape}, Data: data}}
}

func TestGivenResultsAreWhatTheFirstBlockSays(t *testing.T) {
	for name, tc := range map[string]struct {
		first, second []tensor.Tensor
		want          string
	}{
		"another width":    {bytesOfShape(make([]byte, 8), 6, 4), bytesOfShape(make([]byte, 6), 6, 3), "it was to be"},
		"another type":     {bytesOfShape(make([]byte, 8), 6, 4), []tensor.Tensor{{Desc: tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{6, 4}}, Data: make([]byte, 8)}}, "it was to be"},
		"too few bytes":    {bytesOfShape(make([]byte, 8), 6, 4), bytesOfShape(make([]byte, 7), 6, 4), "has 7 bytes in 2 rows"},
		"other rows":       {bytesOfShape(make([]byte, 8), 7, 4), nil, "has 7 rows, the call has 6"},
		"none":             {nil, nil, "returned 0 outputs"},
		"not of its info":  {bytesOfShape(make([]byte, 2), 6), nil, "its info says"},
		"rows of a block":  {bytesOfShape(make([]byte, 8), 2, 4), nil, "has 2 rows, the call has 6"},
		"nothing in a row": {bytesOfShape(nil, 6, 0), bytesOfShape(make([]byte, 1), 6, 0), "has 1 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, config{})
			r, works := given(t, h)
			released := 0
			release := func() { released++ }
			works[1].Give(tc.first, release)
			works[1].Done(nil, Times{})
			if tc.second != nil {
				works[0].Give(tc.second, release)
				works[0].Done(nil, Times{})
			}
			if err := context.Cause(r.ctx); !errors.Is(err, engine.ErrModel) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("the run ended with %v, want %s", err, tc.want)
			}
			for i, w := range works {
				if i != 1 && (i != 0 || tc.second == nil) {
					w.Done(nil, Times{})
				}
			}
			if err := r.Close(); err != nil {
				t.Error(err)
			}
			if want := 1 + min(1, len(tc.second)); released != want {
				t.Errorf("%d results were released, want %d", released, want)
			}
			idle(t, h)
		})
	}
}

func TestResultsInTheInputKeepItAndOthersDoNot(t *testing.T) {
	h := newHost(t, config{})
	r, works := given(t, h)
	free := func() int {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.free)
	}
	before := free()
	works[0].Give(bytesOfShape(works[0].In[0], 6, 3), nil)
	works[0].Done(nil, Times{})
	if got := free(); got != before {
		t.Errorf("%d slots are free after a result in the input, want %d", got, before)
	}
	works[1].Give(bytesOfShape(make([]byte, 6), 6, 3), nil)
	works[1].Done(nil, Times{})
	if got := free(); got != before+1 {
		t.Errorf("%d slots are free after a result elsewhere, want %d", got, before+1)
	}
	for range 2 {
		o, err := r.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		o.Release()
	}
	if got := free(); got != before+2 {
		t.Errorf("%d slots are free after all results, want %d", got, before+2)
	}
	works[2].Done(nil, Times{})
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	idle(t, h)
}

func TestAQueueKeepsItsOrderWithoutWhatIsTaken(t *testing.T) {
	one, two := &run{ctx: t.Context()}, &run{ctx: context.WithoutCancel(t.Context())}
	for script := range 1 << 6 {
		var q Queue
		var works, kept, taken []*Work
		for i := range 6 {
			w := &Work{run: one}
			if script>>i&1 == 1 {
				w.run = two
				taken = append(taken, w)
			} else {
				kept = append(kept, w)
			}
			works = append(works, w)
			q.Push(w)
		}
		if q.Head() != works[0] {
			t.Fatalf("script %b: the head is not the first", script)
		}
		var out Queue
		q.Take(two.ctx, &out)
		last := &Work{run: one} // and one more behind what is left
		q.Push(last)
		for _, of := range []struct {
			q    *Queue
			want []*Work
		}{{&out, taken}, {&q, append(kept, last)}} {
			for i, w := range of.want {
				if got := of.q.Pop(); got != w {
					t.Fatalf("script %b: block %d is another", script, i)
				}
			}
			if of.q.Pop() != nil || of.q.Head() != nil {
				t.Fatalf("script %b: there is one too many", script)
			}
		}
	}
}

func TestADeadlineIsTheCause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, config{Workers: 1})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r := openBytes(ctx, t, byteModel(t, h, 1, true, nil), 3, 5, 5)
		if _, err := r.Next(t.Context()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Next returned %v, want DeadlineExceeded", err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestOpenWaitsForMemoryAndGivesUpWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, config{MemoryBytes: 8 * (1 << 10), Workers: 1}) // two slots of a page
		m := byteModel(t, h, 1, true, nil)
		first := openBytes(t.Context(), t, m, 3, 5, 5)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			synctest.Wait()
			cancel()
		}()
		if _, err := m.Open(ctx, bytesCall(3, 5, 5)); !errors.Is(err, context.Canceled) {
			t.Errorf("Open returned %v, want Canceled", err)
		}
		time.AfterFunc(time.Second, func() {
			if err := first.Close(); err != nil {
				t.Error(err)
			}
		})
		second := openBytes(t.Context(), t, m, 3, 5, 5)
		if q := second.Stats().Queue; q != time.Second {
			t.Errorf("stats say %v in the queue, want a second", q)
		}
		if err := second.Close(); err != nil {
			t.Error(err)
		}
		idle(t, h)
	})
}

func TestARunIsWidenedWithinTheBudget(t *testing.T) {
	for _, inPlace := range []bool{false, true} {
		h := newHost(t, config{MemoryBytes: 512 * mib, Workers: 2})
		const block = mib
		r := openBytes(t.Context(), t, byteModel(t, h, 0, inPlace, nil), 40*1024, 1<<10, block)
		lend := func() (all []*engine.Block) {
			for b, err := r.borrow(); b != nil; b, err = r.borrow() {
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, b)
			}
			return all
		}
		r.Widen(block) // it has more
		first := lend()
		r.Widen(30 * block)
		more := lend()
		if n := len(first) + len(more); len(more) == 0 || n != max(30, len(first)) {
			t.Fatalf("%d blocks and %d more are lent, want %d", len(first), len(more), 30)
		}
		r.Widen(1 << 40)
		rest := lend()
		if n := len(first) + len(more) + len(rest); n != 40 {
			t.Fatalf("%d blocks are lent, there are 40", n)
		}
		for _, b := range append(append(rest, more...), first...) { // the first ones last
			r.Filled(b)
		}
		for range 40 {
			o, err := r.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			o.Release()
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		r.Widen(1 << 40)
		idle(t, h)
	}
}

func TestTheBudgetCoversWhatThePoolHandsOut(t *testing.T) {
	h := newHost(t, config{MemoryBytes: 128 * mib, Workers: 1})
	covered := func() {
		t.Helper()
		used, _, _ := h.Budget().Used()
		if _, live := h.Pool().Live(); live > used {
			t.Fatalf("%d bytes are handed out, %d are taken from the budget", live, used)
		}
	}
	for _, rowBytes := range []int64{0, 1, 5, 4*(1<<10) + 1, 64*(1<<10) + 1, 2*mib + 1} {
		for _, inPlace := range []bool{false, true} {
			const rows = 20
			r := openBytes(t.Context(), t, byteModel(t, h, 1, inPlace, nil), rows, rowBytes, max(rowBytes, 1))
			lent := int64(0)
			for taken := int64(0); taken < r.plan.blocks; {
				for { // every slot there is
					b, err := r.borrow()
					if err != nil && !errors.Is(err, io.EOF) {
						t.Fatal(err)
					}
					if b == nil {
						break
					}
					lent++
					r.Filled(b)
				}
				for range min(lent-taken, int64(len(r.slots))) {
					o, err := r.Next(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					covered()
					o.Release()
					taken++
				}
			}
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	idle(t, h)
}
