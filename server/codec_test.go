package server_test

import (
	"bytes"
	"fmt"
	"runtime"
	"testing"

	"github.com/pierrec/lz4/v4"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// sparse is n bytes that lz4 halves at least: most are zero, in runs.
func sparse(n int) []byte {
	data := testkit.Bytes(n, uint64(n))
	for i := range data {
		if i/64%4 > 0 {
			data[i] = 0
		}
	}
	return data
}

// passed is how many bytes went through a proxy, both ways.
func (p *proxy) passed(budget int64) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return budget - p.left
}

func TestInLZ4FewerBytesTravelAndTheSameArrive(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	const budget = 1 << 50
	sent := map[string]int64{}
	for _, k := range []codec.Codec{codec.None, codec.LZ4} {
		for name, fill := range map[string]func(int) []byte{"sparse": sparse, "noise": func(n int) []byte { return testkit.Bytes(n, 9) }} {
			p := newProxy(t, f.addr, budget)
			c, err := client.Dial(p.addr, client.Config{Codec: k})
			require.NoError(t, err)
			for _, n := range []int{0, 1, 511, 512, 16383, 16384, 16385, mib - 1, mib, mib + 1, 2*mib + 1, 9*mib + 5} {
				x, err := tensor.Of(fill(n))
				require.NoError(t, err)
				y, err := c.Compute(t.Context(), "echo", x)
				require.NoError(t, err, "%d bytes", n)
				require.True(t, bytes.Equal(x.Data, y.Data), "%d bytes of %s in %v", n, name, k)
			}
			require.NoError(t, c.Close())
			sent[fmt.Sprint(name, " ", k)] = p.passed(budget)
		}
	}
	require.Less(t, sent["sparse lz4"], sent["sparse none"]/2, "of both ways")
	require.InEpsilon(t, sent["noise none"], sent["noise lz4"], 0.01, "what does not get shorter goes as it is")
}

// squeeze puts a chunk into LZ4, by the library alone.
func (r *raw) squeeze(c *pb.Chunk) *pb.Chunk {
	r.t.Helper()
	out := make([]byte, lz4.CompressBlockBound(len(c.Data)))
	n, err := lz4.CompressBlock(c.Data, out, nil)
	require.NoError(r.t, err)
	require.Less(r.t, n, len(c.Data))
	return r.signed(c, out[:n])
}

// signed gives a chunk in LZ4 other bytes, with their checksum.
func (r *raw) signed(c *pb.Chunk, data []byte) *pb.Chunk {
	c.Codec, c.Data, c.Checksum = pb.Codec_CODEC_LZ4, data, r.sum(c.TensorId, c.Index, data)
	return c
}

// openCoded opens a session that names codecs.
func openCoded(t testing.TB, addr string, codecs ...pb.Codec) *raw {
	r := dialRaw(t, addr)
	hello := r.greeting()
	hello.Codecs = codecs
	r.send(&pb.Frame{Hello: hello})
	r.until(func() bool { return r.hello != nil })
	require.Equal(t, []pb.Codec{pb.Codec_CODEC_LZ4}, r.hello.Codecs, "what the server decodes")
	return r
}

func TestAStockClientMaySendAndReceiveLZ4(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	for name, tc := range map[string]struct {
		codecs []pb.Codec
		coded  bool
	}{
		"lz4":                         {[]pb.Codec{pb.Codec_CODEC_LZ4}, true},
		"one of the future, then lz4": {[]pb.Codec{200, pb.Codec_CODEC_LZ4}, true},
		"one of the future":           {[]pb.Codec{200}, false},
		"none, and lz4 all the same":  {nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := openCoded(t, f.addr, tc.codecs...)
			o := offering("echo", sparse(3*100_000+17), 100_000)
			r.open(o)
			for i := range o.count() {
				r.credit(o.desc.TensorId, i+1)
				if c := r.chunk(o, i); len(c.Data) > 100 {
					r.send(&pb.Frame{Chunk: r.squeeze(c)})
				} else {
					r.send(&pb.Frame{Chunk: c})
				}
			}
			y := r.result(o)["y"]
			require.True(t, bytes.Equal(o.data, y.data))
			require.Equal(t, tc.coded, r.coded > 0, "%d chunks came in lz4", r.coded)
		})
	}
}

