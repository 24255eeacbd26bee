// Package worker runs models in processes of their own, such as Python: a guest of
// internal/link computes blocks in memory that both map.
//
// It refuses to know what language a guest is written in, and to trust it: a process that
// breaks the protocol, does not answer or dies is killed and started again, and only its own
// blocks fail. Hosts are safe for concurrent use. Input blocks lie in memory of the host that
// is lent to the guest; results are shared by it until they are released.
package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/slab"
)

// Descriptor is where a process finds its link.
const Descriptor = 3

// Config says what computes a model, and what it may use.
type Config struct {
	// Name is that of the model.
	Name string
	// Command is a program and its arguments. Each process has its link at Descriptor.
	Command []string
	// Env is added to the environment of a process, as "name=value".
	Env []string
	// Processes is how many there are. Zero means 1.
	Processes int
	// Threads is how many threads each process computes with. Zero leaves that to an
	// environment that says it, else cores are shared out.
	Threads int
	// Socket, if it is set, is the link of a guest that runs already; Command, Env,
	// Processes and Threads are of no use then. It is handed over.
	Socket *net.UnixConn
	// MemoryBytes is the most memory that inputs may have at a time, and the most that
	// results may. Zero means 256 MiB.
	MemoryBytes int64
	// Version is that of the program, which the hello of a guest has to say too.
	Version string
	// Log is where the lines of the processes go, and what becomes of them; nil means slog.Default().
	Log *slog.Logger

	block, turn, first time.Duration // blockWait, turnWait, pauseFirst, but in tests
	// obey is how long a block may take after nobody wants it any more: less than what a closed run
	// waits for its blocks, by drainWait twice. A process may take as long as end to end.
	obey, end time.Duration
}

func (c *Config) setDefaults() {
	c.MemoryBytes = cmp.Or(max(c.MemoryBytes, 0), blocks.DefaultMemory)
	if c.Processes <= 0 || c.Socket != nil {
		c.Processes = 1
	}
	c.Log = cmp.Or(c.Log, slog.Default()).With(slog.String("model", c.Name))
	c.block, c.turn, c.first = cmp.Or(c.block, blockWait), cmp.Or(c.turn, turnWait), cmp.Or(c.first, pauseFirst)
	c.obey, c.end = cmp.Or(c.obey, blocks.CloseWait/2), blocks.CloseWait
	if c.Socket != nil { // nobody could start another guest
		c.obey = c.block
	}
}

// threads are the settings of the libraries that compute: those that the caller's
// environment does not say, unless Config does.
func (c *Config) threads(said func(string) (string, bool)) (env []string) {
	n := c.Threads
	if n <= 0 {
		n = max(1, runtime.NumCPU()/c.Processes)
	}
	for _, name := range []string{"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TENSORFERRY_THREADS"} {
		if _, ok := said(name); !ok || c.Threads > 0 {
			env = append(env, name+"="+strconv.Itoa(n))
		}
	}
	return env
}

// Host is a model and the processes that compute it.
type Host struct {
	cfg     Config
	heap    *link.Heap
	pool    *slab.Pool
	budget  *slab.Budget // of inputs
	results *slab.Budget
	engine  *blocks.Engine
	model   engine.Model
	// companions are more models of the same process.
	companions []engine.Model

	stop  context.CancelFunc
	ctx   context.Context // ends with Close
	all   sync.WaitGroup
	ended chan struct{}

	blockIDs, runIDs atomic.Uint64
	restarts         atomic.Int64

	mu     sync.Mutex          // guards all below, and what guests and programs say of it
	lines  [2]line             // of the model, and of its companions
	turn   int                 // whose is next
	guests map[*guest]struct{} // that are ready
	info   *info               // as the first guest said
	kept   kept                // by the process, between calls
	// stateBytes are those of the states of all guests.
	stateBytes int64
	// sessions have calls of a model with companions: by the channel that is closed at their end.
	sessions    map[<-chan struct{}]*session
	lastSession uint64
}

