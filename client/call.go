package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// Request describes a call.
type Request struct {
	Model  string
	Inputs []Input
	Params map[string]string
	// Timeout limits the call on the server; 0 means no limit.
	Timeout time.Duration
	// Results maps ports to the Sinks of their results. For a port without an entry, To
	// chooses the Sink. Without To, or with an empty Sink, the result gets memory of its
	// own. To must not block.
	Results map[string]Sink
	To      func(port string, d tensor.Desc) (Sink, error)
}

// Sink is the destination of one result or pulled tensor. Create one with Into, Writer or
// At.
type Sink struct {
	into []byte
	open func(tensor.Desc) (io.Writer, error)
	at   ReadWriterAt
}

// Into returns a Sink that stores a result in dst, whose length must be the result's size.
// The caller lends dst until the call has ended.
func Into(dst []byte) Sink { return Sink{into: dst} }

// Writer returns a Sink that writes a result in order, as it arrives, to the writer that
// open returns for its desc. A slow writer slows down the server but takes no more memory.
// open and Write run on a goroutine of the call, or on that of Pull.
func Writer(open func(tensor.Desc) (io.Writer, error)) Sink { return Sink{open: open} }

// Results are a call's results by port. A result that went to a Writer has no Data.
type Results map[string]tensor.Tensor

// Region is a part of a result that has arrived. Data shares the result's memory.
type Region struct {
	Port string
	Desc tensor.Desc // of the whole result
	Off  int64       // bytes from its start
	Data []byte
}

// Timings are the durations of a call's stages as the server measured them.
type Timings struct {
	Receive, Queue, H2D, Compute, D2H, FirstResult, Total time.Duration
}

// Exposed returns the time that did not overlap with the slowest stage: the total minus
// that stage. Blocks computed concurrently may add up to more than the total; then it is 0.
func (t Timings) Exposed() time.Duration {
	return max(0, t.Total-max(t.Receive, t.H2D, t.Compute, t.D2H))
}

// Call is one run of a model.
type Call struct {
	session *Session
	id      tensor.ID
	sinks   map[string]Sink
	to      func(string, tensor.Desc) (Sink, error)
	unhook  func() bool
	news    chan struct{} // capacity 1, for Regions: a chunk arrived
	closed  chan struct{} // closed by the session's last event of the call
	feeding sync.WaitGroup
	writing sync.WaitGroup
	shared  atomic.Int64  // inputs that grpc may still read, and 1 while opening
	letGo   chan struct{} // closed when shared is 0

	// Guarded by the session's lock until closed.
	results []*result
	done    frame.Done
	cause   error // why this side ended the call
	ended   bool
}

// result is a result being received.
type result struct {
	call *Call
	id   tensor.ID
	desc tensor.Desc
	geo  tensor.Geometry
	port string
	mem  []byte   // nil if it goes to a writer
	came []uint32 // chunk indexes in order of arrival, for Regions

	// For a writer.
	rest  *restClock
	open  func(tensor.Desc) (io.Writer, error)
	slot  int64 // bytes of each piece but the last
	lent  []*piece
	given int64         // bytes lent so far
	news  chan struct{} // capacity 1: a piece is full
}

// piece is reusable memory, lent for the next bytes of a result.
type piece struct {
	*slab.Slab
	filled bool
	done   func(filled bool)
}

