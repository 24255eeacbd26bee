package client_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/lane"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

var laneFaults = flag.Int("lane.faults", 40, "how many faults TestFaultsOfLanes has happen")

// laneFault is what may happen to a lane, or to its session while a chunk is on the lane.
type laneFault struct {
	name string
	slow bool // it costs seconds of patience
	run  func(l *faultyLane)
}

var faults = []laneFault{
	{"cut", false, forward(func(l *faultyLane, c *onLane) { l.midway(c) })},
	{"cut backwards", false, backward(func(l *faultyLane, c *onLane) { l.midway(c) })},
	{"reset", false, forward(func(l *faultyLane, c *onLane) {
		l.midway(c)
		_ = c.to.(*net.TCPConn).SetLinger(0)
	})},
	{"half closed", false, forward(func(l *faultyLane, c *onLane) {
		l.midway(c)
		_ = c.to.(*net.TCPConn).CloseWrite()
		_, _ = io.Copy(io.Discard, c.from)
	})},
	{"payload damaged", false, forward(func(l *faultyLane, c *onLane) { l.damage(c, laneHeader, c.size) })},
	{"payload damaged backwards", false, backward(func(l *faultyLane, c *onLane) { l.damage(c, laneHeader, c.size) })},
	{"header damaged", false, forward(func(l *faultyLane, c *onLane) { l.damage(c, 0, laneHeader) })},
	{"header damaged backwards", false, backward(func(l *faultyLane, c *onLane) { l.damage(c, 0, laneHeader) })},
	{"slowed", false, forward(func(l *faultyLane, c *onLane) {
		l.midway(c)
		tick := time.NewTicker(20 * time.Millisecond) // 3 MB/s
		defer tick.Stop()
		for range 20 {
			<-tick.C
			if c.carry(64<<10) != nil {
				return
			}
		}
		c.rest()
	})},
	{"stalled", true, forward(func(l *faultyLane, c *onLane) {
		l.midway(c)
		<-l.over
	})},
	{"stalled backwards", true, backward(func(l *faultyLane, c *onLane) {
		l.midway(c)
		<-l.over
	})},
	{"a wrong token", false, func(l *faultyLane) {
		l.token[l.rand.IntN(len(l.token))] ^= 1 << l.rand.IntN(8)
		if how, err := l.greet(); err == nil && how == 0 {
			l.world.t.Error("a wrong token has opened a lane")
		} else if err == nil {
			l.met() // a chunk waits for the lane, and goes by the session
		}
	}},
	{"a used token", false, forward(func(l *faultyLane, c *onLane) {
		l.midway(c)
		conn, err := net.Dial("tcp", l.of.addr)
		if err != nil {
			return // the server has ended
		}
		defer conn.Close()
		if err = lane.Greet(conn, l.token, int(l.use)); err == nil {
			l.world.t.Error("a token has opened a lane twice with one use")
		}
		c.rest()
	})},
	{"a token of another session", true, func(l *faultyLane) {
		other, ok := l.of.other(l.target)
		if !ok {
			return
		}
		l.token, l.use = other, lane.Uses-1
		forward(func(l *faultyLane, c *onLane) {
			l.midway(c)
			c.rest()
		})(l)
	}},
	{"call cancelled", false, forward((*faultyLane).cancel)},
	{"call cancelled backwards", false, backward((*faultyLane).cancel)},
	{"session half-closed before its lane", false, func(l *faultyLane) {
		l.fit = func(id tensor.ID) bool { return l.target.mayEnd(id) }
		backward(func(l *faultyLane, c *onLane) {
			l.midway(c)
			l.target.endSide(true)
			c.rest()
		})(l)
	}},
	{"session half-closed after its lane", false, func(l *faultyLane) {
		l.fit = func(id tensor.ID) bool { return l.target.mayEnd(id) }
		backward(func(l *faultyLane, c *onLane) {
			l.midway(c)
			l.keep.Store(true)
			l.target.endLanes()
			_ = c.to.(*net.TCPConn).CloseWrite()
			<-l.over // the client has given up the half that it has
			l.target.endSide(false)
			if l.rand.IntN(2) == 0 {
				<-l.target.told // the server learns that the lane has ended when the session has
			}
		})(l)
	}},
	{"session half-closed too early", false, func(l *faultyLane) {
		l.fit = func(id tensor.ID) bool { return l.target.mayNotEnd(id) }
		forward(func(l *faultyLane, c *onLane) {
			l.midway(c)
			l.target.endSide(true)
			if l.rand.IntN(2) == 0 {
				c.rest()
			} else {
				<-l.over // the session ends with the chunk half way
			}
		})(l)
	}},
	{"server drained", false, forward(func(l *faultyLane, c *onLane) { l.drain(context.Background(), c) })},
	{"server drained backwards", false, backward(func(l *faultyLane, c *onLane) { l.drain(context.Background(), c) })},
	{"server drained without patience", false, forward(func(l *faultyLane, c *onLane) {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		l.drain(ctx, c)
	})},
	{"client drains", false, forward(func(l *faultyLane, c *onLane) {
		l.midway(c)
		l.target.sayDrain()
		c.rest()
	})},
}

