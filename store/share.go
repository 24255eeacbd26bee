package store

import "sync/atomic"

// share counts the holders of something. It starts with one holder, and when the last one
// releases it, free is called. It is safe for concurrent use.
type share struct {
	refs atomic.Int64
	free func()
}

func (s *share) init(free func()) {
	s.refs.Store(1)
	s.free = free
}

// retain adds a holder. The caller is a holder, or prevents one from releasing.
func (s *share) retain() {
	if s.refs.Add(1) <= 1 {
		panic("store: retained after its last release")
	}
}

// tryRetain adds a holder unless the last one has already released.
func (s *share) tryRetain() bool {
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
func (s *share) Release() {
	switch n := s.refs.Add(-1); {
	case n < 0:
		panic("store: released more often than retained")
	case n == 0:
		s.free()
	}
}
