package main

import (
	"errors"
	"net"
	"sync"
)

// proxy stands between a client and a server and cuts every connection after so
// many bytes of both directions together.
type proxy struct {
	address string
	l       net.Listener
	work    sync.WaitGroup

	mu    sync.Mutex // guards all below
	conns []net.Conn
	left  int
	over  bool
}

// cutAfter starts a proxy, whose goroutines end with close.
func cutAfter(n int, to string) (*proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{address: l.Addr().String(), l: l, left: n}
	p.work.Go(func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", to)
			if err != nil {
				_ = from.Close() // as a server that is not there
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, from, server)
			p.mu.Unlock()
			p.work.Go(func() { p.pass(server, from) })
			p.work.Go(func() { p.pass(from, server) })
		}
	})
	return p, nil
}

func (p *proxy) pass(to, from net.Conn) {
	buf := make([]byte, 64*kib)
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		if p.left -= n; p.left < 0 {
			n, p.left, p.over = max(0, n+p.left), 0, true
		}
		over := p.over
		p.mu.Unlock()
		if _, e := to.Write(buf[:n]); e != nil || err != nil || over {
			_, _ = from.Close(), to.Close() // what they lose is what is wanted
			return
		}
	}
}

func (p *proxy) close() error {
	err := p.l.Close()
	p.mu.Lock()
	for _, c := range p.conns {
		if e := c.Close(); !errors.Is(e, net.ErrClosed) {
			err = errors.Join(err, e)
		}
	}
	p.mu.Unlock()
	p.work.Wait()
	return err
}
