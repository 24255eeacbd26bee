package server_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/stream"
)

// either is grpc's own codec, but for a []byte, which is the message, whatever it holds.
type either struct{ encoding.CodecV2 }

func (e either) Marshal(v any) (mem.BufferSlice, error) {
	if b, ok := v.([]byte); ok {
		return mem.BufferSlice{mem.SliceBuffer(b)}, nil
	}
	return e.CodecV2.Marshal(v)
}

// asItIs has an RPC take a []byte as a message, too.
func asItIs() grpc.CallOption { return grpc.ForceCodecV2(either{encoding.GetCodecV2("proto")}) }

// good is a call that any healthy session computes.
func (r *raw) good() {
	r.t.Helper()
	o := offering("relu", floats(3000), 999).as(pb.DataType_DATA_TYPE_FLOAT32, 3000)
	require.Equal(r.t, mapFloats(o.data, relu), r.run(o)["y"].data, "a good call after it")
}

// small is a call of 10 bytes in chunks of 4, on allowance.
func small(model string) *offer {
	o := offering(model, []byte("0123456789"), 4)
	o.desc.OnAllowance = true
	return o
}

func TestABrokenRuleOfTheSessionEndsItWithTheRightStatus(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) { c.Session.FirstFrame = stream.Instant(100 * time.Millisecond) })
	parts := func(n int, part func() *pb.Frame) *pb.Frame {
		all := &pb.Frame{}
		for range n {
			proto.Merge(all, part())
		}
		return all
	}
	for name, tc := range map[string]struct {
		opens bool // a good hello comes first
		send  func(r *raw)
		code  codes.Code
		says  []string
	}{
		"nothing for too long": {code: codes.DeadlineExceeded, send: func(*raw) {}, says: []string{"hello"}},
		"no hello first": {code: codes.InvalidArgument, says: []string{"hello"}, send: func(r *raw) {
			r.open(small("echo"))
		}},
		"an empty first frame": {code: codes.InvalidArgument, says: []string{"hello"}, send: func(r *raw) { r.send(&pb.Frame{}) }},
		"a chunk first": {code: codes.InvalidArgument, says: []string{"hello"}, send: func(r *raw) {
			r.send(&pb.Frame{Chunk: r.chunk(small("echo"), 0)})
		}},
		"two hellos": {opens: true, code: codes.InvalidArgument, says: []string{"second hello"}, send: func(r *raw) {
			r.send(&pb.Frame{Hello: r.greeting()})
		}},
		"another version": {code: codes.FailedPrecondition, says: []string{"version 2", "speaks 1"}, send: func(r *raw) {
			h := r.greeting()
			h.Version = 2
			r.send(&pb.Frame{Hello: h})
		}},
		"no checksum": {code: codes.InvalidArgument, says: []string{"checksum kind 0", "crc32c"}, send: func(r *raw) {
			h := r.greeting()
			h.Checksum = 0
			r.send(&pb.Frame{Hello: h})
		}},
		"an unknown checksum": {code: codes.InvalidArgument, says: []string{"checksum kind 77"}, send: func(r *raw) {
			h := r.greeting()
			h.Checksum = 77
			r.send(&pb.Frame{Hello: h})
		}},
		"no session id": {code: codes.InvalidArgument, says: []string{"hello.session_id", "16 bytes"}, send: func(r *raw) {
			h := r.greeting()
			h.SessionId = nil
			r.send(&pb.Frame{Hello: h})
		}},
		"a session id of zeros": {code: codes.InvalidArgument, says: []string{"hello.session_id"}, send: func(r *raw) {
			h := r.greeting()
			h.SessionId = make([]byte, 16)
			r.send(&pb.Frame{Hello: h})
		}},
		"a call id of 15 bytes": {opens: true, code: codes.InvalidArgument, says: []string{"calls[0].id", "16 bytes", "15 bytes"}, send: func(r *raw) {
			o := small("echo")
			o.call.Id = o.call.Id[1:]
			r.open(o)
		}},
		"an input's id of 17 bytes": {opens: true, code: codes.InvalidArgument, says: []string{"calls[0].inputs[0].tensor_id", "17 bytes"}, send: func(r *raw) {
			o := small("echo")
			o.call.Inputs[0].TensorId = append(o.call.Inputs[0].TensorId, 1)
			r.open(o)
		}},
		"a desc's id of 1 byte": {opens: true, code: codes.InvalidArgument, says: []string{"descs[0].tensor_id", "1 bytes"}, send: func(r *raw) {
			o := small("echo")
			o.desc.TensorId = []byte{1}
			r.open(o)
		}},
		"a chunk without id": {opens: true, code: codes.InvalidArgument, says: []string{"chunk.tensor_id", "0 bytes"}, send: func(r *raw) {
			r.send(&pb.Frame{Chunk: &pb.Chunk{Data: []byte{1}}})
		}},
		"garbage": {opens: true, code: codes.InvalidArgument, says: []string{"malformed frame"}, send: func(r *raw) {
			require.NoError(r.t, r.stream.SendMsg([]byte("\xff\xff\xff\xff garbage \xff")))
		}},
		"a message cut short": {opens: true, code: codes.InvalidArgument, says: []string{"malformed frame"}, send: func(r *raw) {
			o := small("echo")
			b, err := proto.Marshal(&pb.Frame{Chunk: r.chunk(o, 0)})
			require.NoError(r.t, err)
			require.NoError(r.t, r.stream.SendMsg(b[:len(b)-1]))
		}},
		"a name that is not UTF-8": {opens: true, code: codes.InvalidArgument, says: []string{"malformed frame"}, send: func(r *raw) {
			o := small("echo")
			b, err := proto.Marshal(&pb.Frame{Calls: []*pb.Call{o.call}})
			require.NoError(r.t, err)
			require.NoError(r.t, r.stream.SendMsg([]byte(strings.Replace(string(b), "echo", "ech\xff", 1))))
		}},
		"done from the client": {opens: true, code: codes.InvalidArgument, says: []string{"done came from the client"}, send: func(r *raw) {
			r.send(&pb.Frame{Dones: []*pb.Done{{CallId: newID()}}})
		}},
		"65 calls in a frame": {opens: true, code: codes.ResourceExhausted, says: []string{"calls", "64", "65"}, send: func(r *raw) {
			r.send(parts(65, func() *pb.Frame { return &pb.Frame{Calls: []*pb.Call{small("echo").call}} }))
		}},
		"257 credits in a frame": {opens: true, code: codes.ResourceExhausted, says: []string{"credits", "256", "257"}, send: func(r *raw) {
			r.send(parts(257, func() *pb.Frame { return &pb.Frame{Credits: []*pb.Credit{{TensorId: newID()}}} }))
		}},
		"65 inputs of a call": {opens: true, code: codes.ResourceExhausted, says: []string{"calls[0].inputs", "64", "65"}, send: func(r *raw) {
			o := small("echo")
			for range 64 {
				o.call.Inputs = append(o.call.Inputs, &pb.Input{Port: "x", TensorId: newID()})
			}
			r.open(o)
		}},
		"more than 64 KiB beside the payload": {opens: true, code: codes.ResourceExhausted, says: []string{"65536"}, send: func(r *raw) {
			o := small("echo")
			o.call.Params = map[string]string{"a": strings.Repeat("b", 65<<10)}
			r.open(o)
		}},
		"a message over the receive limit": {opens: true, code: codes.ResourceExhausted, says: []string{"larger than max", fmt.Sprint(mib + 64<<10)}, send: func(r *raw) {
			r.send(&pb.Frame{Chunk: &pb.Chunk{TensorId: newID(), Data: make([]byte, 2*mib)}})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			var r *raw
			if strings.Contains(name, "UTF-8") || strings.Contains(name, "garbage") || strings.Contains(name, "short") {
				r = dialRaw(t, f.addr, asItIs())
			} else {
				r = dialRaw(t, f.addr)
			}
			if tc.opens {
				r.greet()
			}
			tc.send(r)
			st := r.status()
			require.Equal(t, tc.code, st.Code(), st.Message())
			for _, text := range tc.says {
				require.Contains(t, st.Message(), text)
			}
			f.isEmpty(t)
		})
	}
}

