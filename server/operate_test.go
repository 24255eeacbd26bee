package server_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	reflectionalpha "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// dial is a connection of grpc's own, for stubs.
func (f *fixture) dial(t testing.TB) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(f.addr, reach, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	return conn
}

// model is the echo of another name.
func (f *fixture) named(t testing.TB, name string) engine.Model {
	t.Helper()
	m, unuse, err := f.models.Lookup("echo")
	require.NoError(t, err)
	t.Cleanup(unuse)
	return enginetest.Named(name, m)
}

const (
	healthy  = healthpb.HealthCheckResponse_SERVING
	ill      = healthpb.HealthCheckResponse_NOT_SERVING
	notKnown = healthpb.HealthCheckResponse_SERVICE_UNKNOWN
)

func TestHealthFollowsModelsThatComeAndGo(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	c := healthpb.NewHealthClient(f.dial(t))
	check := func(name string) (healthpb.HealthCheckResponse_ServingStatus, codes.Code) {
		r, err := c.Check(t.Context(), &healthpb.HealthCheckRequest{Service: name})
		return r.GetStatus(), status.Code(err)
	}
	is := func(name string, want healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		got, code := check(name)
		require.Equal(t, codes.OK, code)
		require.Equal(t, want, got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	watched, err := c.Watch(ctx, &healthpb.HealthCheckRequest{Service: "model/late"})
	require.NoError(t, err)
	seen := func(want healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		r, err := watched.Recv()
		require.NoError(t, err)
		require.Equal(t, want, r.GetStatus())
	}
	seen(notKnown)
	for _, name := range []string{"", "tensorferry.v1.TensorService", "model/echo", "model/relu"} {
		is(name, healthy)
	}
	for _, name := range []string{"echo", "model/", "model/late", strings.Repeat("x", 2000)} {
		_, code := check(name)
		require.Equal(t, codes.NotFound, code, name)
	}

	require.NoError(t, f.models.Add(f.named(t, "late")))
	seen(healthy)
	is("model/late", healthy)
	require.NoError(t, f.models.Remove("late"))
	seen(notKnown)
	_, code := check("model/late")
	require.Equal(t, codes.NotFound, code)
	list, err := c.List(t.Context(), &healthpb.HealthListRequest{})
	require.NoError(t, err)
	require.Contains(t, list.GetStatuses(), "model/echo")
	require.NotContains(t, list.GetStatuses(), "model/late")
	require.NoError(t, f.models.Replace(f.named(t, "late")))
	seen(healthy)
}

func TestNothingServesWhileTheServerDrains(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	g := addGate(t, f, "gate")
	c := healthpb.NewHealthClient(f.dial(t))
	s := f.session(t, client.Config{})
	x, err := tensor.Of([]byte{1})
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { _, err := s.Compute(t.Context(), "gate", x); ended <- err }()
	testkit.Eventually(t, func() bool { return g.started.Load() == 1 }, "the call")
	down := make(chan error, 1)
	go func() { down <- f.server.Shutdown(t.Context()) }()
	for _, name := range []string{"", "tensorferry.v1.TensorService", "model/echo", "model/gate"} {
		testkit.Eventually(t, func() bool {
			r, err := c.Check(t.Context(), &healthpb.HealthCheckRequest{Service: name})
			return err == nil && r.GetStatus() == ill
		}, "the end of "+name)
	}
	_, err = pb.NewTensorServiceClient(f.dial(t)).GetServiceInfo(t.Context(), &pb.GetServiceInfoRequest{})
	require.NoError(t, err, "an operator may still look")
	close(g.open)
	require.NoError(t, <-ended, "open calls finish")
	require.NoError(t, <-down)
}

func TestReflectionShowsTheService(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) { c.Reflection = true })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, err := reflectionpb.NewServerReflectionClient(f.dial(t)).ServerReflectionInfo(ctx)
	require.NoError(t, err)
	ask := func(q *reflectionpb.ServerReflectionRequest) *reflectionpb.ServerReflectionResponse {
		require.NoError(t, r.Send(q))
		answer, err := r.Recv()
		require.NoError(t, err)
		return answer
	}
	list := ask(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}})
	var names []string
	for _, s := range list.GetListServicesResponse().GetService() {
		names = append(names, s.GetName())
	}
	require.ElementsMatch(t, []string{
		"tensorferry.v1.TensorService", "grpc.health.v1.Health",
		"grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection",
	}, names)
	file := ask(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_FileContainingSymbol{
		FileContainingSymbol: "tensorferry.v1.TensorService",
	}}).GetFileDescriptorResponse().GetFileDescriptorProto()
	require.Len(t, file, 1)
	var d descriptorpb.FileDescriptorProto
	require.NoError(t, proto.Unmarshal(file[0], &d))
	require.Equal(t, "tensorferry.v1", d.GetPackage())
	require.Len(t, d.GetService()[0].GetMethod(), len(pb.TensorService_ServiceDesc.Methods)+len(pb.TensorService_ServiceDesc.Streams))
}

