package serving

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/tensor"
)

// link is a client's RPC without gRPC: a queue of frames each way.
type link struct {
	ctx     context.Context
	end     context.CancelFunc
	in, out chan *frame.Frame // in is closed when the client has ended its side
}

func newLink(t testing.TB) *link {
	l := &link{in: make(chan *frame.Frame, 64), out: make(chan *frame.Frame, 64)}
	l.ctx, l.end = context.WithCancel(context.Background())
	t.Cleanup(l.end)
	return l
}

// Opened is of a Conn, as all below.
func (*link) Opened()                           {}
func (*link) Take(int64) bool                   { return true }
func (*link) Comes(float64, time.Duration) bool { return false }
func (*link) Free()                             {}

func (l *link) Send(f *frame.Frame, held interface{ Release() }) error {
	if held != nil {
		defer held.Release()
	}
	own := *f // f is borrowed
	own.Descs, own.Credits, own.Failures, own.Dones = slices.Clone(f.Descs), slices.Clone(f.Credits), slices.Clone(f.Failures), slices.Clone(f.Dones)
	own.Acks, own.Calls, own.Cancels = slices.Clone(f.Acks), slices.Clone(f.Calls), slices.Clone(f.Cancels)
	for i := range own.Acks {
		own.Acks[i].Resend = slices.Clone(own.Acks[i].Resend)
	}
	own.Chunk.Data = [][]byte{bytes.Join(f.Chunk.Data, nil)}
	if l.ctx.Err() != nil {
		return l.ctx.Err()
	}
	select {
	case l.out <- &own:
		return nil
	case <-l.ctx.Done():
		return l.ctx.Err()
	}
}

func (l *link) Clear(int) bool { return true }

func (l *link) Recv() (*frame.Frame, error) {
	select {
	case f, ok := <-l.in:
		if !ok {
			return nil, io.EOF
		}
		return f, nil
	case <-l.ctx.Done():
		return nil, l.ctx.Err()
	}
}

// peer is a client that makes every frame by hand. It belongs to one goroutine: it sends
// what it may, and reads when it may not; a session never needs more.
type peer struct {
	*link
	t     testing.TB
	sess  *Session
	ended chan error   // why Serve returned
	hello *frame.Hello // the server's
	rand  *rand.Rand

	results  map[tensor.ID]*incoming
	failures map[tensor.ID]frame.Failure
	acks     map[tensor.ID]frame.Ack // the last one
	resends  map[tensor.ID]int       // chunks asked for again
	limits   map[tensor.ID]uint32
	dones    map[tensor.ID]frame.Done // by call
	drained  bool
	hold     bool  // results get no credit and no acknowledgement
	mute     bool  // results get no acknowledgement
	over     bool  // Serve has returned
	err      error // what it returned
}

// incoming is a result on its way in.
type incoming struct {
	desc  frame.Desc
	data  []byte
	held  []bool
	left  int
	below int // every chunk before it is held
}

// dial opens a session without a hello, of a caller of its own.
func (f *fixture) dial(t testing.TB) *peer {
	t.Helper()
	p, err := f.dialFrom(t, new(admission.Caller))
	require.NoError(t, err)
	return p
}

func (f *fixture) dialFrom(t testing.TB, from *admission.Caller) (*peer, error) {
	t.Helper()
	sess, err := f.OpenSession(from)
	if err != nil {
		return nil, err
	}
	p := &peer{
		link: newLink(t), t: t, sess: sess, ended: make(chan error, 1), rand: rand.New(rand.NewPCG(1, 2)),
		results: map[tensor.ID]*incoming{}, failures: map[tensor.ID]frame.Failure{}, acks: map[tensor.ID]frame.Ack{},
		resends: map[tensor.ID]int{}, limits: map[tensor.ID]uint32{}, dones: map[tensor.ID]frame.Done{},
	}
	go func() { // ends with the session
		err := sess.Serve(p.ctx, p.link)
		p.end() // gRPC sends nothing after its handler has returned
		p.ended <- err
	}()
	return p, nil
}

// session opens a session.
func (f *fixture) session(t testing.TB) *peer {
	t.Helper()
	p := f.dial(t)
	p.greet()
	return p
}

func (p *peer) greet() {
	p.t.Helper()
	p.send(&frame.Frame{Hello: greeting()})
	p.until(func() bool { return p.hello != nil })
}

func greeting() *frame.Hello {
	return &frame.Hello{Version: frame.Version, Session: tensor.NewID(), MaxChunkBytes: mib, AllowanceBytes: mib, Checksum: uint8(codec.CRC32C), MaxOpenTensors: 64}
}

