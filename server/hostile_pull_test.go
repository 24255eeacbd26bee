package server_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pierrec/lz4/v4"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/store/storetest"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// pulled is what came of a pull, checked chunk by chunk with nothing but the proto.
type pulled struct {
	hello     *pb.Hello
	descs     map[string]*pb.TensorDesc // by tensor
	data      map[string][]byte         // by tensor
	chunks    map[string][]uint32       // that came, by tensor
	summaries []*pb.Summary
	status    *status.Status
}

// greeting is the hello of a pull.
func greeting(id []byte) *pb.Hello {
	return &pb.Hello{Version: 1, SessionId: id, MaxChunkBytes: mib, Checksum: pb.Checksum_CHECKSUM_CRC32C}
}

// pullAll pulls selections to the end.
func pullAll(t testing.TB, f *fixture, list ...*pb.Selection) *pulled {
	t.Helper()
	return pullWith(t, f, &pb.PullTensorsRequest{Hello: greeting(newID()), Selections: list})
}

func pullWith(t testing.TB, f *fixture, req *pb.PullTensorsRequest) *pulled {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), rawLife)
	defer cancel()
	s, err := pb.NewTensorServiceClient(f.dial(t)).PullTensors(ctx, req)
	require.NoError(t, err)
	p := &pulled{descs: map[string]*pb.TensorDesc{}, data: map[string][]byte{}, chunks: map[string][]uint32{}}
	for {
		frame, err := s.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			p.status = status.Convert(err)
			return p
		}
		p.take(t, frame)
	}
}

// take keeps the book of one frame.
func (p *pulled) take(t testing.TB, f *pb.Frame) {
	t.Helper()
	require.Equal(t, p.hello == nil, f.Hello != nil, "hello comes first, and once")
	if f.Hello != nil {
		p.hello = f.Hello
	}
	require.Empty(t, f.Calls)
	require.Empty(t, f.Credits)
	require.Empty(t, f.Acks)
	require.Empty(t, f.Dones)
	for _, d := range f.Descs {
		require.NotContains(t, p.descs, string(d.TensorId))
		p.descs[string(d.TensorId)] = d
		p.data[string(d.TensorId)] = make([]byte, d.SizeBytes)
	}
	if c := f.Chunk; c != nil {
		id := string(c.TensorId)
		d := p.descs[id]
		require.NotNil(t, d, "a chunk before its desc")
		require.Equal(t, sealed(c.TensorId, c.Index, c.Data).Checksum, c.Checksum)
		off := int(c.Index) * int(d.ChunkBytes)
		place := p.data[id][off:min(off+int(d.ChunkBytes), len(p.data[id]))]
		if c.Codec == pb.Codec_CODEC_LZ4 {
			require.Less(t, len(c.Data), len(place))
			n, err := lz4.UncompressBlock(c.Data, place)
			require.NoError(t, err)
			require.Len(t, place, n)
		} else {
			require.Len(t, c.Data, len(place))
			copy(place, c.Data)
		}
		require.NotContains(t, p.chunks[id], c.Index)
		p.chunks[id] = append(p.chunks[id], c.Index)
	}
	p.summaries = append(p.summaries, f.Summaries...)
}

// summary is the only one of its name.
func (p *pulled) summary(t testing.TB, name string) *pb.Summary {
	t.Helper()
	require.NoError(t, p.status.Err())
	var found *pb.Summary
	for _, s := range p.summaries {
		if s.GetName() == name {
			require.Nil(t, found, "%q ended twice", name)
			found = s
		}
	}
	require.NotNil(t, found, "no summary of %q", name)
	return found
}

// whole writes a file of one tensor.
func whole(t testing.TB, path, name string, data []byte) {
	t.Helper()
	file, err := os.Create(path)
	require.NoError(t, err)
	desc := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(len(data))}}
	require.NoError(t, tensorfile.WriteSafetensors(file, []tensorfile.Named{{Name: name, Tensor: tensor.Tensor{Desc: desc, Data: data}}}, nil))
	require.NoError(t, file.Close())
}

