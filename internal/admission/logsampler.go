package admission

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// sampleEvery is how often a LogSampler logs a recurring event, and how long the event must
// be absent before counting starts again.
const sampleEvery = time.Minute

// apart is how many kinds of an event LogSamplers tell apart.
const apart = 64

// LogSampler counts an event that a peer can cause without limit. It logs the event each
// time the count doubles, and once a minute, so that a flood does not fill the log.
type LogSampler struct {
	mu     sync.Mutex
	count  int64
	last   time.Time
	logged time.Time
}

// Again counts one event. If due is true, the caller logs it with n.
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

// Log counts one event and, if that is due, logs it, with the count under a name.
func (l *LogSampler) Log(log *slog.Logger, level slog.Level, message, count string, attrs ...slog.Attr) {
	if n, due := l.Again(); due {
		log.LogAttrs(context.Background(), level, message, append(attrs, slog.Int64(count, n))...) //nolint:sloglint // the callers' are literals
	}
}

// LogSamplers are the LogSamplers of an event of several kinds: beyond the first of them, all others
// are one. The zero value is ready to use.
type LogSamplers struct {
	mu sync.Mutex
	of map[string]*LogSampler // "" is all others
}

// Of returns the LogSampler of a kind.
func (l *LogSamplers) Of(kind string) *LogSampler {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of[kind] == nil && len(l.of) >= apart {
		kind = ""
	}
	if l.of[kind] == nil {
		if l.of == nil {
			l.of = make(map[string]*LogSampler)
		}
		l.of[kind] = new(LogSampler)
	}
	return l.of[kind]
}
