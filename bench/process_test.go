package main

import (
	"context"
	"errors"
	"fmt"
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
		exit(serveEnd(os.Stdin, os.Stdout, kinds()))
	}
	os.Exit(m.Run())
}

func TestEveryKindMovesEveryByteBetweenProcesses(t *testing.T) {
	testkit.Start(t)
	all := kinds()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		t.Run(name, func(t *testing.T) {
			c, err := openContestant(t.Context(), "", all[name], bench.ChunkBytes+8)
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
	c, err := openContestant(ctx, "", bench.RawCRC, 1<<20)
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
	if _, err := openContestant(t.Context(), "", bench.Kind{Name: "pigeon"}, 8); err == nil {
		t.Error("it was taken")
	}
}

// idler is a kind whose ends say that all has arrived when nothing has.
type idler struct{ idle chan struct{} }

func (i idler) Idle() <-chan struct{}             { return i.idle }
func (idler) Run(context.Context, bench.Op) error { return nil }
func (idler) Close() error                        { return nil }

func TestBytesThatDidNotArriveHaveNoTime(t *testing.T) {
	i := idler{make(chan struct{})}
	close(i.idle)
	memory := testMemory(1 << 20)
	copy(memory.Remote, memory.Source) // what an earlier run left
	for _, op := range []bench.Op{bench.Upload, bench.Echo} {
		far := &End{source: memory.Source, dst: memory.Remote, server: i}
		near := &End{source: memory.Source, dst: memory.Back, client: i}
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
	r, err := run(t.Context(), config{size: 1<<20 + 8, quick: true, progress: func(string) { rounds++ }})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, w := range r.Works {
		for _, c := range w.Comparisons {
			kind := c.Peer
			for _, b := range w.best() {
				if b.Kind == c.Peer {
					kind = map[bool]string{false: "flight", true: "flight-crc"}[b.Sums]
				}
			}
			got = append(got, fmt.Sprintf("%s %s", c.Work, kind))
			if len(c.Pairs) != 3 || c.Required != nil {
				t.Errorf("%s: %d pairs, required %v", c.Peer, len(c.Pairs), c.Required)
			}
		}
		if len(w.Batches) != 2*len(batchSizes) {
			t.Errorf("%s: batches %v", w.Op, w.Batches)
		}
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

func TestRunRefusesSizesThatAreNoPairsOfFloats(t *testing.T) {
	for _, size := range []int{-8, 0, 4, 12} {
		if _, err := run(t.Context(), config{size: size}); err == nil {
			t.Errorf("%d bytes were taken", size)
		}
	}
}
