package client_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestALargeTensorGoesByALane(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			testkit.Start(t)
			f := start(t, network, client.Config{})
			x, err := tensor.Of(testkit.Bytes(64*mib, 1), 64*mib)
			require.NoError(t, err)
			s := f.session(t)
			for range 5 {
				y, err := s.Compute(t.Context(), "echo", x)
				require.NoError(t, err)
				require.Equal(t, x.Data, y.Data)
				t.Logf("%+v", s.Ways())
			}
			require.NoError(t, s.Close())
		})
	}
}
