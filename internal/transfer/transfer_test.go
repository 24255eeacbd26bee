package transfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/mem"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/background"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// tape is a gRPC stream that keeps what is sent as bytes, as gRPC would, and plays it.
type tape struct {
	frames [][]byte
	fail   int // the message that fails before it is encoded, counted from 1
	broken error
}

// newSender returns a Sender over a gRPC stream.
func newSender(conn wire.Stream) *Sender { return &Sender{Conn: wire.NewConn(conn, nil)} }

func (c *tape) Context() context.Context { return context.Background() }

func (c *tape) SendMsg(m any) error {
	if c.fail--; c.fail == 0 {
		return c.broken
	}
	b, err := wire.Codec{}.Marshal(m)
	if err != nil {
		return err
	}
	c.frames = append(c.frames, bytes.Clone(b.Materialize()))
	b.Free() // the last reader of the payload has gone
	return nil
}

func (c *tape) RecvMsg(m any) error {
	if len(c.frames) == 0 {
		return io.EOF
	}
	b := mem.BufferSlice{mem.SliceBuffer(c.frames[0])}
	c.frames = c.frames[1:]
	return wire.Codec{}.Unmarshal(b, m)
}

// origin is a Viewer whose views are slabs of their own, all of which must come back.
type origin struct {
	t     testing.TB
	pool  *slab.Pool
	data  []byte
	next  int64 // views come in order
	views atomic.Int32
	fail  int64 // the offset at which reading fails; negative: none
	short bool  // fails by returning too little
}

var errOrigin = errors.New("the disk is gone")

func newOrigin(t testing.TB, data []byte) *origin {
	return &origin{t: t, pool: testkit.Pool(t), data: data, fail: -1}
}

type loan struct {
	of *origin
	s  *slab.Slab
}

func (l loan) Release() {
	l.s.Release() // panics the second time
	l.of.views.Add(-1)
}

func (o *origin) View(off, n int64) ([]byte, interface{ Release() }, error) {
	require.GreaterOrEqual(o.t, off, o.next, "views are asked for in order")
	o.next = off + n
	if o.fail >= 0 && off+n > o.fail && !o.short {
		return nil, nil, errOrigin
	}
	s, err := o.pool.Get(int(n))
	require.NoError(o.t, err)
	copy(s.Bytes(), o.data[off:off+n])
	o.views.Add(1)
	if o.fail >= 0 && off+n > o.fail {
		return s.Bytes()[:n-1], loan{o, s}, nil
	}
	return s.Bytes(), loan{o, s}, nil
}

// place is memory for one tensor.
type place struct {
	data  []byte
	err   error // of every write
	moved int64
	ended []string // whole, or why not
}

func (p *place) WriteViews(off int64, views [][]byte) error {
	for _, v := range views {
		if p.err != nil {
			return p.err
		}
		off += int64(copy(p.data[off:], v))
	}
	return p.err
}

// book is a Handler that keeps a book of every tensor.
type book struct {
	t      testing.TB
	places map[tensor.ID]*place
	refuse error // of every Open
}

func newBook(t testing.TB) *book { return &book{t: t, places: map[tensor.ID]*place{}} }

func (b *book) Begin(in *In[*place]) *place {
	require.Nil(b.t, b.places[in.Tensor], "a tensor begins once")
	b.places[in.Tensor] = new(place)
	return b.places[in.Tensor]
}

func (b *book) Open(in *In[*place]) error {
	require.Empty(b.t, in.Place.ended)
	require.Nil(b.t, in.Place.data, "a tensor is opened once")
	in.Place.data = make([]byte, in.Geo.Size)
	return b.refuse
}

func (b *book) Moved(in *In[*place], n int64) {
	in.Place.moved += n
	require.Equal(b.t, in.Moved, in.Place.moved)
}

func (b *book) Whole(in *In[*place]) { in.Place.ended = append(in.Place.ended, "whole") }

func (b *book) Failed(in *In[*place], err error) {
	in.Place.ended = append(in.Place.ended, err.Error())
}

func noise(r *rand.Rand, n int, run int) []byte {
	b := make([]byte, n)
	for i := range b {
		if b[i] = byte(r.Uint32()); i%run > 0 {
			b[i] = b[i-1]
		}
	}
	return b
}

// cargo is one tensor of a random schedule.
type cargo struct {
	id     tensor.ID
	data   []byte
	held   []Range
	frames [][]byte
	digest codec.Digest
}

