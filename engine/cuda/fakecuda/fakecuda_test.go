//go:build linux && cgo

package fakecuda

import (
	"bytes"
	"encoding/binary"
	"flag"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Result codes of cuda.h.
const (
	success                 = 0
	invalidValue            = 1
	outOfMemory             = 2
	notInitialized          = 3
	invalidDevice           = 101
	invalidImage            = 200
	invalidContext          = 201
	noBinaryForGPU          = 209
	invalidPTX              = 218
	unsupportedPTX          = 222
	invalidHandle           = 400
	notFound                = 500
	notReady                = 600
	illegalAddress          = 700
	contextIsDestroyed      = 709
	alreadyRegistered       = 712
	notRegistered           = 713
	misalignedAddress       = 716
	launchFailed            = 719
	notSupported            = 801
	nonBlocking             = 1 // of a stream
	page                    = 4096
	canary             byte = 0xD5
)

// sanitized is set in the process that repeats the tests with Address Sanitizer.
const sanitized = "FAKECUDA_TEST_SANITIZED"

// gpu is a thread with a driver and a current context.
type gpu struct {
	t *testing.T
	*Driver
	out uintptr // eight bytes for a result
}

func open(t *testing.T, hide string) *gpu {
	t.Helper()
	options := Options{Kernels: "testdata", Sanitize: os.Getenv(sanitized) != "", Hide: hide}
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	g := &gpu{t: t, Driver: Open(t, Build(t, options))}
	g.out = address(host(t, page))
	return g
}

// start makes the primary context of device 0 the thread's. At the end of the test
// nothing may be left but what the context had.
func start(t *testing.T) *gpu {
	t.Helper()
	g := open(t, "")
	g.do("cuInit", 0)
	g.do("cuCtxSetCurrent", g.get("cuDevicePrimaryCtxRetain", 0))
	t.Cleanup(func() {
		g.Control("reset")
		g.do("cuDevicePrimaryCtxReset_v2", 0)
		g.do("cuDevicePrimaryCtxRelease_v2", 0)
		g.do("cuCtxSetCurrent", 0)
		require.Zero(t, g.Live())
	})
	return g
}

// do calls a function that has to succeed.
func (g *gpu) do(function string, args ...uintptr) {
	g.t.Helper()
	g.want(success, function, args...)
}

func (g *gpu) want(code int, function string, args ...uintptr) {
	g.t.Helper()
	require.Equal(g.t, code, g.call(function, args...), function)
}

// get calls a function whose first argument says where its result goes.
func (g *gpu) get(function string, args ...uintptr) uintptr {
	g.t.Helper()
	at := (*uintptr)(pointer(g.out))
	*at = 0
	g.do(function, append([]uintptr{g.out}, args...)...)
	return *at
}

func (g *gpu) stream() uintptr {
	g.t.Helper()
	return g.get("cuStreamCreate", nonBlocking)
}

func (g *gpu) event() uintptr {
	g.t.Helper()
	return g.get("cuEventCreate", 0)
}

func (g *gpu) memory(n int) uintptr {
	g.t.Helper()
	return g.get("cuMemAlloc_v2", uintptr(n))
}

// registered returns host memory that the device may copy from and to.
func (g *gpu) registered(n int) []byte {
	g.t.Helper()
	b := host(g.t, n)
	g.do("cuMemHostRegister_v2", address(b), uintptr(n), 0)
	return b
}

// read returns the bytes of device memory, after what the stream has to do.
func (g *gpu) read(stream, from uintptr, n int) []byte {
	g.t.Helper()
	to := host(g.t, n)
	g.do("cuMemcpyDtoHAsync_v2", address(to), from, uintptr(n), stream)
	return to
}

func (g *gpu) kernel(name string) uintptr {
	g.t.Helper()
	ptx, err := os.ReadFile("testdata/test.ptx")
	require.NoError(g.t, err)
	module := g.get("cuModuleLoadDataEx", address(text(g.t, string(ptx))), 0, 0, 0)
	return g.get("cuModuleGetFunction", module, address(text(g.t, name)))
}

// launch runs a kernel, each of whose arguments lies in the low bytes of one of args.
func (g *gpu) launch(kernel, stream uintptr, blocks, threads [3]uintptr, args ...uint64) int {
	g.t.Helper()
	b := host(g.t, page)
	defer clear(b) // the driver has copied them
	for i, a := range args {
		binary.NativeEndian.PutUint64(b[8*i:], uint64(address(b))+1024+uint64(8*i))
		binary.NativeEndian.PutUint64(b[1024+8*i:], a)
	}
	return g.call("cuLaunchKernel", kernel, blocks[0], blocks[1], blocks[2], threads[0], threads[1], threads[2], 0, stream, address(b), 0)
}

// vacant is where host maps next: far from where the kernel puts what the runtime or
// Address Sanitizer maps, so that nothing takes the place of memory that a test unmaps.
var vacant uintptr = 0x5000_0000_0000

// host returns memory that does not move, until the end of the test.
func host(t *testing.T, n int) []byte {
	t.Helper()
	at, err := unix.MmapPtr(-1, 0, pointer(vacant), uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_FIXED_NOREPLACE)
	require.NoError(t, err)
	vacant += uintptr(n+page-1) / page * page
	b := unsafe.Slice((*byte)(at), n)
	t.Cleanup(func() { unmap(t, b) }) // some tests do before
	return b
}

func unmap(t *testing.T, b []byte) {
	t.Helper()
	require.NoError(t, unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b))))
}

