package enginetest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

var (
	errDevice = errors.New("the device failed")
	errGone   = errors.New("fell off the bus")
)

// program is what a late device computes: rows writes b.Out, gives makes results.
type program struct {
	rows  func(b blocks.RowBlock)
	gives func(b blocks.RowBlock) []tensor.Tensor
}

// late is an engine whose device computes much later than it starts, block after
// block in any order, a step at a time, on whatever goroutine comes: it copies the
// input, computes in memory of its own, and copies the results.
type late struct {
	*blocks.Engine
	pool   *slab.Pool
	budget *slab.Budget
	close  func()

	mu     sync.Mutex // guards all below
	more   sync.Cond
	rng    *rand.Rand
	queue  []*item
	lost   []*item // what was on it when it was lost
	isLost bool
	closed bool
	busy   int // blocks that a goroutine is at
	fails  int // one step in so many fails, 0 for none
	given  int // results given and not released
}

// item is a block on a late device.
type item struct {
	*blocks.Work
	in    [][]byte // copied
	out   [][]byte
	given []tensor.Tensor
	step  int
}

func newLate(memory int64, b slab.Backing, seed uint64, goroutines int) *late {
	l := &late{pool: slab.NewPool(memory, b), budget: slab.NewBudget("device memory", memory), rng: rand.New(rand.NewPCG(seed, 0))}
	l.more.L = &l.mu
	l.Engine = blocks.New(blocks.Config{Name: "late:0", Device: l, Pool: l.pool, Budget: l.budget})
	var all sync.WaitGroup
	for range goroutines {
		all.Go(l.compute)
	}
	l.close = func() {
		l.mu.Lock()
		l.closed = true
		l.more.Broadcast()
		l.mu.Unlock()
		all.Wait()
	}
	return l
}

func onLate(memory int64) *late { return newLate(memory, slab.System, uint64(memory), 3) }

func (l *late) Pool() *slab.Pool     { return l.pool }
func (l *late) Budget() *slab.Budget { return l.budget }
func (l *late) Close()               { l.close() }

// Start implements blocks.Device.
func (l *late) Start(w *blocks.Work) {
	l.mu.Lock()
	if err := w.Context().Err(); err != nil {
		l.mu.Unlock()
		w.Done(err, blocks.Times{})
		return
	}
	defer l.mu.Unlock()
	it := &item{Work: w}
	if l.isLost {
		l.lost = append(l.lost, it)
		return
	}
	l.queue = append(l.queue, it)
	l.more.Broadcast()
}

// compute takes any block a step further, again and again.
func (l *late) compute() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for !l.closed && len(l.queue) == 0 {
			l.more.Wait()
		}
		if len(l.queue) == 0 {
			return
		}
		i := l.rng.IntN(len(l.queue))
		it := l.queue[i]
		l.queue = slices.Delete(l.queue, i, i+1)
		coin := l.rng.Int()
		fail := l.fails > 0 && l.rng.IntN(l.fails) == 0
		l.busy++
		l.mu.Unlock()
		if coin%3 == 0 {
			runtime.Gosched()
		}
		over := it.advance(l, coin, fail)
		l.mu.Lock()
		l.busy--
		l.more.Broadcast()
		switch {
		case over:
		case l.isLost:
			l.lost = append(l.lost, it)
		default:
			l.queue = append(l.queue, it)
			l.more.Broadcast()
		}
	}
}

// advance is one step of a block; it reports whether that was the last.
func (it *item) advance(l *late, coin int, fail bool) bool {
	p := it.Program.(program)
	if err := it.Context().Err(); err != nil {
		it.Done(err, blocks.Times{})
		return true
	}
	if fail {
		it.Done(errDevice, blocks.Times{})
		return true
	}
	switch it.step++; it.step {
	case 1:
		for _, data := range it.In {
			it.in = append(it.in, bytes.Clone(data))
		}
		if coin%2 == 0 {
			it.InputFree()
		}
	case 2:
		b := it.RowBlock
		b.In, b.Out = it.in, nil
		if p.gives != nil {
			it.given = p.gives(b)
			break
		}
		for _, mem := range it.Out {
			b.Out = append(b.Out, bytes.Repeat([]byte{0xee}, len(mem)))
		}
		p.rows(b)
		it.out = b.Out
	default:
		for i, data := range it.out {
			copy(it.Out[i], data)
		}
		it.finish(l)
		return true
	}
	return false
}

