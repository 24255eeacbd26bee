package transfer

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/pierrec/lz4/v4"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// fuzzTensors is how many tensors a script may announce, fuzzOpen how many at a time.
const (
	fuzzTensors = 6
	fuzzOpen    = 3
)

// expected is what the slow model knows of one tensor.
type expected struct {
	d      frame.Desc
	open   bool
	chunks map[int][]byte // by index, the bytes; of those that came
	sums   map[int]uint32
	codecs map[int]uint8
	ended  string // "", "whole" or "failed"
}

// model is a Receiver that looks at everything, every time.
type model struct {
	tensors map[tensor.ID]*expected
	refuse  bool // every Open
	full    bool // every write fails
}

func (m *model) open() (n int) {
	for _, e := range m.tensors {
		if e.open {
			n++
		}
	}
	return n
}

func (e *expected) fail() { e.open, e.ended = false, "failed" }

func (e *expected) count() int {
	n, chunk := int(e.d.SizeBytes), int(e.d.ChunkBytes)
	if n == 0 {
		return 1
	}
	return (n + chunk - 1) / chunk
}

func (e *expected) length(i int) int {
	return min(int(e.d.ChunkBytes), int(e.d.SizeBytes)-i*int(e.d.ChunkBytes))
}

// desc reports whether the peer broke the protocol.
func (m *model) desc(d frame.Desc) bool {
	if e := m.tensors[d.Tensor]; e != nil {
		same := e.d.DType == d.DType && slices.Equal(e.d.Shape, d.Shape) && e.d.SizeBytes == d.SizeBytes && e.d.ChunkBytes == d.ChunkBytes && e.d.Name == d.Name
		if e.open && !same {
			e.fail()
		}
		return false
	}
	if len(m.tensors) == fuzzTensors {
		return true
	}
	e := &expected{d: d, open: true, chunks: map[int][]byte{}, sums: map[int]uint32{}, codecs: map[int]uint8{}}
	m.tensors[d.Tensor] = e
	size := uint64(1)
	for _, dim := range d.Shape {
		size *= uint64(dim)
	}
	if d.DType != tensor.Uint8 || size != d.SizeBytes || d.ChunkBytes == 0 || d.ChunkBytes > 16 || !d.Call.IsZero() || m.open() > fuzzOpen || m.refuse {
		e.fail()
	}
	return false
}

func (m *model) chunk(c frame.Chunk, data []byte) bool {
	e := m.tensors[c.Tensor]
	switch {
	case e == nil:
		return true
	case !e.open:
		return false
	case c.Codec > 1 || int(c.Index) >= e.count():
		e.fail()
		return false
	}
	i := int(c.Index)
	want := e.length(i)
	if c.Codec == 0 && len(data) != want || c.Codec == 1 && (len(data) == 0 || len(data) >= want) {
		e.fail()
		return false
	}
	if _, here := e.chunks[i]; here {
		if e.codecs[i] == c.Codec && e.sums[i] != c.Sum {
			e.fail()
		}
		return false
	}
	if c.Sum != codec.CRC32.Update(codec.CRC32.Seed(c.Tensor, c.Index), data) || m.full && want > 0 {
		e.fail()
		return false
	}
	if c.Codec == 1 {
		out := make([]byte, want)
		if n, err := lz4.UncompressBlock(data, out); err != nil || n != want {
			e.fail()
			return false
		}
		data = out
	}
	e.chunks[i], e.sums[i], e.codecs[i] = data, c.Sum, c.Codec
	if len(e.chunks) == e.count() {
		e.open, e.ended = false, "whole"
	}
	return false
}

// cover holds every byte against every range.
func (e *expected) cover(held []Range) {
	whole := true
	for i := range e.count() {
		within := false
		for _, h := range held {
			off, n := int64(i)*int64(e.d.ChunkBytes), int64(e.length(i))
			within = within || n > 0 && h.Off <= off && off+n <= h.Off+h.Len
		}
		whole = whole && (within || e.chunks[i] != nil)
	}
	if e.open = false; whole {
		e.ended = "whole"
	} else {
		e.ended = "failed"
	}
}

