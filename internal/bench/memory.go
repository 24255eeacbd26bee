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
	"path/filepath"
	"strconv"
	"time"

	"github.com/tensorferry/tensorferry/internal/proc"
)

// PeakMemory starts a server and a client as processes of their own, streams a
// generated tensor of so many bytes, a multiple of MemoryBlock, through relu, compares
// every byte that comes back, and returns the most memory that each of the two took: pages
// that were present at a time, of code and files too, as the kernel keeps it (VmHWM).
// Ending ctx ends both.
func (c Config) PeakMemory(ctx context.Context, network string, size int64) (_ Rows, err error) {
	defer func() {
		if ctx.Err() != nil {
			err = context.Cause(ctx) // and not what it broke
		}
	}()
	running, cancel := context.WithCancel(ctx)
	defer cancel()
	listen := "127.0.0.1:0"
	if network == "unix" {
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
	client := proc.New(c.Command(running, "run", "relu", "--server", address, "--dtype", "float32", "--shape", strconv.FormatInt(size/4, 10)))
	stdout, err := client.Pipe()
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	written := make(chan error, 1)
	go func() { written <- errors.Join(writeBlocks(client.In, size), client.In.Close()) }() // ends with the client
	var near proc.Resident
	err = checkBlocks(stdout, size, func(left int64) (err error) {
		if left%max(size/16/MemoryBlock*MemoryBlock, MemoryBlock) == 0 {
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
	return Rows{{
		Net: network, Work: memory, Bytes: size, Who: Tensorferry, Time: took, Rate: rate(size, took),
		Samples: []Sample{{Time: took, Server: far.Peak, Client: near.Peak}},
	}}, err
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
