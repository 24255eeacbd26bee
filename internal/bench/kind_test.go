package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// lazy moves nothing and says that it did.
var lazy = Kind{
	Name: "lazy",
	Serve: func(l net.Listener, _ Place) (Server, error) {
		return Server{always, l.Close}, nil
	},
	Dial: func(context.Context, Place) (Client, error) {
		return Client{Run: func(context.Context, Op) error { return nil }, Close: func() error { return nil }}, nil
	},
}

// A test binary is an end, too.
func TestMain(m *testing.M) {
	BeEnd(append(Kinds(), lazy))
	os.Exit(m.Run())
}

// briefly is a configuration of one round, with files in a folder of its own, whose
// name is short: a Unix socket's path has 108 bytes. The folder must be empty in the
// end.
func briefly(t *testing.T) Config {
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
	return Config{Kinds: append(Kinds(), lazy), Size: 1 << 20, MinRounds: 2, MaxRounds: 2, Batch: 5, Smoke: true}
}

// opsOf are what a kind does.
func opsOf(k Kind) []Op {
	switch name := k.Name; {
	case name == Copying:
		return []Op{Push}
	case name == Folder:
		return []Op{Push, Pull, PullToFile, Push, Pull}
	case name == InMemory:
		return []Op{Push}
	case strings.Contains(name, "connections"):
		return []Op{Upload, Echo, ReLU}
	case k.OwnMemory:
		return []Op{Upload, Echo, ReLU, FirstResult, CallBeside, Call}
	}
	return append(slices.Clone(moves), Call)
}

func TestEveryKindMovesEveryByte(t *testing.T) {
	for _, processes := range []int{1, 2} {
		for _, network := range []string{"tcp", "unix"} {
			for _, k := range Kinds() {
				t.Run(fmt.Sprintf("%d %s %s", processes, network, k.Name), func(t *testing.T) {
					c := briefly(t)
					sizes := []int{8, ChunkBytes, 3*ChunkBytes + 8}
					if processes == 2 {
						sizes = sizes[2:] // a process each
					}
					for _, size := range sizes {
						ops := opsOf(k)
						if size < ChunkBytes { // no call ends beside that
							ops = slices.DeleteFunc(slices.Clone(ops), func(op Op) bool { return op == CallBeside })
						}
						all, err := c.Measure(t.Context(), Group{Net: network, Processes: processes, Size: size, Ops: ops, Entrants: Beside(k.Name)})
						require.NoError(t, err)
						require.Len(t, all, len(ops))
						for _, x := range all {
							require.Len(t, x.Pairs, 2)
							for _, p := range x.Pairs {
								require.Positive(t, p.Ours.Time, x.Work)
								require.Equal(t, x.Work == FirstResult, p.Ours.Total >= p.Ours.Time)
								require.Equal(t, x.Work == Call || x.Work == CallBeside, p.Ours.P99 >= p.Ours.Time)
							}
						}
					}
				})
			}
		}
	}
}

func TestBytesThatDidNotArriveHaveNoTime(t *testing.T) {
	c := briefly(t)
	for _, processes := range []int{1, 2} {
		for _, op := range []Op{Upload, Echo, ReLU, Call} {
			_, err := c.Measure(t.Context(), Group{Net: "tcp", Processes: processes, Size: 1 << 20, Ops: []Op{op}, Entrants: Beside(lazy.Name)})
			require.ErrorContains(t, err, "that arrived is not the", op)
		}
	}
	source, to := make([]byte, 3*ChunkBytes), make([]byte, 3*ChunkBytes)
	FillFloats(source)
	for name, run := range map[string]func() error{
		"one page is stale": func() error {
			copy(to, source[:2*ChunkBytes])
			copy(to[2*ChunkBytes+4096:], source[2*ChunkBytes+4096:])
			return nil
		},
		"the transfer fails": func() error { copy(to, source); return net.ErrClosed },
	} {
		copy(to, source) // what an earlier run left
		s, err := transfer(Echo, to, source, run)
		require.Error(t, err, name)
		require.Zero(t, s, name)
	}
}

func TestWhatIsNotKnownIsRefused(t *testing.T) {
	c := briefly(t)
	good := Group{Net: "tcp", Processes: 1, Size: 8, Ops: []Op{Upload}, Entrants: Beside(Tensorferry)}
	for want, change := range map[string]func(*Group){
		`no kind "pigeon"`:      func(g *Group) { g.Entrants = Beside("pigeon") },
		"has no push":           func(g *Group) { g.Ops, g.Entrants = []Op{Push}, Beside(StockGRPC.Name) },
		"tensors of 12 bytes":   func(g *Group) { g.Size = 12 },
		"tensors of 0 bytes":    func(g *Group) { g.Size = 0 },
		"unknown network":       func(g *Group) { g.Net = "pigeon" },
		"no such file":          func(g *Group) { g.Processes, g.Entrants[0].Program = 2, []string{filepath.Join(c.Kinds[0].Name, "no")} },
		"tensors of -8 bytes":   func(g *Group) { g.Size = -8 },
		"cp and fsync, upload:": func(g *Group) { g.Entrants = Beside(Copying) },
	} {
		g := good
		g.Entrants = slices.Clone(g.Entrants)
		change(&g)
		_, err := c.Measure(t.Context(), g)
		require.ErrorContains(t, err, want)
	}
}

