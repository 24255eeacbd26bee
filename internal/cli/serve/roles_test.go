package serve

import (
	"context"
	"errors"
	"hash/crc32"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	kpupb "github.com/tensorferry/tensorferry/api/kpu/torch/server"
	commpb "github.com/tensorferry/tensorferry/api/splitlearn/comm"
	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/compat/kpu"
	"github.com/tensorferry/tensorferry/compat/splitlearn"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/internal/torchsave"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/tensor"
)

// guarded is a server with every service and a file of roles. Who sends an RPC says so.
type guarded struct {
	t                       *testing.T
	native, kpu, splitlearn string // addresses
	roles                   string // the file
	log                     record
}

// named is the name of a client.
type named string

func (n named) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": string(n)}, nil
}

func (named) RequireTransportSecurity() bool { return false }

func guard(t *testing.T, lines string) *guarded {
	t.Helper()
	g := &guarded{t: t, roles: filepath.Join(t.TempDir(), "roles")}
	g.write("ops admin\n" + lines)
	listen := func() net.Listener {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		return l
	}
	host := cpu.NewHost(cpu.HostConfig{MemoryBytes: 256 << 20, Workers: 2})
	models, sources := engine.NewRegistry(), new(store.Sources)
	for _, m := range append(cpu.Builtins(host), cpu.Slow(host)) {
		require.NoError(t, models.Add(m))
	}
	require.NoError(t, sources.Add("gen", store.Generator()))
	kept := memory.New(host.Pool(), 256<<20)
	may, err := readRoles(g.roles, slog.New(slog.NewTextHandler(&g.log, nil)))
	require.NoError(t, err)
	may.stored = kept
	native, own, theirs := listen(), listen(), listen()
	g.native, g.kpu, g.splitlearn = native.Addr().String(), own.Addr().String(), theirs.Addr().String()
	s, err := server.New(server.Config{
		Models: models, Pool: host.Pool(), Budget: host.Budget(), Store: kept, Sources: sources, Log: slog.New(slog.DiscardHandler), Reflection: true,
		Services: []server.Service{kpu.Config{Model: "relu"}.Service(own), splitlearn.New(theirs, "relu")},
		Identify: func(_ credentials.AuthInfo, authorization []string) (string, error) {
			return strings.Join(authorization, " "), nil
		},
		Authorize: may.authorize,
	})
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- s.Serve(native) }()
	t.Cleanup(func() {
		s.Close()
		require.NoError(t, <-served)
		require.NoError(t, kept.Close())
		host.Close()
	})
	return g
}

// record is what was logged. Safe for concurrent use.
type record struct {
	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

// Write copies p.
func (r *record) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.Write(p)
}

func (r *record) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.String()
}

func (g *guarded) write(lines string) {
	g.t.Helper()
	require.NoError(g.t, os.WriteFile(g.roles+".new", []byte(lines), 0o600))
	require.NoError(g.t, os.Rename(g.roles+".new", g.roles))
}

func (g *guarded) as(who, addr string) *grpc.ClientConn {
	g.t.Helper()
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithPerRPCCredentials(named(who)))
	require.NoError(g.t, err)
	g.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (g *guarded) dial(who string) *client.Client {
	g.t.Helper()
	c, err := client.Dial(g.native, client.Config{PerRPC: named(who)})
	require.NoError(g.t, err)
	g.t.Cleanup(func() { _ = c.Close() })
	return c
}

func vector(name string, n int) client.Input {
	return client.Input{Name: name, Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(n)}}, Data: make([]byte, n)}
}

func push(t *testing.T, c *client.Client, all bool, in ...client.Input) error {
	if all {
		_, err := c.PutAll(t.Context(), client.PushRequest{Tensors: in})
		return err
	}
	_, err := c.Push(t.Context(), client.PushRequest{Tensors: in})
	return err
}

