package calling

import (
	"fmt"
	"math"
	"sync/atomic"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// Summary is the outcome of one tensor of a push or a pull.
type Summary struct {
	Name string
	// Desc is zero if the tensor does not exist.
	tensor.Desc
	Bytes int64
	// Digest is of all bytes, computed on both sides and compared.
	Digest codec.Digest
	// Durable: the tensor survives a crash of the server.
	Durable bool
	// Metadata is what was pushed with a pulled tensor.
	Metadata map[string]string
	// Evicted is how many other tensors the server's store evicted to make room for a pushed
	// one, and EvictedBytes what they had: they are gone.
	Evicted      int
	EvictedBytes int64
	// Data has the bytes of a pulled tensor that got memory of its own. It belongs to the
	// caller.
	Data []byte
	// Err is why the tensor did not arrive; nil if it did.
	Err error
	// Transfer is the ID of the RPC, for Client.Transfer.
	Transfer tensor.ID
}

// String returns the name and the desc, and the error if there is one.
func (s Summary) String() string {
	text := fmt.Sprintf("%q %v", s.Name, s.Desc)
	if s.Err != nil {
		text += ": " + s.Err.Error()
	}
	return text
}

// Progress is the progress of one tensor.
type Progress struct {
	Name         string
	Moved, Bytes int64 // so far, and in total
}

// Tensor is one tensor of a put or a get.
type Tensor struct {
	Summary
	over  bool
	moved atomic.Int64   // bytes that the receiver has
	told  int64          // of them, to Progress
	sum   *frame.Summary // the server's; guarded by the session's lock until the call has ended
}

// End records the outcome of the tensor: the first counts.
func (t *Tensor) End(err error) {
	if !t.over {
		t.over, t.Err = true, err
	}
}

// report tells progress, if not nil, what has moved.
func (t *Tensor) report(progress func(Progress), moved int64) {
	if moved > t.told && progress != nil {
		t.told = moved
		progress(Progress{t.Name, moved, t.Bytes})
	}
}

// EvictedFor returns what a store evicted for a tensor.
func EvictedFor(s *frame.Summary) (tensors int, bytes int64) {
	return int(s.Evicted), int64(min(s.EvictedBytes, math.MaxInt64))
}
