package server_test

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// proxy stands between client and server and loses the connection: when told, or
// after a number of bytes in both directions together.
type proxy struct {
	addr string

	mu    sync.Mutex
	conns []net.Conn
	left  int64 // bytes until the cut; negative: none is planned
}

func newProxy(t testing.TB, to string, cutAfter int64) *proxy {
	t.Helper()
	l := listen(t)
	p := &proxy{addr: l.Addr().String(), left: cutAfter}
	var work sync.WaitGroup
	work.Go(func() { // ends with the listener
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			server, err := connect(context.Background(), to)
			if err != nil {
				_ = from.Close()
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, from, server)
			p.mu.Unlock()
			work.Go(func() { p.pass(server, from) })
			work.Go(func() { p.pass(from, server) })
		}
	})
	t.Cleanup(func() {
		require.NoError(t, l.Close())
		p.cut()
		work.Wait()
	})
	return p
}

// pass copies until either side is closed, or the cut is due.
func (p *proxy) pass(to, from net.Conn) {
	defer func() { _, _ = to.Close(), from.Close() }()
	buf := make([]byte, 16<<10)
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		if p.left >= 0 {
			if p.left -= int64(n); p.left < 0 {
				n, p.left = max(0, n+int(p.left)), 0
				err = errors.Join(err, io.ErrUnexpectedEOF)
			}
		}
		p.mu.Unlock()
		if _, e := to.Write(buf[:n]); e != nil || err != nil {
			p.cut()
			return
		}
	}
}

// cut closes every connection.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}
