//go:build linux

package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/internal/link/linktest"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// liar is a worker in Go: each gets what the host says, until it returns false.
func liar(t *testing.T, c Config, ready string, each func(g *linktest.Guest, m *link.Run) bool) (*Host, *linktest.Guest) {
	t.Helper()
	socket, g := linktest.Pair(t)
	go func() { // ends with the link
		g.Send(&link.Hello{JSON: []byte(`{"link":1,"version":"1","role":"worker","pid":1}`)})
		if _, err := g.Recv(); err != nil {
			return
		}
		g.Send(&link.Ready{JSON: []byte(ready)})
		for {
			m, err := g.Recv()
			if err != nil {
				return
			}
			if r, ok := m.(*link.Run); ok && !each(g, r) {
				return
			}
		}
	}()
	c.Name, c.Socket, c.Version, c.MemoryBytes = "liar", socket, "1", 64<<20
	h, err := Start(c)
	require.NoError(t, err)
	t.Cleanup(h.Close)
	return h, g
}

// wide is a tensor in blocks of 1 MiB, more than a run has slots for.
func wide(t *testing.T) tensor.Tensor {
	const rows, width = 256, 64 << 10
	x, err := tensor.Of(testkit.Bytes(rows*width, 7), rows, width)
	require.NoError(t, err)
	return x
}

// A chunk of a narrow result spans more blocks than a run has slots.
func TestANarrowResultBesideOneInTheInputEndsTheWorker(t *testing.T) {
	for _, inside := range []bool{false, true} {
		t.Run(fmt.Sprintf("inside=%v", inside), func(t *testing.T) {
			testkit.Start(t)
			h, _ := liar(t, Config{}, `{"inputs":[{"name":"x","shape":[-2]}],"outputs":[{"name":"y","shape":[-2]},{"name":"s","shape":[-2]}],"rows":1}`,
				func(g *linktest.Guest, r *link.Run) bool {
					y := r.Inputs[0]
					if !inside {
						y.Range = g.Take(int(y.Range.Len))
					}
					n := y.Shape[0]
					g.Send(&link.Answer{Head: link.Head{ID: r.ID}, Outputs: []link.Tensor{y, {DType: 6, Shape: []int64{n, 1}, Range: g.Take(int(n))}}})
					return true
				})
			_, err := enginetest.Compute(t.Context(), h.Model(), []tensor.Tensor{wide(t)}, nil, 1<<20, 0)
			if inside {
				require.ErrorIs(t, err, engine.ErrUnavailable)
			} else {
				require.NoError(t, err)
			}
		})
	}
}

func TestAModelMayReturnItsInputBesideSomethingNarrow(t *testing.T) {
	testkit.Start(t)
	h, err := Start(python(t, "both"))
	require.NoError(t, err)
	defer h.Close()
	x := wide(t)
	outs, err := enginetest.Compute(t.Context(), h.Model(), []tensor.Tensor{x}, nil, 1<<20, 0)
	require.NoError(t, err)
	require.Equal(t, x.Data, outs[0].Data)
	require.Equal(t, x.Data[64<<10], outs[1].Data[1])
}

func TestAWorkerThatDoesNotReadEnds(t *testing.T) {
	testkit.Start(t)
	stop := make(chan struct{})
	h, g := liar(t, Config{obey: 300 * time.Millisecond, block: 2 * time.Second},
		`{"inputs":[{"name":"x","shape":[-2]}],"outputs":[{"name":"y","shape":[-2]}],"rows":1}`,
		func(g *linktest.Guest, r *link.Run) bool {
			for range 900 { // what they are answered with fills the socket
				g.Send(&link.Take{Head: link.Head{ID: g.ID()}, Bytes: 1 << 63, Millis: 1})
			}
			g.Send(&link.Answer{Head: link.Head{ID: r.ID}, Outputs: []link.Tensor{r.Inputs[0]}})
			<-stop
			return false
		})
	_, err := enginetest.Compute(t.Context(), h.Model(), vector(4), nil, 1<<20, 0)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, _ = enginetest.Compute(ctx, h.Model(), vector(4), nil, 1<<20, 0) // it may have got an answer, or not
	testkit.Eventually(t, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.guests) == 0
	}, "nobody is left")
	close(stop)
	g.Close()
}

func TestWhatAGuestDoesNotMakePublicIsForTheLogAlone(t *testing.T) {
	const trace = "Traceback\n  File \"m.py\", line 3, in f\n    raise KeyError('secret')\nKeyError: 'secret'\n"
	for public, says := range map[bool]string{true: `,"public":true`, false: ""} {
		text, err := json.Marshal(trace)
		require.NoError(t, err)
		err = failure(&link.Answer{JSON: fmt.Appendf(nil, `{"message":"KeyError in /home/model"%s,"trace":%s}`, says, text)})
		require.EqualError(t, err, "KeyError: 'secret'")
		told, ok := errors.AsType[engine.PublicError](err)
		require.Equal(t, public, ok)
		if ok {
			require.Equal(t, "KeyError in /home/model", told.Public())
		}
		traced, ok := errors.AsType[engine.TracedError](err)
		require.True(t, ok)
		place, all := traced.Trace()
		require.Equal(t, `File "m.py", line 3, in f`, place)
		require.Equal(t, trace, all)
	}
}
