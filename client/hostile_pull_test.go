package client_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/pierrec/lz4/v4"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// rogue is a server that knows nothing but the proto, and does with puts and gets what a test
// says: its RPC ends with an error of theirs, else their call with OK.
type rogue struct {
	pb.UnimplementedTensorServiceServer
	get  func(call *pb.Call, s pb.TensorService_StreamTensorsServer) error
	put  func(first *pb.Frame, s pb.TensorService_StreamTensorsServer) error
	list func(*pb.ListTensorsRequest) *pb.ListTensorsResponse
}

// StreamTensors serves a session, one call after the other.
func (r *rogue) StreamTensors(s pb.TensorService_StreamTensorsServer) error {
	err := hello(s, func(h *pb.Hello) { h.Stores = true })
	for err == nil {
		var f *pb.Frame
		if f, err = s.Recv(); err != nil {
			return nil
		}
		for _, c := range f.GetCalls() {
			if c.Get != nil {
				err = r.get(c, s)
			} else {
				err = r.put(f, s)
			}
			if err == nil {
				err = s.Send(&pb.Frame{Dones: []*pb.Done{{CallId: c.Id}}})
			}
		}
	}
	return err
}

func (r *rogue) ListTensors(_ context.Context, req *pb.ListTensorsRequest) (*pb.ListTensorsResponse, error) {
	return r.list(req), nil
}

// bytesOrMessages sends a []byte as it is, and messages as grpc's own codec does.
type bytesOrMessages struct{ encoding.CodecV2 }

func (c bytesOrMessages) Marshal(v any) (mem.BufferSlice, error) {
	if b, ok := v.([]byte); ok {
		return mem.BufferSlice{mem.SliceBuffer(b)}, nil
	}
	return c.CodecV2.Marshal(v)
}

// beguile opens a client of a server that a test has made.
func beguile(t *testing.T, r pb.TensorServiceServer, cfg client.Config) *client.Client {
	t.Helper()
	l := listen(t)
	s := grpc.NewServer(grpc.ForceServerCodecV2(bytesOrMessages{encoding.GetCodecV2("proto")}))
	pb.RegisterTensorServiceServer(s, r)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }() // ends with Stop
	cfg.OpenTimeout, cfg.Checksum = 5*time.Second, codec.CRC32C
	c, err := dial(l.Addr().String(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, c.Close())
		s.Stop()
		require.NoError(t, <-served)
	})
	return c
}

// sent is one tensor of 10 bytes in chunks of 4, as a server sends it.
type sent struct {
	desc   *pb.TensorDesc
	chunks []*pb.Chunk
	sum    *pb.Summary
	extra  []*pb.Frame // after the chunks
	raw    []byte      // after the chunks, as a message
	early  bool        // the summary comes before the chunks
	end    error
}

var table = crc32.MakeTable(crc32.Castagnoli)

func sealed(id []byte, index uint32, data []byte) *pb.Chunk {
	named := binary.LittleEndian.AppendUint32(bytes.Clone(id), index)
	return &pb.Chunk{TensorId: id, Index: index, Data: data, Checksum: crc32.Update(crc32.Checksum(named, table), table, data)}
}

func send(call *pb.Call, name string) *sent {
	data := []byte("0123456789")
	id := newID()
	d := digestOf(data)
	return &sent{
		desc: &pb.TensorDesc{
			TensorId: id, Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{10}, SizeBytes: 10, ChunkBytes: 4, Name: name,
			CallId: call.Id, OnAllowance: true,
		},
		chunks: []*pb.Chunk{sealed(id, 0, data[:4]), sealed(id, 1, data[4:8]), sealed(id, 2, data[8:])},
		sum:    &pb.Summary{TensorId: id, Name: name, SizeBytes: 10, Digest: d[:], CallId: call.Id},
	}
}

// huge makes it a tensor of so many bytes, none of which has come.
func (x *sent) huge(bytes int64) {
	x.desc.Shape, x.desc.SizeBytes, x.desc.ChunkBytes, x.desc.OnAllowance = []int64{bytes}, uint64(bytes), mib, false
	x.chunks, x.sum = nil, nil
}