func TestABadPullIsRefusedBeforeAnythingIsSent(t *testing.T) {
	testkit.Start(t)
	m := shelf(t, 16*mib)
	storetest.Put(t, m, "x", testkit.Bytes(3*mib, 1))
	f := serve(t, func(c *server.Config) { c.Store = m })
	const invalid, exhausted = codes.InvalidArgument, codes.ResourceExhausted
	x := func(change func(s *pb.Selection)) func(r *pb.PullTensorsRequest) {
		return func(r *pb.PullTensorsRequest) { change(r.Selections[0]) }
	}
	held := func(list ...uint64) func(r *pb.PullTensorsRequest) {
		return x(func(s *pb.Selection) {
			for i := 0; i < len(list); i += 2 {
				s.Held = append(s.Held, &pb.Range{Offset: list[i], Length: list[i+1]})
			}
		})
	}
	many := func(n int) func(r *pb.PullTensorsRequest) {
		return func(r *pb.PullTensorsRequest) {
			for len(r.Selections) < n {
				r.Selections = append(r.Selections, &pb.Selection{Name: "y"})
			}
		}
	}
	for name, tc := range map[string]struct {
		change func(r *pb.PullTensorsRequest)
		code   codes.Code
		says   []string
	}{
		"no hello":             {func(r *pb.PullTensorsRequest) { r.Hello = nil }, invalid, []string{"hello.session_id"}},
		"another version":      {func(r *pb.PullTensorsRequest) { r.Hello.Version = 2 }, codes.FailedPrecondition, []string{"version 2", "speaks 1"}},
		"no checksum":          {func(r *pb.PullTensorsRequest) { r.Hello.Checksum = 0 }, invalid, []string{"checksum kind 0"}},
		"an unknown checksum":  {func(r *pb.PullTensorsRequest) { r.Hello.Checksum = 1 << 20 }, invalid, []string{"checksum kind 0"}},
		"no id":                {func(r *pb.PullTensorsRequest) { r.Hello.SessionId = nil }, invalid, []string{"16 bytes", "0 bytes"}},
		"an id of zeros":       {func(r *pb.PullTensorsRequest) { r.Hello.SessionId = make([]byte, 16) }, invalid, []string{"zeros"}},
		"no selection":         {func(r *pb.PullTensorsRequest) { r.Selections = nil }, invalid, []string{"selections", "name a tensor"}},
		"1025 selections":      {many(1025), exhausted, []string{"1025", "1024", "several"}},
		"no name":              {x(func(s *pb.Selection) { s.Name = "" }), invalid, []string{"selections[0]", "name", "empty"}},
		"a name of 513 bytes":  {x(func(s *pb.Selection) { s.Name = strings.Repeat("n", 513) }), invalid, []string{"513", "512"}},
		"a name with a bell":   {x(func(s *pb.Selection) { s.Name = "\a" }), invalid, []string{"control"}},
		"params of no source":  {x(func(s *pb.Selection) { s.Params = map[string]string{"a": "b"} }), invalid, []string{"params", "sources"}},
		"65 params":            {x(func(s *pb.Selection) { s.Source, s.Params = true, entriesOf(65, 3, 1) }), invalid, []string{"65", "64"}},
		"a key of 129 bytes":   {x(func(s *pb.Selection) { s.Source, s.Params = true, entriesOf(1, 129, 1) }), invalid, []string{"129", "128"}},
		"a value of 4097":      {x(func(s *pb.Selection) { s.Source, s.Params = true, entriesOf(1, 1, 4097) }), invalid, []string{"4097", "4096"}},
		"params over 32 KiB":   {x(func(s *pb.Selection) { s.Source, s.Params = true, entriesOf(9, 1, 4096) }), invalid, []string{"32768"}},
		"a digest of 15 bytes": {x(func(s *pb.Selection) { s.HeldDigest = make([]byte, 15) }), invalid, []string{"held_digest", "15", "16"}},
		"an empty range":       {held(0, 0), invalid, []string{"held[0]", "[0,+0)"}},
		"ranges that overlap":  {held(0, 10, 9, 5), invalid, []string{"held[1]", "[9,+5)", "overlap"}},
		"ranges that descend":  {held(100, 10, 0, 5), invalid, []string{"held[1]", "ascend"}},
		"a range past 2^63":    {held(1, 1<<63-1), invalid, []string{"held[0]", "2^63"}},
		"a range from 2^63":    {held(1<<63, 1), invalid, []string{"held[0]"}},
		"a range past 2^64":    {held(1<<62, 1<<64-1), invalid, []string{"held[0]"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := &pb.PullTensorsRequest{Hello: greeting(newID()), Selections: []*pb.Selection{{Name: "x"}}}
			tc.change(r)
			p := pullWith(t, f, r)
			require.Equal(t, tc.code, p.status.Code(), p.status.Message())
			saysWhy(t, p.status.Message(), tc.says)
			require.Nil(t, p.hello)
			f.isEmpty(t)
		})
	}
	t.Run("a request over the receive limit", func(t *testing.T) {
		r := &pb.PullTensorsRequest{Hello: greeting(newID()), Selections: []*pb.Selection{{Name: "x"}}}
		for range 200_000 {
			r.Selections[0].Held = append(r.Selections[0].Held, &pb.Range{Offset: 1 << 40, Length: 1})
		}
		require.Equal(t, exhausted, pullWith(t, f, r).status.Code())
	})
	t.Run("1024 selections", func(t *testing.T) {
		r := &pb.PullTensorsRequest{Hello: greeting(newID()), Selections: []*pb.Selection{{Name: "x"}}}
		many(1024)(r)
		p := pullWith(t, f, r)
		require.NoError(t, p.status.Err())
		require.Len(t, p.summaries, 1024)
		require.Zero(t, p.summaries[0].GetCode())
		require.Equal(t, codes.NotFound, codes.Code(p.summaries[1023].GetCode()))
	})
}

