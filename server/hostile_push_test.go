package server_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/pierrec/lz4/v4"
	"github.com/stretchr/testify/require"
	"github.com/zeebo/xxh3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/folder"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/store/storetest"
)

// parcel is a tensor for a push: its desc and its bytes.
type parcel struct {
	desc *pb.TensorDesc
	data []byte
}

// pack makes a uint8 vector.
func pack(name string, data []byte, chunkBytes int) *parcel {
	return &parcel{&pb.TensorDesc{
		TensorId: newID(), Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{int64(len(data))},
		SizeBytes: uint64(len(data)), ChunkBytes: uint32(chunkBytes), Name: name,
	}, data}
}

// ten is a tensor of 10 bytes in chunks of 4.
func ten(name string) *parcel { return pack(name, []byte("0123456789"), 4) }

// chunk cuts chunk i.
func (p *parcel) chunk(i uint32) *pb.Chunk {
	at, n := int(i)*int(p.desc.ChunkBytes), int(p.desc.ChunkBytes)
	return sealed(p.desc.TensorId, i, p.data[at:min(at+n, len(p.data))])
}

func (p *parcel) count() uint32 {
	n := int(p.desc.ChunkBytes)
	return uint32(max(1, (len(p.data)+n-1)/n))
}

// sealed is a chunk with the checksum that belongs to it, in CRC-32C.
func sealed(id []byte, index uint32, data []byte) *pb.Chunk {
	table := crc32.MakeTable(crc32.Castagnoli)
	named := binary.LittleEndian.AppendUint32(bytes.Clone(id), index)
	return &pb.Chunk{TensorId: id, Index: index, Checksum: crc32.Update(crc32.Checksum(named, table), table, data), Data: data}
}

// squeezed is a chunk whose payload is what lz4 makes of data.
func squeezed(id []byte, index uint32, data []byte) *pb.Chunk {
	out := make([]byte, lz4.CompressBlockBound(len(data)))
	var z lz4.CompressorHC
	n, err := z.CompressBlock(data, out)
	if err != nil {
		panic(err)
	}
	c := sealed(id, index, out[:n])
	c.Codec = pb.Codec_CODEC_LZ4
	return c
}

// pusher is a client that knows nothing but the proto: generated stubs, grpc's own
// codec, every frame of a push by hand.
type pusher struct {
	t      testing.TB
	stream grpc.ClientStreamingClient[pb.Frame, pb.PushTensorsResponse]
	id     []byte             // of the transfer
	end    context.CancelFunc // ends the RPC
	resp   *pb.PushTensorsResponse
	err    error
}

// dialPush opens a push without a hello.
func dialPush(t testing.TB, f *fixture, opts ...grpc.CallOption) *pusher {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), rawLife)
	s, err := pb.NewTensorServiceClient(f.dial(t)).PushTensors(ctx, opts...)
	require.NoError(t, err)
	t.Cleanup(cancel)
	return &pusher{t: t, stream: s, id: newID(), end: cancel}
}

// openPush opens a push.
func openPush(t testing.TB, f *fixture, opts ...grpc.CallOption) *pusher {
	t.Helper()
	p := dialPush(t, f, opts...)
	p.send(&pb.Frame{Hello: p.greeting()})
	return p
}

func (p *pusher) greeting() *pb.Hello {
	return &pb.Hello{Version: 1, SessionId: p.id, Checksum: pb.Checksum_CHECKSUM_CRC32C}
}

// send sends a frame. That the push has ended is for finish to find out.
func (p *pusher) send(f *pb.Frame) {
	p.t.Helper()
	if err := p.stream.Send(f); err != nil && !errors.Is(err, io.EOF) {
		p.t.Fatalf("send: %v", err)
	}
}

func (p *pusher) announce(list ...*parcel) {
	p.t.Helper()
	f := &pb.Frame{}
	for _, o := range list {
		f.Descs = append(f.Descs, o.desc)
	}
	p.send(f)
}

func (p *pusher) chunk(c *pb.Chunk) { p.t.Helper(); p.send(&pb.Frame{Chunk: c}) }

// deliver sends every chunk from the given one on.
func (p *pusher) deliver(o *parcel, from uint32) {
	p.t.Helper()
	for i := from; i < o.count(); i++ {
		p.chunk(o.chunk(i))
	}
}

// finish ends the push and returns its status.
func (p *pusher) finish() *status.Status {
	p.t.Helper()
	if p.resp == nil && p.err == nil {
		p.resp, p.err = p.stream.CloseAndRecv()
	}
	return status.Convert(p.err)
}

