package server_test

import (
	"context"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
)

// larger gives a foreign service a listener of its own, with messages of up to 64 MiB, and
// the server so many bytes for what is received. Its handler only counts the bytes.
func larger(t testing.TB, receive int64) (f *fixture, addr string) {
	own := listen(t)
	desc := foreignDesc
	desc.Methods = []grpc.MethodDesc{{MethodName: "Whole", Handler: func(srv any, ctx context.Context, decode func(any) error, around grpc.UnaryServerInterceptor) (any, error) {
		in := new(wrapperspb.BytesValue)
		if err := decode(in); err != nil {
			return nil, err
		}
		return around(ctx, in, &grpc.UnaryServerInfo{Server: srv, FullMethod: "/" + foreignName + "/Whole"}, func(_ context.Context, req any) (any, error) {
			return &wrapperspb.BytesValue{Value: []byte(strconv.Itoa(len(req.(*wrapperspb.BytesValue).Value)))}, nil
		})
	}}}
	f = serve(t, func(c *server.Config) {
		c.ReceiveBytes, c.WindowBytes = receive, 64*mib // a peer by hand does not wait for window
		c.Services = []server.Service{{Listener: own, MessageBytes: 64 * mib, FirstMessage: time.Hour, Register: func(r grpc.ServiceRegistrar, _ *server.Models) {
			r.RegisterService(&desc, new(any))
		}}}
	})
	return f, own.Addr().String()
}

func unfinishedLarger(t *testing.T) {
	const size, limit, peers = 32 * mib, 136 * mib, 8 // one takes 96 MiB, of three quarters
	f, addr := larger(t, limit)
	require.EqualValues(t, limit, f.counters(t)["receive_limit_bytes"], "a service raises nobody's limit")
	native := pb.NewTensorServiceClient(f.dial(t))
	goesOn := func() {
		t.Helper()
		require.LessOrEqual(t, f.counters(t)["receive_used_bytes"], int64(limit+(peers+5)*inbound.Free))
		_, err := native.Compute(t.Context(), asking("sink", pb.DataType_DATA_TYPE_UINT8, make([]byte, mib-1), mib-1))
		require.NoError(t, err)
	}
	var all []*wire2
	ends := make(chan map[string]string, peers)
	for range peers {
		w := dialWire2(t, addr)
		all = append(all, w)
		go func() { // ends with the connection
			w.Open("/"+foreignName+"/Whole").Send(size, size/2, 16<<10, 0)
			if end, told := <-w.ends; told {
				ends <- end
			}
		}()
	}
	testkit.Eventually(t, func() bool { // the first have stopped; others wait, and have them end
		goesOn()
		return len(ends) >= 2
	}, "the ends of those that stopped")
	for range 2 {
		end := <-ends
		require.Equal(t, strconv.Itoa(int(codes.ResourceExhausted)), end["grpc-status"], end)
		require.Contains(t, end["grpc-message"], "later")
		require.NotEmpty(t, end["grpc-status-details-bin"], "when to try again")
	}
	for _, w := range all {
		w.close()
	}

	// Whole ones come one after the other, though two have no room.
	came := make(chan error, 3)
	for range cap(came) {
		c := dialForeign(t, addr)
		go func() {
			_, err := c.whole(t.Context(), make([]byte, size))
			for status.Code(err) == codes.ResourceExhausted && t.Context().Err() == nil { // on a slow machine one takes longer than another waits
				_, err = c.whole(t.Context(), make([]byte, size))
			}
			came <- err
		}()
	}
	testkit.Eventually(t, func() bool {
		goesOn()
		return len(came) == cap(came)
	}, "three messages")
	for range cap(came) {
		require.NoError(t, <-came)
	}
}

func TestALargerMessageThatCanNeverFitIsRefusedAtOnce(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		_, addr := larger(t, 64*mib)
		w := dialWire2(t, addr)
		began := time.Now()
		w.Open("/"+foreignName+"/Whole").Send(32*mib, 100, 16<<10, 0)
		end := <-w.ends
		require.Zero(t, time.Since(began))
		require.Equal(t, strconv.Itoa(int(codes.ResourceExhausted)), end["grpc-status"], end)
		saysWhy(t, end["grpc-message"], []string{strconv.Itoa(32 * mib), strconv.Itoa(48 * mib), "receive_bytes"})
		require.Empty(t, end["grpc-status-details-bin"], "it is never tried again")
		w.close()
	})
}

func TestHeapThatLargerMessagesLeaveGoesBackToTheSystem(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		defer debug.SetGCPercent(debug.SetGCPercent(-1)) // nothing else collects
		heap := func() (bytes uint64) {
			all := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/unused:bytes"}, {Name: "/memory/classes/heap/free:bytes"}}
			metrics.Read(all)
			for _, m := range all {
				bytes += m.Value.Uint64()
			}
			return bytes
		}
		larger(t, 64*mib)
		debug.FreeOSMemory()
		before := heap()
		for range 4 {
			runtime.KeepAlive(make([]byte, 64*mib))
		}
		require.Greater(t, heap(), before+200*mib)
		testkit.Eventually(t, func() bool { return heap() < before+48*mib }, "the heap as it was")
	})
}

// smallCallsCompute has a model stop after the first block of its results: what it computes lies
// in the budget.
func smallCallsCompute(t *testing.T) {
	const size, limit = 16 * mib, 160 * mib
	own := listen(t)
	f := serveWithin(t, limit, func(c *server.Config) {
		c.ReceiveBytes = 512 * mib
		withForeign(own, func(s *server.Service) { s.MessageBytes = 17 * mib })(c)
	})
	let := make(chan struct{})
	f.add(t, cpu.RowFunc{
		Info: engine.Info{Name: "halting", Rows: 1, Inputs: anyShape("x"), Outputs: anyShape("y"), BlockRows: 64 << 10},
		Rows: func(ctx context.Context, b cpu.RowBlock) error {
			if b.Row > 0 {
				select {
				case <-let:
				case <-ctx.Done():
				}
			}
			copy(b.Out[0], b.In[0])
			return context.Cause(ctx)
		},
	})
	used := func() int64 { n, _, _ := f.host.Budget().Used(); return n }
	ctx := metadata.AppendToOutgoingContext(t.Context(), "model", "halting")
	ended := make(chan error, 3)
	call := func() { _, err := dialForeign(t, own.Addr().String()).whole(ctx, make([]byte, size)); ended <- err }
	go call()
	const run = 16 * mib // at most, for blocks
	testkit.Eventually(t, func() bool { return used() >= inbound.HeapShare*size }, "what is computed")
	require.LessOrEqual(t, used(), int64(inbound.HeapShare*size+run), "the input is charged where it was received")
	go call()
	go call()
	err := <-ended // half of the budget is for two
	require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
	saysWhy(t, status.Convert(err).Message(), []string{"small call", "memory_bytes", strconv.Itoa(limit), "later"})
	require.True(t, tellsWhenToRetry(status.Convert(err)))
	close(let)
	require.NoError(t, <-ended)
	require.NoError(t, <-ended)
	testkit.Eventually(t, func() bool { return used() == 0 }, "the memory of calls that ended")
}
