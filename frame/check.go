package frame

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
)

// Check reports what is wrong with a peer's hello, or nil. A push and a pull open
// with one, as a session does.
func (h *Hello) Check() *Error {
	switch {
	case h.Version != Version:
		return Errorf(FailedPrecondition, "protocol version %d; this side speaks %d", h.Version, Version)
	case !codec.Checksum(h.Checksum).Valid():
		return Errorf(InvalidArgument, "checksum kind %d; known are 1 (crc32c) and 2 (crc32)", h.Checksum)
	case h.Session.IsZero():
		return Errorf(InvalidArgument, "hello without a session id; send 16 bytes that are not all zero")
	}
	return nil
}

// Check compares a desc with its own arithmetic and with the largest chunk and tensor
// that this side accepts, in bytes, and returns how the tensor is cut. An error is the
// tensor's alone; its text begins with the tensor.
func (d *Desc) Check(chunkBytes uint32, tensorBytes int64) (tensor.Geometry, *Error) {
	fail := func(r reason.Reason, format string, args ...any) (tensor.Geometry, *Error) {
		return tensor.Geometry{}, Because(r, "tensor "+d.Tensor.String()+": "+format, args...)
	}
	size, err := d.Bytes()
	switch {
	case errors.Is(err, tensor.ErrTooLarge):
		return fail(reason.TooLarge, "%s", reason.Plain(err))
	case err != nil:
		return fail("INVALID_ARGUMENT", "%s", reason.Plain(err))
	case uint64(size) != d.SizeBytes:
		return fail("INVALID_ARGUMENT", "size_bytes is %d, but %v makes %d", d.SizeBytes, d.Desc, size)
	case size > tensorBytes:
		return fail(reason.TooLarge, "%d bytes, the limit of a tensor is %d", size, tensorBytes)
	case d.ChunkBytes < 1 || d.ChunkBytes > chunkBytes:
		return fail("INVALID_ARGUMENT", "chunk_bytes is %d; it must be 1 to %d", d.ChunkBytes, chunkBytes)
	}
	geo, err := tensor.NewGeometry(size, int64(d.ChunkBytes))
	if err != nil { // too many chunks: the rest was checked
		return fail(reason.TooLarge, "%s", reason.Plain(err))
	}
	if problem := d.CheckTexts(); problem != "" {
		return fail("INVALID_ARGUMENT", "%s", problem)
	}
	return geo, nil
}

// CheckTexts reports what is wrong with the names and the metadata of a desc, or nothing.
func (d *Desc) CheckTexts() string {
	return cmp.Or(CheckName("port", d.Port), CheckName("name", d.Name), CheckEntries("metadata", d.Metadata))
}

// Check reports what one frame could not carry of a call, or nothing.
func (c *Call) Check() string {
	if len(c.Inputs) > callInputs {
		return fmt.Sprintf("call has %d inputs, the limit is %d", len(c.Inputs), callInputs)
	}
	if size := c.Cost(); c.Get == nil && size > callBytes {
		return fmt.Sprintf("call takes %d bytes with its names and params, the limit is %d", size, callBytes)
	}
	if c.Get != nil {
		for i := range c.Get.Selections {
			s := &c.Get.Selections[i]
			if problem := cmp.Or(CheckName("selection", s.Name), CheckEntries("params", s.Params)); problem != "" {
				return problem
			}
		}
	}
	return c.checkTexts()
}

// checkTexts reports what is wrong with the names and the params of a call, or nothing.
func (c *Call) checkTexts() string {
	for _, b := range c.Inputs {
		if problem := CheckName("port", b.Port); problem != "" {
			return problem
		}
	}
	return cmp.Or(CheckName("model", c.Model), CheckEntries("params", c.Params))
}

// CheckInput reports why a tensor is not one that the call may announce, or nothing.
func (c *Call) CheckInput(d *Desc) string {
	i := slices.IndexFunc(c.Inputs, func(b Binding) bool { return b.Tensor == d.Tensor })
	switch {
	case c.Put != nil:
	case i < 0:
		return "its call does not list it as an input"
	case c.Inputs[i].Port != d.Port:
		return fmt.Sprintf("port is %q, the call says %q", d.Port, c.Inputs[i].Port)
	}
	return ""
}

