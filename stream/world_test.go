package stream

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/pierrec/lz4/v4"

	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/lifecycle"
	"github.com/tensorferry/tensorferry/internal/recent"
	"github.com/tensorferry/tensorferry/tensor"
)

// A world is a client's machine and a server's with a bad network between them,
// and a small program on each side that lends, offers and checks as client and
// server do. Whatever happens, by the choices it is given:
//
//   - each call ends exactly once on each side, on the client with bit-exact
//     results or with a code, and after its end nothing more is told of it;
//   - a call that nothing was done to ends well, whatever is done to others;
//   - memory lent is not touched after it came back, memory offered comes back
//     exactly once and is not read after;
//   - without loss nothing waits for a timer, with it everything ends by one;
//   - in the end both machines hold nothing and have forgotten no count.
type world struct {
	choose func(n int) int // one of n, 0 when there is nothing to choose any more
	coded  bool            // both sides know lz4, and content compresses
	trace  []string
	keep   bool // keep the trace

	now      Instant
	cli, srv *party
	calls    map[tensor.ID]*worldCall
	order    []*worldCall
	serial   int
	lossy    bool // something was lost: only a timer helps
	closed   bool
	halfDone bool // the client has ended its side
	lanes    bool // there may be one
	silent   bool // one was cut, and only time tells
	says     bool // the client has something to say: that it waits
}

// worldCall is what the world knows of a call.
type worldCall struct {
	id       tensor.ID
	inputs   []*source
	early    bool   // its result does not depend on its inputs
	blamed   string // why it may end badly
	ended    [2]int // EventClosed on client and server
	ready    int
	sinks    [2][]*sink // client: results, server: inputs
	outs     []*source  // server
	finished bool
	done     frame.Done

	kind     int
	told     bool                     // put: the client has said its end
	all      bool                     // put: the end came
	lost     map[tensor.ID]bool       // put: failed before the server's program knew them
	sums     map[tensor.ID]frame.Code // client
	selected int                      // get
	refused  int                      // get: summaries of what was not found
}

func (c *worldCall) sink(side int, port string) *sink {
	for _, t := range c.sinks[side] {
		if t.port == port {
			return t
		}
	}
	return nil
}

func (c *worldCall) blame(why string) {
	if c.blamed == "" {
		c.blamed = why
	}
}

// source is a tensor on its way out.
type source struct {
	id     tensor.ID
	port   string
	call   *worldCall
	data   []byte
	chunk  int64
	retain uint32 // chunks kept; 0: all
	pieces []span // still to be offered
	out    []*piece
	input  *sink // server: what it is made of
	open   bool

	held   []chunks // of a get: what the client has
	summed bool
	failed bool
	rotten bool // the client found another digest
	blamed string
}

type span struct{ off, n int64 }

type piece struct {
	mem      []byte
	releases int
}

// sink is a tensor on its way in.
type sink struct {
	id    tensor.ID
	call  *worldCall
	port  string
	size  int64
	block int64
	lent  int64
	mem   []*lentMem
	data  []byte
	have  int64 // bytes of filled memory, from the start
	whole bool
	seen  map[span]bool // EventChunk

	failed, checked bool
	held            []span // of a get: what the client has
}

type lentMem struct {
	off    int64
	mem    []byte
	back   bool
	filled bool
}

// party is one side.
type party struct {
	w     *world
	m     *Machine
	peer  *party
	wire  []*frame.Frame // on its way from here
	held  map[*frame.Frame]chunker.Releaser
	claim *openClaim
	lanes [worldLanes]laneEnd
	good  map[chunkName]bool // delivered here whole, at least once
	bad   map[chunkName]int  // delivered here with a flaw
	all   []*sink
	made  []*source
	over  bool
}

type chunkName struct {
	id    tensor.ID
	index uint32
}

type openClaim struct {
	c      Claim
	data   [][]byte
	sum    uint32
	failed error
	done   bool // copied
}

const poison = 0xdb

func (w *world) tracef(format string, args ...any) {
	if w.keep {
		for i, a := range args {
			switch a := a.(type) { // only when somebody will read it
			case tensor.ID:
				args[i] = short(a)
			case *frame.Frame:
				args[i] = describe(a)
			}
		}
		w.trace = append(w.trace, fmt.Sprintf("%v ", w.now)+fmt.Sprintf(format, args...))
	}
}

// fault is what a world panics with when something is wrong.
type fault string

func (w *world) failf(format string, args ...any) { panic(fault(fmt.Sprintf(format, args...))) }

func (w *world) id(kind byte) tensor.ID {
	w.serial++
	return tensor.ID{kind, byte(w.serial >> 8), byte(w.serial)}
}

func short(id tensor.ID) string {
	if id.IsZero() {
		return "-"
	}
	return fmt.Sprintf("%c%d", id[0], int(id[1])<<8|int(id[2]))
}

