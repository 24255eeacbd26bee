package server_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store/storetest"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// unary sends a request and leaves its answer unread: gRPC's client takes a window of
// it and no more.
func unary(t testing.TB, conn *grpc.ClientConn, method string, req proto.Message) grpc.ClientStream {
	t.Helper()
	s, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
	require.NoError(t, err)
	require.NoError(t, s.SendMsg(req))
	require.NoError(t, s.CloseSend())
	return s
}

const ours = "/tensorferry.v1.TensorService/"

func TestAnswersThatNobodyReadsEndTheirConnection(t *testing.T) {
	testkit.Start(t)
	fileAsk := &reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_FileContainingSymbol{
		FileContainingSymbol: "tensorferry.v1.TensorService",
	}}
	listAsk := &reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}
	reflection := func(asks int, ask proto.Message) func(testing.TB, *fixture, *grpc.ClientConn) {
		return func(t testing.TB, _ *fixture, conn *grpc.ClientConn) {
			s, err := reflectionpb.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
			require.NoError(t, err)
			for range asks {
				if s.SendMsg(ask) != nil { // it has ended already
					return
				}
			}
		}
	}
	for name, ask := range map[string]func(testing.TB, *fixture, *grpc.ClientConn){
		"Compute": func(t testing.TB, f *fixture, conn *grpc.ClientConn) {
			for range 8 {
				unary(t, conn, ours+"Compute", asking("echo", pb.DataType_DATA_TYPE_UINT8, make([]byte, mib), mib))
			}
			testkit.Eventually(t, func() bool { return f.counters(t)["calls_ok_total"] == 8 && f.counters(t)["calls"] == 0 }, "the calls")
			require.GreaterOrEqual(t, f.counters(t)["receive_used_bytes"], int64(8*mib), "what is not read is charged")
		},
		"ListTensors": func(t testing.TB, _ *fixture, conn *grpc.ClientConn) {
			unary(t, conn, ours+"ListTensors", &pb.ListTensorsRequest{})
		},
		"large answers of reflection": reflection(100, fileAsk),
		"small answers of reflection": reflection(2000, listAsk),
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				log := &notes{}
				m := shelf(t, 16*mib)
				f := serve(t, func(c *server.Config) {
					c.Log, c.Reflection, c.Store = log.log(), true, m
					c.Session.ChunkIdle = stream.Instant(400 * time.Millisecond)
				})
				if name == "ListTensors" {
					for i := range 300 {
						storetest.Put(t, m, strings.Repeat("x", 500)+fmt.Sprint(i), []byte{1})
					}
				}
				// A window that does not grow.
				conn, err := grpc.NewClient(f.addr, reach, grpc.WithTransportCredentials(insecure.NewCredentials()),
					grpc.WithInitialWindowSize(64<<10), grpc.WithInitialConnWindowSize(64<<10))
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, conn.Close()) })
				ask(t, f, conn)
				testkit.Eventually(t, func() bool { return strings.Contains(log.String(), "its peer does not read") }, "the end of the connection")
				f.isEmpty(t)
			})
		})
	}
}

// TestResultsThatOnlyGRPCHoldsAreNoLostRun leaves a result unread, in a window that does
// not grow: the session ends, and its run waits for nobody, long before the connection is
// closed.
func TestResultsThatOnlyGRPCHoldsAreNoLostRun(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		const idle = 2200 * time.Millisecond // a run is given up 5 s after its call, a connection closed after 4 times idle
		log := &notes{}
		f := serve(t, func(c *server.Config) { c.Log, c.Session.ChunkIdle = log.log(), stream.Instant(idle) })
		conn, err := grpc.NewClient(f.addr, reach, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithInitialWindowSize(64<<10), grpc.WithInitialConnWindowSize(64<<10))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, conn.Close()) })
		s, err := pb.NewTensorServiceClient(conn).StreamTensors(t.Context())
		require.NoError(t, err)
		o := offering("relu", make([]byte, 256<<10), mib)
		o.desc.Dtype, o.desc.OnAllowance = pb.DataType_DATA_TYPE_INT8, true
		hello := &pb.Hello{Version: 1, SessionId: newID(), MaxChunkBytes: mib, AllowanceBytes: mib, Checksum: pb.Checksum_CHECKSUM_CRC32C, MaxOpenTensors: 64}
		require.NoError(t, s.Send(&pb.Frame{Hello: hello, Calls: []*pb.Call{o.call}, Descs: []*pb.TensorDesc{o.desc}, Chunk: sealed(o.desc.TensorId, 0, o.data)}))
		testkit.Eventually(t, func() bool {
			used, _, _ := f.host.Budget().Used()
			return used >= 256<<10
		}, "what gRPC holds is charged")
		testkit.Eventually(t, func() bool {
			return f.counters(t)["calls_ok_total"]+f.counters(t)["calls_deadline_exceeded_total"] > 0 && f.counters(t)["calls"] == 0
		}, "the end of the call")
		h := healthpb.NewHealthClient(f.dial(t))
		testkit.Eventually(t, func() bool {
			r, err := h.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "model/relu"})
			require.NoError(t, err)
			require.Equal(t, healthy, r.GetStatus())
			return strings.Contains(log.String(), "its peer does not read")
		}, "the end of the connection")
		f.isEmpty(t)
		require.Zero(t, f.counters(t)["runs_abandoned_total"])
	})
}

func TestAnAnswerThatIsReadIsNobodysLoan(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	stub := pb.NewTensorServiceClient(f.dial(t))
	for range 20 {
		_, err := stub.Compute(t.Context(), asking("echo", pb.DataType_DATA_TYPE_UINT8, make([]byte, mib), mib))
		require.NoError(t, err)
	}
	f.isEmpty(t)
}

func TestRequestsOfSmallCallsLieInTheBudget(t *testing.T) {
	testkit.Start(t)
	const limit = 16 * mib
	f := serveWithin(t, limit, func(c *server.Config) { c.ReceiveBytes = 64 * mib })
	g := addGate(t, f, "gate")
	stub := pb.NewTensorServiceClient(f.dial(t))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 20)
	for range 20 {
		go func() {
			_, err := stub.Compute(ctx, asking("gate", pb.DataType_DATA_TYPE_UINT8, make([]byte, mib), mib))
			ended <- err
		}()
	}
	// Half of the budget is 8 MiB, and each has a little more than one.
	testkit.Eventually(t, func() bool { return f.counters(t)["calls"] == int64(20-len(ended)) && len(ended) >= 13 }, "the refusals")
	left := 20 - len(ended)
	require.Positive(t, left)
	for range 20 - left {
		st := status.Convert(<-ended)
		require.Equal(t, codes.ResourceExhausted, st.Code(), st.Message())
		saysWhy(t, st.Message(), []string{"small call", "memory_bytes", fmt.Sprint(limit), "later"})
		require.True(t, tellsWhenToRetry(st))
	}
	testkit.Eventually(t, func() bool { return g.started.Load() > 0 }, "a run")
	used, _, _ := f.host.Budget().Used()
	require.Greater(t, used, int64(left*mib), "the requests, and a run at least")
	cancel()
	for range left {
		require.Equal(t, codes.Canceled, status.Code(<-ended))
	}
	f.isEmpty(t)
	_, err := stub.Compute(t.Context(), asking("echo", pb.DataType_DATA_TYPE_UINT8, make([]byte, mib), mib))
	require.NoError(t, err)
}

func TestAStreamOfRequestsThatStaysSilentEnds(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, func(c *server.Config) {
			c.Reflection, c.Session.ChunkIdle = true, stream.Instant(300*time.Millisecond)
		})
		conn := f.dial(t)
		watch, err := healthpb.NewHealthClient(conn).Watch(t.Context(), &healthpb.HealthCheckRequest{Service: "model/late"})
		require.NoError(t, err)
		_, err = watch.Recv()
		require.NoError(t, err)
		for _, requests := range []int{0, 3} {
			s, err := reflectionpb.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
			require.NoError(t, err)
			for range requests {
				require.NoError(t, s.Send(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}))
				_, err = s.Recv()
				require.NoError(t, err)
			}
			_, err = s.Recv()
			require.Equal(t, codes.DeadlineExceeded, status.Code(err), err)
			saysWhy(t, status.Convert(err).Message(), []string{"no request", "300ms", "again"})
		}
		require.NoError(t, f.models.Add(f.named(t, "late")))
		r, err := watch.Recv()
		require.NoError(t, err, "who watches the health has asked, and waits")
		require.Equal(t, healthy, r.GetStatus())
	})
}

func TestAClosedServerEndsStreamsOfRequests(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) { c.Reflection = true })
	s, err := reflectionpb.NewServerReflectionClient(f.dial(t)).ServerReflectionInfo(t.Context())
	require.NoError(t, err)
	require.NoError(t, s.Send(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}))
	_, err = s.Recv()
	require.NoError(t, err)
	f.server.Close()
	_, err = s.Recv()
	require.Equal(t, codes.Unavailable, status.Code(err), err)
}

