package torchsave

import (
	"hash/crc32"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// Parts is a file that is to be written: gaps, and between them the bytes of its tensors,
// row-major and little-endian. It is safe for concurrent use.
type Parts struct {
	gaps    [][]byte // before each tensor and behind the last, without checksums and directory
	offsets []int64  // where each tensor begins, and where the last gap does
	records []record // up to the last tensor: two, and the storages
}

// Bare lays out a file of one tensor.
func Bare(d tensor.Desc) (*Parts, error) { return NewParts([]tensorfile.Entry{{Desc: d}}, true) }

// NewParts lays out a file of a dict of tensors, or of one that is bare. Of an entry it
// takes name and desc.
func NewParts(tensors []tensorfile.Entry, bare bool) (*Parts, error) {
	pickle := []byte("\x80\x02")
	if !bare {
		pickle = append(pickle, "}("...)
	}
	seen, sizes, left := map[string]bool{}, make([]int64, len(tensors)), int64(math.MaxInt64/2)
	for i, t := range tensors {
		size, err := t.Desc.Bytes()
		switch {
		case err != nil:
			return nil, malformed("%w", err)
		case seen[t.Name] || !utf8.ValidString(t.Name) || len(t.Name) > maxText:
			return nil, malformed("the name %.80q is taken, too long or not UTF-8", t.Name)
		case size > left:
			return nil, limited("more than %d bytes", int64(math.MaxInt64/2))
		}
		seen[t.Name], sizes[i], left = true, size, left-size
		if !bare && i > 0 && i%(maxStack/8) == 0 {
			pickle = append(pickle, "u("...)
		}
		if !bare {
			pickle = appendText(pickle, t.Name)
		}
		pickle = appendTensor(pickle, t.Desc, i, size)
	}
	if !bare {
		pickle = append(pickle, 'u')
	}
	if pickle = append(pickle, '.'); len(pickle) > maxFilePickle {
		return nil, limited("names and shapes of %d bytes, the limit is %d", len(pickle), maxFilePickle)
	}

	p, pos := &Parts{}, int64(0)
	gap := p.record(nil, 0, order[0], pickle)
	gap = p.record(gap, 0, order[orderRecord], []byte("little"))
	for i, size := range sizes {
		r := record{name: prefix + order[storageRecord] + strconv.Itoa(i), offset: pos + int64(len(gap)), size: size}
		gap = append(gap, r.local()...)
		pos += int64(len(gap))
		p.gaps, p.offsets, p.records = append(p.gaps, gap), append(p.offsets, pos), append(p.records, r)
		gap, pos = r.descriptor(), pos+size
	}
	p.gaps, p.offsets = append(p.gaps, gap), append(p.offsets, pos)
	return p, nil
}

// prefix is what the names of all records begin with.
const prefix = "archive/"

// record appends a short record of the file to b, which is at pos.
func (p *Parts) record(b []byte, pos int64, name string, data []byte) []byte {
	r := record{name: prefix + name, crc: crc32.ChecksumIEEE(data), size: int64(len(data)), offset: pos + int64(len(b))}
	p.records = append(p.records, r)
	return slices.Concat(b, r.local(), data, r.descriptor())
}

// Offset returns where the bytes of a tensor begin in the file, and, one further than the
// last tensor, where these end.
func (p *Parts) Offset(i int) int64 { return p.offsets[i] }

// Size returns how many bytes the whole file has.
func (p *Parts) Size() int64 {
	last := len(p.offsets) - 1
	return p.offsets[last] + int64(len(p.Gap(last, make([]uint32, last))))
}

// Gap hands over what comes before the bytes of a tensor, or behind those of the last one.
// crcs has the CRC-32 (IEEE) of each tensor before.
func (p *Parts) Gap(i int, crcs []uint32) []byte {
	b := slices.Clone(p.gaps[i])
	for _, crc := range crcs[max(i-1, 0):i] {
		if p.records[1+i].size > 0 { // an empty record has no descriptor
			le.PutUint32(b[len(descriptorBegin):], crc)
		}
	}
	if i < len(p.gaps)-1 {
		return b
	}
	whole := Parts{records: slices.Clone(p.records)}
	for i, crc := range crcs {
		whole.records[2+i].crc = crc
	}
	b = whole.record(b, p.offsets[i], order[versionRecord], []byte("3\n"))
	from := p.offsets[i] + int64(len(b))
	for _, r := range whole.records {
		b = append(b, r.entry()...)
	}
	return append(b, endRecords(len(whole.records), from, p.offsets[i]+int64(len(b)))...)
}

// appendTensor appends the opcodes of a dense tensor that fills the storage of a key.
func appendTensor(b []byte, d tensor.Desc, key int, size int64) []byte {
	build, unit, kind := "_v2", width(d), storageType(d.DType)
	if nameOf(kind) == "" {
		build, unit, kind = "_v3", 1, 0
	}
	b = appendText(append(appendGlobal(b, "torch._utils _rebuild_tensor"+build), "(("...), "storage")
	b = appendText(appendText(appendGlobal(b, nameOf(kind)), strconv.Itoa(key)), "cpu")
	b = appendNumber(append(appendNumber(b, size/unit), "tQ"...), 0)
	strides, step := make([]int64, len(d.Shape)), int64(1)
	for i, dim := range slices.Backward(d.Shape) {
		strides[i], step = step, step*max(dim, 1)
	}
	for _, list := range [][]int64{d.Shape, strides} {
		b = append(b, '(')
		for _, n := range list {
			b = appendNumber(b, n)
		}
		b = append(b, 't')
	}
	b = append(appendGlobal(append(b, 0x89), "collections OrderedDict"), ")R"...)
	if kind == 0 {
		b = appendGlobal(b, nameOf(dataType(d.DType)))
	}
	return append(b, "tR"...)
}

// nameOf is the name of a type, or empty.
func nameOf(v any) string {
	for name, known := range globals {
		if _, called := known.(function); !called && known == v {
			return name
		}
	}
	return ""
}

func appendGlobal(b []byte, name string) []byte {
	return append(append(append(b, 'c'), strings.Replace(name, " ", "\n", 1)...), '\n')
}

func appendText(b []byte, s string) []byte {
	return append(le.AppendUint32(append(b, 'X'), uint32(len(s))), s...)
}

func appendNumber(b []byte, n int64) []byte {
	switch {
	case n <= math.MaxUint8:
		return append(b, 'K', byte(n))
	case n <= math.MaxInt32:
		return le.AppendUint32(append(b, 'J'), uint32(n))
	}
	return le.AppendUint64(append(b, 0x8a, 8), uint64(n))
}