// CheckContent reports what is wrong with the content of a call, or nothing. It does not
// look into selections, each of which is answered by itself.
func (c *Call) CheckContent() string {
	switch {
	case c.Put != nil && c.Get != nil || c.Stored() && (c.Model != "" || len(c.Inputs) > 0):
		return "a call is either a put, a get or a run of a model"
	case c.Stored() && c.Sequence != nil:
		return "a put or a get is of no sequence"
	case c.Sequence != nil:
		if problem := c.checkSequence(); problem != "" {
			return problem
		}
	case !c.Stored() && c.Model == "":
		return "call names no model"
	}
	if problem := c.checkTexts(); problem != "" {
		return problem
	}
	for i, b := range c.Inputs {
		for _, o := range c.Inputs[:i] {
			if o.Port == b.Port || o.Tensor == b.Tensor {
				return fmt.Sprintf("inputs %q and %q share a port or a tensor", o.Port, b.Port)
			}
		}
	}
	return ""
}

// checkSequence reports what a call of a sequence may not have, or nothing.
func (c *Call) checkSequence() string {
	q, first := c.Sequence, c.Sequence.MaxRows > 0
	switch {
	case q.ID.IsZero():
		return "sequence without an id"
	case q.MaxRows > math.MaxInt64:
		return fmt.Sprintf("max_rows is %d; the limit is %d", q.MaxRows, int64(math.MaxInt64))
	case first && q.End:
		return "a call either begins a sequence or ends it"
	case first && (c.Model == "" || len(c.Inputs) > 0):
		return "a call that begins a sequence names a model and has no inputs"
	case !first && (c.Model != "" || len(c.Params) > 0):
		return "a call of a sequence after the first names no model and has no params; set max_rows to begin one"
	case !first && q.End != (len(c.Inputs) == 0):
		return "a step of a sequence has inputs, and the call that ends it has none"
	}
	return ""
}

// CheckName reports what is wrong with a name that a peer sent, or nothing.
func CheckName(what, name string) string {
	switch {
	case len(name) > NameBytes:
		return fmt.Sprintf("%s has %d bytes, the limit is %d", what, len(name), NameBytes)
	case !printable(name):
		return what + " must be UTF-8 without control characters"
	}
	return ""
}

// CheckEntries reports what is wrong with parameters or metadata, or nothing.
func CheckEntries(what string, m map[string]string) string {
	if len(m) > Entries {
		return fmt.Sprintf("%s: %d entries, the limit is %d", what, len(m), Entries)
	}
	total := 0
	for k, v := range m {
		switch total += len(k) + len(v); {
		case !utf8.ValidString(k) || !utf8.ValidString(v):
			return fmt.Sprintf("%s: an entry is not UTF-8", what)
		case len(k) > KeyBytes:
			return fmt.Sprintf("%s: a key of %d bytes, the limit is %d", what, len(k), KeyBytes)
		case len(v) > ValueBytes:
			return fmt.Sprintf("%s: a value of %d bytes, the limit is %d", what, len(v), ValueBytes)
		case total > EntriesBytes:
			return fmt.Sprintf("%s: more than %d bytes in total", what, EntriesBytes)
		}
	}
	return ""
}

func printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

// Clip returns at most the first n bytes of a text, cut between two characters. It copies
// them if the text is longer: a short text does not keep a long one in memory.
func Clip(text string, n int) string {
	if len(text) <= n {
		return text
	}
	for low := n - utf8.UTFMax; n > max(low, 0) && !utf8.RuneStart(text[n]); {
		n--
	}
	return strings.Clone(text[:n])
}

// Sizes are the bytes that an input of a call, an entry of params or metadata, a selection,
// and a held range take somewhere, beside their texts.
type Sizes struct{ Binding, Entry, Selection, Range int }

// OfCall returns the bytes of a call.
func (z *Sizes) OfCall(c *Call) int {
	n := len(c.Model) + z.OfEntries(c.Params)
	for _, b := range c.Inputs {
		n += z.Binding + len(b.Port)
	}
	if c.Get != nil {
		for i := range c.Get.Selections {
			n += z.OfSelection(&c.Get.Selections[i])
		}
	}
	return n
}

