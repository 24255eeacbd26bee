package tensorfile

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/tensor"
)

// A .safetensors file is 8 bytes of header length (little-endian), the header (a
// JSON object, padded with spaces), then the bytes of all tensors, back to back.
const (
	lengthBytes = 8
	headerAlign = 8 // so that the first tensor begins aligned for any data type
)

// stTypes are the data types in the order of the reference implementation, with the
// format's names. It has none for complex128.
var stTypes = []stType{
	{tensor.Uint64, "U64"}, {tensor.Int64, "I64"}, {tensor.Float64, "F64"}, {tensor.Complex64, "C64"},
	{tensor.Float32, "F32"}, {tensor.Uint32, "U32"}, {tensor.Int32, "I32"},
	{tensor.BFloat16, "BF16"}, {tensor.Float16, "F16"}, {tensor.Uint16, "U16"}, {tensor.Int16, "I16"},
	{tensor.Float8E4M3FN, "F8_E4M3"}, {tensor.Float8E5M2, "F8_E5M2"},
	{tensor.Int8, "I8"}, {tensor.Uint8, "U8"}, {tensor.Bool, "BOOL"},
}

type stType struct {
	dtype tensor.DataType
	name  string
}

// rank returns the index of a data type in stTypes, -1 if the format has none.
func rank(d tensor.DataType) int {
	return slices.IndexFunc(stTypes, func(t stType) bool { return t.dtype == d })
}

// Named is a tensor and its name in a file.
type Named struct {
	Name string
	tensor.Tensor
}

// Entry says where a .safetensors file holds a tensor. Off and Bytes are bytes,
// Off counted from the end of the header.
type Entry struct {
	Name       string
	Desc       tensor.Desc
	Off, Bytes int64
	// Foreign is the format's name of a data type that there is none of here, at most
	// 40 bytes of it. The Desc then has no data type.
	Foreign string
}

// Safetensors is an open .safetensors file, or a model of several (OpenModel). Safe
// for concurrent use, except that Close comes last.
type Safetensors struct {
	entries  []Entry
	index    map[string]int
	document Document
	data     []byte                  // after the header; lent by the map or shared with the caller
	shards   map[string]*Safetensors // the files of a model of several, which have the data
	closeMap func() error
}

// OpenSafetensors reads and checks the file's header, and maps the file read-only.
// Tensors are read from disk when they are first touched. Nobody may shorten the
// file while it is open: touching a page that is gone kills the process (SIGBUS), as
// does writing to a tensor's bytes. Replace such a file by renaming a new one
// over it. The caller closes the result.
func OpenSafetensors(path string) (*Safetensors, error) {
	var s *Safetensors
	data, closeMap, err := mapAfter(path, func(r io.Reader, size int64) (err error) {
		s, err = readSafetensors(r, size)
		return err
	})
	if err != nil {
		return nil, err
	}
	s.data, s.closeMap = data, closeMap
	return s, nil
}

// ParseSafetensors reads a file's whole content from memory, such as an embedded
// file. The result shares data with the caller, who may not change it before Close.
func ParseSafetensors(data []byte) (*Safetensors, error) {
	r := bytes.NewReader(data)
	s, err := readSafetensors(r, r.Size())
	if err != nil {
		return nil, err
	}
	s.data, s.closeMap = data[len(data)-r.Len():], func() error { return nil }
	return s, nil
}

// readSafetensors reads the header of a file of size bytes, up to the first byte of the
// data.
func readSafetensors(r io.Reader, size int64) (*Safetensors, error) {
	if size < lengthBytes {
		return nil, fmt.Errorf("%w: safetensors: %d bytes are not a file; the header length alone takes %d",
			ErrFormat, size, lengthBytes)
	}
	var length [lengthBytes]byte
	if err := readHeader(r, length[:], "safetensors"); err != nil {
		return nil, err
	}
	n, left := binary.LittleEndian.Uint64(length[:]), size-lengthBytes
	if n > MaxSafetensorsHeader {
		return nil, fmt.Errorf("%w: safetensors: header of %d bytes is over the limit of %d; is this a safetensors file?",
			ErrFormat, n, MaxSafetensorsHeader)
	}
	if n > uint64(left) {
		return nil, fmt.Errorf("%w: safetensors: header of %d bytes promised, %d bytes left in the file; it was cut short",
			ErrFormat, n, left)
	}
	header := make([]byte, n)
	if err := readHeader(r, header, "safetensors"); err != nil {
		return nil, err
	}
	entries, metadata, err := parseSafetensorsHeader(header, left-int64(n))
	if err != nil {
		return nil, err
	}
	return &Safetensors{entries: entries, index: indexOf(entries), document: Document{Metadata: metadata}}, nil
}

