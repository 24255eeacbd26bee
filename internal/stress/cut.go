package main

import (
	"context"
	"io"
	"net"
	"sync/atomic"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// cutting are credentials whose connections break after so many bytes of both
// directions together.
type cutting struct {
	credentials.TransportCredentials
	left atomic.Int64
}

func cutAfter(n int) *cutting {
	c := &cutting{TransportCredentials: insecure.NewCredentials()}
	c.left.Store(int64(n))
	return c
}

// Clone shares what is left.
func (c *cutting) Clone() credentials.TransportCredentials { return c }

// ClientHandshake says nothing.
func (c *cutting) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return c.TransportCredentials.ClientHandshake(ctx, authority, &cutConn{conn, &c.left})
}

type cutConn struct {
	net.Conn
	left *atomic.Int64
}

// spend returns how many of n bytes pass, and an error if not all do.
func (c *cutConn) spend(n int) (int, error) {
	over := -c.left.Add(-int64(n))
	if over <= 0 {
		return n, nil
	}
	return max(0, n-int(over)), io.ErrUnexpectedEOF
}

// Read copies into b.
func (c *cutConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	n, cut := c.spend(n)
	if cut != nil {
		_ = c.Close() // what is lost is what is wanted
		err = cut
	}
	return n, err
}

// Write copies b.
func (c *cutConn) Write(b []byte) (int, error) {
	n, cut := c.spend(len(b))
	n, err := c.Conn.Write(b[:n])
	if cut != nil {
		_ = c.Close()
		err = cut
	}
	return n, err
}
