package wire

import (
	"math"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// The payload is the last field of the last part.
const (
	fieldChunk = 15 // of a frame
	fieldData  = 15 // of a chunk
)

// The parts of a frame, with their fields by number, for both directions. Numbers out of
// range are the stream machine's to refuse, by failing one call or tensor.

func (c *coder) frame(f *frame.Frame) {
	optional(c, 1, "hello", &f.Hello, (*coder).hello)
	list(c, 2, "calls", MaxCalls, &f.Calls, (*coder).call)
	list(c, 3, "descs", MaxParts, &f.Descs, (*coder).desc)
	list(c, 4, "credits", MaxParts, &f.Credits, (*coder).credit)
	list(c, 5, "acks", MaxParts, &f.Acks, (*coder).ack)
	list(c, 6, "cancels", MaxParts, &f.Cancels, (*coder).cancel)
	list(c, 7, "failures", MaxParts, &f.Failures, (*coder).failure)
	list(c, 8, "dones", MaxParts, &f.Dones, (*coder).done)
	optional(c, 9, "drain", &f.Drain, (*coder).drain)
	list(c, 11, "ends", MaxParts, &f.Ends, (*coder).end)
	list(c, 14, "summaries", MaxParts, &f.Summaries, (*coder).summary)
	c.hasChunk = c.hasChunk || f.HasChunk() || c.comes(fieldChunk, protowire.BytesType)
	if c.hasChunk {
		nested(c, fieldChunk, "chunk", &f.Chunk, (*coder).chunk)
	}
}

func (c *coder) hello(h *frame.Hello) {
	number(c, 1, &h.Version)
	c.id(2, "session_id", &h.Session)
	number(c, 3, &h.MaxChunkBytes)
	number(c, 4, &h.AllowanceBytes)
	enum(c, 5, &h.Checksum, 0)
	number(c, 6, &h.MaxOpenTensors)
	packed(c, 7, &h.Codecs, frame.HelloCodecs, codecOf)
	number(c, 8, &h.Lanes)
	c.array(9, "lane_token", "32 bytes, or none", h.LaneToken[:])
	number(c, 10, &h.ChunkIdleMillis)
	c.flag(11, &h.Stores)
	number(c, 12, &h.LanesAtOnce)
	c.flag(13, &h.Sequences)
}

func (c *coder) call(v *frame.Call) {
	c.id(1, "id", &v.ID)
	c.name(2, "model", &v.Model)
	list(c, 3, "inputs", MaxCalls, &v.Inputs, (*coder).binding)
	c.entries(4, "params", &v.Params)
	number(c, 5, &v.TimeoutMillis)
	optional(c, 6, "put", &v.Put, (*coder).put)
	optional(c, 7, "get", &v.Get, (*coder).get)
	optional(c, 8, "sequence", &v.Sequence, (*coder).sequence)
}

func (c *coder) sequence(q *frame.Sequence) {
	c.id(1, "id", &q.ID)
	number(c, 2, &q.MaxRows)
	c.flag(3, &q.End)
}

func (c *coder) put(p *frame.Put) { c.flag(1, &p.All) }

func (c *coder) get(g *frame.Get) {
	list(c, 1, "selections", math.MaxInt, &g.Selections, (*coder).selection)
	c.flag(2, &g.More)
}

func (c *coder) selection(s *frame.Selection) {
	c.name(1, "name", &s.Name)
	c.flag(2, &s.Source)
	c.entries(3, "params", &s.Params)
	list(c, 4, "held", math.MaxInt, &s.Held, (*coder).extent)
	c.bytes(5, &s.HeldDigest)
}

func (c *coder) extent(r *frame.Range) {
	number(c, 1, &r.Off)
	number(c, 2, &r.Len)
}

func (c *coder) binding(b *frame.Binding) {
	c.name(1, "port", &b.Port)
	c.id(2, "tensor_id", &b.Tensor)
}

func (c *coder) desc(d *frame.Desc) {
	c.id(1, "tensor_id", &d.Tensor)
	enum(c, 2, &d.DType, 0)
	// Of too many dimensions enough are kept to refuse them: 60 KB of ones in a frame are
	// half a megabyte here.
	packed(c, 3, (*[]int64)(&d.Shape), tensor.MaxRank+1, as[int64])
	number(c, 4, &d.SizeBytes)
	number(c, 5, &d.ChunkBytes)
	c.idOrNone(6, "call_id", &d.Call) // a tensor of PushTensors belongs to no call
	c.name(7, "port", &d.Port)
	c.name(8, "name", &d.Name)
	c.entries(9, "metadata", &d.Metadata)
	c.flag(10, &d.OnAllowance)
	number(c, 11, &d.RetainChunks)
	c.flag(12, &d.Held)
}

func (c *coder) credit(v *frame.Credit) {
	c.id(1, "tensor_id", &v.Tensor)
	number(c, 2, &v.Limit)
}

func (c *coder) ack(a *frame.Ack) {
	c.id(1, "tensor_id", &a.Tensor)
	number(c, 2, &a.Below)
	packed(c, 3, &a.Beyond, 2*frame.AckPairs+1, as[uint32]) // enough to refuse them
	packed(c, 5, &a.Resend, math.MaxInt, as[uint32])
}

func (c *coder) cancel(id *tensor.ID) { c.id(1, "call_id", id) }

func (c *coder) failure(f *frame.Failure) {
	c.id(1, "tensor_id", &f.Tensor)
	number(c, 2, &f.Code)
	c.text(3, "message", &f.Message)
	c.reason(4, &f.Reason)
}

func (c *coder) done(d *frame.Done) {
	c.id(1, "call_id", &d.Call)
	number(c, 2, &d.Code)
	c.text(3, "message", &d.Message)
	list(c, 4, "outputs", MaxCalls, &d.Outputs, (*coder).binding)
	if c.mode == reading || d.Timings != (frame.Timings{}) {
		nested(c, 5, "timings", &d.Timings, (*coder).timings)
	}
	number(c, 6, &d.RetryAfterMillis)
	c.flag(7, &d.Refused)
	c.reason(8, &d.Reason)
	number(c, 9, &d.Rows)
}

func (c *coder) timings(t *frame.Timings) {
	number(c, 1, &t.Receive)
	number(c, 2, &t.Queue)
	number(c, 3, &t.H2D)
	number(c, 4, &t.Compute)
	number(c, 5, &t.D2H)
	number(c, 6, &t.FirstResult)
	number(c, 7, &t.Total)
}

func (c *coder) drain(d *frame.Drain) { c.text(1, "reason", &d.Reason) }

func (c *coder) end(e *frame.End) {
	c.id(1, "call_id", &e.Call)
	number(c, 2, &e.Tensors)
}

func (c *coder) summary(s *frame.Summary) {
	c.id(1, "tensor_id", &s.Tensor)
	c.name(2, "name", &s.Name)
	number(c, 3, &s.Code)
	c.text(4, "message", &s.Message)
	number(c, 5, &s.SizeBytes)
	c.array(6, "digest", "16 bytes, or none", s.Digest[:])
	c.flag(7, &s.Durable)
	number(c, 8, &s.RetryAfterMillis)
	c.idOrNone(9, "call_id", &s.Call) // outside a session it belongs to no call
	number(c, 10, &s.Evicted)
	number(c, 11, &s.EvictedBytes)
	c.reason(12, &s.Reason)
}

func (c *coder) chunk(v *frame.Chunk) {
	c.id(1, "tensor_id", &v.Tensor)
	number(c, 2, &v.Index)
	enum(c, 3, &v.Codec, unknownCodec)
	c.fixed(4, &v.Sum)
	c.payload(fieldData, v)
}

// unknownCodec is a number that no codec has; 0 is codec.None.
const unknownCodec = math.MaxUint8

func codecOf(v uint64) uint8 { return narrow(v, uint8(unknownCodec)) }
