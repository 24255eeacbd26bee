//go:build linux

package main

import "time"

const (
	// tensorBytes takes 17 seconds at 1 Gbit/s: windows have opened long before.
	tensorBytes = 2 << 30
	// quickBytes takes a second on the quick link.
	quickBytes = 4 << 20
	// shortBytes is what the time to a tensor is taken of.
	shortBytes = 256 << 20
	// warmUp is the time that does not count for a rate.
	warmUp = 2 * time.Second
	// sampleEvery is how often what has arrived is counted, askEvery how many of these pass
	// before ss is asked.
	sampleEvery = 10 * time.Millisecond
	askEvery    = 100
	// rounds of turns, without a flag.
	rounds = 3
	// smallQueue is the queue beside which small calls are measured, as time at the line's
	// rate: that of a good router.
	smallQueue = 10 * time.Millisecond
	// pingEvery is the time between pings on the loaded link.
	pingEvery = 20 * time.Millisecond
	// jobWait ends a job of a peer that is too slow, and the measurement of it.
	jobWait = 10 * time.Minute
	// memoryBytes is the server's --memory where what it takes is measured.
	memoryBytes = 512 << 20
	// ownBytes, connectionBytes and sessionBytes are what docs/limits.md allows a server for
	// itself and, as much again, for Go's collector; for a connection; and for a session.
	ownBytes        = 32 << 20
	connectionBytes = 192 << 10
	sessionBytes    = 24 << 10
	// lookEvery is the time between two looks at the memory of processes.
	lookEvery = 50 * time.Millisecond
	// storeSpare is the room in a store beside the tensor.
	storeSpare = 64 << 20
)
