package stream

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/flow"
	"github.com/tensorferry/tensorferry/internal/lifecycle"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// calls are the calls of a session, from opening to EventClosed.
type calls struct {
	*shared
	in    *receiver
	out   *sender
	moves *lifecycle.Moves

	open      map[tensor.ID]*call
	number    uint64 // number of calls so far
	undecided int    // calls whose end is undecided

	opens   []*call     // client: to be sent; a get, until all its parts are
	cancels []tensor.ID // to be sent
	answers []*call     // server: calls whose done is to be sent
}

type call struct {
	part     frame.Call
	number   uint64 // order of opening
	state    lifecycle.State
	done     frame.Done // once its end is decided
	missing  int        // server: inputs not announced yet
	retained int        // server: bytes, included in shared.retained
	claims   int        // open claims on its incoming tensors
	ins      []*in
	outs     []*out
	began    Instant
	storing

	first struct { // of a small call; none is allocated by itself
		in  [1]*in
		out [1]*out
	}
}

// timeout returns the time limit of the call; 0 means none. The engine's side enforces it,
// once the inputs are announced.
func (k *call) timeout() Instant {
	return Instant(min(k.part.TimeoutMillis, 1<<40)) * terms.Millisecond
}

// weight (client) is how many tensors the peer counts as open for the call, at least 1.
func (k *call) weight() int { return max(1, len(k.part.Inputs), k.putting) }

// used reports whether a tensor's ID is known here.
func (c *calls) used(id tensor.ID) bool {
	return c.in.tensors[id] != nil || c.out.tensors[id] != nil || c.tombstones.Has(id)
}

// inOrder returns the open calls in the order of their opening, so that a machine is
// deterministic.
func (c *calls) inOrder() []*call {
	return slices.SortedFunc(maps.Values(c.open), func(a, b *call) int { return cmp.Compare(a.number, b.number) })
}

func (c *calls) add(k *call, now Instant) {
	if len(c.open) == 0 {
		c.ticked = now
	}
	c.lastUse = now
	c.number++
	k.number, k.began, k.last = c.number, now, now
	k.ins, k.outs = k.first.in[:0], k.first.out[:0]
	c.open[k.part.ID] = k
	c.most = max(c.most, len(c.open))
	c.undecided++
	if !k.part.Stored() {
		c.stats.CallsOpened++
	}
}

// end decides how a call ends, unless that is already decided.
func (c *calls) end(k *call, on lifecycle.Cause, d frame.Done) {
	if _, ok := c.moves.Next(k.state, on); ok && k.state < lifecycle.DoneSent {
		if k.state == lifecycle.Answering {
			c.waiting += len(d.Message) - len(k.done.Message)
		}
		d.Call = k.part.ID
		k.done = d
	}
	c.move(k, on)
}

// giveUp fails a call for a reason other than its own done.
func (c *calls) giveUp(k *call, code frame.Code, text string) {
	c.end(k, lifecycle.GivenUp, frame.Done{Code: code, Message: text})
}

// move changes the state of a call according to its side's table, and does what the new
// state requires.
func (c *calls) move(k *call, on lifecycle.Cause) {
	from := k.state
	to, ok := c.moves.Next(from, on)
	if !ok {
		return
	}
	k.state = to
	if from < lifecycle.Finishing && to >= lifecycle.Finishing {
		c.undecided--
	}
	switch to {
	case lifecycle.Running:
		if c.cfg.Server {
			c.tell(Event{Kind: EventReady, Call: k.part.ID, Part: &k.part})
		} else {
			c.inFlight += k.weight()
		}
	case lifecycle.Finishing:
		if c.cfg.Server {
			c.in.dropAll(k)
		}
	case lifecycle.Failed, lifecycle.Over:
		c.letGo(k, from, on)
	case lifecycle.Closed:
		c.close(k)
	}
	if to == lifecycle.Answering || to == lifecycle.Failed && from != lifecycle.Answering {
		c.answers = append(c.answers, k)
		c.waiting += len(k.done.Message)
	}
	c.advance(k)
}

