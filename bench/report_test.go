package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/bench/measure"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/harness"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// testReport has figures that are easy to tell apart.
func testReport() *Report {
	r := &Report{Modules: []string{"a@v1"}}
	r.Date, r.LoadAfter = "2026-01-02", "1.00"
	r.Machine = harness.Machine{CPU: "Xeon", Cores: 2, Go: "go1", OS: "linux", Arch: "amd64", Commit: "abc123"}
	r.Batches = []Batch{{Op: bench.Upload, Kind: "x", Rate: 2, Best: true}}
	for i, op := range both {
		for j, peer := range []string{bench.RawName(codec.CRC32C, 1<<20), flightName("Go", true, 1<<20)} {
			x := &measure.Comparison{
				Net: "tcp", Work: op, Bytes: 256 << 20, Who: "tensorferry", Beside: peer, Required: &measure.Required{Value: 1.5, Met: j == 1},
				Pairs: []measure.Pair{{Ours: bench.Sample{Time: time.Duration(200+i) << 20, CPU: time.Second}, Theirs: bench.Sample{Time: time.Duration(100*(j+1)) << 20, CPU: time.Second}}},
			}
			x.Sum()
			r.Comparisons = append(r.Comparisons, x)
		}
	}
	return r
}

func TestWhatIsWrittenIsReadBack(t *testing.T) {
	r, folder := testReport(), filepath.Join(t.TempDir(), "new")
	var out bytes.Buffer
	require.NoError(t, write(r, &out, folder, "peers"))
	if !bytes.Equal(out.Bytes(), r.page()) {
		t.Error("the page was not printed")
	}
	text := strings.Join(strings.Fields(out.String()), " ")
	for _, want := range []string{
		"tcp upload of 256 MiB tensorferry 1.28 GB/s 3.73 cpu-s/GB", "beside raw socket, CRC-32C, 1 MiB 2.56 GB/s 3.73 cpu-s/GB 0.50 ±0.0 % 1.00 ±0.0 % 1 at least 1.5: MISSED",
		"| upload | x | 2.00 | best |", "abc123", "2026-01-02", "a@v1",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("it lacks %q:\n%s", want, text)
		}
	}
	compareResults(t, folder)
}

// compareResults checks that the page is that of the samples.
func compareResults(t *testing.T, folder string) {
	t.Helper()
	read := func(name string) []byte {
		data, err := os.ReadFile(filepath.Join(folder, name))
		require.NoError(t, err)
		return data
	}
	var r Report
	require.NoError(t, json.Unmarshal(read("peers.json"), &r))
	if !bytes.Equal(read("peers.md"), r.page()) {
		t.Errorf("the page in %s is not that of peers.json; write them with make bench-peers-results", folder)
	}
	if r.Smoke {
		t.Errorf("%s holds a smoke run", folder)
	}
}

func TestThePublishedResultsAreThoseOfTheirSamples(t *testing.T) {
	compareResults(t, "../docs/bench")
}

func TestTheBestBatchOfEachTakesPart(t *testing.T) {
	testkit.Start(t)
	c := measure.Smoke()
	c.Size = 1 << 20
	batches, err := sweep(t.Context(), c, both, languages("", ""))
	require.NoError(t, err)
	best := map[bench.Op][]string{}
	for _, b := range batches {
		if b.Best {
			best[b.Op] = append(best[b.Op], b.Kind)
		}
	}
	if len(batches) != 2*2*len(batchSizes) || len(best[bench.Upload]) != 2 || len(best[bench.Echo]) != 2 {
		t.Fatalf("%v of %v", best, batches)
	}
	found := map[string]bool{}
	for _, g := range peers([]string{"tcp"}, batches) {
		for _, e := range g.Entrants {
			if slices.Contains(best[g.Ops[0]], e.Kind) {
				found[string(g.Ops[0])+e.Kind] = true
			}
		}
	}
	if len(found) != 4 {
		t.Errorf("%v of %v take part", found, best)
	}
}

func TestFlightInAnotherLanguageIsAProgramOfItsOwn(t *testing.T) {
	e := languages("python", "ends.py")[1].entrant(true, 1<<20)
	if e.Kind != "Arrow Flight (C++), CRC-32, 1 MiB" || !slices.Equal(e.Program, []string{"python", "ends.py", measure.EndArgument, "sums", "1048576"}) {
		t.Errorf("%+v", e)
	}
}
