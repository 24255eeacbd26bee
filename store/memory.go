package store

import (
	"container/list"
	"context"
	"fmt"
	"maps"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// Memory keeps tensors in slabs, up to a number of bytes, until the process ends. When it is
// full, it refuses new ones or, if it is a cache, evicts others. It is safe for concurrent use.
type Memory struct {
	pool   *slab.Pool
	limit  int64
	evicts bool
	used   atomic.Int64 // bytes in slabs: of tensors, of open Writers, and of what is still being read; grows under mu only

	index[*resident]
	recent list.List // of *resident, most recently used first; guarded by mu
}

// resident is a tensor in memory, and its Reader. The store, each Open and each View hold
// it.
type resident struct {
	share
	described
	data []byte
	room int64 // bytes charged
	at   *list.Element
}

// NewMemory returns a store of at most limitBytes. A tensor takes its bytes, rounded up to
// whole pages of 4 KiB, and its metadata. Its memory comes from pool.
func NewMemory(pool *slab.Pool, limitBytes int64) *Memory {
	return &Memory{pool: pool, limit: limitBytes, index: index[*resident]{byName: map[string]*resident{}}}
}

// NewCache is like NewMemory, but the store evicts tensors to make room for a new one: the
// least recently used, by Open or Commit, except an older one of the same name, and those with
// an open Reader. A Writer is then an Evicter.
func NewCache(pool *slab.Pool, limitBytes int64) *Memory {
	m := NewMemory(pool, limitBytes)
	m.evicts = true
	return m
}

// Create implements Store. It never waits. A cache evicts as many tensors as it must, or none
// if that is not enough. ErrFull says how much is missing.
func (m *Memory) Create(ctx context.Context, name string, d tensor.Desc, metadata map[string]string) (Writer, error) {
	size, err := checkNew(ctx, name, d, metadata)
	if err != nil {
		return nil, err
	}
	room := slab.PagesOf(size) + metadataBytes(metadata)
	evicted, err := m.reserve(name, room)
	if err != nil {
		return nil, err
	}
	s, err := m.pool.GetPages(int(size))
	if err != nil {
		m.used.Add(-room)
		return nil, fmt.Errorf("%w: tensor %q: %w", ErrFull, name, err)
	}
	info := Info{Name: name, Desc: d.Clone(), Metadata: maps.Clone(metadata)}
	w := &memoryWriter{store: m, made: &resident{described: described{info}, data: s.Bytes(), room: room}, evicted: evicted}
	w.made.init(func() {
		s.Release()
		m.used.Add(-room)
	})
	return w, nil
}

// neverFitsError is an ErrFull that is a tensor.ErrTooLarge, too: to try again does not help.
type neverFitsError struct{ error }

func (n neverFitsError) Unwrap() error { return n.error }

// Is reports whether target is tensor.ErrTooLarge.
func (neverFitsError) Is(target error) bool { return target == tensor.ErrTooLarge }

// reserve charges room bytes, and evicts tensors for them if it may and must.
func (m *Memory) reserve(name string, room int64) (evicted []Info, err error) {
	if room > m.limit {
		return nil, neverFitsError{fmt.Errorf("%w: tensor %q takes %d bytes, the limit is %d; a larger store, or one in a folder, has more room", ErrFull, name, room, m.limit)}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, ErrClosed
	}
	used := m.used.Load()
	missing := used - m.limit + room
	if missing > 0 && !m.evicts {
		return nil, fmt.Errorf("%w: tensor %q needs %d bytes more than the %d that are free%s; delete some tensors, or have a larger store, and try again",
			ErrFull, name, missing, m.limit-used, m.replacing(name))
	}
	var victims []*resident
	for e := m.recent.Back(); e != nil && missing > 0; e = e.Prev() {
		// Only the store holds it, and Open needs mu.
		if r := e.Value.(*resident); r.refs.Load() == 1 && r.info.Name != name {
			victims = append(victims, r)
			missing -= r.room
		}
	}
	if missing > 0 {
		return nil, fmt.Errorf("%w: tensor %q needs %d more bytes; the limit is %d, of which %d are being read or written, or replaced%s; try again when they are done",
			ErrFull, name, missing, m.limit, m.limit-room+missing, m.replacing(name))
	}
	for _, r := range victims {
		evicted = append(evicted, r.info)
		m.forget(r)
	}
	m.used.Add(room)
	return evicted, nil
}

// replacing returns a note for ErrFull if an older tensor has the name, which needs room, too.
// The caller holds mu.
func (m *Memory) replacing(name string) string {
	if old := m.byName[name]; old != nil {
		return fmt.Sprintf(" (the older one, of %d, stays until the new one is complete)", old.room)
	}
	return ""
}

// forget drops the store's hold on r. The caller holds mu.
func (m *Memory) forget(r *resident) {
	m.drop(r.info.Name)
	m.recent.Remove(r.at)
	r.Release()
}

// show makes tensors visible, in place of older ones.
func (m *Memory) show(made ...*resident) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return ErrClosed
	}
	for _, old := range m.put(made...) {
		m.recent.Remove(old.at)
		old.Release()
	}
	now := time.Now()
	for _, r := range made {
		r.info.Stored = now
		r.at = m.recent.PushFront(r)
	}
	return nil
}