func TestABadSelectionFailsAloneAndSaysWhy(t *testing.T) {
	testkit.Start(t)
	s, dir := inFolder(t)
	storetest.Put(t, s, "x", testkit.Bytes(3*mib, 1))
	storetest.Put(t, s, "tiny", make([]byte, 2<<20))
	var sources store.Sources
	require.NoError(t, sources.Add("gen", store.Generator()))
	require.NoError(t, sources.Add("boom", func(context.Context, map[string]string) (store.Reader, error) { panic(dir) }))
	require.NoError(t, sources.Add("broken", func(context.Context, map[string]string) (store.Reader, error) {
		return nil, fmt.Errorf("open %s/secret: no such file", dir)
	}))
	f := serve(t, func(c *server.Config) { c.Store, c.Sources = s, &sources })
	gen := func(params ...string) *pb.Selection {
		sel := &pb.Selection{Name: "gen", Source: true, Params: map[string]string{"shape": "10"}}
		for i := 0; i < len(params); i += 2 {
			sel.Params[params[i]] = params[i+1]
		}
		return sel
	}
	const invalid = codes.InvalidArgument
	for name, tc := range map[string]struct {
		sel   *pb.Selection
		chunk uint32 // of hello; 0: 1 MiB
		code  codes.Code
		says  []string
	}{
		"an unknown tensor":           {&pb.Selection{Name: "nothing"}, 0, codes.NotFound, []string{`"nothing"`}},
		"an unknown source":           {&pb.Selection{Name: "nobody", Source: true}, 0, codes.NotFound, []string{`source "nobody"`}},
		"a tensor's name as a source": {&pb.Selection{Name: "x", Source: true}, 0, codes.NotFound, []string{`source "x"`}},
		"a glob that matches nothing": {&pb.Selection{Name: "y*"}, 0, codes.NotFound, []string{`no tensor matches "y*"`}},
		"a malformed glob":            {&pb.Selection{Name: "[x"}, 0, invalid, []string{`"[x"`, "bad pattern"}},
		"a name that is a path":       {&pb.Selection{Name: "../../etc/passwd"}, 0, codes.NotFound, []string{"../../etc/passwd"}},
		"an unknown parameter":        {gen("speed", "9"), 0, invalid, []string{`"speed"`, "known are"}},
		"an unknown data type":        {gen("dtype", "float31"), 0, invalid, []string{`"float31"`}},
		"a shape that is none":        {gen("shape", "2,x"), 0, invalid, []string{`"x"`}},
		"a shape that overflows":      {gen("shape", "1099511627776,1099511627776"), 0, codes.ResourceExhausted, []string{"2^63"}},
		"a source that panics":        {&pb.Selection{Name: "boom", Source: true}, 0, codes.Internal, nil},
		"a source that fails":         {&pb.Selection{Name: "broken", Source: true}, 0, codes.Internal, nil},
		"too many chunks":             {&pb.Selection{Name: "tiny"}, 1, codes.ResourceExhausted, []string{"2097152 chunks", "1048576", "larger chunks"}},
	} {
		t.Run(name, func(t *testing.T) {
			h := greeting(newID())
			if tc.chunk > 0 {
				h.MaxChunkBytes = tc.chunk
			}
			rest := &pb.Selection{Name: "gen", Source: true, Params: map[string]string{"shape": "1000", "seed": "7"}}
			p := pullWith(t, f, &pb.PullTensorsRequest{Hello: h, Selections: []*pb.Selection{tc.sel, rest}})
			require.NoError(t, p.status.Err())
			require.Len(t, p.summaries, 2)
			bad, good := p.summaries[0], p.summaries[1]
			require.Equal(t, tc.code, codes.Code(bad.GetCode()), bad.GetMessage())
			if tc.code == codes.Internal { // the log has the rest
				require.Equal(t, "internal error", bad.GetMessage())
			} else {
				saysWhy(t, bad.GetMessage(), tc.says)
			}
			require.NotContains(t, bad.GetMessage(), dir)
			require.Empty(t, bad.GetDigest())
			require.Zero(t, good.GetCode())
			require.Equal(t, digest(p.data[string(good.GetTensorId())]), good.GetDigest())
			require.Len(t, f.transfer(t, h.SessionId).GetTensors(), 2)
			f.isEmpty(t)
		})
	}
}

func TestHeldRangesAreNotSentAndNothingElseIsLeftOut(t *testing.T) {
	testkit.Start(t)
	m := shelf(t, 16*mib)
	data := testkit.Bytes(10*1024+1, 1)
	storetest.Put(t, m, "x", data)
	storetest.Put(t, m, "empty", nil)
	f := serve(t, func(c *server.Config) { c.Store = m })
	all := []uint32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	const last = 10 * 1024 // the only byte of the last chunk
	for name, tc := range map[string]struct {
		held   []uint64
		digest []byte
		want   []uint32
	}{
		"nothing":                  {nil, nil, all},
		"all":                      {[]uint64{0, last + 1}, nil, nil},
		"all, in two":              {[]uint64{0, 512, 512, last}, nil, all[:1]}, // a chunk lies in one range
		"past the end":             {[]uint64{0, 1<<63 - 1}, nil, nil},
		"beyond the end":           {[]uint64{1 << 62, 1<<62 - 1}, nil, all},
		"all but a byte":           {[]uint64{0, last}, nil, all[10:]},
		"the last byte":            {[]uint64{last, 1}, nil, all[:10]},
		"a byte less than a chunk": {[]uint64{0, 1023}, nil, all},
		"a chunk":                  {[]uint64{1024, 1024}, nil, []uint32{0, 2, 3, 4, 5, 6, 7, 8, 9, 10}},
		"every other chunk": {
			[]uint64{0, 1024, 2048, 1024, 4096, 1024, 6144, 1024, 8192, 1024}, nil, []uint32{1, 3, 5, 7, 9, 10},
		},
		"all, of this tensor":    {[]uint64{0, last + 1}, digest(data), nil},
		"all, of another tensor": {[]uint64{0, last + 1}, digest(data[1:]), all},
	} {
		t.Run(name, func(t *testing.T) {
			sel := &pb.Selection{Name: "x", HeldDigest: tc.digest}
			for i := 0; i < len(tc.held); i += 2 {
				sel.Held = append(sel.Held, &pb.Range{Offset: tc.held[i], Length: tc.held[i+1]})
			}
			h := greeting(newID())
			h.MaxChunkBytes = 1024
			p := pullWith(t, f, &pb.PullTensorsRequest{Hello: h, Selections: []*pb.Selection{sel}})
			s := p.summary(t, "x")
			require.Zero(t, s.GetCode())
			require.Equal(t, digest(data), s.GetDigest(), "of all bytes, held or not")
			require.Len(t, p.descs, 1)
			require.Equal(t, tc.want, p.chunks[string(s.GetTensorId())])
		})
	}
	p := pullAll(t, f, &pb.Selection{Name: "empty", Held: []*pb.Range{{Offset: 0, Length: 10}}})
	require.Equal(t, []uint32{0}, p.chunks[string(p.summary(t, "empty").GetTensorId())], "nobody holds the chunk of no bytes")
}

