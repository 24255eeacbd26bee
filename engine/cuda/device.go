//go:build linux && cgo

package cuda

// #include <stdlib.h>
// #include "driver.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"time"
	"unsafe"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/engine/cuda/kernels"
)

// device computes blocks. Three goroutines feed it: the submitter, which alone changes the
// context and has blocks copied and computed; one that waits for inputs to be on the
// device; and one that waits for results. A block passes them in this order, on a lane.
// They are not locked to threads, since every call into C sets its thread's context first:
// a goroutine that has a thread of its own wakes late, and while many callers wait for mu,
// 64 of them did no more calls together than one alone (H200, November 2026).
type device struct {
	*driver
	hang, closing time.Duration
	tell          func() // that it is lost
	c             *C.tf_device
	pinned        *pinned
	engine        *blocks.Engine

	// The submitter's.
	kernels map[reflect.Type]C.tf_launch // by the type of their launches, which this begins
	weights map[*weights]struct{}

	uploaded, computed chan *lane // have room for all
	all                sync.WaitGroup

	mu     sync.Mutex // guards all below; held while the engine hears how the device is
	more   sync.Cond  // for the submitter: there may be something to do
	queue  blocks.Queue
	asked  []func()
	asking bool // the submitter is at what was asked
	idle   []*lane
	dead   error         // why the context is, for as long as the process lives; nil while it lives
	watch  *blocks.Watch // for the next end of a block, or of what is asked
	closed bool
}

// lane carries one block at a time through the device.
type lane struct {
	device *device
	list   []C.tf_launch // what the block launches; the submitter's
	c      *C.tf_lane
	work   *blocks.Work
	dirty  error // why the block failed
}

func newDevice(d *driver, c Config, about Device) (*device, error) {
	v := &device{
		driver: d, hang: c.Hang, closing: c.closing, tell: c.Lost, weights: make(map[*weights]struct{}),
		c:        (*C.tf_device)(C.calloc(1, C.sizeof_tf_device)),
		uploaded: make(chan *lane, lanes), computed: make(chan *lane, lanes),
	}
	v.c.driver, v.c.ordinal = d.c, C.CUdevice(c.Device)
	v.more.L = &v.mu
	v.pinned = &pinned{driver: d, dev: v.c, most: c.PinnedBytes}
	for range lanes {
		v.idle = append(v.idle, &lane{device: v, c: (*C.tf_lane)(C.calloc(1, C.sizeof_tf_lane))})
	}
	v.watch = blocks.NewWatch(v.overdue)
	err := v.start()
	if err == nil {
		err = v.pinned.begin()
	}
	if err != nil {
		v.stop()
		v.free()
		return nil, err
	}
	d.log.Info("device found", slog.String("device", about.Name), slog.Int64("bytes", about.Memory),
		slog.String("capability", fmt.Sprintf("%d.%d", about.Major, about.Minor)))
	return v, nil
}

// free frees what is C's.
func (v *device) free() {
	for _, l := range v.idle {
		C.free(unsafe.Pointer(l.c))
	}
	C.free(unsafe.Pointer(v.c))
}

// start makes a context with everything that blocks need in it but weights.
func (v *device) start() error {
	err := v.guarded(func() error {
		err := v.failed(C.tf_start(v.c))
		if err == nil {
			err = v.load()
		}
		return err
	})
	for _, l := range v.idle {
		if err == nil {
			err = v.failed(C.tf_lane_open(v.c, l.c))
		}
	}
	return err
}

// load loads the first image of the kernels that the device takes.
func (v *device) load() error {
	var all error
	for _, image := range kernels.Images() {
		ptx := C.CString(string(image.PTX))
		text := (*C.char)(C.calloc(textBytes, 1))
		err := v.failed(C.tf_load(v.c, ptx, text, textBytes-1))
		says := C.GoString(text)
		C.free(unsafe.Pointer(ptx))
		C.free(unsafe.Pointer(text))
		if err == nil {
			return v.find(image)
		}
		all = errors.Join(all, fmt.Errorf("image %s: %w %s", image.Name, err, says))
		if r, ok := errors.AsType[*resultError](err); !ok || !otherImage[r.code] {
			break
		}
	}
	return all
}

