//go:build linux

package roads

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// End is a namespace at one end of a road. Its methods are safe for concurrent use.
type End struct {
	Addr netip.Addr

	holder *exec.Cmd
	user   bool // it has a user namespace of its own
	tun    int  // a descriptor that the runtime does not watch, as way does

	mu     sync.Mutex
	parent *net.UnixConn // guarded by mu
}

// newEnd starts the process that holds a namespace: plainly as root, else in a user
// namespace, too.
func newEnd(ctx context.Context, l Link, addr netip.Addr) (*End, error) {
	var whys []string
	for _, user := range []bool{false, true} {
		if !user && os.Geteuid() != 0 {
			continue
		}
		e, err := startEnd(ctx, l, addr, user)
		no := new(UnavailableError)
		if !errors.As(err, &no) {
			return e, err
		}
		whys = append(whys, no.Why)
	}
	return nil, &UnavailableError{strings.Join(slices.Compact(whys), "; ")}
}

func startEnd(ctx context.Context, l Link, addr netip.Addr, user bool) (_ *End, err error) {
	for _, tool := range []string{"nsenter", "chrt", "ip", "ss"} {
		if _, err := exec.LookPath(tool); err != nil {
			return nil, &UnavailableError{fmt.Sprintf("there is no %s command: install util-linux and iproute2", tool)}
		}
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "holder"), os.NewFile(uintptr(pair[1]), "parent")
	defer ours.Close()
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, err
	}
	e := &End{Addr: addr, user: user, tun: -1, parent: conn.(*net.UnixConn)}
	defer func() {
		if err != nil {
			_ = conn.Close()
		}
	}()
	h := exec.Command("/proc/self/exe")
	h.Args = []string{holderName, addr.String(), strconv.Itoa(l.MTU), l.Congestion}
	h.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0") // a second, in tests
	h.ExtraFiles = []*os.File{theirs}
	h.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
	if user {
		h.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		h.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}} // root inside
		h.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	if err := h.Start(); err != nil {
		what := "a network namespace"
		if user {
			what = "a user namespace"
		}
		return nil, &UnavailableError{fmt.Sprintf("the system refuses %s: %v", what, err)}
	}
	e.holder = h
	_ = theirs.Close() // so that its end is seen
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })()
	if err := conn.SetDeadline(time.Now().Add(setUpWait)); err != nil {
		return nil, errors.Join(err, e.close())
	}
	if e.tun, err = e.receive(); err != nil {
		return nil, errors.Join(err, e.close())
	}
	return e, conn.SetDeadline(time.Time{})
}

// receive returns the descriptor that the holder sends.
func (e *End) receive() (int, error) {
	text, rights := make([]byte, 4<<10), make([]byte, unix.CmsgSpace(4))
	n, size, _, _, err := e.parent.ReadMsgUnix(text, rights)
	switch {
	case err != nil:
		return -1, fmt.Errorf("roads: the process that holds a namespace says nothing: %w", err)
	case n == 0:
		return -1, errors.New("roads: the process that holds a namespace has ended")
	case text[0] == holderNone:
		return -1, &UnavailableError{string(text[1:n])}
	case text[0] != holderOK:
		return -1, errors.New(string(text[1:n]))
	}
	messages, err := unix.ParseSocketControlMessage(rights[:size])
	if err == nil && len(messages) == 1 {
		var fds []int
		if fds, err = unix.ParseUnixRights(&messages[0]); err == nil && len(fds) == 1 {
			return fds[0], nil
		}
	}
	return -1, errors.Join(errors.New("roads: the process that holds a namespace sent no descriptor"), err)
}

// close ends the namespace, and all processes in it.
func (e *End) close() error {
	if e.tun >= 0 {
		_ = unix.Close(e.tun)
	}
	_ = e.parent.Close()
	defer time.AfterFunc(endWait, func() { _ = e.holder.Process.Kill() }).Stop()
	_ = e.holder.Wait() // it has said what went wrong
	return nil
}

// Command returns a command that runs at this end, no more urgent than others. It is killed at the latest when the road
// is closed.
func (e *End) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	in := []string{"--target", strconv.Itoa(e.holder.Process.Pid), "--net"}
	if e.user {
		in = append(in, "--user", "--preserve-credentials")
	}
	return exec.CommandContext(ctx, "nsenter", append(append(in, "--", "chrt", "--other", "0", name), args...)...)
}

// Congestion returns the congestion controls of the connections that are established with
// the other end, as the kernel has them, and how many have each.
func (e *End) Congestion(ctx context.Context) (map[string]int, error) {
	out, err := e.Command(ctx, "ss", "-tinHO", "state", "established", "dst", netip.PrefixFrom(e.Addr, networkBits).Masked().String()).Output()
	if err != nil {
		return nil, fmt.Errorf("roads: ss: %w", err)
	}
	return congestions(out), nil
}

// congestions reads what ss prints of connections, one in a line: two sizes, two addresses,
// some words without a value and the name. It borrows out.
func congestions(out []byte) map[string]int {
	found := make(map[string]int)
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		words := strings.Fields(lines.Text())
		for _, word := range words[min(4, len(words)):] {
			if !slices.Contains([]string{"ts", "sack", "ecn", "ecnseen", "fastopen"}, word) {
				found[word]++
				break
			}
		}
	}
	return found
}

// socket returns a new socket of this namespace, bound to a free port of its address.
func (e *End) socket(want byte) (*os.File, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, err := e.parent.Write([]byte{want}); err != nil {
		return nil, err
	}
	fd, err := e.receive()
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "socket")
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: e.Addr.As4()}); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Listen listens on a free port of this end.
func (e *End) Listen() (net.Listener, error) {
	f, err := e.socket(wantTCP)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := unix.Listen(descriptor(f), listenBacklog); err != nil {
		return nil, err
	}
	return net.FileListener(f)
}

// ListenPacket listens on a free UDP port of this end.
func (e *End) ListenPacket() (net.PacketConn, error) {
	f, err := e.socket(wantUDP)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return net.FilePacketConn(f)
}

// Dial connects this end with an address of the other.
func (e *End) Dial(ctx context.Context, address string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	f, err := e.socket(wantTCP)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	defer context.AfterFunc(ctx, func() { _ = f.SetDeadline(time.Now()) })()
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	failed, begun := error(nil), false
	err = raw.Write(func(fd uintptr) bool {
		if !begun {
			begun = true
			failed = unix.Connect(int(fd), &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())})
			return !errors.Is(failed, unix.EINPROGRESS)
		}
		failed = nil
		if code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR); err != nil {
			failed = err
		} else if code != 0 {
			failed = unix.Errno(code)
		} else if _, err := unix.Getpeername(int(fd)); errors.Is(err, unix.ENOTCONN) {
			return false // woken by what the socket was before it began to connect
		}
		return true
	})
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		return nil, err
	case failed != nil:
		return nil, fmt.Errorf("roads: dial %s: %w", address, failed)
	}
	return net.FileConn(f)
}

// descriptor returns that of f, and leaves it as it is: Fd may have it block.
func descriptor(f *os.File) (fd int) {
	raw, err := f.SyscallConn()
	if err == nil {
		err = raw.Control(func(d uintptr) { fd = int(d) })
	}
	if err != nil {
		return -1
	}
	return fd
}
