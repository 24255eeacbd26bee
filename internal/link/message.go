package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"reflect"
	"unicode/utf8"
)

// ErrMessage is wrapped when a packet is no message of this protocol, or a message
// does not fit into a packet.
var ErrMessage = errors.New("link: bad message")

// Flags of a message.
const (
	Long       = 1  // json is a range
	Regions    = 2  // of a call: regions are wanted
	Idempotent = 8  // of a call: it may be repeated
	Piece      = 4  // of a region: its range is handed over
	Only       = 16 // of a run: it has no other block, and no end
)

// How an input or a result travels.
const (
	Pieces uint8 = 0
	Whole  uint8 = 1
)

// Head begins every message. Of most messages the flags are 0.
type Head struct {
	Flags uint8
	ID    uint64
}

// Range is a part of a memory. The zero Range is none.
type Range struct {
	Memory   uint32
	Off, Len uint64 // bytes
}

// Tensor is a tensor in a range.
type Tensor struct {
	DType uint8
	Shape []int64
	Range Range
}

// Input is a tensor that goes into a call.
type Input struct {
	Port     string
	DType    uint8
	Shape    []int64
	Name     string
	Metadata [][2]string
	How      uint8
	Range    Range
}

// Sink says where a result goes.
type Sink struct {
	Port  string
	How   uint8
	Range Range
}

// Announced is a result: what it is, and where it lies or will lie.
type Announced struct {
	Result uint32
	Name   string
	DType  uint8
	Shape  []int64
	How    uint8
	Range  Range
}

// Message points to one of the types below, whose fields, in their order, are its body. The comments
// of the fields are in docs/link.md.
type Message interface{ head() *Head }

// The messages.
type (
	// Hello is the first message of each side.
	Hello struct {
		Head
		JSON []byte
	}
	// Memory names memory; its descriptor comes with the packet.
	Memory struct {
		Head
		Bytes uint64
	}
	// Forget ends a Memory.
	Forget struct{ Head }
	// Take asks for a range.
	Take struct {
		Head
		Bytes  uint64
		Millis uint32
	}
	// Give makes the receiver the owner of ranges.
	Give struct {
		Head
		Ranges []Range
	}
	// Done ends what the guest has asked for.
	Done struct {
		Head
		Code    uint16
		Timings [7]uint64
		Results []Announced
		JSON    []byte
	}
	// Ask asks for what is rare.
	Ask struct {
		Head
		Millis uint32
		JSON   []byte
	}
	// Call runs a model of a server.
	Call struct {
		Head
		Connection, Millis uint32
		Model              string
		Params             [][2]string
		Inputs             []Input
		Sinks              []Sink
	}
	// Data is the next piece of an input.
	Data struct {
		Head
		Input uint32
		Range Range
	}
	// Cancel ends a call, or says that a block is not wanted any more.
	Cancel struct{ Head }
	// Result announces a result.
	Result struct {
		Head
		Announced
	}
	// Region says that a part of a result has arrived.
	Region struct {
		Head
		Result      uint32
		Offset, Len uint64
		Range       Range
	}
	// Ready says what the model of a worker is.
	Ready struct {
		Head
		JSON []byte
	}
	// Run has a block computed.
	Run struct {
		Head
		Run, Row, Rows uint64
		Model          uint16 // 0, or the number of a companion in ready
		Inputs         []Tensor
		JSON           []byte
	}
	// Answer is what became of a block.
	Answer struct {
		Head
		Code    uint16
		Nanos   uint64
		Outputs []Tensor
		JSON    []byte
	}
	// End says that a run has no more blocks.
	End struct{ Head }
	// Kept says what a guest keeps between calls.
	Kept struct {
		Head
		JSON []byte
	}
	// Gone says that a session has ended: what a model keeps for it is freed.
	Gone struct{ Head }
)

// messages has a message of each kind, by its number in docs/link.md.
var messages = [256]Message{
	1: &Hello{}, 2: &Memory{}, 3: &Forget{}, 4: &Take{}, 5: &Give{}, 8: &Done{},
	10: &Ask{}, 11: &Call{}, 12: &Data{}, 13: &Cancel{}, 14: &Result{}, 15: &Region{},
	20: &Ready{}, 21: &Run{}, 22: &Answer{}, 23: &End{}, 24: &Gone{}, 25: &Kept{},
}

var kinds = func() map[reflect.Type]uint8 {
	m := make(map[reflect.Type]uint8)
	for kind, of := range messages {
		if of != nil {
			m[reflect.TypeOf(of)] = uint8(kind)
		}
	}
	return m
}()

// KindOf returns the number of m's kind.
func KindOf(m Message) uint8 { return kinds[reflect.TypeOf(m)] }

func (h *Head) head() *Head { return h }

const (
	headBytes  = 16
	rangeBytes = 20
)

// Append appends the packet of m to b, which it borrows, and returns the longer slice. It fails when m
// has more than PacketBytes, or a text or list that its count cannot say.
func Append(b []byte, m Message) ([]byte, error) {
	b, _, err := encode(b, m)
	return b, err
}

// encode is Append, and names the memories that m names.
func encode(b []byte, m Message) (packet []byte, named []uint32, err error) {
	start := len(b)
	h := m.head()
	c := coder{buf: append(b, KindOf(m), h.Flags, 0, 0, 0, 0, 0, 0), writing: true, flags: h.Flags}
	c.number(h.ID, 8)
	c.walk(reflect.ValueOf(m).Elem())
	n := len(c.buf) - start
	if n > PacketBytes {
		c.fail("%d bytes; at most %d fit into a packet", n, PacketBytes)
	}
	if c.err != nil {
		return b, nil, fmt.Errorf("%w: kind %d: %w", ErrMessage, KindOf(m), c.err)
	}
	binary.LittleEndian.PutUint32(c.buf[start+4:], uint32(n))
	return c.buf, c.named, nil
}

