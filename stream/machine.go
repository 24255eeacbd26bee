package stream

import (
	"fmt"
	"slices"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/lifecycle"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// Types of package terms, which every user of a Machine needs.
type (
	// Config configures one side of a session.
	Config = terms.Config
	// Limits are the limits of one session.
	Limits = terms.Limits
	// Instant is a time in nanoseconds since a fixed point that the caller chooses.
	Instant = terms.Instant
	// Stats counts what a machine has done.
	Stats = terms.Stats
	// Status is the state of a machine.
	Status = terms.Status
)

// Machine is one side of a session. It belongs to one goroutine at a time.
type Machine struct {
	shared
	calls calls
	in    receiver
	out   sender

	began                Instant
	helloSent, helloSeen bool
	drain                *frame.Drain // to be sent
	code                 codec.Codec  // codec of the chunks sent
	waits                bool         // client: the peer must be told that this side waits
	alive                Instant      // when the peer last said that it waits
	err                  error        // why the session ended
}

// New returns a machine whose time starts at now.
func New(cfg Config, now Instant) *Machine {
	cfg.SetDefaults()
	m := &Machine{shared: shared{cfg: cfg, peer: frame.Hello{MaxChunkBytes: 1, MaxOpenTensors: 1}, lastUse: now}, began: now}
	m.out = sender{shared: &m.shared, tensors: make(map[tensor.ID]*out)}
	m.in = receiver{shared: &m.shared, tensors: make(map[tensor.ID]*in)}
	m.in.Terms = &m.cfg
	m.in.free = func(done func(filled bool), filled bool) {
		if done != nil {
			m.tell(Event{done: done, filled: filled})
		}
	}
	m.calls = calls{shared: &m.shared, in: &m.in, out: &m.out, moves: lifecycle.Client, open: make(map[tensor.ID]*call)}
	if m.cfg.Server {
		m.calls.moves = lifecycle.Server
	}
	return m
}

// Status returns the state of the machine.
func (m *Machine) Status() Status {
	return Status{
		Server: m.cfg.Server, Session: m.cfg.Session, Open: m.helloSeen && !m.shut, Draining: m.draining || m.drained,
		Checksum: m.cfg.Check, Codec: m.code, PeerChunkBytes: int64(min(m.peer.MaxChunkBytes, m.cfg.Limits.ChunkBytes)),
		PeerChunkIdle: Instant(m.peer.ChunkIdleMillis) * terms.Millisecond, PeerStores: m.peer.Stores, PeerSequences: m.peer.Sequences, PeerTensors: int(m.peer.MaxOpenTensors),
		Calls: len(m.calls.open), Err: m.err, Stats: m.stats,
	}
}

// Retained returns how many bytes are kept of what the peer has said about calls (names,
// params, metadata and chunk tables) and for answers waiting to be sent to it.
func (m *Machine) Retained() int {
	return m.retained + m.waiting + (len(m.failures)+len(m.calls.answers))*answerBytes
}

// OpenCall (client) opens a call. Its inputs are announced by OpenTensor, with the IDs that
// c names. The machine copies c's inputs and shares its Params.
func (m *Machine) OpenCall(now Instant, c frame.Call) error {
	switch {
	case m.shut || m.err != nil || m.peerDone:
		return ErrClosed
	case m.draining || m.drained:
		return ErrDraining
	case m.calls.open[c.ID] != nil || m.tombstones.Has(c.ID):
		return fmt.Errorf("stream: call %s was opened before; use a new id", c.ID)
	}
	// What the wire cannot carry would end the session, and with it every other call.
	if problem := c.Check(); problem != "" {
		return fmt.Errorf("stream: %s", problem)
	}
	k := &call{part: c}
	k.part.Inputs = slices.Clone(c.Inputs)
	if c.Get != nil {
		k.further = c.Get.Parts()
	}
	m.calls.add(k, now)
	m.calls.opens = append(m.calls.opens, k)
	return nil
}

// Finish decides how a call ends. The first decision stands, except that a call may still
// fail while a done with OK waits behind its chunks. On a server, done is sent once every
// chunk of the results has been sent, or at once if the code is not OK; OK has no effect
// before EventReady. On a client, a code other than OK cancels the call: the server is
// told, and the call's memory is returned without waiting for the answer.
func (m *Machine) Finish(d frame.Done) {
	k := m.calls.open[d.Call]
	switch {
	case k == nil:
	case m.cfg.Server:
		if d.Code != frame.OK {
			d.Message, d.Outputs = frame.Clip(d.Message, frame.TextBytes), nil
		}
		m.calls.end(k, lifecycle.EndOf(d.Code), d)
	case d.Code != frame.OK:
		m.calls.end(k, lifecycle.GivenUp, frame.Done{Code: d.Code, Message: d.Message, Reason: d.Reason})
	}
}

// FailTensor gives up an incoming tensor and its call, for a reason of the caller's.
func (m *Machine) FailTensor(id tensor.ID, code frame.Code, text string) {
	if t := m.in.tensors[id]; t != nil {
		m.fail(&t.Desc, t.call, &frame.Error{Code: code, Text: text})
	}
}

// PeerWaits records that the peer has said in another way that it waits.
func (m *Machine) PeerWaits(now Instant) { m.alive = now }

// Waits makes the machine tell the peer that this side is alive and waiting: for its own
// input, for the consumer of its output, or (server) for a frame that comes slowly.
func (m *Machine) Waits() { m.waits = true }

// Drain announces that this side opens and accepts nothing new.
func (m *Machine) Drain(reason string) {
	if !m.draining && !m.shut {
		m.draining = true
		m.drain = &frame.Drain{Reason: reason}
	}
}

// PeerDone records that the peer has sent its last frame. On a server, calls with
// incomplete inputs fail, and results that have been sent are no longer waited for: their
// acknowledgements cannot arrive. On a client the session is over.
func (m *Machine) PeerDone(now Instant) {
	m.peerDone = true
	m.SetLanes(now, 0, 0) // its acknowledgements cannot arrive
	m.LoseLane(0)
	for _, k := range m.calls.inOrder() {
		if !m.cfg.Server {
			m.calls.giveUp(k, frame.Unavailable, "the server ended the session")
			continue
		}
		for _, t := range slices.Clone(k.outs) {
			t.Chunks.AckSent()
			m.out.settle(t)
		}
		if k.part.Put != nil && k.ended {
			for _, t := range slices.Clone(k.ins) {
				if !t.Asm.Whole() {
					m.fail(&t.Desc, k, frame.Errorf(frame.InvalidArgument, "tensor %s: the stream ended after %d of %d bytes; send all chunks first", t.Desc.Tensor, min(int64(t.Asm.Held())*t.Geo.ChunkBytes, t.Geo.Size), t.Geo.Size))
				}
			}
		} else if k.missing > 0 || k.part.Put != nil || slices.ContainsFunc(k.ins, func(t *in) bool { return !t.Asm.Whole() }) {
			m.calls.giveUp(k, frame.InvalidArgument, "the client ended its stream before every input was complete; send all chunks first")
		}
		m.calls.advance(k)
	}
}

// Close ends the session: every call stops with code and text, every incoming tensor
// without an open claim is dropped, and nothing more is sent. Open claims must still be
// committed.
func (m *Machine) Close(code frame.Code, text string) {
	if m.shut {
		return
	}
	m.shut = true
	for _, k := range m.calls.inOrder() {
		m.calls.end(k, lifecycle.SessionOver, frame.Done{Code: code, Message: text})
	}
	m.calls.answers, m.out.summaries, m.failures, m.waiting = nil, nil, nil, 0
}

// fail gives up a tensor and, unless that is a put or a get, its call. A tensor of a put or
// a get is ended by its holder (server), or lost to it (client).
func (m *Machine) fail(d *frame.Desc, k *call, why *frame.Error) {
	if !k.part.Stored() || !m.cfg.Server {
		m.sayFailed(d.Tensor, why)
	}
	if !k.part.Stored() {
		m.calls.end(k, lifecycle.GivenUp, frame.Done{Code: why.Code, Message: why.Text, Reason: why.Reason})
		return
	}
	if t := m.in.tensors[d.Tensor]; t != nil {
		m.in.drop(t)
	}
	m.tell(Event{Kind: EventFailed, Call: k.part.ID, Tensor: d.Tensor, Desc: d, Code: why.Code, Text: why.Text, Reason: why.Reason})
	m.calls.advance(k)
}

func (m *Machine) violate(code frame.Code, format string, args ...any) error {
	if m.err == nil {
		m.err = frame.Errorf(code, format, args...)
	}
	return m.err
}