func TestABadChunkInACodecEndsItsCallAndTheSessionLives(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	r := openCoded(t, f.addr)
	for name, tc := range map[string]struct {
		spoil func(c *pb.Chunk)
		text  string
	}{
		"cut short":             {func(c *pb.Chunk) { r.signed(c, r.squeeze(c).Data[:len(c.Data)-1]) }, "does not decode"},
		"no block":              {func(c *pb.Chunk) { r.signed(c, bytes.Repeat([]byte{0xff}, 900)) }, "does not decode"},
		"a bomb":                {func(c *pb.Chunk) { r.signed(c, bomb(900)) }, "does not decode"},
		"empty":                 {func(c *pb.Chunk) { r.signed(c, nil) }, "has 0 bytes of lz4"},
		"as long as its place":  {func(c *pb.Chunk) { r.signed(c, c.Data) }, "its place has 1000"},
		"a codec of the future": {func(c *pb.Chunk) { c.Codec = 200 }, "codec 200"},
		"one that fits no byte": {func(c *pb.Chunk) { c.Codec = 1 << 20 }, "codec 255"},
	} {
		t.Run(name, func(t *testing.T) {
			o := offering("echo", sparse(2000), 1000)
			r.open(o)
			r.credit(o.desc.TensorId, 2)
			r.send(&pb.Frame{Chunk: r.chunk(o, 0)})
			c := r.chunk(o, 1)
			tc.spoil(c)
			r.send(&pb.Frame{Chunk: c})
			require.Equal(t, codes.InvalidArgument, codes.Code(r.failure(o.desc.TensorId).Code))
			require.Contains(t, r.failure(o.desc.TensorId).Message, tc.text)
			require.Equal(t, codes.InvalidArgument, codes.Code(r.done(o.call.Id).Code))
		})
	}
	y := r.run(offering("echo", sparse(2000), 1000))["y"]
	require.True(t, bytes.Equal(sparse(2000), y.data))
}

// bomb is a block of n bytes that makes 255 times as many zeros.
func bomb(n int) []byte {
	b := bytes.Repeat([]byte{255}, n)
	copy(b, []byte{0x1f, 0, 1, 0})
	copy(b[n-6:], []byte{0x50, 0, 0, 0, 0, 0})
	return b
}

func TestAChunkInLZ4ThatIsDamagedOnTheWayIsAskedForAgain(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	r := openCoded(t, f.addr)
	o := offering("echo", sparse(2000), 1000)
	r.open(o)
	r.credit(o.desc.TensorId, 2)
	bad := r.squeeze(r.chunk(o, 1))
	bad.Data[5] ^= 1
	for n := range 2 {
		r.send(&pb.Frame{Chunk: bad})
		r.until(func() bool { return r.resends[string(o.desc.TensorId)] == n+1 })
	}
	r.send(&pb.Frame{Chunk: r.squeeze(r.chunk(o, 1))})
	r.send(&pb.Frame{Chunk: r.squeeze(r.chunk(o, 0))})
	require.True(t, bytes.Equal(o.data, r.result(o)["y"].data))
}

// The memory to decode in is that of a few chunks, however many sessions send.
func TestSessionsThatSendLZ4ShareWhatTheyAreDecodedIn(t *testing.T) {
	testkit.Start(t)
	const sessions, size = 64, 4 * mib
	f := serveWithin(t, 64*mib, nil)
	data := make([]byte, size)
	memory := func() int64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapSys)
	}
	before := memory()
	x, err := tensor.Of(data)
	require.NoError(t, err)
	errs := make(chan error, sessions)
	for range sessions {
		s := f.session(t, client.Config{Codec: codec.LZ4})
		go func() {
			_, err := s.Call(t.Context(), client.Request{Model: "sink", Inputs: []client.Input{client.From("", x)}})
			errs <- err
		}()
	}
	for range sessions {
		require.NoError(t, <-errs)
	}
	testkit.Eventually(t, func() bool { return f.counters(t)["calls_ok_total"] == sessions }, "every call's end")
	require.EqualValues(t, sessions*size, f.counters(t)["received_bytes_total"])
	// Two chunks a session would be 128 MiB on their own.
	few := int64(min(runtime.GOMAXPROCS(0), 16)) * 3 * 2 * mib
	require.Less(t, memory()-before, few+64*mib, "bytes of heap beside tensors")
}
