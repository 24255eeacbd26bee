package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/internal/transfer"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// PushRequest describes a push.
type PushRequest struct {
	// Tensors are stored under their Names, which must differ; Port is ignored. They are
	// sent one after another, in this order.
	Tensors []Input
	// Progress, if not nil, is called after each chunk sent, on the goroutine of Push.
	Progress func(Progress)
}

// Push stores tensors on the server and returns their summaries, in the order of the
// request. The error joins those of the summaries, or says what ended the push. A tensor
// whose summary has no error is stored. Push shares the inputs until it returns.
func (c *Client) Push(ctx context.Context, r PushRequest) ([]Summary, error) {
	out := make([]Summary, len(r.Tensors))
	var all []*pushing
	names := make(map[string]struct{}, len(r.Tensors))
	for i := range r.Tensors {
		in := &r.Tensors[i]
		out[i] = Summary{Name: in.Name, Desc: in.Desc}
		_, err := in.check()
		if in.Next != nil {
			err = fmt.Errorf("%w: tensor %q: Push does not support Next; use Reader", ErrInput, in.Name)
		}
		if _, twice := names[in.Name]; err == nil && twice {
			err = fmt.Errorf("%w: two tensors are named %q", ErrInput, in.Name)
		}
		names[in.Name] = struct{}{}
		if out[i].Err = err; err != nil {
			in.done()
			continue
		}
		p := &pushing{client: c, in: in, out: &out[i], letGo: make(chan struct{})}
		p.refs.Store(1)
		all = append(all, p)
	}
	var err error
	waiting := slices.Clone(all)
	for len(waiting) > 0 && err == nil {
		if err = c.push(ctx, waiting[:min(len(waiting), pushTensors)], r.Progress); err != nil {
			break
		}
		before := len(waiting)
		waiting = slices.DeleteFunc(waiting, func(p *pushing) bool { return p.over })
		if len(waiting) == before {
			err = &Error{Code: codes.Internal, Message: "the server ended the push without mentioning a tensor"}
		}
	}
	for _, p := range waiting {
		p.end(err)
	}
	for _, p := range all {
		<-p.letGo
	}
	if err = errorsOf(out); err != nil {
		c.known.Store(nil) // by now it may be another server
	}
	return out, err
}

// pushing is one tensor of a push, and the transfer.Viewer of its bytes.
type pushing struct {
	client *Client
	in     *Input
	out    *Summary
	id     tensor.ID
	over   bool
	refs   atomic.Int32
	letGo  chan struct{} // closed when refs is 0

	// The first bytes of a Reader, to send them again if the server ends the RPC because of
	// another tensor.
	kept      []*slab.Slab
	keptBytes int64
	unkept    bool // there were more than keepBytes
}

// View shares the next bytes.
func (p *pushing) View(off, n int64) ([]byte, interface{ Release() }, error) {
	if p.in.Reader == nil {
		p.refs.Add(1)
		return p.in.Data[off : off+n : off+n], p, nil
	}
	if n > 0 && off+n <= p.keptBytes {
		s := p.kept[off/int64(len(p.kept[0].Bytes()))] // all but the last have one size
		s.Retain()
		return s.Bytes(), s, nil
	}
	s, err := p.client.pool.Get(int(n))
	if err != nil {
		return nil, nil, fmt.Errorf("client: tensor %q: %w", p.in.Name, err)
	}
	if got, err := io.ReadFull(p.in.Reader, s.Bytes()); err != nil {
		s.Release()
		return nil, nil, fmt.Errorf("%w: tensor %q ended after %d of %d bytes: %w", ErrInput, p.in.Name, off+int64(got), p.out.Bytes, err)
	}
	p.keep(s)
	return s.Bytes(), s, nil
}

// keep retains a chunk that was read. Beyond keepBytes it forgets all of them.
func (p *pushing) keep(s *slab.Slab) {
	n := int64(len(s.Bytes()))
	if p.unkept = p.unkept || p.keptBytes+n > keepBytes; p.unkept {
		p.forget()
		return
	}
	if n == 0 {
		return
	}
	s.Retain()
	p.kept = append(p.kept, s)
	p.keptBytes += n
}

func (p *pushing) forget() {
	for _, s := range p.kept {
		s.Release()
	}
	p.kept, p.keptBytes = nil, 0
}

// Release ends the sharing of a view, or of the input itself.
func (p *pushing) Release() {
	if p.refs.Add(-1) == 0 {
		p.in.done()
		close(p.letGo)
	}
}