func pull(t *testing.T, c *client.Client, names ...string) (got []string, err error) {
	var r client.PullRequest
	for _, name := range names {
		r.Select = append(r.Select, client.Selection{Name: name})
	}
	all, err := c.Pull(t.Context(), r)
	for _, s := range all {
		if s.Err == nil {
			got = append(got, s.Name)
		}
	}
	return got, err
}

func list(t *testing.T, c *client.Client, glob string) (got []string) {
	all, _, err := c.List(t.Context(), glob)
	require.NoError(t, err)
	for _, s := range all {
		got = append(got, s.Name)
	}
	return got
}

func told(t *testing.T, err error, code codes.Code, text string) {
	t.Helper()
	require.Equal(t, code, status.Code(err), "%v", err)
	require.ErrorContains(t, err, text)
}

// every lists the RPCs of all services, by full name, with the address that serves them.
func (g *guarded) every() map[string]string {
	all := make(map[string]string)
	for addr, services := range map[string][]grpc.ServiceDesc{
		g.native:     {pb.TensorService_ServiceDesc, healthpb.Health_ServiceDesc, reflectpb.ServerReflection_ServiceDesc},
		g.kpu:        {kpupb.Service_ServiceDesc},
		g.splitlearn: {commpb.ComputeService_ServiceDesc},
	} {
		for _, s := range services {
			for _, m := range s.Methods {
				all["/"+s.ServiceName+"/"+m.MethodName] = addr
			}
			for _, m := range s.Streams {
				all["/"+s.ServiceName+"/"+m.StreamName] = addr
			}
		}
	}
	return all
}

func TestWhoHasNoLineMayDoNothing(t *testing.T) {
	testkit.Start(t)
	g := guard(t, "alice compute")
	require.NoError(t, push(t, g.dial("ops"), false, vector("x", 3)))
	rpcs := g.every()
	require.Greater(t, len(rpcs), 18)
	for _, who := range []string{"mallory", "", "alice ", "ALICE"} {
		for method, addr := range rpcs {
			s, err := g.as(who, addr).NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
			require.NoError(t, err)
			require.NoError(t, s.CloseSend())
			told(t, s.RecvMsg(new(pb.Frame)), codes.PermissionDenied, "the server's roles have no line for ")
		}
	}
	_, err := g.dial("mallory").Session(t.Context())
	told(t, err, codes.PermissionDenied, `no line for "mallory"`)
}

