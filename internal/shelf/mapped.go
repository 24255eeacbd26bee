package shelf

import (
	"context"
	"fmt"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/fault"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// Mapped is a mapped file. It is unmapped when nobody holds it any more.
type Mapped struct {
	Share
	file *tensorfile.Safetensors
}

// NewMapped takes over an open file. It calls after when the file has been unmapped.
func NewMapped(file *tensorfile.Safetensors, after func()) *Mapped {
	m := &Mapped{file: file}
	m.Init(func() {
		_ = file.Close() // unmapping does not fail
		after()
	})
	return m
}

// views has the memory of views of mapped files.
var views = slab.NewPool(viewBytes, slab.System)

// reader is the Reader of a tensor in a mapped file, which it holds.
type reader struct {
	info store.Info
	data []byte
	file *Mapped
	keep func(codec.Digest)
}

// Open returns a Reader of the tensor that the file has under entry, which gives keep the digest
// if somebody computes it. It takes over the caller's hold on the file, even if it fails.
func (m *Mapped) Open(info store.Info, entry string, keep func(codec.Digest)) (store.Reader, error) {
	t, err := m.file.Tensor(entry)
	if err == nil {
		_, err = tensor.New(info.Desc, t.Data) // the file may have been replaced
	}
	if err != nil {
		m.Release()
		return nil, fmt.Errorf("store: tensor %q: its file has changed: %w", info.Name, err)
	}
	return m.Of(info, t.Data, keep), nil
}

// Of is Open for bytes that belong to the file, which it shares.
func (m *Mapped) Of(info store.Info, data []byte, keep func(codec.Digest)) store.Reader {
	return &reader{info, data, m, keep}
}

// Info implements store.Reader.
func (r *reader) Info() store.Info { return r.info.Clone() }

// View copies: another process may truncate the file, which a reader of the mapping, such
// as gRPC, would not survive.
func (r *reader) View(ctx context.Context, off, n int64) ([]byte, store.Releaser, error) {
	if err := store.CheckRange(ctx, off, n, int64(len(r.data))); err != nil {
		return nil, nil, err
	}
	s, err := views.Get(int(n))
	if err != nil {
		return nil, nil, fmt.Errorf("store: tensor %q: %w", r.info.Name, err)
	}
	if err := fault.Guard(func() { copy(s.Bytes(), r.data[off:]) }); err != nil {
		s.Release()
		return nil, nil, fmt.Errorf("store: tensor %q: %w", r.info.Name, err)
	}
	return s.Bytes(), s, nil
}

// Digested implements store.DigestKeeper.
func (r *reader) Digested(d codec.Digest) { r.keep(d) }

// Release implements store.Reader.
func (r *reader) Release() { r.file.Release() }
