package serving

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestABrokenRuleOfACallFailsThatCallAloneWithTheRightCode(t *testing.T) {
	testkit.Start(t)
	desc := func(change func(d *frame.Desc)) func(p *peer) *offer {
		return func(p *peer) *offer {
			o := small("echo")
			change(&o.desc)
			p.open(o)
			return o
		}
	}
	call := func(change func(c *frame.Call)) func(p *peer) *offer {
		return func(p *peer) *offer {
			o := small("echo")
			change(&o.call)
			p.open(o)
			return o
		}
	}
	// chunk opens a good call and then sends a chunk that is not.
	chunk := func(change func(c *frame.Chunk)) func(p *peer) *offer {
		return func(p *peer) *offer {
			o := small("echo")
			p.open(o)
			f := o.chunk(1)
			change(&f.Chunk)
			f.Chunk.Sum = sum(f.Chunk.Tensor, f.Chunk.Index, bytes.Join(f.Chunk.Data, nil))
			p.send(f)
			return o
		}
	}
	const invalid, exhausted = frame.InvalidArgument, frame.ResourceExhausted
	for name, tc := range map[string]struct {
		commit func(p *peer) *offer
		code   frame.Code
		says   []string
		failed bool // the tensor is named in a failure too
	}{
		"an unknown model":      {call(func(c *frame.Call) { c.Model = "nothing" }), frame.NotFound, []string{`"nothing"`}, false},
		"no model":              {call(func(c *frame.Call) { c.Model = "" }), invalid, []string{"model"}, false},
		"a model of 513 bytes":  {call(func(c *frame.Call) { c.Model = strings.Repeat("m", 513) }), invalid, []string{"model", "512"}, false},
		"a model with a bell":   {call(func(c *frame.Call) { c.Model = "a\ab" }), invalid, []string{"model", "control"}, false},
		"a port of 513 bytes":   {call(func(c *frame.Call) { c.Inputs[0].Port = strings.Repeat("p", 513) }), invalid, []string{"port", "512"}, false},
		"a port with a newline": {call(func(c *frame.Call) { c.Inputs[0].Port = "x\n" }), invalid, []string{"port", "control"}, false},
		"an unknown port": {func(p *peer) *offer {
			o := small("pair")
			o.call.Inputs = append(o.call.Inputs, frame.Binding{Port: "v", Tensor: tensor.NewID()})
			d := o.desc
			d.Tensor, d.Port = o.call.Inputs[1].Tensor, "v"
			p.send(&frame.Frame{Calls: []frame.Call{o.call}, Descs: []frame.Desc{o.desc, d}})
			return o
		}, invalid, []string{`"w"`, `["x" "v"]`}, false},
		"too few inputs": {func(p *peer) *offer {
			o := small("pair")
			p.open(o)
			return o
		}, invalid, []string{`takes inputs ["x" "w"]`, `has ["x"]`}, false},
		"two inputs on one port": {call(func(c *frame.Call) {
			c.Inputs = append(c.Inputs, frame.Binding{Port: "x", Tensor: tensor.NewID()})
		}), invalid, []string{`"x"`, "share"}, false},
		"one tensor on two ports": {call(func(c *frame.Call) {
			c.Inputs = append(c.Inputs, frame.Binding{Port: "w", Tensor: c.Inputs[0].Tensor})
		}), invalid, []string{`"w"`, "share"}, false},
		"more inputs than open tensors": {call(func(c *frame.Call) {
			for i := range 8 {
				c.Inputs = append(c.Inputs, frame.Binding{Port: fmt.Sprint(i), Tensor: tensor.NewID()})
			}
		}), exhausted, []string{"9 inputs", "8"}, false},
		"a tensor used before": {func(p *peer) *offer {
			o := small("echo")
			p.run(o)
			o.call.ID = tensor.NewID()
			o.desc.Call = o.call.ID
			p.open(o)
			return o
		}, invalid, []string{"used before"}, false},
		"the same call with other content": {func(p *peer) *offer {
			o := small("echo")
			o.desc.OnAllowance = false
			p.open(o)
			p.credit(o, 3)
			again := o.call
			again.Model = "relu"
			p.send(&frame.Frame{Calls: []frame.Call{again}})
			return o
		}, invalid, []string{"different content"}, false},
		"65 params":              {call(func(c *frame.Call) { c.Params = entriesOf(65, 3, 1) }), invalid, []string{"params", "65", "64"}, false},
		"a param's key too long": {call(func(c *frame.Call) { c.Params = entriesOf(1, 129, 1) }), invalid, []string{"params", "129", "128"}, false},
		"a param's value too long": {
			call(func(c *frame.Call) { c.Params = entriesOf(1, 1, 4097) }), invalid, []string{"params", "4097", "4096"}, false,
		},
		"params of more than 32 KiB": {call(func(c *frame.Call) { c.Params = entriesOf(9, 1, 4096) }), invalid, []string{"params", "32768"}, false},
		"65 metadata entries": {
			desc(func(d *frame.Desc) { d.Metadata = entriesOf(65, 3, 1) }), invalid, []string{"metadata", "65", "64"}, true,
		},
		"a metadata key too long": {desc(func(d *frame.Desc) { d.Metadata = entriesOf(1, 129, 1) }), invalid, []string{"metadata", "128"}, true},
		"a metadata value too long": {
			desc(func(d *frame.Desc) { d.Metadata = entriesOf(1, 1, 4097) }), invalid, []string{"metadata", "4096"}, true,
		},
		"metadata of more than 32 KiB": {desc(func(d *frame.Desc) { d.Metadata = entriesOf(9, 1, 4096) }), invalid, []string{"metadata", "32768"}, true},
		"a name of 513 bytes":          {desc(func(d *frame.Desc) { d.Name = strings.Repeat("n", 513) }), invalid, []string{"name", "512"}, true},
		"a name with an escape":        {desc(func(d *frame.Desc) { d.Name = "\x1b[31m" }), invalid, []string{"name", "control"}, true},
		"another port than the call's": {desc(func(d *frame.Desc) { d.Port = "y" }), invalid, []string{`"y"`, `"x"`}, true},

		"no data type":         {desc(func(d *frame.Desc) { d.DType = 0 }), invalid, []string{"data type"}, true},
		"an unknown data type": {desc(func(d *frame.Desc) { d.DType = 99 }), invalid, []string{"data type", "99"}, true},
		"rank 33":              {desc(func(d *frame.Desc) { d.Shape = make([]int64, 33) }), invalid, []string{"rank 33", "32"}, true},
		"a negative dimension": {desc(func(d *frame.Desc) { d.Shape = []int64{2, -5} }), invalid, []string{"dimension 1", "-5"}, true},
		"a dimension over 2^40": {
			desc(func(d *frame.Desc) { d.Shape = []int64{1<<40 + 1} }), invalid, []string{"dimension 0", "1099511627777", "1099511627776"}, true,
		},
		"a shape that overflows": {
			desc(func(d *frame.Desc) { d.Shape = []int64{1 << 40, 1 << 40} }), exhausted, []string{"1099511627776 1099511627776", "2^63"}, true,
		},
		"an empty shape that overflows": {
			desc(func(d *frame.Desc) { d.Shape, d.SizeBytes = []int64{1 << 40, 1 << 40, 0}, 0 }), exhausted, []string{"1099511627776 1099511627776 0", "2^63"}, true,
		},
		"a size that is not the shape's": {desc(func(d *frame.Desc) { d.SizeBytes = 11 }), invalid, []string{"size_bytes", "11", "10"}, true},
		"chunks of 0 bytes":              {desc(func(d *frame.Desc) { d.ChunkBytes = 0 }), invalid, []string{"chunk_bytes", "0", "1048576"}, true},
		"chunks over the limit":          {desc(func(d *frame.Desc) { d.ChunkBytes = mib + 1 }), invalid, []string{"chunk_bytes", "1048577", "1048576"}, true},
		"more than 2^20 chunks": {desc(func(d *frame.Desc) {
			d.Shape, d.SizeBytes, d.ChunkBytes = []int64{1<<20 + 1}, 1<<20+1, 1
		}), exhausted, []string{"1048577 chunks", "1048576"}, true},
		"a tensor over 16 GiB": {desc(func(d *frame.Desc) {
			d.Shape, d.SizeBytes, d.ChunkBytes = []int64{16<<30 + 1}, 16<<30+1, mib
		}), exhausted, []string{"17179869185", "17179869184"}, true},
		"more on allowance than is left": {desc(func(d *frame.Desc) {
			d.Shape, d.SizeBytes, d.ChunkBytes = []int64{mib + 1}, mib+1, mib
		}), exhausted, []string{"allowance", "1048577", "1048576"}, true},
		"a desc that the call does not list": {func(p *peer) *offer {
			o := small("echo")
			other := small("echo").desc
			other.Call = o.call.ID
			p.send(&frame.Frame{Calls: []frame.Call{o.call}, Descs: []frame.Desc{other}})
			return o
		}, invalid, []string{"does not list"}, false},
		"a second desc that differs": {func(p *peer) *offer {
			o := small("echo")
			p.open(o)
			again := o.desc
			again.Shape = []int64{5, 2}
			p.send(&frame.Frame{Descs: []frame.Desc{again}})
			return o
		}, invalid, []string{"another desc"}, true},

		"a chunk past the last": {chunk(func(c *frame.Chunk) { c.Index = 3 }), invalid, []string{"index 3", "3 chunks"}, true},
		"chunk 2^32-1":          {chunk(func(c *frame.Chunk) { c.Index = 1<<32 - 1 }), invalid, []string{"index 4294967295", "3 chunks"}, true},
		"a chunk too short":     {chunk(func(c *frame.Chunk) { c.Data[0] = c.Data[0][:3] }), invalid, []string{"chunk 1", "3 bytes", "4"}, true},
		"an empty chunk":        {chunk(func(c *frame.Chunk) { c.Data = nil }), invalid, []string{"chunk 1", "0 bytes", "4"}, true},
		"a chunk too long":      {chunk(func(c *frame.Chunk) { c.Data = [][]byte{[]byte("fives")} }), invalid, []string{"chunk 1", "5 bytes", "4"}, true},
		"a last chunk too long": {chunk(func(c *frame.Chunk) { c.Index = 2 }), invalid, []string{"chunk 2", "4 bytes", "2"}, true},
		"a conflicting duplicate": {func(p *peer) *offer {
			o := small("echo")
			p.open(o)
			p.send(o.chunk(1))
			o.data = []byte("9876543210")
			p.send(o.chunk(1))
			return o
		}, invalid, []string{"chunk 1", "again"}, true},
		"a wrong checksum three times": {func(p *peer) *offer {
			o := small("echo")
			p.open(o)
			for range 3 {
				f := o.chunk(1)
				f.Chunk.Sum++
				p.send(f)
			}
			return o
		}, frame.DataLoss, []string{"chunk 1", "3 times"}, true},
		"a chunk without credit": {func(p *peer) *offer {
			o := offering("gate", make([]byte, 64*mib), mib)
			p.open(o)
			p.credit(o, 1)
			p.send(o.chunk(63))
			return o
		}, invalid, []string{"index 63", "credit"}, true},

		"a data type the model does not take": {func(p *peer) *offer {
			o := small("relu")
			p.open(o)
			return o
		}, frame.FailedPrecondition, []string{"float32", "uint8[10]", `"x"`}, false},
		"a shape the model does not take": {func(p *peer) *offer {
			x := offering("pair", floats(2), 8).as(tensor.Float32, 2)
			w := x.desc
			w.Tensor, w.Port = tensor.NewID(), "w"
			x.call.Inputs = append(x.call.Inputs, frame.Binding{Port: "w", Tensor: w.Tensor})
			p.send(&frame.Frame{Calls: []frame.Call{x.call}, Descs: []frame.Desc{x.desc, w}})
			return x
		}, frame.FailedPrecondition, []string{"[any any]", "float32[2]"}, false},
		"a param the model does not take": {func(p *peer) *offer {
			o := small("slow")
			o.call.Params = map[string]string{"delay": "a while"}
			p.open(o)
			return o
		}, frame.InvalidArgument, []string{"delay", "a while"}, false},
		"a model that fails": {func(p *peer) *offer {
			o := small("slow")
			o.call.Params = map[string]string{"fail_at": "3"}
			p.open(o)
			p.deliver(o)
			return o
		}, frame.Internal, []string{"row 3"}, false},
		"an input given up": {func(p *peer) *offer {
			o := small("echo")
			p.open(o)
			p.send(&frame.Frame{Failures: []frame.Failure{{Tensor: o.desc.Tensor, Code: frame.DataLoss, Message: "the disk is gone"}}})
			return o
		}, frame.DataLoss, []string{"the disk is gone"}, false},
		"a cancel": {func(p *peer) *offer {
			o := small("gate")
			p.open(o)
			p.send(&frame.Frame{Cancels: []tensor.ID{o.call.ID}})
			return o
		}, frame.Cancelled, []string{"cancelled"}, false},
		"a timeout": {func(p *peer) *offer {
			o := small("gate")
			o.call.TimeoutMillis = 50
			p.open(o)
			return o
		}, frame.DeadlineExceeded, []string{"timeout"}, false},
		"an acknowledgement of what was never sent": {func(p *peer) *offer {
			p.hold = true
			o := offering("echo", make([]byte, 4*mib), mib)
			p.open(o)
			p.deliver(o)
			id := func() (id tensor.ID) {
				for _, in := range p.results {
					if in.desc.Call == o.call.ID {
						id = in.desc.Tensor
					}
				}
				return id
			}
			p.until(func() bool { return !id().IsZero() })
			p.hold = false
			p.send(&frame.Frame{Acks: []frame.Ack{{Tensor: id(), Below: 3}}})
			return o
		}, invalid, []string{"below 3", "below 0"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := serve(t, func(c *Config) {
					c.Session.OpenTensors, c.Session.OpenCalls, c.Session.ChunkIdle = 8, 6, stream.Instant(5*time.Second)
				})
				addPair(t, f)
				addGate(t, f, "gate") // never opened
				p := f.session(t)
				o := tc.commit(p)
				done := p.done(o)
				require.Equal(t, tc.code, done.Code, done.Message)
				require.Empty(t, done.Outputs)
				for _, text := range tc.says {
					require.Contains(t, done.Message, text)
				}
				if tc.failed {
					fail := p.failure(o.desc.Tensor)
					require.Equal(t, done.Code, fail.Code)
					require.Equal(t, done.Message, fail.Message)
				}
				// What still comes for the call is late, not wrong.
				p.send(&frame.Frame{
					Calls: []frame.Call{o.call}, Descs: []frame.Desc{o.desc}, Cancels: []tensor.ID{o.call.ID},
					Credits: []frame.Credit{{Tensor: o.desc.Tensor, Limit: 9}}, Acks: []frame.Ack{{Tensor: o.desc.Tensor}},
				})
				p.good()
				close(p.in)
				code, text := p.status()
				require.Equal(t, frame.OK, code, text)
				f.isEmpty(t)
			})
		})
	}
}

