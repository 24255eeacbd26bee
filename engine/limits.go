package engine

const (
	// chunkBytes is the chunk that inputs of Compute arrive in: the size that blocks
	// are made for.
	chunkBytes = 1 << 20
	// maxNameBytes bounds the name of a model and of a port.
	maxNameBytes = 512
	// maxPorts bounds the inputs of a model, and its outputs: a call carries 64
	// bindings each way (wire.MaxBindings).
	maxPorts = 64
)
