package serving

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/internal/metrics"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

const mib = 1 << 20

// bubble runs a test where time passes as soon as everybody waits.
var bubble = testkit.Bubble

// fixture is a Core with the built-in models, and no gRPC.
type fixture struct {
	*Core
	host   *cpu.Host
	models *engine.Registry
	lost   int64 // runs whose memory is meant to be

	mu     sync.Mutex
	health map[string]Health // guarded by mu
	log    strings.Builder   // guarded by mu
}

// serve returns a core that the test's end closes, and then finds empty.
func serve(t testing.TB, change func(*Config)) *fixture {
	t.Helper()
	return serveWithin(t, 512*mib, change)
}

// serveWithin is serve with a memory budget of its own.
func serveWithin(t testing.TB, memory int64, change func(*Config)) *fixture {
	t.Helper()
	host := cpu.NewHost(cpu.HostConfig{MemoryBytes: memory, Workers: 2})
	f := &fixture{host: host, models: engine.NewRegistry(), health: map[string]Health{}}
	for _, m := range append(cpu.Builtins(host), cpu.Slow(host)) {
		require.NoError(t, f.models.Add(m))
	}
	cfg := Config{
		Models: f.models, Pool: host.Pool(), Budget: host.Budget(), Log: slog.New(slog.NewTextHandler(f, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Open: [admission.Kinds]int{100, 100, 100}, MemoryWait: time.Minute, Status: statusOf, Own: func(error) *terms.RefusedError { return nil },
		PrincipalOf: func(context.Context) string { return "" }, May: func(context.Context, string, string) error { return nil },
		Health: func(model string, h Health) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.health[model] = h
		},
	}
	if change != nil {
		change(&cfg)
	}
	cfg.Session = cfg.Session.WithDefaults()
	f.Core = New(cfg)
	t.Cleanup(func() {
		f.Close()
		f.Wait()
		f.Forget()
		f.isEmpty(t)
		host.Close()
	})
	return f
}

// Write keeps what is logged.
func (f *fixture) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.log.Write(p)
}

func (f *fixture) logged() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.log.String()
}

// statusOf stands in for the server's.
func statusOf(err error) (frame.Code, string) {
	var broken *frame.Error
	var refused *terms.RefusedError
	switch {
	case err == nil, errors.Is(err, session.ErrPeerClosed):
		return frame.OK, ""
	case errors.As(err, &broken):
		return broken.Code, broken.Text
	case errors.As(err, &refused):
		return refused.Code, refused.Text
	case errors.Is(err, failures.ErrShutdown):
		return frame.Unavailable, "server is shutting down"
	case errors.Is(err, context.Canceled):
		return frame.Cancelled, err.Error()
	}
	return frame.Internal, err.Error()
}

// isEmpty waits until nothing is left of any session: no call, no budget, no slab.
func (f *fixture) isEmpty(t testing.TB) {
	t.Helper()
	testkit.Eventually(t, func() bool { return f.Values().Sessions == 0 && f.isIdle() }, "the end of every session and call")
	v := f.Values()
	require.Zero(t, v.MemoryUsed)
	require.Equal(t, f.lost, v.RunsAbandoned, "runs whose memory is lost")
	ended := int64(0)
	for _, n := range v.Ended {
		ended += n
	}
	require.Equal(t, v.CallsOpened, ended, "calls that ended: %v", v.Ended)
}

// isIdle reports whether no call is open and no memory in use.
func (f *fixture) isIdle() bool {
	slabs, _ := f.host.Pool().Live()
	v := f.Values()
	return v.Calls == 0 && slabs == 0 && v.MemoryUsed == 0
}

func (f *fixture) isIdleSoon(t testing.TB) {
	t.Helper()
	testkit.Eventually(t, f.isIdle, "the end of every call")
}

// covered fails when more memory is handed out than the budget knows of.
func (f *fixture) covered(t testing.TB) {
	t.Helper()
	_, live := f.host.Pool().Live()
	require.LessOrEqual(t, live, f.Values().MemoryUsed, "bytes handed out beside the budget")
}

// ended returns how many calls of a model ended with a code.
func (f *fixture) ended(model string, code frame.Code) int64 {
	return f.Values().Ended[of(model, code)]
}

func of(what string, code frame.Code) metrics.Outcome {
	return metrics.Outcome{Of: what, Code: code.String()}
}

// healthOf returns the health of a model, as Health was told.
func (f *fixture) healthOf(model string) Health {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.health[model]
}

// named is echo with another name.
func (f *fixture) named(t testing.TB, name string) engine.Model {
	t.Helper()
	m, unuse, err := f.models.Lookup("echo")
	require.NoError(t, err)
	t.Cleanup(unuse)
	return enginetest.Named(name, m)
}

func (f *fixture) add(t testing.TB, fn cpu.RowFunc) {
	t.Helper()
	m, err := fn.Model(f.host)
	require.NoError(t, err)
	require.NoError(t, f.models.Add(m))
}

func anyShape(port string) []engine.Port {
	return []engine.Port{{Name: port, Shape: []int64{engine.AnyAxes}}}
}

