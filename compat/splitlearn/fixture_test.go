package splitlearn_test

import (
	"bytes"
	"compress/zlib"
	"context"
	"encoding/binary"
	"math"
	"net"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/x448/float16"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/splitlearn/comm"
	"github.com/tensorferry/tensorferry/compat/splitlearn"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

const mib = 1 << 20

// fixture is a real server with the service on a real socket, and a stock client of it.
type fixture struct {
	pb.ComputeServiceClient
	host   *cpu.Host
	models *engine.Registry
	server *server.Server
	addr   string
}

func listen(t testing.TB) net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	return l
}

func serve(t testing.TB, memory int64, change func(*server.Config)) *fixture {
	t.Helper()
	return serveModel(t, memory, "echo", change)
}

func serveModel(t testing.TB, memory int64, model string, change func(*server.Config)) *fixture {
	t.Helper()
	host := cpu.NewHost(cpu.HostConfig{MemoryBytes: memory, Workers: 2})
	f := &fixture{host: host, models: engine.NewRegistry()}
	for _, m := range append(cpu.Builtins(host), cpu.Slow(host)) {
		require.NoError(t, f.models.Add(m))
	}
	own := listen(t)
	cfg := server.Config{Models: f.models, Pool: host.Pool(), Budget: host.Budget(), Version: "test", Services: []server.Service{splitlearn.New(own, model)}}
	if change != nil {
		change(&cfg)
	}
	var err error
	f.server, err = server.New(cfg)
	require.NoError(t, err)
	native := listen(t)
	served := make(chan error, 1)
	go func() { served <- f.server.Serve(native) }()
	f.addr = own.Addr().String()
	f.ComputeServiceClient = pb.NewComputeServiceClient(dial(t, f.addr))
	t.Cleanup(func() {
		f.server.Close()
		require.NoError(t, <-served)
		testkit.Eventually(t, func() bool {
			slabs, _ := host.Pool().Live()
			used, _, _ := host.Budget().Used()
			return f.counters(t)["calls"] == 0 && slabs == 0 && used == 0
		}, "nothing left of any call")
		host.Close()
	})
	return f
}

func dial(t testing.TB, addr string) *grpc.ClientConn {
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.MaxCallSendMsgSize(math.MaxInt32)))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (f *fixture) counters(t testing.TB) map[string]int64 {
	info, err := f.server.GetServiceInfo(context.Background(), nil)
	require.NoError(t, err)
	return info.GetCounters()
}

// add adds a Go function over whole tensors.
func (f *fixture) add(t testing.TB, fn cpu.Func) {
	t.Helper()
	m, err := fn.Model(f.host)
	require.NoError(t, err)
	require.NoError(t, f.models.Add(m))
}

func anyShape(name string, types ...tensor.DataType) []engine.Port {
	return []engine.Port{{Name: name, DTypes: types, Shape: []int64{engine.AnyAxes}}}
}

// constant adds a model whose result is always the same.
func (f *fixture) constant(t testing.TB, name string, y tensor.Tensor) {
	f.add(t, cpu.Func{
		Info: engine.Info{Name: name, Inputs: anyShape("x"), Outputs: anyShape("y")},
		Call: func(context.Context, []tensor.Tensor, map[string]string) ([]tensor.Tensor, error) {
			return []tensor.Tensor{{Desc: y.Desc, Data: bytes.Clone(y.Data)}}, nil
		},
	})
}

// addBlocker adds a model that waits for its context, and counts the runs that have ended so.
func (f *fixture) addBlocker(t testing.TB) (running, cancelled *atomic.Int64) {
	running, cancelled = new(atomic.Int64), new(atomic.Int64)
	f.add(t, cpu.Func{
		Info: engine.Info{Name: "blocker", Inputs: anyShape("x"), Outputs: anyShape("y")},
		Call: func(ctx context.Context, _ []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
			running.Add(1)
			<-ctx.Done()
			cancelled.Add(1)
			return nil, context.Cause(ctx)
		},
	})
	return running, cancelled
}

// Codecs of their clients.

func raw(values ...float32) (b []byte) {
	for _, v := range values {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	}
	return b
}

func floats(t testing.TB, b []byte) (values []float32) {
	require.Zero(t, len(b)%4)
	for ; len(b) > 0; b = b[4:] {
		values = append(values, math.Float32frombits(binary.LittleEndian.Uint32(b)))
	}
	return values
}

func half(values ...float32) (b []byte) {
	for _, v := range values {
		b = binary.LittleEndian.AppendUint16(b, float16.Fromfloat32(v).Bits())
	}
	return b
}

var writers [10]*zlib.Writer // by level; each takes a megabyte to make

func deflate(b []byte, level int) []byte {
	var out bytes.Buffer
	w := writers[level]
	if w == nil {
		w, _ = zlib.NewWriterLevel(&out, level)
		writers[level] = w
	}
	w.Reset(&out)
	_, _ = w.Write(b)
	_ = w.Close()
	return out.Bytes()
}

func inflate(t testing.TB, b []byte) []byte {
	r, err := zlib.NewReader(bytes.NewReader(b))
	require.NoError(t, err)
	var out bytes.Buffer
	_, err = out.ReadFrom(r)
	require.NoError(t, err)
	return out.Bytes()
}

func compute(data []byte, shape ...int32) *pb.ComputeRequest {
	return &pb.ComputeRequest{Data: data, Shape: shape}
}

func hasCode(t testing.TB, want codes.Code, err error) {
	t.Helper()
	require.Equal(t, want, status.Code(err), "%v", err)
}
