//go:build !(linux && cgo)

package cuda

import (
	"fmt"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/stack"
	"github.com/tensorferry/tensorferry/slab"
)

// errOff is why there is no device in this program.
var errOff = fmt.Errorf("%w: this program was built without cgo, which CUDA needs", engine.ErrUnavailable)

// Host is what models of one device share. There is none in this program.
type Host struct{}

// Open fails: this program was built without cgo. The error wraps
// engine.ErrUnavailable.
func Open(Config) (*Host, error) { return nil, errOff }

// Devices fails as Open does.
func Devices(string) ([]Device, error) { return nil, errOff }

// Name returns the name of the device.
func (*Host) Name() string { return "" }

// Pool returns the pool that every block of the host's models comes from.
func (*Host) Pool() *slab.Pool { return nil }

// Budget returns the budget that every run of the host's models is admitted by.
func (*Host) Budget() *slab.Budget { return nil }

// Close ends the host.
func (*Host) Close() {}

// Builtins returns no models.
func Builtins(*Host) []engine.Model { return nil }

// Stack fails as Open does.
func Stack(*Host, *stack.Model) (engine.Model, error) { return nil, errOff }
