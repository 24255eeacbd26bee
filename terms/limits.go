package terms

import (
	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	// retainedBytes is how much a server retains, for all calls of a session, of what they
	// contain: names, params, metadata, of open calls and of those whose done is not sent.
	// For each tensor that may be open, there are tensorState and a table of
	// frame.AllowanceChunks besides, which charge no budget.
	retainedBytes = 1 << 20
	tensorState   = 1 << 10
)

// Retained is what is retained for the parts of a call.
var Retained = frame.Sizes{Binding: 32, Entry: 96, Selection: 1 << 10, Range: 16}

// HeldCalls times the limit of open calls is the maximum number of all calls, including those
// whose results wait for acknowledgement: those of a frame that arrives before its
// acknowledgements, and as many again.
const HeldCalls = 4

// laneStall, plus the same for each MiB of a chunk, is how long a lane may take for an
// acknowledgement that is due within lazyAck of internal/flow. A route that lost chunks takes
// longer; a busy machine or a line of 1 Mbit/s does not.
const laneStall = 5 * Second

// LeastRate is how many bytes a second a peer must send for them to count as a sign of life while
// no chunk is whole, as a line of 9.6 kbit/s does, and SlowChunk how long a client believes a
// server that says that one comes: the largest.
const (
	LeastRate = 1 << 10
	SlowChunk = frame.ChunkBytesCeiling / LeastRate * Second
)

// Instant is a time in nanoseconds since a fixed point that the caller chooses.
type Instant int64

// Seconds returns the time in seconds.
func (i Instant) Seconds() float64 { return float64(i) / float64(Second) }

// Units of Instant.
const (
	Millisecond = Second / 1000
	Second      = Instant(1e9)
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
		ChunkBytes: 1 << 20, AllowanceBytes: 1 << 20, TensorBytes: 16 << 30,
		OpenTensors: 64, OpenCalls: 64,
		FirstFrame: 10 * Second, ChunkIdle: 30 * Second, InputIdle: 3600 * Second, SessionIdle: 600 * Second,
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

func set[T uint32 | int | int64 | Instant](v *T, def, most T) {
	if *v <= 0 {
		*v = def
	}
	*v = min(*v, most)
}

// RetainedBytes is how much a session retains of calls and tensors.
func (l Limits) RetainedBytes() int {
	return retainedBytes + l.OpenTensors*(tensorState+frame.AllowanceChunks*assembler.ChunkOverhead)
}

// RetainedByDesc returns how many bytes are retained for a tensor with this geometry.
func RetainedByDesc(p *frame.Desc, geo tensor.Geometry) int {
	n := tensorState + len(p.Port) + len(p.Name) + Retained.OfEntries(p.Metadata)
	if !p.OnAllowance { // otherwise, and beyond that number, the budget is charged
		n += int(min(geo.Count(), frame.AllowanceChunks)) * assembler.ChunkOverhead
	}
	return n
}

// TableBytes returns how many bytes of a tensor's chunk table are charged to the budget: those
// beyond what a session retains anyway.
func TableBytes(chunks uint32) int64 {
	return max(0, int64(chunks)-frame.AllowanceChunks) * assembler.ChunkOverhead
}
