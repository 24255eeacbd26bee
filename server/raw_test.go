package server_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/pierrec/lz4/v4"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
)

// raw is a client that knows nothing but the proto: generated stubs, grpc's own
// codec, every frame by hand. It belongs to the test's goroutine: it sends what
// it may, and reads when it may not; a session never needs more.
type raw struct {
	t      testing.TB
	stream grpc.BidiStreamingClient[pb.Frame, pb.Frame]
	end    context.CancelFunc // ends the RPC
	hello  *pb.Hello          // the server's
	kind   pb.Checksum
	rand   *rand.Rand

	results  map[string]*incoming // by tensor
	failures map[string]*pb.Failure
	acks     map[string]*pb.Ack    // the last one, by tensor
	resends  map[string]int        // chunks asked for again, by tensor
	limits   map[string]uint32     // by tensor
	dones    map[string][]*pb.Done // by call
	coded    int                   // chunks that came in LZ4
	drained  bool
	hold     bool // results get no credit and no acknowledgement
	mute     bool // results get no acknowledgement
	err      error
}

// incoming is a result on its way in.
type incoming struct {
	desc  *pb.TensorDesc
	data  []byte
	held  []bool
	left  int
	below int // every chunk before it is held
}

// rawLife bounds a raw session, so that what hangs fails.
const rawLife = 60 * time.Second

// dialRaw opens a stream without a hello.
func dialRaw(t testing.TB, addr string, opts ...grpc.CallOption) *raw {
	t.Helper()
	r, err := tryRaw(t, addr, opts...)
	require.NoError(t, err)
	return r
}

// tryRaw is dialRaw for where that may fail.
func tryRaw(t testing.TB, addr string, opts ...grpc.CallOption) (*raw, error) {
	t.Helper()
	conn, err := grpc.NewClient(addr, reach, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	return rawOn(t, conn, opts...)
}

// rawOn is tryRaw over a connection that is there.
func rawOn(t testing.TB, conn *grpc.ClientConn, opts ...grpc.CallOption) (*raw, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), rawLife)
	t.Cleanup(cancel)
	stream, err := pb.NewTensorServiceClient(conn).StreamTensors(ctx, opts...)
	if err != nil {
		return nil, err
	}
	return &raw{
		t: t, stream: stream, end: cancel, kind: pb.Checksum_CHECKSUM_CRC32C, rand: rand.New(rand.NewPCG(1, 2)),
		results: map[string]*incoming{}, failures: map[string]*pb.Failure{}, acks: map[string]*pb.Ack{},
		resends: map[string]int{}, limits: map[string]uint32{}, dones: map[string][]*pb.Done{},
	}, nil
}

// openRaw opens a session.
func openRaw(t testing.TB, addr string) *raw {
	t.Helper()
	r := dialRaw(t, addr)
	r.greet()
	return r
}

func (r *raw) greet() {
	r.t.Helper()
	r.send(&pb.Frame{Hello: r.greeting()})
	r.until(func() bool { return r.hello != nil })
}

func (r *raw) greeting() *pb.Hello {
	return &pb.Hello{Version: 1, SessionId: newID(), MaxChunkBytes: mib, AllowanceBytes: mib, Checksum: r.kind, MaxOpenTensors: 64}
}

func newID() []byte { id := uuid.Must(uuid.NewV7()); return id[:] }

// send sends a frame. That the RPC has ended is for recv to find out.
func (r *raw) send(f *pb.Frame) {
	r.t.Helper()
	if err := r.stream.Send(f); err != nil && !errors.Is(err, io.EOF) {
		r.t.Fatalf("send: %v", err)
	}
}

// recv reads a frame, keeps its book, credits and acknowledges. It reports
// false once the RPC has ended, with its status in err.
func (r *raw) recv() bool {
	r.t.Helper()
	f, err := r.stream.Recv()
	if err != nil {
		r.err = err
		return false
	}
	var answer pb.Frame
	if f.Hello != nil {
		require.Nil(r.t, r.hello, "a second hello")
		r.hello = f.Hello
	}
	require.Empty(r.t, f.Calls)
	require.Empty(r.t, f.Cancels)
	for _, d := range f.Descs {
		require.NotContains(r.t, r.results, string(d.TensorId))
		require.GreaterOrEqual(r.t, d.ChunkBytes, uint32(1))
		count := max(1, (d.SizeBytes+uint64(d.ChunkBytes)-1)/uint64(d.ChunkBytes))
		r.results[string(d.TensorId)] = &incoming{d, make([]byte, d.SizeBytes), make([]bool, count), int(count), 0}
		if !d.OnAllowance && !r.hold {
			answer.Credits = append(answer.Credits, &pb.Credit{TensorId: d.TensorId, ChunkLimit: uint32(count)})
		}
	}
	for _, c := range f.Credits {
		require.Greater(r.t, c.ChunkLimit, r.limits[string(c.TensorId)], "a limit only rises")
		r.limits[string(c.TensorId)] = c.ChunkLimit
	}
	for _, a := range f.Acks {
		r.acks[string(a.TensorId)] = a
		r.resends[string(a.TensorId)] += len(a.Resend)
	}
	for _, p := range f.Failures {
		require.NotContains(r.t, r.failures, string(p.TensorId), "a tensor fails once")
		r.failures[string(p.TensorId)] = p
	}
	for _, d := range f.Dones {
		r.dones[string(d.CallId)] = append(r.dones[string(d.CallId)], d)
		require.Len(r.t, r.dones[string(d.CallId)], 1, "a call ends once")
	}
	r.drained = r.drained || f.Drain != nil
	if c := f.Chunk; c != nil {
		in := r.results[string(c.TensorId)]
		require.NotNil(r.t, in, "a chunk before its desc")
		require.Equal(r.t, r.sum(c.TensorId, c.Index, c.Data), c.Checksum)
		require.Less(r.t, int(c.Index), len(in.held))
		require.False(r.t, in.held[c.Index], "a chunk comes once")
		in.held[c.Index] = true
		in.left--
		off := int(c.Index) * int(in.desc.ChunkBytes)
		place := in.data[off:min(off+int(in.desc.ChunkBytes), len(in.data))]
		if c.Codec == pb.Codec_CODEC_LZ4 {
			r.coded++
			require.Less(r.t, len(c.Data), len(place))
			n, err := lz4.UncompressBlock(c.Data, place)
			require.NoError(r.t, err)
			require.Equal(r.t, len(place), n)
		} else {
			require.Len(r.t, c.Data, len(place))
			copy(place, c.Data)
		}
		if !r.hold && !r.mute {
			for in.below < len(in.held) && in.held[in.below] {
				in.below++
			}
			answer.Acks = append(answer.Acks, &pb.Ack{TensorId: c.TensorId, ReceivedBelow: uint32(in.below)})
		}
	}
	if len(answer.Credits)+len(answer.Acks) > 0 {
		r.send(&answer)
	}
	return true
}

