package demo

import (
	"bufio"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/examples/local"
	"github.com/tensorferry/tensorferry/examples/text"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
)

// dialed returns a client of a server with the trunk, over a socket, and a host for the other parts.
func dialed(t *testing.T) (*client.Client, *cpu.Host) {
	t.Helper()
	testkit.Start(t)
	host := cpu.NewHost(cpu.HostConfig{})
	t.Cleanup(host.Close)
	trunk, err := cpu.LoadFS(host, text.ModelFS(), "trunk")
	require.NoError(t, err)
	address, stop, err := local.Serve(host, server.Config{}, trunk)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, stop()) })
	cl, err := client.Dial(address, client.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cl.Close()) })
	return cl, host
}

func TestTheLikeliestTextIsThatOfTorch(t *testing.T) {
	cl, host := dialed(t)
	served, err := cl.Sequence(t.Context(), client.SequenceRequest{Model: textTrunk, MaxRows: text.Positions})
	require.NoError(t, err)
	for name, trunk := range map[string]*client.Sequence{"split": served, "unsplit": nil} {
		w, err := newWriter(t.Context(), host, trunk, 1)
		require.NoError(t, err)
		w.temperature = 1e-9
		for len(w.text) < len(text.Torch()) {
			require.NoError(t, w.next(t.Context()))
		}
		w.Close()
		if string(w.text) != text.Torch() {
			t.Errorf("%s: wrote %q, and torch %q", name, w.text, text.Torch())
		}
	}
	require.EqualValues(t, len(text.Torch())-1, served.Rows())
	require.NoError(t, served.Close())
}

func TestTextsBySplitAndUnsplitNetworksAreTheSame(t *testing.T) {
	cl, _ := dialed(t)
	texts := map[string]bool{}
	for range 5 {
		var out strings.Builder
		report, err := write(t.Context(), cl, &columns{w: bufio.NewWriter(&out)}) // compares them
		require.NoError(t, err)
		require.Contains(t, report, "the same on both sides")
		texts[out.String()] = true
	}
	require.Len(t, texts, 5, "each has a seed of its own")
}

func TestColumnsBreakBetweenWords(t *testing.T) {
	left := "One two three four five six seven eight nine ten.\nA " + strings.Repeat("w", 40) + " end."
	right := strings.Replace(left, "two", "TWO", 1)
	want := []string{
		"One two three four five six seven    One TWO three four five six seven",
		"eight nine ten.                      eight nine ten.",
		"A                                    A",
		strings.Repeat("w", 35) + "  " + strings.Repeat("w", 35),
		"wwwww end.                           wwwww end.",
	}
	for _, live := range []bool{false, true} {
		var out strings.Builder
		c := &columns{w: bufio.NewWriter(&out), live: live}
		for n := 1; n <= len(left); n++ {
			require.NoError(t, c.show([]byte(left[:n]), []byte(right[:n]), n == len(left)))
		}
		var lines []string
		for line := range strings.Lines(out.String()) {
			cells := ""
			for over := range strings.SplitSeq(strings.TrimSuffix(line, "\n"), "\r") {
				cells = over + cells[min(len(over), len(cells)):] // as a terminal does
			}
			lines = append(lines, strings.TrimRight(cells, " "))
		}
		require.Equal(t, want, lines, "live: %v", live)
	}
}
