package wire

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	tensorferryv1 "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
)

// ledger is a pool that counts what is put back and spoils it, so that who reads
// a buffer after its release gets caught.
type ledger struct {
	mem.NopBufferPool
	t        testing.TB
	made, in int
}

var spoiled = bytes.Repeat([]byte{0xdb}, 1<<16)

func (l *ledger) Put(b *[]byte) {
	l.in++
	for d := *b; len(d) > 0; {
		d = d[copy(d, spoiled):]
	}
}

// split cuts a copy of b into views of the lengths that cuts says, repeated;
// with none it is whole. gRPC tracks a buffer by its capacity, so there is room
// behind the last one.
func (l *ledger) split(b []byte, cuts ...byte) mem.BufferSlice {
	var s mem.BufferSlice
	b = append(make([]byte, 0, len(b)+SmallBytes+1), b...)
	for i := 0; len(b) > 0; i++ {
		n := len(b)
		if len(cuts) > 0 {
			n = min(n, int(cuts[i%len(cuts)]))
		}
		if n == 0 {
			s = append(s, mem.SliceBuffer(nil))
			if i < len(cuts) {
				continue
			}
			n = 1 // a script of zeros must end too
		}
		view := b[:n]
		l.made++
		s = append(s, mem.NewBuffer(&view, l))
		b = b[n:]
	}
	return s
}

// decoded is what a test looks at after Unmarshal: a frame whose payload is copied.
type decoded struct {
	frame   frame.Frame
	payload []byte
	err     error
}

// decode takes b through the codec in the views of cuts, and checks on the way
// that the payload outlives gRPC's references and that every buffer is released once.
func decode(t testing.TB, b []byte, cuts ...byte) decoded {
	t.Helper()
	l := &ledger{t: t}
	data := l.split(b, cuts...)
	m := new(Message)
	if err := (Codec{}).Unmarshal(data, m); err != nil {
		t.Fatalf("Unmarshal returned %v; it must leave errors in the message", err)
	}
	data.Free()
	d := snapshot(m)
	m.Free()
	if l.made != l.in {
		t.Fatalf("%d of %d receive buffers were released", l.in, l.made)
	}
	if !m.Frame.Empty() {
		t.Fatal("the frame is not empty after Free")
	}
	m.Free() // nothing left to free
	return d
}

func snapshot(m *Message) decoded {
	d := decoded{frame: copyFrame(&m.Frame), err: m.Err, payload: bytes.Join(m.Frame.Chunk.Data, nil)}
	d.frame.Chunk.Data = nil
	return d
}

// copyFrame copies the slices that the owner reuses.
func copyFrame(f *frame.Frame) frame.Frame {
	c := *f
	c.Calls = append([]frame.Call(nil), f.Calls...)
	c.Descs = append([]frame.Desc(nil), f.Descs...)
	c.Credits = append([]frame.Credit(nil), f.Credits...)
	c.Acks = append([]frame.Ack(nil), f.Acks...)
	c.Cancels = append([]tensor.ID(nil), f.Cancels...)
	c.Failures = append([]frame.Failure(nil), f.Failures...)
	c.Dones = append([]frame.Done(nil), f.Dones...)
	c.Ends = append([]frame.End(nil), f.Ends...)
	c.Summaries = append([]frame.Summary(nil), f.Summaries...)
	return c
}

// model is the slow and obvious decoder: the stock codec, the limits counted on its
// result, and what a frame cannot hold. It trusts the decoder with what the stock codec
// makes of that, and holds the frame to the message.
func model(t testing.TB, b []byte) decoded {
	t.Helper()
	var pb tensorferryv1.Frame
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(b, &pb); err != nil {
		return decoded{err: err}
	}
	if len(b)-len(pb.GetChunk().GetData()) > MaxControlBytes || len(pb.Calls) > MaxCalls {
		return decoded{err: ErrTooLarge}
	}
	for _, n := range []int{len(pb.Descs), len(pb.Credits), len(pb.Acks), len(pb.Cancels), len(pb.Failures), len(pb.Dones), len(pb.Ends), len(pb.Summaries)} {
		if n > MaxParts {
			return decoded{err: ErrTooLarge}
		}
	}
	if !holds(pb.ProtoReflect()) {
		return decoded{err: ErrMalformed}
	}
	usual, err := proto.MarshalOptions{Deterministic: true}.Marshal(&pb)
	if err != nil {
		t.Fatal(err)
	}
	d := decode(t, usual)
	if d.err != nil {
		t.Fatalf("%v does not decode: %v", &pb, d.err)
	}
	f := d.frame
	f.Chunk.Data = [][]byte{d.payload}
	if back := toProto(&f); !proto.Equal(back, &pb) {
		t.Fatalf("read %v, but the stock codec %v", back, &pb)
	}
	return d
}