// text returns s with a zero at its end.
func text(t *testing.T, s string) []byte {
	t.Helper()
	b := host(t, len(s)+1)
	copy(b, s)
	return b
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// pointer is the way back, of memory outside Go's heap.
func pointer(a uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&a)) }

func kinds(ops []Op) (all []string) {
	for _, op := range ops {
		all = append(all, op.Kind)
	}
	return all
}

func TestFunctionsNeedAContext(t *testing.T) {
	g := open(t, "")
	g.do("cuInit", 0)
	require.EqualValues(t, 2, g.get("cuDeviceGetCount"))
	g.want(invalidDevice, "cuDeviceGet", g.out, 2)
	g.want(invalidContext, "cuMemAlloc_v2", g.out, 16)
	g.want(invalidContext, "cuDevicePrimaryCtxRelease_v2", 1)
	g.want(invalidContext, "cuCtxSetCurrent", 16)
	ctx := g.get("cuDevicePrimaryCtxRetain", 1)
	g.do("cuCtxSetCurrent", ctx)
	require.Equal(t, ctx, g.get("cuCtxGetCurrent"))
	g.memory(16)
	g.do("cuDevicePrimaryCtxRelease_v2", 1)
	g.want(contextIsDestroyed, "cuMemAlloc_v2", g.out, 16)
	g.do("cuCtxSetCurrent", 0)
	require.Zero(t, g.Live())
}

func TestAHiddenFunctionIsNotFound(t *testing.T) {
	g := open(t, "cuEventElapsedTime")
	require.Nil(t, g.symbol("cuEventElapsedTime"))
	require.NotNil(t, g.symbol("cuEventQuery"))
}

func TestDevicesSayWhatTheyAre(t *testing.T) {
	g := start(t)
	name := host(t, page)
	g.do("cuDeviceGetName", address(name), page, 1)
	require.Equal(t, "Fake GPU 1", string(name[:bytes.IndexByte(name, 0)]))
	require.EqualValues(t, 64<<20, g.get("cuDeviceTotalMem_v2", 1))
	require.EqualValues(t, 8, g.get("cuDeviceGetAttribute", 75, 0))
	g.Control("devices 1; capability 7 5")
	g.want(invalidDevice, "cuDeviceTotalMem_v2", g.out, 1)
	require.EqualValues(t, 7, g.get("cuDeviceGetAttribute", 75, 0))
	g.Control("devices 0; fail cuInit 100")
	g.want(100, "cuInit", 0)
	require.Zero(t, g.get("cuDeviceGetCount"))
}

func TestErrorsHaveNames(t *testing.T) {
	g := start(t)
	for function, want := range map[string]string{
		"cuGetErrorName":   "CUDA_ERROR_ILLEGAL_ADDRESS",
		"cuGetErrorString": "an illegal memory access was encountered",
	} {
		g.do(function, illegalAddress, g.out)
		got := unsafe.Slice((*byte)(pointer(*(*uintptr)(pointer(g.out)))), len(want)+1)
		require.Equal(t, want+"\x00", string(got))
		g.want(invalidValue, function, 12345, g.out)
	}
}

func TestAStreamExecutesInOrder(t *testing.T) {
	g := start(t)
	stream, memory, to := g.stream(), g.memory(page), g.registered(page)
	g.Control("hang memset")
	g.do("cuMemsetD8Async", memory, 1, page, stream)
	g.do("cuMemsetD8Async", memory, 2, 8, stream)
	g.do("cuMemcpyDtoHAsync_v2", address(to), memory, page, stream)
	g.Control("unhang memset")
	g.do("cuStreamSynchronize", stream)
	require.Equal(t, append(bytes.Repeat([]byte{2}, 8), bytes.Repeat([]byte{1}, page-8)...), to)
	ops := g.Timeline()
	require.Equal(t, []string{"memset", "memset", "d2h"}, kinds(ops))
	for i, op := range ops {
		require.Equal(t, 1, op.Stream)
		require.LessOrEqual(t, op.Begin, op.End)
		require.True(t, i == 0 || ops[i-1].End <= op.Begin, "operations of a stream overlap")
	}
}

func TestAnEventHoldsAnotherStream(t *testing.T) {
	g := start(t)
	a, b, memory, to := g.stream(), g.stream(), g.memory(page), g.registered(page)
	first, last := g.event(), g.event()
	g.Control("hang memset")
	g.do("cuMemsetD8Async", memory, 7, page, a)
	g.do("cuEventRecord", first, a)
	g.do("cuStreamWaitEvent", b, first, 0)
	g.do("cuMemcpyDtoHAsync_v2", address(to), memory, page, b)
	g.do("cuEventRecord", last, b)
	g.want(notReady, "cuEventQuery", last)
	g.want(notReady, "cuEventElapsedTime", g.out, first, last)
	g.Control("unhang")
	g.do("cuEventSynchronize", last)
	require.Equal(t, bytes.Repeat([]byte{7}, page), to)
	g.do("cuEventQuery", first)
	millis := math.Float32frombits(uint32(g.get("cuEventElapsedTime", first, last)))
	require.GreaterOrEqual(t, millis, float32(0))
	require.Equal(t, []string{"memset", "record", "wait", "d2h", "record"}, kinds(g.Timeline()))
}

