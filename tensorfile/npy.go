package tensorfile

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	"github.com/tensorferry/tensorferry/tensor"
)

// A .npy file is the magic, two bytes of version, the header's length (2 bytes in
// version 1, else 4, little-endian), the header (a Python dict that ends in a
// newline), then the bytes of one array. Version 3 only lets the header be UTF-8.
const (
	npyMagic = "\x93NUMPY"
	npyAlign = 64 // where the data begins, a multiple of it: what NumPy writes
)

// npyNames are NumPy's names of the data types, without the byte order. It has
// none for bfloat16 and the 8-bit floats.
var npyNames = map[tensor.DataType]string{
	tensor.Bool: "b1", tensor.Int8: "i1", tensor.Int16: "i2", tensor.Int32: "i4", tensor.Int64: "i8",
	tensor.Uint8: "u1", tensor.Uint16: "u2", tensor.Uint32: "u4", tensor.Uint64: "u8",
	tensor.Float16: "f2", tensor.Float32: "f4", tensor.Float64: "f8",
	tensor.Complex64: "c8", tensor.Complex128: "c16",
}

func readNPYHeader(r io.Reader) (d tensor.Desc, l Layout, err error) {
	var prefix [len(npyMagic) + 2 + 4]byte
	b := prefix[:len(npyMagic)+2]
	if err := readHeader(r, b, "npy"); err != nil {
		return d, l, err
	}
	if string(b[:len(npyMagic)]) != npyMagic {
		return d, l, fmt.Errorf("%w: npy: the file does not begin as a .npy file does", ErrFormat)
	}
	major, minor := b[len(npyMagic)], b[len(npyMagic)+1]
	if major < 1 || major > 3 || minor != 0 {
		return d, l, fmt.Errorf("%w: npy: version %d.%d; known are 1.0, 2.0 and 3.0", ErrUnsupported, major, minor)
	}
	b = prefix[len(npyMagic)+2:]
	if major == 1 {
		b = b[:2]
	}
	if err := readHeader(r, b, "npy"); err != nil {
		return d, l, err
	}
	n := uint32(binary.LittleEndian.Uint16(b))
	if major > 1 {
		n = binary.LittleEndian.Uint32(b)
	}
	if n > math.MaxUint16 { // all that version 1.0 can say; 32 axes of 13 digits take less than 1 KiB
		return d, l, fmt.Errorf("%w: npy: header of %d bytes is over the limit of %d", ErrFormat, n, math.MaxUint16)
	}
	header := make([]byte, n)
	if err := readHeader(r, header, "npy"); err != nil {
		return d, l, err
	}
	return parseNPYDict(string(header))
}

// WriteNPYHeader writes a .npy header of version 1.0; the tensor's bytes follow as
// they are. The format has no data type for bfloat16 and the 8-bit floats: they are
// refused, .safetensors holds them.
func WriteNPYHeader(w io.Writer, d tensor.Desc) error {
	if _, err := d.Bytes(); err != nil {
		return fmt.Errorf("%w: npy: %w", ErrFormat, err)
	}
	name, known := npyNames[d.DType]
	if !known {
		return fmt.Errorf("%w: npy has no type for %v; write it as .safetensors", ErrUnsupported, d.DType)
	}
	order := "<"
	if d.DType.Bits() == 8 {
		order = "|" // what NumPy writes where there is no order
	}
	shape := strings.ReplaceAll(strings.Trim(d.Shape.String(), "[]"), " ", ", ")
	if shape != "" {
		shape += "," // a lone number in parentheses is no tuple
	}
	out := append([]byte(npyMagic), 1, 0, 0, 0)
	prefix := len(out)
	out = fmt.Appendf(out, "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }", order+name, shape)
	for (len(out)+1)%npyAlign != 0 {
		out = append(out, ' ')
	}
	out = append(out, '\n')
	binary.LittleEndian.PutUint16(out[prefix-2:], uint16(len(out)-prefix)) // below 1 KiB
	if _, err := w.Write(out); err != nil {
		return fmt.Errorf("tensorfile: write npy header: %w", err)
	}
	return nil
}

type closer func() error

func (c closer) Close() error { return c() }

