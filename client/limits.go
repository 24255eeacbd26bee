package client

import "time"

const (
	mib = 1 << 20
	// slots is how many chunks a streamed input is read ahead, or a streamed result
	// received ahead of its writer: enough for a round trip of some milliseconds.
	slots = 8
	// slotBytes is the least size of a slot of a streamed result: smaller chunks share
	// one.
	slotBytes = 256 << 10
	// pushTensors is how many tensors one RPC of a push has: the server's limit.
	pushTensors = 1024
	// keepBytes is how much of a Reader's tensor is kept, to be sent again if the server
	// ends the RPC because of the tensor before it: what may be sent until that is
	// known, the server's window and what gRPC queues.
	keepBytes = 2*DefaultWindow + 4*mib
	// pushResponseBytes is room for as many summaries, each with a name of 512 bytes
	// and a text of 4 KiB.
	pushResponseBytes = 8 * mib
	// pullTensors bounds the tensors of a pull with a glob, some hundred bytes and a name
	// each: what a server's folder holds by default.
	pullTensors = 1 << 16
	// pullTextBytes bounds the texts kept of a pull's summaries, of which there may be
	// pullTensors of 4 KiB each; later ones are cut.
	pullTextBytes = 1 * mib
	// silentRate is the least bytes per second of a server, a slow disk's, where the
	// protocol keeps it silent: it reads held ranges for the digest, and syncs what was
	// pushed.
	silentRate = 32 * mib
	// listTensors and listBytes bound the result of List: sixteen times what a server's
	// folder holds by default, and their bytes on the wire.
	listTensors = 1 << 20
	listBytes   = 256 * mib
	// tensorBytes is the largest tensor received: what a server stores at most by
	// default. ResultBytes limits those in memory.
	tensorBytes = 1 << 40
	// pieceBytes is what a writer or an At gets at a time: with gRPC's pieces of 16 KiB,
	// client and server on one machine took 14 % more CPU time (November 2026).
	pieceBytes = 256 << 10
	// laneBytes is the least tensor for which a session opens its lane: to connect costs
	// as much as some hundred KiB on one machine, and round trips over a distance.
	laneBytes = 4 * mib
	// laneWait, and the time that the session took to open, is how long opening a lane may
	// take; nobody waits for it.
	laneWait = 1 * time.Second
	// laneTries is how often in a row a lane may be refused, as behind a balancer, or break
	// before it has carried laneBytes, or stall; each is tried laneWait later than the one
	// before. Then the client tries no more for laneMemoryTime.
	laneTries      = 3
	laneMemoryTime = 10 * time.Minute
	// signs is how often, within the time that a server waits without a word, it is told
	// that the client waits for its own input or output; every mostSign when that is
	// shorter, or unknown, and every leastSign at most, whatever the server says.
	signs     = 3
	mostSign  = 10 * time.Second
	leastSign = 10 * time.Millisecond
	// poolBytes is how much released slot memory a client keeps for reuse.
	poolBytes = 64 * mib
)

// Defaults of Config.
const (
	// DefaultWindow is the server's too, which says why.
	DefaultWindow      = 2 * mib
	DefaultOpenTimeout = 10 * time.Second
	// DefaultStallTimeout is twice the server's own, whose error tells more.
	DefaultStallTimeout = 60 * time.Second
	DefaultResultBytes  = 4 << 30
)
