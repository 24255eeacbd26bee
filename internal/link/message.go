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
	Long       = 1 // json is a range
	Regions    = 2 // of a call: regions are wanted
	Idempotent = 8 // of a call: it may be repeated
	Piece      = 4 // of a region: its range is handed over
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

// Message is one of the types below. The comments of its fields are in docs/link.md.
type Message interface {
	head() *Head
	body(*coder)
}

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

// What most messages share: a message of a head alone has no body.
func (h *Head) head() *Head { return h }
func (*Head) body(*coder)   {}

func (m *Hello) body(c *coder)  { c.json(&m.Head, &m.JSON) }
func (m *Memory) body(c *coder) { c.u64(&m.Bytes) }
func (m *Take) body(c *coder)   { c.u64(&m.Bytes); c.u32(&m.Millis) }
func (m *Give) body(c *coder)   { list(c, &m.Ranges, rangeBytes, c.extent) }
func (m *Ask) body(c *coder)    { c.u32(&m.Millis); c.json(&m.Head, &m.JSON) }
func (m *Data) body(c *coder)   { c.u32(&m.Input); c.extent(&m.Range) }
func (m *Ready) body(c *coder)  { c.json(&m.Head, &m.JSON) }
func (m *Kept) body(c *coder)   { c.json(&m.Head, &m.JSON) }

func (m *Done) body(c *coder) {
	c.u16(&m.Code)
	for i := range m.Timings {
		c.u64(&m.Timings[i])
	}
	list(c, &m.Results, 9+rangeBytes, c.announced)
	c.json(&m.Head, &m.JSON)
}

func (m *Call) body(c *coder) {
	c.u32(&m.Connection)
	c.u32(&m.Millis)
	c.text(&m.Model)
	c.texts(&m.Params)
	list(c, &m.Inputs, 9+rangeBytes, func(in *Input) {
		c.text(&in.Port)
		c.tensor(&in.DType, &in.Shape)
		c.text(&in.Name)
		c.texts(&in.Metadata)
		c.u8(&in.How)
		c.extent(&in.Range)
	})
	list(c, &m.Sinks, 3+rangeBytes, func(s *Sink) {
		c.text(&s.Port)
		c.u8(&s.How)
		c.extent(&s.Range)
	})
}

func (m *Result) body(c *coder) { c.announced(&m.Announced) }

func (m *Region) body(c *coder) {
	c.u32(&m.Result)
	c.u64(&m.Offset)
	c.u64(&m.Len)
	c.extent(&m.Range)
}

func (m *Run) body(c *coder) {
	c.u64(&m.Run)
	c.u64(&m.Row)
	c.u64(&m.Rows)
	c.u16(&m.Model)
	list(c, &m.Inputs, 2+rangeBytes, c.placed)
	c.json(&m.Head, &m.JSON)
}

func (m *Answer) body(c *coder) {
	c.u16(&m.Code)
	c.u64(&m.Nanos)
	list(c, &m.Outputs, 2+rangeBytes, c.placed)
	c.json(&m.Head, &m.JSON)
}

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
	c := coder{buf: append(b, KindOf(m), m.head().Flags, 0, 0, 0, 0, 0, 0), writing: true}
	c.u64(&m.head().ID)
	m.body(&c)
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
	m.head().Flags = packet[1]
	c := coder{buf: packet[8:]}
	c.u64(&m.head().ID)
	m.body(&c)
	if c.err == nil && len(c.buf) > 0 {
		c.fail("%d bytes too many", len(c.buf))
	}
	if c.err != nil {
		return nil, nil, fmt.Errorf("%w: kind %d: %w", ErrMessage, packet[0], c.err)
	}
	return m, c.long, nil
}

// coder writes or reads the body of a message: each message says once what its body
// is, for both directions. After the first error it does nothing.
type coder struct {
	buf     []byte // what is written, or left to read
	writing bool
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
		return make([]byte, 8) // the longest number
	}
	b := c.buf[:n]
	c.buf = c.buf[n:]
	return b
}