// find finds the kernels of an image.
func (v *device) find(image kernels.Image) error {
	v.kernels = make(map[reflect.Type]C.tf_launch)
	for entry, launch := range kernels.All() {
		name := C.CString(entry)
		var f C.CUfunction
		err := v.failed(C.tf_function(v.c, name, &f))
		C.free(unsafe.Pointer(name))
		if err != nil {
			return fmt.Errorf("image %s, kernel %s: %w", image.Name, entry, err)
		}
		t := reflect.TypeOf(launch)
		v.kernels[t] = empty(f, t)
	}
	return nil
}

// stop gives back what start took.
func (v *device) stop() {
	for _, l := range v.idle {
		C.tf_lane_close(v.c, l.c)
	}
	for w := range v.weights {
		w.free(v)
	}
	v.pinned.close(func() { C.tf_stop(v.c) })
}

// run starts the goroutines, which end with close.
func (v *device) run(e *blocks.Engine) {
	v.engine = e
	v.all.Go(v.submit)
	v.all.Go(v.freeInputs)
	v.all.Go(v.finish)
}

// Start implements blocks.Device.
func (v *device) Start(w *blocks.Work) {
	v.mu.Lock()
	if v.closed || w.Context().Err() != nil {
		v.mu.Unlock()
		w.End(engine.ErrClosed)
		return
	}
	defer v.mu.Unlock()
	v.queue.Push(w)
	v.more.Signal()
}

// Cancel implements blocks.Canceler.
func (v *device) Cancel(run context.Context) {
	var over blocks.Queue
	v.mu.Lock()
	v.queue.Take(run, &over)
	v.mu.Unlock()
	over.End(nil)
}

// ask has the submitter do something between two blocks, and waits for it, with a
// device that hangs not for long. Do gets why the context is dead, nil while it lives.
// Errors of the driver wrap engine.ErrUnavailable.
func (v *device) ask(do func(dead error) error) error {
	answer := make(chan error, 1)
	v.mu.Lock()
	if v.closed {
		v.mu.Unlock()
		return engine.ErrClosed
	}
	v.asked = append(v.asked, func() {
		err := do(v.died())
		v.check(err)
		answer <- err
	})
	v.more.Signal()
	v.mu.Unlock()
	for {
		select {
		case err := <-answer:
			if err != nil {
				err = fmt.Errorf("%w: %w", engine.ErrUnavailable, err)
			}
			return err
		case <-time.After(v.closing):
			if v.engine.State() != blocks.Alive { // it hangs, or its reset does
				return fmt.Errorf("%w: cuda: the device does not answer", engine.ErrUnavailable)
			}
		}
	}
}

// died is why the context is dead, nil while it lives.
func (v *device) died() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.dead
}

// check looks whether an error of the driver means that the context is dead: it asks
// the driver something that a living one answers.
func (v *device) check(err error) {
	r, ok := errors.AsType[*resultError](err)
	if !ok || v.died() != nil {
		return
	}
	if !sticky[r.code] && r.call != "cuStreamSynchronize" {
		var left, total C.size_t
		if v.failed(C.tf_memory(v.c, &left, &total)) == nil {
			return
		}
	}
	v.die(err)
}

// die notes that the context is dead. The first cause stands.
func (v *device) die(cause error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.dead == nil {
		v.dead = cause
		v.more.Signal()
	}
}

// submit is the submitter.
func (v *device) submit() {
	defer close(v.uploaded)
	for {
		v.mu.Lock()
		waiting, resting := v.queue.Head() != nil, len(v.idle) == lanes
		switch {
		case len(v.asked) > 0:
			asked := v.asked
			v.asked, v.asking = nil, true
			v.progress()
			v.mu.Unlock()
			for _, do := range asked {
				do()
			}
			v.mu.Lock()
			v.asking = false
			v.progress()
			v.mu.Unlock()
		case v.closed && waiting:
			rest := v.queue
			v.queue = blocks.Queue{}
			v.mu.Unlock()
			rest.End(engine.ErrClosed)
		case v.closed && resting:
			v.mu.Unlock()
			if v.died() != nil && v.engine.State() != blocks.Lost {
				v.lose()
			}
			v.stop()
			return
		case !v.closed && v.dead != nil && resting && v.engine.State() != blocks.Lost:
			v.mu.Unlock()
			v.lose()
		case !v.closed && v.dead == nil && waiting && len(v.idle) > 0:
			w, l := v.queue.Pop(), v.idle[len(v.idle)-1]
			v.idle = v.idle[:len(v.idle)-1]
			v.progress()
			v.mu.Unlock()
			l.work, l.dirty = w, v.enqueue(l, w)
			v.uploaded <- l
		default:
			v.more.Wait()
			v.mu.Unlock()
		}
	}
}

