package server_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

// memory is the network of the bubble that runs; nil outside.
var memory atomic.Pointer[testkit.Network]

// settling is for what ends late, as testkit.Start waits for outside: goroutines that run
// after it fail the test.
const settling = 20 * time.Second

// bubble runs f in a bubble of synctest, where time passes as soon as everybody waits, so
// that a test may wait for a limit of seconds. Servers that f starts listen in memory, and
// connect, reach and what dials through them find those. The clients of package client do
// not: they dial by themselves. testkit.Start comes before.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	memory.Store(new(testkit.Network))
	defer memory.Store(nil)
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(settling) })
		f(t)
	})
}

// listen listens on a socket, or in a bubble in memory.
func listen(t testing.TB) net.Listener {
	t.Helper()
	if n := memory.Load(); n != nil {
		return n.Listen()
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	return l
}

// connect connects to what listen has returned.
func connect(ctx context.Context, addr string) (net.Conn, error) {
	if n := memory.Load(); n != nil {
		return n.Dial(ctx, "tcp", addr)
	}
	return new(net.Dialer).DialContext(ctx, "tcp", addr)
}

// reach makes gRPC connect to what listen has returned.
var reach = grpc.WithContextDialer(connect)
