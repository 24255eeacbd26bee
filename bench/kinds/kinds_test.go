package kinds

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/rpc"
	"net/rpc/jsonrpc"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/bench/measure"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// A test binary is an end, too.
func TestMain(m *testing.M) {
	measure.BeEnd(All())
	os.Exit(m.Run())
}

// briefly is a configuration of one round, with files in a folder of its own, whose
// name is short: a Unix socket's path has 108 bytes. The folder must be empty in the
// end.
func briefly(t *testing.T) measure.Config {
	t.Helper()
	testkit.Start(t)
	dir, err := os.MkdirTemp("", "b") //nolint:usetesting // t.TempDir is long
	require.NoError(t, err)
	t.Cleanup(func() {
		left, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Empty(t, left)
		require.NoError(t, os.RemoveAll(dir))
	})
	t.Setenv("TMPDIR", dir)
	t.Setenv("GORACE", "atexit_sleep_ms=0") // or each end would sleep for a second in the end
	return measure.Config{Size: 1 << 20, MinRounds: 1, MaxRounds: 1, Batch: 5, Smoke: true}
}

// opsOf are what a kind does.
func opsOf(k bench.Kind) []bench.Op {
	switch name := k.Name; {
	case name == Copying:
		return []bench.Op{measure.Push}
	case name == Folder, name == RawStored:
		return []bench.Op{measure.Push, measure.Pull, measure.PullToFile, measure.Push, measure.Pull}
	case name == InMemory:
		return []bench.Op{measure.Push, measure.PushMany, measure.PushSet, measure.PullMany}
	case strings.HasPrefix(name, Steps), strings.HasPrefix(name, Compute), strings.Contains(name, "BytesValue"):
		return []bench.Op{bench.Call, measure.AtOnce}
	case name == Tar:
		return []bench.Op{measure.PushMany, measure.PushSet, measure.PullMany}
	case strings.Contains(name, "connections"):
		return []bench.Op{bench.Upload, bench.Echo, bench.ReLU}
	case k.OwnMemory:
		return []bench.Op{bench.Upload, bench.Echo, bench.ReLU, measure.FirstResult, measure.CallBeside, bench.Call}
	}
	return append(slices.Clone(bench.Moves), bench.Call)
}

func TestEveryKindMovesEveryByte(t *testing.T) {
	for _, k := range All() {
		if strings.Contains(k.Name, "connections") && k.Name != (Load{4, 16}).Name() {
			continue // one of them does
		}
		for _, tc := range []struct {
			network string
			size    int
		}{{"tcp", 8}, {"tcp", bench.ChunkBytes + 8}, {"unix", bench.ChunkBytes + 8}} {
			t.Run(fmt.Sprint(tc.network, " ", tc.size, " ", k.Name), func(t *testing.T) {
				c, ops := briefly(t), opsOf(k)
				if tc.size < bench.ChunkBytes { // no call ends beside that
					ops = slices.DeleteFunc(slices.Clone(ops), func(op bench.Op) bool { return op == measure.CallBeside })
				}
				all, err := c.Measure(t.Context(), measure.Group{Net: tc.network, Size: tc.size, Ops: ops, Entrants: measure.Beside(k.Name)})
				require.NoError(t, err)
				require.Len(t, all, len(ops))
				for _, x := range all {
					require.Len(t, x.Pairs, 1)
					p := x.Pairs[0].Ours
					require.Positive(t, p.Time, x.Work)
					require.Equal(t, x.Work == measure.FirstResult, p.Total >= p.Time)
					require.Equal(t, x.Work == bench.Call || x.Work == measure.CallBeside, p.P99 >= p.Time)
				}
			})
		}
	}
}