func indexOf(entries []Entry) map[string]int {
	index := make(map[string]int, len(entries))
	for i, e := range entries {
		index[e.Name] = i
	}
	return index
}

// Names returns the names of the tensors in the order of their bytes, of every data
// type.
func (s *Safetensors) Names() []string {
	names := make([]string, len(s.entries))
	for i, e := range s.entries {
		names[i] = e.Name
	}
	return names
}

// Metadata copies the file's free-form texts; of a model of several files, those that
// all have.
func (s *Safetensors) Metadata() map[string]string { return s.document.Common() }

// Document returns what the file says beside its tensors, which it shares, read-only.
func (s *Safetensors) Document() Document { return s.document }

// Desc copies the desc of the tensor of this name; the error wraps ErrNotFound, or
// ErrUnsupported if its data type is not one of package tensor.
func (s *Safetensors) Desc(name string) (tensor.Desc, error) {
	e, err := s.entry(name)
	return e.Desc.Clone(), err
}

// Array is Tensor, as other files of several have it.
func (s *Safetensors) Array(name string) (Array, error) {
	t, err := s.Tensor(name)
	return Array{Name: name, Desc: t.Desc, Data: t.Data}, err
}

// Tensor lends the tensor of this name until Close, read-only: a view of the file,
// no copy. The bytes may begin at an address that is not aligned for their data
// type, since other writers do not align; tensor.Slice refuses such a tensor.
func (s *Safetensors) Tensor(name string) (tensor.Tensor, error) {
	e, err := s.entry(name)
	if err != nil {
		return tensor.Tensor{}, err
	}
	if s.closeMap == nil {
		return tensor.Tensor{}, ErrClosed
	}
	if s.shards != nil {
		return s.shards[s.document.files[name]].Tensor(name)
	}
	end := e.Off + e.Bytes // within the data: the header was checked against its size
	return tensor.New(e.Desc.Clone(), s.data[e.Off:end:end])
}

// Close ends the loan of every tensor. Closing twice returns ErrClosed.
func (s *Safetensors) Close() error {
	if s.closeMap == nil {
		return ErrClosed
	}
	closeMap := s.closeMap
	s.closeMap, s.data = nil, nil
	return closeMap()
}

func (s *Safetensors) entry(name string) (Entry, error) {
	i, ok := s.index[name]
	if !ok {
		return Entry{}, fmt.Errorf("%w: %q; the file holds %d others; tensorferry show lists them", ErrNotFound, name, len(s.entries))
	}
	if e := s.entries[i]; e.Foreign != "" {
		return Entry{}, fmt.Errorf("%w: tensor %q has the data type %q; convert it in Python", ErrUnsupported, name, e.Foreign)
	}
	return s.entries[i], nil
}

// parseSafetensorsHeader checks a header (the JSON text with its padding, without
// the length before it) against the dataBytes bytes that follow it, which the
// tensors must cover once and completely. Entries come in the order of their bytes.
// Nothing returned shares header.
func parseSafetensorsHeader(header []byte, dataBytes int64) ([]Entry, map[string]string, error) {
	text := bytes.TrimRight(header, " ")
	if len(text) == 0 || text[0] != '{' || text[len(text)-1] != '}' {
		return nil, nil, fmt.Errorf("%w: safetensors: the header is not a JSON object; is this a safetensors file?", ErrFormat)
	}
	p := newHeaderParser(text, "the header")
	p.object("the header", func(key string) {
		if key == MetadataName {
			p.metadata = p.texts(key)
		} else {
			p.entry(key)
		}
	})
	if p.err == nil {
		p.checkCoverage(dataBytes)
	}
	if p.err != nil {
		return nil, nil, p.err
	}
	return p.entries, p.metadata, nil
}

// headerParser walks the tokens of a header. After the first error no step does anything.
type headerParser struct {
	firstError
	dec      *json.Decoder
	entries  []Entry
	metadata map[string]string
}

// newHeaderParser returns a parser of a text, which it checks to be JSON.
func newHeaderParser(text []byte, what string) headerParser {
	p := headerParser{firstError: firstError{format: "safetensors"}, dec: json.NewDecoder(bytes.NewReader(text))}
	p.dec.UseNumber()
	if !utf8.Valid(text) || !json.Valid(text) {
		p.fail("%s is not JSON in UTF-8", what)
	}
	return p
}

// checkCount fails if there may be no more than n of something.
func (p *headerParser) checkCount(n int, what string) {
	if n >= MaxEntries {
		p.fail("there are more than %d %s, the limit", MaxEntries, what)
	}
}

// texts reads an object of texts.
func (p *headerParser) texts(what string) map[string]string {
	m := map[string]string{}
	p.object(what, func(k string) {
		p.checkCount(len(m), "texts")
		m[k] = p.text(k)
	})
	return m
}