// summary finishes and finds a tensor's summary.
func (p *pusher) summary(o *parcel) *pb.Summary {
	p.t.Helper()
	require.NoError(p.t, p.finish().Err())
	for _, s := range p.resp.GetSummaries() {
		if bytes.Equal(s.GetTensorId(), o.desc.TensorId) {
			return s
		}
	}
	p.t.Fatalf("no summary of %q in %v", o.desc.Name, p.resp)
	return nil
}

// stored asserts that a tensor was stored, by what the summary says.
func (p *pusher) stored(o *parcel) {
	p.t.Helper()
	s := p.summary(o)
	require.Equal(p.t, codes.OK, codes.Code(s.GetCode()), s.GetMessage())
	require.Equal(p.t, digest(o.data), s.GetDigest())
	require.EqualValues(p.t, len(o.data), s.GetSizeBytes())
	require.Equal(p.t, o.desc.Name, s.GetName())
}

func digest(data []byte) []byte {
	d := xxh3.Hash128(data).Bytes()
	return d[:]
}

// shelf is a store in memory that, unlike the server, is not empty at a test's end.
func shelf(t testing.TB, limit int64) *memory.Store {
	t.Helper()
	m := memory.New(testkit.Pool(t), limit)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return m
}

// inFolder opens a store in a folder.
func inFolder(t testing.TB) (store.Store, string) {
	t.Helper()
	dir := t.TempDir()
	s, err := folder.OpenWithFiles(dir, folder.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s, dir
}

// transfer waits for the end of a transfer and returns what the server remembers.
func (f *fixture) transfer(t testing.TB, id []byte) *pb.GetTransferResponse {
	t.Helper()
	var state *pb.GetTransferResponse
	testkit.Eventually(t, func() bool {
		var err error
		state, err = f.server.GetTransfer(t.Context(), &pb.GetTransferRequest{TransferId: id})
		return err == nil && !state.GetOpen()
	}, "the end of a transfer")
	return state
}

// leaks is what no peer may read: where the server's files are and what listens
// where, stacks, and Go's own words.
var leaks = regexp.MustCompile(`(?i)/tmp/|/home/|/work/|127\.0\.0\.1|\.go:\d|goroutine|0x[0-9a-f]{6}|runtime error|nil pointer|internal error|%!`)

// saysWhy asserts that a text is for people: that it names what it should, and
// nothing that is nobody's business.
func saysWhy(t testing.TB, text string, parts []string) {
	t.Helper()
	require.NotEmpty(t, text)
	require.NotRegexp(t, leaks, text)
	require.LessOrEqual(t, len(text), 4<<10)
	for _, part := range parts {
		require.Contains(t, text, part)
	}
}

func entriesOf(n, key, value int) map[string]string {
	m := map[string]string{}
	for i := range n {
		m[fmt.Sprintf("%0*d", key, i)] = strings.Repeat("v", value)
	}
	return m
}

func TestABadTensorOfAPushFailsAloneAndSaysWhy(t *testing.T) {
	testkit.Start(t)
	desc := func(change func(d *pb.TensorDesc)) func(p *pusher, o *parcel) {
		return func(p *pusher, o *parcel) {
			change(o.desc)
			p.announce(o)
		}
	}
	// chunk opens a good tensor and then sends a chunk that is not.
	chunk := func(change func(c *pb.Chunk)) func(p *pusher, o *parcel) {
		return func(p *pusher, o *parcel) {
			p.announce(o)
			c := o.chunk(1)
			change(c)
			kind := c.Codec
			c = sealed(c.TensorId, c.Index, c.Data)
			c.Codec = kind
			p.chunk(c)
		}
	}
	// coded opens a tensor of 64 KiB in two chunks, and sends the second in LZ4.
	coded := func(place int, second func(id []byte) *pb.Chunk) func(p *pusher, o *parcel) {
		return func(p *pusher, o *parcel) {
			*o = *pack(o.desc.Name, bytes.Repeat([]byte("squeeze"), place), place)
			o.data = o.data[:2*place]
			o.desc.Shape, o.desc.SizeBytes = []int64{int64(2 * place)}, uint64(2*place)
			p.announce(o)
			p.chunk(second(o.desc.TensorId))
		}
	}
	const invalid, exhausted = codes.InvalidArgument, codes.ResourceExhausted
	for name, tc := range map[string]struct {
		commit func(p *pusher, o *parcel)
		code   codes.Code
		says   []string
	}{
		"no data type":            {desc(func(d *pb.TensorDesc) { d.Dtype = 0 }), invalid, []string{"data type"}},
		"an unknown data type":    {desc(func(d *pb.TensorDesc) { d.Dtype = 99 }), invalid, []string{"data type", "99"}},
		"a data type past a byte": {desc(func(d *pb.TensorDesc) { d.Dtype = 1<<20 + 1 }), invalid, []string{"data type"}},
		"a negative data type":    {desc(func(d *pb.TensorDesc) { d.Dtype = -5 }), invalid, []string{"data type"}},
		"rank 33":                 {desc(func(d *pb.TensorDesc) { d.Shape = make([]int64, 33) }), invalid, []string{"rank 33", "32"}},
		"a negative dimension":    {desc(func(d *pb.TensorDesc) { d.Shape = []int64{2, -5} }), invalid, []string{"dimension 1", "-5"}},
		"a dimension over 2^40": {
			desc(func(d *pb.TensorDesc) { d.Shape = []int64{1<<40 + 1} }), invalid, []string{"dimension 0", "1099511627777", "1099511627776"},
		},
		"a shape that overflows": {
			desc(func(d *pb.TensorDesc) { d.Shape = []int64{1 << 40, 1 << 40} }), exhausted, []string{"1099511627776 1099511627776", "2^63"},
		},
		"an empty shape that overflows": {
			desc(func(d *pb.TensorDesc) { d.Shape, d.SizeBytes = []int64{1 << 40, 1 << 40, 0}, 0 }), exhausted, []string{"1099511627776 1099511627776 0", "2^63"},
		},
		"a size that is not the shape's": {desc(func(d *pb.TensorDesc) { d.SizeBytes = 11 }), invalid, []string{"size_bytes", "11", "10"}},
		"chunks of 0 bytes":              {desc(func(d *pb.TensorDesc) { d.ChunkBytes = 0 }), invalid, []string{"chunk_bytes", "0", "1048576"}},
		"chunks over the limit":          {desc(func(d *pb.TensorDesc) { d.ChunkBytes = mib + 1 }), invalid, []string{"chunk_bytes", "1048577", "1048576"}},
		"more than 2^20 chunks": {desc(func(d *pb.TensorDesc) {
			d.Shape, d.SizeBytes, d.ChunkBytes = []int64{1<<20 + 1}, 1<<20+1, 1
		}), exhausted, []string{"1048577 chunks", "1048576"}},
		"a tensor over the limit": {desc(func(d *pb.TensorDesc) {
			d.Shape, d.SizeBytes, d.ChunkBytes = []int64{32*mib + 1}, 32*mib+1, mib
		}), exhausted, []string{"33554433", "33554432"}},
		"more than the store may hold": {desc(func(d *pb.TensorDesc) {
			d.Shape, d.SizeBytes, d.ChunkBytes = []int64{16*mib + 1}, 16*mib+1, mib
		}), exhausted, []string{"the store is full", "16777216"}},
		"no name":                       {desc(func(d *pb.TensorDesc) { d.Name = "" }), invalid, []string{"name", "empty"}},
		"a name of 513 bytes":           {desc(func(d *pb.TensorDesc) { d.Name = strings.Repeat("n", 513) }), invalid, []string{"name", "512"}},
		"a name of 60 KiB":              {desc(func(d *pb.TensorDesc) { d.Name = strings.Repeat("n", 60<<10) }), invalid, []string{"name", "512"}},
		"a name with an escape":         {desc(func(d *pb.TensorDesc) { d.Name = "\x1b[31m" }), invalid, []string{"name", "control"}},
		"a call's tensor":               {desc(func(d *pb.TensorDesc) { d.CallId = newID() }), invalid, []string{"call", "no calls"}},
		"a port of 513 bytes":           {desc(func(d *pb.TensorDesc) { d.Port = strings.Repeat("p", 513) }), invalid, []string{"port", "512"}},
		"65 metadata entries":           {desc(func(d *pb.TensorDesc) { d.Metadata = entriesOf(65, 3, 1) }), invalid, []string{"metadata", "65", "64"}},
		"a metadata key of 129 bytes":   {desc(func(d *pb.TensorDesc) { d.Metadata = entriesOf(1, 129, 1) }), invalid, []string{"metadata", "129", "128"}},
		"a metadata value of 4097":      {desc(func(d *pb.TensorDesc) { d.Metadata = entriesOf(1, 1, 4097) }), invalid, []string{"metadata", "4097", "4096"}},
		"metadata of more than 32 KiB":  {desc(func(d *pb.TensorDesc) { d.Metadata = entriesOf(9, 1, 4096) }), invalid, []string{"metadata", "32768"}},
		"a second desc of another type": {again(func(d *pb.TensorDesc) { d.Dtype = pb.DataType_DATA_TYPE_INT8 }), invalid, []string{"another desc", "new id"}},
		"a second desc of another name": {again(func(d *pb.TensorDesc) { d.Name = "other" }), invalid, []string{"another desc"}},
		"a second desc of other chunks": {again(func(d *pb.TensorDesc) { d.ChunkBytes = 5 }), invalid, []string{"another desc"}},

		"a chunk past the last":    {chunk(func(c *pb.Chunk) { c.Index = 3 }), invalid, []string{"index 3", "3 chunks"}},
		"chunk 2^32-1":             {chunk(func(c *pb.Chunk) { c.Index = 1<<32 - 1 }), invalid, []string{"index 4294967295", "3 chunks"}},
		"a chunk too short":        {chunk(func(c *pb.Chunk) { c.Data = c.Data[:3] }), invalid, []string{"chunk 1", "3 bytes", "4"}},
		"an empty chunk":           {chunk(func(c *pb.Chunk) { c.Data = nil }), invalid, []string{"chunk 1", "0 bytes", "4"}},
		"a chunk too long":         {chunk(func(c *pb.Chunk) { c.Data = []byte("fives") }), invalid, []string{"chunk 1", "5 bytes", "4"}},
		"a last chunk too long":    {chunk(func(c *pb.Chunk) { c.Index = 2 }), invalid, []string{"chunk 2", "4 bytes", "2"}},
		"an unknown codec":         {chunk(func(c *pb.Chunk) { c.Codec = 200 }), invalid, []string{"chunk 1", "codec 200"}},
		"a codec past a byte":      {chunk(func(c *pb.Chunk) { c.Codec = 1 << 20 }), invalid, []string{"chunk 1", "codec 255"}},
		"lz4 as long as its place": {chunk(func(c *pb.Chunk) { c.Codec = 1 }), invalid, []string{"chunk 1", "lz4", "shorter"}},
		"lz4 of nothing":           {chunk(func(c *pb.Chunk) { c.Codec, c.Data = 1, nil }), invalid, []string{"chunk 1", "lz4", "not empty"}},
		"lz4 that is noise": {coded(32<<10, func(id []byte) *pb.Chunk {
			c := sealed(id, 1, testkit.Bytes(1000, 1))
			c.Codec = 1
			return c
		}), invalid, []string{"chunk 1", "not an lz4 block of 32768"}},
		"lz4 that makes less": {coded(32<<10, func(id []byte) *pb.Chunk {
			return squeezed(id, 1, make([]byte, 32<<10-1))
		}), invalid, []string{"chunk 1", "make 32767", "has 32768"}},
		"lz4 that makes more": {coded(32<<10, func(id []byte) *pb.Chunk {
			return squeezed(id, 1, make([]byte, 32<<10+1))
		}), invalid, []string{"chunk 1", "32768"}},
		"an lz4 bomb": {coded(mib, func(id []byte) *pb.Chunk {
			return squeezed(id, 1, make([]byte, 64*mib))
		}), invalid, []string{"chunk 1", "not an lz4 block of 1048576"}},
		"a wrong checksum": {func(p *pusher, o *parcel) {
			p.announce(o)
			c := o.chunk(1)
			c.Checksum++
			p.chunk(c)
		}, codes.DataLoss, []string{"chunk 1", "checksum", "send the tensor again"}},
		"a wrong checksum of lz4": {coded(32<<10, func(id []byte) *pb.Chunk {
			c := squeezed(id, 1, make([]byte, 32<<10))
			c.Checksum++
			return c
		}), codes.DataLoss, []string{"chunk 1", "checksum", "send the tensor again"}},
		"a checksum of another chunk": {func(p *pusher, o *parcel) {
			p.announce(o)
			c := o.chunk(0)
			c.Index = 1
			p.chunk(c)
		}, codes.DataLoss, []string{"chunk 1"}},
		"a checksum of another tensor": {func(p *pusher, o *parcel) {
			p.announce(o)
			c := ten("b").chunk(1)
			c.TensorId = o.desc.TensorId
			p.chunk(c)
		}, codes.DataLoss, []string{"chunk 1"}},
		"a chunk twice with another checksum": {func(p *pusher, o *parcel) {
			p.announce(o)
			p.chunk(o.chunk(1))
			p.chunk(sealed(o.desc.TensorId, 1, []byte("evil")))
		}, invalid, []string{"chunk 1", "again"}},
		"given up": {func(p *pusher, o *parcel) {
			p.announce(o)
			p.send(&pb.Frame{Failures: []*pb.Failure{{TensorId: o.desc.TensorId, Code: uint32(codes.DataLoss), Message: "the disk is gone"}}})
		}, codes.DataLoss, []string{"given up", "the disk is gone"}},
		"given up with code 0": {func(p *pusher, o *parcel) {
			p.announce(o)
			p.send(&pb.Frame{Failures: []*pb.Failure{{TensorId: o.desc.TensorId}}})
		}, codes.Unknown, []string{"given up"}},
		"given up with a code and a text of nobody's": {func(p *pusher, o *parcel) {
			p.announce(o)
			p.send(&pb.Frame{Failures: []*pb.Failure{{TensorId: o.desc.TensorId, Code: 1 << 31, Message: strings.Repeat("ä", 30<<10)}}})
		}, codes.Unknown, []string{"given up", "ää"}},
		"the end of the stream": {func(p *pusher, o *parcel) {
			p.announce(o)
			p.chunk(o.chunk(1))
		}, invalid, []string{"ended after 4 of 10 bytes", "send all chunks"}},
		"the end of the stream before any chunk": {func(p *pusher, o *parcel) { p.announce(o) }, invalid, []string{"0 of 10 bytes"}},
		"the end of the stream before the empty chunk": {func(p *pusher, o *parcel) {
			*o = *pack(o.desc.Name, nil, 4)
			p.announce(o)
		}, invalid, []string{"0 of 0 bytes"}},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			m := shelf(t, 16*mib)
			f := serve(t, func(c *server.Config) { c.Store, c.StoredBytes = m, 32*mib })
			p := openPush(t, f)
			good, bad := ten("good"), ten("bad")
			p.announce(good)
			p.chunk(good.chunk(2))
			tc.commit(p, bad)
			p.deliver(good, 0)
			s := p.summary(bad)
			require.Equal(t, tc.code, codes.Code(s.GetCode()), s.GetMessage())
			saysWhy(t, s.GetMessage(), tc.says)
			require.Empty(t, s.GetDigest())
			require.False(t, s.GetDurable())
			require.LessOrEqual(t, len(s.GetName()), 512)
			p.stored(good)
			require.Equal(t, []string{"good"}, storetest.Names(t, m))
			testkit.Eventually(t, func() bool { used, _ := m.Used(); return used == 4<<10 }, "a store that has a page for the good one")
			state := f.transfer(t, p.id)
			require.Zero(t, state.GetCode(), state.GetMessage())
			require.Len(t, state.GetTensors(), 2)
			for _, ts := range state.GetTensors() {
				require.False(t, ts.GetOpen())
			}
			f.isEmpty(t)
		})
	}
}

