package transfer

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// In is one tensor on its way to us. P is where it goes.
type In[P assembler.Placer] struct {
	frame.Desc
	Geo   tensor.Geometry // once the desc is found to be within the limits
	Place P               // what the Handler's Begin returned
	// Moved is how many of its bytes are in place.
	Moved int64

	asm *assembler.Assembler
}

// Handler says where tensors go, and hears how they end: each tensor that begins
// ends with Whole or Failed, once. Its methods run one at a time.
type Handler[P assembler.Placer] interface {
	// Begin returns the place of a tensor that the peer has announced, be its desc
	// within the limits or not. It may keep t.
	Begin(t *In[P]) P
	// Open makes the place of a tensor whose desc is within the limits ready, or says
	// why it can not.
	Open(t *In[P]) error
	// Moved hears of a chunk of this many bytes that is in its place.
	Moved(t *In[P], bytes int64)
	// Whole says that every chunk is in its place.
	Whole(t *In[P])
	// Failed says why a tensor will not be whole. The error is a *frame.Error, or
	// what the Handler's own code returned.
	Failed(t *In[P], err error)
}

// ErrCorrupt is wrapped when a chunk's checksum is wrong: nobody can be asked to
// send it again.
var ErrCorrupt = errors.New("transfer: damaged on its way")

// Receiver takes the frames of a push or a pull. It belongs to one goroutine.
type Receiver[P assembler.Placer] struct {
	// ChunkBytes and TensorBytes are the largest chunk and tensor accepted, in bytes.
	ChunkBytes  uint32
	TensorBytes int64
	// OpenTensors is how many may be open at a time, Tensors how many may be announced.
	OpenTensors, Tensors int
	Checksum             codec.Checksum
	// Codecs are what our hello named.
	Codecs  []codec.Codec
	Handler Handler[P]

	tensors map[tensor.ID]*In[P] // nil: over
	open    []*In[P]
	claim   assembler.Claim
}

// Open returns how many tensors are on their way.
func (r *Receiver[P]) Open() int { return len(r.open) }

// Frame takes a frame, whose payload it borrows; hello and summaries are the
// caller's. An error is a *frame.Error and ends the transfer: the peer broke the
// protocol.
func (r *Receiver[P]) Frame(f *frame.Frame) error {
	if len(f.Calls)+len(f.Credits)+len(f.Acks)+len(f.Cancels)+len(f.Dones) > 0 || f.Drain != nil {
		return frame.Errorf(frame.InvalidArgument, "a transfer has descs, chunks and failures; calls, credits, acks and their like are of sessions")
	}
	for i := range f.Descs {
		if err := r.desc(&f.Descs[i]); err != nil {
			return err
		}
	}
	for i := range f.Failures {
		p := &f.Failures[i]
		t, announced := r.tensors[p.Tensor]
		if !announced {
			return frame.Errorf(frame.NotFound, "failure of tensor %s, which was not announced", p.Tensor)
		}
		if t != nil {
			r.fail(t, givenUp(p))
		}
	}
	if f.HasChunk() {
		return r.chunk(&f.Chunk)
	}
	return nil
}

func (r *Receiver[P]) desc(d *frame.Desc) error {
	if t, seen := r.tensors[d.Tensor]; seen {
		if t != nil && (!t.Desc.Desc.Equal(d.Desc) || t.SizeBytes != d.SizeBytes || t.ChunkBytes != d.ChunkBytes || t.Name != d.Name) {
			r.fail(t, frame.Errorf(frame.InvalidArgument, "tensor %s was announced before with another desc; use a new id", d.Tensor))
		}
		return nil
	}
	if len(r.tensors) >= r.Tensors {
		return frame.Errorf(frame.ResourceExhausted, "tensors of a transfer: the limit is %d; use several", r.Tensors)
	}
	if r.tensors == nil {
		r.tensors = make(map[tensor.ID]*In[P])
	}
	t := &In[P]{Desc: *d}
	t.Shape = d.Shape.Clone()
	r.tensors[d.Tensor] = t
	r.open = append(r.open, t)
	t.Place = r.Handler.Begin(t)
	geo, bad := d.Check(r.ChunkBytes, r.TensorBytes)
	switch {
	case bad != nil:
		r.fail(t, bad)
		return nil
	case len(r.open) > r.OpenTensors:
		r.fail(t, frame.Errorf(frame.ResourceExhausted, "tensor %s: open tensors: the limit of a transfer is %d", d.Tensor, r.OpenTensors))
		return nil
	case !d.Call.IsZero():
		r.fail(t, frame.Errorf(frame.InvalidArgument, "tensor %s belongs to call %s; a transfer has no calls", d.Tensor, d.Call))
		return nil
	}
	t.Geo = geo
	if err := r.Handler.Open(t); err != nil {
		r.fail(t, err)
		return nil
	}
	t.asm = assembler.NewPlaced(d.Tensor, geo, r.Checksum, t.Place)
	return nil
}

