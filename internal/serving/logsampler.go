package serving

import "sync/atomic"

// LogSampler counts what a peer can cause without a limit, and logs it as its number
// doubles, so that a flood does not fill the log.
type LogSampler struct{ count atomic.Int64 }

// Again counts one more. If due, it is to be logged, with n.
func (l *LogSampler) Again() (n int64, due bool) {
	n = l.count.Add(1)
	return n, n&(n-1) == 0
}
