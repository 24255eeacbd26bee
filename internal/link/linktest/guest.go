//go:build linux

// Package linktest is the guest of a link, in Go, for tests: it maps what it is given,
// and sends whatever it is told to. A Guest is for one goroutine.
package linktest

import (
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/internal/link"
)

// Guest is the other end of a link.
type Guest struct {
	T      testing.TB
	Socket *net.UnixConn
	mem    map[uint32][]byte
	Given  []link.Range // ranges that came with id 0
	ids    uint64
}

// patience is how long a guest waits for the host.
const patience = 10 * time.Second

// Pair returns a socket for a host, and a guest at its other end until the test ends.
func Pair(t testing.TB) (host *net.UnixConn, g *Guest) {
	t.Helper()
	host, file, err := link.Pair()
	require.NoError(t, err)
	fd, err := unix.Dup(int(file.Fd()))
	require.NoError(t, err)
	_ = file.Close()
	g = &Guest{T: t, mem: make(map[uint32][]byte)}
	g.Socket, err = link.FromFD(fd)
	require.NoError(t, err)
	t.Cleanup(g.Close)
	return host, g
}

// Close ends the guest's side, and unmaps all.
func (g *Guest) Close() {
	_ = g.Socket.Close() // a second time it fails
	for n, m := range g.mem {
		_ = unix.Munmap(m)
		delete(g.mem, n)
	}
}

// ID returns an id that was not used before.
func (g *Guest) ID() uint64 { g.ids++; return g.ids }

// Write sends a packet as it is.
func (g *Guest) Write(packet []byte) {
	g.T.Helper()
	_, err := g.Socket.Write(packet)
	require.NoError(g.T, err)
}

// Send sends a message.
func (g *Guest) Send(m link.Message) {
	g.T.Helper()
	packet, err := link.Append(nil, m)
	require.NoError(g.T, err)
	g.Write(packet)
}

// Recv returns the next message that is not about memory, io.EOF at the end.
func (g *Guest) Recv() (m link.Message, err error) {
	g.T.Helper()
	for m == nil && err == nil {
		m, err = g.RecvOrGiven()
	}
	return m, err
}

// RecvOrGiven is like Recv, but also returns, without a message, when ranges came back.
func (g *Guest) RecvOrGiven() (link.Message, error) {
	g.T.Helper()
	packet, oob := make([]byte, link.PacketBytes+1), make([]byte, 64)
	for {
		_ = g.Socket.SetReadDeadline(time.Now().Add(patience))
		n, oobn, _, _, err := g.Socket.ReadMsgUnix(packet, oob)
		switch {
		case errors.Is(err, io.EOF), err == nil && n == 0:
			return nil, io.EOF
		case err != nil:
			return nil, err
		}
		m, err := link.Parse(packet[:n])
		if err != nil {
			return nil, err
		}
		switch m := m.(type) {
		case *link.Memory:
			if err := g.mapped(m, oob[:oobn]); err != nil {
				return nil, err
			}
		case *link.Forget:
			if g.mem[uint32(m.ID)] == nil {
				return nil, fmt.Errorf("memory %d is to be forgotten and not known", m.ID)
			}
			_ = unix.Munmap(g.mem[uint32(m.ID)])
			delete(g.mem, uint32(m.ID))
		case *link.Give:
			if m.ID != 0 {
				return m, nil
			}
			g.Given = append(g.Given, m.Ranges...)
			return nil, nil
		default:
			return m, nil
		}
	}
}

// mapped maps a memory, which must be sealed.
func (g *Guest) mapped(m *link.Memory, oob []byte) error {
	all, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(all) != 1 {
		return fmt.Errorf("memory %d comes with %d control messages: %w", m.ID, len(all), err)
	}
	fds, err := unix.ParseUnixRights(&all[0])
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fds[0]) }()
	if unix.Ftruncate(fds[0], 0) == nil || unix.Ftruncate(fds[0], int64(m.Bytes)+1) == nil {
		return fmt.Errorf("memory %d can be resized", m.ID)
	}
	mem, err := unix.Mmap(fds[0], 0, int(m.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	g.mem[uint32(m.ID)] = mem
	return err
}

// Must is Recv, which must bring a message of type T.
func Must[T link.Message](g *Guest) T {
	g.T.Helper()
	m, err := g.Recv()
	require.NoError(g.T, err)
	require.IsType(g.T, *new(T), m)
	return m.(T)
}

// Take takes a range of n bytes.
func (g *Guest) Take(n int) link.Range {
	g.T.Helper()
	g.Send(&link.Take{Head: link.Head{ID: g.ID()}, Bytes: uint64(n), Millis: uint32(patience.Milliseconds())})
	give := Must[*link.Give](g)
	require.Len(g.T, give.Ranges, 1)
	r := give.Ranges[0]
	require.GreaterOrEqual(g.T, r.Len, uint64(n))
	r.Len = uint64(n)
	return r
}

// Give gives a range back.
func (g *Guest) Give(r ...link.Range) { g.T.Helper(); g.Send(&link.Give{Ranges: r}) }

// Bytes lends the memory of a range, until Close.
func (g *Guest) Bytes(r link.Range) []byte {
	if r.Len == 0 {
		return []byte{}
	}
	return g.mem[r.Memory][r.Off : r.Off+r.Len : r.Off+r.Len]
}

// Memories returns how many memories are mapped.
func (g *Guest) Memories() int { return len(g.mem) }

// Put takes a range and copies data into it.
func (g *Guest) Put(data []byte) link.Range {
	g.T.Helper()
	r := g.Take(max(1, len(data)))
	r.Len = uint64(copy(g.Bytes(r), data))
	return r
}
