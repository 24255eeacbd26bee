package server

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/stats"
	"google.golang.org/protobuf/proto"

	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/lane"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/wire"
)

// connections tracks the server's connections. As a stats.Handler it learns when a
// connection has ended, that is, when gRPC's reader and writer for it have returned; gRPC
// reports that nowhere else. The handler's other events cost about 200 bytes a message.
type connections struct {
	log  *slog.Logger
	most int // maximum accepted at a time
	thin int // small frames per second and connection
	// memory accounts for what peers have sent and nothing has consumed.
	memory *inbound.Memory
	// lanesRefused counts refused greetings.
	lanesRefused atomic.Int64
	// handshakesFailed counts connections whose handshake failed.
	handshakesFailed atomic.Int64

	mu       sync.Mutex // guards all below
	open     map[*connection]struct{}
	accepted int
	refused  serving.LogSampler
	noLane   serving.LogSampler
	unread   serving.LogSampler
	unshaken serving.LogSampler
}

// connection is the state of one connection.
type connection struct {
	serving.Caller
	flight wire.InFlight
	addr   net.Addr
	in     *inbound.Conn // accounts for what its peer has sent; nil before the handshake
	thin   *rate.Limiter
	rpcs   *rpcsContext // nil unless gRPC has the connection
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

// reject cancels the newest child.
func (c *rpcsContext) reject() {
	if c == nil || c.newest == nil {
		return
	}
	c.rejecting.Store(true)
	c.newest()
	c.rejecting.Store(false)
	c.newest = nil
}

type connectionKey struct{}

// room reports whether there is memory for an answer. It returns true if the answer is
// accounted for elsewhere.
func (c *connection) room(answer any, as *wire.Answer) bool {
	m, ok := answer.(proto.Message)
	if !ok || c.in == nil || as != nil && as.Charged {
		return true
	}
	return c.in.Room(int64(proto.Size(m)))
}

// listener returns connections whose address leads back to them: gRPC exposes nothing else
// of a connection. Connections beyond the limit are closed at once, rather than left in the
// system's queue, where they would wait without knowing why.
type listener struct {
	net.Listener
	of *connections
}

type acceptedConn struct {
	net.Conn
	one    *connection
	closed func()      // once
	lane   atomic.Bool // ignore gRPC's deadlines: it clears them late
}

// handshakes makes gRPC read connections through an inbound.Conn, which limits them, and
// takes lanes out.
type handshakes struct {
	credentials.TransportCredentials
	of      *connections
	message int64        // size of the largest message
	lanes   *lane.Offers // nil: connections cannot become lanes
}

// tracked is a connection as gRPC sees it.
type tracked struct {
	*inbound.Conn
	one *connection
}

type trackedAddr struct {
	net.Addr
	one *connection
}

// Accept waits for the next connection.
func (l listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.of.enter() {
			one := l.of.one()
			return &acceptedConn{Conn: c, one: one, closed: sync.OnceFunc(func() { l.of.leave(one) })}, nil
		}
		_ = c.Close() // the peer notices
	}
}

func (c *connections) enter() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.accepted >= c.most {
		if n, due := c.refused.Again(); due {
			c.log.Warn("connections refused: the limit is reached", slog.Int("limit", c.most), slog.Int64("refused", n))
		}
		return false
	}
	c.accepted++
	return true
}

func (c *connections) leave(one *connection) {
	c.mu.Lock()
	c.accepted--
	_, open := c.open[one]
	c.mu.Unlock()
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
	raw, err := h.withoutLane(accepted)
	if err != nil {
		return nil, nil, err
	}
	conn, info, err := h.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		h.of.unsecured(accepted, err)
		return nil, nil, err
	}
	one := accepted.one
	one.in = h.of.memory.Conn(conn, h.message, func() bool { return one.Calls() > 0 || !one.flight.Empty() })
	one.flight.Copied = one.in.Hold
	return tracked{one.in, one}, info, nil
}

// unsecured counts and logs a handshake that failed.
func (c *connections) unsecured(conn net.Conn, why error) {
	c.handshakesFailed.Add(1)
	if n, due := c.unshaken.Again(); due {
		c.log.Info("handshake failed", slog.String("peer", conn.RemoteAddr().String()), slog.String("reason", why.Error()), slog.Int64("failed", n))
	}
}

// Clone returns a copy.
func (h handshakes) Clone() credentials.TransportCredentials {
	h.TransportCredentials = h.TransportCredentials.Clone()
	return h
}

// RemoteAddr returns the peer's address.
func (c tracked) RemoteAddr() net.Addr { return trackedAddr{c.Conn.RemoteAddr(), c.one} }

// TagConn starts tracking a connection.
func (c *connections) TagConn(ctx context.Context, info *stats.ConnTagInfo) context.Context {
	a, ok := info.RemoteAddr.(trackedAddr)
	one := a.one
	if !ok {
		one = c.one()
	}
	one.addr = info.RemoteAddr
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open == nil {
		c.open = make(map[*connection]struct{})
	}
	c.open[one] = struct{}{}
	one.rpcs = &rpcsContext{Context: context.WithValue(ctx, connectionKey{}, one), done: make(chan struct{})}
	return one.rpcs
}

// of returns the state of the connection that an RPC came over. If gRPC did not announce
// that connection, the RPC gets a state of its own.
func (c *connections) of(ctx context.Context) *connection {
	if one, ok := ctx.Value(connectionKey{}).(*connection); ok {
		return one
	}
	return c.one()
}

func (c *connections) one() *connection {
	return &connection{thin: rate.NewLimiter(rate.Limit(c.thin), max(c.thin/10, 1))}
}

// HandleConn releases what a dead connection had queued.
func (c *connections) HandleConn(ctx context.Context, s stats.ConnStats) {
	if _, ok := s.(*stats.ConnEnd); !ok {
		return
	}
	one := ctx.Value(connectionKey{}).(*connection)
	c.mu.Lock()
	delete(c.open, one)
	c.mu.Unlock()
	one.flight.Abandon()
	if one.in != nil {
		one.in.End()
	}
}

// watch closes connections whose peers do not read, until done is closed. Each RPC has its
// own idle timeout, but what an RPC sent before it ended stays in gRPC's queue, along with
// the memory it occupies, for as long as the peer's window is closed. gRPC cannot reset a
// stream then, so the connection must be closed. A frame that is still queued at the second
// of two looks has been there for at least idle and at most twice that.
func (c *connections) watch(idle time.Duration, done <-chan struct{}) {
	tick := time.NewTicker(idle)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-done:
			return
		}
		for _, one := range c.stuck() {
			if n, due := c.unread.Again(); due {
				c.log.Warn("connection closed: its peer does not read", slog.String("peer", one.addr.String()), slog.Int64("closed", n))
			}
			_ = one.in.Close() // gRPC's reader cleans up the rest
		}
	}
}

// stuck checks all connections and returns those whose peers do not read.
func (c *connections) stuck() (all []*connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for one := range c.open {
		if one.flight.Look() && one.in != nil {
			all = append(all, one)
		}
	}
	return all
}

// TagRPC returns ctx.
func (*connections) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC follows an RPC from the start of its handler to its end. It takes back what was
// sent after the RPC ended: gRPC may have dropped it.
func (*connections) HandleRPC(ctx context.Context, s stats.RPCStats) {
	switch s := s.(type) {
	case *stats.InHeader:
		received(ctx).Begun()
	case *stats.OutPayload:
		if ctx.Err() != nil {
			wire.Unsent(s.Payload)
		}
	case *stats.End:
		received(ctx).End()
	}
}
