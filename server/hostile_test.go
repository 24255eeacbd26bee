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
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/stream"
)

// verbatim sends a []byte as the message, whatever it holds.
type verbatim struct{}

func (verbatim) Name() string { return "proto" }

func (verbatim) Marshal(v any) (mem.BufferSlice, error) {
	b, err := v.([]byte), error(nil)
	return mem.BufferSlice{mem.SliceBuffer(b)}, err
}

func (verbatim) Unmarshal(data mem.BufferSlice, v any) error {
	return proto.Unmarshal(data.Materialize(), v.(proto.Message))
}

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
				r = dialRaw(t, f.addr, grpc.ForceCodecV2(either{}))
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

// either is verbatim for a []byte and grpc's own codec for messages.
type either struct{ verbatim }

func (e either) Marshal(v any) (mem.BufferSlice, error) {
	if m, ok := v.(proto.Message); ok {
		b, err := proto.Marshal(m)
		return mem.BufferSlice{mem.SliceBuffer(b)}, err
	}
	return e.verbatim.Marshal(v)
}

func TestABrokenRuleOfACallFailsThatCallAloneWithTheRightCode(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) {
		c.Session.OpenTensors, c.Session.OpenCalls, c.Session.ChunkIdle = 8, 6, stream.Instant(5*time.Second)
	})
	addPair(t, f)
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
	entries := func(n, key, value int) map[string]string {
		m := map[string]string{}
		for i := range n {
			m[fmt.Sprintf("%0*d", key, i)] = strings.Repeat("v", value)
		}
		return m
	}
	const invalid, exhausted = codes.InvalidArgument, codes.ResourceExhausted
	for name, tc := range map[string]struct {
		commit func(r *raw) *offer
		code   codes.Code
		says   []string
		failed bool // the tensor is named in a failure too
	}{
		"an unknown model":      {call(func(c *pb.Call) { c.Model = "nothing" }), codes.NotFound, []string{`"nothing"`}, false},
		"no model":              {call(func(c *pb.Call) { c.Model = "" }), invalid, []string{"model"}, false},
		"a model of 513 bytes":  {call(func(c *pb.Call) { c.Model = strings.Repeat("m", 513) }), invalid, []string{"model", "512"}, false},
		"a model with a bell":   {call(func(c *pb.Call) { c.Model = "a\ab" }), invalid, []string{"model", "control"}, false},
		"a port of 513 bytes":   {call(func(c *pb.Call) { c.Inputs[0].Port = strings.Repeat("p", 513) }), invalid, []string{"port", "512"}, false},
		"a port with a newline": {call(func(c *pb.Call) { c.Inputs[0].Port = "x\n" }), invalid, []string{"port", "control"}, false},
		"an unknown port": {func(r *raw) *offer {
			o := small("pair")
			o.call.Inputs = append(o.call.Inputs, &pb.Input{Port: "v", TensorId: newID()})
			d := proto.Clone(o.desc).(*pb.TensorDesc)
			d.TensorId, d.Port = o.call.Inputs[1].TensorId, "v"
			r.send(&pb.Frame{Calls: []*pb.Call{o.call}, Descs: []*pb.TensorDesc{o.desc, d}})
			return o
		}, invalid, []string{`"w"`, `"x", "v"`}, false},
		"too few inputs": {func(r *raw) *offer {
			o := small("pair")
			r.open(o)
			return o
		}, invalid, []string{"2 inputs", "has 1"}, false},
		"two inputs on one port": {call(func(c *pb.Call) {
			c.Inputs = append(c.Inputs, &pb.Input{Port: "x", TensorId: newID()})
		}), invalid, []string{`"x"`, "share"}, false},
		"one tensor on two ports": {call(func(c *pb.Call) {
			c.Inputs = append(c.Inputs, &pb.Input{Port: "w", TensorId: c.Inputs[0].TensorId})
		}), invalid, []string{`"w"`, "share"}, false},
		"more inputs than open tensors": {call(func(c *pb.Call) {
			for i := range 8 {
				c.Inputs = append(c.Inputs, &pb.Input{Port: fmt.Sprint(i), TensorId: newID()})
			}
		}), exhausted, []string{"9 inputs", "8"}, false},
		"a tensor used before": {func(r *raw) *offer {
			o := small("echo")
			r.run(o)
			o.call.Id = newID()
			o.desc.CallId = o.call.Id
			r.open(o)
			return o
		}, invalid, []string{"used before"}, false},
		"the same call with other content": {func(r *raw) *offer {
			o := small("echo")
			o.desc.OnAllowance = false
			r.open(o)
			r.credit(o.desc.TensorId, 3)
			again := proto.Clone(o.call).(*pb.Call)
			again.Model = "relu"
			r.send(&pb.Frame{Calls: []*pb.Call{again}})
			return o
		}, invalid, []string{"different content"}, false},
		"65 params":              {call(func(c *pb.Call) { c.Params = entries(65, 3, 1) }), invalid, []string{"params", "65", "64"}, false},
		"a param's key too long": {call(func(c *pb.Call) { c.Params = entries(1, 129, 1) }), invalid, []string{"params", "129", "128"}, false},
		"a param's value too long": {
			call(func(c *pb.Call) { c.Params = entries(1, 1, 4097) }), invalid, []string{"params", "4097", "4096"}, false,
		},
		"params of more than 32 KiB": {call(func(c *pb.Call) { c.Params = entries(9, 1, 4096) }), invalid, []string{"params", "32768"}, false},
		"65 metadata entries": {
			desc(func(d *pb.TensorDesc) { d.Metadata = entries(65, 3, 1) }), invalid, []string{"metadata", "65", "64"}, true,
		},
		"a metadata key too long": {desc(func(d *pb.TensorDesc) { d.Metadata = entries(1, 129, 1) }), invalid, []string{"metadata", "128"}, true},
		"a metadata value too long": {
			desc(func(d *pb.TensorDesc) { d.Metadata = entries(1, 1, 4097) }), invalid, []string{"metadata", "4096"}, true,
		},
		"metadata of more than 32 KiB": {desc(func(d *pb.TensorDesc) { d.Metadata = entries(9, 1, 4096) }), invalid, []string{"metadata", "32768"}, true},
		"a name of 513 bytes":          {desc(func(d *pb.TensorDesc) { d.Name = strings.Repeat("n", 513) }), invalid, []string{"name", "512"}, true},
		"a name with an escape":        {desc(func(d *pb.TensorDesc) { d.Name = "\x1b[31m" }), invalid, []string{"name", "control"}, true},
		"another port than the call's": {desc(func(d *pb.TensorDesc) { d.Port = "y" }), invalid, []string{`"y"`, `"x"`}, true},

		"no data type":            {desc(func(d *pb.TensorDesc) { d.Dtype = 0 }), invalid, []string{"data type"}, true},
		"an unknown data type":    {desc(func(d *pb.TensorDesc) { d.Dtype = 99 }), invalid, []string{"data type", "99"}, true},
		"a data type past a byte": {desc(func(d *pb.TensorDesc) { d.Dtype = 1<<20 + 1 }), invalid, []string{"data type"}, true},
		"rank 33":                 {desc(func(d *pb.TensorDesc) { d.Shape = make([]int64, 33) }), invalid, []string{"rank 33", "32"}, true},
		"a negative dimension":    {desc(func(d *pb.TensorDesc) { d.Shape = []int64{2, -5} }), invalid, []string{"dimension 1", "-5"}, true},
		"a dimension over 2^40": {
			desc(func(d *pb.TensorDesc) { d.Shape = []int64{1<<40 + 1} }), invalid, []string{"dimension 0", "1099511627777", "1099511627776"}, true,
		},
		"a shape that overflows": {
			desc(func(d *pb.TensorDesc) { d.Shape = []int64{1 << 40, 1 << 40} }), exhausted, []string{"1099511627776 1099511627776", "2^63"}, true,
		},
		"an empty shape that overflows": {
			desc(func(d *pb.TensorDesc) { d.Shape, d.SizeBytes = []int64{1 << 40, 1 << 40, 0}, 0 }), exhausted, []string{"1099511627776 1099511627776 0", "2^63"}, true,
		},
		"a size that is not the shape's": {desc(func(d *pb.TensorDesc) { d.SizeBytes = 11 }), invalid, []string{"size_bytes", "11", "10"}, true},
		"chunks of 0 bytes":              {desc(func(d *pb.TensorDesc) { d.ChunkBytes = 0 }), invalid, []string{"chunk_bytes", "0", "1048576"}, true},
		"chunks over the limit":          {desc(func(d *pb.TensorDesc) { d.ChunkBytes = mib + 1 }), invalid, []string{"chunk_bytes", "1048577", "1048576"}, true},
		"more than 2^20 chunks": {desc(func(d *pb.TensorDesc) {
			d.Shape, d.SizeBytes, d.ChunkBytes = []int64{1<<20 + 1}, 1<<20+1, 1
		}), exhausted, []string{"1048577 chunks", "1048576"}, true},
		"a tensor over 16 GiB": {desc(func(d *pb.TensorDesc) {
			d.Shape, d.SizeBytes, d.ChunkBytes = []int64{16<<30 + 1}, 16<<30+1, mib
		}), exhausted, []string{"17179869185", "17179869184"}, true},
		"more on allowance than is left": {desc(func(d *pb.TensorDesc) {
			d.Shape, d.SizeBytes, d.ChunkBytes = []int64{mib + 1}, mib+1, mib
		}), exhausted, []string{"allowance", "1048577", "1048576"}, true},
		"a desc that the call does not list": {func(r *raw) *offer {
			o := small("echo")
			other := small("echo").desc
			other.CallId = o.call.Id
			r.send(&pb.Frame{Calls: []*pb.Call{o.call}, Descs: []*pb.TensorDesc{other}})
			return o
		}, invalid, []string{"does not list"}, false},
		"a second desc that differs": {func(r *raw) *offer {
			o := small("echo")
			r.open(o)
			again := proto.Clone(o.desc).(*pb.TensorDesc)
			again.Shape = []int64{5, 2}
			r.send(&pb.Frame{Descs: []*pb.TensorDesc{again}})
			return o
		}, invalid, []string{"another desc"}, true},

		"a chunk past the last": {chunk(func(c *pb.Chunk) { c.Index = 3 }), invalid, []string{"index 3", "3 chunks"}, true},
		"chunk 2^32-1":          {chunk(func(c *pb.Chunk) { c.Index = 1<<32 - 1 }), invalid, []string{"index 4294967295", "3 chunks"}, true},
		"a chunk too short":     {chunk(func(c *pb.Chunk) { c.Data = c.Data[:3] }), invalid, []string{"chunk 1", "3 bytes", "4"}, true},
		"an empty chunk":        {chunk(func(c *pb.Chunk) { c.Data = nil }), invalid, []string{"chunk 1", "0 bytes", "4"}, true},
		"a chunk too long":      {chunk(func(c *pb.Chunk) { c.Data = []byte("fives") }), invalid, []string{"chunk 1", "5 bytes", "4"}, true},
		"a last chunk too long": {chunk(func(c *pb.Chunk) { c.Index = 2 }), invalid, []string{"chunk 2", "4 bytes", "2"}, true},
		"a conflicting duplicate": {func(r *raw) *offer {
			o := small("echo")
			r.open(o)
			r.send(&pb.Frame{Chunk: r.chunk(o, 1)})
			o.data = []byte("9876543210")
			r.send(&pb.Frame{Chunk: r.chunk(o, 1)})
			return o
		}, invalid, []string{"chunk 1", "again"}, true},
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
		"a chunk without credit": {func(r *raw) *offer {
			o := offering("gate", make([]byte, 64*mib), mib)
			r.open(o)
			r.credit(o.desc.TensorId, 1)
			r.send(&pb.Frame{Chunk: r.chunk(o, 63)})
			return o
		}, invalid, []string{"index 63", "credit"}, true},

		"a data type the model does not take": {func(r *raw) *offer {
			o := small("relu")
			r.open(o)
			return o
		}, codes.FailedPrecondition, []string{"float32", "uint8[10]", `"x"`}, false},
		"a shape the model does not take": {func(r *raw) *offer {
			x := offering("pair", floats(2), 8).as(pb.DataType_DATA_TYPE_FLOAT32, 2)
			w := proto.Clone(x.desc).(*pb.TensorDesc)
			w.TensorId, w.Port = newID(), "w"
			x.call.Inputs = append(x.call.Inputs, &pb.Input{Port: "w", TensorId: w.TensorId})
			r.send(&pb.Frame{Calls: []*pb.Call{x.call}, Descs: []*pb.TensorDesc{x.desc, w}})
			return x
		}, codes.FailedPrecondition, []string{"[any any]", "float32[2]"}, false},
		"a param the model does not take": {func(r *raw) *offer {
			o := small("slow")
			o.call.Params = map[string]string{"delay": "a while"}
			r.open(o)
			return o
		}, codes.FailedPrecondition, []string{"delay", "a while"}, false},
		"a model that fails": {func(r *raw) *offer {
			o := small("slow")
			o.call.Params = map[string]string{"fail_at": "3"}
			r.open(o)
			r.deliver(o)
			return o
		}, codes.Internal, []string{"row 3"}, false},
		"an input given up": {func(r *raw) *offer {
			o := small("echo")
			r.open(o)
			r.send(&pb.Frame{Failures: []*pb.Failure{{TensorId: o.desc.TensorId, Code: uint32(codes.DataLoss), Message: "the disk is gone"}}})
			return o
		}, codes.DataLoss, []string{"the disk is gone"}, false},
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
		"an acknowledgement of what was never sent": {func(r *raw) *offer {
			r.hold = true
			o := offering("echo", make([]byte, 4*mib), mib)
			r.open(o)
			r.deliver(o)
			id := func() (id []byte) {
				for _, in := range r.results {
					if string(in.desc.CallId) == string(o.call.Id) {
						id = in.desc.TensorId
					}
				}
				return id
			}
			r.until(func() bool { return id() != nil })
			r.hold = false
			r.send(&pb.Frame{Acks: []*pb.Ack{{TensorId: id(), ReceivedBelow: 3}}})
			return o
		}, invalid, []string{"below 3", "below 0"}, false},
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

func TestAFrameForAnUnknownTensorIsAnsweredAndTheSessionLivesOn(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	for name, tc := range map[string]struct {
		send func(r *raw, id []byte)
		says string
		code codes.Code
	}{
		"chunk":  {func(r *raw, id []byte) { r.send(&pb.Frame{Chunk: &pb.Chunk{TensorId: id, Data: []byte{1}}}) }, "desc first", codes.NotFound},
		"credit": {func(r *raw, id []byte) { r.send(&pb.Frame{Credits: []*pb.Credit{{TensorId: id, ChunkLimit: 1}}}) }, "not known", codes.NotFound},
		"ack":    {func(r *raw, id []byte) { r.send(&pb.Frame{Acks: []*pb.Ack{{TensorId: id}}}) }, "not known", codes.NotFound},
		"desc of an unknown call": {func(r *raw, id []byte) {
			o := small("echo")
			o.desc.TensorId = id
			r.send(&pb.Frame{Descs: []*pb.TensorDesc{o.desc}})
		}, "call first", codes.NotFound},
		"desc of no call": {func(r *raw, id []byte) {
			o := small("echo")
			o.desc.TensorId, o.desc.CallId = id, nil
			r.send(&pb.Frame{Descs: []*pb.TensorDesc{o.desc}})
		}, "names no call", codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			r := openRaw(t, f.addr)
			id := newID()
			tc.send(r, id)
			p := r.failure(id)
			require.Equal(t, tc.code, codes.Code(p.Code))
			require.Contains(t, p.Message, tc.says)
			tc.send(r, id) // answered once
			r.good()
		})
	}
}