// The wait is for the record before it, not for one that comes later.
func TestAWaitIsForTheLatestRecord(t *testing.T) {
	g := start(t)
	a, b, memory, event := g.stream(), g.stream(), g.memory(page), g.event()
	g.do("cuEventQuery", event)
	g.do("cuEventSynchronize", event)
	g.do("cuStreamWaitEvent", b, event, 0) // never recorded: complete
	g.do("cuEventRecord", event, a)
	g.do("cuStreamWaitEvent", b, event, 0)
	g.Control("hang memset")
	g.do("cuMemsetD8Async", memory, 7, page, a)
	g.do("cuEventRecord", event, a)
	g.do("cuStreamSynchronize", b)
	g.want(notReady, "cuEventQuery", event)
}

func TestAnEventWithoutTimeHasNoElapsedTime(t *testing.T) {
	g := start(t)
	stream, a, b := g.stream(), g.event(), g.get("cuEventCreate", 2)
	g.want(invalidHandle, "cuEventElapsedTime", g.out, a, a)
	g.do("cuEventRecord", a, stream)
	g.do("cuEventRecord", b, stream)
	g.do("cuStreamSynchronize", stream)
	g.do("cuEventElapsedTime", g.out, a, a)
	g.want(invalidHandle, "cuEventElapsedTime", g.out, a, b)
}

func TestMemoryThatIsGoneAtExecutionIsAViolation(t *testing.T) {
	for name, tc := range map[string]struct {
		away func(g *gpu, host []byte, memory uintptr)
		says string
	}{
		"unregistered": {
			func(g *gpu, host []byte, _ uintptr) { g.want(illegalAddress, "cuMemHostUnregister", address(host)) },
			"no longer registered",
		},
		"unmapped": {
			func(g *gpu, host []byte, _ uintptr) { unmap(g.t, host) },
			"no longer mapped",
		},
		"protected": {
			func(g *gpu, host []byte, _ uintptr) { require.NoError(g.t, syscall.Mprotect(host, syscall.PROT_NONE)) },
			"no longer mapped",
		},
		"device memory freed": {
			func(g *gpu, _ []byte, memory uintptr) { g.want(illegalAddress, "cuMemFree_v2", memory) },
			"device memory that is gone",
		},
	} {
		for _, function := range []string{"cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"} {
			t.Run(name+" "+function, func(t *testing.T) {
				g := start(t)
				stream, memory, host := g.stream(), g.memory(2*page), g.registered(2*page)
				to, from := memory, address(host)
				if function == "cuMemcpyDtoHAsync_v2" {
					to, from = from, to
				}
				g.Control("late 50000") // what takes memory away waits for the device
				g.do(function, to, from, 2*page, stream)
				tc.away(g, host, memory)
				g.want(illegalAddress, "cuStreamSynchronize", stream)
				require.Len(t, g.Violations(), 1)
				require.Contains(t, g.Violations()[0], tc.says)
				g.want(illegalAddress, "cuEventCreate", g.out, 0)
			})
		}
	}
}

func TestCopiesAreCheckedAtTheCall(t *testing.T) {
	g := start(t)
	stream, memory, host := g.stream(), g.memory(page), host(t, 3*page)
	g.want(invalidHandle, "cuMemcpyHtoDAsync_v2", memory, address(host), page, 0) // the legacy default stream
	g.want(invalidValue, "cuMemcpyHtoDAsync_v2", memory+1, address(host), page, stream)
	g.want(invalidValue, "cuMemsetD8Async", memory, 0, page+1, stream)
	g.do("cuMemHostRegister_v2", address(host)+page, page, 0)
	g.want(invalidValue, "cuMemcpyHtoDAsync_v2", memory, address(host)+page-8, 16, stream)
	g.want(invalidValue, "cuMemcpyHtoDAsync_v2", memory, address(host)+2*page-8, 16, stream)
	g.do("cuMemcpyHtoDAsync_v2", memory, address(host)+page-16, 16, stream) // ends where it begins
	g.do("cuMemcpyHtoDAsync_v2", memory, address(host)+2*page, 16, stream)
	g.do("cuMemcpyHtoDAsync_v2", memory, 0, 0, stream)
	g.do("cuStreamSynchronize", stream)
	require.Empty(t, g.Violations())
}

func TestRegistration(t *testing.T) {
	g := start(t)
	host := g.registered(2 * page)
	g.want(alreadyRegistered, "cuMemHostRegister_v2", address(host)+page, page, 0)
	g.want(notRegistered, "cuMemHostUnregister", address(host)+page)
	g.do("cuMemHostUnregister", address(host))
	g.want(notRegistered, "cuMemHostUnregister", address(host))
	unmap(t, host)
	g.want(invalidValue, "cuMemHostRegister_v2", address(host), page, 0)
	g.Control("refuse-registration")
	g.want(notSupported, "cuMemHostRegister_v2", g.out, page, 0)
	require.Zero(t, g.get("cuDeviceGetAttribute", 99, 0))
}