// finish ends a block well, and gives its results if it is of those.
func (it *item) finish(l *late) {
	if it.given != nil {
		l.mu.Lock()
		l.given++
		l.mu.Unlock()
		it.Give(it.given, func() {
			l.mu.Lock()
			l.given--
			l.mu.Unlock()
		})
	}
	it.Done(nil, blocks.Times{H2D: 1, Compute: 2, D2H: 3})
}

// lose takes the device away with all that is on it. What a goroutine of the device
// is at is finished first, as a driver does that resets it.
func (l *late) lose() {
	l.mu.Lock()
	l.isLost = true
	l.lost = append(l.lost, l.queue...)
	l.queue = nil
	for l.busy > 0 {
		l.more.Wait()
	}
	l.mu.Unlock()
	l.Lost(errGone)
}

// back brings it back, after everything that was lost has been said late.
func (l *late) back() {
	l.mu.Lock()
	lost := l.lost
	l.lost = nil
	l.mu.Unlock()
	for _, it := range lost {
		it.InputFree()
		it.finish(l)
	}
	l.mu.Lock()
	l.isLost = false
	l.mu.Unlock()
	l.Back()
}

func (l *late) idle(t testing.TB) {
	t.Helper()
	used, _, _ := l.budget.Used()
	slabs, live := l.pool.Live()
	l.mu.Lock()
	defer l.mu.Unlock()
	if used != 0 || slabs != 0 || l.given != 0 || len(l.queue) != 0 {
		t.Errorf("%d bytes of the budget, %d slabs of %d bytes, %d results and %d blocks are still held", used, slabs, live, l.given, len(l.queue))
	}
}

// inline is an engine whose device is done before Start returns.
type inline struct{ *late }

func onInline(memory int64) inline {
	h := inline{onLate(memory)}
	h.Engine = blocks.New(blocks.Config{Name: "inline", Device: h, Pool: h.pool, Budget: h.budget})
	return h
}

func (h inline) Start(w *blocks.Work) {
	for it := (&item{Work: w}); !it.advance(h.late, 0, false); {
	}
}

type maker interface {
	Model(blocks.Model) (engine.Model, error)
}

// made makes models of n rows per block.
type made func(n int64) blocks.Model

func on[H maker](m made, n int64) func(H) (engine.Model, error) {
	return func(h H) (engine.Model, error) { return h.Model(m(n)) }
}

var bytePort = []engine.Port{{Name: "x", DTypes: []tensor.DataType{tensor.Uint8}, Shape: []int64{engine.Free, engine.Free}}}

// plusOne adds 1 to every byte; where says where its results lie.
func plusOne(where blocks.Results) made {
	return func(n int64) blocks.Model {
		rows := func(b blocks.RowBlock) {
			for i, x := range b.In[0] {
				b.Out[0][i] = x + 1
			}
		}
		p := program{rows: rows}
		if where == blocks.Given {
			p = program{gives: func(b blocks.RowBlock) []tensor.Tensor {
				b.Out = [][]byte{make([]byte, len(b.In[0]))}
				rows(b)
				return []tensor.Tensor{{Desc: b.OutDescs[0], Data: b.Out[0]}}
			}}
		}
		return blocks.Model{
			Info: engine.Info{Name: "plus one", Rows: 1, BlockRows: n, Inputs: bytePort, Outputs: bytePort},
			Bind: func(c engine.Call) (blocks.Bound, error) {
				return blocks.Bound{Outs: c.Descs(), Results: where, Program: p}, nil
			},
		}
	}
}