func TestAFrameForAnUnknownTensorIsAnsweredAndTheSessionLivesOn(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		send func(p *peer, id tensor.ID)
		says string
		code frame.Code
	}{
		"chunk":  {func(p *peer, id tensor.ID) { p.send(&frame.Frame{Chunk: frame.Chunk{Tensor: id, Data: [][]byte{{1}}}}) }, "desc first", frame.NotFound},
		"credit": {func(p *peer, id tensor.ID) { p.send(&frame.Frame{Credits: []frame.Credit{{Tensor: id, Limit: 1}}}) }, "not known", frame.NotFound},
		"ack":    {func(p *peer, id tensor.ID) { p.send(&frame.Frame{Acks: []frame.Ack{{Tensor: id}}}) }, "not known", frame.NotFound},
		"desc of an unknown call": {func(p *peer, id tensor.ID) {
			o := small("echo")
			o.desc.Tensor = id
			p.send(&frame.Frame{Descs: []frame.Desc{o.desc}})
		}, "call first", frame.NotFound},
		"desc of no call": {func(p *peer, id tensor.ID) {
			o := small("echo")
			o.desc.Tensor, o.desc.Call = id, tensor.ID{}
			p.send(&frame.Frame{Descs: []frame.Desc{o.desc}})
		}, "names no call", frame.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				p := serve(t, nil).session(t)
				id := tensor.NewID()
				tc.send(p, id)
				fail := p.failure(id)
				require.Equal(t, tc.code, fail.Code)
				require.Contains(t, fail.Message, tc.says)
				tc.send(p, id) // answered once
				p.good()
			})
		})
	}
}