func newWorld(choose func(n int) int) *world {
	w := &world{choose: choose, calls: map[tensor.ID]*worldCall{}}
	open := 2 + choose(6)
	w.coded = choose(4) == 1
	var codecs []codec.Codec
	least := 4
	if w.coded {
		codecs, least = codec.All(), 24 // what is shorter can not be compressed
	}
	limits := func() Limits {
		return Limits{
			ChunkBytes: uint32(least + 4*choose(4)), AllowanceBytes: uint32(1 + 16*choose(4)), TensorBytes: 1 << 10,
			OpenTensors: open, OpenCalls: open, ChunkIdle: 30 * second, InputIdle: 60 * second, FirstFrame: 10 * second, SessionIdle: 600 * second,
		}
	}
	check := codec.CRC32C
	if choose(8) == 1 {
		check = codec.CRC32
	}
	w.lanes = choose(3) == 1
	lanes := uint32(0)
	if w.lanes {
		lanes = worldLanes
	}
	w.cli = &party{w: w, m: New(Config{Session: w.id('s'), Check: check, Limits: limits(), Codecs: codecs, Lanes: lanes, LanesAtOnce: lanes}, 0)}
	w.srv = &party{w: w, m: New(Config{Server: true, Limits: limits(), Codecs: codec.All(), Stores: true, StoredBytes: 1 << 10}, 0)}
	w.srv.m.OfferLanes(frame.LaneToken{1}, 8, worldLanes)
	w.cli.peer, w.srv.peer = w.srv, w.cli
	for _, p := range []*party{w.cli, w.srv} {
		p.held, p.good, p.bad = map[*frame.Frame]chunker.Releaser{}, map[chunkName]bool{}, map[chunkName]int{}
	}
	w.flow() // the hellos
	if !w.cli.m.Status().Open || !w.srv.m.Status().Open {
		w.failf("the session did not open")
	}
	want := codec.None
	if w.coded {
		want = codec.LZ4
	}
	if w.cli.m.Status().Codec != want || w.srv.m.Status().Codec != want {
		w.failf("codecs are %v and %v, want %v", w.cli.m.Status().Codec, w.srv.m.Status().Codec, want)
	}
	return w
}

func (p *party) server() bool { return p == p.w.srv }

func (p *party) name() string {
	if p.server() {
		return "server"
	}
	return "client"
}

func (p *party) side() int {
	if p.server() {
		return 1
	}
	return 0
}

// content is what a tensor holds by its name.
func (w *world) content(id tensor.ID, n int64) []byte {
	b := bytes.Repeat([]byte{id[2] * 29}, int(n))
	for i := range b {
		switch {
		case !w.coded:
			b[i] += byte(i*11) + byte(i>>8)
		case i%20 == 19: // a few that tell one place from another
			b[i] = byte(i)
		}
	}
	return b
}

// encode does what a session does before it sends, for chunks of any size.
func encode(c *frame.Chunk) bool {
	src := bytes.Join(c.Data, nil)
	out := make([]byte, lz4.CompressBlockBound(len(src)))
	n, err := lz4.CompressBlock(src, out, nil)
	if err != nil || n == 0 || n >= len(src) {
		return false
	}
	c.Codec, c.Data = uint8(codec.LZ4), [][]byte{out[:n/2], out[n/2 : n]}
	return true
}

// result is what the server makes of an input.
func result(input []byte) []byte {
	b := make([]byte, len(input))
	for i, v := range input {
		b[i] = v ^ 0x5a
	}
	return b
}

var constant = []byte("the answer that needs no question")

// cut splits a source into pieces and perhaps changes their order.
func (w *world) cut(s *source) {
	size := int64(len(s.data))
	if s.retain > 0 { // a few chunks at a time, in order, as a reader or an engine makes them
		step := s.chunk * int64(1+w.choose(int(s.retain)))
		s.retain = max(s.retain, uint32(step/s.chunk))
		for off := int64(0); off < size || off == 0; off += step {
			s.pieces = append(s.pieces, span{off, min(step, size-off)})
		}
		return
	}
	for off := int64(0); off < size || off == 0; {
		n := min(int64(1+w.choose(20)), size-off)
		if w.choose(3) == 0 {
			n = size - off
		}
		s.pieces = append(s.pieces, span{off, n})
		off += max(n, 1)
	}
	if w.choose(2) == 1 {
		for i := len(s.pieces) - 1; i > 0; i-- {
			j := w.choose(i + 1)
			s.pieces[i], s.pieces[j] = s.pieces[j], s.pieces[i]
		}
	}
}

// most is how large tensors may get.
func (w *world) most() int {
	if w.coded {
		return 96
	}
	return 48
}

// openCall has the client open a call.
func (w *world) openCall() {
	c := &worldCall{id: w.id('c'), early: w.choose(6) == 1}
	part := frame.Call{ID: c.id, Model: "model"}
	for i := range w.choose(min(4, int(w.cli.m.peer.MaxOpenTensors)+1)) {
		s := &source{id: w.id('i'), port: fmt.Sprintf("in%d", i), call: c, chunk: int64(1 + w.choose(int(w.cli.m.Status().PeerChunkBytes)))}
		s.data = w.content(s.id, int64(w.choose(w.most())))
		if w.choose(3) == 1 {
			s.retain = uint32(1 + w.choose(4))
		}
		w.cut(s)
		c.inputs = append(c.inputs, s)
		part.Inputs = append(part.Inputs, frame.Binding{Port: s.port, Tensor: s.id})
	}
	w.tracef("client opens %v with %d inputs", c.id, len(c.inputs))
	err := w.cli.m.OpenCall(w.now, part)
	switch {
	case w.cli.m.Status().Draining:
		if !errors.Is(err, ErrDraining) {
			w.failf("opening while draining: %v", err)
		}
		return
	case err != nil:
		w.failf("opening: %v", err)
	}
	if w.srv.m.Status().Draining {
		c.blame("drain")
	}
	w.calls[c.id] = c
	w.order = append(w.order, c)
	for _, s := range c.inputs {
		w.cli.announce(s)
	}
	w.cli.events()
}

// announce opens an outgoing tensor.
func (p *party) announce(s *source) {
	s.open = true
	err := p.m.OpenTensor(p.w.now, frame.Desc{
		Tensor: s.id, Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(len(s.data))}},
		ChunkBytes: uint32(s.chunk), Call: s.call.id, Port: s.port, RetainChunks: s.retain,
	})
	if err != nil {
		p.w.failf("%s announces %s: %v", p.name(), short(s.id), err)
	}
	p.made = append(p.made, s)
}

