package client

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/glob"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/internal/transfer"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

// PullRequest describes a pull.
type PullRequest struct {
	Select []Selection
	// To returns the Sink of a tensor. If To is nil, or the Sink empty, the tensor gets
	// memory of its own, up to ResultBytes.
	To func(name string, d tensor.Desc) (Sink, error)
	// Progress, if not nil, is called after each chunk, on the goroutine of Pull.
	Progress func(Progress)
}

// Selection selects tensors of a server's store, or a source.
type Selection struct {
	// Name is the name of a tensor, a glob that must match at least one, or, with Source,
	// the name of a source.
	Name string
	// Source makes the server generate a tensor from Params.
	Source bool
	Params map[string]string
	// Held lists ranges that the Sink, an Into or an At, already has. They are not sent.
	// They must be in ascending order and must not overlap.
	Held []Range
	// HeldDigest is the digest of the tensor that Held is from, if known. If the server's
	// tensor has another digest, the server sends all of it.
	HeldDigest codec.Digest
}

// Range is a range of a tensor's bytes.
type Range = transfer.Range

// At returns a Sink that writes each chunk of a tensor to w, at its offset, as it arrives.
// Only Pull supports it. w is also read, for the digest, if chunks arrive out of order. All
// of this happens on the goroutine of Pull.
func At(w ReadWriterAt) Sink { return Sink{at: w} }

// ReadWriterAt is implemented by *os.File, for example.
type ReadWriterAt interface {
	io.ReaderAt
	io.WriterAt
}

// Pull fetches tensors and returns their summaries in order of arrival. The error joins
// those of the summaries, or says what ended the pull. A tensor whose summary has no error
// is complete and has the server's digest.
func (c *Client) Pull(ctx context.Context, r PullRequest) ([]Summary, error) {
	p := &pull{client: c, request: r, id: session.NewID(), byID: make(map[tensor.ID]*pulled), answered: make([]bool, len(r.Select))}
	hello := frame.Hello{Version: frame.Version, Session: p.id, MaxChunkBytes: uint32(c.cfg.ChunkBytes), Checksum: uint8(c.cfg.Checksum)}
	if c.cfg.Codec != codec.None {
		hello.Codecs = []uint8{uint8(c.cfg.Codec)}
	}
	own, cancel := context.WithCancelCause(ctx)
	defer cancel(nil) // ends the RPC if it is still open
	p.clock = newStallClock(c.cfg.StallTimeout, cancel)
	names := make(map[string]int, len(r.Select))
	for _, s := range r.Select {
		names[s.Name]++
		var g *glob.Glob
		if s.glob() {
			g, _ = glob.Parse(s.Name) // the server rejects an invalid one
		}
		p.globs = append(p.globs, g)
	}
	req := &pb.PullTensorsRequest{Hello: wire.ToHello(&hello)}
	for _, s := range r.Select {
		if len(s.Held) > 0 && names[s.Name] > 1 {
			return nil, fmt.Errorf("%w: selection %q: a tensor with Held must be selected only once", ErrInput, s.Name)
		}
		sel := &pb.Selection{Name: s.Name, Source: s.Source, Params: s.Params}
		for _, h := range s.Held {
			sel.Held = append(sel.Held, &pb.Range{Offset: uint64(h.Off), Length: uint64(h.Len)})
			p.clock.allow(h.Len)
		}
		if !s.HeldDigest.IsZero() {
			sel.HeldDigest = s.HeldDigest[:]
		}
		req.Selections = append(req.Selections, sel)
	}
	p.clock.wait()
	rpc, err := c.stub.PullTensors(own, req)
	p.clock.stop()
	if err == nil {
		p.clock.Conn = wire.NewConn(rpc, nil)
		p.clock.rest = newRestClock("the pull", c.cfg.InputIdle, 0, func() {
			_, _ = ask(own, c, c.stub.GetTransfer, &pb.GetTransferRequest{TransferId: p.id[:], Waiting: true})
		}, c.idle(cancel))
		err = p.receive()
		p.clock.rest.end()
	}
	if err != nil {
		err = c.transferError(ctx, own, err)
	}
	p.over(err)
	if err == nil {
		p.unanswered()
		err = errorsOf(p.list())
	}
	return p.list(), err
}

// pull is the state of one Pull.
type pull struct {
	client  *Client
	request PullRequest
	id      tensor.ID
	recv    transfer.Receiver[*pulled]
	clock   *stallClock
	order   []*pulled
	byID    map[tensor.ID]*pulled
	pieces  *bufio.Writer // created for the first tensor that needs it

	globs     []*glob.Glob // of the selections; nil for a plain name
	answered  []bool       // by selection: the server has mentioned it
	textBytes int          // of the server's texts that are kept
}

// pulled is one tensor of a pull, and its assembler.Placer.
type pulled struct {
	Summary
	into   []byte
	at     ReadWriterAt
	pieces *bufio.Writer // to at or writer; belongs to the pull
	writer io.Writer
	order  *codec.OrderedDigester // nil once it is over
	whole  bool
	over   bool
}

