package torchsave

import (
	"bytes"
	"hash/crc32"
	"io"
	"slices"
	"strings"
)

// order has the records of a file in their order. data.pkl has the opcodes, data/ and a key
// is a storage; what else there is are short texts.
var order = []string{"data.pkl", ".format_version", ".storage_alignment", "byteorder", "data/", "version", ".data/serialization_id"}

const (
	orderRecord   = 3
	storageRecord = 4
	versionRecord = 5
)

// Reader reads a file of torch.save of one tensor that comes in pieces, in order. It holds
// a few KiB and starts nothing. It belongs to one goroutine.
type Reader struct {
	m       machine // with the first error of all
	many    bool    // a whole file: it may hold a dict, and the bytes of its storages do not come
	entries []entry
	bare    bool // one tensor, without a dict
	known   bool

	pos  int64  // of the byte that comes next, or of the first one held
	pass int64  // bytes that pass before the next step
	held []byte // the begin of a step that needs more
	// step takes what b begins with and returns how many bytes it has, or 0 if it needs more.
	step func(b []byte) (used int)

	prefix  string // of all names: archive/
	place   int    // of the last record, in order
	records []record
	sum     uint32   // the checksum of the last record
	storage *storage // that the last record is, or nil
	came    int      // storages
	listing int64    // where the directory begins
	listed  int      // records that came in it
	over    bool
}

// NewReader returns a Reader of a file whose tensor, and the window in which its elements
// lie, have up to maxBytes bytes each. A larger one is refused as soon as the layout is
// known; the error wraps tensor.ErrTooLarge.
func NewReader(maxBytes int64) *Reader {
	return newReader(maxText, func(l Layout) error {
		if size, _ := l.Bytes(); max(size, l.Window) > maxBytes { // it has been computed before
			return limited("%v has %d bytes, which take %d in the file; the limit is %d", l.Desc, size, l.Window, maxBytes)
		}
		return nil
	})
}

func newReader(most int, limit func(Layout) error) *Reader {
	r := &Reader{m: machine{most: most, limit: limit, stores: map[string]*storage{}}, place: -1}
	r.step = r.header
	return r
}

// Next consumes p until it has bytes of the tensor's window or p ends. data and rest are
// parts of p, which is borrowed: call Next again with rest until it is empty, then with
// what comes next. All data together is the window; bytes of the storage outside of it,
// other records and the directory are checked and not returned. After an error the
// Reader returns it again.
func (r *Reader) Next(p []byte) (data, rest []byte, err error) {
	for r.m.err == nil && len(p) > 0 && len(data) == 0 && (r.pass == 0 || !r.many) {
		if r.pass > 0 {
			piece := p[:min(r.pass, int64(len(p)))]
			data, p = r.passing(piece), p[len(piece):]
			continue
		}
		b, before := p, len(r.held)
		if before > 0 { // no step has more than an entry of the directory may have
			b = append(r.held, p[:min(len(p), entrySize+maxText+wideSize-before)]...)
		}
		if used := r.step(b); used > 0 { // more than was held, which was too little
			r.held, p, r.pos = r.held[:0], p[used-before:], r.pos+int64(used)
		} else if r.m.err == nil { // as much as that
			r.held, p = append(r.held[:0], b...), p[len(b)-before:]
		}
	}
	return data, p, r.m.err
}

// Layout returns the tensor's layout once it is known: within the first few hundred bytes
// of a file, and before Next returns data.
func (r *Reader) Layout() (l Layout, known bool) {
	if r.known {
		l = r.entries[0].Layout
	}
	return l, r.known
}

// Close returns nil if the file was whole, up to and including its end record. The data is
// only then known to be what the file's checksums say.
func (r *Reader) Close() error {
	if r.m.err == nil && !r.over {
		r.m.err = malformed("the file ends too early, after %d bytes: %w", r.pos+int64(len(r.held)), io.ErrUnexpectedEOF)
	}
	return r.m.err
}

func (r *Reader) last() *record { return &r.records[len(r.records)-1] }

// passing returns the part of a piece that is in the window of the tensor.
func (r *Reader) passing(piece []byte) []byte {
	begin := r.pos
	r.pos, r.pass = r.pos+int64(len(piece)), r.pass-int64(len(piece))
	if r.storage == nil { // an extra field
		return nil
	}
	within := func(pos int64) int64 { return max(0, min(pos-begin, int64(len(piece)))) }
	r.sum = crc32.Update(r.sum, crc32.IEEETable, piece[within(r.storage.data):])
	from := r.storage.data + r.entries[0].offset
	return piece[within(from):within(from+r.entries[0].Window)]
}