// announced provides memory for a result; the session is locked.
func (c *Call) announced(m *stream.Machine, now stream.Instant, e stream.Event) {
	d := e.Desc
	r := &result{
		call: c, id: e.Tensor, desc: d.Desc.Clone(), port: d.Port,
		geo: tensor.Geometry{Size: int64(d.SizeBytes), ChunkBytes: int64(d.ChunkBytes)},
	}
	fail := func(format string, args ...any) {
		c.cause = fmt.Errorf("client: result %q: "+format, append([]any{r.port}, args...)...)
		m.FailTensor(e.Tensor, frame.FailedPrecondition, "the client cannot take the result")
	}
	sink, ok := c.sinks[d.Port]
	var err error
	if !ok && c.to != nil {
		sink, err = c.to(d.Port, r.desc)
	}
	switch {
	case err != nil:
		fail("%w", err)
		return
	case sink.open != nil:
		c.results = append(c.results, r)
		r.open, r.news, r.rest = sink.open, make(chan struct{}, 1), c.rests(m, named("result", r.port))
		r.slot = r.geo.ChunkBytes * max(1, slotBytes/r.geo.ChunkBytes)
		if d.OnAllowance {
			r.slot = max(1, r.geo.Size)
		}
		for range slots {
			p := new(piece)
			p.done = func(filled bool) {
				p.filled = filled
				tell(r.news)
			}
			r.lend(m, now, p)
		}
		c.writing.Add(1)
		go r.write() // ends with the call
		return
	case sink.into != nil:
		if int64(len(sink.into)) != r.geo.Size {
			fail("%v has %d bytes, but Into was given %d", r.desc, r.geo.Size, len(sink.into))
			return
		}
		r.mem = sink.into
	case r.geo.Size > c.session.client.cfg.ResultBytes:
		fail("%v has %d bytes, ResultBytes allows %d; raise it, or use Into or Writer", r.desc, r.geo.Size, c.session.client.cfg.ResultBytes)
		return
	default:
		r.mem = make([]byte, r.geo.Size)
	}
	c.results = append(c.results, r)
	if err := m.Lend(now, r.id, r.mem, nil); err != nil && !errors.Is(err, stream.ErrClosed) {
		fail("%w", err)
	}
}

// event implements handler.
func (c *Call) event(m *stream.Machine, now stream.Instant, e stream.Event) {
	switch e.Kind {
	case stream.EventTensor:
		c.announced(m, now, e)
		c.session.wantLane(m, int64(e.Desc.SizeBytes))
	case stream.EventChunk:
		c.arrived(e)
	case stream.EventClosed:
		c.done, c.ended = *e.Done, true
		close(c.closed)
	}
}

// lend lends p for the next bytes of a written result, if any; the session is locked.
func (r *result) lend(m *stream.Machine, now stream.Instant, p *piece) {
	if r.given == r.geo.Size && (r.geo.Size > 0 || len(r.lent) > 0) {
		return
	}
	n := min(r.slot, r.geo.Size-r.given)
	s, err := r.call.session.client.pool.Get(int(n))
	if err != nil {
		r.call.cause = fmt.Errorf("client: result %q: %w", r.port, err)
		m.FailTensor(r.id, frame.FailedPrecondition, "the client has no memory for the result")
		return
	}
	p.Slab, p.filled = s, false
	if err := m.Lend(now, r.id, p.Bytes(), p.done); err != nil {
		p.Release()
		return
	}
	r.lent = append(r.lent, p)
	r.given += n
}

// arrived records a chunk for Regions; the session is locked.
func (c *Call) arrived(e stream.Event) {
	for _, r := range c.results {
		if r.id == e.Tensor && r.mem != nil {
			r.came = append(r.came, uint32(e.Off/r.geo.ChunkBytes))
			tell(c.news)
		}
	}
}

func tell(news chan struct{}) {
	select {
	case news <- struct{}{}:
	default: // already signaled
	}
}

// write writes a result in order. A failure cancels the call.
func (r *result) write() {
	c := r.call
	defer c.writing.Done()
	defer func() {
		<-c.closed // nothing more is received
		for _, s := range r.lent {
			s.Release()
		}
	}()
	defer r.rest.end()
	r.rest.start()
	w, err := r.open(r.desc)
	r.rest.stop()
	if err != nil {
		c.fail(fmt.Errorf("client: result %q: %w", r.port, err))
		return
	}
	for off := int64(0); off < r.geo.Size || r.geo.Size == 0; {
		s := r.next()
		if s == nil {
			return
		}
		n := int64(len(s.Bytes()))
		r.rest.start()
		_, err := w.Write(s.Bytes())
		r.rest.stop()
		s.Release()
		if err != nil {
			c.fail(fmt.Errorf("client: result %q: after %d of %d bytes: %w", r.port, off, r.geo.Size, err))
			return
		}
		if off += n; r.geo.Size == 0 {
			return
		}
		c.session.sess.Do(func(m *stream.Machine, now stream.Instant) { r.lend(m, now, s) })
	}
}

// next waits for the next full piece and removes it from lent; nil means that the call
// ended first.
func (r *result) next() *piece {
	c := r.call
	for ended := false; ; {
		var s *piece
		c.session.sess.Do(func(*stream.Machine, stream.Instant) {
			if len(r.lent) > 0 && r.lent[0].filled {
				s = r.lent[0]
				r.lent = append(r.lent[:0], r.lent[1:]...)
			}
		})
		if s != nil || ended {
			return s
		}
		select {
		case <-r.news:
		case <-c.closed:
			ended = true // check once more: the last pieces may have arrived before the end
		}
	}
}