func TestALineIsTheBoundOfEveryWayIn(t *testing.T) {
	testkit.Start(t)
	g := guard(t, "alice compute,push,pull models=relu names=alice/**\nbob compute,push,pull\ncarol pull names=alice/**,gen\ndave push names=alice/**\n")
	bob, alice := g.dial("bob"), g.dial("alice")
	require.NoError(t, push(t, bob, false, vector("bob/x", 5), vector("alice/x", 4), vector("gen", 1), vector("kpu/one", 1)))
	reset := func() { require.NoError(t, push(t, bob, false, vector("alice/x", 4))) }
	x, err := tensor.Of([]float32{-1, 2})
	require.NoError(t, err)
	ctx := t.Context()

	t.Run("models", func(t *testing.T) {
		stub := pb.NewTensorServiceClient(g.as("alice", g.native))
		_, err := alice.Compute(ctx, "relu", x)
		require.NoError(t, err)
		for _, model := range []string{"echo", "nothing", "relu/train", "relu ", ""} {
			_, err := stub.Compute(ctx, &pb.ComputeRequest{Model: model, Inputs: []*pb.NamedTensor{{Dtype: pb.DataType_DATA_TYPE_FLOAT32, Shape: []int64{2}, Data: x.Data}}})
			if model != "" {
				told(t, err, codes.PermissionDenied, `the server's roles do not let "alice" compute "`+model+`"`)
				_, err = alice.Compute(ctx, model, x)
				told(t, err, codes.PermissionDenied, `do not let "alice" compute`)
			}
			require.Error(t, err)
			_, err = commpb.NewComputeServiceClient(g.as("alice", g.splitlearn)).Compute(ctx, &commpb.ComputeRequest{ModelId: model, Data: x.Data, Shape: []int32{2}})
			if model != "" {
				told(t, err, codes.NotFound, "no model")
			}
		}
		models, err := alice.Models(ctx)
		require.NoError(t, err)
		require.Len(t, models, 1)
		info, err := stub.GetServiceInfo(ctx, &pb.GetServiceInfoRequest{})
		require.NoError(t, err)
		require.Len(t, info.GetModels(), 1)
		models, err = g.dial("carol").Models(ctx)
		require.NoError(t, err)
		require.Empty(t, models)
	})
	t.Run("health", func(t *testing.T) {
		h := healthpb.NewHealthClient(g.as("alice", g.native))
		_, hidden := h.Check(ctx, &healthpb.HealthCheckRequest{Service: "model/echo"})
		_, absent := h.Check(ctx, &healthpb.HealthCheckRequest{Service: "model/none"})
		require.Equal(t, status.Convert(absent).String(), status.Convert(hidden).String())
		told(t, hidden, codes.NotFound, "")
		for service, want := range map[string]healthpb.HealthCheckResponse_ServingStatus{
			"": healthpb.HealthCheckResponse_SERVING, "model/relu": healthpb.HealthCheckResponse_SERVING,
			"model/echo": healthpb.HealthCheckResponse_SERVICE_UNKNOWN, "model/none": healthpb.HealthCheckResponse_SERVICE_UNKNOWN,
		} {
			w, err := h.Watch(ctx, &healthpb.HealthCheckRequest{Service: service})
			require.NoError(t, err)
			got, err := w.Recv()
			require.NoError(t, err)
			require.Equal(t, want, got.GetStatus(), service)
		}
		all, err := h.List(ctx, &healthpb.HealthListRequest{})
		require.NoError(t, err)
		for name := range all.GetStatuses() {
			require.True(t, name == "model/relu" || !strings.HasPrefix(name, "model/"), name)
		}
	})
	t.Run("get", func(t *testing.T) {
		for _, oneWay := range []bool{false, true} {
			get := func(sel ...*pb.Selection) ([]string, *pb.Summary) { return g.get("alice", oneWay, sel...) }
			for hidden, absent := range map[string]string{"bob/x": "bob/y", "bob/*": "bib/*", "alice": "alici", "*": "?"} {
				_, one := get(&pb.Selection{Name: hidden})
				_, two := get(&pb.Selection{Name: absent})
				require.EqualValues(t, codes.NotFound, one.GetCode(), hidden)
				require.Equal(t, strings.ReplaceAll(one.GetMessage(), hidden, absent), two.GetMessage())
			}
			_, one := get(&pb.Selection{Name: "gen", Source: true, Params: map[string]string{"shape": "3"}})
			_, two := get(&pb.Selection{Name: "get", Source: true, Params: map[string]string{"shape": "3"}})
			require.Equal(t, strings.ReplaceAll(one.GetMessage(), "gen", "get"), two.GetMessage())
			_, held := get(&pb.Selection{Name: "bob/x", HeldDigest: make([]byte, 16), Held: []*pb.Range{{Length: 5}}})
			require.EqualValues(t, codes.NotFound, held.GetCode())
			got, _ := get(&pb.Selection{Name: "**"}, &pb.Selection{Name: "*/x"})
			require.Equal(t, []string{"alice/x", "alice/x"}, got)
		}
		_, err := pull(t, g.dial("dave"), "alice/x")
		told(t, err, codes.PermissionDenied, `do not let "dave" pull`)
		got, err := pull(t, g.dial("carol"), "**")
		require.NoError(t, err)
		require.Equal(t, []string{"alice/x", "gen"}, got)
	})
	t.Run("list", func(t *testing.T) {
		require.Equal(t, []string{"alice/x"}, list(t, alice, "**"))
		require.Equal(t, []string{"alice/x"}, list(t, alice, ""))
		require.Empty(t, list(t, alice, "bob/*"))
		page, err := pb.NewTensorServiceClient(g.as("alice", g.native)).ListTensors(ctx, &pb.ListTensorsRequest{PageSize: 1})
		require.NoError(t, err)
		require.Len(t, page.GetTensors(), 1)
		require.Empty(t, page.GetNextPageToken()+strings.Join(page.GetSources(), ""))
		_, sources, err := g.dial("carol").List(ctx, "")
		require.NoError(t, err)
		require.Equal(t, []string{"gen"}, sources)
		for _, ask := range []*pb.ListTensorsRequest{{}, {Glob: "bob/*"}, {Glob: "none/*"}, {PageToken: "zzz"}} { // whatever there is
			_, err = pb.NewTensorServiceClient(g.as("dave", g.native)).ListTensors(ctx, ask)
			told(t, err, codes.PermissionDenied, `do not let "dave" pull`)
		}
	})
	t.Run("delete", func(t *testing.T) {
		_, hidden := alice.Delete(ctx, "bob/x")
		_, absent := alice.Delete(ctx, "bob/y")
		require.Equal(t, strings.ReplaceAll(hidden.Error(), "bob/x", "bob/y"), absent.Error())
		told(t, hidden, codes.NotFound, "")
		_, err := alice.Delete(ctx, "alice/x", "bob/x")
		told(t, err, codes.NotFound, "")
		_, err = g.dial("carol").Delete(ctx, "alice/x")
		told(t, err, codes.PermissionDenied, `do not let "carol" push`)
		require.Len(t, list(t, bob, ""), 4, "nothing is gone")
		for _, who := range []string{"alice", "dave"} {
			deleted, err := g.dial(who).Delete(ctx, "**", "*/x")
			require.NoError(t, err)
			require.Equal(t, []string{"alice/x"}, deleted)
			reset()
		}
	})
	t.Run("put", func(t *testing.T) {
		for _, name := range []string{"bob/x", "bob/new", "gen", "alice", "alicex/y", "Alice/x"} {
			for _, all := range []bool{false, true} {
				err := push(t, alice, all, vector("alice/new", 3), vector(name, 9))
				told(t, err, codes.PermissionDenied, `do not let "alice" push "`+name+`"`)
				_, err = alice.Delete(ctx, "alice/new")
				require.Equal(t, all, err != nil, "of a set nothing is stored")
			}
			require.EqualValues(t, codes.PermissionDenied, g.pushOneWay("alice", name).GetCode())
		}
		told(t, push(t, g.dial("carol"), false, vector("alice/x", 1)), codes.PermissionDenied, `do not let "carol" push`)
		stored, _, err := bob.List(ctx, "")
		require.NoError(t, err)
		require.Len(t, stored, 4)
		require.EqualValues(t, 5, stored[1].Bytes, "bob's is what it was")
	})
	t.Run("transfers of others", func(t *testing.T) {
		session := g.session("bob")
		session.open(&pb.Call{Put: &pb.Put{}})
		ask := func(who string, id []byte) error {
			_, err := pb.NewTensorServiceClient(g.as(who, g.native)).GetTransfer(ctx, &pb.GetTransferRequest{TransferId: id})
			return err
		}
		testkit.Eventually(t, func() bool { return ask("bob", session.call) == nil }, "the push")
		told(t, ask("alice", session.call), codes.NotFound, "neither open nor among the last that ended")
	})
	t.Run("clients of kpu.torch", func(t *testing.T) {
		for who, code := range map[string]codes.Code{"alice": codes.PermissionDenied, "carol": codes.PermissionDenied, "bob": codes.OK} {
			stub := kpupb.NewServiceClient(g.as(who, g.kpu))
			up, err := stub.ReceiveTensors(ctx)
			require.NoError(t, err)
			_ = up.Send(chunkOf(t, "one"))
			_, err = up.CloseAndRecv()
			require.Equal(t, code, status.Code(err), "%s: %v", who, err)
			down, err := stub.SendTensors(ctx, &kpupb.TensorRequest{Count: 1})
			require.NoError(t, err)
			_, err = down.Recv()
			require.Equal(t, map[string]codes.Code{"alice": codes.NotFound}[who], status.Code(err), "%s: %v", who, err)
			both, err := stub.StreamTensors(ctx)
			require.NoError(t, err)
			_ = both.Send(chunkOf(t, "one"))
			_ = both.CloseSend()
			_, err = both.Recv()
			require.Equal(t, map[string]codes.Code{"carol": codes.PermissionDenied}[who], status.Code(err), "%s: %v", who, err)
		}
	})
}

