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
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// exchange is one StreamTensors.
type exchange struct {
	*receiver
	stream grpc.BidiStreamingServer[pb.TensorChunk, pb.TensorChunk]
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
	e.receiver = s.receiver(stream.Context(), func(id string) sink {
		t := &running{exchange: e, id: id, over: make(chan struct{})}
		t.wanted, t.stop = context.WithCancelCause(e.ctx)
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
	return e.wait()
}

// running is a tensor that a model computes.
type running struct {
	*exchange
	id      string
	wanted  context.Context // ends when nobody wants the result any more
	stop    context.CancelCauseFunc
	run     *server.Run   // nil before open
	dropped atomic.Bool   // it will not come whole: who receives says why
	over    chan struct{} // closed with the run
	ring    *slab.Slab    // chunks of the result
	free    chan []byte   // those that have been sent, or are new
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
		size = min(size+ringExtra, ringBytes)
		t.ring, err = t.models.Buffer(size - size%min(size, chunkBytes)) // whole chunks
	}
	if err != nil {
		<-t.places
		return err
	}
	run, err := t.models.Open(t.ctx, t.model, engine.Call{Inputs: []engine.Input{{Desc: d, ChunkBytes: tensor.ChunkFor(d, engine.ChunkBytes)}}})
	if err == nil && len(run.Info().Outputs) != 1 {
		err = run.End(frame.Errorf(frame.FailedPrecondition, "model %q has %d outputs; the service needs a model with one", t.model, len(run.Info().Outputs)))
	}
	if err != nil {
		t.ring.Release()
		<-t.places
		return err
	}
	t.run, t.free = run, make(chan []byte, ringBytes/chunkBytes)
	for mem := range slices.Chunk(t.ring.Bytes(), chunkBytes) {
		t.free <- mem
	}
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

// end leaves the run to result if all has come. Otherwise result must not wait for the client
// while the run waits for what it holds.
func (t *running) end(err error) error {
	if t.run != nil && err == nil {
		return nil
	}
	t.dropped.Store(true)
	t.stop(err)
	if t.run == nil {
		return err
	}
	return t.run.End(err)
}

// result sends what the run makes, and ends it.
func (t *running) result() {
	chunks := len(t.free)
	err := t.take()
	for i := 0; err == nil && i < chunks; i++ { // until all is sent
		_, err = t.room()
	}
	if err = t.run.End(err); err != nil && !t.dropped.Load() {
		t.fail(err)
	}
	t.stop(nil)
	t.ring.Release()
	<-t.places
	t.live.Delete(t.id)
	close(t.over)
}

// room waits for memory of a chunk that has been sent, as long as the client reads those of
// other results.
func (t *running) room() ([]byte, error) {
	for passed := int64(-1); passed < t.passed.Load(); {
		passed = t.passed.Load()
		select {
		case mem := <-t.free:
			return mem, nil
		case <-t.wanted.Done():
			return nil, context.Cause(t.wanted)
		case <-time.After(t.most.unread):
		}
	}
	return nil, frame.Errorf(frame.ResourceExhausted, "the client has not read results for %v; it must read them while it sends", t.most.unread)
}

// take cuts the run's result into chunks.
func (t *running) take() error {
	var f *file
	var early []engine.Out // what comes before its turn
	defer func() {
		for _, o := range early {
			o.Release()
		}
	}()
	for at := int64(0); ; {
		o, err := t.run.Next(t.wanted)
		switch {
		case errors.Is(err, io.EOF) && f != nil && f.whole():
			return nil
		case errors.Is(err, io.EOF):
			return fmt.Errorf("%w: it ended before its result was complete", engine.ErrModel)
		case err != nil:
			return err
		}
		if early = append(early, o); f == nil {
			f = &file{id: "processed_" + t.id, desc: o.Desc, step: min(chunkBytes, int64(len(t.ring.Bytes()))), room: t.room, send: t.pass}
			err = f.begin(t.most.chunks)
		}
		for i := 0; err == nil && i >= 0; {
			if i = slices.IndexFunc(early, func(o engine.Out) bool { return o.Off == at }); i >= 0 {
				at += int64(len(early[i].Data))
				err = f.data(early[i].Data)
				early[i].Release()
				early = slices.Delete(early, i, i+1)
			}
		}
		if err != nil {
			return err
		}
	}
}

// pass leaves a chunk to be sent, unless the exchange fails before.
func (t *running) pass(c *pb.TensorChunk) error {
	t.ring.Retain() // until it is sent, which may be after the run
	t.out <- func() {
		if t.ctx.Err() == nil {
			if err := t.stream.Send(c); err != nil {
				t.fail(err)
			}
		}
		t.passed.Add(1)
		t.free <- c.Data[:cap(c.Data)]
		t.ring.Release()
	}
	return nil
}