// OfSelection returns the bytes of a selection.
func (z *Sizes) OfSelection(s *Selection) int {
	return z.Selection + len(s.Name) + z.Range*len(s.Held) + z.OfEntries(s.Params)
}

// OfEntries returns the bytes of parameters or metadata.
func (z *Sizes) OfEntries(m map[string]string) int {
	n := len(m) * z.Entry
	for k, v := range m {
		n += len(k) + len(v)
	}
	return n
}

// Cost is about the bytes that a call takes in a frame.
func (c *Call) Cost() int { return inFrame.OfCall(c) }

// Parts cuts a get into parts that a frame can carry, at least one. They share what g has.
func (g *Get) Parts() (parts []Get) {
	part, cost := Get{}, 0
	add := func(s Selection, rest bool) {
		size := inFrame.OfSelection(&s)
		if rest || cost+size > getBytes && cost > 0 {
			part.More = true
			parts = append(parts, part)
			part, cost = Get{}, 0
		}
		part.Selections = append(part.Selections, s)
		cost += size
	}
	for _, s := range g.Selections {
		held := s.Held
		s.Held = held[:min(len(held), partRanges)]
		add(s, false)
		for some := range slices.Chunk(held[len(s.Held):], partRanges) {
			add(Selection{Held: some}, true)
		}
	}
	return append(parts, part)
}

// Append adds a further part of a get.
func (g *Get) Append(part *Get) {
	g.More = part.More
	for i, s := range part.Selections {
		if n := len(g.Selections); i == 0 && s.Name == "" && n > 0 {
			g.Selections[n-1].Held = append(g.Selections[n-1].Held, s.Held...)
			continue
		}
		g.Selections = append(g.Selections, s)
	}
}

// Cost is about the bytes that a desc takes in a frame.
func (d *Desc) Cost() int {
	return descBytes + 10*len(d.Shape) + len(d.Name) + len(d.Port) + inFrame.OfEntries(d.Metadata)
}

// Same reports whether two calls with one ID say the same.
func (c *Call) Same(o *Call) bool {
	return (c.Get == nil) == (o.Get == nil) && (c.Put == nil) == (o.Put == nil) && (c.Put == nil || *c.Put == *o.Put) &&
		(c.Sequence == nil) == (o.Sequence == nil) && (c.Sequence == nil || *c.Sequence == *o.Sequence) &&
		c.Model == o.Model && c.TimeoutMillis == o.TimeoutMillis && slices.Equal(c.Inputs, o.Inputs) && maps.Equal(c.Params, o.Params)
}

// Same reports whether two descs with one ID announce the same.
func (d *Desc) Same(o *Desc) bool {
	return d.Desc.Equal(o.Desc) && d.SizeBytes == o.SizeBytes && d.ChunkBytes == o.ChunkBytes && d.Call == o.Call && d.Port == o.Port
}

// Check reports what is wrong with an acknowledgement, or nothing.
func (a *Ack) Check() string {
	switch n := len(a.Beyond); {
	case n > 2*AckPairs:
		return fmt.Sprintf("acknowledgement names more than %d ranges of received chunks", AckPairs)
	case n%2 != 0:
		return fmt.Sprintf("acknowledgement has %d numbers of received chunks; a range has two", n)
	}
	last := a.Below
	for _, v := range a.Beyond {
		if v <= last {
			return fmt.Sprintf("acknowledgement names the chunks %v beyond those below %d; ranges must ascend and be apart", a.Beyond, a.Below)
		}
		last = v
	}
	return ""
}

// CheckSender reports what of a frame only the other side may send, or nothing.
func (f *Frame) CheckSender(server bool) string {
	switch {
	case server && len(f.Calls) > 0:
		return "call came from the server; only a client opens calls"
	case server && len(f.Cancels) > 0:
		return "cancel came from the server; only a client cancels"
	case !server && len(f.Dones) > 0:
		return "done came from the client; only a server ends calls"
	case server && len(f.Ends) > 0:
		return "an end of a put came from the server; only a client puts"
	}
	return ""
}
