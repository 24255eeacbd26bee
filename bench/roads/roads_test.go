//go:build linux

package main

import (
	"math"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/bench/measure"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

func TestMain(m *testing.M) {
	measure.BeEnd(allKinds())
	m.Run()
}

func TestRawSocketsMoveEveryByte(t *testing.T) {
	testkit.Start(t)
	for _, n := range []int{1, 3} {
		g := measure.Group{Net: "tcp", Size: 1<<20 + 8, Ops: []bench.Op{bench.Upload, bench.Echo}, Entrants: measure.Beside(sockets(n))}
		if _, err := measure.Smoke().Measure(t.Context(), g); err != nil { // it compares what arrived
			t.Error(err)
		}
	}
}

func TestALinkIsReadFromItsText(t *testing.T) {
	l, err := parseLine("50ms:9000:1000:0.001")
	if want := (line{rtt: 50 * time.Millisecond, mtu: 9000, mbit: 1000, loss: 0.001}); err != nil || l != want {
		t.Fatalf("%+v, %v; want %+v", l, err, want)
	}
	if n := l.queueBytes(); n != 6_250_000 {
		t.Errorf("a queue of %d bytes; want a round trip", n)
	}
	l.queue = smallQueue
	if n := l.queueBytes(); n != 1_250_000 {
		t.Errorf("a queue of %d bytes; want 10 ms", n)
	}
	for _, text := range []string{"", "50ms:9000:1000", "50:9000:1000:0", "50ms:x:1000:0"} {
		if _, err := parseLine(text); err == nil {
			t.Errorf("%q is a link", text)
		}
	}
}

// A hundred MB take ten seconds, of which the first two have a tenth.
func TestARateLeavesTheFirstSecondsOut(t *testing.T) {
	w := new(watch)
	begin := time.Now()
	for ms := range 10_101 {
		w.times = append(w.times, begin.Add(time.Duration(ms)*time.Millisecond))
		at := time.Duration(max(ms-100, 0)) * time.Millisecond // the first packet comes late
		sent := min(at, warmUp).Seconds()*5e6 + max(at-warmUp, 0).Seconds()*11.25e6
		w.bytes[0] = append(w.bytes[0], 1000+int64(sent*1.01)) // headers
		w.bytes[1] = append(w.bytes[1], 0)
	}
	for _, tc := range []struct {
		what string
		end  int
		took time.Duration
		want float64
	}{
		{"without the first seconds", 0, 10 * time.Second, 90e6},
		{"too short to leave any out", 0, 2 * time.Second, 400e6},
		{"the other end", 1, 10 * time.Second, 0},
	} {
		if got := w.rate(tc.end, 100e6, tc.took); math.Abs(got-tc.want) > 0.1e6 {
			t.Errorf("%s: %g bit/s, want %g", tc.what, got, tc.want)
		}
	}
}

func TestCongestionControlsOfBothEndsAreTold(t *testing.T) {
	for want, found := range map[string][2]map[string]int{
		"cubic ×2":                    {{"cubic": 2}, {"cubic": 2}},
		"cubic ×2 | bbr ×1, cubic ×1": {{"cubic": 2}, {"bbr": 1, "cubic": 1}},
		"not seen":                    {},
	} {
		if got := (&watch{found: found}).congestion(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
