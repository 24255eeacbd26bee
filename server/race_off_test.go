//go:build !race

package server_test

// raceEnabled tells whether sync.Pool drops items at random, so that counting
// allocations would say nothing.
const raceEnabled = false
