package measure

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"runtime"

	"github.com/tensorferry/tensorferry/internal/proc"
)

// busyArgument alone makes a program a loop: it calls BeEnd.
const busyArgument = "bench-busy"

// Busy keeps every core busy with loops that give way to everybody else, so that no core has to
// be woken. Each is a process that ends with its input, which this one holds: none outlives it.
func Busy(ctx context.Context) (end func() error, err error) {
	self, err := os.Executable()
	var loops []*proc.Child
	end = func() (err error) {
		for _, c := range loops {
			err = errors.Join(err, c.Stop())
		}
		if ctx.Err() != nil {
			err = nil // it has ended them
		}
		return err
	}
	for len(loops) < runtime.NumCPU() && err == nil {
		c := proc.New(exec.CommandContext(ctx, "nice", "-n", "19", self, busyArgument))
		if _, err = c.Pipe(); err == nil {
			loops = append(loops, c)
		}
	}
	if err != nil {
		return nil, errors.Join(err, end())
	}
	return end, nil
}

// beBusy loops until its input ends.
func beBusy() {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	for n := 0; ; n++ {
		_ = n
	}
}