// What is in registered memory when the device comes to it, counts; pageable memory is
// read at the call.
func TestMemoryIsReusedAfterTheCall(t *testing.T) {
	for name, want := range map[string]byte{"registered": 2, "pageable": 1} {
		t.Run(name, func(t *testing.T) {
			g := start(t)
			stream, memory, b := g.stream(), g.memory(page), host(t, page)
			if name == "registered" {
				g.do("cuMemHostRegister_v2", address(b), page, 0)
			}
			b[9] = 1
			g.Control("hang copies; late 1000")
			g.do("cuMemcpyHtoDAsync_v2", memory, address(b), page, stream)
			b[9] = 2
			g.Control("unhang")
			g.do("cuStreamSynchronize", stream)
			require.Equal(t, want, g.read(stream, memory, page)[9])
		})
	}
}

func TestASynchronousCopyIsDoneWhenItReturns(t *testing.T) {
	g := start(t)
	memory, b := g.memory(page), host(t, page)
	b[9] = 1
	g.do("cuMemcpyHtoD_v2", memory, address(b), page)
	b[9] = 2
	require.EqualValues(t, 1, g.read(g.stream(), memory, page)[9])
	require.Equal(t, 0, g.Timeline()[0].Stream)
}

func TestDeviceMemoryShowsNothingOfItsPast(t *testing.T) {
	g := start(t)
	fresh := bytes.Repeat([]byte{canary}, page)
	memory, stream := g.memory(page), g.stream()
	require.Equal(t, fresh, g.read(stream, memory, page))
	g.do("cuMemsetD8Async", memory, 9, page, stream)
	g.do("cuStreamSynchronize", stream)
	g.do("cuMemFree_v2", memory)
	require.Equal(t, fresh, g.read(stream, g.memory(page), page))
	g.want(invalidValue, "cuMemFree_v2", memory+1)
}

func TestDeviceMemoryIsOutOfTheHostsReach(t *testing.T) {
	g := start(t)
	memory := g.memory(page)
	_, _, errno := syscall.Syscall(syscall.SYS_GETCWD, memory, page, 0)
	require.Equal(t, syscall.EFAULT, errno)
}

func TestDeviceMemoryEnds(t *testing.T) {
	g := start(t)
	g.Control("memory 3145728") // of which the context has 2 MiB
	a := g.memory(1 << 19)
	g.want(outOfMemory, "cuMemAlloc_v2", g.out, 1<<19+1)
	g.memory(1 << 18)
	sizes := address(host(t, page))
	g.do("cuMemGetInfo_v2", sizes, sizes+8)
	require.Equal(t, [2]uint64{1 << 18, 3 << 20}, *(*[2]uint64)(pointer(sizes)))
	g.do("cuMemFree_v2", a)
	g.memory(1<<19 + 1)
	require.EqualValues(t, 1<<18+1<<19+1, g.Live().Bytes)
}

func TestKernelsComputeWhatGoDoes(t *testing.T) {
	t.Run("relu_words", func(t *testing.T) {
		g := start(t)
		const n = 1000
		b := g.registered(8 * n)
		var want []byte
		for i := range b {
			b[i] = byte(i*i/7 + i)
		}
		for i := 0; i < 8*n; i += 2 { // int16: negative ones become 0
			v := binary.LittleEndian.Uint16(b[i:])
			if v > math.MaxInt16 {
				v = 0
			}
			want = binary.LittleEndian.AppendUint16(want, v)
		}
		memory, stream, kernel := g.memory(8*n), g.stream(), g.kernel("relu_words")
		g.do("cuMemcpyHtoDAsync_v2", memory, address(b), 8*n, stream)
		const sign = 0x8000800080008000
		code := g.launch(kernel, stream, [3]uintptr{3, 1, 1}, [3]uintptr{64, 1, 1}, uint64(memory), n, sign, 0, 15)
		require.Equal(t, success, code)
		g.do("cuMemcpyDtoHAsync_v2", address(b), memory, 8*n, stream)
		g.do("cuStreamSynchronize", stream)
		require.Equal(t, want, b)
		require.Equal(t, []string{"h2d", "relu_words", "d2h"}, kinds(g.Timeline()))
	})
	t.Run("affine_f32", func(t *testing.T) {
		g := start(t)
		const n = 1000
		b := g.registered(4 * n)
		var want []byte
		scale, shift := float32(1.1), float32(-0.3)
		for i := range n {
			x := float32(i) * 0.7
			binary.LittleEndian.PutUint32(b[4*i:], math.Float32bits(x))
			want = binary.LittleEndian.AppendUint32(want, math.Float32bits(float32(scale*x)+shift))
		}
		memory, stream, kernel := g.memory(4*n), g.stream(), g.kernel("affine_f32")
		g.do("cuMemcpyHtoDAsync_v2", memory, address(b), 4*n, stream)
		code := g.launch(kernel, stream, [3]uintptr{2, 1, 1}, [3]uintptr{128, 1, 1},
			uint64(memory), n, uint64(math.Float32bits(scale)), uint64(math.Float32bits(shift)))
		require.Equal(t, success, code)
		require.Equal(t, want, g.read(stream, memory, 4*n))
	})
}

