package transfer

import "github.com/tensorferry/tensorferry/stream"

const (
	// givenUpBytes is how much is kept of what a peer says of a tensor that it gives
	// up: a frame has room for 64 KiB, and a thousand such texts may be remembered.
	givenUpBytes = 512
	// lastCode is the last status code there is, and unknownCode stands for those
	// after it.
	lastCode    stream.Code = 16
	unknownCode stream.Code = 2
)
