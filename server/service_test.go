package server_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math"
	"math/big"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// foreign is a service of somebody else's: its messages are plain bytes, of which it
// makes a tensor for the model that the RPC's metadata names.
type foreign struct{ models *server.Models }

const foreignName = "test.Foreign"

var foreignDesc = grpc.ServiceDesc{
	ServiceName: foreignName,
	HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{{MethodName: "Whole", Handler: func(srv any, ctx context.Context, decode func(any) error, around grpc.UnaryServerInterceptor) (any, error) {
		in := new(wrapperspb.BytesValue)
		if err := decode(in); err != nil {
			return nil, err
		}
		return around(ctx, in, &grpc.UnaryServerInfo{Server: srv, FullMethod: "/" + foreignName + "/Whole"}, func(ctx context.Context, req any) (any, error) {
			return srv.(*foreign).whole(ctx, req.(*wrapperspb.BytesValue))
		})
	}}},
	Streams: []grpc.StreamDesc{{StreamName: "Rows", ClientStreams: true, ServerStreams: true, Handler: func(srv any, s grpc.ServerStream) error {
		return srv.(*foreign).rows(s)
	}}},
}

func modelOf(ctx context.Context) string {
	md, _ := metadata.FromIncomingContext(ctx)
	return append(md.Get("model"), "echo")[0]
}

func bytesDesc(n int) tensor.Desc {
	return tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(n)}}
}

// whole runs a model over one message.
func (f *foreign) whole(ctx context.Context, in *wrapperspb.BytesValue) (*wrapperspb.BytesValue, error) {
	x := tensor.Tensor{Desc: bytesDesc(len(in.Value)), Data: in.Value}
	out, _, _, err := f.models.Compute(ctx, modelOf(ctx), engine.Call{Inputs: make([]engine.Input, 1)}, []tensor.Tensor{x}, 64*mib)
	if err != nil {
		return nil, err
	}
	return &wrapperspb.BytesValue{Value: out[0].Data}, nil
}

// rows runs a model over a stream of messages, the first of which tells how many bytes
// follow, and sends each result as soon as it is there.
func (f *foreign) rows(s grpc.ServerStream) error {
	var head wrapperspb.BytesValue
	if err := s.RecvMsg(&head); err != nil {
		return err
	}
	total := 0
	for _, b := range head.Value {
		total = total<<8 | int(b)
	}
	r, err := f.models.Open(s.Context(), modelOf(s.Context()), engine.Call{Inputs: []engine.Input{{Desc: bytesDesc(total), ChunkBytes: 64 << 10}}})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(s.Context())
	defer cancel(nil)
	go func() { // ends with the last message, or with the RPC
		for sent := 0; sent < total; {
			var m wrapperspb.BytesValue
			err := s.RecvMsg(&m)
			if errors.Is(err, io.EOF) {
				err = status.Errorf(codes.InvalidArgument, "the input ended after %d of %d bytes", sent, total)
			}
			if err == nil {
				err = r.Write(ctx, 0, m.Value)
			}
			if err != nil {
				cancel(err)
				return
			}
			sent += len(m.Value)
		}
	}()
	for {
		o, err := r.Next(ctx)
		if errors.Is(err, io.EOF) {
			return r.End(nil)
		}
		if err != nil {
			return r.End(err)
		}
		err = s.SendMsg(&wrapperspb.BytesValue{Value: o.Data}) // a copy, made before it returns
		o.Release()
		if err != nil {
			return r.End(err)
		}
	}
}

// withForeign adds the service to a server's configuration; own is a listener of its own.
func withForeign(own net.Listener, change func(*server.Service)) func(*server.Config) {
	return func(c *server.Config) {
		svc := server.Service{Listener: own, Register: func(r grpc.ServiceRegistrar, m *server.Models) {
			r.RegisterService(&foreignDesc, &foreign{m})
		}}
		if change != nil {
			change(&svc)
		}
		c.Services = append(c.Services, svc)
	}
}

// foreignClient talks to the service.
type foreignClient struct{ *grpc.ClientConn }

func dialForeign(t testing.TB, addr string) foreignClient {
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return foreignClient{conn}
}

