// Package bench measures tensorferry beside other ways of moving the same bytes
// between two places in memory, in one process or in two.
//
// Each peer is a competitor, not a straw man: it does the same work (same chunks,
// same memory, same checksums where it says so) as directly as its kind allows.
// Bytes that did not arrive have no time. The package does not judge: it prints
// what is required beside what was measured. Whoever opens a kind lends it all
// memory until Close.
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

	"github.com/tensorferry/tensorferry/internal/proc"
)

// Memory is what is moved: an upload goes from Source to Remote, an echo on to
// Back. All have one length, of 1 byte or more, and should have been written to
// before, or the first run measures page faults. For ReLU the source is float32
// without NaN. The caller keeps alive what they lie in.
type Memory struct {
	Source []byte // the client's
	Remote []byte // the server's
	Back   []byte // the client's
}

// Op is what is done with the source.
type Op string

// The operations. One more is a row of ops.
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
	model   string       // tensorferry's for it
	back    bool         // the result goes to Back
	compute func([]byte) // makes the result in place; nil: it is the source
}{
	Upload: {"sink", false, nil},
	Echo:   {"echo", true, nil},
	ReLU:   {"relu", true, Rectify},
}

// Back reports whether the result goes back to the client.
func (op Op) Back() bool { return ops[op].back }

// Sample is what one transfer took, or one batch of small calls.
type Sample struct {
	Time time.Duration `json:"time_ns"`          // from the first byte to the client's knowledge of the last; of a batch, the median
	CPU  time.Duration `json:"cpu_ns,omitempty"` // of both ends in that time; of a batch, the mean
	P99  time.Duration `json:"p99_ns,omitempty"` // of a batch
}

// unless returns no sample with an error.
func (s Sample) unless(err error) (Sample, error) {
	if err != nil {
		return Sample{}, err
	}
	return s, nil
}