// offer offers the next piece of a source, if its maker has it.
func (p *party) offer(s *source) bool {
	if len(s.pieces) == 0 || s.failed || s.call.ended[p.side()] > 0 {
		return false
	}
	sp := s.pieces[0]
	if s.input != nil && !s.call.early && s.input.have < sp.off+sp.n {
		return false
	}
	if s.retain > 0 {
		out := uint32(0)
		for _, x := range s.out {
			if x.releases == 0 {
				out += uint32(max(1, (int64(len(x.mem))+s.chunk-1)/s.chunk))
			}
		}
		if n := uint32(max(1, (sp.n+s.chunk-1)/s.chunk)); out > 0 && out+n > s.retain {
			return false
		}
	}
	s.pieces = s.pieces[1:]
	x := &piece{mem: bytes.Clone(s.data[sp.off : sp.off+sp.n])}
	err := p.m.Offer(p.w.now, s.id, sp.off, x.mem, func() {
		x.releases++
		for i := range x.mem {
			x.mem[i] = poison
		}
	})
	p.w.tracef("%v offers %v [%d,+%d): %v", p.name(), s.id, sp.off, sp.n, err)
	switch {
	case err == nil:
		s.out = append(s.out, x)
	case !errors.Is(err, ErrClosed):
		p.w.failf("%s offers %s [%d,+%d): %v", p.name(), short(s.id), sp.off, sp.n, err)
	default:
		s.pieces = nil
	}
	return true
}

// lend lends the next block of a sink, if few enough are out.
func (p *party) lend(t *sink) bool {
	if t.lent == t.size && (t.size > 0 || len(t.mem) > 0) || t.failed {
		return false
	}
	most := t.size
	if s := t.call.tensor(t.id); t.call.kind == get && len(s.held) > 0 {
		has, until := s.holds(t.lent)
		if has {
			copy(t.data[t.lent:until], s.data[t.lent:])
			t.held = append(t.held, span{t.lent, until - t.lent})
			n := until - t.lent
			t.lent = until
			p.w.tracef("client holds %d of %v", n, t.id)
			if err := p.m.Hold(p.w.now, t.id, n); err != nil {
				t.failed = true
			}
			t.count()
			return true
		}
		most = until
	}
	out := int64(0)
	for _, l := range t.mem {
		if !l.back {
			out += int64(len(l.mem))
		}
	}
	geo := p.m.in.tensors[t.id]
	if out > 0 && geo != nil && out >= 2*max(t.block, geo.Geo.ChunkBytes) {
		return false
	}
	return p.lendNow(t, min(t.block, most-t.lent))
}

func (p *party) lendNow(t *sink, n int64) bool {
	l := &lentMem{off: t.lent, mem: bytes.Repeat([]byte{poison}, int(n))}
	err := p.m.Lend(p.w.now, t.id, l.mem, func(filled bool) { p.returned(t, l, filled) })
	p.w.tracef("%v lends %d of %v: %v", p.name(), n, t.id, err)
	if err != nil {
		if !errors.Is(err, ErrClosed) {
			p.w.failf("%s lends: %v", p.name(), err)
		}
		return false
	}
	t.mem = append(t.mem, l)
	t.lent += n
	return true
}

// returned takes lent memory back and poisons it.
func (p *party) returned(t *sink, l *lentMem, filled bool) {
	p.w.tracef("%v has [%d,+%d) of %v back, filled %v", p.name(), l.off, len(l.mem), t.id, filled)
	switch {
	case l.back:
		p.w.failf("%s: [%d,+%d) of %s came back twice", p.name(), l.off, len(l.mem), short(t.id))
	case t.call.ended[p.side()] > 0:
		p.w.failf("%s: [%d,+%d) of %s came back after the call's end", p.name(), l.off, len(l.mem), short(t.id))
	case p.claim.holds(t, l, filled), slices.ContainsFunc(p.lanes[:], func(e laneEnd) bool { return e.claim.holds(t, l, filled) }):
		p.w.failf("%s: [%d,+%d) of %s came back, filled %v, with a claim open", p.name(), l.off, len(l.mem), short(t.id), filled)
	}
	l.back, l.filled = true, filled
	if filled {
		p.whole(t, l)
		copy(t.data[l.off:], l.mem)
	}
	for i := range l.mem {
		l.mem[i] = poison
	}
	t.count()
}

// count counts the bytes that are here, from the start.
func (t *sink) count() {
	for t.have = 0; ; {
		from := t.have
		for _, l := range t.mem {
			if l.filled && l.off == t.have {
				t.have += int64(len(l.mem))
			}
		}
		for _, h := range t.held {
			if h.off == t.have {
				t.have += h.n
			}
		}
		if t.have == from {
			return
		}
	}
}

// whole checks that memory that came back full has every byte of its source.
func (p *party) whole(t *sink, l *lentMem) {
	for _, s := range p.peer.made {
		if s.id == t.id && !bytes.Equal(l.mem, s.data[l.off:l.off+int64(len(l.mem))]) {
			p.w.failf("%s: [%d,+%d) of %s came back full with wrong bytes", p.name(), l.off, len(l.mem), short(t.id))
		}
	}
}

// holds reports whether a claim forbids that l of t comes back.
func (c *openClaim) holds(t *sink, l *lentMem, filled bool) bool {
	return c != nil && c.c.tensor.Desc.Tensor == t.id && (!filled || c.touches(l))
}

// touches reports whether a claim's chunk lies in l.
func (c *openClaim) touches(l *lentMem) bool {
	off, n := c.c.tensor.Geo.Span(c.c.Index())
	return off < l.off+int64(len(l.mem)) && l.off < off+n
}

// events handles what a machine tells.
func (p *party) events() {
	for {
		e, ok := p.m.Event()
		if !ok {
			return
		}
		p.event(e)
		p.invariants()
	}
}

