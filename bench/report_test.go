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
	"strconv"
	"strings"
	"testing"

	"github.com/tensorferry/tensorferry/internal/bench"
)

// testReport has figures that are easy to tell apart.
func testReport() *Report {
	r := &Report{Date: "2026-01-02", Modules: []string{"a@v1"}, LoadAfter: "1.00"}
	r.Machine = bench.Machine{CPU: `<Xeon> & "co"`, Cores: 2, Go: "go1", OS: "linux", Arch: "amd64", Commit: "abc123"}
	for i, w := range works {
		for _, sums := range []bool{false, true} {
			for j, n := range batchSizes {
				r.Batches = append(r.Batches, Batch{w.op, flightKind(n, sums).Name, sums, n, float64(j + 1), j == 1})
			}
		}
		for j, peer := range []string{"raw-crc", "flight-1024KiB", "flight-crc-1024KiB", "grpc"} {
			ratio := 0.9 + float64(j)/2
			r.Comparisons = append(r.Comparisons, &bench.Comparison{
				Net: "tcp", Work: string(w.op), Peer: peer, Bytes: 256 << 20,
				Ratio:    bench.Spread{Median: ratio, Q1: ratio - 0.1, Q3: ratio + 0.1, Error: 0.03, N: 9},
				Required: map[bool]*bench.Required{true: {Value: w.toFlight, Met: true}}[j == 2],
				Ours:     bench.Figures{Rate: 1.5 - float64(i)/2, CPU: 1},
				Theirs:   bench.Figures{Rate: (1.5 - float64(i)/2) / ratio, CPU: 2},
			})
		}
	}
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
	if want := len(works) * 5; bars != want || longest != pictureWidth-margin-labelWidth-valueWidth {
		t.Errorf("%d bars up to %v, want %d", bars, longest, want)
	}
	for _, want := range []string{`<Xeon> & "co"`, "abc123", "2026-01-02", "upload of 256 MiB", "echo of 256 MiB", "1.67 (tensorferry × 0.90)", "Arrow Flight, CRC-32C"} {
		if !strings.Contains(text, want) {
			t.Errorf("it does not say %q:\n%s", want, text)
		}
	}
	if bytes.Contains(r.picture(), []byte("SMOKE")) {
		t.Error("it was no smoke run")
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

func TestThePageHasARowForEveryPeerAndEveryBatchSize(t *testing.T) {
	text := strings.Join(strings.Fields(string(testReport().page())), " ")
	for _, want := range []string{
		"tcp upload of 256 MiB 1.50 GB/s 1.00 cpu-s/GB raw socket, CRC-32C 1.67 GB/s 2.00 cpu-s/GB 0.90 ±3.0 % 0.80 to 1.00",
		"Arrow Flight, CRC-32C, batches of 1 MiB 0.79 GB/s 2.00 cpu-s/GB 1.90 ±3.0 % 1.80 to 2.00 0 at least 1.5: met",
		"| upload, no checksum | 1 MiB | 2.00 | best |",
		"abc123", "2026-01-02", "a@v1",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("it lacks %q:\n%s", want, text)
		}
	}
}

func TestWhatIsWrittenIsReadBack(t *testing.T) {
	r, folder := testReport(), filepath.Join(t.TempDir(), "new")
	var out bytes.Buffer
	if err := write(r, &out, folder); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(out.Bytes(), r.page()) {
		t.Error("the page was not printed")
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
