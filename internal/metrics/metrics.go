// Package metrics declares every metric of a server, and answers for them over HTTP.
//
// It refuses to count: a server counts, and is asked for its Values at each
// scrape, by GetServiceInfo as well as by Prometheus, so that the two cannot
// disagree. Labels are bounded: models of the registry, kinds of transfers and
// status codes, never the name of a tensor or an address. It sees no payload.
package metrics

import (
	"cmp"
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

const prefix = "tensorferry_"

// Outcome is what calls are counted by when they have ended, and bytes of transfers.
type Outcome struct {
	Of   string // a model in the registry, empty for any other; the kind of a transfer; or a service
	Code string // as in docs/errors.md, such as NOT_FOUND
}

// Gauge is what a model in the registry measures, by a name that the model chose.
type Gauge struct{ Model, Name string }

// Values are what a server has counted at one moment.
type Values struct {
	Sessions, SessionsOpened, SessionsRefused int64
	Calls, CallsOpened, CallsRefused          int64
	Ended                                     map[Outcome]int64 // calls, by model
	ReceivedBytes, SentBytes                  int64             // payload
	ReceivedChunks, SentChunks                int64
	CorruptChunks, DuplicateChunks            int64
	Lanes, LanesOpened, LanesRefused          int64 // Lanes now
	HandshakesFailed, Unauthenticated         int64
	LaneReceivedBytes, LaneSentBytes          int64             // of ReceivedBytes and SentBytes
	OpenTransfers                             map[string]int64  // by kind
	TransferBytes                             map[Outcome]int64 // payload, by kind
	EndedTensors                              map[Outcome]int64 // of transfers, by kind
	EndedRPCs                                 map[Outcome]int64 // by service
	MemoryUsed, MemoryPeak, MemoryLimit       int64             // bytes
	MemoryKept                                int64             // bytes
	ReceiveUsed, ReceiveLimit, ReceiveEnded   int64             // bytes; RPCs and connections
	HeapLimit                                 int64             // bytes
	StoreUsed, StoreLimit                     int64             // bytes; 0: there is no store, or it does not tell
	StoreAvailable                            int64             // 1 if the store can be used
	StoreEvicted, StoreDamaged                int64             // tensors
	RunsAbandoned, Panics                     int64
	ModelGauges                               map[Gauge]float64
}

// plain are the metrics without labels. Their names are those of the counters in
// GetServiceInfo, too.
var plain = []struct {
	name, help string
	kind       prometheus.ValueType
	of         func(*Values) int64
}{
	{"sessions", "Sessions open now.", prometheus.GaugeValue, func(v *Values) int64 { return v.Sessions }},
	{"sessions_total", "Sessions opened.", prometheus.CounterValue, func(v *Values) int64 { return v.SessionsOpened }},
	{"sessions_refused_total", "Sessions refused at the limit.", prometheus.CounterValue, func(v *Values) int64 { return v.SessionsRefused }},
	{"calls", "Calls computing or waiting for memory now.", prometheus.GaugeValue, func(v *Values) int64 { return v.Calls }},
	{"calls_total", "Calls opened.", prometheus.CounterValue, func(v *Values) int64 { return v.CallsOpened }},
	{"calls_refused_total", "Calls refused at the limit.", prometheus.CounterValue, func(v *Values) int64 { return v.CallsRefused }},
	{"received_bytes_total", "Payload bytes received in calls.", prometheus.CounterValue, func(v *Values) int64 { return v.ReceivedBytes }},
	{"sent_bytes_total", "Payload bytes sent in calls.", prometheus.CounterValue, func(v *Values) int64 { return v.SentBytes }},
	{"received_chunks_total", "Chunks received in calls.", prometheus.CounterValue, func(v *Values) int64 { return v.ReceivedChunks }},
	{"sent_chunks_total", "Chunks sent in calls.", prometheus.CounterValue, func(v *Values) int64 { return v.SentChunks }},
	{"corrupt_chunks_total", "Chunks received with a wrong checksum.", prometheus.CounterValue, func(v *Values) int64 { return v.CorruptChunks }},
	{"lanes", "Lanes open.", prometheus.GaugeValue, func(v *Values) int64 { return v.Lanes }},
	{"lanes_opened_total", "Lanes opened.", prometheus.CounterValue, func(v *Values) int64 { return v.LanesOpened }},
	{"handshakes_failed_total", "Connections whose handshake failed.", prometheus.CounterValue, func(v *Values) int64 { return v.HandshakesFailed }},
	{"unauthenticated_total", "RPCs refused, or ended, because of who sent them.", prometheus.CounterValue, func(v *Values) int64 { return v.Unauthenticated }},
	{"lanes_refused_total", "Connections that wanted to be a lane and were refused.", prometheus.CounterValue, func(v *Values) int64 { return v.LanesRefused }},
	{"lane_received_bytes_total", "Bytes of tensors received by lanes, of those received by sessions.", prometheus.CounterValue, func(v *Values) int64 { return v.LaneReceivedBytes }},
	{"lane_sent_bytes_total", "Bytes of tensors sent by lanes, of those sent by sessions.", prometheus.CounterValue, func(v *Values) int64 { return v.LaneSentBytes }},
	{"duplicate_chunks_total", "Chunks received more than once.", prometheus.CounterValue, func(v *Values) int64 { return v.DuplicateChunks }},
	{"memory_used_bytes", "Memory budget granted now.", prometheus.GaugeValue, func(v *Values) int64 { return v.MemoryUsed }},
	{"memory_peak_bytes", "Most of the memory budget ever granted.", prometheus.GaugeValue, func(v *Values) int64 { return v.MemoryPeak }},
	{"memory_kept_bytes", "Memory that nobody uses, kept for the next to ask; given back when others need it.", prometheus.GaugeValue, func(v *Values) int64 { return v.MemoryKept }},
	{"memory_limit_bytes", "Memory budget.", prometheus.GaugeValue, func(v *Values) int64 { return v.MemoryLimit }},
	{"receive_used_bytes", "What clients have sent and nothing has consumed, and what they have not read, 64 KiB of each connection included.", prometheus.GaugeValue, func(v *Values) int64 { return v.ReceiveUsed }},
	{"receive_limit_bytes", "What it may take beyond 64 KiB of each connection.", prometheus.GaugeValue, func(v *Values) int64 { return v.ReceiveLimit }},
	{"receive_ended_total", "RPCs and connections refused or ended for want of memory for what clients send.", prometheus.CounterValue, func(v *Values) int64 { return v.ReceiveEnded }},
	{"heap_limit_bytes", "Memory limit of the Go runtime; the largest number if it has none.", prometheus.GaugeValue, func(v *Values) int64 { return v.HeapLimit }},
	{"store_used_bytes", "What pushed tensors take in the store now.", prometheus.GaugeValue, func(v *Values) int64 { return v.StoreUsed }},
	{"store_limit_bytes", "What they may take, or what their disk has room for; the largest number if that is not known.", prometheus.GaugeValue, func(v *Values) int64 { return v.StoreLimit }},
	{"store_available", "1 if the store can be used.", prometheus.GaugeValue, func(v *Values) int64 { return v.StoreAvailable }},
	{"store_evicted_total", "Tensors evicted from the store to make room for others.", prometheus.CounterValue, func(v *Values) int64 { return v.StoreEvicted }},
	{"store_damaged_total", "Tensors that a client pulled whole and found damaged: their digest was not the store's.", prometheus.CounterValue, func(v *Values) int64 { return v.StoreDamaged }},
	{"runs_abandoned_total", "Runs whose model did not stop in time.", prometheus.CounterValue, func(v *Values) int64 { return v.RunsAbandoned }},
	{"panics_total", "Handlers that panicked.", prometheus.CounterValue, func(v *Values) int64 { return v.Panics }},
}

// The metrics with labels.
var (
	endedCalls    = desc("ended_calls_total", "Calls that have ended.", "model", "code")
	openTransfers = desc("open_transfers", "Pushes and pulls open now.", "kind")
	transferBytes = desc("transfer_bytes_total", "Payload bytes of pushes and pulls that have ended.", "kind", "code")
	endedTensors  = desc("ended_tensors_total", "Tensors of pushes and pulls that have ended, well or not.", "kind", "code")
	endedRPCs     = desc("ended_rpcs_total", "RPCs that have ended, of every service.", "service", "code")
	modelValue    = desc("model_value", "What a model measures, in the unit that the gauge's name ends with.", "model", "gauge")
	buildInfo     = desc("build_info", "1, with the version of the server.", "version", "go_version")
)

// CallSeconds are the times of calls, by model; New collects them.
type CallSeconds = *prometheus.HistogramVec

// NewCallSeconds returns a CallSeconds without any.
func NewCallSeconds() CallSeconds {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: prefix + "call_seconds",
		Help: "Time of a call from the last of its inputs announced to its last result acknowledged.",
		// From a small call on this machine to a tensor of many gigabytes.
		Buckets: []float64{1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 50, 100},
	}, []string{"model"})
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prefix+name, help, labels, nil)
}

