package session

import (
	"context"
	"slices"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// Doer runs f on a machine, as Session.Do does.
type Doer interface {
	Do(f func(m *stream.Machine, now stream.Instant))
}

// News wakes one goroutine. Its capacity is 1.
type News chan struct{}

// Tell wakes the goroutine, now or when it looks next.
func (n News) Tell() {
	select {
	case n <- struct{}{}:
	default: // already signaled
	}
}

// Wait waits until Tell, or returns the cause of ctx.
func (n News) Wait(ctx context.Context) error {
	select {
	case <-n:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Landing brings an incoming tensor of a put or a get to where it rests: it lends memory for its
// next bytes, and hands over what has come in pieces, each once. Stage, and the fields up
// to it, belong to the session's lock; the other methods to one goroutine.
type Landing struct {
	Session Doer
	Tensor  tensor.ID
	Geo     tensor.Geometry
	// Tell is called when a piece has come or gone, with the session locked.
	Tell func()

	// Set before Step.
	To assembler.Placer
	// Memory is where the tensor rests, if that is memory: it is lent itself.
	Memory []byte
	// Slab returns memory of n bytes. Its error counts only if there is no memory yet.
	Slab func(n int) (*slab.Slab, error)
	// InOrder has the pieces handed over in order.
	InOrder bool
	// Held are the ranges that the place has, ascending and apart.
	Held []frame.Range

	size   int64 // bytes of a piece, whole chunks; 0 before the first
	lent   int64 // bytes lent, or held
	began  bool
	left   int   // pieces lent, and not handed over
	next   int64 // in order, up to where all was handed over, or is held
	spare  []*slab.Slab
	slabs  int
	failed bool  // nothing can be lent any more
	ahead  int64 // bytes to be lent ahead, if more than usual

	// Guarded by the session's lock.
	away []*piece // lent
	came []*piece
	lost []*piece // came back without their bytes
}

type piece struct {
	off  int64
	mem  []byte
	slab *slab.Slab // nil: mem is of Memory, or empty
}

// Stage lends a slab, which it takes over, for all of a tensor on allowance, while it is
// announced; the session is locked.
func (l *Landing) Stage(m *stream.Machine, now stream.Instant, s *slab.Slab) {
	l.lend(m, now, &piece{mem: s.Bytes(), slab: s})
	l.lent, l.left, l.began = l.Geo.Size, 1, true
}

// lend lends a piece; the session is locked.
func (l *Landing) lend(m *stream.Machine, now stream.Instant, p *piece) {
	l.away = append(l.away, p)
	back := func(filled bool) {
		l.away = slices.DeleteFunc(l.away, func(o *piece) bool { return o == p })
		if filled {
			l.came = append(l.came, p)
		} else {
			l.failed = true
			l.lost = append(l.lost, p)
		}
		l.Tell()
	}
	if m.Lend(now, l.Tensor, p.mem, back) != nil {
		back(false)
	}
}

// Whole reports whether everything has been handed over.
func (l *Landing) Whole() bool {
	return l.began && l.lent == l.Geo.Size && l.left == 0
}

// Step hands over what has come, and lends memory for more. An error is the place's own, or
// that of memory: the caller then gives the tensor up.
func (l *Landing) Step() error {
	for {
		if err := l.more(); err != nil {
			return err
		}
		p, part := l.take()
		if p == nil {
			return nil
		}
		off, mem := p.off, p.mem
		if l.InOrder { // the beginning may have been handed over
			off, mem = l.next, p.mem[l.next-p.off:]
		}
		views := [][]byte{mem}
		if len(mem) == 0 {
			views = nil
		}
		err := l.To.WriteViews(off, views)
		l.next = max(l.next, off+int64(len(mem)))
		if part && err == nil {
			continue
		}
		l.free(p)
		if err != nil {
			return err
		}
		if l.left--; l.Whole() {
			return nil
		}
	}
}

// take returns a piece that has come or, in order, one of which a part is in place; nil if there
// is none.
func (l *Landing) take() (p *piece, part bool) {
	l.Session.Do(func(m *stream.Machine, _ stream.Instant) {
		i := slices.IndexFunc(l.came, func(p *piece) bool { return !l.InOrder || p.off <= l.next })
		if i >= 0 {
			p = l.came[i]
			l.came = slices.Delete(l.came, i, i+1)
			return
		}
		if !l.InOrder {
			return
		}
		here := m.InPlace(l.Tensor)
		i = slices.IndexFunc(l.away, func(p *piece) bool { return l.next < min(here, p.off+int64(len(p.mem))) && p.off <= l.next })
		if part = i >= 0; part {
			p = &piece{off: l.away[i].off, mem: l.away[i].mem[:min(here-l.away[i].off, int64(len(l.away[i].mem)))]}
		}
	})
	return p, part
}

func (l *Landing) free(p *piece) {
	if p.slab != nil {
		l.spare = append(l.spare, p.slab)
		p.slab = nil
	}
}

// more lends what there is memory for.
func (l *Landing) more() error {
	if l.size == 0 {
		if l.size = l.Geo.ChunkBytes; len(l.Held) == 0 {
			l.size *= max(1, PieceBytes/l.Geo.ChunkBytes)
		}
	}
	for !l.began || l.lent < l.Geo.Size {
		if n := l.held(); n > 0 {
			l.Session.Do(func(m *stream.Machine, now stream.Instant) { l.failed = l.failed || m.Hold(now, l.Tensor, n) != nil })
			l.lent += n
			l.next = l.lent
			l.began = true
			continue
		}
		n := min(l.size, l.Geo.Size-l.lent) // up to what is held
		p := &piece{off: l.lent}
		switch {
		case n == 0:
			p.mem = []byte{}
		case l.Memory != nil:
			p.mem = l.Memory[l.lent : l.lent+n : l.lent+n]
		case len(l.spare) > 0:
			p.slab = l.spare[len(l.spare)-1]
			l.spare = l.spare[:len(l.spare)-1]
			p.mem = p.slab.Bytes()[:n]
		case int64(l.slabs) >= max(Slabs, l.ahead/l.size):
			return nil
		default:
			s, err := l.Slab(int(n))
			if err != nil && l.slabs > 0 {
				return nil
			} else if err != nil {
				return err
			}
			l.slabs++
			p.slab, p.mem = s, s.Bytes()[:n]
		}
		full := false
		l.Session.Do(func(m *stream.Machine, now stream.Instant) {
			l.ahead = m.Ahead(now)
			if full = l.failed || l.Memory != nil && int64(len(l.away)) >= max(landingPieces, l.ahead/l.size); !full {
				l.lend(m, now, p)
			}
		})
		if full {
			l.free(p)
			return nil
		}
		l.lent += n
		l.left++
		l.began = true
	}
	return nil
}

// held returns how many of the next bytes are in chunks that lie in one range of Held.
func (l *Landing) held() (n int64) {
	size := func() int64 { return min(l.Geo.ChunkBytes, l.Geo.Size-l.lent-n) }
	for cover(&l.Held, l.lent+n, size()) {
		n += size()
	}
	return n
}

// Home reports whether nothing is lent any more; if so, it releases the slabs. The tensor
// has ended before.
func (l *Landing) Home() (home bool) {
	l.Session.Do(func(*stream.Machine, stream.Instant) {
		if home = len(l.away) == 0; home {
			for _, p := range append(l.came, l.lost...) {
				l.free(p)
			}
			l.came, l.lost = nil, nil
		}
	})
	if home {
		for _, s := range l.spare {
			s.Release()
		}
		l.spare = nil
	}
	return home
}
