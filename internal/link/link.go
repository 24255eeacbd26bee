// Package link shares memory and messages with another process of this machine, such
// as Python: docs/link.md is its protocol, and this is the side of the host.
//
// It refuses to know what the messages are for. Memory is the heap's; a Block counts
// who uses a range of it, the guest among them, which is held to the ranges that
// it owns. A Conn is safe for concurrent use, except that Recv is for one goroutine.
package link

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/slab"
)

// Conn is a link to one guest.
type Conn struct {
	conn    *net.UnixConn
	*socket // the same
	cfg     Config
	shut    func() // Close, once
	packet  []byte // of Recv
	ctx     context.Context
	cancel  context.CancelFunc
	ending  sync.WaitGroup // of what tells, and the takes that wait
	takes   atomic.Int32

	sending sync.Mutex          // one message at a time
	out     []byte              // guarded by sending
	known   map[uint32]struct{} // guarded by sending: memories that the guest has

	wake chan struct{} // capacity 1: there is news

	telling sync.Mutex // taken with a heap's lock held
	news    []Message  // guarded by telling: what the guest is to be told when there is room in the socket

	mu     sync.Mutex       // guards all below
	owned  map[Range]*Block // what the guest owns, by the whole range
	closed bool
}

// Config is what a link works on.
type Config struct {
	Heap *Heap
	// Pool has the Heap for its backing; others may share it.
	Pool *slab.Pool
	// Quota bounds the bytes that the guest owns, or has handed over to a holder of a
	// Block.
	Quota *slab.Budget
}

// Block is a range with counted references, of which the guest may have one.
type Block struct {
	// Freed, if it is set before anybody else has a reference, runs after the last
	// Release. It does not block.
	Freed func()

	slab   *slab.Slab
	quota  *slab.Budget
	whole  Range
	holder *slab.Principal
	refs   atomic.Int32
}

// Bytes lends all memory of the block: valid while the caller holds a reference.
func (b *Block) Bytes() []byte { return b.slab.Bytes() }

// Range says where the first n bytes of the block lie.
func (b *Block) Range(n int64) Range { return Range{b.whole.Memory, b.whole.Off, uint64(n)} }

// Release drops a reference; with the last one the memory is free.
func (b *Block) Release() {
	switch n := b.refs.Add(-1); {
	case n < 0:
		panic("link: block released more often than retained")
	case n == 0:
		b.slab.Release()
		b.quota.Release(b.holder, int64(b.whole.Len))
		if b.Freed != nil {
			b.Freed()
		}
	}
}

// New returns a link over a socket, which is handed over. A goroutine tells the guest
// of memory until Close.
func New(conn *net.UnixConn, cfg Config) *Conn {
	c := &Conn{
		conn: conn, cfg: cfg, packet: make([]byte, PacketBytes+1), known: make(map[uint32]struct{}),
		wake: make(chan struct{}, 1), owned: make(map[Range]*Block),
	}
	c.socket, _ = socketOf(conn) // it fails without a socket
	c.shut = sync.OnceFunc(c.end)
	c.ctx, c.cancel = context.WithCancel(context.Background())
	cfg.Heap.attach(c)
	c.ending.Go(c.tell)
	return c
}

// Close ends the link, and takes back what the guest owned: it must not be able to
// write there any more.
func (c *Conn) Close() { c.shut() }

func (c *Conn) end() {
	c.mu.Lock()
	c.closed = true // nothing is owned, and no goroutine started, from now on
	owned := c.owned
	c.owned = nil
	c.mu.Unlock()
	c.cfg.Heap.detach(c)
	c.cancel()
	c.Shutdown()
	_ = c.conn.Close()
	c.ending.Wait()
	for _, b := range owned {
		b.Release()
	}
}

// Shutdown ends the socket, and so Recv and Send.
func (c *Conn) Shutdown() {
	_ = c.conn.CloseRead() // they fail where it has ended
	_ = c.conn.CloseWrite()
}

