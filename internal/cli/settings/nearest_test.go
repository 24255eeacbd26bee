package settings

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheNearestNameIsTheMostAlike(t *testing.T) {
	names := []string{"listen", "max-calls", "max-chunk", "metrics"}
	for key, want := range map[string]string{
		"listne": "listen", "max-call": "max-calls", "chunk": "max-chunk", "metric": "metrics", "maxcalls": "max-calls", "": "listen",
		strings.Repeat("metrics", 1000): "metrics",
	} {
		require.Equal(t, want, Nearest(key, names), key)
	}
}
