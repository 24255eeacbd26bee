package torchsave

import (
	"encoding/binary"
	"math"
	"slices"
	"strings"
)

// A file of torch.save is a zip archive that was written without looking back: a local
// header has no sizes, which follow the bytes in a descriptor and stand in the directory.
// Every record is stored as it is, and begins at a multiple of align. ZIP64 takes the place
// of what has no room in 32 bits, but its end record is always there.
const (
	localBegin      = "PK\x03\x04"
	descriptorBegin = "PK\x07\x08"
	entryBegin      = "PK\x01\x02"
	endBegin        = "PK\x06\x06"

	localSize = 30 // without the name and the extra field
	entrySize = 46
	endSize   = 56 + 20 + 22 // the end record of ZIP64, its locator, the end record of zip
	flags     = 0x0808       // sizes follow, the name is UTF-8
	align     = 64
	narrow    = math.MaxUint32 // from here on a number is in ZIP64's extra field
)

// record is a record of an archive.
type record struct {
	name         string
	crc          uint32
	size, offset int64 // in bytes; where its local header begins
}

var le = binary.LittleEndian

// wide is the record's extra field of ZIP64, empty if the record needs none.
func (r *record) wide() (extra []byte) {
	if r.size >= narrow {
		extra = le.AppendUint64(le.AppendUint64(extra, uint64(r.size)), uint64(r.size))
	}
	if r.offset >= narrow {
		extra = le.AppendUint64(extra, uint64(r.offset))
	}
	if extra != nil {
		extra = slices.Concat([]byte{1, 0, byte(len(extra)), 0}, extra)
	}
	return extra
}

func short(n int64) uint32 { return uint32(min(n, narrow)) }

// local is the record's local header, as long as the record's bytes begin at a multiple of align.
func (r *record) local() []byte {
	b := append([]byte(localBegin), make([]byte, localSize-4)...)
	le.PutUint16(b[6:], flags)
	le.PutUint16(b[26:], uint16(len(r.name)))
	b = append(append(b, r.name...), r.wide()...)
	pad := (align - (r.offset+int64(len(b))+4)%align) % align
	b = append(le.AppendUint16(append(b, "FB"...), uint16(pad)), strings.Repeat("Z", int(pad))...)
	le.PutUint16(b[28:], uint16(len(b)-localSize-len(r.name)))
	return b
}

// descriptor is what follows the record's bytes.
func (r *record) descriptor() []byte {
	b := le.AppendUint32([]byte(descriptorBegin), r.crc)
	if r.wide() != nil {
		return le.AppendUint64(le.AppendUint64(b, uint64(r.size)), uint64(r.size))
	}
	return le.AppendUint32(le.AppendUint32(b, uint32(r.size)), uint32(r.size))
}

// entry is the record's entry in the directory.
func (r *record) entry() []byte {
	b := append([]byte(entryBegin), make([]byte, entrySize-4)...)
	extra := r.wide()
	le.PutUint16(b[8:], flags)
	le.PutUint32(b[16:], r.crc)
	le.PutUint32(b[20:], short(r.size))
	le.PutUint32(b[24:], short(r.size))
	le.PutUint16(b[28:], uint16(len(r.name)))
	le.PutUint16(b[30:], uint16(len(extra)))
	le.PutUint32(b[42:], short(r.offset))
	return append(append(b, r.name...), extra...)
}

// end is what follows a directory of n entries, from begin to end.
func end(n, begin, end int64) []byte {
	b := make([]byte, endSize)
	for at, signature := range map[int]string{0: endBegin, 56: "PK\x06\x07", 76: "PK\x05\x06"} {
		copy(b[at:], signature)
	}
	b[4], b[12], b[13], b[14] = 44, 0x1e, 3, 45 // the bytes to come; versions, as torch has them
	for i, v := range []int64{n, n, end - begin, begin} {
		le.PutUint64(b[24+8*i:], uint64(v))
	}
	le.PutUint64(b[56+8:], uint64(end))
	b[56+16] = 1 // disk
	le.PutUint16(b[76+8:], uint16(min(n, math.MaxUint16)))
	le.PutUint16(b[76+10:], uint16(min(n, math.MaxUint16)))
	le.PutUint32(b[76+12:], short(end-begin))
	le.PutUint32(b[76+16:], short(begin))
	return b
}

// field is a field of a header, whose value may matter or not.
type field struct {
	at   int
	name string // empty for what may be anything: versions, times, attributes
}

var (
	entryFields = []field{{0, "signature"}, {4, ""}, {8, "flags"}, {10, "compression"}, {12, ""}, {16, "checksum"}, {20, "size"}, {28, "name"},
		{30, "ZIP64 field"}, {32, "comment"}, {34, "disk"}, {36, ""}, {42, "offset"}, {46, "name"}}
	endFields = []field{{0, "signature"}, {4, "length"}, {12, ""}, {16, "disk"}, {24, "number of records"}, {40, "length of the directory"},
		{48, "offset of the directory"}, {56, "signature"}, {60, "disk"}, {64, "offset of the end record"}, {72, "number of disks"},
		{76, "signature"}, {80, "disk"}, {84, "number of records"}, {88, "length of the directory"}, {92, "offset of the directory"}, {96, "comment"}}
)

// other returns the first field whose value is not the one wanted, or nothing.
func other(got, want []byte, fields []field) string {
	for i, f := range fields {
		to := len(want)
		if i+1 < len(fields) {
			to = fields[i+1].at
		}
		if f.name != "" && string(got[f.at:to]) != string(want[f.at:to]) {
			return f.name
		}
	}
	return ""
}
