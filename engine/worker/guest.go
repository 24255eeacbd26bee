package worker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/internal/link"
)

// guest is a process that speaks. Two goroutines serve it: one reads, and one has blocks
// computed, in order.
type guest struct {
	process *process
	host    *Host
	socket  *net.UnixConn
	conn    *link.Conn
	pid     int
	info    *info
	idle    chan struct{} // closed when no block is computed any more

	stopping sync.Mutex // guards the three below
	end      func()     // kills the process, or cuts off what has none of its own
	over     bool       // it has ended: its pid may be another's soon
	why      error      // it was ended, the first reason

	// Guarded by the host's mu.
	states map[*state]struct{} // it has
	runs   map[uint64]bool     // it knows
	tells  []link.Message      // it is to be sent: runs and sessions that have ended
	gone   bool                // the link has ended
	left   error               // it has left the host, and why

	flight []*flight     // the blocks that it computes, the oldest first
	passed *blocks.Work  // was computed, and its results are not passed on
	took   time.Duration // computing the last one
	watch  *blocks.Watch // for the answer to the oldest, or that it reads what it is sent
}

// flight is a block on its way through a guest.
type flight struct {
	id      uint64
	work    *blocks.Work
	begun   bool         // the guest is being told of it: it may answer
	sent    bool         // the guest was told of it
	unasked bool         // it was told that nobody wants it
	answer  *link.Answer // nil before there is one
}

func newGuest(p *process, socket *net.UnixConn, pid int, end func()) *guest {
	h := p.host
	g := &guest{
		process: p, host: h, socket: socket, pid: pid, end: end, runs: make(map[uint64]bool), states: make(map[*state]struct{}),
		idle: make(chan struct{}), took: aheadWithin,
		conn: link.New(socket, link.Config{Heap: h.heap, Pool: h.pool, Quota: h.results}),
	}
	if end == nil {
		g.end = g.conn.Close
	}
	g.watch = blocks.NewWatch(g.checkDeadline)
	h.mu.Lock()
	p.guest = g
	h.mu.Unlock()
	return g
}

// stop ends the guest. Where there is a reason,
// what the guest still says does not count.
func (g *guest) stop(why error) {
	g.stopping.Lock()
	defer g.stopping.Unlock()
	g.why = cmp.Or(g.why, why)
	if !g.over {
		g.end()
	}
}

// endWithHost asks the guest to end, when the host is closed, and kills it if it does not.
func (g *guest) endWithHost() {
	_ = g.socket.CloseWrite()
	g.host.mu.Lock()
	defer g.host.mu.Unlock()
	time.AfterFunc(g.host.cfg.end, func() { g.stop(nil) }) // that has no effect where it has ended
}

// killGroup kills what the process has started. The process itself has not been waited for, so
// that its pid is not yet another's.
func (g *guest) killGroup() {
	g.stop(nil)
	g.stopping.Lock()
	defer g.stopping.Unlock()
	g.over = true
}

