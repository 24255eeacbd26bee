package stream

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/tensor"
)

// CheckHello reports what is wrong with a peer's hello, or nil. It opens a push
// and a pull as it opens a session.
func CheckHello(h *Hello) *Error {
	switch {
	case h.Version != Version:
		return &Error{FailedPrecondition, fmt.Sprintf("protocol version %d; this side speaks %d", h.Version, Version)}
	case !codec.Checksum(h.Checksum).Valid():
		return &Error{InvalidArgument, fmt.Sprintf("checksum kind %d; known are 1 (crc32c) and 2 (crc32)", h.Checksum)}
	case h.Session.IsZero():
		return &Error{InvalidArgument, "hello without a session id; send 16 bytes that are not all zero"}
	}
	return nil
}

// CheckDesc holds a desc to its own arithmetic and to limits, and returns how the
// tensor is cut. An error is the tensor's alone; its text begins with the tensor.
func CheckDesc(p *Desc, l Limits) (tensor.Geometry, *Error) {
	fail := func(code Code, format string, args ...any) (tensor.Geometry, *Error) {
		return tensor.Geometry{}, &Error{code, "tensor " + p.Tensor.String() + ": " + fmt.Sprintf(format, args...)}
	}
	size, err := p.Bytes()
	switch {
	case errors.Is(err, tensor.ErrTooLarge):
		return fail(ResourceExhausted, "%v", err)
	case err != nil:
		return fail(InvalidArgument, "%v", err)
	case uint64(size) != p.SizeBytes:
		return fail(InvalidArgument, "size_bytes is %d, but %v makes %d", p.SizeBytes, p.Desc, size)
	case size > l.TensorBytes:
		return fail(ResourceExhausted, "%d bytes, the limit of a tensor is %d", size, l.TensorBytes)
	case p.ChunkBytes < 1 || p.ChunkBytes > l.ChunkBytes:
		return fail(InvalidArgument, "chunk_bytes is %d; it must be 1 to %d", p.ChunkBytes, l.ChunkBytes)
	}
	geo, err := tensor.NewGeometry(size, int64(p.ChunkBytes))
	if err != nil { // too many chunks: the rest was checked
		return fail(ResourceExhausted, "%v", err)
	}
	if problem := cmp.Or(checkName("port", p.Port), checkName("name", p.Name), CheckEntries("metadata", p.Metadata)); problem != "" {
		return fail(InvalidArgument, "%s", problem)
	}
	return geo, nil
}
