package session

import (
	"cmp"
	"errors"
	"io"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/frame"
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
	// RoundTrip returns the least round trip; 0 if it is not known.
	RoundTrip() time.Duration
}

// Errors that a lane ends with.
var (
	// ErrReplaced ends the oldest lane when the peer has opened one too many.
	ErrReplaced = errors.New("session: the peer has opened another lane")
	// ErrSpare ends a lane without which the others carry as much.
	ErrSpare = errors.New("session: the others carry as much")
	// ErrLaneClosed ends a lane between two chunks.
	ErrLaneClosed = errors.New("session: the peer, or something before it, has closed the lane")
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
	number  uint8 // index in Session.lanes plus 1; 0: it is not there any more
	since   stream.Instant
	claim   stream.Claim
	reading bool // claim is open: the reader writes to memory that was lent
	broken  bool // the memory is wanted back: the reader was told
	writing bool // a writer has been started and has not yet found nothing to send
}

// AddLane has chunks go by l as well, which the session takes over. It starts a goroutine
// that reads l, and one that writes it whenever there is something to send; they end with
// the lane, or the session. ended is then called, once. If there are as many lanes as may be
// open at a time, the oldest ends.
func (s *Session) AddLane(l Lane, ended func(why error)) {
	n := &lane{Lane: l, ended: ended}
	n.write = func() { s.writeLane(n) }
	var oldest *lane
	over := false
	s.Do(func(m *stream.Machine, now stream.Instant) {
		if over = s.over; over {
			return
		}
		n.since = now
		if open := s.open(); len(open) >= m.LanesAtOnce() {
			oldest = open[0]
			s.forget(oldest)
		}
		at := slices.Index(s.lanes, nil)
		if at < 0 {
			at = len(s.lanes)
			s.lanes = append(s.lanes, nil)
		}
		s.lanes[at], n.number = n, uint8(at+1)
		s.laned()
		s.work.Add(1)
		go s.readLane(n)
	})
	if over {
		n.end(s.Cause())
	}
	if oldest != nil {
		oldest.end(ErrReplaced)
	}
}

// KeepLanes ends all but the n oldest lanes.
func (s *Session) KeepLanes(n int) {
	s.mu.Lock()
	open := s.open()
	s.mu.Unlock()
	for _, l := range open[min(n, len(open)):] {
		s.retire(l, ErrSpare)
	}
}

// open returns the lanes, the oldest first; mu is held.
func (s *Session) open() []*lane {
	all := slices.DeleteFunc(slices.Clone(s.lanes), func(l *lane) bool { return l == nil })
	slices.SortStableFunc(all, func(a, b *lane) int { return cmp.Compare(a.since, b.since) })
	return all
}

// laned tells the machine of the lanes; mu is held.
func (s *Session) laned() {
	var trip time.Duration // of those that are far
	open := s.open()
	for _, l := range open {
		if t := l.RoundTrip(); t >= farTrip && (trip == 0 || t < trip) {
			trip = t
		}
	}
	s.m.SetLanes(s.now(), len(open), stream.Instant(trip))
}

// forget has what a lane has not brought go another way; mu is held.
func (s *Session) forget(l *lane) {
	if l.number == 0 {
		return
	}
	n := l.number
	s.lanes[n-1], l.number = nil, 0
	s.laned()
	s.m.LoseLane(n)
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
	switch {
	case errors.Is(why, os.ErrDeadlineExceeded):
		why = ErrStalled
	case errors.Is(why, io.EOF):
		why = ErrLaneClosed
	}
	s.Do(func(m *stream.Machine, now stream.Instant) {
		if errors.Is(why, ErrStalled) {
			m.RestLanes(now)
		}
		s.forget(l)
	})
	l.end(why)
}

// stalled returns a lane that the peer acknowledges too little of, if there is one.
func (s *Session) stalled() *lane {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.m.LaneStalled(s.now()); n > 0 {
		return s.lanes[n-1]
	}
	return nil
}

// patience is how long n bytes may take on a lane: a slower one is not worth keeping.
func (s *Session) patience(n int) time.Time {
	return time.Now().Add(time.Duration(s.m.LanePatience(n)))
}

// attend sees to the lanes when something has changed; mu is held.
func (s *Session) attend() {
	pending := len(s.lanes) > 0 && !s.over && s.m.LanePending()
	for _, l := range s.lanes {
		if l == nil {
			continue
		}
		if l.reading && !l.broken && l.claim.Dead() {
			l.broken = true
			_ = l.SetReadDeadline(time.Unix(1, 0)) // its reader lets go
		}
		if pending && !l.writing {
			l.writing, pending = true, false // it wakes another one if there is more
			s.work.Add(1)
			go l.write()
		}
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
		var failed error
		if err == nil {
			if got, left, err = l.claim.Fill(l); err == nil {
				failed = l.claim.Decode(got)
			}
		}
		broken := s.locked(func(m *stream.Machine, now stream.Instant) bool {
			if l.reading = false; err == nil {
				m.Commit(now, &l.claim, got, failed)
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
		var held interface{ Release() }
		var st stream.Status
		ok := false
		s.Do(func(m *stream.Machine, now stream.Instant) {
			if l.number > 0 {
				held, ok = m.NextLane(now, &l.out, l.number)
			}
			l.writing, st = ok, m.Status()
		})
		if !ok {
			return
		}
		if held = s.seal(&l.out, held, st); held == nil {
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