func (p *party) event(e Event) {
	w := p.w
	c := w.calls[e.Call]
	if e.Kind == EventOpened {
		return
	}
	w.tracef("%v event %d call %v tensor %v n %d off %d code %d %v", p.name(), e.Kind, e.Call, e.Tensor, e.N, e.Off, e.Code, e.Text)
	if c == nil {
		w.failf("%s: event %d of an unknown call", p.name(), e.Kind)
	}
	if c.ended[p.side()] > 0 {
		w.failf("%s: event %d of %s after its end", p.name(), e.Kind, short(c.id))
	}
	var t *sink
	for _, s := range c.sinks[p.side()] {
		if s.id == e.Tensor {
			t = s
		}
	}
	if c.kind != run && p.eventStored(c, t, e) {
		return
	}
	switch e.Kind {
	case EventTensor:
		if t != nil {
			w.failf("%s: tensor %s announced twice", p.name(), short(e.Tensor))
		}
		t = &sink{id: e.Tensor, call: c, port: e.Desc.Port, size: int64(e.Desc.SizeBytes), seen: map[span]bool{}}
		t.data = make([]byte, t.size)
		t.block = int64(1 + w.choose(16))
		c.sinks[p.side()] = append(c.sinks[p.side()], t)
		p.all = append(p.all, t)
		if e.Desc.OnAllowance {
			p.lendNow(t, t.size)
		}
	case EventReady:
		c.ready++
		if !p.server() || c.ready > 1 {
			w.failf("%s: call %s is ready, time %d", p.name(), short(c.id), c.ready)
		}
		p.start(c)
	case EventChunk:
		if s := (span{e.Off, e.N}); t.seen[s] {
			w.failf("%s: chunk [%d,+%d) of %s counted twice", p.name(), e.Off, e.N, short(t.id))
		} else {
			t.seen[s] = true
		}
	case EventWhole:
		if t.whole {
			w.failf("%s: %s whole twice", p.name(), short(t.id))
		}
		t.whole = true
		if t.have != t.size {
			w.failf("%s: %s is whole, %d of %d bytes came back", p.name(), short(t.id), t.have, t.size)
		}
	case EventStop:
		if c.blamed == "" && !w.closed && !w.lossy {
			w.failf("%s: call %s stopped, nothing was done to it: %d %s", p.name(), short(c.id), e.Code, e.Text)
		}
	case EventClosed:
		c.ended[p.side()]++
		for _, t := range c.sinks[p.side()] {
			for _, l := range t.mem {
				if !l.back {
					w.failf("%s: call %s is closed, [%d,+%d) of %s did not come back", p.name(), short(c.id), l.off, len(l.mem), short(t.id))
				}
			}
		}
		if !p.server() {
			c.done = *e.Done
			if c.kind == run {
				w.ended(c, e)
			}
		}
	}
}

// ended checks how a call ended for the client.
func (w *world) ended(c *worldCall, e Event) {
	if e.Done.Code != e.Code || e.Done.Call != c.id {
		w.failf("client: done %+v in an event of %s code %d", e.Done, short(c.id), e.Code)
	}
	if e.Code != frame.OK {
		if c.blamed == "" && !w.closed && !w.lossy {
			w.failf("client: call %s failed, nothing was done to it: %d %s", short(c.id), e.Code, e.Text)
		}
		if e.Text == "" {
			w.failf("client: call %s failed without a word", short(c.id))
		}
		return
	}
	want := c.wanted()
	if len(e.Done.Outputs) != len(want) {
		w.failf("client: call %s ended with %d outputs, want %d", short(c.id), len(e.Done.Outputs), len(want))
	}
	for _, o := range e.Done.Outputs {
		t := c.sink(0, o.Port)
		if t == nil || t.id != o.Tensor || !t.whole || !bytes.Equal(t.data, want[o.Port]) {
			w.failf("client: call %s: result %s is not right", short(c.id), o.Port)
		}
	}
}

// wanted is what a call's results must be.
func (c *worldCall) wanted() map[string][]byte {
	want := map[string][]byte{}
	for i, s := range c.inputs {
		data := result(s.data)
		if c.early {
			data = constant
		}
		want[fmt.Sprintf("out%d", i)] = data
	}
	if len(c.inputs) == 0 {
		want["out0"] = constant
	}
	return want
}

// start has the server begin with a call.
func (p *party) start(c *worldCall) {
	for i := range max(1, len(c.inputs)) {
		s := &source{id: p.w.id('o'), port: fmt.Sprintf("out%d", i), call: c, chunk: int64(1 + p.w.choose(int(p.m.Status().PeerChunkBytes)))}
		s.data = constant
		if i < len(c.inputs) && !c.early {
			s.input = c.sink(1, c.inputs[i].port)
			s.data = result(c.inputs[i].data) // checked against what came when it is offered
		}
		if p.w.choose(3) == 1 {
			s.retain = uint32(1 + p.w.choose(8))
		}
		p.w.cut(s)
		c.outs = append(c.outs, s)
	}
}

// work has a side's program do one thing for a call.
func (p *party) work(c *worldCall) bool {
	if c.ended[p.side()] > 0 {
		return false
	}
	defer p.events()
	if c.kind != run {
		return p.workStored(c)
	}
	sources := c.inputs
	if p.server() {
		sources = c.outs
	}
	if slices.ContainsFunc(c.sinks[p.side()], p.lend) {
		return true
	}
	if p.server() && (c.ready == 0 || c.finished) {
		return false
	}
	for _, s := range sources {
		if p.server() && !s.open {
			if p.m.calls.open[c.id] == nil || p.m.calls.open[c.id].state >= lifecycle.Finishing {
				return false
			}
			p.announce(s)
			return true
		}
		if s.input != nil && !bytes.Equal(result(s.input.data[:s.input.have]), s.data[:s.input.have]) {
			p.w.failf("server: input %s is not right", short(s.input.id))
		}
		if p.offer(s) {
			return true
		}
	}
	if !p.server() {
		return false
	}
	for _, s := range sources {
		if len(s.pieces) > 0 {
			return false
		}
	}
	c.finished = true
	d := frame.Done{Call: c.id}
	for _, s := range c.outs {
		d.Outputs = append(d.Outputs, frame.Binding{Port: s.port, Tensor: s.id})
	}
	p.w.tracef("server finishes %v", c.id)
	p.m.Finish(d)
	return true
}

