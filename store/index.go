package store

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/tensorferry/tensorferry/internal/background"
	"github.com/tensorferry/tensorferry/internal/glob"
)

// described is what an index knows of a tensor.
type described struct{ info Info }

func (d *described) about() *Info { return &d.info }

// index has the tensors of a store by name. The caller of a method without another comment
// holds mu.
type index[T interface{ about() *Info }] struct {
	mu     sync.Mutex // guards all below; taken last
	byName map[string]T
	names  []string // sorted
	closed bool
}

// find returns a value; it locks mu.
func (x *index[T]) find(name string) (v T, there bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	v, there = x.byName[name]
	return v, there
}

// open calls hold with a value, and returns it, unless the store is closed; it locks mu.
func (x *index[T]) open(name string, hold func(T)) (v T, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	v, there := x.byName[name]
	switch {
	case x.closed:
		return v, ErrClosed
	case !there:
		return v, fmt.Errorf("%w: no tensor %q", ErrNotFound, name)
	}
	hold(v)
	return v, nil
}

// List implements Store; it locks mu.
func (x *index[T]) List(ctx context.Context, glob, after string, most int) ([]Info, error) {
	return listPages(ctx, glob, after, most, func(after string, n int) (infos []Info, err error) {
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.closed {
			return nil, ErrClosed
		}
		i, there := slices.BinarySearch(x.names, after)
		if there {
			i++
		}
		for _, name := range x.names[i:min(i+n, len(x.names))] {
			infos = append(infos, *x.byName[name].about())
		}
		return infos, nil
	})
}

// close closes the store once.
func (x *index[T]) close() error {
	if x.closed {
		return ErrClosed
	}
	x.closed = true
	return nil
}

// put adds values, and returns those that they replace.
func (x *index[T]) put(values ...T) (replaced []T) {
	var fresh []string
	for _, v := range values {
		name := v.about().Name
		if old, there := x.byName[name]; there {
			replaced = append(replaced, old)
		} else {
			fresh = append(fresh, name)
		}
		x.byName[name] = v
	}
	if len(fresh) == 1 {
		i, _ := slices.BinarySearch(x.names, fresh[0])
		x.names = slices.Insert(x.names, i, fresh[0])
	} else if len(fresh) > 1 {
		x.names = append(x.names, fresh...)
		slices.Sort(x.names)
	}
	return replaced
}

func (x *index[T]) drop(name string) {
	if i, there := slices.BinarySearch(x.names, name); there {
		x.names = slices.Delete(x.names, i, i+1)
		delete(x.byName, name)
	}
}

// deleteEach implements Store.Delete with a function that deletes one tensor, if it is there.
func deleteEach(ctx context.Context, names []string, one func(name string) (there bool, err error)) (deleted []string, err error) {
	for _, name := range names {
		if ctx.Err() != nil {
			return deleted, context.Cause(ctx)
		}
		there, err := one(name)
		if err != nil {
			return deleted, err
		}
		if there {
			deleted = append(deleted, name)
		}
	}
	return deleted, nil
}

// listPages implements Store.List with pages of up to n Infos after a name. It gives way
// between two pages, so that a long list does not delay others.
func listPages(ctx context.Context, pattern, after string, most int, page func(after string, n int) ([]Info, error)) ([]Info, error) {
	g, err := glob.Parse(pattern)
	if err != nil {
		return nil, err
	}
	var turn background.Turn
	defer turn.End()
	var found []Info
	for {
		if err := turn.Work(ctx); err != nil {
			return nil, err
		}
		infos, err := page(after, pageNames)
		if err != nil {
			return nil, err
		}
		for _, info := range infos {
			if ctx.Err() != nil { // a name may take 10 µs
				return nil, context.Cause(ctx)
			}
			if len(found) >= most {
				return found, nil
			}
			if pattern == "" || g.Match(info.Name) {
				found = append(found, info.clone())
			}
			after = info.Name
		}
		if len(infos) < pageNames {
			return found, nil
		}
	}
}
