package store

import (
	"context"
	"errors"

	"github.com/tensorferry/tensorferry/tensor"
)

// Beside returns a store that keeps pushed tensors in main and also serves the tensors of
// other stores, such as Files, to which it never writes. If several stores have a name, the
// first one serves it. The name of another store's tensor can neither be deleted nor,
// unless main has it already, pushed. The result owns all of the stores, and closes them.
func Beside(main Store, others ...Store) Store {
	if len(others) == 0 {
		return main
	}
	b := &beside{main: main, others: others}
	meter, isMeter := main.(Meter)
	sets, isSets := main.(Sets)
	switch {
	case isMeter && isSets:
		return struct {
			Store
			Meter
			Sets
		}{b, meter, sets}
	case isMeter:
		return struct {
			Store
			Meter
		}{b, meter}
	case isSets:
		return struct {
			Store
			Sets
		}{b, sets}
	}
	return b
}

type beside struct {
	main   Store
	others []Store
}

// taken returns the Info of a tensor that only another store has.
func (b *beside) taken(ctx context.Context, name string) (info Info, taken bool, err error) {
	for _, s := range b.others {
		if info, taken, err = has(ctx, s, name); taken || err != nil {
			break
		}
	}
	if !taken || err != nil {
		return Info{}, false, err
	}
	_, own, err := has(ctx, b.main, name)
	return info, !own && err == nil, err
}

// has returns the Info of a tensor of s. It does not have Files look for new ones, which
// each push of many would.
func has(ctx context.Context, s Store, name string) (Info, bool, error) {
	if f, ok := s.(*Files); ok {
		return f.known(name)
	}
	r, err := s.Open(ctx, name)
	if errors.Is(err, ErrNotFound) {
		return Info{}, false, nil
	}
	if err != nil {
		return Info{}, false, err
	}
	defer r.Release()
	return r.Info(), true, nil
}

func (b *beside) Create(ctx context.Context, name string, d tensor.Desc) (Writer, error) {
	if _, err := checkNew(ctx, name, d); err != nil {
		return nil, err
	}
	if info, taken, err := b.taken(ctx, name); err != nil {
		return nil, err
	} else if taken {
		return nil, taking(info)
	}
	return b.main.Create(ctx, name, d)
}

// Open opens the tensor of the first store that has it.
func (b *beside) Open(ctx context.Context, name string) (r Reader, err error) {
	for _, s := range append([]Store{b.main}, b.others...) {
		if r, err = s.Open(ctx, name); !errors.Is(err, ErrNotFound) {
			break
		}
	}
	return r, err
}

func (b *beside) List(ctx context.Context, glob, after string, most int) ([]Info, error) {
	var all [][]Info
	for _, s := range append([]Store{b.main}, b.others...) {
		infos, err := s.List(ctx, glob, after, most)
		if err != nil {
			return nil, err
		}
		all = append(all, infos)
	}
	return merge(most, all...), nil
}

func (b *beside) Delete(ctx context.Context, names ...string) ([]string, error) {
	var refused error
	for i, name := range names {
		info, taken, err := b.taken(ctx, name)
		if taken {
			err = partOf(info)
		}
		if err != nil {
			names, refused = names[:i], err
			break
		}
	}
	if len(names) == 0 {
		return nil, refused
	}
	deleted, err := b.main.Delete(ctx, names...)
	if err == nil {
		err = refused
	}
	return deleted, err
}

func (b *beside) Close() error {
	err := b.main.Close()
	for _, s := range b.others {
		err = errors.Join(err, s.Close())
	}
	if errors.Is(err, ErrClosed) {
		return ErrClosed
	}
	return err
}
