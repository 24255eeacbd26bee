//go:build asan && linux && cgo

package cuda_test

// With the address sanitizer in the test, the fake driver has it too.
func init() { driverOptions.Sanitize = true }
