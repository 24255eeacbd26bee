package client

import (
	"errors"
	"fmt"
	"io"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/session"
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

// source reads a tensor from a Reader.
type source struct {
	io.Reader
	client *Client
	rest   *restClock
	what   string // "input", for example, and its name
	size   int64
}

// view reads bytes [off, off+n), the next ones, and hands over what holds them.
func (s *source) view(off, n int64) ([]byte, interface{ Release() }, error) {
	mem, err := s.client.pool.Get(int(n))
	if err != nil {
		return nil, nil, fmt.Errorf("client: %s: %w", s.what, err)
	}
	// Read may block; the end of the call is noticed only when it returns.
	s.rest.start()
	got, err := io.ReadFull(s.Reader, mem.Bytes())
	s.rest.stop()
	if err != nil {
		mem.Release()
		return nil, nil, fmt.Errorf("%w: %s ended after %d of %d bytes: %w", ErrInput, s.what, off+int64(got), s.size, err)
	}
	return mem.Bytes(), mem, nil
}

// feed sends an input of a call.
type feed struct {
	call *run
	in   Input
	id   tensor.ID
	geo  tensor.Geometry // once it is open
}

// open announces the input, and offers Data; the session is locked.
func (f *feed) open(m *stream.Machine, now stream.Instant) error {
	var err error
	if f.geo, err = f.call.session.geometry(m, f.in.Desc); err != nil {
		return err
	}
	d := frame.Desc{
		Tensor: f.id, Desc: f.in.Desc.Clone(), ChunkBytes: uint32(f.geo.ChunkBytes), Call: f.call.id, Port: f.in.Port,
		Name: f.in.Name, Metadata: f.in.Metadata,
	}
	if f.in.streamed() {
		d.RetainChunks = slots
	}
	if err := m.OpenTensor(now, d); err != nil || f.in.streamed() {
		return err
	}
	return f.offer(m, now, 0, f.in.Data, f.in.Release)
}

// offer offers data, which the call uses until gRPC has stopped reading it; the session is
// locked.
func (f *feed) offer(m *stream.Machine, now stream.Instant, off int64, data []byte, release func()) error {
	using := &f.call.using
	using.Add(1)
	err := m.Offer(now, f.id, off, data, func() {
		if release != nil {
			release()
		}
		using.Done()
	})
	if err != nil {
		using.Done()
	}
	return err
}

// run reads the input and offers it. It ends with the last byte or with the call.
func (f *feed) run() {
	c := f.call
	rest := c.rests("input", f.in.Port)
	defer rest.end()
	if f.in.Next != nil {
		f.pass(rest)
		return
	}
	from := source{f.in.Reader, c.session.client, rest, fmt.Sprintf("input %q", f.in.Port), f.geo.Size}
	feed := session.Feed{Session: c.session.sess, View: from.view, Pieces: slots, Plain: true}
	_, err := feed.Send(c.ctx, f.id, f.geo)
	if own, ok := errors.AsType[*session.SourceError](err); ok {
		c.stop(own.Err)
	}
	<-c.ctx.Done()
}

// pass offers the pieces from Next without copying them.
func (f *feed) pass(rest *restClock) {
	c := f.call
	for off, more := int64(0), true; more; more = off < f.geo.Size {
		rest.start()
		data, release, err := f.in.Next(c.ctx.Done())
		rest.stop()
		if err != nil {
			c.stop(fmt.Errorf("%w: input %q ended after %d of %d bytes: %w", ErrInput, f.in.Port, off, f.geo.Size, err))
			return
		}
		c.session.sess.Do(func(m *stream.Machine, now stream.Instant) { err = f.offer(m, now, off, data, release) })
		if err != nil { // the call is over
			release()
			return
		}
		off += int64(len(data))
	}
}
