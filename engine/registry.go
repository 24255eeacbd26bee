package engine

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
)

// ErrExists is wrapped when a registry already has a model of that name.
var ErrExists = errors.New("engine: model exists")

// Registry finds models by name and lets them come and go while runs are open. A model that
// is also an io.Closer is closed when it is out of the registry and its last use has been
// released, by whoever released it. Safe for concurrent use; no method waits for a run.
type Registry struct {
	mu       sync.Mutex // guards all below
	models   map[string]*entry
	watchers map[*func(name string, m Model)]struct{}
}

type entry struct {
	model Model
	uses  int // the registry's own, and one for each Lookup not released
}

// NewRegistry returns an empty registry.
func NewRegistry() *Registry {
	return &Registry{models: make(map[string]*entry), watchers: make(map[*func(string, Model)]struct{})}
}

// Watch tells of each model that is here now, and then of each that comes, also in
// another's place, or goes (nil), in that order, until stop is called. It runs with
// the registry locked: it must be quick and must not call the registry.
func (r *Registry) Watch(told func(name string, m Model)) (stop func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.watchers[&told] = struct{}{}
	for name, e := range r.models {
		told(name, e.model)
	}
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.watchers, &told)
	}
}

// put makes m what name finds, nothing if nil, unless refuse has a reason against it.
// put has m, or no model, under a name. It fails with taken or free, as the name is, where that is an error.
func (r *Registry) put(name string, m Model, taken, free error) error {
	if m != nil && !validName(name) {
		return fmt.Errorf("%w: a name is 1 to %d bytes of UTF-8 without control characters, got %q", ErrInfo, maxNameBytes, name)
	}
	r.mu.Lock()
	old, err := r.models[name], free
	if old != nil {
		err = taken
	}
	if err != nil {
		r.mu.Unlock()
		return err
	}
	delete(r.models, name)
	if m != nil {
		r.models[name] = &entry{m, 1}
	}
	for told := range r.watchers {
		(*told)(name, m)
	}
	r.mu.Unlock()
	if old != nil {
		r.release(old)
	}
	return nil
}

// Add hands m over to the registry, under the name in its Info. It fails when
// the name is taken (ErrExists) or is none (ErrInfo).
func (r *Registry) Add(m Model) error {
	name := m.Info().Name
	return r.put(name, m, fmt.Errorf("%w: %q; replace or remove it first", ErrExists, name), nil)
}

// Replace is Add, but a model that has the name gives way: only its uses go on.
func (r *Registry) Replace(m Model) error { return r.put(m.Info().Name, m, nil, nil) }

// Remove takes a model out; uses of it go on. It fails with ErrNotFound.
func (r *Registry) Remove(name string) error {
	return r.put(name, nil, nil, fmt.Errorf("%w: %q", ErrNotFound, name))
}

// Lookup finds a model and keeps it from being closed until release is called, once, after
// the last run opened on it has been closed. It fails with ErrNotFound, without a release.
func (r *Registry) Lookup(name string) (m Model, release func(), err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.models[name]
	if e == nil {
		return nil, nil, fmt.Errorf("%w: %q", ErrNotFound, name)
	}
	e.uses++
	return e.model, func() { r.release(e) }, nil
}

// Infos returns what each model says about itself, sorted by name.
func (r *Registry) Infos() []Info {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]Info, 0, len(r.models))
	for _, e := range r.models {
		all = append(all, e.model.Info())
	}
	slices.SortFunc(all, func(a, b Info) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// Close removes every model.
func (r *Registry) Close() {
	for _, i := range r.Infos() {
		_ = r.Remove(i.Name) // not found: another Close or Remove was first
	}
}

func (r *Registry) release(e *entry) {
	r.mu.Lock()
	e.uses--
	uses := e.uses
	r.mu.Unlock()
	switch c, ok := As[io.Closer](e.model); {
	case uses < 0:
		panic(fmt.Sprintf("engine: model %q released more often than looked up", e.model.Info().Name))
	case uses == 0 && ok:
		_ = c.Close() // nobody is left to hear of it
	}
}