// send puts the next frame on the wire.
func (p *party) send() bool {
	if p.over {
		return false
	}
	f := new(frame.Frame)
	pending := p.m.Pending()
	held, ok := p.m.Next(p.w.now, f)
	p.events()
	waits := ok && f.Empty()
	if ok == f.Empty() && !waits || waits && (p.server() || !p.w.says) {
		p.w.failf("%s: next frame %+v, ok %v", p.name(), f, ok)
	}
	if waits {
		p.w.says = false
	}
	if ok && !pending {
		p.w.failf("%s: a frame although nothing was pending", p.name())
	}
	if !ok {
		if held != nil {
			p.w.failf("%s: no frame but a view", p.name())
		}
		return false
	}
	if f.HasChunk() {
		p.held[f] = held
		// Not always, as if too much waited to be sent: what comes again may come in
		// another form.
		if p.m.Status().Codec == codec.LZ4 && p.w.choose(4) > 0 && encode(&f.Chunk) {
			held.Release()
			delete(p.held, f)
		}
		f.Chunk.Sum = p.sum(f.Chunk.Tensor, f.Chunk.Index, f.Chunk.Data)
	}
	p.w.tracef("%v sends %v", p.name(), f)
	p.wire = append(p.wire, f)
	return true
}

func (p *party) sum(id tensor.ID, index uint32, data [][]byte) uint32 {
	sum := p.m.Status().Checksum.Seed(id, index)
	for _, v := range data {
		sum = p.m.Status().Checksum.Update(sum, v)
	}
	return sum
}

// describe is a frame in a line, for traces.
func describe(f *frame.Frame) string {
	var b bytes.Buffer
	if f.Hello != nil {
		fmt.Fprintf(&b, "hello ")
	}
	for _, c := range f.Calls {
		fmt.Fprintf(&b, "call %s ", short(c.ID))
	}
	for _, d := range f.Descs {
		fmt.Fprintf(&b, "desc %s of %s %d/%d allowance %v ", short(d.Tensor), short(d.Call), d.SizeBytes, d.ChunkBytes, d.OnAllowance)
	}
	for _, c := range f.Credits {
		fmt.Fprintf(&b, "credit %s %d ", short(c.Tensor), c.Limit)
	}
	for _, a := range f.Acks {
		fmt.Fprintf(&b, "ack %s %d %v ", short(a.Tensor), a.Below, a.Resend)
	}
	for _, id := range f.Cancels {
		fmt.Fprintf(&b, "cancel %s ", short(id))
	}
	for _, x := range f.Failures {
		fmt.Fprintf(&b, "failure %s %d %s ", short(x.Tensor), x.Code, x.Message)
	}
	if f.HasChunk() {
		fmt.Fprintf(&b, "chunk %s %d in %v ", short(f.Chunk.Tensor), f.Chunk.Index, codec.Codec(f.Chunk.Codec))
	}
	for _, d := range f.Dones {
		fmt.Fprintf(&b, "done %s %d %s ", short(d.Call), d.Code, d.Message)
	}
	for _, e := range f.Ends {
		fmt.Fprintf(&b, "end %s %d ", short(e.Call), e.Tensors)
	}
	for _, s := range f.Summaries {
		fmt.Fprintf(&b, "summary %s %d ", short(s.Tensor), s.Code)
	}
	if f.Drain != nil {
		fmt.Fprintf(&b, "drain")
	}
	return b.String()
}

// flaws a chunk may be delivered with.
const (
	fine = iota
	flipped
	wrongSum
	twice
	twiceFlipped
	conflicting
	cutShort
	lost
)

// deliver gives the peer the oldest frame on the wire, its chunk with a flaw.
func (p *party) deliver(flaw int) bool {
	q := p.peer
	if len(p.wire) == 0 || q.claim != nil {
		return false
	}
	f := p.wire[0]
	p.wire = p.wire[1:]
	held := p.held[f]
	delete(p.held, f)
	release := func() {
		if held != nil {
			held.Release()
			held = nil
		}
	}
	if p.over || q.over {
		release()
		return true
	}
	bare := *f
	bare.Chunk = frame.Chunk{}
	if f.HasChunk() && flaw == lost && bare.Empty() {
		p.w.tracef("lost: %v", f)
		p.w.lossy = true
		release()
		return true
	}
	if err := q.m.Control(p.w.now, f); err != nil {
		p.w.failf("%s: %v", q.name(), err)
	}
	q.events()
	if !f.HasChunk() {
		return true
	}
	chunk := frame.Chunk{Tensor: f.Chunk.Tensor, Index: f.Chunk.Index, Codec: f.Chunk.Codec, Sum: f.Chunk.Sum}
	for _, v := range f.Chunk.Data {
		chunk.Data = append(chunk.Data, bytes.Clone(v))
	}
	release() // the wire has its copy
	switch flaw {
	case flipped, wrongSum, conflicting, cutShort:
		q.take(chunk, flaw)
	case twice, twiceFlipped:
		q.take(chunk, fine)
		if flaw == twiceFlipped {
			q.take(chunk, flipped)
		} else {
			q.take(chunk, fine)
		}
	default:
		q.begin(chunk, fine)
	}
	return true
}

