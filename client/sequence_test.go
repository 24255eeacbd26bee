package client_test

import (
	"context"
	"errors"
	"io"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

const width = 4

// sums is a model whose rows are the sums of all rows so far. A row that begins with NaN fails,
// one with an infinity waits for the end of its call, and one with -1 loses the state.
type sums struct {
	states atomic.Int64
	begun  atomic.Int64 // rows that wait
}

type sumsState struct {
	of   *sums
	info engine.Info
	sum  [width]float32
}

func (s *sumsState) Rows(c engine.Call) (int64, error) { return s.info.Check(c) }
func (s *sumsState) Bytes() int64                      { return 4 * width }
func (s *sumsState) Close()                            { s.of.states.Add(-1) }

func (m *sums) model(t testing.TB, h *cpu.Host) engine.Model {
	port := func(name string) []engine.Port {
		return []engine.Port{{Name: name, DTypes: []tensor.DataType{tensor.Float32}, Shape: []int64{engine.Free, width}}}
	}
	info := engine.Info{Name: "sums", Rows: 1, BlockRows: 1 << 20, Inputs: port("x"), Outputs: port("y"), Params: []engine.Param{{Name: "from", Kind: "float"}}}
	model, err := cpu.RowFunc{
		Info: info,
		Begin: func(_ context.Context, q engine.Sequence) (engine.State, error) {
			if q.MaxRows > 1<<40 {
				return nil, engine.ErrUnavailable
			}
			m.states.Add(1)
			s := &sumsState{of: m, info: info}
			if q.Params["from"] != "" {
				s.sum[0] = 100
			}
			return s, nil
		},
		Bind: func(c engine.Call) (cpu.RowsFunc, error) {
			s, ok := c.State.(*sumsState)
			if !ok {
				s = new(sumsState)
			}
			return cpu.Rows(func(ctx context.Context, b cpu.RowBlock, in, out [][]float32) error {
				for r := range int(b.Rows) {
					x, y := in[0][r*width:][:width], out[0][r*width:][:width]
					switch {
					case math.IsNaN(float64(x[0])):
						return engine.Publicf("a row that is none")
					case math.IsInf(float64(x[0]), 0):
						m.begun.Add(1)
						<-ctx.Done()
						return context.Cause(ctx)
					case x[0] < 0:
						return errors.Join(engine.ErrStateLost, errors.New("its process has ended"))
					}
					for i := range x {
						s.sum[i] += x[i]
					}
					copy(y, s.sum[:])
				}
				return nil
			}), nil
		},
	}.Model(h)
	require.NoError(t, err)
	return model
}

func rowsOf(t testing.TB, first float32, n int) tensor.Tensor {
	all := make([]float32, n*width)
	for i := range all {
		all[i] = first
	}
	x, err := tensor.Of(all, int64(n), width)
	require.NoError(t, err)
	return x
}

func sumsFixture(t testing.TB, cfg client.Config, change func(*serverConfig)) (*fixture, *sums) {
	m := new(sums)
	var models *engine.Registry
	f := startServer(t, "tcp", cfg, func(c *serverConfig) {
		models = c.Models
		change(c)
	})
	require.NoError(t, models.Add(m.model(t, f.host)))
	return f, m
}

func counters(t testing.TB, f *fixture) map[string]int64 {
	i, err := f.server.GetServiceInfo(context.Background(), nil)
	require.NoError(t, err)
	return i.GetCounters()
}

func begin(t testing.TB, s interface {
	Sequence(context.Context, client.SequenceRequest) (*client.Sequence, error)
}, rows int64) *client.Sequence {
	t.Helper()
	q, err := s.Sequence(t.Context(), client.SequenceRequest{Model: "sums", MaxRows: rows})
	require.NoError(t, err)
	return q
}

// last returns the first element of the last row of a step's result.
func last(t testing.TB, q *client.Sequence, x tensor.Tensor) float32 {
	t.Helper()
	y, err := q.Step(t.Context(), x)
	require.NoError(t, err)
	all, err := tensor.Slice[float32](y)
	require.NoError(t, err)
	return all[len(all)-width]
}

func isLost(t testing.TB, err error) {
	t.Helper()
	own, ok := errors.AsType[*client.Error](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, codes.FailedPrecondition, own.Code, "%v", err)
	require.Equal(t, reason.StateLost, own.Why(), "%v", err)
	require.False(t, own.Retryable())
}

// gone waits until the server has nothing of any sequence.
func (m *sums) gone(t testing.TB, f *fixture) {
	t.Helper()
	testkit.Eventually(t, func() bool {
		n := counters(t, f)
		return m.states.Load() == 0 && n["sequences"] == 0 && n["state_bytes"] == 0 && n["calls"] == 0
	}, "states are given up")
}

func TestStepsShareAStateAndSequencesDoNot(t *testing.T) {
	testkit.Start(t)
	f, m := sumsFixture(t, client.Config{}, func(*serverConfig) {})
	a, b := begin(t, f.client, 10_000), begin(t, f.client, 10_000)
	require.EqualValues(t, 2, counters(t, f)["sequences"])
	require.EqualValues(t, 2*4*width, counters(t, f)["state_bytes"])
	var rows int64
	for i := range 300 {
		n := 1 + i%3*i%70
		rows += int64(n)
		require.EqualValues(t, rows, last(t, a, rowsOf(t, 1, n)))
		require.Equal(t, rows, a.Rows())
		require.EqualValues(t, 2*(i+1), last(t, b, rowsOf(t, 2, 1)))
	}
	// A call of the model has no state, and a large step is one, too.
	y, err := f.client.Compute(t.Context(), "sums", rowsOf(t, 1, 1))
	require.NoError(t, err)
	require.Equal(t, rowsOf(t, 1, 1).Data, y.Data)
	big := begin(t, f.client, 1<<18)
	require.EqualValues(t, 1<<18, last(t, big, rowsOf(t, 1, 1<<18)))
	for _, q := range []*client.Sequence{a, b, big} {
		require.NoError(t, q.Close())
		require.NoError(t, q.Close())
		_, err := q.Step(t.Context(), rowsOf(t, 1, 1))
		isLost(t, err)
		require.ErrorContains(t, err, "it was closed")
	}
	m.gone(t, f)
	// Steps of a model that keeps nothing are independent.
	q, err := f.client.Sequence(t.Context(), client.SequenceRequest{Model: "relu", MaxRows: 8 * width})
	require.NoError(t, err)
	for range 8 {
		y, err := q.Step(t.Context(), rowsOf(t, 3, 1))
		require.NoError(t, err)
		require.Equal(t, rowsOf(t, 3, 1).Data, y.Data)
	}
	require.NoError(t, q.Close())
	q, err = f.client.Sequence(t.Context(), client.SequenceRequest{Model: "sums", MaxRows: 1, Params: map[string]string{"from": "1"}})
	require.NoError(t, err)
	require.EqualValues(t, 101, last(t, q, rowsOf(t, 1, 1)))
	require.NoError(t, q.Close())
}

func TestABadStepLeavesTheStateAsItWas(t *testing.T) {
	testkit.Start(t)
	f, m := sumsFixture(t, client.Config{}, func(*serverConfig) {})
	wrong, err := tensor.Of(make([]float32, 3), 1, 3)
	require.NoError(t, err)
	q := begin(t, f.client, 3)
	require.EqualValues(t, 2, last(t, q, rowsOf(t, 2, 1)))
	for name, bad := range map[string]struct {
		r    client.Request
		code codes.Code
		says string
	}{
		"a wrong width":    {client.Request{Inputs: []client.Input{client.From("", wrong)}}, codes.FailedPrecondition, `wanted float32 of shape [any 4]`},
		"too many rows":    {client.Request{Inputs: []client.Input{client.From("", rowsOf(t, 1, 3))}}, codes.FailedPrecondition, "a step of 3 rows, and its sequence has room for 2 of its 3"},
		"an unknown input": {client.Request{Inputs: []client.Input{client.From("z", rowsOf(t, 1, 1))}}, codes.InvalidArgument, `takes inputs ["x"]`},
		"no input":         {client.Request{}, codes.Unknown, "a step of a sequence has inputs"},
		"a model":          {client.Request{Model: "sums", Inputs: []client.Input{client.From("", rowsOf(t, 1, 1))}}, codes.Unknown, "that the sequence began with"},
	} {
		c, err := q.Call(t.Context(), bad.r)
		if err == nil {
			_, err = c.Wait()
		}
		require.ErrorContains(t, err, bad.says, name)
		require.Equal(t, bad.code, status.Code(err), name)
	}
	require.EqualValues(t, 4, last(t, q, rowsOf(t, 2, 1)))
	require.EqualValues(t, 2, q.Rows())
	require.NoError(t, q.Close())
	for name, bad := range map[string]struct {
		r    client.SequenceRequest
		code codes.Code
		says string
	}{
		"no rows":         {client.SequenceRequest{Model: "sums"}, codes.Unknown, "at most 0 rows; wanted 1 or more"},
		"no model":        {client.SequenceRequest{MaxRows: 1}, codes.InvalidArgument, "names a model"},
		"unknown":         {client.SequenceRequest{Model: "none", MaxRows: 1}, codes.NotFound, "no such model"},
		"whole tensors":   {client.SequenceRequest{Model: "pair", MaxRows: 1}, codes.FailedPrecondition, "takes whole tensors"},
		"refused by it":   {client.SequenceRequest{Model: "sums", MaxRows: 1 << 41}, codes.Unavailable, ""},
		"unknown a param": {client.SequenceRequest{Model: "sums", MaxRows: 1, Params: map[string]string{"b": "1"}}, codes.InvalidArgument, `no param "b"`},
	} {
		_, err := f.client.Sequence(t.Context(), bad.r)
		require.ErrorContains(t, err, bad.says, name)
		require.Equal(t, bad.code, status.Code(err), name)
	}
	m.gone(t, f)
}

func TestAFailedStepEndsTheSequence(t *testing.T) {
	testkit.Start(t)
	f, m := sumsFixture(t, client.Config{}, func(*serverConfig) {})
	for name, x := range map[string]float32{"an error": float32(math.NaN()), "a lost state": -1, "a cancelled step": float32(math.Inf(1)), "a timeout": float32(math.Inf(1))} {
		q := begin(t, f.client, 100)
		require.EqualValues(t, 5, last(t, q, rowsOf(t, 1, 5)))
		m.begun.Store(0)
		ctx, cancel := context.WithCancel(t.Context())
		r := client.Request{Inputs: []client.Input{client.From("", rowsOf(t, x, 1))}}
		if name == "a timeout" {
			r.Timeout = 20 * time.Millisecond
		}
		c, err := q.Call(ctx, r)
		require.NoError(t, err)
		if name == "a cancelled step" {
			testkit.Eventually(t, func() bool { return m.begun.Load() == 1 }, "it computes")
			cancel()
		}
		_, err = c.Wait()
		require.Error(t, err, name)
		if name == "a lost state" {
			isLost(t, err)
			require.ErrorContains(t, err, "5 rows were answered")
		}
		_, err = q.Step(t.Context(), rowsOf(t, 1, 1))
		isLost(t, err)
		require.ErrorContains(t, err, "after 5 rows", name)
		require.NoError(t, q.Close())
		cancel()
		m.gone(t, f)
	}
}

func TestAStepThatDoesNotBeginLeavesNothingBehind(t *testing.T) {
	testkit.Start(t)
	f, m := sumsFixture(t, client.Config{}, func(*serverConfig) {})
	q := begin(t, f.client, 1<<20)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := q.Step(ctx, rowsOf(t, 1, 1))
	require.Equal(t, codes.Canceled, status.Code(err))
	require.EqualValues(t, 1, last(t, q, rowsOf(t, 1, 1)), "nothing was sent")
	// Nor does one that waits for memory when it is cancelled: its end is for Close to tell.
	f.host.Budget().Hold(nil, 512*mib)
	c, err := q.Call(t.Context(), client.Request{Inputs: []client.Input{client.From("", rowsOf(t, 1, 1<<18))}})
	require.NoError(t, err)
	testkit.Eventually(t, func() bool { return counters(t, f)["calls"] == 1 }, "it waits")
	c.Cancel()
	_, err = c.Wait()
	require.Equal(t, codes.Canceled, status.Code(err))
	testkit.Eventually(t, func() bool { return counters(t, f)["calls"] == 0 }, "it waits no more")
	f.host.Budget().Release(nil, 512*mib)
	require.EqualValues(t, 1, m.states.Load())
	require.NoError(t, q.Close())
	m.gone(t, f)
}

func TestTwoStepsAtATimeAreRefused(t *testing.T) {
	testkit.Start(t)
	f, m := sumsFixture(t, client.Config{}, func(*serverConfig) {})
	q := begin(t, f.client, 1000)
	c, err := q.Call(t.Context(), client.Request{Inputs: []client.Input{client.From("", rowsOf(t, float32(math.Inf(1)), 1))}})
	require.NoError(t, err)
	_, err = q.Step(t.Context(), rowsOf(t, 1, 1))
	require.ErrorContains(t, err, "a step is under way")
	require.Equal(t, codes.FailedPrecondition, status.Code(err))
	c.Cancel()
	_, err = c.Wait()
	require.Error(t, err)
	require.NoError(t, q.Close())
	m.gone(t, f)
	// Every row is counted once, whoever wins.
	q = begin(t, f.client, 1000)
	var all sync.WaitGroup
	var done atomic.Int64
	for range 4 {
		all.Go(func() {
			for range 100 {
				if _, err := q.Step(t.Context(), rowsOf(t, 1, 1)); err == nil {
					done.Add(1)
				}
			}
		})
	}
	all.Wait()
	require.EqualValues(t, done.Load()+1, last(t, q, rowsOf(t, 1, 1)))
	require.Equal(t, done.Load()+1, q.Rows())
	require.NoError(t, q.Close())
}

func TestSequencesEndWithTheirSessionAndWhenTheyRest(t *testing.T) {
	testkit.Start(t)
	f, m := sumsFixture(t, client.Config{}, func(c *serverConfig) { c.Session.SessionIdle = 300 * stream.Instant(time.Millisecond) })
	s := f.session(t)
	q := begin(t, s, 10)
	require.EqualValues(t, 1, last(t, q, rowsOf(t, 1, 1)))
	testkit.Eventually(t, func() bool { // calls keep the session, but not the sequence
		_, err := s.Compute(t.Context(), "relu", rowsOf(t, 1, 1))
		require.NoError(t, err)
		return m.states.Load() == 0
	}, "it rests for too long")
	_, err := q.Step(t.Context(), rowsOf(t, 1, 1))
	isLost(t, err)
	require.ErrorContains(t, err, "as long as a session may be idle")
	require.NoError(t, q.Close())
	q, cut := begin(t, s, 10), begin(t, s, 10)
	require.EqualValues(t, 2, last(t, q, rowsOf(t, 1, 2)))
	c, err := cut.Call(t.Context(), client.Request{Inputs: []client.Input{client.From("", rowsOf(t, float32(math.Inf(1)), 1))}})
	require.NoError(t, err)
	require.NoError(t, s.Close())
	_, err = c.Wait()
	isLost(t, err)
	_, err = q.Step(t.Context(), rowsOf(t, 1, 1))
	isLost(t, err)
	require.ErrorContains(t, err, "after 2 rows: its connection to the server has ended: ")
	require.NoError(t, q.Close())
	m.gone(t, f)
}

func TestTenThousandStepsAndAThousandSequences(t *testing.T) {
	testkit.Start(t)
	f, m := sumsFixture(t, client.Config{}, func(*serverConfig) {})
	q := begin(t, f.client, 10_000)
	for i := range 10_000 {
		if y := last(t, q, rowsOf(t, 1, 1)); y != float32(i+1) {
			t.Fatalf("step %d of %v: a row was lost, or came twice", i, y)
		}
	}
	require.EqualValues(t, 10_000, q.Rows())
	_, err := q.Step(t.Context(), rowsOf(t, 1, 1))
	require.ErrorContains(t, err, "a step of 1 rows, and its sequence has room for 0 of its 10000")
	require.NoError(t, q.Close())
	for range 1000 {
		q := begin(t, f.client, 1)
		require.EqualValues(t, 1, last(t, q, rowsOf(t, 1, 1)))
		require.NoError(t, q.Close())
	}
	m.gone(t, f)
}

// TestTwoHundredSequencesThatEndInEveryWay has them step at a time, and end well, by a cancelled step,
// with their session, with a connection that breaks, and at last with the server.
func TestTwoHundredSequencesThatEndInEveryWay(t *testing.T) {
	testkit.Start(t)
	f, m := sumsFixture(t, client.Config{}, func(*serverConfig) {})
	const sessions, each = 8, 25
	var all, steady sync.WaitGroup
	steady.Add(1)
	for range sessions {
		c, err := dial(f.addr, client.Config{})
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		s, err := c.Session(t.Context())
		require.NoError(t, err)
		for i := range each {
			all.Go(func() {
				q, err := s.Sequence(t.Context(), client.SequenceRequest{Model: "sums", MaxRows: 1 << 20})
				for n := 1; err == nil; n++ {
					ctx, cancel := context.WithCancel(t.Context())
					x := float32(1)
					if n == 10 && i%4 == 1 {
						x = float32(math.Inf(1))
						time.AfterFunc(time.Millisecond, cancel)
					}
					var y tensor.Tensor
					if y, err = q.Step(ctx, rowsOf(t, x, 1)); err == nil {
						if v, _ := tensor.Slice[float32](y); v[0] != float32(n) {
							t.Errorf("step %d is %v", n, v[0])
						}
					}
					cancel()
					switch {
					case n < 10 || err != nil:
					case i%4 == 0:
						err = errors.Join(q.Close(), io.EOF)
					case i%4 == 2 && i > 20:
						err = errors.Join(s.Close(), io.EOF)
					case i%4 == 3 && i > 20:
						err = errors.Join(c.Close(), io.EOF)
					case n > 1000:
						steady.Wait() // until the server ends
						_, err = q.Step(t.Context(), rowsOf(t, 1, 1))
					}
				}
			})
		}
	}
	other, err := f.client.Sequence(t.Context(), client.SequenceRequest{Model: "sums", MaxRows: 9})
	require.NoError(t, err)
	require.EqualValues(t, 1, last(t, other, rowsOf(t, 1, 1)))
	testkit.Eventually(t, func() bool { return m.states.Load() < 150 }, "some have ended")
	f.server.Close()
	steady.Done()
	all.Wait()
	testkit.Eventually(t, func() bool {
		_, err = other.Step(t.Context(), rowsOf(t, 1, 1))
		return err != nil
	}, "the server has ended")
	isLost(t, err)
	testkit.Eventually(t, func() bool { return m.states.Load() == 0 }, "states are given up")
}
