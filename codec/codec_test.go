package codec

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"

	"github.com/tensorferry/tensorferry/slab"
)

const mib = 1 << 20

func TestACodecIsReadByTheNameItPrints(t *testing.T) {
	for k := range Codec(255) {
		got, err := ParseCodec(k.String())
		if k.Known() {
			require.NoError(t, err)
			require.Equal(t, k, got)
		} else {
			require.Error(t, err, "%v", k)
		}
	}
	for _, text := range []string{"", "LZ4", "zstd", "lz4 "} {
		_, err := ParseCodec(text)
		require.Error(t, err, "%q", text)
	}
}

func TestTheCodecIsTheFirstOfThePeersThatIsOursToo(t *testing.T) {
	for name, tc := range map[string]struct {
		own  []Codec
		peer []uint8
		want Codec
	}{
		"both":                          {All(), []uint8{1}, LZ4},
		"the peer names none":           {All(), nil, None},
		"we name none":                  {nil, []uint8{1}, None},
		"one of the future comes first": {All(), []uint8{255, 7, 1}, LZ4},
		"only those of the future":      {All(), []uint8{255, 7}, None},
		"as they are comes first":       {All(), []uint8{0, 1}, None},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, Choose(tc.own, tc.peer)) })
	}
}

// fills are bytes that compress well, a little and not at all.
var fills = map[string]func(b []byte){
	"zeros": func(b []byte) { clear(b) },
	"ramp": func(b []byte) {
		for i := range b {
			b[i] = byte(i >> 4)
		}
	},
	"half noise": func(b []byte) {
		copy(b, testkit.Bytes(len(b), 1))
		clear(b[len(b)/2:])
	},
	"noise": func(b []byte) { copy(b, testkit.Bytes(len(b), 2)) },
}

// boundaries of chunks of c bytes.
func boundaries(c int) []int { return []int{0, 1, c - 1, c, c + 1, 2 * c, 2*c + 1} }

// cut cuts b into n pieces, some of which are empty.
func cut(b []byte, n int) [][]byte {
	var all [][]byte
	for i := range n {
		at := len(b) * i / n
		all = append(all, b[at:len(b)*(i+1)/n], b[:0])
	}
	return all
}

// guarded is memory of n bytes with a guard on each side.
type guarded struct{ all, mem []byte }

const guard = 64

func guardedBytes(n int) guarded {
	all := bytes.Repeat([]byte{0xa5}, n+2*guard)
	return guarded{all, all[guard : guard+n : guard+n]}
}

func (g guarded) intact() bool {
	want := bytes.Repeat([]byte{0xa5}, guard)
	return bytes.Equal(g.all[:guard], want) && bytes.Equal(g.all[len(g.all)-guard:], want)
}

func TestWhateverIsEncodedDecodesToTheSameBytes(t *testing.T) {
	var sizes []int
	for _, c := range []int{minEncode, 1024, 1025, 16383, 16384, 16385} {
		sizes = append(sizes, boundaries(c)...)
	}
	sizes = append(sizes, mib-1, mib, 4*mib)
	for name, fill := range fills {
		for _, n := range sizes {
			data := make([]byte, n)
			fill(data)
			for _, pieces := range []int{1, 2, 7} {
				p := LZ4.Encode(cut(data, pieces))
				if name == "noise" || n < minEncode {
					require.Nil(t, p, "%s of %d bytes", name, n)
					continue
				}
				require.NotNil(t, p, "%s of %d bytes", name, n)
				require.LessOrEqual(t, len(p.Bytes()), n-n/leastGain)
				for _, places := range []int{1, 2, 5} {
					g := guardedBytes(n)
					dst := [][]byte{g.mem}
					if places > 1 {
						dst = cut(g.mem, places)
					}
					require.NoError(t, LZ4.Decode(dst, cut(p.Bytes(), pieces)))
					require.True(t, bytes.Equal(data, g.mem) && g.intact(), "%s of %d bytes in %d places", name, n, places)
				}
				p.Release()
			}
		}
	}
	require.Zero(t, waiting(), "bytes of payloads that were released")
}

