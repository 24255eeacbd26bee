package wire

import (
	"fmt"
	"math"

	tensorferryv1 "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// convert appends the parts of pb to f, which takes over pb's strings, maps and
// shapes. It refuses only what a frame.Frame cannot hold: the stream machine refuses
// numbers out of range, by failing one call or tensor.
func convert(pb *tensorferryv1.Frame, f *frame.Frame) error {
	var c converter
	if pb.Hello != nil {
		f.Hello = c.hello(pb.Hello)
	}
	for i, p := range pb.Calls {
		call := frame.Call{
			ID: c.id(p.Id, "calls[%d].id", i), Model: p.Model, Params: p.Params, TimeoutMillis: p.TimeoutMillis,
		}
		c.most(len(p.Inputs), "calls[%d].inputs", i)
		for j, in := range p.Inputs {
			call.Inputs = append(call.Inputs, frame.Binding{
				Port: in.Port, Tensor: c.id(in.TensorId, "calls[%d].inputs[%d].tensor_id", i, j),
			})
		}
		if p.Put != nil {
			call.Put = &frame.Put{All: p.Put.All}
		}
		if p.Get != nil {
			call.Get = &frame.Get{Selections: Selections(p.Get.Selections), More: p.Get.More}
		}
		f.Calls = append(f.Calls, call)
	}
	for i, p := range pb.Descs {
		d := frame.Desc{
			Tensor:     c.id(p.TensorId, "descs[%d].tensor_id", i),
			Desc:       tensor.Desc{DType: tensor.DataType(known(p.Dtype)), Shape: shape(p.Shape)},
			SizeBytes:  p.SizeBytes,
			ChunkBytes: p.ChunkBytes,
			Port:       p.Port,
			Name:       p.Name,
			Metadata:   p.Metadata,

			OnAllowance:  p.OnAllowance,
			RetainChunks: p.RetainChunks,
			Held:         p.Held,
		}
		if len(p.CallId) > 0 { // a tensor of PushTensors belongs to no call
			d.Call = c.id(p.CallId, "descs[%d].call_id", i)
		}
		f.Descs = append(f.Descs, d)
	}
	for i, p := range pb.Credits {
		f.Credits = append(f.Credits, frame.Credit{
			Tensor: c.id(p.TensorId, "credits[%d].tensor_id", i), Limit: p.ChunkLimit,
		})
	}
	for i, p := range pb.Acks {
		f.Acks = append(f.Acks, frame.Ack{
			Tensor: c.id(p.TensorId, "acks[%d].tensor_id", i), Below: p.ReceivedBelow, Resend: p.Resend,
		})
	}
	for i, p := range pb.Cancels {
		f.Cancels = append(f.Cancels, c.id(p.CallId, "cancels[%d].call_id", i))
	}
	for i, p := range pb.Failures {
		f.Failures = append(f.Failures, frame.Failure{
			Tensor: c.id(p.TensorId, "failures[%d].tensor_id", i), Code: frame.Code(p.Code), Message: p.Message,
		})
	}
	for i, p := range pb.Dones {
		t := p.GetTimings()
		done := frame.Done{
			Call: c.id(p.CallId, "dones[%d].call_id", i), Code: frame.Code(p.Code), Message: p.Message,
			Timings: frame.Timings{
				Receive: t.GetReceiveNanos(), Queue: t.GetQueueNanos(), H2D: t.GetH2DNanos(),
				Compute: t.GetComputeNanos(), D2H: t.GetD2HNanos(),
				FirstResult: t.GetFirstResultNanos(), Total: t.GetTotalNanos(),
			},
			RetryAfterMillis: p.RetryAfterMillis,
		}
		c.most(len(p.Outputs), "dones[%d].outputs", i)
		for j, out := range p.Outputs {
			done.Outputs = append(done.Outputs, frame.Binding{
				Port: out.Port, Tensor: c.id(out.TensorId, "dones[%d].outputs[%d].tensor_id", i, j),
			})
		}
		f.Dones = append(f.Dones, done)
	}
	for i, p := range pb.Ends {
		f.Ends = append(f.Ends, frame.End{Call: c.id(p.CallId, "ends[%d].call_id", i), Tensors: p.Tensors})
	}
	for i, p := range pb.Summaries {
		f.Summaries = append(f.Summaries, c.summary(p, "summaries[%d]", i))
	}
	if pb.Drain != nil {
		f.Drain = &frame.Drain{Reason: pb.Drain.Reason}
	}
	if p := pb.Chunk; p != nil {
		f.Chunk.Tensor, f.Chunk.Index, f.Chunk.Sum = c.id(p.TensorId, "chunk.tensor_id"), p.Index, p.Checksum
		f.Chunk.Codec = codecOf(p.Codec)
		if len(p.Data) > 0 {
			f.Chunk.Data = append(f.Chunk.Data, p.Data)
		}
	}
	return c.err
}

// Selections copies what a get or a pull selects: a range takes five times as much memory
// in the message.
func Selections(list []*tensorferryv1.Selection) []frame.Selection {
	out := make([]frame.Selection, len(list))
	for i, p := range list {
		out[i] = frame.Selection{Name: p.GetName(), Source: p.GetSource(), Params: p.GetParams(), HeldDigest: p.GetHeldDigest()}
		if n := len(p.GetHeld()); n > 0 {
			out[i].Held = make([]frame.Range, n)
		}
		for j, r := range p.GetHeld() {
			out[i].Held[j] = frame.Range{Off: int64(r.GetOffset()), Len: int64(r.GetLength())}
		}
	}
	return out
}

// ToSelections copies selections into their messages, which share maps and digests.
func ToSelections(list []frame.Selection) []*tensorferryv1.Selection {
	out := make([]*tensorferryv1.Selection, len(list))
	for i, s := range list {
		out[i] = &tensorferryv1.Selection{Name: s.Name, Source: s.Source, Params: s.Params, HeldDigest: s.HeldDigest}
		for _, r := range s.Held {
			out[i].Held = append(out[i].Held, &tensorferryv1.Range{Offset: uint64(r.Off), Length: uint64(r.Len)})
		}
	}
	return out
}

// shape takes over dims. Of too many it copies enough to refuse them: 60 KB of ones
// in a frame are half a megabyte here.
func shape(dims []int64) tensor.Shape {
	if len(dims) > tensor.MaxRank {
		return tensor.Shape(dims[:tensor.MaxRank+1]).Clone()
	}
	return dims
}

// Hello copies what opens a pull.
func Hello(p *tensorferryv1.Hello) (*frame.Hello, error) {
	var c converter
	h := c.hello(p)
	return h, c.err
}

func (c *converter) hello(p *tensorferryv1.Hello) *frame.Hello {
	h := &frame.Hello{
		Version:        p.GetVersion(),
		Session:        c.id(p.GetSessionId(), "hello.session_id"),
		MaxChunkBytes:  p.GetMaxChunkBytes(),
		AllowanceBytes: p.GetAllowanceBytes(),
		Checksum:       uint8(known(p.GetChecksum())),
		MaxOpenTensors: p.GetMaxOpenTensors(),
		Lanes:          p.GetLanes(),

		ChunkIdleMillis: p.GetChunkIdleMillis(),
		Stores:          p.GetStores(),
	}
	if n := copy(h.LaneToken[:], p.GetLaneToken()); c.err == nil && (n != len(p.GetLaneToken()) || n > 0 && n < len(h.LaneToken)) {
		c.err = &FieldError{ErrMalformed, "hello.lane_token", "32 bytes, or none", fmt.Sprintf("%d bytes", len(p.GetLaneToken()))}
	}
	for _, k := range p.GetCodecs()[:min(len(p.GetCodecs()), frame.HelloCodecs)] {
		h.Codecs = append(h.Codecs, codecOf(k))
	}
	return h
}

// ToHello copies a hello into its message.
func ToHello(h *frame.Hello) *tensorferryv1.Hello {
	p := &tensorferryv1.Hello{
		Version: h.Version, SessionId: h.Session[:], MaxChunkBytes: h.MaxChunkBytes, AllowanceBytes: h.AllowanceBytes,
		Checksum: tensorferryv1.Checksum(h.Checksum), MaxOpenTensors: h.MaxOpenTensors,
		ChunkIdleMillis: h.ChunkIdleMillis, Stores: h.Stores,
	}
	for _, k := range h.Codecs {
		p.Codecs = append(p.Codecs, tensorferryv1.Codec(k))
	}
	return p
}

// Summary copies what ended a tensor of a push.
func Summary(p *tensorferryv1.Summary) (frame.Summary, error) {
	var c converter
	s := c.summary(p, "summary")
	return s, c.err
}

func (c *converter) summary(p *tensorferryv1.Summary, path string, at ...any) frame.Summary {
	s := frame.Summary{
		Tensor: c.id(p.GetTensorId(), path+".tensor_id", at...), Name: p.GetName(), Code: frame.Code(p.GetCode()),
		Message: p.GetMessage(), SizeBytes: p.GetSizeBytes(), Durable: p.GetDurable(), RetryAfterMillis: p.GetRetryAfterMillis(),
	}
	if len(p.GetCallId()) > 0 {
		s.Call = c.id(p.GetCallId(), path+".call_id", at...)
	}
	if n := copy(s.Digest[:], p.GetDigest()); c.err == nil && (n != len(p.GetDigest()) || n > 0 && n < len(s.Digest)) {
		c.err = &FieldError{ErrMalformed, fmt.Sprintf(path+".digest", at...), "16 bytes, or none", fmt.Sprintf("%d bytes", len(p.GetDigest()))}
	}
	return s
}

// ToSummary copies a summary into its message.
func ToSummary(s *frame.Summary) *tensorferryv1.Summary {
	p := &tensorferryv1.Summary{
		TensorId: s.Tensor[:], Name: s.Name, Code: uint32(s.Code), Message: Text(s.Message),
		SizeBytes: s.SizeBytes, Durable: s.Durable, RetryAfterMillis: s.RetryAfterMillis,
	}
	if !s.Digest.IsZero() {
		p.Digest = s.Digest[:]
	}
	if !s.Call.IsZero() {
		p.CallId = s.Call[:]
	}
	return p
}

// converter keeps the first thing that could not be converted.
type converter struct{ err error }

// id copies an ID. path is formatted only when there is something to say.
func (c *converter) id(b []byte, path string, at ...any) tensor.ID {
	id, ok := tensor.ParseID(b)
	if !ok && c.err == nil {
		got := fmt.Sprintf("%d bytes", len(b))
		if len(b) == len(id) {
			got = "zeros"
		}
		c.err = &FieldError{ErrMalformed, fmt.Sprintf(path, at...), "16 bytes, not all zero", got}
	}
	return id
}

func (c *converter) most(n int, path string, at ...any) {
	if n > MaxBindings && c.err == nil {
		c.err = tooLarge(fmt.Sprintf(path, at...), "bindings", MaxBindings, n)
	}
}

// known maps an enum's number that does not fit a byte to 0, which no enum uses.
func known[E tensorferryv1.DataType | tensorferryv1.Checksum](e E) E {
	if e < 0 || e > math.MaxUint8 {
		return 0
	}
	return e
}

// codecOf maps a codec's number that does not fit a byte to one that no codec has;
// 0 is codec.None.
func codecOf(k tensorferryv1.Codec) uint8 {
	if k < 0 || k > math.MaxUint8 {
		return math.MaxUint8
	}
	return uint8(k)
}