func (x *sent) to(s pb.TensorService_StreamTensorsServer) error {
	var frames []*pb.Frame
	if x.desc != nil {
		frames = append(frames, &pb.Frame{Descs: []*pb.TensorDesc{x.desc}})
	}
	if x.early {
		frames = append(frames, &pb.Frame{Summaries: []*pb.Summary{x.sum}})
	}
	for _, c := range x.chunks {
		frames = append(frames, &pb.Frame{Chunk: c})
	}
	frames = append(frames, x.extra...)
	for _, f := range frames {
		if err := s.Send(f); err != nil {
			return err
		}
	}
	if x.raw != nil {
		if err := s.SendMsg(x.raw); err != nil {
			return err
		}
	}
	if x.sum != nil && !x.early {
		if err := s.Send(&pb.Frame{Summaries: []*pb.Summary{x.sum}}); err != nil {
			return err
		}
	}
	return x.end
}

func TestABadTensorOfAPullIsNeverTakenForAGoodOne(t *testing.T) {
	testkit.Start(t)
	const invalid, internal = codes.InvalidArgument, codes.Internal
	squeezed := func(c *pb.Chunk, data []byte) {
		out := make([]byte, lz4.CompressBlockBound(len(data)))
		var z lz4.CompressorHC
		n, err := z.CompressBlock(data, out)
		require.NoError(t, err)
		c.Data, c.Codec, c.Checksum = out[:n], pb.Codec_CODEC_LZ4, sealed(c.TensorId, c.Index, out[:n]).Checksum
	}
	for name, tc := range map[string]struct {
		spoil func(x *sent)
		code  codes.Code
		says  string
	}{
		"a call":                     {func(x *sent) { x.extra = []*pb.Frame{{Calls: []*pb.Call{{Id: newID(), Model: "m"}}}} }, invalid, "call came from the server"},
		"garbage":                    {func(x *sent) { x.raw = []byte("\xff\xff garbage") }, invalid, "malformed frame"},
		"a message too large":        {func(x *sent) { x.raw = make([]byte, 8*mib) }, codes.ResourceExhausted, "larger than max"},
		"a chunk before its desc":    {func(x *sent) { x.desc = nil }, internal, "did not"},
		"no data type":               {func(x *sent) { x.desc.Dtype = 0 }, invalid, "data type"},
		"rank 33":                    {func(x *sent) { x.desc.Shape = make([]int64, 33) }, invalid, "rank 33"},
		"a negative dimension":       {func(x *sent) { x.desc.Shape = []int64{-10} }, invalid, "-10"},
		"a size not the shape's":     {func(x *sent) { x.desc.SizeBytes = 11 }, invalid, "size_bytes is 11"},
		"chunks over ours":           {func(x *sent) { x.desc.ChunkBytes = 2 * mib }, invalid, "chunk_bytes is 2097152"},
		"a call's tensor":            {func(x *sent) { x.desc.CallId = newID() }, internal, "did not"},
		"a name with an escape":      {func(x *sent) { x.desc.Name = "\x1b[2J" }, invalid, "control"},
		"a name of 60 KiB":           {func(x *sent) { x.desc.Name = strings.Repeat("n", 60<<10) }, invalid, "name"},
		"another name":               {func(x *sent) { x.desc.Name = "../../etc/passwd" }, internal, "was not selected"},
		"more than ResultBytes":      {func(x *sent) { x.huge(1 << 31) }, codes.Unknown, "ResultBytes"},
		"a chunk out of range":       {func(x *sent) { x.chunks[1].Index = 7 }, invalid, "index 7"},
		"a chunk too long":           {func(x *sent) { x.chunks[1].Data = []byte("fives") }, invalid, "5 bytes"},
		"a chunk that is missing":    {func(x *sent) { x.chunks = x.chunks[:2] }, codes.DeadlineExceeded, "StallTimeout"},
		"a chunk that is damaged":    {func(x *sent) { x.chunks[1].Data = []byte("evil") }, codes.DeadlineExceeded, "StallTimeout"},
		"a chunk of another tensor":  {func(x *sent) { x.chunks[1].Checksum = sealed(newID(), 1, x.chunks[1].Data).Checksum }, codes.DeadlineExceeded, "StallTimeout"},
		"a chunk twice, differently": {func(x *sent) { x.chunks[2] = sealed(x.desc.TensorId, 1, []byte("evil")) }, invalid, "again"},
		"a second desc that differs": {func(x *sent) {
			other := &pb.TensorDesc{TensorId: x.desc.TensorId, Dtype: x.desc.Dtype, Shape: []int64{5, 2}, SizeBytes: 10, ChunkBytes: 4, Name: "x"}
			x.extra, x.chunks = []*pb.Frame{{Descs: []*pb.TensorDesc{other}}}, x.chunks[:2]
		}, invalid, "another desc"},
		"a codec that nobody knows": {func(x *sent) { x.chunks[1].Codec = 9 }, invalid, "codec 9"},
		"lz4 that is noise":         {func(x *sent) { c := sealed(x.desc.TensorId, 1, []byte("ab")); c.Codec = 1; x.chunks[1] = c }, invalid, "chunk 1"},
		"an lz4 bomb": {func(x *sent) {
			x.desc.Shape, x.desc.SizeBytes, x.desc.ChunkBytes = []int64{mib}, mib, mib
			x.chunks = x.chunks[:1]
			squeezed(x.chunks[0], make([]byte, 64*mib))
		}, invalid, "not an lz4 block"},
		"a summary of another content": {func(x *sent) { x.sum.Digest[3] ^= 1 }, codes.DataLoss, "pull it again"},
		"a summary without a digest":   {func(x *sent) { x.sum.Digest = nil }, codes.DataLoss, "pull it again"},
		"a digest of 15 bytes":         {func(x *sent) { x.sum.Digest = x.sum.Digest[1:] }, invalid, "digest"},
		"a summary of nothing sent":    {func(x *sent) { x.desc, x.chunks = nil, nil }, internal, "did not"},
		"a summary that says no":       {func(x *sent) { x.sum.Code, x.sum.Message, x.sum.RetryAfterMillis = 8, "no room", 250 }, codes.ResourceExhausted, "no room"},
		"a failure":                    {func(x *sent) { x.failure(&pb.Failure{Code: 15, Message: "the disk is gone"}) }, codes.DataLoss, "the disk is gone"},
		"a failure with code 0":        {func(x *sent) { x.failure(&pb.Failure{}) }, codes.Unknown, "given up"},
		"no summary":                   {func(x *sent) { x.sum = nil }, internal, "without a summary"},
		"half of it":                   {func(x *sent) { x.sum, x.chunks = nil, x.chunks[:1] }, internal, "without a summary"},
		"an error in the middle":       {func(x *sent) { x.sum, x.end = nil, status.Error(codes.Unavailable, "gone") }, codes.Unavailable, "gone"},
		"a hello alone":                {func(x *sent) { *x = sent{} }, codes.DataLoss, "without mentioning it"},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			bubble(t, func(t *testing.T) {
				r := &rogue{get: func(call *pb.Call, s pb.TensorService_StreamTensorsServer) error {
					x := send(call, "x")
					tc.spoil(x)
					return x.to(s)
				}}
				c := beguile(t, r, client.Config{Codec: codec.LZ4, ResultBytes: 1 << 30, StallTimeout: time.Second})
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				defer cancel()
				asked := []string{}
				list, err := c.Pull(ctx, client.PullRequest{
					Select: []client.Selection{{Name: "x"}},
					To: func(name string, _ tensor.Desc) (client.Sink, error) {
						asked = append(asked, name)
						return client.Sink{}, nil
					},
				})
				for _, name := range asked {
					require.Equal(t, "x", name, "the caller is asked for what it selected, and nothing else")
				}
				require.Error(t, err)
				for _, s := range list {
					require.Error(t, s.Err)
					require.Nil(t, s.Data, "no bytes of a tensor that failed")
					require.Contains(t, []string{"x", ""}, s.Name)
				}
				if len(list) > 0 {
					err = list[0].Err
				}
				require.Equal(t, tc.code, status.Code(err), err)
				require.ErrorContains(t, err, tc.says)
				require.LessOrEqual(t, len(err.Error()), 8<<10)
			})
		})
	}
}

