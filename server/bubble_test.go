package server_test

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"
)

// links are the listeners of a bubble's servers, by address.
var links struct {
	mu     sync.Mutex
	on     bool // a bubble runs
	serial uint16
	open   map[string]*bufconn.Listener
}

// linkBytes is what a connection of a bubble holds that nobody reads, in each direction.
const linkBytes = 256 << 10

// bubble runs f in a bubble of synctest, where time passes as soon as everybody waits, so
// that a test may wait for a limit of seconds. Servers that f starts listen in memory, and
// reach, connect and dialling through them find those. The client of package client does
// not: it dials by itself. testkit.Start comes before.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	links.mu.Lock()
	links.on, links.open = true, map[string]*bufconn.Listener{}
	links.mu.Unlock()
	defer func() {
		links.mu.Lock()
		links.on = false
		links.mu.Unlock()
	}()
	synctest.Test(t, f)
}

// listener listens on a socket, or in a bubble in memory.
func listener(t testing.TB) (l net.Listener, addr string) {
	t.Helper()
	links.mu.Lock()
	defer links.mu.Unlock()
	if !links.on {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		return l, l.Addr().String()
	}
	links.serial++
	addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, 1}), links.serial).String() // nobody's: RFC 5737
	links.open[addr] = bufconn.Listen(linkBytes)
	return links.open[addr], addr
}

// connect connects to what listener has returned.
func connect(ctx context.Context, addr string) (net.Conn, error) {
	links.mu.Lock()
	l := links.open[addr]
	links.mu.Unlock()
	if l != nil {
		return l.DialContext(ctx)
	}
	return new(net.Dialer).DialContext(ctx, "tcp", addr)
}

// reach makes gRPC connect to what listener has returned.
var reach = grpc.WithContextDialer(connect)
