package lane

import (
	"cmp"
	"fmt"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// unsentBytes is how much of what was written to a far lane may wait in the kernel unsent
// (TCP_NOTSENT_LOWAT): the lane whose socket wants more takes the next chunk.
const unsentBytes = 256 << 10

// BBR has a TCP socket, which a net.Dialer or net.ListenConfig is about to use, send by BBR. It
// fails where the kernel does not allow that.
func BBR(network, _ string, c syscall.RawConn) (err error) {
	if network == "unix" {
		return nil
	}
	failed := c.Control(func(fd uintptr) {
		if err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "bbr"); err != nil {
			err = fmt.Errorf("no BBR: %w; load the module tcp_bbr, and allow bbr in net.ipv4.tcp_allowed_congestion_control", err)
		}
	})
	return cmp.Or(failed, err)
}

// tune prepares a TCP connection for chunks, and returns its least round trip; 0 for other
// connections. The sizes of its buffers are the kernel's to choose: setting them would end
// that.
func tune(c net.Conn) (trip time.Duration) {
	s, ok := c.(*net.TCPConn)
	if !ok {
		return 0
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) { // without it, the lane works as well, but is slower
		if info, err := unix.GetsockoptTCPInfo(int(fd), syscall.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			trip = time.Duration(min(info.Rtt, info.Min_rtt)) * time.Microsecond
		}
		if trip >= Far {
			_ = unix.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, unsentBytes)
		}
	})
	return trip
}
