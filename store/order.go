package store

import "github.com/tensorferry/tensorferry/codec"

// inOrder hashes a tensor while it is written, as far as its bytes come in order,
// because they are in the processor's cache then. It belongs to one goroutine.
type inOrder struct {
	digester codec.Digester
	next     int64 // bytes hashed: all before this offset
}

// wrote takes note of views written to off, which it borrows.
func (o *inOrder) wrote(off int64, views [][]byte) {
	if off != o.next {
		return
	}
	for _, v := range views {
		_, _ = o.digester.Write(v) // it never fails
		o.next += int64(len(v))
	}
}

// digest returns the digest of all size bytes. What did not come in order is read
// again with read, which lends a piece of n bytes until its next call.
func (o *inOrder) digest(size int64, read func(off, n int64) ([]byte, error)) (codec.Digest, error) {
	for o.next < size {
		piece, err := read(o.next, min(hashPiece, size-o.next))
		if err != nil {
			return codec.Digest{}, err
		}
		o.wrote(o.next, [][]byte{piece})
	}
	return o.digester.Sum(), nil
}
