package lane

import (
	"bufio"
	"net"
	"sync"
)

// batchBytes is how many bytes a Batch joins. TLS writes each record of 16 KiB by itself,
// which wakes the peer as often: an upload over loopback took 1.1 of the CPU time of a copy
// with crypto/tls, and takes 0.7 to 0.9 of it with 64 KiB; 256 KiB gained nothing (two cores,
// November 2026).
const batchBytes = 64 << 10

// Batch is a connection below one that secures it. It joins what the other writes for a
// chunk, once a lane is above both.
type Batch struct {
	net.Conn

	mu  sync.Mutex    // a reader that answers its peer writes, too
	out *bufio.Writer // nil until there is a lane; its contents are guarded by mu
}

// Write writes p, or keeps it until there is more.
func (b *Batch) Write(p []byte) (int, error) {
	if b.out == nil {
		return b.Conn.Write(p)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.out.Write(p)
}

// flush writes what was kept.
func (b *Batch) flush() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.out.Flush()
}

// Secured is a connection that is secured, above a Batch.
type Secured struct {
	net.Conn
	Below *Batch
}

// Close closes the connection below first: TLS would send an alert, for up to 5 s.
func (s Secured) Close() error {
	err := s.Below.Close()
	_ = s.Conn.Close()
	return err
}
