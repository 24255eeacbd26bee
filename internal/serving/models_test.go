package serving

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestTheTextOfAModelsErrorStaysHereUnlessItIsPublic(t *testing.T) {
	testkit.Start(t)
	private := &fs.PathError{Op: "open", Path: "/secret/place", Err: fs.ErrNotExist}
	for name, tc := range map[string]struct {
		err  error
		want string
	}{
		"private":        {private, "model failed; the server has the cause under the call's id"},
		"public":         {engine.Publicf("row %d is not finite", 3), "model failed: row 3 is not finite"},
		"public-wrapped": {fmt.Errorf("/secret/place: %w", engine.Publicf("no luck")), "model failed: no luck"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := serve(t, nil)
				f.addFailing(t, name, func() error { return tc.err })
				p := f.session(t)
				o := small(name)
				p.open(o)
				p.deliver(o)
				done := p.done(o)
				require.Equal(t, frame.Internal, done.Code)
				require.Equal(t, tc.want, done.Message)
				f.isIdleSoon(t)
				require.EqualValues(t, 1, f.ended(name, frame.Internal))
				if name == "private" {
					require.Contains(t, f.logged(), o.call.ID.String())
					require.Contains(t, f.logged(), "/secret/place")
				}
			})
		})
	}
}

func TestAModelThatPanicsFailsItsCallAlone(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		f.addFailing(t, "panics", func() error { panic("no such luck") })
		p := f.session(t)
		o := small("panics")
		p.open(o)
		p.deliver(o)
		done := p.done(o)
		require.Equal(t, frame.Internal, done.Code)
		require.Contains(t, done.Message, `"panics" panicked`)
		require.NotContains(t, done.Message, "no such luck", "the value of a panic is for logs")
		require.NotContains(t, done.Message, ".go:", "a stack is for logs")
		p.good()
	})
}

// opener is a model that panics before it has a run.
type opener struct{ engine.Model }

func (opener) Open(context.Context, engine.Call) (engine.Run, error) { panic("no such luck") }

func TestAModelThatPanicsWhenItIsOpenedFailsItsCallAlone(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		require.NoError(t, f.models.Add(opener{f.named(t, "panics")}))
		p := f.session(t)
		o := small("panics")
		p.open(o)
		done := p.done(o)
		require.Equal(t, frame.Internal, done.Code)
		require.Contains(t, done.Message, "panicked")
		require.NotContains(t, done.Message, "no such luck", "the value of a panic is for logs")
		f.isIdleSoon(t)
		p.good()
	})
}

func TestAFailureAmidTheTensorIsReportedOnceAndTheSessionLivesOn(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		p := f.session(t)
		data := testkit.Bytes(8*mib, 1)
		o := offering("slow", data, mib)
		o.call.Params = map[string]string{"fail_at": fmt.Sprint(3*mib + 5)}
		p.open(o)
		p.deliver(o)
		done := p.done(o)
		require.Equal(t, frame.Internal, done.Code)
		require.Contains(t, done.Message, "row 3145733")
		f.isIdleSoon(t)
		good := offering("echo", data, mib)
		require.Equal(t, string(data), string(p.run(good)["y"]))
	})
}

// loser is a model whose runs do not end in time, but when ended is closed.
type loser struct {
	engine.Model
	ended  chan struct{}
	closed chan struct{}
}

// Close says that nothing uses the model any more.
func (l loser) Close() error {
	close(l.closed)
	return nil
}

type lostRun struct {
	engine.Run
	ended chan struct{}
}

func (l loser) Open(ctx context.Context, c engine.Call) (engine.Run, error) {
	r, err := l.Model.Open(ctx, c)
	if err != nil {
		return nil, err
	}
	return lostRun{r, l.ended}, nil
}

