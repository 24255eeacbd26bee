package torchsave

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"strings"
)

// The records of a file in their order. The first has the opcodes, a storage the key behind
// its name; what else there is are short texts.
var order = []string{"data.pkl", ".format_version", ".storage_alignment", "byteorder", "data/", "version", ".data/serialization_id"}

const (
	pickleRecord  = 0
	orderRecord   = 3
	storageRecord = 4
	versionRecord = 5
)

// Reader reads a file of torch.save of one tensor that comes in pieces, in order. It holds
// a few KiB and starts nothing. It belongs to one goroutine.
type Reader struct {
	machine machine
	many    bool // a whole file: it may hold a dict, and its storages are skipped
	entries []entry
	bare    bool // one tensor, without a dict
	known   bool

	pos  int64  // of the bytes that come next, but for those held
	pass int64  // bytes that pass before the next step
	held []byte // the begin of a step that needs more
	// step takes what b begins with and returns how many bytes it has, or 0 if it needs more.
	step func(b []byte) (used int, err error)
	err  error

	prefix  string // of all names: archive/
	place   int    // of the last record, in order
	records []record
	sum     uint32   // the checksum of the last record
	storage *storage // that passes, or nil
	came    int      // storages
	listing int64    // where the directory begins
	listed  int      // records that came in it
	over    bool
}

// NewReader returns a Reader of a file whose tensor, and the window in which its elements
// lie, have up to maxBytes bytes each. A larger one is refused as soon as the layout is
// known; the error wraps tensor.ErrTooLarge.
func NewReader(maxBytes int64) *Reader {
	return newReader(maxPickle, func(l Layout) error {
		if size, _ := l.Bytes(); max(size, l.Window) > maxBytes { // it has been computed before
			return limited("%v has %d bytes, and lies among %d in the file; the limit is %d", l.Desc, size, l.Window, maxBytes)
		}
		return nil
	})
}

func newReader(most int, limit func(Layout) error) *Reader {
	r := &Reader{machine: machine{most: most, limit: limit, stores: map[string]*storage{}}, place: -1}
	r.step = r.header
	return r
}

// Next consumes p until it has bytes of the tensor's window or p ends. data and rest are
// parts of p, which is borrowed: call Next again with rest until it is empty, then with
// what comes next. All data together is the window; bytes of the storage outside of it,
// other records and the directory are checked and not returned. After an error the
// Reader returns it again.
func (r *Reader) Next(p []byte) (data, rest []byte, err error) {
	for r.err == nil && len(p) > 0 && len(data) == 0 {
		if r.pass > 0 {
			if r.many {
				break
			}
			piece := p[:min(r.pass, int64(len(p)))]
			data, p = r.passing(piece), p[len(piece):]
			continue
		}
		b, before := p, len(r.held)
		if before > 0 {
			b = append(r.held, p[:min(len(p), maxHeld-before)]...)
		}
		used, err := r.step(b)
		switch {
		case err != nil:
			r.err = err
		case used == 0:
			r.held, p = append(r.held[:0], b...), p[len(b)-before:]
		default: // more than was held, which was too little
			r.held, p, r.pos = r.held[:0], p[used-before:], r.pos+int64(used)
		}
	}
	return data, p, r.err
}

// Layout returns the tensor's layout once it is known: within the first few hundred bytes
// of a file, and before Next returns data.
func (r *Reader) Layout() (l Layout, known bool) {
	if !r.known {
		return l, false
	}
	return r.entries[0].Layout, true
}

// Close returns nil if the file was whole, up to and including its end record. The data is
// only then known to be what the file's checksums say.
func (r *Reader) Close() error {
	switch within := "its directory"; {
	case r.err != nil:
		return r.err
	case !r.over:
		if len(r.records) == 0 {
			within = "its first record"
		} else if r.listing == 0 {
			within = fmt.Sprintf("or behind the record %q", r.records[len(r.records)-1].name)
		}
		return malformed("the file ends in %s: %w", within, io.ErrUnexpectedEOF)
	}
	return nil
}