func TestTheThreadsOfABlockMeetAtBarriers(t *testing.T) {
	for name, threads := range map[string][3]uintptr{"256": {256, 1, 1}, "32 x 8": {32, 8, 1}, "2": {2, 1, 1}, "1024": {1024, 1, 1}} {
		t.Run(name, func(t *testing.T) {
			g := start(t)
			const blocks = 64
			n := int(threads[0] * threads[1])
			b := g.registered(8 * blocks * n)
			var want []byte
			for block := range blocks {
				var sum uint64
				for i := range n {
					v := uint64(block*n+i) * 0x9e3779b97f4a7c15
					binary.NativeEndian.PutUint64(b[8*(block*n+i):], v)
					sum += v
				}
				want = binary.NativeEndian.AppendUint64(want, sum)
			}
			x, sums, stream, kernel := g.memory(len(b)), g.memory(8*blocks), g.stream(), g.kernel("sum_u64")
			g.do("cuMemcpyHtoDAsync_v2", x, address(b), uintptr(len(b)), stream)
			require.Equal(t, success, g.launch(kernel, stream, [3]uintptr{blocks, 1, 1}, threads, uint64(x), uint64(sums)))
			require.Equal(t, want, g.read(stream, sums, 8*blocks))
			for _, op := range g.Timeline() {
				if op.Kind == "sum_u64" {
					t.Logf("%d blocks of %s threads: %v", blocks, name, op.End-op.Begin)
				}
			}
		})
	}
}

func TestAKernelsPointersAreChecked(t *testing.T) {
	one := [3]uintptr{1, 1, 1}
	for name, tc := range map[string]struct {
		kernel string
		x      func(memory, host uintptr) uintptr
		code   int
	}{
		"no memory":      {"relu_words", func(_, host uintptr) uintptr { return host }, illegalAddress},
		"misaligned":     {"relu_words", func(memory, _ uintptr) uintptr { return memory + 4 }, misalignedAddress},
		"beyond the end": {"beyond", func(memory, _ uintptr) uintptr { return memory }, illegalAddress},
	} {
		t.Run(name, func(t *testing.T) {
			if os.Getenv(sanitized) == "1" && tc.kernel == "beyond" {
				t.Skip("Address Sanitizer ends the process")
			}
			g := start(t)
			memory, stream, kernel := g.memory(64), g.stream(), g.kernel(tc.kernel)
			require.Equal(t, success, g.launch(kernel, stream, one, one, uint64(tc.x(memory, g.out)), 8, 0, 0, 15))
			g.want(tc.code, "cuStreamSynchronize", stream)
		})
	}
}

// A real driver would copy; an engine that keeps its devices apart never asks for it.
func TestAnotherDevicesMemoryIsOutOfReach(t *testing.T) {
	for name, use := range map[string]func(g *gpu, memory, stream uintptr){
		"kernel": func(g *gpu, memory, stream uintptr) {
			one := [3]uintptr{1, 1, 1}
			require.Equal(g.t, success, g.launch(g.kernel("relu_words"), stream, one, one, uint64(memory), 8, 0, 0, 15))
		},
		"copy":   func(g *gpu, memory, stream uintptr) { g.do("cuMemcpyHtoDAsync_v2", memory, g.out, 8, stream) },
		"memset": func(g *gpu, memory, stream uintptr) { g.do("cuMemsetD8Async", memory, 1, 8, stream) },
	} {
		t.Run(name, func(t *testing.T) {
			g := start(t)
			here := g.get("cuCtxGetCurrent")
			g.do("cuCtxSetCurrent", g.get("cuDevicePrimaryCtxRetain", 1))
			memory := g.memory(64)
			g.do("cuCtxSetCurrent", here)
			stream := g.stream()
			use(g, memory, stream)
			g.want(illegalAddress, "cuStreamSynchronize", stream)
			require.Len(t, g.Violations(), 1)
			g.do("cuDevicePrimaryCtxRelease_v2", 1)
		})
	}
}

func TestLaunchesAreCheckedAtTheCall(t *testing.T) {
	g := start(t)
	stream, kernel, one := g.stream(), g.kernel("relu_words"), [3]uintptr{1, 1, 1}
	require.Equal(t, invalidValue, g.launch(kernel, stream, [3]uintptr{0, 1, 1}, one, 0, 0, 0, 0, 0))
	require.Equal(t, invalidValue, g.launch(kernel, stream, one, [3]uintptr{1025, 1, 1}, 0, 0, 0, 0, 0))
	require.Equal(t, invalidHandle, g.launch(kernel+1, stream, one, one, 0, 0, 0, 0, 0))
	require.Equal(t, success, g.launch(kernel, stream, one, one, 0, 0, 0, 0, 0)) // a null that no thread follows
	g.do("cuStreamSynchronize", stream)
}

func TestModulesAreReadAsADriverDoes(t *testing.T) {
	ptx, err := os.ReadFile("testdata/test.ptx")
	require.NoError(t, err)
	with := func(from, to string) string { return strings.Replace(string(ptx), from, to, 1) }
	for name, tc := range map[string]struct {
		text string
		code int
	}{
		"as it is":            {string(ptx), success},
		"garbage":             {"garbage", invalidPTX},
		"empty":               {"", invalidPTX},
		"no target":           {".version 6.3\n", invalidPTX},
		"for a newer device":  {with("sm_75", "sm_90"), noBinaryForGPU},
		"for this one":        {with("sm_75", "sm_80"), success},
		"for another alone":   {with("sm_75", "sm_75a"), noBinaryForGPU},
		"for a newer driver":  {with(".version 6.3", ".version 8.5"), unsupportedPTX},
		"for this driver":     {with(".version 6.3", ".version 8.4"), success},
		"an image of another": {"\x7fELF", invalidImage},
	} {
		t.Run(name, func(t *testing.T) {
			g := start(t)
			log := host(t, page)
			options := []int32{5, 6} // CU_JIT_ERROR_LOG_BUFFER and its size
			values := host(t, page)
			binary.NativeEndian.PutUint64(values[64:], uint64(options[0])|uint64(options[1])<<32)
			binary.NativeEndian.PutUint64(values, uint64(address(log)))
			binary.NativeEndian.PutUint64(values[8:], page)
			g.want(tc.code, "cuModuleLoadDataEx", g.out, address(text(t, tc.text)), 2, address(values)+64, address(values))
			said := binary.NativeEndian.Uint64(values[8:])
			require.Equal(t, tc.code != success && tc.code != invalidImage, said > 0 && said < page)
		})
	}
}