// fuzzBook hears what the Receiver says, and makes places that fail when told.
type fuzzBook struct {
	t      *testing.T
	refuse bool
	full   bool
	data   map[tensor.ID][]byte
	ended  map[tensor.ID]string
	moved  map[tensor.ID]int64
}

type fuzzPlace struct {
	of *fuzzBook
	id tensor.ID
}

var errFuzz = errors.New("not today")

func (p fuzzPlace) WriteViews(off int64, views [][]byte) error {
	for _, v := range views {
		if p.of.full && len(v) > 0 {
			return errFuzz
		}
		if n := copy(p.of.data[p.id][off:], v); n < len(v) {
			p.of.t.Fatalf("%d bytes at %d of a tensor of %d", len(v), off, len(p.of.data[p.id]))
		}
		off += int64(len(v))
	}
	return nil
}

func (b *fuzzBook) Begin(in *In[fuzzPlace]) fuzzPlace { return fuzzPlace{b, in.Tensor} }

func (b *fuzzBook) Open(in *In[fuzzPlace]) error {
	if b.refuse {
		return errFuzz
	}
	b.data[in.Tensor] = make([]byte, in.Geo.Size)
	return nil
}

func (b *fuzzBook) Moved(in *In[fuzzPlace], n int64) { b.moved[in.Tensor] += n }
func (b *fuzzBook) Whole(in *In[fuzzPlace])          { b.end(in.Tensor, "whole") }

func (b *fuzzBook) Failed(in *In[fuzzPlace], err error) {
	if err == nil || err.Error() == "" {
		b.t.Fatal("a failure without a reason")
	}
	if in.Place.id != in.Tensor {
		b.t.Fatal("a failure without a place")
	}
	b.end(in.Tensor, "failed")
}

func (b *fuzzBook) end(id tensor.ID, how string) {
	if b.ended[id] != "" {
		b.t.Fatalf("tensor %v ended twice: %s, %s", id, b.ended[id], how)
	}
	b.ended[id] = how
}

// script reads a fuzzer's bytes; past the end there are zeros.
type script struct{ b []byte }

func (s *script) byte() byte {
	if len(s.b) == 0 {
		return 0
	}
	v := s.b[0]
	s.b = s.b[1:]
	return v
}

// desc announces a vector of 0 to 31 bytes, in one of 16 not quite as it should be.
func (s *script) desc(id tensor.ID) frame.Desc {
	size := s.byte() % 32
	d := frame.Desc{Tensor: id, Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(size)}}, SizeBytes: uint64(size), ChunkBytes: uint32(1 + s.byte()%16), Name: "n"}
	switch s.byte() % 24 {
	case 0:
		d.SizeBytes++
	case 1:
		d.ChunkBytes = 0
	case 2:
		d.ChunkBytes = 17
	case 3:
		d.Call = tensor.ID{7}
	case 4:
		d.DType = 0
	case 5:
		d.Name = "other"
	}
	return d
}

// payload is noise or what compresses, as it is or in LZ4, of about so many bytes.
func (s *script) payload(n int) (k uint8, data []byte) {
	n = max(0, n+[]int{0, 0, 0, 0, 0, 0, -1, 1}[s.byte()%8])
	data = bytes.Repeat([]byte{s.byte()}, n)
	switch s.byte() % 8 {
	case 0:
		return 1, data // noise, for LZ4
	case 1, 2, 3:
		out := make([]byte, lz4.CompressBlockBound(n))
		if m, err := lz4.CompressBlock(data, out, nil); err == nil && m > 0 {
			return 1, out[:m]
		}
	case 4:
		return 3, data
	}
	return 0, data
}

