// Package conns holds a server's connections: it limits how many are open and how fast
// each sends, takes lanes out before gRPC sees them, charges for what peers send, and
// closes connections whose peers do not read.
package conns

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/stats"
	"google.golang.org/protobuf/proto"

	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/lane"
	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/internal/wire"
)

// Config says what a Set needs.
type Config struct {
	Log         *slog.Logger
	Connections int             // the maximum open at a time
	ThinFrames  int             // small frames per second and connection
	Memory      *inbound.Memory // charged for what peers have sent and nothing has consumed
	Lanes       int             // how many a session may have at a time
	Full        func(net.Conn)  // tells the client of a secured connection that there is no room for it
}

// Set is a server's connections. As a stats.Handler, but for its HandleRPC, it learns when a
// connection has ended, that is, when gRPC's reader and writer for it have returned; gRPC
// reports that nowhere else. The handler's other events cost about 200 bytes a message.
// Safe for concurrent use.
type Set struct {
	LanesRefused     atomic.Int64 // greetings
	HandshakesFailed atomic.Int64 // connections

	cfg                               Config
	lanes                             lane.Offers
	refused, noLane, unread, unshaken admission.LogSampler
	unaccepted                        admission.LogSampler
	loud                              admission.LogSampler // connections closed for what their peers sent

	mu       sync.Mutex  // guards all below
	accepted int         // connections, within the limit
	refusing int         // and beyond it
	laned    map[any]int // lanes by owner
}

// New returns a Set without connections.
func New(cfg Config) *Set {
	return &Set{cfg: cfg, laned: make(map[any]int)}
}

// Conn is a connection, from its acceptance to its end: what gRPC, TLS or a lane reads and writes
// is above it, and has its address, which leads back to it. Safe for concurrent use, like its
// parts.
type Conn struct {
	admission.Caller
	lane.Batch // the socket
	of         *Set
	thin       *rate.Limiter
	secured    net.Conn           // above it, or itself; nil before the handshake
	rpcs       *rpcsContext       // nil unless gRPC serves it
	end        context.CancelFunc // of Life

	// Info is what the handshake has shown of the peer.
	Info credentials.AuthInfo
	// Inbound, set after the handshake, accounts for what the peer has sent, and not read.
	Inbound *inbound.Conn
	// Life, set once gRPC serves the connection, ends with it.
	Life context.Context

	// Guarded by Set.mu.
	state state
	owner any // of the lane that it is
}

// state is what the Set counts a connection as.
type state uint8

const (
	ended    state = iota
	told           // beyond the limit: its client is told so
	accepted       // and shakes hands
	laned
	served // by gRPC, whose reader and writer may outlive it
)

// Answer returns m as gRPC sends it on the connection, or nil if there is no memory for it.
func (c *Conn) Answer(m any) *wire.Answer {
	if p, ok := m.(proto.Message); ok && !c.Inbound.Room(int64(proto.Size(p))) {
		return nil
	}
	return &wire.Answer{Message: m, Outgoing: wire.Outgoing{Unread: c.Inbound}}
}

// Reject cancels the context of the RPC that tap rejects, and that began last. Only the
// goroutine that reads the connection, tap's, may call it.
func (c *Conn) Reject() {
	if c.rpcs.newest == nil {
		return
	}
	c.rpcs.rejecting.Store(true)
	c.rpcs.newest()
	c.rpcs.rejecting.Store(false)
	c.rpcs.newest = nil
}

// rpcsContext is the parent of the contexts of a connection's RPCs. gRPC (1.85) does not
// cancel the context of an RPC that tap rejects, so one with a deadline would stay in
// memory until then. Package context passes AfterFunc what cancels a child.
type rpcsContext struct {
	context.Context
	done      chan struct{} // never closed: gRPC cancels its RPCs
	newest    func()        // cancels the newest child; only for the goroutine that reads the connection
	rejecting atomic.Bool
}

// Done returns a channel that is never closed: without one, no child would be announced.
func (c *rpcsContext) Done() <-chan struct{} { return c.done }

// Err returns what the child that is being cancelled is to return.
func (c *rpcsContext) Err() error {
	if c.rejecting.Load() {
		return context.Canceled
	}
	return nil
}

// AfterFunc learns how to cancel a child.
func (c *rpcsContext) AfterFunc(f func()) (stop func() bool) {
	c.newest = f
	return func() bool { return true }
}

// connKey is the context key of the *Conn.
type connKey struct{}

// errFull ends a connection beyond the limit.
var errFull = errors.New("conns: the limit of connections is reached")

// listener accepts connections of a Set. Those beyond the limit are refused, rather than left in
// the system's queue, where they would wait without knowing why.
type listener struct {
	net.Listener
	of *Set
}

// Listener returns l's connections as the Set's, for gRPC.
func (s *Set) Listener(l net.Listener) net.Listener { return listener{l, s} }

// Accept waits for the next connection.
func (l listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				l.of.unaccepted.Log(l.of.cfg.Log, slog.LevelWarn, "connections cannot be accepted", "failed", slog.String("reason", err.Error()))
			}
			return nil, err
		}
		one := &Conn{Batch: lane.Batch{Conn: c}, of: l.of, thin: l.of.limiter()}
		if l.of.enter(one) {
			return one, nil
		}
		_ = c.Close() // the peer notices
	}
}