func plusOneOf(in []tensor.Tensor) ([]tensor.Tensor, error) {
	y := tensor.Tensor{Desc: in[0].Desc, Data: bytes.Clone(in[0].Data)}
	for i := range y.Data {
		y.Data[i]++
	}
	return []tensor.Tensor{y}, nil
}

// lateKnown gives each row as its first width bytes, repeated where it has fewer, and
// tells only then that it does.
func lateKnown(width int64) made {
	return func(n int64) blocks.Model {
		return blocks.Model{
			Info: engine.Info{Name: "late known", Rows: 1, BlockRows: n, Inputs: bytePort, Outputs: bytePort},
			Bind: func(c engine.Call) (blocks.Bound, error) {
				return blocks.Bound{Results: blocks.Given, Program: program{gives: func(b blocks.RowBlock) []tensor.Tensor {
					shape := b.Descs[0].Shape
					y := tensor.Tensor{
						Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{shape[0], width}},
						Data: rewidth(b.In[0], b.Rows, shape[1], width),
					}
					return []tensor.Tensor{y}
				}}}, nil
			},
		}
	}
}

func rewidth(in []byte, rows, from, to int64) []byte {
	out := make([]byte, 0, rows*to)
	for row := range rows {
		for i := range to {
			out = append(out, in[row*from+i%from])
		}
	}
	return out
}

func lateKnownOf(width int64) func([]tensor.Tensor) ([]tensor.Tensor, error) {
	return func(in []tensor.Tensor) ([]tensor.Tensor, error) {
		shape := in[0].Shape
		y, err := tensor.Of(rewidth(in[0].Data, shape[0], shape[1], width), shape[0], width)
		return []tensor.Tensor{y}, err
	}
}

// keyed adds a Whole key to the bytes of two inputs, and sums the key apart.
func keyed(n int64) blocks.Model {
	port := func(name string, whole bool) engine.Port {
		return engine.Port{Name: name, Shape: []int64{engine.Free, engine.Free}, Whole: whole}
	}
	return blocks.Model{
		Info: engine.Info{
			Name: "keyed", Rows: 1, BlockRows: n,
			Inputs:  []engine.Port{port("a", false), port("key", true), port("b", false)},
			Outputs: []engine.Port{port("added", false), port("first", false)},
		},
		Bind: func(c engine.Call) (blocks.Bound, error) {
			d := c.Descs()
			first := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{d[0].Shape[0], 1}}
			return blocks.Bound{Outs: []tensor.Desc{d[0], first}, Program: program{rows: func(b blocks.RowBlock) {
				for i, x := range b.In[0] {
					b.Out[0][i] = x + b.In[2][i] + b.Whole[1][0]
				}
				for row := range b.Rows {
					b.Out[1][row] = b.Out[0][row*int64(len(b.In[0]))/b.Rows]
				}
			}}}, nil
		},
	}
}

func keyedOf(in []tensor.Tensor) ([]tensor.Tensor, error) {
	rows, width := in[0].Shape[0], in[0].Shape[1]
	added := bytes.Clone(in[0].Data)
	first := make([]byte, rows)
	for i := range added {
		added[i] += in[2].Data[i] + in[1].Data[0]
	}
	for row := range first {
		first[row] = added[int64(row)*width]
	}
	y, err := tensor.Of(first, rows, 1)
	return []tensor.Tensor{{Desc: in[0].Desc, Data: added}, y}, err
}

