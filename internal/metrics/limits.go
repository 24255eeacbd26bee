package metrics

import "time"

const (
	// scrapes at a time; one adds up every session, and nobody needs more.
	scrapes = 4
	// connections at a time, and streams of one: more than scrapers and probes have.
	connections = 64
	streams     = 16
	// readWait is how long a request may take to come: it has no body.
	readWait = 5 * time.Second
	// writeWait is how long an answer may take: a profile of 30 s, pprof's own
	// default, and as much again. A scraper's connection is kept for twice as long: between scrapes of
	// a minute.
	writeWait = time.Minute
	// headerBytes is far more than a scraper sends.
	headerBytes = 16 << 10
	// closeWait is how long a stopping listener lets answers end.
	closeWait = time.Second
)
