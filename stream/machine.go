package stream

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// Config of one side of a session.
type Config struct {
	Server  bool
	Session tensor.ID      // chosen by the client; a server learns it from hello
	Check   codec.Checksum // client: the kind for the session; zero is CRC32C
	// Codecs are those that this side decodes, the best liked first, and encodes with
	// when the peer decodes them. Empty is none: chunks go and come as they are.
	Codecs []codec.Codec
	Limits Limits
}

// EventKind says what an Event tells.
type EventKind uint8

// The events.
const (
	// EventOpened: the session's hellos have been exchanged.
	EventOpened EventKind = iota + 1
	// EventReady (server): a call has come and every input is announced.
	EventReady
	// EventTensor: an incoming tensor was announced. If Desc.OnAllowance, its
	// whole memory must be lent while handling this event, or the tensor failed.
	EventTensor
	// EventChunk: bytes [Off, Off+N) of an incoming tensor are in place.
	EventChunk
	// EventWhole: every byte of an incoming tensor is in place.
	EventWhole
	// EventStop: the call has failed or was cancelled, for the reason in Code and
	// Text. Whoever works for it should stop.
	EventStop
	// EventClosed: the call is over, and all memory lent for it has been returned.
	// A call's last event, once, also for a call that never was ready. Done is set
	// on the client.
	EventClosed
	// EventDrain: the peer opens and takes nothing new.
	EventDrain
)

// Event is something that happened while a machine handled its input. Pointers
// are lent until the next call of the machine.
type Event struct {
	Kind   EventKind
	Call   tensor.ID
	Tensor tensor.ID
	Desc   *frame.Desc
	Part   *frame.Call // EventReady
	Done   *frame.Done // EventClosed on the client
	N      int64
	Off    int64
	Code   frame.Code
	Text   string

	done   func(filled bool) // of memory to be returned: no event for the holder
	filled bool
}

// Machine is one side of a session. It belongs to one goroutine at a time.
type Machine struct {
	cfg    Config
	limits Limits
	kind   codec.Checksum
	code   codec.Codec // what chunks are sent in
	peer   frame.Hello // as far as it binds us
	err    *frame.Error

	helloSent, helloSeen bool
	draining, drained    bool // we drain; the peer drains
	shut                 bool
	peerDone             bool // the peer sends nothing more

	calls  map[tensor.ID]*call
	ins    map[tensor.ID]*in
	outs   map[tensor.ID]*out
	closed []tensor.ID            // grows to closedIDs, then the oldest makes room
	gone   map[tensor.ID]struct{} // nil: none
	nextID int                    // place of the oldest in closed

	events []Event
	taken  int                                       // events handed out
	free   func(done func(filled bool), filled bool) // has Event run done

	// What waits to be sent.
	drain     *frame.Drain
	callQ     []*call // client: to be opened
	descQ     []*out
	creditQ   []*in
	ackQ      []*in
	cancelQ   []tensor.ID
	failQ     []frame.Failure
	doneQ     []*call
	ring      []*out // with chunks to send; ready tensors take turns
	turn      int
	small     []*out // on allowance: before the ring
	smallRun  int    // chunks taken from small since one was taken from ring
	announced int    // outgoing tensors the peer counts as open
	incoming  int    // incoming tensors that count as open
	running   int    // calls whose end is not decided
	opened    int    // client: weight of the calls the peer counts as open
	numbered  uint64 // calls so far
	kept      int    // server: bytes that calls keep, call by call
	waiting   int    // bytes of text in failQ and doneQ
	most      int    // entries that calls, ins or outs have had since they were made

	allowIn  int64 // allowance used by the peer
	allowOut int64 // allowance used by us

	began   Instant
	lastUse Instant // when a call was last seen open, or the session began
	ticked  Instant // when the slow timers were last looked at
	lazyAt  Instant // when lazy acknowledgements are due; 0: none wait

	stats Stats
}

