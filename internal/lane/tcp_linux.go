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
// (TCP_NOTSENT_LOWAT): the lane whose socket wants more takes the next chunk. What
// waits on a slow lane holds up what comes after it.
const unsentBytes = 32 << 10

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
	control(c, func(fd int, info *unix.TCPInfo) { // without it, the lane works as well, but is slower
		if trip = time.Duration(min(info.Rtt, info.Min_rtt)) * time.Microsecond; trip >= Far {
			_ = unix.SetsockoptInt(fd, syscall.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, unsentBytes)
		}
	})
	return trip
}

// road returns what a TCP connection has carried; 0 for other connections.
func road(c net.Conn) (r Road) {
	control(c, func(_ int, info *unix.TCPInfo) {
		r = Road{
			Trip:  time.Duration(max(info.Rtt, info.Rcv_rtt)) * time.Microsecond,
			Moved: int64(info.Bytes_acked + info.Bytes_received),
			Sent:  int(info.Data_segs_out), Again: int(info.Total_retrans),
		}
	})
	return r
}

// control calls do with the socket of a TCP connection, and what the kernel knows of it.
func control(c net.Conn, do func(fd int, info *unix.TCPInfo)) {
	if s, ok := c.(*net.TCPConn); ok {
		if raw, err := s.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) {
				if info, err := unix.GetsockoptTCPInfo(int(fd), syscall.IPPROTO_TCP, unix.TCP_INFO); err == nil {
					do(int(fd), info)
				}
			})
		}
	}
}
