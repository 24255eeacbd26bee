package stream

import (
	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	kib    = 1 << 10
	mib    = 1 << 20
	second = Instant(1e9)

	millisecond = second / 1000
)

const (
	// retainedBytes is how much a server retains, for all calls of a session, of what they
	// contain: names, params, metadata, of open calls and of those whose done is not sent.
	// It is in addition to tensorBytes for each tensor that may be open.
	retainedBytes = 1 * mib
	// tensorBytes is what is retained for one incoming tensor, except its names and
	// metadata, without charging a budget: tensorState and the chunk table.
	tensorBytes = tensorState + frame.AllowanceChunks*assembler.ChunkOverhead
	tensorState = 1 * kib
	// bindingBytes and entryBytes are what an input of a call takes in addition to its
	// port, and an entry of params or metadata in addition to its text.
	bindingBytes = 32
	entryBytes   = 96
	// frameParts and frameBytes limit the control parts put into one frame. The receiver
	// accepts 64 KiB, so one part more than counted always fits.
	frameParts = 64
	frameBytes = 24 * kib
	// heldCalls times the limit of open calls is the maximum number of all calls, including those
	// whose results wait for acknowledgement: those of a frame that arrives before its
	// acknowledgements, and as many again.
	heldCalls = 4
	// smallRun is how many chunks of small tensors may be sent before a large one gets a
	// turn, so that a flood of small calls does not stop it.
	smallRun = 8
	// pendingControl limits the answers that wait because the peer does not read, and
	// pendingBytes their texts.
	pendingControl = 2048
	// summaryBytes is what a summary takes in a frame in addition to its texts.
	summaryBytes = 96
	// selectionBytes and rangeBytes are what is retained for a selection in addition to its
	// texts, and for a held range.
	selectionBytes = 1 * kib
	rangeBytes     = 16
	// answerBytes is what an answer takes in addition to its text.
	answerBytes  = 400
	pendingBytes = 512 * kib
	// retainedQueue is the capacity up to which an empty queue or map is kept, and
	// retainedEvents the same for the events.
	retainedQueue  = 64
	retainedEvents = 32
	// ackShare: an acknowledgement is due when 1/ackShare of what the sender can retain has
	// arrived.
	ackShare = 4
	// lazyAck is how long an acknowledgement or a credit that nobody waits for may be
	// delayed, to be sent along with another frame.
	lazyAck = 20 * millisecond
	// laneRetain is how many chunks a sender with lanes wants to have acknowledged
	// together. When a lane breaks, at most that many are sent again, in addition to those
	// in flight.
	laneRetain = 64
	// laneStall, plus the same for each MiB of a chunk, is how long a lane may take for an
	// acknowledgement that is due within lazyAck. A route that lost chunks takes longer; a
	// busy machine or a line of 1 Mbit/s does not.
	laneStall = 5 * second
	// tickEvery is how often the slow timers are checked at least while calls are open.
	tickEvery = 1 * second
	// lateFrames is how long a session without calls still expects late frames of ended
	// calls; then it forgets those calls.
	lateFrames = 10 * second
)

// Limits are the limits of one session. GetServiceInfo shows each of them. Zero values mean
// those of DefaultLimits.
type Limits struct {
	ChunkBytes     uint32  // largest chunk accepted, bytes, at most ChunkBytesCeiling
	AllowanceBytes uint32  // payload accepted without credit, bytes, at most AllowanceCeiling
	TensorBytes    int64   // largest tensor accepted, bytes
	OpenTensors    int     // open incoming tensors
	OpenCalls      int     // open calls
	FirstFrame     Instant // until the peer's hello
	ChunkIdle      Instant // without a chunk although there is credit, or without reading what is ready
	InputIdle      Instant // the same while the peer says that it is waiting itself; at least ChunkIdle
	SessionIdle    Instant // without a call
}

// DefaultLimits returns the default limits of a session.
func DefaultLimits() Limits {
	return Limits{
		ChunkBytes: 1 * mib, AllowanceBytes: 1 * mib, TensorBytes: 16 << 30,
		OpenTensors: 64, OpenCalls: 64,
		FirstFrame: 10 * second, ChunkIdle: 30 * second, InputIdle: 3600 * second, SessionIdle: 600 * second,
	}
}

// WithDefaults returns the limits with zero fields set to their defaults and all fields
// reduced to their ceilings.
func (l Limits) WithDefaults() Limits {
	d := DefaultLimits()
	set(&l.ChunkBytes, d.ChunkBytes, frame.ChunkBytesCeiling)
	set(&l.AllowanceBytes, d.AllowanceBytes, frame.AllowanceCeiling)
	set(&l.TensorBytes, d.TensorBytes, 1<<62)
	set(&l.OpenTensors, d.OpenTensors, 1<<16)
	set(&l.OpenCalls, d.OpenCalls, 1<<16)
	set(&l.FirstFrame, d.FirstFrame, 1<<62)
	set(&l.ChunkIdle, d.ChunkIdle, 1<<62)
	set(&l.InputIdle, d.InputIdle, 1<<62)
	l.InputIdle = max(l.InputIdle, l.ChunkIdle)
	set(&l.SessionIdle, d.SessionIdle, 1<<62)
	return l
}

// ChunkIdleMillis returns ChunkIdle as a hello has it.
func (l Limits) ChunkIdleMillis() uint32 {
	return uint32(min(max(l.ChunkIdle/millisecond, 1), 1<<32-1))
}

func set[T uint32 | int | int64 | Instant](v *T, def, most T) {
	if *v <= 0 {
		*v = def
	}
	*v = min(*v, most)
}

// Instant is a time in nanoseconds since a fixed point that the caller chooses.
type Instant int64

// retainedBy returns how many bytes are retained for a call.
func retainedBy(c *frame.Call) int {
	n := len(c.Model) + frame.SizeOf(c.Params, entryBytes)
	for _, b := range c.Inputs {
		n += bindingBytes + len(b.Port)
	}
	if c.Get != nil {
		for _, s := range c.Get.Selections {
			n += selectionBytes + len(s.Name) + rangeBytes*len(s.Held) + frame.SizeOf(s.Params, entryBytes)
		}
	}
	return n
}

// retainedByDesc returns how many bytes are retained for a tensor with this geometry.
func retainedByDesc(p *frame.Desc, geo tensor.Geometry) int {
	n := tensorState + len(p.Port) + len(p.Name) + frame.SizeOf(p.Metadata, entryBytes)
	if !p.OnAllowance { // otherwise, and beyond that number, the budget is charged
		n += int(min(geo.Count(), frame.AllowanceChunks)) * assembler.ChunkOverhead
	}
	return n
}
