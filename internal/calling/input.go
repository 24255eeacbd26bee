package calling

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/session"
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
	// reads a few chunks ahead. What comes first, in whole rows but at most the server's chunk,
	// is the size of a call's chunks, each of which is sent when it is whole: who writes row
	// by row may wait for the results of one before writing the next.
	Reader io.Reader
	// Next, if not nil, returns the tensor's bytes in order, in pieces that are shared
	// until release is called and that are sent without a copy. The first piece is the size of
	// the chunks. It must return when over is closed, because the call has ended. It must be able
	// to return 8 chunks before the first of them is released. Push does not support it.
	Next func(over <-chan struct{}) (data []byte, release func(), err error)
	// Name and Metadata are for people; see docs/limits.md for their limits. Push stores
	// the tensor under Name.
	Name     string
	Metadata map[string]string
	// Release, if not nil, is called once, when Data is no longer used.
	Release func()
}

// Check returns how many bytes the input has.
func (in *Input) Check() (int64, error) {
	n, err := in.Bytes()
	if err != nil {
		return 0, fmt.Errorf("%w: input %q: %w", Causes.Input, in.Port, err)
	}
	if !in.streamed() && int64(len(in.Data)) != n {
		return 0, fmt.Errorf("%w: input %q: %v needs %d bytes, got %d", Causes.Input, in.Port, in.Desc, n, len(in.Data))
	}
	return n, nil
}

// streamed reports whether the bytes come from Reader or Next.
func (in *Input) streamed() bool { return in.Reader != nil || in.Next != nil }

// source reads a tensor from a Reader.
type source struct {
	io.Reader
	pool *slab.Pool
	rest *restClock
	what string // "input", for example, and its name
	size int64
}

// view reads bytes [off, off+n), the next ones, and hands over what holds them.
func (s *source) view(off, n int64) ([]byte, interface{ Release() }, error) {
	mem, _, err := s.read(off, int(n), int(n))
	if err != nil {
		return nil, nil, err
	}
	return mem.Bytes(), mem, nil
}

// read reads the next bytes, most of them or at least least, and hands over what holds them.
func (s *source) read(off int64, most, least int) (*slab.Slab, int, error) {
	mem, err := s.pool.Get(most)
	if err != nil {
		return nil, 0, fmt.Errorf("client: %s: %w", s.what, err)
	}
	// Read may block; the end of the call is noticed only when it returns.
	s.rest.start()
	got, err := io.ReadAtLeast(s.Reader, mem.Bytes(), least)
	s.rest.stop()
	if err != nil {
		mem.Release()
		return nil, 0, fmt.Errorf("%w: %s ended after %d of %d bytes: %w", Causes.Input, s.what, off+int64(got), s.size, err)
	}
	return mem, got, nil
}

// feed sends an input of a call.
type feed struct {
	call *Call
	in   Input
	id   tensor.ID

	announced bool            // guarded by the session's lock, as geo is until then
	geo       tensor.Geometry // once it is open
}

// open checks the input. It announces and offers Data; what is streamed waits for its first
// bytes. The session is locked.
func (f *feed) open(m *stream.Machine, now stream.Instant) error {
	var err error
	if f.geo, err = f.call.session.Lanes.Geometry(m, f.in.Desc); err != nil {
		return err
	}
	d := f.desc()
	if problem := d.CheckTexts(); problem != "" {
		return errors.New(problem)
	}
	if f.in.streamed() {
		return nil
	}
	if err := m.OpenTensor(now, d); err != nil {
		return err
	}
	return f.offer(m, now, 0, f.in.Data, f.in.Release)
}

func (f *feed) desc() frame.Desc {
	return frame.Desc{
		Tensor: f.id, Desc: f.in.Desc.Clone(), ChunkBytes: uint32(f.geo.ChunkBytes), Call: f.call.id, Port: f.in.Port,
		Name: f.in.Name, Metadata: f.in.Metadata,
	}
}

// announce announces a streamed input in chunks of item bytes, unless that is done or the
// call is over, and returns how many chunks are read ahead.
func (f *feed) announce(item int64) (ahead int) {
	f.call.session.Do(func(m *stream.Machine, now stream.Instant) {
		chunk := even(max(item, f.geo.Size/tensor.MaxChunks+1), f.geo.ChunkBytes, int64(f.in.DType.Bits()/8))
		if !f.announced && f.geo.Size/chunk < tensor.MaxChunks {
			f.geo.ChunkBytes = chunk
		}
		ahead = session.Slabs * int(min(max(1, (1<<20)/f.geo.ChunkBytes), smallChunks))
		if f.announced {
			return
		}
		f.announced = true
		d := f.desc()
		d.RetainChunks = uint32(ahead)
		if err := m.OpenTensor(now, d); err != nil && !errors.Is(err, stream.ErrClosed) {
			m.Finish(frame.Done{Call: f.call.id, Code: frame.InvalidArgument, Message: err.Error()})
		}
	})
	return ahead
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

// even returns the size of the chunks, at most limit, in which items are sent: a larger item
// has a whole number of them, of whole elements, unless only very small ones would do.
func even(item, limit, width int64) int64 {
	least := (item-1)/limit + 1
	for n := least; n <= least*smallChunks; n++ {
		if n == 1 || item%(n*width) == 0 {
			return item / n
		}
	}
	return limit
}

// run reads the input and offers it. It ends with the last byte or with the call.
func (f *feed) run() {
	c := f.call
	rest := c.rests("input", f.in.Port)
	defer rest.end()
	row := f.geo.Size
	if len(f.in.Shape) > 0 {
		row /= max(1, f.in.Shape[0])
	}
	row, most := max(1, row), min(f.geo.ChunkBytes, f.geo.Size)
	// The server ends a call whose inputs are not announced in time.
	late := time.AfterFunc(rest.every, func() { f.announce(max(row, f.geo.Size/frame.AllowanceChunks/row*row)) })
	defer late.Stop()
	if f.in.Next != nil {
		f.pass(rest)
		return
	}
	from := source{f.in.Reader, c.session.cfg.Pool, rest, fmt.Sprintf("input %q", f.in.Port), f.geo.Size}
	mem, n, err := from.read(0, int(most), int(min(row, most)))
	if err != nil {
		c.Stop(err)
		return
	}
	defer mem.Release()
	from.Reader = io.MultiReader(bytes.NewReader(mem.Bytes()[:n]), f.in.Reader)
	feed := session.Feed{Session: c.session, View: from.view, Pieces: f.announce(max(row, int64(n)/row*row)), Plain: true}
	_, err = feed.Send(c.ctx, f.id, f.geo)
	if own, ok := errors.AsType[*session.SourceError](err); ok {
		c.Stop(own.Err)
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
			c.Stop(fmt.Errorf("%w: input %q ended after %d of %d bytes: %w", Causes.Input, f.in.Port, off, f.geo.Size, err))
			return
		}
		if off == 0 {
			f.announce(int64(len(data)))
		}
		c.session.Do(func(m *stream.Machine, now stream.Instant) { err = f.offer(m, now, off, data, release) })
		if err != nil { // the call is over
			release()
			return
		}
		off += int64(len(data))
	}
}
