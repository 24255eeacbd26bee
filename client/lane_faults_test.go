package client_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"strings"
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
	"github.com/tensorferry/tensorferry/store/folder"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/tensor"
)

var laneFaults = flag.Int("lane.faults", 32, "how many faults TestFaultsOfLanes has happen, in all its worlds together")

// laneFault is what may happen to a lane, or to its session while a chunk is on the lane.
type laneFault struct {
	name string
	only condition
	run  func(l *faultyLane)
}

// condition says where a fault may happen.
type condition int

const (
	slow      condition = 1 << iota // it may cost seconds of patience: in long runs only
	oneLane                         // where sessions have one lane, as it means the end of all
	encrypted                       // where there is TLS
	certified                       // to a session whose principal comes from a certificate
	bearing                         // to one whose principal comes from a token
)

// The answers to a greeting, as docs/wire.md numbers them.
const (
	laneOpened = iota
	laneUnknown
	laneUsed
	_
	laneForeign
)

var faults = []laneFault{
	{"cut", 0, forward(func(l *faultyLane, c *onLane) { l.midway(c) })},
	{"cut backwards", 0, backward(func(l *faultyLane, c *onLane) { l.midway(c) })},
	{"reset", 0, forward(func(l *faultyLane, c *onLane) {
		l.midway(c)
		_ = socket(c.to).SetLinger(0)
	})},
	{"half closed", 0, forward(func(l *faultyLane, c *onLane) {
		l.midway(c)
		l.halfClose(c.to)
		_, _ = io.Copy(io.Discard, c.from)
	})},
	{"payload damaged", 0, forward(func(l *faultyLane, c *onLane) { l.damage(c, laneHeader, c.size) })},
	{"payload damaged backwards", 0, backward(func(l *faultyLane, c *onLane) { l.damage(c, laneHeader, c.size) })},
	{"header damaged", 0, forward(func(l *faultyLane, c *onLane) { l.damage(c, 0, laneHeader) })},
	{"header damaged backwards", 0, backward(func(l *faultyLane, c *onLane) { l.damage(c, 0, laneHeader) })},
	{"slowed", 0, forward(func(l *faultyLane, c *onLane) {
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
	{"stalled", slow, forward(func(l *faultyLane, c *onLane) {
		l.midway(c)
		<-l.over
	})},
	{"stalled backwards", slow, backward(func(l *faultyLane, c *onLane) {
		l.midway(c)
		<-l.over
	})},
	{"a wrong token", 0, func(l *faultyLane) {
		l.token[l.rand.IntN(len(l.token))] ^= 1 << l.rand.IntN(8)
		l.refused(laneUnknown)
	}},
	{"a used token", 0, forward(func(l *faultyLane, c *onLane) {
		l.midway(c)
		if how, err := l.beside(l.token, l.use); err == nil && how != laneUsed && how != laneUnknown && !(how == laneForeign && l.world.keys.isRevoked(l.target.bearer)) {
			l.world.t.Errorf("a token that was used has got the answer %d", how)
		}
		c.rest()
	})},
	{"a token of a session that has ended", 0, func(l *faultyLane) {
		token, ok := l.of.endedToken()
		if !ok {
			l.pass()
			return
		}
		forward(func(l *faultyLane, c *onLane) {
			l.midway(c)
			how, err := byte(laneOpened), error(nil)
			for use := uint64(lane.Uses); err == nil && how != laneUnknown && use > 0; use-- { // the server may hear late that it has ended
				how, err = l.beside(token, use-1)
			}
			if err == nil && how != laneUnknown {
				l.world.t.Errorf("a token of a session that has ended has got the answer %d", how)
			}
			c.rest()
		})(l)
	}},
	{"a token of another session", slow, func(l *faultyLane) {
		other, ok := l.of.other(l.target, false)
		if !ok {
			l.pass()
			return
		}
		l.token, l.use = other, lane.Uses-1
		forward(func(l *faultyLane, c *onLane) {
			l.midway(c)
			c.rest()
		})(l)
	}},
	{"call cancelled", 0, forward((*faultyLane).cancel)},
	{"call cancelled backwards", 0, backward((*faultyLane).cancel)},
	{"session half-closed before its lane", 0, func(l *faultyLane) {
		l.fit = func(id tensor.ID) bool { return l.target.mayEnd(id) }
		backward(func(l *faultyLane, c *onLane) {
			l.midway(c)
			l.target.endSide(true)
			c.rest()
		})(l)
	}},
	{"session half-closed after its lane", oneLane, func(l *faultyLane) {
		l.fit = func(id tensor.ID) bool { return l.target.mayEnd(id) }
		backward(func(l *faultyLane, c *onLane) {
			l.midway(c)
			l.keep.Store(true)
			l.target.endLanes()
			l.halfClose(c.to)
			<-l.over // the client has given up the half that it has
			l.target.endSide(false)
			if l.rand.IntN(2) == 0 {
				<-l.target.told // the server learns that the lane has ended when the session has
			}
		})(l)
	}},
	{"session half-closed too early", slow, func(l *faultyLane) {
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
	{"server drained", 0, forward(func(l *faultyLane, c *onLane) { l.drain(context.Background(), c) })},
	{"server drained backwards", 0, backward(func(l *faultyLane, c *onLane) { l.drain(context.Background(), c) })},
	{"server drained without patience", 0, forward(func(l *faultyLane, c *onLane) {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		l.drain(ctx, c)
	})},
	{"client drains", 0, forward(func(l *faultyLane, c *onLane) {
		l.midway(c)
		l.target.sayDrain()
		c.rest()
	})},
	{"a stolen token", encrypted, func(l *faultyLane) {
		other, ok := l.of.other(l.target, true)
		if !ok {
			l.pass()
			return
		}
		l.token, l.use = other, lane.Uses-1
		l.refused(laneForeign)
	}},
	{"another principal's certificate", certified, func(l *faultyLane) {
		if l.again(l.world.keys.another(l.certificate)) {
			l.refused(laneForeign)
		}
	}},
	{"client's certificate rotated", certified, func(l *faultyLane) {
		if l.again(l.world.keys.rotated(l.certificate)) {
			forward(func(l *faultyLane, c *onLane) {
				l.midway(c)
				c.rest()
			})(l)
		}
	}},
	{"server's certificate rotated", encrypted, forward(func(l *faultyLane, c *onLane) {
		if l.client.(*tls.Conn).NetConn().(*below).shown == l.target.shown {
			l.world.keys.rotate(l.world.t)
			return // the next lanes are shown another one than the session was
		}
		l.midway(c)
		c.rest()
	})},
	{"token revoked", slow | bearing, forward(func(l *faultyLane, c *onLane) {
		l.midway(c)
		l.world.keys.revoke(l.world.t, l.target.bearer)
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		how, err := byte(laneUsed), error(nil)
		for err == nil && how == laneUsed { // the server may see it late
			<-tick.C
			how, err = l.beside(l.token, l.use)
		}
		if err == nil && how != laneForeign && how != laneUnknown {
			l.world.t.Errorf("a lane of a session whose token is revoked has got the answer %d", how)
		}
		if l.rand.IntN(2) == 0 {
			c.rest()
		}
	})},
	{"record cut", encrypted, forward(func(l *faultyLane, c *onLane) {
		l.spoil(c, func(to net.Conn, record []byte) error {
			_, _ = to.Write(record[:l.rand.IntN(len(record))])
			return net.ErrClosed
		})
	})},
	{"record damaged", encrypted, backward(func(l *faultyLane, c *onLane) {
		l.spoil(c, func(to net.Conn, record []byte) error {
			record = bytes.Clone(record)
			record[l.rand.IntN(len(record))] ^= 1 << l.rand.IntN(8)
			_, err := to.Write(record)
			return err
		})
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
	certificate    *x509.Certificate // the client's; nil: it has none
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
	if how, err = greet(l.server, l.token, l.use); err == nil {
		_, err = l.client.Write(append([]byte("tflane:"), how))
	}
	return how, err
}

// greet greets, after the magic, and returns the answer.
func greet(conn net.Conn, token frame.LaneToken, use uint64) (how byte, err error) {
	if _, err := conn.Write(binary.LittleEndian.AppendUint64(token[:], use)); err != nil {
		return 0, err
	}
	answer := make([]byte, len("tflane:")+1)
	_, err = io.ReadFull(conn, answer)
	return answer[len(answer)-1], err
}

// refused carries a greeting that must be refused. A chunk waits for the lane, and goes by
// another path.
func (l *faultyLane) refused(want byte) {
	switch how, err := l.greet(); {
	case err != nil: // the session or the server has ended
	case how == want:
		l.met()
	case how != laneUnknown:
		l.world.t.Errorf("a lane has got the answer %d, not %d", how, want)
	}
}

// again connects to the server again, with another certificate.
func (l *faultyLane) again(pair *tls.Certificate) bool {
	conn, err := l.of.proxy.reach(l.of.addr, pair)
	if err == nil {
		hangUp(l.server)
		l.server = conn
		_, err = conn.Write([]byte(lane.Magic))
	}
	return err == nil
}

// beside greets on a connection beside the lane.
func (l *faultyLane) beside(token frame.LaneToken, use uint64) (how byte, err error) {
	conn, err := l.of.proxy.reach(l.of.addr, l.world.keys.pairOf(l.certificate))
	if err != nil {
		return 0, err // the server has ended
	}
	defer hangUp(conn)
	if _, err = conn.Write([]byte(lane.Magic)); err != nil {
		return 0, err
	}
	return greet(conn, token, use)
}

// pass carries the lane, to which nothing is to happen.
func (l *faultyLane) pass() {
	if how, err := l.greet(); err != nil || how != laneOpened {
		return
	}
	switch carried := carryBoth(l.client, l.server); {
	case carried == 0: // the client may have given it up while it was opened
	case l.target.mayLose():
		l.world.spared.Add(1)
	default:
		l.world.lost.Add(1)
	}
}

// halfClose ends one direction of a connection, with or without telling TLS.
func (l *faultyLane) halfClose(c net.Conn) {
	if c, ok := c.(*tls.Conn); ok && l.rand.IntN(2) == 0 {
		_ = c.CloseWrite()
		return
	}
	_ = socket(c).CloseWrite()
}

// spoil has the next record of TLS, with a part of the chunk, go its own way.
func (l *faultyLane) spoil(c *onLane, way func(to net.Conn, record []byte) error) {
	if c.carry(l.rand.Int64N(c.size)) != nil {
		return
	}
	b := c.to.(*tls.Conn).NetConn().(*below)
	b.once.Store(&way)
	l.met()
	c.rest()
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
		hangUp(from)
		hangUp(to)
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
	ended    []frame.LaneToken           // guarded by mu: of sessions that have ended
	draining bool                        // guarded by mu: calls that are not known to the server yet may be refused
	cut      bool                        // guarded by mu: any call may
}

// session returns what is known of the session of a token.
func (g *generation) session(token frame.LaneToken) *target {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.sessions[token]
}

// other returns the token of another session, which has a certificate or has none.
func (g *generation) other(than *target, certified bool) (token frame.LaneToken, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for token, t := range g.sessions {
		if t != than && t.certified == certified {
			t.robbed.Store(true)
			return token, true
		}
	}
	return token, false
}

// endedToken returns the token of a session that has ended.
func (g *generation) endedToken() (token frame.LaneToken, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.ended) == 0 {
		return token, false
	}
	return g.ended[0], true
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
	// Its principal comes from a certificate, or a bearer's token; without TLS it has none.
	certified bool
	bearer    string
	keys      *laneKeys
	shown     *tls.Certificate // the server's
	robbed    atomic.Bool      // others may take the place of its lanes
	leaving   atomic.Bool      // the client ends it

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

// mayLose reports whether the session may have ended a lane to which nothing has happened.
func (t *target) mayLose() bool {
	draining, _ := t.of.drains()
	return draining || t.leaving.Load() || t.robbed.Load() || t.noLanes() || t.isOver() || t.keys.isRevoked(t.bearer) || t.isTold()
}

// isTold reports whether the server has said that the session ends.
func (t *target) isTold() bool {
	select {
	case <-t.told:
		return true
	default:
		return false
	}
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
	case codes.Unauthenticated:
		return t.keys.isRevoked(t.bearer)
	case codes.DeadlineExceeded:
		return t.over && !k.credited && k.transfer == nil // nobody took the result: the client could not say where to
	}
	return false
}

// laneWorld is servers, one after the other, whose lanes fail.
type laneWorld struct {
	t       *testing.T
	count   int       // lanes of a session
	keys    *laneKeys // nil: without TLS
	quota   int       // how many faults are to happen
	before  *laneTally
	last    bool             // of the worlds
	spared  atomic.Int64     // lanes to which nothing happened before their session ended
	lost    atomic.Int64     // those that ended before it: the machine was slow, or another one took their place
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
	g.fixture = startServer(w.t, "tcp", w.keys.client(0), func(c *serverConfig) {
		if w.keys != nil {
			w.keys.change(c)
		}
		if inFolders {
			c.Store = inFolder(w.t.TempDir(), folder.Config{})(w.t, c.Pool)
		} else {
			c.Store = memory.New(c.Pool, 1<<30)
		}
	})
	g.proxy = newBetweenWith(w.t, w.keys, func(bool) string { return g.addr }, func(c, s net.Conn) { w.fail(g, c, s) })
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
		runtime.GC() // the server would do so later
		info, err := g.server.GetServiceInfo(w.t.Context(), nil)
		require.NoError(w.t, err)
		n = info.Counters
		return n["receive_used_bytes"] == 0
	}, "the memory of what was received")
	require.Equal(w.t, n["calls_total"], n["calls_ok_total"]+n["calls_cancelled_total"]+n["calls_failed_total"], "every call ends once")
	for _, name := range []string{"lanes", "sessions", "calls", "memory_used_bytes"} {
		require.Contains(w.t, n, name)
		require.Zero(w.t, n[name], name)
	}
}

// draw returns a fault by chance that may happen to a lane: each comes once before one
// comes again, but those that are slow. In a short run those that have never happened are first.
func (w *laneWorld) draw(t *target) laneFault {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.bag) == 0 {
		for _, f := range faults {
			if w.short() && w.before.sum(f.name)+w.met[f.name] == 0 {
				w.putBack(f)
			}
		}
		slices.SortStableFunc(w.bag, func(a, b laneFault) int { return cmp.Compare(b.only&oneLane, a.only&oneLane) }) // few worlds have them
	}
	if len(w.bag) == 0 {
		for _, f := range faults {
			if f.only&slow == 0 || w.met[f.name] == 0 || w.rand.IntN(4) == 0 {
				w.putBack(f)
			}
		}
	}
	fits := func(f laneFault) bool {
		return (f.only&certified == 0 || t.certified) && (f.only&bearing == 0 || t.bearer != "")
	}
	if i := slices.IndexFunc(w.bag, fits); i >= 0 {
		f := w.bag[i]
		w.bag = slices.Delete(w.bag, i, i+1)
		return f
	}
	for { // the rest are for other sessions
		if f := faults[w.rand.IntN(len(faults))]; w.has(f) && fits(f) && f.only&slow == 0 {
			return f
		}
	}
}

// putBack has a fault come later, if it may happen in this world at all; mu is held.
func (w *laneWorld) putBack(f laneFault) {
	if w.has(f) {
		w.bag = slices.Insert(w.bag, w.rand.IntN(len(w.bag)+1), f)
	}
}

// has reports whether a fault may happen in this world.
func (w *laneWorld) has(f laneFault) bool {
	return (f.only&slow == 0 || !w.short()) && (f.only&oneLane == 0 || w.count == 1) && (f.only&(encrypted|certified|bearing) == 0 || w.keys != nil)
}

// short reports whether there are too few faults for each of them to happen in each world.
func (w *laneWorld) short() bool { return *laneFaults < laneWorlds*len(faults) }

// happened returns how many faults have met a chunk, and which never did that must.
func (w *laneWorld) happened() (sum int, never []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range faults {
		sum += w.met[f.name]
		must, n := w.has(f), w.met[f.name]
		if *laneFaults < 4*laneWorlds*len(faults) { // some need luck: of all worlds then
			must, n = must && (w.last || f.only&oneLane != 0), n+w.before.sum(f.name)
		}
		if must && n == 0 {
			never = append(never, f.name)
		}
	}
	return sum, never
}

// enough reports whether all that was asked for has happened, or never will.
func (w *laneWorld) enough() bool {
	sum, never := w.happened()
	return w.t.Failed() || sum >= w.quota && len(never) == 0 || w.lanes.Load() > int64(50*w.quota+1000)
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
	l.certificate = leafOf(c)
	most := 12 * mib // of the session, more or less
	if w.short() {
		most = 3 * mib
	}
	l.after = l.rand.Int64N(int64(most / w.count))
	if l.use%uint64(w.count) > 0 && l.rand.IntN(2) == 0 {
		l.pass()
		return
	}
	f, met := w.draw(l.target), false
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
		w.putBack(f)
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

// laneCounts are how many lanes a session has in a world; laneWorlds is how many worlds
// there are, one of each with TLS and one without.
var laneCounts = []int{1, 2, 4, 16}

const laneWorlds = 2 * 4

// laneTally is what has happened in the worlds so far.
type laneTally struct {
	names []string         // of the worlds
	met   []map[string]int // by fault
}

func (y *laneTally) sum(fault string) (n int) {
	for _, met := range y.met {
		n += met[fault]
	}
	return n
}

// String is a table.
func (y *laneTally) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-40s", "")
	for _, name := range y.names {
		fmt.Fprintf(&b, " %8s", name)
	}
	total := make([]int, len(y.met))
	for _, f := range faults {
		fmt.Fprintf(&b, "\n%-40s", f.name)
		for i, met := range y.met {
			fmt.Fprintf(&b, " %8d", met[f.name])
			total[i] += met[f.name]
		}
	}
	fmt.Fprintf(&b, "\n%-40s", "faults")
	for _, n := range total {
		fmt.Fprintf(&b, " %8d", n)
	}
	return b.String()
}

func TestFaultsOfLanesCostNoCall(t *testing.T) {
	testkit.Start(t)
	var all laneTally
	defer func() { t.Logf("faults by lanes of a session:\n%v", &all) }()
	for _, secure := range []bool{false, true} {
		for _, n := range laneCounts {
			name := fmt.Sprint(n)
			if secure {
				name += " TLS"
			}
			t.Run(name, func(t *testing.T) {
				testkit.Start(t)
				w := &laneWorld{
					t: t, count: n, quota: (*laneFaults + laneWorlds - 1) / laneWorlds, before: &all, last: len(all.met) == laneWorlds-1,
					next: make(chan *generation), drained: make(chan *generation),
					rand: testkit.Rand(t), met: map[string]int{}, codes: map[codes.Code]int{}, stored: map[codes.Code]int{},
				}
				if secure {
					w.keys = newLaneKeys(t)
				}
				w.live()
				all.names, all.met = append(all.names, name), append(all.met, w.met)
			})
			if t.Failed() {
				return
			}
		}
	}
}

// live has the faults of a world happen.
func (w *laneWorld) live() {
	t := w.t
	w.now = w.generation()
	var work sync.WaitGroup
	for i := range laneWorkers {
		work.Go(func() {
			lw := &laneWorker{world: w, t: t, number: i, rand: rand.New(rand.NewPCG(uint64(i), 1))}
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
	spared, lost := w.spared.Load(), w.lost.Load()
	t.Logf("%d lanes; of those to which nothing happened, %d ended with their session, %d before; calls by code: %v; tensors pushed and pulled: %v", w.lanes.Load(), spared, lost, w.codes, w.stored)
	require.LessOrEqual(t, lost, 1+spared/10, "a fault of a lane must not end others")
}

// endless is how many rounds no session makes whose token has been revoked.
const endless = 10_000

// laneWorkers is how many clients there are at a time.
const laneWorkers = 4

// laneWorker makes calls of large tensors, whose results must be right.
type laneWorker struct {
	world  *laneWorld
	t      *testing.T
	number int
	made   int // sessions
	rand   *rand.Rand
	gone   [][]byte // memory of calls that have failed: it must not change
	stock  *stocker
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

// leave notes that the client ends its sessions.
func (w *watched) leave() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range w.list {
		t.leaving.Store(true)
	}
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
	w.made++
	cfg, certified, bearer := w.world.keys.worker(w.number, (w.number+w.made)%2 == 0, w.rand.IntN(2))
	cfg.Checksum, cfg.Lanes, cfg.FixedLanes = codec.Checksum(1+w.rand.IntN(2)), w.world.count, true
	c, err := client.Dial(g.proxy.addr, cfg)
	if err != nil {
		return err
	}
	watch := watched{list: []*target{{of: g}}} // of a session that does not come to be
	c.WrapSessions(func(s client.SessionStream) client.SessionStream {
		t := &target{
			SessionStream: s, of: g, told: make(chan struct{}), transfer: &w.stock.now,
			tensors: map[tensor.ID]announced{}, calls: map[tensor.ID]*knownCall{},
			certified: certified, bearer: bearer, keys: w.world.keys, shown: w.world.keys.showing(),
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
		rounds := 12
		if w.world.short() {
			rounds = 4
		}
		for i := 0; i < rounds || t.keys.isRevoked(bearer); i++ {
			if i == endless {
				err = errors.New("the session goes on without its token")
				break
			}
			err = w.round(ctx, c, s, t, &watch)
			if draining, _ := g.drains(); err != nil || draining || t.isOver() || t.isTold() {
				break
			}
			if idle := strings.HasPrefix(s.Ways().Why, "none for"); (idle || w.world.enough()) && !t.keys.isRevoked(bearer) {
				break
			}
		}
		watch.leave()
		if w.rand.IntN(2) == 0 {
			err = errors.Join(err, s.Close())
		}
		err = errors.Join(err, c.Close(), w.check())
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, t := range watch.list {
		if delete(g.sessions, t.token); !t.token.IsZero() {
			g.ended = append(g.ended, t.token)
		}
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
