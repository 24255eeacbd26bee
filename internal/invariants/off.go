//go:build !invariants

// Package invariants holds checks that cost nothing unless built in with
// -tags invariants: poisoned memory after its last release, assertions on
// state that must hold. It refuses to decide anything: a program behaves the
// same with and without it. Anyone in the module may call it.
package invariants

// Enabled reports whether the checks are built in. Being a constant, it lets
// the compiler drop what stands behind it.
const Enabled = false

// Poison overwrites b, which nobody may read any more.
func Poison([]byte) {}

// Assert panics with what when ok is false.
func Assert(bool, string) {}
