package cuda

import "time"

const (
	// defaultLibrary is what NVIDIA's driver installs.
	defaultLibrary = "libcuda.so.1"
	// defaultPinned is enough for sixteen runs at full depth.
	defaultPinned = 256 << 20
	// lanes is how many blocks are on a device at a time: one coming in, one being
	// computed, one going out, and one more so that none of them waits for the host.
	lanes = 4
	// laneUnit divides the device memory of a lane: blocks of nearly one size share it.
	laneUnit = 2 << 20
	// laneMost is about the most that a block of a stack model takes of a lane, if its
	// rows are not wider: a few times what comes in and goes out.
	laneMost = 8 << 20
	// hangWait is a thousand times what a block of the largest model takes.
	hangWait = 30 * time.Second
	// closeWait is how long Close waits for blocks that are on the device.
	closeWait = 5 * time.Second
	// A dead context is rebuilt at once, then after rebuildFirst, twice that, and so
	// on, but at least every rebuildMost.
	rebuildFirst = 100 * time.Millisecond
	rebuildMost  = time.Minute
	// textBytes has room for what the driver's compiler says of a faulty image.
	textBytes = 4 << 10
	// uploadBytes is how much of a weight is copied to the device at a time.
	uploadBytes = 4 << 20
)
