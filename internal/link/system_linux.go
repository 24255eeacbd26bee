package link

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapNew makes and maps a memfd that can neither grow nor shrink, so that no side can
// make the other's reads fail.
func mapNew(size int) (fd int, mem []byte, err error) {
	fd, err = unix.MemfdCreate("tensorferry", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return 0, nil, err
	}
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		err = unix.Fallocate(fd, 0, 0, int64(size))
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err == nil {
		mem, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		_ = unix.Close(fd)
		return 0, nil, err
	}
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // best effort
	return fd, mem, nil
}

func unmap(fd int, mem []byte) {
	_ = unix.Close(fd)
	if err := unix.Munmap(mem); err != nil {
		panic("link: unmap: " + err.Error()) // only a slice that was not mapped
	}
}

// Pair returns the two ends of a socket: the host's, and a file for the guest.
func Pair() (host *net.UnixConn, guest *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("link: socket: %w", err)
	}
	guest = os.NewFile(uintptr(fds[1]), "link")
	if host, err = FromFD(fds[0]); err != nil {
		_ = guest.Close()
	}
	return host, guest, err
}

// FromFD takes over the descriptor of a socket that this process was started with.
func FromFD(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "link")
	defer func() { _ = f.Close() }() // FileConn copies the descriptor
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err == nil && kind != unix.SOCK_SEQPACKET {
		err = unix.EPROTOTYPE
	}
	var c net.Conn
	if err == nil {
		c, err = net.FileConn(f)
	}
	if err != nil {
		return nil, fmt.Errorf("link: descriptor %d is not a socket of a link: %w", fd, err)
	}
	return c.(*net.UnixConn), nil // no others are SOCK_SEQPACKET in Go
}

// noFD stands for no descriptor.
const noFD = -1

// socket moves bytes of a socket. The runtime does not hear of its system calls: it would wake its monitor,
// which then wakes itself every 20 µs, and takes a quarter of the time of a small call.
type socket struct {
	raw     syscall.RawConn
	in, out direction
}

// direction is one of a socket's.
type direction struct {
	wait func(try func(fd uintptr) (done bool)) error // until try, which is made once, is done
	try  func(fd uintptr) bool
	call uintptr

	mu     sync.Mutex // guards all below
	p      []byte
	moved  int
	why    syscall.Errno
	atOnce bool // what would wait fails
}

func socketOf(c syscall.Conn) (*socket, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &socket{raw: raw, in: direction{wait: raw.Read, call: unix.SYS_RECVFROM}, out: direction{wait: raw.Write, call: unix.SYS_SENDTO}}
	s.in.try, s.out.try = s.in.move, s.out.move
	return s, nil
}

func (d *direction) move(fd uintptr) (done bool) {
	for d.why = unix.EINTR; d.why == unix.EINTR; {
		var n uintptr
		n, _, d.why = syscall.RawSyscall6(d.call, fd, uintptr(unsafe.Pointer(unsafe.SliceData(d.p))), uintptr(len(d.p)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
		d.moved = int(n)
	}
	return d.atOnce || d.why != unix.EAGAIN
}

// transfer receives p or sends it. If that would wait and is not to, it fails with errFull.
func (d *direction) transfer(p []byte, atOnce bool) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.p, d.atOnce = p, atOnce
	bad := d.wait(d.try)
	d.p = nil
	switch {
	case bad != nil:
		return 0, bad
	case d.why == unix.EAGAIN:
		return 0, errFull
	case d.why != 0:
		return 0, d.why
	case d.moved == 0 && len(p) > 0:
		return 0, io.EOF
	}
	return d.moved, nil
}

// sendPacket sends a packet and, unless it is noFD, a descriptor.
func (s *socket) sendPacket(packet []byte, fd int, atOnce bool) (err error) {
	if fd == noFD {
		_, err = s.out.transfer(packet, atOnce)
		return err
	}
	bad := s.raw.Write(func(to uintptr) bool {
		for err = unix.EINTR; errors.Is(err, unix.EINTR); {
			err = unix.Sendmsg(int(to), packet, unix.UnixRights(fd), nil, unix.MSG_NOSIGNAL)
		}
		return atOnce || !errors.Is(err, unix.EAGAIN)
	})
	if errors.Is(err, unix.EAGAIN) {
		err = errFull
	}
	return cmp.Or(bad, err)
}

// receive receives a packet, for which it waits.
func (s *socket) receive(packet []byte) (int, error) { return s.in.transfer(packet, false) }

// Brief returns conn, a socket, so that the runtime does not hear of its short reads and writes. A program that computes
// long without any other system call should not use it: the runtime would not interrupt that.
func Brief(conn net.Conn) net.Conn {
	if c, ok := conn.(syscall.Conn); ok && !race { // the race detector knows from system calls what happened before
		if s, err := socketOf(c); err == nil {
			return brief{conn, s}
		}
	}
	return conn
}

type brief struct {
	net.Conn
	*socket
}

func (b brief) Read(p []byte) (n int, err error) { return b.in.transfer(p, false) }

func (b brief) Write(p []byte) (n int, err error) {
	if len(p) > PacketBytes { // it takes long
		return b.Conn.Write(p)
	}
	for n < len(p) && err == nil {
		var moved int
		moved, err = b.out.transfer(p[n:], false)
		n += moved
	}
	return n, err
}

// Watch runs ended on a goroutine when the process ends, until stop is called: a
// socket whose other end a child of the process holds too says nothing of it.
func Watch(pid int, ended func()) (stop func(), err error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("link: process %d: %w", pid, err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	raw, err := f.SyscallConn()
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("link: process %d: %w", pid, err)
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		tried := false
		// It is readable when the process has ended.
		if raw.Read(func(uintptr) bool { was := tried; tried = true; return was }) == nil {
			ended()
		}
	}()
	return func() {
		_ = f.Close() // ends Read
		<-over
	}, nil
}