// backwards turns a tensor round, and tells only then that it has one dimension.
func backwards(int64) blocks.Model {
	shape := []int64{engine.AnyAxes}
	return blocks.Model{
		Info: engine.Info{Name: "backwards", Inputs: []engine.Port{{Name: "x", Shape: shape}}, Outputs: []engine.Port{{Name: "y", Shape: shape}}},
		Bind: func(engine.Call) (blocks.Bound, error) {
			return blocks.Bound{Results: blocks.Given, Program: program{gives: func(b blocks.RowBlock) []tensor.Tensor {
				y := bytes.Clone(b.In[0])
				slices.Reverse(y)
				return []tensor.Tensor{{Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(len(y))}}, Data: y}}
			}}}, nil
		},
	}
}

func backwardsOf(in []tensor.Tensor) ([]tensor.Tensor, error) {
	y := bytes.Clone(in[0].Data)
	slices.Reverse(y)
	t, err := tensor.Of(y, int64(len(y)))
	return []tensor.Tensor{t}, err
}

// counting has no inputs: its rows are numbered, in bytes.
func counting(rows int64) made {
	return func(n int64) blocks.Model {
		d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{rows, 3}}
		return blocks.Model{
			Info: engine.Info{Name: "counting", Rows: 1, BlockRows: n, Outputs: bytePort},
			Bind: func(engine.Call) (blocks.Bound, error) {
				return blocks.Bound{Outs: []tensor.Desc{d}, Program: program{rows: func(b blocks.RowBlock) {
					for i := range b.Out[0] {
						b.Out[0][i] = byte(b.Row + int64(i)/3)
					}
				}}}, nil
			},
		}
	}
}

func countingOf(rows int64) func([]tensor.Tensor) ([]tensor.Tensor, error) {
	return func([]tensor.Tensor) ([]tensor.Tensor, error) {
		data := make([]byte, rows*3)
		for i := range data {
			data[i] = byte(i / 3)
		}
		t, err := tensor.Of(data, rows, 3)
		return []tensor.Tensor{t}, err
	}
}

func matrix(rows, width int64) tensor.Tensor {
	t, err := tensor.Of(testkit.Bytes(int(rows*width), 7), rows, width)
	if err != nil {
		panic(err)
	}
	return t
}

// cases are models of each kind that a device may have.
var cases = map[string]struct {
	made  made
	in    []tensor.Tensor
	empty []tensor.Tensor
	want  func([]tensor.Tensor) ([]tensor.Tensor, error)
}{
	"results of their own":       {plusOne(blocks.Own), []tensor.Tensor{matrix(300, 9)}, []tensor.Tensor{matrix(0, 9)}, plusOneOf},
	"results in place":           {plusOne(blocks.InPlace), []tensor.Tensor{matrix(300, 9)}, []tensor.Tensor{matrix(0, 9)}, plusOneOf},
	"results given":              {plusOne(blocks.Given), []tensor.Tensor{matrix(300, 9)}, nil, plusOneOf},
	"results given, known then":  {lateKnown(9), []tensor.Tensor{matrix(300, 9)}, []tensor.Tensor{matrix(0, 9)}, lateKnownOf(9)},
	"narrow results, known then": {lateKnown(1), []tensor.Tensor{matrix(200, 9)}, []tensor.Tensor{matrix(0, 9)}, lateKnownOf(1)},
	"wide results, known then":   {lateKnown(50), []tensor.Tensor{matrix(200, 9)}, []tensor.Tensor{matrix(0, 9)}, lateKnownOf(50)},
	"many ports":                 {keyed, []tensor.Tensor{matrix(200, 9), matrix(1, 5), matrix(200, 9)}, []tensor.Tensor{matrix(0, 9), matrix(1, 5), matrix(0, 9)}, keyedOf},
	"whole tensors":              {backwards, []tensor.Tensor{matrix(300, 9)}, nil, backwardsOf},
	"no inputs":                  {counting(5000), nil, nil, countingOf(5000)},
	"no inputs and no results":   {counting(0), nil, nil, countingOf(0)},
}

