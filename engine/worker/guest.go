package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/internal/link"
)

// guest is a process that speaks. One goroutine reads it, and passes results on; whoever has
// something to tell it sends that.
type guest struct {
	process *process
	host    *Host
	socket  *net.UnixConn
	conn    *link.Conn
	pid     int
	info    *info

	stopping sync.Mutex // guards the three below
	end      func()     // kills the process, or cuts off what has none of its own
	over     bool       // it has ended: its pid may be another's soon
	why      error      // it was ended, the first reason

	// Guarded by the host's mu.
	states  map[*state]struct{} // it has
	runs    map[uint64]bool     // it knows
	tells   []link.Message      // it is to be sent: runs and sessions that have ended
	telling bool                // somebody sends
	gone    bool                // the link has ended
	left    error               // it has left the host, and why

	flight []*flight     // the blocks that it has, the oldest first
	took   time.Duration // computing the last one
	watch  *blocks.Watch // for the first answer that is due, or that it reads what it is sent

	returning sync.Mutex   // guards the two below
	returned  []link.Range // its ranges again, of which it is not told yet
	bytes     uint64       // of these
}

// flight is a block on its way through a guest.
type flight struct {
	id      uint64
	work    *blocks.Work
	sent    bool      // the guest was told of it
	unasked bool      // it was told that nobody wants it
	due     time.Time // when it is to be answered; zero while it waits for those before it
}

func newGuest(p *process, socket *net.UnixConn, pid int, end func()) *guest {
	h := p.host
	g := &guest{
		process: p, host: h, socket: socket, pid: pid, end: end, runs: make(map[uint64]bool), states: make(map[*state]struct{}),
		took: aheadWithin,
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
		g.watch.Clear()
		g.host.mu.Unlock()
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
			g.process.reportStart(nil)
			g.host.mu.Lock()
			g.tell()
			g.host.mu.Unlock()
		case *link.Answer:
			if err := g.answered(m); err != nil {
				return err
			}
		case *link.Kept:
			g.host.mu.Lock()
			err := g.host.keep(m.JSON)
			g.host.mu.Unlock()
			if err != nil {
				return err
			}
		default:
			return fmt.Errorf("%w: a worker does not send kind %d", link.ErrMessage, link.KindOf(m))
		}
	}
}

// answered passes the results of a block on, after what the guest may do meanwhile.
func (g *guest) answered(a *link.Answer) error {
	h := g.host
	h.mu.Lock()
	at := slices.IndexFunc(g.flight, func(f *flight) bool { return f.id == a.ID })
	if at < 0 {
		h.mu.Unlock()
		return fmt.Errorf("%w: an answer that nobody waits for, to block %d", link.ErrMessage, a.ID)
	}
	f := g.flight[at]
	if a.Code == 0 && len(a.JSON) > 0 && len(h.companions) > 0 && f.work.Program.(*program).state == nil { // charged before another call is admitted
		if err := h.keep(a.JSON); err != nil {
			h.mu.Unlock()
			return err
		}
	}
	h.mu.Unlock()
	r, err := h.accept(g, f.work, a)
	if err != nil {
		return err // the block is computed until the guest has left
	}
	h.mu.Lock()
	own := g.finished(f, r.times.Compute)
	g.tell()
	h.mu.Unlock()
	if own && r.err == nil {
		f.work.Give(r.outs, r.release)
	} else {
		r.release()
	}
	if own {
		f.work.Done(r.err, r.times)
		runtime.Gosched() // lets the goroutine that waits for the results run on this thread: another wakes more slowly
	}
	return nil
}

// atOnce is how many blocks the guest computes at the same time: the oldest.
func (g *guest) atOnce() int { return max(1, g.info.Concurrency) }

// finished notes that the guest has computed a block, or does not. The next one, which it may have already, is
// due as if it began only now. It reports whether the block has not ended with the guest; mu is held.
func (g *guest) finished(f *flight, took time.Duration) bool {
	at, last := slices.Index(g.flight, f), g.atOnce()-1
	if at < 0 {
		return false
	}
	g.flight = slices.Delete(g.flight, at, at+1)
	g.took = took
	if at <= last && last < len(g.flight) {
		if next := g.flight[last]; next.unasked && f.unasked { // those of a run share the time
			next.due = f.due
		} else {
			g.begins(next)
		}
	}
	g.wait()
	return true
}

// begins notes that the guest computes a block from now on; mu is held.
func (g *guest) begins(f *flight) {
	wait := g.host.cfg.block
	if f.unasked {
		wait = g.host.cfg.obey
	}
	f.due = time.Now().Add(wait)
}

// wait waits for the answer that is due first; mu is held.
func (g *guest) wait() {
	var due time.Time
	for _, f := range g.flight {
		if due.IsZero() || !f.due.IsZero() && f.due.Before(due) {
			due = f.due
		}
	}
	switch {
	case due.Equal(g.watch.Due):
	case due.IsZero():
		if !g.telling { // else it is to read yet
			g.watch.Clear()
		}
	default:
		g.watch.Set(due)
	}
}

// tell sends the guest what there is, unless somebody does already: runs that have ended, and blocks, as many as
// it takes. It waits for nothing: where the guest does not read, a goroutine goes on. mu is held, but given away
// meanwhile.
func (g *guest) tell() {
	if !g.telling {
		g.telling = true
		m, f := g.next()
		g.send(m, f, false)
	}
}

