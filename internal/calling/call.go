package calling

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/session"
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
	// own. To must not block. It is called again when the call is repeated.
	Results map[string]Sink
	To      func(port string, d tensor.Desc) (Sink, error)
	// Idempotent: a call has no effect but its results, or the same when it is repeated. With
	// Config.Retry, it is repeated even if it may have begun. A model can declare itself to be.
	Idempotent bool
}

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
	task  // its news: a chunk arrived
	sinks map[string]Sink
	to    func(string, tensor.Desc) (Sink, error)
	using sync.WaitGroup // what still uses inputs or results: goroutines, and gRPC

	results []*result   // guarded by the session's lock until ctx has ended
	handed  atomic.Bool // the caller has some of a result
}

// Call starts a call and returns without waiting for it. Cancelling ctx cancels the call.
// Inputs are shared until Wait has returned.
func (s *Session) Call(ctx context.Context, r Request) (*Call, error) {
	return s.call(ctx, r, nil, nil)
}

// call starts a call, which is of a sequence unless of is nil, and a step of it unless step is nil.
func (s *Session) call(ctx context.Context, r Request, step *Sequence, of *frame.Sequence) (*Call, error) {
	c := &Call{sinks: r.Results, to: r.To}
	c.step = step
	timeout := (max(0, r.Timeout) + time.Millisecond - 1) / time.Millisecond // never rounded to 0, which is no limit
	part := frame.Call{ID: tensor.NewID(), Model: r.Model, Params: r.Params, TimeoutMillis: uint64(timeout), Sequence: of}
	feeds := make([]feed, len(r.Inputs)) // not copied: goroutines run on them
	for i, in := range r.Inputs {
		if _, err := in.Check(); err != nil {
			return nil, err
		}
		feeds[i] = feed{call: c, in: in, id: tensor.NewID()}
		part.Inputs = append(part.Inputs, frame.Binding{Port: in.Port, Tensor: feeds[i].id})
	}
	for port, sink := range r.Results {
		if sink.at != nil {
			return nil, fmt.Errorf("%w: result %q: only Pull takes At; use Into or Writer", Causes.Input, port)
		}
	}
	err := c.open(ctx, s, part, c, func(m *stream.Machine, now stream.Instant) error {
		for i := range feeds {
			if err := feeds[i].open(m, now); err != nil {
				m.Finish(frame.Done{Call: c.id, Code: frame.InvalidArgument, Message: err.Error()})
				return err
			}
			c.sent += feeds[i].geo.Size
			s.Lanes.Want(m, feeds[i].geo.Size)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i := range feeds {
		if feeds[i].in.streamed() {
			c.using.Go(feeds[i].run) // ends with its reader or its Next, or with the call
		}
	}
	return c, nil
}

// result is a result being received.
type result struct {
	id   tensor.ID
	desc tensor.Desc
	geo  tensor.Geometry
	port string
	mem  []byte           // nil if it goes to a writer
	to   *session.Landing // then
	came []uint32         // chunk indexes in order of arrival, for Regions
}

// failed returns the error of a result that the caller's Sink does not take.
func (r *result) failed(err error) error {
	if errors.Is(err, Causes.InputIdle) {
		return err
	}
	return &Error{Code: codes.FailedPrecondition, Cause: fmt.Errorf("client: result %q: %w", r.port, err)}
}

// announced provides memory for a result; the session is locked.
func (c *Call) announced(m *stream.Machine, now stream.Instant, e stream.Event) {
	d := e.Desc
	r := &result{
		id: e.Tensor, desc: d.Desc.Clone(), port: d.Port,
		geo: tensor.Geometry{Size: int64(d.SizeBytes), ChunkBytes: int64(d.ChunkBytes)},
	}
	c.results = append(c.results, r)
	c.received += r.geo.Size
	sink, ok := c.sinks[d.Port]
	var err error
	if !ok && c.to != nil {
		sink, err = c.to(d.Port, r.desc)
	}
	if err == nil && sink.open != nil {
		c.write(m, now, r, sink, d.OnAllowance)
		return
	}
	if err == nil {
		r.mem, err = sink.memory(r.desc, r.geo.Size, c.session.cfg.ResultBytes)
	}
	if err == nil {
		err = m.Lend(now, r.id, r.mem, nil)
	}
	if err != nil && !errors.Is(err, stream.ErrClosed) {
		c.cause = r.failed(err)
		m.FailTensor(r.id, frame.FailedPrecondition, "the client cannot take the result")
	}
}

// event implements handler.
func (c *Call) event(m *stream.Machine, now stream.Instant, e stream.Event) {
	switch e.Kind {
	case stream.EventTensor:
		c.announced(m, now, e)
		c.session.Lanes.Want(m, int64(e.Desc.SizeBytes))
	case stream.EventChunk:
		for _, r := range c.results {
			switch {
			case r.id != e.Tensor:
			case r.mem != nil:
				r.came = append(r.came, uint32(e.Off/r.geo.ChunkBytes))
				c.news.Tell()
			case r.to != nil:
				r.to.Tell()
			}
		}
	}
}

// write starts a goroutine that writes a result in order and ends with the call; the session
// is locked. A failure cancels the call.
func (c *Call) write(m *stream.Machine, now stream.Instant, r *result, to Sink, onAllowance bool) {
	at, news := &place{size: r.geo.Size, handed: &c.handed}, make(session.News, 1)
	l := &session.Landing{
		Session: c.session, Tensor: r.id, Geo: r.geo, InOrder: true, To: at, Slab: c.session.cfg.Pool.Get, Tell: news.Tell,
	}
	if r.to = l; onAllowance {
		c.session.stage(m, now, l)
	}
	c.using.Go(func() {
		at.rest = c.rests("result", r.port)
		err := at.open(to, r.desc)
		for ended := false; err == nil; {
			if err = l.Step(); ended || l.Whole() {
				break
			}
			ended = news.Wait(c.ctx) != nil // step once more then: the last pieces may have arrived before the end
		}
		at.rest.end()
		if err != nil {
			err = r.failed(err)
			c.Stop(err)
			c.session.Do(func(*stream.Machine, stream.Instant) {
				if c.cause == nil && c.done.Code == frame.OK { // Stop set no cause: the call had succeeded
					c.cause = err
				}
			})
		}
		<-c.ctx.Done() // nothing more is received
		l.Home()
	})
}

// Wait waits for the call to end and returns all its results, or an error. A result that went to
// a Writer has no Data; the others belong to the caller.
func (c *Call) Wait() (Results, error) {
	<-c.ctx.Done()
	c.unhook()
	c.using.Wait()
	if err := c.Err(); err != nil {
		return nil, err
	}
	results := make(Results, len(c.results))
	for _, r := range c.results {
		results[r.port] = tensor.Tensor{Desc: r.desc, Data: r.mem}
	}
	for port := range c.sinks {
		if _, there := results[port]; !there {
			return nil, &Error{Code: codes.InvalidArgument, Call: c.id, Cause: fmt.Errorf("%w: there is no result %q; the results are %q", Causes.Input, port, slices.Sorted(maps.Keys(results)))}
		}
	}
	return results, nil
}

// Err returns why the call, which has ended, has failed.
func (c *Call) Err() error { return c.err(context.Background()) }

// Handed reports whether the caller has some of a result.
func (c *Call) Handed() bool { return c.handed.Load() }

// Timings returns what the server has measured of the call, which has ended.
func (c *Call) Timings() Timings {
	t := &c.done.Timings
	return Timings{
		time.Duration(t.Receive), time.Duration(t.Queue), time.Duration(t.H2D), time.Duration(t.Compute),
		time.Duration(t.D2H), time.Duration(t.FirstResult), time.Duration(t.Total),
	}
}

// Regions yields parts of the results as they arrive, until the call ends. It reports whether
// yield wanted all of them.
func (c *Call) Regions(yield func(Region) bool) (more bool) {
	next := map[*result]int{}
	for ended := false; ; ended = !c.wait() {
		var fresh []Region
		c.session.Do(func(*stream.Machine, stream.Instant) {
			for _, r := range c.results {
				for _, i := range r.came[next[r]:] {
					off, n := r.geo.Span(i)
					fresh = append(fresh, Region{r.port, r.desc, off, r.mem[off : off+n]})
				}
				next[r] = len(r.came)
			}
		})
		for _, r := range fresh {
			c.handed.Store(true)
			if !yield(r) {
				return false
			}
		}
		if ended {
			return true
		}
	}
}
