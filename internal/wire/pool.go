package wire

import (
	"runtime"
	"sync"

	"google.golang.org/grpc/mem"

	"github.com/tensorferry/tensorferry/slab"
)

// Buffers is the pool of all connections' buffers, of received data frames and of copies
// to be sent. grpc's own clears each before it is overwritten: 3 % of an upload's time
// (November 2026). Safe for concurrent use.
var Buffers mem.BufferPool = newBuffers(mem.DefaultBufferPool())

// buffers keeps buffers outside the heap, by size, and leaves what is larger, or too small
// for gRPC to put back, to grpc.
type buffers struct {
	rest mem.BufferPool
	of   []*buffersOf // ascending
}

// buffersOf are buffers of one size. Few that nobody uses are kept: of the others the
// system has the memory back. One that grpc forgets, as it does with what an RPC leaves
// unread, comes back with the next collection.
type buffersOf struct {
	size, kept int

	mu   sync.Mutex
	warm []*[]byte // the last one is given out next; guarded by mu
	cold []*[]byte // without memory until they are written to; guarded by mu
}

func newBuffers(rest mem.BufferPool) *buffers {
	p := &buffers{rest: rest}
	for _, c := range classes {
		p.of = append(p.of, &buffersOf{size: c.size, kept: c.kept})
	}
	return p
}

// Get hands over n bytes of whatever content.
func (p *buffers) Get(n int) *[]byte {
	for _, of := range p.of {
		if n <= of.size && !mem.IsBelowBufferPoolingThreshold(n) {
			return of.get(n)
		}
	}
	return p.rest.Get(n)
}

// Put takes a buffer over.
func (p *buffers) Put(b *[]byte) {
	for _, of := range p.of {
		if cap(*b) == of.size {
			of.put(b)
			return
		}
	}
	p.rest.Put(b)
}

func (p *buffersOf) get(n int) *[]byte {
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

func (p *buffersOf) put(b *[]byte) {
	*b = (*b)[:p.size]
	p.mu.Lock()
	if len(p.warm) < p.kept {
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
func (p *buffersOf) more() *[]byte {
	n := max(leastBuffers, segmentBytes/p.size)
	m, err := slab.System.Alloc(n * p.size)
	if err != nil { // the system's limit of mappings
		m = make([]byte, n*p.size)
	}
	for ; len(m) > p.size; m = m[p.size:] {
		p.cold = append(p.cold, p.handle(m[:p.size:p.size]))
	}
	return p.handle(m)
}

// handle returns a pointer to a buffer that comes back when nobody has the pointer.
func (p *buffersOf) handle(m []byte) *[]byte {
	b := &m
	runtime.AddCleanup(b, func(m []byte) { p.put(p.handle(m)) }, m)
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