func (r *Receiver[P]) chunk(c *frame.Chunk) error {
	t, announced := r.tensors[c.Tensor]
	switch {
	case !announced:
		return frame.Errorf(frame.NotFound, "chunk %d of tensor %s, which was not announced; send its desc first", c.Index, c.Tensor)
	case t == nil:
		return nil // it is over: what still comes is late
	}
	k := codec.Codec(c.Codec)
	if k != codec.None && !slices.Contains(r.Codecs, k) {
		r.fail(t, frame.Errorf(frame.InvalidArgument, "chunk %d is in codec %d, which this side did not offer", c.Index, c.Codec))
		return nil
	}
	verdict, err := t.asm.Claim(&r.claim, c.Index, c.Len(), k, c.Sum)
	if err != nil {
		r.fail(t, frame.Errorf(frame.InvalidArgument, "%v", err))
		return nil
	}
	if verdict != assembler.Place {
		return nil
	}
	_, n := t.Geo.Span(c.Index)
	got, err := r.claim.Copy(c.Data)
	ok, e := t.asm.Commit(&r.claim, got, err)
	switch {
	case errors.Is(e, assembler.ErrConflict):
		r.fail(t, frame.Errorf(frame.InvalidArgument, "%v", e))
	case !ok && r.claim.Again(): // damaged, and here already
	case errors.Is(err, codec.ErrDecode):
		r.fail(t, fmt.Errorf("%w, tensor %s; send the tensor again", e, t.Tensor))
	case err != nil: // the place's own
		r.fail(t, err)
	case !ok:
		r.fail(t, fmt.Errorf("%w: chunk %d of tensor %s has checksum %08x, promised was %08x; send the tensor again", ErrCorrupt, c.Index, c.Tensor, got, c.Sum))
	default:
		t.Moved += n
		r.Handler.Moved(t, n)
		if t.asm.Whole() {
			r.forget(t)
			r.Handler.Whole(t)
		}
	}
	return nil
}

// givenUp is the failure of a tensor that the peer does not send to its end. What
// the peer says of it is kept by this side: no more of it than tells why, and no
// code that would make a success of it.
func givenUp(p *frame.Failure) *frame.Error {
	return &frame.Error{Code: p.Why(), Text: "given up by its sender: " + frame.Clip(p.Message, frame.FailureTextBytes)}
}

// Cover says that the caller holds ranges, ascending and apart, of a tensor of
// which the peer will send no more chunks: with them it is whole, or it failed.
func (r *Receiver[P]) Cover(id tensor.ID, held []Range) {
	t, left := r.tensors[id], ranges(held)
	if t == nil {
		return
	}
	for i := range t.Geo.Count() {
		off, n := t.Geo.Span(i)
		if !left.cover(off, n) && !t.asm.Has(i) {
			r.fail(t, fmt.Errorf("%w: chunk %d of tensor %s did not come", ErrCorrupt, i, t.Tensor))
			return
		}
	}
	r.forget(t)
	r.Handler.Whole(t)
}

// Refuse ends a tensor, if it is on its way.
func (r *Receiver[P]) Refuse(id tensor.ID, err error) {
	if t := r.tensors[id]; t != nil {
		r.fail(t, err)
	}
}

// Fail ends every tensor that is on its way.
func (r *Receiver[P]) Fail(err error) {
	for len(r.open) > 0 {
		r.fail(r.open[0], err)
	}
}

// End ends the transfer in order: tensors that are not whole failed.
func (r *Receiver[P]) End() {
	for len(r.open) > 0 {
		t := r.open[0]
		r.fail(t, frame.Errorf(frame.InvalidArgument, "tensor %s: the stream ended after %d of %d bytes; send all chunks first", t.Tensor, t.Moved, t.SizeBytes))
	}
}

func (r *Receiver[P]) fail(t *In[P], err error) {
	r.forget(t)
	r.Handler.Failed(t, err)
}

func (r *Receiver[P]) forget(t *In[P]) {
	r.tensors[t.Tensor] = nil
	for i, o := range r.open {
		if o == t {
			r.open = append(r.open[:i], r.open[i+1:]...)
			return
		}
	}
}
