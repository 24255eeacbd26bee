package session

import (
	"maps"
	"slices"
	"sync"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// Gate holds chunks back until they have a place, on a connection on which no credit can be
// sent: its reader reads nothing more until then. It is safe for concurrent use.
type Gate struct {
	mu     sync.Mutex // guards all below
	limits map[tensor.ID]gated
	news   chan struct{} // closed when a limit was raised
}

// gated is how many chunks of a tensor have a place, and how many there are.
type gated struct{ limit, count uint32 }

// Announce adds a tensor, and reports whether it is new.
func (g *Gate) Announce(d *frame.Desc) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.limits == nil {
		g.limits, g.news = make(map[tensor.ID]gated), make(chan struct{})
	}
	_, known := g.limits[d.Tensor]
	if !known {
		// A desc that does not make sense has no chunks: the machine judges it.
		geo, err := tensor.NewGeometry(int64(d.SizeBytes), int64(d.ChunkBytes))
		if err != nil {
			geo = tensor.Geometry{ChunkBytes: 1}
		}
		g.limits[d.Tensor] = gated{count: geo.Count()}
	}
	return !known
}

// Knows reports whether a tensor was announced.
func (g *Gate) Knows(id tensor.ID) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, known := g.limits[id]
	return known
}

// Sent notes the credits of a frame that this side would send.
func (g *Gate) Sent(f *frame.Frame) {
	for _, c := range f.Credits {
		g.raise(c.Tensor, c.Limit)
	}
	for _, x := range f.Failures {
		g.Over(x.Tensor)
	}
}

// Over lets everything through that still comes of a tensor: it has ended.
func (g *Gate) Over(id tensor.ID) { g.raise(id, ^uint32(0)) }

func (g *Gate) raise(id tensor.ID, limit uint32) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if t, known := g.limits[id]; known && limit > t.limit {
		g.limits[id] = gated{limit, t.count}
		close(g.news)
		g.news = make(chan struct{})
	}
}

// WaitAll waits until every tensor that was announced has a place, or has ended, or one of
// the channels is closed.
func (g *Gate) WaitAll(done, stopped <-chan struct{}) {
	g.mu.Lock()
	ids := slices.Collect(maps.Keys(g.limits))
	g.mu.Unlock()
	for _, id := range ids {
		g.Wait(&frame.Chunk{Tensor: id}, done, stopped)
	}
}

// Wait waits until a chunk has its place, unless there is none for it, or one of the channels
// is closed.
func (g *Gate) Wait(c *frame.Chunk, done, stopped <-chan struct{}) {
	for {
		g.mu.Lock()
		t := g.limits[c.Tensor]
		news := g.news
		g.mu.Unlock()
		if c.Index < t.limit || c.Index >= t.count {
			return
		}
		select {
		case <-news:
		case <-done:
			return
		case <-stopped:
			return
		}
	}
}
