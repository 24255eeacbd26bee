package codec

import (
	"encoding/hex"
	"strings"

	"github.com/zeebo/xxh3"
)

// DigestPrefix names the function in a digest's text.
const DigestPrefix = "xxh3:"

// Digest is the XXH3 hash, 128 bits, of all of a tensor's bytes, whatever chunks
// they came in: it tells whether two copies are the same, and finds damage that
// happened at rest. It is not cryptographic: someone who wants two tensors with
// one digest can make them. The zero Digest says that nobody has computed it.
type Digest [16]byte

// IsZero reports whether nobody has computed the digest.
func (d Digest) IsZero() bool { return d == Digest{} }

// String returns the digest as xxh3: and 32 lower-case hexadecimal digits, as
// xxhsum -H128 prints them; nothing for the zero Digest.
func (d Digest) String() string {
	if d.IsZero() {
		return ""
	}
	return DigestPrefix + hex.EncodeToString(d[:])
}

// ParseDigest reads what String returns.
func ParseDigest(text string) (d Digest, ok bool) {
	digits, ok := strings.CutPrefix(text, DigestPrefix)
	if !ok {
		return d, false
	}
	b, err := hex.DecodeString(digits)
	if err != nil || len(b) != len(d) {
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
