package blocks

import (
	"time"

	"github.com/tensorferry/tensorferry/engine"
)

const (
	// preferredSlots is how many blocks a run keeps in memory per direction when
	// the budget has room: one being filled, one computed by each of a few
	// workers, the rest cover the way to the peer and back: with 8, an echo by a lane
	// stood still for want of them now and then (32 were 7 to 15 % faster, November 2026).
	preferredSlots = 16
	// preferredBytes lets a run of small blocks have more than preferredSlots of
	// them, so that small chunks do not mean a small window.
	preferredBytes = 4 * engine.ChunkBytes
	// maxSlots bounds the slots of one direction, each with about 500 bytes of bookkeeping.
	// Rows per block are raised until one chunk of input spans chunkSlots or, where the model
	// has chosen them, a quarter of maxSlots: rows of 512 bytes are computed one by one, in
	// chunks of 1 MiB, too.
	maxSlots   = 8192
	chunkSlots = 64
	// CloseWait is how long Close waits for running blocks and unreleased
	// results. A device that watches contexts is done within one block; what takes longer
	// is lost, and its memory stays charged until it has stopped.
	CloseWait = 5 * time.Second
	// DefaultMemory is what the runs of a GPU or a worker have, where nobody says: enough for
	// sixteen at full depth.
	DefaultMemory = 256 << 20
	// spillAfter is how long results wait for their taker before they give way to
	// others: a hundred times what a peer takes that keeps up.
	spillAfter = 100 * time.Millisecond
)
