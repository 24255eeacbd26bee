package client

import (
	"cmp"
	"context"
	"net"
	"sync/atomic"

	"google.golang.org/grpc/credentials"

	"github.com/tensorferry/tensorferry/internal/lane"
)

// noted are credentials that note the authority that gRPC gives them, which is the same for
// all connections of a client, and what became of an attempt to connect.
type noted struct {
	credentials.TransportCredentials
	in    *atomic.Value
	dials *dials
}

// ClientHandshake secures a connection.
func (n noted) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	n.in.Store(authority)
	conn, info, err := n.TransportCredentials.ClientHandshake(ctx, authority, raw)
	n.dials.end(unsecured, err)
	return conn, info, err
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
