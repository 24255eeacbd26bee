package worker

import "time"

const (
	// defaultMemory is enough for sixteen runs at full depth, in each direction.
	defaultMemory = 256 << 20
	// helloWait is how long an interpreter takes to start on a loaded machine, and more.
	helloWait = time.Minute
	// loadWait is how long a model may take to load: gigabytes of weights from a network.
	loadWait = 10 * time.Minute
	// blockWait is how long a block may take. What hangs does so for ever.
	blockWait = 10 * time.Minute
	// obeyWait is how long a block may take after nobody wants it any more. It is less
	// than what a closed run waits for its blocks (blocks: 5 s), by drainWait twice.
	obeyWait = 2500 * time.Millisecond
	// A process that has ended is started again after pauseFirst, twice that, and so on,
	// but at least every pauseMost; from the beginning after it was well for healthy.
	pauseFirst = 100 * time.Millisecond
	pauseMost  = 10 * time.Second
	healthy    = time.Minute
	// mostAhead is how many blocks a guest may have at a time that says how many it takes.
	// More than one it has only while the last took less than aheadWithin: to end one that
	// nobody wants it has to compute those before it, and a closed run waits 5 s.
	mostAhead   = 8
	aheadWithin = time.Second
	// endWait is how long a process may take to tear its model down.
	endWait = 5 * time.Second
	// saveWait is how long one may take that writes what it has learned: gigabytes to a disk.
	saveWait = time.Minute
	// drainWait is how long what a killed process started may keep its pipes and socket open.
	drainWait = time.Second
	// keptShare: what a process keeps between calls may be 1/keptShare of the memory for inputs;
	// the worker of Python keeps to it.
	keptShare = 2
	// turnWait is how long a block waits for the calls before it in its order to come.
	turnWait = 30 * time.Second
	// seriesBytes is the longest name of a series of calls that have an order.
	seriesBytes = 64
	// lineBytes is the longest line of a worker that is logged whole.
	lineBytes = 4 << 10
	// A process may say linesPerSecond lines to the log, and lineBurst at once.
	linesPerSecond = 100
	lineBurst      = 1000
	// textBytes bounds what a caller reads of a worker's error, traceBytes what the log has.
	textBytes  = 1 << 10
	traceBytes = 16 << 10
)
