package calling

import (
	"fmt"
	"io"
	"sync/atomic"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// Sink is the destination of one result or tensor of a get; if it is empty, memory is made for it.
type Sink struct {
	into []byte
	open func(tensor.Desc) (io.Writer, error)
	at   ReadWriterAt
}

// Into is client.Into, which borrows dst.
func Into(dst []byte) Sink { return Sink{into: dst} }

// Writer is client.Writer.
func Writer(open func(tensor.Desc) (io.Writer, error)) Sink { return Sink{open: open} }

// At is client.At.
func At(w ReadWriterAt) Sink { return Sink{at: w} }

// ReadWriterAt is implemented by *os.File, for example.
type ReadWriterAt interface {
	io.ReaderAt
	io.WriterAt
}

// memory returns memory for a tensor: that of Into, or its own.
func (s *Sink) memory(d tensor.Desc, size, most int64) ([]byte, error) {
	switch {
	case s.into != nil && int64(len(s.into)) != size:
		return nil, fmt.Errorf("%v has %d bytes, but Into was given %d", d, size, len(s.into))
	case s.into != nil:
		return s.into, nil
	case size > most:
		return nil, fmt.Errorf("%v has %d bytes, ResultBytes allows %d; raise it, or use Into or Writer", d, size, most)
	}
	return make([]byte, size), nil
}

// place is where a tensor rests: one of into, at and writer.
type place struct {
	size   int64
	rest   *restClock
	order  *codec.OrderedDigester // nil unless the tensor is pulled
	into   []byte
	at     ReadWriterAt
	writer io.Writer
	handed *atomic.Bool // is set with its first byte, which cannot be written again
}

// open opens a Writer.
func (p *place) open(s Sink, d tensor.Desc) (err error) {
	p.rest.start()
	defer p.rest.stop()
	p.writer, err = s.open(d)
	return err
}

// WriteViews writes views to byte off.
func (p *place) WriteViews(off int64, views [][]byte) error {
	to := p.writer
	switch {
	case p.at != nil:
		to = io.NewOffsetWriter(p.at, off)
	case to != nil && p.order != nil && off != p.order.Next():
		return frame.Errorf(frame.FailedPrecondition, "byte %d arrived instead of byte %d, but the tensor goes to a writer; use Into or At", off, p.order.Next())
	}
	for _, v := range views {
		if p.order != nil {
			p.order.Wrote(off, v)
		}
		if p.into != nil {
			if &v[0] != &p.into[off] { // otherwise it was received there
				copy(p.into[off:], v)
			}
		} else {
			if p.writer != nil {
				p.handed.Store(true)
			}
			p.rest.start()
			_, err := to.Write(v)
			p.rest.stop()
			if err != nil {
				return fmt.Errorf("after %d of %d bytes: %w", off, p.size, err)
			}
		}
		off += int64(len(v))
	}
	return nil
}

// digest returns the digest of the whole tensor. It reads back what did not arrive in order.
func (p *place) digest() (codec.Digest, error) {
	switch {
	case p.at != nil:
		if err := p.order.ReadRest(p.at, p.size); err != nil {
			return codec.Digest{}, err
		}
	case p.into != nil:
		next := p.order.Next()
		p.order.Wrote(next, p.into[next:])
	}
	return p.order.Sum(), nil
}
