package inbound

import "time"

const (
	// Free is what each connection may hold beside Memory's limit: a small call and its
	// RPC pass however full the rest is.
	Free = 64 << 10
	// messages is how many of the server's own largest messages there is room for at least,
	// when their frames are large: gRPC may hold four times the bytes of small ones.
	messages = 16
	// All connections may begin messages while at most this part (1/beginOf) of the limit is
	// charged, and one while it has at most this part (1/shareOf) of it. The rest is for
	// messages that begin while others of their connection are not whole: what follows of
	// those lies behind them, so that waiting would not end.
	beginOf = 2
	shareOf = 4

	// overhead is what gRPC allocates for each frame beside its bytes: about 56 for what
	// it queues, and a buffer's header.
	overhead = 128
	// rpcBytes is what an RPC keeps that has not been admitted to anything: a stack, the
	// transport's stream, contexts and a timer.
	rpcBytes = 12 << 10
	// rpcsLimit is for all such RPCs beyond the few that each connection may have: 1 200
	// of them. What they keep lies in Go's heap, which takes as much again before it is
	// collected.
	rpcsLimit = 16 << 20
	// keptBatches is how long a list of an RPC's messages may be that is kept for the next.
	keptBatches = 64
	// HeapShare is what a byte of Go's heap takes until it is collected, with GOGC at 100.
	HeapShare = 2
	// fieldBytes is what a field of the metadata takes beside its text.
	fieldBytes = 96

	// A connection may send controlRate frames a second that bring nothing, such as window
	// updates, pings and what comes for RPCs that are over, beside one for each controlPays
	// bytes that are written to it, controlsOfData for each data frame and controlsOfRPC for
	// each RPC: gRPC's own clients send half as many, such as a window update for each small
	// message that they read. Those beyond are read later, in steps of Debt; a connection that
	// is never done with them for pause is closed. It may begin with those of two seconds.
	controlRate    = 1000
	controlPays    = 4 << 10
	controlsOfData = 2
	paysData       = 16 // bytes of a data frame that does: a client could have a message come byte by byte
	controlsOfRPC  = 4
	// Debt is how far a connection may exceed a rate before it waits: a timer for each frame would
	// cost more than the frame.
	Debt = 5 * time.Millisecond
	// goodbye is how long a peer has to take the reason why its connection is closed, and
	// goodbyeBytes how much of what it sends meanwhile is dropped.
	goodbye      = time.Second
	goodbyeBytes = 1 << 20

	// HeapLook is how often a server that receives larger messages looks at Go's heap, and
	// heapSpare what may lie there beside what is charged: what docs/limits.md has for the collector.
	HeapLook  = time.Second
	heapSpare = 32 << 20
	// queueEvery is how often what is to be sent looks for memory.
	queueEvery = 10 * time.Millisecond
	// lookEvery is how often a connection that waits looks whether anything moves.
	lookEvery = 100 * time.Millisecond
	// stale is how long an RPC may have a message that is not consumed, or comes slower than
	// slowest bytes a second, before it may be ended for others that wait.
	stale   = time.Second
	slowest = 64 << 10
	// patience is how long a connection waits until the RPC that it waits for is ended, how
	// long a peer may read nothing of what others' answers wait for, and pause how long a
	// connection waits until it is closed: before its peer gives it up, as gRPC's clients
	// and their systems do when nothing that they send is read for 10 s.
	patience = 5 * time.Second
	pause    = 8 * time.Second
	// collectAfter is how long what ended RPCs left may lie until a collection is run.
	collectAfter = 2 * time.Second
	// collectEvery is the least time between two collections that are run because what
	// ended RPCs left keeps a connection waiting: each takes milliseconds.
	collectEvery = 50 * time.Millisecond
)