// Kind is a way to move bytes, its two ends apart: the same code moves them
// between processes and within one. A client and its server are made for tensors
// of one length, and each other.
type Kind struct {
	Name string // in reports
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
type Server struct {
	// Idle says, once for each transfer that succeeded at the client and forever
	// after the last one, that nobody touches Remote.
	Idle <-chan struct{}
	// Close ends every goroutine and returns what went wrong before.
	Close func() error
}

// Client is the end that has Source and Back. It belongs to one goroutine.
type Client struct {
	// Run does op once and returns when all its bytes are where they belong. After
	// an error, the end of ctx for one, only Close is of use.
	Run   func(ctx context.Context, op Op) error
	Close func() error
}

// Go starts a goroutine for serve, which stop ends.
func Go(serve func() error, stop func(), idle <-chan struct{}) Server {
	served := make(chan error, 1)
	go func() { served <- serve() }()
	return Server{idle, func() error {
		stop()
		return <-served
	}}
}

// always is the idle of a server whose memory nobody looks at.
var always = func() chan struct{} {
	idle := make(chan struct{})
	close(idle)
	return idle
}()

// End is the server or the client of a kind, with what it moves. Its exported
// methods can be called from another process, one at a time.
type End struct {
	Kind   Kind
	Source []byte // of a server, what the client has
	To     []byte // remote of a server, back of a client
	Server Server
	Client Client
	cpu    time.Duration // of this process when a transfer began
}

// Prepare readies the server for a transfer.
func (e *End) Prepare(_ Op, ready *bool) error {
	*ready = true
	if !e.Kind.OwnMemory {
		spoil(e.To, e.Source)
	}
	e.cpu = proc.CPUTime()
	return nil
}

// Move does op at the client and answers with the time, and the time its process
// ran for. Whoever waits too long ends the process.
func (e *End) Move(op Op, s *Sample) (err error) {
	*s, err = e.move(op, func() error { return e.Client.Run(context.Background(), op) })
	return err
}

// move times a run of op by the client.
func (e *End) move(op Op, run func() error) (Sample, error) {
	if op.Back() {
		spoil(e.To, e.Source)
	}
	s, err := timed(run)
	if err == nil && op.Back() {
		err = Check(op, e.To, e.Source)
	}
	return s, err
}

// Finish compares what arrived at the server and answers with the time that its
// process ran for since Prepare.
func (e *End) Finish(op Op, cpu *time.Duration) error {
	<-e.Server.Idle
	*cpu = proc.CPUTime() - e.cpu
	if e.Kind.OwnMemory {
		return nil
	}
	return Check(op, e.To, e.Source)
}

// Close ends what was opened. It is for the process itself.
func (e *End) Close() error {
	for _, end := range []func() error{e.Client.Close, e.Server.Close} {
		if end != nil { // an end is one of the two
			return end()
		}
	}
	return nil
}

// Ends are both ends of a kind in this process. It belongs to one goroutine.
type Ends struct {
	far, near End
	release   func()
}

// Open connects both ends of k in this process, over "tcp" or "unix". It is lent
// mem until Close.
func (k Kind) Open(ctx context.Context, network string, mem Memory) (_ *Ends, err error) {
	if len(mem.Source) == 0 || len(mem.Remote) != len(mem.Source) || len(mem.Back) != len(mem.Source) {
		return nil, fmt.Errorf("bench: source, remote and back of %d, %d and %d bytes; give all the same, 1 or more",
			len(mem.Source), len(mem.Remote), len(mem.Back))
	}
	address, release, err := place(network)
	if err != nil {
		return nil, err
	}
	l, err := new(net.ListenConfig).Listen(ctx, network, address)
	if err != nil {
		release()
		return nil, err
	}
	p := &Ends{End{Kind: k, Source: mem.Source, To: mem.Remote}, End{Kind: k, Source: mem.Source, To: mem.Back}, release}
	if p.far.Server, err = k.Serve(l, mem.Remote); err == nil {
		p.near.Client, err = k.Dial(ctx, network, l.Addr().String(), mem.Source, mem.Back)
	}
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// Move does op once. What was moved is compared with the source before Move
// returns, outside the time. After an error only Close is of use.
func (p *Ends) Move(ctx context.Context, op Op) (Sample, error) {
	return p.move(op, func() error { return p.near.Client.Run(ctx, op) })
}

func (p *Ends) move(op Op, run func() error) (s Sample, err error) {
	if err = p.far.Prepare(op, new(bool)); err == nil {
		s, err = p.near.move(op, run)
	}
	if err == nil {
		err = p.far.Finish(op, new(time.Duration))
	}
	return s.unless(err)
}

// Close ends both ends.
func (p *Ends) Close() error {
	defer p.release()
	return errors.Join(p.near.Close(), p.far.Close())
}

// ping echoes once and returns the time. It does without the system calls of Move,
// during which the other end would fall asleep.
func (p *Ends) ping(ctx context.Context) (time.Duration, error) {
	e := &p.near
	spoil(e.To, e.Source)
	begin := time.Now()
	err := e.Client.Run(ctx, Echo)
	took := time.Since(begin)
	if err == nil {
		err = Check(Echo, e.To, e.Source)
	}
	return took, err
}

// batch pings n times, one after the other.
func batch(n int, ping func() (time.Duration, error)) (Sample, error) {
	all := make([]time.Duration, max(n, 1))
	cpu := proc.CPUTime()
	for i := range all {
		var err error
		if all[i], err = ping(); err != nil {
			return Sample{}, err
		}
	}
	return Sample{quantile(all, 0.5), (proc.CPUTime() - cpu) / time.Duration(len(all)), quantile(all, 0.99)}, nil
}

// timed runs something.
func timed(run func() error) (Sample, error) {
	cpu, begin := proc.CPUTime(), time.Now()
	if err := run(); err != nil {
		return Sample{}, err
	}
	return Sample{Time: time.Since(begin), CPU: proc.CPUTime() - cpu}, nil
}

// spoil makes a byte of every page of dst one that no op makes of the source's,
// so that what an earlier run left there does not pass for a transfer.
func spoil(dst, source []byte) {
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
	var made []byte
	for at := 0; at < len(dst); at += ChunkBytes {
		end := min(at+ChunkBytes, len(dst))
		want := source[at:end]
		if compute := ops[op].compute; compute != nil {
			made = append(made[:0], want...)
			compute(made)
			want = made
		}
		if !bytes.Equal(dst[at:end], want) {
			return fmt.Errorf("bench: chunk %d that arrived is not the %s of the one that was sent", at/ChunkBytes, op)
		}
	}
	return nil
}

// Rectify computes max(x, 0) of each float32 in place, two at a time and without a
// branch: a lane whose sign is set becomes 0. It is lent data; bytes behind the last
// pair stay as they are.
func Rectify(data []byte) {
	const signs = 0x8000_0000_8000_0000
	for ; len(data) >= 8; data = data[8:] {
		w := binary.LittleEndian.Uint64(data)
		sign := w & signs
		binary.LittleEndian.PutUint64(data, w&^(sign|(sign-sign>>31)))
	}
}

// FillFloats writes float32 of random sign with magnitudes from 0.5 to 1, the same
// ones every time, and so touches every page. It is lent data.
func FillFloats(data []byte) {
	state := uint64(88172645463325252) // xorshift; any seed but 0
	for ; len(data) >= 8; data = data[8:] {
		state ^= state << 13
		state ^= state >> 7
		state ^= state << 17
		const fraction, half = 0x807f_ffff_807f_ffff, 0x3f00_0000_3f00_0000
		binary.LittleEndian.PutUint64(data, state&fraction|half)
	}
}

// place returns an address to listen at: "tcp" on loopback, or "unix" in a directory
// that release removes.
func place(network string) (address string, release func(), err error) {
	switch network {
	case "tcp":
		return "127.0.0.1:0", func() {}, nil
	case "unix":
		dir, err := os.MkdirTemp("", "tensorferry-bench-")
		return filepath.Join(dir, "socket"), func() { _ = os.RemoveAll(dir) }, err
	}
	return "", nil, fmt.Errorf("bench: network %q; known are tcp and unix", network)
}
