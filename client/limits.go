package client

import "time"

const (
	mib = 1 << 20
	// slots is how many chunks a streamed input is read ahead, and a streamed
	// result received ahead of its writer: enough to keep a round trip of some
	// milliseconds busy at the speed of the wire.
	slots = 8
	// slotBytes is the least size of a slot of a streamed result: chunks smaller
	// than this share one.
	slotBytes = 256 << 10
	// pushTensors is how many tensors one RPC of a push takes, which is the server's
	// limit; Push uses as many RPCs as it needs.
	pushTensors = 1024
	// keepBytes is how much of a Reader's tensor is kept, to be sent again should the
	// server end the RPC because of the tensor before it: as much as is sent before
	// that is heard of, which is the server's window and what gRPC queues.
	keepBytes = 2*DefaultWindow + 4*mib
	// pushResponseBytes is room for as many summaries, each with a name of 512 bytes
	// and a text of 4 KiB.
	pushResponseBytes = 8 * mib
	// pullTensors bounds what is kept of a pull with a glob: some hundred bytes and a name
	// per tensor. It is what a server's folder holds by default. Without a glob a pull has
	// as many tensors as selections.
	pullTensors = 1 << 16
	// pullTextBytes bounds what is kept of the texts that the summaries of a pull have.
	// There may be pullTensors of 4 KiB; what comes after the first of them is cut.
	pullTextBytes = 1 * mib
	// silentRate is how many bytes a second a server goes through, at the least, where the
	// protocol has it say nothing: it reads what a puller holds, for the digest, and syncs
	// what was pushed. A slow disk does that.
	silentRate = 32 * mib
	// listTensors and listBytes bound what List gathers: sixteen times what a server's folder
	// holds by default, and their bytes on the wire.
	listTensors = 1 << 20
	listBytes   = 256 * mib
	// tensorBytes is the largest tensor that is received, in a result or a pull: what a
	// server stores at most by default. What is kept of one in memory has a limit of
	// its own.
	tensorBytes = 1 << 40
	// pieceBytes is what an At gets at a time: gRPC hands over 16 KiB at a time, which
	// cost the client and a server beside it 14 % more CPU time (November 2026).
	pieceBytes = 256 << 10
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