func TestReflectionSpeaksToOlderClients(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) { c.Reflection = true })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	old, err := reflectionalpha.NewServerReflectionClient(f.dial(t)).ServerReflectionInfo(ctx)
	require.NoError(t, err)
	require.NoError(t, old.Send(&reflectionalpha.ServerReflectionRequest{MessageRequest: &reflectionalpha.ServerReflectionRequest_ListServices{}})) //nolint:staticcheck // they are marked as deprecated
	answer, err := old.Recv()
	require.NoError(t, err)
	require.Len(t, answer.GetListServicesResponse().GetService(), 4) //nolint:staticcheck // as above
}

func TestWithoutReflectionThereIsNone(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	r, err := reflectionpb.NewServerReflectionClient(f.dial(t)).ServerReflectionInfo(t.Context())
	require.NoError(t, err)
	_, err = r.Recv()
	require.Equal(t, codes.Unimplemented, status.Code(err))
}

func TestMetricsSayWhatTheServerHasCounted(t *testing.T) {
	testkit.Start(t)
	all := prometheus.NewRegistry()
	f := serve(t, func(c *server.Config) { c.Metrics = all; c.QueuedCalls = 4 })
	g := addGate(t, f, "gate")
	s := f.session(t, client.Config{})
	x, err := tensor.Of(make([]float32, 1000))
	require.NoError(t, err)
	compute := func(model string) error { // when no call is open
		testkit.Eventually(t, func() bool { return f.counters(t)["calls"] == 0 }, "the end of the last call")
		_, err := s.Compute(t.Context(), model, x)
		return err
	}
	for range 3 {
		require.NoError(t, compute("relu"))
	}
	for i := range 4 { // a caller may ask for what it likes
		require.Error(t, compute(fmt.Sprint("no such model ", i)))
	}
	testkit.Eventually(t, f.isIdle, "the end of the last call")
	y, err := tensor.Of([]byte{1})
	require.NoError(t, err)
	ended := make(chan error, 4)
	for range 4 {
		go func() { _, err := s.Compute(t.Context(), "gate", y); ended <- err }()
	}
	testkit.Eventually(t, func() bool { return f.counters(t)["calls"] == 4 }, "the calls")
	_, err = s.Compute(t.Context(), "relu", x)
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	close(g.open)
	for range 4 {
		require.NoError(t, <-ended)
	}
	testkit.Eventually(t, func() bool { return f.counters(t)["calls_ok_total"] == 7 && f.isIdle() }, "the end of the calls")

	require.NoError(t, testutil.GatherAndCompare(all, strings.NewReader(`
# HELP tensorferry_ended_calls_total Calls that have ended.
# TYPE tensorferry_ended_calls_total counter
tensorferry_ended_calls_total{code="NOT_FOUND",model=""} 4
tensorferry_ended_calls_total{code="OK",model="gate"} 4
tensorferry_ended_calls_total{code="OK",model="relu"} 3
tensorferry_ended_calls_total{code="RESOURCE_EXHAUSTED",model="relu"} 1
# HELP tensorferry_calls_refused_total Calls refused at the limit.
# TYPE tensorferry_calls_refused_total counter
tensorferry_calls_refused_total 1
# HELP tensorferry_sessions Sessions open now.
# TYPE tensorferry_sessions gauge
tensorferry_sessions 1
# HELP tensorferry_received_bytes_total Payload bytes received in calls.
# TYPE tensorferry_received_bytes_total counter
tensorferry_received_bytes_total `+fmt.Sprint(f.counters(t)["received_bytes_total"])+`
`), "tensorferry_ended_calls_total", "tensorferry_calls_refused_total", "tensorferry_sessions", "tensorferry_received_bytes_total"))
	problems, err := testutil.GatherAndLint(all)
	require.NoError(t, err)
	require.Empty(t, problems)
	seconds := func() map[string]uint64 {
		families, err := all.Gather()
		require.NoError(t, err)
		out := map[string]uint64{}
		for _, family := range families {
			for _, m := range family.GetMetric() {
				if family.GetName() == "tensorferry_call_seconds" {
					out[m.GetLabel()[0].GetValue()] = m.GetHistogram().GetSampleCount()
				}
			}
		}
		return out
	}
	require.Equal(t, map[string]uint64{"": 4, "gate": 4, "relu": 3}, seconds())

	// A model that goes takes its labels along, not its calls.
	before := f.counters(t)
	require.NoError(t, f.models.Remove("gate"))
	require.Equal(t, map[string]uint64{"": 4, "relu": 3}, seconds())
	after := f.counters(t)
	require.Equal(t, before["calls_ok_total"], after["calls_ok_total"])

	// Another server can not have the same names, and can once this one is closed.
	cfg := server.Config{Models: f.models, Pool: f.host.Pool(), Budget: f.host.Budget(), Metrics: all}
	_, err = server.New(cfg)
	require.ErrorContains(t, err, "give each server a registry")
	f.server.Close()
	next, err := server.New(cfg)
	require.NoError(t, err)
	next.Close()
}