func TestBytesAreThoseOfTheNamesHoweverTheyCome(t *testing.T) {
	testkit.Start(t)
	g := guard(t, "alice push,pull names=alice/**,kpu/* bytes=100\nbob push\n")
	alice, bob := g.dial("alice"), g.dial("bob")
	full := func(err error) {
		t.Helper()
		told(t, err, codes.ResourceExhausted, "the server's roles let tensors of your names have 100")
	}
	require.NoError(t, push(t, alice, false, vector("alice/a", 60), vector("alice/b", 40)))
	full(push(t, alice, false, vector("alice/c", 1)))
	full(push(t, alice, true, vector("alice/c", 1)))
	require.NoError(t, push(t, alice, false, vector("alice/empty", 0)))
	require.NoError(t, push(t, bob, false, vector("alice/d", 1), vector("bob/a", 1000)), "bob has no limit")
	full(push(t, alice, false, vector("alice/c", 1)))
	full(push(t, alice, false, vector("alice/b", 40))) // both are there until the end
	_, err := alice.Delete(t.Context(), "alice/d", "alice/b")
	require.NoError(t, err)
	full(push(t, alice, false, vector("alice/b", 41)))
	require.NoError(t, push(t, alice, false, vector("alice/b", 5)))
	require.NoError(t, push(t, alice, false, vector("alice/b", 10)), "it replaces a smaller one")
	require.NoError(t, push(t, alice, false, vector("alice/c", 30)))
	full(push(t, alice, true, vector("alice/d", 1)))
	_, err = alice.Delete(t.Context(), "alice/**")
	require.NoError(t, err)
	full(push(t, alice, true, vector("alice/a", 50), vector("alice/b", 51)))
	require.NoError(t, push(t, alice, true, vector("alice/a", 50), vector("alice/b", 50)))
	_, err = alice.Delete(t.Context(), "alice/**")
	require.NoError(t, err)

	var all sync.WaitGroup // each of which fits alone
	var mu sync.Mutex
	fit := 0
	for i := range 12 {
		all.Go(func() {
			err := push(t, g.dial("alice"), i%2 == 0, vector("alice/"+string(rune('a'+i)), 30))
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				fit++
			} else {
				full(err)
			}
		})
	}
	all.Wait()
	require.Equal(t, 3, fit)
	require.Len(t, list(t, alice, "**"), 3)

	_, err = alice.Delete(t.Context(), "alice/**")
	require.NoError(t, err)
	set := g.session("alice") // of which a tensor is ready, and not stored
	set.open(&pb.Call{Put: &pb.Put{All: true}})
	sum := set.announce("alice/a", 60, make([]byte, 60)...)
	require.Zero(t, sum.GetCode(), sum.GetMessage())
	sum = set.announce("alice/b", 41)
	require.EqualValues(t, codes.ResourceExhausted, sum.GetCode(), sum.GetMessage())
	set.end()

	s := g.session("alice") // which announces and does not send, one of another's bytes twice
	s.open(&pb.Call{Put: &pb.Put{}})
	testkit.Eventually(t, func() bool { return s.announce("alice/a", 60) == nil }, "the room of the set")
	sum = s.announce("alice/a", 41)
	require.EqualValues(t, codes.ResourceExhausted, sum.GetCode(), sum.GetMessage())
	full(push(t, alice, false, vector("alice/b", 41)))
	up, err := kpupb.NewServiceClient(g.as("alice", g.kpu)).ReceiveTensors(t.Context())
	require.NoError(t, err)
	_ = up.Send(chunkOf(t, "one")) // 41 bytes
	_, err = up.CloseAndRecv()
	full(err)
	s.end()
	testkit.Eventually(t, func() bool { return push(t, alice, false, vector("alice/b", 100)) == nil }, "the room to come back")
}