// Counters are the values by the names that GetServiceInfo shows, labels summed up.
func Counters(v *Values) map[string]int64 {
	out := make(map[string]int64, len(plain)+9)
	for _, m := range plain {
		out[m.name] = m.of(v)
	}
	for _, name := range []string{"calls_ok_total", "calls_cancelled_total", "calls_failed_total", "open_transfers", "transfer_bytes_total", "tensors_ok_total", "tensors_failed_total", "rpcs_ok_total", "rpcs_failed_total"} {
		out[name] = 0
	}
	calls := map[string]string{"OK": "calls_ok_total", "CANCELLED": "calls_cancelled_total"}
	for o, n := range v.Ended {
		out[cmp.Or(calls[o.Code], "calls_failed_total")] += n
	}
	for _, n := range v.OpenTransfers {
		out["open_transfers"] += n
	}
	for _, n := range v.TransferBytes {
		out["transfer_bytes_total"] += n
	}
	tensors := map[string]string{"OK": "tensors_ok_total"}
	for o, n := range v.EndedTensors {
		out[cmp.Or(tensors[o.Code], "tensors_failed_total")] += n
	}
	rpcs := map[string]string{"OK": "rpcs_ok_total"}
	for o, n := range v.EndedRPCs {
		out[cmp.Or(rpcs[o.Code], "rpcs_failed_total")] += n
	}
	return out
}

