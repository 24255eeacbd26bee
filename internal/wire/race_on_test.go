//go:build race

package wire

// raceEnabled tells that sync.Pool drops items at random, so that counting
// allocations says nothing.
const raceEnabled = true