// send sends a frame. That the session has ended is for recv to find out.
func (p *peer) send(f *frame.Frame) {
	select {
	case p.in <- f:
	case <-p.ctx.Done():
	}
}

// next returns the next frame; nil after the last.
func (p *peer) next() *frame.Frame {
	if !p.over {
		select {
		case f := <-p.out:
			return f
		case p.err = <-p.ended:
			p.over = true
		}
	}
	select {
	case f := <-p.out:
		return f
	default:
		return nil
	}
}

// recv reads a frame, keeps its book, credits and acknowledges. It reports false once the
// session has ended, with why in err.
func (p *peer) recv() bool {
	p.t.Helper()
	f := p.next()
	if f == nil {
		return false
	}
	var answer frame.Frame
	if f.Hello != nil {
		require.Nil(p.t, p.hello, "a second hello")
		p.hello = f.Hello
	}
	require.Empty(p.t, f.Calls)
	require.Empty(p.t, f.Cancels)
	for _, d := range f.Descs {
		require.NotContains(p.t, p.results, d.Tensor)
		require.GreaterOrEqual(p.t, d.ChunkBytes, uint32(1))
		count := max(1, (d.SizeBytes+uint64(d.ChunkBytes)-1)/uint64(d.ChunkBytes))
		p.results[d.Tensor] = &incoming{d, make([]byte, d.SizeBytes), make([]bool, count), int(count), 0}
		if !d.OnAllowance && !p.hold {
			answer.Credits = append(answer.Credits, frame.Credit{Tensor: d.Tensor, Limit: uint32(count)})
		}
	}
	for _, c := range f.Credits {
		require.Greater(p.t, c.Limit, p.limits[c.Tensor], "a limit only rises")
		p.limits[c.Tensor] = c.Limit
	}
	for _, a := range f.Acks {
		p.acks[a.Tensor] = a
		p.resends[a.Tensor] += len(a.Resend)
	}
	for _, fail := range f.Failures {
		require.NotContains(p.t, p.failures, fail.Tensor, "a tensor fails once")
		p.failures[fail.Tensor] = fail
	}
	for _, d := range f.Dones {
		require.NotContains(p.t, p.dones, d.Call, "a call ends once")
		p.dones[d.Call] = d
	}
	p.drained = p.drained || f.Drain != nil
	if f.HasChunk() {
		answer.Acks = p.take(f.Chunk)
	}
	if !answer.Empty() {
		p.send(&answer)
	}
	return true
}

// take keeps a chunk, and returns what acknowledges it.
func (p *peer) take(c frame.Chunk) []frame.Ack {
	p.t.Helper()
	in := p.results[c.Tensor]
	require.NotNil(p.t, in, "a chunk before its desc")
	data := c.Data[0]
	require.Equal(p.t, sum(c.Tensor, c.Index, data), c.Sum)
	require.Less(p.t, int(c.Index), len(in.held))
	require.False(p.t, in.held[c.Index], "a chunk comes once")
	in.held[c.Index] = true
	in.left--
	off := int(c.Index) * int(in.desc.ChunkBytes)
	require.Len(p.t, data, min(off+int(in.desc.ChunkBytes), len(in.data))-off)
	copy(in.data[off:], data)
	if p.hold || p.mute {
		return nil
	}
	for in.below < len(in.held) && in.held[in.below] {
		in.below++
	}
	return []frame.Ack{{Tensor: c.Tensor, Below: uint32(in.below)}}
}

func sum(id tensor.ID, index uint32, data []byte) uint32 {
	return codec.CRC32C.Update(codec.CRC32C.Seed(id, index), data)
}

// until reads until cond holds; that the session ends before is a failure.
func (p *peer) until(cond func() bool) {
	p.t.Helper()
	for !cond() {
		if !p.recv() {
			p.t.Fatalf("the session ended: %v", p.err)
		}
	}
}

// status reads to the session's end.
func (p *peer) status() (frame.Code, string) {
	p.t.Helper()
	for p.recv() {
	}
	return statusOf(p.err)
}

func (p *peer) isDone(call tensor.ID) bool {
	_, done := p.dones[call]
	return done
}

func (p *peer) done(o *offer) frame.Done {
	p.t.Helper()
	p.until(func() bool { return p.isDone(o.call.ID) })
	return p.dones[o.call.ID]
}

func (p *peer) failure(id tensor.ID) frame.Failure {
	p.t.Helper()
	p.until(func() bool { _, failed := p.failures[id]; return failed })
	return p.failures[id]
}

