package main

import (
	"fmt"
	"time"
)

const (
	kib = 1 << 10
	mib = 1 << 20

	// baseRSS, connectionRSS and sessionRSS are what docs/limits.md allows a server for
	// itself, for each connection and for each session; spareReceived is what it may take at any time beside them and what
	// it charges, whatever peers send.
	baseRSS       = 32 * mib
	connectionRSS = 128 * kib
	sessionRSS    = 24 * kib
	// ownBytes is what a connection may be charged beside receive_bytes, as docs/limits.md
	// says, and as much again for answers that are written.
	ownBytes      = 2 * 64 * kib
	spareReceived = 32 * mib
	// scrapeWait bounds one answer of a metrics listener.
	scrapeWait = 20 * time.Second
	// settleWait is how long a server may take until nothing is open any more: a connection
	// that waits, or sent control frames only, is closed after 8 s; collections take a few.
	settleWait = 30 * time.Second
	// pollEvery is how often a state is asked for that is waited for.
	pollEvery = 50 * time.Millisecond
	// problemsKept is how many of a program's problems are printed.
	problemsKept = 20
	// openers is how many sessions are being opened at a time.
	openers = 64
	// perConnection is how many sessions one connection has: a server allows 128.
	perConnection = 125
)

func mibs[T int | int64 | float64](n T) string { return fmt.Sprintf("%.1f MiB", float64(n)/mib) }
