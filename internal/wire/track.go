package wire

import (
	"context"
	"net"
	"sync/atomic"

	"google.golang.org/grpc/credentials"
)

// Track returns credentials of a client whose connections know what is in flight, and
// end its loans when they die. grpc's stats.Handler costs about 200 bytes a message,
// and may report the end after 5 s while the writer still reads. A dialer's connection
// would lose TCP_USER_TIMEOUT, which gRPC sets before the handshake.
func Track(c credentials.TransportCredentials) credentials.TransportCredentials {
	return tracking{c}
}

type tracking struct {
	credentials.TransportCredentials
}

// ClientHandshake wraps the connection that gRPC writes to.
func (t tracking) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := t.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		return nil, nil, err
	}
	return &tracked{Conn: conn}, info, nil
}

// Clone returns a copy.
func (t tracking) Clone() credentials.TransportCredentials {
	return tracking{t.TransportCredentials.Clone()}
}

// tracked is a connection of a client. gRPC's writer reads no payload after a Write
// has failed, or after it has closed the connection. The transport closes it once, too,
// before or after the writer: so the second Close ends the loans.
type tracked struct {
	net.Conn
	flight InFlight
	closes atomic.Int32
}

// Write writes b, which it borrows.
func (c *tracked) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if err != nil {
		c.flight.Abandon()
	}
	return n, err
}

// Close closes the connection.
func (c *tracked) Close() error {
	err := c.Conn.Close()
	if c.closes.Add(1) == 2 {
		c.flight.Abandon()
	}
	return err
}

// RemoteAddr returns the peer's address with what is in flight: grpc shows nothing
// else of a connection.
func (c *tracked) RemoteAddr() net.Addr { return trackedAddr{c.Conn.RemoteAddr(), &c.flight} }

type trackedAddr struct {
	net.Addr
	flight *InFlight
}
