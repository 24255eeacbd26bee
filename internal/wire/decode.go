package wire

import (
	"math"
	"slices"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	tensorferryv1 "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// Field numbers of the proto that this package reads or writes by hand.
const (
	fieldHello     = 1
	fieldCalls     = 2
	fieldDescs     = 3
	fieldCredits   = 4
	fieldAcks      = 5
	fieldCancels   = 6
	fieldFailures  = 7
	fieldDones     = 8
	fieldDrain     = 9
	fieldEnds      = 11
	fieldSummaries = 14
	fieldChunk     = 15

	// A credit, an ack and a chunk begin alike: whose, and a number.
	fieldTensor = 1
	fieldNumber = 2 // chunk_limit, received_below, index
	fieldCodec  = 3 // of a chunk
	fieldSum    = 4 // of a chunk
	fieldResend = 5 // of an ack
	fieldData   = 15
)

// Every tag of a hot part fits one byte.
const (
	tagTensor = fieldTensor<<3 | byte(protowire.BytesType)
	tagNumber = fieldNumber<<3 | byte(protowire.VarintType)
	tagCodec  = fieldCodec<<3 | byte(protowire.VarintType)
	tagSum    = fieldSum<<3 | byte(protowire.Fixed32Type)
	tagResend = fieldResend<<3 | byte(protowire.BytesType)
	tagData   = fieldData<<3 | byte(protowire.BytesType)
)

// repeated fields of a frame, whose bytes alone do not bound them well enough.
var repeated = [fieldChunk + 1]struct {
	name string
	most int
}{
	fieldCalls: {"calls", MaxCalls}, fieldDescs: {"descs", MaxParts}, fieldCredits: {"credits", MaxParts}, fieldAcks: {"acks", MaxParts},
	fieldCancels: {"cancels", MaxParts}, fieldFailures: {"failures", MaxParts}, fieldDones: {"dones", MaxParts}, fieldEnds: {"ends", MaxParts}, fieldSummaries: {"summaries", MaxParts},
}

// counts says how often each field was in a frame.
type counts [fieldChunk + 1]int

func (c *counts) add(field protowire.Number) error {
	c[field]++
	if r := repeated[field]; r.most > 0 && c[field] > r.most {
		return tooLarge(r.name, "parts", r.most, c[field])
	}
	return nil
}

func checkControl(n int) error {
	if n > MaxControlBytes {
		return tooLarge("frame", "bytes beside the payload", MaxControlBytes, n)
	}
	return nil
}

func (m *Message) unmarshal(data mem.BufferSlice) {
	m.Free()
	usual, err := m.parse(data)
	if !usual {
		clear(m.buffers) // of which no reference was taken
		m.buffers = m.buffers[:0]
		m.Free()
		if err == nil {
			err = m.parseJoined(data)
		}
	}
	if m.Err = err; err != nil {
		m.Frame.Reset()
		return
	}
	m.Control = data.Len() - m.Frame.Chunk.Len()
	// gRPC frees its own references when Unmarshal returns; Free is the other half.
	for _, b := range m.buffers {
		b.Ref()
	}
}

// parse reads a frame in its usual encoding, without allocating for credits, acks and
// the chunk. It reports false, and no error, for any other, which parseJoined then
// reads as the stock codec does.
func (m *Message) parse(data mem.BufferSlice) (usual bool, err error) {
	r := reader{buffers: data, left: data.Len()}
	var count counts
	control, payload := 0, 0
	m.cold = m.cold[:0]
	for r.left > 0 {
		tag := r.byte()
		n := r.length()
		if r.odd {
			return false, nil
		}
		end := r.left - n
		field := protowire.Number(tag >> 3)
		if tag&7 != byte(protowire.BytesType) || field > fieldChunk {
			return false, nil
		}
		if err := count.add(field); err != nil {
			return false, err
		}
		if field != fieldChunk {
			control += n
			if err := checkControl(control); err != nil {
				return false, err
			}
		}
		switch field {
		case fieldCredits:
			p := r.part(end, 1<<fieldTensor|1<<fieldNumber)
			m.Frame.Credits = append(m.Frame.Credits, frame.Credit{Tensor: p.tensor, Limit: p.number})
		case fieldAcks:
			p := r.part(end, 1<<fieldTensor|1<<fieldNumber|1<<fieldResend)
			m.Frame.Acks = append(m.Frame.Acks, frame.Ack{Tensor: p.tensor, Below: p.number, Resend: p.resend})
		case fieldChunk:
			if count[fieldChunk] > 1 {
				return false, nil
			}
			// No more views than buffers, so that what is kept stays close to what is used.
			r.views, r.held = slices.Grow(m.Frame.Chunk.Data, len(data)), slices.Grow(m.buffers, len(data))
			p := r.part(end, 1<<fieldTensor|1<<fieldNumber|1<<fieldCodec|1<<fieldSum|1<<fieldData)
			m.Frame.Chunk = frame.Chunk{Tensor: p.tensor, Index: p.number, Codec: p.codec, Sum: p.sum, Data: r.views}
			m.buffers, payload = r.held, p.payload
		case fieldHello, fieldCalls, fieldDescs, fieldCancels, fieldFailures, fieldDones, fieldDrain, fieldEnds, fieldSummaries:
			m.cold = append(m.cold, tag)
			m.cold = protowire.AppendVarint(m.cold, uint64(n))
			m.cold = r.append(m.cold, n)
		default:
			return false, nil
		}
		if r.odd {
			return false, nil
		}
	}
	if err := checkControl(data.Len() - payload); err != nil {
		return false, err
	}
	if len(m.cold) == 0 {
		return true, nil
	}
	var pb tensorferryv1.Frame
	if err := unmarshalStock(m.cold, &pb); err != nil {
		return false, err
	}
	err = convert(&pb, &m.Frame)
	return err == nil, err
}

// parseJoined copies and reads any frame, as the stock codec does, within the limits.
func (m *Message) parseJoined(data mem.BufferSlice) error {
	joined := data.Materialize()
	if err := checkLimits(joined); err != nil {
		return err
	}
	var pb tensorferryv1.Frame
	if err := unmarshalStock(joined, &pb); err != nil {
		return err
	}
	return convert(&pb, &m.Frame)
}

func unmarshalStock(b []byte, pb *tensorferryv1.Frame) error {
	// Unknown fields come from newer peers.
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(b, pb); err != nil {
		return malformed(err)
	}
	return nil
}

// checkLimits walks a whole frame before memory is spent on its parts: two bytes
// of an empty credit become more than a hundred.
func checkLimits(b []byte) error {
	var count counts
	payload := 0
	err := eachBytes(b, func(field protowire.Number, value []byte) error {
		switch {
		case field > fieldChunk:
			return nil
		case field < fieldChunk:
			return count.add(field)
		}
		// Two chunk fields are merged: the last payload is the payload.
		return eachBytes(value, func(field protowire.Number, value []byte) error {
			if field == fieldData {
				payload = len(value)
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	return checkControl(len(b) - payload)
}

// eachBytes calls f for each length-delimited field of a message until f fails.
func eachBytes(b []byte, f func(field protowire.Number, value []byte) error) error {
	for len(b) > 0 {
		field, typ, n := protowire.ConsumeField(b)
		if n < 0 {
			return malformed(protowire.ParseError(n))
		}
		if typ == protowire.BytesType {
			_, _, tag := protowire.ConsumeTag(b)
			value, _ := protowire.ConsumeBytes(b[tag:])
			if err := f(field, value); err != nil {
				return err
			}
		}
		b = b[n:]
	}
	return nil
}

func malformed(err error) error {
	return &FieldError{ErrMalformed, "frame", "a tensorferry.v1.Frame", err.Error()}
}

// reader walks the views of one message. What it cannot read, or what is encoded in an
// unusual way, makes it odd: its results mean nothing from then on.
type reader struct {
	buffers mem.BufferSlice
	next    int    // buffers[next:] have not been looked at
	view    []byte // what is left of buffers[next-1]
	left    int    // what is left of the message
	odd     bool

	views [][]byte     // the payload
	held  []mem.Buffer // the buffers that views lie in
}

// part is what a credit, an ack or a chunk holds.
type part struct {
	tensor  tensor.ID
	number  uint32
	codec   uint8
	sum     uint32
	resend  []uint32
	payload int // bytes
}

// part reads a part that ends where end bytes of the message are left. allowed
// has a bit for each field the part may hold, once.
func (r *reader) part(end int, allowed uint32) (p part) {
	for r.left > end && !r.odd {
		tag := r.byte()
		field := uint32(1) << (tag >> 3)
		r.odd = r.odd || allowed&field == 0
		allowed &^= field
		switch tag {
		case tagTensor:
			r.odd = r.odd || r.length() != len(p.tensor)
			r.copy(p.tensor[:])
		case tagNumber:
			p.number = r.varint()
		case tagCodec:
			p.codec = uint8(min(r.varint(), math.MaxUint8))
		case tagSum:
			var b [4]byte
			r.copy(b[:])
			p.sum, _ = protowire.ConsumeFixed32(b[:])
		case tagResend:
			n := r.length()
			p.resend = r.packed(r.left - n)
		case tagData:
			p.payload = r.length()
			r.share(p.payload)
		default:
			r.odd = true
		}
	}
	r.odd = r.odd || r.left != end || p.tensor.IsZero()
	return p
}

// fill makes the view hold something, unless the message is at its end.
func (r *reader) fill() bool {
	for len(r.view) == 0 {
		if r.next == len(r.buffers) {
			r.odd = true
			return false
		}
		r.view = r.buffers[r.next].ReadOnlyData()
		r.next++
	}
	return true
}

func (r *reader) byte() byte {
	if !r.fill() {
		return 0
	}
	b := r.view[0]
	r.view = r.view[1:]
	r.left--
	return b
}

// varint reads a number of at most 32 bits in at most five bytes.
func (r *reader) varint() uint32 {
	var v uint64
	for shift := 0; shift < 35; shift += 7 {
		b := r.byte()
		v |= uint64(b&0x7f) << shift
		if b < 0x80 {
			r.odd = r.odd || v > 1<<32-1
			return uint32(v)
		}
	}
	r.odd = true
	return 0
}

// length reads a length prefix that the rest of the message covers; 0 if it is odd.
func (r *reader) length() int {
	n := r.varint()
	if r.odd || uint64(n) > uint64(r.left) {
		r.odd = true
		return 0
	}
	return int(n)
}

// take returns up to n of the next bytes, which lie in one view.
func (r *reader) take(n int) []byte {
	if !r.fill() {
		return nil
	}
	n = min(n, len(r.view))
	b := r.view[:n:n]
	r.view = r.view[n:]
	r.left -= n
	return b
}

func (r *reader) copy(dst []byte) {
	for len(dst) > 0 && !r.odd {
		dst = dst[copy(dst, r.take(len(dst))):]
	}
}

func (r *reader) append(dst []byte, n int) []byte {
	for n > 0 && !r.odd {
		b := r.take(n)
		dst = append(dst, b...)
		n -= len(b)
	}
	return dst
}

// share collects the next n bytes where they lie.
func (r *reader) share(n int) {
	for n > 0 && !r.odd {
		b := r.take(n)
		r.views = append(r.views, b)
		r.held = append(r.held, r.buffers[r.next-1])
		n -= len(b)
	}
}

// packed reads varints until end bytes of the message are left. What it
// allocates follows the bytes that came, within MaxControlBytes.
func (r *reader) packed(end int) (list []uint32) {
	for r.left > end && !r.odd {
		list = append(list, r.varint())
	}
	r.odd = r.odd || r.left != end
	return list
}