// Recv returns the next message that is not about memory, with its JSON, long or not. io.EOF is the end of the
// guest. After any error the link is of no use: close it.
func (c *Conn) Recv() (Message, error) {
	for {
		n, err := c.receive(c.packet)
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.Is(err, syscall.ECONNRESET): // reset: it left messages unread
			return nil, io.EOF
		case err != nil:
			return nil, fmt.Errorf("link: %w", err)
		}
		m, long, err := parse(c.packet[:n])
		if err != nil {
			return nil, err
		}
		if long != nil {
			where := LongRange(*long)
			b, err := c.Taken(where)
			if err != nil {
				return nil, err
			}
			*long = bytes.Clone(b.Bytes()[:where.Len])
			b.Release()
		}
		switch m := m.(type) {
		case *Take:
			err = c.take(m)
		case *Give:
			err = c.takeBack(m.Ranges)
		default:
			return m, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// Send sends m, after the memories that it names. It waits while the socket is full.
func (c *Conn) Send(m Message) error {
	c.sending.Lock()
	defer c.sending.Unlock()
	return c.send(m, true)
}

// TrySend is Send, but does not wait: it reports whether it has sent m. Where it has not, Send says why, if it
// cannot either. It may send the memories alone.
func (c *Conn) TrySend(m Message) bool {
	if !c.sending.TryLock() {
		return false
	}
	defer c.sending.Unlock()
	return c.send(m, false) == nil
}

// errFull is why a packet is not sent without waiting.
var errFull = errors.New("link: the socket is full")

// send sends m, and a Forget only to a guest that knows the memory; sending is held.
func (c *Conn) send(m Message, wait bool) error {
	if f, ok := m.(*Forget); ok {
		if _, known := c.known[uint32(f.ID)]; !known {
			return nil
		}
		delete(c.known, uint32(f.ID))
	}
	packet, named, err := encode(c.out[:0], m)
	if err != nil {
		return err
	}
	c.out = packet
	for _, number := range named {
		if _, ok := c.known[number]; ok || number == 0 {
			continue
		}
		fd, size, ok := c.cfg.Heap.descriptor(number)
		if !ok {
			return fmt.Errorf("link: a message names memory %d, which is gone", number)
		}
		about, _, err := encode(nil, &Memory{Head{ID: uint64(number)}, uint64(size)})
		if err != nil {
			return err
		}
		if err = c.sendPacket(about, fd, !wait); err != nil {
			return fmt.Errorf("link: %w", err)
		}
		c.known[number] = struct{}{}
	}
	if err := c.sendPacket(packet, noFD, !wait); err != nil {
		return fmt.Errorf("link: %w", err)
	}
	return nil
}

// tell sends the news until the link ends.
func (c *Conn) tell() {
	for {
		select {
		case <-c.wake:
		case <-c.ctx.Done():
			return
		}
		c.telling.Lock()
		all := c.news
		c.news = nil
		c.telling.Unlock()
		for _, m := range all {
			_ = c.Send(m) // an error is Recv's too
		}
	}
}

// enqueue queues a message for the goroutine that sends them. It never blocks: the heap calls it with its lock held.
func (c *Conn) enqueue(m Message) {
	c.telling.Lock()
	c.news = append(c.news, m)
	many := len(c.news) > mostNews
	c.telling.Unlock()
	if many { // the guest does not read, and asks for more
		c.Shutdown()
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// New returns a block of n bytes, or more, of a quota, nil for the link's own, with one
// reference, the caller's. It waits for the quota; errors wrap slab.ErrBudget where it is
// too small, slab.ErrMemory, or why ctx ended.
func (c *Conn) New(ctx context.Context, quota *slab.Budget, n int64) (*Block, error) {
	quota = cmp.Or(quota, c.cfg.Quota)
	// Each block is its own holder: who waits for memory of a link waits in line.
	holder := slab.NewPrincipal("link")
	if err := quota.Acquire(ctx, holder, slab.SizeOf(n)); err != nil {
		return nil, err
	}
	return c.block(quota, holder, n)
}

// TryNew is New without waiting: nil where the quota has not room enough, or a
// block would have more than half of it.
func (c *Conn) TryNew(n int64) (*Block, error) {
	holder := slab.NewPrincipal("link")
	if !c.cfg.Quota.TryAcquire(holder, slab.SizeOf(n)) {
		return nil, nil
	}
	return c.block(c.cfg.Quota, holder, n)
}

// block makes a block, whose bytes a quota has granted.
func (c *Conn) block(quota *slab.Budget, holder *slab.Principal, n int64) (*Block, error) {
	n = slab.SizeOf(n)
	s, err := c.cfg.Pool.Get(int(n))
	if err != nil {
		quota.Release(holder, n)
		return nil, err
	}
	whole, ok := c.cfg.Heap.RangeOf(s.Bytes())
	if !ok {
		panic("link: the pool is not over the heap")
	}
	b := &Block{slab: s, quota: quota, whole: whole, holder: holder}
	b.refs.Store(1)
	return b, nil
}

// Own makes the caller's reference the guest's, which is about to be told by a message.
func (c *Conn) Own(b *Block) {
	c.mu.Lock()
	closed := c.closed
	if !closed {
		c.owned[b.whole] = b
	}
	c.mu.Unlock()
	if closed {
		b.Release()
	}
}

// Fit borrows text and returns it as the JSON of a message, with its flags. What is long is copied into a block
// of room, which becomes the guest's.
func (c *Conn) Fit(text []byte, room func(n int64) (*Block, error)) (flags uint8, json []byte, err error) {
	if len(text) <= PacketBytes/2 {
		return 0, text, nil
	}
	b, err := room(int64(len(text)))
	if err != nil {
		return 0, nil, err
	}
	json = AppendRange(nil, b.Range(int64(copy(b.Bytes(), text))))
	c.Own(b)
	return Long, json, nil
}

// GiveBack is Own, and has the guest told. It never blocks.
func (c *Conn) GiveBack(b *Block) { c.give(0, b) }

func (c *Conn) give(id uint64, b *Block) {
	m := &Give{Head{ID: id}, []Range{b.whole}}
	c.Own(b)
	if id == 0 || !c.TrySend(m) {
		c.enqueue(m)
	}
}

// Taken makes the guest's reference to the block that r begins the caller's. An error
// ends the link.
func (c *Conn) Taken(r Range) (*Block, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b, err := c.guests(r)
	if err != nil {
		return nil, err
	}
	if b.whole.Off != r.Off {
		return nil, fmt.Errorf("%w: [%d,+%d) of memory %d is within what the guest owns; it hands over all or nothing", ErrMessage, r.Off, r.Len, r.Memory)
	}
	delete(c.owned, b.whole)
	return b, nil
}

// Shared shares a range of the guest's until the caller releases its block. An error
// ends the link.
func (c *Conn) Shared(r Range) (data []byte, b *Block, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if b, err = c.guests(r); err != nil {
		return nil, nil, err
	}
	b.refs.Add(1)
	off := r.Off - b.whole.Off
	return b.Bytes()[off : off+r.Len : off+r.Len], b, nil
}

// guests finds the guest's block that r lies in; mu is held.
func (c *Conn) guests(r Range) (*Block, error) {
	whole, ok := c.cfg.Heap.piece(r)
	b := c.owned[whole]
	switch {
	case c.closed:
		return nil, io.EOF
	case !ok, b == nil, r.Len > whole.Len, r.Off-whole.Off > whole.Len-r.Len:
		return nil, fmt.Errorf("%w: [%d,+%d) of memory %d is not the guest's", ErrMessage, r.Off, r.Len, r.Memory)
	}
	return b, nil
}

// takeBack takes back what the guest does not need any more.
func (c *Conn) takeBack(ranges []Range) error {
	for _, r := range ranges {
		b, err := c.Taken(r)
		if err != nil {
			return err
		}
		b.Release()
	}
	return nil
}

// take answers a take, at once or, on a goroutine that ends with the link, later.
func (c *Conn) take(m *Take) error {
	n := int64(min(m.Bytes, math.MaxInt64))
	if b, err := c.TryNew(n); b != nil && err == nil {
		c.give(m.ID, b)
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.takes.Add(1) > waitingTakes {
		return fmt.Errorf("%w: more than %d takes wait", ErrMessage, waitingTakes)
	}
	if c.closed {
		return io.EOF
	}
	c.ending.Go(func() {
		defer c.takes.Add(-1)
		ctx, stop := context.WithTimeout(c.ctx, time.Duration(m.Millis)*time.Millisecond)
		defer stop()
		b, err := c.New(ctx, nil, n)
		if err == nil {
			c.give(m.ID, b)
			return
		}
		code := Exhausted
		if errors.Is(err, context.DeadlineExceeded) {
			code = Deadline
		}
		text, _ := json.Marshal(map[string]string{"message": err.Error()}) // a text marshals
		_ = c.Send(&Done{Head: Head{ID: m.ID}, Code: code, JSON: text})    // an error is Recv's too
	})
	return nil
}

// Codes of a Done that the link itself sends: gRPC's.
const (
	Invalid      uint16 = 3
	Deadline     uint16 = 4
	Exhausted    uint16 = 8
	Precondition uint16 = 9
)