// laneHeader is the size of a chunk's header on a lane; docs/wire.md says what is in it.
const laneHeader = 40

// faultyLane is a lane between a client and a server on which a fault is to happen.
type faultyLane struct {
	world          *laneWorld
	of             *generation
	target         *target // nil: of a client that nobody watches
	rand           *rand.Rand
	client, server net.Conn
	token          frame.LaneToken
	use            uint64
	after          int64 // bytes of one direction that pass before the fault
	fit            func(id tensor.ID) bool
	over           chan struct{} // closed when the other direction has ended
	keep           atomic.Bool   // which ends the lane with the fault, not at once
	met            func()        // the fault happens, with a chunk on the lane
}

// greet carries the greeting and its answer.
func (l *faultyLane) greet() (how byte, err error) {
	if _, err := l.server.Write(binary.LittleEndian.AppendUint64(l.token[:], l.use)); err != nil {
		return 0, err
	}
	answer := make([]byte, len("tflane:")+1)
	if _, err := io.ReadFull(l.server, answer); err != nil {
		return 0, err
	}
	_, err = l.client.Write(answer)
	return answer[len(answer)-1], err
}

// forward has a fault happen on the way to the server, backward on the way back.
func forward(fault func(l *faultyLane, c *onLane)) func(l *faultyLane) {
	return func(l *faultyLane) { l.one(l.client, l.server, fault) }
}

func backward(fault func(l *faultyLane, c *onLane)) func(l *faultyLane) {
	return func(l *faultyLane) { l.one(l.server, l.client, fault) }
}

// one carries the lane, whose fault is in the direction from one end to the other.
func (l *faultyLane) one(from, to net.Conn, fault func(l *faultyLane, c *onLane)) {
	if how, err := l.greet(); err != nil || how != 0 {
		return
	}
	var work sync.WaitGroup
	end := func() {
		_ = from.Close()
		_ = to.Close()
	}
	work.Go(func() {
		defer close(l.over)
		_, _ = io.Copy(from, to)
		if !l.keep.Load() {
			end()
		}
	})
	work.Go(func() {
		defer end()
		if c, ok := l.reach(from, to); ok {
			fault(l, c)
		}
	})
	work.Wait()
}

// onLane is a chunk at a proxy, and what follows it.
type onLane struct {
	id   tensor.ID // of its tensor
	size int64     // with its header
	from io.Reader
	to   net.Conn
}

