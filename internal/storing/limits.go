package storing

const (
	// PushTensors is how many tensors may be open on one push at a time: state per tensor.
	PushTensors = 16
	// Tensors is how many tensors a push, or a pull's request, may name in all: state per
	// tensor, and a response that fits a message.
	Tensors = 1024
	// commits is how many tensors of a push are made durable at a time: a disk
	// answers several fsyncs together as fast as one.
	commits = 4
	// recordsKept, recordTensors and recordTensorsKept bound what is remembered of
	// transfers that ended: up to 16 MB, 900 bytes of each tensor, which are mostly
	// its name and the beginning of its message, of recordMessage bytes at most.
	recordsKept       = 1024
	recordTensors     = 1024
	recordTensorsKept = 8 << 10
	recordMessage     = 256
	// pullFree is how much of what each pull selects counts in no budget: 16 MiB for
	// as many as a server has by default.
	pullFree = 64 << 10
	// pushedBytes is what a push keeps of a tensor until it ends, beside its name: records
	// and texts.
	pushedBytes = 1 << 10
	// selectionBytes is what a pull keeps of a selection, and of how it ended, beside
	// its name, a range of rangeBytes for each that is held, and its parameters, with
	// entryBytes for each of these.
	selectionBytes = 1 << 10
	rangeBytes     = 16
	entryBytes     = 64
)
