package relay

import "time"

const (
	// mostLanes is the most lanes that a guest may ask for: client.Config.Lanes has no more.
	mostLanes = 64
	// pieceBytes is what a result in pieces comes in: a chunk.
	pieceBytes = 1 << 20
	// piecesOut is how many pieces of a result a guest may have: it copies one while
	// others come.
	piecesOut = 8
	// PiecesBytes bounds the pieces of all results together, beside the link's quota.
	PiecesBytes = 64 << 20
	// pieceWait is how long a piece waits for those of other results to come back, which a
	// guest that rests may have.
	pieceWait = 20 * time.Second
)