// reach carries whole chunks, and returns the one with byte l.after, or the next one that
// fits. Nothing of that has been carried.
func (l *faultyLane) reach(from, to net.Conn) (*onLane, bool) {
	for passed := int64(0); ; {
		header := make([]byte, laneHeader)
		if _, err := io.ReadFull(from, header); err != nil {
			return nil, false
		}
		c := &onLane{
			id: tensor.ID(header[:16]), size: laneHeader + int64(binary.LittleEndian.Uint32(header[20:])),
			from: io.MultiReader(bytes.NewReader(header), from), to: to,
		}
		if passed += c.size; passed > l.after && (l.fit == nil || l.fit(c.id)) {
			return c, true
		}
		if c.carry(c.size) != nil {
			return nil, false
		}
	}
}

// carry carries so many bytes more.
func (c *onLane) carry(n int64) error {
	_, err := io.CopyN(c.to, c.from, n)
	return err
}

// rest carries all that follows.
func (c *onLane) rest() { _, _ = io.Copy(c.to, c.from) }

// midway carries a part of the chunk, which may be none: it waits at the proxy.
func (l *faultyLane) midway(c *onLane) {
	if c.carry(l.rand.Int64N(c.size)) == nil {
		l.met()
	}
}

// damage changes one of the bytes from begin to end of a chunk.
func (l *faultyLane) damage(c *onLane, begin, end int64) {
	if c.carry(begin+l.rand.Int64N(end-begin)) != nil {
		return
	}
	b := make([]byte, 1)
	if _, err := io.ReadFull(c.from, b); err != nil {
		return
	}
	b[0] ^= 1 << l.rand.IntN(8)
	if _, err := c.to.Write(b); err == nil {
		l.met()
		c.rest()
	}
}

// cancel cancels the call of a chunk.
func (l *faultyLane) cancel(c *onLane) {
	if c.carry(l.rand.Int64N(c.size)) == nil && l.target.cancel(c.id) {
		l.met()
	}
	c.rest()
}

// drain has the server drain, another one having taken its place. The chunk goes on when
// the client has been told.
func (l *faultyLane) drain(patience context.Context, c *onLane) {
	if c.carry(l.rand.Int64N(c.size)) == nil && l.world.drain(patience, l.of) {
		l.met()
		<-l.target.told
	}
	c.rest()
}

// generation is a server, until it is drained, and the proxy before it.
type generation struct {
	*fixture
	proxy *between

	mu       sync.Mutex
	sessions map[frame.LaneToken]*target // guarded by mu
	draining bool                        // guarded by mu: calls that are not known to the server yet may be refused
	cut      bool                        // guarded by mu: any call may
}

// session returns what is known of the session of a token.
func (g *generation) session(token frame.LaneToken) *target {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.sessions[token]
}

// other returns the token of another session.
func (g *generation) other(than *target) (token frame.LaneToken, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for token, t := range g.sessions {
		if t != than {
			return token, true
		}
	}
	return token, false
}

func (g *generation) drains() (draining, cut bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.draining, g.cut
}

// target is the RPC of a session that faults may happen to.
type target struct {
	client.SessionStream
	of   *generation
	told chan struct{} // closed when the server has said that it drains, or says nothing more
	once sync.Once
	// transfer is the push or the pull that the session's worker makes now.
	transfer *atomic.Pointer[transferring]

	sending sync.Mutex
	ended   bool // guarded by sending: what is sent is dropped

	mu      sync.Mutex
	token   frame.LaneToken          // guarded by mu
	over    bool                     // guarded by mu: as ended
	rude    bool                     // guarded by mu: it ended against the rules of docs/wire.md
	alone   bool                     // guarded by mu: the client opens no lanes any more
	mixed   bool                     // guarded by mu: there may be a call and a transfer at the same time
	pulling bool                     // guarded by mu
	met     []string                 // guarded by mu: faults
	tensors map[tensor.ID]announced  // guarded by mu
	calls   map[tensor.ID]*knownCall // guarded by mu
}