func (c *coder) u8(v *uint8)   { number(c, v, 1) }
func (c *coder) u16(v *uint16) { number(c, v, 2) }
func (c *coder) u32(v *uint32) { number(c, v, 4) }
func (c *coder) u64(v *uint64) { number(c, v, 8) }

// number walks over a little-endian number of size bytes.
func number[T uint8 | uint16 | uint32 | uint64](c *coder, v *T, size int) {
	var b [8]byte
	if c.writing {
		binary.LittleEndian.PutUint64(b[:], uint64(*v))
		c.buf = append(c.buf, b[:size]...)
		return
	}
	copy(b[:], c.take(size)[:size])
	*v = T(binary.LittleEndian.Uint64(b[:]))
}

func (c *coder) count(n int) int {
	if n > math.MaxUint16 {
		c.fail("%d bytes or entries; at most %d can be said", n, math.MaxUint16)
	}
	v := uint16(n)
	c.u16(&v)
	return int(v)
}

func (c *coder) text(s *string) {
	n := c.count(len(*s))
	if c.writing {
		c.buf = append(c.buf, *s...)
		return
	}
	if n > len(c.buf) {
		c.fail("a text of %d bytes ends too early", n)
		return
	}
	if *s = string(c.take(n)); !utf8.ValidString(*s) {
		c.fail("a text is not UTF-8")
	}
}

func (c *coder) texts(pairs *[][2]string) {
	list(c, pairs, 4, func(p *[2]string) { c.text(&p[0]); c.text(&p[1]) })
}

func (c *coder) extent(r *Range) {
	if c.writing && r.Memory != 0 {
		c.named = append(c.named, r.Memory)
	}
	c.u32(&r.Memory)
	c.u64(&r.Off)
	c.u64(&r.Len)
}

func (c *coder) tensor(dtype *uint8, shape *[]int64) {
	c.u8(dtype)
	rank := uint8(len(*shape))
	if c.writing && len(*shape) > math.MaxUint8 {
		c.fail("%d dimensions", len(*shape))
	}
	if c.u8(&rank); !c.writing {
		if int(rank)*8 > len(c.buf) {
			c.fail("%d dimensions end too early", rank)
			return
		}
		*shape = make([]int64, rank)
	}
	for i := range *shape {
		v := uint64((*shape)[i])
		if c.u64(&v); v > math.MaxInt64 {
			c.fail("a dimension of %d", v)
			return
		}
		(*shape)[i] = int64(v)
	}
}

func (c *coder) announced(a *Announced) {
	c.u32(&a.Result)
	c.text(&a.Name)
	c.tensor(&a.DType, &a.Shape)
	c.u8(&a.How)
	c.extent(&a.Range)
}

func (c *coder) placed(t *Tensor) { c.tensor(&t.DType, &t.Shape); c.extent(&t.Range) }

// json is all that is left of a message, or where the head says Long, one range.
func (c *coder) json(h *Head, b *[]byte) {
	if c.writing {
		c.buf = append(c.buf, *b...)
	} else {
		*b = append([]byte(nil), c.take(len(c.buf))...)
	}
	if h.Flags&Long != 0 {
		if len(*b) != rangeBytes {
			c.fail("json is no range")
			return
		}
		if c.long = b; c.writing {
			c.named = append(c.named, LongRange(*b).Memory)
		}
	}
}

// list walks over a list, each entry of which is of as many bytes or more.
func list[T any](c *coder, all *[]T, least int, each func(*T)) {
	n := c.count(len(*all))
	if !c.writing {
		if n*least > len(c.buf) {
			c.fail("%d entries end too early", n)
			return
		}
		*all = make([]T, n)
	}
	for i := range *all {
		if c.err != nil {
			return
		}
		each(&(*all)[i])
	}
}

// LongRange borrows the JSON of a message with flag Long, and returns the range in it.
func LongRange(b []byte) (r Range) {
	c := coder{buf: b}
	c.extent(&r)
	return r
}

// AppendRange appends r to b, which it borrows, as it stands in a message with flag Long.
func AppendRange(b []byte, r Range) []byte {
	c := coder{buf: b, writing: true}
	c.extent(&r)
	return c.buf
}
