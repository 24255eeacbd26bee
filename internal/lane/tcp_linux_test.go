package lane

import (
	"errors"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

func TestBothEndsSendByBBRWhereTheKernelAllowsIt(t *testing.T) {
	testkit.Start(t)
	how := net.ListenConfig{Control: BBR}
	l, err := how.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if errors.Is(err, syscall.ENOENT) || errors.Is(err, os.ErrPermission) {
		require.ErrorContains(t, err, "tcp_allowed_congestion_control")
		t.Skip(err)
	}
	require.NoError(t, err)
	defer l.Close()
	a, err := (&net.Dialer{Control: BBR}).Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer a.Close()
	b, err := l.Accept()
	require.NoError(t, err)
	defer b.Close()
	for _, c := range []net.Conn{a, b} {
		raw, err := c.(*net.TCPConn).SyscallConn()
		require.NoError(t, err)
		require.NoError(t, raw.Control(func(fd uintptr) {
			name, err := unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION)
			require.NoError(t, err)
			require.Equal(t, "bbr", name)
		}))
	}
}

func TestAUnixSocketIsLeftAlone(t *testing.T) {
	require.NoError(t, BBR("unix", "", nil))
}
