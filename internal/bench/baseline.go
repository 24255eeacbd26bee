// Package bench measures tensorferry beside other ways of moving the same bytes
// between two places in memory. Both ends are in this process, or each in one of
// its own, where whoever starts the processes measures around a Kind's ends.
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

// Op is what is done with the source.
type Op string

// The operations. One more is a row of ops, and a few lines where the ends of a
// kind tell it apart.
const (
	// Upload moves Source to Remote; the server acknowledges the whole.
	Upload Op = "upload"
	// Echo moves Source to Remote and every chunk, as soon as it is whole there,
	// to Back: both directions run at once.
	Echo Op = "echo"
	// ReLU is an echo of max(x, 0) for each float32 of the source.
	ReLU Op = "relu"
)

// ops says what each operation is made of. No two names begin alike.
var ops = map[Op]struct {
	benchmark string       // its name among Go's benchmarks
	model     string       // tensorferry's for it
	back      bool         // the result goes to Back
	compute   func([]byte) // makes the result, in place
}{
	Upload: {"Upload", "sink", false, func([]byte) {}},
	Echo:   {"Echo", "echo", true, func([]byte) {}},
	ReLU:   {"ReLU", "relu", true, relu},
}

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

// Kind is a way to move bytes, its two ends apart: the same code moves them
// between processes and within one. A client and its server are made for tensors
// of one length, and each other.
type Kind struct {
	Name string // in reports
	Text string // for people
	// OwnMemory says that the server receives into memory of its own: of remote
	// it takes the length only.
	OwnMemory bool
	// Serve starts goroutines that serve one client, which dials l, until Close.
	// The server is handed l, also when this fails, and lent remote until Close.
	Serve func(l net.Listener, remote []byte) (Server, error)
	// Dial connects to a server that listens on "tcp" or "unix". The client is
	// lent source and back, of the length of remote, until Close.
	Dial func(ctx context.Context, network, address string, source, back []byte) (Client, error)
}

// Server is the end that has Remote.
type Server interface {
	// Idle says, once for each transfer that succeeded at the client and forever
	// after the last one, that nobody touches Remote.
	Idle() <-chan struct{}
	// Close ends the connection and every goroutine behind it. It returns what
	// went wrong before, if anything did.
	Close() error
}

// Client is the end that has Source and Back. It belongs to one goroutine.
type Client interface {
	// Run does op once and returns when all its bytes are where they belong. After
	// an error, the end of ctx for one, only Close is of use.
	Run(ctx context.Context, op Op) error
	// Close ends the connection and every goroutine behind it.
	Close() error
}

// pair is both ends of a kind in this process.
type pair struct {
	mem     Memory
	own     bool // the server's memory is out of reach
	client  Client
	server  Server
	release func()
}

// Open connects both ends of k in this process, over "tcp" or "unix". It is lent
// mem until Close.
func (k Kind) Open(ctx context.Context, network string, mem Memory) (Baseline, error) {
	return k.open(ctx, network, mem)
}

func (k Kind) open(ctx context.Context, network string, mem Memory) (*pair, error) {
	if err := mem.check(); err != nil {
		return nil, err
	}
	l, release, err := listen(network)
	if err != nil {
		return nil, err
	}
	server, err := k.Serve(l, mem.Remote)
	if err != nil {
		release()
		return nil, err
	}
	client, err := k.Dial(ctx, network, l.Addr().String(), mem.Source, mem.Back)
	if err != nil {
		err = errors.Join(err, server.Close())
		release()
		return nil, err
	}
	return &pair{mem, k.OwnMemory, client, server, release}, nil
}

// Move does op once.
func (p *pair) Move(ctx context.Context, op Op) (Sample, error) {
	return p.measured(op, func() error { return p.client.Run(ctx, op) })
}

// measured is Memory's, over what the op fills.
func (p *pair) measured(op Op, run func() error) (Sample, error) {
	var to [][]byte
	if !p.own {
		to = append(to, p.mem.Remote)
	}
	if op.Back() {
		to = append(to, p.mem.Back)
	}
	return p.mem.measured(op, run, p.server.Idle(), to...)
}

// Close ends both ends.
func (p *pair) Close() error {
	err := errors.Join(p.client.Close(), p.server.Close())
	p.release()
	return err
}

// Back reports whether the result goes back to the client.
func (op Op) Back() bool { return ops[op].back }