func TestNoneEncodesNothingAndDecodesNothing(t *testing.T) {
	require.Nil(t, None.Encode([][]byte{make([]byte, mib)}))
	require.ErrorIs(t, None.Decode([][]byte{make([]byte, 9)}, [][]byte{make([]byte, 9)}), ErrDecode)
	require.ErrorIs(t, Codec(9).Decode([][]byte{make([]byte, 9)}, [][]byte{make([]byte, 3)}), ErrDecode)
}

// A chunk that is sent again must have the checksum it had.
func TestTheSameBytesEncodeToTheSamePayload(t *testing.T) {
	data := make([]byte, 100_000)
	fills["half noise"](data)
	first := LZ4.Encode([][]byte{data})
	defer first.Release()
	for range 20 {
		other := testkit.Bytes(100_000, rand.Uint64())
		clear(other[rand.IntN(len(other)):])
		if p := LZ4.Encode([][]byte{other}); p != nil {
			p.Release()
		}
		again := LZ4.Encode(cut(data, 3))
		require.True(t, bytes.Equal(first.Bytes(), again.Bytes()))
		again.Release()
	}
}

// reference is 250 bytes, and what the C implementation (lz4 1.9.4) made of them
// at three of its levels.
var reference = struct {
	data   string
	blocks map[string]string
}{
	data: ramp32 + strings.Repeat("00", 40) + strings.Repeat("74656e736f72", 9) + strings.Repeat("0000803f", 8) +
		"000000000000003f0000803f0000c03f00000040000020400000404000006040" + strings.Repeat("ff", 21) + ramp32 + "74686520656e64",
	blocks: map[string]string{
		"-1": "ff12" + ramp32 + "000100146f74656e736f7206001d4f0000803f04000b010200032400ff04c03f00000040000020400000404000006040ff0100010fd3000d7074686520656e64",
		"-9": "ff12" + ramp32 + "000100146f74656e736f7206001d4f0000803f04000b010100030c0010c01000ef40000020400000404000006040ff0100010fd3000d7074686520656e64",
		"--fast=5": "ff17" + ramp32 + "00000000000006000f6f74656e736f7206001d8f0000803f0000803f080007010200032000fb09c03f00000040000020400000404000006040" +
			"ffffffffffff06000fd3000d7074686520656e64",
	},
}

const ramp32 = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	require.NoError(t, err)
	return b
}

func TestBlocksOfTheReferenceImplementationDecode(t *testing.T) {
	want := unhex(t, reference.data)
	for level, block := range reference.blocks {
		g := guardedBytes(len(want))
		require.NoError(t, LZ4.Decode([][]byte{g.mem}, [][]byte{unhex(t, block)}), level)
		require.Equal(t, want, g.mem, level)
		require.True(t, g.intact())
		made, ok := model(unhex(t, block), len(want))
		require.True(t, ok && bytes.Equal(made, want), "the tests' own decoder on %s", level)
	}
}

// model decodes an LZ4 block to at most n bytes, one by one, as the format's
// description says. ok is whether the block is right and makes n; a block may
// make n bytes and be wrong in its end, where decoders differ.
func model(src []byte, n int) (out []byte, ok bool) {
	take := func() (b byte, ok bool) {
		if len(src) == 0 {
			return 0, false
		}
		b, src = src[0], src[1:]
		return b, true
	}
	more := func(v int) (int, bool) { // a length that did not fit four bits
		if v < 15 {
			return v, true
		}
		for {
			b, ok := take()
			v += int(b)
			if !ok || v > n {
				return 0, false
			}
			if b < 255 {
				return v, true
			}
		}
	}
	for {
		token, ok := take()
		if !ok {
			return nil, false
		}
		literals, ok := more(int(token >> 4))
		if !ok || literals > len(src) || literals > n-len(out) {
			return nil, false
		}
		out, src = append(out, src[:literals]...), src[literals:]
		if len(src) == 0 { // the last sequence has literals only
			return out, len(out) == n && token&15 == 0
		}
		lo, _ := take()
		hi, ok := take()
		offset := int(lo) | int(hi)<<8
		if !ok || offset == 0 || offset > len(out) {
			return nil, false
		}
		length, ok := more(int(token & 15))
		if length += 4; !ok || length > n-len(out) {
			return nil, false
		}
		for range length {
			out = append(out, out[len(out)-offset])
		}
		if len(src) == 0 {
			return out, false
		}
	}
}

// FuzzDecode holds the decoder to the model: what the format allows decodes, what
// is decoded are the model's bytes, and nothing else is written, in any cut.
func FuzzDecode(f *testing.F) {
	for _, block := range reference.blocks {
		f.Add(unhex(f, block), uint16(250), uint8(0))
		f.Add(unhex(f, block), uint16(249), uint8(1))
		f.Add(unhex(f, block)[:90], uint16(250), uint8(2))
	}
	f.Add([]byte{0x1f, 0, 1, 0, 255, 255, 255, 220, 0x50, 0, 0, 0, 0, 0}, uint16(1000), uint8(3))
	f.Add([]byte{0xff, 255, 255, 255, 255}, uint16(2000), uint8(0))
	f.Add([]byte{0x0f, 0, 0, 255}, uint16(300), uint8(0))
	f.Fuzz(func(t *testing.T, src []byte, n uint16, cuts uint8) {
		if n == 0 || len(src) >= int(n) {
			return // refused before the decoder sees them
		}
		g := guardedBytes(int(n))
		dst, views := [][]byte{g.mem}, [][]byte{src}
		if cuts&1 == 1 {
			dst = cut(g.mem, 3)
		}
		if cuts&2 == 2 {
			views = cut(src, 3)
		}
		err := LZ4.Decode(dst, views)
		if err != nil && !errors.Is(err, ErrDecode) || !g.intact() {
			t.Fatalf("error %v, guards intact %v", err, g.intact())
		}
		want, ok := model(src, int(n))
		if ok && err != nil {
			t.Fatalf("%x is a block of %d bytes, but: %v", src, n, err)
		}
		if err == nil && !bytes.Equal(want, g.mem) {
			t.Fatalf("%x made %x, want %x, %v", src, g.mem, want, ok)
		}
	})
}

// FuzzRoundTrip encodes anything, repeated until it compresses.
func FuzzRoundTrip(f *testing.F) {
	f.Add([]byte("tensor"), uint16(3000), uint8(2))
	f.Add([]byte{0}, uint16(600), uint8(1))
	f.Fuzz(func(t *testing.T, pattern []byte, n uint16, pieces uint8) {
		if len(pattern) == 0 {
			return
		}
		data := bytes.Repeat(pattern, int(n)/len(pattern)+1)[:n]
		p := LZ4.Encode(cut(data, 1+int(pieces%5)))
		if p == nil {
			return
		}
		defer p.Release()
		g := guardedBytes(len(data))
		if err := LZ4.Decode([][]byte{g.mem}, [][]byte{p.Bytes()}); err != nil || !bytes.Equal(data, g.mem) || !g.intact() {
			t.Fatal("it did not come back:", err)
		}
		if made, ok := model(p.Bytes(), len(data)); !ok || !bytes.Equal(made, data) {
			t.Fatal("the payload is no block of these bytes")
		}
	})
}

func TestAPayloadThatDoesNotMakeExactlyItsPlaceIsRefused(t *testing.T) {
	data := make([]byte, 4096)
	fills["half noise"](data)
	p := LZ4.Encode([][]byte{data})
	require.NotNil(t, p)
	defer p.Release()
	try := func(n int, payload []byte) error {
		g := guardedBytes(n)
		err := LZ4.Decode([][]byte{g.mem}, [][]byte{payload})
		require.True(t, g.intact(), "%d bytes into %d", len(payload), n)
		return err
	}
	for n := range p.Bytes() {
		require.ErrorIs(t, try(len(data), p.Bytes()[:n]), ErrDecode, "cut to %d bytes", n)
	}
	for name, n := range map[string]int{"one too few": 4095, "one too many": 4097, "half": 2200, "twice": 8192} {
		require.ErrorIs(t, try(n, p.Bytes()), ErrDecode, name)
	}
	require.ErrorIs(t, try(len(p.Bytes()), p.Bytes()), ErrDecode, "a place no longer than the payload")
	require.NoError(t, try(len(data), p.Bytes()))
}

