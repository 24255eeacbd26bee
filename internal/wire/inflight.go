package wire

import (
	"bytes"
	"sync"
	"sync/atomic"
)

// InFlight is what was sent on one connection and gRPC has not let go of: frames and
// answers. The zero value is ready. Safe for concurrent use.
type InFlight struct {
	// Copied, if set, is called with each change in the bytes in flight that gRPC alone
	// holds.
	Copied func(bytes int64)

	frames atomic.Int64
	mu     sync.Mutex
	newest *sending // linked by older and newer; guarded by mu
	over   bool     // it was abandoned; guarded by mu
}

// Abandon ends the loans of what is in flight and of all that is sent later. gRPC's
// writer of the connection must not read payloads any more.
func (f *InFlight) Abandon() {
	f.mu.Lock()
	f.over = true
	f.mu.Unlock()
	f.take(func(s *sending) bool {
		s.state.CompareAndSwap(queued, ended)
		return true
	})
}

// revoke ends the loans of what was sent from a message or an answer, all of it or the
// newest alone, unless gRPC has begun to read it. Of the newest gRPC has a copy then: it
// may be behind the end of its RPC, where nobody reads it, or still before. Of all it has
// zeros, and the RPC must have ended.
func (f *InFlight) revoke(from any, all bool) {
	found := false
	f.take(func(s *sending) bool {
		if s.from != from || found && !all {
			return false
		}
		found = true
		if !all && s.state.Load() == queued {
			for i := range s.parts {
				if p := &s.parts[i]; p.lent {
					p.copy = bytes.Clone(p.data)
				}
			}
		}
		return s.state.CompareAndSwap(queued, ended)
	})
}

// take ends the loans that pick returns true for, from the newest on.
func (f *InFlight) take(pick func(*sending) bool) {
	var ended []Releaser
	f.mu.Lock()
	for s := f.newest; s != nil; {
		older := s.older
		if pick(s) {
			if s.held != nil {
				ended = append(ended, s.held)
			}
			f.remove(s)
		}
		s = older
	}
	f.mu.Unlock()
	for _, held := range ended {
		held.Release()
	}
}

// Empty reports whether nothing is in flight.
func (f *InFlight) Empty() bool { return f.frames.Load() == 0 }

// Look counts one more look at what is in flight, and reports whether two have found
// the same: the peer has not read it all this while.
func (f *InFlight) Look() (stuck bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for s := f.newest; s != nil; s = s.older {
		s.looks++
		stuck = stuck || s.looks > 1
	}
	return stuck
}

// excuse forgets the looks at what was sent from a message.
func (f *InFlight) excuse(from any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for s := f.newest; s != nil; s = s.older {
		if s.from == from {
			s.looks = 0
		}
	}
}

// add notes what is about to be sent.
func (f *InFlight) add(s *sending) {
	f.mu.Lock()
	if !f.over {
		defer f.mu.Unlock()
		s.flight, s.older = f, f.newest
		if f.newest != nil {
			f.newest.newer = s
		}
		f.newest = s
		f.count(1, s.copied)
		return
	}
	f.mu.Unlock()
	s.state.Store(ended)
	s.end()
}

// count counts a frame that is in flight, or is not any more; mu is held.
func (f *InFlight) count(frames int64, copied int) {
	f.frames.Add(frames)
	if f.Copied != nil && copied > 0 {
		f.Copied(frames * int64(copied))
	}
}

// remove takes s out, and what is lent out of s; mu is held.
func (f *InFlight) remove(s *sending) {
	f.count(-1, s.copied)
	if s.newer == nil {
		f.newest = s.older
	} else {
		s.newer.older = s.older
	}
	if s.older != nil {
		s.older.newer = s.newer
	}
	s.older, s.newer, s.held, s.from, s.looks, s.removed = nil, nil, nil, nil, 0, true
}

// end ends the loan, unless it has ended.
func (s *sending) end() {
	f := s.flight
	if f != nil {
		f.mu.Lock()
	}
	held := s.held
	s.held = nil
	if f != nil {
		if !s.removed {
			f.remove(s)
		}
		s.flight, s.removed = nil, false
		f.mu.Unlock()
	}
	if held != nil {
		held.Release()
	}
}