func (c foreignClient) whole(ctx context.Context, x []byte) ([]byte, error) {
	out := new(wrapperspb.BytesValue)
	err := c.Invoke(ctx, "/"+foreignName+"/Whole", &wrapperspb.BytesValue{Value: x}, out)
	return out.Value, err
}

func (c foreignClient) open(ctx context.Context, total int) (grpc.ClientStream, error) {
	s, err := c.NewStream(ctx, &foreignDesc.Streams[0], "/"+foreignName+"/Rows")
	if err != nil {
		return nil, err
	}
	err = s.SendMsg(&wrapperspb.BytesValue{Value: []byte{byte(total >> 24), byte(total >> 16), byte(total >> 8), byte(total)}})
	if errors.Is(err, io.EOF) { // it has ended already, as RecvMsg says
		err = nil
	}
	return s, err
}

func (f *fixture) health(t testing.TB, name string) string {
	conn, err := grpc.NewClient(f.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	r, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: name})
	if err != nil {
		return status.Code(err).String()
	}
	return r.GetStatus().String()
}

func TestAForeignServiceRunsModelsInMemoryAndAsStreams(t *testing.T) {
	testkit.Start(t)
	own := listen(t)
	for name, tc := range map[string]struct {
		own    net.Listener
		addr   func(*fixture) string
		change func(*server.Service)
		size   int
	}{
		"on the listener of the server": {nil, func(f *fixture) string { return f.addr }, nil, mib},
		"on a listener of its own": {own, func(*fixture) string { return own.Addr().String() }, func(s *server.Service) {
			s.MessageBytes = 16 * mib
		}, 8 * mib},
	} {
		t.Run(name, func(t *testing.T) {
			registry := prometheus.NewRegistry()
			f := serve(t, func(c *server.Config) {
				c.Metrics = registry
				withForeign(tc.own, tc.change)(c)
			})
			c := dialForeign(t, tc.addr(f))
			x := testkit.Bytes(tc.size, 1)
			y, err := c.whole(t.Context(), x)
			require.NoError(t, err)
			require.True(t, bytes.Equal(x, y))

			s, err := c.open(t.Context(), len(x))
			require.NoError(t, err)
			go func() {
				for i := 0; i < len(x); i += 100_000 {
					if s.SendMsg(&wrapperspb.BytesValue{Value: x[i:min(i+100_000, len(x))]}) != nil {
						return
					}
				}
			}()
			got := 0
			for got < len(x) { // blocks may overtake each other: echo's are compared by their sum
				var m wrapperspb.BytesValue
				require.NoError(t, s.RecvMsg(&m))
				got += len(m.Value)
			}
			require.ErrorIs(t, s.RecvMsg(new(wrapperspb.BytesValue)), io.EOF)

			// It is counted, and in health.
			testkit.Eventually(t, func() bool { return f.counters(t)["calls_ok_total"] == 2 }, "two calls that ended well")
			require.Equal(t, "SERVING", f.health(t, foreignName))
			families, err := registry.Gather()
			require.NoError(t, err)
			counted := 0.0
			for _, family := range families {
				if family.GetName() == "tensorferry_ended_calls_total" {
					for _, m := range family.GetMetric() {
						counted += m.GetCounter().GetValue()
					}
				}
			}
			require.Equal(t, 2.0, counted)

			// Its callers are told what a caller of the TensorService would be.
			_, err = c.whole(metadata.AppendToOutgoingContext(t.Context(), "model", "nothing"), x)
			require.Equal(t, codes.NotFound, status.Code(err), "%v", err)
			_, err = c.whole(metadata.AppendToOutgoingContext(t.Context(), "model", "layernorm"), x)
			require.Equal(t, codes.NotFound, status.Code(err), "%v", err)
		})
	}
}

func anyShape(port string) []engine.Port {
	return []engine.Port{{Name: port, Shape: []int64{engine.AnyAxes}}}
}

// addBlocker adds a model whose runs wait until they are let go.
func (f *fixture) addBlocker(t testing.TB, let <-chan struct{}) (running *atomic.Int64) {
	running = new(atomic.Int64)
	f.add(t, cpu.RowFunc{
		Info: engine.Info{Name: "blocker", Rows: 1, Inputs: anyShape("x"), Outputs: anyShape("y")},
		Rows: func(ctx context.Context, b cpu.RowBlock) error {
			running.Add(1)
			select {
			case <-let:
			case <-ctx.Done():
			}
			copy(b.Out[0], b.In[0])
			return context.Cause(ctx)
		},
	})
	return running
}

