package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

var (
	// errBinding: the call's inputs do not fit the model's ports by name.
	errBinding = errors.New("server: inputs do not match the model")
	// errMemoryWait: the memory a call needs at least did not become free.
	errMemoryWait = errors.New("server: no memory became free for the call in time")
	// errFinished ends the feeding of a run whose results are complete.
	errFinished = errors.New("server: results complete")
)

// call is one run of a model for a session. Two goroutines work for it, from
// start until end: one lends the run's blocks to the session, the other takes
// its results.
type call struct {
	peer   *peer
	id     tensor.ID
	cancel context.CancelCauseFunc
	closed chan struct{} // closed by the session's last event

	// Guarded by the session's lock.
	inputs   []*input
	model    string // once ready
	spare    []*arrival
	arrived  stream.Instant
	lastByte stream.Instant
}

// arrival is a block whose inputs are on their way.
type arrival struct {
	block   *engine.Block
	missing int // inputs
	done    func(filled bool)
}

// arrival returns one that nobody uses; the session is locked.
func (c *call) arrival(run engine.Run) *arrival {
	if n := len(c.spare); n > 0 {
		a := c.spare[n-1]
		c.spare = c.spare[:n-1]
		return a
	}
	a := new(arrival)
	a.done = func(filled bool) { // not filled: the call is over, and Close takes the block back
		if filled {
			a.missing--
		}
		if filled && a.missing == 0 {
			run.Filled(a.block)
			c.spare = append(c.spare, a)
		}
	}
	return a
}

// output is one result on its way out; taker goroutine only.
type output struct {
	id      tensor.ID
	size    int64
	offered int64
	open    bool
}

// start starts the call's goroutines; the session is locked. They end when the
// call has, which the session's end and the call's context bring about.
func (c *call) start(part *frame.Call) {
	ctx, cancel := context.WithCancelCause(context.Background())
	c.cancel = cancel
	params := part.Params
	timeout := timeoutOf(part.TimeoutMillis)
	c.peer.server.work.Go(func() {
		defer c.peer.server.endCall(c.peer.conn)
		defer cancel(nil)
		if timeout > 0 {
			// Finish too: the results may be complete and only nobody takes them.
			alarm := time.AfterFunc(timeout, func() {
				cancel(context.DeadlineExceeded)
				c.finish(frame.Timings{}, context.DeadlineExceeded)
			})
			defer alarm.Stop()
		}
		c.serve(ctx, params)
	})
}

// timeoutOf is a call's timeout as its caller says it.
func timeoutOf(millis uint64) time.Duration {
	return time.Duration(min(millis, uint64(maxTimeout/time.Millisecond))) * time.Millisecond
}

// serve runs the call from its model's name to its memory's return.
func (c *call) serve(ctx context.Context, params map[string]string) {
	defer c.release()
	model, over, err := c.peer.server.model(c.model)
	if err != nil {
		c.finish(frame.Timings{}, err)
		<-c.closed
		return
	}
	var closed error
	defer func() { over(closed) }()
	inputs, table, err := c.bind(model.Info())
	if err != nil {
		c.finish(frame.Timings{}, err)
		<-c.closed
		return
	}
	if table > 0 {
		defer c.peer.server.cfg.Budget.Release(c.peer.holder, table)
	}
	run, err := c.open(ctx, model, inputs, params)
	if err != nil {
		c.finish(frame.Timings{}, err)
		<-c.closed
		return
	}
	c.compute(ctx, model.Info(), run)
	<-c.closed // every result acknowledged or given up, no chunk on its way into a block
	if closed = run.Close(); closed != nil {
		c.peer.server.log.Warn("run left memory behind", slog.String("call", c.id.String()), slog.String("error", closed.Error()))
	}
}

// bind puts the call's inputs in the order of the model's ports, and takes the
// memory for tensors of very many chunks.
func (c *call) bind(info engine.Info) ([]engine.Input, int64, error) {
	if len(c.inputs) != len(info.Inputs) {
		return nil, 0, fmt.Errorf("%w: %q has %d inputs, the call has %d", errBinding, info.Name, len(info.Inputs), len(c.inputs))
	}
	ordered := make([]*input, len(info.Inputs))
	inputs := make([]engine.Input, len(info.Inputs))
	var table int64
	for i, port := range info.Inputs {
		for _, in := range c.inputs {
			if in.port == port.Name || in.port == "" && len(info.Inputs) == 1 {
				ordered[i] = in
			}
		}
		in := ordered[i]
		if in == nil {
			return nil, 0, fmt.Errorf("%w: %q needs input %q, the call has %s", errBinding, info.Name, port.Name, c.portNames())
		}
		inputs[i] = engine.Input{Port: port.Name, Desc: in.desc, ChunkBytes: in.chunk}
		table += tableBytes(in.chunks)
	}
	if err := acquireTable(c.peer.server.cfg.Budget, c.peer.holder, table); err != nil {
		return nil, 0, err
	}
	c.peer.sess.Do(func(*stream.Machine, stream.Instant) { c.inputs = ordered })
	return inputs, table, nil
}

