package client

import (
	"fmt"
	"io"
	"sync"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// Input is one tensor that goes into a call: its bytes lie in Data, or come from
// Reader or Next.
type Input struct {
	// Port is the model's input; empty for the only one.
	Port string
	tensor.Desc
	// Data is shared with the library until the call has ended, read-only.
	Data []byte
	// Reader, when not nil, yields the tensor's bytes; a goroutine that ends with the
	// call reads a few chunks ahead.
	Reader io.Reader
	// Next, when not nil, yields the tensor's bytes in order, in pieces that are shared
	// until release and sent without a copy. It returns when over is closed, the call
	// having ended. It must be able to yield 8 chunks before any of them is released.
	// Only calls take it.
	Next func(over <-chan struct{}) (data []byte, release func(), err error)
	// Name and Metadata are for people; docs/limits.md has their sizes.
	Name     string
	Metadata map[string]string
	// Release, when not nil, runs once when Data is no longer used.
	Release func()
}

// From makes an input of a tensor, whose bytes it shares.
func From(port string, t tensor.Tensor) Input { return Input{Port: port, Desc: t.Desc, Data: t.Data} }

// FromReader makes an input of the bytes that r yields.
func FromReader(port string, d tensor.Desc, r io.Reader) Input {
	return Input{Port: port, Desc: d, Reader: r}
}

// check returns how many bytes the input has.
func (in *Input) check() (int64, error) {
	n, err := in.Bytes()
	if err != nil {
		return 0, fmt.Errorf("%w: input %q: %w", ErrInput, in.Port, err)
	}
	if !in.streamed() && int64(len(in.Data)) != n {
		return 0, fmt.Errorf("%w: input %q: %v needs %d bytes, got %d", ErrInput, in.Port, in.Desc, n, len(in.Data))
	}
	return n, nil
}

// streamed reports whether the bytes come little by little.
func (in *Input) streamed() bool { return in.Reader != nil || in.Next != nil }

// feed is an input on its way into a call.
type feed struct {
	call  *Call
	in    Input
	id    tensor.ID
	size  int64
	chunk int64
	free  chan *slot // slots to read into
	rest  *restClock // of one that is streamed
	made  int        // slots

	mu   sync.Mutex
	over bool // guarded by mu
}

// open announces the input; the session is locked.
func (f *feed) open(m *stream.Machine, now stream.Instant) error {
	f.chunk = tensor.ChunkFor(f.in.Desc, m.Status().PeerChunkBytes)
	if f.size/f.chunk >= tensor.MaxChunks {
		f.chunk = m.Status().PeerChunkBytes
	}
	d := frame.Desc{
		Tensor: f.id, Desc: f.in.Desc.Clone(), ChunkBytes: uint32(f.chunk), Call: f.call.id, Port: f.in.Port,
		Name: f.in.Name, Metadata: f.in.Metadata,
	}
	if f.in.streamed() {
		d.RetainChunks = slots
		f.rest = f.call.rests(m, named("input", f.in.Port))
	}
	if err := m.OpenTensor(now, d); err != nil || f.in.streamed() {
		return err
	}
	// The call is over for its caller only when grpc reads its inputs no more.
	f.call.shared.Add(1)
	call, release := f.call, f.in.Release
	if err := m.Offer(now, f.id, 0, f.in.Data, func() {
		if release != nil {
			release()
		}
		call.returned()
	}); err != nil {
		f.call.shared.Add(-1)
		return err
	}
	return nil
}

// slot is memory that a part of the input is read into, again and again.
type slot struct {
	slab    *slab.Slab
	release func() // gives it back to its feed; made once
}

// run reads the input into slots and offers them. It ends with the last byte or
// with the call.
func (f *feed) run() {
	c := f.call
	defer c.returned()
	defer c.feeding.Done()
	defer f.rest.end()
	f.free = make(chan *slot, slots)
	pump := f.pump
	if f.in.Next != nil {
		pump = f.pass
	}
	if err := pump(); err != nil {
		c.stop(err)
	}
	<-c.closed // the slots come home with acknowledgements, or now
	f.mu.Lock()
	defer f.mu.Unlock()
	f.over = true
	for len(f.free) > 0 {
		(<-f.free).slab.Release()
	}
}

func (f *feed) pump() error {
	c := f.call
	for off, more := int64(0), true; more; more = off < f.size {
		n := min(f.chunk, f.size-off)
		s, err := f.take()
		if s == nil {
			return err // nil: the call is over
		}
		data := s.slab.Bytes()[:n]
		// The reader may block; the end of the call is seen after it.
		f.rest.start()
		got, err := io.ReadFull(f.in.Reader, data)
		f.rest.stop()
		if err != nil {
			s.slab.Release()
			return fmt.Errorf("%w: input %q ended after %d of %d bytes: %w", ErrInput, f.in.Port, off+int64(got), f.size, err)
		}
		c.session.sess.Do(func(m *stream.Machine, now stream.Instant) {
			err = m.Offer(now, f.id, off, data, s.release)
		})
		if err != nil {
			s.slab.Release()
			return nil // the call is over
		}
		off += n
	}
	return nil
}

// pass offers the pieces of Next as they are.
func (f *feed) pass() error {
	c := f.call
	for off, more := int64(0), true; more; more = off < f.size {
		f.rest.start()
		data, release, err := f.in.Next(c.closed)
		f.rest.stop()
		if err != nil {
			return fmt.Errorf("%w: input %q ended after %d of %d bytes: %w", ErrInput, f.in.Port, off, f.size, err)
		}
		c.shared.Add(1)
		done := func() {
			release()
			c.returned()
		}
		c.session.sess.Do(func(m *stream.Machine, now stream.Instant) { err = m.Offer(now, f.id, off, data, done) })
		if err != nil {
			done()
			return nil // the call is over
		}
		off += int64(len(data))
	}
	return nil
}

// take returns a slot to read into, nil when the call is over.
func (f *feed) take() (*slot, error) {
	if f.made < slots && len(f.free) == 0 {
		f.made++
		mem, err := f.call.session.client.pool.Get(int(f.chunk))
		if err != nil {
			return nil, fmt.Errorf("client: input %q: %w", f.in.Port, err)
		}
		s := &slot{slab: mem}
		s.release = func() { f.recycle(s) }
		return s, nil
	}
	select {
	case s := <-f.free:
		return s, nil
	case <-f.call.closed:
		return nil, nil
	}
}

// recycle takes back a slot that is no longer read.
func (f *feed) recycle(s *slot) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.over {
		s.slab.Release()
		return
	}
	f.free <- s // never more than slots
}