// failure gives the tensor up after its first chunk.
func (x *sent) failure(f *pb.Failure) {
	f.TensorId = x.desc.TensorId
	x.extra, x.chunks = []*pb.Frame{{Failures: []*pb.Failure{f}}}, x.chunks[:1]
}

func TestWhatAServerMayDoInAPullIsTaken(t *testing.T) {
	testkit.Start(t)
	for name, change := range map[string]func(x *sent){
		"as it should be":             func(*sent) {},
		"chunks in another order":     func(x *sent) { x.chunks[0], x.chunks[2] = x.chunks[2], x.chunks[0] },
		"a chunk twice":               func(x *sent) { x.chunks = append(x.chunks[:2:2], x.chunks[1], x.chunks[2]) },
		"late chunks":                 func(x *sent) { x.chunks = append(x.chunks, x.chunks...) },
		"an equal desc again":         func(x *sent) { x.extra = []*pb.Frame{{Descs: []*pb.TensorDesc{x.desc}}} },
		"an empty frame":              func(x *sent) { x.extra = []*pb.Frame{{}} },
		"a late failure":              func(x *sent) { x.extra = []*pb.Frame{{Failures: []*pb.Failure{{TensorId: x.desc.TensorId, Code: 13}}}} },
		"a summary before the chunks": func(x *sent) { x.early = true },
		"a summary twice":             func(x *sent) { x.extra = []*pb.Frame{{Summaries: []*pb.Summary{x.sum}}} },
		"summaries that contradict": func(x *sent) {
			x.extra = []*pb.Frame{{Summaries: []*pb.Summary{x.sum, {TensorId: x.desc.TensorId, Code: 13}}}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			c := beguile(t, &rogue{get: func(call *pb.Call, s pb.TensorService_StreamTensorsServer) error {
				x := send(call, "dir/x")
				change(x)
				return x.to(s)
			}}, client.Config{})
			list, err := c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "dir/*"}}})
			require.NoError(t, err)
			require.Len(t, list, 1)
			require.Equal(t, "dir/x", list[0].Name)
			require.Equal(t, "0123456789", string(list[0].Data))
		})
	}
}