func TestAForeignServiceIsUnderTheLimitsOfTheServer(t *testing.T) {
	testkit.Start(t)
	const open = 4
	f := serve(t, func(c *server.Config) {
		c.QueuedCalls = open
		withForeign(nil, nil)(c)
	})
	let := make(chan struct{})
	running := f.addBlocker(t, let)
	c := dialForeign(t, f.addr)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "model", "blocker")
	ended := make(chan error, open)
	for range open {
		go func() {
			_, err := c.whole(ctx, []byte("x"))
			ended <- err
		}()
	}
	testkit.Eventually(t, func() bool { return f.counters(t)["calls"] == open }, "four calls")
	_, err := c.whole(ctx, []byte("x"))
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	saysWhy(t, status.Convert(err).Message(), []string{"calls", "limit of the server is 4", "later"})
	require.NotEmpty(t, status.Convert(err).Details(), "when to try again")
	require.EqualValues(t, 1, f.counters(t)["calls_refused_total"])

	// Drain lets what is open end, and refuses what is new.
	drained := make(chan error, 1)
	testkit.Eventually(t, func() bool { return running.Load() > 0 }, "a block that computes")
	go func() { drained <- f.server.Shutdown(t.Context()) }()
	testkit.Eventually(t, func() bool {
		_, err := c.whole(ctx, []byte("x"))
		return status.Code(err) == codes.Unavailable
	}, "a refusal while draining")
	select {
	case err := <-drained:
		t.Fatalf("drained beside open calls: %v", err)
	default:
	}
	close(let)
	for range open {
		require.NoError(t, <-ended)
	}
	require.NoError(t, <-drained)
}

func TestAForeignStreamMayBeSilentAsLongAsItsOwnListenerSays(t *testing.T) {
	testkit.Start(t)
	own := listen(t)
	f := serve(t, func(c *server.Config) {
		c.Session.ChunkIdle, c.Session.FirstFrame = 20e6, 20e6 // 20 ms
		withForeign(own, func(s *server.Service) { s.Idle, s.FirstMessage = time.Hour, time.Hour })(c)
		withForeign(nil, nil)(c)
	})
	short, err := dialForeign(t, f.addr).open(t.Context(), 4)
	require.NoError(t, err)
	require.Equal(t, codes.DeadlineExceeded, status.Code(short.RecvMsg(new(wrapperspb.BytesValue))))
	// By now the other would have ended, too, were its limits the same.
	long, err := dialForeign(t, own.Addr().String()).open(t.Context(), 4)
	require.NoError(t, err)
	again, err := dialForeign(t, f.addr).open(t.Context(), 4)
	require.NoError(t, err)
	require.Equal(t, codes.DeadlineExceeded, status.Code(again.RecvMsg(new(wrapperspb.BytesValue))))
	require.NoError(t, long.SendMsg(&wrapperspb.BytesValue{Value: []byte{1, 2, 3, 4}}))
	var y wrapperspb.BytesValue
	require.NoError(t, long.RecvMsg(&y))
	require.Equal(t, []byte{1, 2, 3, 4}, y.Value)
}

