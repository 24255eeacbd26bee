package engine

const (
	// ChunkBytes is the chunk that blocks are made for: inputs of Compute arrive in
	// it, and a run without inputs has memory for as many bytes of each output.
	ChunkBytes = 1 << 20
	// AtOnceBytes is the most input of a call that whoever read it, or takes its result, computes
	// itself: moving 64 KiB takes less than waking another goroutine.
	AtOnceBytes = 64 << 10
	// maxNameBytes bounds the name of a model and of a port.
	maxNameBytes = 512
	// maxPorts bounds the inputs of a model, and its outputs: a call carries 64
	// bindings each way (wire.MaxCalls).
	maxPorts = 64
)
