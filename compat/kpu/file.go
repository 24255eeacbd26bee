package kpu

import (
	"hash/crc32"
	"strconv"
	"strings"

	pb "github.com/tensorferry/tensorferry/api/kpu/torch/server"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/torchsave"
	"github.com/tensorferry/tensorferry/tensor"
)

// file is the file of a tensor that is sent in chunks.
type file struct {
	id         string
	desc       tensor.Desc
	parts      *torchsave.Parts
	head, tail []byte
	step       int64  // bytes of a chunk
	data, size int64  // bytes of the tensor, and of the file
	total      int64  // chunks
	crc        uint32 // of the data sealed
}

// newFile returns the file of a tensor, in chunks of step bytes, most of them.
func newFile(id string, d tensor.Desc, step, most int64) (*file, error) {
	parts, err := torchsave.Bare(d)
	if err != nil {
		return nil, frame.Errorf(frame.FailedPrecondition, "%v", err)
	}
	f := &file{id: id, desc: d, parts: parts, head: parts.Gap(0, nil), step: step, size: parts.Size()}
	if f.total = (f.size + step - 1) / step; f.total > most {
		return nil, frame.Errorf(frame.ResourceExhausted, "a tensor of %d chunks is to be sent, the limit is %d", f.total, most)
	}
	f.data, _ = d.Bytes() // Bare has checked it
	return f, nil
}

// chunk returns the part of a buffer that chunk i takes, and of that the part for bytes of the
// tensor; it shares them.
func (f *file) chunk(i int64, buffer []byte) (chunk, data []byte) {
	n := min(f.step, f.size-i*f.step)
	clip := func(at int64) int64 { return min(max(at-i*f.step, 0), n) }
	chunk = buffer[:n]
	return chunk, chunk[clip(int64(len(f.head))):clip(int64(len(f.head))+f.data)]
}

// seal returns a chunk that has its bytes of the tensor, and shares it. Chunks are sealed in
// order: the checksum of all data stands behind it.
func (f *file) seal(i int64, chunk, data []byte) *pb.TensorChunk {
	f.crc = crc32.Update(f.crc, crc32.IEEETable, data)
	at := i * f.step
	copy(chunk, f.head[min(at, int64(len(f.head))):])
	if behind := int64(len(f.head)) + f.data; at+int64(len(chunk)) > behind {
		if f.tail == nil {
			f.tail = f.parts.Gap(1, []uint32{f.crc})
		}
		copy(chunk[max(behind-at, 0):], f.tail[max(at-behind, 0):])
	}
	c := &pb.TensorChunk{TensorId: f.id, ChunkNumber: uint32(i), Data: chunk, TotalChunks: uint32(f.total), IsLast: i == f.total-1}
	if i == 0 {
		c.Metadata = map[string]string{
			"shape": strings.ReplaceAll(f.desc.Shape.String(), " ", ", "), "dtype": "torch." + f.desc.DType.String(),
			"device": "cpu", "size_bytes": strconv.FormatInt(f.size, 10),
		}
	}
	return c
}
