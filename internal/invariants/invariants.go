// Package invariants holds checks that cost nothing unless built in with
// -tags invariants: poisoned memory after its last release, assertions on
// state that must hold. It refuses to decide anything: a program behaves the
// same with and without it. Anyone in the module may call it.
package invariants