// again opens a good tensor and announces it once more, changed.
func again(change func(d *pb.TensorDesc)) func(p *pusher, o *parcel) {
	return func(p *pusher, o *parcel) {
		p.announce(o)
		second := proto.Clone(o.desc).(*pb.TensorDesc)
		change(second)
		p.send(&pb.Frame{Descs: []*pb.TensorDesc{second}})
	}
}

func TestABrokenRuleOfAPushEndsItWithTheRightStatus(t *testing.T) {
	testkit.Start(t)
	const invalid, exhausted = codes.InvalidArgument, codes.ResourceExhausted
	hello := func(change func(h *pb.Hello)) func(p *pusher) {
		return func(p *pusher) {
			h := p.greeting()
			change(h)
			p.send(&pb.Frame{Hello: h})
		}
	}
	part := func(f *pb.Frame) func(p *pusher) { return func(p *pusher) { p.send(f) } }
	for name, tc := range map[string]struct {
		opens bool // a good hello comes first, and an open tensor
		bytes bool // send sends bytes, not messages
		send  func(p *pusher)
		code  codes.Code
		says  []string
	}{
		"an empty first frame":    {false, false, part(&pb.Frame{}), invalid, []string{"hello"}},
		"a desc first":            {false, false, func(p *pusher) { p.announce(ten("x")) }, invalid, []string{"hello"}},
		"a chunk first":           {false, false, func(p *pusher) { p.chunk(ten("x").chunk(0)) }, invalid, []string{"hello"}},
		"nothing at all":          {false, false, func(*pusher) {}, invalid, []string{"hello"}},
		"another version":         {false, false, hello(func(h *pb.Hello) { h.Version = 2 }), codes.FailedPrecondition, []string{"version 2", "speaks 1"}},
		"no checksum":             {false, false, hello(func(h *pb.Hello) { h.Checksum = 0 }), invalid, []string{"checksum kind 0", "crc32c"}},
		"an unknown checksum":     {false, false, hello(func(h *pb.Hello) { h.Checksum = 77 }), invalid, []string{"checksum kind 77"}},
		"no id":                   {false, false, hello(func(h *pb.Hello) { h.SessionId = nil }), invalid, []string{"hello.session_id", "16 bytes"}},
		"an id of zeros":          {false, false, hello(func(h *pb.Hello) { h.SessionId = make([]byte, 16) }), invalid, []string{"hello.session_id", "zero"}},
		"a second hello":          {true, false, hello(func(*pb.Hello) {}), invalid, []string{"second hello"}},
		"a call":                  {true, false, part(&pb.Frame{Calls: []*pb.Call{small("echo").call}}), invalid, []string{"calls", "sessions"}},
		"a credit":                {true, false, part(&pb.Frame{Credits: []*pb.Credit{{TensorId: newID(), ChunkLimit: 1}}}), invalid, []string{"credits", "sessions"}},
		"an ack":                  {true, false, part(&pb.Frame{Acks: []*pb.Ack{{TensorId: newID()}}}), invalid, []string{"acks", "sessions"}},
		"a cancel":                {true, false, part(&pb.Frame{Cancels: []*pb.Cancel{{CallId: newID()}}}), invalid, []string{"sessions"}},
		"a done":                  {true, false, part(&pb.Frame{Dones: []*pb.Done{{CallId: newID()}}}), invalid, []string{"sessions"}},
		"a drain":                 {true, false, part(&pb.Frame{Drain: &pb.Drain{Reason: "tired"}}), invalid, []string{"sessions"}},
		"a summary":               {true, false, part(&pb.Frame{Summaries: []*pb.Summary{{TensorId: newID(), Name: "x"}}}), invalid, []string{"summary", "server"}},
		"a chunk before its desc": {true, false, func(p *pusher) { p.chunk(ten("x").chunk(1)) }, codes.NotFound, []string{"chunk 1", "not announced", "desc first"}},
		"an unknown tensor's failure": {
			true, false, part(&pb.Frame{Failures: []*pb.Failure{{TensorId: newID(), Code: 13}}}), codes.NotFound, []string{"not announced"},
		},
		"an id of 15 bytes": {true, false, func(p *pusher) {
			o := ten("x")
			o.desc.TensorId = o.desc.TensorId[1:]
			p.announce(o)
		}, invalid, []string{"descs[0].tensor_id", "15 bytes"}},
		"a call id of 3 bytes": {true, false, func(p *pusher) {
			o := ten("x")
			o.desc.CallId = []byte("abc")
			p.announce(o)
		}, invalid, []string{"descs[0].call_id", "3 bytes"}},
		"257 descs in a frame": {true, false, func(p *pusher) {
			var list []*parcel
			for range 257 {
				list = append(list, ten("x"))
			}
			p.announce(list...)
		}, exhausted, []string{"descs", "256", "257"}},
		"257 failures in a frame": {true, false, func(p *pusher) {
			f := &pb.Frame{}
			for range 257 {
				f.Failures = append(f.Failures, &pb.Failure{TensorId: newID(), Code: 13})
			}
			p.send(f)
		}, exhausted, []string{"failures", "256", "257"}},
		"more than 64 KiB beside the payload": {true, false, func(p *pusher) {
			o := ten("x")
			o.desc.Metadata = map[string]string{"a": strings.Repeat("b", 65<<10)}
			p.announce(o)
		}, exhausted, []string{"65536"}},
		"a message over the receive limit": {true, false, func(p *pusher) {
			p.chunk(&pb.Chunk{TensorId: newID(), Data: make([]byte, 2*mib)})
		}, exhausted, []string{"larger than max", fmt.Sprint(mib + 64<<10)}},
		"garbage": {true, true, func(p *pusher) {
			require.NoError(p.t, p.stream.SendMsg([]byte("\xff\xff\xff\xff garbage \xff")))
		}, invalid, []string{"malformed frame"}},
		"a message cut short": {true, true, func(p *pusher) {
			b, err := proto.Marshal(&pb.Frame{Chunk: ten("x").chunk(0)})
			require.NoError(p.t, err)
			require.NoError(p.t, p.stream.SendMsg(b[:len(b)-1]))
		}, invalid, []string{"malformed frame"}},
		"a name that is not UTF-8": {true, true, func(p *pusher) {
			b, err := proto.Marshal(&pb.Frame{Descs: []*pb.TensorDesc{ten("echo").desc}})
			require.NoError(p.t, err)
			require.NoError(p.t, p.stream.SendMsg([]byte(strings.Replace(string(b), "echo", "ech\xff", 1))))
		}, invalid, []string{"malformed frame"}},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			m := shelf(t, 16*mib)
			f := serve(t, func(c *server.Config) { c.Store = m })
			var opts []grpc.CallOption
			if tc.bytes {
				opts = append(opts, asItIs())
			}
			p := dialPush(t, f, opts...)
			if tc.opens {
				p.send(&pb.Frame{Hello: p.greeting()})
				o := ten("open")
				p.announce(o)
				p.chunk(o.chunk(0))
			}
			tc.send(p)
			st := p.finish()
			require.Equal(t, tc.code, st.Code(), st.Message())
			saysWhy(t, st.Message(), tc.says)
			require.Empty(t, storetest.Names(t, m))
			testkit.Eventually(t, func() bool { used, _ := m.Used(); return used == 0 }, "the room to come back")
			if tc.opens {
				state := f.transfer(t, p.id)
				require.Equal(t, tc.code, codes.Code(state.GetCode()))
				require.Equal(t, st.Message(), state.GetMessage())
				require.NotEmpty(t, state.GetTensors())
				for _, ts := range state.GetTensors() {
					require.False(t, ts.GetOpen())
					require.NotZero(t, ts.GetSummary().GetCode(), "no tensor of a push that failed is a success")
					saysWhy(t, ts.GetSummary().GetMessage(), nil)
				}
			}
			f.isEmpty(t)
		})
	}
}

