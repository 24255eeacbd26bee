//go:build asan && linux && cgo

package cuda_test

import "github.com/tensorferry/tensorferry/engine/cuda/fakecuda"

// With the address sanitizer in the test, the fake driver has it too.
func init() { driverOptions.Sanitize = true }
