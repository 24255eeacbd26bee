//go:build linux && cgo

package cuda

// #cgo LDFLAGS: -ldl
// #include <stdlib.h>
// #include "driver.h"
import "C"

import (
	"cmp"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/tensorferry/tensorferry/engine"
)

// driver is an opened library.
type driver struct {
	c   *C.tf_driver
	log *slog.Logger
}

// opened are the libraries that this process has opened: none is ever closed.
var opened = struct {
	sync.Mutex
	byName map[string]*C.tf_driver
}{byName: make(map[string]*C.tf_driver)}

// bounded returns what open does, which it runs in a goroutine that ends with it: a driver may
// hang. It waits for openHangs times hang; a result that comes later is passed to undo.
func bounded[T any](hang time.Duration, open func() (T, error), undo func(T)) (T, error) {
	type result struct {
		of  T
		err error
	}
	in, late := make(chan result), make(chan struct{})
	go func() {
		of, err := open()
		select {
		case in <- result{of, err}:
		case <-late:
			if err == nil {
				undo(of)
			}
		}
	}()
	select {
	case r := <-in:
		return r.of, r.err
	case <-time.After(openHangs * hang):
		close(late)
		var none T
		return none, fmt.Errorf("%w: cuda: the driver has not answered for %v; see whether nvidia-smi does", engine.ErrUnavailable, openHangs*hang)
	}
}

// libraries are where the driver is looked for: what NVIDIA's installs, and where container runtimes
// mount it that do not tell the linker.
var libraries = []string{"libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1"}

// openDriver opens the first library that there is, and counts devices. Errors wrap
// engine.ErrUnavailable, and say why the first library is not.
func openDriver(c Config) (d *driver, devices, version int, err error) {
	all := libraries
	if c.Library != "" {
		all = []string{c.Library}
	}
	for _, library := range all {
		d, bad := openLibrary(library, c.Log)
		if bad == nil {
			devices, version, err = d.count()
			return d, devices, version, err
		}
		err = cmp.Or(err, bad)
	}
	return nil, 0, 0, err
}

func openLibrary(library string, log *slog.Logger) (*driver, error) {
	opened.Lock()
	defer opened.Unlock()
	d := &driver{opened.byName[library], log}
	if d.c != nil {
		return d, nil
	}
	name := C.CString(library)
	defer C.free(unsafe.Pointer(name))
	why := (*C.char)(C.malloc(textBytes))
	defer C.free(unsafe.Pointer(why))
	if d.c = C.tf_open(name, why, textBytes); d.c == nil {
		text := C.GoString(why)
		if library == libraries[0] && strings.Contains(text, "cannot open shared object file: No such file") {
			text = library + " is not installed here"
		}
		return nil, fmt.Errorf("%w: no NVIDIA driver: %s", engine.ErrUnavailable, text)
	}
	opened.byName[library] = d.c
	return d, nil
}

// count is the number of devices, and the driver's version.
func (d *driver) count() (devices, version int, err error) {
	var n, v C.int
	err = d.guarded(func() error { return d.failed(C.tf_count(d.c, &n, &v)) })
	if err == nil && n == 0 {
		err = fmt.Errorf("cuda: the driver has no device")
	}
	if err != nil {
		return 0, 0, fmt.Errorf("%w: %w", engine.ErrUnavailable, err)
	}
	return int(n), int(v), nil
}

// guarding is held while handlers of signals may be replaced.
var guarding sync.Mutex

// guarded runs do, and puts back handlers of signals that the library has replaced.
func (d *driver) guarded(do func() error) error {
	guarding.Lock()
	defer guarding.Unlock()
	C.tf_signals_keep()
	err := do()
	if n := C.tf_signals_restore(); n > 0 {
		d.log.Debug("handlers of signals restored", slog.Int("signals", int(n)))
	}
	return err
}

// describe describes a device.
func (d *driver) describe(i, version int) (Device, error) {
	name := (*C.char)(C.calloc(textBytes, 1))
	defer C.free(unsafe.Pointer(name))
	var memory C.size_t
	var major, minor C.int
	err := d.failed(C.tf_describe(d.c, C.int(i), name, textBytes, &memory, &major, &minor))
	if err != nil {
		return Device{}, fmt.Errorf("%w: device cuda:%d: %w", engine.ErrUnavailable, i, err)
	}
	return Device{C.GoString(name), int64(memory), int(major), int(minor), version}, nil
}

// Devices opens a driver and describes its devices, one or more. Of c it reads Library, Hang,
// four times which it waits at most, and Log. Errors wrap engine.ErrUnavailable.
func Devices(c Config) ([]Device, error) {
	c.setDefaults()
	return bounded(c.Hang, func() ([]Device, error) {
		d, n, version, err := openDriver(c)
		if err != nil {
			return nil, err
		}
		all := make([]Device, n)
		for i := range all {
			if all[i], err = d.describe(i, version); err != nil {
				return nil, err
			}
		}
		return all, nil
	}, func([]Device) {})
}

// resultError is a call of the driver that failed.
type resultError struct {
	call string
	code int
	text string
}

func (e *resultError) Error() string { return fmt.Sprintf("cuda: %s: %s", e.call, e.text) }

// failed makes an error of a result, nil if it went well.
func (d *driver) failed(r C.tf_result) error {
	if r.code == C.CUDA_SUCCESS {
		return nil
	}
	text := (*C.char)(C.malloc(textBytes))
	defer C.free(unsafe.Pointer(text))
	C.tf_text(d.c, r.code, text, textBytes)
	return &resultError{"cu" + C.GoString(r.call), int(r.code), C.GoString(text)}
}

// outOfMemory is the code after which memory of other lanes may do.
const outOfMemory = 2

// otherImage are the codes after which another image may: this one is none, or not for the
// device, or its PTX is wrong or not known.
var otherImage = map[int]bool{200: true, 209: true, 218: true, 222: true}

// sticky are the codes after which a context is dead: no call or result of it is any good.
var sticky = map[int]bool{
	4: true, 201: true, 709: true, 810: true, // the driver shuts down, the context or the client is gone
	214: true, 220: true, 226: true, 714: true, // memory, the link, the device or its stack failed
	700: true, 702: true, 710: true, 719: true, // a kernel used a bad address, took too long, asserted, or failed
	715: true, 716: true, 717: true, 718: true, // its instruction, alignment, address space or counter was wrong
	721: true, 999: true, // memory leaked, and what nobody knows
}
