//go:build race

package server_test

// raceEnabled tells that sync.Pool drops items at random, so that counting
// allocations says nothing.
const raceEnabled = true