// take has a machine take a chunk from claim to commit.
func (p *party) take(ch frame.Chunk, flaw int) {
	p.begin(ch, flaw)
	p.finishClaim()
}

// owner is the call that a tensor belongs to.
func (w *world) owner(id tensor.ID) (*worldCall, *source) {
	for _, c := range w.order {
		for _, s := range slices.Concat(c.inputs, c.outs) {
			if s.id == id {
				return c, s
			}
		}
	}
	w.failf("tensor %s belongs to nobody", short(id))
	return nil, nil
}

// begin claims a chunk's place.
func (p *party) begin(ch frame.Chunk, flaw int) {
	name := chunkName{ch.Tensor, ch.Index}
	empty := ch.Len() == 0
	data := make([][]byte, len(ch.Data))
	for i, v := range ch.Data {
		data[i] = bytes.Clone(v)
	}
	flip := func() {
		for i := range data {
			if len(data[i]) > 0 {
				data[i][p.w.choose(len(data[i]))] ^= 1 << p.w.choose(8)
				return
			}
		}
	}
	switch flaw {
	case flipped:
		if empty {
			flaw = fine
			break
		}
		flip()
	case wrongSum:
		ch.Sum ^= 1 << p.w.choose(32)
	case conflicting: // whole, with a checksum that fits, but not what was sent
		if empty {
			flaw = fine
			break
		}
		flip()
		ch.Sum = p.sum(ch.Tensor, ch.Index, data)
	case cutShort: // with a checksum that fits: of the wrong length, or undecodable
		if empty {
			flaw = fine
			break
		}
		last := len(data) - 1
		for len(data[last]) == 0 {
			last--
		}
		data[last] = data[last][:len(data[last])-1]
		ch.Sum = p.sum(ch.Tensor, ch.Index, data)
	}
	switch {
	case flaw == conflicting && !p.good[name]:
		flaw = fine // nobody can tell; deliver it as it was
		for i, v := range ch.Data {
			data[i] = bytes.Clone(v)
		}
		ch.Sum = p.sum(ch.Tensor, ch.Index, data)
	case flaw == cutShort:
		p.w.blame(ch.Tensor, "cut short")
	case flaw == conflicting, flaw == wrongSum && p.good[name]:
		p.w.blame(ch.Tensor, "conflict")
	case flaw == flipped && !p.good[name], flaw == wrongSum:
		if p.bad[name]++; p.bad[name] >= 3 {
			p.w.blame(ch.Tensor, "corrupt thrice")
		}
	}
	if flaw == fine {
		p.good[name] = true
	}
	p.w.tracef("%v gets chunk %v %d, flaw %d", p.name(), ch.Tensor, ch.Index, flaw)
	ch.Data = data
	claim := new(openClaim)
	ok, err := p.m.Claim(p.w.now, &ch, &claim.c)
	if err != nil {
		p.w.failf("%s: %v", p.name(), err)
	}
	p.events()
	if ok {
		claim.data = data
		p.claim = claim
	}
}

// finishClaim copies and commits a claim that is open.
func (p *party) finishClaim() bool {
	if p.claim == nil {
		return false
	}
	c := p.claim
	if !c.done {
		c.sum, c.failed = c.c.Copy(c.data)
	}
	p.claim = nil
	p.m.Commit(p.w.now, &c.c, c.sum, c.failed)
	p.events()
	return true
}

// swap exchanges two chunks of one tensor that are on the wire: what below the
// limit is sent in one order may come in any.
func (p *party) swap() {
	if len(p.wire) < 2 {
		return
	}
	a := p.wire[p.w.choose(len(p.wire))]
	b := p.wire[p.w.choose(len(p.wire))]
	if a == b || !a.HasChunk() || a.Chunk.Tensor != b.Chunk.Tensor {
		return
	}
	a.Chunk, b.Chunk = b.Chunk, a.Chunk
	p.held[a], p.held[b] = p.held[b], p.held[a]
}

// step does one thing, by choice.
func (w *world) step() {
	p := w.cli
	what := w.choose(32)
	if w.lanes && w.choose(3) == 0 {
		what = 32 | what&1
	}
	if what&1 == 1 {
		p = w.srv
	}
	switch what >> 1 {
	case 0, 1:
		p.send()
		p.send()
	case 2, 3:
		p.peer.deliver(fine)
	case 4, 5:
		if len(w.order) > 0 {
			p.work(w.order[w.choose(len(w.order))])
		}
	case 6:
		if p == w.cli && len(w.order) < 12 {
			w.openAny()
		} else {
			p.swap()
		}
	case 7:
		for _, c := range w.order {
			p.work(c)
		}
	case 8:
		p.finishClaim()
	case 9:
		if p.claim != nil && !p.claim.done {
			p.claim.sum, p.claim.failed = p.claim.c.Copy(p.claim.data)
			p.claim.done = true
		}
		p.swap()
	case 10, 11:
		p.peer.deliver(w.choose(lost))
	case 12:
		if len(w.order) > 0 {
			w.meddle(w.order[w.choose(len(w.order))], p)
		}
	case 13:
		w.advance(Instant(w.choose(30)) * second / 1000)
	case 14:
		for p.send() || p.peer.deliver(fine) {
		}
	case 16:
		w.laneStep(p)
	case 15:
		switch w.choose(24) {
		case 1:
			p.m.Drain("by choice")
			for _, c := range w.order {
				if p == w.srv && w.srv.m.calls.open[c.id] == nil {
					c.blame("drain")
				}
			}
		case 2, 3, 4:
			p.peer.deliver(lost)
		case 5, 6:
			w.waits()
		}
	}
	p.events()
}

