//go:build !linux

package lane

import (
	"errors"
	"net"
	"syscall"
	"time"
)

// BBR fails: only Linux has it.
func BBR(string, string, syscall.RawConn) error { return errors.New("no BBR: only Linux has it") }

// tune returns 0: the round trip is not known.
func tune(net.Conn) time.Duration { return 0 }

// road returns 0: nothing is known.
func road(net.Conn) Road { return Road{} }