func TestFramesOfAPushThatChangeNothingAreIgnored(t *testing.T) {
	testkit.Start(t)
	m := shelf(t, 16*mib)
	f := serve(t, func(c *server.Config) { c.Store = m })
	p := openPush(t, f)
	a, b, open := ten("a\u2026"), pack("b", nil, 4), ten("open")
	p.announce(open)
	p.send(&pb.Frame{})
	p.announce(a, a, b)
	p.announce(a)
	for range 2 {
		p.chunk(a.chunk(1)) // in any order, and twice
	}
	for i := range uint32(4) { // damaged, of a chunk that is there
		c := a.chunk(1)
		c.Checksum += 1 + i
		p.chunk(c)
	}
	p.deliver(a, 0)
	p.deliver(b, 0)
	// Both are whole: all that comes for them is late.
	p.deliver(a, 0)
	p.deliver(b, 0)
	p.announce(a, b)
	p.chunk(sealed(a.desc.TensorId, 1, []byte("evil")))
	p.chunk(sealed(a.desc.TensorId, 77, []byte("evil")))
	p.send(&pb.Frame{Failures: []*pb.Failure{{TensorId: a.desc.TensorId, Code: 13, Message: "late"}}})
	p.deliver(open, 0)
	for _, o := range []*parcel{a, b, open} {
		p.stored(o)
	}
	require.Len(t, p.resp.GetSummaries(), 3)
	require.Equal(t, []string{"a\u2026", "b", "open"}, storetest.Names(t, m))
	require.Zero(t, pullAll(t, f, &pb.Selection{Name: "a\u2026"}).summary(t, "a\u2026").GetCode())
}

