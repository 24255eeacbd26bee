package bench

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/tensorferry/tensorferry/internal/proc"
)

// MemoryConfig says how to measure the memory that a large tensor takes.
type MemoryConfig struct {
	// Command returns a process of tensorferry that has not been started.
	Command func(ctx context.Context, args ...string) *exec.Cmd
	// Bytes is the size of the tensor, a multiple of MemoryBlock.
	Bytes   int64
	Network string // "tcp" or "unix"
	// Progress, if set, is told how far it is.
	Progress func(text string)
}

// MemoryReport is the most memory that each process took: pages that were present
// at a time, of code and files too, as the kernel keeps it (VmHWM).
type MemoryReport struct {
	Machine Machine       `json:"machine"`
	Net     string        `json:"net"`
	Bytes   int64         `json:"bytes"`
	Time    time.Duration `json:"time_ns"`
	Server  int64         `json:"server_peak_bytes"`
	Client  int64         `json:"client_peak_bytes"`
	// Required of both.
	Required *Required `json:"required"`
}

// WriteText writes it for people.
func (r *MemoryReport) WriteText(w io.Writer) error {
	_, err := fmt.Fprintf(w, `%d bytes of float32 through relu, stdin to stdout, %s: every byte right, %v, %.2f GB/s
peak memory of the server  %6.1f MiB
peak memory of the client  %6.1f MiB
required of each           at most %.0f MiB: %s
`, r.Bytes, r.Net, r.Time.Round(time.Millisecond), float64(r.Bytes)/float64(r.Time), mib(r.Server), mib(r.Client),
		mib(peakBytes), map[bool]string{true: "met", false: "MISSED"}[r.Required.Met])
	return err
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }

// PeakMemory starts a server and a client as processes of their own, streams a
// generated tensor through relu, compares every byte that comes back, and returns
// the most memory that each of the two took. Ending ctx ends both.
func PeakMemory(ctx context.Context, c MemoryConfig) (_ *MemoryReport, err error) {
	defer func() {
		if ctx.Err() != nil {
			err = context.Cause(ctx) // and not what it broke
		}
	}()
	running, cancel := context.WithCancel(ctx)
	defer cancel()
	listen := "127.0.0.1:0"
	if c.Network == "unix" {
		dir, err := os.MkdirTemp("", "tensorferry-bench-")
		if err != nil {
			return nil, err
		}
		defer func() { _ = os.RemoveAll(dir) }()
		listen = "unix:" + filepath.Join(dir, "s")
	}
	server, address, err := proc.Serve(running, c.Command(running, "serve", "--child", "--listen", listen))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	client := proc.New(c.Command(running, "run", "relu", "--server", address, "--dtype", "float32", "--shape", strconv.FormatInt(c.Bytes/4, 10)))
	stdout, err := client.Pipe()
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	written := make(chan error, 1)
	go func() { written <- errors.Join(writeBlocks(client.In, c.Bytes), client.In.Close()) }() // ends with the client
	var near proc.Resident
	err = checkBlocks(stdout, c.Bytes, func(left int64) (err error) {
		if c.Progress != nil && left%max(c.Bytes/16/MemoryBlock*MemoryBlock, MemoryBlock) == 0 {
			c.Progress(ByteText(int(left)) + " left")
		}
		if left == MemoryBlock { // the client lives until it has written this one too
			near, err = proc.ResidentOf(client.Process.Pid)
		}
		return err
	})
	took := time.Since(begin)
	if err != nil {
		cancel() // or the client would wait for its output to be read
	}
	writeErr := <-written // a broken pipe, if the client failed
	if err = cmp.Or(errors.Join(err, client.Wait()), writeErr); err != nil {
		return nil, err
	}
	far, err := proc.ResidentOf(server.Process.Pid)
	return &MemoryReport{
		Machine: ThisMachine(), Net: c.Network, Bytes: c.Bytes, Time: took, Server: far.Peak, Client: near.Peak,
		Required: (&Required{AtMost: true, Value: peakBytes}).hold(float64(max(far.Peak, near.Peak))),
	}, err
}

// A generated tensor is one block again and again, but for its first element,
// which tells the blocks apart.
func newBlock() []byte {
	b := make([]byte, MemoryBlock)
	FillFloats(b)
	return b
}

func stamp(block []byte, i int64) {
	binary.LittleEndian.PutUint32(block, math.Float32bits(float32(i+1))) // exact up to 2²⁴ blocks
}

func writeBlocks(w io.Writer, size int64) error {
	block := newBlock()
	for i := range size / MemoryBlock {
		stamp(block, i)
		if _, err := w.Write(block); err != nil {
			return err
		}
	}
	return nil
}

// checkBlocks reads what relu makes of what writeBlocks writes. It calls before,
// with the bytes left, for each block.
func checkBlocks(r io.Reader, size int64, before func(left int64) error) error {
	want, got := newBlock(), make([]byte, MemoryBlock)
	Rectify(want)
	for i := range size / MemoryBlock {
		if err := before(size - i*MemoryBlock); err != nil {
			return err
		}
		if n, err := io.ReadFull(r, got); err != nil {
			return fmt.Errorf("bench: the result ends after %d of %d bytes: %w", i*MemoryBlock+int64(n), size, err)
		}
		if stamp(want, i); !bytes.Equal(got, want) {
			return fmt.Errorf("bench: the result is wrong in [%d,+%d)", i*MemoryBlock, MemoryBlock)
		}
	}
	if n, err := r.Read(got[:1]); n > 0 || err != io.EOF {
		return fmt.Errorf("bench: the result does not end after %d bytes: %w", size, err)
	}
	return nil
}
