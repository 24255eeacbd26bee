package codec

import (
	"encoding/hex"
	"io"
	"strings"

	"github.com/zeebo/xxh3"
)

// DigestPrefix names the function in a digest's text.
const DigestPrefix = "xxh3:"

// Digest is the XXH3 hash, 128 bits, of all of a tensor's bytes. It compares copies and
// finds damage at rest. It is not cryptographic: two tensors with one digest can be
// made. The zero Digest is not computed.
type Digest [16]byte

// IsZero reports whether the digest is not computed.
func (d Digest) IsZero() bool { return d == Digest{} }

// String returns xxh3: and 32 lower-case hexadecimal digits, as of xxhsum -H128; nothing
// for the zero Digest.
func (d Digest) String() string {
	if d.IsZero() {
		return ""
	}
	return DigestPrefix + hex.EncodeToString(d[:])
}

// ParseDigest reads what String returns.
func ParseDigest(text string) (d Digest, ok bool) {
	digits, ok := strings.CutPrefix(text, DigestPrefix)
	b, err := hex.DecodeString(digits)
	if !ok || err != nil || len(b) != len(d) {
		return d, false
	}
	return Digest(b), true
}

// Digester computes a Digest piece by piece, in order. The zero Digester is ready.
// It belongs to one goroutine.
type Digester struct{ h xxh3.Hasher }

// Write goes on with the next bytes, which it borrows. It never fails.
func (d *Digester) Write(p []byte) (int, error) { return d.h.Write(p) }

// Sum returns the digest of what was written so far.
func (d *Digester) Sum() Digest { return d.h.Sum128().Bytes() }

// OrderedDigester computes the Digest of a tensor that is written in any order: from the
// bytes as they come, still in the cache, while they come in order; the rest is read
// again. The zero OrderedDigester is ready. It belongs to one goroutine.
type OrderedDigester struct {
	digester Digester
	next     int64
}

// Next returns the offset that is digested next: all bytes before it are.
func (o *OrderedDigester) Next() int64 { return o.next }

// Wrote goes on with p, which it borrows, if p was written to offset Next.
func (o *OrderedDigester) Wrote(off int64, p []byte) {
	if off == o.next {
		_, _ = o.digester.Write(p) // it never fails
		o.next += int64(len(p))
	}
}

// ReadRest reads what is left of a tensor of size bytes from where it was written.
func (o *OrderedDigester) ReadRest(r io.ReaderAt, size int64) error {
	piece := make([]byte, max(0, min(PieceBytes, size-o.next)))
	for o.next < size {
		p := piece[:min(int64(len(piece)), size-o.next)]
		if _, err := io.ReadFull(io.NewSectionReader(r, o.next, int64(len(p))), p); err != nil {
			return err
		}
		o.Wrote(o.next, p)
	}
	return nil
}

// Sum returns the digest of the bytes before Next.
func (o *OrderedDigester) Sum() Digest { return o.digester.Sum() }