// parseNPYDict reads the dict as NumPy writes it, and as Python would read it as
// far as spaces, order of keys, kind of quotes and trailing commas go. Every key
// comes exactly once.
func parseNPYDict(text string) (d tensor.Desc, l Layout, err error) {
	p := literal{firstError: firstError{format: "npy"}, rest: text}
	seen := map[string]bool{}
	p.want("{")
	for p.err == nil && !p.take("}") {
		key := p.quoted()
		if seen[key] {
			p.fail("the key %q comes twice", key)
		}
		seen[key] = true
		p.want(":")
		switch key {
		case "descr":
			d.DType, l.BigEndian = p.descr()
		case "fortran_order":
			if l.Fortran = p.take("True"); !l.Fortran {
				p.want("False")
			}
		case "shape":
			d.Shape = p.tuple()
		default:
			p.fail("unknown key %q", key)
		}
		if !p.take(",") {
			p.want("}")
			break
		}
	}
	if len(seen) != 3 {
		p.fail("the header needs descr, fortran_order and shape")
	}
	p.want("\n")
	if p.rest != "" {
		p.fail("bytes after the newline that ends the header")
	}
	if p.err != nil {
		return d, l, p.err
	}
	if _, err := d.Bytes(); err != nil {
		return d, l, fmt.Errorf("%w: npy: %w", ErrFormat, err)
	}
	return d, l, nil
}

// literal reads the few Python literals of a header.
type literal struct {
	firstError
	rest string
}

// take skips spaces and reports whether the token follows, consuming it.
func (p *literal) take(token string) (ok bool) {
	p.rest = strings.TrimLeft(p.rest, " ")
	p.rest, ok = strings.CutPrefix(p.rest, token)
	return ok
}

func (p *literal) want(token string) {
	if !p.take(token) {
		p.fail("wanted %q, the header goes on with %.20q", token, p.rest)
	}
}

func (p *literal) quoted() string {
	for _, quote := range []string{"'", `"`} {
		if p.take(quote) {
			s, rest, closed := strings.Cut(p.rest, quote)
			if !closed || strings.Contains(s, `\`) {
				break
			}
			p.rest = rest
			return s
		}
	}
	p.fail("wanted a short text in quotes, the header goes on with %.20q", p.rest)
	return ""
}

func (p *literal) descr() (dtype tensor.DataType, bigEndian bool) {
	if p.take("[") {
		p.refuse(ErrUnsupported, "a structured array; save each of its fields by itself")
		return 0, false
	}
	s := p.quoted()
	for t, name := range npyNames {
		order, named := strings.CutSuffix(s, name)
		swapped := order == ">"
		if named && (swapped || order == "<" || order == "=" || order == "|" && t.Bits() == 8) {
			return t, swapped // = is the order of this machine: little-endian
		}
	}
	switch {
	case p.err != nil:
	case strings.Contains(s, "O"):
		p.refuse(ErrUnsupported, "%q holds Python objects, which are never unpickled; save numbers", s)
	case strings.Contains(s, "V"):
		p.refuse(ErrUnsupported, "%q is opaque bytes; bfloat16 and 8-bit floats go into .safetensors", s)
	default:
		p.refuse(ErrUnsupported, "%q is not supported; convert it with array.astype", s)
	}
	return 0, false
}

func (p *literal) tuple() tensor.Shape {
	shape := tensor.Shape{}
	p.want("(")
	for p.err == nil && !p.take(")") {
		digits := p.rest[:len(p.rest)-len(strings.TrimLeft(p.rest, "0123456789"))]
		p.rest = p.rest[len(digits):]
		dim, err := strconv.ParseUint(digits, 10, 63)
		if err != nil || len(digits) > 1 && digits[0] == '0' {
			p.fail("wanted a dimension, got %.20q", digits+p.rest)
			break
		}
		if shape = append(shape, int64(dim)); len(shape) > tensor.MaxRank {
			p.fail("the rank is over the limit of %d", tensor.MaxRank)
		}
		if !p.take(",") {
			if len(shape) == 1 {
				p.fail("the shape is a number; a tuple of one has a comma")
			}
			p.want(")")
			break
		}
	}
	return shape
}