func TestAForeignStreamEndsAsItsHandlerOrItsModelSays(t *testing.T) {
	testkit.Start(t)
	own := listen(t)
	f := serve(t, withForeign(own, func(s *server.Service) { s.Idle = time.Hour }))
	f.add(t, cpu.RowFunc{
		Info: engine.Info{Name: "broken", Rows: 1, Inputs: anyShape("x"), Outputs: anyShape("y")},
		Rows: func(context.Context, cpu.RowBlock) error { return engine.Publicf("the weights are wrong") },
	})
	c := dialForeign(t, own.Addr().String())
	read := func(model string, total int, send ...[]byte) (n int, err error) {
		s, err := c.open(metadata.AppendToOutgoingContext(t.Context(), "model", model), total)
		require.NoError(t, err)
		for _, data := range send {
			if data == nil {
				require.NoError(t, s.CloseSend())
				break
			}
			err := s.SendMsg(&wrapperspb.BytesValue{Value: data})
			if errors.Is(err, io.EOF) {
				break // it is over: RecvMsg says why
			}
			require.NoError(t, err)
		}
		for {
			var m wrapperspb.BytesValue
			if err := s.RecvMsg(&m); err != nil {
				return n, err
			}
			n += len(m.Value)
		}
	}
	_, err := read("echo", mib, make([]byte, 100_000), nil)
	require.Equal(t, codes.InvalidArgument, status.Code(err), "an input cut short: %v", err)
	require.Contains(t, err.Error(), "ended after 100000 of")
	_, err = read("echo", 10, make([]byte, 11))
	require.Equal(t, codes.InvalidArgument, status.Code(err), "an input too long: %v", err)
	_, err = read("broken", 2*mib, make([]byte, mib), make([]byte, 500_000)) // which then waits for its client
	require.Equal(t, codes.Internal, status.Code(err))
	require.Contains(t, err.Error(), "the weights are wrong")
	n, err := read("echo", 0)
	require.ErrorIs(t, err, io.EOF, "an input without bytes")
	require.Zero(t, n)
	counters := f.counters(t)
	require.EqualValues(t, 1, counters["calls_ok_total"])
	require.EqualValues(t, 3, counters["calls_failed_total"])
}

func TestARunThatAHandlerLeavesOpenEndsWithIt(t *testing.T) {
	testkit.Start(t)
	var models *server.Models
	var handle func(r *server.Run) error
	f := serve(t, func(c *server.Config) {
		desc := foreignDesc
		desc.Streams = []grpc.StreamDesc{{StreamName: "Rows", ClientStreams: true, ServerStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
			r, err := models.Open(s.Context(), "echo", engine.Call{Inputs: []engine.Input{{Desc: bytesDesc(3 * mib), ChunkBytes: mib}}})
			if err != nil {
				return err
			}
			return handle(r)
		}}}
		c.Services = []server.Service{{Register: func(r grpc.ServiceRegistrar, m *server.Models) {
			models = m
			r.RegisterService(&desc, new(any))
		}}}
	})
	c := dialForeign(t, f.addr)
	take := func(r *server.Run) { // and keep
		_ = r.Write(r.Context(), 0, make([]byte, 2*mib))
		_, _ = r.Next(r.Context())
	}
	for name, tc := range map[string]struct {
		handle func(r *server.Run) error
		want   codes.Code
	}{
		"returns":               {func(*server.Run) error { return nil }, codes.OK},
		"returns with a result": {func(r *server.Run) error { take(r); return nil }, codes.OK},
		"panics":                {func(*server.Run) error { panic("oh") }, codes.Internal},
		"panics with a result":  {func(r *server.Run) error { take(r); panic("oh") }, codes.Internal},
		"fails":                 {func(*server.Run) error { return status.Error(codes.Aborted, "enough") }, codes.Aborted},
		"ends it twice": {func(r *server.Run) error {
			defer func() { _ = r.End(nil) }()
			return r.End(status.Error(codes.Aborted, "enough"))
		}, codes.Aborted},
		"ends it with its status": {func(r *server.Run) error { return r.End(status.Error(codes.OutOfRange, "row 3")) }, codes.OutOfRange},
	} {
		t.Run(name, func(t *testing.T) {
			handle = tc.handle
			s, err := c.open(t.Context(), 0)
			require.NoError(t, err)
			err = s.RecvMsg(new(wrapperspb.BytesValue))
			if errors.Is(err, io.EOF) {
				err = nil
			}
			require.Equal(t, tc.want, status.Code(err), "%v", err)
			testkit.Eventually(t, f.isIdle, "nothing left of the run")
		})
	}
	counters := f.counters(t)
	require.Zero(t, counters["runs_abandoned_total"])
	require.Equal(t, counters["calls_total"], counters["calls_failed_total"])
	require.Equal(t, "SERVING", f.health(t, "model/echo"))
}

func TestACancelledForeignCallEndsItsRun(t *testing.T) {
	testkit.Start(t)
	f := serve(t, withForeign(nil, nil))
	running := f.addBlocker(t, nil)
	ctx, cancel := context.WithCancel(metadata.AppendToOutgoingContext(t.Context(), "model", "blocker"))
	ended := make(chan error, 1)
	go func() {
		_, err := dialForeign(t, f.addr).whole(ctx, []byte("x"))
		ended <- err
	}()
	testkit.Eventually(t, func() bool { return running.Load() > 0 }, "a block that computes")
	cancel()
	require.Equal(t, codes.Canceled, status.Code(<-ended))
	testkit.Eventually(t, func() bool { return f.counters(t)["calls_cancelled_total"] == 1 }, "the end of the run")
}