// talk greets the guest and reads what it says, until it ends (nil) or breaks the protocol.
func (g *guest) talk() (err error) {
	defer func() {
		g.host.mu.Lock()
		g.gone = true
		g.host.more.Broadcast()
		g.watch.Clear()
		g.host.mu.Unlock()
		if g.info == nil {
			close(g.idle)
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
	}()
	own := link.Greeting{Version: g.host.cfg.Version, Role: "worker"}
	if _, err := link.Greet(g.socket, helloWait, own, func(int64) int64 { return g.host.cfg.MemoryBytes }); err != nil {
		return err
	}
	late := time.AfterFunc(blockWait, func() { g.stop(fmt.Errorf("it did not load in %v", blockWait)) })
	defer late.Stop()
	for {
		m, err := g.conn.Recv()
		if err != nil {
			return err
		}
		switch m := m.(type) {
		case *link.Ready:
			if g.info != nil {
				return errors.New("it said twice that it is ready")
			}
			late.Stop()
			info, err := parseInfo(g.host.cfg.Name, m.JSON)
			if err == nil {
				err = g.host.join(g, info)
			}
			if err != nil {
				return err
			}
			go g.work() // ends when the link does; idle says so
			g.process.reportStart(nil)
		case *link.Answer:
			if err := g.answered(m); err != nil {
				return err
			}
		case *link.Kept:
			var k kept
			if err := json.Unmarshal(m.JSON, &k); err != nil {
				return fmt.Errorf("%w: kept: %w", link.ErrMessage, err)
			}
			g.host.mu.Lock()
			g.host.keep(k)
			g.host.mu.Unlock()
		default:
			return fmt.Errorf("%w: a worker does not send kind %d", link.ErrMessage, link.KindOf(m))
		}
	}
}

// answered notes the answer to a block.
func (g *guest) answered(a *link.Answer) error {
	g.host.mu.Lock()
	defer g.host.mu.Unlock()
	at := slices.IndexFunc(g.flight, func(f *flight) bool { return f.id == a.ID && f.begun && f.answer == nil })
	if at < 0 {
		return fmt.Errorf("%w: an answer that nobody waits for, to block %d", link.ErrMessage, a.ID)
	}
	g.flight[at].answer = a
	g.host.more.Broadcast()
	return nil
}

// work has blocks computed. The results of one are passed on while the next is computed.
func (g *guest) work() {
	defer close(g.idle)
	for pass := (func())(nil); ; {
		switch f := g.next(pass == nil); {
		case f != nil && f.answer == nil:
			g.send(f)
		case f != nil:
			r, err := g.host.accept(g, f.work, f.answer)
			if err != nil {
				g.stop(err) // the block is computed until the guest has left
				return
			}
			g.finished(f, r.times.Compute)
			pass = func() { g.pass(f.work, r) }
		case pass != nil:
			pass()
			pass = nil
		default:
			return
		}
	}
}

// finished notes that the guest has computed a block, or does not. The next one, which it has already, is due
// as if it began only now. It reports whether the block has not ended with the guest.
func (g *guest) finished(f *flight, took time.Duration) bool {
	g.host.mu.Lock()
	defer g.host.mu.Unlock()
	oldest := g.flight[0] == f
	g.flight = slices.DeleteFunc(g.flight, func(other *flight) bool { return other == f })
	if g.took = took; f.answer != nil {
		g.passed = f.work
	}
	switch {
	case len(g.flight) == 0:
		g.watch.Clear()
	case !oldest:
	case !g.flight[0].unasked:
		g.watch.Set(g.host.cfg.block)
	case !f.unasked: // else those of a run share the time
		g.watch.Set(g.host.cfg.obey)
	}
	return g.left == nil
}

// pass passes results on.
func (g *guest) pass(w *blocks.Work, r result) {
	g.host.mu.Lock()
	g.passed = nil
	left := g.left != nil
	g.host.mu.Unlock()
	if !left && r.err == nil {
		w.Give(r.outs, r.release)
	} else {
		r.release()
	}
	if !left { // else w failed with it
		w.Done(r.err, r.times)
	}
}

// next returns a block that was answered, or takes the next one for the guest. It returns nil
// if there is neither: where it may wait, only when the guest has left. Where it may not, it
// looks for no answers. Runs that have ended are told before.
func (g *guest) next(wait bool) *flight {
	g.host.mu.Lock()
	defer g.host.mu.Unlock()
	for {
		at := slices.IndexFunc(g.flight, func(f *flight) bool { return f.answer != nil })
		idle := len(g.flight) == 0
		switch {
		case at >= 0 && wait:
			return g.flight[at]
		case g.gone:
			return nil
		case len(g.tells) > 0:
			m := g.tells[0]
			g.tells = g.tells[1:]
			if idle {
				g.watch.Set(g.host.cfg.obey)
			}
			g.host.mu.Unlock()
			_ = g.conn.Send(m) // an error is Recv's too
			g.host.mu.Lock()
			if idle {
				g.watch.Clear()
			}
			continue
		}
		var w *blocks.Work
		if idle || len(g.flight) < g.info.Blocks && g.took < aheadWithin && g.host.waiting == 0 {
			w = g.host.pop(g)
		}
		switch {
		case w == nil && !wait:
			return nil
		case w == nil:
			if !idle {
				g.host.more.Wait()
				continue
			}
			g.host.waiting++
			g.host.more.Wait()
			g.host.waiting--
			continue
		}
		p := w.Program.(*program)
		if over := p.over(w); over != nil {
			g.host.mu.Unlock()
			w.End(over)
			g.host.mu.Lock()
			continue
		}
		if g.host.info.Stateful && p.owner == nil {
			p.owner = g
		}
		f := &flight{id: g.host.blockIDs.Add(1), work: w}
		g.flight = append(g.flight, f)
		return f
	}
}

// send tells the guest of the block that next has taken. Where that fails, the block has ended,
// or does with the link.
func (g *guest) send(f *flight) {
	p := f.work.Program.(*program)
	run := f.work.Context()
	m, err := g.host.message(f.id, f.work)
	g.host.mu.Lock()
	fresh := !g.runs[p.run]
	g.host.mu.Unlock()
	if fresh && err == nil {
		m.Flags, m.JSON, err = g.conn.Fit(p.json, func(n int64) (*link.Block, error) { return g.conn.New(run, nil, n) })
	}
	if err != nil {
		if g.finished(f, aheadWithin) {
			f.work.Done(err, blocks.Times{})
		}
		return
	}
	g.host.mu.Lock()
	g.runs[p.run], f.begun = true, true
	if g.flight[0] == f {
		g.watch.Set(g.host.cfg.block) // from now on: a guest may not read
	}
	g.host.mu.Unlock()
	if fresh && p.state == nil {
		context.AfterFunc(run, func() { g.leaveRun(p.run) })
	}
	if err := g.conn.Send(m); err != nil {
		g.stop(err)
		return
	}
	g.host.mu.Lock()
	f.sent = true
	g.host.mu.Unlock()
	if run.Err() != nil {
		g.cancel(run)
	}
}

// leaveRun is called when a run ends that the guest knows.
func (g *guest) leaveRun(id uint64) {
	g.host.mu.Lock()
	defer g.host.mu.Unlock()
	g.forget(id)
}

// forget has the guest told that a run has ended, if it knows it; mu is held.
func (g *guest) forget(id uint64) {
	if !g.gone && g.runs[id] {
		delete(g.runs, id)
		g.tells = append(g.tells, &link.End{Head: link.Head{ID: id}})
		g.host.more.Broadcast()
	}
}

// cancel says that the blocks of a run are not wanted any more, if they are computed.
func (g *guest) cancel(run context.Context) {
	g.host.mu.Lock()
	var told []uint64
	for i, f := range g.flight {
		if f.work.Context() != run || f.unasked {
			continue
		}
		if f.sent { // else send comes here again
			f.unasked = true
			told = append(told, f.id)
		}
		if i == 0 && !g.watch.Due.IsZero() {
			g.watch.Set(g.host.cfg.obey)
		}
	}
	g.host.mu.Unlock()
	for _, id := range told {
		_ = g.conn.Send(&link.Cancel{Head: link.Head{ID: id}}) // an error is Recv's too
	}
}

// checkDeadline ends a guest whose block takes too long.
func (g *guest) checkDeadline() {
	g.host.mu.Lock()
	late, why := g.watch.Late(), fmt.Errorf("a block took more than %v", g.host.cfg.block)
	if len(g.flight) > 0 && g.flight[0].unasked {
		why = fmt.Errorf("it went on for %v with a block that was cancelled", g.host.cfg.obey)
	}
	g.host.mu.Unlock()
	if late {
		g.stop(why)
	}
}