// Start starts the processes of a model and goroutines for each, which end with Close,
// and returns when all are ready. It fails if one is not: it tells what the model said.
func Start(c Config) (*Host, error) {
	c.setDefaults()
	heap := link.NewHeap(4 * c.MemoryBytes)
	h := &Host{
		cfg: c, heap: heap, pool: slab.NewPool(2*c.MemoryBytes, heap),
		budget:  slab.NewBudget("input memory of "+c.Name, c.MemoryBytes),
		results: slab.NewBudget("result memory of "+c.Name, c.MemoryBytes),
		ended:   make(chan struct{}), guests: make(map[*guest]struct{}), sessions: make(map[<-chan struct{}]*session),
	}
	h.engine = blocks.New(blocks.Config{Name: "python:" + c.Name, Device: h, Pool: h.pool, Budget: h.budget})
	h.ctx, h.stop = context.WithCancel(context.Background())
	ready := make(chan error, c.Processes)
	for n := range c.Processes {
		p := &process{host: h, log: c.Log, first: ready, lines: rate.NewLimiter(linesPerSecond, 10*linesPerSecond)}
		if c.Processes > 1 {
			p.log = c.Log.With(slog.Int("process", n+1))
		}
		if c.Socket != nil {
			h.all.Go(p.attached)
		} else {
			h.all.Go(p.supervise)
		}
	}
	var err error
	for range c.Processes {
		if err = <-ready; err != nil {
			break
		}
	}
	if err == nil {
		err = h.makeModels()
	}
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("worker: model %q: %w", c.Name, err)
	}
	return h, nil
}

// makeModels makes the models that the first guest has announced.
func (h *Host) makeModels() (err error) {
	if len(h.info.Companions) > 0 && h.cfg.Processes > 1 {
		return fmt.Errorf("a model that trains has one process, not %d: its weights are there", h.cfg.Processes)
	}
	for i, d := range h.info.Companions {
		m, err := h.engine.Model(h.bound(i+1, d))
		if err != nil {
			return err
		}
		h.companions = append(h.companions, m)
	}
	m := h.bound(0, h.info.described)
	m.Begin, m.Teardown, m.Gauges = h.begin, h.Close, h.gauges // the last two of all of them
	h.model, err = h.engine.Model(m)
	return err
}

// Model returns the model. Closing it closes the host.
func (h *Host) Model() engine.Model { return h.model }

// Ended is closed when the guest of Config.Socket is gone.
func (h *Host) Ended() <-chan struct{} { return h.ended }

// Close has the processes tear their model down and end, for a few seconds, then kills
// them. Blocks that are not computed fail with engine.ErrClosed.
func (h *Host) Close() {
	h.mu.Lock()
	h.stop()
	rest := h.takeAll()
	h.mu.Unlock()
	rest.End(engine.ErrClosed)
	h.all.Wait()
}

// gauges are what the model measures.
func (h *Host) gauges() []engine.Gauge {
	h.mu.Lock()
	ready, queued, resident, said := len(h.guests), h.lines[0].len()+h.lines[1].len(), int64(0), h.kept.Gauges
	states, stateBytes := 0, h.stateBytes
	for g := range h.guests {
		r, _ := proc.ResidentOf(g.pid) // nothing where the system does not tell
		resident += r.Own + r.Mapped
		states += len(g.states)
	}
	h.mu.Unlock()
	inputs, _, _ := h.budget.Used()
	results, _, _ := h.results.Used()
	all := []engine.Gauge{
		{Name: "worker_processes", Meaning: "processes that are ready", Value: float64(ready)},
		{Name: "worker_restarts", Meaning: "processes that were started again", Value: float64(h.restarts.Load())},
		{Name: "worker_memory_bytes", Meaning: "memory of the processes", Value: float64(resident)},
		{Name: "worker_queue_blocks", Meaning: "blocks that wait for a process", Value: float64(queued)},
		{Name: "worker_input_bytes", Meaning: "shared memory that inputs have", Value: float64(inputs)},
		{Name: "worker_result_bytes", Meaning: "shared memory that results have", Value: float64(results)},
		{Name: "worker_states", Meaning: "sequences whose state the processes have", Value: float64(states)},
		{Name: "worker_state_bytes", Meaning: "memory of these states, as the processes say", Value: float64(stateBytes)},
	}
	for _, g := range trainingGauges {
		if len(h.companions) > 0 {
			all = append(all, engine.Gauge{Name: g.name, Meaning: g.meaning, Value: said[g.said]})
		}
	}
	return all
}

