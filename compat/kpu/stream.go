package kpu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	pb "github.com/tensorferry/tensorferry/api/kpu/torch/server"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

// exchange is one StreamTensors.
type exchange struct {
	*receiver
	stream grpc.BidiStreamingServer[pb.TensorChunk, pb.TensorChunk]
	ctx    context.Context
	places chan struct{}  // a token for each run
	live   sync.Map       // from the id of each run to a channel that is closed with it
	out    chan func()    // each sends a chunk; has room for all that runs have memory for
	passed atomic.Int64   // chunks sent, of all runs
	work   sync.WaitGroup // runs
}

// StreamTensors runs the model on tensors. A goroutine receives them and writes to the runs, one
// for each run copies its result into chunks, and another one sends those. All end with the RPC.
func (s *service) StreamTensors(stream grpc.BidiStreamingServer[pb.TensorChunk, pb.TensorChunk]) error {
	e := &exchange{stream: stream, places: make(chan struct{}, s.most.open), out: make(chan func(), s.most.open*ringBytes/chunkBytes)}
	ctx, fail := context.WithCancelCause(stream.Context())
	e.ctx = ctx
	e.receiver = s.receiver(fail, func(id string) sink {
		t := &running{exchange: e, id: id, went: make(chan struct{}, 1), over: make(chan struct{})}
		return sink{t.open, t.write, t.end}
	})
	go func() {
		if err := e.receive(stream.Recv); err != nil {
			e.fail(err)
		}
		e.work.Wait()
		close(e.out)
	}()
	go func() {
		for send := range e.out {
			send()
		}
		e.fail(io.EOF) // unless it has failed
	}()
	<-e.ctx.Done()
	if err := context.Cause(e.ctx); !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

// running is a tensor that a model computes.
type running struct {
	*exchange
	id      string
	run     *server.Run // nil before open
	dropped atomic.Bool // it will not come whole: who receives says why
	sent    atomic.Int64
	went    chan struct{} // a token when a chunk has been sent
	over    chan struct{} // closed with the run

	// Of the goroutine of the result.
	ring   server.Buffer // chunk i lies at i modulo the number of chunks it holds
	file   *file         // nil before the result begins
	next   int64         // chunk
	filled int           // of its bytes of the tensor
}

// open opens the run, after the memory in which its result waits: what has a run must not be
// refused that.
func (t *running) open(d tensor.Desc) error {
	before, again := t.live.Load(t.id) // whose chunks must not be taken for this one's
	for again {
		select {
		case <-before.(chan struct{}):
			again = false
		case <-t.ctx.Done():
			return context.Cause(t.ctx)
		}
	}
	select {
	case t.places <- struct{}{}:
	case <-t.ctx.Done():
		return context.Cause(t.ctx)
	}
	size, err := d.Bytes()
	if err == nil {
		t.ring, err = t.hold(min(max(size+ringExtra, ringLeast), ringBytes))
	}
	if err != nil {
		<-t.places
		return err
	}
	run, err := t.models.Open(t.ctx, server.Request{Model: t.model, Inputs: []engine.Input{{Desc: d, ChunkBytes: tensor.ChunkFor(d, engine.ChunkBytes)}}})
	if err == nil && len(run.Info().Outputs) != 1 {
		err = run.End(frame.Errorf(frame.FailedPrecondition, "the model %q has %d outputs; the service needs one with one", t.model, len(run.Info().Outputs)))
	}
	if err != nil {
		t.drop(t.ring)
		<-t.places
		return err
	}
	t.run = &run
	t.live.Store(t.id, t.over)
	t.work.Go(t.result) // ends with the run
	return nil
}

// write copies data to the run. What the run does not need any more is dropped.
func (t *running) write(data []byte) error {
	if err := t.run.Write(t.ctx, 0, data); err == nil || errors.Is(err, engine.ErrClosed) {
		return nil
	}
	<-t.ctx.Done() // result is told the same, and ends the exchange
	return context.Cause(t.ctx)
}

// end leaves the run to result if all has come.
func (t *running) end(err error) error {
	if t.run == nil || err == nil {
		return err
	}
	t.dropped.Store(true)
	return t.run.End(err)
}

// result sends what the run makes, and ends it.
func (t *running) result() {
	err := t.take()
	for err == nil && t.sent.Load() < t.file.total {
		err = t.wait()
	}
	if err = t.run.End(err); err != nil && !t.dropped.Load() {
		t.fail(err)
	}
	t.drop(t.ring)
	<-t.places
	t.live.Delete(t.id)
	close(t.over)
}

// wait waits until a chunk has been sent, as long as the client reads those of other results.
func (t *running) wait() error {
	for passed := int64(-1); passed < t.passed.Load(); {
		passed = t.passed.Load()
		select {
		case <-t.went:
			return nil
		case <-t.ctx.Done():
			return context.Cause(t.ctx)
		case <-time.After(t.most.unread):
		}
	}
	return frame.Errorf(frame.ResourceExhausted, "the client has not read results for %v; it must read them while it sends", t.most.unread)
}

// take cuts the run's result into chunks.
func (t *running) take() error {
	var early []engine.Out // what comes before its turn
	defer func() {
		for _, o := range early {
			o.Release()
		}
	}()
	for at := int64(0); ; {
		o, err := t.run.Next(t.ctx)
		switch {
		case errors.Is(err, io.EOF) && t.file != nil && t.next == t.file.total:
			return nil
		case errors.Is(err, io.EOF):
			return fmt.Errorf("%w: it ended before its result was complete", engine.ErrModel)
		case err != nil:
			return err
		}
		if early = append(early, o); t.file == nil {
			t.file, err = newFile("processed_"+t.id, o.Desc, min(chunkBytes, int64(len(t.ring.Bytes()))), t.most.chunks)
		}
		for i := 0; err == nil && i >= 0; {
			if i = slices.IndexFunc(early, func(o engine.Out) bool { return o.Off == at }); i >= 0 {
				at += int64(len(early[i].Data))
				err = t.copy(early[i].Data)
				early[i].Release()
				early = slices.Delete(early, i, i+1)
			}
		}
		if err != nil {
			return err
		}
	}
}

// copy copies the next bytes of the result, and passes on the chunks that are complete.
func (t *running) copy(p []byte) error {
	n := int64(len(t.ring.Bytes())) / t.file.step // chunks in the ring
	for t.next < t.file.total {
		chunk, data := t.file.chunk(t.next, t.ring.Bytes()[t.next%n*t.file.step:])
		if len(p) == 0 && t.filled < len(data) {
			return nil
		}
		for t.sent.Load() <= t.next-n {
			if err := t.wait(); err != nil {
				return err
			}
		}
		k := copy(data[t.filled:], p)
		if p, t.filled = p[k:], t.filled+k; t.filled < len(data) {
			return nil
		}
		c := t.file.seal(t.next, chunk, data)
		t.ring.Retain() // until it is sent, which may be after the run
		t.out <- func() { t.send(c) }
		t.next, t.filled = t.next+1, 0
	}
	return nil
}

// send sends a chunk, unless the exchange has failed.
func (t *running) send(c *pb.TensorChunk) {
	if t.ctx.Err() == nil {
		if err := t.stream.Send(c); err != nil {
			t.fail(err)
		}
	}
	t.ring.Release()
	t.sent.Add(1)
	t.passed.Add(1)
	select {
	case t.went <- struct{}{}:
	default:
	}
}
