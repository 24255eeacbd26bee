package storing

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// ErrNoStore is returned for requests that need a store, on a server without one.
var ErrNoStore = frame.Because(reason.NoStore, "this server has no store; start one with --store")

// put is a client's upload into the store. Each tensor that is open has a goroutine, which
// takes the next one after it, and ends with the call.
type put struct {
	task
	all   bool
	slots chan struct{}  // holds a token for each running commit
	next  chan *incoming // to a worker that waits

	// Guarded by the session's lock.
	tensors map[tensor.ID]*incoming
	open    int // tensors without a Summary
	ended   bool
	summed  bool // every tensor has a Summary
	set     []store.Writer
}

// incoming is one tensor on its way into the store.
type incoming struct {
	put     *put
	desc    frame.Desc
	name    string // as the peer sent it
	state   *progress
	ctx     context.Context
	cancel  context.CancelCauseFunc
	news    session.News
	landing session.Landing
	memory  *slab.Account // for its chunk table, and for memory on its way into the store
	table   int64         // bytes of the chunk table that are charged
	evicted []store.Info

	mu     sync.Mutex
	writer store.Writer // nil before it begins and after its end; guarded by mu
}

// Event implements serving.Task.
func (p *put) Event(m *stream.Machine, now stream.Instant, e stream.Event) {
	in := p.tensors[e.Tensor]
	switch e.Kind {
	case stream.EventTensor:
		p.announced(m, now, e.Desc)
	case stream.EventChunk:
		in.state.bytes.Add(e.N)
		p.record.bytes.Add(e.N)
	case stream.EventWhole:
		in.news.Tell()
	case stream.EventFailed:
		err := e.Why()
		if in != nil {
			in.cancel(err)
			return
		}
		p.open++ // it broke a rule before it began
		name := ""
		if store.CheckName(e.Desc.Name) == nil {
			name = e.Desc.Name
		}
		state := p.service.log.tensor(p.record, e.Tensor, name, e.Desc.SizeBytes)
		p.endTensor(m, now, state, p.failed(frame.Summary{Tensor: e.Tensor, Name: name, SizeBytes: e.Desc.SizeBytes}, err))
	case stream.EventEnd:
		p.ended = true
		p.finishIfDone(m)
	case stream.EventStop:
		p.cancel(e.Why())
	case stream.EventClosed:
		p.closed(e)
		if p.all && !p.summed { // what is ready of the set is not stored
			p.service.Go(func() {
				p.abort()
				p.memory.Close()
			})
		}
	}
}

// announced begins to receive a tensor.
func (p *put) announced(m *stream.Machine, now stream.Instant, d *frame.Desc) {
	p.open++
	in := &incoming{put: p, desc: *d, news: make(session.News, 1), memory: p.service.Budget.Account(p.session.Holder)}
	in.ctx, in.cancel = context.WithCancelCause(p.ctx)
	if store.CheckName(d.Name) != nil { // it may have 64 KiB
		in.desc.Name = ""
	}
	in.state = p.service.log.tensor(p.record, d.Tensor, in.desc.Name, d.SizeBytes)
	geo := tensor.Geometry{Size: int64(d.SizeBytes), ChunkBytes: int64(d.ChunkBytes)}
	in.table = terms.TableBytes(geo.Count())
	in.landing = session.Landing{Session: p.session, Tensor: d.Tensor, Geo: geo, Tell: in.news.Tell, Slab: in.slab}
	p.tensors[d.Tensor] = in
	if d.OnAllowance {
		mem, err := p.session.Stage(geo)
		if err != nil {
			in.cancel(err)
		} else {
			in.landing.Stage(m, now, mem)
		}
	}
	in.name = d.Name
	select {
	case p.next <- in:
	default: // every worker is busy
		// Until the call ends: a goroutine for each tensor would grow its stack each time.
		p.service.Go(func() {
			for {
				in.run()
				select {
				case in = <-p.next:
				case <-p.ctx.Done():
					return
				}
			}
		})
	}
}