// waits has the client say that it waits.
func (w *world) waits() {
	if !w.cli.over {
		w.cli.m.Waits()
		w.says = true
	}
}

// openAny has the client open a call, a put or a get.
func (w *world) openAny() {
	if kind := w.choose(4); kind == put || kind == get {
		w.openStored(kind)
	} else {
		w.openCall()
	}
}

// meddle ends a call on purpose.
func (w *world) meddle(c *worldCall, p *party) {
	if c.ended[p.side()] > 0 {
		return
	}
	defer p.events()
	switch {
	case c.kind != run && w.choose(4) > 0:
		w.meddleStored(c, p)
	case p == w.cli:
		c.blame("cancel")
		w.tracef("client cancels %v", c.id)
		p.m.Finish(frame.Done{Call: c.id, Code: frame.Cancelled, Message: "by choice"})
	case c.ready > 0 && w.choose(2) == 0:
		c.blame("model error")
		c.finished = true
		w.tracef("server fails %v", c.id)
		p.m.Finish(frame.Done{Call: c.id, Code: frame.Aborted, Message: "by choice"})
	case c.kind == run && len(c.sinks[1]) > 0:
		c.blame("tensor failed")
		w.tracef("server fails tensor %v", c.sinks[1][0].id)
		p.m.FailTensor(c.sinks[1][0].id, frame.ResourceExhausted, "by choice")
	}
}

// advance lets time pass and both machines look at their clocks.
func (w *world) advance(d Instant) {
	w.now += d
	for _, p := range []*party{w.cli, w.srv} {
		if p.over || p.m.NextTick() > w.now {
			continue
		}
		if err := p.m.Tick(w.now); err != nil {
			w.failf("%s: tick: %v", p.name(), err)
		}
		p.events()
		if at := p.m.NextTick(); at <= w.now {
			w.failf("%s: after a tick at %d the next is due at %d", p.name(), w.now, at)
		}
	}
}

// flow runs everything that can run without time passing.
func (w *world) flow() {
	for round := 0; ; round++ {
		if round > 20000 {
			w.failf("it never comes to rest")
		}
		moved := false
		for _, p := range []*party{w.cli, w.srv} {
			moved = p.finishClaim() || moved
			for _, c := range w.order {
				moved = p.work(c) || moved
			}
			moved = p.send() || moved
			moved = p.deliver(fine) || moved
			moved = p.laneFlow() || moved
		}
		if !moved {
			return
		}
	}
}

// settle lets everything come to its end, by time if needed, and checks what is
// left. With half the client ends its side of the stream first.
func (w *world) settle(half bool) {
	if half {
		for w.cli.finishClaim() || w.srv.finishClaim() || w.cli.send() || w.cli.deliver(fine) {
		}
		for _, c := range w.order {
			if c.ended[0] == 0 || c.ended[1] == 0 {
				c.blame("the client ended its side")
			}
		}
		w.tracef("the client has ended its side")
		w.cli.over = true // sends nothing more, and the server hears nothing more
		w.srv.m.PeerDone(w.now)
		w.srv.events()
		w.halfDone = true
	}
	// What nobody lost needs no timer but that of what may wait for a frame.
	patience := 20 * second
	if half || w.lossy {
		patience = 200 * second
	} else if w.silent {
		patience = 60 * second
	}
	says := w.choose(4) == 1 // all along: it ends all the same
	for end := w.now + patience; ; {
		if says {
			w.waits()
		}
		w.flowHalf()
		if w.idle() || w.now >= end {
			break
		}
		w.advance(20 * millisecond)
		if patience > 20*second {
			w.advance(second)
		}
	}
	for _, c := range w.order {
		for side, n := range c.ended {
			if n == 0 && (c.ready > 0 || side == 0 || w.srv.m.calls.open[c.id] != nil) && !(half && side == 0) {
				w.failf("call %s never ended on side %d (blamed: %q)", short(c.id), side, c.blamed)
			}
			if n > 1 {
				w.failf("call %s ended %d times on side %d", short(c.id), n, side)
			}
		}
	}
}

func (w *world) flowHalf() {
	if !w.halfDone {
		w.flow()
		return
	}
	for moved := true; moved; {
		moved = w.srv.finishClaim()
		for _, c := range w.order {
			moved = w.srv.work(c) || moved
		}
		moved = w.srv.send() || moved
		// The client still reads.
		w.cli.over = false
		moved = w.srv.deliver(fine) || moved
		moved = w.cli.finishClaim() || moved
		moved = w.srv.laneFlow() || moved
		for n := range worldLanes {
			moved = w.cli.finishLane(n) || moved
			moved = w.cli.notice(n) || moved
		}
		for _, c := range w.order {
			moved = w.cli.work(c) || moved
		}
		w.cli.over = true
	}
}

func (w *world) idle() bool {
	credits, acks := w.cli.m.in.Due()
	granted, _ := w.srv.m.in.Due()
	return w.cli.m.Status().Calls == 0 && w.srv.m.Status().Calls == 0 && acks+credits+granted == 0
}