// done calls Release if it is set.
func (in *Input) done() {
	if in.Release != nil {
		in.Release()
	}
}

// end records the outcome of the tensor.
func (p *pushing) end(err error) {
	if !p.over {
		p.over, p.out.Err = true, err
		p.forget()
		p.Release()
	}
}

// push sends tensors in one RPC. The server may accept only the first few.
func (c *Client) push(ctx context.Context, list []*pushing, progress func(Progress)) error {
	known, err := c.facts(ctx)
	if err != nil {
		return err
	}
	own, cancel := context.WithCancelCause(ctx)
	defer cancel(nil) // ends the RPC if it is still open
	conn := newStallClock(c.cfg.StallTimeout, cancel)
	conn.wait()
	rpc, err := c.stub.PushTensors(own, grpc.MaxCallRecvMsgSize(pushResponseBytes))
	conn.stop()
	if err != nil {
		return c.transferError(ctx, own, err)
	}
	conn.Conn = wire.NewConn(rpc, nil)
	conn.rest = newRestClock("the push", c.cfg.InputIdle, known.chunkIdle, conn.waits, c.idle(cancel))
	defer func() {
		cancel(nil)
		_ = conn.quiet(func() error { conn.Finish(); return nil })
	}()
	hello := frame.Hello{Version: frame.Version, Session: session.NewID(), Checksum: uint8(c.cfg.Checksum)}
	err = c.sendAll(own, conn, hello, known, list, progress)
	if err == nil {
		err = conn.quiet(rpc.CloseSend)
	}
	if err != nil && !errors.Is(err, io.EOF) { // after EOF, RecvMsg returns the response or the RPC's error
		return c.transferError(ctx, own, err)
	}
	var resp pb.PushTensorsResponse
	conn.moved()
	conn.wait()
	err = rpc.RecvMsg(&resp)
	conn.stop()
	if err != nil {
		return c.transferError(ctx, own, err)
	}
	byID := make(map[tensor.ID]*pushing, len(list))
	for _, p := range list {
		byID[p.id] = p
		p.out.Transfer = hello.Session
	}
	for _, r := range resp.GetSummaries() {
		s, err := wire.Summary(r)
		if err != nil {
			return &Error{Code: codes.Internal, Cause: err}
		}
		p := byID[s.Tensor]
		if p == nil || p.over {
			continue
		}
		err = summaryError(&s)
		if err == nil && s.Digest != p.out.Digest {
			err = &Error{Code: codes.DataLoss, Message: fmt.Sprintf("tensor %q: the server stored %v, the client sent %v", s.Name, s.Digest, p.out.Digest)}
		}
		p.out.Durable = s.Durable
		p.end(err)
	}
	for _, p := range list {
		if !p.over && p.unkept { // it cannot be read again
			p.end(&Error{Code: codes.Aborted, Message: fmt.Sprintf("tensor %q: the push ended while it was being sent; push it again", p.in.Name)})
		}
	}
	return nil
}

// sendAll sends the frames of a push.
func (c *Client) sendAll(ctx context.Context, conn *stallClock, hello frame.Hello, known facts, list []*pushing, progress func(Progress)) error {
	s := transfer.Sender{
		Conn: conn, Checksum: c.cfg.Checksum, ChunkBytes: min(int64(c.cfg.ChunkBytes), known.chunkBytes), Codec: c.codecFor(known.codecs),
	}
	if err := s.Control(frame.Frame{Hello: &hello}); err != nil {
		return err
	}
	for _, p := range list {
		p.id = session.NewID()
		size, err := p.in.Bytes()
		if err != nil {
			return err
		}
		p.out.Bytes = size
		conn.rest.of(named("tensor", p.in.Name))
		moved := int64(0)
		s.Moved = func(_ *frame.Desc, n int64) {
			if moved += n; progress != nil {
				progress(Progress{p.in.Name, moved, size})
			}
		}
		t := transfer.Tensor{Desc: frame.Desc{Tensor: p.id, Desc: p.in.Desc, Name: p.in.Name, Metadata: p.in.Metadata}, From: p}
		p.out.Digest, err = s.Send(ctx, &t)
		conn.allow(size)
		if source, ok := errors.AsType[*transfer.SourceError](err); ok {
			p.end(source.Err)
			err = s.Control(frame.Frame{Failures: []frame.Failure{{Tensor: p.id, Code: frame.Cancelled, Message: "the client could not read all of it"}}})
		}
		if err != nil {
			return err
		}
	}
	return nil
}