// Parse reads one packet. The message copies what it keeps of it.
func Parse(packet []byte) (Message, error) {
	m, _, err := parse(packet)
	return m, err
}

// parse is Parse, and says where the message has a range in place of its JSON.
func parse(packet []byte) (m Message, long *[]byte, err error) {
	if len(packet) < headBytes || uint64(binary.LittleEndian.Uint32(packet[4:])) != uint64(len(packet)) {
		return nil, nil, fmt.Errorf("%w: a packet of %d bytes does not begin with its length", ErrMessage, len(packet))
	}
	kind := messages[packet[0]]
	if kind == nil || packet[2]|packet[3] != 0 {
		return nil, nil, fmt.Errorf("%w: there is no kind %d", ErrMessage, packet[0])
	}
	m = reflect.New(reflect.TypeOf(kind).Elem()).Interface().(Message)
	c := coder{buf: packet[8:], flags: packet[1]}
	*m.head() = Head{packet[1], c.number(0, 8)}
	c.walk(reflect.ValueOf(m).Elem())
	if c.err == nil && len(c.buf) > 0 {
		c.fail("%d bytes too many", len(c.buf))
	}
	if c.err != nil {
		return nil, nil, fmt.Errorf("%w: kind %d: %w", ErrMessage, packet[0], c.err)
	}
	return m, c.long, nil
}

// coder writes or reads the body of a message. After the first error it does nothing.
type coder struct {
	buf     []byte // what is written, or left to read
	writing bool
	flags   uint8    // of the message
	named   []uint32 // memories of the ranges written
	long    *[]byte  // a range that was read, and is to be JSON
	err     error
}

func (c *coder) fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf(format, args...)
		c.buf = nil
	}
}

// take reads n bytes.
func (c *coder) take(n int) []byte {
	if n > len(c.buf) {
		c.fail("it ends %d bytes too early", n-len(c.buf))
		return nil
	}
	b := c.buf[:n]
	c.buf = c.buf[n:]
	return b
}

// number writes a little-endian number of size bytes, or reads one.
func (c *coder) number(v uint64, size int) uint64 {
	var b [8]byte
	if c.writing {
		binary.LittleEndian.PutUint64(b[:], v)
		c.buf = append(c.buf, b[:size]...)
		return v
	}
	copy(b[:], c.take(size))
	return binary.LittleEndian.Uint64(b[:])
}

// count writes how many bytes or entries follow, n, or reads it.
func (c *coder) count(n, size int) int {
	if most := 1<<(8*size) - 1; n > most {
		c.fail("%d bytes or entries; at most %d can be said", n, most)
	}
	return int(c.number(uint64(n), size))
}

// walk writes or reads v: a struct's fields, a list's entries behind their count, or one of these.
func (c *coder) walk(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[Head]() {
			return // it comes before
		}
		if r, ok := reflect.TypeAssert[*Range](v.Addr()); ok && c.writing && r.Memory != 0 {
			c.named = append(c.named, r.Memory)
		}
		for i := range v.NumField() { //nolint:modernize // Fields allocates for each of them
			c.walk(v.Field(i))
		}
	case reflect.Array:
		for i := range v.Len() {
			c.walk(v.Index(i))
		}
	case reflect.String:
		n := c.count(v.Len(), 2)
		if c.writing {
			c.buf = append(c.buf, v.String()...)
			return
		}
		if v.SetString(string(c.take(n))); !utf8.ValidString(v.String()) {
			c.fail("a text is not UTF-8")
		}
	case reflect.Slice:
		c.list(v)
	case reflect.Int64: // a dimension
		n := c.number(uint64(v.Int()), 8)
		if n > math.MaxInt64 {
			c.fail("a dimension of %d", n)
		}
		v.SetInt(int64(n))
	default:
		if n := c.number(v.Uint(), int(v.Type().Size())); !c.writing {
			v.SetUint(n)
		}
	}
}

// list is walk of a slice. Bytes are JSON, to the end of the message, and of dimensions are few.
func (c *coder) list(v reflect.Value) {
	size := 2
	switch v.Type().Elem().Kind() {
	case reflect.Uint8:
		c.json(v.Addr().Interface().(*[]byte))
		return
	case reflect.Int64:
		size = 1
	}
	n := c.count(v.Len(), size)
	for i := 0; i < n && c.err == nil; i++ {
		if !c.writing {
			if i == v.Cap() { // some at a time: there may be fewer than is said
				v.Grow(min(n-i, 16))
			}
			v.SetLen(i + 1)
		}
		c.walk(v.Index(i))
	}
}

// json is all that is left of a message, or where its head says Long, one range.
func (c *coder) json(b *[]byte) {
	if c.writing {
		c.buf = append(c.buf, *b...)
	} else {
		*b = append([]byte(nil), c.take(len(c.buf))...)
	}
	if c.flags&Long != 0 {
		if len(*b) != rangeBytes {
			c.fail("json is no range")
			return
		}
		if c.long = b; c.writing {
			c.named = append(c.named, LongRange(*b).Memory)
		}
	}
}

// LongRange borrows the JSON of a message with flag Long, and returns the range in it.
func LongRange(b []byte) (r Range) {
	c := coder{buf: b}
	c.walk(reflect.ValueOf(&r).Elem())
	return r
}

// AppendRange appends r to b, which it borrows, as it stands in a message with flag Long.
func AppendRange(b []byte, r Range) []byte {
	c := coder{buf: b, writing: true}
	c.walk(reflect.ValueOf(&r).Elem())
	return c.buf
}