// returned decrements shared, when gRPC no longer reads an input for example.
func (c *Call) returned() {
	if c.shared.Add(-1) == 0 {
		close(c.letGo)
	}
}

// stop cancels the call with a cause on this side, unless the call has ended.
func (c *Call) stop(cause error) {
	c.session.sess.Do(func(m *stream.Machine, _ stream.Instant) {
		if !c.ended && c.cause == nil {
			c.cause = cause
		}
		m.Finish(frame.Done{Call: c.id, Code: frame.Cancelled, Message: "cancelled by the caller"})
	})
}

// fail is like stop, but it also fails a call that has already succeeded.
func (c *Call) fail(cause error) {
	c.stop(cause)
	c.session.sess.Do(func(*stream.Machine, stream.Instant) {
		if c.cause == nil && c.done.Code == frame.OK { // stop set no cause: the call had ended
			c.cause = cause
		}
	})
}

// rests returns a clock for the caller's code of one input or result; the session is
// locked.
func (c *Call) rests(m *stream.Machine, what string) *restClock {
	cfg := &c.session.client.cfg
	idled := func(err error) {
		if cfg.Idled != nil {
			cfg.Idled(err)
		}
	}
	chunkIdle := time.Duration(m.Status().PeerChunkIdle)
	var r *restClock
	r = newRestClock(what, cfg.InputIdle, chunkIdle, func() {
		select {
		case <-c.closed:
			r.end()
			if err := c.err(); err != nil {
				idled(err)
			}
		default:
			c.session.waits(signEvery(chunkIdle))
		}
	}, func(cause error) {
		c.stop(cause)
		idled(causeError(cause))
	})
	return r
}

// ID returns the call's ID, under which the server logs the call's failures.
func (c *Call) ID() tensor.ID { return c.id }

// Cancel cancels the call. The server stops the model within one block.
func (c *Call) Cancel() { c.stop(context.Canceled) }

// Wait waits for the call to end and returns all its results, or an error. Afterwards the
// library uses neither inputs nor results. On a hung connection, Wait blocks until
// keep-alive closes the connection; on a hung lane, until the lane is given up.
func (c *Call) Wait() (Results, error) {
	<-c.closed
	if c.unhook != nil {
		c.unhook()
	}
	c.feeding.Wait()
	c.writing.Wait()
	<-c.letGo
	if err := c.err(); err != nil {
		return nil, err
	}
	results := make(Results, len(c.results))
	for _, r := range c.results {
		results[r.port] = tensor.Tensor{Desc: r.desc, Data: r.mem}
	}
	return results, nil
}

// err returns the call's error. It must only be called after closed is closed.
func (c *Call) err() (err error) {
	c.session.sess.Do(func(*stream.Machine, stream.Instant) {
		if err = doneError(&c.done); c.cause != nil {
			err = causeError(c.cause)
		}
	})
	return err
}

// Timings returns how long each stage took on the server. It must only be called after
// Wait.
func (c *Call) Timings() Timings {
	t := c.done.Timings
	return Timings{
		time.Duration(t.Receive), time.Duration(t.Queue), time.Duration(t.H2D), time.Duration(t.Compute),
		time.Duration(t.D2H), time.Duration(t.FirstResult), time.Duration(t.Total),
	}
}

// Regions yields parts of the results as they arrive, until the call ends. If the call
// fails, the last pair has the error. Results that go to a Writer are omitted. Only one
// goroutine at a time may iterate.
func (c *Call) Regions() iter.Seq2[Region, error] {
	return func(yield func(Region, error) bool) {
		next := map[*result]int{}
		for ended := false; ; {
			var fresh []Region
			c.session.sess.Do(func(*stream.Machine, stream.Instant) {
				for _, r := range c.results {
					for _, i := range r.came[next[r]:] {
						off, n := r.geo.Span(i)
						fresh = append(fresh, Region{r.port, r.desc, off, r.mem[off : off+n]})
					}
					next[r] = len(r.came)
				}
			})
			for _, r := range fresh {
				if !yield(r, nil) {
					return
				}
			}
			if ended {
				if err := c.err(); err != nil {
					yield(Region{}, err)
				}
				return
			}
			select {
			case <-c.news:
			case <-c.closed:
				ended = true
			}
		}
	}
}
