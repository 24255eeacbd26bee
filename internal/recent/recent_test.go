package recent_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/recent"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestTheLastIDsAreRemembered(t *testing.T) {
	var r recent.IDs
	id := func(i int) tensor.ID { return tensor.ID{byte(i), byte(i >> 8), 1} }
	for i := range 5 * recent.Most / 2 {
		require.False(t, r.Has(id(i)))
		r.Add(id(i))
		require.Equal(t, min(i+1, recent.Most), r.Len())
		for _, back := range []int{0, 1, recent.Most - 1, recent.Most} {
			require.Equal(t, back < recent.Most && back <= i, r.Has(id(i-back)), "%d before %d", back, i)
		}
	}
	r = recent.IDs{}
	require.Zero(t, r.Len())
	require.False(t, r.Has(id(1)))
}