// TestABrokenRuleOfACallFailsThatCallAloneWithTheRightCode has each code, and what only a
// message can hold; internal/serving has the rest.
func TestABrokenRuleOfACallFailsThatCallAloneWithTheRightCode(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) { c.Session.ChunkIdle = stream.Instant(5 * time.Second) })
	addGate(t, f, "gate") // never opened
	desc := func(change func(d *pb.TensorDesc)) func(r *raw) *offer {
		return func(r *raw) *offer {
			o := small("echo")
			change(o.desc)
			r.open(o)
			return o
		}
	}
	call := func(change func(c *pb.Call)) func(r *raw) *offer {
		return func(r *raw) *offer {
			o := small("echo")
			change(o.call)
			r.open(o)
			return o
		}
	}
	// chunk opens a good call and then sends a chunk that is not.
	chunk := func(change func(c *pb.Chunk)) func(r *raw) *offer {
		return func(r *raw) *offer {
			o := small("echo")
			r.open(o)
			c := r.chunk(o, 1)
			change(c)
			c.Checksum = r.sum(c.TensorId, c.Index, c.Data)
			r.send(&pb.Frame{Chunk: c})
			return o
		}
	}
	const invalid, exhausted = codes.InvalidArgument, codes.ResourceExhausted
	for name, tc := range map[string]struct {
		commit func(r *raw) *offer
		code   codes.Code
		says   []string
		failed bool // the tensor is named in a failure too
	}{
		"an unknown model": {call(func(c *pb.Call) { c.Model = "nothing" }), codes.NotFound, []string{`"nothing"`}, false},
		"65 metadata entries": {
			desc(func(d *pb.TensorDesc) { d.Metadata = entriesOf(65, 3, 1) }), invalid, []string{"metadata", "65", "64"}, true,
		},
		"an unknown data type":    {desc(func(d *pb.TensorDesc) { d.Dtype = 99 }), invalid, []string{"data type", "99"}, true},
		"a data type past a byte": {desc(func(d *pb.TensorDesc) { d.Dtype = 1<<20 + 1 }), invalid, []string{"data type"}, true},
		"a shape that overflows": {
			desc(func(d *pb.TensorDesc) { d.Shape = []int64{1 << 40, 1 << 40} }), exhausted, []string{"1099511627776 1099511627776", "2^63"}, true,
		},
		"an empty chunk": {chunk(func(c *pb.Chunk) { c.Data = nil }), invalid, []string{"chunk 1", "0 bytes", "4"}, true},
		"a wrong checksum three times": {func(r *raw) *offer {
			o := small("echo")
			r.open(o)
			c := r.chunk(o, 1)
			c.Checksum++
			for range 3 {
				r.send(&pb.Frame{Chunk: c})
			}
			return o
		}, codes.DataLoss, []string{"chunk 1", "3 times"}, true},

		"a model that fails": {func(r *raw) *offer {
			o := small("slow")
			o.call.Params = map[string]string{"fail_at": "3"}
			r.open(o)
			r.deliver(o)
			return o
		}, codes.Internal, []string{"row 3"}, false},
		"a cancel": {func(r *raw) *offer {
			o := small("gate")
			r.open(o)
			r.send(&pb.Frame{Cancels: []*pb.Cancel{{CallId: o.call.Id}}})
			return o
		}, codes.Canceled, []string{"cancelled"}, false},
		"a timeout": {func(r *raw) *offer {
			o := small("gate")
			o.call.TimeoutMillis = 50
			r.open(o)
			return o
		}, codes.DeadlineExceeded, []string{"timeout"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := openRaw(t, f.addr)
			o := tc.commit(r)
			done := r.done(o.call.Id)
			require.Equal(t, tc.code, codes.Code(done.Code), done.Message)
			require.Empty(t, done.Outputs)
			for _, text := range tc.says {
				require.Contains(t, done.Message, text)
			}
			if tc.failed {
				p := r.failure(o.desc.TensorId)
				require.Equal(t, done.Code, p.Code)
				require.Equal(t, done.Message, p.Message)
			}
			// What still comes for the call is late, not wrong.
			r.send(&pb.Frame{
				Calls: []*pb.Call{o.call}, Descs: []*pb.TensorDesc{o.desc}, Cancels: []*pb.Cancel{{CallId: o.call.Id}},
				Credits: []*pb.Credit{{TensorId: o.desc.TensorId, ChunkLimit: 9}}, Acks: []*pb.Ack{{TensorId: o.desc.TensorId}},
			})
			r.good()
			require.NoError(t, r.stream.CloseSend())
			require.Equal(t, codes.OK, r.status().Code())
			f.isEmpty(t)
		})
	}
}

