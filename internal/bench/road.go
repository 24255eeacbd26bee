package bench

import (
	"io"
	"net"
	"sync"
	"time"
)

// road is a proxy that delays each byte on its way, in both directions, as a long line
// of any rate does. It ends each connection at its own sockets, so that the system's
// TCP does not see the delay: what it shows are the windows of the protocols above.
type road struct {
	listener net.Listener
	delay    time.Duration // of one direction
	all      sync.WaitGroup

	mu    sync.Mutex // guards all below
	ended bool
	open  []net.Conn
}

// newRoad starts goroutines that pass connections to a server on, until close.
func newRoad(network, to string, delay time.Duration) (*road, error) {
	listen := "127.0.0.1:0"
	if network == "unix" {
		listen = to + "-road"
	}
	l, err := net.Listen(network, listen) //nolint:noctx // it does not wait
	if err != nil {
		return nil, err
	}
	r := &road{listener: l, delay: delay}
	r.all.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial(network, to) //nolint:noctx // on this machine
			if err != nil {
				_ = near.Close()
				continue
			}
			r.keep(near, far)
			r.all.Go(func() { r.pass(far, near) })
			r.all.Go(func() { r.pass(near, far) })
		}
	})
	return r, nil
}

func (r *road) address() string { return r.listener.Addr().String() }

// keep has close end the connections.
func (r *road) keep(conns ...net.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open = append(r.open, conns...)
	if r.ended {
		for _, c := range conns {
			_ = c.Close()
		}
	}
}

// close ends everything.
func (r *road) close() {
	_ = r.listener.Close()
	r.mu.Lock()
	r.ended = true
	for _, c := range r.open {
		_ = c.Close()
	}
	r.mu.Unlock()
	r.all.Wait()
}

// pass writes what it reads, a delay later.
func (r *road) pass(to, from net.Conn) {
	type piece struct {
		data []byte
		due  time.Time
	}
	way := make(chan piece, roadPieces)
	r.all.Go(func() { // ends with the reader
		for p := range way {
			time.Sleep(time.Until(p.due))
			if _, err := to.Write(p.data); err != nil {
				_ = from.Close()
			}
		}
		_ = to.Close()
	})
	defer close(way)
	for {
		data := make([]byte, roadPieceBytes)
		n, err := from.Read(data)
		if n > 0 {
			way <- piece{data[:n], time.Now().Add(r.delay)}
		}
		if err != nil {
			if err != io.EOF {
				_ = to.Close()
			}
			return
		}
	}
}
