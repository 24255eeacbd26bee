//go:build !linux

package link

import (
	"errors"
	"net"
	"os"
	"syscall"
)

// errSystem: memfds and their seals are Linux's.
var errSystem = errors.New("link: only Linux has the shared memory that links need")

func mapNew(int) (int, []byte, error) { return 0, nil, errSystem }

func unmap(int, []byte) {}

// Pair fails: there are no links here.
func Pair() (host *net.UnixConn, guest *os.File, err error) { return nil, nil, errSystem }

// FromFD fails: there are no links here.
func FromFD(int) (*net.UnixConn, error) { return nil, errSystem }

const noFD = -1

type socket struct{}

func socketOf(syscall.Conn) (*socket, error) { return new(socket), nil }

func (*socket) sendPacket([]byte, int, bool) error { return errSystem }

func (*socket) receive([]byte) (int, error) { return 0, errSystem }

// Brief returns conn.
func Brief(conn net.Conn) net.Conn { return conn }

// Watch fails: there are no links here.
func Watch(int, func()) (stop func(), err error) { return nil, errSystem }