// load has a Sender make the frames of a tensor.
func load(t testing.TB, r *rand.Rand, i int, sum codec.Checksum) *cargo {
	size := []int{0, 1, 1023, 1024, 1025, 4096, 4097, r.IntN(40_000)}[r.IntN(8)]
	c := &cargo{id: tensor.ID{1, byte(i)}, data: noise(r, size, 1+r.IntN(50))}
	conn := &tape{}
	s := newSender(conn)
	s.Checksum, s.ChunkBytes = sum, int64([]int{1, 7, 1000, 1024, 1 << 20}[r.IntN(5)])
	if size > 1025 && s.ChunkBytes < 1000 {
		s.ChunkBytes = 1000
	}
	s.Codec = []codec.Codec{codec.None, codec.LZ4}[r.IntN(2)]
	for at := int64(0); r.IntN(3) == 0 && at < int64(size); {
		at += r.Int64N(3000)
		n := 1 + r.Int64N(5000)
		c.held = append(c.held, Range{at, n})
		at += n
	}
	from := newOrigin(t, c.data)
	desc := frame.Desc{Tensor: c.id, Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(size)}}, Name: fmt.Sprint("tensor ", i)}
	var want codec.Digester
	_, _ = want.Write(c.data)
	job := Tensor{Desc: desc, From: from, Held: c.held}
	if r.IntN(2) == 0 {
		job.Digest = want.Sum() // then what is held need not be read
	}
	moved := int64(0)
	s.Moved = func(d *frame.Desc, n int64) {
		require.Equal(t, c.id, d.Tensor)
		moved += n
	}
	digest, err := s.Send(t.Context(), &job)
	require.NoError(t, err)
	require.Equal(t, want.Sum(), digest)
	require.LessOrEqual(t, moved, int64(size))
	if len(c.held) == 0 {
		require.EqualValues(t, size, moved)
	}
	require.Zero(t, from.views.Load(), "views that were not given back")
	c.frames, c.digest = conn.frames, digest
	return c
}

func TestWhatASenderSendsArrivesInAnyOrderOfTensorsAndChunks(t *testing.T) {
	r := testkit.Rand(t)
	for round := range 300 {
		sum := []codec.Checksum{codec.CRC32C, codec.CRC32}[r.IntN(2)]
		var all []*cargo
		for i := range 1 + r.IntN(6) {
			all = append(all, load(t, r, i, sum))
		}
		// The first frame of each has its desc and comes first; the others come in any
		// order, among those of the other tensors, some of them twice.
		var rest [][]byte
		for _, c := range all {
			for _, f := range c.frames[1:] {
				for range 1 + r.IntN(4)/3 {
					rest = append(rest, f)
				}
			}
		}
		r.Shuffle(len(rest), func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
		if round%10 == 0 { // in order
			rest = rest[:0]
			for _, c := range all {
				rest = append(rest, c.frames[1:]...)
			}
		}
		conn := &tape{}
		for _, c := range all {
			conn.frames = append(conn.frames, c.frames[0])
			if r.IntN(4) == 0 {
				conn.frames = append(conn.frames, c.frames[0])
			}
		}
		conn.frames = append(conn.frames, rest...)

		b := newBook(t)
		recv := Receiver[*place]{ChunkBytes: 1 << 20, TensorBytes: 16 << 30, OpenTensors: 16, Tensors: 16, Checksum: sum, Codecs: codec.All(), Handler: b}
		var msg wire.Message
		for conn.RecvMsg(&msg) == nil {
			require.NoError(t, msg.Err)
			require.NoError(t, recv.Frame(&msg.Frame))
			msg.Free()
		}
		for _, c := range all {
			p := b.places[c.id]
			if len(c.held) > 0 && len(p.ended) == 0 {
				for _, h := range c.held { // what is held lies there already
					if h.Off < int64(len(c.data)) {
						copy(p.data[h.Off:min(h.Off+h.Len, int64(len(c.data)))], c.data[h.Off:])
					}
				}
				recv.Cover(c.id, c.held)
				recv.Cover(c.id, c.held) // the second time it is over
			}
			require.Equal(t, []string{"whole"}, p.ended)
			require.True(t, bytes.Equal(c.data, p.data), "round %d: tensor %v differs", round, c.id)
		}
		require.Zero(t, recv.Open())
		recv.End()
		recv.Fail(errOrigin)
		for _, p := range b.places {
			require.Len(t, p.ended, 1, "a tensor ends once")
		}
	}
}

func TestAChunkThatIsHeldAndOneThatDidNotComeAreToldApart(t *testing.T) {
	r := testkit.Rand(t)
	for range 200 {
		c := load(t, r, 1, codec.CRC32C)
		if len(c.frames) < 2 {
			continue
		}
		lost := 1 + r.IntN(len(c.frames)-1)
		conn := &tape{frames: slices.Delete(slices.Clone(c.frames), lost, lost+1)}
		b := newBook(t)
		recv := Receiver[*place]{ChunkBytes: 1 << 20, TensorBytes: 16 << 30, OpenTensors: 16, Tensors: 16, Checksum: codec.CRC32C, Codecs: codec.All(), Handler: b}
		var msg wire.Message
		for conn.RecvMsg(&msg) == nil {
			require.NoError(t, recv.Frame(&msg.Frame))
		}
		recv.Cover(c.id, c.held)
		require.Len(t, b.places[c.id].ended, 1)
		require.Contains(t, b.places[c.id].ended[0], "did not come")
	}
}

func TestATensorThatCanNotBeReadToItsEndIsItsSourcesFault(t *testing.T) {
	for _, short := range []bool{false, true} {
		for _, fail := range []int64{0, 999, 1000, 2999} {
			t.Run(fmt.Sprintf("short=%v/at=%d", short, fail), func(t *testing.T) {
				from := newOrigin(t, make([]byte, 3000))
				from.fail, from.short = fail, short
				conn := &tape{}
				s := newSender(conn)
				s.Checksum, s.ChunkBytes = codec.CRC32C, 1000
				_, err := s.Send(t.Context(), &Tensor{Desc: vector(tensor.ID{1}, 3000), From: from})
				var source *SourceError
				require.ErrorAs(t, err, &source)
				if !short {
					require.ErrorIs(t, err, errOrigin)
				}
				require.Len(t, conn.frames, int(max(fail/1000, 1)), "its desc at least, which the peer must know to be told of the failure")
				require.Zero(t, from.views.Load())

				// The stream is as it was: the next tensor arrives.
				good := newOrigin(t, []byte("abc"))
				_, err = s.Send(t.Context(), &Tensor{Desc: vector(tensor.ID{2}, 3), From: good})
				require.NoError(t, err)
				b := newBook(t)
				recv := Receiver[*place]{ChunkBytes: 1 << 20, TensorBytes: 16 << 30, OpenTensors: 16, Tensors: 16, Checksum: codec.CRC32C, Handler: b}
				var msg wire.Message
				for conn.RecvMsg(&msg) == nil {
					require.NoError(t, recv.Frame(&msg.Frame))
				}
				require.Equal(t, "abc", string(b.places[tensor.ID{2}].data))
			})
		}
	}
}

func vector(id tensor.ID, n int64) frame.Desc {
	return frame.Desc{Tensor: id, Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{n}}, Name: "vector"}
}