func FuzzReceiver(f *testing.F) {
	f.Add([]byte{0, 1, 8, 3, 9, 1, 1, 0, 0, 1, 7, 1, 1, 1, 1, 7})
	f.Add(bytes.Repeat([]byte{0, 1, 31, 15, 9}, 8))
	f.Add([]byte{0, 1, 20, 9, 9, 5, 1, 0, 12, 3, 9, 1, 6})
	f.Fuzz(func(t *testing.T, b []byte) {
		s := &script{b}
		m := &model{tensors: map[tensor.ID]*expected{}}
		book := &fuzzBook{t: t, data: map[tensor.ID][]byte{}, ended: map[tensor.ID]string{}, moved: map[tensor.ID]int64{}}
		r := Receiver[fuzzPlace]{ChunkBytes: 16, TensorBytes: 1000, OpenTensors: fuzzOpen, Tensors: fuzzTensors, Checksum: codec.CRC32, Codecs: codec.All(), Handler: book}
		for len(s.b) > 0 {
			op, id := s.byte()%16, tensor.ID{1 + s.byte()%8}
			broken := false
			var err error
			e := m.tensors[id]
			switch op {
			case 0, 1, 2:
				d := s.desc(id)
				broken = m.desc(d)
				err = r.Frame(&frame.Frame{Descs: []frame.Desc{d}})
			case 3:
				broken = e == nil
				if e != nil && e.open {
					e.fail()
				}
				err = r.Frame(&frame.Frame{Failures: []frame.Failure{{Tensor: id, Code: frame.Code(s.byte()), Message: string(s.b)}}})
			case 4:
				var held []Range
				for at := int64(0); len(held) < 4 && s.byte()%3 > 0; {
					at += int64(s.byte() % 16)
					n := 1 + int64(s.byte()%32)
					held = append(held, Range{at, n})
					at += n
				}
				if e != nil && e.open {
					e.cover(held)
				}
				r.Cover(id, held)
			case 5:
				if e != nil && e.open {
					e.fail()
				}
				r.Refuse(id, errFuzz)
			case 6:
				m.refuse = s.byte()%2 == 0
				book.refuse = m.refuse
			case 7:
				m.full = s.byte()%2 == 0
				book.full = m.full
			case 8:
				broken = true
				err = r.Frame(&frame.Frame{Credits: make([]frame.Credit, 1)})
			default:
				c := frame.Chunk{Tensor: id, Index: uint32(s.byte() % 34)}
				want := 5
				if e != nil && e.d.ChunkBytes > 0 {
					if n := uint32(e.count()); s.byte()%8 > 0 {
						c.Index %= n
					}
					want = max(0, e.length(int(c.Index)))
				}
				var data []byte
				c.Codec, data = s.payload(want)
				c.Sum = codec.CRC32.Update(codec.CRC32.Seed(id, c.Index), data)
				if s.byte()%16 == 1 {
					c.Sum++
				}
				cut := min(int(s.byte()), len(data)) // it may come in several views
				if c.Data = [][]byte{data[:cut], data[cut:]}; len(data) == 0 {
					c.Data = nil
				}
				broken = m.chunk(c, data)
				err = r.Frame(&frame.Frame{Chunk: c})
			}
			var se *frame.Error
			if errors.As(err, &se) != broken {
				t.Fatalf("operation %d: %v, want broken to be %v", op, err, broken)
			}
			m.hold(t, &r, book)
			if broken {
				break
			}
		}
		if len(b)%2 == 0 {
			r.End()
		} else {
			r.Fail(errFuzz)
		}
		for _, e := range m.tensors {
			if e.open {
				e.fail()
			}
		}
		m.hold(t, &r, book)
	})
}

// hold compares the Receiver with the model.
func (m *model) hold(t *testing.T, r *Receiver[fuzzPlace], b *fuzzBook) {
	t.Helper()
	if r.Open() != m.open() {
		t.Fatalf("%d tensors are open, want %d", r.Open(), m.open())
	}
	if len(b.ended) > len(m.tensors) {
		t.Fatalf("%d tensors ended, %d are known", len(b.ended), len(m.tensors))
	}
	for id, e := range m.tensors {
		if b.ended[id] != e.ended {
			t.Fatalf("tensor %v ended %q, want %q", id, b.ended[id], e.ended)
		}
		moved := int64(0)
		for i, data := range e.chunks {
			moved += int64(len(data))
			at := i * int(e.d.ChunkBytes)
			if got := b.data[id][at : at+len(data)]; !bytes.Equal(got, data) {
				t.Fatalf("chunk %d of tensor %v is %x, want %x", i, id, got, data)
			}
		}
		if b.moved[id] != moved {
			t.Fatalf("tensor %v: %d bytes moved, want %d", id, b.moved[id], moved)
		}
	}
}
