package serving

import (
	"sync"
	"time"
)

// sampleQuiet is how long nothing must happen until a LogSampler begins anew.
const sampleQuiet = time.Minute

// LogSampler counts what a peer can cause without a limit, and logs it as its number
// doubles, so that a flood does not fill the log.
type LogSampler struct {
	mu    sync.Mutex
	count int64
	last  time.Time
}

// Again counts one more. If due, it is to be logged, with n.
func (l *LogSampler) Again() (n int64, due bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if now.Sub(l.last) >= sampleQuiet {
		l.count = 0
	}
	l.last = now
	l.count++
	return l.count, l.count&(l.count-1) == 0
}
