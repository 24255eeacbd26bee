package testkit

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/test/bufconn"
)

// linkBytes is what a connection in memory holds that nobody reads, in each direction.
const linkBytes = 256 << 10

// Network is a network in memory, for bubbles of testing/synctest: time does not pass while
// somebody waits for a socket. The zero value is a network without listeners. Safe for
// concurrent use.
type Network struct {
	mu     sync.Mutex
	serial uint16                       // guarded by mu, as open
	open   map[string]*bufconn.Listener // by address
}

// Listen returns a listener with an address of its own.
func (n *Network) Listen() net.Listener {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.open == nil {
		n.open = make(map[string]*bufconn.Listener)
	}
	n.serial++
	addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, 1}), n.serial) // nobody's: RFC 5737
	l := bufconn.Listen(linkBytes)
	n.open[addr.String()] = l
	return memoryListener{l, net.TCPAddrFromAddrPort(addr)}
}

// Dial connects to a listener of the network, once that accepts it.
func (n *Network) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	n.mu.Lock()
	l := n.open[address]
	n.mu.Unlock()
	addr, err := net.ResolveTCPAddr(network, address)
	if err != nil {
		return nil, err
	}
	if l == nil {
		return nil, &net.OpError{Op: "dial", Net: network, Addr: addr, Err: syscall.ECONNREFUSED}
	}
	c, err := l.DialContext(ctx)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Addr: addr, Err: syscall.ECONNREFUSED}
	}
	return memoryConn{c, addr}, nil
}

type memoryListener struct {
	*bufconn.Listener
	addr net.Addr
}

// Addr returns the address that Dial connects to.
func (l memoryListener) Addr() net.Addr { return l.addr }

type memoryConn struct {
	net.Conn
	addr net.Addr
}

// RemoteAddr returns the address that it was opened to.
func (c memoryConn) RemoteAddr() net.Addr { return c.addr }

// current is the network of the bubble that runs; nil outside.
var current atomic.Pointer[Network]

// settling is for what ends late, as Start waits for outside: goroutines that run after it
// fail the test.
const settling = 20 * time.Second

// Bubble runs f in a bubble of synctest, where time passes as soon as everybody waits, so
// that a test may wait for a limit of seconds. What Listen returns is in memory then, and
// Dial reaches it. Start comes before.
func Bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	current.Store(new(Network))
	defer current.Store(nil)
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(settling) }) // in the bubble: no test waits for it
		f(t)
	})
}

// InBubble returns the network of the bubble that runs; nil outside.
func InBubble() *Network { return current.Load() }

// Listen listens on a TCP socket, or in a bubble in memory.
func Listen(t testing.TB) net.Listener {
	t.Helper()
	if n := InBubble(); n != nil {
		return n.Listen()
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("testkit: %v", err)
	}
	return l
}

// Dial connects to what Listen has returned.
func Dial(ctx context.Context, addr string) (net.Conn, error) {
	if n := InBubble(); n != nil {
		return n.Dial(ctx, "tcp", addr)
	}
	return new(net.Dialer).DialContext(ctx, "tcp", addr)
}

// SlowConn is a connection that takes Rate bytes a second, in a bubble.
type SlowConn struct {
	net.Conn
	Rate int
}

// Write writes a little at a time.
func (c SlowConn) Write(b []byte) (n int, err error) {
	for n < len(b) && err == nil {
		var m int
		m, err = c.Conn.Write(b[n:min(len(b), n+256)])
		n += m
		time.Sleep(time.Duration(m) * time.Second / time.Duration(c.Rate))
	}
	return n, err
}