// close closes both machines, wherever they stand.
func (w *world) close() {
	w.closed = true
	for _, p := range []*party{w.cli, w.srv} {
		p.m.Close(frame.Unavailable, "the session has ended")
		p.m.Close(frame.Internal, "twice")
		p.events()
		p.over = true
		p.finishClaim()
		for n := range p.lanes {
			l := &p.lanes[n]
			l.open, l.cut, l.cutAt = true, true, 0
			p.notice(n)
		}
		for _, f := range p.wire {
			if r := p.held[f]; r != nil {
				r.Release()
			}
		}
		f := new(frame.Frame)
		if _, ok := p.m.Next(w.now, f); ok || p.m.Pending() {
			w.failf("%s: a frame after the end: %s", p.name(), describe(f))
		}
	}
	for _, p := range []*party{w.cli, w.srv} {
		if n := len(p.m.calls.open) + len(p.m.in.tensors) + len(p.m.out.tensors); n > 0 {
			w.failf("%s: %d calls, %d incoming and %d outgoing tensors are left", p.name(), len(p.m.calls.open), len(p.m.in.tensors), len(p.m.out.tensors))
		}
		p.counts()
		for _, t := range p.all {
			for i, l := range t.mem {
				if !l.back {
					w.failf("%s: region %d of %s never came back", p.name(), i, short(t.id))
				}
				if !bytes.Equal(l.mem, bytes.Repeat([]byte{poison}, len(l.mem))) {
					w.failf("%s: region %d of %s was written after it came back", p.name(), i, short(t.id))
				}
			}
		}
		for _, s := range p.made {
			for i, x := range s.out {
				if x.releases != 1 {
					w.failf("%s: piece %d of %s was released %d times", p.name(), i, short(s.id), x.releases)
				}
			}
		}
	}
	for _, c := range w.order {
		if c.ended[0] != 1 {
			w.failf("call %s ended %d times on the client", short(c.id), c.ended[0])
		}
		if c.ended[1] > 1 || c.ready > 0 && c.ended[1] != 1 {
			w.failf("call %s ended %d times on the server", short(c.id), c.ended[1])
		}
	}
}

// counts checks that a machine without calls counts nothing.
func (p *party) counts() {
	m := p.m
	if m.in.Allowance != 0 || m.out.Allowance != 0 || m.in.Open != 0 || m.calls.undecided != 0 || m.calls.inFlight != 0 {
		p.w.failf("%s: with no call open it counts allowance in %d, out %d, incoming %d, running %d, opened %d",
			p.name(), m.in.Allowance, m.out.Allowance, m.in.Open, m.calls.undecided, m.calls.inFlight)
	}
}

// invariants checks a machine at any moment.
func (p *party) invariants() {
	if problem := miscounted(p.m); problem != "" {
		p.w.failf("%s %s", p.name(), problem)
	}
	if credits, acks := p.m.in.Due(); acks > len(p.all) || credits > len(p.all) {
		p.w.failf("%s: %d acks and %d credits wait for %d tensors", p.name(), acks, credits, len(p.all))
	}
}

// miscounted compares a machine's counts with what they count, and with its limits.
func miscounted(m *Machine) string {
	var allowIn, allowOut int64
	incoming, undecided, opened, retained, waiting := 0, 0, 0, 0, 0
	for _, f := range m.failures {
		waiting += len(f.Message)
	}
	for _, q := range m.out.summaries {
		waiting += len(q.Message)
	}
	for _, c := range m.calls.answers {
		waiting += len(c.done.Message)
	}
	for _, t := range m.in.tensors {
		if t.Open {
			incoming++
			allowIn += t.Share
		}
	}
	for _, t := range m.out.tensors {
		allowOut += t.Share
		if t.summary != nil {
			waiting += len(t.summary.Message)
		}
		if t.Announced && m.cfg.Server {
			opened++
		}
	}
	for _, c := range m.calls.open {
		retained += c.retained
		if c.state < lifecycle.Finishing {
			undecided++
		}
		if !m.cfg.Server && (c.state == lifecycle.Running || c.state == lifecycle.Finishing) {
			opened += c.weight()
		}
	}
	if allowIn != m.in.Allowance || allowOut != m.out.Allowance || incoming != m.in.Open || undecided != m.calls.undecided || opened != m.calls.inFlight {
		return fmt.Sprintf("counts allowance in %d, out %d, incoming %d, undecided %d, opened %d; there are %d %d %d %d %d",
			m.in.Allowance, m.out.Allowance, m.in.Open, m.calls.undecided, m.calls.inFlight, allowIn, allowOut, incoming, undecided, opened)
	}
	if retained != m.calls.retained || waiting != m.waiting {
		return fmt.Sprintf("counts %d bytes retained, %d of text that waits; there are %d and %d", m.calls.retained, m.waiting, retained, waiting)
	}
	if allowIn > int64(m.cfg.Limits.AllowanceBytes) || incoming > m.cfg.Limits.OpenTensors+1 || m.tombstones.Len() > recent.Most {
		return fmt.Sprintf("passes its limits: allowance %d, incoming %d, %d ids remembered", allowIn, incoming, m.tombstones.Len())
	}
	return ""
}

// run is one schedule from beginning to end.
func (w *world) run(steps int) {
	for range 1 + w.choose(4) {
		w.openAny()
	}
	for range steps {
		w.step()
	}
	switch how := w.choose(8); how {
	case 0: // closed in the middle of everything
	case 1:
		w.settle(true)
	default:
		w.settle(false)
		for _, p := range []*party{w.cli, w.srv} {
			if len(p.wire) == 0 && p.m.Status().Calls == 0 {
				p.counts()
			}
			credits, acks := p.m.in.Due()
			if n := len(p.m.calls.opens) + len(p.m.out.descs) + credits + acks + len(p.m.calls.cancels) + len(p.m.failures) + len(p.m.calls.answers) + len(p.m.out.summaries) + len(p.m.out.ending); n > 0 || p.m.out.Ready(false) || p.m.out.Ready(true) {
				w.failf("%s: %d things wait in its queues with no call open", p.name(), n)
			}
		}
		if !w.cli.m.Status().Draining { // the session lives on
			w.lossy = false
			w.openCall()
			w.settle(false)
			if c := w.order[len(w.order)-1]; c.done.Code != frame.OK {
				w.failf("a call after everything failed: %d %s", c.done.Code, c.done.Message)
			}
		}
	}
	w.close()
}