// addFailing adds a model whose rows do what fail does.
func (f *fixture) addFailing(t testing.TB, name string, fail func() error) {
	t.Helper()
	f.add(t, cpu.RowFunc{
		Info: engine.Info{Name: name, Rows: engine.AllAxes, Inputs: anyShape("x"), Outputs: anyShape("y")},
		Rows: func(context.Context, cpu.RowBlock) error { return fail() },
	})
}

// addPair adds a model of two inputs and two outputs: x is split into rows, w is
// needed whole; sum is each row's scalar product with w, scaled is x times w.
func addPair(t testing.TB, f *fixture) {
	t.Helper()
	f32 := []tensor.DataType{tensor.Float32}
	f.add(t, cpu.RowFunc{
		Info: engine.Info{
			Name: "pair", Rows: 1,
			Inputs: []engine.Port{
				{Name: "x", DTypes: f32, Shape: []int64{engine.Free, engine.Free}},
				{Name: "w", DTypes: f32, Shape: []int64{engine.Free}, Whole: true},
			},
			Outputs: []engine.Port{
				{Name: "sum", DTypes: f32, Shape: []int64{engine.Free}},
				{Name: "scaled", DTypes: f32, Shape: []int64{engine.Free, engine.Free}},
			},
		},
		Outs: func(in []tensor.Desc, _ map[string]string) ([]tensor.Desc, error) {
			return []tensor.Desc{{DType: tensor.Float32, Shape: in[0].Shape[:1]}, in[0]}, nil
		},
		Rows: func(_ context.Context, b cpu.RowBlock) error {
			sum, scaled := pairWant(b.In[0], b.Whole[1])
			copy(b.Out[0], sum)
			copy(b.Out[1], scaled)
			return nil
		},
	})
}

func pairWant(x, w []byte) (sums, scaled []byte) {
	at := func(b []byte, i int) float32 { return math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:])) }
	columns := len(w) / 4
	sum := float32(0)
	for i := range len(x) / 4 {
		v := at(x, i) * at(w, i%columns)
		scaled = binary.LittleEndian.AppendUint32(scaled, math.Float32bits(v))
		if sum += v; i%columns == columns-1 {
			sums = binary.LittleEndian.AppendUint32(sums, math.Float32bits(sum))
			sum = 0
		}
	}
	return sums, scaled
}

// gate is a model like echo whose blocks wait to be let through, and are counted.
type gate struct {
	started, ended atomic.Int64
	open           chan struct{} // closed, or one token per block
}

// addGate adds a gate of 1 MiB blocks under its name.
func addGate(t testing.TB, f *fixture, name string) *gate {
	t.Helper()
	g := &gate{open: make(chan struct{})}
	u8 := []tensor.DataType{tensor.Uint8}
	f.add(t, cpu.RowFunc{
		Info: engine.Info{
			Name: name, Rows: engine.AllAxes, BlockRows: mib,
			Inputs:  []engine.Port{{Name: "x", DTypes: u8, Shape: []int64{engine.AnyAxes}}},
			Outputs: []engine.Port{{Name: "y", DTypes: u8, Shape: []int64{engine.AnyAxes}}},
		},
		InPlace: true,
		Rows: func(ctx context.Context, _ cpu.RowBlock) error {
			g.started.Add(1)
			defer g.ended.Add(1)
			select {
			case <-g.open:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		},
	})
	return g
}

// leaks is what no peer may read: where files are and what listens where, stacks, and Go's
// own words.
var leaks = regexp.MustCompile(`(?i)/tmp/|/home/|/work/|127\.0\.0\.1|\.go:\d|goroutine|0x[0-9a-f]{6}|runtime error|nil pointer|internal error|%!`)

// saysWhy asserts that a text is for people: that it names what it should, and nothing that
// is nobody's business.
func saysWhy(t testing.TB, text string, parts []string) {
	t.Helper()
	require.NotEmpty(t, text)
	require.NotRegexp(t, leaks, text)
	require.LessOrEqual(t, len(text), 4<<10)
	for _, part := range parts {
		require.Contains(t, text, part)
	}
}

func entriesOf(n, key, value int) map[string]string {
	m := map[string]string{}
	for i := range n {
		m[fmt.Sprintf("%0*d", key, i)] = strings.Repeat("v", value)
	}
	return m
}

// floats returns n float32 of both signs as bytes.
func floats(n int) []byte {
	data := make([]byte, 0, 4*n)
	for i := range n {
		v := float32(i%251) / 8
		if i%3 == 0 {
			v = -v
		}
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(v))
	}
	return data
}

// relus is what relu should make of floats.
func relus(data []byte) []byte {
	out := make([]byte, 0, len(data))
	for at := 0; at < len(data); at += 4 {
		v := math.Float32frombits(binary.LittleEndian.Uint32(data[at:]))
		out = binary.LittleEndian.AppendUint32(out, math.Float32bits(max(v, 0)))
	}
	return out
}

// idle returns limits with the times of those who say nothing, and of those who say that
// they wait.
func idle(of, most time.Duration) stream.Limits {
	return stream.Limits{ChunkIdle: stream.Instant(of), InputIdle: stream.Instant(most)}
}