// busy is how many blocks are on the device.
func (v *device) busy() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return lanes - len(v.idle)
}

// progress says that a lane has become busy or idle, or something asked has begun or
// ended: a device that hung may be back; mu is held.
func (v *device) progress() {
	v.watch.Clear()
	switch {
	case v.asking || len(v.idle) < lanes:
		v.watch.Set(time.Now().Add(v.hang))
	case v.dead == nil && v.engine.Back():
		v.log.Warn("device answers again")
	}
}

// overdue is called when there has been no progress for too long.
func (v *device) overdue() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.watch.Late() {
		return
	}
	err := fmt.Errorf("cuda: no answer for %v, with %d blocks on the device", v.hang, lanes-len(v.idle))
	v.log.Error("device hangs; restart the process if it does not come back", slog.Any("cause", err))
	v.engine.Hung(err)
}

// enqueue has the driver take a block through the lane.
func (v *device) enqueue(l *lane, w *blocks.Work) error {
	if err := context.Cause(w.Context()); err != nil {
		return err
	}
	p := w.Program.(*program)
	if p.check != nil {
		if err := p.check(w); err != nil {
			return err
		}
	}
	in, out := w.In[0], w.Out[0]
	bytes := int64(len(in))
	if p.memory != nil {
		bytes = max(bytes, p.memory(w.Rows))
	}
	bytes = (max(bytes, int64(len(out)), 1) + laneUnit - 1) / laneUnit * laneUnit
	if err := v.roomy(func() error { return v.failed(C.tf_lane_grow(v.c, l.c, C.size_t(bytes))) }); err != nil {
		v.check(err)
		return fmt.Errorf("%d bytes of device memory for a block: %w", bytes, err)
	}
	x := kernels.Address(l.c.memory)
	l.list = l.list[:0]
	y := x
	if p.launch != nil {
		y = p.launch(l, w.Rows, int64(len(in)), x)
	}
	b := C.tf_block{out: pointer(out), out_bytes: C.size_t(len(out)), out_at: C.size_t(y - x)}
	for i, in := range w.In {
		b.in[i] = C.tf_input{from: pointer(in), bytes: C.size_t(len(in))}
		if i > 0 {
			b.in[i].at = C.size_t(p.second(w.Rows))
		}
	}
	if p.begun%timedEvery == 0 {
		b.timed = 1
	}
	p.begun++
	err := v.failed(C.tf_submit(v.c, l.c, &b, unsafe.SliceData(l.list), C.unsigned(len(l.list))))
	v.check(err)
	return err
}

// add appends a launch of a kernel, whose parameters it copies.
func add[K kernels.Launch](l *lane, k K) {
	l.list = append(l.list, l.device.kernels[reflect.TypeFor[K]()])
	c := &l.list[len(l.list)-1]
	grid, block := k.Grid()
	for i := range 3 {
		c.grid[i], c.block[i] = C.unsigned(grid[i]), C.unsigned(block[i])
	}
	*(*K)(unsafe.Pointer(&c.bytes)) = k
}

// empty is a launch without parameters. It says where they go: Go lays them out as C does.
func empty(f C.CUfunction, t reflect.Type) C.tf_launch {
	if t.NumField() > C.TF_PARAMS || t.Size() > C.TF_PARAM_BYTES {
		panic("cuda: kernel " + t.Name() + " has more parameters than a launch has room for")
	}
	l := C.tf_launch{function: f, params: C.unsigned(t.NumField())}
	for i := range t.NumField() {
		l.offsets[i] = C.unsigned(t.Field(i).Offset)
	}
	return l
}

