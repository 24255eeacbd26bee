package storing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/background"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/internal/glob"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// get is a client's download from the store and the sources. One goroutine serves it, and
// ends with the call.
type get struct {
	task
	list   []frame.Selection
	news   session.News  // a Summary was sent
	ended  chan struct{} // closed with the call
	chunk  int64         // bytes, of the chunks to send
	pieces int           // views that a tensor may have shared; a view may be a copy
	all    []picked      // what the selections pick; belongs to run
	most   int           // tensors whose Summary is not sent

	// Guarded by the session's lock.
	unsummed int                 // tensors whose Summary is not sent
	sizes    map[tensor.ID]int64 // of those of them that are being sent
	bytes    int64               // the sum of sizes
	lost     map[tensor.ID]error // why tensors failed while they were sent
	damaged  int                 // tensors, as the client says
}

// check validates selections before any work is done for them.
func check(list []frame.Selection) *frame.Error {
	refuse := func(format string, args ...any) *frame.Error {
		return frame.Errorf(frame.InvalidArgument, format, args...)
	}
	switch n := len(list); {
	case n == 0:
		return refuse("selections: none; name a tensor, a glob or a source")
	case n > Tensors:
		return frame.Errorf(frame.ResourceExhausted, "selections: %d, the limit of a pull is %d; use several", n, Tensors)
	}
	for i := range list {
		sel := &list[i]
		if err := store.CheckName(sel.Name); err != nil {
			return refuse("selections[%d]: %s", i, reason.Plain(err))
		}
		if problem := frame.CheckEntries("params", sel.Params); problem != "" {
			return refuse("selections[%d]: %s", i, problem)
		}
		if len(sel.Params) > 0 && !sel.Source {
			return refuse("selections[%d]: params are for sources; set source, or leave them out", i)
		}
		if d := len(sel.HeldDigest); d != 0 && d != len(codec.Digest{}) {
			return refuse("selections[%d]: held_digest has %d bytes, a digest has %d", i, d, len(codec.Digest{}))
		}
		end := int64(0)
		for j, r := range sel.Held {
			if r.Len <= 0 || r.Off < end || r.Len > math.MaxInt64-r.Off {
				return refuse("selections[%d].held[%d]: bytes [%d,+%d); ranges must not be empty, must ascend, must not overlap, and must end below 2^63", i, j, uint64(r.Off), uint64(r.Len))
			}
			end = r.Off + r.Len
		}
	}
	return nil
}

// Event implements serving.Task.
func (g *get) Event(_ *stream.Machine, _ stream.Instant, e stream.Event) {
	switch e.Kind {
	case stream.EventFailed:
		if _, sending := g.sizes[e.Tensor]; sending {
			g.lost[e.Tensor] = e.Why()
		} else if e.Code == frame.DataLoss { // it was sent whole
			g.service.Damaged.Add(1)
			g.service.log.damaged(g.record, e.Tensor, e.Code, e.Text)
			if g.damaged++; g.damaged > damagesListed {
				break
			}
			g.service.Failed(g.session.Values, g.id, "", e.Code, fmt.Errorf("tensor %q is damaged, in the store or on its way: %s", e.Desc.Name, e.Text))
		}
	case stream.EventSummed:
		g.unsummed--
		g.bytes -= g.sizes[e.Tensor]
		delete(g.sizes, e.Tensor)
		delete(g.lost, e.Tensor)
		g.news.Tell()
	case stream.EventStop:
		g.cancel(e.Why())
	case stream.EventClosed:
		g.closed(e)
		close(g.ended)
	}
}

// run serves the get.
func (g *get) run() {
	// The first piece is free, for as many pulls as a server has.
	g.session.Do(func(m *stream.Machine, _ stream.Instant) { g.chunk = m.Status().PeerChunkBytes })
	size := slab.SizeOf(max(session.PieceBytes, g.chunk))
	for g.pieces = 1; g.pieces < feedPieces; g.pieces++ { // while others have the other half
		if used, _, limit := g.service.Budget.Used(); used+size > limit/2 || !g.memory.Take(size) {
			break
		}
	}
	err := g.service.protect(g.send)
	var d frame.Done
	if err != nil {
		d = g.service.Explain(err, slog.String("pull", g.id.String())).Done()
	}
	g.session.Do(func(m *stream.Machine, _ stream.Instant) { g.finish(m, d) })
	<-g.ended // nothing is shared any more
	g.memory.Close()
}

// picked is a tensor that a selection matches, or why it matches none.
type picked struct {
	at     int // its selection's index
	name   string
	sel    *frame.Selection
	reader store.Reader // nil if it is opened when it is its turn
	was    store.Info   // then: what it was when it was picked
	kept   int64        // then: bytes taken for it
	err    error
}

