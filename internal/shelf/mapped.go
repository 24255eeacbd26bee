package shelf

import (
	"context"
	"fmt"

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

// ViewPool returns a pool for the views of mapped files.
func ViewPool() *slab.Pool { return slab.NewPool(viewBytes, slab.System) }

// reader is the Reader of a tensor in a mapped file, which it holds.
type reader struct {
	pool *slab.Pool
	info store.Info
	data []byte
	file *Mapped
}

// Open returns a Reader of the tensor that the file has under entry. It takes over the caller's
// hold on the file, even if it fails.
func (m *Mapped) Open(pool *slab.Pool, info store.Info, entry string) (store.Reader, error) {
	t, err := m.file.Tensor(entry)
	if err == nil {
		_, err = tensor.New(info.Desc, t.Data) // the file may have been replaced
	}
	if err != nil {
		m.Release()
		return nil, fmt.Errorf("store: tensor %q: its file has changed: %w", info.Name, err)
	}
	return m.Of(pool, info, t.Data), nil
}

// Of returns a Reader of bytes that belong to the file, which it shares. It takes over the
// caller's hold on the file.
func (m *Mapped) Of(pool *slab.Pool, info store.Info, data []byte) store.Reader {
	return &reader{pool: pool, info: info, data: data, file: m}
}

// Info implements store.Reader.
func (r *reader) Info() store.Info { return r.info.Clone() }

// View copies: another process may truncate the file, which a reader of the mapping, such
// as gRPC, would not survive.
func (r *reader) View(ctx context.Context, off, n int64) ([]byte, store.Releaser, error) {
	if err := store.CheckRange(ctx, off, n, int64(len(r.data))); err != nil {
		return nil, nil, err
	}
	s, err := r.pool.Get(int(n))
	if err != nil {
		return nil, nil, fmt.Errorf("store: tensor %q: %w", r.info.Name, err)
	}
	if err := fault.Guard(func() { copy(s.Bytes(), r.data[off:]) }); err != nil {
		s.Release()
		return nil, nil, fmt.Errorf("store: tensor %q: %w", r.info.Name, err)
	}
	return s.Bytes(), s, nil
}

// Release implements store.Reader.
func (r *reader) Release() { r.file.Release() }
