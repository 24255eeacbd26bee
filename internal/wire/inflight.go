package wire

import "sync"

// InFlight knows the frames of one connection whose payload gRPC has not let go
// of. The zero value is ready. Safe for concurrent use.
type InFlight struct {
	mu    sync.Mutex
	first *sending // linked by next and prev; guarded by mu
}

// Abandon ends the loans of the frames that were queued on the connection when it
// died: gRPC forgets their buffers instead of freeing them. The caller knows that
// gRPC's writer of the connection has ended, so that nobody reads them any more.
func (f *InFlight) Abandon() {
	for {
		f.mu.Lock()
		s := f.first
		if s == nil {
			f.mu.Unlock()
			return
		}
		held := s.held
		f.remove(s)
		f.mu.Unlock()
		held.Release()
	}
}

// Stuck reports whether a frame is there that was there at the last call already:
// the peer has not read it all this while.
func (f *InFlight) Stuck() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	stuck := false
	for s := f.first; s != nil; s = s.next {
		stuck = stuck || s.seen
		s.seen = true
	}
	return stuck
}

func (f *InFlight) add(s *sending) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s.flight, s.next = f, f.first
	if f.first != nil {
		f.first.prev = s
	}
	f.first = s
}

// remove takes s out, and its loan from it; mu is held.
func (f *InFlight) remove(s *sending) {
	if s.prev == nil {
		f.first = s.next
	} else {
		s.prev.next = s.next
	}
	if s.next != nil {
		s.next.prev = s.prev
	}
	s.next, s.prev, s.held, s.seen = nil, nil, nil, false
}

// take takes the loan out of a frame that gRPC has let go of: nil when there is
// none, or none any more.
func (s *sending) take() Releaser {
	f := s.flight
	if f == nil {
		held := s.held
		s.held = nil
		return held
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s.flight = nil
	held := s.held
	if held != nil {
		f.remove(s)
	}
	return held
}
