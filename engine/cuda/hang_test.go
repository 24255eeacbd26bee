//go:build linux && cgo

package cuda_test

import (
	"context"
	_ "embed"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cuda"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// hung is what uses a device while a function of its driver hangs.
type hung int

const (
	aBlock    hung = iota
	aLargeOne      // than its lane
	aLoad          // of a model
	anUnload
	aLoss // of the device
	aClose
	nobody // but its end waits for it
)

type hang struct {
	name, commands string
	by             hung
}

// hangs are the functions of the driver that are called once a device is open, and what is
// said to the driver besides. To hang a call that enqueues is not to hang what it has enqueued.
var hangs = []hang{
	{"cuCtxSetCurrent", "", aBlock},
	{"call:cuMemcpyHtoDAsync_v2", "", aBlock},
	{"cuMemcpyHtoDAsync_v2", "", aBlock},
	{"call:cuEventRecord", "", aBlock},
	{"cuEventRecord", "", aBlock},
	{"call:cuStreamWaitEvent", "", aBlock},
	{"cuStreamWaitEvent", "", aBlock},
	{"call:cuLaunchKernel", "", aBlock},
	{"cuLaunchKernel", "", aBlock},
	{"call:cuMemcpyDtoHAsync_v2", "", aBlock},
	{"cuMemcpyDtoHAsync_v2", "", aBlock},
	{"cuEventSynchronize", "", aBlock},
	{"cuEventElapsedTime", "", aBlock},
	{"cuMemAlloc_v2", "", aLargeOne},
	{"cuMemFree_v2", "", aLargeOne},
	{"cuStreamSynchronize", "fail cuLaunchKernel 701 times 1", aBlock},
	{"cuMemGetInfo_v2", "fail cuLaunchKernel 701 times 1", aBlock},
	{"cuGetErrorName", "fail cuLaunchKernel 701 times 1", aBlock},
	{"cuGetErrorString", "fail cuLaunchKernel 701 times 1", aBlock},
	{"cuMemAlloc_v2", "", aLoad},
	{"cuStreamSynchronize", "", aLoad},
	{"cuMemFree_v2", "", anUnload},
	{"cuDevicePrimaryCtxReset_v2", "async fail cuLaunchKernel 700 times 1", aLoss},
	{"cuDevicePrimaryCtxRelease_v2", "async fail cuLaunchKernel 700 times 1", aLoss},
	{"cuMemHostRegister_v2", "", nobody},
	{"cuMemHostUnregister", "", aClose},
	{"cuMemFree_v2", "", aClose},
	{"cuEventDestroy_v2", "", aClose},
	{"cuStreamDestroy_v2", "", aClose},
	{"cuModuleUnload", "", aClose},
	{"cuDevicePrimaryCtxRelease_v2", "", aClose},
}

// hangsAtOpen are those that are called before.
var hangsAtOpen = []string{
	"cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceTotalMem_v2", "cuDeviceGetAttribute",
	"cuDevicePrimaryCtxSetFlags_v2", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuStreamCreate", "cuModuleLoadDataEx", "cuModuleGetFunction",
	"cuEventCreate", "cuMemHostRegister_v2",
}

//go:embed driver.h
var header string // a compiled test runs where no source is

func TestEveryFunctionOfTheDriverIsHung(t *testing.T) {
	known := map[string]bool{}
	for _, name := range hangsAtOpen {
		known[name] = true
	}
	for _, h := range hangs {
		known[strings.TrimPrefix(h.name, "call:")] = true
	}
	for _, m := range regexp.MustCompile(`X\(\w+, "(\w+)"`).FindAllStringSubmatch(header, -1) {
		require.True(t, known[m[1]], m[1])
	}
}

func TestADriverThatHangsAtOpenIsNotWaitedForLong(t *testing.T) {
	for _, name := range hangsAtOpen {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.Control("hang " + name)
			c := r.config(mib)
			c.Hang = 25 * time.Millisecond
			err := soon(func() error { _, err := cuda.Open(c); return err })(t)
			require.ErrorIs(t, err, engine.ErrUnavailable)
			require.ErrorContains(t, err, "the driver has not answered for 100ms")
			r.Control("unhang")
		})
	}
}

func TestADriverThatHangsIsNotWaitedForLongToDescribeItsDevices(t *testing.T) {
	for _, name := range hangsAtOpen[:slices.Index(hangsAtOpen, "cuDevicePrimaryCtxSetFlags_v2")] {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.Control("hang " + name)
			err := soon(func() error {
				_, err := cuda.Devices(cuda.Config{Library: r.path, Hang: 25 * time.Millisecond})
				return err
			})(t)
			require.ErrorIs(t, err, engine.ErrUnavailable)
			require.ErrorContains(t, err, "the driver has not answered for 100ms")
			r.Control("unhang")
		})
	}
}