// credit waits for the limit of an input to reach n.
func (p *peer) credit(o *offer, n uint32) {
	p.t.Helper()
	p.until(func() bool { return p.limits[o.desc.Tensor] >= n })
}

// offer is a call with one input, and the input's bytes.
type offer struct {
	call frame.Call
	desc frame.Desc
	data []byte
}

// offering makes a call of a model with a uint8 vector as its input.
func offering(model string, data []byte, chunkBytes int) *offer {
	id, call := tensor.NewID(), tensor.NewID()
	return &offer{
		call: frame.Call{ID: call, Model: model, Inputs: []frame.Binding{{Port: "x", Tensor: id}}},
		desc: frame.Desc{
			Tensor: id, Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(len(data))}},
			SizeBytes: uint64(len(data)), ChunkBytes: uint32(chunkBytes), Call: call, Port: "x",
		},
		data: data,
	}
}

// as gives the input another data type and shape.
func (o *offer) as(d tensor.DataType, shape ...int64) *offer {
	o.desc.DType, o.desc.Shape = d, shape
	return o
}

// beside makes data another input of the call of o, on allowance.
func (o *offer) beside(port string, d tensor.DataType, data []byte, shape ...int64) *offer {
	w := offering(o.call.Model, data, len(data)).as(d, shape...)
	w.desc.Call, w.desc.Port, w.desc.OnAllowance = o.call.ID, port, true
	o.call.Inputs = append(o.call.Inputs, frame.Binding{Port: port, Tensor: w.desc.Tensor})
	w.call = o.call
	return w
}

// small is a call of 10 bytes in chunks of 4, on allowance.
func small(model string) *offer {
	o := offering(model, []byte("0123456789"), 4)
	o.desc.OnAllowance = true
	return o
}

func (o *offer) count() uint32 {
	return uint32(max(1, (uint64(len(o.data))+uint64(o.desc.ChunkBytes)-1)/uint64(o.desc.ChunkBytes)))
}

// chunk cuts chunk i.
func (o *offer) chunk(i uint32) *frame.Frame {
	off := int(i) * int(o.desc.ChunkBytes)
	data := o.data[off:min(off+int(o.desc.ChunkBytes), len(o.data))]
	return &frame.Frame{Chunk: frame.Chunk{Tensor: o.desc.Tensor, Index: i, Sum: sum(o.desc.Tensor, i, data), Data: [][]byte{data}}}
}

// open sends call and desc in one frame.
func (p *peer) open(o *offer) {
	p.send(&frame.Frame{Calls: []frame.Call{o.call}, Descs: []frame.Desc{o.desc}})
}

// deliver sends every chunk, in a random order within the limits.
func (p *peer) deliver(o *offer) {
	p.t.Helper()
	var may []uint32 // allowed and not sent
	next, count := uint32(0), o.count()
	for next < count || len(may) > 0 {
		limit := p.limits[o.desc.Tensor]
		if o.desc.OnAllowance {
			limit = count
		}
		for ; next < min(limit, count); next++ {
			may = append(may, next)
		}
		if len(may) == 0 {
			if p.isDone(o.call.ID) || !p.recv() {
				return // the call failed: the caller looks at how
			}
			continue
		}
		k := p.rand.IntN(len(may))
		p.send(o.chunk(may[k]))
		may[k] = may[len(may)-1]
		may = may[:len(may)-1]
	}
}

// result waits for the call to end well and every output it names to be whole.
func (p *peer) result(o *offer) map[string][]byte {
	p.t.Helper()
	done := p.done(o)
	require.Equal(p.t, frame.OK, done.Code, done.Message)
	outputs := map[string][]byte{}
	for _, b := range done.Outputs {
		in := p.results[b.Tensor]
		require.NotNil(p.t, in, "output %q was not announced before done", b.Port)
		p.until(func() bool { return in.left == 0 })
		require.Equal(p.t, o.call.ID, in.desc.Call)
		outputs[b.Port] = in.data
	}
	return outputs
}

// run runs the call from its first frame to its last.
func (p *peer) run(o *offer) map[string][]byte {
	p.t.Helper()
	p.open(o)
	p.deliver(o)
	return p.result(o)
}

// good is a call that any healthy session computes.
func (p *peer) good() {
	p.t.Helper()
	o := offering("relu", floats(3000), 999).as(tensor.Float32, 3000)
	require.Equal(p.t, relus(o.data), p.run(o)["y"], "a good call after it")
}