// holds reports whether a frame can hold a message, and cuts from it what a frame leaves out.
func holds(m protoreflect.Message) bool {
	switch p := m.Interface().(type) {
	case *tensorferryv1.Hello:
		p.Checksum = tensorferryv1.Checksum(inByte(int32(p.Checksum), 0))
		p.Codecs = p.Codecs[:min(len(p.Codecs), frame.HelloCodecs)]
		for i, k := range p.Codecs {
			p.Codecs[i] = tensorferryv1.Codec(inByte(int32(k), unknownCodec))
		}
	case *tensorferryv1.TensorDesc:
		p.Dtype = tensorferryv1.DataType(inByte(int32(p.Dtype), 0))
		p.Shape = p.Shape[:min(len(p.Shape), tensor.MaxRank+1)]
	case *tensorferryv1.Ack:
		p.ReceivedBeyond = p.ReceivedBeyond[:min(len(p.ReceivedBeyond), 2*frame.AckPairs+1)]
	case *tensorferryv1.Chunk:
		p.Codec = tensorferryv1.Codec(inByte(int32(p.Codec), unknownCodec))
	case *tensorferryv1.Call:
		if len(p.Inputs) > MaxCalls {
			return false
		}
	case *tensorferryv1.Failure:
		p.Reason = string(reason.Parse(p.Reason))
	case *tensorferryv1.Summary:
		p.Reason = string(reason.Parse(p.Reason))
	case *tensorferryv1.Done:
		if len(p.Outputs) > MaxCalls {
			return false
		}
		p.Reason = string(reason.Parse(p.Reason))
		if proto.Equal(p.Timings, &tensorferryv1.Timings{}) {
			p.Timings = nil
		}
	}
	optional := map[protoreflect.FullName]int{
		"tensorferry.v1.Hello.lane_token": 32, "tensorferry.v1.Summary.digest": 16,
	}
	ok := true
	for i := range m.Descriptor().Fields().Len() {
		f := m.Descriptor().Fields().Get(i)
		v := m.Get(f)
		switch most, may := optional[f.FullName()]; {
		case f.IsMap():
		case f.IsList() && f.Message() != nil:
			for k := range v.List().Len() {
				ok = ok && holds(v.List().Get(k).Message())
			}
		case f.Message() != nil:
			ok = ok && (!m.Has(f) || holds(v.Message()))
		case may && len(v.Bytes()) == most && len(bytes.Trim(v.Bytes(), "\x00")) == 0:
			m.Clear(f)
		case may:
			ok = ok && (len(v.Bytes()) == 0 || len(v.Bytes()) == most)
		case f.Name() == "id" || strings.HasSuffix(string(f.Name()), "_id"):
			_, valid := tensor.ParseID(v.Bytes())
			none := f.FullName() == "tensorferry.v1.TensorDesc.call_id" || f.FullName() == "tensorferry.v1.Summary.call_id"
			ok = ok && (valid || none && len(v.Bytes()) == 0)
		}
	}
	return ok
}

// inByte returns other for an enum's number that does not fit a byte.
func inByte(n, other int32) int32 {
	if n != int32(uint8(n)) {
		return other
	}
	return n
}

// diff compares two decodings; of errors only that there is one.
func diff(a, b decoded) string {
	if (a.err != nil) != (b.err != nil) {
		return fmt.Sprintf("error %v against %v", a.err, b.err)
	}
	if a.err != nil {
		return ""
	}
	if !bytes.Equal(a.payload, b.payload) {
		return fmt.Sprintf("payloads of %d and %d bytes differ", len(a.payload), len(b.payload))
	}
	if reflect.DeepEqual(a.frame, b.frame) { // many times faster, but nil and empty differ
		return ""
	}
	return cmp.Diff(a.frame, b.frame, cmpopts.EquateEmpty())
}

// encode marshals f as gRPC has it done.
func encode(t testing.TB, f *frame.Frame) []byte {
	t.Helper()
	data, err := Codec{}.Marshal(&Message{Frame: *f})
	if err != nil {
		t.Fatal(err)
	}
	b := data.Materialize()
	data.Ref() // as the transport does
	data.Free()
	data.Free()
	return b
}

