package serving

import (
	"fmt"
	"log/slog"
	"maps"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/metrics"
	"github.com/tensorferry/tensorferry/stream"
)

// Direction is the direction of a transfer, as named in metrics.
type Direction string

// The directions of transfers.
const (
	Push Direction = "push"
	Pull Direction = "pull"
)

// counts holds what a core counts in addition to the statistics of its sessions. It is the
// single source of GetServiceInfo and Prometheus. Safe for concurrent use.
type counts struct {
	runsAbandoned, panics atomic.Int64
	panicked              admission.LogSampler
	lanes, lanesOpened    atomic.Int64
	lanesBroken           admission.LogSampler
	callsUnary            atomic.Int64        // outside sessions
	seconds               metrics.CallSeconds // of calls, by model

	mu     sync.Mutex // guards all below
	models map[string]struct{}
	sums   metrics.Values // its maps
}

// add adds n to one of the sums.
func (c *counts) add(to map[metrics.Outcome]int64, of, code string, n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	to[metrics.Outcome{Of: of, Code: code}] += n
}

// watch follows the registry. Only its models have labels of their own, so that callers
// cannot create labels. The counts of a removed model stay in the total.
func (c *counts) watch(name string, here bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if here {
		c.models[name] = struct{}{}
		return
	}
	delete(c.models, name)
	c.seconds.DeleteLabelValues(name)
	for o, n := range c.sums.Ended {
		if o.Of == name {
			delete(c.sums.Ended, o)
			c.sums.Ended[metrics.Outcome{Code: o.Code}] += n
		}
	}
}

// callEnded counts a call that has ended, and its time if it has one.
func (c *counts) callEnded(model string, code frame.Code, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, here := c.models[model]; !here {
		model = ""
	}
	c.sums.Ended[metrics.Outcome{Of: model, Code: code.String()}]++
	if took > 0 {
		c.seconds.WithLabelValues(model).Observe(took.Seconds())
	}
}

// transferOpen counts n more pushes or pulls as open.
func (c *counts) transferOpen(k Direction, n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sums.OpenTransfers[string(k)] += n
}

// TransferEnded counts the payload that a push or a pull has moved.
func (c *counts) TransferEnded(k Direction, code frame.Code, bytes int64) {
	c.add(c.sums.TransferBytes, string(k), code.String(), bytes)
}

// TensorsEnded counts n tensors of a push or a pull.
func (c *counts) TensorsEnded(k Direction, code frame.Code, n int64) {
	c.add(c.sums.EndedTensors, string(k), code.String(), n)
}

// RPCEnded counts an RPC of a service.
func (c *counts) RPCEnded(service, code string) { c.add(c.sums.EndedRPCs, service, code, 1) }

// Panicked counts and logs a panic of a handler. It is called while the panic unwinds.
func (c *Core) Panicked(p any) {
	c.panics.Add(1)
	c.panicked.Log(c.Log, slog.LevelError, "handler panicked", "panics", slog.String("panic", fmt.Sprint(p)), slog.String("stack", string(debug.Stack())))
}

// Seconds returns the durations of calls, by model.
func (c *Core) Seconds() metrics.CallSeconds { return c.seconds }

// Values adds up what the core and its sessions have counted. The caller adds what a store
// holds.
func (c *Core) Values() metrics.Values {
	c.mu.Lock()
	st, open := c.past, slices.Collect(maps.Keys(c.sessions))
	c.mu.Unlock()
	var states int64
	for _, s := range open {
		s.Do(func(m *stream.Machine, _ stream.Instant) {
			st.Add(m.Status().Stats)
			states += s.stateBytes()
		})
	}
	calls, callsRefused := c.Count(admission.Calls)
	sequences, sequencesRefused := c.Count(admission.Sequences)
	sessions, sessionsRefused := c.Count(admission.Sessions)
	v := metrics.Values{
		Sessions: sessions, SessionsOpened: c.number.Load() - c.oneWays.Load(), SessionsRefused: sessionsRefused,
		Calls: calls, CallsOpened: st.CallsOpened + c.callsUnary.Load(), CallsRefused: callsRefused,
		Sequences: sequences, SequencesRefused: sequencesRefused, StateBytes: states,
		ReceivedBytes: st.BytesIn, SentBytes: st.BytesOut, ReceivedChunks: st.ChunksIn, SentChunks: st.ChunksOut,
		Lanes: c.lanes.Load(), LanesOpened: c.lanesOpened.Load(), LaneReceivedBytes: st.LaneBytesIn, LaneSentBytes: st.LaneBytesOut,
		CorruptChunks: st.Corrupt, DuplicateChunks: st.Duplicate,
		RunsAbandoned: c.runsAbandoned.Load(), Panics: c.panics.Load(),
	}
	v.MemoryUsed, v.MemoryPeak, v.MemoryLimit = c.Budget.Used()
	v.MemoryKept = c.Pool.Kept()
	v.ModelGauges = make(map[metrics.Gauge]float64)
	for _, m := range c.ModelStates() {
		for _, g := range m.Gauges {
			v.ModelGauges[metrics.Gauge{Model: m.Name, Name: g.Name}] = g.Value
		}
	}
	c.counts.mu.Lock()
	defer c.counts.mu.Unlock()
	n := &c.sums
	v.Ended, v.OpenTransfers, v.TransferBytes = maps.Clone(n.Ended), maps.Clone(n.OpenTransfers), maps.Clone(n.TransferBytes)
	v.EndedTensors, v.EndedRPCs = maps.Clone(n.EndedTensors), maps.Clone(n.EndedRPCs)
	return v
}
