// Package session runs one stream.Machine over a connection that carries frames, the same on
// both sides: it reads and places, encodes, sums and writes, keeps time, and hands events to
// its holder. A session outlives its connection, and may be carried by another one.
//
// It refuses to compute, and to know models, files or how frames become bytes. The
// reader never waits on the writer: what has to be sent is noted in the machine, which
// is bounded, and the writer takes it from there. It owns no payload bytes; views on
// the way out are held until the connection has let go of them.
package session

import (
	"context"
	"errors"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/fault"
	"github.com/tensorferry/tensorferry/stream"
)

// Conn carries frames. Send side: Send. Receive side: Recv, Free. One goroutine per
// side. When the connection ends, Send and Recv return.
type Conn interface {
	// Send sends a frame, which it borrows. The caller hands over held, which is nil if
	// nobody waits for the payload: Release runs once, also when Send fails. io.EOF
	// means that Recv tells why.
	Send(f *frame.Frame, held interface{ Release() }) error
	// Recv lends the next frame until the next Recv or Free. It returns io.EOF after
	// the peer's last frame, and a *frame.Error for bytes that are not a frame.
	Recv() (*frame.Frame, error)
	// Free ends the loan of the last frame.
	Free()
	// Clear reports whether Send would not wait for the peer with a payload of n bytes.
	Clear(n int) bool
}

// Handler is told what happens, in order, with the session locked: it must be
// quick, must not block and must not call Do. It may call the machine.
type Handler interface {
	Event(m *stream.Machine, now stream.Instant, e stream.Event)
	// Received is called after each frame, and its events.
	Received(m *stream.Machine)
}

// ErrPeerClosed is what a session ends with when the peer ended it in order.
var ErrPeerClosed = errors.New("session: closed by the peer")

// Session is one side of a session. Do and Stop are safe for concurrent use.
type Session struct {
	// Comes, if not nil, reports whether the peer sends, if slowly: a sign of life, though no
	// frame is whole yet. It is set before Carry, and called with the session locked.
	Comes func() bool

	handler Handler
	start   time.Time

	mu sync.Mutex
	m  *stream.Machine // guarded by mu
	// timer runs tick when the machine's next moment has come; guarded by mu.
	timer *time.Timer
	next  stream.Instant // when timer fires; 0: it does not; guarded by mu
	over  bool           // no goroutine is started, the timer stays still; guarded by mu
	ended bool           // the peer has sent its last frame; guarded by mu
	heard bool           // a frame has come since the last tick; guarded by mu
	// reading: a frame is being received; then and after, unless nil, are to run on its reader's
	// goroutine. following: a goroutine that has passed its turn on waits for the next, which saves a
	// new one whose stack would have to grow. It ends when no call is open. All guarded by mu.
	reading, following bool
	then               func(*Turn)
	after              func()
	turn               chan carried // zero: the follower ends
	claim              stream.Claim // of whoever reads
	// writing: a writer has been started and has not yet found nothing to send. Then it
	// waits for wake, or ends if no call is open: an idle session does without its stack.
	// Both guarded by mu.
	writing, waiting bool
	wake             chan struct{}
	writer           func()  // write, made once: a go statement would make it for each frame
	lanes            []*lane // by number, from 1 on; nil where there is none; guarded by mu

	sending chan struct{} // holds a token while somebody sends
	// Guarded by sending.
	out  frame.Frame
	conn Conn         // nil: nothing can be sent
	lost chan<- error // of Carry

	life context.Context // ends with Stop
	stop context.CancelCauseFunc

	sendingSince atomic.Int64 // nanoseconds since start plus 1; 0 when not in Send
	reader       sync.WaitGroup
	work         sync.WaitGroup // writers, and readers of lanes
}

// carried is what reads of a connection need.
type carried struct {
	conn Conn
	lost chan<- error
}