// Stats counts what a machine has done. Bytes are of tensors, in whatever codec
// they came.
type Stats struct {
	BytesIn, BytesOut   int64
	ChunksIn, ChunksOut int64
	Corrupt, Duplicate  int64
	CallsOpened         int64
}

// Add adds o's counts.
func (s *Stats) Add(o Stats) {
	s.BytesIn += o.BytesIn
	s.BytesOut += o.BytesOut
	s.ChunksIn += o.ChunksIn
	s.ChunksOut += o.ChunksOut
	s.Corrupt += o.Corrupt
	s.Duplicate += o.Duplicate
	s.CallsOpened += o.CallsOpened
}

type call struct {
	part     frame.Call
	number   uint64 // in the order of opening
	ready    bool   // server: EventReady was given
	sent     bool   // client: opened on the wire
	finished bool   // server: done is decided; client: done has come, or the call was given up
	told     bool   // server: done was sent; client: the call was given up, or its results are whole
	queued   bool   // in doneQ
	done     frame.Done
	missing  int // server: inputs not announced yet
	kept     int // server: bytes, part of the machine's
	busy     int // claims open on its incoming tensors
	ins      []*in
	outs     []*out
	began    Instant
}

// timeout returns what the call may take; 0 is no limit. It is the engine's side
// that keeps it, once the inputs are announced.
func (c *call) timeout() Instant { return Instant(min(c.part.TimeoutMillis, 1<<40)) * second / 1000 }

func (c *call) weight() int { return max(1, len(c.part.Inputs)) }

// in is a tensor on its way to us.
type in struct {
	desc   frame.Desc
	geo    tensor.Geometry
	asm    *assembler.Assembler
	call   *call
	limit  uint32 // last sent
	acked  uint32 // last sent
	resend []uint32
	dead   bool
	open   bool  // counts in incoming
	share  int64 // of the allowance
	last   Instant
	inCred bool // in creditQ
	inAck  bool // in ackQ
}

// out is a tensor on its way to the peer.
type out struct {
	desc      frame.Desc
	geo       tensor.Geometry
	chunks    *chunker.Chunker
	call      *call
	limit     uint32
	announced bool
	queued    bool // in ring or small
	dead      bool
	share     int64
	last      Instant
}

// New returns a machine. now is the first moment of its time.
func New(cfg Config, now Instant) *Machine {
	if !cfg.Check.Valid() {
		cfg.Check = codec.CRC32C
	}
	cfg.Codecs = slices.Clone(cfg.Codecs[:min(len(cfg.Codecs), frame.HelloCodecs)])
	m := &Machine{
		cfg: cfg, limits: cfg.Limits.WithDefaults(), kind: cfg.Check,
		peer:  frame.Hello{MaxChunkBytes: 1, MaxOpenTensors: 1},
		calls: make(map[tensor.ID]*call), ins: make(map[tensor.ID]*in), outs: make(map[tensor.ID]*out),
		began: now, lastUse: now,
	}
	m.free = func(done func(filled bool), filled bool) {
		if done != nil {
			m.tell(Event{done: done, filled: filled})
		}
	}
	return m
}

// Stats returns the counts so far.
func (m *Machine) Stats() Stats { return m.stats }

// Session returns the session's ID; zero on a server that has seen no hello.
func (m *Machine) Session() tensor.ID { return m.cfg.Session }

// Server reports which side this is.
func (m *Machine) Server() bool { return m.cfg.Server }

// Checksum returns the kind of the session's checksums.
func (m *Machine) Checksum() codec.Checksum { return m.kind }

// Codec returns what chunks are to be sent in: the first in the peer's hello that
// this side's Config names too.
func (m *Machine) Codec() codec.Codec { return m.code }

// Open reports whether the hellos have been exchanged.
func (m *Machine) Open() bool { return m.helloSeen && !m.shut }

