package bench

import (
	"time"

	"github.com/tensorferry/tensorferry/codec"
)

const (
	// ChunkBytes is the bytes of one write in most baselines; it is the client's default
	// chunk, too.
	ChunkBytes = 1 << 20
	// smallPiece is what a raw socket checks while it is in the cache of a core.
	smallPiece = 256 << 10
	// SmallBytes is the size of a small call's tensor: 7500 float32.
	SmallBytes = 30_000
	// MinRounds is the least number of pairs that a median is taken of.
	MinRounds = 9
	// MaxRounds ends the wait for a stable median: on a machine whose speed keeps
	// changing it would have none.
	MaxRounds = 25
	// StableError is how well a median ratio must be known, as a part of it.
	StableError = 0.05
	// CallBatch is the small calls of one sample: enough for a p99.
	CallBatch = 2000
	// uploadsBeside bounds how many uploads small calls are made beside in a sample.
	uploadsBeside = 5
	// copyBytes is what a file is copied in pieces of: cp's, or two of an older one's.
	copyBytes = 256 << 10
	// hostTensors: the server of a measure may hold so many large tensors.
	hostTensors = 4
	// hostSpare is its memory beyond them, for blocks.
	hostSpare = 64 << 20
	// jobWait is how long one job may take before the run is given up: a tensor of
	// 256 MiB at 2 MB/s.
	jobWait = 2 * time.Minute
	// RoadDelay is the round trip of the long way that is reported: a continent's.
	RoadDelay = 50 * time.Millisecond
	// RoadBytes is the tensor on it: some seconds at the rates that a window allows.
	RoadBytes = 64 << 20
	// roadPieceBytes and roadPieces bound what is on such a way: 64 MiB, which is 2.6 GB/s.
	roadPieceBytes = 64 << 10
	roadPieces     = 1024
)

// Rules are what is required of tensorferry on loopback with two cores.
func Rules() (all []Rule) {
	least := func(v float64) *Required { return &Required{Value: v} }
	most := func(v float64) *Required { return &Required{Value: v, AtMost: true} }
	for _, sum := range []codec.Checksum{codec.CRC32C, codec.CRC32} {
		for _, op := range []Op{Upload, Echo} {
			all = append(all,
				Rule{"tcp", op, OursWith(sum), "raw socket, " + SumText(sum) + ",", least(0.95), most(1.15)},
				Rule{"unix", op, OursWith(sum), "raw socket, " + SumText(sum) + ",", least(0.90), nil})
		}
	}
	return append(all,
		Rule{"tcp", Upload, OursWith(codec.CRC32C), StockGRPC.Name, least(1.6), nil},
		Rule{"tcp", Echo, OursWith(codec.CRC32C), StockGRPC.Name, least(1.2), nil},
		Rule{"tcp", Call, Tensorferry, StockGRPC.Name, most(1.5), nil},
		Rule{"tcp", FirstResult, Tensorferry, "", most(0.05), nil},
		Rule{"tcp", Pull, Folder, "raw socket", least(0.80), nil},
		Rule{"tcp", Push, Folder, Copying, least(0.60), nil})
}

// peakBytes is the most memory of the server's process, and of the client's, while a
// tensor of any size goes through.
const peakBytes = 256 << 20

// MemoryBlock is the bytes that the memory measure writes, reads and compares at a
// time. It is more than a pipe holds: whoever has the last one still to write is
// alive.
const MemoryBlock = 1 << 20
