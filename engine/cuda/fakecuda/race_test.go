//go:build race && linux && cgo

package fakecuda

// Both sanitizers in a process are one too many.
func init() { racing = true }
