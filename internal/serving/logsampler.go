package serving

import (
	"sync"
	"time"
)

// sampleEvery is how often a LogSampler logs what goes on and on, and how long nothing
// must happen until it begins anew.
const sampleEvery = time.Minute

// LogSampler counts what a peer can cause without a limit, and logs it as its number
// doubles, and once a minute, so that a flood does not fill the log.
type LogSampler struct {
	mu     sync.Mutex
	count  int64
	last   time.Time
	logged time.Time
}

// Again counts one more. If due, it is to be logged, with n.
func (l *LogSampler) Again() (n int64, due bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if now.Sub(l.last) >= sampleEvery {
		l.count = 0
	}
	l.last = now
	l.count++
	due = l.count&(l.count-1) == 0 || now.Sub(l.logged) >= sampleEvery
	if due {
		l.logged = now
	}
	return l.count, due
}