// collector is one server's metrics.
type collector struct {
	version string
	read    func() Values
	seconds CallSeconds
	plain   []*prometheus.Desc // as the table
}

// New returns the metrics of a server: read is asked at each scrape, concurrently
// with others.
func New(version string, seconds CallSeconds, read func() Values) prometheus.Collector {
	c := &collector{version: version, read: read, seconds: seconds}
	for _, m := range plain {
		c.plain = append(c.plain, desc(m.name, m.help))
	}
	return c
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range c.plain {
		out <- d
	}
	for _, d := range []*prometheus.Desc{modelValue, endedCalls, endedRPCs, openTransfers, transferBytes, endedTensors, buildInfo} {
		out <- d
	}
	c.seconds.Describe(out)
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, n int64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, kind, float64(n), labels...)
	}
	v := c.read()
	for i, m := range plain {
		send(c.plain[i], m.kind, m.of(&v))
	}
	for d, counted := range map[*prometheus.Desc]map[Outcome]int64{endedCalls: v.Ended, endedRPCs: v.EndedRPCs, transferBytes: v.TransferBytes, endedTensors: v.EndedTensors} {
		for o, n := range counted {
			send(d, prometheus.CounterValue, n, o.Of, o.Code)
		}
	}
	for kind, n := range v.OpenTransfers {
		send(openTransfers, prometheus.GaugeValue, n, kind)
	}
	for g, value := range v.ModelGauges {
		out <- prometheus.MustNewConstMetric(modelValue, prometheus.GaugeValue, value, g.Model, g.Name)
	}
	send(buildInfo, prometheus.GaugeValue, 1, c.version, runtime.Version())
	c.seconds.Collect(out)
}

// NewRegistry returns a registry with the metrics of Go and of this process.
func NewRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// LogLines adds the count of lines of the log that were dropped.
func LogLines(r *prometheus.Registry, dropped func() float64) {
	r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "tensorferry_log_lines_dropped_total", Help: "Lines of the log that could not be written.",
	}, dropped))
}