func (p *headerParser) entry(name string) {
	p.checkCount(len(p.entries), "tensors")
	e := Entry{Name: name}
	var seen int
	p.object(name, func(key string) {
		seen++
		switch key {
		case "dtype":
			dtype := p.text(name)
			if i := slices.IndexFunc(stTypes, func(t stType) bool { return t.name == dtype }); i >= 0 {
				e.Desc.DType = stTypes[i].dtype
			} else {
				e.Foreign = cmp.Or(strings.ToValidUTF8(dtype[:min(len(dtype), 40)], ""), "none")
			}
		case "shape":
			// A shape is kept only as far as the rank limit, however long the list.
			n := p.numbers(name, tensor.MaxRank, func(d int64) { e.Desc.Shape = append(e.Desc.Shape, d) })
			if n > tensor.MaxRank {
				p.fail("tensor %q has rank %d, over the limit of %d", name, n, tensor.MaxRank)
			}
		case "data_offsets":
			var offs []int64
			if n := p.numbers(name, 2, func(o int64) { offs = append(offs, o) }); n != 2 {
				p.fail("tensor %q has %d data_offsets, wanted begin and end", name, n)
			} else if p.err == nil {
				e.Off, e.Bytes = offs[0], offs[1]-offs[0] // both 0 or more, so no overflow
			}
		default:
			p.fail("tensor %q has the unknown key %q", name, key)
		}
	})
	if seen != 3 { // each at most once, so three are all
		p.fail("tensor %q needs dtype, shape and data_offsets", name)
	}
	if p.err != nil {
		return
	}
	if e.Desc.Shape == nil {
		e.Desc.Shape = tensor.Shape{}
	}
	n, err := e.Desc.Bytes()
	if e.Foreign != "" { // how many bytes it needs is not known
		_, err = e.Desc.Shape.Elements()
		n = max(e.Bytes, 0)
	}
	switch {
	case err != nil:
		p.err = fmt.Errorf("%w: safetensors: tensor %q: %w", ErrFormat, name, err)
	case n != e.Bytes:
		p.fail("tensor %q: %v needs %d bytes, data_offsets hold %d", name, cmp.Or(e.Foreign, e.Desc.String()), n, e.Bytes)
	default:
		p.entries = append(p.entries, e)
	}
}

// checkCoverage checks that the tensors leave no hole, no overlap and no rest. Empty
// tensors may share an offset, at the seams of the others.
func (p *headerParser) checkCoverage(dataBytes int64) {
	slices.SortFunc(p.entries, func(a, b Entry) int {
		return cmp.Or(cmp.Compare(a.Off, b.Off), cmp.Compare(a.Bytes, b.Bytes), cmp.Compare(a.Name, b.Name))
	})
	var end int64
	for _, e := range p.entries {
		if e.Off != end {
			p.fail("tensor %q begins at byte %d, the one before it ends at %d: a hole or an overlap", e.Name, e.Off, end)
			return
		}
		end += e.Bytes // the sum of contiguous ranges is an offset that was read
	}
	if end != dataBytes {
		p.fail("the tensors end at byte %d, the data has %d bytes", end, dataBytes)
	}
}

func (p *headerParser) next() json.Token {
	if p.err != nil {
		return nil
	}
	t, err := p.dec.Token()
	if err != nil {
		p.fail("the header is not JSON: %v", err)
	}
	return t
}

// object runs member for each key of the object that comes next; member consumes
// the value. A key that comes twice is refused.
func (p *headerParser) object(what string, member func(key string)) {
	if p.next() != json.Delim('{') {
		p.fail("%q is not an object", what)
	}
	seen := map[string]bool{}
	for p.err == nil && p.dec.More() {
		key := p.text(what)
		if seen[key] {
			p.fail("duplicate key %q in %q", key, what)
		}
		if seen[key] = true; p.err == nil {
			member(key)
		}
	}
	p.next() // the closing brace
}

func (p *headerParser) text(what string) string {
	s, ok := p.next().(string)
	if !ok {
		p.fail("%q holds something other than text", what)
	}
	// The decoder turns half a surrogate pair into this character: two different
	// names would become one.
	if strings.ContainsRune(s, utf8.RuneError) {
		p.fail("%q holds broken Unicode", what)
	}
	return s
}

// numbers runs add for the first keep numbers of the list that comes next and
// returns how many there are. They are plain: no sign, fraction or exponent.
func (p *headerParser) numbers(what string, keep int, add func(int64)) (n int) {
	if p.next() != json.Delim('[') {
		p.fail("tensor %q: wanted a list of numbers", what)
	}
	for ; p.err == nil && p.dec.More(); n++ {
		num, _ := p.next().(json.Number)
		v, err := strconv.ParseUint(string(num), 10, 63)
		if err != nil {
			p.fail("tensor %q: wanted a whole number below 2^63, got %q", what, num)
		} else if n < keep {
			add(int64(v))
		}
	}
	p.next() // the closing bracket
	return n
}