// passing returns the part of a piece that is in the window of the tensor.
func (r *Reader) passing(piece []byte) []byte {
	begin := r.pos
	r.pos, r.pass = r.pos+int64(len(piece)), r.pass-int64(len(piece))
	if r.storage == nil { // an extra field
		return nil
	}
	within := func(pos int64) int64 { return max(0, min(pos-begin, int64(len(piece)))) }
	r.sum = crc32.Update(r.sum, crc32.IEEETable, piece[within(r.storage.data):])
	t := r.entries[0]
	if r.storage != t.storage {
		return nil
	}
	from := t.data + t.offset
	return piece[within(from):within(from+t.Window)]
}

// header takes a local header, up to the part of the extra field that says nothing.
func (r *Reader) header(b []byte) (int, error) {
	if len(b) < len(localBegin) {
		return 0, nil
	}
	switch begin := string(b[:len(localBegin)]); {
	case begin == entryBegin && r.place >= versionRecord:
		r.listing, r.step = r.pos, r.directory
		return r.directory(b)
	case begin == localBegin:
	case r.pos == 0 && begin == "\x80\x02\x8a\x0a":
		return 0, unsupported("a file of torch.save before torch 1.6; load it and torch.save it again")
	case r.pos == 0:
		return 0, malformed("the file does not begin as one of torch.save does")
	default:
		return 0, malformed("behind %q comes neither a record nor, after all of them, the directory", r.records[len(r.records)-1].name)
	}
	if len(b) < localSize {
		return 0, nil
	}
	n, extra := int(le.Uint16(b[26:])), int(le.Uint16(b[28:]))
	if n > maxRecordName {
		return 0, malformed("a record with a name of %d bytes, the limit is %d", n, maxRecordName)
	}
	used := localSize + n + min(extra, maxWide)
	if len(b) < used {
		return 0, nil
	}
	rec := record{name: string(b[localSize : localSize+n]), offset: r.pos}
	switch {
	case le.Uint16(b[8:]) != 0:
		return 0, unsupported("the record %.*q is compressed; torch.save it again", quoted, rec.name)
	case le.Uint16(b[6:]) != flags, [12]byte(b[14:]) != [12]byte{}:
		return 0, unsupported("the record %.*q is as another program writes it; torch.save it again", quoted, rec.name)
	}
	if err := r.begin(rec.name); err != nil {
		return 0, err
	}
	if r.storage != nil {
		rec.size = r.storage.size
	}
	field, wide := b[localSize+n:used], rec.wide()
	switch {
	case wide == nil && bytes.HasPrefix(field, []byte{1, 0}):
		return 0, malformed("the record %q has a ZIP64 field, and needs none", rec.name)
	case !bytes.HasPrefix(field, wide):
		return 0, malformed("the record %q has no ZIP64 field for its %d bytes at %d", rec.name, rec.size, rec.offset)
	}
	r.records, r.sum = append(r.records, rec), 0
	r.pass = int64(extra - len(field))
	if r.storage != nil {
		r.storage.data = r.pos + int64(used) + r.pass
		r.pass += rec.size
	}
	return used, nil
}

// begin begins the record of a name, and decides which step comes behind its header.
func (r *Reader) begin(name string) error {
	r.storage, r.step = nil, r.text
	if r.place < 0 {
		var first bool
		if r.prefix, first = strings.CutSuffix(name, order[pickleRecord]); !first || !strings.HasSuffix(r.prefix, "/") {
			return unsupported("the first record is %.*q, and not data.pkl: torch.save has not written it", quoted, name)
		}
		r.place, r.step = pickleRecord, r.pickle
		return nil
	}
	rest, ours := strings.CutPrefix(name, r.prefix)
	key, stored := strings.CutPrefix(rest, order[storageRecord])
	place := slices.Index(order, rest)
	if stored {
		place = storageRecord
	}
	switch {
	case !ours || place < 0:
		return unsupported("the record %.*q: torch.save writes none of this name", quoted, name)
	case place < r.place, place == r.place && !stored:
		return malformed("the record %q comes twice, or too late", name)
	case place > storageRecord && r.came < len(r.machine.stores):
		return malformed("the record %q comes before the %d storages that the tensors lie in", name, len(r.machine.stores)-r.came)
	}
	r.place = place
	if stored {
		r.storage, r.step = r.machine.stores[key], r.descriptor
		if r.storage == nil || r.storage.came {
			return malformed("the record %.*q is no storage that a tensor lies in, or comes twice", quoted, name)
		}
		r.storage.came = true
		r.came++
	}
	return nil
}

