package server_test

import (
	"net"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/attack"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

// wire2 is a peer that speaks HTTP/2 by hand. It writes on the test's goroutine.
type wire2 struct {
	*attack.Conn
	conn net.Conn
	ends chan map[string]string // the trailers of each RPC that has ended; closed with the connection
}

func dialWire2(t testing.TB, addr string) *wire2 {
	t.Helper()
	conn, err := connect(t.Context(), addr)
	require.NoError(t, err)
	w := &wire2{conn: conn, ends: make(chan map[string]string, 1<<10)}
	w.Conn, err = attack.NewConn(t.Context(), conn, 64<<10)
	require.NoError(t, err)
	w.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	go func() { // ends with the connection
		defer close(w.ends)
		for {
			f, err := w.ReadFrame()
			if err != nil {
				return
			}
			if h, ok := f.(*http2.MetaHeadersFrame); ok && h.StreamEnded() {
				end := map[string]string{"id": strconv.Itoa(int(h.StreamID))}
				for _, f := range h.Fields {
					end[f.Name] = f.Value
				}
				w.ends <- end
			}
		}
	}()
	t.Cleanup(w.close)
	return w
}

// close closes the connection and waits for its reader.
func (w *wire2) close() {
	_ = w.conn.Close()
	for range w.ends {
	}
}

// TestUnfinishedMessagesAreChargedAndEndForOthers has what waits for seconds, side by side.
func TestUnfinishedMessagesAreChargedAndEndForOthers(t *testing.T) {
	testkit.Start(t)
	for name, test := range map[string]func(t *testing.T){
		"calls": unfinishedCalls, "what pushes announce": unfinishedPushes,
		"larger messages of a service": unfinishedLarger, "what small calls compute": smallCallsCompute,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t)
		})
	}
}

func unfinishedCalls(t *testing.T) {
	f := serveWithin(t, 16*mib, nil)
	s := f.session(t, client.Config{})
	x, err := tensor.Of([]byte{1, 2, 3})
	require.NoError(t, err)
	small := func() {
		t.Helper()
		y, err := s.Compute(t.Context(), "echo", x)
		require.NoError(t, err)
		require.Equal(t, x.Data, y.Data)
	}
	small()
	limit := f.counters(t)["receive_limit_bytes"]
	require.EqualValues(t, 16*(mib+64<<10), limit, "sixteen of the largest messages")
	base := f.counters(t)["receive_used_bytes"]

	one := dialWire2(t, f.addr)
	require.NoError(t, one.Open(ours+"Compute").Send(mib, 100<<10, 16<<10, 0).Err)
	testkit.Eventually(t, func() bool {
		n := f.counters(t)["receive_used_bytes"] - base
		return n > mib && n < mib+80<<10 // the whole message, and the RPC
	}, "the charge of a message that has begun")
	one.close()
	testkit.Eventually(t, func() bool { return f.counters(t)["receive_used_bytes"] <= base }, "what was left to be collected, by the server itself")

	var all []*wire2
	for range 3 { // each would have more than the limit
		w := dialWire2(t, f.addr)
		all = append(all, w)
		go func() { // ends with the connection
			for range 20 {
				if w.Open(ours+"Compute").Send(mib, mib-1, 11<<10, 0).Err != nil {
					return
				}
			}
		}()
	}
	for _, w := range all {
		end := <-w.ends
		require.Equal(t, strconv.Itoa(int(codes.ResourceExhausted)), end["grpc-status"], end)
		require.Contains(t, end["grpc-message"], "memory")
		require.NotEmpty(t, end["grpc-status-details-bin"], "when to try again")
		small()
		require.LessOrEqual(t, f.counters(t)["receive_used_bytes"], limit+256<<10, "and what each connection has to itself")
	}
	require.Positive(t, f.counters(t)["receive_ended_total"])
	for _, w := range all {
		w.close()
	}
	testkit.Eventually(t, func() bool {
		runtime.GC() // that a server does so itself has been seen above
		return f.counters(t)["receive_used_bytes"] <= base
	}, "the memory of closed connections")
}

// TestManyMessagesOfOneConnectionComeAtOnce has gRPC interleave them, frame by frame.
func TestManyMessagesOfOneConnectionComeAtOnce(t *testing.T) {
	testkit.Start(t)
	// Room for 16 small calls of 2 MiB and a little, their runs, and what sessions reserve.
	f := serveWithin(t, 128*mib, func(c *server.Config) { c.ReceiveBytes = 32 * mib })
	c, err := client.Dial(f.addr, client.Config{})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	x, err := tensor.Of(testkit.Bytes(4*mib, 1))
	require.NoError(t, err)
	stub := pb.NewTensorServiceClient(f.dial(t))
	var all sync.WaitGroup
	errs := make(chan error, 200)
	for range 16 {
		all.Go(func() {
			s, err := c.Session(t.Context())
			for range 3 {
				if err == nil {
					_, err = s.Compute(t.Context(), "sink", x)
				}
				errs <- err
			}
		})
	}
	all.Wait()
	for range 16 {
		all.Go(func() {
			for range 3 {
				_, err := stub.Compute(t.Context(), asking("sink", pb.DataType_DATA_TYPE_UINT8, x.Data[:mib], mib))
				errs <- err
			}
		})
	}
	all.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
	require.Zero(t, f.counters(t)["receive_ended_total"])
}

