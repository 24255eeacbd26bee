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

// Input is a tensor to send: an input of a call, or a tensor to push. Its bytes are in
// Data, or come from Reader or Next.
type Input struct {
	// Port is the name of the model's input. It may be empty if there is only one.
	Port string
	tensor.Desc
	// Data is shared with the library, read-only, until the call has ended.
	Data []byte
	// Reader, if not nil, supplies the tensor's bytes. A goroutine that ends with the call
	// reads a few chunks ahead.
	Reader io.Reader
	// Next, if not nil, returns the tensor's bytes in order, in pieces that are shared
	// until release is called and that are sent without a copy. It must return when over is
	// closed, because the call has ended. It must be able to return 8 chunks before the
	// first of them is released. Push does not support it.
	Next func(over <-chan struct{}) (data []byte, release func(), err error)
	// Name and Metadata are for people; see docs/limits.md for their limits. Push stores
	// the tensor under Name.
	Name     string
	Metadata map[string]string
	// Release, if not nil, is called once, when Data is no longer used.
	Release func()
}

// From returns an Input for a tensor, whose bytes it shares.
func From(port string, t tensor.Tensor) Input { return Input{Port: port, Desc: t.Desc, Data: t.Data} }

// FromReader returns an Input whose bytes come from r.
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

// streamed reports whether the bytes come from Reader or Next.
func (in *Input) streamed() bool { return in.Reader != nil || in.Next != nil }

// feed sends an input of a call.
type feed struct {
	call  *Call
	in    Input
	id    tensor.ID
	size  int64
	chunk int64
	free  chan *slot // to read into
	rest  *restClock // nil unless streamed
	made  int        // number of slots

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
	// Wait must not return before gRPC has stopped reading the input.
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

// slot is reusable memory that a part of the input is read into.
type slot struct {
	slab    *slab.Slab
	release func() // returns it to its feed; allocated once
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
	<-c.closed // acknowledgements return the slots, or the end of the call does
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
		// Read may block; the end of the call is noticed only when it returns.
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

// pass offers the pieces from Next without copying them.
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

// take returns a slot to read into, or nil when the call is over.
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

// recycle takes back a slot that gRPC no longer reads.
func (f *feed) recycle(s *slot) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.over {
		s.slab.Release()
		return
	}
	f.free <- s // never more than slots
}