// Err returns what ended the session, or nil.
func (m *Machine) Err() error {
	if m.err == nil {
		return nil
	}
	return m.err
}

// PeerChunkBytes returns the largest chunk the peer receives.
func (m *Machine) PeerChunkBytes() int64 {
	return int64(min(m.peer.MaxChunkBytes, m.limits.ChunkBytes))
}

// Draining reports whether either side opens nothing new.
func (m *Machine) Draining() bool { return m.draining || m.drained }

// Idle reports whether no call is open.
func (m *Machine) Idle() bool { return len(m.calls) == 0 }

// Calls returns the number of open calls.
func (m *Machine) Calls() int { return len(m.calls) }

// Event returns the next thing that happened, and runs the done functions of
// memory that was returned before it. Events come in order; handling one may cause
// more.
func (m *Machine) Event() (Event, bool) {
	for m.taken < len(m.events) {
		e := m.events[m.taken]
		m.taken++
		if e.done == nil {
			return e, true
		}
		e.done(e.filled)
	}
	clear(m.events)
	if m.events = m.events[:0]; cap(m.events) > keptEvents {
		m.events = nil
	}
	m.taken = 0
	return Event{}, false
}

func (m *Machine) tell(e Event) { m.events = append(m.events, e) }

func (m *Machine) violate(code frame.Code, format string, args ...any) *frame.Error {
	if m.err == nil {
		m.err = frame.Errorf(code, format, args...)
	}
	return m.err
}

// forget moves an ID to the ones whose frames are ignored.
func (m *Machine) forget(id tensor.ID) {
	m.most = max(m.most, len(m.calls), len(m.ins), len(m.outs)) // whatever ends passes here
	if m.gone == nil {
		m.gone = make(map[tensor.ID]struct{})
	}
	m.gone[id] = struct{}{}
	if len(m.closed) < closedIDs {
		m.closed = append(m.closed, id)
		return
	}
	delete(m.gone, m.closed[m.nextID])
	m.closed[m.nextID] = id
	m.nextID = (m.nextID + 1) % closedIDs
}

func (m *Machine) isGone(id tensor.ID) bool {
	_, ok := m.gone[id]
	return ok
}

// Close ends the session for good: every call stops with code and text, every
// incoming tensor that no claim holds is let go, nothing more is sent. The last
// claims still have to be committed.
func (m *Machine) Close(code frame.Code, text string) {
	if m.shut {
		return
	}
	m.shut = true
	for _, c := range m.inOrder() {
		if !c.told && (!c.finished || c.done.Code == frame.OK) {
			m.stop(c, code, text)
		}
		c.told = true
		m.settle(c)
	}
	m.callQ, m.descQ, m.creditQ, m.ackQ, m.cancelQ, m.failQ, m.doneQ, m.ring, m.small = nil, nil, nil, nil, nil, nil, nil, nil, nil
	m.waiting = 0
}

// inOrder returns the open calls in the order of their opening, so that a
// machine does the same whenever it is told the same.
func (m *Machine) inOrder() []*call {
	return slices.SortedFunc(maps.Values(m.calls), func(a, b *call) int { return cmp.Compare(a.number, b.number) })
}

// open notes a new call.
func (m *Machine) open(c *call, now Instant) {
	if len(m.calls) == 0 {
		m.ticked = now
	}
	m.numbered++
	c.number, c.began = m.numbered, now
	m.calls[c.part.ID] = c
	m.running++
	m.stats.CallsOpened++
	m.lastUse = now
}

// stop gives a call up on this side: its outgoing memory is let go, its incoming
// tensors take nothing more, and its worker is told.
func (m *Machine) stop(c *call, code frame.Code, text string) {
	m.finish(c)
	if c.queued {
		m.waiting += len(text) - len(c.done.Message)
	}
	c.done = frame.Done{Call: c.part.ID, Code: code, Message: text}
	for _, t := range c.outs {
		m.dropOut(t)
	}
	for _, t := range c.ins {
		t.drop()
	}
	if c.ready || !m.cfg.Server {
		m.tell(Event{Kind: EventStop, Call: c.part.ID, Code: code, Text: text})
	}
}

