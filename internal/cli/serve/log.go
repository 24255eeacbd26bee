package serve

import (
	"bytes"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// logLines is how many lines may wait for a reader of the log that is slow: a burst of a
	// second, of some hundred bytes each.
	logLines = 1024
	// FlushWait is how long the end of a server waits for that reader.
	FlushWait = time.Second
)

// logWriter writes lines, for which nobody waits: whoever reads a log decides nothing over the
// server. A line that finds too many before it, or cannot be written, is dropped and counted.
type logWriter struct {
	lines   chan []byte // nil ends them
	ended   chan struct{}
	dropped atomic.Int64
}

// newLog returns the log of a server. It starts a goroutine, which ends with end.
func newLog(c Config) (log *slog.Logger, w *logWriter) {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.logLevel)) // the flag has checked it
	if c.verbose {
		level = slog.LevelDebug
	}
	w = &logWriter{lines: make(chan []byte, logLines), ended: make(chan struct{})}
	o := &slog.HandlerOptions{Level: level}
	log = slog.New(slog.NewTextHandler(w, o))
	if c.logFormat == LogJSON {
		log = slog.New(slog.NewJSONHandler(w, o))
	}
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // it would end the process; not ignored, as children inherit that
	go w.write(os.Stderr, func(dropped int64) {
		log.Warn("lines of the log could not be written", slog.Int64("dropped", dropped))
	})
	return log, w
}

// Write copies the line p. It never fails.
func (w *logWriter) Write(p []byte) (int, error) {
	select {
	case w.lines <- bytes.Clone(p):
	default:
		w.dropped.Add(1)
	}
	return len(p), nil
}

// write writes lines until end, and tells, when one can be written again, how many could not.
func (w *logWriter) write(to io.Writer, tell func(dropped int64)) {
	defer close(w.ended)
	var told int64
	for line := range w.lines {
		if line == nil {
			return
		}
		if _, err := to.Write(line); err != nil {
			w.dropped.Add(1)
		} else if n := w.dropped.Load(); n > told {
			told = n
			tell(n)
		}
	}
}

// flush writes the lines that wait, if they can be written soon.
func (w *logWriter) flush() {
	late := time.After(FlushWait)
	select {
	case w.lines <- nil:
	case <-late:
		return
	}
	select {
	case <-w.ended:
	case <-late:
	}
}
