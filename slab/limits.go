package slab

const (
	// hugePage is the transparent huge page of amd64 and arm64 (4 KiB base pages).
	hugePage = 2 << 20
	// mapFrom is the size from which a slab is mapped outside the Go heap: below
	// it the system calls and the page rounding cost more than they save.
	mapFrom = 64 << 10
	// poolShare: a holder grows to at most this part (1/poolShare) of a budget
	// while others wait for it, so that one session cannot starve the rest.
	poolShare = 2
)