func TestAnEntryHasToBeInPTXAndSource(t *testing.T) {
	ptx, err := os.ReadFile("testdata/test.ptx")
	require.NoError(t, err)
	g := start(t)
	module := g.get("cuModuleLoadDataEx", address(text(t, string(ptx))), 0, 0, 0)
	g.want(notFound, "cuModuleGetFunction", g.out, module, address(text(t, "relu")))
	g.want(notFound, "cuModuleGetFunction", g.out, module, address(text(t, "unknown")))
	require.Empty(t, g.Violations())
	g.want(notFound, "cuModuleGetFunction", g.out, module, address(text(t, "without_twin")))
	g.want(notFound, "cuModuleGetFunction", g.out, module, address(text(t, "orphan")))
	require.Len(t, g.Violations(), 2)
	kernel := g.get("cuModuleGetFunction", module, address(text(t, "sum_u64")))
	g.do("cuModuleUnload", module)
	require.Equal(t, invalidHandle, g.launch(kernel, g.stream(), [3]uintptr{1, 1, 1}, [3]uintptr{1, 1, 1}, 0, 0))
}

func TestAStickyErrorEndsWithTheContext(t *testing.T) {
	g := start(t)
	ctx, stream, memory, event := g.get("cuCtxGetCurrent"), g.stream(), g.memory(page), g.event()
	g.Control("async fail memset 719; hang memset")
	g.do("cuMemsetD8Async", memory, 1, page, stream)
	g.do("cuEventRecord", event, stream)
	g.Control("unhang")
	g.want(launchFailed, "cuStreamSynchronize", stream)
	g.want(launchFailed, "cuDevicePrimaryCtxRetain", g.out, 0)
	g.Control("reset") // as if the process were another
	for _, function := range []string{"cuStreamCreate", "cuMemAlloc_v2", "cuEventQuery", "cuMemFree_v2", "cuStreamDestroy_v2", "cuLaunchKernel"} {
		g.want(launchFailed, function, 0, 0)
	}
	g.do("cuCtxSetCurrent", g.get("cuDevicePrimaryCtxRetain", 1)) // the other device's is well
	g.memory(page)
	g.do("cuDevicePrimaryCtxRelease_v2", 1)

	g.do("cuCtxSetCurrent", ctx)
	g.do("cuDevicePrimaryCtxReset_v2", 0)
	g.want(contextIsDestroyed, "cuMemAlloc_v2", g.out, page)
	require.Zero(t, g.Live())
	g.do("cuCtxSetCurrent", g.get("cuDevicePrimaryCtxRetain", 0))
	g.memory(page)
	g.do("cuDevicePrimaryCtxRelease_v2", 0) // one of two
	g.memory(page)
}

func TestAnErrorThatIsNotStickyIsToldOnce(t *testing.T) {
	g := start(t)
	stream, memory := g.stream(), g.memory(page)
	g.Control("async fail memset 801 after 1 times 1; fail cuEventCreate 2 times 2; fail cuMemAlloc_v2 2 after 1; hang memset")
	for range 3 {
		g.do("cuMemsetD8Async", memory, 1, page, stream)
	}
	g.Control("unhang")
	g.want(notSupported, "cuStreamSynchronize", stream)
	g.do("cuStreamSynchronize", stream)
	require.Equal(t, []string{"memset", "memset"}, kinds(g.Timeline()))
	g.want(outOfMemory, "cuEventCreate", g.out, 0)
	g.want(outOfMemory, "cuEventCreate", g.out, 0)
	g.do("cuEventCreate", g.out, 0)
	g.do("cuMemAlloc_v2", g.out, page)
	g.want(outOfMemory, "cuMemAlloc_v2", g.out, page)
	g.want(outOfMemory, "cuMemAlloc_v2", g.out, page)
}

func TestAStickyErrorOfACallPoisonsToo(t *testing.T) {
	g := start(t)
	g.Control("fail cuEventCreate 999 times 1")
	g.want(999, "cuEventCreate", g.out, 0)
	g.want(999, "cuMemAlloc_v2", g.out, page)
}

func TestTheEndOfAContextEndsWhatHangs(t *testing.T) {
	g := start(t)
	stream, memory := g.stream(), g.memory(page)
	g.Control("hang memset")
	g.do("cuMemsetD8Async", memory, 1, page, stream)
	g.do("cuDevicePrimaryCtxReset_v2", 0)
	require.Zero(t, g.Live())
	g.do("cuCtxSetCurrent", g.get("cuDevicePrimaryCtxRetain", 0))
	stream, memory = g.stream(), g.memory(page)
	g.do("cuMemsetD8Async", memory, 1, page, stream)
	g.Control("sticky 700 device 0")
	g.want(illegalAddress, "cuStreamSynchronize", stream)
	g.do("cuDevicePrimaryCtxRelease_v2", 0) // one of two
}