// TestAFrameForAnUnknownTensorIsAnsweredAndTheSessionLivesOn has a desc without the ID of a
// call; internal/serving has the other frames.
func TestAFrameForAnUnknownTensorIsAnsweredAndTheSessionLivesOn(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	r := openRaw(t, f.addr)
	o := small("echo")
	o.desc.CallId = nil
	for range 2 { // answered once
		r.send(&pb.Frame{Descs: []*pb.TensorDesc{o.desc}})
		p := r.failure(o.desc.TensorId)
		require.Equal(t, codes.InvalidArgument, codes.Code(p.Code))
		require.Contains(t, p.Message, "names no call")
	}
	r.good()
}

func TestLimitsOfTheServerAreNamedWhenTheyAreReached(t *testing.T) {
	testkit.Start(t)
	const limit = 6
	f := serve(t, func(c *server.Config) { c.Sessions = limit })
	conn := f.dial(t)
	open := func() *raw {
		r, err := rawOn(t, conn)
		require.NoError(t, err)
		r.send(&pb.Frame{Hello: r.greeting()})
		return r
	}
	var sessions []*raw
	for range limit - 1 { // one place is for others
		r := open()
		r.good()
		sessions = append(sessions, r)
	}
	st := open().status()
	require.Equal(t, codes.ResourceExhausted, st.Code())
	saysWhy(t, st.Message(), []string{"open sessions", "limit of the server is 6"})
	require.True(t, tellsWhenToRetry(st))
	sessions[0].good()
}

