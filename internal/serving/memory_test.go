package serving

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestSessionsThatCompeteForATinyBudgetAllFinish(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serveWithin(t, 5*mib, nil)
		data := floats(3 << 20) // 12 MiB
		want := relus(data)
		ended := make(chan error)
		const sessions = 4
		for range sessions {
			p := f.session(t)
			go func() { // ends with its calls
				for range 3 {
					y := p.run(offering("relu", data, mib).as(tensor.Float32, 3<<20))["y"]
					if !bytes.Equal(want, y) {
						ended <- errors.New("wrong result")
						return
					}
				}
				ended <- nil
			}()
		}
		for range sessions {
			require.NoError(t, <-ended)
		}
		v := f.Values()
		require.LessOrEqual(t, v.MemoryPeak, v.MemoryLimit)
	})
}

func TestACallThatCanNeverFitIsRefusedNamingTheLimit(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serveWithin(t, 4*mib, nil)
		p := f.session(t)
		o := offering("sink", make([]byte, 8*mib), mib) // needs it whole
		p.open(o)
		done := p.done(o)
		require.Equal(t, frame.ResourceExhausted, done.Code)
		require.Contains(t, done.Message, fmt.Sprint(4*mib))
		require.Contains(t, done.Message, fmt.Sprintf("%d bytes asked", 8*mib+4096)) // and the result, which takes a page
		require.Zero(t, done.RetryAfterMillis, "waiting does not help")
		p.good()
	})
}

func TestTooManyChunksForTheBudgetAreRefusedNamingIt(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serveWithin(t, 4*mib, nil)
		p := f.session(t)
		o := offering("echo", make([]byte, mib), 1)
		p.open(o)
		done := p.done(o)
		require.Equal(t, frame.ResourceExhausted, done.Code)
		require.Contains(t, done.Message, "larger chunks")
		require.Contains(t, done.Message, fmt.Sprint(4*mib))
		p.good()
	})
}

func TestACallWaitsForMemoryABoundedTime(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serveWithin(t, 12*mib, func(c *Config) { c.MemoryWait = 200 * time.Millisecond })
		g := addGate(t, f, "gate")
		first, second := f.session(t), f.session(t)
		o := offering("gate", make([]byte, 6*mib), mib)
		first.open(o)
		first.credit(o, 1)
		began := time.Now()
		over := offering("sink", make([]byte, 6*mib), mib)
		second.open(over)
		done := second.done(over)
		require.Equal(t, 200*time.Millisecond, time.Since(began))
		require.Equal(t, frame.ResourceExhausted, done.Code)
		require.Contains(t, done.Message, "200ms")
		require.Contains(t, done.Message, fmt.Sprint(12*mib))
		require.Positive(t, done.RetryAfterMillis)
		close(g.open)
		first.deliver(o)
		require.Equal(t, o.data, first.result(o)["y"])
		testkit.Eventually(t, func() bool { return f.Values().MemoryUsed == 0 }, "free memory")
		second.run(offering("sink", make([]byte, 6*mib), mib))
	})
}

func TestAnAllowanceThatWasGrantedIsKeptWhenTheBudgetIsFull(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serveWithin(t, 16*mib, nil)
		g := addGate(t, f, "gate")
		holder, waiting := f.session(t), f.session(t)
		held := offering("gate", make([]byte, 9*mib), mib)
		holder.open(held)
		holder.credit(held, 1)
		behind := offering("sink", make([]byte, 9*mib), mib)
		waiting.open(behind)
		testkit.Eventually(t, f.host.Budget().Waited, "a call that waits for memory")
		p := f.session(t)
		began := time.Now()
		for range 20 { // also those that run at once
			o := offering("echo", make([]byte, 30_000), mib)
			o.desc.OnAllowance = true
			require.Equal(t, o.data, p.run(o)["y"])
		}
		require.Less(t, time.Since(began), time.Second)
		o := offering("echo", make([]byte, p.hello.AllowanceBytes), mib)
		o.desc.OnAllowance = true
		p.open(o)
		p.deliver(o)
		last := f.session(t)
		small := offering("echo", make([]byte, 30_000), 30_000)
		last.open(small) // needs no allowance
		last.credit(small, 1)
		last.deliver(small)
		require.Equal(t, small.data, last.result(small)["y"])
		close(g.open)
		holder.deliver(held)
		holder.result(held)
		waiting.credit(behind, 1)
		waiting.deliver(behind)
		waiting.result(behind)
		require.Equal(t, o.data, p.result(o)["y"])
	})
}

func TestAllowancesThatAreGrantedCanAllBeKept(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serveWithin(t, 64*mib, nil)
		var granted []uint32
		var all []*peer
		var total uint32
		for range 60 {
			p := f.session(t)
			all = append(all, p)
			granted = append(granted, p.hello.AllowanceBytes)
			total += p.hello.AllowanceBytes
		}
		require.EqualValues(t, mib, granted[0])
		require.True(t, slices.IsSortedFunc(granted, func(a, b uint32) int { return cmp.Compare(b, a) }), granted)
		require.LessOrEqual(t, total, uint32(16*mib), "a quarter of the budget is for allowances")
		require.Greater(t, total, uint32(10*mib))
		require.Zero(t, granted[59], granted)
		// All at the same time.
		var sent []*offer
		for i, p := range all {
			o := offering("echo", make([]byte, max(granted[i], 1)), mib)
			o.desc.OnAllowance = granted[i] > 0
			p.open(o)
			sent = append(sent, o)
		}
		for i, p := range all {
			if granted[i] > 0 {
				p.deliver(sent[i])
			}
		}
		for i, p := range all {
			if granted[i] == 0 { // waits for credit, as a large tensor does
				p.credit(sent[i], 1)
				p.deliver(sent[i])
			}
			require.True(t, bytes.Equal(sent[i].data, p.result(sent[i])["y"]), "session %d", i)
		}
		for _, p := range all {
			p.end()
		}
		f.isEmpty(t)
		require.EqualValues(t, mib, f.session(t).hello.AllowanceBytes, "what sessions were granted comes back with their end")
	})
}

// pairOf makes a call of pair with rows of x on credit and a w of n bytes on
// allowance.
func pairOf(rows, n int) (x, w *offer) {
	x = offering("pair", floats(rows*n/4), n).as(tensor.Float32, int64(rows), int64(n/4))
	return x, x.beside("w", tensor.Float32, floats(n/4), int64(n/4))
}

func TestTensorsOnAllowanceWaitWithinTheBudget(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serveWithin(t, 64*mib, nil)
		addPair(t, f)
		p := f.session(t)
		_, first := pairOf(1, mib)
		for i := range 10 {
			w := first
			if i > 0 {
				_, w = pairOf(1, mib)
			}
			p.open(w) // x never comes
			p.send(w.chunk(0))
			if i > 0 { // the first stays, so it is not acknowledged, and the allowance is in use
				done := p.done(w)
				require.Equal(t, frame.ResourceExhausted, done.Code)
				require.Contains(t, done.Message, "0 are left; wait for credit")
			}
			f.covered(t)
		}
		require.Zero(t, p.acks[first.desc.Tensor].Below)
		p.send(&frame.Frame{Cancels: []tensor.ID{first.call.ID}})
		p.run(small("echo"))
	})
}

func TestATensorOnAllowanceMakesRoomOnceItLiesInABlock(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		addPair(t, f)
		p := f.session(t)
		const calls = 8
		var last [calls]*offer
		for i := range last {
			x, w := pairOf(1, mib)
			p.send(&frame.Frame{Calls: []frame.Call{x.call}, Descs: []frame.Desc{w.desc, x.desc}})
			p.deliver(w)
			p.credit(x, 1) // the block of w is full
			last[i] = x
		}
		f.covered(t)
		// Each run holds w and a block of x; none of them waits on the side.
		_, live := f.host.Pool().Live()
		require.Less(t, live, int64(calls*2*mib+mib))
		for _, x := range last {
			p.deliver(x)
			p.result(x)
		}
	})
}

func TestAnAllowanceDoesNotHoldUpALargeCallOfItsSession(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serveWithin(t, 16*mib, nil)
		g := addGate(t, f, "gate")
		first, second, third := f.session(t), f.session(t), f.session(t)
		second.run(small("echo")) // from now on it holds its allowance
		o := offering("gate", make([]byte, 6*mib), mib)
		first.open(o)
		first.credit(o, 1)
		large := offering("sink", make([]byte, 10*mib), mib) // more than half, and than is left
		second.open(large)
		probe := slab.NewPrincipal("probe")
		testkit.Eventually(t, func() bool {
			granted := f.host.Budget().TryAcquire(probe, 1)
			if granted {
				f.host.Budget().Release(probe, 1)
			}
			return !granted
		}, "a call that waits for memory")
		behind := offering("sink", make([]byte, 7*mib), mib)
		third.open(behind)
		close(g.open)
		first.deliver(o)
		first.result(o)
		second.deliver(large)
		second.result(large)
		third.deliver(behind)
		third.result(behind)
	})
}
