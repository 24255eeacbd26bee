// Package cuda runs models on NVIDIA GPUs: a block is received into page-locked memory,
// copied to the device, computed and copied back while later ones are still on the wire.
//
// It needs a C compiler to build, and only NVIDIA's driver to run, which it opens by
// name: without cgo or a driver Open says so, and everything else works. It refuses
// to wait for a device on a caller's goroutine. Memory is lent for input and shared
// for results as package engine/blocks says; weights are copied. Hosts and models
// are safe for concurrent use.
package cuda

import (
	"cmp"
	"log/slog"
	"time"

	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/slab"
)

// Config says which device a Host is, and what it may use. The zero value works.
type Config struct {
	// Library is the driver to open, as the dynamic linker finds it. Empty: libcuda.so.1, or
	// if there is none, /usr/local/nvidia/lib64/libcuda.so.1, where containers have it.
	Library string
	// Device counts from 0, in the driver's order. A device has one Host at a time, and
	// no other user in the process: its context is reset when it fails, for good.
	Device int
	// PinnedBytes is the most page-locked memory that runs may hold at a time, and the
	// most that is kept for reuse. Zero means 256 MiB.
	PinnedBytes int64
	// Spill, if it is set, is ordinary memory that results are copied out to when they
	// wait for their taker while other calls wait for page-locked memory.
	Spill *blocks.Spill
	// Hang is how long a block may take before its device is said to hang. Zero means 30 s.
	// Open gives up after four times that.
	Hang time.Duration
	// Lost, if it is set, is called once when the device is lost, and every run on it has an
	// error: only another process can use it again. It must not block.
	Lost func()
	// Log hears what becomes of the device; nil means slog.Default().
	Log *slog.Logger

	closing time.Duration // blocks.CloseWait, but in tests
}

func (c *Config) setDefaults() {
	c.PinnedBytes = cmp.Or(max(c.PinnedBytes, 0), blocks.DefaultMemory)
	c.Hang = cmp.Or(max(c.Hang, 0), hangWait)
	c.Log = cmp.Or(c.Log, slog.Default())
	c.closing = cmp.Or(c.closing, blocks.CloseWait)
	if c.Lost == nil {
		c.Lost = func() {}
	}
}

// Device is what a driver says of a device.
type Device struct {
	Name         string // such as "NVIDIA H200"
	Memory       int64  // bytes
	Major, Minor int    // compute capability
	Driver       int    // the newest CUDA that the driver knows: 12040 is 12.4
}

// Host is what models of one device share: page-locked memory, the budget that
// bounds it, and the device. There is none in a program that was built without cgo.
type Host struct {
	pool   *slab.Pool
	budget *slab.Budget
	device *device
	engine *blocks.Engine
}

// Close ends what feeds the device: blocks on it are finished, queued ones and runs fail with
// engine.ErrClosed. A device that hangs is left as it is after five seconds.
func (h *Host) Close() { h.device.close() }