// Start implements blocks.Device.
func (h *Host) Start(w *blocks.Work) {
	h.mu.Lock()
	var over blocks.Queue
	p, err := w.Program.(*program), w.Context().Err()
	if p.owner != nil {
		err = cmp.Or(err, p.owner.left)
	}
	if p.state != nil {
		p.state.rows = p.before + w.Row + w.Rows
	}
	if h.ctx.Err() != nil {
		err = engine.ErrClosed
	}
	if err == nil {
		over = h.push(w)
		h.tell()
	}
	h.mu.Unlock()
	if err != nil {
		w.End(err)
	}
	over.End(errTurn)
}

// tell tells guests of the blocks that wait, those first that have none; mu is held, but given away meanwhile.
func (h *Host) tell() {
	for _, idle := range []bool{true, false} {
		for g := range h.guests {
			if (len(g.flight) == 0) == idle {
				g.tell()
			}
		}
	}
}

// Cancel implements blocks.Canceler.
func (h *Host) Cancel(run context.Context) {
	var over blocks.Queue
	h.mu.Lock()
	for i := range h.lines {
		h.lines[i].take(func(p *program) bool { return p.queue.Head().Context() == run }, &over)
	}
	for _, s := range h.sessions {
		for n, t := range s.waiting {
			if t.Context() == run {
				over.Push(s.take(n))
			}
		}
	}
	for g := range h.guests {
		if slices.ContainsFunc(g.flight, func(f *flight) bool { return f.work.Context() == run }) {
			go g.cancel(run) // ends when the guest reads, or has ended
		}
	}
	h.mu.Unlock()
	over.End(nil)
}

// join takes in a guest that is ready.
func (h *Host) join(g *guest, i *info) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ctx.Err() != nil {
		return engine.ErrClosed
	}
	if h.info == nil {
		h.info = i
	} else if !reflect.DeepEqual(h.info, i) {
		return errors.New("its ports, rows or parameters are not those that the model had before")
	}
	if len(i.Companions) > 0 { // what it keeps is worth more than the time
		h.cfg.obey, h.cfg.end = h.cfg.block, saveWait
	}
	g.info = i
	h.guests[g] = struct{}{}
	if h.engine.Back() {
		h.cfg.Log.Warn("worker is back")
	}
	return nil
}

// leave ends the blocks of a guest that is gone, or all runs when it was the last.
// Nothing can write to the guest's memory any more.
func (h *Host) leave(g *guest, cause error) {
	h.mu.Lock()
	_, ready := h.guests[g]
	delete(h.guests, g)
	g.left = cause
	var over blocks.Queue
	h.lines[0].take(func(p *program) bool { return p.owner == g }, &over)
	for _, f := range g.flight {
		over.Push(f.work)
	}
	g.flight = nil
	for s := range g.states {
		s.end(cause)
	}
	h.mu.Unlock()
	over.End(cause)
	h.mu.Lock()
	defer h.mu.Unlock()
	if !ready || h.ctx.Err() != nil || len(h.guests) > 0 {
		return
	}
	_ = h.keep([]byte("{}"))
	h.takeAll() // the engine does
	h.engine.Lost(cause)
}