func TestWhoHasLittleOpenIsServedThoughTheLimitsAreReached(t *testing.T) {
	testkit.Start(t)
	m := shelf(t, mib)
	f := serve(t, func(c *server.Config) { c.Store, c.Sessions, c.QueuedCalls, c.Transfers = m, 8, 8, 8 })
	addGate(t, f, "gate") // never opened
	conn := f.dial(t)
	for range 7 {
		greedy, err := rawOn(t, conn)
		require.NoError(t, err)
		greedy.send(&pb.Frame{Hello: greedy.greeting()})
		greedy.open(small("gate"))
		_, err = pb.NewTensorServiceClient(conn).PushTensors(t.Context())
		require.NoError(t, err)
	}
	testkit.Eventually(t, func() bool {
		c := f.counters(t)
		return c["calls"] == 6 && c["open_transfers"] == 6
	}, "the limits")

	modest := openRaw(t, f.addr) // a connection of its own
	for range 100 {
		modest.good()
	}
	_, err := pb.NewTensorServiceClient(f.dial(t)).Compute(t.Context(), asking("echo", pb.DataType_DATA_TYPE_UINT8, []byte("abc"), 3))
	require.NoError(t, err)
	for range 10 {
		p, o := openPush(t, f), ten("modest")
		p.announce(o)
		p.deliver(o, 0)
		p.stored(o)
	}
}

// TestARejectedRPCLeavesNothingBehind rejects RPCs whose deadlines are far away.
func TestARejectedRPCLeavesNothingBehind(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	conn := f.dial(t)
	ctx, cancel := context.WithTimeout(t.Context(), 1000*time.Hour)
	defer cancel()
	reject := func(n int) {
		for range n {
			err := conn.Invoke(ctx, "/tensorferry.v1.TensorService/Nothing", &pb.ComputeRequest{}, &pb.ComputeResponse{})
			require.Equal(t, codes.Unimplemented, status.Code(err))
		}
	}
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	reject(100)
	before := heap()
	const n = 5000
	reject(n)
	require.Less(t, (heap()-before)/n, int64(100), "bytes for each")
}

func TestAHalfClosedStream(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	r := openRaw(t, f.addr)
	require.NoError(t, r.stream.CloseSend())
	require.Equal(t, codes.OK, r.status().Code(), "without calls it ends the session")
	f.isEmpty(t)
}