func TestAPullWithoutAStoreSaysSo(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	s := pullAll(t, f, &pb.Selection{Name: "x"}).summary(t, "x")
	require.Equal(t, codes.FailedPrecondition, codes.Code(s.GetCode()))
	saysWhy(t, s.GetMessage(), []string{"no store"})
}

func TestAFileThatIsDamagedFailsItsTensorsAlone(t *testing.T) {
	testkit.Start(t)
	s, dir := inFolder(t)
	path := filepath.Join(dir, "model.safetensors")
	whole(t, path, "w", testkit.Bytes(4*mib, 1))
	storetest.Put(t, s, "x", []byte("abc"))
	f := serve(t, func(c *server.Config) { c.Store = s })
	both := []*pb.Selection{{Name: "model/w"}, {Name: "x"}}
	require.Zero(t, pullAll(t, f, both...).summary(t, "model/w").GetCode())
	require.NoError(t, os.Truncate(path, 4096))
	p := pullAll(t, f, both...)
	bad := p.summary(t, "model/w")
	require.Equal(t, codes.NotFound, codes.Code(bad.GetCode()), "what is left is no file of tensors")
	saysWhy(t, bad.GetMessage(), []string{"model/w"})
	require.Zero(t, p.summary(t, "x").GetCode())
	// What a transfer says about the whole folder stays here.
	p = pullAll(t, f, &pb.Selection{Name: "*"})
	require.NoError(t, p.status.Err())
	for _, s := range p.summaries {
		require.NotContains(t, s.GetMessage(), dir)
	}
}

