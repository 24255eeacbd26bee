package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/stress/known"
)

func TestWrongBytesAreNeverExpected(t *testing.T) {
	cut := &client.Error{Code: codes.Unavailable}
	require.NoError(t, tolerate(cut, codes.Canceled, codes.Unavailable))
	require.Error(t, tolerate(cut, codes.Canceled))
	require.NoError(t, tolerate(nil, codes.Canceled))
	require.Error(t, tolerate(errors.Join(cut, known.Wrong("x")), codes.Unavailable))
}

// script returns an environment whose command is a shell script.
func script(t *testing.T, text string) *environment {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "command")
	require.NoError(t, os.WriteFile(file, []byte("#!/bin/sh\n"+text), 0o755))
	return &environment{out: io.Discard, dir: dir, command: file}
}

func TestALogIsReadForItsAddressAndItsComplaints(t *testing.T) {
	testkit.Start(t)
	e := script(t, `cat >&2 <<'END'
time=1 level=INFO msg=starting
time=2 level=INFO msg=listening address=127.0.0.1:1 metrics=127.0.0.1:2 models=4
time=3 level=WARN msg="file cannot be used"
panic: oh
time=4 level=INFO msg=stopped
END`)
	d, err := e.serve(t.Context())
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1:1", d.address)
	require.Equal(t, "127.0.0.1:2", d.metrics)
	require.NoError(t, d.Stopped())
	require.Equal(t, []string{`log: time=3 level=WARN msg="file cannot be used"`, "log: panic: oh"}, e.all())
}

func TestFiguresAreTheSumOverAllLabels(t *testing.T) {
	page := "# TYPE tensorferry_sessions gauge\ntensorferry_sessions 3\n# TYPE x_total counter\nx_total{a=\"1\"} 2\nx_total{a=\"} 2\"} 5\n" +
		"# TYPE go_goroutines gauge\ngo_goroutines 1e3\n"
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, page) }))
	defer s.Close()
	d := &daemon{metrics: s.Listener.Addr().String()}
	f, err := d.scrape(t.Context())
	require.ErrorContains(t, err, "nothing about process_open_fds")
	require.Equal(t, figures{"tensorferry_sessions": 3, "x_total": 7, "go_goroutines": 1000}, f)
}

func TestProblemsAreCountedBeyondThoseKept(t *testing.T) {
	var p problems
	require.Empty(t, p.all())
	for i := range problemsKept + 3 {
		p.add("%d", i)
	}
	require.Len(t, p.all(), problemsKept+1)
	require.Equal(t, "3 more", p.all()[problemsKept])
}

// grown returns what is said of a heap of these sizes, one a second.
func grown(t *testing.T, length time.Duration, heap func(at time.Duration) float64) []string {
	t.Helper()
	s := &soak{environment: &environment{out: io.Discard}, histories: []*history{{name: "x"}}}
	for at := time.Second; at <= length; at += time.Second {
		s.histories[0].samples = append(s.histories[0].samples, sample{at, figures{"heap": heap(at), "goroutines": 7}})
	}
	s.growth(length)
	return s.all()
}

func TestGrowthIsToldFromNoise(t *testing.T) {
	length := judgedFrom
	require.Empty(t, grown(t, length, func(time.Duration) float64 { return 100 * mib }))
	require.Empty(t, grown(t, length, func(at time.Duration) float64 { return float64(100+int(at.Seconds())%7) * mib }))
	require.Empty(t, grown(t, length, func(at time.Duration) float64 { return 100 * mib * min(1, at.Minutes()) }), "it warms up")
	require.Len(t, grown(t, length, func(at time.Duration) float64 { return (100 + 10*at.Minutes()) * mib }), 1, "a leak of 10 MiB a minute")
	require.Len(t, grown(t, 4*judgedFrom, func(at time.Duration) float64 { return (100 + at.Minutes()) * mib }), 1, "and of 1 MiB, in time")
	require.Empty(t, grown(t, judgedFrom/2, func(at time.Duration) float64 { return at.Minutes() * 1024 * mib }), "too short to say")
}

func TestGrowthThatNobodySawIsAProblem(t *testing.T) {
	s := &soak{environment: &environment{out: io.Discard}, histories: []*history{{name: "x"}}}
	s.growth(time.Hour)
	require.NotEmpty(t, s.all())
}

