package worker

import "time"

const (
	// helloWait is how long an interpreter takes to start on a loaded machine, and more.
	helloWait = time.Minute
	// blockWait is how long a block may take, and a model to load: gigabytes of weights from a
	// network. What hangs does so for ever.
	blockWait = 10 * time.Minute
	// A process that has ended is started again after pauseFirst, twice that, and so on,
	// but at least every pauseMost; from the beginning after it lived longer than helloWait.
	pauseFirst = 100 * time.Millisecond
	pauseMost  = 10 * time.Second
	// mostAhead is how many blocks a guest may have at a time that says how many it takes.
	// More than one it has only while the last took less than aheadWithin: to end one that
	// nobody wants it has to compute those before it, and a closed run waits 5 s.
	mostAhead   = 8
	aheadWithin = time.Second
	// mostConcurrency is how many blocks a guest may compute at once that says how many it does.
	mostConcurrency = 256
	// A guest is told of memory that came back when it has returnedRanges of it, or, with the other guests,
	// 1/returnedShare of what results may have: 1 MiB by default.
	returnedRanges, returnedShare = 32, 256
	// saveWait is how long a process may take to end that writes what it has learned: gigabytes
	// to a disk. Others have blocks.CloseWait to tear their model down.
	saveWait = time.Minute
	// drainWait is how long what a killed process started may keep its pipes and socket open.
	drainWait = time.Second
	// keptShare: what a process keeps between calls may be 1/keptShare of the memory for inputs;
	// the worker of Python keeps to it.
	keptShare = 2
	// turnWait is how long a block waits for the calls before it in its order to come.
	turnWait = 30 * time.Second
	// A process may say linesPerSecond lines to the log, and ten times as many at once.
	linesPerSecond = 100
	// textBytes bounds what a caller reads of a worker's error, traceBytes what the log has.
	textBytes  = 1 << 10
	traceBytes = 16 << 10
)