func TestRefusalsDoNotFillTheLog(t *testing.T) {
	testkit.Start(t)
	log := &notes{}
	f := serve(t, func(c *server.Config) {
		c.Log = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelInfo}))
	})
	model, err := cpu.Func{
		Info: engine.Info{Name: "broken", Inputs: []engine.Port{{Name: "x", Shape: []int64{engine.AnyAxes}}}, Outputs: []engine.Port{{Name: "y", Shape: []int64{engine.AnyAxes}}}},
		Call: func(context.Context, []tensor.Tensor, map[string]string) ([]tensor.Tensor, error) {
			return nil, errors.New("broken")
		},
	}.Model(f.host)
	require.NoError(t, err)
	require.NoError(t, f.models.Add(model))
	stub := pb.NewTensorServiceClient(f.dial(t))
	compute := func(model string) codes.Code {
		_, err := stub.Compute(t.Context(), asking(model, pb.DataType_DATA_TYPE_UINT8, []byte("abc"), 3))
		return status.Code(err)
	}
	require.Equal(t, codes.NotFound, compute("nothing"))
	require.Equal(t, codes.InvalidArgument, compute("\a"))
	require.Equal(t, codes.FailedPrecondition, compute("relu"))
	r := openRaw(t, f.addr)
	r.send(&pb.Frame{Hello: r.greeting()}) // twice
	require.Equal(t, codes.InvalidArgument, r.status().Code())
	f.isEmpty(t)
	require.Empty(t, log.String())

	for range 100 {
		require.Equal(t, codes.Internal, compute("broken"))
	}
	lines := func(of string) int { return strings.Count(log.String(), of) }
	testkit.Eventually(t, func() bool {
		return lines("level=INFO msg=\"rpc ended\" rpc="+ours+"Compute code=INTERNAL") == 7
	}, "a line as the number of failures doubles")
	require.Equal(t, 7, lines("level=ERROR msg=\"call failed\""))
	require.Contains(t, log.String(), "failures=64")
}

func TestTheTextOfAStatusIsBounded(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	stub := pb.NewTensorServiceClient(f.dial(t))
	for _, text := range []string{strings.Repeat("\x01", 4096), strings.Repeat("é", 2048), "x" + strings.Repeat("é", 2047)} {
		ask := asking("slow", pb.DataType_DATA_TYPE_UINT8, []byte("abc"), 3)
		ask.Params = map[string]string{"delay": text}
		_, err := stub.Compute(t.Context(), ask)
		st := status.Convert(err)
		require.Equal(t, codes.InvalidArgument, st.Code())
		require.LessOrEqual(t, len(st.Message()), 4096)
		require.Greater(t, len(st.Message()), 4096-utf8.UTFMax)
		require.True(t, utf8.ValidString(st.Message()))
		require.NotContains(t, st.Message(), string(utf8.RuneError))
	}
}

// endings is how many sessions end: each after another number of chunks.
var endings = flag.Int("endings", 60, "how many sessions end while their results are on the way; make floods ends 200")

// TestEveryChunkThatAPeerReadsIsRightHoweverItsSessionEnds has sessions end with an error
// while their results are on the way, and reads to the end.
func TestEveryChunkThatAPeerReadsIsRightHoweverItsSessionEnds(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) { c.ThinFrames = 1 << 30 })
	addCounting(t, f)
	stub := pb.NewTensorServiceClient(f.dial(t))
	for n := range *endings {
		s, err := stub.StreamTensors(t.Context())
		require.NoError(t, err)
		hello := &pb.Frame{Hello: &pb.Hello{Version: 1, SessionId: newID(), MaxChunkBytes: 32 << 10, Checksum: pb.Checksum_CHECKSUM_CRC32C, MaxOpenTensors: 64}}
		for range 8 {
			hello.Calls = append(hello.Calls, &pb.Call{Id: newID(), Model: "counting", Params: map[string]string{"rows": "131072"}})
		}
		require.NoError(t, s.Send(hello))
		for chunks := 0; ; {
			got, err := s.Recv()
			if err != nil {
				require.Equal(t, codes.InvalidArgument, status.Code(err), "%v", err)
				break
			}
			for _, d := range got.GetDescs() {
				_ = s.Send(&pb.Frame{Credits: []*pb.Credit{{TensorId: d.GetTensorId(), ChunkLimit: 1000}}}) // or the session is over
			}
			c := got.GetChunk()
			if c == nil {
				continue
			}
			sum := codec.CRC32C.Update(codec.CRC32C.Seed(tensor.ID(c.GetTensorId()), c.GetIndex()), c.GetData())
			require.Equal(t, c.GetChecksum(), sum, "session %d, chunk %d", n, c.GetIndex())
			if chunks++; chunks == 5+n%60 {
				_ = s.Send(&pb.Frame{Hello: &pb.Hello{Version: 1}}) // the second: the session ends with an error
			}
		}
	}
}
