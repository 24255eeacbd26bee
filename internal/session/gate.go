package session

import (
	"maps"
	"slices"
	"sync"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// Gate makes frames of a session of those of a push or a pull, on a connection on which no
// credit can be sent: it holds chunks back until they have a place, and nothing more is read
// until then. Pass, Recv, Left and the fields belong to one goroutine; the other methods are
// safe for concurrent use.
type Gate struct {
	Kind  string    // "push" or "pull"
	Parts string    // that its frames may have, for error texts
	Call  tensor.ID // of the session
	// New, if not nil, is called for each tensor that is announced. Its error ends the
	// session.
	New func(d *frame.Desc) error

	chunk *frame.Frame // of the last frame, not returned yet
	sums  *frame.Frame // likewise
	rest  frame.Frame

	mu     sync.Mutex // guards all below
	limits map[tensor.ID]gated
	news   chan struct{} // closed when a limit was raised
}

// gated is how many chunks of a tensor have a place, and how many there are.
type gated struct{ limit, count uint32 }

// Pass checks what a frame says, and makes its tensors those of the call.
func (g *Gate) Pass(f *frame.Frame) error {
	if len(f.Calls)+len(f.Credits)+len(f.Acks)+len(f.Cancels)+len(f.Dones)+len(f.Ends) > 0 || f.Drain != nil {
		return frame.Errorf(frame.InvalidArgument, "a %s has %s; calls, credits, acks and their like are of sessions", g.Kind, g.Parts)
	}
	for i := range f.Descs {
		d := &f.Descs[i]
		if !d.Call.IsZero() {
			f.Failures = append(f.Failures, frame.Failure{Tensor: d.Tensor, Code: frame.InvalidArgument, Message: "it belongs to a call; a " + g.Kind + " has no calls"})
		}
		d.Call, d.OnAllowance, d.RetainChunks, d.Held = g.Call, false, 0, false
		if g.announce(d) && g.New != nil {
			if err := g.New(d); err != nil {
				return err
			}
		}
	}
	for _, x := range f.Failures {
		if !g.knows(x.Tensor) {
			return frame.Errorf(frame.NotFound, "failure of tensor %s, which was not announced", x.Tensor)
		}
		g.Over(x.Tensor)
	}
	if f.HasChunk() && !g.knows(f.Chunk.Tensor) {
		return frame.Errorf(frame.NotFound, "chunk %d of tensor %s, which was not announced; send its desc first", f.Chunk.Index, f.Chunk.Tensor)
	}
	return nil
}

// Recv returns the rest of the last frame, or the frame that receive returns. A chunk has a
// frame of its own, once it has a place or one of the channels is closed; summaries follow
// it.
func (g *Gate) Recv(receive func() (*frame.Frame, error), done, stopped <-chan struct{}) (f *frame.Frame, err error) {
	switch {
	case g.chunk != nil:
		f, g.chunk = g.chunk, nil
	case g.sums != nil:
		f, g.sums = g.sums, nil
	default:
		if f, err = receive(); err != nil {
			return nil, err
		}
		if !f.HasChunk() {
			break
		}
		g.rest = frame.Frame{Chunk: f.Chunk}
		if len(f.Summaries) > 0 {
			g.sums = &frame.Frame{Summaries: f.Summaries}
		}
		f.Chunk, f.Summaries = frame.Chunk{}, nil
		if f.Empty() {
			f = &g.rest
		} else {
			g.chunk = &g.rest
		}
	}
	if f.HasChunk() {
		g.wait(&f.Chunk, done, stopped)
	}
	for i := range f.Summaries {
		g.Over(f.Summaries[i].Tensor)
	}
	return f, nil
}

// Left reports whether something of the last frame has not been returned.
func (g *Gate) Left() bool { return g.chunk != nil || g.sums != nil }

// announce adds a tensor, and reports whether it is new.
func (g *Gate) announce(d *frame.Desc) bool {
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

// knows reports whether a tensor was announced.
func (g *Gate) knows(id tensor.ID) bool {
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
		g.wait(&frame.Chunk{Tensor: id}, done, stopped)
	}
}

// wait waits until a chunk has its place, unless there is none for it, or one of the channels
// is closed.
func (g *Gate) wait(c *frame.Chunk, done, stopped <-chan struct{}) {
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
