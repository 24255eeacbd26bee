//go:build invariants

package invariants

// Enabled reports whether the checks are built in.
const Enabled = true

// poison is no valid float, index or text: whoever reads it after the release
// sees it in a debugger at once.
const poison = 0xdb

// Poison overwrites b, which the caller lends and nobody may read any more.
func Poison(b []byte) {
	for i := range b {
		b[i] = poison
	}
}

// Assert panics with what when ok is false.
func Assert(ok bool, what string) {
	if !ok {
		panic("invariant broken: " + what)
	}
}