// pickle takes an opcode of data.pkl.
func (r *Reader) pickle(b []byte) (int, error) {
	used, err := r.machine.step(b)
	if err != nil || !r.machine.over {
		return used, err
	}
	if r.entries, r.bare, err = r.machine.root(); err == nil && !r.bare && !r.many {
		err = unsupported("it holds a dict of tensors, and not one tensor")
	}
	r.records[0].size, r.sum, r.step = int64(r.machine.read), r.machine.crc, r.descriptor
	return used, err
}

// text takes a short record and its descriptor.
func (r *Reader) text(b []byte) (int, error) {
	rec := &r.records[len(r.records)-1]
	n := bytes.Index(b, []byte(descriptorBegin))
	switch {
	case n > maxRecordText, n < 0 && len(b) >= maxRecordText+len(descriptorBegin):
		return 0, malformed("the record %q has more than %d bytes", rec.name, maxRecordText)
	case n < 0:
		return 0, nil
	}
	if text := b[:n]; r.place == orderRecord && string(text) != "little" {
		return 0, unsupported("the byte order is %q; torch.save it on a machine that is little-endian", text)
	}
	rec.size, r.sum = int64(n), crc32.ChecksumIEEE(b[:n])
	used, err := r.descriptor(b[n:])
	if used > 0 {
		used += n
	}
	return used, err
}

// descriptor takes what follows a record.
func (r *Reader) descriptor(b []byte) (int, error) {
	rec := &r.records[len(r.records)-1]
	used := len(rec.descriptor())
	if len(b) < used {
		return 0, nil
	}
	rec.crc = le.Uint32(b[len(descriptorBegin):])
	switch {
	case !bytes.HasPrefix(b, []byte(descriptorBegin)):
		return 0, malformed("the record %q does not end after its %d bytes", rec.name, rec.size)
	case !bytes.HasPrefix(b, rec.descriptor()):
		return 0, malformed("what follows the record %q says another size than its %d bytes", rec.name, rec.size)
	case rec.crc != r.sum && rec.crc != 0 && (r.storage == nil || !r.many): // 0 is none: torch may leave it out
		return 0, malformed("the record %q is damaged: its checksum is wrong", rec.name)
	}
	if r.storage != nil {
		r.storage.crc = rec.crc
	}
	r.known, r.step = true, r.header
	return used, nil
}

// directory takes an entry of the directory.
func (r *Reader) directory(b []byte) (int, error) {
	if r.listed == len(r.records) {
		r.step = r.end
		return r.end(b)
	}
	rec := &r.records[r.listed]
	want := rec.entry()
	if len(b) < len(want) {
		return 0, nil
	}
	if field := other(b, want, entryFields); field != "" {
		return 0, malformed("the directory has another %s for the record %q", field, rec.name)
	}
	r.listed++
	return len(want), nil
}

// end takes what follows the directory.
func (r *Reader) end(b []byte) (int, error) {
	if r.over {
		return 0, malformed("bytes follow the end of the file")
	}
	if len(b) < endSize {
		return 0, nil
	}
	if field := other(b, end(int64(r.listed), r.listing, r.pos), endFields); field != "" {
		return 0, malformed("the end of the directory has another %s", field)
	}
	r.over = true
	return endSize, nil
}