func TestAPushToAServerWithoutAStoreSaysSo(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	p := openPush(t, f)
	st := p.finish()
	require.Equal(t, codes.FailedPrecondition, st.Code())
	saysWhy(t, st.Message(), []string{"no store", "--store"})
}

func TestTheSameTransferTwiceAtATimeIsRefusedAndLaterIsNot(t *testing.T) {
	testkit.Start(t)
	m := shelf(t, 16*mib)
	f := serve(t, func(c *server.Config) { c.Store = m })
	first := openPush(t, f)
	o := ten("x")
	first.announce(o)
	testkit.Eventually(t, func() bool {
		_, err := f.server.GetTransfer(t.Context(), &pb.GetTransferRequest{TransferId: first.id})
		return err == nil
	}, "the first push")
	second := dialPush(t, f)
	second.id = first.id
	second.send(&pb.Frame{Hello: second.greeting()})
	st := second.finish()
	require.Equal(t, codes.AlreadyExists, st.Code())
	saysWhy(t, st.Message(), []string{"already open", "new id"})
	of, err := f.server.GetTransfer(t.Context(), &pb.GetTransferRequest{TransferId: first.id})
	require.NoError(t, err)
	require.True(t, of.GetOpen(), "the first one goes on")
	first.deliver(o, 0)
	first.stored(o)
	third := dialPush(t, f)
	third.id = first.id
	third.send(&pb.Frame{Hello: third.greeting()})
	require.NoError(t, third.finish().Err())
}