func (r lostRun) Close() error {
	if err := r.Run.Close(); err != nil {
		return err
	}
	return &engine.LostError{Text: "for the test", Ended: r.ended}
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestAModelThatLostARunDoesNotServeUntilTheRunEndsOrItIsReplaced(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		f.lost = 4
		g := addGate(t, f, "gate")
		gated, unuse, err := f.models.Lookup("gate")
		require.NoError(t, err)
		defer unuse()
		lose := func(ended chan struct{}) loser { return loser{gated, ended, make(chan struct{})} }
		over := make(chan struct{})
		require.NoError(t, f.models.Replace(lose(over)))
		is := func(want Health, what string) {
			t.Helper()
			testkit.Eventually(t, func() bool { return f.healthOf("gate") == want }, what)
		}
		unavailable := func() string {
			for _, s := range f.ModelStates() {
				if s.Name == "gate" {
					return s.Unavailable
				}
			}
			return "it is not there"
		}
		p := f.session(t)
		call := func() { p.run(offering("gate", []byte{1, 2, 3}, 3)) }

		// A run of the model that is there.
		o := small("gate")
		p.open(o)
		p.deliver(o)
		testkit.Eventually(t, func() bool { return g.started.Load() == 1 }, "the call")
		is(Serving, "health while it computes")
		close(g.open)
		require.Equal(t, o.data, p.result(o)["y"])
		is(NotServing, "a lost run")
		require.Contains(t, unavailable(), "one of its runs did not end")
		require.Equal(t, Serving, f.healthOf("echo"), "the others serve")
		close(over)
		is(Serving, "the run has ended")
		require.Empty(t, unavailable())
		call()
		is(Serving, "one that ended at once")
		never := make(chan struct{})
		second := lose(never)
		require.NoError(t, f.models.Replace(second))
		call()
		is(NotServing, "another lost run")
		require.NoError(t, f.models.Replace(lose(never)))
		is(Serving, "its replacement")
		require.False(t, isClosed(second.closed), "the lost run may use the model yet")

		// A run of a model that has been replaced meanwhile: the new one is well.
		g.open = make(chan struct{})
		o = small("gate")
		p.open(o)
		p.deliver(o)
		testkit.Eventually(t, func() bool { return g.started.Load() == 4 }, "the call")
		require.NoError(t, f.models.Replace(gated))
		close(g.open)
		require.Equal(t, o.data, p.result(o)["y"])
		testkit.Eventually(t, func() bool { return f.Values().RunsAbandoned == 4 }, "the lost run")
		is(Serving, "the new model")
		close(never)
		testkit.Eventually(t, func() bool { return isClosed(second.closed) }, "the end of the model that lost a run")
	})
}

func TestALostRunOfAComputeShowsInTheModelsHealth(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		f.lost = 1
		require.NoError(t, f.models.Add(loser{f.named(t, "loser"), nil, make(chan struct{})}))
		code, _ := f.compute(t.Context(), asking("loser", tensor.Uint8, []byte("abc"), 3))
		require.Equal(t, frame.Internal, code)
		require.Equal(t, NotServing, f.healthOf("loser"))
		require.Equal(t, Serving, f.healthOf("echo"))
	})
}

// listening is a model that keeps what it was told in Open.
type listening struct {
	engine.Model
	calls chan engine.Call
}

func (l listening) Open(ctx context.Context, c engine.Call) (engine.Run, error) {
	l.calls <- c
	return l.Model.Open(ctx, c)
}

func TestAModelIsToldWhatItsInputsAreAndWhenTheSessionEnds(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		heard := listening{f.named(t, "heard"), make(chan engine.Call, 1)}
		require.NoError(t, f.models.Add(heard))
		p := f.session(t)
		o := offering("heard", floats(3), mib).as(tensor.Float32, 3)
		o.desc.Name, o.desc.Metadata = "pixels", map[string]string{"from": "a camera"}
		p.run(o)
		got := <-heard.calls
		require.Equal(t, o.call.ID, got.ID)
		require.Equal(t, "pixels", got.Inputs[0].Name)
		require.True(t, maps.Equal(o.desc.Metadata, got.Inputs[0].Metadata))
		require.NoError(t, got.Lifetime.Err(), "the call is over, the session is not")
		p.end()
		<-got.Lifetime.Done()
	})
}

// fitful is a model that runs when it likes, and measures its patience.
type fitful struct {
	engine.Model
	told func(error)
}

func (m *fitful) WatchHealth(told func(error)) (stop func()) {
	m.told = told
	told(nil)
	return func() { m.told = nil }
}

func (*fitful) Gauges() (all []engine.Gauge) {
	for i := range modelGauges + 1 {
		all = append(all, engine.Gauge{Name: fmt.Sprintf("patience_%d_seconds", i), Meaning: "how long it will bear it", Value: 1.5})
	}
	return all
}

func TestWhatAModelTellsIsShownAndItsHealthFollowed(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		m := &fitful{Model: f.named(t, "moody")}
		require.NoError(t, f.models.Add(enginetest.Named("moody", m)))
		shows := func(h Health, unavailable string) {
			t.Helper()
			require.Equal(t, h, f.healthOf("moody"))
			for _, s := range f.ModelStates() {
				if s.Name == "moody" {
					require.Equal(t, unavailable, s.Unavailable)
					require.Len(t, s.Gauges, modelGauges, "each is a label")
					require.Equal(t, 1.5, s.Gauges[0].Value)
					return
				}
			}
			t.Error("the model is not shown")
		}
		shows(Serving, "")
		require.Len(t, f.Values().ModelGauges, modelGauges)
		m.told(engine.ErrUnavailable)
		shows(NotServing, engine.ErrUnavailable.Error())
		m.told(nil)
		shows(Serving, "")
		late := m.told
		require.NoError(t, f.models.Remove("moody"))
		require.Nil(t, m.told, "nobody listens to a model that is out")
		late(engine.ErrUnavailable) // it was on the way
		require.Equal(t, Gone, f.healthOf("moody"))
	})
}

func TestWhatIsCountedOfAModelStaysWhenItGoes(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, func(c *Config) { c.Open[admission.Calls] = 4 })
		g := addGate(t, f, "gate")
		p := f.session(t)
		for range 3 {
			p.good()
			f.isIdleSoon(t)
		}
		for i := range 4 { // a caller may ask for what it likes
			o := small(fmt.Sprint("no such model ", i))
			p.open(o)
			require.Equal(t, frame.NotFound, p.done(o).Code)
			f.isIdleSoon(t)
		}
		var open []*offer
		for range 4 {
			o := small("gate")
			p.open(o)
			p.deliver(o)
			open = append(open, o)
		}
		testkit.Eventually(t, func() bool { return f.Values().Calls == 4 }, "the calls")
		o := small("relu")
		p.open(o)
		require.Equal(t, frame.ResourceExhausted, p.done(o).Code)
		close(g.open)
		for _, o := range open {
			p.result(o)
		}
		f.isIdleSoon(t)

		counted := map[string]int64{
			"nothing": f.ended("", frame.NotFound), "gate": f.ended("gate", frame.OK), "relu": f.ended("relu", frame.OK),
			"refused": f.ended("relu", frame.ResourceExhausted),
		}
		require.Equal(t, map[string]int64{"nothing": 4, "gate": 4, "relu": 3, "refused": 1}, counted)
		v := f.Values()
		require.EqualValues(t, 1, v.CallsRefused)
		require.EqualValues(t, 12, v.CallsOpened)
		require.EqualValues(t, 1, v.Sessions)
		require.EqualValues(t, 1, v.SessionsOpened)
		require.EqualValues(t, 3*12000+4*10, v.ReceivedBytes)

		// A model that goes takes its labels along, not its calls.
		require.NoError(t, f.models.Remove("gate"))
		require.Zero(t, f.ended("gate", frame.OK))
		require.EqualValues(t, 4, f.ended("", frame.OK))
	})
}

func TestThePanicOfAHandlerIsCountedAndLogged(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		func() {
			defer func() { f.Panicked(recover()) }()
			panic("secret of the model")
		}()
		require.EqualValues(t, 1, f.Values().Panics)
		require.Contains(t, f.logged(), "secret of the model")
		require.Contains(t, f.logged(), "models_test.go", "the stack says where")
		require.Equal(t, frame.Internal, failures.ExplainCall(errors.New("secret")).Code)
	})
}

func TestAModelWithoutInputsIsCalled(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		f.add(t, cpu.RowFunc{ // whose rows of two numbers are numbered
			Info: engine.Info{
				Name: "counting", Rows: 1, Params: []engine.Param{{Name: "rows", Kind: "rows", Meaning: "how many to make"}},
				Outputs: []engine.Port{{Name: "y", DTypes: []tensor.DataType{tensor.Uint32}, Shape: []int64{engine.Free, 2}}},
			},
			Outs: func(_ []tensor.Desc, params map[string]string) ([]tensor.Desc, error) {
				var rows int64
				_, err := fmt.Sscan(params["rows"], &rows)
				return []tensor.Desc{{DType: tensor.Uint32, Shape: tensor.Shape{rows, 2}}}, err
			},
			Rows: func(_ context.Context, b cpu.RowBlock) error {
				for i := range 2 * b.Rows {
					binary.LittleEndian.PutUint32(b.Out[0][4*i:], uint32(b.Row+i/2))
				}
				return nil
			},
		})
		p := f.session(t)
		for _, rows := range []uint32{0, 1, 1000, 128 << 10, 5<<17 + 1} { // less than a block, one, and some and a tail
			var want []byte
			for i := range rows {
				want = binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(want, i), i)
			}
			o := &offer{call: frame.Call{ID: tensor.NewID(), Model: "counting", Params: map[string]string{"rows": fmt.Sprint(rows)}}}
			p.send(&frame.Frame{Calls: []frame.Call{o.call}})
			require.True(t, bytes.Equal(want, p.result(o)["y"]), "%d rows", rows)
			out, err := f.outputs(t.Context(), new(admission.Caller), ask{model: "counting", params: o.call.Params})
			if 8*rows > mib {
				code, _ := statusOf(err)
				require.Equal(t, frame.ResourceExhausted, code)
				continue
			}
			require.NoError(t, err)
			require.True(t, bytes.Equal(want, out[0].Data), "%d rows", rows)
		}
		o := offering("counting", []byte{1}, 1) // which it has not
		p.open(o)
		require.Equal(t, frame.InvalidArgument, p.done(o).Code)
	})
}