func TestASelectionThatTheServerForgetsFails(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		selected, told, forgotten []string
	}{
		"the only one":         {[]string{"x"}, nil, []string{"x"}},
		"a glob":               {[]string{"x*"}, nil, []string{"x*"}},
		"a glob, answered":     {[]string{"x*"}, []string{"x1", "x2"}, nil},
		"the last":             {[]string{"x", "y"}, []string{"x"}, []string{"y"}},
		"the first":            {[]string{"x", "y"}, []string{"y"}, []string{"x"}},
		"one of two alike":     {[]string{"x", "x"}, []string{"x"}, []string{"x"}},
		"a name after a glob":  {[]string{"*", "x"}, []string{"x"}, []string{"x"}},
		"a glob after a name":  {[]string{"x", "*"}, []string{"x"}, []string{"*"}},
		"both came":            {[]string{"x", "*"}, []string{"x", "x", "y"}, nil},
		"a backslash no glob":  {[]string{`\x`}, []string{`\x`}, nil},
		"a name like a glob":   {[]string{"[x]"}, []string{"[x]"}, nil},
		"all, and nothing hid": {[]string{"y", "x"}, []string{"y", "x"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			c := beguile(t, &rogue{get: func(call *pb.Call, s pb.TensorService_StreamTensorsServer) error {
				for _, n := range tc.told {
					if err := send(call, n).to(s); err != nil {
						return err
					}
				}
				return nil
			}}, client.Config{})
			var r client.PullRequest
			for _, n := range tc.selected {
				r.Select = append(r.Select, client.Selection{Name: n})
			}
			list, err := c.Pull(t.Context(), r)
			require.Equal(t, len(tc.forgotten) > 0, err != nil, "%v", err)
			var failed []string
			for _, s := range list {
				if s.Err != nil {
					require.Equal(t, codes.DataLoss, status.Code(s.Err), s.Err)
					failed = append(failed, s.Name)
				}
			}
			require.Equal(t, tc.forgotten, failed)
		})
	}
}