// WriteViews copies views to byte off of the tensor, of which in is the Place, and the
// assembler.Placer if the call comes one way. A store's code may panic.
func (in *incoming) WriteViews(off int64, views [][]byte) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.writer == nil {
		return stream.ErrClosed
	}
	return in.put.service.protect(func() error { return in.writer.WriteViews(in.ctx, off, views) })
}

// takeWriter returns the writer, which nobody uses any more, nil if there is none.
func (in *incoming) takeWriter() store.Writer {
	in.mu.Lock()
	defer in.mu.Unlock()
	writer := in.writer
	in.writer = nil
	return writer
}

// slab returns memory of n bytes. It waits for the first.
func (in *incoming) slab(n int) (*slab.Slab, error) {
	s, size := in.put.service, slab.SizeOf(int64(n))
	if !in.memory.Take(size) {
		if in.memory.Held() > in.table {
			return nil, slab.ErrBudget
		}
		defer s.Patience(in.cancel, failures.TryLater(reason.Memory, "memory: none became free in time for a part of the tensor; try again later")).Stop()
		if err := in.memory.Wait(in.ctx, size); err != nil {
			return nil, cmp.Or(context.Cause(in.ctx), err)
		}
	}
	return in.memory.Get(s.Pool, n, size)
}

// run brings the tensor into the store, and ends it.
func (in *incoming) run() {
	p := in.put
	var info store.Info
	err := p.service.protect(func() (err error) {
		info, err = in.store()
		return err
	})
	sum := frame.Summary{Tensor: in.desc.Tensor, Name: in.desc.Name, SizeBytes: in.desc.SizeBytes}
	for _, gone := range in.evicted {
		size, _ := gone.Bytes() // it was stored
		sum.Evicted, sum.EvictedBytes = sum.Evicted+1, sum.EvictedBytes+uint64(size)
	}
	if err != nil {
		sum = p.failed(sum, err)
	} else {
		sum.Digest, sum.Durable = info.Digest, info.Durable
	}
	var kept store.Writer // of a set
	p.session.Do(func(m *stream.Machine, now stream.Instant) {
		if err == nil && p.all && p.ctx.Err() != nil { // the set has failed while this tensor became ready
			sum = p.failed(sum, context.Cause(p.ctx))
		} else if err == nil && p.all {
			kept = in.takeWriter()
			p.set = append(p.set, kept)
		}
		delete(p.tensors, in.desc.Tensor)
		p.endTensor(m, now, in.state, sum)
	})
	for !in.landing.Home() { // until no chunk is being written to it
		<-in.news
	}
	if w := in.takeWriter(); w != nil { // it failed, or is not of a set
		p.service.discard(w)
	}
	in.memory.Close()
	if kept == nil { // else it ends with the set
		in.cancel(nil)
	}
}

// store reserves room for the tensor, receives it, and commits it unless it is part of a
// set.
func (in *incoming) store() (info store.Info, err error) {
	p := in.put
	s := p.service
	if err := store.CheckNew(in.name); err != nil {
		return info, err
	}
	if err := s.TakeTable(in.memory, in.table); err != nil {
		return info, err
	}
	w, evicted, err := s.create(in.ctx, in.cancel, in.name, in.desc.Desc, in.desc.Metadata)
	if err != nil {
		return info, err
	}
	in.evicted = evicted
	in.mu.Lock()
	in.writer = w
	in.mu.Unlock()
	if err := in.receive(w); err != nil {
		return info, err
	}
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	case <-in.ctx.Done():
		return info, context.Cause(in.ctx)
	}
	if p.all {
		return s.Store.(store.Sets).Ready(in.ctx, w)
	}
	return w.Commit(in.ctx)
}

