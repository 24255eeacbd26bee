package codec

import (
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"slices"

	"github.com/pierrec/lz4/v4"

	"github.com/tensorferry/tensorferry/slab"
)

// Codec is what is done to a chunk's payload before it is sent. The numbers are
// those of the wire (tensorferry.v1.Codec).
type Codec uint8

// The codecs.
const (
	None Codec = 0 // the bytes as they are
	LZ4  Codec = 1 // one LZ4 block, without a frame around it
)

// names of the codecs, as flags and configuration spell them.
var names = [...]string{None: "none", LZ4: "lz4"}

// ErrDecode is wrapped when a payload does not decode to the bytes of its place.
var ErrDecode = errors.New("codec: payload does not decode")

// Known reports whether this build encodes and decodes k.
func (k Codec) Known() bool { return int(k) < len(names) }

// String returns the codec's name, its number when it has none.
func (k Codec) String() string {
	if !k.Known() {
		return fmt.Sprintf("codec %d", uint8(k))
	}
	return names[k]
}

// ParseCodec reads what String returns for the codecs that are known.
func ParseCodec(text string) (Codec, error) {
	if k := slices.Index(names[:], text); k >= 0 {
		return Codec(k), nil
	}
	return None, fmt.Errorf("codec: unknown codec %q; use none or lz4", text)
}

// All returns the codecs of this build but None, in order of preference.
func All() []Codec { return []Codec{LZ4} }

// Choose returns the codec to send with: the first in the peer's hello, as numbers of
// the wire, that is None or one of our own; else None.
func Choose(own []Codec, peer []uint8) Codec {
	for _, k := range peer {
		if Codec(k) == None || slices.Contains(own, Codec(k)) {
			return Codec(k)
		}
	}
	return None
}

// Encode encodes the bytes of a chunk, borrowed as views in order, and hands over the
// payload, which is released once it is sent, or cannot be; nil when the views are to be sent as they are: the codec is None, they would
// not become shorter by 1/leastGain, or too much encoded payload waits to be sent. The
// same bytes encode to the same payload. It may wait for other encoders, a few
// milliseconds each.
func (k Codec) Encode(views [][]byte) *slab.Slab {
	n := length(views)
	if k != LZ4 || n < minEncode {
		return nil
	}
	s := <-encoding
	defer func() { encoding <- s }()
	if s.lz4 == nil {
		s.lz4 = new(lz4.CompressorCCompat)
	}
	src := s.join(views, n)
	dst := grow(&s.whole, n-n/leastGain)
	if n, err := s.lz4.CompressBlock(src, dst); err == nil && n > 0 {
		return keep(dst[:n])
	}
	return nil // it does not fit
}

// Decode decodes a payload, borrowed as views in order, into the memory that dst lends, in
// order. Two views or more may lie in dst: they are copied first. It fills all of dst, or returns
// an error that wraps ErrDecode. It may wait for other decoders, a millisecond each.
func (k Codec) Decode(dst [][]byte, views [][]byte) error {
	if k != LZ4 {
		return fmt.Errorf("%w: %v is not compressed", ErrDecode, k)
	}
	s := <-decoding
	defer func() { decoding <- s }()
	if len(dst) == 1 {
		return s.decode(dst[0], views)
	}
	data := grow(&s.whole, length(dst))
	if err := s.decode(data, views); err != nil {
		return err
	}
	for _, d := range dst {
		data = data[copy(d, data):]
	}
	return nil
}

// decode fills dst with what an LZ4 block holds.
func (s *scratch) decode(dst []byte, views [][]byte) error {
	size := length(views)
	if size >= len(dst) { // also what bounds the joining of views
		return fmt.Errorf("%w: %d bytes of lz4 for a place of %d; they must be fewer", ErrDecode, size, len(dst))
	}
	n, err := lz4.UncompressBlock(s.join(views, size), dst)
	if err != nil {
		return fmt.Errorf("%w: %d bytes are not an lz4 block of %d", ErrDecode, size, len(dst))
	}
	if n != len(dst) {
		return fmt.Errorf("%w: %d bytes of lz4 make %d, the place has %d", ErrDecode, size, n, len(dst))
	}
	return nil
}

func length(views [][]byte) int {
	n := 0
	for _, v := range views {
		n += len(v)
	}
	return n
}

// scratch is the memory of one encoding or decoding. It grows to the largest chunk.
type scratch struct {
	joined []byte // the source, when its views lie apart
	whole  []byte // the destination, when it lies apart or is not known before
	lz4    *lz4.CompressorCCompat
}

// These bound how many encode and decode at a time, and so their memory: there may be 10 000
// sessions. They are apart, because an encoder may read a mapped file.
var encoding, decoding = newPool(), newPool()

func newPool() chan *scratch {
	p := make(chan *scratch, min(runtime.GOMAXPROCS(0), coders))
	for range cap(p) {
		p <- new(scratch)
	}
	return p
}

// join returns n bytes of views in one piece.
func (s *scratch) join(views [][]byte, n int) []byte {
	if len(views) == 1 {
		return views[0]
	}
	dst := grow(&s.joined, n)[:0]
	for _, v := range views {
		dst = append(dst, v...)
	}
	return dst
}

// grow returns n bytes of *mem, which it makes larger, to a power of two, if need be.
func grow(mem *[]byte, n int) []byte {
	if cap(*mem) < n {
		*mem = make([]byte, 1<<bits.Len(uint(n-1)))
	}
	return (*mem)[:n:n]
}

// payloads has those that wait to be sent.
var payloads = slab.NewPool(keptBytes, slab.System)

// keep copies a payload; nil when too much waits already, or no memory is left.
func keep(data []byte) *slab.Slab {
	s, err := payloads.Get(len(data))
	if err != nil {
		return nil
	}
	if _, waiting := payloads.Live(); waiting > waitingBytes {
		s.Release()
		return nil
	}
	copy(s.Bytes(), data)
	return s
}