func TestAForeignHandlerIsChargedForWhatItMakesUntilItsRPCEnds(t *testing.T) {
	testkit.Start(t)
	var models *server.Models
	var handle func(ctx context.Context, in []byte) error
	f := serve(t, func(c *server.Config) {
		desc := foreignDesc
		desc.Methods = []grpc.MethodDesc{{MethodName: "Whole", Handler: func(_ any, ctx context.Context, decode func(any) error, around grpc.UnaryServerInterceptor) (any, error) {
			in := new(wrapperspb.BytesValue)
			if err := decode(in); err != nil {
				return nil, err
			}
			return around(ctx, in, &grpc.UnaryServerInfo{FullMethod: "/" + foreignName + "/Whole"}, func(ctx context.Context, _ any) (any, error) {
				return in, handle(ctx, in.GetValue())
			})
		}}}
		c.Services = []server.Service{{Register: func(r grpc.ServiceRegistrar, m *server.Models) {
			models = m
			r.RegisterService(&desc, new(any))
		}}}
	})
	var id tensor.ID
	seen := engine.Info{Name: "seen", Inputs: anyShape("x"), Outputs: anyShape("y")}
	m, err := cpu.RowFunc{Info: seen, Bind: func(c engine.Call) (cpu.RowsFunc, error) {
		id = c.ID
		return func(_ context.Context, b cpu.RowBlock) error { copy(b.Out[0], b.In[0]); return nil }, nil
	}}.Model(f.host)
	require.NoError(t, err)
	require.NoError(t, f.models.Add(m))
	used := func() int64 { n, _, _ := f.host.Budget().Used(); return n }
	idle := used()
	c := dialForeign(t, f.addr)
	compute := func(ctx context.Context, model string, data []byte) error {
		x := tensor.Tensor{Desc: bytesDesc(len(data)), Data: data}
		_, _, _, err := models.Compute(ctx, model, engine.Call{ID: tensor.ID{7}, Inputs: make([]engine.Input, 1)}, []tensor.Tensor{x}, 64*mib)
		return err
	}
	for name, tc := range map[string]struct {
		handle func(ctx context.Context) error
		code   codes.Code
	}{
		"holds": {func(ctx context.Context) error {
			assert.NoError(t, models.Hold(ctx, mib))
			assert.EqualValues(t, idle+2*mib, used(), "Go's heap takes twice as much")
			return nil
		}, codes.OK},
		"computes what it holds": {func(ctx context.Context) error {
			assert.NoError(t, models.Hold(ctx, mib))
			assert.NoError(t, compute(ctx, "seen", make([]byte, mib)))
			assert.Equal(t, tensor.ID{7}, id)
			assert.InDelta(t, idle+4*mib, used(), 4096, "and the output")
			return nil
		}, codes.OK},
		"computes what it made": {func(ctx context.Context) error {
			assert.NoError(t, compute(ctx, "seen", make([]byte, mib)))
			assert.InDelta(t, idle+4*mib, used(), 4096, "but for the message")
			return nil
		}, codes.OK},
		"holds too much": {func(ctx context.Context) error {
			assert.NoError(t, models.Hold(ctx, 64*mib))
			return models.Hold(ctx, 65*mib)
		}, codes.ResourceExhausted},
		"leaves some to small calls of others": {func(ctx context.Context) error {
			for models.Hold(ctx, mib) == nil { // until there is no more
			}
			return compute(models.Context(), "seen", make([]byte, 30_000))
		}, codes.OK},
		"panics": {func(ctx context.Context) error {
			assert.NoError(t, models.Hold(ctx, mib))
			panic("oh")
		}, codes.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			handle = func(ctx context.Context, _ []byte) error { return tc.handle(ctx) }
			_, err := c.whole(t.Context(), []byte("x"))
			require.Equal(t, tc.code, status.Code(err), "%v", err)
			testkit.Eventually(t, func() bool { return used() == idle }, "nothing held after the RPC")
		})
	}
	// What a service does by itself ends with it, and it knows whether there is anybody to serve.
	require.NoError(t, compute(models.Context(), "seen", make([]byte, mib)))
	require.Equal(t, idle, used())
	require.True(t, models.Ready(""))
	require.True(t, models.Ready("seen"))
	require.False(t, models.Ready("nothing"))
	require.NoError(t, f.models.Remove("seen"))
	require.False(t, models.Ready("seen"))
	require.NoError(t, f.server.Shutdown(t.Context()))
	require.False(t, models.Ready(""))
	require.Error(t, models.Context().Err())
	require.Error(t, compute(models.Context(), "echo", []byte("x")))
}

