package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/bench/kinds"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// testReport has figures that are easy to tell apart.
func testReport() *Report {
	r := &Report{Modules: []string{"a@v1"}}
	r.Date, r.LoadAfter = "2026-01-02", "1.00"
	r.Machine = bench.Machine{CPU: `<Xeon> & "co"`, Cores: 2, Go: "go1", OS: "linux", Arch: "amd64", Commit: "abc123"}
	r.Batches = []Batch{{Op: bench.Upload, Kind: "x", Rate: 2, Best: true}}
	for i, op := range both {
		for j, peer := range []string{kinds.RawName(codec.CRC32C, 1<<20), flightName("Go", true, 1<<20)} {
			x := &bench.Comparison{
				Net: "tcp", Processes: 2, Work: op, Bytes: 256 << 20, Who: "tensorferry", Beside: peer, Required: &bench.Required{Value: 1.5, Met: j == 1},
				Pairs: []bench.Pair{{Ours: bench.Sample{Time: time.Duration(200+i) << 20, CPU: time.Second}, Theirs: bench.Sample{Time: time.Duration(100*(j+1)) << 20, CPU: time.Second}}},
			}
			x.Sum()
			r.Comparisons = append(r.Comparisons, x)
		}
	}
	other := *r.Comparisons[0]
	other.Net, other.Who = "unix", "not in the picture"
	r.Comparisons = append(r.Comparisons, &other)
	return r
}

// elements parses an SVG strictly and returns its elements.
func elements(t *testing.T, svg []byte) (all []xml.StartElement, text string) {
	t.Helper()
	d := xml.NewDecoder(bytes.NewReader(svg))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return all, text
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, svg)
		}
		switch token := token.(type) {
		case xml.StartElement:
			all = append(all, token.Copy())
		case xml.CharData:
			text += string(token) + "\n"
		}
	}
}

func number(t *testing.T, e xml.StartElement, name string) float64 {
	t.Helper()
	for _, a := range e.Attr {
		if a.Name.Local == name {
			n, err := strconv.ParseFloat(a.Value, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("%v has no %s", e, name)
	return 0
}

func TestThePictureIsWellFormedAndInBounds(t *testing.T) {
	r := testReport()
	all, text := elements(t, r.picture())
	if all[0].Name.Local != "svg" || all[0].Name.Space != "http://www.w3.org/2000/svg" {
		t.Fatalf("it begins with %v", all[0])
	}
	width, height := number(t, all[0], "width"), number(t, all[0], "height")
	bars, longest := 0, 0.0
	for _, e := range all {
		switch e.Name.Local {
		case "rect":
			bars++
			end := number(t, e, "x") + number(t, e, "width")
			longest = max(longest, number(t, e, "width"))
			if end > width-valueWidth || number(t, e, "y")+number(t, e, "height") > height {
				t.Errorf("a bar ends outside: %v", e.Attr)
			}
		case "text":
			if number(t, e, "y") > height || number(t, e, "x") > width {
				t.Errorf("a text stands outside: %v", e.Attr)
			}
		}
	}
	if bars != 6 || longest != pictureWidth-margin-labelWidth-valueWidth {
		t.Errorf("%d bars up to %v, want 6", bars, longest)
	}
	for _, want := range []string{`<Xeon> & "co"`, "abc123", "2026-01-02", "upload of 256 MiB", "echo of 256 MiB", "2.56 (tensorferry × 0.50)", "Arrow Flight (Go), CRC-32C"} {
		if !strings.Contains(text, want) {
			t.Errorf("it does not say %q:\n%s", want, text)
		}
	}
	if bytes.Contains(r.picture(), []byte("SMOKE")) || strings.Contains(text, "not in the picture") {
		t.Error("it was no smoke run, and shows TCP only")
	}
	r.Smoke = true
	if !bytes.Contains(r.picture(), []byte("SMOKE")) || !bytes.Contains(r.page(), []byte("SMOKE")) {
		t.Error("it does not say that its figures mean nothing")
	}
}

// luminance is that of https://www.w3.org/TR/WCAG21/#dfn-relative-luminance.
func luminance(t *testing.T, color string) float64 {
	t.Helper()
	n, err := strconv.ParseUint(strings.TrimPrefix(color, "#"), 16, 24)
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for i, weight := range []float64{0.2126, 0.7152, 0.0722} {
		c := float64(n>>(16-8*i)&0xff) / 255
		if c = c / 12.92; c > 0.04045/12.92 {
			c = math.Pow((c*12.92+0.055)/1.055, 2.4)
		}
		sum += weight * c
	}
	return sum
}

func TestThePictureIsLegibleOnWhiteAndOnBlack(t *testing.T) {
	for color, least := range map[string]float64{textColor: 4, oursColor: 3, theirColor: 2.5} {
		for _, page := range []string{"#ffffff", "#0d1117"} {
			a, b := luminance(t, color), luminance(t, page)
			if contrast := (max(a, b) + 0.05) / (min(a, b) + 0.05); contrast < least {
				t.Errorf("%s on %s has a contrast of %.2f, want %v", color, page, contrast, least)
			}
		}
	}
}

func TestWhatIsWrittenIsReadBack(t *testing.T) {
	r, folder := testReport(), filepath.Join(t.TempDir(), "new")
	var out bytes.Buffer
	if err := write(r, &out, folder, "peers"); err != nil {
		t.Fatal(err)
	}
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

// compareResults checks that page and picture are those of the samples.
func compareResults(t *testing.T, folder string) {
	t.Helper()
	read := func(name string) []byte {
		data, err := os.ReadFile(filepath.Join(folder, name))
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	var r Report
	if err := json.Unmarshal(read("peers.json"), &r); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(read("peers.md"), r.page()) || !bytes.Equal(read("peers.svg"), r.picture()) {
		t.Errorf("page and picture in %s are not those of peers.json; write them with make bench-peers-results", folder)
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
	c := bench.Smoke(allKinds())
	c.Size = 1 << 20
	batches, err := sweep(t.Context(), c, both, languages("", ""))
	if err != nil {
		t.Fatal(err)
	}
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
			if g.Delay == 0 && slices.Contains(best[g.Ops[0]], e.Kind) {
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
	if e.Kind != "Arrow Flight (C++), CRC-32, 1 MiB" || !slices.Equal(e.Program, []string{"python", "ends.py", bench.EndArgument, "sums", "1048576"}) {
		t.Errorf("%+v", e)
	}
}