// However many decode at a time, the memory is that of a few.
func TestTheScratchOfAllIsThatOfAFew(t *testing.T) {
	p := LZ4.Encode([][]byte{make([]byte, mib)})
	defer p.Release()
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			if err := LZ4.Decode([][]byte{make([]byte, mib/2), make([]byte, mib/2)}, cut(p.Bytes(), 2)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	total := 0
	for _, pool := range []chan *scratch{encoding, decoding} {
		require.Len(t, pool, cap(pool), "scratch was given back")
		require.LessOrEqual(t, cap(pool), min(runtime.GOMAXPROCS(0), coders))
		for range cap(pool) {
			s := <-pool
			total += cap(s.joined) + cap(s.whole)
			pool <- s
		}
	}
	require.LessOrEqual(t, total, 2*cap(decoding)*2*4*mib)
}

// waiting returns the bytes of payloads that are not released.
func waiting() int64 {
	_, bytes := payloads.Live()
	return bytes
}

func TestTooMuchThatWaitsIsSentAsItIs(t *testing.T) {
	data := make([]byte, mib)
	fills["half noise"](data)
	var held []*slab.Slab
	for len(held) < 1000 {
		p := LZ4.Encode([][]byte{data})
		if p == nil {
			break
		}
		held = append(held, p)
		require.LessOrEqual(t, waiting(), int64(waitingBytes))
	}
	require.Less(t, len(held), 1000)
	require.Greater(t, len(held)*mib, waitingBytes/2)
	held[0].Release()
	p := LZ4.Encode([][]byte{data})
	require.NotNil(t, p, "there is room again")
	for _, p := range append(held[1:], p) {
		p.Release()
	}
	require.Zero(t, waiting())
}

func TestDecodingAllocatesNothing(t *testing.T) {
	data := make([]byte, 100_000)
	fills["ramp"](data)
	p := LZ4.Encode([][]byte{data})
	defer p.Release()
	back := make([]byte, len(data))
	views := cut(p.Bytes(), 3)
	for name, dst := range map[string][][]byte{"one place": {back}, "two places": {back[:7], back[7:]}} {
		if n := testing.AllocsPerRun(50, func() {
			if err := LZ4.Decode(dst, views); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations, want 0", name, n)
		}
	}
	require.Equal(t, data, back)
}

// relu is what a layer of a network sends: half of its floats are zero.
func relu(n int) []byte {
	b := testkit.Bytes(n, 3)
	for i := 0; i+4 <= n; i += 4 {
		if b[i]&1 == 0 {
			clear(b[i : i+4])
		} else {
			b[i+3] = 0x3f
		}
	}
	return b
}

func BenchmarkLZ4(b *testing.B) {
	zeros, noise := make([]byte, mib), testkit.Bytes(mib, 4)
	for _, bm := range []struct {
		name string
		data []byte
	}{{"zeros", zeros}, {"relu", relu(mib)}, {"noise", noise}} {
		views := [][]byte{bm.data}
		b.Run(fmt.Sprintf("op=encode/data=%s/chunk=1MiB", bm.name), func(b *testing.B) {
			b.SetBytes(mib)
			b.ReportAllocs()
			n := mib
			for b.Loop() {
				if p := LZ4.Encode(views); p != nil {
					n = len(p.Bytes())
					p.Release()
				}
			}
			b.ReportMetric(float64(n)/mib, "sent/byte")
		})
		p := LZ4.Encode(views)
		if p == nil {
			continue
		}
		dst := [][]byte{make([]byte, mib)}
		payload := [][]byte{p.Bytes()}
		b.Run(fmt.Sprintf("op=decode/data=%s/chunk=1MiB", bm.name), func(b *testing.B) {
			b.SetBytes(mib)
			b.ReportAllocs()
			for b.Loop() {
				if err := LZ4.Decode(dst, payload); err != nil {
					b.Fatal(err)
				}
			}
		})
		p.Release()
	}
}