// WriteViews writes a chunk to the tensor's destination.
func (t *pulled) WriteViews(off int64, views [][]byte) error {
	if next := t.order.Next(); t.writer != nil && off != next {
		return frame.Errorf(frame.FailedPrecondition, "byte %d arrived instead of byte %d, but the tensor goes to a writer; use Into or At", off, next)
	}
	if t.into != nil {
		for _, v := range views {
			t.order.Wrote(off, v)
			off += int64(copy(t.into[off:], v))
		}
		return nil
	}
	to := t.writer
	if t.at != nil {
		to = io.NewOffsetWriter(t.at, off)
	}
	t.pieces.Reset(to)
	for _, v := range views {
		t.order.Wrote(off, v)
		if _, err := t.pieces.Write(v); err != nil {
			return err
		}
		off += int64(len(v))
	}
	return t.pieces.Flush()
}

// digest returns the digest of the whole tensor. It reads back what did not arrive in
// order.
func (t *pulled) digest() (codec.Digest, error) {
	switch next := t.order.Next(); {
	case t.at != nil:
		if err := t.order.ReadRest(t.at, t.Bytes); err != nil {
			return codec.Digest{}, err
		}
	case t.into != nil:
		t.order.Wrote(next, t.into[next:])
	}
	return t.order.Sum(), nil
}

// receive processes the server's frames. An error ends the pull.
func (p *pull) receive() error {
	p.recv = transfer.Receiver[*pulled]{
		ChunkBytes: uint32(p.client.cfg.ChunkBytes), TensorBytes: tensorBytes, OpenTensors: 1,
		Tensors: p.most(), Checksum: p.client.cfg.Checksum, Codecs: p.client.codecs(), Handler: p,
	}
	defer p.clock.Free()
	for first := true; ; first = false {
		f, err := p.clock.Recv()
		var bad *frame.Error
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.As(err, &bad):
			return &Error{Code: codes.Internal, Message: bad.Text}
		case err != nil:
			return err
		case first != (f.Hello != nil):
			return &Error{Code: codes.Internal, Message: "the server must begin a pull with one hello"}
		}
		if h := f.Hello; h != nil {
			if bad := h.Check(); bad != nil {
				return bad
			}
			if h.Session != p.id || h.Checksum != uint8(p.client.cfg.Checksum) {
				return &Error{Code: codes.Internal, Message: "the server's hello names another transfer or checksum"}
			}
			p.clock.moved()
			p.clock.rest.told(idleOf(h.ChunkIdleMillis))
		}
		if err := p.recv.Frame(f); err != nil {
			return err
		}
		// A summary may arrive with the last chunk.
		for i := range f.Summaries {
			if err := p.summary(&f.Summaries[i]); err != nil {
				return err
			}
		}
	}
}

// Begin adds a tensor that the server announces.
func (p *pull) Begin(in *transfer.In[*pulled]) *pulled { return p.tensor(in.Tensor, in.Name) }

// Open asks the caller where a tensor goes.
func (p *pull) Open(in *transfer.In[*pulled]) error {
	t := in.Place
	p.clock.rest.of(named("tensor", in.Name))
	t.Desc, t.Bytes, t.order = in.Desc.Desc.Clone(), in.Geo.Size, new(codec.OrderedDigester)
	if t.Name == "" {
		return &Error{Code: codes.Internal, Message: fmt.Sprintf("tensor %v: the server sent a tensor that was not selected", in.Tensor)}
	}
	var sink Sink
	var err error
	if p.request.To != nil {
		sink, err = p.request.To(in.Name, in.Desc.Desc.Clone())
	}
	switch {
	case err != nil:
	case sink.open != nil:
		t.writer, err = sink.open(in.Desc.Desc.Clone())
	case sink.at != nil:
		t.at = sink.at
	case sink.into != nil:
		if int64(len(sink.into)) != t.Bytes {
			return fmt.Errorf("%w: tensor %q has %d bytes, its buffer has %d", ErrInput, in.Name, t.Bytes, len(sink.into))
		}
		t.into = sink.into
	case t.Bytes > p.client.cfg.ResultBytes:
		return fmt.Errorf("%w: tensor %q has %d bytes, more than ResultBytes (%d); raise it, or use Into, Writer or At", ErrInput, in.Name, t.Bytes, p.client.cfg.ResultBytes)
	default:
		t.Data = make([]byte, t.Bytes)
		t.into = t.Data
	}
	if err == nil && t.into == nil {
		if p.pieces == nil {
			p.pieces = bufio.NewWriterSize(nil, pieceBytes)
		}
		t.pieces = p.pieces
	}
	return err
}

// tensor adds a tensor. It drops a name that was not selected: the server could send
// anything.
func (p *pull) tensor(id tensor.ID, name string) *pulled {
	p.clock.moved() // their number is bounded
	if !p.selected(name) {
		name = ""
	}
	t := &pulled{Summary: Summary{Name: name, Transfer: p.id}}
	p.order = append(p.order, t)
	p.byID[id] = t
	return t
}