// announced is a tensor of a call.
type announced struct {
	call   *knownCall
	input  bool
	chunks uint32
}

// knownCall is what has been seen of a call. Its target's lock guards it.
type knownCall struct {
	call      *client.Call  // once its worker has it
	transfer  *transferring // of a put or a get, which may have several tensors
	accepted  bool          // the server gave credit, or announced a tensor, before it drained
	acked     bool          // every chunk of the input of a call is acknowledged
	credited  bool          // every chunk of the result of a call has credit
	cancelled bool
}

// SendMsg drops what is sent after the end of the side.
func (t *target) SendMsg(m any) error {
	t.sending.Lock()
	defer t.sending.Unlock()
	if t.ended {
		return nil
	}
	f := &m.(*wire.Message).Frame
	t.mu.Lock()
	for _, c := range f.Calls {
		if k := t.knows(c.ID); c.Put != nil || c.Get != nil {
			k.transfer = t.transfer.Load()
		}
	}
	for i := range f.Descs {
		t.announce(&f.Descs[i], true)
	}
	for _, p := range f.Credits {
		if a, ok := t.tensors[p.Tensor]; ok && p.Limit >= a.chunks {
			a.call.credited = a.call.transfer == nil
		}
	}
	t.mu.Unlock()
	return t.SessionStream.SendMsg(m)
}

// RecvMsg notes what is received.
func (t *target) RecvMsg(m any) error {
	err := t.SessionStream.RecvMsg(m)
	f := &m.(*wire.Message).Frame
	if err != nil || f.Drain != nil {
		t.once.Do(func() { close(t.told) })
	}
	if err != nil {
		return err
	}
	draining, _ := t.of.drains()
	t.mu.Lock()
	defer t.mu.Unlock()
	if f.Hello != nil {
		t.token = f.Hello.LaneToken
		t.of.mu.Lock()
		t.of.sessions[t.token] = t
		t.of.mu.Unlock()
	}
	for i := range f.Descs {
		k := t.announce(&f.Descs[i], false)
		k.accepted = k.accepted || !draining
	}
	for _, p := range f.Credits {
		if a, ok := t.tensors[p.Tensor]; ok && !draining {
			a.call.accepted = true
		}
	}
	for _, p := range f.Acks {
		if a, ok := t.tensors[p.Tensor]; ok && p.Below >= a.chunks {
			a.call.acked = a.call.transfer == nil
		}
	}
	return nil
}

// announce notes a tensor, and returns what is known of its call; mu is held.
func (t *target) announce(d *frame.Desc, input bool) *knownCall {
	geo := tensor.Geometry{Size: int64(d.SizeBytes), ChunkBytes: int64(d.ChunkBytes)}
	a := announced{t.knows(d.Call), input, geo.Count()}
	a.call.credited = a.call.credited || !input && d.OnAllowance && a.call.transfer == nil
	t.tensors[d.Tensor] = a
	return a.call
}

// knows returns what is known of a call; mu is held.
func (t *target) knows(id tensor.ID) *knownCall {
	if t.calls[id] == nil {
		t.calls[id] = new(knownCall)
	}
	return t.calls[id]
}

// mayEnd reports whether the client may end its side and get the result all the same, by
// what it knows: the input of the tensor's call is acknowledged, its result has credit.
func (t *target) mayEnd(id tensor.ID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	a, ok := t.tensors[id]
	return ok && !t.mixed && a.call.acked && a.call.credited
}

// mayNotEnd reports whether an end of the client's side fails the call of a tensor, and
// no other.
func (t *target) mayNotEnd(id tensor.ID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	a, ok := t.tensors[id]
	return ok && !t.mixed && (a.input || a.call.transfer == nil) && !(a.call.acked && a.call.credited)
}

// meets notes a fault.
func (t *target) meets(fault string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.met = append(t.met, fault)
}

