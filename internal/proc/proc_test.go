package proc

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

// shell returns a script that has not been started.
func shell(ctx context.Context, script string) *Child {
	return New(exec.CommandContext(ctx, "sh", "-c", script))
}

func TestAServerIsAwaitedByTheLineThatHasItsAddress(t *testing.T) {
	testkit.Start(t)
	c := shell(t.Context(), "echo starting >&2; echo address=here >&2; echo address=there >&2; cat")
	var err error
	c.In, err = c.StdinPipe()
	require.NoError(t, err)
	at, err := c.Listen(t.Context(), &c.Log, func(line string) string {
		_, a, _ := strings.Cut(line, "address=")
		return a
	})
	require.NoError(t, err)
	require.Equal(t, "here", at)
	require.NoError(t, c.Stop())
	require.NoError(t, c.Stop(), "a second time")
	require.Equal(t, "starting\naddress=here\naddress=there\n", c.Log.Tail())
}

func TestAServerThatDoesNotListenIsAnErrorThatSaysWhatItSaid(t *testing.T) {
	testkit.Start(t)
	_, _, err := Serve(t.Context(), exec.CommandContext(t.Context(), "sh", "-c", "echo no room >&2; exit 3"))
	require.ErrorContains(t, err, "where it listens")
	require.ErrorContains(t, err, "no room")
	require.ErrorContains(t, err, "exit status 3")
	_, _, err = Serve(t.Context(), exec.CommandContext(t.Context(), "sh", "-c", "exit 0"))
	require.ErrorContains(t, err, "where it listens")
}

func TestAChildEndsWithItsContext(t *testing.T) {
	testkit.Start(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("no more")
	c := shell(ctx, "echo up >&2; exec sleep 1000")
	_, err := c.Listen(ctx, &c.Log, func(line string) string {
		cancel(why)
		return ""
	})
	require.ErrorIs(t, err, why)
}

func TestOutputIsWhatAChildPrintsAndItsErrorWhatItSays(t *testing.T) {
	testkit.Start(t)
	t.Setenv("TENSORFERRY_LISTEN", "elsewhere")
	out, err := shell(t.Context(), "echo to: $TENSORFERRY_LISTEN").Output()
	require.NoError(t, err)
	require.Equal(t, "to:\n", string(out))
	_, err = shell(t.Context(), "echo it is full >&2; exit 1").Output()
	require.ErrorContains(t, err, "it is full")
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
}

func TestALogKeepsItsLastLinesAndTellsOfEach(t *testing.T) {
	var all []string
	l := Log{Each: func(line string) { all = append(all, line) }}
	text := strings.Repeat("x\n", logLines) + "first\nsecond\nunfinished"
	for i := range text {
		n, err := l.Write([]byte(text[i : i+1]))
		require.NoError(t, err)
		require.Equal(t, 1, n)
	}
	require.Len(t, all, logLines+2)
	require.True(t, strings.HasSuffix(l.Tail(), "x\nfirst\nsecond\nunfinished"))
	require.Equal(t, logLines, strings.Count(l.Tail(), "\n"))
	l.Close()
	l.Close()
	require.Equal(t, "unfinished", all[logLines+2])
	long := strings.Repeat("y", lineBytes+1)
	for _, part := range []string{long, long + "\n"} {
		n, err := l.Write([]byte(part))
		require.NoError(t, err)
		require.Equal(t, len(part), n)
	}
	require.Equal(t, []string{long[1:]}, all[logLines+3:])
}

func TestThisProcessHasMemoryAndDescriptors(t *testing.T) {
	r, err := ResidentOf(os.Getpid())
	if errors.Is(err, os.ErrNotExist) {
		t.Skip("no /proc here")
	}
	require.NoError(t, err)
	require.Greater(t, r.Own, int64(1<<20))
	require.GreaterOrEqual(t, r.Peak, r.Own)
	require.Positive(t, MostDescriptors())
}
