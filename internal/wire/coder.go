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

// coder writes the fields of a message, or reads them: each part says once, by number, what its
// fields are. It writes as the stock codec does in its deterministic mode: fields by number, maps by
// key, zeros left out. It reads what the stock codec reads, and does nothing after an error.
type coder struct {
	writes bool
	err    *FieldError // the first; its Field lacks what the message lies in

	b       []byte // what is written
	follows int    // bytes of payload, which the caller appends

	number protowire.Number // of the field that is read or written
	typ    protowire.Type   // what is read has
	value  uint64
	view   []byte

	hasChunk bool // the frame has one, perhaps of no tensor
}

// fields are those of a message, by number.
type fields[T any] []func(*coder, *T)

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

// read reads the fields of b, which it borrows, into v. What is not among them is a newer peer's.
func read[T any](c *coder, b []byte, v *T, of fields[T]) {
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
			return
		}
		b = b[n+size:]
		if int(field) < len(of) && of[field] != nil {
			c.number, c.typ = field, typ
			of[field](c, v)
		}
	}
}

// write writes the fields of v.
func write[T any](c *coder, v *T, of fields[T]) {
	for n, field := range of {
		if field != nil && c.err == nil {
			c.number = protowire.Number(n)
			field(c, v)
		}
	}
}

func (c *coder) malformed(code int) {
	c.fail("", "a protobuf message", protowire.ParseError(code).Error())
}

// comes reports whether the field is read, in its type.
func (c *coder) comes(typ protowire.Type) bool { return !c.writes && c.typ == typ }

// part is a nested message.
func part[T any](c *coder, v *T, of fields[T]) {
	switch {
	case c.writes:
		at := c.open()
		write(c, v, of)
		c.close(at)
	case c.typ == protowire.BytesType:
		read(c, c.view, v, of)
	}
}

// nested is a message that is always there.
func nested[T any](c *coder, name string, v *T, of fields[T]) {
	part(c, v, of)
	c.within(name)
}

// optional is a message that is nil if it does not come.
func optional[T any](c *coder, name string, v **T, of fields[T]) {
	if *v == nil && c.comes(protowire.BytesType) {
		*v = new(T)
	}
	if *v != nil {
		nested(c, name, *v, of)
	}
}

// list is at most so many messages of one kind: their bytes bound them too loosely.
func list[T any](c *coder, name string, most int, all *[]T, of fields[T]) {
	from, number := 0, c.number
	if !c.writes {
		if c.typ != protowire.BytesType {
			return
		}
		from = len(*all)
		*all = append(*all, *new(T))
	}
	if n := len(*all); n > most {
		c.err = tooLarge(name, "parts", most, n)
	}
	for i := from; i < len(*all) && c.err == nil; i++ {
		c.number = number
		if part(c, &(*all)[i], of); c.err != nil {
			c.within(fmt.Sprintf("%s[%d]", name, i))
		}
	}
}

// open begins a nested message and close ends it. Nearly all are shorter than
// 128 bytes, so one byte is left for the length and the rest moved up if not.
func (c *coder) open() (at int) {
	c.b = append(protowire.AppendTag(c.b, c.number, protowire.BytesType), 0)
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

func number[N ~uint8 | ~uint32 | ~uint64 | ~int64](c *coder, v *N) {
	switch {
	case c.writes && *v != 0:
		c.b = protowire.AppendTag(c.b, c.number, protowire.VarintType)
		c.b = protowire.AppendVarint(c.b, uint64(*v))
	case c.comes(protowire.VarintType):
		*v = N(c.value)
	}
}

func (c *coder) fixed(v *uint32) {
	switch {
	case c.writes && *v != 0:
		c.b = protowire.AppendTag(c.b, c.number, protowire.Fixed32Type)
		c.b = protowire.AppendFixed32(c.b, *v)
	case c.comes(protowire.Fixed32Type):
		*v = uint32(c.value)
	}
}

// enum is the number of an enum, which becomes other if it does not fit a byte.
func enum[E ~uint8](c *coder, v *E, other E) {
	if c.comes(protowire.VarintType) {
		*v = narrow(c.value, other)
		return
	}
	number(c, v)
}

func narrow[E ~uint8](v uint64, other E) E {
	if n := int32(v); n < 0 || n > math.MaxUint8 {
		return other
	}
	return E(v)
}

func (c *coder) flag(v *bool) {
	switch {
	case c.writes && *v:
		one := uint64(1)
		number(c, &one)
	case c.comes(protowire.VarintType):
		*v = c.value != 0
	}
}

// packed are numbers in one field; it reads them from fields of their own, too. It
// keeps at most so many.
func packed[N uint8 | uint32 | int64](c *coder, all *[]N, most int, as func(uint64) N) {
	switch {
	case c.writes && len(*all) > 0:
		at := c.open()
		for _, n := range *all {
			c.b = protowire.AppendVarint(c.b, uint64(n))
		}
		c.close(at)
	case c.comes(protowire.VarintType):
		if len(*all) < most {
			*all = append(*all, as(c.value))
		}
	case c.comes(protowire.BytesType):
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

const (
	wantID = "16 bytes, not all zero"
	noID   = "0 bytes, or zeros"
)

// id is the ID that a part must have: check says where it is missing.
func (c *coder) id(name string, id *tensor.ID) {
	if c.writes {
		c.append(id[:])
	} else {
		c.array(name, wantID, id[:])
	}
}

// idOrNone is the ID that a part may have.
func (c *coder) idOrNone(name string, id *tensor.ID) {
	comes := c.comes(protowire.BytesType) && len(c.view) > 0
	if c.array(name, wantID, id[:]); comes && id.IsZero() {
		c.fail(name, wantID, "zeros")
	}
}

var zeros [len(frame.LaneToken{})]byte

// array is bytes of a fixed length; zeros are none.
func (c *coder) array(name, want string, v []byte) {
	switch {
	case c.writes && !bytes.Equal(v, zeros[:len(v)]):
		c.append(v)
	case c.comes(protowire.BytesType):
		if n := len(c.view); n > 0 && n != len(v) {
			c.fail(name, want, fmt.Sprintf("%d bytes", n))
		}
		if copy(v, c.view) == 0 {
			clear(v)
		}
	}
}

// bytes is bytes, of which it reads a copy.
func (c *coder) bytes(v *[]byte) {
	switch {
	case c.writes && len(*v) > 0:
		c.append(*v)
	case c.comes(protowire.BytesType):
		*v = bytes.Clone(c.view)
	}
}

func (c *coder) append(b []byte) {
	c.b = protowire.AppendTag(c.b, c.number, protowire.BytesType)
	c.b = protowire.AppendBytes(c.b, b)
}

// name is what identifies something, and must therefore arrive unchanged.
func (c *coder) name(name string, s *string) {
	switch {
	case c.writes && *s != "":
		c.string(name, *s)
	case c.comes(protowire.BytesType):
		if *s = string(c.view); !utf8.ValidString(*s) {
			c.notUTF8(name)
		}
	}
}

// string writes a string.
func (c *coder) string(name, s string) {
	if !utf8.ValidString(s) {
		c.notUTF8(name)
	}
	c.b = protowire.AppendTag(c.b, c.number, protowire.BytesType)
	c.b = protowire.AppendString(c.b, s)
}

func (c *coder) notUTF8(name string) { c.fail(name, "UTF-8", "bytes that are not") }

// text is what people read. Bytes that are no text are replaced when it is sent,
// and no error is so long that it would not fit a frame.
func (c *coder) text(name string, s *string) {
	if c.writes {
		sent := Text(*s)
		s = &sent
	}
	c.name(name, s)
}

// reason is a reason; a text that is not one is none.
func (c *coder) reason(r *reason.Reason) {
	text := string(reason.Parse(string(*r)))
	c.name("reason", &text)
	*r = reason.Parse(text)
}

// Text returns what goes over the wire of a text that people read: UTF-8, and no more
// than frame.TextBytes of it.
func Text(s string) string {
	return strings.ToValidUTF8(frame.Clip(s, frame.TextBytes), "?")
}

// entries are parameters or metadata.
func (c *coder) entries(name string, m *map[string]string) {
	number := c.number
	switch {
	case c.writes && len(*m) > 0:
		for _, k := range slices.Sorted(maps.Keys(*m)) {
			c.number = number
			at := c.open()
			for i, text := range []string{k, (*m)[k]} {
				c.number = protowire.Number(1 + i)
				c.string(name, text)
			}
			c.close(at)
		}
	case c.comes(protowire.BytesType):
		var pair [2]string
		read(c, c.view, &pair, fields[[2]string]{
			1: func(c *coder, pair *[2]string) { c.name(name, &pair[0]) },
			2: func(c *coder, pair *[2]string) { c.name(name, &pair[1]) },
		})
		if *m == nil {
			*m = make(map[string]string)
		}
		(*m)[pair[0]] = pair[1]
	}
}

// payload is the payload of a chunk. It announces what the caller appends, and
// shares what it reads.
func (c *coder) payload(v *frame.Chunk) {
	switch {
	case c.writes:
		if c.follows = v.Len(); c.follows > 0 {
			c.b = protowire.AppendTag(c.b, c.number, protowire.BytesType)
			c.b = protowire.AppendVarint(c.b, uint64(c.follows))
		}
	case c.comes(protowire.BytesType):
		if v.Data = v.Data[:0]; len(c.view) > 0 {
			v.Data = append(v.Data, c.view)
		}
	}
}
