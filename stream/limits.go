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
	// retainedBytes is what a server retains in all of what the calls of one session say:
	// names, params, metadata, of open calls and of those whose done is not sent. It
	// is on top of tensorBytes for each tensor that may be open.
	retainedBytes = 1 * mib
	// tensorBytes is what is retained for one incoming tensor but its names and metadata,
	// in no budget: tensorState, and what stands per chunk.
	tensorBytes = tensorState + frame.AllowanceChunks*assembler.ChunkOverhead
	tensorState = 1 * kib
	// bindingBytes and entryBytes are what an input of a call takes beside its port,
	// and an entry of params or metadata beside its text.
	bindingBytes = 32
	entryBytes   = 96
	// frameParts and frameBytes bound the control parts put into one frame; the
	// receiver accepts 64 KiB, so one part more than counted always fits.
	frameParts = 64
	frameBytes = 24 * kib
	// heldCalls times the open calls is how many may be there in all, those
	// included whose results wait for acknowledgement: those of a frame that comes
	// before its acknowledgements, and as many again.
	heldCalls = 4
	// smallRun is how many chunks of small tensors may go before a large one has
	// a turn, so that a flood of small calls does not stop it.
	smallRun = 8
	// pendingControl bounds answers that wait because the peer does not read, and
	// pendingBytes their texts.
	pendingControl = 2048
	// answerBytes is what an answer takes beside its text.
	answerBytes  = 400
	pendingBytes = 512 * kib
	// retainedQueue is the capacity retained of each queue and map that has become empty,
	// and retainedEvents that of the events.
	retainedQueue  = 64
	retainedEvents = 32
	// ackShare: an acknowledgement is due when this part (1/ackShare) of what the
	// sender can retain has come.
	ackShare = 4
	// lazyAck is how long an acknowledgement or a credit that nobody waits for may wait
	// for a frame to ride in.
	lazyAck = 20 * millisecond
	// laneRetain is how many chunks a sender with lanes wants acknowledged together: as
	// many go again when a lane breaks, at most, beside those on their way.
	laneRetain = 64
	// laneStall, and once more for each MiB of a chunk, is how long chunks of a lane may
	// lack an acknowledgement that is due in lazyAck: a route that lost some of them takes
	// longer, a busy machine or a line of 1 Mbit/s does not.
	laneStall = 5 * second
	// tickEvery is how often the slow timers are looked at while calls are open.
	tickEvery = 1 * second
	// lateFrames is how long a session without calls still expects frames that
	// crossed an end; then it forgets what has ended.
	lateFrames = 10 * second
)

// Limits of one session, each visible in GetServiceInfo. Zero values mean the
// defaults of DefaultLimits.
type Limits struct {
	ChunkBytes     uint32  // largest chunk accepted, bytes, to ChunkBytesCeiling
	AllowanceBytes uint32  // payload accepted without credit, bytes, to AllowanceCeiling
	TensorBytes    int64   // largest tensor accepted, bytes
	OpenTensors    int     // incoming tensors at a time
	OpenCalls      int     // calls at a time
	FirstFrame     Instant // to the peer's hello
	ChunkIdle      Instant // without a chunk although credit is unused, or without taking what is ready
	InputIdle      Instant // the same, while the peer says that it waits itself; at least ChunkIdle
	SessionIdle    Instant // without any call
}

// DefaultLimits are the limits of a session nobody configured.
func DefaultLimits() Limits {
	return Limits{
		ChunkBytes: 1 * mib, AllowanceBytes: 1 * mib, TensorBytes: 16 << 30,
		OpenTensors: 64, OpenCalls: 64,
		FirstFrame: 10 * second, ChunkIdle: 30 * second, InputIdle: 3600 * second, SessionIdle: 600 * second,
	}
}

// WithDefaults returns the limits with zero fields set, and none over its ceiling.
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

// ChunkIdleMillis is ChunkIdle as a hello tells it.
func (l Limits) ChunkIdleMillis() uint32 {
	return uint32(min(max(l.ChunkIdle/millisecond, 1), 1<<32-1))
}

func set[T uint32 | int | int64 | Instant](v *T, def, most T) {
	if *v <= 0 {
		*v = def
	}
	*v = min(*v, most)
}

// Instant is a moment in nanoseconds since a fixed point that the caller chose.
type Instant int64

// retainedBy is what is retained of a call.
func retainedBy(c *frame.Call) int {
	n := len(c.Model) + frame.SizeOf(c.Params, entryBytes)
	for _, b := range c.Inputs {
		n += bindingBytes + len(b.Port)
	}
	return n
}

// retainedByDesc is what is retained for a tensor that is cut as geo says.
func retainedByDesc(p *frame.Desc, geo tensor.Geometry) int {
	n := tensorState + len(p.Port) + len(p.Name) + frame.SizeOf(p.Metadata, entryBytes)
	if !p.OnAllowance { // else, and above that number, they are in the budget
		n += int(min(geo.Count(), frame.AllowanceChunks)) * assembler.ChunkOverhead
	}
	return n
}
