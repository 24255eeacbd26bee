//go:build linux && cgo

package fakecuda

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

static int control(void *f, const char *commands) {
	return ((int (*)(const char *))f)(commands);
}

static size_t text(void *f, const char *what, char *buf, size_t n) {
	return ((size_t (*)(const char *, char *, size_t))f)(what, buf, n);
}

// call passes as many arguments as any function takes. The spare ones do no harm.
static int call(void *f, const uintptr_t *a) {
	int (*g)(uintptr_t a0, uintptr_t a1, uintptr_t a2, uintptr_t a3, uintptr_t a4, uintptr_t a5,
		uintptr_t a6, uintptr_t a7, uintptr_t a8, uintptr_t a9, uintptr_t a10) = f;
	return g(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]);
}
*/
import "C"

import (
	"fmt"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// Driver is a loaded library, safe for concurrent use, and one for all who load its path.
type Driver struct {
	t                     testing.TB
	handle, control, text unsafe.Pointer
}

// Op is an operation that a CUDA stream has executed.
type Op struct {
	Device     int
	Stream     int           // in the order in which the context made them, from 1; 0 is the default stream
	Kind       string        // h2d, d2h, memset, record, wait or a kernel's name
	Bytes      int64         // copied or set
	Begin, End time.Duration // since the library was loaded
}

// Live counts what exists.
type Live struct {
	Contexts, Streams, Events, Modules int
	Allocations                        int
	Registered                         int   // ranges of host memory
	Bytes                              int64 // of the allocations
	Workers                            int   // threads of CUDA streams, one that is destroyed and has work left among them
}

// Open loads the library that Build built, and resets it, now and when the test ends.
func Open(t testing.TB, path string) *Driver {
	t.Helper()
	d := load(t, path)
	d.Control("reset")
	t.Cleanup(func() { d.Control("reset") })
	return d
}

func load(t testing.TB, path string) *Driver {
	t.Helper()
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	d := &Driver{t: t, handle: C.dlopen(name, C.RTLD_NOW|C.RTLD_LOCAL)}
	require.NotNil(t, d.handle, "fakecuda: %s", C.GoString(C.dlerror()))
	d.control, d.text = d.symbol("fake_control"), d.symbol("fake_read")
	require.True(t, d.control != nil && d.text != nil, "fakecuda: %s is not the fake driver", path)
	return d
}

// Control gives the driver commands, separated by semicolons:
//
//	fail NAME CODE [after N] [times M]        the function returns CODE, from its call N+1 on, M times or for ever
//	async fail NAME CODE [after N] [times M]  its operations do, when they are executed; the context's next call returns CODE
//	sticky CODE [device N]                    contexts fail with CODE, whichever that is, and no new one is made
//	delay NAME MICROSECONDS                   calls, or operations when they are executed, take longer
//	late MICROSECONDS                         the same for all asynchronous copies
//	hang NAME, unhang [NAME]                  they wait until unhang, reset, or the end of their context
//	crash NAME                                they end the process
//	heal                                      after cuDevicePrimaryCtxReset_v2 a context that failed is made anew
//	memory BYTES, devices N                   per device, of which a context takes 2 MiB; how many, at most 16
//	capability MAJOR MINOR, driver VERSION    of the devices (8 0); as cuDriverGetVersion returns it (12040)
//	refuse-registration [CODE]                cuMemHostRegister_v2 fails, with 801
//	sigaction                                 cuInit and the first module install handlers that harm Go's
//	reset                                     forget all this, the timeline, the violations and errors of contexts; objects stay
//
// A NAME is that of a function; for operations also "copies", "kernels", a kernel's, or
// a kind of Op. To delay or hang a function that enqueues, and not its operation, is call:NAME. Codes that end a context (214, 700, 702, 710, 714 to 719, 999) do so
// however they come up. A program that a test starts reads commands from FAKECUDA.
func (d *Driver) Control(commands string) {
	d.t.Helper()
	c := C.CString(commands)
	defer C.free(unsafe.Pointer(c))
	require.Zero(d.t, C.control(d.control, c), "fakecuda: command not understood: %s", commands)
}

// Timeline returns what was executed without an error, in the order of its end.
func (d *Driver) Timeline() []Op {
	d.t.Helper()
	var ops []Op
	for _, line := range d.read("timeline") {
		var op Op
		_, err := fmt.Sscan(line, &op.Device, &op.Stream, &op.Kind, &op.Bytes, (*int64)(&op.Begin), (*int64)(&op.End))
		require.NoError(d.t, err, "fakecuda: timeline: %q", line)
		ops = append(ops, op)
	}
	return ops
}

// Live returns what exists now, in all contexts.
func (d *Driver) Live() Live {
	d.t.Helper()
	var l Live
	text := strings.Join(d.read("live"), "")
	_, err := fmt.Sscan(text, &l.Contexts, &l.Streams, &l.Events, &l.Modules, &l.Allocations, &l.Registered, &l.Bytes, &l.Workers)
	require.NoError(d.t, err, "fakecuda: live: %q", text)
	return l
}

// Violations returns what a device would not survive, or only by luck, a sentence each.
func (d *Driver) Violations() []string {
	d.t.Helper()
	return d.read("violations")
}

// Flags returns the flags that contexts, CUDA streams, events and host memory were given: each
// call's name and its flags once, in the order of their text.
func (d *Driver) Flags() []string {
	d.t.Helper()
	return d.read("flags")
}

func (d *Driver) read(what string) []string {
	name := C.CString(what)
	defer C.free(unsafe.Pointer(name))
	for size := C.size_t(4096); ; {
		buf := (*C.char)(C.malloc(size))
		n := C.text(d.text, name, buf, size)
		text := C.GoString(buf)
		C.free(unsafe.Pointer(buf))
		if n < size {
			return strings.FieldsFunc(text, func(r rune) bool { return r == '\n' })
		}
		size = n + 4096 // it may have grown again
	}
}

// symbol returns nil when the library has none of that name.
func (d *Driver) symbol(name string) unsafe.Pointer {
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	return C.dlsym(d.handle, c)
}

// call calls a function of the driver's API. Addresses among the arguments must not be Go's.
func (d *Driver) call(function string, args ...uintptr) int {
	d.t.Helper()
	f := d.symbol(function)
	require.NotNil(d.t, f, "fakecuda: no function %s", function)
	var all [11]C.uintptr_t
	for i, a := range args {
		all[i] = C.uintptr_t(a)
	}
	return int(C.call(f, &all[0]))
}