// New returns a session that begins with Carry.
func New(cfg stream.Config, h Handler) *Session {
	s := &Session{
		handler: h, start: time.Now(), m: stream.New(cfg, 0),
		sending: make(chan struct{}, 1), wake: make(chan struct{}, 1), turn: make(chan carried, 1),
	}
	s.life, s.stop = context.WithCancelCause(context.Background())
	s.writer = s.write
	return s
}

func (s *Session) now() stream.Instant { return stream.Instant(time.Since(s.start)) }

// Carry has conn carry the session. It starts a reader goroutine and, whenever there is
// something to send, a writer, which waits while a call is open; they end with conn, or with
// the session. If conn ends first, lost gets the reason, and another connection may carry the
// session: what was on its way is not sent again. Carry waits until the connection before is
// not used.
func (s *Session) Carry(conn Conn) (lost <-chan error) {
	s.reader.Wait()
	l := make(chan error, 1)
	s.sending <- struct{}{}
	s.conn, s.lost = conn, l
	<-s.sending
	s.mu.Lock()
	if s.timer == nil {
		s.timer = time.AfterFunc(time.Hour, s.tick)
	}
	s.schedule()
	s.mu.Unlock()
	s.reader.Add(1)
	go s.read(carried{conn, l})
	s.nudge()
	return l
}

// Life returns a context that ends with the session.
func (s *Session) Life() context.Context { return s.life }

// Stopped is closed when the session has ended; Cause then says why.
func (s *Session) Stopped() <-chan struct{} { return s.life.Done() }

// Cause returns what ended the session; only after Stopped.
func (s *Session) Cause() error { return context.Cause(s.life) }

// Stop ends the session: the first cause, which is not nil, stands. It does not wait.
func (s *Session) Stop(cause error) { s.stop(cause) }

// Wait waits until the session's goroutines have ended, and then closes the
// machine with code and text, so that every call gets its last event. The
// caller has stopped the session and ended its connection before.
func (s *Session) Wait(code frame.Code, text string) {
	<-s.Stopped()
	s.mu.Lock()
	s.over = true
	s.dismiss()
	lanes := s.open()
	s.mu.Unlock()
	for _, l := range lanes {
		l.end(s.Cause())
	}
	s.reader.Wait()
	s.work.Wait()
	s.sending <- struct{}{} // a caller of DoSend may be about to leave
	s.conn = nil
	<-s.sending
	s.mu.Lock()
	defer s.mu.Unlock()
	s.timer.Stop()
	s.m.Close(code, text)
	s.dispatch(s.now())
}

// Do runs f on the machine and then sees to what f caused: events are handed
// out, and what waits to be sent is sent by the writer.
func (s *Session) Do(f func(m *stream.Machine, now stream.Instant)) {
	if s.do(f) {
		s.nudge()
	}
}

// DoSend is Do, except that the caller itself sends the next frame if nobody else
// is sending: a small call then does not wait for the writer to wake up. It may
// block as long as the peer does not read, at most writeStall.
func (s *Session) DoSend(f func(m *stream.Machine, now stream.Instant)) {
	if s.do(f) {
		s.send(-1)
	}
}

// send sends the next frame, unless somebody else is sending. If most is not negative, the caller reads: then
// send leaves to the writer what might wait, all but most bytes, not encoded, of the only open call.
func (s *Session) send(most int) {
	select {
	case s.sending <- struct{}{}:
	default:
		s.nudge()
		return
	}
	sent := true
	if most >= 0 {
		s.mu.Lock()
		st := s.m.Status()
		s.mu.Unlock()
		sent = st.Calls <= 1 && st.Codec == codec.None && s.conn != nil && s.conn.Clear(most)
	}
	if sent {
		s.sendFrame(nil)
	}
	<-s.sending
	// More may wait, or may have come while the writer could not have the lock.
	s.mu.Lock()
	more := !sent || s.m.Pending() || s.ended // or it was the last frame, which the writer sees to
	s.mu.Unlock()
	if more {
		s.nudge()
	}
}

func (s *Session) do(f func(m *stream.Machine, now stream.Instant)) bool {
	s.mu.Lock()
	now := s.now()
	f(s.m, now)
	s.dispatch(now)
	due := s.due()
	s.schedule()
	s.mu.Unlock()
	return due
}

// due reports whether a writer is needed: for a frame, or for the session's end, when the
// peer has ended its side and what the last call waited for, such as a chunk that a lane
// was bringing, has let go. Without a call, it ends the follower. mu is held.
func (s *Session) due() bool {
	idle := (s.ended || s.waiting || s.following) && s.m.Status().Calls == 0
	if idle {
		s.dismiss()
	}
	return s.m.Pending() || idle && (s.ended || s.waiting)
}

// dispatch hands out events until there are none, and has the lanes attended to; mu is held.
func (s *Session) dispatch(now stream.Instant) {
	for {
		e, ok := s.m.Event()
		if !ok {
			s.attend()
			return
		}
		s.handler.Event(s.m, now, e)
	}
}

// nudge has a writer look for what is to be sent; mu is not held.
func (s *Session) nudge() {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.writing || s.over || s.timer == nil: // it looks, or nobody will
	case s.waiting:
		s.writing, s.waiting = true, false
		s.wake <- struct{}{}
	default:
		s.writing = true
		s.work.Add(1)
		go s.writer()
	}
}

// schedule sets the timer to the machine's next moment; mu is held. The timer is
// only ever brought forward: one that runs too early finds nothing due and sets
// itself again, which is cheaper than resetting it for every frame.
func (s *Session) schedule() {
	if s.over || s.timer == nil { // not started yet
		return
	}
	at := s.m.NextTick()
	if s.next != 0 && at >= s.next {
		return
	}
	now := s.now()
	s.next = min(at, now+stream.Instant(writeStall)) // a stalled writer is looked for too
	s.timer.Reset(max(0, time.Duration(s.next-now)))
}

func (s *Session) tick() {
	s.mu.Lock()
	now := s.now()
	s.next = 0
	if s.Comes != nil && s.Comes() {
		if s.m.PeerWaits(now); !s.heard {
			s.m.Waits() // the peer hears nothing else about a frame that takes long
		}
	}
	s.heard = false
	err := s.m.Tick(now)
	s.dispatch(now)
	due := s.due()
	if err == nil {
		s.schedule()
	}
	unread := ""
	if since := s.sendingSince.Load(); since != 0 {
		unread = s.m.Unread(now, stream.Instant(since), stream.Instant(writeStall))
	}
	s.mu.Unlock()
	for l := s.stalled(); l != nil; l = s.stalled() {
		s.retire(l, ErrStalled)
	}
	if err == nil && unread != "" {
		err = &frame.Error{Code: frame.DeadlineExceeded, Text: "the peer has not read for " + unread}
	}
	if err != nil {
		s.Stop(err)
		return
	}
	if due {
		s.nudge()
	}
}

// Turn is a goroutine's turn to read, while it runs what a frame has begun; nil for one that does not read.
type Turn struct {
	session *Session
	from    carried
	after   func()
	passed  bool
}

// Pass has another goroutine read on. The holder of a turn passes it before it waits for anything.
func (t *Turn) Pass() {
	if t == nil || t.passed {
		return
	}
	t.passed = true
	s := t.session
	s.mu.Lock()
	next := s.following
	if next {
		s.following = false
		s.turn <- t.from
	}
	s.mu.Unlock()
	if !next {
		go s.read(t.from)
	}
	t.end()
}

func (t *Turn) end() {
	if t.after != nil {
		t.after()
		t.after = nil
	}
}

// DoSend is Session.DoSend for the holder of a turn, who gives the call at most bytes to send. It leaves to
// the writer what might wait.
func (t *Turn) DoSend(bytes int, f func(m *stream.Machine, now stream.Instant)) {
	if t.passed {
		bytes = -1
	}
	if t.session.do(f) {
		t.session.send(bytes)
	}
}

// Go has f run on a goroutine. While an event of a frame is told, that is the one that has read the
// frame: a small call then waits for nobody to wake up. The session is locked.
func (s *Session) Go(f func(*Turn)) {
	if s.reading && s.then == nil {
		s.then = f
		return
	}
	go f(nil)
}

// After has f, which is quick, run soon and unlocked: on the goroutine that has read a frame while an
// event of that is told, after what Go has it run. The session is locked.
func (s *Session) After(f func()) {
	if s.reading && s.after == nil {
		s.after = f
		return
	}
	go f()
}

// read receives frames, has the machine judge them, and puts chunks at their places. It goes on
// until the connection has ended, or another goroutine reads and this one is not to follow it.
func (s *Session) read(from carried) {
	t := &Turn{session: s}
	for {
		then := s.readOn(from, t)
		if then == nil {
			s.reader.Done()
			return
		}
		if then(t); !t.passed {
			t.end()
			continue
		}
		s.mu.Lock()
		if s.following || s.over || s.m.Status().Calls == 0 {
			s.mu.Unlock()
			return
		}
		s.following = true
		s.work.Add(1)
		s.mu.Unlock()
		from = <-s.turn
		s.work.Done()
		if from.conn == nil {
			return
		}
	}
}

// dismiss ends the follower, if there is one; mu is held.
func (s *Session) dismiss() {
	if s.following {
		s.following = false
		s.turn <- carried{}
	}
}

// readOn reads until there is something to run in a turn, which it begins, or the connection has ended.
func (s *Session) readOn(from carried, t *Turn) (then func(*Turn)) {
	for {
		t.from, t.passed = from, false
		f, err := from.conn.Recv()
		if err != nil {
			var bad *frame.Error
			switch {
			case errors.Is(err, io.EOF):
				s.endOfInput()
			case errors.As(err, &bad):
				s.Stop(bad)
			default:
				select {
				case s.sending <- struct{}{}:
					s.conn = nil // what is to be sent waits for the next one
					<-s.sending
				default: // whoever sends learns it
				}
				lose(from.lost, err)
			}
			return nil
		}
		then, t.after, err = s.receive(f)
		from.conn.Free()
		if err != nil {
			if s.Stop(err); then != nil {
				go then(nil)
			}
			t.end()
			return nil
		}
		if then != nil {
			return then
		}
		t.end()
	}
}

// Why returns why a connection has ended whose context has: gRPC ends the context of an RPC
// that it refuses itself before Recv says why, which Carry's lost gets.
func Why(ctx context.Context, lost <-chan error) error {
	why := context.Cause(ctx)
	if !errors.Is(why, context.Canceled) {
		return why
	}
	select {
	case err := <-lost:
		return err
	case <-time.After(whyWait):
		return why
	}
}

// lose tells why a connection ended: the first reason stands.
func lose(lost chan<- error, err error) {
	select {
	case lost <- err:
	default:
	}
}

// endOfInput notes that the peer sends nothing more. When it was the server, the
// session is over. A client may end its side early and still read: the session
// then lives until its last call has ended.
func (s *Session) endOfInput() {
	server := false
	s.Do(func(m *stream.Machine, now stream.Instant) {
		s.ended = true
		server = m.Status().Server
		m.PeerDone(now)
	})
	if !server {
		s.Stop(ErrPeerClosed)
		return
	}
	s.nudge()
}

func (s *Session) receive(f *frame.Frame) (then func(*Turn), after func(), err error) {
	s.mu.Lock()
	now := s.now()
	s.heard, s.reading = true, true
	err = s.m.Control(now, f)
	s.dispatch(now)
	place := false
	if err == nil && f.HasChunk() {
		place, err = s.m.Claim(now, &f.Chunk, &s.claim)
		s.dispatch(now)
	}
	if place {
		s.mu.Unlock()
		sum, failed := s.claim.Copy(f.Chunk.Data)
		s.mu.Lock()
		now = s.now()
		s.m.Commit(now, &s.claim, sum, failed)
		s.dispatch(now)
	}
	s.handler.Received(s.m)
	then, after, s.then, s.after, s.reading = s.then, s.after, nil, nil, false
	due := s.due()
	s.schedule()
	s.mu.Unlock()
	if due {
		s.nudge()
	}
	return then, after, err
}

// write sends what the machine has to send, until there is nothing and no call is open.
func (s *Session) write() {
	defer s.work.Done()
	for {
		waits := false
		select {
		case s.sending <- struct{}{}:
		case <-s.Stopped(): // whoever sends may be stuck
			return
		}
		runtime.Gosched() // what others have to say goes along
		for s.sendFrame(&waits) {
		}
		<-s.sending
		if !waits {
			return
		}
		select {
		case <-s.wake:
		case <-s.Stopped():
			return
		}
	}
}

// sendFrame sends the next frame and reports whether there was one to send and
// it went; sending is held. The writer, who alone passes waits, learns whether to wait for
// wake when there is nothing; otherwise it ends, and the next nudge starts another.
func (s *Session) sendFrame(waits *bool) bool {
	f := &s.out
	f.Reset()
	s.mu.Lock()
	now := s.now()
	var held interface{ Release() }
	ok := s.conn != nil
	if ok {
		held, ok = s.m.Next(now, f)
	}
	s.dispatch(now)
	st := s.m.Status()
	last := !ok && s.ended && st.Calls == 0
	if !ok && waits != nil {
		*waits = st.Calls > 0
		s.writing, s.waiting = false, *waits
	}
	if ok { // with mu held, or Drain would see neither a call nor its last frame
		s.sendingSince.Store(int64(now) + 1)
	}
	s.mu.Unlock()
	if last {
		s.Stop(ErrPeerClosed)
	}
	if !ok {
		return false
	}
	defer s.sendingSince.Store(0)
	if f.HasChunk() {
		if held = s.seal(&f.Chunk, held, st); held == nil && f.Empty() {
			return true
		}
	}
	if err := s.conn.Send(f, held); err != nil {
		s.conn = nil
		if waits != nil { // the writer ends; the next connection has another
			s.mu.Lock()
			s.writing = false
			s.mu.Unlock()
		}
		if !errors.Is(err, io.EOF) { // the reader learns the real cause
			lose(s.lost, err)
		}
		return false
	}
	return true
}

// seal encodes a chunk, if that pays off, and sums it. It returns what is to be released
// when the chunk is sent: held, or what the chunk lies in now. If its bytes could not be
// read, seal gives up its tensor, forgets the chunk and returns nil.
func (s *Session) seal(c *frame.Chunk, held interface{ Release() }, st stream.Status) interface{ Release() } {
	err := fault.Guard(func() {
		if p := st.Codec.Encode(c.Data); p != nil {
			held.Release() // what is sent lies elsewhere now
			held = p
			c.Codec, c.Data = uint8(st.Codec), append(c.Data[:0], p.Bytes())
		}
		c.Sum = st.Checksum.Seed(c.Tensor, c.Index)
		for _, d := range c.Data {
			c.Sum = st.Checksum.UpdateCold(c.Sum, d)
		}
	})
	if err == nil {
		return held
	}
	held.Release()
	id := c.Tensor
	*c = frame.Chunk{}
	s.Do(func(m *stream.Machine, _ stream.Instant) { m.Lost(id, err.Error()) })
	return nil
}

// Drain has the machine announce that nothing new is taken, and waits until no
// call is open, the session ends, or ctx does.
func (s *Session) Drain(ctx context.Context, reason string) error {
	s.Do(func(m *stream.Machine, _ stream.Instant) { m.Drain(reason) })
	t := time.NewTicker(drainPoll)
	defer t.Stop()
	for {
		idle := false
		s.Do(func(m *stream.Machine, _ stream.Instant) {
			idle = m.Status().Calls == 0 && !m.Pending() && s.sendingSince.Load() == 0
		})
		if idle {
			return nil
		}
		select {
		case <-t.C:
		case <-s.Stopped():
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
