package worker

import (
	"context"
	"encoding/json"
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
func (h *Host) keep(said []byte) error {
	var k kept
	if err := json.Unmarshal(said, &k); err != nil {
		return fmt.Errorf("%w: kept: %w", link.ErrMessage, err)
	}
	k.Bytes = min(max(0, k.Bytes), h.cfg.MemoryBytes) // it is bounded by 1/keptShare of that
	k.Most = max(0, k.Most)
	h.charge(nil, k.Bytes-h.kept.Bytes)
	h.kept = k
	return nil
}

// session is one of a client, or what stands for one, as far as the companions of a model know it.
//
// Its blocks are computed in the order that their calls say with the param "order", a text
// SERIES.N: N begins with 0, and a block waits for all before it. Calls that a client begins
// together would overtake each other else, and a module may have a state.
type session struct {
	number  uint64 // which the processes know it by
	series  string // empty before there is one
	next    uint64
	waiting map[uint64]turn
}

// sessionOf returns the session that a call belongs to, nil if there is none. The processes are told
// when it has ended.
func (h *Host) sessionOf(life context.Context) *session {
	if life == nil || life.Done() == nil || len(h.companions) == 0 {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.sessions[life.Done()]
	if s == nil {
		h.lastSession++
		s = &session{number: h.lastSession}
		h.sessions[life.Done()] = s
		context.AfterFunc(life, func() { h.leaveSession(life, s) })
	}
	return s
}

func (h *Host) leaveSession(life context.Context, s *session) {
	var over blocks.Queue
	h.mu.Lock()
	delete(h.sessions, life.Done())
	s.takeAll(&over)
	for g := range h.guests {
		g.tells = append(g.tells, &link.Gone{Head: link.Head{ID: s.number}})
		g.tell()
	}
	h.mu.Unlock()
	over.End(errTurn)
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
	if n, err = strconv.ParseUint(number, 10, 64); err != nil || series == "" {
		return "", 0, fmt.Errorf("%w: order=%q: use SERIES.N", engine.ErrParam, text)
	}
	return series, n, nil
}

// push puts a block into the queue, when its turn has come. It returns the blocks whose turn
// does not come; mu is held.
func (h *Host) push(w *blocks.Work) (over blocks.Queue) {
	p := w.Program.(*program)
	line := &h.lines[min(p.model, 1)]
	s := p.session
	if p.series == "" || s == nil || p.life.Err() != nil {
		line.push(w)
		return over
	}
	if s.series != p.series {
		s.takeAll(&over)
		*s = session{number: s.number, series: p.series, waiting: make(map[uint64]turn)}
	}
	if _, taken := s.waiting[p.turn]; taken {
		over.Push(w)
		return over
	}
	if p.turn > s.next {
		s.waiting[p.turn] = turn{w, time.AfterFunc(h.cfg.turn, func() { h.late(s, p.turn, w) })}
		return over
	}
	line.push(w)
	for s.next = max(s.next, p.turn+1); ; s.next++ {
		next := s.take(s.next)
		if next == nil {
			return over
		}
		line.push(next)
	}
}

// take takes the block of a turn out, nil if none waits; mu is held.
func (s *session) take(n uint64) *blocks.Work {
	t, waits := s.waiting[n]
	if waits {
		t.late.Stop()
		delete(s.waiting, n)
	}
	return t.Work
}

// takeAll moves all blocks that wait to a queue; mu is held.
func (s *session) takeAll(to *blocks.Queue) {
	for n := range s.waiting {
		to.Push(s.take(n))
	}
}

// late ends a block that has waited for too long.
func (h *Host) late(s *session, n uint64, w *blocks.Work) {
	h.mu.Lock()
	waits := s.waiting[n].Work == w
	if waits {
		s.take(n)
	}
	h.mu.Unlock()
	if waits {
		w.End(errTurn)
	}
}

// takeAll takes all blocks out that no process has begun; mu is held.
func (h *Host) takeAll() (taken blocks.Queue) {
	for i := range h.lines {
		h.lines[i].take(func(*program) bool { return true }, &taken)
	}
	for _, s := range h.sessions {
		s.takeAll(&taken)
		s.series = "" // another process begins anew
	}
	return taken
}

// pop returns the next block for a guest: of the model and of its companions by turns, so that neither
// waits for more than one of the other; mu is held.
func (h *Host) pop(g *guest) (w *blocks.Work) {
	for range h.lines {
		w = h.lines[h.turn].pop(g)
		if h.turn = 1 - h.turn; w != nil {
			break
		}
	}
	return w
}