func TestWhatAServerSaysInAPullIsKeptInBounds(t *testing.T) {
	testkit.Start(t)
	flood := func(what func(call []byte) *pb.Frame) *rogue {
		return &rogue{get: func(call *pb.Call, s pb.TensorService_StreamTensorsServer) error {
			for {
				if err := s.Send(what(call.Id)); err != nil {
					return err
				}
			}
		}}
	}
	text := strings.Repeat("z", 5_000)
	summaries := func(name, text string) *rogue {
		return flood(func(call []byte) *pb.Frame {
			f := &pb.Frame{}
			for range 30_000 / (len(name) + len(text) + 100) { // as many as a frame has room for
				f.Summaries = append(f.Summaries, &pb.Summary{TensorId: newID(), Name: name, Code: 5, Message: text, CallId: call})
			}
			return f
		})
	}
	descs := flood(func(call []byte) *pb.Frame {
		return &pb.Frame{Descs: []*pb.TensorDesc{{TensorId: newID(), Dtype: 12, Shape: make([]int64, 50_000), Name: "x", CallId: call}}}
	})
	for name, tc := range map[string]struct {
		server *rogue
		glob   string
		most   int
	}{
		"summaries of a name":         {summaries("x", text), "x", 1},
		"summaries of a glob":         {summaries("x", text[:300]), "*", 1 << 16},
		"summaries under a long name": {summaries(text[:600], ""), "*", 1 << 16},
		"descs of a name":             {descs, "x", 1},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			list, err := beguile(t, tc.server, client.Config{}).Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: tc.glob}}})
			require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
			require.Len(t, list, tc.most)
			kept := 0
			for _, s := range list {
				require.Error(t, s.Err)
				require.LessOrEqual(t, len(s.Name), 512)
				var e *client.Error
				require.ErrorAs(t, s.Err, &e)
				require.LessOrEqual(t, len(e.Message), 4<<10+100)
				kept += len(e.Message)
			}
			require.LessOrEqual(t, kept, mib+100*tc.most)
		})
	}
}

func TestAListThatDoesNotEndIsRefused(t *testing.T) {
	testkit.Start(t)
	long := strings.Repeat("f", 4000)
	for name, tc := range map[string]struct {
		tensors int
		file    string
		code    codes.Code
		spoil   func(*pb.StoredTensor)
	}{
		"tensors without end":              {tensors: 8000, code: codes.ResourceExhausted},
		"bytes without end":                {tensors: 200, file: long, code: codes.ResourceExhausted},
		"a data type that has no room":     {1, "", codes.Internal, func(s *pb.StoredTensor) { s.Dtype = 300 }},
		"a negative data type":             {1, "", codes.Internal, func(s *pb.StoredTensor) { s.Dtype = -3 }},
		"more axes than a tensor may have": {1, "", codes.Internal, func(s *pb.StoredTensor) { s.Shape = make([]int64, 33) }},
		"a name that no tensor may have":   {1, "", codes.Internal, func(s *pb.StoredTensor) { s.Name = long }},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			page := &pb.ListTensorsResponse{}
			for range tc.tensors {
				s := &pb.StoredTensor{Name: "x", Dtype: 12, File: tc.file}
				if tc.spoil != nil {
					tc.spoil(s)
				}
				page.Tensors = append(page.Tensors, s)
			}
			pages := 0
			c := beguile(t, &rogue{list: func(*pb.ListTensorsRequest) *pb.ListTensorsResponse {
				pages++
				page.NextPageToken = fmt.Sprintf("%012d", pages)
				return page
			}}, client.Config{})
			_, _, err := c.List(t.Context(), "")
			require.Equal(t, tc.code, status.Code(err), err)
			require.LessOrEqual(t, len(err.Error()), 500)
		})
	}
}