// tableBytes is what the budget gives for what is kept per chunk of a tensor.
func tableBytes(chunks uint32) int64 {
	return max(0, int64(chunks)-tableFree) * assembler.ChunkOverhead
}

// acquireTable takes so many bytes, which may be none, of the budget.
func acquireTable(b *slab.Budget, holder string, bytes int64) error {
	if bytes == 0 || b.TryAcquire(holder, bytes) {
		return nil
	}
	_, _, limit := b.Used()
	return fmt.Errorf("%w: %d bytes to keep track of so many chunks, the budget is %d; send larger chunks", slab.ErrBudget, bytes, limit)
}

func (c *call) portNames() string {
	if len(c.inputs) == 0 {
		return "none"
	}
	names := make([]string, len(c.inputs))
	for i, in := range c.inputs {
		names[i] = strconv.Quote(in.port)
	}
	return strings.Join(names, ", ")
}

// open opens the run, waiting a bounded time for memory.
func (c *call) open(ctx context.Context, model engine.Model, inputs []engine.Input, params map[string]string) (engine.Run, error) {
	patience := time.AfterFunc(c.peer.server.cfg.MemoryWait, func() { c.cancel(c.peer.server.waitedForMemory()) })
	defer patience.Stop()
	return model.Open(ctx, engine.Call{ID: c.id, Session: c.peer.holder, Inputs: inputs, Params: params})
}

// waitedForMemory is the cause of a call's end that waited in vain.
func (s *Server) waitedForMemory() error {
	_, _, limit := s.cfg.Budget.Used()
	return fmt.Errorf("%w: waited %v, the memory budget is %d bytes; try again later", errMemoryWait, s.cfg.MemoryWait, limit)
}

// compute moves blocks in and results out until the call's end is decided.
func (c *call) compute(ctx context.Context, info engine.Info, run engine.Run) {
	fed := make(chan struct{})
	if seq := 0; c.feed(ctx, run, &seq, 1) {
		// One block was all: a small call does without another goroutine.
		close(fed)
	} else {
		go func() { // ends with the last block, or with ctx
			defer close(fed)
			c.feed(ctx, run, &seq, math.MaxInt)
		}()
	}
	err := c.take(ctx, info, run)
	if err != nil {
		c.finish(timings(run.Stats()), err)
	}
	c.cancel(errFinished)
	<-fed
}

// feed lends up to most of the run's blocks to the session, and copies what waits
// on the side. It reports whether there are no more blocks to lend.
func (c *call) feed(ctx context.Context, run engine.Run, seq *int, most int) (last bool) {
	for ; *seq < most; *seq++ {
		b, err := run.Lend(ctx)
		if err != nil {
			return true // io.EOF, or what Next returns too
		}
		wire := 0
		for i, mem := range b.In {
			if mem == nil {
				continue
			}
			in := c.inputs[i]
			if in.ready == nil {
				wire++
				continue
			}
			select {
			case <-in.ready:
			case <-ctx.Done():
				return true
			}
			if in.staged == nil {
				continue // used up: rows without bytes
			}
			in.used += int64(copy(mem, in.staged.Bytes()[in.used:]))
			if in.used == in.size {
				c.peer.unstage(in) // the session may have its share back, and the call last
			}
		}
		if wire == 0 {
			run.Filled(b)
			if c.usedUp(b) {
				return true
			}
			continue
		}
		c.peer.sess.Do(func(m *stream.Machine, now stream.Instant) {
			a := c.arrival(run)
			a.block, a.missing = b, wire
			for i, mem := range b.In {
				if in := c.inputs[i]; mem != nil && in.ready == nil && m.Lend(now, in.id, mem, a.done) != nil {
					return // the call is over: Close takes the block back
				}
			}
		})
	}
	return false
}

// usedUp reports whether b was the last block: every input has been copied from
// the side to its last byte. After the Whole inputs rows follow, perhaps none.
func (c *call) usedUp(b *engine.Block) bool {
	for i, in := range c.inputs {
		if in.ready == nil || in.used < in.size || b.In[i] == nil && b.Whole {
			return false
		}
	}
	return true
}

