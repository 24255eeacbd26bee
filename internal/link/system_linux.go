package link

import (
	"errors"
	"fmt"
	"net"
	"os"

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

// sendPacket sends a packet and, unless it is noFD, a descriptor. If it does not wait for
// room in the socket, it is errFull that there is none.
func sendPacket(f *os.File, packet []byte, fd int, wait bool) error {
	flags := unix.MSG_NOSIGNAL
	if !wait {
		flags |= unix.MSG_DONTWAIT
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var rights []byte
	if fd != noFD {
		rights = unix.UnixRights(fd)
	}
	if bad := raw.Control(func(socket uintptr) {
		for {
			err = unix.Sendmsg(int(socket), packet, rights, nil, flags)
			if !errors.Is(err, unix.EINTR) {
				return
			}
		}
	}); bad != nil {
		return bad
	}
	if errors.Is(err, unix.EAGAIN) {
		return errFull
	}
	return err
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
