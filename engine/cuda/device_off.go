//go:build !(linux && cgo)

package cuda

import (
	"fmt"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/stack"
)

// errOff is why there is no device in this program.
var errOff = fmt.Errorf("%w: this program was built without cgo, which CUDA needs", engine.ErrUnavailable)

// device is what a Host would have.
type device struct{}

func (*device) close() {}

// Open fails: this program was built without cgo. The error wraps engine.ErrUnavailable.
func Open(Config) (*Host, error) { return nil, errOff }

// Devices fails as Open does.
func Devices(Config) ([]Device, error) { return nil, errOff }

// Builtins returns no models.
func Builtins(*Host) []engine.Model { return nil }

// Stack fails as Open does.
func Stack(*Host, *stack.Model) (engine.Model, error) { return nil, errOff }