func TestABrokenStreamGivesEveryViewBack(t *testing.T) {
	for fail := 1; fail <= 4; fail++ {
		for _, k := range []codec.Codec{codec.None, codec.LZ4} {
			t.Run(fmt.Sprintf("message=%d/%v", fail, k), func(t *testing.T) {
				from := newOrigin(t, make([]byte, 8000))
				conn := &tape{fail: fail, broken: io.ErrClosedPipe}
				s := newSender(conn)
				s.Checksum, s.ChunkBytes, s.Codec = codec.CRC32C, 2000, k
				moved := int64(0)
				s.Moved = func(_ *frame.Desc, n int64) { moved += n }
				_, err := s.Send(t.Context(), &Tensor{Desc: vector(tensor.ID{1}, 8000), From: from})
				require.ErrorIs(t, err, io.ErrClosedPipe)
				require.NotErrorAs(t, err, new(*SourceError))
				require.EqualValues(t, (fail-1)*2000, moved)
				require.Zero(t, from.views.Load())
				require.Error(t, func() error { conn.fail = 1; return s.Control(frame.Frame{}) }())
			})
		}
	}
}

// amnesiac is a gRPC stream that forgets frames, as gRPC does when its RPC has ended.
type amnesiac struct{ last frame.Chunk }

func (c *amnesiac) Context() context.Context { return context.Background() }

func (c *amnesiac) SendMsg(m any) error {
	c.last = m.(*wire.Message).Frame.Chunk
	_, err := wire.Codec{}.Marshal(m)
	return err
}

func (c *amnesiac) RecvMsg(any) error { return io.EOF }

// again is a Viewer of the same bytes over and over.
type again []byte

func (a again) View(_, n int64) ([]byte, interface{ Release() }, error) { return a[:n], nil, nil }