func TestWhatGivesBackWaitsForTheDevice(t *testing.T) {
	ptx, err := os.ReadFile("testdata/test.ptx")
	require.NoError(t, err)
	for _, function := range []string{"cuMemFree_v2", "cuMemHostUnregister", "cuModuleLoadDataEx", "cuModuleUnload"} {
		t.Run(function, func(t *testing.T) {
			g := start(t)
			stream, memory, image := g.stream(), g.memory(page), address(text(t, string(ptx)))
			args := map[string][]uintptr{
				"cuMemFree_v2": {g.memory(page)}, "cuMemHostUnregister": {address(g.registered(page))},
				"cuModuleLoadDataEx": {g.out, image}, "cuModuleUnload": {g.get("cuModuleLoadDataEx", image)},
			}
			g.Control("delay memset 20000")
			g.do("cuMemsetD8Async", memory, 1, page, stream)
			g.do(function, args[function]...)
			require.Equal(t, []string{"memset"}, kinds(g.Timeline()))
		})
	}
}

func TestWhatIsNotThereOrElsewhereIsAViolation(t *testing.T) {
	g := start(t)
	stream, event, here := g.stream(), g.event(), g.get("cuCtxGetCurrent")
	g.do("cuCtxSetCurrent", g.get("cuDevicePrimaryCtxRetain", 1))
	theirs := g.event()
	g.do("cuCtxSetCurrent", here)
	for i, tc := range []struct {
		code     int
		function string
		args     []uintptr
	}{
		{invalidValue, "cuMemFree_v2", []uintptr{page}},
		{notRegistered, "cuMemHostUnregister", []uintptr{page}},
		{invalidHandle, "cuStreamDestroy_v2", []uintptr{event}},
		{invalidHandle, "cuEventDestroy_v2", []uintptr{stream}},
		{invalidHandle, "cuModuleUnload", []uintptr{stream}},
		{invalidHandle, "cuEventRecord", []uintptr{theirs, stream}},
		{invalidHandle, "cuStreamWaitEvent", []uintptr{stream, theirs}},
		{invalidHandle, "cuEventSynchronize", []uintptr{theirs}},
		{invalidHandle, "cuEventElapsedTime", []uintptr{g.out, event, theirs}},
		{invalidHandle, "cuEventDestroy_v2", []uintptr{theirs}},
	} {
		g.want(tc.code, tc.function, tc.args...)
		require.Len(t, g.Violations(), i+1, tc.function)
		require.Contains(t, g.Violations()[i], tc.function)
	}
	g.do("cuDevicePrimaryCtxRelease_v2", 1) // with an event in it
	require.Contains(t, g.Violations()[10], "1 things were left in the context")
}

func TestAHandleThatIsGoneIsGivenAgain(t *testing.T) {
	g := start(t)
	stream := g.stream()
	g.do("cuStreamDestroy_v2", stream)
	event := g.event()
	require.Equal(t, stream, event)
	g.do("cuEventDestroy_v2", event)
	require.Equal(t, stream, g.stream())
}

func TestAResetHealsIfItIsToldTo(t *testing.T) {
	g := start(t)
	g.Control("heal; sticky 911")
	g.want(911, "cuMemAlloc_v2", g.out, page)
	g.want(911, "cuDevicePrimaryCtxRetain", g.out, 0)
	g.do("cuDevicePrimaryCtxReset_v2", 0)
	g.do("cuCtxSetCurrent", g.get("cuDevicePrimaryCtxRetain", 0))
	g.memory(page)
	g.do("cuDevicePrimaryCtxRelease_v2", 0) // one of two
}

func TestACrashIsOfTheProcess(t *testing.T) {
	if os.Getenv("FAKECUDA") != "" {
		g := &gpu{t: t, Driver: load(t, Build(t, Options{Kernels: "testdata"})), out: address(host(t, page))}
		g.do("cuInit", 0)
		g.call("cuDeviceGetCount", g.out)
		return
	}
	out, err := child(t, "^TestACrashIsOfTheProcess$", "FAKECUDA=crash cuDeviceGetCount")
	require.Error(t, err)
	require.Contains(t, string(out), "SIGABRT")
}

func TestBlocksAndThreadsRunInNoOrder(t *testing.T) {
	g := start(t)
	const blocks, threads = 10, 20
	b := g.registered(page)
	memory, stream, kernel := g.memory(page), g.stream(), g.kernel("order")
	g.do("cuMemcpyHtoDAsync_v2", memory, address(b), page, stream)
	require.Equal(t, success, g.launch(kernel, stream, [3]uintptr{blocks, 1, 1}, [3]uintptr{threads, 1, 1}, uint64(memory)))
	order := unsafe.Slice((*uint64)(pointer(address(g.read(stream, memory, page)))), 1+blocks*threads)[1:]
	require.False(t, slices.IsSorted(order[:threads]), "threads of a block: %v", order)
	var firsts []uint64
	for i := 0; i < len(order); i += threads {
		for _, of := range order[i : i+threads] {
			require.Equal(t, order[i]/threads, of/threads, "blocks run one after the other")
		}
		firsts = append(firsts, order[i]/threads)
	}
	require.False(t, slices.IsSorted(firsts), "blocks: %v", firsts)
	slices.Sort(order)
	for i, of := range order {
		require.EqualValues(t, i, of)
	}
}