// letGo drops a call's tensors. It reports to this side's worker, and to the server, that
// the call was given up.
func (c *calls) letGo(k *call, from lifecycle.State, on lifecycle.Cause) {
	weight := k.weight()
	for len(k.outs) > 0 {
		c.out.drop(k.outs[0])
	}
	c.in.dropAll(k)
	// On a server nobody works for a call before it runs; on a client a done is enough.
	if from < lifecycle.DoneSent && (c.cfg.Server && from > lifecycle.Opening || !c.cfg.Server && on >= lifecycle.GivenUp) {
		c.tell(Event{Kind: EventStop, Call: k.part.ID, Code: k.done.Code, Text: k.done.Message, Reason: k.done.Reason})
	}
	c.opens = slices.DeleteFunc(c.opens, func(q *call) bool { return q == k })
	if !c.cfg.Server && from > lifecycle.Opening {
		c.inFlight -= weight
		if on == lifecycle.GivenUp {
			c.cancels = append(c.cancels, k.part.ID)
		}
	}
}

// advance changes the state of a call if what its state waits for has happened.
func (c *calls) advance(k *call) {
	switch k.state {
	case lifecycle.Opening:
		if c.cfg.Server && k.missing == 0 && (k.part.Get == nil || !k.part.Get.More) {
			c.move(k, lifecycle.Began)
		}
	case lifecycle.Finishing:
		lost, waits := c.results(k)
		if lost != "" {
			c.giveUp(k, frame.DataLoss, lost) // the server need not wait for acknowledgements
		} else if !waits {
			c.move(k, lifecycle.Completed)
		}
	case lifecycle.DoneSent:
		if !slices.ContainsFunc(k.outs, func(t *out) bool { return !c.peerDone || !t.Chunks.Sent() }) {
			c.move(k, lifecycle.Acknowledged)
		}
	case lifecycle.Over:
		if k.claims == 0 {
			c.move(k, lifecycle.Released)
		}
	}
}

// results reports whether a call that succeeded is still waiting for its results to be sent
// (server) or complete (client). lost says what makes that impossible.
func (c *calls) results(k *call) (lost string, waits bool) {
	if c.cfg.Server {
		return "", k.unsent > 0 || slices.ContainsFunc(k.outs, func(t *out) bool { return !t.Chunks.Sent() })
	}
	if k.part.Stored() {
		return "", slices.ContainsFunc(k.ins, func(t *in) bool { return t.summed })
	}
	for _, b := range k.done.Outputs {
		i := slices.IndexFunc(k.ins, func(t *in) bool { return t.Desc.Tensor == b.Tensor })
		switch {
		case i < 0:
			lost = fmt.Sprintf("the server named result %q and never announced it", b.Port)
		case k.ins[i].Asm.Whole():
		case k.ins[i].Dead:
			lost = fmt.Sprintf("result %q was given up", b.Port)
		default:
			waits = true
		}
	}
	for _, t := range k.ins {
		if lost == "" && !slices.Contains(k.done.Outputs, frame.Binding{Port: t.Desc.Port, Tensor: t.Desc.Tensor}) {
			lost = fmt.Sprintf("the server announced result %q, but its done does not name it", t.Desc.Port)
		}
	}
	return lost, waits
}

func (c *calls) close(k *call) {
	delete(c.open, k.part.ID)
	c.tombstones.Add(k.part.ID)
	c.retained -= k.retained
	if len(c.open) == 0 && c.most > frame.KeptParts { // a map never shrinks
		c.open, c.in.tensors, c.out.tensors = make(map[tensor.ID]*call), make(map[tensor.ID]*in), make(map[tensor.ID]*out)
		c.most = 0
	}
	e := Event{Kind: EventClosed, Call: k.part.ID, Part: &k.part, Code: k.done.Code, Text: k.done.Message, Reason: k.done.Reason}
	if !c.cfg.Server {
		e.Done = &k.done
	}
	c.tell(e)
}

