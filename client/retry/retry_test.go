package retry_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/client/retry"
)

func TestPolicies(t *testing.T) {
	for n := 1; n < 100; n++ {
		most := min(retry.First*time.Duration(1<<min(n-1, 20)), retry.Most)
		for _, text := range []string{"exponential", "adaptive"} {
			p, err := retry.Parse(text)
			require.NoError(t, err)
			wait, again := p(retry.Attempt{N: n})
			require.True(t, again)
			require.GreaterOrEqual(t, wait, most/2, n)
			require.LessOrEqual(t, wait, most, n)
		}
		wait, again := retry.Adaptive()(retry.Attempt{N: n, After: time.Minute})
		require.True(t, again)
		require.GreaterOrEqual(t, wait, time.Minute)
		require.LessOrEqual(t, wait, 3*time.Minute/2)
	}
	p, err := retry.Parse("fixed")
	require.NoError(t, err)
	wait, again := p(retry.Attempt{N: 1000})
	require.True(t, again)
	require.Equal(t, retry.Every, wait)
	p, err = retry.Parse("0s,100ms,2m")
	require.NoError(t, err)
	for i, want := range []time.Duration{0, 100 * time.Millisecond, 2 * time.Minute} {
		wait, again := p(retry.Attempt{N: i + 1})
		require.True(t, again)
		require.Equal(t, want, wait)
	}
	_, again = p(retry.Attempt{N: 4})
	require.False(t, again)
	for _, none := range []string{"", "none"} {
		p, err = retry.Parse(none)
		require.NoError(t, err)
		require.Nil(t, p)
	}
	for _, bad := range []string{"often", "1", "1s,", "-1s", "1s,x", "1s 2s"} {
		_, err = retry.Parse(bad)
		require.ErrorContains(t, err, "write none, exponential")
	}
}
