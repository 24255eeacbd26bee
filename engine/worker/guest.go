package worker

import (
	"cmp"
	"context"
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
// computed, one after the other.
type guest struct {
	process *process
	socket  *net.UnixConn
	conn    *link.Conn
	pid     int
	info    *info
	answers chan *link.Answer // closed when the link ends
	idle    chan struct{}     // closed when no block is computed any more

	stopping sync.Mutex // guards the three below
	end      func()     // kills the process; nil without one
	over     bool       // it has ended: its pid may be another's soon
	why      error      // it was ended, the first reason

	// Guarded by the host's mu.
	queue blocks.Queue    // only it may compute these
	begun []*blocks.Work  // what it may touch: that which it computes, or answered last
	runs  map[uint64]bool // it knows
	tells []link.Message  // it is to be sent: runs and sessions that have ended
	gone  bool            // the link has ended
	left  error           // it has left the host, and why

	id      uint64       // of the block that it computes; 0 without one
	block   *blocks.Work // likewise
	sent    bool         // it was told of it
	due     time.Time    // for the answer
	unasked bool         // it was told that nobody wants it
	clock   *time.Timer  // for due
}

func newGuest(p *process, socket *net.UnixConn, pid int, end func()) *guest {
	h := p.host
	g := &guest{
		process: p, socket: socket, pid: pid, end: end, runs: make(map[uint64]bool),
		answers: make(chan *link.Answer, 1), idle: make(chan struct{}),
		conn: link.New(socket, link.Config{Heap: h.heap, Pool: h.pool, Quota: h.results}),
	}
	g.clock = time.AfterFunc(time.Hour, g.overdue)
	g.clock.Stop()
	h.mu.Lock()
	p.guest = g
	h.mu.Unlock()
	return g
}

// stop kills the process, or cuts off what has none of its own. Where there is a reason,
// what the guest still says does not count.
func (g *guest) stop(why error) {
	g.stopping.Lock()
	defer g.stopping.Unlock()
	g.why = cmp.Or(g.why, why)
	switch {
	case g.over:
	case g.end != nil:
		g.end()
	default:
		g.conn.Close()
	}
}

// endWithHost asks the guest to end when the host is closed, and kills it if it does not. It
// returns when the guest is over.
func (g *guest) endWithHost(over <-chan struct{}) {
	select {
	case <-over:
		return
	case <-g.process.host.ctx.Done():
	}
	_ = g.socket.CloseWrite() // it is asked to end
	h := g.process.host
	h.mu.Lock()
	wait := h.cfg.end
	h.mu.Unlock()
	select {
	case <-over:
	case <-time.After(wait):
		g.stop(nil)
	}
}

// bury is called before the process is waited for, and kills what it has started.
func (g *guest) bury() {
	g.stop(nil)
	g.stopping.Lock()
	defer g.stopping.Unlock()
	g.over = true
}

// talk greets the guest and reads what it says, until it ends (nil) or breaks the protocol.
func (g *guest) talk() (err error) {
	h := g.process.host
	working := false
	defer func() {
		h.mu.Lock()
		g.gone = true
		h.more.Broadcast()
		h.mu.Unlock()
		g.clock.Stop()
		close(g.answers)
		if !working {
			close(g.idle)
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
	}()
	own := link.Greeting{Version: h.cfg.Version, Role: "worker"}
	if _, err := link.Greet(g.socket, helloWait, own, func(int64) int64 { return h.cfg.MemoryBytes }); err != nil {
		return err
	}
	late := time.AfterFunc(loadWait, func() { g.stop(fmt.Errorf("it did not load in %v", loadWait)) })
	defer late.Stop()
	for {
		m, err := g.conn.Recv()
		if err != nil {
			return err
		}
		switch m := m.(type) {
		case *link.Ready:
			if working {
				return errors.New("it said twice that it is ready")
			}
			late.Stop()
			info, err := parseInfo(h.cfg.Name, m.JSON)
			if err != nil {
				return err
			}
			g.info = info
			if err := h.join(g); err != nil {
				g.info = nil
				return err
			}
			working = true
			go g.work() // ends when answers is closed; idle says so
			g.process.tell(nil)
		case *link.Answer:
			select {
			case g.answers <- m:
			default:
				return fmt.Errorf("%w: an answer that nobody waits for", link.ErrMessage)
			}
		case *link.Kept:
			if err := h.keep(m.JSON); err != nil {
				return err
			}
		default:
			return fmt.Errorf("%w: a worker does not send kind %d", link.ErrMessage, link.KindOf(m))
		}
	}
}

// work has blocks computed. The results of one are passed on while the next is computed.
func (g *guest) work() {
	defer close(g.idle)
	h := g.process.host
	for pass := (func())(nil); ; {
		w := g.next(pass == nil)
		if w == nil && pass == nil {
			return
		}
		sent := w != nil && g.send(w)
		if pass != nil {
			pass()
			pass = nil
		}
		if !sent {
			continue
		}
		a, ok := <-g.answers
		if !ok {
			return
		}
		var r result
		err := fmt.Errorf("%w: an answer to block %d, which is not computed", link.ErrMessage, a.ID)
		if a.ID == g.id {
			r, err = h.accept(g, w, a)
		}
		if err != nil {
			g.stop(err) // w stays among what it may touch
			for range g.answers {
			}
			return
		}
		g.rest()
		pass = func() { g.pass(w, r) }
	}
}

// rest notes that the guest computes nothing.
func (g *guest) rest() {
	g.process.host.mu.Lock()
	defer g.process.host.mu.Unlock()
	g.unwind()
	g.block, g.id, g.sent, g.unasked = nil, 0, false, false
}

// pass passes results on.
func (g *guest) pass(w *blocks.Work, r result) {
	h := g.process.host
	h.mu.Lock()
	at := slices.Index(g.begun, w)
	if at >= 0 {
		g.begun = slices.Delete(g.begun, at, at+1)
	}
	h.mu.Unlock()
	if at < 0 { // the guest has left, and w failed with it
		r.release()
		return
	}
	if r.err == nil {
		w.Give(r.outs, r.release)
	} else {
		r.release()
	}
	w.Done(r.err, r.times)
}

// next takes the next block for the guest, nil if there is none: where it may wait, only
// when the guest has left. Runs that have ended are told before.
func (g *guest) next(wait bool) *blocks.Work {
	h := g.process.host
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		if g.gone {
			return nil
		}
		if len(g.tells) > 0 {
			m := g.tells[0]
			g.tells = g.tells[1:]
			g.wind(h.cfg.obey)
			h.mu.Unlock()
			_ = g.conn.Send(m) // an error is Recv's too
			h.mu.Lock()
			g.unwind()
			continue
		}
		w := g.queue.Pop()
		if w == nil {
			w = h.pop()
		}
		switch {
		case w == nil && !wait:
			return nil
		case w == nil:
			h.more.Wait()
			continue
		}
		p := w.Program.(*program)
		if over := p.over(w); over != nil {
			h.mu.Unlock()
			w.End(over)
			h.mu.Lock()
			continue
		}
		if h.info.Stateful && p.owner == nil {
			p.owner = g
			rest := h.queue.Take(w.Context())
			g.queue.Append(&rest)
		}
		g.begun = append(g.begun, w)
		g.block, g.id = w, h.blockIDs.Add(1)
		return w
	}
}

// send tells the guest of the block that next has taken. It reports whether an answer is
// to be waited for, else the block has ended.
func (g *guest) send(w *blocks.Work) bool {
	h, p := g.process.host, w.Program.(*program)
	run := w.Context()
	m, err := h.message(g.id, w)
	h.mu.Lock()
	fresh := !g.runs[p.run]
	h.mu.Unlock()
	if fresh && err == nil {
		if m.JSON = p.json; len(p.json) > link.PacketBytes/2 {
			var b *link.Block
			if b, err = g.conn.New(run, int64(len(p.json))); err == nil {
				m.Flags, m.JSON = link.Long, link.AppendRange(nil, b.Range(int64(copy(b.Bytes(), p.json))))
				g.conn.Own(b)
			}
		}
	}
	if err != nil {
		g.rest()
		g.pass(w, result{err: err, release: func() {}})
		return false
	}
	h.mu.Lock()
	g.runs[p.run] = true
	g.wind(h.cfg.block) // from now on: a guest may not read
	h.mu.Unlock()
	if fresh {
		context.AfterFunc(run, func() { g.leaveRun(run, p.run) })
	}
	if err := g.conn.Send(m); err != nil {
		g.stop(err)
		return true // until the link ends
	}
	h.mu.Lock()
	g.sent = true
	h.mu.Unlock()
	if run.Err() != nil {
		g.cancel(run)
	}
	return true
}

// wind has the answer, or that the guest reads, be due in a while; the host's mu is held.
func (g *guest) wind(d time.Duration) {
	g.due = time.Now().Add(d)
	g.clock.Reset(d)
}

// unwind ends that; the host's mu is held.
func (g *guest) unwind() {
	g.clock.Stop()
	g.due = time.Time{}
}

// leaveRun is called when a run ends that the guest knows.
func (g *guest) leaveRun(run context.Context, id uint64) {
	h := g.process.host
	g.cancel(run)
	h.mu.Lock()
	defer h.mu.Unlock()
	if !g.gone {
		delete(g.runs, id)
		g.tells = append(g.tells, &link.End{Head: link.Head{ID: id}})
		h.more.Broadcast()
	}
}

// cancel says that the block of a run is not wanted any more, if it is computed.
func (g *guest) cancel(run context.Context) {
	h := g.process.host
	h.mu.Lock()
	on := g.block != nil && !g.due.IsZero() && g.block.Context() == run && !g.unasked
	id, sent := g.id, g.sent
	if on {
		g.unasked = sent // else send comes here again
		g.wind(h.cfg.obey)
	}
	h.mu.Unlock()
	if on && sent {
		_ = g.conn.Send(&link.Cancel{Head: link.Head{ID: id}}) // an error is Recv's too
	}
}

// overdue ends a guest whose block takes too long.
func (g *guest) overdue() {
	h := g.process.host
	h.mu.Lock()
	late, why := !g.due.IsZero() && !time.Now().Before(g.due), fmt.Errorf("a block took more than %v", h.cfg.block)
	if g.unasked {
		why = fmt.Errorf("it went on for %v with a block that was cancelled", h.cfg.obey)
	}
	h.mu.Unlock()
	if late {
		g.stop(why)
	}
}