func TestFramesThatGRPCForgetsMakeRoomForEncodingWhenTheirRPCEnds(t *testing.T) {
	data := again(testkit.Bytes(1<<20, 5))
	clear(data[3<<18:]) // a quarter can be saved
	room := func() (n int) {
		var held []*codec.Payload
		for p := codec.LZ4.Encode([][]byte{data}); p != nil; p = codec.LZ4.Encode([][]byte{data}) {
			held = append(held, p)
		}
		for _, p := range held {
			p.Release()
		}
		return len(held)
	}
	before := room()
	require.NotZero(t, before)
	conn := new(amnesiac)
	c := wire.NewConn(conn, new(wire.InFlight))
	s := &Sender{Conn: c}
	s.Checksum, s.ChunkBytes, s.Codec = codec.CRC32C, 1<<20, codec.LZ4
	_, err := s.Send(t.Context(), &Tensor{Desc: vector(tensor.ID{1}, int64(before+1)<<20), From: data, Digest: codec.Digest{1}})
	require.NoError(t, err)
	require.Zero(t, conn.last.Codec, "there was no room any more")
	require.Zero(t, room())
	c.Finish()
	require.Equal(t, before, room())
}

func TestASenderKeepsToTheLimitOfChunks(t *testing.T) {
	send := func(chunkBytes int64, shape ...int64) (*Tensor, error) {
		s := newSender(&tape{fail: 1, broken: io.ErrClosedPipe})
		s.Checksum, s.ChunkBytes = codec.CRC32C, chunkBytes
		d := frame.Desc{Tensor: tensor.ID{1}, Desc: tensor.Desc{DType: tensor.Uint8, Shape: shape}, Name: "thin"}
		job := &Tensor{Desc: d, From: newOrigin(t, make([]byte, chunkBytes))}
		_, err := s.Send(t.Context(), job)
		return job, err
	}
	for rows, chunk := range map[int64]uint32{1<<20 - 1: 3, 1<<20 + 1: 5} { // rows of 3 bytes, which a chunk does not cut if it need not
		job, err := send(5, rows, 3)
		require.ErrorIs(t, err, io.ErrClosedPipe)
		require.Equal(t, chunk, job.ChunkBytes)
	}
	_, err := send(1, 1<<20+1, 3) // there is no way to cut it
	require.ErrorIs(t, err, tensor.ErrTooLarge)
	require.ErrorAs(t, err, new(*SourceError))
	_, err = send(1, -1)
	require.ErrorIs(t, err, tensor.ErrShape)
	require.ErrorAs(t, err, new(*SourceError))
}

func TestAReceiverRefusesWhatIsOfSessions(t *testing.T) {
	for name, f := range map[string]frame.Frame{
		"call":   {Calls: make([]frame.Call, 1)},
		"credit": {Credits: make([]frame.Credit, 1)},
		"ack":    {Acks: make([]frame.Ack, 1)},
		"cancel": {Cancels: make([]tensor.ID, 1)},
		"done":   {Dones: make([]frame.Done, 1)},
		"drain":  {Drain: &frame.Drain{}},
	} {
		t.Run(name, func(t *testing.T) {
			recv := Receiver[*place]{ChunkBytes: 1 << 20, TensorBytes: 16 << 30, OpenTensors: 1, Tensors: 1, Checksum: codec.CRC32C, Handler: newBook(t)}
			var broken *frame.Error
			require.ErrorAs(t, recv.Frame(&f), &broken)
			require.Equal(t, frame.InvalidArgument, broken.Code)
			require.Contains(t, broken.Text, "sessions")
		})
	}
}

func TestAHandlersRefusalAndAPlacesErrorEndTheTensorAsTheyAre(t *testing.T) {
	errFull := errors.New("full")
	b := newBook(t)
	b.refuse = errFull
	recv := Receiver[*place]{ChunkBytes: 1 << 20, TensorBytes: 16 << 30, OpenTensors: 16, Tensors: 16, Checksum: codec.CRC32C, Handler: b}
	d := vector(tensor.ID{1}, 3)
	d.SizeBytes, d.ChunkBytes = 3, 3
	require.NoError(t, recv.Frame(&frame.Frame{Descs: []frame.Desc{d}}))
	require.Equal(t, []string{"full"}, b.places[d.Tensor].ended)

	b.refuse = nil
	d.Tensor = tensor.ID{2}
	chunk := frame.Chunk{Tensor: d.Tensor, Data: [][]byte{[]byte("abc")}}
	chunk.Sum = codec.CRC32C.Update(codec.CRC32C.Seed(d.Tensor, 0), []byte("abc"))
	require.NoError(t, recv.Frame(&frame.Frame{Descs: []frame.Desc{d}}))
	b.places[d.Tensor].err = errFull
	require.NoError(t, recv.Frame(&frame.Frame{Chunk: chunk}))
	require.Equal(t, []string{"full"}, b.places[d.Tensor].ended)
	require.NoError(t, recv.Frame(&frame.Frame{Chunk: chunk}), "late")

	d.Tensor = tensor.ID{3}
	require.NoError(t, recv.Frame(&frame.Frame{Descs: []frame.Desc{d}}))
	recv.Refuse(d.Tensor, errFull)
	recv.Refuse(d.Tensor, errFull)
	recv.Refuse(tensor.ID{99}, errFull)
	require.Equal(t, []string{"full"}, b.places[d.Tensor].ended)
	require.Zero(t, recv.Open())
}

