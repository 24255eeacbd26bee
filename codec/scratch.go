package codec

import (
	"math/bits"
	"runtime"
	"sync/atomic"

	"github.com/pierrec/lz4/v4"

	"github.com/tensorferry/tensorferry/slab"
)

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

// Payloads that wait to be sent, and what they take, in bytes.
var (
	payloads = slab.NewPool(keptBytes, slab.System)
	waiting  atomic.Int64
)

// Payload is an encoded chunk on its way out.
type Payload struct{ slab *slab.Slab }

// newPayload copies data; nil when too much waits already, or no memory is left.
func newPayload(data []byte) *Payload {
	n := slab.SizeOf(int64(len(data)))
	if waiting.Add(n) <= waitingBytes {
		if s, err := payloads.Get(len(data)); err == nil {
			copy(s.Bytes(), data)
			return &Payload{s}
		}
	}
	waiting.Add(-n)
	return nil
}

// Bytes lends the payload until Release.
func (p *Payload) Bytes() []byte { return p.slab.Bytes() }

// Release gives the payload's memory back, once, on any goroutine. The sender must call
// it also when the connection dies.
func (p *Payload) Release() {
	n := slab.SizeOf(int64(len(p.slab.Bytes())))
	p.slab.Release()
	waiting.Add(-n)
}