// create reserves room for a tensor. If that has to wait for too long, it calls cancel, which
// must cancel ctx.
func (s *Service) create(ctx context.Context, cancel context.CancelCauseFunc, name string, d tensor.Desc, metadata map[string]string) (w store.Writer, evicted []store.Info, err error) {
	late := s.Patience(cancel, context.DeadlineExceeded)
	w, err = s.Store.Create(ctx, name, d, metadata)
	late.Stop()
	if err != nil {
		return nil, nil, cmp.Or(context.Cause(ctx), err)
	}
	if e, may := w.(store.Evicter); may {
		evicted = e.Evicted()
	}
	for _, gone := range evicted {
		s.Evicted.Add(1)
		s.Log.Debug("tensor evicted", slog.String("tensor", gone.Name), slog.Time("stored", gone.Stored), slog.String("for", name))
		s.evictions.Log(s.Log, slog.LevelWarn, "tensors evicted: the store is full", "evicted", slog.String("last", gone.Name))
	}
	return w, evicted, nil
}

// receive waits until every byte is written.
func (in *incoming) receive(w store.Writer) error {
	l := &in.landing
	l.To = in
	if in.put.session.OneWay() {
		in.put.session.Do(func(m *stream.Machine, now stream.Instant) { _ = m.Place(now, in.desc.Tensor, in) })
		return in.news.Wait(in.ctx) // until it is whole: nothing else is told
	}
	if mem, ok := w.(store.InPlace); ok && !in.desc.OnAllowance {
		l.Memory = mem.Memory()
	}
	for {
		if err := l.Step(); err != nil || l.Whole() {
			return err
		}
		if err := in.news.Wait(in.ctx); err != nil {
			return err
		}
	}
}

// endTensor ends a tensor, and with it the set that it fails; the session is locked.
func (p *put) endTensor(m *stream.Machine, now stream.Instant, state *progress, sum frame.Summary) {
	p.summarize(m, now, state, sum)
	p.open--
	if p.all && sum.Code == frame.OK && p.ctx.Err() == nil { // otherwise abort has released what was charged
		if !p.memory.Take(int64(pushedBytes + len(sum.Name))) {
			sum.Reason, sum.Code, sum.Message = reason.Memory, frame.ResourceExhausted, "memory: not enough for the names of so many tensors; put fewer at a time"
		}
		if len(p.set) > store.MaxSet {
			sum.Code, sum.Message = frame.ResourceExhausted, fmt.Sprintf("the set has more than %d tensors; put fewer at a time", store.MaxSet)
		}
	}
	if p.all && sum.Code != frame.OK && !p.summed { // else a desc came after the end
		p.cancel(&frame.Error{Code: sum.Code, Text: sum.Message, Reason: sum.Reason}) // before the end, which may have come, finishes
		p.finish(m, frame.Done{Code: sum.Code, Message: "nothing of the set is stored: " + sum.Message, RetryAfterMillis: sum.RetryAfterMillis, Reason: sum.Reason})
		return
	}
	p.finishIfDone(m)
}

// finishIfDone ends the call when every tensor has ended; the session is locked.
func (p *put) finishIfDone(m *stream.Machine) {
	if !p.ended || p.open > 0 || p.summed || p.ctx.Err() != nil {
		return
	}
	p.summed = true
	if p.all {
		p.service.Go(p.commit)
		return
	}
	p.finish(m, frame.Done{})
}

// commit stores the set.
func (p *put) commit() {
	var stored []store.Info
	err := p.service.protect(func() (err error) {
		stored, err = p.service.Store.(store.Sets).CommitAll(p.ctx, p.set)
		return err
	})
	var d frame.Done
	if err != nil {
		p.abort() // what is stored stays
		what := "nothing of the set is stored: "
		if len(stored) > 0 {
			what = "the set is stored, but may not survive a crash of the server: "
		}
		sum := p.failed(frame.Summary{}, err)
		d = frame.Done{Code: sum.Code, Message: what + sum.Message, RetryAfterMillis: sum.RetryAfterMillis, Reason: sum.Reason}
	}
	if err == nil || len(stored) > 0 {
		p.service.log.stored(p.record)
	}
	p.memory.Close()
	p.session.Do(func(m *stream.Machine, _ stream.Instant) { p.finish(m, d) })
}

// abort discards what is not stored of the set.
func (p *put) abort() {
	for _, w := range p.set {
		p.service.discard(w)
	}
}

// discard ends a writer: a no-op if it was committed.
func (s *Service) discard(w store.Writer) {
	_ = s.protect(func() error { w.Abort(); return nil })
}