func TestEveryDevicePassesTheSuite(t *testing.T) {
	for name, c := range cases {
		for _, n := range []int64{1, 7} {
			s := enginetest.Case{Inputs: c.in, Empty: c.empty, Want: c.want}
			t.Run(fmt.Sprintf("late, %s, %d rows a block", name, n), func(t *testing.T) {
				s.New = enginetest.On(onLate, on[*late](c.made, n))
				enginetest.Run(t, s)
			})
			t.Run(fmt.Sprintf("at once, %s, %d rows a block", name, n), func(t *testing.T) {
				s.New = enginetest.On(onInline, on[inline](c.made, n))
				enginetest.Run(t, s)
			})
		}
	}
}

func TestRunsOnADeviceThatFailsAndIsLostEndInOneWay(t *testing.T) {
	testkit.Start(t)
	rng := testkit.Rand(t)
	for range 60 {
		l := newLate(8<<20, slab.System, rng.Uint64(), 2)
		l.fails = rng.IntN(3) * 200
		var callers, losses sync.WaitGroup
		for name, c := range cases {
			m, err := l.Model(c.made(1 + rng.Int64N(9)))
			require.NoError(t, err)
			seed, chunk := rng.Uint64(), 1+rng.Int64N(500)
			callers.Go(func() {
				want, err := c.want(c.in)
				if err != nil {
					t.Error(err)
				}
				got, err := enginetest.Compute(t.Context(), m, c.in, nil, chunk, seed)
				if err == nil {
					err = enginetest.Equal(got, want)
				}
				if err != nil && !errors.Is(err, engine.ErrUnavailable) && !errors.Is(err, errDevice) {
					t.Errorf("%s: %v", name, err)
				}
			})
			stop, taken := rng.IntN(3), rng.IntN(5)
			callers.Go(func() { abandon(t, m, c.in, stop, taken) })
		}
		losses.Go(func() {
			for range 3 {
				for range 200 {
					runtime.Gosched()
				}
				l.lose()
				l.back()
			}
		})
		callers.Wait()
		losses.Wait()
		l.Close()
		l.idle(t)
	}
}

// abandon opens a run, fills what it can, takes a few results and gives up: it
// cancels (0), or closes the run while it releases the last (1) or after (2).
func abandon(t *testing.T, m engine.Model, in []tensor.Tensor, stop, taken int) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, err := m.Open(ctx, enginetest.Call(m, in, nil, 64))
	if err != nil {
		if !errors.Is(err, engine.ErrUnavailable) {
			t.Error(err)
		}
		return
	}
	var feeding sync.WaitGroup
	feeding.Go(func() {
		for {
			b, err := r.Borrow(ctx)
			if err != nil {
				return
			}
			r.Filled(b)
		}
	})
	release := func() {}
	for range taken {
		o, err := r.Next(ctx)
		if err != nil {
			break
		}
		release() // but the last: a run with little memory stands still before long
		release = o.Release
	}
	if stop == 0 {
		cancel()
	}
	var releasing sync.WaitGroup
	if stop == 1 {
		releasing.Go(release)
	} else {
		release()
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	cancel()
	feeding.Wait()
	releasing.Wait()
}

// by is an engine whose device does what a test says.
type by struct {
	*blocks.Engine
	pool    *slab.Pool
	budget  *slab.Budget
	started chan *blocks.Work
}

func byHand() *by {
	d := &by{started: make(chan *blocks.Work, 1000), pool: slab.NewPool(1<<20, slab.System), budget: slab.NewBudget("memory", 1<<20)}
	d.Engine = blocks.New(blocks.Config{Name: "by hand", Device: d, Pool: d.pool, Budget: d.budget})
	return d
}

func (d *by) Start(w *blocks.Work) { d.started <- w }

func (d *by) idle(t *testing.T) {
	t.Helper()
	used, _, _ := d.budget.Used()
	if slabs, live := d.pool.Live(); used != 0 || slabs != 0 {
		t.Errorf("%d bytes of the budget and %d slabs of %d bytes are still held", used, slabs, live)
	}
}