// stall pulls, reads the first frames, and then nothing.
func stall(t testing.TB, f *fixture, req *pb.PullTensorsRequest, opts ...grpc.DialOption) grpc.ServerStreamingClient[pb.Frame] {
	t.Helper()
	// A window of grpc's own that does not grow.
	opts = append(opts, reach, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithInitialWindowSize(64<<10), grpc.WithInitialConnWindowSize(mib))
	conn, err := grpc.NewClient(f.addr, opts...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	s, err := pb.NewTensorServiceClient(conn).PullTensors(t.Context(), req)
	require.NoError(t, err)
	_, err = s.Recv()
	require.NoError(t, err)
	return s
}

func TestAPullThatNobodyReadsEndsAndGivesEverythingBack(t *testing.T) {
	testkit.Start(t)
	const idle = 200 * time.Millisecond
	m := shelf(t, 64*mib)
	data := testkit.Bytes(32*mib, 1)
	storetest.Put(t, m, "x", data)
	var sources store.Sources
	require.NoError(t, sources.Add("gen", store.Generator()))
	log := &notes{}
	f := serve(t, func(c *server.Config) {
		c.Store, c.Sources, c.Log, c.Session.ChunkIdle = m, &sources, log.log(), stream.Instant(idle)
	})
	gen := &pb.Selection{Name: "gen", Source: true, Params: map[string]string{"shape": "100000000", "dtype": "uint8"}}
	for name, sel := range map[string]*pb.Selection{"memory": {Name: "x"}, "a source": gen} {
		t.Run(name, func(t *testing.T) {
			id := newID()
			s := stall(t, f, &pb.PullTensorsRequest{Hello: greeting(id), Selections: []*pb.Selection{sel}})
			state := f.transfer(t, id)
			require.Equal(t, codes.DeadlineExceeded, codes.Code(state.GetCode()))
			saysWhy(t, state.GetMessage(), []string{"not read", "pull again"})
			// grpc keeps what is queued behind a closed window: the connection goes.
			testkit.Eventually(t, func() bool { return strings.Contains(log.String(), "does not read") }, "the connection's end")
			storetest.Remove(t, m, "x")
			testkit.Eventually(t, func() bool { used, _ := m.Used(); return used == 0 }, "what was not read to be free")
			storetest.Put(t, m, "x", data)
			f.isEmpty(t)
			err := error(nil)
			for err == nil {
				_, err = s.Recv()
			}
			require.NotEqual(t, codes.OK, status.Code(err))
			require.NotErrorIs(t, err, io.EOF)
		})
	}
}

func TestASlowReaderThatReadsIsServedToTheEnd(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		const idle = 200 * time.Millisecond
		m := shelf(t, 64*mib)
		data := testkit.Bytes(4*mib, 1)
		storetest.Put(t, m, "x", data)
		f := serve(t, func(c *server.Config) { c.Store, c.Session.ChunkIdle = m, stream.Instant(idle) })
		h := greeting(newID())
		h.MaxChunkBytes = 64 << 10
		s := stall(t, f, &pb.PullTensorsRequest{Hello: h, Selections: []*pb.Selection{{Name: "x"}}})
		p := &pulled{hello: h, descs: map[string]*pb.TensorDesc{}, data: map[string][]byte{}, chunks: map[string][]uint32{}}
		tick := time.NewTicker(idle / 20) // 64 frames of it take three times what doing nothing may
		defer tick.Stop()
		for {
			frame, err := s.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err)
			p.take(t, frame)
			<-tick.C
		}
		p.status = status.New(codes.OK, "")
		sum := p.summary(t, "x")
		require.Equal(t, digest(data), sum.GetDigest())
		require.True(t, bytes.Equal(data, p.data[string(sum.GetTensorId())]))
	})
}

func TestAPullCutInTheMiddleLeavesNothing(t *testing.T) {
	testkit.Start(t)
	m := shelf(t, 64*mib)
	storetest.Put(t, m, "x", testkit.Bytes(32*mib, 1))
	for name, cut := range map[string]func(f *fixture, end context.CancelFunc, px *proxy){
		"by a cancel":          func(_ *fixture, end context.CancelFunc, _ *proxy) { end() },
		"by a dead connection": func(_ *fixture, _ context.CancelFunc, px *proxy) { px.cut() },
		"by the server's end":  func(f *fixture, _ context.CancelFunc, _ *proxy) { f.server.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			bubble(t, func(t *testing.T) {
				f := serve(t, func(c *server.Config) { c.Store = m })
				px := newProxy(t, f.addr, -1)
				through := *f
				through.addr = px.addr
				ctx, end := context.WithCancel(t.Context())
				defer end()
				id := newID()
				s, err := pb.NewTensorServiceClient(through.dial(t)).PullTensors(ctx, &pb.PullTensorsRequest{Hello: greeting(id), Selections: []*pb.Selection{{Name: "x"}}})
				require.NoError(t, err)
				for range 3 {
					_, err = s.Recv()
					require.NoError(t, err)
				}
				cut(f, end, px)
				state := f.transfer(t, id)
				require.NotZero(t, state.GetCode())
				require.Len(t, state.GetTensors(), 1)
				testkit.Eventually(t, func() bool {
					used, _ := m.Used()
					return used == 32*mib
				}, "the tensor")
				storetest.Remove(t, m, "x")
				testkit.Eventually(t, func() bool { used, _ := m.Used(); return used == 0 }, "nobody to read the tensor")
				storetest.Put(t, m, "x", testkit.Bytes(32*mib, 1))
				f.isEmpty(t)
			})
		})
	}
}