func TestACrashLeavesWhatWasAcknowledgedOrTriedAfter(t *testing.T) {
	old, fresh, other, half := known.Pick(1, mib), known.Pick(2, mib), known.Pick(3, mib), known.Pick(2, mib/2)
	s := newSet("x", 1, mib)
	found := func(w known.Window) client.Summary {
		return client.Summary{Name: s.names[0], Desc: w.Desc(), Data: w.Data()}
	}
	nothing := client.Summary{Name: s.glob(), Err: &client.Error{Code: codes.NotFound}}
	mixed := found(fresh)
	mixed.Data = append(bytes.Clone(old.Data()[:mib/2]), fresh.Data()[mib/2:]...)
	for name, tc := range map[string]struct {
		tried []version // of which the first was acknowledged
		got   client.Summary
		good  bool
	}{
		"acknowledged and there":      {[]version{{old}}, found(old), true},
		"acknowledged and gone":       {[]version{{old}}, nothing, false},
		"acknowledged and another":    {[]version{{old}}, found(other), false},
		"never pushed and there":      {[]version{nil}, found(other), false},
		"tried and whole":             {[]version{nil, {fresh}}, found(fresh), true},
		"tried and absent":            {[]version{nil, {fresh}}, nothing, true},
		"tried and half":              {[]version{nil, {fresh}}, found(half), false},
		"replaced":                    {[]version{{old}, {fresh}}, found(fresh), true},
		"not replaced":                {[]version{{old}, {fresh}}, found(old), true},
		"replaced by half":            {[]version{{old}, {fresh}}, mixed, false},
		"lost in being replaced":      {[]version{{old}, {fresh}}, nothing, false},
		"deletion tried, gone":        {[]version{{old}, nil}, nothing, true},
		"deletion tried, there":       {[]version{{old}, nil}, found(old), true},
		"deletion acknowledged, back": {[]version{nil}, found(old), false},
	} {
		t.Run(name, func(t *testing.T) {
			s.tried = tc.tried
			_, err := s.judge(0, []client.Summary{tc.got})
			require.Equal(t, tc.good, err == nil, "%v", err)
		})
	}
}

func TestASetIsOfOneVersionOrWrong(t *testing.T) {
	const n = 3
	of := func(number int) (v version) {
		for i := range n {
			v = append(v, known.Pick(uint64(number*n+i), mib))
		}
		return v
	}
	s := newSet("x", n, mib)
	found := func(of ...version) (got []client.Summary) {
		for i, v := range of {
			got = append(got, client.Summary{Name: s.names[i], Desc: v[i].Desc(), Data: v[i].Data()})
		}
		return got
	}
	failed := func(code codes.Code) client.Summary {
		return client.Summary{Name: s.glob(), Err: &client.Error{Code: code}}
	}
	a, b, c, other := of(1), of(2), of(3), of(4)
	s.tried, s.acked = []version{nil, a, b, c}, 2 // c is on its way
	aborted := found(b, b, b)
	aborted[1].Err = failed(codes.Aborted).Err
	twice := found(b, b, b)
	twice[1] = twice[0]
	for name, tc := range map[string]struct {
		got   []client.Summary
		found int // 0: wrong
	}{
		"acknowledged":           {found(b, b, b), 2},
		"on its way":             {found(c, c, c), 3},
		"replaced before":        {found(a, a, a), 0},
		"nothing":                {[]client.Summary{failed(codes.NotFound)}, 0},
		"never pushed":           {found(other, other, other), 0},
		"two versions":           {found(b, c, c), 0},
		"a part":                 {found(b, b), 0},
		"a part, and an end":     {append(found(b, b), failed(codes.NotFound)), 0},
		"one in another's place": {twice, 0},
		"ABORTED, of so few":     {aborted, 0},
	} {
		t.Run(name, func(t *testing.T) {
			found, err := s.judge(s.acked, tc.got)
			if tc.found > 0 {
				require.NoError(t, err)
				require.Equal(t, tc.found, found)
				return
			}
			var wrong *known.WrongError
			require.ErrorAs(t, err, &wrong)
		})
	}
	found0, err := newSet("x", n, mib).judge(0, []client.Summary{failed(codes.NotFound)})
	require.NoError(t, err)
	require.Zero(t, found0)

	many := newSet("y", pinnedMost+1, 4)
	v := make(version, len(many.names))
	var got []client.Summary
	for i, name := range many.names {
		v[i] = known.Pick(uint64(i), 4)
		got = append(got, client.Summary{Name: name, Desc: v[i].Desc(), Data: v[i].Data()})
	}
	got[7] = client.Summary{Name: many.names[7], Err: failed(codes.Aborted).Err}
	many.try(v)
	which, err := many.judge(0, got)
	require.NoError(t, err, "ABORTED, of many")
	require.Equal(t, 1, which)
}

func TestEachToldOfEveryFailure(t *testing.T) {
	require.NoError(t, each(0, 4, nil))
	done := make([]bool, 100)
	require.NoError(t, each(100, 7, func(i int) error { done[i] = true; return nil }))
	require.NotContains(t, done, false)
	require.ErrorContains(t, each(10, 3, func(i int) error {
		if i%5 == 0 {
			return fmt.Errorf("oh")
		}
		return nil
	}), "2 of 10 failed")
}

func TestAProgramThatDoesNotExistIsAnErrorThatNamesThoseThatDo(t *testing.T) {
	for _, args := range [][]string{nil, {"nothing"}} {
		err := run(context.Background(), io.Discard, args)
		for _, p := range programs {
			require.ErrorContains(t, err, p.name)
		}
	}
}
