package wire

import (
	"runtime"
	"sync"

	"google.golang.org/grpc/mem"

	"github.com/tensorferry/tensorferry/slab"
)

// Buffers is the pool of all connections' receive buffers. grpc's own clears each
// before it is overwritten: 3 % of an upload's time (November 2026). Safe for
// concurrent use.
var Buffers mem.BufferPool = &buffers{rest: mem.DefaultBufferPool()}

// buffers keeps buffers of the largest data frame that grpc sends, outside the heap,
// and leaves every larger size to grpc. It keeps few that nobody uses: of the others the
// system has the memory back. One that grpc forgets, as it does with what an RPC leaves
// unread, comes back with the next collection.
type buffers struct {
	rest mem.BufferPool

	mu   sync.Mutex
	warm []*[]byte // the last one is given out next; guarded by mu
	cold []*[]byte // without memory until they are written to; guarded by mu
}

// Get hands over n bytes of whatever content.
func (p *buffers) Get(n int) *[]byte {
	if n > frameBytes || mem.IsBelowBufferPoolingThreshold(n) {
		return p.rest.Get(n)
	}
	p.mu.Lock()
	b := pop(&p.warm)
	if b == nil {
		b = pop(&p.cold)
	}
	if b == nil {
		b = p.more()
	}
	p.mu.Unlock()
	*b = (*b)[:n]
	return b
}

// Put takes a buffer over.
func (p *buffers) Put(b *[]byte) {
	if cap(*b) != frameBytes {
		p.rest.Put(b)
		return
	}
	*b = (*b)[:frameBytes]
	p.mu.Lock()
	if len(p.warm) < keptBuffers {
		p.warm = append(p.warm, b)
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()
	slab.Discard(*b)
	p.mu.Lock()
	p.cold = append(p.cold, b)
	p.mu.Unlock()
}

// more makes buffers and returns one; mu is held.
func (p *buffers) more() *[]byte {
	m, err := slab.System.Alloc(segmentBytes)
	if err != nil { // the system's limit of mappings
		m = make([]byte, segmentBytes)
	}
	for len(m) > frameBytes {
		p.cold = append(p.cold, p.handle(m[:frameBytes:frameBytes]))
		m = m[frameBytes:]
	}
	return p.handle(m)
}

// handle returns a pointer to a buffer that comes back when nobody has the pointer.
func (p *buffers) handle(m []byte) *[]byte {
	b := &m
	runtime.AddCleanup(b, func(m []byte) { p.Put(p.handle(m)) }, m)
	return b
}

func pop(list *[]*[]byte) (b *[]byte) {
	if n := len(*list); n > 0 {
		b = (*list)[n-1]
		(*list)[n-1] = nil
		*list = (*list)[:n-1]
	}
	return b
}
