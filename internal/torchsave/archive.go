package torchsave

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"strings"
)

// A file of torch.save is a zip archive that is written without looking back: a local header
// has no sizes, which follow the bytes, if there are any, in a descriptor and stand in the
// directory. Records are stored as they are, and their bytes begin at a multiple of align.
// What has no room in 32 bits is in ZIP64's extra field; ZIP64's end record is always there.
const (
	localBegin      = "PK\x03\x04"
	descriptorBegin = "PK\x07\x08"
	entryBegin      = "PK\x01\x02"
	endBegin        = "PK\x06\x06" // of ZIP64's; then come its locator and the end record of zip

	localSize = 30 // without the name and the extra field
	entrySize = 46
	wideSize  = 4 + 3*8 // of ZIP64's extra field, the most: two sizes and an offset
	flags     = 0x0808  // a descriptor follows, the name is UTF-8
	noBytes   = 0x0800  // of an empty record
	align     = 64
	narrow    = math.MaxUint32 // the least that has no room
)

var le = binary.LittleEndian

// record is a record of an archive.
type record struct {
	name         string
	crc          uint32
	size, offset int64 // in bytes; where its local header begins
}

// wide is the record's extra field of ZIP64, nil if the record needs none: its size and how
// many bytes it is packed into, which torch leaves at 0 in a local header, and its offset.
func (r *record) wide(packed int64) (extra []byte) {
	if r.size >= narrow {
		extra = le.AppendUint64(le.AppendUint64(extra, uint64(r.size)), uint64(packed))
	}
	if r.offset >= narrow {
		extra = le.AppendUint64(extra, uint64(r.offset))
	}
	if extra != nil {
		extra = slices.Concat([]byte{1, 0, byte(len(extra)), 0}, extra)
	}
	return extra
}

func (r *record) flags() uint16 {
	if r.size == 0 {
		return noBytes
	}
	return flags
}

// local is the record's local header.
func (r *record) local() []byte {
	b := append([]byte(localBegin), make([]byte, localSize-len(localBegin))...)
	le.PutUint16(b[6:], r.flags())
	le.PutUint16(b[26:], uint16(len(r.name)))
	b = append(append(b, r.name...), r.wide(0)...)
	pad := align - (r.offset+int64(len(b))+4)%align
	b = append(le.AppendUint16(append(b, "FB"...), uint16(pad)), strings.Repeat("Z", int(pad))...)
	le.PutUint16(b[28:], uint16(len(b)-localSize-len(r.name)))
	return b
}

// descriptor is what follows the record's bytes.
func (r *record) descriptor() []byte {
	if r.size == 0 {
		return nil
	}
	b := le.AppendUint32([]byte(descriptorBegin), r.crc)
	if r.wide(0) != nil {
		return le.AppendUint64(le.AppendUint64(b, uint64(r.size)), uint64(r.size))
	}
	return le.AppendUint32(le.AppendUint32(b, uint32(r.size)), uint32(r.size))
}

// entry is the record's entry in the directory.
func (r *record) entry() []byte {
	b := append([]byte(entryBegin), make([]byte, entrySize-len(entryBegin))...)
	size, extra := uint32(min(r.size, narrow)), r.wide(r.size)
	le.PutUint16(b[8:], r.flags())
	le.PutUint32(b[16:], r.crc)
	le.PutUint32(b[20:], size)
	le.PutUint32(b[24:], size)
	le.PutUint16(b[28:], uint16(len(r.name)))
	le.PutUint16(b[30:], uint16(len(extra)))
	le.PutUint32(b[42:], uint32(min(r.offset, narrow)))
	return append(append(b, r.name...), extra...)
}

// endRecords are ZIP64's end record, its locator and the end record of zip behind a directory of n
// entries that lies between two offsets.
func endRecords(n int, from, to int64) []byte {
	b := append([]byte(endBegin), 44, 0, 0, 0, 0, 0, 0, 0, 0x1e, 3, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0) // its length, versions as torch has them, disks
	for _, v := range []int64{int64(n), int64(n), to - from, from} {
		b = le.AppendUint64(b, uint64(v))
	}
	b = le.AppendUint64(append(append(b, "PK\x06\x07"...), 0, 0, 0, 0), uint64(to))
	b = append(append(append(b, 1, 0, 0, 0), "PK\x05\x06"...), 0, 0, 0, 0)
	n16 := uint16(min(n, math.MaxUint16))
	b = le.AppendUint16(le.AppendUint16(b, n16), n16)
	b = le.AppendUint32(le.AppendUint32(b, uint32(min(to-from, narrow))), uint32(min(from, narrow)))
	return append(b, 0, 0) // no comment
}

// matches reports whether what came is what was to come, but for ranges of bytes: versions,
// times and attributes may be anything.
func matches(came, want []byte, anything ...[2]int) bool {
	came = slices.Clone(came[:len(want)])
	for _, a := range anything {
		copy(came[a[0]:a[1]], want[a[0]:])
	}
	return bytes.Equal(came, want)
}
