// Package bench compares tensorferry with other ways of moving the same bytes from a
// client process to a server process, and back: raw sockets and stock gRPC.
//
// Each kind is a competitor, not a straw man: it does the same work (same memory,
// same checksums where it says so) as directly as it can. Bytes that did not arrive
// have no time. The package has what the command needs; the module bench measures more
// kinds with the same parts. A kind is lent all memory until it is closed.
package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"time"

	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/slab"
)

// Op is what is done.
type Op string

// The operations that every kind has.
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
)

// Moves are the operations that Client.Run does.
var Moves = []Op{Upload, Echo, ReLU}

// Back reports whether the result goes back to the client.
func (op Op) Back() bool { return op != Upload }

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
	From             int // where the source of a client belongs in the server's memory
	// Wrap, if set, encrypts what a client has dialed.
	Wrap func(context.Context, net.Conn) (net.Conn, error)
}

// Connect connects to the server.
func (p Place) Connect(ctx context.Context) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, p.Network, p.Address)
	if err != nil || p.Wrap == nil {
		return conn, err
	}
	wrapped, err := p.Wrap(ctx, conn)
	if err != nil {
		_ = conn.Close()
	}
	return wrapped, err
}

// Kind is a way to move bytes, its two ends apart.
type Kind struct {
	Name string // in reports, too
	// OwnMemory says that the server receives into memory of its own: of To it takes
	// the length only.
	OwnMemory bool
	// Serve serves one client, which dials l, until ctx ends, and closes l.
	// Once the client knows of the end of a transfer, nobody touches To until the next.
	Serve func(ctx context.Context, l net.Listener, p Place) error
	// Dial connects to a server.
	Dial func(ctx context.Context, p Place) (Client, error)
}

// Client is the end that has the source. It belongs to one goroutine.
type Client struct {
	// Prepare, if set, connects for one of Moves, so that Run need not.
	Prepare func(ctx context.Context, op Op) error
	// Run does one of Moves once and returns when all its bytes are where they belong.
	// It sets first, unless that is nil, to when the first piece of a result was there.
	// After an error, the end of ctx for one, only Close is of use.
	Run func(ctx context.Context, op Op, first *time.Time) error
	// Measure has the jobs that the client times and checks itself.
	Measure map[Op]func(ctx context.Context, count int) (Sample, error)
	Close   func() error
}

// Do does op, which is one of Moves or a batch of calls, and measures it.
func (c Client) Do(ctx context.Context, op Op, p Place, calls int) (Sample, error) {
	if op == Call {
		return batch(calls, p.To, p.Source, func() error { return c.Run(ctx, Echo, nil) })
	}
	return Transfer(op, p.To, p.Source, func() error { return c.Run(ctx, op, nil) })
}

// Transfer times a run of op, whose result goes to where the source's went to, and
// compares it after the time. It borrows both.
func Transfer(op Op, to, source []byte, run func() error) (Sample, error) {
	if op.Back() {
		Spoil(to, source)
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
		Spoil(to, source)
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

// Spoil makes a byte of every page of dst one that no op makes of the source's,
// so that what an earlier run left there does not pass for a transfer. It borrows both.
func Spoil(dst, source []byte) {
	for i := 0; i < len(dst); i += 4 << 10 {
		dst[i] = ^source[i] // neither the source's byte, nor its relu's: that is 0 or the same
		if dst[i] == 0 {
			dst[i] = 1
		}
	}
}

// Check returns an error if dst is not what op makes of the source. It borrows
// both, of one length.
func Check(op Op, dst, source []byte) error {
	var made []byte
	for at := 0; at < len(dst); at += ChunkBytes {
		end := min(at+ChunkBytes, len(dst))
		want := source[at:end]
		if op == ReLU {
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

// Memory returns memory that was written before, outside the Go heap and in huge pages where
// there are any, as the engine's own. It lends it until free.
func Memory(size int) (data []byte, free func(), err error) {
	s, err := slab.NewPool(0, slab.System).Get(size)
	if err != nil {
		return nil, nil, err
	}
	FillFloats(s.Bytes())
	return s.Bytes(), s.Release, nil
}

// Rectify computes max(x, 0) of each float32 in place, two at a time and without a
// branch: a lane whose sign is set becomes 0. It borrows data; bytes behind the last
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
// ones every time, and so touches every page. It borrows data.
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