// bearer is a secret that every RPC must bring.
type bearer string

func (t bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": string(t)}, nil
}
func (bearer) RequireTransportSecurity() bool { return true }

func TestUsersBringInterceptorsAndCredentials(t *testing.T) {
	testkit.Start(t)
	cert, roots := certificate(t)
	allowed := func(ctx context.Context) error {
		if md, _ := metadata.FromIncomingContext(ctx); len(md.Get("authorization")) == 1 && md.Get("authorization")[0] == "secret" {
			return nil
		}
		return status.Error(codes.Unauthenticated, "no token")
	}
	f := serve(t, func(c *server.Config) {
		c.Credentials = credentials.NewServerTLSFromCert(&cert)
		c.UnaryInterceptors = append(c.UnaryInterceptors, func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			if err := allowed(ctx); err != nil {
				return nil, err
			}
			return next(ctx, req)
		})
		c.StreamInterceptors = append(c.StreamInterceptors, func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			if err := allowed(s.Context()); err != nil {
				return err
			}
			return next(srv, s)
		})
	})
	x, err := tensor.Of([]float32{-1, 2})
	require.NoError(t, err)
	dial := func(cfg client.Config) *client.Client {
		c, err := client.Dial(f.addr, cfg)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, c.Close()) })
		return c
	}
	secure := credentials.NewTLS(&tls.Config{RootCAs: roots, ServerName: "localhost", MinVersion: tls.VersionTLS13})
	y, err := dial(client.Config{Credentials: secure, PerRPC: bearer("secret")}).Compute(t.Context(), "relu", x)
	require.NoError(t, err)
	require.Equal(t, x.Desc, y.Desc)
	for name, cfg := range map[string]client.Config{
		"without a token":    {Credentials: secure},
		"with a wrong token": {Credentials: secure, PerRPC: bearer("guess")},
	} {
		c := dial(cfg)
		_, err = c.Compute(t.Context(), "relu", x)
		require.Equal(t, codes.Unauthenticated, status.Code(err), "%s: %v", name, err)
		_, err = c.Models(t.Context())
		require.Equal(t, codes.Unauthenticated, status.Code(err), "%s: %v", name, err)
	}
	_, err = dial(client.Config{OpenTimeout: time.Second}).Models(t.Context())
	require.Error(t, err, "a client without TLS")
}

// certificate makes one for localhost, and the authority that vouches for it.
func certificate(t testing.TB) (tls.Certificate, *x509.CertPool) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	parsed, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	roots := x509.NewCertPool()
	roots.AddCert(parsed)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, roots
}

// handling serves a foreign service whose streams a function handles, and returns what calls it:
// an RPC that waits for its end.
func handling(t *testing.T, change func(*server.Config), handle func(ctx context.Context, m *server.Models) error) (*fixture, func(ctx context.Context) error) {
	t.Helper()
	desc := foreignDesc
	var models *server.Models
	desc.Streams = []grpc.StreamDesc{{StreamName: "Rows", ClientStreams: true, ServerStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
		return handle(s.Context(), models)
	}}}
	f := serve(t, func(c *server.Config) {
		c.Services = []server.Service{{Register: func(r grpc.ServiceRegistrar, m *server.Models) {
			models = m
			r.RegisterService(&desc, new(any))
		}}}
		if change != nil {
			change(c)
		}
	})
	c := dialForeign(t, f.addr)
	return f, func(ctx context.Context) error {
		s, err := c.open(ctx, 0)
		if err == nil {
			err = s.RecvMsg(new(wrapperspb.BytesValue))
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err
	}
}

