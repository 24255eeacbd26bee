package server

import "sync/atomic"

// sampler says which of the events that a peer can cause at will are logged: those at
// which their number has doubled, so that a flood does not fill the log.
type sampler struct{ count atomic.Int64 }

// again counts one more. If due, it is logged, with n.
func (r *sampler) again() (n int64, due bool) {
	n = r.count.Add(1)
	return n, n&(n-1) == 0
}