// limiter returns the limit of a connection's small frames.
func (s *Set) limiter() *rate.Limiter {
	return rate.NewLimiter(rate.Limit(s.cfg.ThinFrames), max(s.cfg.ThinFrames/10, 1))
}

// enter counts a connection, unless there are too many beyond the limit, too.
func (s *Set) enter(c *Conn) (ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.accepted < s.cfg.Connections {
		s.accepted++
		c.state = accepted
		return true
	}
	s.refused.Log(s.cfg.Log, slog.LevelWarn, "connections refused: the limit is reached", "refused", slog.Int("limit", s.cfg.Connections))
	if ok = s.refusing < refusals; ok {
		s.refusing++
		c.state = told
	}
	return ok
}

// leave undoes enter, once.
func (c *Conn) leave() {
	s := c.of
	s.mu.Lock()
	defer s.mu.Unlock()
	switch c.state {
	case ended:
		return
	case told:
		s.refusing--
	default:
		s.accepted--
	}
	if c.state == laned {
		if s.laned[c.owner]--; s.laned[c.owner] == 0 {
			delete(s.laned, c.owner)
		}
	}
	if c.state != served && c.Inbound != nil { // gRPC rejected it
		c.Inbound.End()
	}
	c.state = ended
}

// Close closes the connection.
func (c *Conn) Close() error {
	c.leave()
	return c.Batch.Close()
}

// SetDeadline is called by gRPC before and after the handshake. It has no effect on a lane, whose
// deadlines gRPC would clear late.
func (c *Conn) SetDeadline(t time.Time) error {
	c.of.mu.Lock()
	own := c.state == laned
	c.of.mu.Unlock()
	if own {
		return nil
	}
	return c.Batch.SetDeadline(t)
}

// addr is the address of a connection's peer: gRPC exposes nothing else of a connection.
type addr struct {
	net.Addr
	one *Conn
}

// RemoteAddr returns the peer's address.
func (c *Conn) RemoteAddr() net.Addr { return addr{c.Batch.RemoteAddr(), c} }

// below returns the Conn below what secures it.
func below(c net.Conn) *Conn { return c.RemoteAddr().(addr).one }

// handshakes makes gRPC read connections through an inbound.Conn, which limits them, and
// takes lanes out.
type handshakes struct {
	credentials.TransportCredentials
	of      *Set
	message int64 // size of the largest message
	lanes   bool  // connections may become lanes
}

// Credentials returns credentials that secure the Set's connections as creds does, and take
// lanes out if the listener may have them. A message has so many bytes at most.
func (s *Set) Credentials(creds credentials.TransportCredentials, message int64, lanes bool) credentials.TransportCredentials {
	return handshakes{creds, s, message, lanes && s.cfg.Lanes > 0}
}

// ServerHandshake secures a connection and starts charging for what arrives on it.
func (h handshakes) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	s, one := h.of, raw.(*Conn)
	var err error
	if one.secured, one.Info, err = h.TransportCredentials.ServerHandshake(one); err != nil {
		s.HandshakesFailed.Add(1)
		s.unshaken.Log(s.cfg.Log, slog.LevelInfo, "handshake failed", "failed", slog.String("peer", one.RemoteAddr().String()), slog.String("reason", err.Error()))
		return nil, nil, err
	}
	if one.state == told {
		s.cfg.Full(one.secured)
		return nil, nil, errFull
	}
	var first []byte // of what its peer says
	if h.lanes {
		if first, err = one.greeting(); err != nil {
			return nil, nil, err
		}
	}
	one.Conn = link.Brief(one.Conn) // no lane: those write in pieces
	one.Inbound = s.cfg.Memory.Conn(one.secured, first, h.message, func() bool { return one.Calls() > 0 })
	one.Inbound.Closing = one.closing
	return one.Inbound, one.Info, nil
}

// Clone returns a copy.
func (h handshakes) Clone() credentials.TransportCredentials {
	h.TransportCredentials = h.TransportCredentials.Clone()
	return h
}

// TagConn has gRPC serve a connection.
func (s *Set) TagConn(ctx context.Context, info *stats.ConnTagInfo) context.Context {
	one := info.RemoteAddr.(addr).one
	one.Life, one.end = context.WithCancel(ctx)
	one.rpcs = &rpcsContext{Context: context.WithValue(ctx, connKey{}, one), done: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	if one.state == accepted { // or it was closed meanwhile
		one.state = served
	}
	return one.rpcs
}

// From returns the connection that an RPC came over, or nil if ctx is not of an RPC.
func From(ctx context.Context) *Conn {
	one, _ := ctx.Value(connKey{}).(*Conn)
	return one
}

// HandleConn ends the accounting of a dead connection.
func (s *Set) HandleConn(ctx context.Context, event stats.ConnStats) {
	if _, ok := event.(*stats.ConnEnd); ok {
		From(ctx).end()
		From(ctx).Inbound.End()
	}
}

// closing logs that the connection is about to be closed.
func (c *Conn) closing(why error) {
	s, peer := c.of, slog.String("peer", c.RemoteAddr().String())
	if errors.Is(why, inbound.ErrUnread) {
		s.unread.Log(s.cfg.Log, slog.LevelWarn, "connection closed: its peer does not read", "closed", peer)
	} else {
		s.loud.Log(s.cfg.Log, slog.LevelWarn, "connection closed for what its peer sends", "closed", peer, slog.String("reason", why.Error()))
	}
}

// TagRPC returns ctx.
func (*Set) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }
