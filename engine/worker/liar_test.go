//go:build linux

package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/internal/link/linktest"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// liar is a worker in Go: each gets what the host says, until it returns false.
func liar(t *testing.T, c Config, ready string, each func(g *linktest.Guest, m *link.Run) bool) (*Host, *linktest.Guest) {
	t.Helper()
	socket, g := lies(t, ready, each)
	c.Name, c.Socket, c.Version, c.MemoryBytes = "liar", socket, "1", 64<<20
	h, err := Start(c)
	require.NoError(t, err)
	t.Cleanup(h.Close)
	return h, g
}

// lies is the guest of liar, and the socket of its host.
func lies(t *testing.T, ready string, each func(g *linktest.Guest, m *link.Run) bool) (*net.UnixConn, *linktest.Guest) {
	socket, g := linktest.Pair(t)
	go func() { // ends with the link
		g.Send(&link.Hello{JSON: []byte(`{"link":1,"version":"1","role":"worker","pid":1}`)})
		if _, err := g.Recv(); err != nil {
			return
		}
		g.Send(&link.Ready{JSON: []byte(ready)})
		for {
			m, err := g.Recv()
			if err != nil {
				_ = g.Socket.Close() // so the host need not wait
				return
			}
			if r, ok := m.(*link.Run); ok && !each(g, r) {
				return
			}
		}
	}()
	return socket, g
}

// wide is a tensor in blocks of 1 MiB, more than a run has slots for.
func wide(t *testing.T) tensor.Tensor {
	const rows, width = 256, 64 << 10
	x, err := tensor.Of(testkit.Bytes(rows*width, 7), rows, width)
	require.NoError(t, err)
	return x
}

// A chunk of a narrow result spans more blocks than a run has slots.
func TestANarrowResultBesideOneInTheInputEndsTheWorker(t *testing.T) {
	for _, inside := range []bool{false, true} {
		t.Run(fmt.Sprintf("inside=%v", inside), func(t *testing.T) {
			testkit.Start(t)
			h, _ := liar(t, Config{}, `{"inputs":[{"name":"x","shape":[-2]}],"outputs":[{"name":"y","shape":[-2]},{"name":"s","shape":[-2]}],"rows":1}`,
				func(g *linktest.Guest, r *link.Run) bool {
					y := r.Inputs[0]
					if !inside {
						y.Range = g.Take(int(y.Range.Len))
					}
					n := y.Shape[0]
					g.Send(&link.Answer{Head: link.Head{ID: r.ID}, Outputs: []link.Tensor{y, {DType: 6, Shape: []int64{n, 1}, Range: g.Take(int(n))}}})
					return true
				})
			_, err := enginetest.Compute(t.Context(), h.Model(), []tensor.Tensor{wide(t)}, nil, 1<<20, 0)
			if inside {
				require.ErrorIs(t, err, engine.ErrUnavailable)
			} else {
				require.NoError(t, err)
			}
		})
	}
}

func TestAWorkerIsToldOfMemoryThatComesBackInOneMessageForMany(t *testing.T) {
	testkit.Start(t)
	came, flags := make(chan int, 1), make(chan uint8, 2)
	h, _ := liar(t, Config{}, `{"inputs":[{"name":"x","shape":[-2]}],"outputs":[{"name":"y","shape":[-2]}],"rows":1,"block_rows":65536}`,
		func(g *linktest.Guest, r *link.Run) bool {
			came <- len(g.Given)
			flags <- r.Flags
			y := r.Inputs[0]
			y.Range = g.Take(int(y.Range.Len))
			g.Send(&link.Answer{Head: link.Head{ID: r.ID}, Outputs: []link.Tensor{y}})
			return true
		})
	call := func(rows int) int {
		_, err := enginetest.Compute(t.Context(), h.Model(), vector(rows), nil, 1<<20, 0)
		require.NoError(t, err)
		require.Equal(t, uint8(link.Only), <-flags)
		return <-came
	}
	for range returnedRanges {
		require.Zero(t, call(1))
	}
	require.Equal(t, returnedRanges, call(1))
	require.Equal(t, returnedRanges, call(64<<20/returnedShare/9))
	require.Equal(t, returnedRanges+2, call(1), "the last one was large")
}

func TestAModelMayReturnItsInputBesideSomethingNarrow(t *testing.T) {
	testkit.Start(t)
	h, err := Start(python(t, "both"))
	require.NoError(t, err)
	defer h.Close()
	x := wide(t)
	outs, err := enginetest.Compute(t.Context(), h.Model(), []tensor.Tensor{x}, nil, 1<<20, 0)
	require.NoError(t, err)
	require.Equal(t, x.Data, outs[0].Data)
	require.Equal(t, x.Data[64<<10], outs[1].Data[1])
}

func TestAWorkerMayLieAboutAState(t *testing.T) {
	testkit.Start(t)
	says := make(chan string, 1)
	h, g := liar(t, Config{}, `{"inputs":[{"name":"x","shape":[-2]}],"outputs":[{"name":"y","shape":[-2]}],"rows":1}`,
		func(g *linktest.Guest, r *link.Run) bool {
			g.Send(&link.Answer{Head: link.Head{ID: r.ID}, Outputs: r.Inputs, JSON: []byte(<-says)})
			return true
		})
	step := func(s engine.State, said string) error {
		says <- said
		_, err := engine.Step(t.Context(), h.Model(), s, vector(1)...)
		return err
	}
	s, err := h.begin(t.Context(), engine.Sequence{MaxRows: 9})
	require.NoError(t, err)
	for said, want := range map[string]int64{`{"state":-5}`: 0, `{"state":7}`: 7, `{}`: 0, `{"state":33554432}`: 32 << 20} {
		require.NoError(t, step(s, said))
		require.Equal(t, want, s.Bytes())
	}
	require.ErrorIs(t, step(s, `{"state":9223372036854775807}`), slab.ErrBudget)
	s.Close()
	require.NoError(t, step(nil, `{"state":7}`), "a call has none")
	s, err = h.begin(t.Context(), engine.Sequence{MaxRows: 9})
	require.NoError(t, err)
	require.ErrorIs(t, step(s, `{"state":"much"}`), engine.ErrModel)
	s.Close()
	require.NoError(t, h.idle())
	g.Close()
	<-h.Ended()
	_, err = h.begin(t.Context(), engine.Sequence{MaxRows: 9})
	require.ErrorIs(t, err, engine.ErrUnavailable)
}

func TestAStateIsNotWhatAProcessKeeps(t *testing.T) {
	testkit.Start(t)
	const ports = `"inputs":[{"name":"x","shape":[-2]}],"outputs":[{"name":"y","shape":[-2]}]`
	h, _ := liar(t, Config{}, `{`+ports+`,"companions":[{"name":"train",`+ports+`}]}`, func(g *linktest.Guest, r *link.Run) bool {
		g.Send(&link.Kept{JSON: []byte(`{"kept":5}`)})
		g.Send(&link.Answer{Head: link.Head{ID: r.ID}, Outputs: r.Inputs, JSON: []byte(`{"state":7}`)})
		return true
	})
	s, err := h.begin(t.Context(), engine.Sequence{MaxRows: 9})
	require.NoError(t, err)
	defer s.Close()
	_, err = engine.Step(t.Context(), h.Model(), s, vector(1)...)
	require.NoError(t, err)
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Equal(t, []int64{7, 5}, []int64{s.Bytes(), h.kept.Bytes})
}

func TestAWorkerThatDoesNotReadEnds(t *testing.T) {
	testkit.Start(t)
	stop := make(chan struct{})
	h, g := liar(t, Config{obey: 300 * time.Millisecond, block: 2 * time.Second},
		`{"inputs":[{"name":"x","shape":[-2]}],"outputs":[{"name":"y","shape":[-2]}],"rows":1}`,
		func(g *linktest.Guest, r *link.Run) bool {
			for range 900 { // what they are answered with fills the socket
				g.Send(&link.Take{Head: link.Head{ID: g.ID()}, Bytes: 1 << 63, Millis: 1})
			}
			g.Send(&link.Answer{Head: link.Head{ID: r.ID}, Outputs: []link.Tensor{r.Inputs[0]}})
			<-stop
			return false
		})
	_, err := enginetest.Compute(t.Context(), h.Model(), vector(4), nil, 1<<20, 0)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, _ = enginetest.Compute(ctx, h.Model(), vector(4), nil, 1<<20, 0) // it may have got an answer, or not
	testkit.Eventually(t, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.guests) == 0
	}, "nobody is left")
	close(stop)
	g.Close()
}

func TestAWorkerThatReadsNothingAfterItsLastAnswerEnds(t *testing.T) {
	testkit.Start(t)
	runs, answer, stop := make(chan *link.Run, 1), make(chan struct{}), make(chan struct{})
	h, _ := liar(t, Config{block: 2 * time.Second}, `{"inputs":[{"name":"x","shape":[-2]}],"outputs":[{"name":"y","shape":[-2]}],"rows":1}`,
		func(g *linktest.Guest, r *link.Run) bool {
			runs <- r
			<-answer
			g.Send(&link.Answer{Head: link.Head{ID: r.ID}, Outputs: r.Inputs})
			<-stop
			return false
		})
	ended := make(chan error, 1)
	go func() { // ends with the answer
		_, err := enginetest.Compute(t.Context(), h.Model(), vector(1), nil, 1<<20, 0)
		ended <- err
	}()
	<-runs
	h.mu.Lock()
	for g := range h.guests {
		g.tells = slices.Repeat([]link.Message{&link.End{Head: link.Head{ID: 99}}}, 2000) // they fill the socket
		g.tell()
		require.True(t, g.telling)
	}
	h.mu.Unlock()
	close(answer)
	require.NoError(t, <-ended)
	<-h.Ended()
	close(stop)
}

func TestAWorkerThatCannotBeToldEnds(t *testing.T) {
	testkit.Start(t)
	h, _, _, _, done := ahead(t, Config{}, aheadReady, time.Millisecond)
	flying(t, h, 3)
	h.mu.Lock()
	for g := range h.guests {
		g.tells = append(g.tells, &link.Give{Ranges: []link.Range{{Memory: 99, Len: 4096}}})
		g.tell()
	}
	h.mu.Unlock()
	require.ErrorContains(t, <-done, "names memory 99, which is gone")
	<-h.Ended()
}

func TestWhatAGuestDoesNotMakePublicIsForTheLogAlone(t *testing.T) {
	const trace = "Traceback\n  File \"m.py\", line 3, in f\n    raise KeyError('secret')\nKeyError: 'secret'\n"
	for public, says := range map[bool]string{true: `,"public":true`, false: ""} {
		text, err := json.Marshal(trace)
		require.NoError(t, err)
		err = failure(&link.Answer{JSON: fmt.Appendf(nil, `{"message":"KeyError in /home/model"%s,"trace":%s}`, says, text)})
		require.EqualError(t, err, "KeyError: 'secret'")
		told, ok := errors.AsType[engine.PublicError](err)
		require.Equal(t, public, ok)
		if ok {
			require.Equal(t, "KeyError in /home/model", told.Public())
		}
		traced, ok := errors.AsType[engine.TracedError](err)
		require.True(t, ok)
		place, all := traced.Trace()
		require.Equal(t, `File "m.py", line 3, in f`, place)
		require.Equal(t, trace, all)
	}
}

// aheadReady is of a model whose worker takes three blocks at a time.
const aheadReady = `{"inputs":[{"name":"x","shape":[-2]}],"outputs":[{"name":"y","shape":[-2]}],"rows":1,"block_rows":1,"blocks":3}`

// ahead starts a call of 12 blocks, whose worker is told of blocks and answers when it is asked to.
// The first block is answered, in took.
func ahead(t *testing.T, c Config, ready string, took time.Duration) (h *Host, runs chan *link.Run, answer func(*link.Run), cancel func(), done chan error) {
	t.Helper()
	runs = make(chan *link.Run, 12)
	h, g := liar(t, c, ready, func(_ *linktest.Guest, r *link.Run) bool { runs <- r; return true })
	answer = func(r *link.Run) {
		g.Send(&link.Answer{Head: link.Head{ID: r.ID}, Nanos: uint64(took), Outputs: r.Inputs})
	}
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	done = make(chan error, 1)
	x, err := tensor.Of(testkit.Bytes(12*9, 7), 12, 9)
	require.NoError(t, err)
	go func() { // ends with the call
		y, err := enginetest.Compute(ctx, h.Model(), []tensor.Tensor{x}, nil, 1<<20, 0)
		if err == nil && !bytes.Equal(x.Data, y[0].Data) {
			err = errors.New("a result is another block's")
		}
		done <- err
	}()
	answer(<-runs)
	return h, runs, answer, cancel, done
}

// flying waits until a worker has been told of n blocks, and of no more.
func flying(t *testing.T, h *Host, n int) {
	t.Helper()
	testkit.Eventually(t, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		for g := range h.guests {
			return len(g.flight) == n && g.flight[n-1].sent && h.lines[0].len() > 0
		}
		return false
	}, "blocks that the worker has")
}

func TestAWorkerHasAsManyBlocksAsItTakesWhileTheyAreShort(t *testing.T) {
	for name, tc := range map[string]struct {
		ready string
		took  time.Duration
		want  int
	}{
		"three":            {aheadReady, time.Millisecond, 3},
		"it takes one":     {strings.Replace(aheadReady, `,"blocks":3`, "", 1), time.Millisecond, 1},
		"they are long":    {aheadReady, aheadWithin, 1},
		"more than we do":  {strings.Replace(aheadReady, "3}", "1000000}", 1), time.Millisecond, mostAhead},
		"less than it may": {strings.Replace(aheadReady, "3}", "-1}", 1), time.Millisecond, 1},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			h, runs, answer, _, done := ahead(t, Config{}, tc.ready, tc.took)
			flying(t, h, tc.want)
			for range 11 / tc.want { // in any order
				var some []*link.Run
				for range tc.want {
					some = append(some, <-runs)
				}
				for _, r := range slices.Backward(some) {
					answer(r)
				}
			}
			for range 11 % tc.want {
				answer(<-runs)
			}
			require.NoError(t, <-done)
		})
	}
}

func TestTheFirstBlockOfAWorkerIsAlone(t *testing.T) {
	testkit.Start(t)
	runs := make(chan *link.Run, 12)
	h, g := liar(t, Config{}, aheadReady, func(_ *linktest.Guest, r *link.Run) bool { runs <- r; return true })
	go func() { _, _ = enginetest.Compute(t.Context(), h.Model(), vector(12), nil, 1<<20, 0) }() // ends with the host
	flying(t, h, 1)
	g.Close()
}

// runsOf is an each of liar that has a test answer.
func runsOf(runs chan *link.Run) func(*linktest.Guest, *link.Run) bool {
	return func(_ *linktest.Guest, r *link.Run) bool { runs <- r; return true }
}

func TestABlockIsForAnIdleWorkerFirst(t *testing.T) {
	testkit.Start(t)
	one, two := make(chan *link.Run, 3), make(chan *link.Run, 3)
	h, g := liar(t, Config{}, aheadReady, runsOf(one))
	ended := make(chan error, 4)
	call := func() {
		_, err := enginetest.Compute(t.Context(), h.Model(), vector(1), nil, 1<<20, 0)
		ended <- err
	}
	answer := func(g *linktest.Guest, r *link.Run) {
		g.Send(&link.Answer{Head: link.Head{ID: r.ID}, Nanos: 1, Outputs: r.Inputs})
	}
	go call() // they end with their answers
	answer(g, <-one)
	require.NoError(t, <-ended)
	go call()
	first := <-one

	socket, late := lies(t, aheadReady, runsOf(two))
	talked := make(chan error, 1)
	second := newGuest(&process{host: h}, socket, 1, nil)
	go func() { talked <- second.talk() }() // ends with the link
	testkit.Eventually(t, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.guests) == 2
	}, "the second")
	go call()
	answer(late, <-two)
	require.NoError(t, <-ended)
	answer(g, first)
	require.NoError(t, <-ended)
	late.Close()
	require.NoError(t, <-talked)
	second.conn.Close()
	h.leave(second, engine.ErrUnavailable)
}

// Blocks that a worker computes at once may all be late, and each is heard when it is cancelled.
func TestAWorkerComputesBlocksAtOnce(t *testing.T) {
	testkit.Start(t)
	runs := make(chan *link.Run, 12)
	h, g := liar(t, Config{}, strings.Replace(aheadReady, `"blocks"`, `"concurrency"`, 1), runsOf(runs))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	older, younger := make(chan error, 1), make(chan error, 1)
	call := func(ctx context.Context, ended chan<- error) {
		_, err := enginetest.Compute(ctx, h.Model(), vector(1), nil, 1<<20, 0)
		ended <- err
	}
	go call(t.Context(), older) // they end with the host
	<-runs
	go call(ctx, younger)
	<-runs
	h.mu.Lock()
	h.cfg.obey = 300 * time.Millisecond
	h.mu.Unlock()
	cancel()
	require.ErrorIs(t, <-younger, context.Canceled, "it does not answer")
	require.ErrorContains(t, <-older, "it went on for 300ms with a block that was cancelled")
	<-h.Ended()
	g.Close()
}

func TestASequenceHasOneBlockAtATime(t *testing.T) {
	testkit.Start(t)
	runs := make(chan *link.Run, 12)
	h, g := liar(t, Config{}, strings.Replace(aheadReady, `"blocks"`, `"concurrency"`, 1), runsOf(runs))
	ended := make(chan error, 2)
	for range 2 {
		s, err := h.begin(t.Context(), engine.Sequence{MaxRows: 12})
		require.NoError(t, err)
		go func() { // ends with its answers
			_, err := engine.Step(t.Context(), h.Model(), s, vector(6)...)
			ended <- err
		}()
	}
	for range 6 {
		a, b := <-runs, <-runs
		require.Zero(t, a.Flags)
		require.NotEqual(t, a.Run, b.Run)
		require.Equal(t, a.Row, b.Row)
		require.Empty(t, runs)
		for _, r := range []*link.Run{a, b} {
			g.Send(&link.Answer{Head: link.Head{ID: r.ID}, Outputs: r.Inputs})
		}
	}
	require.NoError(t, <-ended)
	require.NoError(t, <-ended)
}

func TestAWorkerWithAStateComputesOneBlockAtATime(t *testing.T) {
	for _, says := range []string{`"stateful":true`, `"companions":[{"name":"train","inputs":[{"name":"x","shape":[-2]}],"outputs":[{"name":"y","shape":[-2]}]}]`} {
		_, err := parseInfo("m", []byte(`{"inputs":[{"name":"x","shape":[-2]}],"outputs":[{"name":"y","shape":[-2]}],"concurrency":2,`+says+`}`))
		require.ErrorContains(t, err, "computes one block at a time, not 2")
	}
}

func TestAllBlocksOfACancelledCallAreCancelled(t *testing.T) {
	for _, obeys := range []bool{true, false} {
		t.Run(fmt.Sprintf("obeys=%v", obeys), func(t *testing.T) {
			testkit.Start(t)
			h, runs, answer, cancel, done := ahead(t, Config{block: 300 * time.Millisecond}, aheadReady, time.Millisecond)
			flying(t, h, 3)
			cancel()
			cancelled := func(n int) (due time.Time) {
				testkit.Eventually(t, func() bool {
					h.mu.Lock()
					defer h.mu.Unlock()
					for g := range h.guests {
						due = g.watch.Due
						return len(g.flight) == n && !slices.ContainsFunc(g.flight, func(f *flight) bool { return !f.unasked })
					}
					return false
				}, "cancelled blocks")
				return due
			}
			due := cancelled(3)
			if obeys {
				answer(<-runs)
				require.Equal(t, due, cancelled(2), "they share the time")
				answer(<-runs)
				answer(<-runs)
			}
			require.ErrorIs(t, <-done, context.Canceled)
			if obeys {
				require.Len(t, h.guests, 1)
			} else {
				<-h.Ended()
			}
		})
	}
}

func TestABlockIsAnsweredOnce(t *testing.T) {
	for _, ids := range [][]uint64{{0, 0}, {1}} { // of the answers to the first block
		testkit.Start(t)
		h, _ := liar(t, Config{}, aheadReady, func(g *linktest.Guest, r *link.Run) bool {
			for _, more := range ids {
				g.Send(&link.Answer{Head: link.Head{ID: r.ID + more}, Outputs: r.Inputs})
			}
			ids = nil
			return true
		})
		for range 2 { // the first answer may be the call's
			_, err := enginetest.Compute(t.Context(), h.Model(), vector(1), nil, 1<<20, 0)
			if err != nil {
				require.ErrorContains(t, err, "an answer that nobody waits for")
			}
		}
		<-h.Ended()
	}
}

// Of several blocks only the oldest is due: the time of the next begins with its answer.
func TestABlockIsDueWhenItIsTheOldest(t *testing.T) {
	testkit.Start(t)
	h, runs, answer, _, done := ahead(t, Config{block: 2 * time.Second}, aheadReady, time.Millisecond)
	flying(t, h, 3)
	var g *guest
	due := func() time.Time {
		h.mu.Lock()
		defer h.mu.Unlock()
		return g.watch.Due
	}
	h.mu.Lock()
	h.cfg.obey = time.Hour
	for g = range h.guests {
		g.tells = append(g.tells, &link.End{Head: link.Head{ID: 99}})
		g.tell()
	}
	h.mu.Unlock()
	first := due()
	one, two, _ := <-runs, <-runs, <-runs
	answer(two)
	<-runs // what was to be told is told, and the fourth is there
	require.Equal(t, first, due(), "the oldest is computed as before")
	answer(one)
	<-runs
	require.True(t, due().After(first))
	require.Less(t, due().Sub(first), time.Minute)
	require.ErrorIs(t, <-done, engine.ErrUnavailable) // the third is not answered
}