func TestCallsAreSoManyAtATime(t *testing.T) {
	testkit.Start(t)
	g := guard(t, "alice compute calls=1\nbob compute calls=2\n")
	alice, bob := g.dial("alice"), g.dial("bob")
	x, err := tensor.Of([]float32{1})
	require.NoError(t, err)
	for range 200 { // one after the other
		_, err := alice.Compute(t.Context(), "relu", x)
		require.NoError(t, err)
	}
	stub := pb.NewTensorServiceClient(g.as("alice", g.native))
	request := func(model string) *pb.ComputeRequest {
		return &pb.ComputeRequest{Model: model, Params: map[string]string{"delay": "30s"}, Inputs: []*pb.NamedTensor{{Dtype: pb.DataType_DATA_TYPE_FLOAT32, Shape: []int64{1}, Data: x.Data}}}
	}
	small := request("relu")
	small.Params = nil
	for range 200 {
		_, err := stub.Compute(t.Context(), small)
		require.NoError(t, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		err := status.Error(codes.ResourceExhausted, "") // as while a small one runs
		for status.Code(err) == codes.ResourceExhausted {
			_, err = stub.Compute(ctx, request("slow"))
		}
		ended <- err
	}()
	testkit.Eventually(t, func() bool {
		_, err := stub.Compute(t.Context(), small)
		select {
		case err := <-ended:
			require.NoError(t, err)
		default:
		}
		return status.Code(err) == codes.ResourceExhausted
	}, "the slow call")
	_, err = alice.Compute(t.Context(), "relu", x)
	told(t, err, codes.ResourceExhausted, "calls: the server's roles let you have 1 at a time")
	var refused *client.Error
	require.ErrorAs(t, err, &refused)
	require.Positive(t, refused.RetryAfter)
	run, err := kpupb.NewServiceClient(g.as("alice", g.kpu)).StreamTensors(t.Context())
	require.NoError(t, err)
	_ = run.Send(chunkOf(t, "one"))
	_, err = run.Recv()
	told(t, err, codes.ResourceExhausted, "calls: ")
	_, err = commpb.NewComputeServiceClient(g.as("alice", g.splitlearn)).Compute(t.Context(), &commpb.ComputeRequest{Data: x.Data, Shape: []int32{1}})
	told(t, err, codes.ResourceExhausted, "calls: ")
	_, err = bob.Compute(t.Context(), "relu", x)
	require.NoError(t, err, "bob's calls are bob's")
	cancel()
	require.Equal(t, codes.Canceled, status.Code(<-ended))
	testkit.Eventually(t, func() bool { _, err := alice.Compute(t.Context(), "relu", x); return err == nil }, "her place")
}

func TestRolesAreReadAgain(t *testing.T) {
	testkit.Start(t)
	g := guard(t, "alice compute")
	alice, x := g.dial("alice"), tensor.Tensor{Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{1}}, Data: []byte{1}}
	can := func() bool { _, err := alice.Compute(t.Context(), "echo", x); return err == nil }
	require.True(t, can())
	g.write("alice pull")
	testkit.Eventually(t, func() bool { return !can() }, "alice's right to go")
	g.write("alice compute\nbob flies")
	testkit.Eventually(t, func() bool { return strings.Contains(g.log.String(), "line 2: flies") }, "a warning")
	require.False(t, can(), "the file before is in force")
	g.write("alice compute calls=2")
	testkit.Eventually(t, can, "alice's right to come back")
	session := g.session("alice")
	_, err := session.stream.Recv()
	require.NoError(t, err)
	g.write("bob compute")
	for err == nil { // what she has open ends
		_, err = session.stream.Recv()
	}
	told(t, err, codes.PermissionDenied, `no line for "alice"`)
}