// withStore gives a server a store and a source.
func withStore(t *testing.T) func(*server.Config) {
	return func(c *server.Config) {
		kept := memory.New(testkit.Pool(t), 16*mib)
		t.Cleanup(func() { require.NoError(t, kept.Close()) })
		c.Store, c.Sources = kept, new(store.Sources)
		require.NoError(t, c.Sources.Add("gen", store.Generator()))
		require.NoError(t, c.Sources.Add("boom", func(context.Context, map[string]string) (store.Reader, error) { panic("oh") }))
	}
}

func TestAForeignServicePutsIntoTheStoreAndGetsFromIt(t *testing.T) {
	testkit.Start(t)
	x := testkit.Bytes(3*mib+5, 1)
	registry := prometheus.NewRegistry()
	f, call := handling(t, func(c *server.Config) {
		withStore(t)(c)
		c.Metrics = registry
	}, func(ctx context.Context, m *server.Models) error {
		put, err := m.Put(ctx, "a/b", bytesDesc(len(x)))
		if err != nil {
			return err
		}
		for piece := range slices.Chunk(x, 2*mib-1) {
			if err := put.Write(piece); err != nil {
				return put.End(err)
			}
		}
		if _, err := m.Get(ctx, "a/b", false, nil); status.Code(err) == codes.OK || err == nil {
			return errors.New("it is there before its end")
		}
		if err := put.End(nil); err != nil {
			return err
		}
		get, err := m.Get(ctx, "a/b", false, nil)
		if err != nil {
			return err
		}
		y := make([]byte, len(x))
		if err := errors.Join(get.Read(y[:7]), get.Read(y[7:])); err != nil || !get.Desc.Equal(bytesDesc(len(x))) || !bytes.Equal(x, y) {
			return get.End(errors.Join(errors.New("other bytes"), err))
		}
		if err := get.End(nil); err != nil {
			return err
		}
		get, err = m.Get(ctx, "gen", true, map[string]string{"shape": "2,3", "fill": "count"})
		if err != nil {
			return err
		}
		y = make([]byte, 24)
		if err := get.Read(y); err != nil || y[23] == 0 {
			return get.End(errors.Join(errors.New("no numbers"), err))
		}
		return get.End(nil)
	})
	require.NoError(t, call(t.Context()))
	c := f.counters(t)
	require.EqualValues(t, 3, c["tensors_ok_total"])
	require.EqualValues(t, 1, c["tensors_failed_total"], "the one that was not there")
	require.EqualValues(t, 2*len(x)+24, c["transfer_bytes_total"])
	require.Zero(t, c["open_transfers"])
	require.EqualValues(t, 1, c["rpcs_ok_total"])
	require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`# HELP tensorferry_ended_rpcs_total RPCs that have ended, of every service.
# TYPE tensorferry_ended_rpcs_total counter
tensorferry_ended_rpcs_total{code="OK",service="test.Foreign"} 1
`), "tensorferry_ended_rpcs_total"))
	list, err := f.server.ListTensors(t.Context(), &pb.ListTensorsRequest{})
	require.NoError(t, err)
	require.Len(t, list.GetTensors(), 1)
	require.Equal(t, "a/b", list.GetTensors()[0].GetName())
}