// unfinishedPushes announces tensors that cannot be: they are kept where there is memory.
func unfinishedPushes(t *testing.T) {
	f := serveWithin(t, 16*mib, func(c *server.Config) {
		unpaced(c)
		c.Store = shelf(t, 16*mib)
	})
	base := f.counters(t)["receive_used_bytes"]
	limit := f.counters(t)["receive_limit_bytes"]
	var pushes []*pusher
	var st *status.Status
	for st == nil {
		require.Less(t, len(pushes), 16, "pushes of 3 MiB each")
		p := openPush(t, f)
		pushes = append(pushes, p)
		p.announce(ten("stays open"))
		for range 10 {
			var list []*parcel
			for range 100 {
				o := ten(strings.Repeat("x", 480))
				o.desc.SizeBytes++ // its shape says less
				list = append(list, o)
			}
			p.announce(list...)
		}
		before := len(pushes) * 2 * mib
		testkit.Eventually(t, func() bool {
			n := f.counters(t)["receive_used_bytes"]
			require.LessOrEqual(t, n, limit+256<<10)
			if f.counters(t)["receive_ended_total"] > 0 {
				st = p.finish()
				return true
			}
			return n > int64(before)
		}, "the memory of what was announced, or its refusal")
	}
	require.Equal(t, codes.ResourceExhausted, st.Code(), st.Message())
	require.Contains(t, st.Message(), "memory")
	for _, p := range pushes {
		p.end()
	}
	testkit.Eventually(t, func() bool { return f.counters(t)["receive_used_bytes"] <= base }, "the memory of pushes that ended")
}

// TestChunkTablesTakeMemoryThatThereIs opens connections and sends one frame of a few KiB on
// each, which announces tensors of thousands of chunks that never come.
func TestChunkTablesTakeMemoryThatThereIs(t *testing.T) {
	testkit.Start(t)
	const tensors = 60
	for kind, of := range map[string]func(*pb.Call){
		"puts":                       func(c *pb.Call) { c.Put = new(pb.Put) },
		"calls that wait for inputs": func(c *pb.Call) { c.Model = "echo" },
	} {
		t.Run(kind, func(t *testing.T) {
			f := serveWithin(t, 16*mib, func(c *server.Config) { c.Store = shelf(t, 16*mib) })
			base, limit := f.counters(t)["receive_used_bytes"], f.counters(t)["receive_limit_bytes"]
			var peers []*raw
			ends := make(chan error, 16)
			denied := func() bool { return f.counters(t)["receive_ended_total"] > 0 }
			for !denied() {
				require.Less(t, len(peers), cap(ends))
				call := &pb.Call{Id: newID()}
				of(call)
				frame := &pb.Frame{Calls: []*pb.Call{call}}
				for i := range tensors {
					d := &pb.TensorDesc{TensorId: newID(), Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{4000}, SizeBytes: 4000, ChunkBytes: 1, CallId: call.Id}
					if name := strconv.Itoa(i); call.Put != nil {
						d.Name = name
					} else {
						d.Port = name
						call.Inputs = append(call.Inputs, &pb.Input{Port: name, TensorId: d.TensorId})
					}
					frame.Descs = append(frame.Descs, d)
				}
				frame.Descs = frame.Descs[1:]
				r := openRaw(t, f.addr)
				r.send(frame)
				peers = append(peers, r)
				go func() {
					for r.recv() {
					}
					ends <- r.err
				}()
				n := int64(len(peers))
				testkit.Eventually(t, func() bool {
					used := f.counters(t)["receive_used_bytes"]
					require.LessOrEqual(t, used, limit+n*inbound.Free, "with %d connections", n)
					return used > base+n*tensors*20<<10 || denied()
				}, "the memory of what was announced, or its refusal")
			}
			err := <-ends // the last one's, or of one that it waited for
			require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
			require.ErrorContains(t, err, "memory")
			for _, r := range peers {
				r.end()
			}
			testkit.Eventually(t, func() bool {
				runtime.GC() // it frees what they left unread
				return f.counters(t)["receive_used_bytes"] <= base
			}, "the memory of what was announced")
		})
	}
}

func TestAnRPCForWhichThereIsNoMemoryIsRefused(t *testing.T) {
	testkit.Start(t)
	f := serveWithin(t, 16*mib, nil)
	all := []*wire2{dialWire2(t, f.addr), dialWire2(t, f.addr)}
	for _, w := range all {
		for range 120 {
			w.Open(ours+"Compute", strings.Repeat("x", 15<<10))
		}
	}
	end := <-all[1].ends
	require.Equal(t, strconv.Itoa(int(codes.ResourceExhausted)), end["grpc-status"], end)
	require.Contains(t, end["grpc-message"], "memory")
	require.NotEmpty(t, end["grpc-status-details-bin"])
	require.LessOrEqual(t, f.counters(t)["receive_used_bytes"], f.counters(t)["receive_limit_bytes"]/2+2*64<<10)
	third := dialWire2(t, f.addr) // has its own
	third.Open(ours+"Compute", strings.Repeat("x", 15<<10))
	f.session(t, client.Config{})
	select {
	case end := <-third.ends:
		t.Fatalf("the first RPC of a connection ended with %v", end)
	default:
	}
}

func TestAnUnknownMethodIsRefusedWithItsHeaders(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	w := dialWire2(t, f.addr)
	for _, method := range []string{ours + "Nothing", "/nobody.Service/Compute", "Compute", "/", "x"} {
		w.Open(method)
		end := <-w.ends
		require.Equal(t, strconv.Itoa(int(codes.Unimplemented)), end["grpc-status"], "%q: %v", method, end)
		require.Contains(t, end["grpc-message"], method)
	}
}
