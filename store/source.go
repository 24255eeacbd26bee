package store

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/tensorferry/tensorferry/tensor"
)

// Source generates a tensor from parameters when it is pulled. The Reader's Info has no
// name: the name of the source is used. A Source is safe for concurrent use.
type Source func(ctx context.Context, params map[string]string) (Reader, error)

// Tensor returns a Source that calls f for each pull. f shares the tensor's bytes, which
// must stay valid and unchanged while they are read; it may return the same tensor many
// times.
func Tensor(f func(ctx context.Context, params map[string]string) (tensor.Tensor, error)) Source {
	return func(ctx context.Context, params map[string]string) (Reader, error) {
		t, err := f(ctx, params)
		if err != nil {
			return nil, err
		}
		if t, err = tensor.New(t.Desc, t.Data); err != nil {
			return nil, err
		}
		return made{t}, nil
	}
}

// made is a tensor on the Go heap, which the garbage collector releases.
type made struct{ t tensor.Tensor }

func (m made) Info() Info { return Info{Desc: m.t.Desc.Clone()} }
func (m made) Release()   {}

func (m made) View(ctx context.Context, off, n int64) ([]byte, Releaser, error) {
	if err := checkView(ctx, off, n, int64(len(m.t.Data))); err != nil {
		return nil, nil, err
	}
	return m.t.Data[off : off+n : off+n], m, nil
}

// Sources maps names to sources. The zero Sources is empty and ready to use. It is safe for
// concurrent use.
type Sources struct{ byName sync.Map } // of string to Source

// Add adds a source under a name. It fails with ErrName or ErrExists.
func (s *Sources) Add(name string, src Source) error {
	if err := CheckName(name); err != nil {
		return err
	}
	if _, taken := s.byName.LoadOrStore(name, src); taken {
		return fmt.Errorf("%w: there is already a source %q", ErrExists, name)
	}
	return nil
}

// Lookup returns the source of this name.
func (s *Sources) Lookup(name string) (Source, bool) {
	src, ok := s.byName.Load(name)
	if !ok {
		return nil, false
	}
	return src.(Source), true
}

// Names returns the names of all sources, sorted.
func (s *Sources) Names() (names []string) {
	for name := range s.byName.Range {
		names = append(names, name.(string))
	}
	slices.Sort(names)
	return names
}
