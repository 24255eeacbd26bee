package shelf

import "sync/atomic"

// Share counts the holders of something. It starts with one holder, and when the last one
// releases it, free is called. It is safe for concurrent use.
type Share struct {
	refs atomic.Int64
	free func()
}

// Init gives a new Share its first holder.
func (s *Share) Init(free func()) {
	s.refs.Store(1)
	s.free = free
}

// Holders returns how many there are now.
func (s *Share) Holders() int64 { return s.refs.Load() }

// Retain adds a holder. The caller is a holder, or prevents one from releasing.
func (s *Share) Retain() {
	if s.refs.Add(1) <= 1 {
		panic("store: retained after its last release")
	}
}

// TryRetain adds a holder unless the last one has already released.
func (s *Share) TryRetain() bool {
	for {
		n := s.refs.Load()
		if n == 0 {
			return false
		}
		if s.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// Release removes a holder.
func (s *Share) Release() {
	switch n := s.refs.Add(-1); {
	case n < 0:
		panic("store: released more often than retained")
	case n == 0:
		s.free()
	}
}
