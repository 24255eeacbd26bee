package kpu

import (
	"hash/crc32"
	"strconv"
	"strings"

	pb "github.com/tensorferry/tensorferry/api/kpu/torch/server"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/torchsave"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
)

// file is the file of a tensor that is sent in chunks.
type file struct {
	id   string
	desc tensor.Desc
	step int64                         // bytes of a chunk
	room func() ([]byte, error)        // lends memory of a chunk
	send func(c *pb.TensorChunk) error // takes a chunk in it

	parts       *torchsave.Parts
	size, total int64  // bytes of the file, and chunks
	left        int64  // bytes of the tensor to come
	crc         uint32 // of those that came
	next        int64  // chunk
	chunk       []byte // it, if it has begun
	filled      int    // bytes of it
}

// begin begins the file, of most chunks.
func (f *file) begin(most int64) (err error) {
	if f.parts, err = torchsave.Bare(f.desc); err != nil {
		return frame.Errorf(frame.FailedPrecondition, "%s", reason.Plain(err))
	}
	f.size = f.parts.Size()
	if f.total = (f.size + f.step - 1) / f.step; f.total > most {
		return frame.Errorf(frame.ResourceExhausted, "the tensor to send has %d chunks, the limit is %d", f.total, most)
	}
	f.left, _ = f.desc.Bytes() // Bare has checked it
	return f.write(f.parts.Gap(0, nil))
}

// whole reports whether all chunks have been sent.
func (f *file) whole() bool { return f.next == f.total }

// data copies the next bytes of the tensor, and ends the file after the last ones.
func (f *file) data(p []byte) error {
	f.left -= int64(len(p))
	f.crc = crc32.Update(f.crc, crc32.IEEETable, p)
	err := f.write(p)
	if err == nil && f.left == 0 {
		err = f.write(f.parts.Gap(1, []uint32{f.crc}))
	}
	return err
}

// write copies the next bytes of the file, and sends the chunks that are full.
func (f *file) write(p []byte) error {
	for len(p) > 0 && !f.whole() {
		if f.filled == 0 {
			mem, err := f.room()
			if err != nil {
				return err
			}
			f.chunk = mem[:min(f.step, f.size-f.next*f.step)]
		}
		n := copy(f.chunk[f.filled:], p)
		if p, f.filled = p[n:], f.filled+n; f.filled < len(f.chunk) {
			return nil
		}
		c := &pb.TensorChunk{TensorId: f.id, ChunkNumber: uint32(f.next), Data: f.chunk, TotalChunks: uint32(f.total), IsLast: f.next == f.total-1}
		if f.next == 0 {
			c.Metadata = map[string]string{
				"shape": strings.ReplaceAll(f.desc.Shape.String(), " ", ", "), "dtype": "torch." + f.desc.DType.String(),
				"device": "cpu", "size_bytes": strconv.FormatInt(f.size, 10),
			}
		}
		f.next, f.filled = f.next+1, 0
		if err := f.send(c); err != nil {
			return err
		}
	}
	return nil
}
