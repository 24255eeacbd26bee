//go:build linux

package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/internal/link/linktest"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// keeper is what a worker in Go says of a model that has companions.
const keeper = `{"inputs":[],"outputs":[{"name":"y","shape":[-2]}],"companions":[
	{"name":"train","inputs":[],"outputs":[{"name":"y","shape":[-2]}],"keeps":true,"ordered":true,"params":[{"name":"order","kind":"str"}]},
	{"name":"step","inputs":[],"outputs":[{"name":"y","shape":[-2]}]}]}`

// trainer is such a worker: it sends what it gets, and answers each block when it is told to.
type trainer struct {
	*linktest.Guest
	host  *Host
	heard chan link.Message
}

func newTrainer(t *testing.T, ready string) *trainer {
	t.Helper()
	socket, g := linktest.Pair(t)
	tr := &trainer{Guest: g, heard: make(chan link.Message, 100)}
	go func() { // ends with the link
		g.Send(&link.Hello{JSON: []byte(`{"link":1,"version":"1","role":"worker","pid":1}`)})
		if _, err := g.Recv(); err != nil {
			return
		}
		g.Send(&link.Ready{JSON: []byte(ready)})
		defer g.Close() // when it is asked to end
		defer close(tr.heard)
		for {
			m, err := g.Recv()
			if err != nil {
				return
			}
			tr.heard <- m
		}
	}()
	h, err := Start(Config{Name: "trunk", Socket: socket, Version: "1", MemoryBytes: 1 << 20})
	require.NoError(t, err)
	t.Cleanup(h.Close)
	tr.host = h
	return tr
}

// hear returns the next message of a kind, which is the next of all but those of ended runs.
func hear[T link.Message](t *testing.T, tr *trainer) T {
	t.Helper()
	for m := range tr.heard {
		if _, ended := m.(*link.End); ended {
			continue
		}
		got, ok := m.(T)
		require.True(t, ok, "a %T", m)
		return got
	}
	panic("the link has ended")
}

// done answers a block that was heard.
func (tr *trainer) done(r *link.Run) {
	tr.Send(&link.Answer{Head: link.Head{ID: r.ID}, Outputs: []link.Tensor{{DType: 6, Shape: []int64{0}}}})
}