// notes are what was logged.
type notes struct {
	mu   sync.Mutex
	text strings.Builder
	on   string // panic at this message
}

func (n *notes) Write(p []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.on != "" && strings.Contains(string(p), n.on) {
		panic("a note too many")
	}
	return n.text.Write(p)
}

func (n *notes) String() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.text.String()
}

func (n *notes) log() *slog.Logger {
	return slog.New(slog.NewTextHandler(n, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// moody is a model that panics when it is asked about itself.
type moody struct {
	engine.Model
	calm *bool
}

func (m moody) Info() engine.Info {
	if !*m.calm {
		panic("secret of the model")
	}
	return m.Model.Info()
}

func TestAPanicInAHandlerIsAnErrorOfThatRPCAlone(t *testing.T) {
	testkit.Start(t)
	n := &notes{on: "session ended"}
	f := serve(t, func(c *server.Config) { c.Log = n.log() })
	calm := true
	require.NoError(t, f.models.Add(moody{f.named(t, "moody"), &calm}))
	c := pb.NewTensorServiceClient(f.dial(t))

	calm = false
	_, err := c.ListModels(t.Context(), &pb.ListModelsRequest{})
	require.Equal(t, codes.Internal, status.Code(err))
	require.Equal(t, "internal error", status.Convert(err).Message(), "nothing of the cause leaves the server")
	calm = true
	_, err = c.ListModels(t.Context(), &pb.ListModelsRequest{})
	require.NoError(t, err)

	r := openRaw(t, f.addr)
	r.send(&pb.Frame{Hello: r.greeting()}) // the second one ends the session, of which the log is told
	require.Equal(t, codes.Internal, r.status().Code())
	require.EqualValues(t, 2, f.counters(t)["panics_total"])
	text := n.String()
	require.Contains(t, text, "secret of the model")
	require.Contains(t, text, "moody.Info", "the stack says where")
	f.isEmpty(t)
}

func TestTheLogNamesEachRPCAndNoTensor(t *testing.T) {
	testkit.Start(t)
	n := &notes{}
	f := serve(t, func(c *server.Config) { c.Log = n.log() })
	r := openRaw(t, f.addr)
	o := offering("echo", []byte("payload"), 7)
	o.desc.Name = "secret-tensor"
	r.run(o)
	r.end()
	r.status()
	closed := f.session(t, client.Config{})
	_, err := closed.Compute(t.Context(), "echo", tensor.Tensor{Desc: tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{1}}, Data: []byte{1}})
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	_, err = pb.NewTensorServiceClient(f.dial(t)).ListModels(t.Context(), &pb.ListModelsRequest{})
	require.NoError(t, err)
	testkit.Eventually(t, func() bool {
		text := n.String()
		return strings.Contains(text, "level=DEBUG msg=\"rpc ended\" rpc=/tensorferry.v1.TensorService/StreamTensors code=CANCELLED") &&
			strings.Contains(text, "level=DEBUG msg=\"rpc ended\" rpc=/tensorferry.v1.TensorService/ListModels code=OK") &&
			strings.Contains(text, "level=DEBUG msg=\"session ended\"")
	}, "every line")
	require.NotContains(t, n.String(), "level=INFO", "nothing that an operator must know")
	require.NotContains(t, n.String(), "secret-tensor")
	require.NotContains(t, n.String(), "payload")
}

func TestLimitsOfAConnectionAreThoseOfTheConfig(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) {
		c.StreamsPerConnection, c.HeaderListBytes = 2, 1<<10
		c.Session = stream.Limits{OpenCalls: 3}
	})
	info, err := f.server.GetServiceInfo(t.Context(), nil)
	require.NoError(t, err)
	require.EqualValues(t, 2, info.GetLimits()["streams_per_connection"])
	require.EqualValues(t, 1<<10, info.GetLimits()["header_list_bytes"])
	require.EqualValues(t, 3, info.GetLimits()["open_calls_per_session"])

	// The third RPC of a connection waits for one of the others to end.
	c := pb.NewTensorServiceClient(f.dial(t))
	var open []context.CancelFunc
	for range 2 {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		s, err := c.StreamTensors(ctx)
		require.NoError(t, err)
		require.NoError(t, s.Send(&pb.Frame{Hello: &pb.Hello{Version: 1, SessionId: newID(), Checksum: pb.Checksum_CHECKSUM_CRC32C}}))
		_, err = s.Recv()
		require.NoError(t, err)
		open = append(open, cancel)
	}
	third := make(chan error, 1)
	go func() { _, err := c.ListModels(t.Context(), &pb.ListModelsRequest{}); third <- err }()
	open[0]()
	require.NoError(t, <-third)

	many := make([]string, 0, 100)
	for i := range 50 {
		many = append(many, fmt.Sprint("key", i), strings.Repeat("v", 20))
	}
	_, err = c.ListModels(metadata.AppendToOutgoingContext(t.Context(), many...), &pb.ListModelsRequest{})
	require.Equal(t, codes.Internal, status.Code(err), err) // grpc's own code for it
}

