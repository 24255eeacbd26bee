package store

import (
	"context"
	"fmt"
	"slices"
	"strings"
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
	sets   []string // the names of the last sets, in the order of their commits
	forgot int64    // how many names of earlier sets are not in sets any more
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
func (x *index[T]) List(ctx context.Context, pattern, after string, most int) (found []Info, err error) {
	err = eachMatch(ctx, pattern, after, x.page, func(name string) bool {
		if len(found) >= most {
			return false
		}
		x.mu.Lock()
		defer x.mu.Unlock()
		if v, there := x.byName[name]; there {
			found = append(found, v.about().clone())
		}
		return true
	})
	return found, err
}

// page returns names after one, and not before the prefix; it locks mu.
func (x *index[T]) page(after, prefix string) ([]string, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return nil, ErrClosed
	}
	i, there := slices.BinarySearch(x.names, max(after, prefix))
	if there && after >= prefix {
		i++
	}
	return slices.Clone(x.names[i:min(i+pageNames, len(x.names))]), nil
}

// close closes the store once.
func (x *index[T]) close() error {
	if x.closed {
		return ErrClosed
	}
	x.closed = true
	return nil
}

// Changed implements Sets; it locks mu.
func (x *index[T]) Changed(after int64) (names []string, now int64, known bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	now = x.forgot + int64(len(x.sets))
	if after < x.forgot {
		return nil, now, false
	}
	return slices.Clone(x.sets[min(after, now)-x.forgot:]), now, true
}

// put adds values, a set if there are several, and returns those that they replace.
func (x *index[T]) put(values ...T) (replaced []T) {
	var fresh []string
	if len(values) > 1 {
		if over := len(x.sets) + len(values) - keptNames; over > 0 {
			x.sets = slices.Delete(x.sets, 0, over)
			x.forgot += int64(over)
		}
	}
	for _, v := range values {
		name := v.about().Name
		if len(values) > 1 {
			x.sets = append(x.sets, name)
		}
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

// eachMatch passes names that match to use, until it returns false, from pages of up to
// pageNames after a name. It gives way between two pages, so that a long list does not delay
// others.
func eachMatch(ctx context.Context, pattern, after string, page func(after, prefix string) ([]string, error), use func(name string) bool) error {
	g, err := glob.Parse(pattern)
	if err != nil {
		return err
	}
	prefix := glob.Prefix(pattern)
	var turn background.Turn
	defer turn.End()
	for {
		if err := turn.Work(ctx); err != nil {
			return err
		}
		names, err := page(after, prefix)
		if err != nil {
			return err
		}
		for _, name := range names {
			if ctx.Err() != nil { // a name may take 10 µs
				return context.Cause(ctx)
			}
			after = name
			if !strings.HasPrefix(name, prefix) || (pattern == "" || g.Match(name)) && !use(name) {
				return nil
			}
		}
		if len(names) < pageNames {
			return nil
		}
	}
}
