package server

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/metrics"
	"github.com/tensorferry/tensorferry/store"
)

// counts is what a server counts beside what its sessions do: the one source of
// GetServiceInfo and of Prometheus. Safe for concurrent use.
type counts struct {
	calls                           atomic.Int64 // open now
	callsRefused, runsAbandoned     atomic.Int64
	sessionsOpened, sessionsRefused atomic.Int64
	panics                          atomic.Int64
	callsUnary                      atomic.Int64             // of Compute
	seconds                         *prometheus.HistogramVec // of calls, by model

	mu            sync.Mutex // guards all below
	models        map[string]struct{}
	ended         map[metrics.Outcome]int64 // calls, by model
	openTransfers map[string]int64          // by kind
	transferBytes map[metrics.Outcome]int64 // by kind
	endedTensors  map[metrics.Outcome]int64 // by kind
}

func newCounts() counts {
	return counts{
		seconds: metrics.NewCallSeconds(), models: make(map[string]struct{}), ended: make(map[metrics.Outcome]int64),
		openTransfers: map[string]int64{string(pushTransfer): 0, string(pullTransfer): 0}, transferBytes: make(map[metrics.Outcome]int64), endedTensors: make(map[metrics.Outcome]int64),
	}
}

// watch follows the registry: only its models have labels of their own, so that
// no caller can make up more. What a model that goes has counted stays in the sum.
func (c *counts) watch(name string, here bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if here {
		c.models[name] = struct{}{}
		return
	}
	delete(c.models, name)
	c.seconds.DeleteLabelValues(name)
	for o, n := range c.ended {
		if o.Of == name {
			delete(c.ended, o)
			c.ended[metrics.Outcome{Code: o.Code}] += n
		}
	}
}

// callEnded counts a call that has ended, and its time if it ever had one.
func (c *counts) callEnded(model string, code frame.Code, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, here := c.models[model]; !here {
		model = ""
	}
	c.ended[metrics.Outcome{Of: model, Code: codeName(code)}]++
	if took > 0 {
		c.seconds.WithLabelValues(model).Observe(took.Seconds())
	}
}

// transferOpened counts a push or a pull that begins; transferEnded follows.
func (c *counts) transferOpened(k kind) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.openTransfers[string(k)]++
}

// transferEnded counts a push or a pull that has moved so many bytes of payload.
func (c *counts) transferEnded(k kind, code frame.Code, bytes int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.openTransfers[string(k)]--
	c.transferBytes[metrics.Outcome{Of: string(k), Code: codeName(code)}] += bytes
}

// tensorEnded counts a tensor of a push or a pull.
func (c *counts) tensorEnded(k kind, code frame.Code) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endedTensors[metrics.Outcome{Of: string(k), Code: codeName(code)}]++
}

// values adds up what the server and its sessions have counted.
func (s *Server) values() metrics.Values {
	st, open := s.stats()
	v := metrics.Values{
		Sessions: int64(open), SessionsOpened: s.sessionsOpened.Load(), SessionsRefused: s.sessionsRefused.Load(),
		Calls: s.calls.Load(), CallsOpened: st.CallsOpened + s.callsUnary.Load(), CallsRefused: s.callsRefused.Load(),
		ReceivedBytes: st.BytesIn, SentBytes: st.BytesOut, ReceivedChunks: st.ChunksIn, SentChunks: st.ChunksOut,
		CorruptChunks: st.Corrupt, DuplicateChunks: st.Duplicate,
		RunsAbandoned: s.runsAbandoned.Load(), Panics: s.panics.Load(),
	}
	v.MemoryUsed, v.MemoryPeak, v.MemoryLimit = s.cfg.Budget.Used()
	v.MemoryKept = s.cfg.Pool.Kept()
	if st, ok := s.cfg.Store.(store.Meter); ok {
		v.StoreUsed, v.StoreLimit = st.Used()
	}
	c := &s.counts
	c.mu.Lock()
	defer c.mu.Unlock()
	v.Ended, v.OpenTransfers, v.TransferBytes = maps.Clone(c.ended), maps.Clone(c.openTransfers), maps.Clone(c.transferBytes)
	v.EndedTensors = maps.Clone(c.endedTensors)
	return v
}