// They hang side by side, each on a driver of its own: a run waits a second for its blocks.
func TestADriverThatHangsHoldsUpNobodyForLong(t *testing.T) {
	r := newRig(t)
	r.Fake()
	library, err := os.ReadFile(r.path)
	require.NoError(t, err)
	var all sync.WaitGroup
	var opening sync.Mutex // or a machine that is busy would be taken for a driver that hangs
	for _, h := range hangs {
		all.Go(func() {
			t.Run(h.name, func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "libcuda.so.1")
				require.NoError(t, os.WriteFile(path, library, 0o700))
				h.test(t, fakeRig(t, path), &opening)
			})
		})
	}
	all.Wait()
}

func (tc hang) test(t *testing.T, r *rig, opening *sync.Mutex) {
	c := r.config(48 * mib)
	c.Closing(time.Second)
	if tc.by != nobody {
		c.Hang = time.Second
	}
	var h *cuda.Host
	var loaded engine.Model
	func() {
		opening.Lock()
		defer opening.Unlock()
		h = r.open(t, c)
		t.Cleanup(func() { r.Control("unhang") })
		var err error
		loaded, err = cuda.Stack(h, mlp(t))
		require.NoError(t, err)
		_, err = engine.Compute(t.Context(), loaded, nil, floats(1, 9, 50))
		require.NoError(t, err)
	}()
	relu, sink := builtin(t, cuda.Builtins(h), "relu"), builtin(t, cuda.Builtins(h), "sink")
	well := watch(t, relu)
	large := floats(2, 3, mib/4)
	if tc.by == nobody {
		large = floats(2, 20, mib/4) // than the memory that is locked
	}
	compute := func(m engine.Model) error {
		ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
		defer cancel()
		_, err := engine.Compute(ctx, m, nil, large)
		return err
	}
	load := func() error {
		m, err := cuda.Stack(h, mlp(t))
		if err == nil {
			closeModel(t, m)
		}
		return err
	}
	r.Control("hang " + tc.name + ";" + tc.commands)
	ended := soon(map[hung]func() error{
		aBlock: func() error { return compute(relu) }, aLoss: func() error { return compute(relu) },
		aLargeOne: func() error { return compute(sink) }, nobody: func() error { return compute(sink) },
		aLoad: load, anUnload: func() error { closeModel(t, loaded); return nil }, aClose: func() error { h.Close(); return nil },
	}[tc.by])
	switch tc.by {
	case aClose:
		require.NoError(t, ended(t))
		require.ErrorIs(t, compute(relu), engine.ErrClosed)
		require.ErrorIs(t, load(), engine.ErrClosed)
	case nobody:
		require.NoError(t, ended(t))
		require.Zero(t, well.changes())
		require.NoError(t, soon(func() error { h.Close(); return nil })(t))
	default:
		testkit.Eventually(t, func() bool { return well.last() != nil }, "the device to be said to hang")
		if tc.by == aLoss {
			requireGone(t, r)
		}
		another, loads := soon(func() error { return compute(sink) }), soon(load)
		require.ErrorIs(t, well.last(), engine.ErrUnavailable)
		require.ErrorIs(t, another(t), engine.ErrUnavailable)
		if err := loads(t); err != nil { // where only blocks hang, it is none
			require.ErrorIs(t, err, engine.ErrUnavailable)
		}
		if err := ended(t); tc.by != anUnload {
			require.ErrorIs(t, err, engine.ErrUnavailable)
		}
	}
	r.Control("unhang")
	switch tc.by {
	case aLoss:
		requireLost(t, r, h, well, "CUDA_ERROR_ILLEGAL_ADDRESS")
	case aClose, nobody:
	default:
		testkit.Eventually(t, func() bool { return well.last() == nil }, "the device to answer again")
		require.NoError(t, compute(relu))
	}
	testkit.Eventually(t, func() bool {
		used, _, _ := h.Budget().Used()
		slabs, _ := h.Pool().Live()
		return used == 0 && slabs == 0
	}, "all memory to be back")
}

// soon runs do, and returns a wait for its end, which comes in the time that anything may
// wait for a device.
func soon(do func() error) (ended func(testing.TB) error) {
	answer := make(chan error, 1)
	go func() { answer <- do() }()
	return func(t testing.TB) (err error) {
		t.Helper()
		testkit.Eventually(t, func() bool {
			select {
			case err = <-answer:
				return true
			default:
				return false
			}
		}, "an end while the driver hangs")
		return err
	}
}
