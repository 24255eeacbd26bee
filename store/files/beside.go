package files

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// Beside returns a store that keeps pushed tensors in main and also serves those of model
// files. If several have a name, the first one serves it, and main before all. The name of
// a tensor in a file can neither be deleted nor, unless main has it already, pushed. The
// result owns all of the stores, and closes them.
func Beside(main store.Store, files ...*Store) store.Store {
	if len(files) == 0 {
		return main
	}
	b := &beside{main: main, files: files, all: []store.Store{main}}
	for _, f := range files {
		b.all = append(b.all, f)
	}
	meter, isMeter := main.(store.Meter)
	sets, isSets := main.(store.Sets)
	switch {
	case isMeter && isSets:
		return struct {
			store.Store
			store.Meter
			store.Sets
		}{b, meter, sets}
	case isMeter:
		return struct {
			store.Store
			store.Meter
		}{b, meter}
	case isSets:
		return struct {
			store.Store
			store.Sets
		}{b, sets}
	}
	return b
}

type beside struct {
	main  store.Store
	files []*Store
	all   []store.Store
}

// taken returns the error that refuse has for a tensor that is in a file and not in main.
func (b *beside) taken(ctx context.Context, name string, refuse func(name, file string) error) error {
	for _, f := range b.files {
		file, err := f.fileOf(name)
		if err != nil {
			return err
		}
		if file == "" {
			continue
		}
		r, err := b.main.Open(ctx, name)
		switch {
		case err == nil:
			r.Release()
		case errors.Is(err, store.ErrNotFound):
			err = refuse(name, file)
		}
		return err
	}
	return nil
}

func (b *beside) Create(ctx context.Context, name string, d tensor.Desc, metadata map[string]string) (store.Writer, error) {
	if err := b.taken(ctx, name, errTaken); err != nil {
		return nil, err
	}
	return b.main.Create(ctx, name, d, metadata)
}

// Open opens the tensor of the first store that has it.
func (b *beside) Open(ctx context.Context, name string) (r store.Reader, err error) {
	for _, s := range b.all {
		if r, err = s.Open(ctx, name); !errors.Is(err, store.ErrNotFound) {
			break
		}
	}
	return r, err
}

func (b *beside) List(ctx context.Context, glob, after string, most int) ([]store.Info, error) {
	var all []store.Info
	for _, s := range b.all {
		infos, err := s.List(ctx, glob, after, most)
		if err != nil {
			return nil, err
		}
		all = append(all, infos...)
	}
	slices.SortStableFunc(all, func(x, y store.Info) int { return strings.Compare(x.Name, y.Name) })
	all = slices.CompactFunc(all, func(x, y store.Info) bool { return x.Name == y.Name }) // the first store's stays
	return all[:min(len(all), max(most, 0))], nil
}

func (b *beside) Delete(ctx context.Context, names ...string) ([]string, error) {
	var refused error
	for i, name := range names {
		if refused = b.taken(ctx, name, errPart); refused != nil {
			names = names[:i]
			break
		}
	}
	if len(names) == 0 {
		return nil, refused
	}
	deleted, err := b.main.Delete(ctx, names...)
	return deleted, cmp.Or(err, refused)
}

func (b *beside) Close() (err error) {
	for _, s := range b.all {
		err = errors.Join(err, s.Close())
	}
	if errors.Is(err, store.ErrClosed) {
		return store.ErrClosed
	}
	return err
}