// begin begins a call of a model, and returns its end.
func begin(ctx, life context.Context, m engine.Model, params map[string]string) <-chan error {
	end := make(chan error, 1)
	go func() { // ends with the call
		r, err := m.Open(ctx, engine.Call{ID: tensor.ID{1}, Params: params, Lifetime: life})
		if err != nil {
			end <- err
			return
		}
		for err == nil {
			var out engine.Out
			if out, err = r.Next(ctx); err == nil && out.Release != nil {
				out.Release()
			}
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
		end <- errors.Join(err, r.Close())
	}()
	return end
}

func TestCompanionsAreServedAndToldWhoCallsThem(t *testing.T) {
	testkit.Start(t)
	tr := newTrainer(t, keeper)
	names := []string{tr.host.Model().Info().Name}
	for _, m := range tr.host.Companions() {
		names = append(names, m.Info().Name)
	}
	require.Equal(t, []string{"trunk", "trunk/train", "trunk/step"}, names)

	one, endOne := context.WithCancel(t.Context())
	two, endTwo := context.WithCancel(t.Context())
	var sessions [2]uint64
	for i, life := range []context.Context{one, two} {
		for number, m := range append([]engine.Model{tr.host.Model()}, tr.host.Companions()...) {
			end := begin(t.Context(), life, m, nil)
			r := hear[*link.Run](t, tr)
			require.EqualValues(t, number, r.Model)
			var said callJSON
			require.NoError(t, json.Unmarshal(r.JSON, &said))
			require.NotZero(t, said.Session)
			require.True(t, number == 0 || said.Session == sessions[i], "calls of one session")
			sessions[i] = said.Session
			tr.done(r)
			require.NoError(t, <-end)
		}
	}
	require.NotEqual(t, sessions[0], sessions[1])
	end := begin(t.Context(), nil, tr.host.Companions()[1], nil) // a call that nothing outlasts
	r := hear[*link.Run](t, tr)
	require.NotContains(t, string(r.JSON), "session")
	tr.done(r)
	require.NoError(t, <-end)

	for i, leave := range []func(){endOne, endTwo} {
		leave()
		require.Equal(t, sessions[i], hear[*link.Gone](t, tr).ID)
	}
	require.Error(t, <-begin(t.Context(), one, tr.host.Model(), nil), "its session has ended")
}

func TestASessionIsGoneAfterItsLastBlock(t *testing.T) {
	testkit.Start(t)
	tr := newTrainer(t, keeper)
	life, leave := context.WithCancel(t.Context())
	first := begin(t.Context(), life, tr.host.Model(), nil)
	r := hear[*link.Run](t, tr)
	second := begin(t.Context(), life, tr.host.Model(), nil)
	testkit.Eventually(t, func() bool {
		tr.host.mu.Lock()
		defer tr.host.mu.Unlock()
		return tr.host.lines[0].len() == 1
	}, "a block waits")
	leave()
	testkit.Eventually(t, func() bool {
		tr.host.mu.Lock()
		defer tr.host.mu.Unlock()
		return len(tr.host.sessions) == 0
	}, "the session is gone")
	tr.done(r)
	hear[*link.Gone](t, tr)
	require.NoError(t, <-first)
	select {
	case err := <-second: // its block was not computed
		require.Error(t, err)
	case m := <-tr.heard:
		require.IsType(t, &link.End{}, m)
	}
}

func TestWhatAProcessKeepsIsChargedUntilItIsGone(t *testing.T) {
	testkit.Start(t)
	tr := newTrainer(t, keeper)
	used := func() int64 {
		n, _, _ := tr.host.budget.Used()
		return n
	}
	keep := func(bytes, most int64) {
		tr.Send(&link.Kept{JSON: fmt.Appendf(nil, `{"kept":%d,"most":%d,"gauges":{"graphs":3,"lease":1}}`, bytes, most)})
		testkit.Eventually(t, func() bool { return used() == min(max(bytes, 0), 1<<20) }, "what is kept is charged")
	}
	keep(300<<10, 100<<10)
	gauges := map[string]float64{}
	for _, g := range tr.host.gauges() {
		gauges[g.Name] = g.Value
	}
	require.EqualValues(t, 3, gauges["training_graphs"])
	require.EqualValues(t, 1, gauges["training_lease"])

	train := tr.host.Companions()[0]
	end := begin(t.Context(), t.Context(), train, nil)
	r := hear[*link.Run](t, tr)
	require.EqualValues(t, 400<<10, used(), "what the last one has left is charged to the next")
	tr.done(r)
	require.NoError(t, <-end)

	keep(450<<10, 100<<10) // only 62 KiB more are kept: others are dropped before
	end = begin(t.Context(), t.Context(), train, nil)
	r = hear[*link.Run](t, tr)
	require.EqualValues(t, 512<<10, used())
	tr.done(r)
	require.NoError(t, <-end)

	tr.host.budget.Hold(nil, 550<<10)
	end = begin(t.Context(), t.Context(), train, nil)
	testkit.Eventually(t, tr.host.budget.Waited, "the next forward pass waits")
	tr.Send(&link.Kept{JSON: []byte(`{"kept":-1,"most":102400}`)})
	tr.host.budget.Release(nil, 550<<10)
	r = hear[*link.Run](t, tr)
	tr.Send(&link.Answer{Head: link.Head{ID: r.ID}, Outputs: []link.Tensor{{DType: 6, Shape: []int64{0}}}, JSON: []byte(`{"kept":1024,"most":1024}`)})
	require.NoError(t, <-end)
	testkit.Eventually(t, func() bool { return used() == 1024 }, "an answer says it, too")

	keep(1<<40, 1<<40) // it may say what it likes
	tr.Send(&link.Kept{JSON: []byte(`{"kept":"much"}`)})
	<-tr.host.Ended()
	testkit.Eventually(t, func() bool { return used() == 0 }, "nothing is charged")
}

func TestCallsOfASeriesRunInTheirOrder(t *testing.T) {
	testkit.Start(t)
	tr := newTrainer(t, keeper)
	train := tr.host.Companions()[0]
	waiting := func(n int) {
		t.Helper()
		testkit.Eventually(t, func() bool {
			tr.host.mu.Lock()
			defer tr.host.mu.Unlock()
			count := tr.host.lines[1].len()
			for _, o := range tr.host.sessions {
				count += len(o.waiting)
			}
			return count == n
		}, "blocks wait")
	}
	order := func(text string) <-chan error {
		return begin(t.Context(), t.Context(), train, map[string]string{"order": text})
	}
	calls := make([]<-chan error, 5)
	for i := range slices.Backward(calls[1:]) {
		calls[i+1] = order(fmt.Sprintf("a.%d", i+1))
		waiting(4 - i)
	}
	calls[0] = order("a.0")
	for i := range calls { // the one that may run is the next
		r := hear[*link.Run](t, tr)
		tr.done(r)
		require.NoError(t, <-calls[i])
	}
	again := order("a.2") // it has run
	tr.done(hear[*link.Run](t, tr))
	require.NoError(t, <-again)

	ctx, cancel := context.WithCancel(t.Context())
	late := begin(ctx, t.Context(), train, map[string]string{"order": "b.7"})
	waiting(1)
	cancel()
	require.Error(t, <-late)
	waiting(0)

	stuck := order("c.9")
	waiting(1)
	require.ErrorIs(t, <-order("c.9"), engine.ErrPrecondition, "the place of another")
	waiting(1)
	first := order("d.0") // c waits for what never came
	require.ErrorIs(t, <-stuck, engine.ErrPrecondition)
	tr.done(hear[*link.Run](t, tr))
	require.NoError(t, <-first)

	tr.host.cfg.turn = time.Millisecond // nothing is begun that reads it
	require.ErrorIs(t, <-order("e.1"), engine.ErrPrecondition, "nothing comes before it")
	waiting(0)
	tr.host.cfg.turn = turnWait

	for _, bad := range []string{"1", "a.-1", ".1", "a.", "a.x"} {
		require.ErrorIs(t, <-order(bad), engine.ErrParam, "%q", bad)
	}
	stuck = order("f.1")
	waiting(1)
	tr.host.Close()
	require.ErrorIs(t, <-stuck, engine.ErrClosed)
}

func TestAProcessMayRefuseForItsState(t *testing.T) {
	testkit.Start(t)
	tr := newTrainer(t, keeper)
	end := begin(t.Context(), t.Context(), tr.host.Companions()[1], nil)
	r := hear[*link.Run](t, tr)
	tr.Send(&link.Answer{Head: link.Head{ID: r.ID}, Code: link.Precondition, JSON: []byte(`{"message":"step 4 stands","public":true}`)})
	err := <-end
	require.ErrorIs(t, err, engine.ErrPrecondition)
	require.ErrorContains(t, err, "step 4 stands")
}

func TestACompanionThatIsNoModelIsRefused(t *testing.T) {
	testkit.Start(t)
	socket, g := linktest.Pair(t)
	go func() { // ends with the link
		g.Send(&link.Hello{JSON: []byte(`{"link":1,"version":"1","role":"worker","pid":1}`)})
		if _, err := g.Recv(); err == nil {
			g.Send(&link.Ready{JSON: []byte(`{"inputs":[],"outputs":[{"name":"y"}],"companions":[{"name":"t","rows":1,"outputs":[{"name":"y"}]}]}`)})
			_, _ = g.Recv()
		}
	}()
	_, err := Start(Config{Name: "trunk", Socket: socket, Version: "1", MemoryBytes: 1 << 20})
	require.ErrorContains(t, err, "a model without inputs has no rows")
}

func TestTheModelAndItsCompanionsWaitForOneBlockOfEachOther(t *testing.T) {
	testkit.Start(t)
	tr := newTrainer(t, keeper)
	step := tr.host.Companions()[1]
	var ends []<-chan error
	for range 3 {
		ends = append(ends, begin(t.Context(), t.Context(), step, nil))
	}
	r := hear[*link.Run](t, tr)
	ends = append(ends, begin(t.Context(), t.Context(), tr.host.Model(), nil))
	testkit.Eventually(t, func() bool {
		tr.host.mu.Lock()
		defer tr.host.mu.Unlock()
		return tr.host.lines[1].len() == 2 && tr.host.lines[0].len() == 1
	}, "all wait")
	ends = append(ends, begin(t.Context(), t.Context(), tr.host.Model(), nil))
	testkit.Eventually(t, func() bool {
		tr.host.mu.Lock()
		defer tr.host.mu.Unlock()
		return tr.host.lines[0].len() == 2
	}, "another waits")
	for _, next := range []uint16{0, 2, 0, 2} {
		tr.done(r)
		r = hear[*link.Run](t, tr)
		require.Equal(t, next, r.Model)
	}
	tr.done(r)
	for _, end := range ends {
		require.NoError(t, <-end)
	}
}
