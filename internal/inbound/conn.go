package inbound

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/tensorferry/tensorferry/internal/wire"
)

// Conn is a connection that reads no further while there is no memory for what comes.
type Conn struct {
	net.Conn
	m     *Memory
	max   int64       // bytes of the largest message
	large bool        // that is larger than the server's own
	busy  func() bool // results wait for acknowledgements from the peer

	r       *bufio.Reader
	rest    int       // bytes of the current frame that gRPC has not read
	opening uint32    // the RPC whose headers gRPC has read last
	last    *RPC      // the one of the last data frame
	stuck   time.Time // when the present row of waits began, in which nothing was consumed
	stuckAt int64     // of consumed, then
	waited  time.Time // when it last stopped waiting
	control *rate.Limiter
	calm    time.Time    // when fewer control frames last came than may
	paid    atomic.Int64 // bytes written, for which control frames may come

	writing sync.Mutex        // guards those below, and whole frames that are written
	header  [headerBytes]byte // of the frame that gRPC writes
	got     int               // bytes of header
	skip    int               // bytes of the frame that follow
	why     error             // to be told the peer
	told    chan struct{}     // closed when it has been: nothing is written after that

	granted chan bool     // whether what was wanted is charged, or not wanted any more
	done    chan struct{} // closed by Close
	close   func() error
	// Closing is told why the connection is about to be closed.
	Closing func(why error)

	// Guarded by m.mu.
	rpcs     map[uint32]*RPC
	charged  int64
	wants    int64     // what Read waits for; 0: it does not
	wanting  *RPC      // for whom
	urgent   bool      // it waits with parts of messages: for a moment, and for all that there is
	consumed int64     // messages, and frames of larger ones
	looked   int64     // of consumed, when it was last looked at
	opened   int64     // for RPCs themselves
	held     int64     // for what ended RPCs have left, until the peer reads
	since    time.Time // held has been more than Free since
	queued   int64     // for what gRPC has in its queue until the peer reads, beside charged
	fresh    int       // messages of that which no look has found
	found    int       // and those that one has
	looks    int       // how many there were
	drained  time.Time // queued has not fallen, and been more than Free, since
	shed     bool      // it was told to end
	parts    int       // RPCs that wait for the rest of a message
	closed   bool
}

// RPC is what a peer has sent for one RPC. A nil RPC is charged nothing.
type RPC struct {
	c      *Conn
	id     uint32
	cancel func(why error)

	// Of the goroutine that reads the connection.
	prefix [prefixBytes]byte
	got    int   // bytes of prefix
	known  bool  // the first message has come, or is too large
	coming int64 // bytes of the current message that have not come

	// Guarded by c.m.mu.
	whole []batch   // messages that have come
	head  int       // of whole: the first that is not consumed
	ready int64     // charged for those from head on
	part  int64     // charged for the frames of a message that has not come as a whole
	ahead int64     // charged for what has not come of it
	rest  int64     // what is not charged yet of a larger one
	large bool      // it waits for the rest of a larger one, and is one of Memory.line
	own   int64     // charged for the RPC itself, until it is over
	since time.Time // the first whole message was not consumed, or the part began
	came  int64     // bytes of the part
	taken bool      // its handler reads, or has, the first message
	begun bool      // there is a handler, which returns
	// admitted says that a limit of its own holds, until the handler returns.
	admitted bool
	shed     bool  // it was told to end
	waits    bool  // for the rest of a message, and is one of c.parts
	ended    bool  // its handler has returned
	over     bool  // gRPC takes nothing more for it
	holds    int64 // charged for what its handler keeps
	kept     int64 // what the handler has left when it returned, until the RPC is over

	sent           int64  // bytes of its data frames
	earlier, later sample // of sent, when Comes was called
}

// sample is how many bytes had come at a time.
type sample struct {
	at    time.Time
	bytes int64
}

// batch is messages that are uncharged with the last of them.
type batch struct {
	messages int
	charged  int64
}

// A message of gRPC begins with a flag and its length.
const prefixBytes = 5

// Parts of HTTP/2 (RFC 9113).
const (
	preface      = len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	headerBytes  = 9
	typeData     = 0
	typeHeaders  = 1
	typeReset    = 3
	typeGoAway   = 7
	typeContinue = 9
	flagEnd      = 1
	flagPadded   = 8

	codeCancel      = 8
	enhanceYourCalm = 11
	// nobody is an ID that no RPC has: clients use odd ones. gRPC returns the window of its
	// data frames to the connection, and drops their bytes.
	nobody = 2
)

// Conn returns a connection of which first, which it shares, has been read, and whose peer sends messages
// of at most so many bytes. busy reports whether it has calls, whose results may wait for the
// peer: memory must not wait for memory then.
func (m *Memory) Conn(c net.Conn, first []byte, message int64, busy func() bool) *Conn {
	r := io.MultiReader(bytes.NewReader(first), c)
	conn := &Conn{
		Conn: c, m: m, max: message, large: message > m.own, busy: busy, r: bufio.NewReaderSize(r, 2*wire.FrameBytes), rest: preface,
		control: rate.NewLimiter(controlRate, 2*controlRate), calm: time.Now(), told: make(chan struct{}), granted: make(chan bool, 1), done: make(chan struct{}), rpcs: make(map[uint32]*RPC),
		Closing: func(error) {},
	}
	conn.close = sync.OnceValue(func() error {
		close(conn.done)
		return c.Close()
	})
	m.mu.Lock()
	defer m.mu.Unlock()
	m.conns[conn] = struct{}{}
	return conn
}

// Close closes the connection. What its peer has sent stays charged until End.
func (c *Conn) Close() error { return c.close() }

// End says that nobody reads the connection, nor what it has brought, any more.
func (c *Conn) End() {
	m := c.m
	m.mu.Lock()
	defer m.mu.Unlock()
	c.closed = true
	m.queued -= c.queued
	c.queued = 0
	m.admit()
	for _, r := range c.rpcs {
		r.end()
		r.close()
	}
	m.await() // one collection frees what all of them have left
	if c.charged == 0 {
		delete(m.conns, c)
	}
}

// Read reads at most to the end of the current frame.
func (c *Conn) Read(p []byte) (int, error) {
	if c.rest == 0 {
		if err := c.next(); err != nil {
			if errors.Is(err, ErrControl) || errors.Is(err, ErrMemory) {
				c.leave(err)
			}
			return 0, err
		}
	}
	n, err := c.r.Read(p[:min(len(p), c.rest)])
	c.rest -= n
	return n, err
}