func TestAPushThatFailsEarlyIsToldBeforeItHasSentAll(t *testing.T) {
	testkit.Start(t)
	m := shelf(t, 16*mib)
	f := serve(t, func(c *server.Config) { c.Store = m })
	p := openPush(t, f)
	o := pack("", make([]byte, 64*mib), mib)
	p.announce(o)
	sent := 0
	for err := error(nil); err == nil; sent++ {
		require.Less(t, sent, 1<<20, "the server takes chunks of a tensor that it refused")
		err = p.stream.Send(&pb.Frame{Chunk: o.chunk(uint32(sent % 64))})
	}
	s := p.summary(o)
	require.Equal(t, codes.InvalidArgument, codes.Code(s.GetCode()))
}

func TestAPushCutInTheMiddleLeavesNothing(t *testing.T) {
	testkit.Start(t)
	files := func(dir string) []string {
		var all []string
		list, err := os.ReadDir(dir)
		require.NoError(t, err)
		for _, e := range list {
			if !strings.Contains(e.Name(), "lock") {
				all = append(all, e.Name())
			}
		}
		return all
	}
	for name, cut := range map[string]func(t *testing.T, f *fixture, p *pusher, px *proxy){
		"by a cancel":          func(_ *testing.T, _ *fixture, p *pusher, _ *proxy) { p.end() },
		"by a dead connection": func(_ *testing.T, _ *fixture, _ *pusher, px *proxy) { px.cut() },
		"by the server's end":  func(_ *testing.T, f *fixture, _ *pusher, _ *proxy) { f.server.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			s, dir := inFolder(t)
			log := &notes{}
			f := serve(t, func(c *server.Config) { c.Store, c.Log = s, log.log() })
			before := files(dir)
			px := newProxy(t, f.addr, -1)
			through := *f
			through.addr = px.addr
			p := openPush(t, &through)
			whole, half, none := ten("whole"), pack("half", make([]byte, 8*mib), mib), ten("none")
			p.announce(whole, half, none)
			p.deliver(whole, 0)
			for i := range uint32(4) {
				p.chunk(half.chunk(i))
			}
			state := func() *pb.GetTransferResponse {
				state, err := f.server.GetTransfer(t.Context(), &pb.GetTransferRequest{TransferId: p.id})
				if err != nil {
					return nil
				}
				return state
			}
			testkit.Eventually(t, func() bool {
				all := state().GetTensors()
				return len(all) == 3 && !all[0].GetOpen() && all[1].GetMovedBytes() == 4*mib
			}, "half of it")
			require.Greater(t, len(files(dir)), len(before)+1, "a file on its way")
			cut(t, f, p, px)
			end := f.transfer(t, p.id)
			require.NotZero(t, end.GetCode())
			require.Equal(t, []string{"whole"}, storetest.Names(t, s))
			testkit.Eventually(t, func() bool { return len(files(dir)) == len(before)+1 }, "the file on its way to be gone")
			for i, ts := range end.GetTensors() {
				require.False(t, ts.GetOpen())
				require.Equal(t, i == 0, ts.GetSummary().GetCode() == 0, ts.GetSummary())
				if i > 0 {
					saysWhy(t, ts.GetSummary().GetMessage(), nil)
				}
			}
			require.NotContains(t, log.String(), "store failed", "that a client leaves is nobody's defect")
		})
	}
}

