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

// connections are those of the server. It is how the server hears of the end of one:
// grpc tells a stats.Handler of it when reader and writer of the connection have
// ended, and tells nobody else. What it tells besides costs about 200 bytes a message.
type connections struct {
	log  *slog.Logger
	most int // accepted at a time
	thin int // frames a second of each
	// memory is what their peers have sent and nobody has consumed.
	memory *inbound.Memory
	// lanesRefused counts greetings that were refused.
	lanesRefused atomic.Int64
	// handshakesFailed counts connections that were not secured.
	handshakesFailed atomic.Int64

	mu       sync.Mutex // guards all below
	open     map[*connection]struct{}
	accepted int
	refused  serving.LogSampler
	noLane   serving.LogSampler
	unread   serving.LogSampler
	unshaken serving.LogSampler
}

// connection is what the server knows of one.
type connection struct {
	serving.Caller
	flight wire.InFlight
	addr   net.Addr
	in     *inbound.Conn // what its peer has sent; nil before its handshake
	thin   *rate.Limiter
}

type connectionKey struct{}

// room reports whether there is memory for an answer, unless somebody else counts it.
func (c *connection) room(answer any, as *wire.Answer) bool {
	m, ok := answer.(proto.Message)
	if !ok || c.in == nil || as != nil && as.Charged {
		return true
	}
	return c.in.Room(int64(proto.Size(m)))
}

// listener hands out connections whose address leads back to them: grpc shows
// nothing else of a connection. One too many is closed at once: in the system's
// queue it would wait without knowing for what.
type listener struct {
	net.Listener
	of *connections
}

type acceptedConn struct {
	net.Conn
	one    *connection
	closed func()      // once
	lane   atomic.Bool // deadlines are not gRPC's any more, which clears them late
}

// handshakes have gRPC read connections by way of what bounds them, and take lanes out.
type handshakes struct {
	credentials.TransportCredentials
	of      *connections
	message int64        // bytes of the largest
	lanes   *lane.Offers // nil: a connection is no lane
}

// tracked is a connection as gRPC has it.
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
		_ = c.Close() // its peer sees it
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
	if !open && one.in != nil { // gRPC did not like it
		one.in.End()
	}
}

// Close closes the connection.
func (c *acceptedConn) Close() error {
	c.closed()
	return c.Conn.Close()
}

// SetDeadline is gRPC's, before and after the handshake.
func (c *acceptedConn) SetDeadline(t time.Time) error {
	if c.lane.Load() {
		return nil
	}
	return c.Conn.SetDeadline(t)
}

// ServerHandshake secures a connection, and has what comes over it charged.
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

// TagConn gives each connection the book of what is sent on it.
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
	return context.WithValue(ctx, connectionKey{}, one)
}

// of returns what is known of the connection that an RPC came over. One that grpc
// did not tell of is the RPC's own.
func (c *connections) of(ctx context.Context) *connection {
	if one, ok := ctx.Value(connectionKey{}).(*connection); ok {
		return one
	}
	return c.one()
}

func (c *connections) one() *connection {
	return &connection{thin: rate.NewLimiter(rate.Limit(c.thin), max(c.thin/10, 1))}
}

// HandleConn gives back what a dead connection had in its queue.
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

// watch closes connections whose peers do not read, until done is closed. Each RPC
// has a clock of its own, but what one has sent before it ended stays in grpc's queue,
// and with it the memory it lies in, for as long as the peer's window is closed;
// grpc can reset no stream then, so the connection must go. A frame may be there
// from one look to the next: idle at least, twice that at most.
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
			_ = one.in.Close() // grpc's reader sees to the rest
		}
	}
}

// stuck looks at all connections and returns those whose peers do not read.
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

// HandleRPC follows an RPC from its handler's start to its end. It takes back what was
// sent when the RPC was over: grpc may have forgotten it.
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