func TestAFaultOfARolesFileHasItsLineAndAReason(t *testing.T) {
	for text, want := range map[string]string{
		"# all\n\nalice":                `line 3: "alice" needs rights`,
		"alice names=x":                 `line 1: "alice" needs rights`,
		"alice pull\nalice push":        `line 2: "alice" needs rights after the name, and no second line`,
		"alice fly":                     "line 1: fly: the rights are compute,push,pull,admin",
		"alice pull,":                   "line 1: pull,: the rights are",
		"alice pull names=[":            "line 1: names=[: glob: bad pattern",
		"alice push bytes=ten":          "line 1: bytes=ten: not a size",
		"alice push bytes=0":            "line 1: bytes=0: use a number above 0",
		"alice push bytes=99999999TiB":  "line 1: bytes=99999999TiB: too large",
		"alice compute calls=-1":        "line 1: calls=-1: use a number above 0",
		"alice compute calls=x":         "line 1: calls=x: ",
		"alice compute calls=2 calls=3": "line 1: calls=3: use models=, names=, bytes= and calls=, each once",
		"alice compute model=x":         "line 1: model=x: use models=",
	} {
		_, err := (&roles{tallies: make(map[string]*tally)}).parse(text)
		require.ErrorContains(t, err, want, text)
	}
	path := filepath.Join(t.TempDir(), "roles")
	require.NoError(t, os.WriteFile(path, []byte("alice fly"), 0o600))
	_, err := readRoles(path, slog.New(slog.DiscardHandler))
	require.ErrorContains(t, err, path+", line 1: fly: the rights are")
}

