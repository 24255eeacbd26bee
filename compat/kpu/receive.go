package kpu

import (
	"context"
	"errors"
	"hash/maphash"
	"io"
	"time"

	pb "github.com/tensorferry/tensorferry/api/kpu/torch/server"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/background"
	"github.com/tensorferry/tensorferry/internal/torchsave"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// sink takes a tensor. Its functions copy what they are given.
type sink struct {
	open  func(d tensor.Desc) error // when the desc is known
	write func(data []byte) error
	end   func(err error) error // once, with nil if all has come; returns what the client is told
}

// receiver reassembles the tensors of an RPC. It belongs to one goroutine.
type receiver struct {
	*service
	ctx    context.Context
	turn   background.Turn         // of what it computes
	fail   context.CancelCauseFunc // ends the RPC
	begin  func(id string) sink
	open   map[string]*incoming
	chunks int64 // of the open tensors
}

// incoming is a tensor that has not come whole.
type incoming struct {
	sink
	total, next uint32                // chunks: in all, and to be read next
	sums        map[uint32]uint64     // of those that have come
	early       map[uint32]*slab.Slab // those beyond the next
	file        *torchsave.Reader
	known       bool       // the layout is
	window      *slab.Slab // of a strided tensor
	filled      int        // bytes of it
}

func (s *service) receiver(rpc context.Context, begin func(id string) sink) *receiver {
	r := &receiver{service: s, begin: begin, open: make(map[string]*incoming)}
	r.ctx, r.fail = context.WithCancelCause(rpc)
	return r
}

// wait waits for the end of the RPC: all has been done if it fails with io.EOF.
func (r *receiver) wait() error {
	<-r.ctx.Done()
	if err := context.Cause(r.ctx); !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

// receive receives until the client has nothing more to send, and then drops incomplete tensors.
// They hold memory and room in the store that others need, so the RPC fails if none of them gets
// a chunk for too long.
func (r *receiver) receive(recv func() (*pb.TensorChunk, error)) (err error) {
	silent := time.AfterFunc(r.most.silent, func() {
		r.fail(frame.Errorf(frame.ResourceExhausted, "nothing has come for %v, and a tensor is incomplete", r.most.silent))
	})
	defer silent.Stop()
	for err == nil {
		var c *pb.TensorChunk
		if silent.Stop(); len(r.open) > 0 {
			silent.Reset(r.most.silent)
		}
		c, err = recv()
		if silent.Stop(); err == nil {
			err = r.chunk(c.GetTensorId(), c)
			r.turn.End()
		}
	}
	for id, t := range r.open {
		_ = r.end(id, t, context.Canceled) // nobody is told
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// end ends a tensor, and returns what the client is told.
func (r *receiver) end(id string, t *incoming, err error) error {
	r.turn.End() // the sink's may wait
	delete(r.open, id)
	r.chunks -= int64(t.total)
	for _, b := range t.early {
		b.Release()
	}
	if t.window != nil {
		t.window.Release()
	}
	return t.sink.end(err)
}

// seed makes sums that nobody foresees.
var seed = maphash.MakeSeed()

// work takes the turn for n bytes.
func (r *receiver) work(n int) error {
	if n <= background.PieceBytes {
		return nil
	}
	return r.turn.Work(r.ctx)
}

// chunk takes a chunk, which it borrows.
func (r *receiver) chunk(id string, c *pb.TensorChunk) error {
	n, total, t := c.GetChunkNumber(), c.GetTotalChunks(), r.open[id]
	switch {
	case n >= total:
		return frame.Errorf(frame.InvalidArgument, "chunk_number %d must be below total_chunks %d", n, total)
	case t != nil && total != t.total:
		return frame.Errorf(frame.InvalidArgument, "total_chunks is %d, and was %d before the tensor was complete", total, t.total)
	case len(id) > idBytes || t == nil && (len(r.open) == r.most.open || int64(total) > r.most.chunks-r.chunks):
		return frame.Errorf(frame.ResourceExhausted, "one RPC may have %d incomplete tensors of %d chunks together, with ids of %d bytes", r.most.open, r.most.chunks, idBytes)
	case t == nil:
		t = &incoming{sink: r.begin(id), total: total, sums: make(map[uint32]uint64), early: make(map[uint32]*slab.Slab), file: torchsave.NewReader(terms.DefaultLimits().TensorBytes)}
		r.open[id] = t
		r.chunks += int64(total)
	}
	if err := r.work(len(c.GetData())); err != nil {
		return err
	}
	sum := maphash.Bytes(seed, c.GetData())
	if was, again := t.sums[n]; again && was != sum {
		return frame.Errorf(frame.InvalidArgument, "chunk_number %d came again with other bytes", n)
	} else if again {
		return nil
	}
	t.sums[n] = sum
	if n > t.next {
		b, err := r.models.Buffer(int64(len(c.GetData())))
		if err == nil {
			copy(b.Bytes(), c.GetData())
			t.early[n] = b
		}
		return err
	}
	err := r.read(t, c.GetData())
	for t.next++; err == nil && t.early[t.next] != nil; t.next++ {
		b := t.early[t.next]
		delete(t.early, t.next)
		err = r.read(t, b.Bytes())
		b.Release()
	}
	if err == nil && t.next == t.total {
		return r.end(id, t, r.finish(t))
	} else if err != nil {
		err = r.end(id, t, err)
	}
	return err
}

// read reads the next bytes of the file, which it borrows.
func (r *receiver) read(t *incoming, p []byte) error {
	for len(p) > 0 {
		if err := r.work(len(p)); err != nil {
			return err
		}
		data, rest, err := t.file.Next(p)
		if err != nil {
			return refused(err)
		}
		if l, known := t.file.Layout(); known && !t.known {
			if t.known = true; l.Dense() {
				r.turn.End() // it may wait, and so may write
				err = t.open(l.Desc)
			} else {
				t.window, err = r.models.Buffer(l.Window)
			}
		}
		if err == nil && t.window != nil {
			t.filled += copy(t.window.Bytes()[t.filled:], data)
		} else if err == nil && len(data) > 0 {
			r.turn.End()
			err = t.write(data)
		}
		if p = rest; err != nil {
			return err
		}
	}
	return nil
}

// finish checks the end of the file, and gathers a strided tensor.
func (r *receiver) finish(t *incoming) error {
	if err := t.file.Close(); err != nil || t.window == nil {
		return refused(err)
	}
	l, _ := t.file.Layout()
	size, err := l.Bytes()
	if err != nil {
		return err
	}
	b, err := r.models.Buffer(min(size, chunkBytes))
	if err != nil {
		return err
	}
	defer b.Release()
	r.turn.End()
	err = t.open(l.Desc)
	for at := int64(0); err == nil && at < size; at += chunkBytes {
		part := b.Bytes()[:min(size-at, chunkBytes)]
		if err = r.work(len(part)); err == nil {
			l.Gather(part, t.window.Bytes(), at*8/int64(l.DType.Bits()))
			r.turn.End()
			err = t.write(part)
		}
	}
	return err
}

// refused is what a client is told about an error of its file.
func refused(err error) error {
	if err == nil {
		return nil
	}
	code := frame.InvalidArgument
	if errors.Is(err, tensor.ErrTooLarge) {
		code = frame.ResourceExhausted
	}
	return frame.Errorf(code, "%s", reason.Plain(err))
}
