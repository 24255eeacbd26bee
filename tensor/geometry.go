package tensor

import "fmt"

// Geometry is how a tensor is cut into chunks: every chunk but the last has
// ChunkBytes bytes, and a chunk's place is its index times that, so chunks can
// not overlap. A tensor of zero bytes is one empty chunk.
type Geometry struct {
	Size       int64 // the tensor's bytes
	ChunkBytes int64
}

// NewGeometry checks the numbers, which may come from a peer.
func NewGeometry(size, chunkBytes int64) (Geometry, error) {
	g := Geometry{size, chunkBytes}
	if size < 0 || chunkBytes < 1 {
		return g, fmt.Errorf("%w: %d bytes in chunks of %d; a chunk has 1 byte or more", ErrShape, size, chunkBytes)
	}
	if n := (size - 1) / chunkBytes; size > 0 && n >= MaxChunks {
		return g, fmt.Errorf("%w: %d bytes in chunks of %d make %d chunks, the limit is %d; send larger chunks",
			ErrTooLarge, size, chunkBytes, n+1, MaxChunks)
	}
	return g, nil
}

// Count returns the number of chunks, 1 or more.
func (g Geometry) Count() uint32 {
	if g.Size == 0 {
		return 1
	}
	return uint32((g.Size-1)/g.ChunkBytes) + 1
}

// Span returns the place of a chunk; index must be below Count.
func (g Geometry) Span(index uint32) (off, n int64) {
	off = int64(index) * g.ChunkBytes
	return off, min(g.ChunkBytes, g.Size-off)
}

// Below returns how many chunks lie wholly before byte end.
func (g Geometry) Below(end int64) uint32 {
	if end >= g.Size {
		return g.Count()
	}
	return uint32(end / g.ChunkBytes)
}

// ChunkFor returns the size of the chunks to cut a tensor into, at most limit
// bytes: as many whole rows as fit, taking the outermost axes whose row fits,
// so that a receiver that works by rows seldom meets a chunk across two.
func ChunkFor(d Desc, limit int64) int64 {
	width := int64(d.DType.Bits() / 8)
	row := width
	for i := len(d.Shape) - 1; i >= 1; i-- {
		dim := d.Shape[i]
		if dim <= 0 || row > limit/dim {
			break
		}
		row *= dim
	}
	return max(limit/max(row, 1)*row, 1)
}
