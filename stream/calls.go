package stream

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/lifecycle"
	"github.com/tensorferry/tensorferry/tensor"
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
	retained  int    // server: bytes that the open calls retain

	opens   []*call     // client: to be sent
	goOn    []*call     // client: gets with further parts to be sent
	cancels []tensor.ID // to be sent
	answers []*call     // server: calls whose done is to be sent
}

type call struct {
	part     frame.Call
	number   uint64 // order of opening
	state    lifecycle.State
	done     frame.Done // once its end is decided
	missing  int        // server: inputs not announced yet
	retained int        // server: bytes, included in calls.retained
	claims   int        // open claims on its incoming tensors
	ins      []*in
	outs     []*out
	began    Instant
	storing
}

// timeout returns the time limit of the call; 0 means none. The engine's side enforces it,
// once the inputs are announced.
func (k *call) timeout() Instant { return Instant(min(k.part.TimeoutMillis, 1<<40)) * millisecond }

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
	c.open[k.part.ID] = k
	c.most = max(c.most, len(c.open))
	c.undecided++
	if !k.stored() {
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
	for _, t := range slices.Clone(k.outs) {
		c.out.drop(t)
	}
	k.outs = nil
	c.in.dropAll(k)
	// On a server nobody works for a call before it runs; on a client a done is enough.
	if from < lifecycle.DoneSent && (c.cfg.Server && from > lifecycle.Opening || !c.cfg.Server && on >= lifecycle.GivenUp) {
		c.tell(Event{Kind: EventStop, Call: k.part.ID, Code: k.done.Code, Text: k.done.Message})
	}
	switch {
	case c.cfg.Server:
	case from == lifecycle.Opening:
		c.opens = slices.DeleteFunc(c.opens, func(q *call) bool { return q == k })
	default:
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
		if !slices.ContainsFunc(k.outs, func(t *out) bool { return !t.dead && !(c.peerDone && t.chunks.Sent()) }) {
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
		return "", k.unsent > 0 || slices.ContainsFunc(k.outs, func(t *out) bool { return !t.dead && !t.chunks.Sent() })
	}
	if k.stored() {
		return "", slices.ContainsFunc(k.ins, func(t *in) bool { return t.summed && !t.asm.Whole() })
	}
	for _, b := range k.done.Outputs {
		i := slices.IndexFunc(k.ins, func(t *in) bool { return t.desc.Tensor == b.Tensor })
		switch {
		case i < 0:
			lost = fmt.Sprintf("the server named result %q and never announced it", b.Port)
		case k.ins[i].asm.Whole():
		case k.ins[i].dead:
			lost = fmt.Sprintf("result %q was given up", b.Port)
		default:
			waits = true
		}
	}
	for _, t := range k.ins {
		if lost == "" && !slices.Contains(k.done.Outputs, frame.Binding{Port: t.desc.Port, Tensor: t.desc.Tensor}) {
			lost = fmt.Sprintf("the server announced result %q, but its done does not name it", t.desc.Port)
		}
	}
	return lost, waits
}

func (c *calls) close(k *call) {
	delete(c.open, k.part.ID)
	c.tombstones.Add(k.part.ID)
	c.retained -= k.retained
	if len(c.open) == 0 && c.most > retainedQueue { // a map never shrinks
		c.open, c.in.tensors, c.out.tensors = make(map[tensor.ID]*call), make(map[tensor.ID]*in), make(map[tensor.ID]*out)
		c.most = 0
	}
	e := Event{Kind: EventClosed, Call: k.part.ID, Part: &k.part, Code: k.done.Code, Text: k.done.Message}
	if !c.cfg.Server {
		e.Done = &k.done
	}
	c.tell(e)
}

// accept (server) accepts a call that the client opens, or refuses it.
func (c *calls) accept(now Instant, p *frame.Call) {
	k := &call{part: *p, missing: len(p.Inputs)}
	c.add(k, now)
	if d := c.refusal(p); d != nil {
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
	c.retain(k, retainedBy(p))
	c.advance(k)
}

// further (server) adds a further part to a get.
func (c *calls) further(now Instant, k *call, p *frame.Call) {
	n := retainedBy(p)
	if n > c.room() {
		c.giveUp(k, frame.ResourceExhausted, c.full("get", n))
		return
	}
	k.last = now
	k.part.Get.Append(p.Get)
	c.retain(k, n)
	c.advance(k)
}

// refusal returns why a call that was just added is refused; nil if it is accepted.
func (c *calls) refusal(p *frame.Call) *frame.Done {
	no := func(code frame.Code, retry uint32, format string, args ...any) *frame.Done {
		return &frame.Done{Code: code, RetryAfterMillis: retry, Message: fmt.Sprintf(format, args...)}
	}
	problem := cmp.Or(frame.CheckName("model", p.Model), frame.CheckEntries("params", p.Params), p.CheckInputs())
	switch n := retainedBy(p); {
	case c.draining:
		return no(frame.Unavailable, 1000, "server is draining; use another one, or try again later")
	case c.undecided > c.cfg.Limits.OpenCalls:
		return no(frame.ResourceExhausted, 100, "open calls: the limit of a session is %d; wait for one to end", c.cfg.Limits.OpenCalls)
	case len(c.open) > heldCalls*c.cfg.Limits.OpenCalls:
		return no(frame.ResourceExhausted, 100, "results of %d calls wait; acknowledge them", len(c.open)-1)
	case len(p.Inputs) > c.cfg.Limits.OpenTensors:
		return no(frame.ResourceExhausted, 0, "call has %d inputs; open tensors are limited to %d", len(p.Inputs), c.cfg.Limits.OpenTensors)
	case p.Stored() && !c.cfg.Stores:
		return no(frame.FailedPrecondition, 0, "calls of this session are runs of models; use PushTensors or PullTensors")
	case p.Put != nil && p.Get != nil || p.Stored() && (p.Model != "" || len(p.Inputs) > 0):
		return no(frame.InvalidArgument, 0, "a call is either a put, a get or a run of a model")
	case !p.Stored() && p.Model == "":
		return no(frame.InvalidArgument, 0, "call names no model")
	case problem != "":
		return no(frame.InvalidArgument, 0, "%s", problem)
	case n > c.room():
		return no(frame.ResourceExhausted, 100, "%s", c.full("call", n))
	}
	for _, b := range p.Inputs {
		if c.used(b.Tensor) {
			return no(frame.InvalidArgument, 0, "tensor %s was used before; each input needs a new id", b.Tensor)
		}
	}
	return nil
}

// expects (server) checks a desc against its call.
func (c *calls) expects(k *call, p *frame.Desc, geo tensor.Geometry) *frame.Error {
	n, name := retainedByDesc(p, geo), "tensor "+p.Tensor.String()+": "
	if k.part.Put != nil && k.ended {
		return frame.Errorf(frame.InvalidArgument, "%sannounced after the end of its put", name)
	} else if k.part.Put != nil && n <= c.room() {
		return nil
	}
	i := slices.IndexFunc(k.part.Inputs, func(b frame.Binding) bool { return b.Tensor == p.Tensor })
	switch {
	case i < 0:
		return frame.Errorf(frame.InvalidArgument, "%sits call does not list it as an input", name)
	case k.part.Inputs[i].Port != p.Port:
		return frame.Errorf(frame.InvalidArgument, "%sport is %q, the call says %q", name, p.Port, k.part.Inputs[i].Port)
	case n > c.room():
		return frame.Errorf(frame.ResourceExhausted, "%s%s", name, c.full("desc", n))
	}
	return nil
}

// retain counts bytes that a call retains until it is closed.
func (c *calls) retain(k *call, n int) {
	k.retained += n
	c.retained += n
}

// room (server) returns how many more bytes calls may retain.
func (c *calls) room() int {
	return retainedBytes + c.cfg.Limits.OpenTensors*tensorBytes - c.retained
}

func (c *calls) full(what string, n int) string {
	return fmt.Sprintf("%s takes %d bytes with its names, entries and chunk table; the limit of a session's calls is %d, %d are left; wait for a call to end",
		what, n, c.room()+c.retained, c.room())
}

// mayOpen (client) reports whether the next call may be sent. A call waits here while it
// would exceed what the peer keeps open.
func (c *calls) mayOpen() bool {
	return len(c.opens) > 0 && (c.inFlight == 0 || c.inFlight+c.opens[0].weight() <= int(c.peer.MaxOpenTensors))
}

func (c *calls) addOpens(p *parcel) {
	add := func(part frame.Call) {
		p.Calls = append(p.Calls, part)
		p.bytes += part.Cost()
	}
	for len(c.goOn) > 0 && p.room(len(p.Calls)) {
		k := c.goOn[0]
		if k.state == lifecycle.Running {
			add(frame.Call{ID: k.part.ID, Get: &k.further[0]})
			k.further = k.further[1:]
		}
		if k.state != lifecycle.Running || len(k.further) == 0 {
			pop(&c.goOn, 0)
		}
	}
	for p.room(len(p.Calls)) && c.mayOpen() {
		k := pop(&c.opens, 0)
		c.move(k, lifecycle.Began)
		part := k.part
		if part.Get != nil {
			part.Get = &k.further[0]
			if k.further = k.further[1:]; len(k.further) > 0 {
				c.goOn = append(c.goOn, k)
			}
		}
		add(part)
		c.out.descs = append(c.out.descs, k.outs...)
	}
}

func (c *calls) addDones(p *parcel) {
	for len(c.answers) > 0 && p.room(len(p.Dones)) && len(p.Summaries) == 0 { // which are read after dones
		k := pop(&c.answers, 0)
		p.Dones = append(p.Dones, k.done)
		p.bytes += len(k.done.Message) + 128
		c.waiting -= len(k.done.Message)
		c.move(k, lifecycle.Answered)
	}
}