// opened opens a run of plusOne with one row of 9 bytes a block.
func (d *by) opened(ctx context.Context, t *testing.T, where blocks.Results) engine.Run {
	t.Helper()
	m, err := d.Model(plusOne(where)(1))
	require.NoError(t, err)
	r, err := m.Open(ctx, enginetest.Call(m, []tensor.Tensor{matrix(300, 9)}, nil, 9))
	require.NoError(t, err)
	return r
}

func fill(t *testing.T, r engine.Run) {
	t.Helper()
	b, err := r.Borrow(t.Context())
	require.NoError(t, err)
	r.Filled(b)
}

func done(w *blocks.Work) { w.Done(nil, blocks.Times{}) }

// stages bring a run with one block to where it ends; what the device says after
// that is the function returned.
var stages = map[string]func(t *testing.T, d *by, r engine.Run) (late func()){
	"before a block is filled": func(*testing.T, *by, engine.Run) func() { return func() {} },
	"before InputFree": func(t *testing.T, d *by, r engine.Run) func() {
		fill(t, r)
		w := <-d.started
		return func() { w.InputFree(); done(w) }
	},
	"after InputFree": func(t *testing.T, d *by, r engine.Run) func() {
		fill(t, r)
		w := <-d.started
		w.InputFree()
		return func() { done(w) }
	},
	"after Done": func(t *testing.T, d *by, r engine.Run) func() {
		fill(t, r)
		done(<-d.started)
		return func() {}
	},
	"with a result held": func(t *testing.T, d *by, r engine.Run) func() {
		fill(t, r)
		done(<-d.started)
		o, err := r.Next(t.Context())
		require.NoError(t, err)
		return o.Release
	},
}

func TestACancelAtEachStageGivesEverythingBack(t *testing.T) {
	testkit.Start(t)
	for name, reach := range stages {
		for _, where := range []blocks.Results{blocks.Own, blocks.InPlace} {
			t.Run(fmt.Sprint(name, ", results ", where), func(t *testing.T) {
				d := byHand()
				cause := errors.New("the caller went away")
				ctx, cancel := context.WithCancelCause(t.Context())
				r := d.opened(ctx, t, where)
				late := reach(t, d, r)
				cancel(cause)
				if _, err := r.Next(t.Context()); !errors.Is(err, cause) {
					t.Errorf("Next returned %v, want the cause", err)
				}
				var wg sync.WaitGroup
				wg.Go(late) // while Close waits for it, or before
				if err := r.Close(); err != nil {
					t.Error(err)
				}
				wg.Wait()
				d.idle(t)
			})
		}
	}
}

func TestALossAtEachStageEndsTheRunAndLateWordsAreIgnored(t *testing.T) {
	testkit.Start(t)
	for name, reach := range stages {
		for _, where := range []blocks.Results{blocks.Own, blocks.InPlace} {
			t.Run(fmt.Sprint(name, ", results ", where), func(t *testing.T) {
				d := byHand()
				r := d.opened(t.Context(), t, where)
				late := reach(t, d, r)
				d.Lost(errGone)
				for what, err := range map[string]error{
					"Next":   func() error { _, err := r.Next(t.Context()); return err }(),
					"Borrow": func() error { _, err := r.Borrow(t.Context()); return err }(),
				} {
					if !errors.Is(err, errGone) || !errors.Is(err, engine.ErrUnavailable) {
						t.Errorf("%s returned %v, want ErrUnavailable and why", what, err)
					}
				}
				if name == "with a result held" {
					late() // or Close would wait for it
				}
				if err := r.Close(); err != nil { // though the device is done with nothing
					t.Error(err)
				}
				d.idle(t)
				d.Back()
				if name != "with a result held" {
					late()
				}
				again := d.opened(t.Context(), t, where)
				fill(t, again)
				done(<-d.started)
				o, err := again.Next(t.Context())
				require.NoError(t, err)
				o.Release()
				if err := again.Close(); err != nil {
					t.Error(err)
				}
				d.idle(t)
			})
		}
	}
}

