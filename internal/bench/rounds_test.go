package bench

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

func TestRoundsTurnAroundUntilEveryMedianIsStable(t *testing.T) {
	var order strings.Builder
	n, calls := 0, 0 // of ours, of one that never stays
	peer := func(name string, atLeast float64, d func() time.Duration) Peer {
		return Peer{Name: name, Required: Required{Value: atLeast}, Do: func(context.Context) (Sample, error) {
			order.WriteString(name)
			return Sample{Time: d()}, nil
		}}
	}
	fixed := func(d time.Duration) func() time.Duration { return func() time.Duration { return d } }
	ours := peer("o", 0, func() time.Duration { n++; return time.Duration(100 + n%2) })
	for name, tc := range map[string]struct {
		b    func() time.Duration
		want int
	}{
		"all are steady":   {fixed(150), MinPairs},
		"one never stays":  {func() time.Duration { calls++; return time.Duration(100 + 900*(calls%2)) }, MaxPairs},
		"no time but ours": {fixed(1), MinPairs},
	} {
		t.Run(name, func(t *testing.T) {
			order.Reset()
			n, calls = 0, 0
			c := Config{MinPairs: MinPairs, MaxPairs: MaxPairs}
			all, err := c.Rounds(t.Context(), "tcp", "upload", 1000, ours, peer("a", 2, fixed(201)), peer("b", 0, tc.b))
			if err != nil {
				t.Fatal(err)
			}
			if want := strings.Repeat("oabbao", MaxPairs); !strings.HasPrefix(want, order.String()) {
				t.Errorf("the order was %s", order.String())
			}
			for _, x := range all {
				if len(x.Pairs) != tc.want || x.Ratio.N != tc.want || order.Len() != 3*(tc.want+1) {
					t.Errorf("%s: %d pairs, want %d", x.Peer, len(x.Pairs), tc.want)
				}
			}
			if a := all[0]; a.Required.String() != "at least 2: MISSED" && a.Required.String() != "at least 2: met" ||
				a.Ours.Time < 100 || a.Ours.Time > 101 || a.Theirs.Time != 201 {
				t.Errorf("%+v, %v", a, a.Required)
			}
			if all[1].Required != nil {
				t.Error("nothing was required of the second")
			}
		})
	}
}

func TestASmokeRunRequiresNothing(t *testing.T) {
	do := func(context.Context) (Sample, error) { return Sample{Time: 1}, nil }
	all, err := Smoke(nil).Rounds(t.Context(), "tcp", "echo", 1, Peer{Name: "o", Do: do}, Peer{Name: "a", Do: do, Required: Required{Value: 5}})
	if err != nil || all[0].Required != nil || len(all[0].Pairs) != 3 {
		t.Fatalf("%+v, %v", all, err)
	}
}

func TestRoundsEndWithTheFirstFailure(t *testing.T) {
	why := errors.New("no more")
	do := func(context.Context) (Sample, error) { return Sample{Time: 1}, nil }
	_, err := Smoke(nil).Rounds(t.Context(), "tcp", "echo", 1, Peer{Name: "o", Do: do},
		Peer{Name: "a", Do: func(context.Context) (Sample, error) { return Sample{}, why }})
	if !errors.Is(err, why) || !strings.Contains(err.Error(), "a echo") {
		t.Fatalf("got %v", err)
	}
}
