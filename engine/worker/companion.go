package worker

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/internal/link"
)

// Companions returns the models that the process has beside Model, named NAME/part. They share
// what it keeps between calls: those of a module that trains have its gradients, its optimizer
// and the graphs of forward passes.
func (h *Host) Companions() []engine.Model { return h.companions }

// trainingGauges are what a process with companions says that it keeps, by its own names.
var trainingGauges = []struct{ said, name, meaning string }{
	{"graphs", "training_graphs", "graphs of forward passes that are kept for their backward passes"},
	{"bytes", "training_graph_bytes", "memory that they have"},
	{"used", "training_graphs_used", "graphs that a backward pass has used"},
	{"evicted", "training_graphs_evicted", "graphs that were dropped for others"},
	{"expired", "training_graphs_expired", "graphs that were dropped for their age, or after a step"},
	{"missed", "training_graphs_missed", "backward passes whose graph was gone"},
	{"failed", "training_checkpoints_failed", "checkpoints that could not be written"},
	{"step", "training_step", "steps that the optimizer has taken"},
	{"lease", "training_lease", "1 while a client trains"},
}

// kept is what a process says that it keeps between calls.
type kept struct {
	Bytes  int64              `json:"kept"` // all of it
	Most   int64              `json:"most"` // what one call has left
	Gauges map[string]float64 `json:"gauges"`
}

// keep charges what a process keeps between calls to the budget of inputs; mu is held.
func (h *Host) keep(k kept) {
	k.Bytes = min(max(0, k.Bytes), h.cfg.MemoryBytes) // it is bounded by 1/keptShare of that
	k.Most = max(0, k.Most)
	if more := k.Bytes - h.kept.Bytes; more > 0 {
		h.budget.Hold(nil, more)
	} else {
		h.budget.Release(nil, -more)
	}
	h.kept = k
}

// session returns the number of the session, or what stands for one, that a call belongs to. The
// processes are told when it has ended. Zero is none.
func (h *Host) session(life context.Context) uint64 {
	if life == nil || life.Done() == nil || len(h.companions) == 0 {
		return 0
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	number, known := h.sessions[life.Done()]
	if !known {
		h.lastSession++
		number = h.lastSession
		h.sessions[life.Done()] = number
		context.AfterFunc(life, func() { h.leaveSession(life) })
	}
	return number
}

func (h *Host) leaveSession(life context.Context) {
	var over blocks.Queue
	h.mu.Lock()
	gone := &link.Gone{Head: link.Head{ID: h.sessions[life.Done()]}}
	delete(h.sessions, life.Done())
	if o := h.orders[gone.ID]; o != nil {
		over = o.takeAll()
		delete(h.orders, gone.ID)
	}
	for g := range h.guests {
		g.tells = append(g.tells, gone)
	}
	h.more.Broadcast()
	h.mu.Unlock()
	over.End(errTurn)
}

// order has the blocks of a session computed in the order that their calls say with the param
// "order", a text SERIES.N: N begins with 0, and a block waits for all before it. Calls that a
// client begins together would overtake each other else, and a module may have a state.
type order struct {
	series  string
	next    uint64
	waiting map[uint64]turn
}

// turn is a block that waits for those before it, for turnWait: it has memory.
type turn struct {
	*blocks.Work
	late *time.Timer
}

// errTurn ends a block whose turn is another's, or does not come.
var errTurn = fmt.Errorf("%w: the call before it in its order did not come, or another has its place; begin a new series", engine.ErrPrecondition)

// orderOf reads the param "order"; a text without a number has no order.
func orderOf(text string) (series string, n uint64, err error) {
	series, number, _ := strings.Cut(text, ".")
	if n, err = strconv.ParseUint(number, 10, 64); err != nil || series == "" || len(series) > seriesBytes {
		return "", 0, fmt.Errorf("%w: order=%q: use SERIES.N", engine.ErrParam, text)
	}
	return series, n, nil
}

// push puts a block into the queue, when its turn has come. It returns the blocks whose turn
// does not come; mu is held.
func (h *Host) push(w *blocks.Work) (over blocks.Queue) {
	p := w.Program.(*program)
	queue := &h.lines[min(p.model, 1)]
	if p.series == "" || p.session == 0 {
		queue.Push(w)
		return over
	}
	o := h.orders[p.session]
	if o == nil || o.series != p.series {
		if o != nil {
			over = o.takeAll()
		}
		o = &order{series: p.series, waiting: make(map[uint64]turn)}
		h.orders[p.session] = o
	}
	if _, taken := o.waiting[p.turn]; taken {
		over.Push(w)
		return over
	}
	if p.turn > o.next {
		o.waiting[p.turn] = turn{w, time.AfterFunc(h.cfg.turn, func() { h.late(o, p.turn, w) })}
		return over
	}
	queue.Push(w)
	for o.next = max(o.next, p.turn+1); ; o.next++ {
		next := o.take(o.next)
		if next == nil {
			return over
		}
		queue.Push(next)
	}
}

// take takes the block of a turn out, nil if none waits; mu is held.
func (o *order) take(n uint64) *blocks.Work {
	t, waits := o.waiting[n]
	if waits {
		t.late.Stop()
		delete(o.waiting, n)
	}
	return t.Work
}

// takeAll takes all blocks out that wait; mu is held.
func (o *order) takeAll() (taken blocks.Queue) {
	for n := range o.waiting {
		taken.Push(o.take(n))
	}
	return taken
}

// late ends a block that has waited for too long.
func (h *Host) late(o *order, n uint64, w *blocks.Work) {
	h.mu.Lock()
	waits := o.waiting[n].Work == w
	if waits {
		o.take(n)
	}
	h.mu.Unlock()
	if waits {
		w.End(errTurn)
	}
}

// take takes the blocks of a run out that no process has begun; mu is held.
func (h *Host) take(run context.Context) (taken blocks.Queue) {
	for i := range h.lines {
		some := h.lines[i].Take(run)
		taken.Append(&some)
	}
	for _, o := range h.orders {
		for n, t := range o.waiting {
			if t.Context() == run {
				taken.Push(o.take(n))
			}
		}
	}
	return taken
}

// takeAll takes all blocks out that no process has begun; mu is held.
func (h *Host) takeAll() (taken blocks.Queue) {
	for i := range h.lines {
		taken.Append(&h.lines[i])
	}
	for _, o := range h.orders {
		some := o.takeAll()
		taken.Append(&some)
	}
	clear(h.orders)
	return taken
}

// pop returns the next block: of the model and of its companions by turns, so that neither
// waits for more than one of the other; mu is held.
func (h *Host) pop() (w *blocks.Work) {
	for range h.lines {
		w = h.lines[h.turn].Pop()
		if h.turn = 1 - h.turn; w != nil {
			break
		}
	}
	return w
}