// blame adds to an error what its session has met.
func (t *target) blame(err error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fmt.Errorf("%w; its session has ended its side: %v; it met %q", err, t.over, t.met)
}

// mix notes whether there may now be a call and a transfer at the same time.
func (t *target) mix(mixed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mixed = mixed
}

// endLanes has the client open no more lanes.
func (t *target) endLanes() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.alone = true
}

func (t *target) noLanes() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.alone
}

// endSide ends the client's side of the session, unless it is pulling; rude is against the
// rules of docs/wire.md.
func (t *target) endSide(rude bool) {
	t.sending.Lock()
	defer t.sending.Unlock()
	if t.ended {
		return
	}
	t.mu.Lock()
	pulling := t.pulling
	if !pulling {
		t.ended, t.over, t.rude = true, true, rude
	}
	t.mu.Unlock()
	if !pulling {
		_ = t.CloseSend()
	}
}

// mayPull reports whether a pull may begin. Until pulled the client does not end its side:
// the pull could not give credit, and would end after half a minute.
func (t *target) mayPull() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pulling = !t.over
	return t.pulling
}

func (t *target) pulled() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pulling = false
}

// sayDrain says that the client opens nothing new, which changes nothing.
func (t *target) sayDrain() {
	t.sending.Lock()
	defer t.sending.Unlock()
	if !t.ended {
		_ = t.SessionStream.SendMsg(&wire.Message{Frame: frame.Frame{Drain: &frame.Drain{Reason: "enough"}}})
	}
}

// cancel cancels the call of a tensor, and reports whether it was there.
func (t *target) cancel(id tensor.ID) bool {
	t.mu.Lock()
	cancel := func() {}
	a, ok := t.tensors[id]
	switch {
	case ok && a.call.transfer != nil:
		cancel = a.call.transfer.cancel
	case ok && a.call.call != nil:
		a.call.cancelled = true
		cancel = a.call.call.Cancel
	default:
		ok = false
	}
	t.mu.Unlock()
	cancel()
	return ok
}

// opened notes a call that a worker has opened, and whether it cancels it.
func (t *target) opened(call *client.Call, cancelled bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := t.knows(call.ID())
	k.call, k.cancelled = call, cancelled
}

// legitimate reports whether a call may end so; id is zero if it could not be opened.
func (t *target) legitimate(id tensor.ID, err error) bool {
	draining, cut := t.of.drains()
	t.mu.Lock()
	defer t.mu.Unlock()
	k := t.calls[id]
	if k == nil {
		k = new(knownCall)
	}
	switch status.Code(err) {
	case codes.OK:
		return true
	case codes.Canceled:
		return k.cancelled
	case codes.Unavailable:
		return cut || t.rude || (draining || t.over) && !k.accepted
	case codes.InvalidArgument:
		return t.over && !k.acked
	case codes.DeadlineExceeded:
		return t.over && !k.credited && k.transfer == nil // nobody took the result: the client could not say where to
	}
	return false
}

// laneWorld is servers, one after the other, whose lanes fail.
type laneWorld struct {
	t       *testing.T
	next    chan *generation // ready to take a place
	drained chan *generation
	lanes   atomic.Int64
	work    sync.WaitGroup // those who drain
	made    int            // servers, which belong to the test's goroutine

	draining sync.Mutex // one server at a time
	stopped  bool       // no other server is needed; guarded by draining

	mu    sync.Mutex
	now   *generation        // guarded by mu
	bag   []laneFault        // to come; guarded by mu
	rand  *rand.Rand         // guarded by mu
	met   map[string]int     // guarded by mu
	codes map[codes.Code]int // of calls; guarded by mu
	// stored has those of tensors pushed and, but for OK, pulled; guarded by mu.
	stored map[codes.Code]int
}