func TestAServerThatMovesNothingEndsATransfer(t *testing.T) {
	testkit.Start(t)
	silent := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	again := func(s pb.TensorService_StreamTensorsServer, f *pb.Frame) error {
		tick := time.NewTicker(time.Millisecond) // time stands still while somebody works
		defer tick.Stop()
		for ; ; <-tick.C {
			if err := s.Send(f); err != nil {
				return err
			}
		}
	}
	for name, pull := range map[string]func(x *sent, s pb.TensorService_StreamTensorsServer) error{
		"that says nothing": func(_ *sent, s pb.TensorService_StreamTensorsServer) error { return silent(s.Context()) },
		"in a tensor of a TiB": func(x *sent, s pb.TensorService_StreamTensorsServer) error {
			x.huge(1 << 40)
			return errors.Join(x.to(s), silent(s.Context()))
		},
		"before the summary": func(x *sent, s pb.TensorService_StreamTensorsServer) error {
			x.sum = nil
			return errors.Join(x.to(s), silent(s.Context()))
		},
		"and sends a chunk for ever": func(x *sent, s pb.TensorService_StreamTensorsServer) error {
			x.chunks, x.sum = x.chunks[:1], nil
			return errors.Join(x.to(s), again(s, &pb.Frame{Chunk: x.chunks[0]}))
		},
	} {
		t.Run("a pull, "+name, func(t *testing.T) {
			testkit.Start(t)
			bubble(t, func(t *testing.T) {
				c := beguile(t, &rogue{get: func(call *pb.Call, s pb.TensorService_StreamTensorsServer) error {
					return pull(send(call, "x"), s)
				}}, client.Config{StallTimeout: 50 * time.Millisecond})
				list, err := c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "x"}}, To: func(string, tensor.Desc) (client.Sink, error) {
					return client.Writer(func(tensor.Desc) (io.Writer, error) { return io.Discard, nil }), nil
				}})
				require.Equal(t, codes.DeadlineExceeded, status.Code(err), err)
				require.ErrorContains(t, err, "StallTimeout")
				for _, s := range list {
					require.ErrorContains(t, s.Err, "StallTimeout")
				}
			})
		})
	}
	for name, push := range map[string]func(first *pb.Frame, s pb.TensorService_StreamTensorsServer) error{
		"that reads nothing": func(_ *pb.Frame, s pb.TensorService_StreamTensorsServer) error { return silent(s.Context()) },
		"that does not answer": func(_ *pb.Frame, s pb.TensorService_StreamTensorsServer) error {
			for {
				if _, err := s.Recv(); err != nil {
					return silent(s.Context())
				}
			}
		},
	} {
		t.Run("a push, "+name, func(t *testing.T) {
			testkit.Start(t)
			bubble(t, func(t *testing.T) {
				c := beguile(t, &rogue{put: push},
					client.Config{StallTimeout: 200 * time.Millisecond})
				in := client.Input{Name: "x", Desc: int8s(20 * mib), Data: make([]byte, 20*mib)}
				_, err := c.Push(t.Context(), client.PushRequest{Tensors: []client.Input{in}})
				require.Equal(t, codes.DeadlineExceeded, status.Code(err), err)
				require.ErrorContains(t, err, "StallTimeout")
			})
		})
	}
}

func TestAPullThatStallsEndsWithItsContext(t *testing.T) {
	testkit.Start(t)
	begun := make(chan struct{}, 2)
	c := beguile(t, &rogue{get: func(call *pb.Call, s pb.TensorService_StreamTensorsServer) error {
		x := send(call, "x")
		x.sum, x.chunks = nil, x.chunks[:1]
		err := x.to(s)
		begun <- struct{}{}
		<-s.Context().Done()
		return err
	}}, client.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-begun; cancel() }()
	list, err := c.Pull(ctx, client.PullRequest{Select: []client.Selection{{Name: "x"}}})
	require.Equal(t, codes.Canceled, status.Code(err), err)
	for _, s := range list {
		require.Error(t, s.Err)
	}
}