func TestADrainingServerFinishesTransfersAndTakesNoNewOnes(t *testing.T) {
	testkit.Start(t)
	m := shelf(t, 16*mib)
	f := serve(t, func(c *server.Config) { c.Store = m })
	g := addGate(t, f, "gate")
	stub := pb.NewTensorServiceClient(f.dial(t))
	p := openPush(t, f)
	o := ten("x")
	p.announce(o)
	computed := make(chan error, 1)
	ask := &pb.ComputeRequest{Model: "gate", Inputs: []*pb.NamedTensor{{Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{3}, Data: []byte("abc")}}}
	go func() { _, err := stub.Compute(t.Context(), ask); computed <- err }()
	testkit.Eventually(t, func() bool {
		_, err := f.server.GetTransfer(t.Context(), &pb.GetTransferRequest{TransferId: p.id})
		return err == nil && g.started.Load() == 1
	}, "a push and a call")
	down := make(chan error, 1)
	go func() { down <- f.server.Shutdown(t.Context()) }()
	late := []string{"draining", "later"}
	refused := func(err error) bool {
		st := status.Convert(err)
		return st.Code() == codes.Unavailable && tellsWhenToRetry(st) && !slices.ContainsFunc(late, func(s string) bool { return !strings.Contains(st.Message(), s) })
	}
	testkit.Eventually(t, func() bool {
		_, err := stub.Compute(t.Context(), &pb.ComputeRequest{Model: "echo", Inputs: ask.Inputs})
		return refused(err)
	}, "calls to be refused")
	require.True(t, refused(openPush(t, f).finish().Err()))
	require.True(t, refused(pullAll(t, f, &pb.Selection{Name: "x"}).status.Err()))
	p.deliver(o, 0)
	p.stored(o)
	close(g.open)
	require.NoError(t, <-computed)
	require.NoError(t, <-down)
}
