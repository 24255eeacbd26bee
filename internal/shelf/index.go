package shelf

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/tensorferry/tensorferry/internal/background"
	"github.com/tensorferry/tensorferry/internal/glob"
	"github.com/tensorferry/tensorferry/store"
)

// Index has the tensors of a store by name. A method whose comment does not say that it locks
// the Index is called with the lock held.
type Index[T interface{ About() *store.Info }] struct {
	sync.Mutex              // guards all below, and what its owner says; taken last
	ByName     map[string]T // changed by the methods only
	names      []string     // sorted
	closed     bool
	sets       []string // the names of the last two of the largest sets, or of more, in the order of their commits
	forgot     int64    // how many names of earlier sets are not in sets any more
}

// Reset replaces all values; it locks.
func (x *Index[T]) Reset(byName map[string]T) {
	names := slices.Sorted(maps.Keys(byName)) // not under the lock: there may be many
	x.Lock()
	defer x.Unlock()
	x.ByName, x.names = byName, names
}

// Closed returns store.ErrClosed if the store has been closed.
func (x *Index[T]) Closed() error {
	if x.closed {
		return store.ErrClosed
	}
	return nil
}

// Find returns a value; it locks.
func (x *Index[T]) Find(name string) (v T, known bool) {
	x.Lock()
	defer x.Unlock()
	v, known = x.ByName[name]
	return v, known
}

// Open calls hold with a value, and returns it, unless the store is closed; it locks.
func (x *Index[T]) Open(name string, hold func(T)) (v T, err error) {
	x.Lock()
	defer x.Unlock()
	v, there := x.ByName[name]
	switch {
	case x.closed:
		return v, store.ErrClosed
	case !there:
		return v, fmt.Errorf("%w: no tensor %q", store.ErrNotFound, name)
	}
	hold(v)
	return v, nil
}

// List implements Store; it locks. It gives way between two pages of names, so that a long list
// does not delay others.
func (x *Index[T]) List(ctx context.Context, pattern, after string, most int) (found []store.Info, err error) {
	g, err := glob.Parse(pattern)
	if err != nil {
		return nil, err
	}
	prefix := glob.Prefix(pattern)
	var turn background.Turn
	defer turn.End()
	for {
		if err := turn.Work(ctx); err != nil {
			return nil, err
		}
		names, err := x.page(after, prefix)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			if ctx.Err() != nil { // a name may take 10 µs
				return nil, context.Cause(ctx)
			}
			if !strings.HasPrefix(name, prefix) || len(found) >= most {
				return found, nil
			}
			if pattern == "" || g.Match(name) {
				found = x.appendInfo(found, name)
			}
			after = name
		}
		if len(names) < store.PageNames {
			return found, nil
		}
	}
}

// appendInfo appends a copy of what is known about a tensor, if it is still there; it locks.
func (x *Index[T]) appendInfo(infos []store.Info, name string) []store.Info {
	x.Lock()
	defer x.Unlock()
	if v, known := x.ByName[name]; known {
		infos = append(infos, v.About().Clone())
	}
	return infos
}

// page returns names after one, and not before the prefix; it locks.
func (x *Index[T]) page(after, prefix string) ([]string, error) {
	x.Lock()
	defer x.Unlock()
	if x.closed {
		return nil, store.ErrClosed
	}
	i, there := slices.BinarySearch(x.names, max(after, prefix))
	if there && after >= prefix {
		i++
	}
	return slices.Clone(x.names[i:min(i+store.PageNames, len(x.names))]), nil
}

// Close closes the store once.
func (x *Index[T]) Close() error {
	if x.closed {
		return store.ErrClosed
	}
	x.closed = true
	return nil
}

// Changed implements Sets; it locks.
func (x *Index[T]) Changed(after int64) (names []string, now int64, known bool) {
	x.Lock()
	defer x.Unlock()
	now = x.forgot + int64(len(x.sets))
	if after < x.forgot {
		return nil, now, false
	}
	return slices.Clone(x.sets[min(after, now)-x.forgot:]), now, true
}

// Put adds values, a set if there are several, and returns those that they replace.
func (x *Index[T]) Put(values ...T) (replaced []T) {
	var fresh []string
	if len(values) > 1 {
		if over := len(x.sets) + len(values) - 2*store.MaxSet; over > 0 {
			x.sets = slices.Delete(x.sets, 0, over)
			x.forgot += int64(over)
		}
	}
	for _, v := range values {
		name := v.About().Name
		if len(values) > 1 {
			x.sets = append(x.sets, name)
		}
		if old, there := x.ByName[name]; there {
			replaced = append(replaced, old)
		} else {
			fresh = append(fresh, name)
		}
		x.ByName[name] = v
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

// Drop removes a value.
func (x *Index[T]) Drop(name string) {
	if i, there := slices.BinarySearch(x.names, name); there {
		x.names = slices.Delete(x.names, i, i+1)
		delete(x.ByName, name)
	}
}