// send sends m, which tells of f, and what comes after it. If it may not wait for the guest, it leaves that to a
// goroutine. mu is held, but given away meanwhile.
func (g *guest) send(m link.Message, f *flight, wait bool) {
	h := g.host
	for ; m != nil; m, f = g.next() {
		h.mu.Unlock()
		done := g.sendOne(m, f, wait)
		h.mu.Lock()
		if g.gone { // f ends with it
			return
		}
		if !done {
			g.sendLater(m, f)
			return
		}
		if f != nil {
			f.sent = true
			if run := f.work.Context(); run.Err() != nil {
				go g.cancel(run) // ends when the guest reads, or has ended
			}
		}
	}
	g.telling = false
	g.wait()
}

// sendLater is send on a goroutine, which ends when the guest has read, or has ended; mu is held.
func (g *guest) sendLater(m link.Message, f *flight) {
	h := g.host
	h.all.Go(func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if len(g.flight) == 0 {
			g.watch.Set(time.Now().Add(h.cfg.obey))
		}
		g.send(m, f, true)
	})
}

// sendOne sends a message, and reports whether it is done with it, as it always is where it may wait. It ends
// a block for whose text there is no memory, and a guest that cannot be told.
func (g *guest) sendOne(m link.Message, f *flight, wait bool) (done bool) {
	run, ok := m.(*link.Run)
	if !wait {
		return (!ok || len(run.JSON) <= link.PacketBytes/2) && g.conn.TrySend(m)
	}
	if ok {
		ctx := f.work.Context()
		flags, text, err := g.conn.Fit(run.JSON, func(n int64) (*link.Block, error) { return g.conn.New(ctx, nil, n) })
		if err != nil {
			g.host.mu.Lock()
			delete(g.runs, run.Run)
			own := g.finished(f, aheadWithin)
			g.host.mu.Unlock()
			if own {
				f.work.Done(err, blocks.Times{})
			}
			return true
		}
		run.Flags, run.JSON = run.Flags|flags, text
	}
	if err := g.conn.Send(m); err != nil {
		g.stop(err)
	}
	return true
}

// next takes what the guest is to be told next, nil for nothing. A block that is not computed any more ends; mu is
// held, but given away meanwhile.
func (g *guest) next() (link.Message, *flight) {
	h := g.host
	for !g.gone {
		if len(g.tells) > 0 {
			m := g.tells[0]
			g.tells = g.tells[1:]
			return m, nil
		}
		n := len(g.flight)
		if n >= g.atOnce() && (n >= g.info.Blocks || g.took >= aheadWithin) {
			break
		}
		w := h.pop(g)
		if w == nil {
			break
		}
		p := w.Program.(*program)
		f := &flight{id: h.blockIDs.Add(1), work: w}
		var m *link.Run
		err := p.over(w)
		if err == nil {
			m, err = h.message(f.id, w)
		}
		if err != nil {
			h.mu.Unlock()
			w.End(err)
			h.mu.Lock()
			continue
		}
		if h.info.Stateful && p.owner == nil {
			p.owner = g
		}
		switch {
		case g.runs[p.run]:
			m.JSON = nil
		case m.Flags&link.Only == 0:
			g.runs[p.run] = true
			if p.state == nil {
				context.AfterFunc(w.Context(), func() {
					h.mu.Lock()
					defer h.mu.Unlock()
					g.forget(p.run)
				})
			}
		}
		if g.flight = append(g.flight, f); n < g.atOnce() {
			g.begins(f) // from now on: a guest may not read
			g.wait()
		}
		return m, f
	}
	return nil, nil
}

// forget has the guest told that a run has ended, if it knows it; mu is held.
func (g *guest) forget(id uint64) {
	if !g.gone && g.runs[id] {
		delete(g.runs, id)
		g.tells = append(g.tells, &link.End{Head: link.Head{ID: id}})
		g.tell()
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
		if i < g.atOnce() {
			f.due = time.Now().Add(g.host.cfg.obey)
		}
	}
	g.wait()
	g.host.mu.Unlock()
	for _, id := range told {
		_ = g.conn.Send(&link.Cancel{Head: link.Head{ID: id}}) // an error is Recv's too
	}
}

// checkDeadline ends a guest whose block takes too long.
func (g *guest) checkDeadline() {
	g.host.mu.Lock()
	late, why := g.watch.Late(), fmt.Errorf("a block took more than %v", g.host.cfg.block)
	if slices.ContainsFunc(g.flight, func(f *flight) bool { return f.unasked && f.due.Equal(g.watch.Due) }) {
		why = fmt.Errorf("it went on for %v with a block that was cancelled", g.host.cfg.obey)
	}
	g.host.mu.Unlock()
	if late {
		g.stop(why)
	}
}

// giveBack makes a block the guest's again. It is told of several at once: each message wakes it.
func (g *guest) giveBack(b *link.Block) {
	whole := b.Range(int64(len(b.Bytes())))
	g.conn.Own(b)
	var all []link.Range
	g.returning.Lock()
	g.returned, g.bytes = append(g.returned, whole), g.bytes+whole.Len
	if len(g.returned) >= returnedRanges || g.bytes >= uint64(g.host.cfg.MemoryBytes)/returnedShare/uint64(g.host.cfg.Processes) {
		all, g.returned, g.bytes = g.returned, nil, 0
	}
	g.returning.Unlock()
	if m := (&link.Give{Ranges: all}); all != nil && !g.conn.TrySend(m) {
		go func() { _ = g.conn.Send(m) }() // ends when the guest reads, or has ended
	}
}