// take offers the run's results to the session until the last one.
func (c *call) take(ctx context.Context, info engine.Info, run engine.Run) error {
	outs := make([]output, len(info.Outputs))
	var first stream.Instant
	for {
		out, err := run.Next(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if out.Port < 0 || out.Port >= len(outs) {
			out.Release()
			return fmt.Errorf("%w: result for port %d of %d", engine.ErrModel, out.Port, len(outs))
		}
		complete := false
		c.peer.sess.DoSend(func(m *stream.Machine, now stream.Instant) {
			if first == 0 {
				first = now
			}
			o := &outs[out.Port]
			if !o.open {
				err = c.announce(m, now, o, info, out)
			}
			if err == nil {
				err = m.Offer(now, o.id, out.Off, out.Data, out.Release)
			}
			if err != nil {
				return
			}
			o.offered += int64(len(out.Data))
			if complete = allComplete(outs); complete {
				m.Finish(c.done(now, first, info, outs, run.Stats()))
			}
		})
		if err != nil {
			out.Release()
			return err
		}
		if complete {
			return nil
		}
	}
	if !allComplete(outs) {
		return fmt.Errorf("%w: it ended before its results were complete", engine.ErrModel)
	}
	c.peer.sess.Do(func(m *stream.Machine, now stream.Instant) { // a model without outputs
		m.Finish(c.done(now, now, info, outs, run.Stats()))
	})
	return nil
}

func allComplete(outs []output) bool {
	for i := range outs {
		if !outs[i].open || outs[i].offered < outs[i].size {
			return false
		}
	}
	return true
}

// announce opens a result's tensor, cut as the run makes it, so that a chunk does
// not lie across two blocks. When the piece at hand does not tell the size of a
// block, no chunk is larger than those of the inputs: the run has memory for as
// many consecutive bytes, and a chunk that spans more would wait for ever. The
// session is locked.
func (c *call) announce(m *stream.Machine, now stream.Instant, o *output, info engine.Info, out engine.Out) error {
	size, err := out.Desc.Bytes()
	if err != nil {
		return err
	}
	limit := m.PeerChunkBytes()
	var chunk int64
	n := int64(len(out.Data))
	switch {
	case n == size:
		chunk = tensor.ChunkFor(out.Desc, limit)
	case n == 0 || out.Off+n == size:
		chunk = min(max(n, 1), limit)
		for i, in := range c.inputs {
			if !info.Inputs[i].Whole {
				chunk = max(chunk, min(in.chunk, in.size, limit))
			}
		}
		chunk = tensor.ChunkFor(out.Desc, chunk)
	default:
		pieces := (n + limit - 1) / limit
		chunk = (n + pieces - 1) / pieces
	}
	if size/chunk >= tensor.MaxChunks {
		chunk = limit
	}
	o.id, o.size, o.open = session.NewID(), size, true
	return m.OpenTensor(now, frame.Desc{
		Tensor: o.id, Desc: out.Desc, ChunkBytes: uint32(chunk), Call: c.id, Port: info.Outputs[out.Port].Name, RetainChunks: retainChunks,
	})
}

// done is how a call ends well. The session is locked.
func (c *call) done(now, first stream.Instant, info engine.Info, outs []output, st engine.Stats) frame.Done {
	d := frame.Done{Call: c.id, Timings: timings(st)}
	d.Timings.Receive = int64(c.lastByte - c.arrived)
	d.Timings.FirstResult = int64(first - c.arrived)
	d.Timings.Total = int64(now - c.arrived)
	for i := range outs {
		d.Outputs = append(d.Outputs, frame.Binding{Port: info.Outputs[i].Name, Tensor: outs[i].id})
	}
	return d
}

func timings(st engine.Stats) frame.Timings {
	return frame.Timings{Queue: int64(st.Queue), H2D: int64(st.H2D), Compute: int64(st.Compute), D2H: int64(st.D2H)}
}

// finish ends the call badly, unless its end is decided already. What a peer may
// not see goes to the log.
func (c *call) finish(t frame.Timings, err error) {
	if errors.Is(err, errStopped) {
		return // the session decided first
	}
	code, text, retry := callCode(err)
	if code == frame.Internal && !errors.Is(err, stream.ErrClosed) { // or the session decided while a result was on its way to it
		c.peer.server.log.Error("call failed", slog.String("session", c.peer.holder),
			slog.String("call", c.id.String()), slog.String("error", err.Error()))
	}
	c.peer.sess.Do(func(m *stream.Machine, _ stream.Instant) {
		m.Finish(frame.Done{Call: c.id, Code: code, Message: text, Timings: t, RetryAfterMillis: retry})
	})
}

// took is how long the call has been computing or waiting to; 0 if it never was.
// The session is locked.
func (c *call) took(now stream.Instant) time.Duration {
	if c.cancel == nil {
		return 0
	}
	return max(time.Duration(now-c.arrived), 1)
}

// end is the session's last event of the call; the session is locked.
func (c *call) end() {
	close(c.closed)
	if c.cancel == nil { // it never started
		c.release()
	}
}

// release gives back what waits on the side; nothing touches it any more.
func (c *call) release() {
	for _, in := range c.inputs {
		c.peer.settle(in)
	}
}
