// Package bench compares tensorferry with other ways of moving the same bytes from a
// client process to a server process, and back.
//
// Each kind is a competitor, not a straw man: it does the same work (same memory,
// same checksums where it says so) as directly as it can. Bytes that did not arrive
// have no time. The package does not judge: it prints what is required beside what
// was measured. A kind is lent all memory until it is closed.
package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"time"

	"github.com/tensorferry/tensorferry/internal/proc"
)

// Op is what is done.
type Op string

// The operations. Tensorferry has all of them, its peers some.
const (
	// Upload moves the source to the server, which acknowledges the whole.
	Upload Op = "upload"
	// Echo moves the source to the server, and every piece back as soon as it is
	// whole there: both directions run at once.
	Echo Op = "echo"
	// ReLU is an echo of max(x, 0) for each float32 of the source.
	ReLU Op = "relu"
	// Call is a batch of echoes, one after the other.
	Call Op = "call"
	// FirstResult is a ReLU, of which the time until its first result counts.
	FirstResult Op = "first-result"
	// CallBeside is a batch of calls on a session that carries uploads.
	CallBeside Op = "call-beside-upload"
	// Pull fetches a mapped file into memory, PullToFile into a new file.
	Pull       Op = "pull"
	PullToFile Op = "pull-to-file"
	// Push stores the source in the server's store, in a folder durably.
	Push Op = "push"
	// PushMany stores Many small tensors, PushSet stores them together, PullMany fetches
	// them.
	PushMany Op = "push-many"
	PushSet  Op = "push-set"
	PullMany Op = "pull-many"
)

// Moves are the operations that Client.Run does. No two names begin alike.
var Moves = []Op{Upload, Echo, ReLU}

// latency has the operations whose time counts, not their rate.
var latency = map[Op]bool{Call: true, FirstResult: true, CallBeside: true}

// Back reports whether the result goes back to the client.
func (op Op) Back() bool { return op != Upload }

// Job is an operation, for batches with a number of calls.
type Job struct {
	Op    Op
	Count int
}

// Sample is what one job took.
type Sample struct {
	Time  time.Duration `json:"time_ns"`            // from the first byte to the client's knowledge of the last; of a batch, the median; until a first result
	CPU   time.Duration `json:"cpu_ns,omitempty"`   // of both ends in that time; of a batch, the mean
	P99   time.Duration `json:"p99_ns,omitempty"`   // of a batch
	Total time.Duration `json:"total_ns,omitempty"` // of the call that gave a first result
	// Server and Client are the most memory of their own that the processes have had
	// so far; the client's is without the tensor and room for it.
	Server int64 `json:"server_peak_bytes,omitempty"`
	Client int64 `json:"client_peak_bytes,omitempty"`
}

// Place is where one end of a kind works, and what it moves. Source is what the
// client has, To where the end receives; both have one length, a multiple of 8.
type Place struct {
	Network, Address string // of the socket, "tcp" or "unix"
	Dir              string // for files; both ends have the same
	Source, To       []byte
}

// Kind is a way to move bytes, its two ends apart.
type Kind struct {
	Name string // in reports, too
	// OwnMemory says that the server receives into memory of its own: of To it takes
	// the length only.
	OwnMemory bool
	// Serve starts goroutines that serve one client, which dials l, until Close.
	// The server is handed l, also when this fails.
	Serve func(l net.Listener, p Place) (Server, error)
	// Dial connects to a server.
	Dial func(ctx context.Context, p Place) (Client, error)
}

// Server is the end that an upload goes to.
type Server struct {
	// Idle gets a value after each transfer that succeeded at the client, once nobody
	// touches the server's memory any more. It is closed after the last one.
	Idle <-chan struct{}
	// Close ends every goroutine and returns what went wrong before.
	Close func() error
}

// Client is the end that has the source. It belongs to one goroutine.
type Client struct {
	// Run does Upload, Echo or ReLU once and returns when all its bytes are where
	// they belong. After an error, the end of ctx for one, only Close is of use.
	Run func(ctx context.Context, op Op) error
	// Measure has the jobs that the client times and checks itself.
	Measure map[Op]func(ctx context.Context, count int) (Sample, error)
	Close   func() error
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

// NewIdle is the idle of a server that says so after each transfer. It has room for
// all that come before somebody asks.
func NewIdle() chan struct{} { return make(chan struct{}, CallBatch) }

// Always is the idle of a server whose memory nobody looks at.
var Always = func() chan struct{} {
	idle := make(chan struct{})
	close(idle)
	return idle
}()

// Transfer times a run of op, whose result goes to where the source's went to, and
// compares it after the time. It borrows both.
func Transfer(op Op, to, source []byte, run func() error) (Sample, error) {
	if op.Back() {
		spoil(to, source)
	}
	s, err := Timed(run)
	if err == nil && op.Back() {
		err = Check(op, to, source)
	}
	if err != nil {
		return Sample{}, err
	}
	return s, nil
}

// batch does n calls, one after the other. It does without system calls between them,
// during which the other end would fall asleep. It borrows both.
func batch(n int, to, source []byte, run func() error) (Sample, error) {
	all := make([]time.Duration, max(n, 1))
	cpu := proc.CPUTime()
	for i := range all {
		spoil(to, source)
		begin := time.Now()
		err := run()
		all[i] = time.Since(begin)
		if err == nil {
			err = Check(Echo, to, source)
		}
		if err != nil {
			return Sample{}, err
		}
	}
	return Sample{Time: Quantile(all, 0.5), CPU: proc.CPUTime() - cpu, P99: Quantile(all, 0.99)}, nil
}

// Timed runs something.
func Timed(run func() error) (Sample, error) {
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
		if op == ReLU || op == FirstResult {
			made = append(made[:0], want...)
			Rectify(made)
			want = made
		}
		if !bytes.Equal(dst[at:end], want) {
			return fmt.Errorf("bench: MiB %d that arrived is not the %s of the one that was sent", at/ChunkBytes, op)
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
