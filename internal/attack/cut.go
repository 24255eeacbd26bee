package attack

import (
	"context"
	"io"
	"net"
	"sync/atomic"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

type cutting struct {
	credentials.TransportCredentials
	left *atomic.Int64
}

// CutAfter returns credentials of a client whose connections, all together, carry so
// many bytes in both directions, and break then. Until then they are as those given are;
// nil: not encrypted.
func CutAfter(n int, as credentials.TransportCredentials) credentials.TransportCredentials {
	left := new(atomic.Int64)
	left.Store(int64(n))
	if as == nil {
		as = insecure.NewCredentials()
	}
	return cutting{as, left}
}

// Clone shares what is left.
func (c cutting) Clone() credentials.TransportCredentials { return c }

// ClientHandshake says nothing.
func (c cutting) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return c.TransportCredentials.ClientHandshake(ctx, authority, cutConn{conn, c.left})
}

type cutConn struct {
	net.Conn
	left *atomic.Int64
}

// spend returns how many of n bytes pass. If not all do, the connection breaks.
func (c cutConn) spend(n int, err error) (int, error) {
	over := -c.left.Add(-int64(n))
	if over <= 0 {
		return n, err
	}
	_ = c.Close() // what is lost is what is wanted
	return max(0, n-int(over)), io.ErrUnexpectedEOF
}

// Read copies into b.
func (c cutConn) Read(b []byte) (int, error) { return c.spend(c.Conn.Read(b)) }

// Write copies what passes of b before the connection breaks.
func (c cutConn) Write(b []byte) (int, error) {
	if left := c.left.Load(); int64(len(b)) > left {
		_, _ = c.Conn.Write(b[:max(left, 0)])
		return c.spend(len(b), nil)
	}
	return c.spend(c.Conn.Write(b))
}
