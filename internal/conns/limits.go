package conns

const (
	// The work of a frame is counted in small frames: one for itself, placing more for a
	// chunk, and one for each workBytes of its control parts. Each payBytes of payload pays
	// for one, so that chunks of 3 KiB and more are free. Each call or tensor that the
	// frame opens pays for openPays, that is, for 16 KiB of control parts, and a tensor for
	// a frame with a chunk: these have limits of their own.
	placing   = 2
	workBytes = 256
	payBytes  = 1 << 10
	openPays  = 64
	// firstChunks is how many opened tensors may have their chunks' frames free at a time:
	// several times as many as a session has open, by default.
	firstChunks = 256
	// refusals is how many connections beyond the limit may be told so at a time; more are
	// closed at once. It is a burst of clients that come back, and each takes a descriptor.
	refusals = 32
	// lanesShare: a lane is opened while at most 1/lanesShare of all connections are open,
	// so that lanes keep no client out.
	lanesShare = 2
	// ownerShare: the lanes of one principal, or of one session without a principal, are at
	// most 1/ownerShare of all connections.
	ownerShare = 4
)