// next looks at the frame that comes next, and waits for memory for it.
func (c *Conn) next() error {
	h, err := c.r.Peek(headerBytes)
	if err != nil {
		if errors.Is(err, io.EOF) && len(h) > 0 {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	n := int(binary.BigEndian.Uint32(h) >> 8)
	id := binary.BigEndian.Uint32(h[5:]) &^ (1 << 31)
	brings := false
	switch kind, flags := h[3], h[4]; {
	case kind == typeHeaders, kind == typeContinue:
		c.opening = id
		c.pay(controlsOfRPC * controlPays)
		brings = true
	case kind == typeReset:
		brings = c.over(id)
	case kind == typeData && n > 0 && n <= wire.FrameBytes: // gRPC refuses a larger one
		if brings, err = c.data(id, n, flags&flagPadded != 0); err != nil {
			return err
		}
		if !brings {
			if h, err = c.r.Peek(headerBytes); err != nil {
				return err
			}
			binary.BigEndian.PutUint32(h[5:], nobody)
		}
	case kind == typeData:
		brings = flags&flagEnd != 0
	}
	c.rest = headerBytes + n
	if !brings {
		return c.pace()
	}
	return nil
}

// pay allows control frames, one for each controlPays bytes.
func (c *Conn) pay(bytes int64) {
	if c.paid.Load() < 2*controlRate*controlPays {
		c.paid.Add(bytes)
	}
}

// pace waits until another frame may come that brings nothing.
func (c *Conn) pace() error {
	if c.paid.Load() >= controlPays {
		c.paid.Add(-controlPays)
		return nil
	}
	d := c.control.Reserve().Delay()
	if c.control.Tokens() >= controlRate/10 {
		c.calm = time.Now()
	} else if time.Since(c.calm) >= pause { // by then its peer may have gone long ago
		return ErrControl
	}
	if d < Debt {
		return nil
	}
	select {
	case <-time.After(d):
		return nil
	case <-c.done:
		return net.ErrClosed
	}
}

// Write writes what gRPC sends, which it borrows, and sees the ends of RPCs in it: until
// its status is written, gRPC keeps what an RPC has left unread. What comes after the peer was
// told why its connection is closed is dropped. So is the reset of an RPC whose deadline has
// passed, the only CANCEL that gRPC's server sends: a peer whose clock is a little behind would
// take it for somebody's wish, and ends the RPC as DEADLINE_EXCEEDED when its own says so.
func (c *Conn) Write(b []byte) (int, error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	all, pays, rest := len(b), len(b), b
	for {
		if n := min(c.skip, len(rest)); n > 0 {
			c.skip -= n
			rest = rest[n:]
		}
		if between := c.skip == 0 && c.got == 0; between && c.why != nil {
			return all, c.tell(b[:len(b)-len(rest)])
		}
		if len(rest) == 0 {
			break
		}
		n := copy(c.header[c.got:], rest)
		rest = rest[n:]
		if c.got += n; c.got < headerBytes {
			break
		}
		c.got = 0
		c.skip = int(binary.BigEndian.Uint32(c.header[:]) >> 8)
		kind, flags := c.header[3], c.header[4]
		if kind == typeReset || flags&flagEnd != 0 && (kind == typeHeaders || kind == typeData) {
			c.over(binary.BigEndian.Uint32(c.header[5:]) &^ (1 << 31))
		}
		if kind == typeReset && n == headerBytes && len(rest) >= 4 && binary.BigEndian.Uint32(rest) == codeCancel {
			b = slices.Concat(b[:len(b)-len(rest)-headerBytes], rest[4:])
			rest, c.skip = b[len(b)-len(rest)+4:], 0
		}
		if kind == typeData && c.skip >= paysData {
			pays += controlsOfData * controlPays
		}
	}
	c.pay(int64(pays))
	if len(b) == 0 {
		return all, nil
	}
	n, err := c.Conn.Write(b)
	return n + all - len(b), err
}

// tell writes the last of the frames, and GOAWAY, unless that is done; writing is held.
func (c *Conn) tell(last []byte) error {
	select {
	case <-c.told:
		return nil
	default:
	}
	defer close(c.told)
	text := strings.TrimPrefix(c.why.Error(), "inbound: ")
	b := binary.BigEndian.AppendUint32(slices.Clip(last), uint32(8+len(text))<<8|typeGoAway)
	b = append(b, 0, 0, 0, 0, 0)
	b = binary.BigEndian.AppendUint32(b, 1<<31-1) // any RPC may have been heard
	b = binary.BigEndian.AppendUint32(b, enhanceYourCalm)
	_, err := c.Conn.Write(append(b, text...))
	return err
}

// leave tells the peer why its connection is closed, between two frames, and gives it a moment to
// read that: what it sends meanwhile is dropped, or the system would drop the reason.
func (c *Conn) leave(why error) {
	c.Closing(why)
	_ = c.Conn.SetDeadline(time.Now().Add(goodbye))
	c.writing.Lock()
	c.why = why
	c.writing.Unlock()
	if _, err := c.Write(nil); err != nil {
		return
	}
	select {
	case <-c.told:
		_, _ = io.CopyN(io.Discard, c.Conn, goodbyeBytes)
	case <-time.After(goodbye):
	case <-c.done:
	}
}

// over says that gRPC takes nothing more for an RPC. It reports whether one was open.
func (c *Conn) over(id uint32) (open bool) {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	r := c.rpcs[id]
	if r == nil || r.over {
		return false
	}
	r.close()
	return true
}

// data charges a data frame of n bytes. It reports whether its RPC takes it.
func (c *Conn) data(id uint32, n int, padded bool) (taken bool, err error) {
	r := c.last
	if r == nil || r.id != id {
		c.m.mu.Lock()
		r = c.rpcs[id]
		c.m.mu.Unlock()
	}
	if c.last = r; r == nil { // it is over
		return false, nil
	}
	ended := 0 // messages that end in this frame
	if padded || r.coming < int64(n) {
		b, err := c.r.Peek(headerBytes + n)
		if err != nil {
			return false, err
		}
		b = b[headerBytes:]
		if padded {
			pad := int(b[0])
			if b = b[1:]; pad > len(b) {
				return true, nil // gRPC ends the connection
			}
			b = b[:len(b)-pad]
		}
		ended = r.scan(b)
	} else if r.coming -= int64(n); r.coming == 0 {
		ended = 1
	}
	coming := r.coming
	if coming > 0 && r.length() > c.max { // gRPC refuses the message, in words of its own, once it has those before
		if !r.known && ended == 0 {
			r.cancel(&TooLargeError{Bytes: r.length(), Most: c.max})
		}
		coming, r.known = 0, true
	}
	r.known = r.known || ended > 0
	return r.charge(n, coming, ended)
}

// length returns the bytes of the message of which some have not come.
func (r *RPC) length() int64 { return int64(binary.BigEndian.Uint32(r.prefix[1:])) }

// largeCost is what is charged for n bytes of a message that is larger than the server's own:
// its frames and HeapShare of its bytes, until it is consumed. gRPC joins the frames in Go's
// heap and decodes the message there before it frees them: that is three times its bytes, and
// what is decoded stays. Smaller messages are charged their frames alone: those of sessions
// are not joined, and what is decoded of a request is less than the frames that it frees.
func largeCost(n int64) int64 {
	return (n/wire.FrameBytes+1)*(wire.FrameBytes+overhead) + HeapShare*n
}

// frameCost is what gRPC allocates for a data frame of n bytes.
func frameCost(n int) int64 {
	switch {
	case n > wire.MediumBytes:
		return wire.FrameBytes + overhead
	case n > wire.SmallBytes:
		return wire.MediumBytes + overhead
	}
	return int64(n+n/8) + overhead // the allocator rounds up
}

// scan follows the messages through bytes of the peer, and returns how many end in them.
func (r *RPC) scan(b []byte) (ended int) {
	for len(b) > 0 {
		if r.coming > 0 {
			n := min(int64(len(b)), r.coming)
			b = b[n:]
			if r.coming -= n; r.coming == 0 {
				ended++
			}
			continue
		}
		n := copy(r.prefix[r.got:], b)
		b = b[n:]
		if r.got += n; r.got == prefixBytes {
			r.got = 0
			if r.coming = int64(binary.BigEndian.Uint32(r.prefix[1:])); r.coming == 0 {
				ended++
			}
		}
	}
	return ended
}

// charge charges a frame of so many bytes, with which messages have ended, and after which
// coming bytes of the current one are still to come: those, too, but of a message larger than
// the server's own at most one of these, or its first byte would take what others need. What
// can never be had ends the RPC at once. Else charge waits until there is memory. While
// messages of the connection are in parts their rest waits with it: then it may have all
// that there is, and the RPC is told to end if nothing is consumed in a moment. It reports
// whether the RPC takes the frame: nobody would read what comes after its end.
func (r *RPC) charge(bytes int, coming int64, ended int) (taken bool, err error) {
	c := r.c
	m := c.m
	m.mu.Lock()
	if r.gone() {
		m.mu.Unlock()
		return false, nil
	}
	r.sent += int64(bytes)
	cost, ahead, rest := frameCost(bytes), min(coming, m.own), int64(0)
	large := coming > 0 && r.length() > m.own
	if large || r.large {
		cost += HeapShare * int64(bytes)
	}
	if large {
		rest = largeCost(coming) - ahead
		before := r.part
		if ended > 0 { // that is of others
			before = 0
		}
		if takes, most := before+cost+ahead+rest, m.limit-m.share; takes > most {
			r.drop()
			m.mu.Unlock()
			r.cancel(&TooLargeError{Bytes: r.length(), Most: most, Takes: takes})
			return false, nil
		}
	}
	n := cost + ahead - r.ahead
	switch {
	case n <= 0, c.parts > 0 && m.grows(r, n):
		m.add(c, n)
	case c.parts > 0 || !m.try(r, n):
		c.wants, c.wanting, c.urgent, c.looked = n, r, c.parts > 0, c.consumed
		m.waiting = append(m.waiting, c)
		m.mu.Unlock()
		if charged, err := c.wait(); err != nil || !charged {
			return false, err
		}
		m.mu.Lock()
	}
	defer m.mu.Unlock()
	if r.gone() { // meanwhile
		m.add(c, -n)
		return false, nil
	}
	r.ahead, r.rest = ahead, rest
	if r.head == len(r.whole) && (r.part == 0 || ended > 0 || large && r.came >= slowest) {
		r.since, r.came = time.Now(), 0
	}
	if ended > 0 {
		r.queue(false)
	}
	if r.queue(large); large {
		c.consumed++
	}
	r.came += int64(bytes)
	partial := coming > 0 || r.got > 0
	r.setParts(partial)
	r.part += cost
	if ended > 0 {
		rest := int64(0)
		if partial {
			rest = cost
		}
		r.whole = append(r.whole, batch{ended, r.part - rest})
		r.ready += r.part - rest
		r.part = rest
	}
	return true, nil
}

// wait waits until what c wants is charged, or not wanted any more.
func (c *Conn) wait() (charged bool, err error) {
	c.m.mu.Lock()
	if c.consumed != c.stuckAt || time.Since(c.waited) >= stale {
		c.stuck, c.stuckAt = time.Now(), c.consumed
	}
	c.m.mu.Unlock()
	begin := time.Now()
	look := time.NewTicker(lookEvery)
	defer func() {
		look.Stop()
		c.waited = time.Now()
	}()
	for {
		c.m.collect()
		select {
		case charged := <-c.granted:
			return charged, nil
		case <-c.done:
			return c.giveUp(net.ErrClosed)
		case <-look.C:
		}
		waited := time.Since(begin)
		if rpc := c.m.victim(c, waited); rpc != nil { // a collection may have taken long: before c is closed
			rpc.cancel(ErrMemory) // without the lock: gRPC opens RPCs under one of its own
		}
		if time.Since(c.stuck) >= pause { // it may have gone long ago: nobody reads that
			return c.giveUp(fmt.Errorf("%w: waited %v", ErrMemory, pause))
		}
	}
}

// giveUp stops waiting, unless that was over already.
func (c *Conn) giveUp(err error) (charged bool, _ error) {
	m := c.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if c.wants == 0 {
		return <-c.granted, nil
	}
	c.unwant()
	if errors.Is(err, ErrMemory) {
		m.denied++
	}
	return false, err
}

// unwant takes c out of those who wait; mu is held.
func (c *Conn) unwant() {
	c.m.waiting = slices.DeleteFunc(c.m.waiting, func(o *Conn) bool { return o == c })
	c.wants, c.wanting, c.urgent = 0, nil, false
	c.m.admit()
}

// Open charges the RPC whose headers gRPC has just read, with these fields. It reports
// false if there is no memory for it. cancel, told ErrMemory or a *TooLargeError, ends the
// RPC; End follows.
func (c *Conn) Open(fields map[string][]string, cancel func(why error)) (*RPC, bool) {
	r := &RPC{c: c, id: c.opening, cancel: cancel, own: rpcBytes}
	for k, values := range fields {
		r.own += HeapShare * (int64(len(k)) + fieldBytes)
		for _, v := range values {
			r.own += HeapShare * (int64(len(v)) + fieldBytes)
		}
	}
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if full := c.m.opened+r.own > c.m.rpcs && c.opened > Free/2; full || !c.room(r.own) {
		return nil, c.m.deny()
	}
	c.m.add(c, r.own)
	c.rpcs[r.id] = r
	r.opened(r.own)
	return r, true
}

// locked runs f with the lock, unless r is nil.
func (r *RPC) locked(f func(*RPC)) {
	if r == nil {
		return
	}
	r.c.m.mu.Lock()
	defer r.c.m.mu.Unlock()
	f(r)
}

// opened notes n bytes more for RPCs themselves; mu is held.
func (r *RPC) opened(n int64) {
	r.c.opened += n
	r.c.m.opened += n
}

// Admitted says that a limit of its own holds for the RPC from now on.
func (r *RPC) Admitted() {
	r.locked(func(r *RPC) {
		if !r.ended && !r.admitted {
			r.admitted = true
			r.own -= rpcBytes
			r.opened(-rpcBytes)
			r.c.m.add(r.c, -rpcBytes)
		}
	})
}

// Begun says that there is a handler, which ends with End.
func (r *RPC) Begun() { r.locked(func(r *RPC) { r.begun = true }) }

// Cancelled says that the RPC is over. If there is no handler, there may never be one:
// gRPC does not start it for an RPC whose time was over before.
func (r *RPC) Cancelled() {
	r.locked(func(r *RPC) {
		if !r.begun {
			r.end()
			r.close()
		}
	})
}

// Next says that the handler reads, or has, the next message: the one before is consumed.
func (r *RPC) Next() {
	r.locked(func(r *RPC) {
		r.consume()
		r.taken = true
	})
}

// Consumed says that the handler does without the message that it has.
func (r *RPC) Consumed() { r.locked((*RPC).consume) }

// Comes reports whether the peer sends at least rate bytes a second for the RPC, on average of
// the time over, or of half of it, and nobody waits for memory. It must be called often in that time.
func (r *RPC) Comes(rate float64, over time.Duration) (comes bool) {
	r.locked(func(r *RPC) {
		now := sample{time.Now(), r.sent}
		if now.at.Sub(r.later.at) >= over/2 {
			r.earlier, r.later = r.later, now
		}
		n, took := now.bytes-r.earlier.bytes, now.at.Sub(r.earlier.at)
		comes = n > 0 && float64(n) >= rate*took.Seconds() && len(r.c.m.waiting) == 0
	})
	return comes
}

// Holds returns what the message that the handler has is charged.
func (r *RPC) Holds() (bytes int64) {
	r.locked(func(r *RPC) {
		if r.taken && r.head < len(r.whole) {
			bytes = r.whole[r.head].charged
		}
	})
	return bytes
}

// consume uncharges the message that the handler has, if there is one; mu is held.
func (r *RPC) consume() {
	if !r.taken || r.head == len(r.whole) {
		return
	}
	r.taken = false
	r.since, r.came = time.Now(), 0
	if !r.shed { // or each that is ended would let its connection wait anew
		r.c.consumed++
	}
	b := &r.whole[r.head]
	if b.messages--; b.messages > 0 {
		return
	}
	n := b.charged
	r.ready -= n
	r.head++
	switch left := len(r.whole) - r.head; {
	case left == 0 && cap(r.whole) > keptBatches:
		r.whole, r.head = nil, 0
	case left == 0, r.head >= keptBatches && r.head >= left: // no more moves than messages
		r.whole = r.whole[:copy(r.whole, r.whole[r.head:])]
		r.head = 0
	}
	r.c.m.add(r.c, -n)
}

// End says that the handler has returned, and reads no more.
func (r *RPC) End() { r.locked((*RPC).end) }

// end notes that the handler has returned; mu is held.
func (r *RPC) end() {
	if r.ended {
		return
	}
	r.consume()
	r.ended = true
	r.refuse()
	r.hold(0)
	if !r.over {
		if r.admitted {
			r.own += rpcBytes
			r.opened(rpcBytes)
			r.c.m.add(r.c, rpcBytes)
		}
		r.kept = r.own + r.unread()
		r.c.keep(r.kept)
	}
	r.forget()
}

// close notes that gRPC takes nothing more for the RPC; mu is held.
func (r *RPC) close() {
	if r.over {
		return
	}
	r.over = true
	r.refuse()
	r.forget()
	r.c.keep(-r.kept)
}

// gone reports whether nobody reads what comes for the RPC; mu is held.
func (r *RPC) gone() bool { return r.over || r.ended || r.shed }

// refuse gives up what was to come for the RPC; mu is held.
func (r *RPC) refuse() {
	r.setParts(false)
	r.queue(false)
	if r.c.wanting == r {
		r.c.unwant()
		r.c.granted <- false
	}
	ahead := r.ahead
	r.ahead = 0
	r.c.m.add(r.c, -ahead)
}

// drop notes that the RPC is told to end; mu is held.
func (r *RPC) drop() {
	r.shed = true
	r.c.m.denied++
	r.refuse()
}

// queue notes whether the RPC waits for the rest of a larger message; mu is held.
func (r *RPC) queue(large bool) {
	m := r.c.m
	switch {
	case large && !r.large:
		m.line = append(m.line, r)
	case !large && r.large:
		m.line = slices.DeleteFunc(m.line, func(o *RPC) bool { return o == r })
		defer m.admit() // for the one that is first now
	}
	r.large = large
}

// forget leaves what lies unread to the collector, once nothing can be read and nothing
// comes; mu is held.
func (r *RPC) forget() {
	if !r.ended || !r.over {
		return
	}
	delete(r.c.rpcs, r.id)
	r.opened(-r.own)
	unread := r.unread()
	if r.c.closed && r.c.held > Free { // many RPCs end with it
		unread += r.own
	} else {
		r.c.m.add(r.c, -r.own)
	}
	r.own = 0
	r.c.m.leave(r.c, unread)
	r.whole, r.head, r.ready, r.part = nil, 0, 0, 0
}

// Take reports whether there is memory for the handler to keep so many bytes, in total, of what
// the peer has said, in Go's heap. They are charged then.
func (r *RPC) Take(n int64) bool {
	taken := r == nil
	r.locked(func(r *RPC) {
		n *= HeapShare
		if taken = !r.ended && (r.c.room(n-r.holds) || r.c.m.deny()); taken {
			r.hold(n)
		}
	})
	return taken
}

// hold charges what the handler keeps; mu is held.
func (r *RPC) hold(n int64) {
	r.c.m.add(r.c, n-r.holds)
	r.holds = n
}

// unread is what the RPC is charged for messages that it has not consumed; mu is held.
func (r *RPC) unread() int64 { return r.ready + r.part + r.ahead }

// setParts notes whether the RPC waits for the rest of a message; mu is held.
func (r *RPC) setParts(waits bool) {
	if r.waits != waits {
		r.waits = waits
		if waits {
			r.c.parts++
		} else {
			r.c.parts--
		}
	}
}

// first reports whether the RPC is first in line; mu is held.
func (r *RPC) first() bool { return r.large && r.c.m.line[0] == r }

// inTurn reports whether the RPC waits for its turn: it is the first in line, or that goes on;
// mu is held.
func (r *RPC) inTurn() bool {
	first := r.first() || r.large && r.c.m.line[0].c.wanting != r.c.m.line[0]
	return first && r.c.wanting == r
}

// stale reports whether a message of the RPC is not consumed, or hardly comes though it does
// not wait for its turn; mu is held.
func (r *RPC) stale() bool {
	took := time.Since(r.since)
	slow := float64(r.came) < took.Seconds()*slowest && !r.inTurn()
	return took >= stale && (r.head < len(r.whole) || slow)
}

// heaviest returns the stale RPC with the most unread bytes, except but; mu is held.
func (c *Conn) heaviest(but *RPC) (most *RPC) {
	var bytes int64
	for _, r := range c.rpcs {
		if r == but || r.shed || !r.stale() {
			continue
		}
		if n := r.unread(); n > bytes {
			most, bytes = r, n
		}
	}
	return most
}

// Room reports whether n bytes more may be queued for the peer.
func (c *Conn) Room(n int64) bool {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	return c.room(n) || c.m.deny()
}

// room reports whether c may have n bytes more for what it asked for; mu is held.
func (c *Conn) room(n int64) bool {
	return n <= 0 || c.charged+c.queued+n <= Free || c.m.within(c, n)
}

// Await waits until n bytes more may be queued for the peer, without end if it does not read,
// or done is closed. The other part of the memory is left to what peers send.
func (c *Conn) Await(n int64, done <-chan struct{}) {
	for !c.MayQueue(n) {
		select {
		case <-done:
			return
		case <-time.After(queueEvery):
		}
	}
}

// MayQueue reports whether n bytes more may be queued. If not, it is for peers that do not read.
func (c *Conn) MayQueue(n int64) bool {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if c.queued+n <= Free || c.m.queued+n <= (c.m.limit-c.m.larger)/beginOf && c.m.used+c.m.queued+n <= c.m.limit {
		return true
	}
	if c.m.searches() {
		c.m.shed()
	}
	return false
}

// Queue counts a message of n bytes that gRPC has in its queue for the peer. They do not count in
// the connection's own share, which keeps it from being read: it may bring the peer's window.
func (c *Conn) Queue(n int64) (look int) {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	c.fresh++
	c.queue(n)
	return c.looks
}

// Unqueue says that gRPC has let go of a message for which Queue has returned look.
func (c *Conn) Unqueue(n int64, look int) {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if look == c.looks {
		c.fresh--
	} else {
		c.found--
	}
	c.queue(-n)
}

// queue notes n bytes more, or fewer than none, in gRPC's queue; mu is held.
func (c *Conn) queue(n int64) {
	if c.closed { // End has uncharged them
		return
	}
	before := c.queued
	c.queued += n
	c.m.queued += n
	if c.queued > Free && (n < 0 || before <= Free) {
		c.drained = time.Now()
	}
	if n < 0 {
		c.m.admit()
	}
}

// look looks at what gRPC has in its queue, and reports whether it has found the same once before:
// the peer has not read it all this while; mu is held.
func (c *Conn) look() (stuck bool) {
	stuck = c.found > 0
	c.found += c.fresh
	c.fresh = 0
	c.looks++
	return stuck
}

// deaf reports whether the peer does not read what c has for it; mu is held.
func (c *Conn) deaf() bool {
	return !c.shed && (c.held > Free && time.Since(c.since) >= stale || c.queued > Free && time.Since(c.drained) >= patience)
}

// keep notes n bytes more, or fewer than none, that the peer has to read something for;
// mu is held.
func (c *Conn) keep(n int64) {
	if before := c.held; before <= Free && before+n > Free {
		c.since = time.Now()
	}
	c.held += n
}