// selected reports whether a selection matches name, and marks the first unanswered one
// that does as answered: the server processes selections in order.
func (p *pull) selected(name string) (found bool) {
	if len(name) > frame.NameBytes {
		return false
	}
	for i := range p.request.Select {
		if p.request.Select[i].Name == name || p.globs[i] != nil && p.globs[i].Match(name) {
			found = true
			if !p.answered[i] {
				p.answered[i] = true
				break
			}
		}
	}
	return found
}

// glob reports whether s may match several tensors.
func (s Selection) glob() bool { return !s.Source && strings.ContainsAny(s.Name, "*?[") }

// most is how many tensors the server may report.
func (p *pull) most() int {
	if slices.ContainsFunc(p.request.Select, Selection.glob) {
		return pullTensors
	}
	return len(p.request.Select)
}

// Moved records progress.
func (p *pull) Moved(in *transfer.In[*pulled], _ int64) {
	p.clock.moved()
	if p.request.Progress != nil {
		p.request.Progress(Progress{in.Name, in.Moved, in.Geo.Size})
	}
}

// Whole records that only the summary is missing.
func (p *pull) Whole(in *transfer.In[*pulled]) { in.Place.whole = true }

// Failed records why a tensor failed.
func (p *pull) Failed(in *transfer.In[*pulled], err error) {
	t := in.Place
	var se *frame.Error
	switch {
	case errors.As(err, &se):
		err = &Error{Code: codes.Code(se.Code), Message: fmt.Sprintf("tensor %q: %s", t.Name, se.Text)}
	case errors.Is(err, transfer.ErrCorrupt):
		err = &Error{Code: codes.DataLoss, Message: fmt.Sprintf("tensor %q: %v", t.Name, err)}
	case errors.Is(err, codec.ErrDecode):
		err = &Error{Code: codes.InvalidArgument, Message: fmt.Sprintf("tensor %q: %v", t.Name, err)}
	}
	t.end(err)
}

func (t *pulled) end(err error) {
	if !t.over {
		t.over, t.Err = true, err
		t.into, t.at, t.writer, t.order = nil, nil, nil, nil // there may be pullTensors of them
		if err != nil {
			t.Data = nil
		}
	}
}

// summary ends a tensor. An error ends the pull.
func (p *pull) summary(s *frame.Summary) error {
	s.Message = p.kept(s.Message)
	t := p.byID[s.Tensor]
	if t == nil { // a selection that matched nothing
		if most := p.most(); len(p.order) >= most {
			return &Error{Code: codes.ResourceExhausted, Message: fmt.Sprintf("the server reported more than %d tensors, the limit of this pull; use several pulls", most)}
		}
		t = p.tensor(s.Tensor, s.Name)
		s.Name = t.Name
		t.end(summaryError(s))
		if t.Err == nil {
			t.Err = &Error{Code: codes.Internal, Message: fmt.Sprintf("tensor %q: the server claims to have sent it, but did not", s.Name)}
		}
		return nil
	}
	if s.Name = t.Name; s.Code != frame.OK {
		t.end(summaryError(s))
		p.recv.Refuse(s.Tensor, t.Err) // discard the rest of it
		return nil
	}
	p.recv.Cover(s.Tensor, p.held(t.Name))
	if t.over || !t.whole {
		return nil
	}
	t.Durable = s.Durable
	d, err := t.digest()
	if err == nil && d != s.Digest {
		err = &Error{Code: codes.DataLoss, Message: fmt.Sprintf("tensor %q: its digest is %v, the server's is %v; pull it again", t.Name, d, s.Digest)}
	}
	t.Digest = d
	t.end(err)
	return nil
}

// kept copies as much of the server's text as the limits allow.
func (p *pull) kept(text string) string {
	text = frame.Clip(text, min(frame.TextBytes, pullTextBytes-p.textBytes))
	p.textBytes += len(text)
	return text
}

// held returns the ranges of a tensor that the caller has.
func (p *pull) held(name string) []Range {
	if i := slices.IndexFunc(p.request.Select, func(s Selection) bool { return s.Name == name }); i >= 0 {
		return p.request.Select[i].Held
	}
	return nil
}

// over ends the tensors that are still open.
func (p *pull) over(err error) {
	if err == nil {
		err = &Error{Code: codes.Internal, Message: "the server ended the pull without a summary"}
	}
	for _, t := range p.order {
		t.end(err)
	}
}

// unanswered adds a failure for each selection that the server did not mention before its
// OK.
func (p *pull) unanswered() {
	for i, s := range p.request.Select {
		if !p.answered[i] {
			err := &Error{Code: codes.DataLoss, Message: fmt.Sprintf("tensor %q: the server ended the pull without mentioning it; pull it again", s.Name)}
			p.order = append(p.order, &pulled{Summary: Summary{Name: s.Name, Transfer: p.id, Err: err}})
		}
	}
}

func (p *pull) list() []Summary {
	out := make([]Summary, len(p.order))
	for i, t := range p.order {
		out[i] = t.Summary
	}
	return out
}
