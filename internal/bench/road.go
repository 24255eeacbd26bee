package bench

import (
	"context"
	"net"
	"sync"
	"time"
)

// road is a proxy that delays each byte on its way, in both directions, as a long line
// of any rate does. Connections end at its sockets, so that the system's TCP does not
// see the delay: what it shows are the windows of the protocols above.
type road struct {
	net.Listener
	end context.CancelFunc
	all sync.WaitGroup
}

// newRoad starts goroutines that pass connections to a server on, until close.
func newRoad(network, to string, delay time.Duration) (*road, error) {
	ctx, end := context.WithCancel(context.Background())
	l, err := new(net.ListenConfig).Listen(ctx, network, map[string]string{"tcp": "127.0.0.1:0", "unix": to + "-road"}[network])
	if err != nil {
		end()
		return nil, err
	}
	r := &road{Listener: l, end: end}
	r.all.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := new(net.Dialer).DialContext(ctx, network, to)
			if err != nil {
				_ = near.Close()
				continue
			}
			shut := func() { _, _ = near.Close(), far.Close() }
			context.AfterFunc(ctx, shut)
			r.all.Go(func() { pass(far, near, delay); shut() })
			r.all.Go(func() { pass(near, far, delay); shut() })
		}
	})
	return r, nil
}

// close ends everything.
func (r *road) close() {
	_ = r.Listener.Close()
	r.end()
	r.all.Wait()
}

// pass writes what it reads, a delay later, until the end of that.
func pass(to, from net.Conn, delay time.Duration) {
	type piece struct {
		data []byte
		due  time.Time
	}
	way := make(chan piece, roadPieces)
	go func() { // ends with from
		defer close(way)
		for {
			data := make([]byte, roadPieceBytes)
			n, err := from.Read(data)
			if n > 0 {
				way <- piece{data[:n], time.Now().Add(delay)}
			}
			if err != nil {
				return
			}
		}
	}()
	for p := range way {
		time.Sleep(time.Until(p.due))
		if _, err := to.Write(p.data); err != nil {
			_ = from.Close()
		}
	}
}