func TestFramesThatChangeNothingAreIgnored(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	r := openRaw(t, f.addr)
	o := small("echo")
	r.send(&pb.Frame{Cancels: []*pb.Cancel{{CallId: newID()}}, Failures: []*pb.Failure{{TensorId: newID(), Code: 13}}})
	r.open(o)
	r.open(o) // the same call and desc again
	r.send(&pb.Frame{Chunk: r.chunk(o, 1)})
	r.send(&pb.Frame{Chunk: r.chunk(o, 1)}) // the same chunk again
	r.deliver(o)
	require.Equal(t, o.data, r.result(o)["y"].data)
	r.open(o) // the call has ended: late
	r.send(&pb.Frame{Chunk: r.chunk(o, 2)})
	r.good()
	require.Equal(t, int64(2), f.counters(t)["calls_total"])
	require.Positive(t, f.counters(t)["duplicate_chunks_total"])
}

func TestAChunkWithAWrongChecksumIsAskedForAgain(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	r := openRaw(t, f.addr)
	o := small("echo")
	r.open(o)
	for range 2 {
		bad := r.chunk(o, 1)
		bad.Data = []byte("evil")
		r.send(&pb.Frame{Chunk: bad})
	}
	id := string(o.desc.TensorId)
	r.until(func() bool { return r.resends[id] == 2 })
	require.Contains(t, r.acks[id].Resend, uint32(1))
	r.deliver(o)
	require.Equal(t, o.data, r.result(o)["y"].data)
	require.Equal(t, int64(2), f.counters(t)["corrupt_chunks_total"])
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
	for range limit {
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
	f := serve(t, func(c *server.Config) { c.Store, c.Sessions, c.QueuedCalls, c.Transfers = m, 1, 1, 1 })
	addGate(t, f, "gate") // never opened
	greedy := openRaw(t, f.addr)
	greedy.open(small("gate"))
	openPush(t, f).announce(ten("greedy"))
	testkit.Eventually(t, func() bool {
		c := f.counters(t)
		return c["calls"] == 1 && c["open_transfers"] == 1
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