func FuzzALineGivesWhatItSaysAndNoMore(f *testing.F) {
	f.Add("alice compute,push,pull models=trunk names=alice/** bytes=10GiB calls=32", "alice/x")
	f.Add("alice admin", "x")
	f.Fuzz(func(t *testing.T, line, name string) {
		all, err := (&roles{tallies: make(map[string]*tally)}).parse(line)
		for who, its := range all {
			require.NoError(t, err)
			require.Contains(t, strings.Fields(line), who)
			for _, right := range its.rights {
				require.Contains(t, line, right)
			}
			if _, after, limited := strings.Cut(line, " names="); limited && !strings.ContainsAny(line, "\n\r\t\v\f\u0085\u00a0,*?[\\") {
				want, _, _ := strings.Cut(after, " ")
				require.Equal(t, name == want, matches(its.names, name))
			}
		}
	})
}

// rawSession is a session of a client that knows nothing but the proto.
type rawSession struct {
	g      *guarded
	stream grpc.BidiStreamingClient[pb.Frame, pb.Frame]
	cancel context.CancelFunc
	call   []byte
}

func newID() []byte { id := uuid.Must(uuid.NewV7()); return id[:] }

func hello() *pb.Hello {
	return &pb.Hello{Version: 1, SessionId: newID(), MaxChunkBytes: 1 << 20, Checksum: pb.Checksum_CHECKSUM_CRC32C, MaxOpenTensors: 64, AllowanceBytes: 1 << 20}
}

func (g *guarded) session(who string) *rawSession {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), time.Minute)
	g.t.Cleanup(cancel)
	stream, err := pb.NewTensorServiceClient(g.as(who, g.native)).StreamTensors(ctx)
	require.NoError(g.t, err)
	require.NoError(g.t, stream.Send(&pb.Frame{Hello: hello()}))
	return &rawSession{g, stream, cancel, nil}
}

