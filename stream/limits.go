package stream

import (
	"cmp"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	kib    = 1 << 10
	mib    = 1 << 20
	second = Instant(1e9)
)

// Version is the protocol version in hello.
const Version = 1

// Limits that are part of the protocol; no configuration moves them.
const (
	// ChunkBytesCeiling is the largest chunk that any side may accept: a chunk
	// is the unit of fairness, and of what is lost by one flaw.
	ChunkBytesCeiling = 4 * mib
	// AllowanceCeiling is the most that may be sent without credit.
	AllowanceCeiling = 1 * mib
	// AllowanceChunks is the most chunks of a tensor on allowance: what is kept per
	// chunk stays small beside what was promised. More of them wait for credit.
	AllowanceChunks = 4096
	// HelloCodecs is how many codecs of a hello are looked at: there are far fewer.
	HelloCodecs = 16
	// NameBytes bounds each name: of a model, a port, a tensor.
	NameBytes = 512
	// Entries, KeyBytes, ValueBytes and EntriesBytes bound the parameters of a
	// call, and the metadata of a tensor.
	Entries      = 64
	KeyBytes     = 128
	ValueBytes   = 4 * kib
	EntriesBytes = 32 * kib
	// callInputs and callBytes bound what one call says: it goes in one frame with
	// others, and the receiver takes 64 KiB of control parts.
	callInputs = 64
	callBytes  = 36 * kib
	// keptBytes is what a server keeps in all of what the calls of one session say:
	// names, params, metadata, of open calls and of those whose done has not gone. It
	// is on top of tensorBytes for each tensor that may be open.
	keptBytes = 1 * mib
	// tensorBytes is what is kept for one incoming tensor but its names and metadata,
	// in no budget: tensorState, and what stands per chunk.
	tensorBytes = tensorState + AllowanceChunks*assembler.ChunkOverhead
	tensorState = 1 * kib
	// bindingBytes and entryBytes are what an input of a call takes beside its port,
	// and an entry of params or metadata beside its text.
	bindingBytes = 32
	entryBytes   = 96
	// textBytes is where the text of a peer's failure is cut: enough to say why.
	textBytes = 512
	// doneBytes is where the text of a done is cut, as it is on the wire.
	doneBytes = 4 * kib
	// closedIDs is how many ended calls and tensors are remembered, so that
	// frames that crossed their end are ignored, not answered.
	closedIDs = 1024
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
	pendingBytes   = 512 * kib
	// KeptParts and KeptViews are the capacities that are kept for the next frame, of
	// parts and of a payload's views; a session that had a fat frame and rests does
	// without. A chunk of 4 MiB comes in 257 views.
	KeptParts = 64
	KeptViews = 320
	// keptQueue is the capacity kept of each queue and map that has become empty, and
	// keptEvents that of the events.
	keptQueue  = 64
	keptEvents = 32
	// ackShare: an acknowledgement is due when this part (1/ackShare) of what the
	// sender can keep has come.
	ackShare = 4
	// lazyAck is how long an acknowledgement that nobody waits for may wait for
	// a frame to ride in.
	lazyAck = 20 * second / 1000
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
	SessionIdle    Instant // without any call
}

// DefaultLimits are the limits of a session nobody configured.
func DefaultLimits() Limits {
	return Limits{
		ChunkBytes: 1 * mib, AllowanceBytes: 1 * mib, TensorBytes: 16 << 30,
		OpenTensors: 64, OpenCalls: 64,
		FirstFrame: 10 * second, ChunkIdle: 30 * second, SessionIdle: 600 * second,
	}
}

// WithDefaults returns the limits with zero fields set, and none over its ceiling.
func (l Limits) WithDefaults() Limits {
	d := DefaultLimits()
	set(&l.ChunkBytes, d.ChunkBytes, ChunkBytesCeiling)
	set(&l.AllowanceBytes, d.AllowanceBytes, AllowanceCeiling)
	set(&l.TensorBytes, d.TensorBytes, 1<<62)
	set(&l.OpenTensors, d.OpenTensors, 1<<16)
	set(&l.OpenCalls, d.OpenCalls, 1<<16)
	set(&l.FirstFrame, d.FirstFrame, 1<<62)
	set(&l.ChunkIdle, d.ChunkIdle, 1<<62)
	set(&l.SessionIdle, d.SessionIdle, 1<<62)
	return l
}

func set[T uint32 | int | int64 | Instant](v *T, def, most T) {
	if *v <= 0 {
		*v = def
	}
	*v = min(*v, most)
}

// Instant is a moment in nanoseconds since a fixed point that the caller chose.
type Instant int64

// checkName reports what is wrong with a name a peer sent, or nothing.
func checkName(what, name string) string {
	switch {
	case len(name) > NameBytes:
		return what + " is longer than 512 bytes"
	case !printable(name):
		return what + " is not UTF-8 without control characters"
	}
	return ""
}

// CheckEntries reports what is wrong with parameters or metadata, or nothing.
func CheckEntries(what string, m map[string]string) string {
	if len(m) > Entries {
		return fmt.Sprintf("%s: %d entries, the limit is %d", what, len(m), Entries)
	}
	total := 0
	for k, v := range m {
		switch total += len(k) + len(v); {
		case !utf8.ValidString(k) || !utf8.ValidString(v):
			return fmt.Sprintf("%s: an entry is not UTF-8", what)
		case len(k) > KeyBytes:
			return fmt.Sprintf("%s: a key of %d bytes, the limit is %d", what, len(k), KeyBytes)
		case len(v) > ValueBytes:
			return fmt.Sprintf("%s: a value of %d bytes, the limit is %d", what, len(v), ValueBytes)
		case total > EntriesBytes:
			return fmt.Sprintf("%s: more than %d bytes in all", what, EntriesBytes)
		}
	}
	return ""
}

// checkCall reports what a call has that one frame could not carry, or nothing.
func checkCall(c *Call) string {
	if len(c.Inputs) > callInputs {
		return fmt.Sprintf("call has %d inputs, the limit is %d", len(c.Inputs), callInputs)
	}
	size := len(c.Model) + costOf(c.Params)
	for _, b := range c.Inputs {
		if problem := checkName("port", b.Port); problem != "" {
			return problem
		}
		size += len(b.Port) + 32
	}
	if size > callBytes {
		return fmt.Sprintf("call takes %d bytes with its names and params, the limit is %d", size, callBytes)
	}
	return cmp.Or(checkName("model", c.Model), CheckEntries("params", c.Params))
}

// clip copies the first n bytes of a text that would keep more.
func clip(text string, n int) string {
	if len(text) <= n {
		return text
	}
	return strings.ToValidUTF8(strings.Clone(text[:n]), "")
}

// keptOf is what is kept of what a call says.
func keptOf(c *Call) int {
	n := len(c.Model) + entriesOf(c.Params)
	for _, b := range c.Inputs {
		n += bindingBytes + len(b.Port)
	}
	return n
}

// keptOfDesc is what is kept for a tensor that is cut as geo says.
func keptOfDesc(p *Desc, geo tensor.Geometry) int {
	n := tensorState + len(p.Port) + len(p.Name) + entriesOf(p.Metadata)
	if !p.OnAllowance { // else, and above that number, they are in the budget
		n += int(min(geo.Count(), AllowanceChunks)) * assembler.ChunkOverhead
	}
	return n
}

func entriesOf(m map[string]string) int {
	n := len(m) * entryBytes
	for k, v := range m {
		n += len(k) + len(v)
	}
	return n
}

func printable(s string) bool {
	for _, r := range s {
		if r == 0xFFFD || r < 0x20 || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return false
		}
	}
	return true
}