// Open implements Store. It never waits.
func (m *Memory) Open(_ context.Context, name string) (Reader, error) {
	r, err := m.open(name, func(r *resident) {
		m.recent.MoveToFront(r.at)
		r.retain()
	})
	if err != nil {
		return nil, err
	}
	return r, nil
}

// Delete implements Store.
func (m *Memory) Delete(ctx context.Context, names ...string) ([]string, error) {
	return deleteEach(ctx, names, func(name string) (bool, error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		r, there := m.byName[name]
		switch {
		case m.closed:
			return false, ErrClosed
		case there:
			m.forget(r)
		}
		return there, nil
	})
}

// Close implements Store.
func (m *Memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.byName {
		m.forget(r)
	}
	return m.close()
}

// Used implements Meter.
func (m *Memory) Used() (used, limit int64) { return m.used.Load(), m.limit }

// memoryWriter writes one tensor to memory.
type memoryWriter struct {
	store *Memory
	made  *resident // nil after the end
	order codec.OrderedDigester

	evicted []Info
}

func (w *memoryWriter) WriteViews(_ context.Context, off int64, views [][]byte) error {
	if err := checkViews(off, views, int64(len(w.made.data))); err != nil {
		return err
	}
	for _, v := range views {
		if to := w.made.data[off:]; len(v) > 0 && &v[0] != &to[0] { // otherwise it is there already, see InPlace
			copy(to, v)
		}
		w.order.Wrote(off, v)
		off += int64(len(v))
	}
	return nil
}

func (w *memoryWriter) Memory() []byte { return w.made.data }

func (w *memoryWriter) Evicted() []Info { return w.evicted }

func (w *memoryWriter) nameIn(s Store) string {
	if w.made == nil || s != w.store {
		return ""
	}
	return w.made.info.Name
}

// seal computes the digest.
func (w *memoryWriter) seal() {
	next := w.order.Next()
	w.order.Wrote(next, w.made.data[next:]) // what arrived after a gap
	w.made.info.Digest = w.order.Sum()
}

func (w *memoryWriter) Commit(context.Context) (Info, error) {
	defer w.Abort()
	w.seal()
	r := w.made
	if err := w.store.show(r); err != nil {
		return Info{}, err
	}
	w.made = nil
	return r.Info(), nil
}

func (w *memoryWriter) Abort() {
	if w.made != nil {
		w.made.Release()
		w.made = nil
	}
}

// Info implements Reader.
func (r *resident) Info() Info { return r.info.clone() }

// View implements Reader: it shares the store's memory.
func (r *resident) View(ctx context.Context, off, n int64) ([]byte, Releaser, error) {
	if err := checkView(ctx, off, n, int64(len(r.data))); err != nil {
		return nil, nil, err
	}
	r.retain()
	return r.data[off : off+n : off+n], r, nil
}
