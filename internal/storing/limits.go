package storing

const (
	// PushTensors is how many tensors may be open on one push at a time: each needs state.
	PushTensors = 16
	// Tensors is the total number of tensors that a push, or the request of a pull, may
	// name: each needs state, and the response must fit into a message.
	Tensors = 1024
	// commits is how many tensors of a push are made durable concurrently: a disk completes
	// several fsyncs as fast as one.
	commits = 4
	// recordsKept, recordTensors and recordTensorsKept limit what is remembered of ended
	// transfers: up to 16 MB, with 900 bytes per tensor, mostly its name and the beginning
	// of its message, of which recordMessage bytes are kept.
	recordsKept       = 1024
	recordTensors     = 1024
	recordTensorsKept = 8 << 10
	recordMessage     = 256
	// pullFree is how many bytes of each pull's selections are not charged to a budget: 16
	// MiB for as many pulls as a server has by default.
	pullFree = 64 << 10
	// pushedBytes is what a push keeps per tensor until it ends, in addition to its name:
	// records and texts.
	pushedBytes = 1 << 10
	// selectionBytes is what a pull keeps per selection and its outcome. The selection's
	// name, rangeBytes per held range, and its parameters, with entryBytes for each, come
	// on top.
	selectionBytes = 1 << 10
	rangeBytes     = 16
	entryBytes     = 64
)