// accept (server) accepts a call that the client opens, or refuses it.
func (c *calls) accept(now Instant, p *frame.Call) {
	k := &call{part: *p, missing: len(p.Inputs)}
	c.add(k, now)
	d := c.cfg.Refuse(p, c.load())
	if i := slices.IndexFunc(p.Inputs, func(b frame.Binding) bool { return c.used(b.Tensor) }); d == nil && i >= 0 {
		d = &frame.Done{Code: frame.InvalidArgument, Message: fmt.Sprintf("tensor %s was used before; each input needs a new id", p.Inputs[i].Tensor)}
	}
	if d != nil {
		k.part = frame.Call{ID: p.ID, Put: p.Put} // do not keep the contents of a refused call
		if p.Get != nil {
			k.part.Get = new(frame.Get)
		}
		c.end(k, lifecycle.EndedBadly, *d)
		return
	}
	k.part.Inputs = slices.Clone(p.Inputs)
	if p.Get != nil {
		k.part.Get = &frame.Get{Selections: slices.Clone(p.Get.Selections), More: p.Get.More}
	}
	c.retain(k, terms.Retained.OfCall(p))
	c.advance(k)
}

// further (server) adds a further part to a get.
func (c *calls) further(now Instant, k *call, p *frame.Call) {
	n := terms.Retained.OfCall(p)
	if problem := c.cfg.Limits.Retain("get", n, c.retained); problem != "" {
		c.giveUp(k, frame.ResourceExhausted, problem)
		return
	}
	if n > 0 { // an empty part is not progress
		k.last = now
	}
	k.part.Get.Append(p.Get)
	c.retain(k, n)
	c.advance(k)
}

// retain counts bytes that a call retains until it is closed.
func (c *calls) retain(k *call, n int) {
	k.retained += n
	c.retained += n
}

// load returns what is open.
func (c *calls) load() terms.Load {
	return terms.Load{
		Draining: c.draining, Undecided: c.undecided, Calls: len(c.open),
		Tensors: c.in.Open, Allowance: c.in.Allowance, Retained: c.retained,
	}
}

// mayOpen (client) reports whether the next call may be sent. A call waits here while it
// would exceed what the peer keeps open.
func (c *calls) mayOpen() bool {
	if len(c.opens) == 0 {
		return false
	}
	k := c.opens[0]
	return k.state > lifecycle.Opening || c.inFlight == 0 || c.inFlight+k.weight() <= int(c.peer.MaxOpenTensors)
}

func (c *calls) addOpens(p *flow.Parcel) {
	for p.Room(len(p.Calls)) && c.mayOpen() {
		k := c.opens[0]
		part := k.part
		if k.state > lifecycle.Opening {
			part = frame.Call{ID: k.part.ID}
		} else {
			c.move(k, lifecycle.Began)
			c.out.descs = append(c.out.descs, k.outs...)
		}
		if k.part.Get != nil {
			part.Get = &k.further[0]
			k.further = k.further[1:]
		}
		if len(k.further) == 0 {
			flow.Pop(&c.opens, 0)
		}
		p.Calls = append(p.Calls, part)
		p.Bytes += part.Cost()
	}
}

func (c *calls) addDones(p *flow.Parcel) {
	for len(c.answers) > 0 && p.Room(len(p.Dones)) && len(p.Summaries) == 0 { // which are read after dones
		k := flow.Pop(&c.answers, 0)
		p.Dones = append(p.Dones, k.done)
		p.Bytes += len(k.done.Message) + len(k.done.Reason) + 128
		c.waiting -= len(k.done.Message)
		c.move(k, lifecycle.Answered)
	}
}
