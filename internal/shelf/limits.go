package shelf

import "github.com/tensorferry/tensorferry/store"

const (
	// keptNames is how many names of tensors of the last sets are remembered, for those that
	// open several tensors meanwhile: two of the largest sets, 6 MB with usual names.
	keptNames = 2 * store.MaxSet
	// PageNames is how many names a List reads under one lock (some µs) and matches in one turn
	// (10 ms for the worst glob).
	PageNames = 1024
	// viewBytes is how many bytes of released views all stores of files keep for reuse: two
	// chunks each of several pulls.
	viewBytes = 32 << 20
)
