package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
)

// coder walks over the fields of a message and writes them, reads them, or checks what was
// read: each part says once what its fields are. It writes as the stock codec does in its
// deterministic mode: fields by number, maps by key, zeros left out. It reads what the
// stock codec reads, and does nothing after an error.
type coder struct {
	mode mode
	err  *FieldError // the first; its Field lacks what the message lies in

	b       []byte // what is written
	follows int    // bytes of payload, which the caller appends

	// The field that is read; its number is 0 once somebody has taken it.
	field protowire.Number
	typ   protowire.Type
	value uint64
	view  []byte

	hasChunk bool // the frame has one, perhaps of no tensor
}

type mode uint8

const (
	reading mode = iota
	checking
	writing
)

// reset makes c read, and keeps its scratch.
func (c *coder) reset() {
	*c = coder{b: c.b[:0]}
	if cap(c.b) > maxColdBytes {
		c.b = nil
	}
}

func (c *coder) fail(field, want, got string) {
	if c.err == nil {
		c.err = &FieldError{ErrMalformed, field, want, got}
	}
}

// within puts what the message that has just been walked over lies in before the path of
// the error in it, if there is one.
func (c *coder) within(path string) {
	if c.err != nil {
		c.err.Field = strings.TrimSuffix(path+"."+c.err.Field, ".")
	}
}

// failed returns the error; name is of the whole message.
func (c *coder) failed(name string) error {
	if c.err == nil {
		return nil
	}
	if c.err.Field == "" {
		c.err.Field = name
	}
	return c.err
}

// read reads the fields of b, which it borrows, into v. Fields that body does not take are
// a newer peer's.
func read[T any](c *coder, b []byte, v *T, body func(*coder, *T)) {
	for len(b) > 0 && c.err == nil {
		field, typ, n := protowire.ConsumeTag(b)
		var size int
		switch {
		case n < 0:
			size = n
		case field > protowire.MaxValidNumber:
			size = -1
		case typ == protowire.VarintType:
			c.value, size = protowire.ConsumeVarint(b[n:])
		case typ == protowire.BytesType:
			c.view, size = protowire.ConsumeBytes(b[n:])
		case typ == protowire.Fixed32Type:
			var sum uint32
			sum, size = protowire.ConsumeFixed32(b[n:])
			c.value = uint64(sum)
		default:
			size = protowire.ConsumeFieldValue(field, typ, b[n:])
		}
		if size < 0 {
			c.malformed(size)
			break
		}
		b = b[n+size:]
		c.field, c.typ = field, typ
		body(c, v)
	}
	c.field = 0
}

func (c *coder) malformed(code int) {
	c.fail("", "a protobuf message", protowire.ParseError(code).Error())
}

// comes reports whether a field is the one that is read.
func (c *coder) comes(field protowire.Number, typ protowire.Type) bool {
	return c.mode == reading && c.field == field && c.typ == typ
}

// takes is comes, and takes the field.
func (c *coder) takes(field protowire.Number, typ protowire.Type) bool {
	comes := c.comes(field, typ)
	if comes {
		c.field = 0
	}
	return comes
}

// part walks over a nested message.
func part[T any](c *coder, field protowire.Number, v *T, body func(*coder, *T)) {
	switch {
	case c.err != nil:
	case c.mode == writing:
		at := c.open(field)
		body(c, v)
		c.close(at)
	case c.mode == checking:
		body(c, v)
	case c.takes(field, protowire.BytesType):
		read(c, c.view, v, body)
	}
}

// nested walks over a message that is always there.
func nested[T any](c *coder, field protowire.Number, name string, v *T, body func(*coder, *T)) {
	if c.err == nil {
		part(c, field, v, body)
		c.within(name)
	}
}

// optional walks over a message that is nil if it does not come.
func optional[T any](c *coder, field protowire.Number, name string, v **T, body func(*coder, *T)) {
	if *v == nil && c.comes(field, protowire.BytesType) {
		*v = new(T)
	}
	if *v != nil {
		nested(c, field, name, *v, body)
	}
}

// list walks over at most so many messages of one kind: their bytes bound them too loosely.
func list[T any](c *coder, field protowire.Number, name string, most int, all *[]T, body func(*coder, *T)) {
	from := 0
	if c.mode == reading {
		if !c.comes(field, protowire.BytesType) {
			return
		}
		from = len(*all)
		*all = append(*all, *new(T))
	}
	if n := len(*all); n > most && c.err == nil {
		c.err = tooLarge(name, "parts", most, n)
	}
	for i := from; i < len(*all) && c.err == nil; i++ {
		if part(c, field, &(*all)[i], body); c.err != nil {
			c.within(fmt.Sprintf("%s[%d]", name, i))
		}
	}
}

// open begins a nested message and close ends it. Nearly all are shorter than
// 128 bytes, so one byte is left for the length and the rest moved up if not.
func (c *coder) open(field protowire.Number) (at int) {
	c.b = append(protowire.AppendTag(c.b, field, protowire.BytesType), 0)
	return len(c.b)
}

func (c *coder) close(at int) {
	size := uint64(len(c.b) - at + c.follows)
	if more := protowire.SizeVarint(size) - 1; more > 0 {
		var room [binary.MaxVarintLen64]byte
		c.b = slices.Insert(c.b, at, room[:more]...)
	}
	binary.PutUvarint(c.b[at-1:], size)
}

func number[N ~uint8 | ~uint32 | ~uint64 | ~int64](c *coder, field protowire.Number, v *N) {
	switch {
	case c.mode == writing && *v != 0:
		c.b = protowire.AppendTag(c.b, field, protowire.VarintType)
		c.b = protowire.AppendVarint(c.b, uint64(*v))
	case c.takes(field, protowire.VarintType):
		*v = N(c.value)
	}
}

func (c *coder) fixed(field protowire.Number, v *uint32) {
	switch {
	case c.mode == writing && *v != 0:
		c.b = protowire.AppendTag(c.b, field, protowire.Fixed32Type)
		c.b = protowire.AppendFixed32(c.b, *v)
	case c.takes(field, protowire.Fixed32Type):
		*v = uint32(c.value)
	}
}

// enum walks over the number of an enum, which becomes other if it does not fit a byte.
func enum[E ~uint8](c *coder, field protowire.Number, v *E, other E) {
	if c.takes(field, protowire.VarintType) {
		*v = narrow(c.value, other)
		return
	}
	number(c, field, v)
}

func narrow[E ~uint8](v uint64, other E) E {
	if n := int32(v); n < 0 || n > math.MaxUint8 {
		return other
	}
	return E(v)
}

func (c *coder) flag(field protowire.Number, v *bool) {
	switch {
	case c.mode == writing && *v:
		one := uint64(1)
		number(c, field, &one)
	case c.takes(field, protowire.VarintType):
		*v = c.value != 0
	}
}

// packed walks over numbers in one field, and reads them from fields of their own, too. It
// keeps at most so many.
func packed[N uint8 | uint32 | int64](c *coder, field protowire.Number, all *[]N, most int, as func(uint64) N) {
	switch {
	case c.mode == writing && len(*all) > 0:
		at := c.open(field)
		for _, n := range *all {
			c.b = protowire.AppendVarint(c.b, uint64(n))
		}
		c.close(at)
	case c.takes(field, protowire.VarintType):
		if len(*all) < most {
			*all = append(*all, as(c.value))
		}
	case c.takes(field, protowire.BytesType):
		for b := c.view; len(b) > 0; {
			v, n := protowire.ConsumeVarint(b)
			if n < 0 {
				c.malformed(n)
				return
			}
			if b = b[n:]; len(*all) < most {
				*all = append(*all, as(v))
			}
		}
	}
}

func as[N uint32 | int64](v uint64) N { return N(v) }

const wantID = "16 bytes, not all zero"

// id walks over the ID that a part must have.
func (c *coder) id(field protowire.Number, name string, id *tensor.ID) {
	switch {
	case c.mode == writing:
		c.append(field, id[:])
	case c.mode == checking && id.IsZero():
		c.fail(name, wantID, "0 bytes, or zeros")
	default:
		c.array(field, name, wantID, id[:])
	}
}