// roomy takes device memory, that of other lanes if there is no more.
func (v *device) roomy(take func() error) error {
	for {
		err := take()
		if r, ok := errors.AsType[*resultError](err); !ok || r.code != outOfMemory || !v.trim() {
			return err
		}
	}
}

// trim frees what idle lanes keep, or the next to be idle, and reports whether that was any.
func (v *device) trim() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	others := lanes - 1
	if v.asking {
		others = lanes
	}
	for {
		for _, l := range v.idle {
			if l.c.bytes > 0 { // an idle lane is the submitter's
				v.mu.Unlock() // a free waits for every kernel on the device
				_ = C.tf_free(v.c, l.c.memory)
				v.mu.Lock()
				l.c.bytes = 0
				return true
			}
		}
		if len(v.idle) >= others {
			return false
		}
		v.more.Wait()
	}
}

// pointer is that of memory outside the Go heap; empty memory may lie in it.
func pointer(data []byte) unsafe.Pointer {
	if len(data) == 0 {
		return nil
	}
	return unsafe.Pointer(unsafe.SliceData(data))
}

// wait waits for an event of a lane. An error is the block's from then on, and the
// context's end: nobody knows what still touches the block's memory.
func (v *device) wait(l *lane, event C.int) {
	if l.dirty != nil {
		return
	}
	if l.dirty = v.failed(C.tf_wait(v.c, l.c, event)); l.dirty != nil {
		v.die(l.dirty)
	}
}

// freeInputs says which inputs are on the device.
func (v *device) freeInputs() {
	defer close(v.computed)
	for l := range v.uploaded {
		if v.wait(l, C.TF_IN_END); l.dirty == nil {
			l.work.InputFree()
		}
		v.computed <- l
	}
}

// finish ends blocks.
func (v *device) finish() {
	for l := range v.computed {
		v.wait(l, C.TF_OUT_END)
		p := l.work.Program.(*program)
		if l.dirty == nil && l.c.timed != 0 {
			var ms [3]C.float
			l.dirty = v.failed(C.tf_times(v.c, l.c, &ms[0]))
			v.check(l.dirty)
			p.times = blocks.Times{H2D: duration(ms[0]), Compute: duration(ms[1]), D2H: duration(ms[2])}
		}
		w, err := l.work, l.dirty
		l.work = nil
		// A dead context may still write to the block's memory, until it is reset: the
		// block then ends with the device, which is lost.
		v.mu.Lock()
		if v.dead == nil {
			v.mu.Unlock()
			w.Done(err, p.times)
			v.mu.Lock()
		}
		v.idle = append(v.idle, l)
		v.progress()
		v.more.Signal()
		v.mu.Unlock()
	}
}

func duration(millis C.float) time.Duration {
	return time.Duration(float64(millis) * float64(time.Millisecond))
}

// lose ends a dead context, and every run. No lane is in use. What the process asks the
// driver for afterwards fails with the error that killed the context, a new one too, whatever
// is reset, destroyed or released before: so NVIDIA says, and so R580 does.
func (v *device) lose() {
	cause := fmt.Errorf("%w; restart the process", v.died())
	v.log.Error("device lost; restart the process", slog.Any("cause", v.died()))
	v.mu.Lock()
	v.engine.Hung(cause) // should the reset hang
	v.mu.Unlock()
	v.tell()
	v.pinned.end(v.reset)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.queue = blocks.Queue{} // the engine takes them back
	v.engine.Lost(cause)
}

// reset ends the context, and with it what lanes and weights have there.
func (v *device) reset() {
	C.tf_reset(v.c)
	for _, l := range v.idle {
		*l.c = C.tf_lane{}
	}
	for w := range v.weights {
		w.at = 0
	}
}

// close ends everything, and returns when it has.
func (v *device) close() {
	v.mu.Lock()
	if v.closed {
		v.mu.Unlock()
		return
	}
	v.closed = true
	v.more.Signal()
	v.mu.Unlock()
	ended := make(chan struct{})
	go func() { // ends with the three
		v.all.Wait()
		v.free()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(v.closing):
		v.log.Error("device does not end its blocks; what they use is left to it")
	}
}