func (s *rawSession) open(c *pb.Call) {
	s.call = newID()
	c.Id = s.call
	require.NoError(s.g.t, s.stream.Send(&pb.Frame{Calls: []*pb.Call{c}}))
}

// announce returns the summary of a tensor that is refused, or nil. It sends data when it may.
func (s *rawSession) announce(name string, size int64, data ...byte) *pb.Summary {
	s.g.t.Helper()
	d := &pb.TensorDesc{CallId: s.call, TensorId: newID(), Name: name, Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{size}, SizeBytes: uint64(size), ChunkBytes: uint32(size)}
	require.NoError(s.g.t, s.stream.Send(&pb.Frame{Descs: []*pb.TensorDesc{d}}))
	for {
		f, err := s.stream.Recv()
		require.NoError(s.g.t, err)
		for _, sum := range f.GetSummaries() {
			return sum
		}
		switch {
		case len(f.GetCredits()) == 0:
		case data == nil:
			return nil
		default:
			sum := crc32.Checksum(slices.Concat(d.GetTensorId(), make([]byte, 4), data), crc32.MakeTable(crc32.Castagnoli))
			require.NoError(s.g.t, s.stream.Send(&pb.Frame{Chunk: &pb.Chunk{TensorId: d.GetTensorId(), Checksum: sum, Data: data}}))
		}
	}
}

func (s *rawSession) end() { s.cancel() }

// get gets what is selected, and returns the names of descs and the last summary.
func (g *guarded) get(who string, oneWay bool, list ...*pb.Selection) (names []string, last *pb.Summary) {
	g.t.Helper()
	var recv func() (*pb.Frame, error)
	var s *rawSession
	if oneWay {
		stream, err := pb.NewTensorServiceClient(g.as(who, g.native)).PullTensors(g.t.Context(), &pb.PullTensorsRequest{Hello: hello(), Selections: list})
		require.NoError(g.t, err)
		recv = stream.Recv
	} else {
		s = g.session(who)
		defer s.end()
		s.open(&pb.Call{Get: &pb.Get{Selections: list}})
		recv = s.stream.Recv
	}
	for {
		f, err := recv()
		if errors.Is(err, io.EOF) {
			return names, last
		}
		require.NoError(g.t, err)
		for _, d := range f.GetDescs() {
			names = append(names, d.GetName())
		}
		if c := f.GetChunk(); c != nil && s != nil {
			require.NoError(g.t, s.stream.Send(&pb.Frame{Acks: []*pb.Ack{{TensorId: c.GetTensorId(), ReceivedBelow: c.GetIndex() + 1}}}))
		}
		for _, sum := range f.GetSummaries() {
			last = sum
		}
		if len(f.GetDones()) > 0 {
			return names, last
		}
	}
}

// pushOneWay announces a tensor with PushTensors, and returns its summary.
func (g *guarded) pushOneWay(who, name string) *pb.Summary {
	g.t.Helper()
	up, err := pb.NewTensorServiceClient(g.as(who, g.native)).PushTensors(g.t.Context())
	require.NoError(g.t, err)
	require.NoError(g.t, up.Send(&pb.Frame{Hello: hello(), Descs: []*pb.TensorDesc{{TensorId: newID(), Name: name, Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{3}, SizeBytes: 3, ChunkBytes: 3}}}))
	answer, err := up.CloseAndRecv()
	require.NoError(g.t, err)
	return answer.GetSummaries()[0]
}

// chunkOf returns a tensor of 41 bytes as clients of kpu.torch send it.
func chunkOf(t *testing.T, id string) *kpupb.TensorChunk {
	d := tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{41}}
	data := make([]byte, 41)
	p, err := torchsave.Bare(d)
	require.NoError(t, err)
	file := append(append(p.Gap(0, nil), data...), p.Gap(1, []uint32{crc32.ChecksumIEEE(data)})...)
	return &kpupb.TensorChunk{TensorId: id, ChunkNumber: 0, TotalChunks: 1, Data: file}
}