// manyHeld asks for a tensor without end, of which n single bytes are held.
func manyHeld(n int) *pb.PullTensorsRequest {
	held := make([]*pb.Range, n)
	for i := range held {
		held[i] = &pb.Range{Offset: 2 * uint64(i), Length: 1}
	}
	h := greeting(newID())
	h.MaxChunkBytes = 64 << 10
	return &pb.PullTensorsRequest{Hello: h, Selections: []*pb.Selection{
		{Name: "gen", Source: true, Params: map[string]string{"shape": "4294967296", "dtype": "uint8", "fill": "zeros"}, Held: held},
	}}
}

func TestAPullKeepsFewBytesOfALargeRequest(t *testing.T) {
	testkit.Start(t)
	const pulls, ranges = 24, 15_000
	var sources store.Sources
	require.NoError(t, sources.Add("gen", store.Generator()))
	f := serve(t, func(c *server.Config) { c.Sources = &sources })
	live := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	conn, err := grpc.NewClient(f.addr, reach, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithInitialWindowSize(64<<10), grpc.WithInitialConnWindowSize(64<<10))
	require.NoError(t, err)
	defer conn.Close()
	stub := pb.NewTensorServiceClient(conn)
	open := func(ranges int) int64 {
		req := manyHeld(ranges)
		req.Hello.MaxChunkBytes = 4 << 10 // what lies unread is little
		before := live()
		for range pulls {
			req.Hello.SessionId = newID()
			s, err := stub.PullTensors(t.Context(), req)
			require.NoError(t, err)
			_, err = s.Recv()
			require.NoError(t, err)
		}
		return live() - before
	}
	few, many := open(1), open(ranges)
	// A Range of the message takes 64 bytes and a pointer.
	require.Less(t, (many-few)/(pulls*ranges), int64(32), "bytes per range")
}

func TestTheRecordOfAFailedPullKeepsTheBeginningOfItsMessages(t *testing.T) {
	testkit.Start(t)
	var sources store.Sources
	require.NoError(t, sources.Add("gen", store.Generator()))
	require.NoError(t, sources.Add("own", func(context.Context, map[string]string) (store.Reader, error) {
		return nil, fmt.Errorf("%w: %s", store.ErrParams, strings.Repeat("ö", 4096))
	}))
	f := serve(t, func(c *server.Config) { c.Sources = &sources })
	req := &pb.PullTensorsRequest{Hello: greeting(newID())}
	for range 100 {
		req.Selections = append(req.Selections,
			&pb.Selection{Name: "gen", Source: true, Params: map[string]string{"shape": strings.Repeat("\x01", 4096)}},
			&pb.Selection{Name: "own", Source: true})
	}
	require.NoError(t, pullWith(t, f, req).status.Err())
	state := f.transfer(t, req.Hello.SessionId)
	require.Len(t, state.GetTensors(), 200)
	for _, s := range state.GetTensors() {
		message := s.GetSummary().GetMessage()
		require.Contains(t, message, "bad parameters")
		require.LessOrEqual(t, len(message), 256)
		require.NotContains(t, message, "\ufffd", "cut within a character")
	}
}

// gone is a Reader of a TiB of zeros that nobody has hashed; it counts its views.
type gone struct {
	views atomic.Int64
	zeros []byte
}

func (*gone) Info() store.Info {
	return store.Info{Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{1 << 40}}}
}

func (*gone) Release() {}

func (g *gone) View(_ context.Context, _, n int64) ([]byte, store.Releaser, error) {
	g.views.Add(1)
	return g.zeros[:n], g, nil
}

