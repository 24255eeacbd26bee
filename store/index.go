package store

import (
	"context"
	"maps"
	"path"
	"slices"
)

// index finds things by name, and the names in order.
type index[T any] struct {
	byName map[string]T
	names  []string // sorted
}

func newIndex[T any](byName map[string]T) index[T] {
	return index[T]{byName, slices.Sorted(maps.Keys(byName))}
}

// put adds v or returns what it replaces.
func (x *index[T]) put(name string, v T) (old T, replaced bool) {
	if old, replaced = x.byName[name]; !replaced {
		i, _ := slices.BinarySearch(x.names, name)
		x.names = slices.Insert(x.names, i, name)
	}
	x.byName[name] = v
	return old, replaced
}

func (x *index[T]) remove(name string) {
	if i, there := slices.BinarySearch(x.names, name); there {
		x.names = slices.Delete(x.names, i, i+1)
		delete(x.byName, name)
	}
}

// after returns up to most names that come after name. They are the index's own:
// valid until it changes.
func (x *index[T]) after(name string, most int) []string {
	i, there := slices.BinarySearch(x.names, name)
	if there {
		i++
	}
	return x.names[i:min(i+most, len(x.names))]
}

// listPages answers Store.List from pages: up to n infos after a name, of which it
// holds no lock between two, so that a long list does not keep others waiting.
func listPages(ctx context.Context, glob, after string, most int, page func(after string, n int) ([]Info, error)) ([]Info, error) {
	if err := checkGlob(glob); err != nil {
		return nil, err
	}
	var found []Info
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		infos, err := page(after, pageNames)
		if err != nil {
			return nil, err
		}
		for _, info := range infos {
			if len(found) >= most {
				return found, nil
			}
			if ok, _ := path.Match(glob, info.Name); ok || glob == "" {
				info.Shape = info.Shape.Clone()
				found = append(found, info)
			}
		}
		if len(infos) < pageNames {
			return found, nil
		}
		after = infos[len(infos)-1].Name
	}
}
