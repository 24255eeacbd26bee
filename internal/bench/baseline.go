// Package bench measures tensorferry beside other ways of moving the same bytes
// between two places in memory, both ends in this process.
//
// A baseline here is a competitor, not a straw man: it does the same work (same
// chunks, same memory, same checksums where it says so) as directly as its kind
// allows. It refuses to report a time for bytes that did not arrive. Whoever
// makes one lends it all memory until Close.
package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// ChunkBytes is the bytes of one write, and of one chunk, in every baseline.
const ChunkBytes = 1 << 20

// Memory is what a baseline moves: an upload goes from Source to Remote, an echo
// on to Back. All have one length, of 1 byte or more, and should have been
// written to before, or the first run measures page faults. The caller keeps
// alive what they lie in: a slab nobody holds takes its bytes with it.
type Memory struct {
	Source []byte // the client's
	Remote []byte // the server's
	Back   []byte // the client's
}

// Baseline is a connection over which bytes are moved. Upload and Echo return
// the time from the first byte to the client's knowledge of the last; what was
// moved is compared with the source before they return, outside that time. After
// an error only Close is of use. A Baseline belongs to one goroutine.
type Baseline interface {
	// Name says what it is, as in a table's head.
	Name() string
	// Upload moves Source to Remote; the server acknowledges the whole.
	Upload(ctx context.Context) (time.Duration, error)
	// Echo moves Source to Remote and every chunk, as soon as it is whole there,
	// to Back: both directions run at once.
	Echo(ctx context.Context) (time.Duration, error)
	// Close ends the connection and every goroutine behind it.
	Close() error
}

// Latencies makes n small calls, one after the other, and returns the time that
// half of them, and that 99 of 100, did not pass.
func Latencies(ctx context.Context, ping func(context.Context) (time.Duration, error), n int) (p50, p99 time.Duration, err error) {
	all := make([]time.Duration, max(n, 1))
	for i := range all {
		if all[i], err = ping(ctx); err != nil {
			return 0, 0, err
		}
	}
	slices.Sort(all)
	return all[(len(all)-1)*50/100], all[(len(all)-1)*99/100], nil
}

func (m Memory) check() error {
	if len(m.Source) == 0 || len(m.Remote) != len(m.Source) || len(m.Back) != len(m.Source) {
		return fmt.Errorf("bench: source, remote and back of %d, %d and %d bytes; give all the same, 1 or more",
			len(m.Source), len(m.Remote), len(m.Back))
	}
	return nil
}

// chunks returns how many chunks there are, the last of which may be short.
func (m Memory) chunks() int { return (len(m.Source) + ChunkBytes - 1) / ChunkBytes }

// chunk returns the i-th chunk of b.
func chunk(b []byte, i int) []byte {
	return b[i*ChunkBytes : min((i+1)*ChunkBytes, len(b))]
}

// measured runs one transfer that must leave each of to equal to the source. A
// byte of every page is spoiled before, so that what an earlier run left there
// does not pass for a transfer. The server sends on, or closes, idle when it has
// done with the memory, which may be a moment after the client has its bytes.
func (m Memory) measured(run func() error, idle <-chan struct{}, to ...[]byte) (time.Duration, error) {
	for _, dst := range to {
		for i := 0; i < len(dst); i += 4 << 10 {
			dst[i] = ^m.Source[i]
		}
	}
	begin := time.Now()
	err := run()
	elapsed := time.Since(begin)
	if err != nil {
		return 0, err
	}
	<-idle
	for _, dst := range to {
		if !bytes.Equal(dst, m.Source) {
			return 0, errors.New("bench: the bytes that arrived are not those that were sent")
		}
	}
	return elapsed, nil
}

// listen opens a socket for one process: "tcp" on loopback, or "unix" in a
// directory that release removes.
func listen(network string) (l net.Listener, release func(), err error) {
	var config net.ListenConfig
	switch network {
	case "tcp":
		l, err = config.Listen(context.Background(), "tcp", "127.0.0.1:0")
		return l, func() {}, err
	case "unix":
		dir, err := os.MkdirTemp("", "tensorferry-bench-")
		if err != nil {
			return nil, nil, err
		}
		release = func() { _ = os.RemoveAll(dir) }
		if l, err = config.Listen(context.Background(), "unix", filepath.Join(dir, "socket")); err != nil {
			release()
			return nil, nil, err
		}
		return l, release, nil
	default:
		return nil, nil, fmt.Errorf("bench: network %q; known are tcp and unix", network)
	}
}

// grpcPair is a gRPC server and a client's connection to it.
type grpcPair struct {
	conn    *grpc.ClientConn
	server  *grpc.Server
	served  chan error
	release func()
}

// newGRPCPair starts a goroutine that serves until close.
func newGRPCPair(network string, server *grpc.Server, opts ...grpc.DialOption) (*grpcPair, error) {
	l, release, err := listen(network)
	if err != nil {
		return nil, err
	}
	addr := l.Addr()
	// Both kinds of address take the same way, and no proxy.
	opts = append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, addr.Network(), addr.String())
		}))
	conn, err := grpc.NewClient("passthrough:///bench", opts...)
	if err != nil {
		_ = l.Close()
		release()
		return nil, err
	}
	p := &grpcPair{conn: conn, server: server, served: make(chan error, 1), release: release}
	go func() { p.served <- server.Serve(l) }()
	return p, nil
}

func (p *grpcPair) close() error {
	err := p.conn.Close()
	p.server.Stop()
	err = errors.Join(err, <-p.served)
	p.release()
	return err
}
