package frame

// Version is the protocol version in hello.
const Version = 1

// Limits that are part of the protocol; no configuration moves them.
const (
	// ChunkBytesCeiling is the largest chunk that any side may accept: a chunk
	// is the unit of fairness, and of what one damaged byte costs.
	ChunkBytesCeiling = 4 << 20
	// AllowanceCeiling is the most that may be sent without credit.
	AllowanceCeiling = 1 << 20
	// AllowanceChunks is the most chunks of a tensor on allowance: what is kept per
	// chunk stays small beside the bytes allowed. More chunks wait for credit.
	AllowanceChunks = 4096
	// AckPairs is how many ranges beyond the first gap an acknowledgement may name.
	AckPairs = 32
	// HelloCodecs is how many codecs of a hello are read: there are far fewer.
	HelloCodecs = 16
	// NameBytes bounds each name: of a model, a port, a tensor.
	NameBytes = 512
	// Entries, KeyBytes, ValueBytes and EntriesBytes bound the parameters of a
	// call, and the metadata of a tensor.
	Entries      = 64
	KeyBytes     = 128
	ValueBytes   = 4 << 10
	EntriesBytes = 32 << 10
	// FailureTextBytes is how much is kept of the text of a peer's failure: enough
	// to say why.
	FailureTextBytes = 512
	// TextBytes is where the text of a failure, a done, a drain or a status is cut
	// when it is sent: an error's text must never be what makes a frame refused.
	TextBytes = 4 << 10
	// KeptParts and KeptViews are the capacities that Reset keeps for the next frame,
	// of parts and of a payload's views, and KeptParts that of an empty queue: an idle
	// session does not keep what one large frame needed. A chunk of 4 MiB comes in 257 views.
	KeptParts = 64
	KeptViews = 320
)

const (
	// callInputs and callBytes bound one call: it goes in one frame with others, and
	// the receiver takes 64 KiB of control parts.
	callInputs = 64
	callBytes  = 36 << 10
	// getBytes bounds one part of a get, but for its last selection, which takes up to
	// EntriesBytes of parameters and partRanges ranges.
	getBytes   = 16 << 10
	partRanges = 512
	// descBytes is what a desc of rank 0 takes in a frame, beside its texts.
	descBytes = 64
)

// inFrame is what parts take in a frame.
var inFrame = Sizes{Binding: 32, Entry: 8, Selection: 32, Range: 24}