// header takes a local header, up to the part of the extra field that says nothing.
func (r *Reader) header(b []byte) int {
	if len(b) < localSize {
		return 0
	}
	begin := string(b[:len(localBegin)])
	if begin == entryBegin && r.place >= versionRecord {
		r.listing, r.step = r.pos, r.directory
		return r.directory(b)
	}
	n, extra := int(le.Uint16(b[26:])), int(le.Uint16(b[28:]))
	used := localSize + n + min(extra, wideSize)
	if !r.m.must(begin != "\x80\x02\x8a\x0a", unsupported, "a file of torch.save before torch 1.6; load it and torch.save it again") ||
		!r.m.must(begin == localBegin || r.pos > 0, malformed, "not a file of torch.save: it does not begin as a ZIP archive does") ||
		!r.m.must(begin == localBegin, malformed, "at byte %d begins neither a record of torch.save nor, after all of them, the directory", r.pos) ||
		!r.m.must(n <= maxText, malformed, "a record with a name of %d bytes, the limit is %d", n, maxText) || len(b) < used {
		return 0
	}
	rec := record{name: string(b[localSize : localSize+n]), offset: r.pos, size: 1} // or more, if it is no storage
	if r.begin(rec.name); r.storage != nil {
		rec.size = r.storage.size
	}
	r.records, r.sum, r.pass = append(r.records, rec), 0, int64(extra-min(extra, wideSize))
	if r.storage != nil {
		r.storage.data = r.pos + int64(used) + r.pass
		r.pass += rec.size
	}
	if rec.size == 0 {
		r.step = r.header
	}
	field, wide := b[localSize+n:used], rec.wide(0)
	r.m.must(le.Uint16(b[8:]) == 0, unsupported, "the record %q is compressed; torch.save it again", rec.name)
	r.m.must(le.Uint16(b[6:]) == rec.flags() && [12]byte(b[14:]) == [12]byte{}, unsupported,
		"the record %q has its size before it, or other flags; torch.save it again", rec.name)
	r.m.must(wide != nil || !bytes.HasPrefix(field, []byte{1, 0}), malformed, "the record %q has a ZIP64 field, and needs none", rec.name)
	r.m.must(bytes.HasPrefix(field, wide), malformed, "the record %q has no ZIP64 field for its %d bytes at %d", rec.name, rec.size, rec.offset)
	return used
}

// begin begins the record of a name, and decides which step comes behind its header.
func (r *Reader) begin(name string) {
	r.storage, r.step = nil, r.text
	if r.place < 0 {
		r.prefix = strings.TrimSuffix(name, order[0])
		r.m.must(strings.HasSuffix(name, "/"+order[0]), unsupported, "the first record is %.80q, not data.pkl: the file is not one of torch.save", name)
		r.place, r.step = 0, r.pickle
		return
	}
	rest, ours := strings.CutPrefix(name, r.prefix)
	key, stored := strings.CutPrefix(rest, order[storageRecord])
	place := slices.Index(order, rest)
	if stored {
		place, r.step = storageRecord, r.descriptor
		r.storage = r.m.stores[key]
	}
	r.m.must(ours && place >= 0, unsupported, "the record %.80q: torch.save writes none of this name", name)
	r.m.must(place > r.place || place == r.place && stored, malformed, "the record %q comes twice, or too late", name)
	r.m.must(place <= storageRecord || r.came == len(r.m.stores), malformed, "the record %q comes before the storage of a tensor", name)
	if stored && r.m.must(r.storage != nil && !r.storage.came, malformed, "the record %q comes twice, or is no storage of a tensor", name) {
		r.storage.came = true
		r.came++
	}
	r.place = place
}

// pickle takes an opcode of data.pkl.
func (r *Reader) pickle(b []byte) int {
	used := r.m.step(b)
	if r.m.over {
		r.entries, r.bare = r.m.root()
		r.m.must(r.many || r.bare && len(r.m.stores) == 1, unsupported, "a dict of tensors, or several storages, where one tensor is expected")
		r.records[0].size, r.sum, r.step = int64(r.m.read), r.m.crc, r.descriptor
	}
	return used
}

// text takes a short record and its descriptor.
func (r *Reader) text(b []byte) int {
	n := bytes.Index(b, []byte(descriptorBegin))
	few := n > 0 && n <= maxText || n < 0 && len(b) < maxText+len(descriptorBegin)
	if !r.m.must(few, malformed, "the record %q has no bytes, or more than %d", r.last().name, maxText) || n < 0 {
		return 0
	}
	r.m.must(r.place != orderRecord || string(b[:n]) == "little", unsupported, "the byte order is %q; torch.save it on a machine that is little-endian", b[:n])
	r.last().size, r.sum = int64(n), crc32.ChecksumIEEE(b[:n])
	if used := r.descriptor(b[n:]); used > 0 {
		return n + used
	}
	return 0
}

// descriptor takes what follows a record.
func (r *Reader) descriptor(b []byte) int {
	rec := r.last()
	used := len(rec.descriptor())
	if len(b) < used {
		return 0
	}
	rec.crc = le.Uint32(b[len(descriptorBegin):])
	r.m.must(bytes.HasPrefix(b, []byte(descriptorBegin)), malformed, "the record %q does not end after its %d bytes", rec.name, rec.size)
	r.m.must(bytes.HasPrefix(b, rec.descriptor()), malformed, "what follows the record %q says another size than its %d bytes", rec.name, rec.size)
	if r.storage != nil {
		r.storage.crc = rec.crc
	}
	if r.storage == nil || !r.many { // 0 is no checksum: torch may leave it out
		r.m.must(rec.crc == r.sum || rec.crc == 0, malformed, "the record %q is damaged: its checksum is wrong", rec.name)
	}
	r.known, r.step = r.known || r.m.err == nil, r.header
	return used
}

// directory takes an entry of the directory.
func (r *Reader) directory(b []byte) int {
	if r.listed == len(r.records) {
		r.step = r.end
		return r.end(b)
	}
	rec := &r.records[r.listed]
	want := rec.entry()
	if len(b) < len(want) {
		return 0
	}
	r.m.must(matches(b, want, [2]int{4, 8}, [2]int{12, 16}, [2]int{36, 42}), malformed, "the directory does not have the record %q as it came", rec.name)
	r.listed++
	return len(want)
}

// end takes what follows the directory.
func (r *Reader) end(b []byte) int {
	want := endRecords(r.listed, r.listing, r.pos)
	if !r.m.must(!r.over, malformed, "bytes follow the end of the file") || len(b) < len(want) {
		return 0
	}
	r.m.must(matches(b, want, [2]int{12, 16}), malformed, "the directory does not end with what came")
	r.over = true
	return len(want)
}
