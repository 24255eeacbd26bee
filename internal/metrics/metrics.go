// Package metrics declares every metric of a server, and answers for them over HTTP.
//
// It refuses to count: a server counts, and is asked for its Values at each
// scrape, by GetServiceInfo as well as by Prometheus, so that the two cannot
// disagree. Labels are bounded: models of the registry, kinds of transfers and
// status codes, never the name of a tensor or an address. It sees no payload.
package metrics

import (
	"cmp"
	"reflect"
	"runtime"
	"slices"
	"strings"

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

// Values are what a server has counted at one moment. Those without labels have the names of their
// metrics, which are those of the counters in GetServiceInfo, too, and what they mean.
type Values struct {
	Sessions          int64 `metric:"sessions" help:"Sessions open now."`
	SessionsOpened    int64 `metric:"sessions_total" help:"Sessions opened."`
	SessionsRefused   int64 `metric:"sessions_refused_total" help:"Sessions refused at the limit."`
	Calls             int64 `metric:"calls" help:"Calls computing or waiting for memory now."`
	CallsOpened       int64 `metric:"calls_total" help:"Calls opened."`
	CallsRefused      int64 `metric:"calls_refused_total" help:"Calls refused at the limit."`
	Sequences         int64 `metric:"sequences" help:"Sequences of calls open now."`
	SequencesRefused  int64 `metric:"sequences_refused_total" help:"Sequences refused at the limit."`
	StateBytes        int64 `metric:"state_bytes" help:"What the states of sequences take now."`
	ReceivedBytes     int64 `metric:"received_bytes_total" help:"Payload bytes received in calls."`
	SentBytes         int64 `metric:"sent_bytes_total" help:"Payload bytes sent in calls."`
	ReceivedChunks    int64 `metric:"received_chunks_total" help:"Chunks received in calls."`
	SentChunks        int64 `metric:"sent_chunks_total" help:"Chunks sent in calls."`
	CorruptChunks     int64 `metric:"corrupt_chunks_total" help:"Chunks received with a wrong checksum."`
	Lanes             int64 `metric:"lanes" help:"Lanes open."`
	LanesOpened       int64 `metric:"lanes_opened_total" help:"Lanes opened."`
	HandshakesFailed  int64 `metric:"handshakes_failed_total" help:"Connections whose handshake failed."`
	Unauthenticated   int64 `metric:"unauthenticated_total" help:"RPCs refused, or ended, because of who sent them."`
	LanesRefused      int64 `metric:"lanes_refused_total" help:"Connections that wanted to be a lane and were refused."`
	LaneReceivedBytes int64 `metric:"lane_received_bytes_total" help:"Bytes of tensors received by lanes, of those received by sessions."`
	LaneSentBytes     int64 `metric:"lane_sent_bytes_total" help:"Bytes of tensors sent by lanes, of those sent by sessions."`
	DuplicateChunks   int64 `metric:"duplicate_chunks_total" help:"Chunks received more than once."`
	MemoryUsed        int64 `metric:"memory_used_bytes" help:"Memory budget granted now."`
	MemoryPeak        int64 `metric:"memory_peak_bytes" help:"Most of the memory budget ever granted."`
	MemoryKept        int64 `metric:"memory_kept_bytes" help:"Memory that nobody uses, kept for the next to ask; given back when others need it."`
	MemoryLimit       int64 `metric:"memory_limit_bytes" help:"Memory budget."`
	ReceiveUsed       int64 `metric:"receive_used_bytes" help:"What clients have sent and nothing has consumed, and what they have not read, 64 KiB of each connection included."`
	ReceiveLimit      int64 `metric:"receive_limit_bytes" help:"What it may take beyond 64 KiB of each connection."`
	ReceiveEnded      int64 `metric:"receive_ended_total" help:"RPCs and connections refused or ended for want of memory for what clients send."`
	HeapLimit         int64 `metric:"heap_limit_bytes" help:"Memory limit of the Go runtime; the largest number if it has none."`
	StoreUsed         int64 `metric:"store_used_bytes" help:"What pushed tensors take in the store now."`
	StoreLimit        int64 `metric:"store_limit_bytes" help:"What they may take, or what their disk has room for; the largest number if that is not known."`
	StoreAvailable    int64 `metric:"store_available" help:"1 if the store can be used."`
	StoreEvicted      int64 `metric:"store_evicted_total" help:"Tensors evicted from the store to make room for others."`
	StoreDamaged      int64 `metric:"store_damaged_total" help:"Tensors that a client pulled whole and found damaged: their digest was not the store's."`
	RunsAbandoned     int64 `metric:"runs_abandoned_total" help:"Runs whose model did not stop in time."`
	Panics            int64 `metric:"panics_total" help:"Handlers that panicked."`

	Ended         map[Outcome]int64 // calls, by model
	OpenTransfers map[string]int64  // by kind
	TransferBytes map[Outcome]int64 // payload, by kind
	EndedTensors  map[Outcome]int64 // of transfers, by kind
	EndedRPCs     map[Outcome]int64 // by service
	ModelGauges   map[Gauge]float64
}

// plain are the fields of Values without labels.
var plain = slices.DeleteFunc(reflect.VisibleFields(reflect.TypeFor[Values]()), func(f reflect.StructField) bool { return f.Tag == "" })

// of returns such a value, and the name of its metric.
func of(v *Values, f reflect.StructField) (name string, n int64) {
	return f.Tag.Get("metric"), reflect.ValueOf(v).Elem().FieldByIndex(f.Index).Int()
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
	for _, f := range plain {
		name, n := of(v, f)
		out[name] = n
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
	plain   []*prometheus.Desc
}

// New returns the metrics of a server: read is asked at each scrape, concurrently
// with others.
func New(version string, seconds CallSeconds, read func() Values) prometheus.Collector {
	c := &collector{version: version, read: read, seconds: seconds}
	for _, f := range plain {
		c.plain = append(c.plain, desc(f.Tag.Get("metric"), f.Tag.Get("help")))
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
	for i, f := range plain {
		name, n := of(&v, f)
		kind := prometheus.GaugeValue
		if strings.HasSuffix(name, "_total") {
			kind = prometheus.CounterValue
		}
		send(c.plain[i], kind, n)
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
