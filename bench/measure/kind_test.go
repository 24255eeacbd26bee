package measure

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// lazy moves nothing and says that it did.
var lazy = bench.Kind{
	Name: "lazy",
	Serve: func(ctx context.Context, l net.Listener, _ bench.Place) error {
		<-ctx.Done()
		return l.Close()
	},
	Dial: func(context.Context, bench.Place) (bench.Client, error) {
		return bench.Client{Run: func(context.Context, bench.Op, *time.Time) error { return nil }, Close: func() error { return nil }}, nil
	},
}

// A test binary is an end, too.
func TestMain(m *testing.M) {
	BeEnd([]bench.Kind{lazy})
	os.Exit(m.Run())
}

func TestBytesThatDidNotArriveHaveNoTime(t *testing.T) {
	testkit.Start(t)
	t.Setenv("GORACE", "atexit_sleep_ms=0") // or each end would sleep for a second in the end
	for _, op := range []bench.Op{bench.Upload, bench.Echo, bench.ReLU, bench.Call} {
		_, err := Smoke().Measure(t.Context(), Group{Net: "tcp", Size: 1 << 20, Ops: []bench.Op{op}, Entrants: Beside(lazy.Name)})
		require.ErrorContains(t, err, "that arrived is not the", op)
	}
}

func TestAnEndEndsWithItsInput(t *testing.T) {
	testkit.Start(t)
	require.NoError(t, ServeEnd(t.Context(), bytes.NewReader(nil), nopCloser{io.Discard}, nil))
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

func TestBusyLoopsEndWithTheirInputAndWithTheContext(t *testing.T) {
	testkit.Start(t)
	end, err := Busy(t.Context())
	require.NoError(t, err)
	require.NoError(t, end())
	ctx, cancel := context.WithCancel(t.Context())
	end, err = Busy(ctx)
	require.NoError(t, err)
	cancel()
	require.NoError(t, end())
}
