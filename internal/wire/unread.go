package wire

import (
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/mem"
)

// Unread counts what was sent on a connection and gRPC has in its queue. Safe for concurrent use.
type Unread interface {
	// Queue counts a message that takes so many bytes of memory.
	Queue(bytes int64) (look int)
	// Unqueue undoes that.
	Unqueue(bytes int64, look int)
}

// copied is a copy of a message for gRPC, in one buffer, which gRPC puts back when it has
// written it or its RPC ends. gRPC forgets what it is given after that, and on a connection
// that dies: the buffer then comes back with the next collection.
type copied struct {
	mem.NopBufferPool         // Get is not used
	data              *[]byte // from Buffers
	slice             [1]mem.Buffer
	of                *Outgoing // that counts it; nil: it does no more
	bytes             int64     // for which its Unread has returned look
	look              int
}

var copies = sync.Pool{New: func() any { return new(copied) }}

// forget says that gRPC may have forgotten the copy.
func (c *copied) forget() {
	if o := c.of; o != nil {
		if c.of = nil; o.Unread != nil {
			o.Unread.Unqueue(c.bytes, c.look)
		}
		o.queued.Add(-1)
	}
}

// Put is called by gRPC when nobody reads the copy any more.
func (c *copied) Put(*[]byte) {
	c.forget()
	Buffers.Put(c.data)
	c.data, c.slice[0] = nil, nil
	copies.Put(c)
}

// Outgoing is the part of a Message or an Answer that is sent.
type Outgoing struct {
	Unread Unread       // that counts it; nil: none does
	queued atomic.Int32 // copies that gRPC has
	copied *copied      // valid until SendMsg returns
}

// room returns a buffer with room for n bytes, without any yet.
func (o *Outgoing) room(n int) *copied {
	c := copies.Get().(*copied)
	c.data = Buffers.Get(max(n, SmallBytes+1))
	*c.data = (*c.data)[:0]
	o.copied, c.of = c, o
	o.queued.Add(1)
	if o.Unread != nil {
		c.bytes = int64(cap(*c.data))
		c.look = o.Unread.Queue(c.bytes)
	}
	return c
}

// buffers hands the copy over to gRPC.
func (c *copied) buffers() mem.BufferSlice {
	c.slice[0] = mem.NewBuffer(c.data, c)
	return c.slice[:]
}

// Forget stops counting what is being sent. The server calls it in gRPC's OutPayload event
// if the RPC is over: gRPC forgets what it is given after an RPC's end.
func (o *Outgoing) Forget() {
	if o.copied != nil {
		o.copied.forget()
	}
}
