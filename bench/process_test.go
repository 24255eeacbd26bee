package main

import (
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// A test binary is a child, too.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == endArgument {
		exit(serveEnd(os.Stdin, os.Stdout))
	}
	os.Exit(m.Run())
}

func TestEveryKindMovesEveryByteBetweenProcesses(t *testing.T) {
	testkit.Start(t)
	for _, name := range slices.Sorted(maps.Keys(kinds())) {
		t.Run(name, func(t *testing.T) {
			c, err := openContestant(t.Context(), "", name, bench.ChunkBytes+8)
			if err != nil {
				t.Fatal(err)
			}
			for _, op := range []bench.Op{bench.Upload, bench.Echo, bench.Upload} {
				if s, err := c.Move(t.Context(), op); err != nil || s.Time <= 0 {
					t.Fatalf("%s: %v, %v", op, s, err)
				}
			}
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestProcessesEndWithTheirContext(t *testing.T) {
	testkit.Start(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	c, err := openContestant(ctx, "", "raw-crc", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	why := errors.New("no more")
	cancel(why)
	for { // the cancellation may come too late for a transfer, never for all of them
		if _, err := c.Move(ctx, bench.Echo); err != nil {
			break
		}
	}
	if err := c.Close(); err == nil {
		t.Error("they were killed, and that is no error")
	}
}

func TestAKindThatNobodyKnowsIsRefused(t *testing.T) {
	testkit.Start(t)
	if _, err := openContestant(t.Context(), "", "pigeon", 8); err == nil {
		t.Error("it was taken")
	}
}

func TestBytesThatDidNotArriveHaveNoTime(t *testing.T) {
	idle := make(chan struct{})
	close(idle)
	memory := testMemory(1 << 20)
	copy(memory.Remote, memory.Source) // what an earlier run left
	for _, op := range []bench.Op{bench.Upload, bench.Echo} {
		far := &bench.End{Source: memory.Source, To: memory.Remote, Server: bench.Server{Idle: idle}}
		near := &bench.End{Source: memory.Source, To: memory.Back, Client: bench.Client{Run: func(context.Context, bench.Op) error { return nil }}}
		err := far.Prepare(op, new(bool))
		err = errors.Join(err, near.Move(op, new(bench.Sample)), far.Finish(op, new(time.Duration)))
		if err == nil {
			t.Errorf("%s: nothing was moved, and that is no error", op)
		}
		if err := near.Move(op, new(bench.Sample)); (err != nil) != op.Back() {
			t.Errorf("%s: the client says %v", op, err)
		}
	}
}

func TestRunReportsEveryWorkBesideEveryPeer(t *testing.T) {
	testkit.Start(t)
	rounds := 0
	c := bench.Smoke(nil)
	c.Size, c.Progress = 1<<20+8, func(string) { rounds++ }
	r, err := run(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	best := map[string]string{"raw-crc": "raw-crc", "grpc": "grpc"}
	for _, b := range r.Batches {
		if b.Best {
			best[b.Kind] = map[bool]string{false: "flight", true: "flight-crc"}[b.Sums]
		}
	}
	var got []string
	for _, c := range r.Comparisons {
		got = append(got, c.Work+" "+best[c.Peer])
		if len(c.Pairs) != 3 || c.Required != nil {
			t.Errorf("%s: %d pairs, required %v", c.Peer, len(c.Pairs), c.Required)
		}
	}
	if want := len(works) * 2 * len(batchSizes); len(r.Batches) != want {
		t.Errorf("batches %v, want %d", r.Batches, want)
	}
	want := []string{"upload raw-crc", "upload flight", "upload flight-crc", "upload grpc",
		"echo raw-crc", "echo flight", "echo flight-crc", "echo grpc"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if rounds == 0 {
		t.Error("nobody was told how far it is")
	}
}