func TestAStreamsThreadEndsWithIt(t *testing.T) {
	g := start(t)
	a, b, memory := g.stream(), g.stream(), g.memory(page)
	require.Equal(t, Live{Contexts: 1, Streams: 2, Allocations: 1, Bytes: page, Workers: 2}, g.Live())
	g.do("cuStreamDestroy_v2", a)
	require.Equal(t, 1, g.Live().Workers)
	g.want(invalidHandle, "cuStreamSynchronize", a)
	g.Control("hang memset")
	event := g.event()
	g.do("cuMemsetD8Async", memory, 1, page, b)
	g.do("cuEventRecord", event, b)
	g.do("cuStreamDestroy_v2", b)
	require.Equal(t, 1, g.Live().Workers) // it has work left
	g.Control("unhang")
	g.do("cuEventSynchronize", event)
}

func TestHandlersOfSignalsAreDisturbed(t *testing.T) {
	const onStack = 0x08000000
	flags := func() uint64 {
		var action struct {
			handler  uintptr
			flags    uint64
			restorer uintptr
			mask     uint64
		}
		_, _, errno := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(syscall.SIGTERM), 0, uintptr(unsafe.Pointer(&action)), 8, 0, 0)
		require.Zero(t, errno)
		return action.flags
	}
	g := start(t)
	require.NotZero(t, flags()&onStack)
	g.Control("sigaction")
	g.kernel("relu_words")
	require.Zero(t, flags()&onStack)
	g.Control("reset")
	require.NotZero(t, flags()&onStack)
}

func TestAProgramReadsCommandsFromItsEnvironment(t *testing.T) {
	path := Build(t, Options{Kernels: "testdata"})
	if os.Getenv("FAKECUDA") != "" {
		g := &gpu{t: t, Driver: load(t, path), out: address(host(t, page))}
		g.want(notInitialized, "cuDeviceGetCount", g.out) // no other test was here
		g.do("cuInit", 0)
		require.EqualValues(t, 5, g.get("cuDeviceGetCount"))
		g.want(100, "cuInit", 0)
		return
	}
	out, err := child(t, "^TestAProgramReadsCommandsFromItsEnvironment$", "FAKECUDA=devices 5; fail cuInit 100 after 1")
	require.NoError(t, err, "%s", out)
	out, err = child(t, "^TestAProgramReadsCommandsFromItsEnvironment$", "FAKECUDA=nonsense")
	require.Error(t, err)
	require.Contains(t, string(out), "not understood")
}

func TestBuildsThatNobodyUsesGo(t *testing.T) {
	cache, now := t.TempDir(), time.Now()
	for name, age := range map[string]time.Duration{"fakecuda-old": kept + time.Hour, "fakecuda-new": kept / 2, "fakecuda-used": 2 * kept, "other": 2 * kept} {
		dir := filepath.Join(cache, name)
		require.NoError(t, os.Mkdir(dir, 0o700))
		require.NoError(t, os.Chtimes(dir, now.Add(-age), now.Add(-age)))
	}
	prune(cache, filepath.Join(cache, "fakecuda-used"), now)
	left, err := os.ReadDir(cache)
	require.NoError(t, err)
	var names []string
	for _, entry := range left {
		names = append(names, entry.Name())
	}
	require.Equal(t, []string{"fakecuda-new", "fakecuda-used", "other"}, names)
}

var (
	racing   bool // with the race detector
	sanitize = flag.Bool("sanitize", false, "repeat the tests with Address Sanitizer")
)

func TestAddressSanitizer(t *testing.T) {
	if racing {
		t.Skip("the race detector and Address Sanitizer do not fit into one process")
	}
	if os.Getenv(sanitized) != "" {
		t.Skip("this is the test that sets it")
	}
	if !*sanitize {
		t.Skip("builds the library once more; make cuda runs it")
	}
	Build(t, Options{Kernels: "testdata", Sanitize: true})
	// Go has handlers of its own, and never frees what it has at the end.
	environment := []string{"LD_PRELOAD=" + Preload(t), "ASAN_OPTIONS=detect_leaks=0:handle_segv=0:handle_sigbus=0:handle_sigfpe=0"}
	t.Run("finds nothing in the driver", func(t *testing.T) {
		out, err := child(t, ".", append(environment, sanitized+"=1")...)
		require.NoError(t, err, "%s", out)
	})
	t.Run("finds a kernel that goes too far", func(t *testing.T) {
		out, err := child(t, "^TestAKernelsPointersAreChecked$/^beyond_the_end$", append(environment, sanitized+"=2")...)
		require.Error(t, err)
		require.Contains(t, string(out), "heap-buffer-overflow")
	})
}

// child runs tests in a process of their own.
func child(t *testing.T, tests string, environment ...string) ([]byte, error) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), self, "-test.run="+tests, "-test.count=1", "-test.timeout=5m")
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "GOCOVERDIR=") }), environment...)
	return cmd.CombinedOutput()
}
