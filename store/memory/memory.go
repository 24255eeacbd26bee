// Package memory keeps tensors in memory until the process ends.
//
// It writes no file. Any program may use a Store, which is safe for concurrent use. A Store
// owns its bytes, in slabs of a pool that the caller gives it.
package memory

import (
	"container/list"
	"context"
	"fmt"
	"maps"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/shelf"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// Store keeps tensors in slabs, up to a number of bytes, until the process ends. When it is
// full, it refuses new ones or, if it is a cache, evicts others. It is safe for concurrent use.
type Store struct {
	pool   *slab.Pool
	limit  int64
	evicts bool
	used   atomic.Int64 // bytes in slabs: of tensors, of open Writers, and of what is still being read; grows under the lock of the index only

	index  shelf.Index[*resident]
	recent list.List // of *resident, most recently used first; guarded by the index
}

// resident is a tensor in memory, and its Reader. The store, each Open and each View hold
// it.
type resident struct {
	shelf.Share
	info store.Info
	data []byte
	room int64 // bytes charged
	at   *list.Element
}

func (r *resident) About() *store.Info { return &r.info }

var (
	_ store.Sets    = (*Store)(nil)
	_ store.Meter   = (*Store)(nil)
	_ store.InPlace = (*writer)(nil)
	_ store.Evicter = (*writer)(nil)
)

// New returns a store of at most limitBytes. A tensor takes its bytes, rounded up to
// whole pages of 4 KiB, and its metadata. Its memory comes from pool.
func New(pool *slab.Pool, limitBytes int64) *Store {
	return &Store{pool: pool, limit: limitBytes, index: shelf.Index[*resident]{ByName: map[string]*resident{}}}
}

// NewCache is like New, but the store evicts tensors to make room for a new one: the
// least recently used, by Open or Commit, except an older one of the same name, and those with
// an open Reader. A Writer is then an Evicter.
func NewCache(pool *slab.Pool, limitBytes int64) *Store {
	m := New(pool, limitBytes)
	m.evicts = true
	return m
}

// Create implements Store. It never waits. A cache evicts as many tensors as it must, or none
// if that is not enough. ErrFull says how much is missing.
func (m *Store) Create(ctx context.Context, name string, d tensor.Desc, metadata map[string]string) (store.Writer, error) {
	size, err := shelf.CheckNew(ctx, name, d, metadata)
	if err != nil {
		return nil, err
	}
	room := slab.PagesOf(size) + shelf.MetadataBytes(metadata)
	evicted, err := m.reserve(name, room)
	if err != nil {
		return nil, err
	}
	s, err := m.pool.GetPages(int(size))
	if err != nil {
		m.used.Add(-room)
		return nil, fmt.Errorf("%w: tensor %q: %w", store.ErrFull, name, err)
	}
	info := store.Info{Name: name, Desc: d.Clone(), Metadata: maps.Clone(metadata)}
	w := &writer{store: m, resident: &resident{info: info, data: s.Bytes(), room: room}, evicted: evicted}
	w.resident.Init(func() {
		s.Release()
		m.used.Add(-room)
	})
	return w, nil
}

// reserve charges room bytes, and evicts tensors for them if it may and must.
func (m *Store) reserve(name string, room int64) (evicted []store.Info, err error) {
	if room > m.limit {
		return nil, fmt.Errorf("%w: tensor %q takes %d bytes, the limit is %d; a larger store, or one in a folder, has more room",
			store.ErrTooSmall, name, room, m.limit)
	}
	m.index.Lock()
	defer m.index.Unlock()
	if err := m.index.Closed(); err != nil {
		return nil, err
	}
	used := m.used.Load()
	missing := used - m.limit + room
	if missing > 0 && !m.evicts {
		return nil, fmt.Errorf("%w: tensor %q needs %d bytes more than the %d that are free%s; delete some tensors, or have a larger store, and try again",
			store.ErrFull, name, missing, m.limit-used, m.replacing(name))
	}
	var victims []*resident
	for e := m.recent.Back(); e != nil && missing > 0; e = e.Prev() {
		// Only the store holds it, and Open needs the index.
		if r := e.Value.(*resident); r.Holders() == 1 && r.info.Name != name {
			victims = append(victims, r)
			missing -= r.room
		}
	}
	if missing > 0 {
		return nil, fmt.Errorf("%w: tensor %q needs %d more bytes; the limit is %d, of which %d are being read or written, or replaced%s; try again when they are done",
			store.ErrFull, name, missing, m.limit, m.limit-room+missing, m.replacing(name))
	}
	for _, r := range victims {
		evicted = append(evicted, r.info)
		m.forget(r)
	}
	m.used.Add(room)
	return evicted, nil
}

// replacing returns a note for ErrFull if an older tensor has the name, which needs room, too.
// The caller holds the index.
func (m *Store) replacing(name string) string {
	if old, known := m.index.ByName[name]; known {
		return fmt.Sprintf(" (the older one, of %d, stays until the new one is complete)", old.room)
	}
	return ""
}

// forget drops the store's hold on r. The caller holds the index.
func (m *Store) forget(r *resident) {
	m.index.Drop(r.info.Name)
	m.recent.Remove(r.at)
	r.Release()
}

// Open implements Store. It never waits.
func (m *Store) Open(_ context.Context, name string) (store.Reader, error) {
	r, err := m.index.Open(name, func(r *resident) {
		m.recent.MoveToFront(r.at)
		r.Retain()
	})
	if err != nil {
		return nil, err
	}
	return r, nil
}

// Delete implements Store.
func (m *Store) Delete(ctx context.Context, names ...string) ([]string, error) {
	return shelf.DeleteEach(ctx, names, func(name string) (bool, error) {
		m.index.Lock()
		defer m.index.Unlock()
		r, known := m.index.ByName[name]
		if known {
			m.forget(r)
		}
		return known, m.index.Closed()
	})
}

// Close implements Store.
func (m *Store) Close() error {
	m.index.Lock()
	defer m.index.Unlock()
	for _, r := range m.index.ByName {
		m.forget(r)
	}
	return m.index.Close()
}

// List implements Store.
func (m *Store) List(ctx context.Context, glob, after string, most int) ([]store.Info, error) {
	return m.index.List(ctx, glob, after, most)
}

// Changed implements Sets.
func (m *Store) Changed(after int64) (names []string, now int64, known bool) {
	return m.index.Changed(after)
}

// Used implements Meter.
func (m *Store) Used() (used, limit int64) { return m.used.Load(), m.limit }

// Ready implements Sets: it computes the digest.
func (m *Store) Ready(ctx context.Context, w store.Writer) (store.Info, error) {
	set, err := shelf.Members[*writer](ctx, m, []store.Writer{w})
	if err != nil {
		return store.Info{}, err
	}
	set[0].seal()
	return set[0].resident.Info(), nil
}

// CommitAll implements Sets.
func (m *Store) CommitAll(ctx context.Context, writers []store.Writer) ([]store.Info, error) {
	defer shelf.AbortAll(writers)
	set, err := shelf.Members[*writer](ctx, m, writers)
	if err != nil {
		return nil, err
	}
	made := make([]*resident, len(set))
	for i, w := range set {
		w.seal()
		made[i] = w.resident
	}
	m.index.Lock()
	defer m.index.Unlock()
	if err := m.index.Closed(); err != nil {
		return nil, err
	}
	for _, old := range m.index.Put(made...) {
		m.recent.Remove(old.at)
		old.Release()
	}
	now, infos := time.Now(), make([]store.Info, len(set))
	for i, r := range made {
		r.info.Stored = now
		r.at = m.recent.PushFront(r)
		infos[i], set[i].resident = r.Info(), nil
	}
	return infos, nil
}

// writer writes one tensor to memory.
type writer struct {
	store    *Store
	resident *resident // nil after the end
	order    codec.OrderedDigester

	evicted []store.Info
}

func (w *writer) WriteViews(ctx context.Context, off int64, views [][]byte) error {
	if err := shelf.CheckViews(ctx, off, views, int64(len(w.resident.data))); err != nil {
		return err
	}
	for _, v := range views {
		if to := w.resident.data[off:]; len(v) > 0 && &v[0] != &to[0] { // otherwise it is there already, see InPlace
			copy(to, v)
		}
		w.order.Wrote(off, v)
		off += int64(len(v))
	}
	return nil
}

func (w *writer) Memory() []byte { return w.resident.data }

func (w *writer) Evicted() []store.Info { return w.evicted }

func (w *writer) NameIn(s store.Store) string {
	if w.resident == nil || s != w.store {
		return ""
	}
	return w.resident.info.Name
}

// seal computes the digest.
func (w *writer) seal() {
	next := w.order.Next()
	w.order.Wrote(next, w.resident.data[next:]) // what arrived after a gap
	w.resident.info.Digest = w.order.Sum()
}

func (w *writer) Commit(ctx context.Context) (store.Info, error) {
	infos, err := w.store.CommitAll(ctx, []store.Writer{w})
	if err != nil {
		return store.Info{}, err
	}
	return infos[0], nil
}

func (w *writer) Abort() {
	if w.resident != nil {
		w.resident.Release()
		w.resident = nil
	}
}

// Info implements Reader.
func (r *resident) Info() store.Info { return r.info.Clone() }

// View implements Reader: it shares the store's memory.
func (r *resident) View(ctx context.Context, off, n int64) ([]byte, store.Releaser, error) {
	if err := store.CheckRange(ctx, off, n, int64(len(r.data))); err != nil {
		return nil, nil, err
	}
	r.Retain()
	return r.data[off : off+n : off+n], r, nil
}