func TestFramesThatChangeNothingAreIgnored(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		p := f.session(t)
		o := small("echo")
		p.send(&frame.Frame{Cancels: []tensor.ID{tensor.NewID()}, Failures: []frame.Failure{{Tensor: tensor.NewID(), Code: frame.Internal}}})
		p.open(o)
		p.open(o) // the same call and desc again
		p.send(o.chunk(1))
		p.send(o.chunk(1)) // the same chunk again
		p.deliver(o)
		require.Equal(t, o.data, p.result(o)["y"])
		p.open(o) // the call has ended: late
		p.send(o.chunk(2))
		p.good()
		require.EqualValues(t, 2, f.Values().CallsOpened)
		require.Positive(t, f.Values().DuplicateChunks)
	})
}

func TestAChunkWithAWrongChecksumIsAskedForAgain(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		p := f.session(t)
		o := small("echo")
		p.open(o)
		for range 2 {
			bad := o.chunk(1)
			bad.Chunk.Data = [][]byte{[]byte("evil")}
			p.send(bad)
		}
		id := o.desc.Tensor
		p.until(func() bool { return p.resends[id] == 2 })
		require.Contains(t, p.acks[id].Resend, uint32(1))
		p.deliver(o)
		require.Equal(t, o.data, p.result(o)["y"])
		require.EqualValues(t, 2, f.Values().CorruptChunks)
	})
}