// generation starts a server.
func (w *laneWorld) generation() *generation {
	g := &generation{sessions: map[frame.LaneToken]*target{}}
	inFolders := w.made%2 == 1
	w.made++
	g.fixture = startServer(w.t, "tcp", client.Config{}, func(c *serverConfig) {
		if inFolders {
			c.Store = inFolder(w.t.TempDir(), store.FolderConfig{})(w.t, c.Pool)
		} else {
			c.Store = store.NewMemory(c.Pool, 1<<30)
		}
	})
	g.proxy = newBetween(w.t, func(bool) string { return g.addr }, func(c, s net.Conn) { w.fail(g, c, s) })
	return g
}

// end ends a generation, whose every call must have ended once, and whose memory must be
// back.
func (w *laneWorld) end(g *generation) {
	require.NoError(w.t, g.client.Close())
	g.server.Close()
	g.proxy.closed()
	g.end()
	var n map[string]int64
	testkit.Eventually(w.t, func() bool { // gRPC may still be letting go of what was received
		info, err := g.server.GetServiceInfo(w.t.Context(), nil)
		require.NoError(w.t, err)
		n = info.GetCounters()
		return n["receive_used_bytes"] == 0
	}, "the memory of what was received")
	require.Equal(w.t, n["calls_total"], n["calls_ok_total"]+n["calls_cancelled_total"]+n["calls_failed_total"], "every call ends once")
	for _, name := range []string{"lanes", "sessions", "calls", "memory_used_bytes"} {
		require.Contains(w.t, n, name)
		require.Zero(w.t, n[name], name)
	}
}

// draw returns a fault by chance: each comes once before one comes again, but those that
// are slow.
func (w *laneWorld) draw() laneFault {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.bag) == 0 {
		for _, f := range faults {
			if !f.slow || w.met[f.name] == 0 || w.rand.IntN(4) == 0 {
				w.bag = append(w.bag, f)
			}
		}
		w.rand.Shuffle(len(w.bag), func(i, j int) { w.bag[i], w.bag[j] = w.bag[j], w.bag[i] })
	}
	f := w.bag[len(w.bag)-1]
	w.bag = w.bag[:len(w.bag)-1]
	return f
}

// happened returns how many faults have met a chunk, and which never did.
func (w *laneWorld) happened() (sum int, never []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range faults {
		sum += w.met[f.name]
		if w.met[f.name] == 0 {
			never = append(never, f.name)
		}
	}
	return sum, never
}

// enough reports whether all that was asked for has happened, or never will.
func (w *laneWorld) enough() bool {
	sum, never := w.happened()
	return w.t.Failed() || sum >= *laneFaults && len(never) == 0 || w.lanes.Load() > int64(20**laneFaults+1000)
}

// fail has a lane fail.
func (w *laneWorld) fail(g *generation, c, s net.Conn) {
	rest := make([]byte, len(frame.LaneToken{})+8)
	if _, err := io.ReadFull(c, rest); err != nil {
		return
	}
	l := &faultyLane{
		world: w, of: g, rand: rand.New(rand.NewPCG(uint64(w.lanes.Add(1)), 0)), client: c, server: s,
		token: frame.LaneToken(rest[:32]), use: binary.LittleEndian.Uint64(rest[32:]), over: make(chan struct{}),
	}
	if l.target = g.session(l.token); l.target == nil {
		return // its session has ended
	}
	if l.target.noLanes() {
		return
	}
	l.after = l.rand.Int64N(12 * mib)
	f, met := w.draw(), false
	l.met = func() {
		met = true
		l.target.meets(f.name)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.met[f.name]++
	}
	f.run(l)
	if !met { // the lane ended before
		w.mu.Lock()
		defer w.mu.Unlock()
		w.bag = append(w.bag, f)
		w.rand.Shuffle(len(w.bag), func(i, j int) { w.bag[i], w.bag[j] = w.bag[j], w.bag[i] })
	}
}