func TestABadAnswerToAPushIsNeverTakenForAGoodOne(t *testing.T) {
	testkit.Start(t)
	data := []byte("0123456789")
	good := digestOf(data)
	drain := func(f *pb.Frame, s pb.TensorService_StreamTensorsServer) (id []byte, err error) {
		for ; err == nil; f, err = s.Recv() {
			for _, d := range f.Descs {
				id = d.TensorId
			}
			if len(f.Ends) > 0 {
				return id, nil
			}
		}
		return nil, err
	}
	answer := func(say func(id []byte) []*pb.Summary) func(*pb.Frame, pb.TensorService_StreamTensorsServer) error {
		return func(first *pb.Frame, s pb.TensorService_StreamTensorsServer) error {
			id, err := drain(first, s)
			if err != nil {
				return err
			}
			f := &pb.Frame{Summaries: say(id)}
			for _, s := range f.Summaries {
				s.CallId = first.Calls[0].Id
			}
			return s.Send(f)
		}
	}
	for name, tc := range map[string]struct {
		push func(*pb.Frame, pb.TensorService_StreamTensorsServer) error
		code codes.Code
		says string
	}{
		"no summary":        {answer(func([]byte) []*pb.Summary { return nil }), codes.Internal, "without mentioning a tensor"},
		"of another tensor": {answer(func([]byte) []*pb.Summary { return []*pb.Summary{{TensorId: newID(), Digest: good[:]}} }), codes.Internal, "without mentioning a tensor"},
		"no digest":         {answer(func(id []byte) []*pb.Summary { return []*pb.Summary{{TensorId: id}} }), codes.DataLoss, "the client sent"},
		"another digest":    {answer(func(id []byte) []*pb.Summary { return []*pb.Summary{{TensorId: id, Digest: id}} }), codes.DataLoss, "the client sent"},
		"half a digest":     {answer(func(id []byte) []*pb.Summary { return []*pb.Summary{{TensorId: id, Digest: id[:8]}} }), codes.InvalidArgument, "digest"},
		"an id of 3 bytes":  {answer(func(id []byte) []*pb.Summary { return []*pb.Summary{{TensorId: id[:3], Digest: good[:]}} }), codes.InvalidArgument, "tensor_id"},
		"no, and then yes": {answer(func(id []byte) []*pb.Summary {
			return []*pb.Summary{{TensorId: id, Code: 8, Message: "full"}, {TensorId: id, Digest: good[:]}}
		}), codes.ResourceExhausted, "full"},
		"a code of nobody's": {answer(func(id []byte) []*pb.Summary { return []*pb.Summary{{TensorId: id, Code: 1 << 31, Digest: good[:]}} }), codes.Unknown, ""},
		"too long an answer": {answer(func(id []byte) []*pb.Summary {
			return []*pb.Summary{{TensorId: id, Digest: good[:], Message: strings.Repeat("m", 9*mib)}}
		}), codes.ResourceExhausted, "larger than max"},
		"an error": {func(*pb.Frame, pb.TensorService_StreamTensorsServer) error {
			return status.Error(codes.PermissionDenied, "not you")
		}, codes.PermissionDenied, "not you"},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			c := beguile(t, &rogue{put: tc.push}, client.Config{})
			for _, in := range []client.Input{{Data: data}, {Reader: bytes.NewReader(data)}} {
				in.Name, in.Desc = "x", int8s(10)
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				list, err := c.Push(ctx, client.PushRequest{Tensors: []client.Input{in}})
				cancel()
				require.Error(t, err)
				require.Len(t, list, 1)
				require.Error(t, list[0].Err)
				require.Equal(t, tc.code, status.Code(list[0].Err), err)
				require.ErrorContains(t, list[0].Err, tc.says)
			}
		})
	}
}

func TestASummaryThatLiesAboutOneOfManyIsNotTheOthers(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		c := beguile(t, &rogue{get: func(call *pb.Call, s pb.TensorService_StreamTensorsServer) error {
			for i := 19; i >= 0; i-- {
				x := send(call, fmt.Sprintf("t%02d", i))
				if i%3 == 1 {
					x.sum.Digest[0] ^= 1
				}
				if i%3 == 2 {
					x.chunks[2].Data = []byte("!!")
				}
				if err := x.to(s); err != nil {
					return err
				}
			}
			return nil
		}}, client.Config{})
		list, err := c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "t*"}}})
		require.Error(t, err)
		require.Len(t, list, 20)
		for i, s := range list {
			require.Equal(t, fmt.Sprintf("t%02d", i), s.Name, "they are sorted")
			require.Equal(t, i%3 == 0, s.Err == nil, "%v", s.Err)
		}
	})
}
