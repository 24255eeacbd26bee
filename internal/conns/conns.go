// Package conns holds a server's connections: it limits how many are open and how fast
// each sends, takes lanes out before gRPC sees them, charges for what peers send, and
// closes connections whose peers do not read.
package conns

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"slices"
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
	cfg                               Config
	lanes                             lane.Offers
	lanesRefused, handshakesFailed    atomic.Int64
	refused, noLane, unread, unshaken admission.LogSampler
	unaccepted                        admission.LogSampler
	loud                              admission.LogSampler // connections closed for what their peers sent

	mu       sync.Mutex // guards all below
	open     map[*Conn]struct{}
	accepted int
	refusing int         // connections beyond the limit, whose clients are being told
	laned    map[any]int // lanes by owner
}

// New returns a Set without connections.
func New(cfg Config) *Set {
	return &Set{cfg: cfg, open: make(map[*Conn]struct{}), laned: make(map[any]int)}
}

// LanesRefused returns how many greetings were refused.
func (s *Set) LanesRefused() int64 { return s.lanesRefused.Load() }

// HandshakesFailed returns how many connections failed their handshake.
func (s *Set) HandshakesFailed() int64 { return s.handshakesFailed.Load() }

// Conn is the state of one connection. Safe for concurrent use, like its parts.
type Conn struct {
	admission.Caller
	unread wire.Unread // what was sent and gRPC has in its queue
	addr   net.Addr
	in     *inbound.Conn // accounts for what its peer has sent; nil before the handshake
	thin   *rate.Limiter
	rpcs   *rpcsContext // nil unless gRPC has the connection, as the two below
	life   context.Context
	end    context.CancelFunc // of life
	owner  any                // of the lane that it is; guarded by Set.mu
}

// Context returns a context that ends with the connection, of one that gRPC has.
func (c *Conn) Context() context.Context { return c.life }

// Open charges an RPC to the connection from its headers on. It reports whether there is
// memory for it; end is called when there is none any more. The account is nil, which is
// valid, if nothing charges the connection.
func (c *Conn) Open(header map[string][]string, end func(why error)) (rpc *inbound.RPC, ok bool) {
	if c == nil || c.in == nil {
		return nil, true
	}
	return c.in.Open(header, end)
}

// Answer returns m as gRPC sends it on the connection, or nil if there is no memory for it.
func (c *Conn) Answer(m any) *wire.Answer {
	if p, ok := m.(proto.Message); ok && c.in != nil && !c.in.Room(int64(proto.Size(p))) {
		return nil
	}
	return &wire.Answer{Message: m, Outgoing: wire.Outgoing{Unread: &c.unread}}
}

// Reject cancels the context of the RPC that tap rejects, and that began last. Only the
// goroutine that reads the connection, tap's, may call it.
func (c *Conn) Reject() {
	if c == nil || c.rpcs.newest == nil {
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

// listener returns connections whose address leads back to them: gRPC exposes nothing else
// of a connection. Connections beyond the limit are refused, rather than left in the system's
// queue, where they would wait without knowing why.
type listener struct {
	net.Listener
	of *Set
}

// Listener returns l's connections as the Set's, for gRPC.
func (s *Set) Listener(l net.Listener) net.Listener { return listener{l, s} }

type acceptedConn struct {
	lane.Batch
	one    *Conn
	closed func()      // once
	beyond bool        // the limit
	lane   atomic.Bool // ignore gRPC's deadlines: it clears them late
}

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

// tracked is a connection as gRPC sees it.
type tracked struct {
	*inbound.Conn
	one *Conn
}

type trackedAddr struct {
	net.Addr
	one *Conn
}

// Accept waits for the next connection.
func (l listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			if n, due := l.of.unaccepted.Again(); due && !errors.Is(err, net.ErrClosed) {
				l.of.cfg.Log.Warn("connections cannot be accepted", slog.String("reason", err.Error()), slog.Int64("failed", n))
			}
			return nil, err
		}
		one := l.of.one()
		beyond, ok := l.of.enter()
		if ok {
			return &acceptedConn{Batch: lane.Batch{Conn: c}, one: one, beyond: beyond, closed: sync.OnceFunc(func() { l.of.leave(one, beyond) })}, nil
		}
		_ = c.Close() // the peer notices
	}
}

// enter counts a connection, unless there are too many beyond the limit, too.
func (s *Set) enter() (beyond, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.accepted >= s.cfg.Connections {
		if n, due := s.refused.Again(); due {
			s.cfg.Log.Warn("connections refused: the limit is reached", slog.Int("limit", s.cfg.Connections), slog.Int64("refused", n))
		}
		if s.refusing >= refusals {
			return true, false
		}
		s.refusing++
		return true, true
	}
	s.accepted++
	return false, true
}

func (s *Set) leave(one *Conn, beyond bool) {
	s.mu.Lock()
	if beyond {
		s.refusing--
	} else {
		s.accepted--
	}
	if one.owner != nil {
		if s.laned[one.owner]--; s.laned[one.owner] == 0 {
			delete(s.laned, one.owner)
		}
	}
	_, open := s.open[one]
	s.mu.Unlock()
	if !open && one.in != nil { // gRPC rejected it
		one.in.End()
	}
}

// Close closes the connection.
func (c *acceptedConn) Close() error {
	c.closed()
	return c.Conn.Close()
}

// SetDeadline is called by gRPC before and after the handshake. It has no effect on a lane.
func (c *acceptedConn) SetDeadline(t time.Time) error {
	if c.lane.Load() {
		return nil
	}
	return c.Conn.SetDeadline(t)
}

// ServerHandshake secures a connection and starts charging for what arrives on it.
func (h handshakes) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	accepted := raw.(*acceptedConn)
	conn, info, err := h.TransportCredentials.ServerHandshake(accepted)
	if err != nil {
		h.of.handshakesFailed.Add(1)
		if n, due := h.of.unshaken.Again(); due {
			h.of.cfg.Log.Info("handshake failed", slog.String("peer", accepted.RemoteAddr().String()), slog.String("reason", err.Error()), slog.Int64("failed", n))
		}
		return nil, nil, err
	}
	if accepted.beyond {
		h.of.cfg.Full(conn)
		return nil, nil, errFull
	}
	if h.lanes {
		if conn, err = h.of.withoutLane(&greeter{conn, info, accepted}); err != nil {
			return nil, nil, err
		}
	}
	one := accepted.one
	one.in = h.of.cfg.Memory.Conn(conn, h.message, func() bool { return one.Calls() > 0 })
	one.unread.Charge = one.in.Queue
	one.in.Closing = func(why error) { h.of.closing(accepted.RemoteAddr(), why) }
	return tracked{one.in, one}, info, nil
}

// Clone returns a copy.
func (h handshakes) Clone() credentials.TransportCredentials {
	h.TransportCredentials = h.TransportCredentials.Clone()
	return h
}

// RemoteAddr returns the peer's address.
func (c tracked) RemoteAddr() net.Addr { return trackedAddr{c.Conn.RemoteAddr(), c.one} }

// TagConn starts tracking a connection.
func (s *Set) TagConn(ctx context.Context, info *stats.ConnTagInfo) context.Context {
	a, ok := info.RemoteAddr.(trackedAddr)
	one := a.one
	if !ok {
		one = s.one()
	}
	one.addr = info.RemoteAddr
	one.life, one.end = context.WithCancel(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open[one] = struct{}{}
	one.rpcs = &rpcsContext{Context: context.WithValue(ctx, connKey{}, one), done: make(chan struct{})}
	return one.rpcs
}

// From returns the connection that an RPC came over, or nil if gRPC did not announce it.
func From(ctx context.Context) *Conn {
	one, _ := ctx.Value(connKey{}).(*Conn)
	return one
}

// Of is like From, but instead of nil it returns a Conn of the RPC's own.
func (s *Set) Of(ctx context.Context) *Conn {
	if one := From(ctx); one != nil {
		return one
	}
	return s.one()
}

func (s *Set) one() *Conn {
	return &Conn{thin: rate.NewLimiter(rate.Limit(s.cfg.ThinFrames), max(s.cfg.ThinFrames/10, 1))}
}

// HandleConn ends the accounting of a dead connection.
func (s *Set) HandleConn(ctx context.Context, event stats.ConnStats) {
	if _, ok := event.(*stats.ConnEnd); !ok {
		return
	}
	one := From(ctx)
	one.end()
	s.mu.Lock()
	delete(s.open, one)
	s.mu.Unlock()
	if one.in != nil {
		one.in.End()
	}
}

// Look closes connections whose peers do not read. Each RPC has its own idle timeout, but what
// an RPC sent before it ended stays in gRPC's queue, along with the memory it occupies, for as
// long as the peer's window is closed. gRPC cannot reset a stream then, so the connection must
// be closed: if a frame that was queued at the last look still is.
func (s *Set) Look() {
	s.mu.Lock()
	stuck := slices.DeleteFunc(slices.Collect(maps.Keys(s.open)), func(one *Conn) bool { return !one.unread.Look() || one.in == nil })
	s.mu.Unlock()
	for _, one := range stuck {
		s.closing(one.addr, inbound.ErrUnread)
		_ = one.in.Close() // gRPC's reader cleans up the rest
	}
}

// closing logs that a connection is about to be closed.
func (s *Set) closing(peer net.Addr, why error) {
	if errors.Is(why, inbound.ErrUnread) {
		if n, due := s.unread.Again(); due {
			s.cfg.Log.Warn("connection closed: its peer does not read", slog.String("peer", peer.String()), slog.Int64("closed", n))
		}
	} else if n, due := s.loud.Again(); due {
		s.cfg.Log.Warn("connection closed for what its peer sends", slog.String("peer", peer.String()), slog.String("reason", why.Error()), slog.Int64("closed", n))
	}
}

// TagRPC returns ctx.
func (*Set) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }
