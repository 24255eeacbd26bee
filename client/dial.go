package client

import (
	"cmp"
	"context"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"

	"github.com/tensorferry/tensorferry/internal/calling"
	"github.com/tensorferry/tensorferry/internal/lane"
)

// noted are credentials that note the authority that gRPC gives them, which is the same for
// all connections of a client, and what became of an attempt to connect.
type noted struct {
	credentials.TransportCredentials
	client *Client
}

// ClientHandshake secures a connection.
func (n noted) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	n.client.authority.Store(authority)
	conn, info, err := n.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		n.client.dials.end(notSecured(err))
	}
	return &answering{Conn: conn, client: n.client}, info, err
}

// answering is a connection whose attempt ends when its peer says something, or has gone.
type answering struct {
	net.Conn
	client *Client
	heard  atomic.Bool
}

func (a *answering) Read(p []byte) (n int, err error) {
	if n, err = a.Conn.Read(p); !a.heard.Load() {
		a.heard.Store(n > 0)
		if err != nil {
			a.client.dials.end(a.client.notAnswered(err))
		} else {
			a.client.dials.end(nil)
		}
	}
	return n, err
}

// Write leaves it to Read to find that the peer has gone, after what it said.
func (a *answering) Write(p []byte) (int, error) {
	if n, err := a.Conn.Write(p); err == nil || a.heard.Load() {
		return n, err
	}
	return len(p), nil
}

// Clone returns a copy that notes in the same place.
func (n noted) Clone() credentials.TransportCredentials {
	n.TransportCredentials = n.TransportCredentials.Clone()
	return n
}

// dialLane connects to the server of a session, and secures the connection as that of the
// session is.
func (c *Client) dialLane(ctx context.Context, to net.Addr) (net.Conn, error) {
	raw, err := c.cfg.dial(ctx, to.Network(), to.String())
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() }) // not all credentials heed ctx
	below := &lane.Batch{Conn: raw}
	conn, _, err := c.cfg.Credentials.ClientHandshake(ctx, c.authority.Load().(string), below)
	if !stop() {
		err = cmp.Or(context.Cause(ctx), err)
	}
	switch {
	case err != nil:
		_ = raw.Close()
		return nil, err
	case conn == below:
		return raw, nil
	}
	return lane.Secured{Conn: conn, Below: below}, nil
}

// dials are the attempts of a client's gRPC connection to connect. gRPC waits longer and longer
// between them, up to two minutes, and has RPCs fail meanwhile with the error of the last one. An
// RPC here fails or succeeds by one that ended after the RPC began.
type dials struct {
	mu    sync.Mutex
	ended int           // attempts
	err   *Error        // of the last one; nil: the peer has answered
	news  chan struct{} // closed when the next one ends
	next  time.Time     // when the next one may be asked for
}

// end notes the end of an attempt, with its error. d keeps the error.
func (d *dials) end(err *Error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ended++
	if d.err = err; err != nil {
		err.Refused = true
	}
	close(d.news)
	d.news = make(chan struct{})
}

// last returns how many attempts have ended, and a copy of the error of the last one.
func (d *dials) last() (ended int, news <-chan struct{}, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil {
		err = calling.AsRefused(d.err)
	}
	return d.ended, d.news, err
}

// ask reports whether gRPC is to dial: once for all who ask within redialEvery.
func (d *dials) ask() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if time.Now().Before(d.next) {
		return false
	}
	d.next = time.Now().Add(redialEvery)
	return true
}

// dial is gRPC's dialer.
func (c *Client) dial(ctx context.Context, address string) (net.Conn, error) {
	network := "tcp"
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		network, address = "unix", strings.TrimPrefix(path, "//")
	}
	conn, err := c.cfg.dial(ctx, network, address)
	if err != nil {
		c.dials.end(c.notDialed(err))
	}
	return conn, err
}

// fresh begins an RPC. If it fails at once because an older attempt to connect has failed, it
// begins again after the next one, which it asks for; and so on for as long as Config.Wait says.
func (c *Client) fresh(ctx context.Context, begin func() error) error {
	until := time.Now().Add(c.cfg.Wait)
	seen, _, _ := c.dials.last()
	try := func() error {
		err := begin()
		if _, _, why := c.dials.last(); why != nil && notSent(err) { // gRPC has only its text
			return why
		}
		return err
	}
	err := try()
	ended, news, why := c.dials.last()
	switch {
	case !notSent(err):
		return err
	case ended > seen && why == nil: // what answers is not a server
		return err
	}
	for ended == seen || time.Now().Before(until) {
		if c.dials.ask() {
			c.conn.ResetConnectBackoff()
		}
		select {
		case <-news:
		case <-time.After(redialEvery): // gRPC may have been connecting when it was asked
			if c.conn.GetState() != connectivity.TransientFailure {
				return try()
			}
			continue
		case <-ctx.Done():
			return err
		case <-c.closing.Done(): // gRPC dials no more
			return context.Cause(c.closing)
		}
		seen = ended
		if ended, news, why = c.dials.last(); why == nil {
			// gRPC says so soon, if it is a server.
			ready, cancel := context.WithTimeout(ctx, tellWait)
			c.conn.WaitForStateChange(ready, connectivity.TransientFailure)
			cancel()
			return try()
		}
		err = why
	}
	return err
}

// unary and streams are interceptors.
func (c *Client) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	return c.fresh(ctx, func() error { return invoker(ctx, method, req, reply, cc, opts...) })
}

func (c *Client) streams(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (s grpc.ClientStream, err error) {
	err = c.fresh(ctx, func() error {
		s, err = streamer(ctx, desc, cc, method, opts...)
		return err
	})
	return s, err
}
