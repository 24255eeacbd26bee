package session

import (
	"errors"
	"io"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/fault"
	"github.com/tensorferry/tensorferry/stream"
)

// Lane carries chunks beside a Conn. Send side: Send. Receive side: Next, Read. One
// goroutine per side. Deadlines and Close are safe for concurrent use.
type Lane interface {
	// Next reads the header of the next chunk and returns how many bytes of payload
	// follow. It may be called again after the error of a deadline.
	Next(ch *frame.Chunk) (n int, err error)
	// Read reads payload.
	Read(p []byte) (int, error)
	// Send sends a chunk, whose views it borrows.
	Send(ch *frame.Chunk) error
	SetReadDeadline(t time.Time) error
	SetWriteDeadline(t time.Time) error
	Close() error
}

// Errors that a lane ends with.
var (
	// ErrReplaced ends a lane when the peer has opened another one.
	ErrReplaced = errors.New("session: the peer has opened another lane")
	// ErrStalled ends a lane that loses chunks, or takes them too slowly.
	ErrStalled = errors.New("session: a chunk on the lane took too long; on a slow line use none")
)

// lane is a lane of a session. Its goroutines end with it.
type lane struct {
	Lane
	once  sync.Once
	ended func(error)
	out   frame.Chunk // of the writer
	write func()      // writeLane, made once

	// Guarded by the session's mu.
	claim   stream.Claim
	reading bool // claim is open: the reader writes to memory that was lent
	broken  bool // the memory is wanted back: the reader was told
	writing bool // a writer has been started and has not yet found nothing to send
}

// AddLane has chunks go by l as well, which the session takes over. It starts a goroutine
// that reads l, and one that writes it whenever there is something to send; they end with
// the lane, or the session. ended is then called, once. A lane that was there ends.
func (s *Session) AddLane(l Lane, ended func(why error)) {
	n := &lane{Lane: l, ended: ended}
	n.write = func() { s.writeLane(n) }
	s.mu.Lock()
	over, old := s.over, s.lane
	if !over {
		s.m.SetLane(s.now(), false) // what went by the old one goes again
		s.m.SetLane(s.now(), true)
		s.lane = n
		s.work.Add(1)
		go s.readLane(n)
		s.dispatch(s.now())
	}
	s.mu.Unlock()
	if over {
		n.end(s.Cause())
	}
	if old != nil {
		old.end(ErrReplaced)
	}
}

// end closes the lane, and tells why.
func (l *lane) end(why error) {
	l.once.Do(func() {
		_ = l.Close()
		l.ended(why)
	})
}

// retire ends a lane: what it has not brought goes another way.
func (s *Session) retire(l *lane, why error) {
	if errors.Is(why, os.ErrDeadlineExceeded) {
		why = ErrStalled
	}
	s.mu.Lock()
	if s.lane == l {
		s.lane = nil
		s.m.SetLane(s.now(), false)
		s.dispatch(s.now())
	}
	pending := s.m.Pending()
	s.mu.Unlock()
	l.end(why)
	if pending {
		s.nudge()
	}
}

// patience is how long n bytes may take on a lane: a slower one is not worth keeping.
func (s *Session) patience(n int) time.Time {
	return time.Now().Add(time.Duration(s.m.LanePatience(n)))
}

// attend sees to the lane when something has changed; mu is held.
func (s *Session) attend() {
	l := s.lane
	if l == nil {
		return
	}
	if l.reading && !l.broken && l.claim.Dead() {
		l.broken = true
		_ = l.SetReadDeadline(time.Unix(1, 0)) // its reader lets go
	}
	if !l.writing && !s.over && s.m.LanePending() {
		l.writing = true
		s.work.Add(1)
		go l.write()
	}
}

// yield yields the processor, unless it did so less than yieldEvery ago, at last. A
// goroutine of a lane seldom waits for its socket, and keeps the thread that polled the
// network. Until another thread takes over, Go 1.26 polls only every 10 ms, and small calls
// would wait for that.
func (s *Session) yield(last *stream.Instant) {
	if now := s.now(); now >= *last+yieldEvery {
		*last = now
		runtime.Gosched() // wakes another thread, which polls
	}
}

// readLane puts the chunks that a lane brings at their places.
func (s *Session) readLane(l *lane) {
	defer s.work.Done()
	var ch frame.Chunk
	for yielded := s.now(); ; s.yield(&yielded) {
		n, err := l.Next(&ch)
		if errors.Is(err, os.ErrDeadlineExceeded) { // that of a chunk before: a lane may rest
			if err = l.SetReadDeadline(time.Time{}); err == nil {
				continue
			}
		}
		if err == nil {
			err = s.readChunk(l, &ch, n)
		}
		if err != nil {
			s.retire(l, err)
			return
		}
	}
}

// readChunk reads the n bytes of a chunk to its place, or past it.
func (s *Session) readChunk(l *lane, ch *frame.Chunk, n int) (err error) {
	wanted := s.locked(func(m *stream.Machine, now stream.Instant) bool {
		l.reading, l.broken = m.ClaimLane(now, ch, n, &l.claim), false
		err = l.SetReadDeadline(s.patience(n)) // before anybody wants the memory back
		return l.reading
	})
	left := n
	if wanted {
		var got uint32
		if err == nil {
			got, left, err = l.claim.Fill(l)
		}
		broken := s.locked(func(m *stream.Machine, now stream.Instant) bool {
			if l.reading = false; err == nil {
				m.Commit(now, &l.claim, got, nil)
			} else {
				m.Abort(now, &l.claim)
			}
			return l.broken
		})
		if broken && errors.Is(err, os.ErrDeadlineExceeded) {
			err = l.SetReadDeadline(s.patience(left))
		}
	}
	if err == nil && left > 0 {
		if _, err = io.CopyN(io.Discard, l, int64(left)); errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
	}
	return err
}

// locked runs f on the machine and sees to what it caused.
func (s *Session) locked(f func(m *stream.Machine, now stream.Instant) bool) (result bool) {
	s.Do(func(m *stream.Machine, now stream.Instant) {
		result = f(m, now)
		s.handler.Received(m)
	})
	return result
}

// writeLane sends what the machine has for the lane, until there is nothing.
func (s *Session) writeLane(l *lane) {
	defer s.work.Done()
	for yielded := s.now(); ; s.yield(&yielded) {
		s.mu.Lock()
		var held interface{ Release() }
		ok := s.lane == l
		if ok {
			held, ok = s.m.NextLane(s.now(), &l.out)
		}
		if !ok {
			l.writing = false
			s.mu.Unlock()
			return
		}
		kind := s.m.Status().Checksum
		s.dispatch(s.now())
		pending := s.m.Pending()
		s.mu.Unlock()
		if pending {
			s.nudge()
		}
		if err := fault.Guard(func() { l.out.Sum = sum(kind, &l.out) }); err != nil {
			s.vanished(&l.out, held, err)
			continue
		}
		err := l.SetWriteDeadline(s.patience(l.out.Len()))
		if err == nil {
			err = l.Send(&l.out)
		}
		held.Release()
		clear(l.out.Data) // or an idle lane would keep it
		if err != nil {
			s.retire(l, err)
			return
		}
	}
}