// toProto says in the stock codec's types what f says.
func toProto(f *frame.Frame) *tensorferryv1.Frame {
	pb := new(tensorferryv1.Frame)
	if h := f.Hello; h != nil {
		pb.Hello = &tensorferryv1.Hello{
			Version: h.Version, SessionId: h.Session[:], MaxChunkBytes: h.MaxChunkBytes, AllowanceBytes: h.AllowanceBytes,
			Checksum: tensorferryv1.Checksum(h.Checksum), MaxOpenTensors: h.MaxOpenTensors, Lanes: h.Lanes, LanesAtOnce: h.LanesAtOnce,
			ChunkIdleMillis: h.ChunkIdleMillis, Stores: h.Stores, Sequences: h.Sequences,
		}
		for _, k := range h.Codecs {
			pb.Hello.Codecs = append(pb.Hello.Codecs, tensorferryv1.Codec(k))
		}
		if !h.LaneToken.IsZero() {
			pb.Hello.LaneToken = h.LaneToken[:]
		}
	}
	for _, c := range f.Calls {
		p := &tensorferryv1.Call{Id: c.ID[:], Model: c.Model, Params: c.Params, TimeoutMillis: c.TimeoutMillis}
		for _, in := range c.Inputs {
			p.Inputs = append(p.Inputs, &tensorferryv1.Input{Port: in.Port, TensorId: in.Tensor[:]})
		}
		if q := c.Sequence; q != nil {
			p.Sequence = &tensorferryv1.Sequence{Id: q.ID[:], MaxRows: q.MaxRows, End: q.End}
		}
		if c.Put != nil {
			p.Put = &tensorferryv1.Put{All: c.Put.All}
		}
		if c.Get != nil {
			p.Get = &tensorferryv1.Get{More: c.Get.More}
			for _, s := range c.Get.Selections {
				q := &tensorferryv1.Selection{Name: s.Name, Source: s.Source, Params: s.Params, HeldDigest: s.HeldDigest}
				for _, r := range s.Held {
					q.Held = append(q.Held, &tensorferryv1.Range{Offset: uint64(r.Off), Length: uint64(r.Len)})
				}
				p.Get.Selections = append(p.Get.Selections, q)
			}
		}
		pb.Calls = append(pb.Calls, p)
	}
	for _, d := range f.Descs {
		p := &tensorferryv1.TensorDesc{
			TensorId: d.Tensor[:], Dtype: tensorferryv1.DataType(d.DType), Shape: d.Shape, SizeBytes: d.SizeBytes,
			ChunkBytes: d.ChunkBytes, Port: d.Port, Name: d.Name, Metadata: d.Metadata, OnAllowance: d.OnAllowance, RetainChunks: d.RetainChunks,
			Held: d.Held,
		}
		if !d.Call.IsZero() {
			p.CallId = d.Call[:]
		}
		pb.Descs = append(pb.Descs, p)
	}
	for _, c := range f.Credits {
		pb.Credits = append(pb.Credits, &tensorferryv1.Credit{TensorId: c.Tensor[:], ChunkLimit: c.Limit})
	}
	for _, a := range f.Acks {
		pb.Acks = append(pb.Acks, &tensorferryv1.Ack{TensorId: a.Tensor[:], ReceivedBelow: a.Below, ReceivedBeyond: a.Beyond, Resend: a.Resend})
	}
	for _, id := range f.Cancels {
		pb.Cancels = append(pb.Cancels, &tensorferryv1.Cancel{CallId: id[:]})
	}
	for _, p := range f.Failures {
		pb.Failures = append(pb.Failures, &tensorferryv1.Failure{TensorId: p.Tensor[:], Code: uint32(p.Code), Message: p.Message, Reason: string(p.Reason)})
	}
	for _, d := range f.Dones {
		p := &tensorferryv1.Done{CallId: d.Call[:], Code: uint32(d.Code), Message: d.Message, RetryAfterMillis: d.RetryAfterMillis, Refused: d.Refused, Reason: string(d.Reason), Rows: d.Rows}
		for _, out := range d.Outputs {
			p.Outputs = append(p.Outputs, &tensorferryv1.Output{Port: out.Port, TensorId: out.Tensor[:]})
		}
		if t := d.Timings; t != (frame.Timings{}) {
			p.Timings = &tensorferryv1.Timings{
				ReceiveNanos: t.Receive, QueueNanos: t.Queue, H2DNanos: t.H2D, ComputeNanos: t.Compute,
				D2HNanos: t.D2H, FirstResultNanos: t.FirstResult, TotalNanos: t.Total,
			}
		}
		pb.Dones = append(pb.Dones, p)
	}
	for _, e := range f.Ends {
		pb.Ends = append(pb.Ends, &tensorferryv1.PutEnd{CallId: e.Call[:], Tensors: e.Tensors})
	}
	for _, s := range f.Summaries {
		p := &tensorferryv1.Summary{
			TensorId: s.Tensor[:], Name: s.Name, Code: uint32(s.Code), Message: s.Message,
			SizeBytes: s.SizeBytes, Durable: s.Durable, RetryAfterMillis: s.RetryAfterMillis,
			Evicted: s.Evicted, EvictedBytes: s.EvictedBytes, Reason: string(s.Reason),
		}
		if !s.Digest.IsZero() {
			p.Digest = s.Digest[:]
		}
		if !s.Call.IsZero() {
			p.CallId = s.Call[:]
		}
		pb.Summaries = append(pb.Summaries, p)
	}
	if f.Drain != nil {
		pb.Drain = &tensorferryv1.Drain{Reason: f.Drain.Reason}
	}
	if c := f.Chunk; f.HasChunk() {
		pb.Chunk = &tensorferryv1.Chunk{TensorId: c.Tensor[:], Index: c.Index, Codec: tensorferryv1.Codec(c.Codec), Checksum: c.Sum, Data: bytes.Join(c.Data, nil)}
	}
	return pb
}

// kind is the word that a vector expects for err.
func kind(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, ErrMalformed):
		return "malformed"
	case errors.Is(err, ErrTooLarge):
		return "over limit"
	default:
		return "unknown error"
	}
}