// idOrNone walks over the ID that a part may have.
func (c *coder) idOrNone(field protowire.Number, name string, id *tensor.ID) {
	comes := c.comes(field, protowire.BytesType) && len(c.view) > 0
	if c.array(field, name, wantID, id[:]); comes && id.IsZero() {
		c.fail(name, wantID, "zeros")
	}
}

var zeros [len(frame.LaneToken{})]byte

// array walks over bytes of a fixed length; zeros are none.
func (c *coder) array(field protowire.Number, name, want string, v []byte) {
	switch {
	case c.mode == writing && !bytes.Equal(v, zeros[:len(v)]):
		c.append(field, v)
	case c.takes(field, protowire.BytesType):
		if n := len(c.view); n > 0 && n != len(v) {
			c.fail(name, want, fmt.Sprintf("%d bytes", n))
		}
		if copy(v, c.view) == 0 {
			clear(v)
		}
	}
}

// bytes walks over bytes, of which it reads a copy.
func (c *coder) bytes(field protowire.Number, v *[]byte) {
	switch {
	case c.mode == writing && len(*v) > 0:
		c.append(field, *v)
	case c.takes(field, protowire.BytesType):
		*v = bytes.Clone(c.view)
	}
}

func (c *coder) append(field protowire.Number, b []byte) {
	c.b = protowire.AppendTag(c.b, field, protowire.BytesType)
	c.b = protowire.AppendBytes(c.b, b)
}

// name walks over what identifies something, and must therefore arrive unchanged.
func (c *coder) name(field protowire.Number, name string, s *string) {
	switch {
	case c.mode == writing && *s != "":
		c.string(field, name, *s)
	case c.takes(field, protowire.BytesType):
		if *s = string(c.view); !utf8.ValidString(*s) {
			c.notUTF8(name)
		}
	}
}

// string writes a string.
func (c *coder) string(field protowire.Number, name, s string) {
	if !utf8.ValidString(s) {
		c.notUTF8(name)
	}
	c.b = protowire.AppendTag(c.b, field, protowire.BytesType)
	c.b = protowire.AppendString(c.b, s)
}

func (c *coder) notUTF8(name string) { c.fail(name, "UTF-8", "bytes that are not") }

// text walks over what people read. Bytes that are no text are replaced when it is sent,
// and no error is so long that it would not fit a frame.
func (c *coder) text(field protowire.Number, name string, s *string) {
	if c.mode == writing {
		sent := Text(*s)
		s = &sent
	}
	c.name(field, name, s)
}

// reason walks over a reason; a text that is not one is none.
func (c *coder) reason(field protowire.Number, r *reason.Reason) {
	text := string(reason.Parse(string(*r)))
	c.name(field, "reason", &text)
	*r = reason.Parse(text)
}

// Text returns what goes over the wire of a text that people read: UTF-8, and no more
// than frame.TextBytes of it.
func Text(s string) string {
	return strings.ToValidUTF8(frame.Clip(s, frame.TextBytes), "?")
}

// entries walks over parameters or metadata.
func (c *coder) entries(field protowire.Number, name string, m *map[string]string) {
	switch {
	case c.mode == writing && len(*m) > 0:
		for _, k := range slices.Sorted(maps.Keys(*m)) {
			at := c.open(field)
			c.string(1, name, k)
			c.string(2, name, (*m)[k])
			c.close(at)
		}
	case c.comes(field, protowire.BytesType):
		var pair [2]string
		part(c, field, &pair, func(c *coder, pair *[2]string) {
			c.name(1, name, &pair[0])
			c.name(2, name, &pair[1])
		})
		if *m == nil {
			*m = make(map[string]string)
		}
		(*m)[pair[0]] = pair[1]
	}
}

// payload walks over the payload of a chunk. It announces what the caller appends, and
// shares what it reads.
func (c *coder) payload(field protowire.Number, v *frame.Chunk) {
	switch {
	case c.mode == writing:
		if c.follows = v.Len(); c.follows > 0 {
			c.b = protowire.AppendTag(c.b, field, protowire.BytesType)
			c.b = protowire.AppendVarint(c.b, uint64(c.follows))
		}
	case c.takes(field, protowire.BytesType):
		if v.Data = v.Data[:0]; len(c.view) > 0 {
			v.Data = append(v.Data, c.view)
		}
	}
}
