package wire

import (
	"sync"

	"google.golang.org/grpc/mem"
)

// Unread counts what was sent on one connection and gRPC has in its queue. The zero value
// is ready. Safe for concurrent use.
type Unread struct {
	// Charge, if set, is called with each change in the bytes of memory that it takes.
	Charge func(bytes int64)

	mu sync.Mutex // guards all below
	// Messages that no look has found, and those that one has.
	fresh, found int
	looks        int // how many there were
}

// Look looks at what is unread, and reports whether it has found the same once before: the
// peer has not read it all this while.
func (u *Unread) Look() (stuck bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	stuck = u.found > 0
	u.found += u.fresh
	u.fresh = 0
	u.looks++
	return stuck
}

// add counts a message, and remove undoes that.
func (u *Unread) add(c *copied) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.fresh++
	c.unread, c.sent, c.bytes = u, u.looks, int64(cap(*c.data))
	u.charge(c.bytes)
}

func (u *Unread) remove(c *copied) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if c.sent == u.looks {
		u.fresh--
	} else {
		u.found--
	}
	u.charge(-c.bytes)
}

func (u *Unread) charge(bytes int64) {
	if u.Charge != nil {
		u.Charge(bytes)
	}
}

// copied is a copy of a message for gRPC, in one buffer, which gRPC puts back when it has
// written it or its RPC ends. gRPC forgets what it is given after that, and on a connection
// that dies: the buffer then comes back with the next collection.
type copied struct {
	mem.NopBufferPool         // Get is not used
	data              *[]byte // from Buffers
	slice             [1]mem.Buffer
	unread            *Unread // that counts it; nil: none does
	sent              int     // of unread.looks
	bytes             int64   // charged
}

var copies = sync.Pool{New: func() any { return new(copied) }}

// forget says that gRPC may have forgotten the copy.
func (c *copied) forget() {
	if c.unread != nil {
		c.unread.remove(c)
		c.unread = nil
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
	Unread *Unread // that counts it; nil: none does
	copied *copied // valid until SendMsg returns
}

// room returns a buffer with room for n bytes, without any yet.
func (o *Outgoing) room(n int) *copied {
	c := copies.Get().(*copied)
	c.data = Buffers.Get(max(n, smallest))
	*c.data = (*c.data)[:0]
	if o.copied = c; o.Unread != nil {
		o.Unread.add(c)
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