// ending is a Viewer of zeros whose reader has gone after some views.
type ending struct {
	again
	left int
	end  context.CancelCauseFunc
}

func (e *ending) View(off, n int64) ([]byte, interface{ Release() }, error) {
	if e.left--; e.left == 0 {
		e.end(io.ErrClosedPipe)
	}
	return e.again.View(off, n)
}

func TestASenderOfATensorThatIsHeldStopsWhenItsReaderHasGone(t *testing.T) {
	const size = 1 << 40 // hours, if it went on
	ctx, end := context.WithCancelCause(t.Context())
	conn := new(tape)
	s := newSender(conn)
	s.Checksum, s.ChunkBytes = codec.CRC32C, 1<<20
	from := &ending{again(make([]byte, 1<<20)), 3, end}
	_, err := s.Send(ctx, &Tensor{Desc: vector(tensor.ID{1}, size), From: from, Held: []Range{{0, size}}})
	require.ErrorIs(t, err, io.ErrClosedPipe)
	require.NotErrorAs(t, err, new(*SourceError))
	require.Zero(t, from.left, "no view after the end")
	require.Empty(t, conn.frames)
}

// counting is a Viewer of zeros that says how many like it are read at a time.
type counting struct {
	again
	begin, end func()
}

func (c counting) View(off, n int64) ([]byte, interface{ Release() }, error) {
	c.begin()
	return c.again[:n], c, nil
}

func (c counting) Release() { c.end() }

func TestSendersOfWhatIsHeldHashInTurnsAndLeaveACore(t *testing.T) {
	const (
		size = 1 << 40 // hours, if one went on
		more = 8
	)
	room := max(1, runtime.GOMAXPROCS(0)-1)
	ctx, end := context.WithCancelCause(t.Context())
	data := again(make([]byte, 1<<20))
	var hashing, most, begun atomic.Int64
	var all sync.WaitGroup
	for i := range room + more {
		all.Go(func() {
			conn := new(tape)
			s := newSender(conn)
			s.Checksum, s.ChunkBytes = codec.CRC32C, 1<<20
			first := true
			from := counting{data, func() {
				if n := hashing.Add(1); n > most.Load() {
					most.Store(n)
				}
				if first {
					first = false
					begun.Add(1)
				}
			}, func() { hashing.Add(-1) }}
			_, err := s.Send(ctx, &Tensor{Desc: vector(tensor.ID{byte(i)}, size), From: from, Held: []Range{{0, size}}})
			require.ErrorIs(t, err, io.ErrClosedPipe)
		})
	}
	testkit.Eventually(t, func() bool { return begun.Load() == int64(room+more) }, "all senders to have a turn")
	end(io.ErrClosedPipe)
	all.Wait()
	require.LessOrEqual(t, most.Load(), int64(room))
}

// asked is a stream to a peer that looks whether others can hash meanwhile.
type asked struct {
	tape
	look func()
}

func (a *asked) SendMsg(m any) error {
	a.look()
	return a.tape.SendMsg(m)
}

func TestASenderThatWaitsForItsReaderHasNoTurn(t *testing.T) {
	const chunk, chunks = 1 << 10, 8
	data := again(make([]byte, chunk))
	conn := &asked{look: func() {
		var turns []*background.Turn
		for range max(1, runtime.GOMAXPROCS(0)-1) {
			turn := new(background.Turn)
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			require.NoError(t, turn.Work(ctx))
			cancel()
			turns = append(turns, turn)
		}
		for _, turn := range turns {
			turn.End()
		}
	}}
	for name, held := range map[string][]Range{
		"all held": {{0, chunks * chunk}}, "the first chunks held": {{0, 3 * chunk}}, "every second one": {{0, chunk}, {2 * chunk, chunk}, {6 * chunk, chunk}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSender(conn)
			s.Checksum, s.ChunkBytes = codec.CRC32C, chunk
			_, err := s.Send(t.Context(), &Tensor{Desc: vector(tensor.ID{1}, chunks*chunk), From: data, Held: held})
			require.NoError(t, err)
		})
	}
}