func TestALostDeviceOpensNothingAndTellsItsModelsHealth(t *testing.T) {
	testkit.Start(t)
	d := byHand()
	m, err := d.Model(plusOne(blocks.Own)(1))
	require.NoError(t, err)
	w, ok := engine.As[engine.HealthWatcher](enginetest.Named("other", m))
	if !ok {
		t.Fatal("the model has no health")
	}
	var told []error
	stop := w.WatchHealth(func(err error) { told = append(told, err) })
	d.Lost(errGone)
	d.Lost(errDevice) // it is lost already
	if _, err := m.Open(t.Context(), enginetest.Call(m, []tensor.Tensor{matrix(3, 9)}, nil, 9)); !errors.Is(err, engine.ErrUnavailable) {
		t.Errorf("Open returned %v, want ErrUnavailable", err)
	}
	d.idle(t)
	d.Back()
	stop()
	d.Lost(errDevice)
	if len(told) != 3 || told[0] != nil || !errors.Is(told[1], errGone) || told[2] != nil {
		t.Errorf("told %v, want well, gone and well", told)
	}
}

func TestInputMemoryIsLentAgainBeforeTheResultsAreThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := byHand()
		r := d.opened(t.Context(), t, blocks.Own)
		borrow := func() *engine.Block {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			b, err := r.Borrow(ctx)
			if err != nil && !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
			return b
		}
		var works []*blocks.Work
		for b := borrow(); b != nil; b = borrow() { // until every slot is at the device
			r.Filled(b)
			works = append(works, <-d.started)
		}
		works[1].InputFree()
		if works[1].In != nil {
			t.Error("the device still has the input that it has let go of")
		}
		b := borrow()
		if b == nil || b.Row != int64(len(works)) {
			t.Fatalf("after InputFree, Borrow returned %v", b)
		}
		r.Filled(b)
		for _, w := range slices.Backward(works) {
			done(w)
		}
		for range works {
			o, err := r.Next(t.Context())
			require.NoError(t, err)
			o.Release()
		}
		done(<-d.started)                 // there is memory for its results now,
		if err := r.Close(); err != nil { // which nobody takes
			t.Error(err)
		}
		d.idle(t)
	})
}

// selfish is a device that finds out in Start that it is lost.
type selfish struct{ *by }

func (d selfish) Start(w *blocks.Work) {
	d.Lost(errGone)
	done(w) // too late
}

