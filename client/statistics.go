package client

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"google.golang.org/grpc/codes"
)

// Statistics are what a client has done since Dial.
type Statistics struct {
	// Calls are the runs of models, the pushes and the pulls; Attempts are those at them, and
	// Retries are the attempts that repeated one.
	Calls    int64 `json:"calls"`
	Attempts int64 `json:"attempts"`
	Retries  int64 `json:"retries"`
	// Failures are the attempts that failed, by code.
	Failures map[codes.Code]int64 `json:"failures"`
	// Sent and Received are bytes of tensors, in attempts that succeeded.
	Sent     int64 `json:"sent"`
	Received int64 `json:"received"`
	// Total is how long attempts took that succeeded, Server what the server says it needed
	// from the first byte of a call to its last, and Network the difference.
	Network Percentiles `json:"network"`
	Server  Percentiles `json:"server"`
	Total   Percentiles `json:"total"`
}

// Percentiles of durations. Each is at most one hundredth too long.
type Percentiles struct {
	P50 time.Duration `json:"p50"`
	P90 time.Duration `json:"p90"`
	P99 time.Duration `json:"p99"`
	Max time.Duration `json:"max"`
}

// tally counts for Statistics.
type tally struct {
	calls, attempts, retries atomic.Int64

	mu                     sync.Mutex // guards all below
	said                   Statistics
	network, server, total *hdrhistogram.Histogram // of microseconds
}

func newTally() *tally {
	h := func() *hdrhistogram.Histogram { return hdrhistogram.New(1, int64(longest/time.Microsecond), 2) }
	return &tally{said: Statistics{Failures: make(map[codes.Code]int64)}, network: h(), server: h(), total: h()}
}

// ended counts the end of an attempt. server is 0 if the server did not say how long it took.
func (t *tally) ended(code codes.Code, total, server time.Duration, sent, received int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if code != codes.OK {
		t.said.Failures[code]++
		return
	}
	t.said.Sent += sent
	t.said.Received += received
	record(t.total, total)
	if server > 0 {
		record(t.server, server)
		record(t.network, total-server)
	}
}

func record(h *hdrhistogram.Histogram, d time.Duration) {
	_ = h.RecordValue(int64(min(max(d, 0), longest) / time.Microsecond)) // which is in its range
}

// Statistics returns what the client has done so far.
func (c *Client) Statistics() Statistics {
	t := c.tally
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.said
	s.Calls, s.Attempts, s.Retries = t.calls.Load(), t.attempts.Load(), t.retries.Load()
	s.Failures = maps.Clone(s.Failures)
	s.Network, s.Server, s.Total = percentiles(t.network), percentiles(t.server), percentiles(t.total)
	return s
}

func percentiles(h *hdrhistogram.Histogram) Percentiles {
	at := func(q float64) time.Duration { return time.Duration(h.ValueAtQuantile(q)) * time.Microsecond }
	return Percentiles{at(50), at(90), at(99), time.Duration(h.Max()) * time.Microsecond}
}