// drain drains a server, and reports whether that is the first time.
func (w *laneWorld) drain(patience context.Context, g *generation) bool {
	if !w.draining.TryLock() { // whoever gives out servers may be waiting for this one's proxy
		return false
	}
	defer w.draining.Unlock()
	if w.stopped || w.current() != g {
		return false
	}
	next := <-w.next
	w.mu.Lock()
	w.now = next
	w.mu.Unlock()
	g.mu.Lock()
	g.draining, g.cut = true, patience.Err() != nil
	g.mu.Unlock()
	w.work.Go(func() {
		if err := g.server.Shutdown(patience); !errors.Is(err, patience.Err()) {
			w.t.Errorf("shutdown: %v", err)
		}
		w.drained <- g
	})
	return true
}

// current is the generation that new sessions are of.
func (w *laneWorld) current() *generation {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.now
}

func TestFaultsOfLanesCostNoCall(t *testing.T) {
	testkit.Start(t)
	const workers = 4
	w := &laneWorld{
		t: t, next: make(chan *generation), drained: make(chan *generation),
		rand: testkit.Rand(t), met: map[string]int{}, codes: map[codes.Code]int{}, stored: map[codes.Code]int{},
	}
	w.now = w.generation()
	var work sync.WaitGroup
	for i := range workers {
		work.Go(func() {
			lw := &laneWorker{world: w, t: t, rand: rand.New(rand.NewPCG(uint64(i), 1))}
			lw.stock = &stocker{world: w, t: t, rand: rand.New(rand.NewPCG(uint64(i), 2)), name: fmt.Sprint("worker ", i)}
			for !w.enough() {
				if err := lw.session(t.Context()); err != nil {
					t.Errorf("worker %d: %v", i, err)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { // ends with the work
		work.Wait()
		w.draining.Lock()
		w.stopped = true
		w.draining.Unlock()
		w.work.Wait()
		close(done)
	}()
	for spare, over := w.generation(), false; !over; {
		select {
		case w.next <- spare:
			spare = w.generation()
		case g := <-w.drained:
			w.end(g)
		case <-done:
			w.end(spare)
			over = true
		}
	}
	w.end(w.now)
	_, never := w.happened()
	require.Empty(t, never, "never met a chunk on a lane")
	for _, f := range faults {
		t.Logf("%5d %s", w.met[f.name], f.name)
	}
	t.Logf("%d lanes; calls by code: %v; tensors pushed and pulled: %v", w.lanes.Load(), w.codes, w.stored)
}

// laneWorker makes calls of large tensors, whose results must be right.
type laneWorker struct {
	world *laneWorld
	t     *testing.T
	rand  *rand.Rand
	gone  [][]byte // memory of calls that have failed: it must not change
	stock *stocker
}

// watched are the sessions of a client.
type watched struct {
	mu   sync.Mutex
	list []*target // guarded by mu
}

func (w *watched) add(t *target) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.list = append(w.list, t)
}

// of returns the session of a call: the last one if none has it.
func (w *watched) of(id tensor.ID) *target {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range w.list {
		if t.has(id) {
			return t
		}
	}
	return w.list[len(w.list)-1]
}

func (t *target) has(id tensor.ID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.calls[id] != nil
}

func (w *laneWorker) session(ctx context.Context) error {
	g := w.world.current()
	c, err := client.Dial(g.proxy.addr, client.Config{Checksum: codec.Checksum(1 + w.rand.IntN(2))})
	if err != nil {
		return err
	}
	watch := watched{list: []*target{{of: g}}} // of a session that does not come to be
	c.WrapSessions(func(s client.SessionStream) client.SessionStream {
		t := &target{
			SessionStream: s, of: g, told: make(chan struct{}), transfer: &w.stock.now,
			tensors: map[tensor.ID]announced{}, calls: map[tensor.ID]*knownCall{},
		}
		watch.add(t)
		return t
	})
	s, err := c.SharedSession(ctx)
	if err != nil {
		err = errors.Join(w.judge(watch.of(tensor.ID{}), tensor.ID{}, err), c.Close())
	} else {
		t := watch.of(tensor.ID{})
		w.stock.groups(g)
		for range 12 {
			err = w.round(ctx, c, s, t, &watch)
			if draining, _ := g.drains(); err != nil || draining || t.isOver() {
				break
			}
		}
		if w.rand.IntN(2) == 0 {
			err = errors.Join(err, s.Close())
		}
		err = errors.Join(err, c.Close(), w.check())
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, t := range watch.list {
		delete(g.sessions, t.token)
	}
	if kept := c.Kept(); kept > 64*mib {
		err = errors.Join(err, fmt.Errorf("the client keeps %d bytes", kept))
	}
	return err
}

// round makes a call, a push or a pull, or two of them at the same time.
func (w *laneWorker) round(ctx context.Context, c *client.Client, s *client.Session, t *target, watch *watched) (err error) {
	what := w.rand.IntN(3)
	t.mix(what == 2)
	var failed bool
	if what == 0 {
		failed, err = w.call(ctx, s, t, 4*mib+w.rand.IntN(8*mib))
	} else {
		moved := make(chan error, 1)
		go func() { moved <- w.stock.step(ctx, c, watch) }() // ends with the push or the pull
		if what == 2 {
			failed, err = w.call(ctx, s, t, 4*mib+w.rand.IntN(8*mib))
		}
		err = errors.Join(err, <-moved)
	}
	if failed && err == nil {
		if _, err = w.call(ctx, s, t, 30_000); err == nil {
			err = w.check()
		}
	}
	return err
}

// isOver reports whether the client has ended its side.
func (t *target) isOver() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.over
}

// judge returns an error that must not be.
func (w *laneWorker) judge(t *target, id tensor.ID, err error) error {
	w.world.mu.Lock()
	w.world.codes[status.Code(err)]++
	w.world.mu.Unlock()
	if t.legitimate(id, err) {
		return nil
	}
	return t.blame(err)
}

// check looks whether memory was written after it was taken back.
func (w *laneWorker) check() error {
	defer func() { w.gone = nil }()
	return untouched(w.gone)
}

// untouched returns an error if memory that was taken back has been written.
func untouched(gone [][]byte) error {
	for _, g := range gone {
		for i := range g {
			if g[i] != 0xdb {
				return fmt.Errorf("byte %d of memory that was taken back has been written", i)
			}
		}
	}
	return nil
}

// call makes a call, and reports whether it has failed. The error is one that must not be.
func (w *laneWorker) call(ctx context.Context, s *client.Session, t *target, n int) (failed bool, err error) {
	x := large(w.t, n, w.rand.Uint64())
	cancelled := n > mib && w.rand.IntN(3) == 0
	into := make([]byte, n)
	var released atomic.Int64
	in := client.From("", x)
	in.Release = func() { released.Add(1) }
	call, err := s.Call(ctx, client.Request{Model: "echo", Inputs: []client.Input{in}, Results: map[string]client.Sink{"y": client.Into(into)}})
	if err != nil {
		return true, w.judge(t, tensor.ID{}, err)
	}
	t.opened(call, cancelled)
	if cancelled {
		for range w.rand.IntN(12) {
			for _, err := range call.Regions() {
				if err != nil {
					break
				}
				break
			}
		}
		call.Cancel()
	}
	_, err = call.Wait()
	if n := released.Load(); n != 1 {
		return true, fmt.Errorf("the input was released %d times: %w", n, err)
	}
	if err != nil {
		clear(x.Data) // the race detector sees who still reads it
		for i := range into {
			into[i] = 0xdb
		}
		w.gone = append(w.gone, into)
		return true, w.judge(t, call.ID(), err)
	}
	if !bytes.Equal(into, x.Data) {
		return true, errors.New("the result is wrong")
	}
	return false, w.judge(t, call.ID(), nil)
}