// finish notes that a call's end is decided.
func (m *Machine) finish(c *call) {
	if !c.finished {
		c.finished = true
		m.running--
	}
}

// settle removes a call when nothing of it is left.
func (m *Machine) settle(c *call) {
	if !c.finished || !c.told || c.busy > 0 || m.calls[c.part.ID] != c {
		return
	}
	if m.cfg.Server && c.done.Code == frame.OK && !m.shut && !m.peerDone {
		for _, t := range c.outs {
			if !t.dead {
				return // results wait for their acknowledgement
			}
		}
	}
	for _, t := range c.outs {
		m.dropOut(t)
	}
	for _, t := range c.ins {
		t.drop()
		m.dropIn(t)
	}
	delete(m.calls, c.part.ID)
	m.forget(c.part.ID)
	m.kept -= c.kept
	if len(m.calls) == 0 && m.most > keptQueue { // a map never shrinks
		m.calls, m.ins, m.outs = make(map[tensor.ID]*call), make(map[tensor.ID]*in), make(map[tensor.ID]*out)
		m.most = 0
	}
	if !m.cfg.Server && c.sent {
		m.opened -= c.weight()
	}
	e := Event{Kind: EventClosed, Call: c.part.ID, Code: c.done.Code, Text: c.done.Message}
	if !m.cfg.Server {
		e.Done = &c.done
	}
	m.tell(e)
}

// PeerDone notes that the peer has sent its last frame. On a server, calls whose
// inputs are incomplete fail, and results are not waited for any more once they
// are sent: their acknowledgements can not come. On a client the session is over.
func (m *Machine) PeerDone() {
	m.peerDone = true
	for _, c := range m.inOrder() {
		if !m.cfg.Server {
			m.abandon(c, frame.Unavailable, "the server ended the session")
			continue
		}
		for _, t := range c.outs {
			t.chunks.AckSent()
		}
		open := c.missing > 0
		for _, t := range c.ins {
			open = open || !t.dead && !t.asm.Whole()
		}
		if open {
			m.fail(c, frame.InvalidArgument, "the client ended its stream before every input was whole; send all chunks first")
		}
		m.settle(c)
	}
}

// drop gives an incoming tensor up: its memory returns to the lender, with the
// commit of a claim that is still open.
func (t *in) drop() {
	t.dead = true
	if t.asm != nil {
		t.asm.Drop()
	}
}

// dropIn forgets an incoming tensor.
func (m *Machine) dropIn(t *in) {
	if m.ins[t.desc.Tensor] != t {
		return
	}
	delete(m.ins, t.desc.Tensor)
	m.forget(t.desc.Tensor)
	m.uncount(t)
}

// shed (server) lets go of the incoming tensors of a call whose end is decided: its
// done may wait for long to be read. The last claim comes back here.
func (m *Machine) shed(c *call) {
	if m.cfg.Server && c.finished && c.busy == 0 {
		for _, t := range c.ins {
			t.asm, t.resend = nil, nil // a queue may know t
		}
		c.ins = nil
	}
}

// uncount stops counting an incoming tensor as open: it is over, or the peer is
// told that it is whole.
func (m *Machine) uncount(t *in) {
	if t.open {
		t.open = false
		m.incoming--
		m.allowIn -= t.share
	}
}

// dropOut lets an outgoing tensor's memory go.
func (m *Machine) dropOut(t *out) {
	if t.dead {
		return
	}
	t.dead = true
	t.chunks.Close()
	delete(m.outs, t.desc.Tensor)
	m.forget(t.desc.Tensor)
	m.allowOut -= t.share
	t.share = 0
	if t.announced {
		m.announced--
	}
}

// NextTick returns when Tick has something to do at the latest.
func (m *Machine) NextTick() Instant {
	var at Instant
	switch {
	case !m.helloSeen:
		at = m.began + m.limits.FirstFrame
	case len(m.calls) > 0:
		at = m.ticked + tickEvery
	default:
		at = m.lastUse + m.limits.SessionIdle
		if len(m.closed) > 0 {
			at = min(at, m.ticked+lateFrames)
		}
	}
	if m.lazyAt != 0 {
		at = min(at, m.lazyAt)
	}
	return at
}

// Tick looks at everything that waits. An error ends the session.
func (m *Machine) Tick(now Instant) error {
	if m.lazyAt != 0 && now >= m.lazyAt {
		m.lazyAt = 0 // Pending sees the acknowledgements from now on
	}
	if m.err != nil {
		return m.err
	}
	if !m.helloSeen {
		if now >= m.began+m.limits.FirstFrame {
			return m.violate(frame.DeadlineExceeded, "no hello for %d s; a session opens with hello", m.limits.FirstFrame/second)
		}
		return nil
	}
	if len(m.calls) == 0 {
		if now >= m.lastUse+m.limits.SessionIdle {
			return m.violate(frame.DeadlineExceeded, "no call for %d s; open a new session when there is one", m.limits.SessionIdle/second)
		}
		if now >= m.ticked+lateFrames {
			m.ticked = now
			m.closed, m.gone, m.nextID = nil, nil, 0
		}
		return nil
	}
	m.lastUse = now
	if now < m.ticked+tickEvery {
		return nil
	}
	m.ticked = now
	idle := m.limits.ChunkIdle
	for _, c := range m.inOrder() {
		if m.cfg.Server && c.missing > 0 && !c.finished && c.timeout() > 0 && now >= c.began+c.timeout() {
			m.fail(c, frame.DeadlineExceeded, "the call's timeout has passed before its inputs were announced")
			continue
		}
		if m.cfg.Server && c.missing > 0 && !c.finished && now >= c.began+idle {
			m.fail(c, frame.DeadlineExceeded, fmt.Sprintf("call expired: %d of its inputs were not announced within %d s", c.missing, idle/second))
			continue
		}
		for _, t := range c.ins {
			if t.dead || t.asm.Whole() || t.asm.Held() >= max(t.limit, t.allowed()) || now < t.last+idle {
				continue
			}
			m.failIn(t, frame.DeadlineExceeded, fmt.Sprintf("tensor %s: no chunk for %d s although credit is unused", t.desc.Tensor, idle/second))
		}
		if !m.cfg.Server {
			continue
		}
		for _, t := range c.outs {
			if t.waits() && now >= t.last+idle {
				m.fail(c, frame.DeadlineExceeded, fmt.Sprintf("call expired: nobody took result %q for %d s", t.desc.Port, idle/second))
				m.giveUp(c)
				break
			}
		}
	}
	return nil
}

// waits reports whether a tensor waits for the peer: for credit, or for an
// acknowledgement, which is due soon after a chunk where not all can be kept.
// Otherwise its maker is the one who is waited for.
func (t *out) waits() bool {
	return !t.dead && t.announced && (t.chunks.Ready(^uint32(0)) || t.chunks.Sent() ||
		t.desc.RetainChunks > 0 && t.chunks.Unacked() > 0)
}

// whole reports whether every byte has come.
func (t *in) whole() bool { return t.asm != nil && t.asm.Whole() }

// allowed is the limit a tensor on allowance has without any credit.
func (t *in) allowed() uint32 {
	if t.desc.OnAllowance {
		return t.geo.Count()
	}
	return 0
}

// giveUp ends the wait for acknowledgements of a call whose done has been sent.
func (m *Machine) giveUp(c *call) {
	for _, t := range c.outs {
		m.dropOut(t)
	}
	m.settle(c)
}
