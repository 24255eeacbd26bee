package wire

import (
	"fmt"
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

var frameFields = fields[frame.Frame]{
	1:  func(c *coder, f *frame.Frame) { optional(c, "hello", &f.Hello, helloFields) },
	2:  func(c *coder, f *frame.Frame) { list(c, "calls", MaxCalls, &f.Calls, callFields) },
	3:  func(c *coder, f *frame.Frame) { list(c, "descs", MaxParts, &f.Descs, descFields) },
	4:  func(c *coder, f *frame.Frame) { list(c, "credits", MaxParts, &f.Credits, creditFields) },
	5:  func(c *coder, f *frame.Frame) { list(c, "acks", MaxParts, &f.Acks, ackFields) },
	6:  func(c *coder, f *frame.Frame) { list(c, "cancels", MaxParts, &f.Cancels, cancelFields) },
	7:  func(c *coder, f *frame.Frame) { list(c, "failures", MaxParts, &f.Failures, failureFields) },
	8:  func(c *coder, f *frame.Frame) { list(c, "dones", MaxParts, &f.Dones, doneFields) },
	9:  func(c *coder, f *frame.Frame) { optional(c, "drain", &f.Drain, drainFields) },
	11: func(c *coder, f *frame.Frame) { list(c, "ends", MaxParts, &f.Ends, endFields) },
	14: func(c *coder, f *frame.Frame) { list(c, "summaries", MaxParts, &f.Summaries, summaryFields) },
	fieldChunk: func(c *coder, f *frame.Frame) {
		if c.hasChunk = c.hasChunk || c.comes(protowire.BytesType) || f.HasChunk(); c.hasChunk {
			nested(c, "chunk", &f.Chunk, chunkFields)
		}
	},
}

var helloFields = fields[frame.Hello]{
	1:  func(c *coder, h *frame.Hello) { number(c, &h.Version) },
	2:  func(c *coder, h *frame.Hello) { c.id("session_id", &h.Session) },
	3:  func(c *coder, h *frame.Hello) { number(c, &h.MaxChunkBytes) },
	4:  func(c *coder, h *frame.Hello) { number(c, &h.AllowanceBytes) },
	5:  func(c *coder, h *frame.Hello) { enum(c, &h.Checksum, 0) },
	6:  func(c *coder, h *frame.Hello) { number(c, &h.MaxOpenTensors) },
	7:  func(c *coder, h *frame.Hello) { packed(c, &h.Codecs, frame.HelloCodecs, codecOf) },
	8:  func(c *coder, h *frame.Hello) { number(c, &h.Lanes) },
	9:  func(c *coder, h *frame.Hello) { c.array("lane_token", "32 bytes, or none", h.LaneToken[:]) },
	10: func(c *coder, h *frame.Hello) { number(c, &h.ChunkIdleMillis) },
	11: func(c *coder, h *frame.Hello) { c.flag(&h.Stores) },
	12: func(c *coder, h *frame.Hello) { number(c, &h.LanesAtOnce) },
	13: func(c *coder, h *frame.Hello) { c.flag(&h.Sequences) },
}

var callFields = fields[frame.Call]{
	1: func(c *coder, v *frame.Call) { c.id("id", &v.ID) },
	2: func(c *coder, v *frame.Call) { c.name("model", &v.Model) },
	3: func(c *coder, v *frame.Call) { list(c, "inputs", MaxCalls, &v.Inputs, bindingFields) },
	4: func(c *coder, v *frame.Call) { c.entries("params", &v.Params) },
	5: func(c *coder, v *frame.Call) { number(c, &v.TimeoutMillis) },
	6: func(c *coder, v *frame.Call) { optional(c, "put", &v.Put, putFields) },
	7: func(c *coder, v *frame.Call) { optional(c, "get", &v.Get, getFields) },
	8: func(c *coder, v *frame.Call) { optional(c, "sequence", &v.Sequence, sequenceFields) },
}

var sequenceFields = fields[frame.Sequence]{
	1: func(c *coder, q *frame.Sequence) { c.id("id", &q.ID) },
	2: func(c *coder, q *frame.Sequence) { number(c, &q.MaxRows) },
	3: func(c *coder, q *frame.Sequence) { c.flag(&q.End) },
}

var putFields = fields[frame.Put]{
	1: func(c *coder, p *frame.Put) { c.flag(&p.All) },
}

var getFields = fields[frame.Get]{
	1: func(c *coder, g *frame.Get) { list(c, "selections", math.MaxInt, &g.Selections, selectionFields) },
	2: func(c *coder, g *frame.Get) { c.flag(&g.More) },
}

var selectionFields = fields[frame.Selection]{
	1: func(c *coder, s *frame.Selection) { c.name("name", &s.Name) },
	2: func(c *coder, s *frame.Selection) { c.flag(&s.Source) },
	3: func(c *coder, s *frame.Selection) { c.entries("params", &s.Params) },
	4: func(c *coder, s *frame.Selection) { list(c, "held", math.MaxInt, &s.Held, extentFields) },
	5: func(c *coder, s *frame.Selection) { c.bytes(&s.HeldDigest) },
}

var extentFields = fields[frame.Range]{
	1: func(c *coder, r *frame.Range) { number(c, &r.Off) },
	2: func(c *coder, r *frame.Range) { number(c, &r.Len) },
}

var bindingFields = fields[frame.Binding]{
	1: func(c *coder, b *frame.Binding) { c.name("port", &b.Port) },
	2: func(c *coder, b *frame.Binding) { c.id("tensor_id", &b.Tensor) },
}

var descFields = fields[frame.Desc]{
	1: func(c *coder, d *frame.Desc) { c.id("tensor_id", &d.Tensor) },
	2: func(c *coder, d *frame.Desc) { enum(c, &d.DType, 0) },
	// Of too many dimensions enough are kept to refuse them: 60 KB of ones in a frame are
	// half a megabyte here.
	3:  func(c *coder, d *frame.Desc) { packed(c, (*[]int64)(&d.Shape), tensor.MaxRank+1, as[int64]) },
	4:  func(c *coder, d *frame.Desc) { number(c, &d.SizeBytes) },
	5:  func(c *coder, d *frame.Desc) { number(c, &d.ChunkBytes) },
	6:  func(c *coder, d *frame.Desc) { c.idOrNone("call_id", &d.Call) }, // a tensor of PushTensors belongs to no call
	7:  func(c *coder, d *frame.Desc) { c.name("port", &d.Port) },
	8:  func(c *coder, d *frame.Desc) { c.name("name", &d.Name) },
	9:  func(c *coder, d *frame.Desc) { c.entries("metadata", &d.Metadata) },
	10: func(c *coder, d *frame.Desc) { c.flag(&d.OnAllowance) },
	11: func(c *coder, d *frame.Desc) { number(c, &d.RetainChunks) },
	12: func(c *coder, d *frame.Desc) { c.flag(&d.Held) },
}

var creditFields = fields[frame.Credit]{
	1: func(c *coder, v *frame.Credit) { c.id("tensor_id", &v.Tensor) },
	2: func(c *coder, v *frame.Credit) { number(c, &v.Limit) },
}

var ackFields = fields[frame.Ack]{
	1: func(c *coder, a *frame.Ack) { c.id("tensor_id", &a.Tensor) },
	2: func(c *coder, a *frame.Ack) { number(c, &a.Below) },
	3: func(c *coder, a *frame.Ack) { packed(c, &a.Beyond, 2*frame.AckPairs+1, as[uint32]) }, // enough to refuse them
	5: func(c *coder, a *frame.Ack) { packed(c, &a.Resend, math.MaxInt, as[uint32]) },
}

var cancelFields = fields[tensor.ID]{
	1: func(c *coder, id *tensor.ID) { c.id("call_id", id) },
}

var failureFields = fields[frame.Failure]{
	1: func(c *coder, f *frame.Failure) { c.id("tensor_id", &f.Tensor) },
	2: func(c *coder, f *frame.Failure) { number(c, &f.Code) },
	3: func(c *coder, f *frame.Failure) { c.text("message", &f.Message) },
	4: func(c *coder, f *frame.Failure) { c.reason(&f.Reason) },
}

var doneFields = fields[frame.Done]{
	1: func(c *coder, d *frame.Done) { c.id("call_id", &d.Call) },
	2: func(c *coder, d *frame.Done) { number(c, &d.Code) },
	3: func(c *coder, d *frame.Done) { c.text("message", &d.Message) },
	4: func(c *coder, d *frame.Done) { list(c, "outputs", MaxCalls, &d.Outputs, bindingFields) },
	5: func(c *coder, d *frame.Done) {
		if !c.writes || d.Timings != (frame.Timings{}) {
			nested(c, "timings", &d.Timings, timingsFields)
		}
	},
	6: func(c *coder, d *frame.Done) { number(c, &d.RetryAfterMillis) },
	7: func(c *coder, d *frame.Done) { c.flag(&d.Refused) },
	8: func(c *coder, d *frame.Done) { c.reason(&d.Reason) },
	9: func(c *coder, d *frame.Done) { number(c, &d.Rows) },
}

var timingsFields = fields[frame.Timings]{
	1: func(c *coder, t *frame.Timings) { number(c, &t.Receive) },
	2: func(c *coder, t *frame.Timings) { number(c, &t.Queue) },
	3: func(c *coder, t *frame.Timings) { number(c, &t.H2D) },
	4: func(c *coder, t *frame.Timings) { number(c, &t.Compute) },
	5: func(c *coder, t *frame.Timings) { number(c, &t.D2H) },
	6: func(c *coder, t *frame.Timings) { number(c, &t.FirstResult) },
	7: func(c *coder, t *frame.Timings) { number(c, &t.Total) },
}

var drainFields = fields[frame.Drain]{
	1: func(c *coder, d *frame.Drain) { c.text("reason", &d.Reason) },
}

var endFields = fields[frame.End]{
	1: func(c *coder, e *frame.End) { c.id("call_id", &e.Call) },
	2: func(c *coder, e *frame.End) { number(c, &e.Tensors) },
}

var summaryFields = fields[frame.Summary]{
	1:  func(c *coder, s *frame.Summary) { c.id("tensor_id", &s.Tensor) },
	2:  func(c *coder, s *frame.Summary) { c.name("name", &s.Name) },
	3:  func(c *coder, s *frame.Summary) { number(c, &s.Code) },
	4:  func(c *coder, s *frame.Summary) { c.text("message", &s.Message) },
	5:  func(c *coder, s *frame.Summary) { number(c, &s.SizeBytes) },
	6:  func(c *coder, s *frame.Summary) { c.array("digest", "16 bytes, or none", s.Digest[:]) },
	7:  func(c *coder, s *frame.Summary) { c.flag(&s.Durable) },
	8:  func(c *coder, s *frame.Summary) { number(c, &s.RetryAfterMillis) },
	9:  func(c *coder, s *frame.Summary) { c.idOrNone("call_id", &s.Call) }, // outside a session it belongs to no call
	10: func(c *coder, s *frame.Summary) { number(c, &s.Evicted) },
	11: func(c *coder, s *frame.Summary) { number(c, &s.EvictedBytes) },
	12: func(c *coder, s *frame.Summary) { c.reason(&s.Reason) },
}

var chunkFields = fields[frame.Chunk]{
	1:         func(c *coder, v *frame.Chunk) { c.id("tensor_id", &v.Tensor) },
	2:         func(c *coder, v *frame.Chunk) { number(c, &v.Index) },
	3:         func(c *coder, v *frame.Chunk) { enum(c, &v.Codec, unknownCodec) },
	4:         func(c *coder, v *frame.Chunk) { c.fixed(&v.Sum) },
	fieldData: func(c *coder, v *frame.Chunk) { c.payload(v) },
}

// check looks whether the parts of a frame have their IDs, as a message that was read has only once all
// of it was.
func (c *coder) check(f *frame.Frame) {
	if f.Hello != nil && f.Hello.Session.IsZero() {
		c.missing("hello.session_id")
	}
	for i := range f.Calls {
		p := &f.Calls[i]
		if p.ID.IsZero() {
			c.missing("calls[%d].id", i)
		}
		c.bindings(p.Inputs, "calls[%d].inputs", i)
		if p.Sequence != nil && p.Sequence.ID.IsZero() {
			c.missing("calls[%d].sequence.id", i)
		}
	}
	for i := range f.Dones {
		if f.Dones[i].Call.IsZero() {
			c.missing("dones[%d].call_id", i)
		}
		c.bindings(f.Dones[i].Outputs, "dones[%d].outputs", i)
	}
	each(c, f.Descs, "descs[%d].tensor_id", func(d *frame.Desc) *tensor.ID { return &d.Tensor })
	each(c, f.Credits, "credits[%d].tensor_id", func(p *frame.Credit) *tensor.ID { return &p.Tensor })
	each(c, f.Acks, "acks[%d].tensor_id", func(a *frame.Ack) *tensor.ID { return &a.Tensor })
	each(c, f.Cancels, "cancels[%d].call_id", func(id *tensor.ID) *tensor.ID { return id })
	each(c, f.Failures, "failures[%d].tensor_id", func(p *frame.Failure) *tensor.ID { return &p.Tensor })
	each(c, f.Ends, "ends[%d].call_id", func(e *frame.End) *tensor.ID { return &e.Call })
	each(c, f.Summaries, "summaries[%d].tensor_id", func(p *frame.Summary) *tensor.ID { return &p.Tensor })
	if c.hasChunk && f.Chunk.Tensor.IsZero() {
		c.missing("chunk.tensor_id")
	}
}

func (c *coder) bindings(all []frame.Binding, path string, part int) {
	for i := range all {
		if all[i].Tensor.IsZero() {
			c.missing(path+"[%d].tensor_id", part, i)
		}
	}
}

// each looks whether each part has an ID.
func each[T any](c *coder, all []T, path string, id func(*T) *tensor.ID) {
	for i := range all {
		if id(&all[i]).IsZero() {
			c.missing(path, i)
		}
	}
}

func (c *coder) missing(path string, parts ...any) {
	c.fail(fmt.Sprintf(path, parts...), wantID, noID)
}

// unknownCodec is a number that no codec has; 0 is codec.None.
const unknownCodec = math.MaxUint8

func codecOf(v uint64) uint8 { return narrow(v, uint8(unknownCodec)) }