func TestALossWithinStartEndsTheRun(t *testing.T) {
	testkit.Start(t)
	d := selfish{byHand()}
	d.Engine = blocks.New(blocks.Config{Name: "selfish", Device: d, Pool: d.pool, Budget: d.budget})
	for range 2 {
		r := d.opened(t.Context(), t, blocks.Own)
		fill(t, r)
		if _, err := r.Next(t.Context()); !errors.Is(err, errGone) {
			t.Errorf("Next returned %v, want why the device is lost", err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		d.Back()
		d.idle(t)
	}
}

func TestADeviceThatBreaksItsWordFailsTheCall(t *testing.T) {
	testkit.Start(t)
	for name, give := range map[string]func(*blocks.Work){
		"it gives nothing":        func(*blocks.Work) {},
		"it gives too many":       func(w *blocks.Work) { w.Give(make([]tensor.Tensor, 2), nil) },
		"it gives another desc":   func(w *blocks.Work) { w.Give([]tensor.Tensor{matrix(1, 9)}, nil) },
		"it gives too few bytes":  func(w *blocks.Work) { w.Give([]tensor.Tensor{{Desc: w.OutDescs[0], Data: make([]byte, 8)}}, nil) },
		"it says it has no input": func(w *blocks.Work) { w.InputFree() },
	} {
		t.Run(name, func(t *testing.T) {
			d := byHand()
			r := d.opened(t.Context(), t, blocks.Given)
			fill(t, r)
			w := <-d.started
			give(w)
			done(w)
			if _, err := r.Next(t.Context()); !errors.Is(err, engine.ErrModel) {
				t.Errorf("Next returned %v, want ErrModel", err)
			}
			if err := r.Close(); err != nil {
				t.Error(err)
			}
			d.idle(t)
		})
	}
	t.Run("it is done twice", func(t *testing.T) {
		d := byHand()
		r := d.opened(t.Context(), t, blocks.Own)
		fill(t, r)
		w := <-d.started
		done(w)
		func() {
			defer func() {
				if recover() == nil {
					t.Error("Done twice does not panic")
				}
			}()
			done(w)
		}()
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		d.idle(t)
	})
}

// scarce is memory of which there is now and then none.
type scarce struct {
	mu   sync.Mutex // guards all below
	rng  *rand.Rand
	some int // one Alloc of so many fails
	held int
}

var errScarce = errors.New("no page is left")

func (s *scarce) Alloc(n int) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rng.IntN(s.some) == 0 {
		return nil, errScarce
	}
	s.held++
	return slab.System.Alloc(n)
}

func (s *scarce) Free(mem []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held--
	slab.System.Free(mem)
}

func TestACallWithoutMemoryFailsAndHoldsNone(t *testing.T) {
	testkit.Start(t)
	rng := testkit.Rand(t)
	failed := 0
	for range 100 {
		b := &scarce{rng: rand.New(rand.NewPCG(rng.Uint64(), 0)), some: 1 + rng.IntN(30)}
		l := newLate(8<<20, b, rng.Uint64(), 1)
		l.pool = slab.NewPool(0, b) // keeps nothing
		l.Engine = blocks.New(blocks.Config{Name: "late:0", Device: l, Pool: l.pool, Budget: l.budget})
		for name, c := range cases {
			m, err := l.Model(c.made(3))
			require.NoError(t, err)
			want, err := c.want(c.in)
			require.NoError(t, err)
			got, err := enginetest.Compute(t.Context(), m, c.in, nil, 100, rng.Uint64())
			if err == nil {
				err = enginetest.Equal(got, want)
			} else if failed++; errors.Is(err, slab.ErrMemory) && errors.Is(err, errScarce) {
				err = nil
			}
			if err != nil && !errors.Is(err, io.EOF) {
				t.Errorf("%s: %v", name, err)
			}
		}
		l.Close()
		l.idle(t)
		if b.held != 0 {
			t.Errorf("%d blocks of memory are still held", b.held)
		}
	}
	if failed == 0 {
		t.Error("memory was never short")
	}
}

func TestACaseMayBeNear(t *testing.T) {
	enginetest.Run(t, enginetest.Case{
		New: enginetest.On(onLate, on[*late](func(n int64) blocks.Model {
			port := []engine.Port{{Name: "x", DTypes: []tensor.DataType{tensor.Float32}, Shape: []int64{engine.AnyAxes}}}
			return blocks.Model{
				Info: engine.Info{Name: "nearly", Rows: engine.AllAxes, BlockRows: n, Inputs: port, Outputs: port},
				Bind: func(c engine.Call) (blocks.Bound, error) {
					return blocks.Bound{Outs: c.Descs(), Program: program{rows: func(b blocks.RowBlock) {
						for i, x := range b.In[0] {
							b.Out[0][i] = x
							if i%4 == 0 {
								b.Out[0][i] ^= 1 // the last bit of a float32
							}
						}
					}}}, nil
				},
			}
		}, 5)),
		Inputs: []tensor.Tensor{floats(100)}, Near: 1e-6,
		Want: func(in []tensor.Tensor) ([]tensor.Tensor, error) { return in, nil },
	})
}

func floats(n int) tensor.Tensor {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(i) * 1.1
	}
	t, err := tensor.Of(v, int64(n))
	if err != nil {
		panic(err)
	}
	return t
}
