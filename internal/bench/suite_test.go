package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

func tensorMemory(n int) Memory {
	m := Memory{make([]byte, n), make([]byte, n), make([]byte, n)}
	FillFloats(m.Source)
	return m
}

func TestOursMovesEveryByteOverEveryNetwork(t *testing.T) {
	testkit.Start(t)
	for _, network := range []string{"tcp", "unix"} {
		for _, size := range []int{8, ChunkBytes, 3*ChunkBytes + 8} {
			t.Run(fmt.Sprintf("%s %d bytes", network, size), func(t *testing.T) {
				var c oursClient
				o, err := ours(&c, noStore).Open(t.Context(), network, tensorMemory(size))
				if err != nil {
					t.Fatal(err)
				}
				for _, op := range []Op{Upload, Echo, ReLU, Upload} {
					if s, err := o.Move(t.Context(), op); err != nil || s.Time <= 0 {
						t.Fatalf("%s: %v, %v", op, s, err)
					}
				}
				if first, total, err := c.firstResult(t.Context(), o); err != nil || first <= 0 || first > total {
					t.Fatalf("first result after %v of %v, %v", first, total, err)
				}
				if s, err := batch(10, func() (time.Duration, error) { return o.ping(t.Context()) }); err != nil || s.Time <= 0 || s.P99 < s.Time {
					t.Fatalf("calls: %v, %v", s, err)
				}
				if err := o.Close(); err != nil {
					t.Fatal(err)
				}
			})
		}
	}
}

