package server

import "sync/atomic"

// rare counts what a peer can bring about as often as it likes, and says when it is
// to be logged: as its number doubles, so that a flood does not fill the log.
type rare struct{ count atomic.Int64 }

// again counts one more. If due, it is to be logged, with n.
func (r *rare) again() (n int64, due bool) {
	n = r.count.Add(1)
	return n, n&(n-1) == 0
}