// WriteSafetensors writes the tensors, which the caller lends, as one file. All of
// them are checked before the first byte is written. Wider data types come first,
// otherwise in the order given, so that every tensor begins aligned.
func WriteSafetensors(w io.Writer, tensors []Named, metadata map[string]string) error {
	tensors = slices.Clone(tensors)
	slices.SortStableFunc(tensors, func(a, b Named) int { return cmp.Compare(b.DType.Bits(), a.DType.Bits()) })
	entries := make([]Entry, len(tensors))
	for i, t := range tensors {
		if _, err := tensor.New(t.Desc, t.Data); err != nil {
			return fmt.Errorf("%w: safetensors: tensor %q: %w", ErrFormat, t.Name, err)
		}
		entries[i] = Entry{Name: t.Name, Desc: t.Desc}
	}
	header, err := SafetensorsHeader(entries, metadata)
	if err != nil {
		return err
	}
	if _, err := w.Write(header); err != nil {
		return fmt.Errorf("tensorfile: write safetensors header: %w", err)
	}
	for _, t := range tensors {
		if _, err := w.Write(t.Data); err != nil {
			return fmt.Errorf("tensorfile: write tensor %q: %w", t.Name, err)
		}
	}
	return nil
}

// SafetensorsHeader hands over how a file begins, its length and its header, whose
// tensors' bytes follow back to back in this order. Of an entry it takes name and
// desc, and says where the bytes go itself.
func SafetensorsHeader(tensors []Entry, metadata map[string]string) ([]byte, error) {
	if n := max(len(tensors), len(metadata)); n > MaxEntries {
		return nil, fmt.Errorf("%w: safetensors: %d entries are over the limit of %d", ErrFormat, n, MaxEntries)
	}
	out := append(make([]byte, lengthBytes, 512), '{') // that of one tensor and a pushed one's metadata fits
	add := func(key string, value any) {
		if len(out) > lengthBytes+1 {
			out = append(out, ',')
		}
		out = append(append(append(out, quote(key)...), ':'), quote(value)...)
	}
	if len(metadata) > 0 {
		for k, v := range metadata {
			if !isSound(k) || !isSound(v) {
				return nil, fmt.Errorf("%w: safetensors: metadata %q: %q is not text in UTF-8", ErrFormat, k, v)
			}
		}
		add(MetadataName, metadata)
	}
	seen := map[string]bool{}
	var end int64
	for _, t := range tensors {
		dtype := rank(t.Desc.DType)
		n, err := t.Desc.Bytes()
		switch {
		case seen[t.Name] || t.Name == MetadataName || !isSound(t.Name):
			return nil, fmt.Errorf("%w: safetensors: the name %q is taken, reserved or not UTF-8", ErrFormat, t.Name)
		case dtype < 0 && t.Desc.DType.Valid():
			return nil, fmt.Errorf("%w: safetensors has no type for tensor %q of %v; write it as .npy", ErrUnsupported, t.Name, t.Desc.DType)
		case err != nil:
			return nil, fmt.Errorf("%w: safetensors: tensor %q: %w", ErrFormat, t.Name, err)
		case n > math.MaxInt64-end:
			return nil, fmt.Errorf("%w: safetensors: %d bytes and tensor %q of %d", tensor.ErrTooLarge, end, t.Name, n)
		}
		seen[t.Name] = true
		begin := end
		end += n
		add(t.Name, struct {
			DType   string       `json:"dtype"`
			Shape   tensor.Shape `json:"shape"`
			Offsets [2]int64     `json:"data_offsets"`
		}{stTypes[dtype].name, append(tensor.Shape{}, t.Desc.Shape...), [2]int64{begin, end}})
	}
	out = append(out, '}')
	for len(out)%headerAlign != 0 {
		out = append(out, ' ')
	}
	n := len(out) - lengthBytes
	if n > MaxSafetensorsHeader {
		return nil, fmt.Errorf("%w: safetensors: header of %d bytes is over the limit of %d", ErrFormat, n, MaxSafetensorsHeader)
	}
	binary.LittleEndian.PutUint64(out, uint64(n))
	return out, nil
}

// Order compares two tensors as the reference implementation orders them in a file:
// wider data types first, so that every tensor begins aligned, then by name.
func Order(a, b Entry) int {
	return cmp.Or(cmp.Compare(rank(a.Desc.DType), rank(b.Desc.DType)), cmp.Compare(a.Name, b.Name))
}

// isSound reports whether a text comes back from JSON as it went in.
func isSound(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, utf8.RuneError) }

// quote returns v as JSON, with no character escaped that need not be. Strings, and
// maps and structs of them, cannot fail.
func quote(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic("tensorfile: " + err.Error())
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}