// Batch makes n small calls, one after the other.
func Batch(ctx context.Context, ping func(context.Context) (time.Duration, error), n int) (Sample, error) {
	all := make([]time.Duration, max(n, 1))
	cpu := CPUTime()
	for i := range all {
		var err error
		if all[i], err = ping(ctx); err != nil {
			return Sample{}, err
		}
	}
	return Sample{quantile(all, 0.5), (CPUTime() - cpu) / time.Duration(len(all)), quantile(all, 0.99)}, nil
}

func (m Memory) check() error {
	if len(m.Source) == 0 || len(m.Remote) != len(m.Source) || len(m.Back) != len(m.Source) {
		return fmt.Errorf("bench: source, remote and back of %d, %d and %d bytes; give all the same, 1 or more",
			len(m.Source), len(m.Remote), len(m.Back))
	}
	return nil
}

// chunks returns how many chunks b has, the last of which may be short.
func chunks(b []byte) int { return (len(b) + ChunkBytes - 1) / ChunkBytes }

// chunk returns the i-th chunk of b.
func chunk(b []byte, i int) []byte {
	return b[i*ChunkBytes : min((i+1)*ChunkBytes, len(b))]
}

// measured runs one transfer that must leave the result of op in each of to. The
// server sends on, or closes, idle when it has done with the memory, which may be
// a moment after the client has its bytes.
func (m Memory) measured(op Op, run func() error, idle <-chan struct{}, to ...[]byte) (Sample, error) {
	for _, dst := range to {
		Spoil(dst, m.Source)
	}
	sample, err := timed(run)
	if err != nil {
		return Sample{}, err
	}
	<-idle
	for _, dst := range to {
		if err := Check(op, dst, m.Source); err != nil {
			return Sample{}, err
		}
	}
	return sample, nil
}

// timed runs something.
func timed(run func() error) (Sample, error) {
	cpu, begin := CPUTime(), time.Now()
	if err := run(); err != nil {
		return Sample{}, err
	}
	return Sample{Time: time.Since(begin), CPU: CPUTime() - cpu}, nil
}

// Spoil makes a byte of every page of dst one that no op makes of the source's,
// so that what an earlier run left there does not pass for a transfer. It is lent
// both, of one length.
func Spoil(dst, source []byte) {
	for i := 0; i < len(dst); i += 4 << 10 {
		dst[i] = ^source[i] // neither the source's byte, nor its relu's: that is 0 or the same
		if dst[i] == 0 {
			dst[i] = 1
		}
	}
}

// Check returns an error if dst is not what op makes of the source. It is lent
// both, of one length.
func Check(op Op, dst, source []byte) error {
	want := make([]byte, ChunkBytes)
	for i := range chunks(dst) {
		got := chunk(dst, i)
		w := want[:copy(want, chunk(source, i))]
		ops[op].compute(w)
		if !bytes.Equal(got, w) {
			return fmt.Errorf("bench: chunk %d that arrived is not the %s of the one that was sent", i, op)
		}
	}
	return nil
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

// grpcServer serves until close.
type grpcServer struct {
	server *grpc.Server
	served chan error
}

func serveGRPC(l net.Listener, server *grpc.Server) grpcServer {
	g := grpcServer{server, make(chan error, 1)}
	go func() { g.served <- server.Serve(l) }()
	return g
}

func (g grpcServer) close() error {
	g.server.Stop()
	return <-g.served
}

// dialGRPC connects on first use. Both kinds of network take the same way, and
// no proxy.
func dialGRPC(network, address string, opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///bench", append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, address)
		}))...)
}

// grpcPair is a gRPC server and a client's connection to it.
type grpcPair struct {
	conn    *grpc.ClientConn
	server  grpcServer
	release func()
}

// newGRPCPair starts a goroutine that serves until close.
func newGRPCPair(network string, server *grpc.Server, opts ...grpc.DialOption) (*grpcPair, error) {
	l, release, err := listen(network)
	if err != nil {
		return nil, err
	}
	conn, err := dialGRPC(network, l.Addr().String(), opts...)
	if err != nil {
		_ = l.Close()
		release()
		return nil, err
	}
	return &grpcPair{conn, serveGRPC(l, server), release}, nil
}

func (p *grpcPair) close() error {
	err := errors.Join(p.conn.Close(), p.server.close())
	p.release()
	return err
}