// send sends what the selections pick. A problem with a selection or one of its tensors
// becomes a summary; an error ends the call.
func (g *get) send() error {
	defer func() {
		for i := range g.all {
			g.release(&g.all[i])
		}
	}()
	if err := g.pick(); err != nil {
		return err
	}
	for i := range g.all {
		err := g.until(func(*stream.Machine, stream.Instant) bool { // before it is opened, so that few are
			if g.unsummed == g.most {
				return false
			}
			g.unsummed++
			return true
		})
		if err == nil {
			err = g.sendOne(&g.all[i])
		}
		if err != nil {
			return err
		}
	}
	return g.until(func(*stream.Machine, stream.Instant) bool { return g.unsummed == 0 })
}

// until waits until a condition holds, which it checks after each Summary, with the session
// locked.
func (g *get) until(holds func(m *stream.Machine, now stream.Instant) bool) error {
	for {
		ok := false
		g.session.Do(func(m *stream.Machine, now stream.Instant) { ok = holds(m, now) })
		if ok {
			return nil
		}
		if err := g.news.Wait(g.ctx); err != nil {
			return err
		}
	}
}

// pick resolves the selections: all of it belongs to one state of the store with regard to
// sets. It keeps no set waiting, but picks again what sets have changed meanwhile.
func (g *get) pick() error {
	sets, ok := g.service.Store.(store.Sets)
	var seen int64
	if ok {
		_, seen, _ = sets.Changed(math.MaxInt64)
	}
	for i := range g.list {
		if err := g.pickFor(g.ctx, i); err != nil {
			return err
		}
	}
	late := failures.TryLater("RESOURCE_EXHAUSTED", "selections: sets replace what they select faster than it can be opened; select less, or try again later")
	ctx, cancel := context.WithTimeoutCause(g.ctx, pickTime, late)
	defer cancel()
	for ok {
		changed, now, known := sets.Changed(seen)
		if !known {
			return late
		}
		if seen = now; len(changed) == 0 {
			break
		}
		if err := cmp.Or(g.pickAgain(ctx, changed), context.Cause(ctx)); err != nil {
			return err
		}
	}
	slices.SortStableFunc(g.all, func(a, b picked) int { return cmp.Or(cmp.Compare(a.at, b.at), strings.Compare(a.name, b.name)) })
	return nil
}

// isGlob reports whether a name may be a glob.
func isGlob(name string) bool { return strings.ContainsAny(name, "*?[") }

// pickFor picks what a selection selects now: the tensor of its name or, if there is none and it
// may be a glob, all that match it.
func (g *get) pickFor(ctx context.Context, i int) error {
	p := picked{at: i, name: g.list[i].Name, sel: &g.list[i]}
	switch {
	case p.sel.Source:
		return g.add(p)
	case g.service.Store == nil:
		p.err = ErrNoStore
		return g.add(p)
	}
	found, err := g.pickName(ctx, i, p.name)
	if err == nil && !found && isGlob(p.name) {
		for info, failed := range store.Each(ctx, g.service.Store, p.name) {
			there := failed == nil
			switch {
			case !there:
				p.err = failed
				return g.add(p)
			case len(g.all) >= pinned:
				err = g.add(picked{at: i, name: info.Name, sel: &frame.Selection{Name: info.Name}, was: info})
			default:
				there, err = g.pickName(ctx, i, info.Name) // it may be deleted meanwhile
			}
			if found = found || there; err != nil {
				return err
			}
		}
	}
	if err != nil || found {
		return err
	}
	p.err = fmt.Errorf("%w: no tensor matches %q", store.ErrNotFound, p.name)
	return g.add(p)
}

