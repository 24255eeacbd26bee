// Package bench measures tensorferry beside other ways of moving the same bytes
// between two places in memory, both ends in this process.
//
// Each baseline is a competitor, not a straw man: it does the same work (same
// chunks, same memory, same checksums where it says so) as directly as its kind
// allows. The package refuses to report a time for bytes that did not arrive,
// and to judge: it prints what is required beside what was measured. Whoever
// makes a baseline lends it all memory until Close.
package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// Memory is what a baseline moves: an upload goes from Source to Remote, an echo
// on to Back. All have one length, of 1 byte or more, and should have been
// written to before, or the first run measures page faults. For ReLU the source
// is float32 without NaN. The caller keeps alive what they lie in: a slab nobody
// holds takes its bytes with it.
type Memory struct {
	Source []byte // the client's
	Remote []byte // the server's
	Back   []byte // the client's
}

// Op is what is done with the source: its name is that of tensorferry's model
// for it, but for an upload.
type Op string

// The operations.
const (
	// Upload moves Source to Remote; the server acknowledges the whole.
	Upload Op = "upload"
	// Echo moves Source to Remote and every chunk, as soon as it is whole there,
	// to Back: both directions run at once.
	Echo Op = "echo"
	// ReLU is an echo of max(x, 0) for each float32 of the source.
	ReLU Op = "relu"
)

// Sample is what one transfer took, or one batch of small calls.
type Sample struct {
	Time time.Duration `json:"time_ns"`          // from the first byte to the client's knowledge of the last; of a batch, the median
	CPU  time.Duration `json:"cpu_ns,omitempty"` // of this process, so of both ends, in that time; of a batch, the mean
	P99  time.Duration `json:"p99_ns,omitempty"` // of a batch
}

// Baseline is a connection over which bytes are moved. It belongs to one
// goroutine.
type Baseline interface {
	// Move does op once. What was moved is compared with the source before Move
	// returns, outside the time. After an error only Close is of use.
	Move(ctx context.Context, op Op) (Sample, error)
	// Close ends the connection and every goroutine behind it.
	Close() error
}

// Batch makes n small calls, one after the other.
func Batch(ctx context.Context, ping func(context.Context) (time.Duration, error), n int) (Sample, error) {
	all := make([]time.Duration, max(n, 1))
	cpu := cpuTime()
	for i := range all {
		var err error
		if all[i], err = ping(ctx); err != nil {
			return Sample{}, err
		}
	}
	return Sample{quantile(all, 0.5), (cpuTime() - cpu) / time.Duration(len(all)), quantile(all, 0.99)}, nil
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

// measured runs one transfer that must leave the result of op in each of to. A
// byte of every page is spoiled before, so that what an earlier run left there
// does not pass for a transfer. The server sends on, or closes, idle when it has
// done with the memory, which may be a moment after the client has its bytes.
func (m Memory) measured(op Op, run func() error, idle <-chan struct{}, to ...[]byte) (Sample, error) {
	for _, dst := range to {
		for i := 0; i < len(dst); i += 4 << 10 {
			dst[i] = ^m.Source[i] // neither the source's byte, nor its relu's: that is 0 or the same
			if dst[i] == 0 {
				dst[i] = 1
			}
		}
	}
	cpu, begin := cpuTime(), time.Now()
	err := run()
	sample := Sample{Time: time.Since(begin), CPU: cpuTime() - cpu}
	if err != nil {
		return Sample{}, err
	}
	<-idle
	for _, dst := range to {
		if !m.holds(op, dst) {
			return Sample{}, fmt.Errorf("bench: the bytes that arrived are not the %s of those that were sent", op)
		}
	}
	return sample, nil
}

// holds reports whether dst is what op makes of the source.
func (m Memory) holds(op Op, dst []byte) bool {
	if op != ReLU {
		return bytes.Equal(dst, m.Source)
	}
	want := make([]byte, ChunkBytes)
	for i := range m.chunks() {
		c := chunk(dst, i)
		copy(want, chunk(m.Source, i))
		relu(want[:len(c)])
		if !bytes.Equal(c, want[:len(c)]) {
			return false
		}
	}
	return true
}

// relu computes max(x, 0) in place, two float32 at a time and without a branch:
// a lane whose sign is set becomes 0. Bytes behind the last pair stay as they are.
func relu(data []byte) {
	const signs = 0x8000_0000_8000_0000
	for ; len(data) >= 8; data = data[8:] {
		w := binary.LittleEndian.Uint64(data)
		sign := w & signs
		binary.LittleEndian.PutUint64(data, w&^(sign|(sign-sign>>31)))
	}
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