func TestOursEndsWithItsContext(t *testing.T) {
	testkit.Start(t)
	o, err := Tensorferry.Open(t.Context(), "tcp", tensorMemory(4*ChunkBytes))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for { // the cancellation may come too late for a call, never for all of them
		if _, err := o.Move(ctx, Echo); err != nil {
			break
		}
	}
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestPairsAreAddedUntilTheMedianIsStable(t *testing.T) {
	for name, tc := range map[string]struct {
		ours        func(n int) time.Duration
		least, most int
	}{
		"always the same": {func(int) time.Duration { return 50 }, 9, 9},
		"never the same":  {func(n int) time.Duration { return time.Duration(100 + 900*(n%2)) }, 25, 25},
		"slow at first":   {func(n int) time.Duration { return time.Duration(50 + 1000*max(0, 6-n)) }, 10, 24},
	} {
		t.Run(name, func(t *testing.T) {
			var order strings.Builder
			n := -2 // the first pair only warms up
			ours := func(context.Context) (Sample, error) {
				n++
				order.WriteByte('o')
				return Sample{Time: tc.ours(n)}, nil
			}
			theirs := func(context.Context) (Sample, error) {
				order.WriteByte('t')
				return Sample{Time: 100}, nil
			}
			var r Report
			c := Config{MinPairs: MinPairs, MaxPairs: MaxPairs}
			if err := c.compare(t.Context(), &r, "tcp", "upload", 100, ours, Peer{Name: "raw-crc", Do: theirs}); err != nil {
				t.Fatal(err)
			}
			x := r.Comparisons[0]
			if got := len(x.Pairs); got < tc.least || got > tc.most || x.Ratio.N != got {
				t.Errorf("%d pairs, want %d to %d", got, tc.least, tc.most)
			}
			if want := strings.Repeat("otto", MaxPairs); !strings.HasPrefix(want, order.String()) {
				t.Errorf("the order was %s", order.String())
			}
		})
	}
}

func TestRatiosAreOfRatesAndForCallsOfTimes(t *testing.T) {
	for _, tc := range []struct {
		net, work, peer string
		theirs          time.Duration
		ratio           float64
		required        string
	}{
		{"tcp", "upload", "raw-crc", 85, 0.85, "at least 0.85: met"},
		{"tcp", "upload", "raw-crc", 84, 0.84, "at least 0.85: MISSED"},
		{"tcp", "upload", "raw", 84, 0.84, "–"},
		{"unix", "upload", "raw-crc", 84, 0.84, "–"},
		{"tcp", "call", "grpc", 50, 2, "at most 1.5: MISSED"},
		{"tcp", "call", "grpc", 80, 1.25, "at most 1.5: met"},
		{"tcp", "call", "grpc-raw-codec", 80, 1.25, "–"},
		{"tcp", "pull", "raw-crc", 80, 0.8, "at least 0.8: met"},
		{"tcp", "pull", "raw-crc", 79, 0.79, "at least 0.8: MISSED"},
		{"tcp", "pull-to-file", "raw-crc", 79, 0.79, "–"},
		{"tcp", "push", "cp", 60, 0.6, "at least 0.6: met"},
		{"unix", "push", "cp", 59, 0.59, "–"},
	} {
		sample := func(d time.Duration) func(context.Context) (Sample, error) {
			return func(context.Context) (Sample, error) { return Sample{Time: d, CPU: 2 * d, P99: 3 * d}, nil }
		}
		var r Report
		err := Config{MinPairs: 1, MaxPairs: 1}.compare(t.Context(), &r, tc.net, tc.work, 1000, sample(100), Peer{Name: tc.peer, Do: sample(tc.theirs)})
		if err != nil {
			t.Fatal(err)
		}
		x := r.Comparisons[0]
		if !near(x.Ratio.Median, tc.ratio) || x.Required.String() != tc.required {
			t.Errorf("%v: ratio %v, required %v", tc, x.Ratio, x.Required)
		}
		if want := (Figures{Time: 100, P99: 300, Rate: 10, CPU: 0.2}); !near(x.Ours.CPU, want.CPU) || !near(x.Ours.Rate, want.Rate) ||
			x.Ours.Time != want.Time || x.Ours.P99 != want.P99 {
			t.Errorf("figures %+v, want %+v", x.Ours, want)
		}
	}
}

func TestSmokeRunReportsEveryWorkBesideEveryPeer(t *testing.T) {
	testkit.Start(t)
	c := Smoke([]string{"tcp", "unix"})
	c.Size, c.Batch = 2*ChunkBytes, 5
	r, err := Run(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, x := range r.Comparisons {
		got = append(got, x.Net+" "+x.Work+" "+x.Peer)
		if len(x.Pairs) != 3 || x.Required != nil {
			t.Errorf("%s: %d pairs, required %v", got[len(got)-1], len(x.Pairs), x.Required)
		}
	}
	var want []string
	for _, network := range c.Networks {
		for _, work := range []string{"upload", "echo", "relu"} {
			for _, peer := range []string{"raw-crc", "raw", "grpc"} {
				want = append(want, network+" "+work+" "+peer)
			}
		}
		want = append(want, network+" call grpc", network+" call grpc-raw-codec",
			network+" pull raw-crc", network+" pull-to-file raw-crc", network+" push cp", network+" push-to-memory raw-crc")
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if len(r.FirstResults) != 2 || len(r.Beside) != 2 {
		t.Errorf("first results %v, beside %v; want one for each network", r.FirstResults, r.Beside)
	}

	var text bytes.Buffer
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"SMOKE RUN", "upload of 2 MiB", "call of 30 KB", "first result", "beside an upload", "raw socket, CRC-32C", "cp and fsync", "push-to-memory of 2 MiB"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the text lacks %q:\n%s", want, text.String())
		}
	}
	text.Reset()
	if err := r.WriteBenchstat(&text); err != nil {
		t.Fatal(err)
	}
	// The format: https://go.googlesource.com/proposal/+/master/design/14313-benchmark-format.md
	line := regexp.MustCompile(`^(goos|goarch|pkg|cpu): .+|Benchmark[A-Z]\w*(/[a-z]+=[^/\s]+)+-\d+\t\d+(\t[\d.]+ [\w/-]+)+|$`)
	for l := range strings.Lines(text.String()) {
		if l = strings.TrimSuffix(l, "\n"); line.FindString(l) != l {
			t.Errorf("no line of Go's benchmarks: %q", l)
		}
	}
	if n, want := strings.Count(text.String(), "\nBenchmark"), 2*3*len(want)+4; n != want {
		t.Errorf("%d benchmark lines, want %d", n, want)
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	testkit.Start(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("no more")
	c := Smoke([]string{"tcp"})
	c.Progress = func(text string) {
		if strings.Contains(text, "echo") {
			cancel(why)
		}
	}
	if r, err := Run(ctx, c); !errors.Is(err, why) {
		t.Fatalf("got %v, %v", r, err)
	}
}

func TestRunRefusesSizesThatAreNoPairsOfFloats(t *testing.T) {
	for _, size := range []int{-8, 0, 4, 12} {
		if _, err := Run(t.Context(), Full([]string{"tcp"}, size, 0)); err == nil {
			t.Errorf("%d bytes were taken", size)
		}
	}
}

func TestGeneratedFloatsAreNumbersOfBothSigns(t *testing.T) {
	m := tensorMemory(64 << 10)
	signs := map[bool]int{}
	for i := 0; i < len(m.Source); i += 4 {
		x := math.Float32frombits(uint32(m.Source[i]) | uint32(m.Source[i+1])<<8 | uint32(m.Source[i+2])<<16 | uint32(m.Source[i+3])<<24)
		if a := math.Abs(float64(x)); a < 0.5 || a >= 1 {
			t.Fatalf("element %d is %v", i/4, x)
		}
		signs[x < 0]++
	}
	if signs[true] < 7000 || signs[false] < 7000 {
		t.Errorf("signs %v", signs)
	}
}

func TestStreamedBlocksAreComparedByteByByte(t *testing.T) {
	const size = 3 * MemoryBlock
	result := func(change func([]byte) []byte) error {
		var b bytes.Buffer
		if err := writeBlocks(&b, size); err != nil {
			t.Fatal(err)
		}
		Rectify(b.Bytes())
		return checkBlocks(bytes.NewReader(change(b.Bytes())), size, func(int64) error { return nil })
	}
	if err := result(func(b []byte) []byte { return b }); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func([]byte) []byte{
		"a bit is wrong":     func(b []byte) []byte { b[size-1] ^= 1; return b },
		"a byte is missing":  func(b []byte) []byte { return b[:size-1] },
		"a byte is too much": func(b []byte) []byte { return append(b, 0) },
		"nothing came":       func([]byte) []byte { return nil },
		"two blocks are turned": func(b []byte) []byte {
			return append(b[MemoryBlock:2*MemoryBlock:2*MemoryBlock], append(b[:MemoryBlock:MemoryBlock], b[2*MemoryBlock:]...)...)
		},
	} {
		if err := result(change); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestMemoryMeasureTellsOfAServerThatDoesNotStart(t *testing.T) {
	testkit.Start(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	_, err = PeakMemory(t.Context(), MemoryConfig{
		Command: func(ctx context.Context, _ ...string) *exec.Cmd {
			return exec.CommandContext(ctx, self, "-no-such-flag")
		},
		Bytes: MemoryBlock, Network: "unix",
	})
	if err == nil || !strings.Contains(err.Error(), "where it listens") || !strings.Contains(err.Error(), "no-such-flag") {
		t.Fatalf("got %v", err)
	}
}
