package relay

const (
	mib = 1 << 20
	// longJSON is the most JSON of an answer in its packet; more goes into a range.
	longJSON = 32 << 10
	// pieceBytes is what a result in pieces comes in: a chunk.
	pieceBytes = 1 * mib
	// piecesOut is how many pieces of a result a guest may have: it copies one while
	// others come.
	piecesOut = 8
)