func TestAConnectionThatDoesNotShakeHandsIsClosed(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) { c.Handshake = 50 * time.Millisecond })
	noise := testkit.Bytes(8<<10, 1)
	for name, says := range map[string][]byte{
		"nothing": nil, "no HTTP/2": noise, "noise after the preface": append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), noise...),
	} {
		t.Run(name, func(t *testing.T) {
			c, err := net.Dial("tcp", f.addr)
			require.NoError(t, err)
			defer c.Close()
			_, _ = c.Write(says)                          // it may be closed already
			for buf := make([]byte, 1<<10); err == nil; { // settings first, then the end
				_, err = c.Read(buf)
			}
		})
	}
}

func TestTensorsOfTransfersAreCountedAsTheyEndAndAFullStoreIsLogged(t *testing.T) {
	testkit.Start(t)
	n := &notes{}
	all := prometheus.NewRegistry()
	f := serve(t, func(c *server.Config) { c.Store, c.Metrics, c.Log = shelf(t, 64<<10), all, n.log() })
	c, err := client.Dial(f.addr, client.Config{})
	require.NoError(t, err)
	defer c.Close()
	push := func(name string, size int) error {
		x, err := tensor.Of(testkit.Bytes(size, 1))
		require.NoError(t, err)
		_, err = c.Push(t.Context(), client.PushRequest{Tensors: []client.Input{{Name: name, Desc: x.Desc, Data: x.Data}}})
		return err
	}
	require.NoError(t, push("x", 1000))
	for range 5 {
		require.Error(t, push("secret", 65<<10))
	}
	_, err = c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "x"}, {Name: "absent"}}})
	require.Error(t, err)
	require.NoError(t, testutil.GatherAndCompare(all, strings.NewReader(`
# HELP tensorferry_ended_tensors_total Tensors of pushes and pulls that have ended, well or not.
# TYPE tensorferry_ended_tensors_total counter
tensorferry_ended_tensors_total{code="NOT_FOUND",kind="pull"} 1
tensorferry_ended_tensors_total{code="OK",kind="pull"} 1
tensorferry_ended_tensors_total{code="OK",kind="push"} 1
tensorferry_ended_tensors_total{code="RESOURCE_EXHAUSTED",kind="push"} 5
`), "tensorferry_ended_tensors_total"))
	require.EqualValues(t, 2, f.counters(t)["tensors_ok_total"])
	require.EqualValues(t, 6, f.counters(t)["tensors_failed_total"])
	require.Equal(t, 3, strings.Count(n.String(), "level=WARN msg=\"tensors refused: the store is full\""), "of 5 the 1st, 2nd and 4th")
	require.NotContains(t, n.String(), "secret")
}
