package metrics

import (
	"context"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

// full is a value of every kind.
func full() Values {
	return Values{
		Sessions: 1, SessionsOpened: 2, SessionsRefused: 3, Calls: 4, CallsOpened: 10, CallsRefused: 6,
		Ended:         map[Outcome]int64{{"relu", "OK"}: 3, {"", "OK"}: 1, {"", "NOT_FOUND"}: 2, {"relu", "CANCELLED"}: 4},
		ReceivedBytes: 7, SentBytes: 8, ReceivedChunks: 9, SentChunks: 10, CorruptChunks: 11, DuplicateChunks: 12,
		OpenTransfers: map[string]int64{"push": 1, "pull": 2}, TransferBytes: map[Outcome]int64{{"push", "OK"}: 100, {"pull", "DATA_LOSS"}: 11},
		EndedTensors: map[Outcome]int64{{"push", "OK"}: 5, {"push", "RESOURCE_EXHAUSTED"}: 6, {"pull", "NOT_FOUND"}: 7},
		EndedRPCs:    map[Outcome]int64{{"tensorferry.v1.TensorService", "OK"}: 24, {"kpu.torch.Service", "INVALID_ARGUMENT"}: 25},
		MemoryUsed:   13, MemoryPeak: 14, MemoryLimit: 15, MemoryKept: 18, ReceiveUsed: 20, ReceiveLimit: 21, ReceiveEnded: 22, HeapLimit: 23, RunsAbandoned: 16, Panics: 17,
		ModelGauges: map[Gauge]float64{{"relu", "queued_blocks"}: 1.5},
	}
}

func registry(t *testing.T) *prometheus.Registry {
	t.Helper()
	r := NewRegistry()
	seconds := NewCallSeconds()
	seconds.WithLabelValues("relu").Observe(0.5)
	require.NoError(t, r.Register(New("1.2.3", seconds, full)))
	return r
}

func TestEveryMetricIsExplainedAndSatisfiesPrometheusLinter(t *testing.T) {
	r := registry(t)
	var names []string
	families, err := r.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if name := f.GetName(); strings.HasPrefix(name, prefix) {
			names = append(names, name)
		} else {
			require.Regexp(t, "^(go|process)_", name)
		}
	}
	require.Len(t, names, len(plain)+8)
	page, err := os.ReadFile("../../docs/operating.md")
	require.NoError(t, err)
	for _, name := range names {
		if !strings.Contains(string(page), "`"+name+"`") {
			require.Contains(t, string(page), "`_"+strings.TrimPrefix(name, prefix)+"`", "docs/operating.md explains every metric")
		}
	}
	problems, err := testutil.GatherAndLint(r, names...)
	require.NoError(t, err)
	require.Empty(t, problems)
}

func TestCountersHaveTheValuesOfTheMetrics(t *testing.T) {
	v := full()
	counters := Counters(&v)
	r := registry(t)
	families, err := r.Gather()
	require.NoError(t, err)
	compared := 0
	for _, f := range families {
		name, ours := strings.CutPrefix(f.GetName(), prefix)
		n, shown := counters[name]
		if !ours || !shown {
			continue
		}
		compared++
		sum := 0.
		for _, m := range f.GetMetric() {
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
		require.EqualValues(t, n, sum, name)
	}
	require.Equal(t, len(plain)+2, compared)
	require.EqualValues(t, 4, counters["calls_ok_total"])
	require.EqualValues(t, 4, counters["calls_cancelled_total"])
	require.EqualValues(t, 2, counters["calls_failed_total"])
	require.EqualValues(t, counters["calls_total"], v.CallsOpened)
	require.Equal(t, slices.Sorted(maps.Keys(counters)), slices.Sorted(maps.Keys(Counters(&Values{}))), "what has not happened yet is shown as 0")
}

// listener serves a handler until the test's end.
func listener(t *testing.T, serving func() bool, profiles bool) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- Serve(ctx, l, nil, Handler(registry(t), serving, profiles), slog.Default()) }()
	t.Cleanup(func() {
		stop()
		require.NoError(t, <-served)
		_, err := net.Dial("tcp", l.Addr().String())
		require.Error(t, err, "it still listens")
	})
	return "http://" + l.Addr().String()
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := c.Get(url)
	require.NoError(t, err)
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	return r.StatusCode, string(text)
}

func TestTheListenerAnswersForMetricsAndHealth(t *testing.T) {
	testkit.Start(t)
	var draining atomic.Bool
	at := listener(t, func() bool { return !draining.Load() }, false)
	code, text := get(t, at+"/metrics")
	require.Equal(t, 200, code)
	require.Contains(t, text, `tensorferry_build_info{go_version="go`)
	require.Contains(t, text, `tensorferry_ended_calls_total{code="OK",model="relu"} 3`)
	require.Contains(t, text, `tensorferry_call_seconds_count{model="relu"} 1`)
	require.Contains(t, text, "go_goroutines ")
	code, text = get(t, at+"/healthz")
	require.Equal(t, 200, code)
	require.Equal(t, "serving\n", text)
	draining.Store(true)
	code, _ = get(t, at+"/healthz")
	require.Equal(t, 503, code)
	for _, path := range []string{"/", "/debug/pprof/", "/debug/pprof/heap"} {
		code, _ = get(t, at+path)
		require.Equal(t, 404, code, path)
	}
}

func TestProfilesAreThereWhenAskedFor(t *testing.T) {
	testkit.Start(t)
	at := listener(t, func() bool { return true }, true)
	for _, path := range []string{"/debug/pprof/", "/debug/pprof/heap", "/debug/pprof/goroutine?debug=1", "/debug/pprof/cmdline"} {
		code, text := get(t, at+path)
		require.Equal(t, 200, code, path)
		require.NotEmpty(t, text, path)
	}
}

func TestAConnectionThatSaysNothingDoesNotHoldUpTheEnd(t *testing.T) {
	testkit.Start(t)
	at := listener(t, func() bool { return true }, false)
	c, err := net.Dial("tcp", strings.TrimPrefix(at, "http://"))
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	_, err = io.WriteString(c, "GET /metr")
	require.NoError(t, err)
}