// pickAgain picks again for the selections that select any of these names.
func (g *get) pickAgain(ctx context.Context, changed []string) error {
	var turn background.Turn
	defer turn.End()
	for i, sel := range g.list {
		pattern, bad := glob.Parse(sel.Name)
		again := false
		for _, name := range changed {
			if err := turn.Work(ctx); err != nil {
				return err
			}
			again = again || name == sel.Name || bad == nil && isGlob(sel.Name) && pattern.Match(name)
		}
		turn.End()
		if sel.Source || !again {
			continue
		}
		g.all = slices.DeleteFunc(g.all, func(p picked) bool {
			if p.at == i {
				g.release(&p)
			}
			return p.at == i
		})
		if err := g.pickFor(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// pickName picks a tensor of a selection, if it is there.
func (g *get) pickName(ctx context.Context, i int, name string) (there bool, err error) {
	p := picked{at: i, name: name, sel: &g.list[i]}
	if name != p.sel.Name { // Held is of that one
		p.sel = &frame.Selection{Name: name}
	}
	if p.reader, p.err = g.service.Store.Open(ctx, name); errors.Is(p.err, store.ErrNotFound) {
		return false, nil
	}
	return true, g.add(p)
}

// add keeps what was picked. It takes over the reader, even if it fails.
func (g *get) add(p picked) error {
	if len(g.all) >= pinned {
		if p.reader != nil { // descriptors and mappings are few
			p.was = p.reader.Info()
			p.reader.Release()
			p.reader = nil
		}
		p.kept = int64(pickedBytes + len(p.name))
		if !g.memory.Take(p.kept) {
			return failures.TryLater(reason.Memory, "memory: not enough to keep what this pull selects; select less, or try again later")
		}
	}
	g.all = append(g.all, p)
	return nil
}

// release frees what is kept of p.
func (g *get) release(p *picked) {
	if p.reader != nil {
		p.reader.Release()
	}
	g.memory.Release(p.kept)
}

// find opens a tensor of the store, or that of a source.
func (s *Service) find(ctx context.Context, sel *frame.Selection) (r store.Reader, err error) {
	if !sel.Source && s.Store == nil {
		return nil, ErrNoStore
	}
	if !sel.Source {
		return s.Store.Open(ctx, sel.Name)
	}
	src, ok := s.Sources.Lookup(sel.Name)
	hidden := s.May(ctx, "generate", sel.Name)
	if hidden != nil && !errors.Is(hidden, store.ErrNotFound) {
		return nil, hidden
	}
	if !ok || hidden != nil {
		return nil, fmt.Errorf("%w: no source %q", store.ErrNotFound, sel.Name)
	}
	err = s.protect(func() (err error) {
		r, err = src(ctx, sel.Params)
		return err
	})
	return r, err
}

// reopen opens a tensor when it is its turn.
func (g *get) reopen(p *picked) (r store.Reader, err error) {
	if r, err = g.service.find(g.ctx, p.sel); err != nil || p.sel.Source {
		return r, err
	}
	if now := r.Info(); !now.Stored.Equal(p.was.Stored) || !p.was.Digest.IsZero() && now.Digest != p.was.Digest {
		r.Release()
		return nil, frame.Because(reason.TensorReplaced, "tensor %q was replaced since the pull began; pull again", p.name)
	}
	return r, nil
}

// sendOne sends one tensor and its summary. An error ends the call.
func (g *get) sendOne(p *picked) error {
	sum := frame.Summary{Tensor: tensor.NewID(), Name: p.name}
	r, err := p.reader, p.err
	p.reader = nil
	if r == nil && err == nil {
		r, err = g.reopen(p)
	}
	var state *progress
	if err == nil {
		defer r.Release()
		info := r.Info()
		var geo tensor.Geometry
		if geo, err = session.Geometry(info.Desc, g.chunk, g.chunk); err == nil {
			sum.SizeBytes = uint64(geo.Size)
			state = g.service.log.tensor(g.record, sum.Tensor, p.name, sum.SizeBytes)
			sum.Durable = info.Durable
			err = g.until(func(m *stream.Machine, now stream.Instant) bool { // large ones go one after the other
				if g.bytes > 0 && g.bytes+geo.Size > max(feedBytes, m.Ahead(now)) {
					return false
				}
				g.bytes += geo.Size
				g.sizes[sum.Tensor] = geo.Size
				return true
			})
			if err != nil {
				return err
			}
			sum.Digest, err = g.feed(r, p.sel, frame.Desc{Tensor: sum.Tensor, Desc: info.Desc, ChunkBytes: uint32(geo.ChunkBytes), Call: g.id, Name: p.name, Metadata: info.Metadata}, state)
		}
		if d, ok := r.(store.DigestKeeper); ok && err == nil && info.Digest.IsZero() {
			d.Digested(sum.Digest) // so that the next get need not hash it again
		}
	}
	if g.ctx.Err() != nil {
		return context.Cause(g.ctx)
	}
	if state == nil {
		state = g.service.log.tensor(g.record, sum.Tensor, p.name, 0)
	}
	if err != nil {
		if source, ok := errors.AsType[*session.SourceError](err); ok {
			err = source.Err
		}
		if errors.Is(err, stream.ErrClosed) {
			g.session.Do(func(*stream.Machine, stream.Instant) { err = cmp.Or(g.lost[sum.Tensor], err) })
		}
		sum = g.failed(sum, err)
	}
	g.session.Do(func(m *stream.Machine, now stream.Instant) { g.summarize(m, now, state, sum) })
	return nil
}

// feed sends a tensor's bytes.
func (g *get) feed(r store.Reader, sel *frame.Selection, d frame.Desc, state *progress) (codec.Digest, error) {
	info := r.Info()
	f := session.Feed{
		Session: g.session, Digest: info.Digest, Pieces: g.pieces,
		View: func(off, n int64) ([]byte, interface{ Release() }, error) { return r.View(g.ctx, off, n) },
		Offered: func(n int64) {
			state.bytes.Add(n)
			g.record.bytes.Add(n)
		},
	}
	if h := sel.HeldDigest; len(h) == 0 || info.Digest.IsZero() || codec.Digest(h) == info.Digest {
		f.Held = sel.Held
	}
	return f.Run(g.ctx, d)
}