// until reads until cond holds; that the RPC ends before is a failure.
func (r *raw) until(cond func() bool) {
	r.t.Helper()
	for !cond() {
		if !r.recv() {
			r.t.Fatalf("the RPC ended: %v", r.err)
		}
	}
}

// status reads to the RPC's end.
func (r *raw) status() *status.Status {
	r.t.Helper()
	for r.recv() {
	}
	if errors.Is(r.err, io.EOF) {
		return status.New(codes.OK, "")
	}
	return status.Convert(r.err)
}

func (r *raw) done(call []byte) *pb.Done {
	r.t.Helper()
	r.until(func() bool { return len(r.dones[string(call)]) > 0 })
	return r.dones[string(call)][0]
}

func (r *raw) failure(tensor []byte) *pb.Failure {
	r.t.Helper()
	r.until(func() bool { return r.failures[string(tensor)] != nil })
	return r.failures[string(tensor)]
}

// credit waits for a tensor's limit to reach n.
func (r *raw) credit(tensor []byte, n uint32) {
	r.t.Helper()
	r.until(func() bool { return r.limits[string(tensor)] >= n })
}

// sum is written out here once more: the tests' word against the codec's.
func (r *raw) sum(id []byte, index uint32, data []byte) uint32 {
	table := crc32.IEEETable
	if r.kind == pb.Checksum_CHECKSUM_CRC32C {
		table = crc32.MakeTable(crc32.Castagnoli)
	}
	named := binary.LittleEndian.AppendUint32(bytes.Clone(id), index)
	return crc32.Update(crc32.Checksum(named, table), table, data)
}

// offer is a call with one input.
type offer struct {
	call *pb.Call
	*parcel
}

// offering makes a call of a model with a uint8 vector as its input.
func offering(model string, data []byte, chunkBytes int) *offer {
	x, call := pack("", data, chunkBytes), newID()
	x.desc.CallId, x.desc.Port = call, "x"
	return &offer{&pb.Call{Id: call, Model: model, Inputs: []*pb.Input{{Port: "x", TensorId: x.desc.TensorId}}}, x}
}

// as gives the input another data type and shape.
func (o *offer) as(d pb.DataType, shape ...int64) *offer {
	o.desc.Dtype, o.desc.Shape = d, shape
	return o
}

// chunk cuts chunk i.
func (r *raw) chunk(o *offer, i uint32) *pb.Chunk {
	c := o.chunk(i)
	c.Checksum = r.sum(c.TensorId, i, c.Data)
	return c
}

// open sends call and desc in one frame.
func (r *raw) open(o *offer) {
	r.t.Helper()
	r.send(&pb.Frame{Calls: []*pb.Call{o.call}, Descs: []*pb.TensorDesc{o.desc}})
}

// deliver sends every chunk, in a random order within the limits.
func (r *raw) deliver(o *offer) {
	r.t.Helper()
	var may []uint32 // allowed and not sent
	next, count := uint32(0), o.count()
	for next < count || len(may) > 0 {
		limit := r.limits[string(o.desc.TensorId)]
		if o.desc.OnAllowance {
			limit = count
		}
		for ; next < min(limit, count); next++ {
			may = append(may, next)
		}
		if len(may) == 0 {
			if len(r.dones[string(o.call.Id)]) > 0 || !r.recv() {
				return // the call failed: the caller looks at how
			}
			continue
		}
		k := r.rand.IntN(len(may))
		r.send(&pb.Frame{Chunk: r.chunk(o, may[k])})
		may[k] = may[len(may)-1]
		may = may[:len(may)-1]
	}
}

// result waits for the call to end well and every output it names to be whole.
func (r *raw) result(o *offer) map[string]*incoming {
	r.t.Helper()
	done := r.done(o.call.Id)
	require.Equal(r.t, codes.OK, codes.Code(done.Code), done.Message)
	outputs := map[string]*incoming{}
	for _, p := range done.Outputs {
		in := r.results[string(p.TensorId)]
		require.NotNil(r.t, in, "output %q was not announced before done", p.Port)
		r.until(func() bool { return in.left == 0 })
		require.Equal(r.t, o.call.Id, in.desc.CallId)
		outputs[p.Port] = in
	}
	return outputs
}

// run runs the call from its first frame to its last.
func (r *raw) run(o *offer) map[string]*incoming {
	r.t.Helper()
	r.open(o)
	r.deliver(o)
	return r.result(o)
}
