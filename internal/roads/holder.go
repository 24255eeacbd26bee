//go:build linux

package roads

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// holderName is the name that this program has, started anew, as the first process of a
// namespace: the arguments are address, MTU and congestion control. It sends the TUN device
// over its socket, then a socket of the namespace for each byte that it gets, and ends every
// process of the namespace when its socket is closed, which the death of this one does.
const holderName = "tensorferry-road"

// holderSocket is the descriptor of the holder's socket.
const holderSocket = 3

// What the holder answers with, before a text.
const (
	holderOK, holderNone, holderFailed = 'o', 'n', 'f'
)

// Sockets that it is asked for.
const (
	wantTCP, wantUDP = 't', 'u'
)

// device is the name of the TUN device at either end.
const device = "road0"

// A program that imports this package is its own holder, also a test's.
func init() {
	if len(os.Args) == 4 && os.Args[0] == holderName {
		if err := hold(os.Args[1:]); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// hold is a holder's whole life.
func hold(args []string) error {
	signal.Ignore(unix.SIGINT, unix.SIGTERM, unix.SIGHUP) // of a terminal, for the parent, which then ends this
	f := os.NewFile(holderSocket, "parent")
	conn, err := net.FileConn(f)
	if err != nil {
		return err
	}
	_ = f.Close() // or programs started here would have it
	parent, is := conn.(*net.UnixConn)
	if !is {
		return errors.New("roads: no Unix socket")
	}
	tun, err := setUp(args[0], args[1], args[2])
	if err != nil {
		what := byte(holderFailed)
		if no := new(UnavailableError); errors.As(err, &no) {
			what, err = holderNone, errors.New(no.Why)
		}
		_, err = parent.Write(append([]byte{what}, err.Error()...))
		return err
	}
	if err := answer(parent, tun, nil); err != nil {
		return err
	}
	defer endAll()
	for {
		var want [1]byte
		if _, err := parent.Read(want[:]); err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return err
		}
		kind := unix.SOCK_STREAM
		if want[0] == wantUDP {
			kind = unix.SOCK_DGRAM
		}
		if err := answer(parent, 0, func() (int, error) { return unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0) }); err != nil {
			return err
		}
	}
}

// answer sends a descriptor, or one that is made and then closed here.
func answer(to *net.UnixConn, fd int, open func() (int, error)) (err error) {
	if open != nil {
		if fd, err = open(); err != nil {
			_, err = to.Write(append([]byte{holderFailed}, err.Error()...))
			return err
		}
	}
	defer func() { _ = unix.Close(fd) }()
	_, _, err = to.WriteMsgUnix([]byte{holderOK}, unix.UnixRights(fd), nil)
	return err
}

// setUp makes the device of this namespace, and returns it.
func setUp(address, mtu, congestion string) (int, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1, &UnavailableError{fmt.Sprintf("/dev/net/tun cannot be opened: %v", err)}
	}
	req, err := unix.NewIfreq(device)
	if err == nil {
		req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err != nil {
		return -1, &UnavailableError{fmt.Sprintf("no TUN device can be made: %v", err)}
	}
	// Or a connection would begin with the window at which an earlier one ended.
	if err := os.WriteFile("/proc/sys/net/ipv4/tcp_no_metrics_save", []byte("1"), 0); err != nil {
		return -1, &UnavailableError{err.Error()}
	}
	own, err := netip.ParseAddr(address)
	if err != nil {
		return -1, err
	}
	network := netip.PrefixFrom(own, networkBits)
	for _, args := range [][]string{
		{"link", "set", "lo", "up"},
		{"addr", "add", network.String(), "dev", device},
		{"link", "set", device, "mtu", mtu, "txqueuelen", strconv.Itoa(deviceQueue), "up"},
		{"route", "replace", network.Masked().String(), "dev", device, "src", address, "congctl", congestion},
	} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); errors.Is(err, exec.ErrNotFound) { //nolint:gosec // the arguments are this program's own
			return -1, &UnavailableError{"there is no ip command: install iproute2"}
		} else if err != nil {
			return -1, fmt.Errorf("roads: ip %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out))
		}
	}
	return fd, nil
}

// networkBits is the prefix of the network that both ends are in.
const networkBits = 24

// endAll kills every other process of this namespace, and those that they start meanwhile.
func endAll() {
	own, err := os.Readlink("/proc/self/ns/net")
	for deadline := time.Now().Add(endWait / 2); err == nil && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		others := inside(own)
		if len(others) == 0 {
			return
		}
		for _, pid := range others {
			_ = unix.Kill(pid, unix.SIGKILL) // it may have ended
		}
	}
}

// inside returns the processes of a network namespace but this one.
func inside(namespace string) (all []int) {
	links, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, link := range links {
		pid, _ := strconv.Atoi(strings.Split(link, "/")[2])
		if of, err := os.Readlink(link); err == nil && of == namespace && pid != os.Getpid() {
			all = append(all, pid)
		}
	}
	return all
}