func TestTransfersOfAForeignServiceAreUnderTheLimitsOfTheServer(t *testing.T) {
	testkit.Start(t)
	put := func(name string, size int, then func(*server.Transfer) error) func(context.Context, *server.Models) error {
		return func(ctx context.Context, m *server.Models) error {
			p, err := m.Put(ctx, name, bytesDesc(size))
			if err != nil {
				return err
			}
			return then(p)
		}
	}
	get := func(name string, source bool, params map[string]string) func(context.Context, *server.Models) error {
		return func(ctx context.Context, m *server.Models) error {
			g, err := m.Get(ctx, name, source, params)
			if err != nil {
				return err
			}
			return g.End(g.Read(make([]byte, 5)))
		}
	}
	var handle func(context.Context, *server.Models) error
	var evil bool
	f, call := handling(t, func(c *server.Config) {
		withStore(t)(c)
		c.StoredBytes, c.Transfers = 4*mib, 5
	}, func(ctx context.Context, m *server.Models) error { return handle(ctx, m) })
	for name, tc := range map[string]struct {
		handle func(context.Context, *server.Models) error
		want   codes.Code
		says   string
	}{
		"no name":           {put("", 1, nil), codes.InvalidArgument, "name"},
		"larger than any":   {put("x", 4*mib+1, nil), codes.ResourceExhausted, "limit of a tensor"},
		"too many bytes":    {put("x", 3, func(p *server.Transfer) error { return p.End(p.Write(make([]byte, 4))) }), codes.InvalidArgument, "of a tensor of 3"},
		"too few bytes":     {put("x", 3, func(p *server.Transfer) error { return p.End(nil) }), codes.InvalidArgument, "only 0 bytes"},
		"ended":             {put("x", 3, func(p *server.Transfer) error { _ = p.End(errors.New("why")); return p.Write([]byte{1}) }), codes.Internal, ""},
		"left open":         {put("x", 3, func(*server.Transfer) error { return nil }), codes.OK, ""},
		"panic":             {put("x", 3, func(*server.Transfer) error { panic("oh") }), codes.Internal, ""},
		"refused":           {put("x", 3, func(p *server.Transfer) error { return p.End(&terms.RefusedError{Code: 9, Text: "no"}) }), codes.FailedPrecondition, "no"},
		"nothing there":     {get("y", false, nil), codes.NotFound, "y"},
		"no source":         {get("y", true, nil), codes.NotFound, "no source"},
		"source panics":     {get("boom", true, nil), codes.Internal, ""},
		"bad params":        {get("gen", true, map[string]string{"shape": "x"}), codes.InvalidArgument, "dimension"},
		"beyond the tensor": {get("gen", true, map[string]string{"shape": "1"}), codes.InvalidArgument, "of a tensor of 4"},
		"too many transfers": {func(ctx context.Context, m *server.Models) error {
			for range 5 {
				if _, err := m.Put(ctx, "x", bytesDesc(1)); err != nil {
					return err
				}
			}
			return nil
		}, codes.ResourceExhausted, "open transfers"},
		"more memory than half": {func(_ context.Context, m *server.Models) error {
			b, err := m.Buffer(200 * mib)
			if err != nil {
				return err
			}
			defer b.Release()
			evil = len(b.Bytes()) != 200*mib
			_, err = m.Buffer(57 * mib)
			return err
		}, codes.ResourceExhausted, "half of memory_bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			handle = tc.handle
			err := call(t.Context())
			require.Equal(t, tc.want, status.Code(err), "%v", err)
			require.Contains(t, status.Convert(err).Message(), tc.says)
			testkit.Eventually(t, func() bool {
				used, _, _ := f.host.Budget().Used()
				return f.counters(t)["open_transfers"] == 0 && f.counters(t)["store_used_bytes"] == 0 && used == 0
			}, "nothing left of the transfer")
		})
	}
	require.False(t, evil)

	// A cancelled RPC ends its put, and while the server drains there is none.
	begun, over := make(chan struct{}), make(chan error, 1)
	handle = func(ctx context.Context, m *server.Models) error {
		return put("x", 0, func(p *server.Transfer) error {
			close(begun)
			<-ctx.Done()
			return p.End(nil)
		})(ctx, m)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { over <- call(ctx) }()
	<-begun
	drained := make(chan error, 1)
	go func() { drained <- f.server.Shutdown(t.Context()) }()
	testkit.Eventually(t, func() bool { return f.health(t, "") == "NOT_SERVING" }, "that it drains")
	select {
	case err := <-drained:
		t.Fatalf("drained beside an open put: %v", err)
	default:
	}
	cancel()
	require.Equal(t, codes.Canceled, status.Code(<-over))
	require.NoError(t, <-drained)
}

func TestAForeignServiceWithoutAStoreIsToldSo(t *testing.T) {
	testkit.Start(t)
	_, call := handling(t, nil, func(ctx context.Context, m *server.Models) error {
		_, err := m.Get(ctx, "x", false, nil)
		_, bad := m.Put(ctx, "x", bytesDesc(1))
		return cmp.Or(bad, err)
	})
	err := call(t.Context())
	require.Equal(t, codes.FailedPrecondition, status.Code(err))
	require.Contains(t, err.Error(), "has no store")
}