func TestAnInterruptedRunLeavesNothing(t *testing.T) {
	for _, processes := range []int{1, 2} {
		for _, g := range []Group{
			{Ops: []Op{Echo}, Entrants: Beside(Tensorferry)},
			{Ops: []Op{Echo}, Entrants: Beside(RawName(codec.CRC32, smallPiece))},
			{Ops: []Op{Push}, Entrants: Beside(Folder, Copying)},
			{Ops: []Op{Upload}, Delay: 10 * time.Millisecond, Entrants: Beside(StockGRPC.Name)},
		} {
			t.Run(fmt.Sprint(processes, g.Entrants), func(t *testing.T) {
				c := briefly(t)
				g.Net, g.Processes, g.Size = "tcp", processes, 8*ChunkBytes
				why := errors.New("no more")
				ctx, cancel := context.WithCancelCause(t.Context())
				c.Progress = func(string) { cancel(why) }
				_, err := c.Measure(ctx, g)
				require.ErrorIs(t, err, why)
			})
		}
	}
}

func TestALongWayDelaysEveryByteBothWays(t *testing.T) {
	c := briefly(t)
	const delay = 20 * time.Millisecond
	for _, network := range []string{"tcp", "unix"} {
		all, err := c.Measure(t.Context(), Group{
			Net: network, Processes: 1, Delay: delay, Size: SmallBytes, Ops: []Op{Upload, Echo}, Entrants: Beside(RawName(codec.CRC32C, ChunkBytes)),
		})
		require.NoError(t, err)
		for _, x := range all {
			require.GreaterOrEqual(t, x.Ours.Time, delay)
		}
	}
}

func TestRawRefusesAPieceWhoseChecksumFails(t *testing.T) {
	testkit.Start(t)
	for _, sum := range []codec.Checksum{codec.CRC32C, codec.CRC32} {
		a, b := net.Pipe()
		piece := []byte("a piece")
		go func() { // ends when Receive has read it
			_, _ = a.Write(append(binary.LittleEndian.AppendUint32(nil, sum.Update(0, piece)^1), piece...))
		}()
		err := (&rawLink{Conn: b, sum: sum}).Receive(make([]byte, len(piece)))
		require.ErrorContains(t, err, "checksum")
	}
}

func TestNoTwoMovesBeginAlike(t *testing.T) {
	for _, op := range moves {
		a, b := net.Pipe()
		go func() { _ = (&rawLink{Conn: a}).Tell(op, true) }() // ends when it is heard
		got, err := (&rawLink{Conn: b}).Hear()
		require.NoError(t, err)
		require.Equal(t, op, got)
		go func() { _, _ = a.Write([]byte{0}) }()
		_, err = (&rawLink{Conn: b}).Hear()
		require.Error(t, err)
		require.NoError(t, errors.Join(a.Close(), b.Close()))
	}
}

func TestReLUOfTwoFloatsAtATimeIsThatOfEach(t *testing.T) {
	values := []float32{
		1, -1, 0, float32(math.Copysign(0, -1)), float32(math.Inf(1)), float32(math.Inf(-1)),
		math.MaxFloat32, -math.MaxFloat32, math.SmallestNonzeroFloat32, -math.SmallestNonzeroFloat32,
	}
	for _, a := range values {
		for _, b := range values {
			var data [8]byte
			binary.LittleEndian.PutUint32(data[:], math.Float32bits(a))
			binary.LittleEndian.PutUint32(data[4:], math.Float32bits(b))
			Rectify(data[:])
			for i, x := range []float32{a, b} {
				require.Equal(t, math.Float32bits(max(x, 0)), binary.LittleEndian.Uint32(data[4*i:]), "relu of %v in %v, %v", x, a, b)
			}
		}
	}
}

func TestGeneratedFloatsAreNumbersOfBothSigns(t *testing.T) {
	data := make([]byte, 64<<10)
	FillFloats(data)
	signs := map[bool]int{}
	for ; len(data) > 0; data = data[4:] {
		x := math.Float32frombits(binary.LittleEndian.Uint32(data))
		a := math.Abs(float64(x))
		require.True(t, a >= 0.5 && a < 1, "%v", x)
		signs[x < 0]++
	}
	require.Greater(t, signs[true], 7000)
	require.Greater(t, signs[false], 7000)
}

func TestCheckFindsEveryByteThatDiffers(t *testing.T) {
	source := make([]byte, 2*ChunkBytes+8)
	FillFloats(source)
	file := filepath.Join(t.TempDir(), "copy")
	for _, op := range moves {
		made := bytes.Clone(source)
		if op == ReLU {
			Rectify(made)
		}
		check := func() error {
			if op != Echo {
				return Check(op, made, source)
			}
			require.NoError(t, os.WriteFile(file, append([]byte("header"), made...), 0o600))
			return errors.Join(Check(op, made, source), checkFile(file, source))
		}
		require.NoError(t, check())
		for _, i := range []int{0, ChunkBytes - 1, ChunkBytes, len(made) - 1} {
			made[i] ^= 1
			require.Error(t, check(), "%s: byte %d differs", op, i)
			made[i] ^= 1
		}
		spoil(made, source)
		require.Error(t, check(), "%s: all pages are spoiled", op)
	}
	require.NoError(t, os.WriteFile(file, source[:len(source)-8], 0o600))
	require.Error(t, checkFile(file, source), "the end is missing")
}

func TestAnEndEndsWithItsInput(t *testing.T) {
	testkit.Start(t)
	require.NoError(t, ServeEnd(t.Context(), bytes.NewReader(nil), nopCloser{io.Discard}, nil))
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }
