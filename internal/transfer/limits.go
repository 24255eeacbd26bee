package transfer

import (
	"github.com/tensorferry/tensorferry/frame"
)

const (
	// lastCode is the last status code there is, and unknownCode stands for those
	// after it.
	lastCode    frame.Code = 16
	unknownCode frame.Code = 2
)
