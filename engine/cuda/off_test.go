//go:build !(linux && cgo)

package cuda_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cuda"
)

func TestWithoutCgoEverythingSaysSo(t *testing.T) {
	_, opened := cuda.Open(cuda.Config{})
	_, listed := cuda.Devices(cuda.Config{})
	_, made := cuda.Stack(nil, nil)
	for _, err := range []error{opened, listed, made} {
		require.ErrorIs(t, err, engine.ErrUnavailable)
		require.ErrorContains(t, err, "built without cgo")
	}
}