// Nothing is sent, so nothing but the RPC's context tells of its end.
func TestACancelledPullOfWhatIsHeldStopsHashing(t *testing.T) {
	testkit.Start(t)
	for name, cut := range map[string]func(f *fixture, end context.CancelFunc){
		"by a cancel":         func(_ *fixture, end context.CancelFunc) { end() },
		"by the server's end": func(f *fixture, _ context.CancelFunc) { f.server.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			var sources store.Sources
			endless := &gone{zeros: make([]byte, mib)}
			require.NoError(t, sources.Add("own", func(context.Context, map[string]string) (store.Reader, error) { return endless, nil }))
			f := serve(t, func(c *server.Config) { c.Sources = &sources })
			ctx, end := context.WithCancel(t.Context())
			defer end()
			id := newID()
			s, err := pb.NewTensorServiceClient(f.dial(t)).PullTensors(ctx, &pb.PullTensorsRequest{Hello: greeting(id), Selections: []*pb.Selection{
				{Name: "own", Source: true, Held: []*pb.Range{{Offset: 0, Length: 1 << 40}}},
			}})
			require.NoError(t, err)
			_, err = s.Recv()
			require.NoError(t, err)
			testkit.Eventually(t, func() bool { return endless.views.Load() > 2 }, "the hashing of what is held")
			cut(f, end)
			require.NotZero(t, f.transfer(t, id).GetCode())
			require.Less(t, endless.views.Load(), int64(1<<20), "it was hashed to its end")
		})
	}
}

// lent counts the Readers of a store that are not released.
type lent struct {
	*memory.Store
	open atomic.Int64
}

type lentReader struct {
	store.Reader
	of *lent
}

func (l *lent) Open(ctx context.Context, name string) (store.Reader, error) {
	r, err := l.Store.Open(ctx, name)
	if err != nil {
		return nil, err
	}
	l.open.Add(1)
	return lentReader{r, l}, nil
}

func (r lentReader) Release() {
	r.of.open.Add(-1)
	r.Reader.Release()
}

func TestAPullThatPicksTooMuchKeepsNoReader(t *testing.T) {
	testkit.Start(t)
	m := &lent{Store: memory.New(testkit.Pool(t), 64*mib)}
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	for i := range 12_000 {
		storetest.Put(t, m, fmt.Sprintf("t%05d", i), []byte{1})
	}
	f := serveWithin(t, 4*mib, func(c *server.Config) { c.Store = m })
	got := pullWith(t, f, &pb.PullTensorsRequest{Hello: greeting(newID()), Selections: []*pb.Selection{{Name: "*"}}})
	require.Equal(t, codes.ResourceExhausted, got.status.Code())
	saysWhy(t, got.status.Message(), []string{"memory", "select less"})
	testkit.Eventually(t, func() bool { return m.open.Load() == 0 }, "every Reader to be released")
}

func TestMoreNamesThanARequestHasArePulledOneAfterTheOther(t *testing.T) {
	testkit.Start(t)
	m := shelf(t, 64*mib)
	f := serve(t, func(c *server.Config) { c.Store = m })
	var r client.PullRequest
	for i := range 2500 {
		name := fmt.Sprintf("%04d", i)
		r.Select = append(r.Select, client.Selection{Name: name})
		if i != 7 && i != 2222 {
			storetest.Put(t, m, name, []byte(name))
		}
	}
	c, err := client.Dial(f.addr, client.Config{})
	require.NoError(t, err)
	defer c.Close()
	got, err := c.Pull(t.Context(), r)
	require.Len(t, got, len(r.Select))
	for i, s := range got {
		require.Equal(t, r.Select[i].Name, s.Name)
		if s.Err == nil {
			require.Equal(t, s.Name, string(s.Data))
		} else {
			require.ErrorContains(t, err, s.Name)
			require.Equal(t, codes.NotFound, status.Code(s.Err))
		}
	}
	require.Error(t, got[7].Err)
	require.Error(t, got[2222].Err)
}