func TestWhatIsNotKnownIsRefused(t *testing.T) {
	c := briefly(t)
	good := measure.Group{Net: "tcp", Size: 8, Ops: []bench.Op{bench.Upload}, Entrants: measure.Beside(bench.Tensorferry)}
	for want, change := range map[string]func(*measure.Group){
		`no kind "pigeon"`:    func(g *measure.Group) { g.Entrants = measure.Beside("pigeon") },
		"has no push":         func(g *measure.Group) { g.Ops, g.Entrants = []bench.Op{measure.Push}, measure.Beside(bench.StockGRPC) },
		"tensors of 12 bytes": func(g *measure.Group) { g.Size = 12 },
		"tensors of 0 bytes":  func(g *measure.Group) { g.Size = 0 },
		"unknown network":     func(g *measure.Group) { g.Net = "pigeon" },
		"no such file": func(g *measure.Group) {
			g.Entrants[0].Program = []string{filepath.Join("nowhere", "no")}
		},
		"tensors of -8 bytes":   func(g *measure.Group) { g.Size = -8 },
		"cp and fsync, upload:": func(g *measure.Group) { g.Entrants = measure.Beside(Copying) },
	} {
		g := good
		g.Entrants = slices.Clone(g.Entrants)
		change(&g)
		_, err := c.Measure(t.Context(), g)
		require.ErrorContains(t, err, want)
	}
}

func TestAnInterruptedRunLeavesNothing(t *testing.T) {
	for _, g := range []measure.Group{
		{Ops: []bench.Op{bench.Echo}, Entrants: measure.Beside(bench.Tensorferry)},
		{Ops: []bench.Op{bench.Echo}, Entrants: measure.Beside(bench.RawName(codec.CRC32, bench.SmallPiece))},
		{Ops: []bench.Op{measure.Push}, Entrants: measure.Beside(Folder, Copying)},
		{Ops: []bench.Op{bench.Upload}, Entrants: measure.Beside(bench.StockGRPC)},
	} {
		t.Run(fmt.Sprint(g.Entrants), func(t *testing.T) {
			c := briefly(t)
			g.Net, g.Size = "tcp", 8*bench.ChunkBytes
			why := errors.New("no more")
			ctx, cancel := context.WithCancelCause(t.Context())
			c.Progress = func(string) { cancel(why) }
			_, err := c.Measure(ctx, g)
			require.ErrorIs(t, err, why)
		})
	}
}

// The ends of the other tests are processes, where nobody looks for leaks.
func TestTheEndsOfEveryKindLeaveNothing(t *testing.T) {
	for _, k := range All() {
		t.Run(k.Name, func(t *testing.T) {
			briefly(t)
			role, job := measure.Role{Kind: k.Name, Size: bench.ChunkBytes + 8, Network: "tcp", Dir: t.TempDir()}, measure.Job{Op: opsOf(k)[0]}
			_, err := identity.WriteCertificates(role.Dir, nil, "bench")
			require.NoError(t, err)
			var ends []*rpc.Client
			for range 2 {
				near, its := net.Pipe()
				ended := make(chan error, 1)
				go func() { ended <- measure.ServeEnd(t.Context(), its, its, All()) }() // ends with the pipe
				end := jsonrpc.NewClient(near)
				defer func() { require.NoError(t, errors.Join(end.Close(), <-ended)) }() // the client first
				ends = append(ends, end)
				require.NoError(t, end.Call("End.Start", role, &role.Address))
			}
			require.NoError(t, ends[0].Call("End.Prepare", job, new(bool)))
			require.NoError(t, ends[1].Call("End.Move", job, new(bench.Sample)))
			require.NoError(t, ends[0].Call("End.Finish", job, new(bench.Sample)))
		})
	}
}

func TestAFileThatDiffersIsFound(t *testing.T) {
	source, file := make([]byte, 2*bench.ChunkBytes+8), filepath.Join(t.TempDir(), "copy")
	bench.FillFloats(source)
	check := func(data []byte) error {
		require.NoError(t, os.WriteFile(file, append([]byte("header"), data...), 0o600))
		return checkFile(file, source)
	}
	require.NoError(t, check(source))
	require.Error(t, check(source[:len(source)-8]), "the end is missing")
	for _, i := range []int{0, bench.ChunkBytes - 1, bench.ChunkBytes, len(source) - 1} {
		data := slices.Clone(source)
		data[i] ^= 1
		require.Error(t, check(data), "byte %d differs", i)
	}
}
