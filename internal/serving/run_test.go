package serving

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// ask is a small call.
type ask struct {
	model   string
	params  map[string]string
	timeout time.Duration
	in      []portTensor
}

// portTensor is a tensor at a port.
type portTensor struct {
	Port string
	tensor.Tensor
}

// asking is a small call of one input.
func asking(model string, d tensor.DataType, data []byte, shape ...int64) ask {
	return ask{model: model, in: []portTensor{{"x", tensor.Tensor{Desc: tensor.Desc{DType: d, Shape: shape}, Data: data}}}}
}

// compute runs a small call of a caller of its own.
func (f *fixture) compute(ctx context.Context, a ask) (frame.Code, string) {
	_, err := f.outputs(ctx, new(admission.Caller), a)
	return statusOf(err)
}

func (f *fixture) outputs(ctx context.Context, from *admission.Caller, a ask) ([]portTensor, error) {
	if a.timeout > 0 {
		timed, stop := context.WithTimeout(ctx, a.timeout)
		defer stop()
		ctx = timed
	}
	call, in := engine.Call{Params: a.params}, make([]tensor.Tensor, len(a.in))
	for i, t := range a.in {
		call.Inputs, in[i] = append(call.Inputs, engine.Input{Port: t.Port}), t.Tensor
	}
	results, info, _, err := f.Compute(ctx, from, a.model, call, in, mib, func(int64) error { return nil })
	out := make([]portTensor, len(results))
	for i, t := range results {
		out[i] = portTensor{info.Outputs[i].Name, t}
	}
	return out, err
}

func TestComputeTakesAndGivesAMiBAndNoMore(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		model, err := cpu.Func{
			Info: engine.Info{Name: "twice", Inputs: anyShape("x"), Outputs: append(anyShape("y"), anyShape("z")...)},
			Call: func(_ context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
				return []tensor.Tensor{in[0], in[0]}, nil
			},
		}.Model(f.host)
		require.NoError(t, err)
		require.NoError(t, f.models.Add(model))
		for by := range 2 {
			data := testkit.Bytes(mib+by, 1)
			y, err := f.outputs(t.Context(), new(admission.Caller), asking("echo", tensor.Uint8, data, int64(len(data))))
			half := testkit.Bytes(mib/2+by, 1)
			twice, twiceErr := f.outputs(t.Context(), new(admission.Caller), asking("twice", tensor.Uint8, half, int64(len(half))))
			if by == 0 {
				require.NoError(t, err)
				require.True(t, bytes.Equal(data, y[0].Data))
				require.NoError(t, twiceErr)
				require.Equal(t, "z", twice[1].Port)
				require.True(t, bytes.Equal(half, twice[1].Data))
				continue
			}
			for what, err := range map[string]error{"inputs": err, "outputs": twiceErr} {
				code, text := statusOf(err)
				require.Equal(t, frame.ResourceExhausted, code, err)
				saysWhy(t, text, []string{"the " + what, "1048576", "session"})
			}
		}
		f.isEmpty(t)
	})
}

func TestABadComputeIsRefusedAndSaysWhy(t *testing.T) {
	testkit.Start(t)
	const u8, f32, invalid = tensor.Uint8, tensor.Float32, frame.InvalidArgument
	change := func(change func(a *ask)) ask {
		a := asking("echo", u8, []byte("abc"), 3)
		change(&a)
		return a
	}
	for name, tc := range map[string]struct {
		ask  ask
		code frame.Code
		says []string
	}{
		"an unknown model":      {asking("nothing", u8, nil, 0), frame.NotFound, []string{`"nothing"`}},
		"no model":              {asking("", u8, nil, 0), invalid, []string{"model", "empty"}},
		"a model of 513 bytes":  {asking(strings.Repeat("m", 513), u8, nil, 0), invalid, []string{"model", "513", "512"}},
		"a model of 500 KiB":    {asking(strings.Repeat("\x01", 500<<10), u8, nil, 0), invalid, []string{"model", "512"}},
		"a model with a bell":   {asking("\a", u8, nil, 0), invalid, []string{"model", "control"}},
		"no input":              {change(func(a *ask) { a.in = nil }), invalid, []string{`takes inputs ["x"]`, "has []"}},
		"an input too many":     {change(func(a *ask) { a.in = append(a.in, a.in[0]) }), invalid, []string{`takes inputs ["x"]`, `has ["x" "x"]`}},
		"one port twice":        {change(func(a *ask) { a.model, a.in = "pair", append(a.in, a.in[0]) }), invalid, []string{`"pair"`, `"w"`}},
		"an unknown port":       {change(func(a *ask) { a.in[0].Port = "q" }), invalid, []string{`"x"`}},
		"no data type":          {asking("echo", 0, []byte("abc"), 3), invalid, []string{"data type"}},
		"an unknown data type":  {asking("echo", 99, []byte("abc"), 3), invalid, []string{"data type", "99"}},
		"rank 33":               {asking("echo", u8, nil, make([]int64, 33)...), invalid, []string{"rank 33", "32"}},
		"a negative dimension":  {asking("echo", u8, nil, 2, -5), invalid, []string{"dimension 1", "-5"}},
		"a dimension over 2^40": {asking("echo", u8, nil, 1<<40+1), invalid, []string{"1099511627777"}},
		"too few bytes":         {asking("echo", u8, []byte("ab"), 3), invalid, []string{`input "x"`, "3 bytes", "2"}},
		"too many bytes":        {asking("echo", u8, []byte("abcd"), 3), invalid, []string{`input "x"`, "3 bytes", "4"}},
		"a shape that overflows": {
			asking("echo", u8, nil, 1<<40, 1<<40), frame.ResourceExhausted, []string{"2^63"},
		},
		"an empty shape that overflows": {
			asking("echo", u8, nil, 1<<40, 1<<40, 0), frame.ResourceExhausted, []string{"2^63"},
		},
		"65 params":          {change(func(a *ask) { a.params = entriesOf(65, 3, 1) }), invalid, []string{"params", "65", "64"}},
		"a key of 129 bytes": {change(func(a *ask) { a.params = entriesOf(1, 129, 1) }), invalid, []string{"params", "129"}},
		"a value of 4097":    {change(func(a *ask) { a.params = entriesOf(1, 1, 4097) }), invalid, []string{"params", "4097"}},
		"params over 32 KiB": {change(func(a *ask) { a.params = entriesOf(9, 1, 4096) }), invalid, []string{"params", "32768"}},
		"a type not taken":   {asking("relu", u8, []byte("abc"), 3), frame.FailedPrecondition, []string{"float32", "uint8[3]", `"x"`}},
		"a shape not taken": {ask{model: "pair", in: []portTensor{
			{"x", tensor.Tensor{Desc: tensor.Desc{DType: f32, Shape: tensor.Shape{2}}, Data: make([]byte, 8)}},
			{"w", tensor.Tensor{Desc: tensor.Desc{DType: f32, Shape: tensor.Shape{2}}, Data: make([]byte, 8)}},
		}}, frame.FailedPrecondition, []string{"[any any]", "float32[2]"}},
		"a param not taken":   {change(func(a *ask) { a.model, a.params = "slow", map[string]string{"delay": "a while"} }), frame.InvalidArgument, []string{"delay", "a while"}},
		"a model that fails":  {change(func(a *ask) { a.model = "broken" }), frame.Internal, []string{"model failed", "call's id (call 0"}},
		"a model that panics": {change(func(a *ask) { a.model = "panics" }), frame.Internal, []string{`model "panics" panicked`, "call's id (call 0"}},
		"a timeout":           {change(func(a *ask) { a.model, a.timeout = "gate", 20*time.Millisecond }), frame.DeadlineExceeded, []string{"timeout"}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := serve(t, nil)
				addPair(t, f)
				addGate(t, f, "gate") // never opened
				f.addFailing(t, "broken", func() error { return errors.New("open /home/secret: permission denied") })
				f.addFailing(t, "panics", func() error { panic("boom at /home/secret.go:7") })
				code, text := f.compute(t.Context(), tc.ask)
				require.Equal(t, tc.code, code, text)
				saysWhy(t, text, tc.says)
				testkit.Eventually(t, func() bool { return f.Values().Calls == 0 }, "the call's end")
				code, text = f.compute(t.Context(), asking("echo", u8, []byte("abc"), 3))
				require.Equal(t, frame.OK, code, text, "a good call after it")
				f.isEmpty(t)
			})
		})
	}
}

func TestOneComputeOverTheCallsOfTheServerIsRefusedAsLater(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, func(c *Config) { c.Open[admission.Calls] = 6 })
		addGate(t, f, "gate") // never opened
		var flood admission.Caller
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 5)
		for range 5 { // one place is for others
			go func() { // ends with ctx
				_, err := f.outputs(ctx, &flood, asking("gate", tensor.Uint8, []byte("abc"), 3))
				ended <- err
			}()
		}
		testkit.Eventually(t, func() bool { return f.Values().Calls == 5 }, "the calls")
		_, err := f.outputs(t.Context(), &flood, asking("echo", tensor.Uint8, []byte("abc"), 3))
		why, ok := errors.AsType[*terms.RefusedError](err)
		require.True(t, ok, "%v", err)
		require.Equal(t, frame.ResourceExhausted, why.Code)
		saysWhy(t, why.Text, []string{"calls", "limit of the server is 6", "later"})
		require.Positive(t, why.RetryMillis)
		code, text := f.compute(t.Context(), asking("echo", tensor.Uint8, []byte("abc"), 3))
		require.Equal(t, frame.OK, code, "who has little open: %s", text)
		cancel()
		for range 5 {
			code, _ := statusOf(<-ended)
			require.Equal(t, frame.Cancelled, code)
		}
		f.isEmpty(t)
	})
}

func TestACloseEndsAComputeAtOnce(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		g := addGate(t, f, "gate")
		ended := make(chan error, 1)
		go func() { // ends with the core
			_, err := f.outputs(t.Context(), new(admission.Caller), asking("gate", tensor.Uint8, []byte("abc"), 3))
			ended <- err
		}()
		testkit.Eventually(t, func() bool { return g.started.Load() == 1 }, "the call")
		began := time.Now()
		f.Close()
		why, ok := errors.AsType[*terms.RefusedError](<-ended)
		require.True(t, ok)
		require.Equal(t, frame.Unavailable, why.Code, why.Text)
		require.Positive(t, why.RetryMillis)
		require.Zero(t, time.Since(began))
	})
}

func TestTheLogHasWhyACallOutsideASessionFailed(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		f.addFailing(t, "broken", func() error { return errors.New("the disk of the model is full") })
		for range 100 {
			code, text := f.compute(t.Context(), asking("broken", tensor.Uint8, []byte{1}, 1))
			require.Equal(t, frame.Internal, code)
			require.NotContains(t, text, "disk", "a peer does not read what a model says")
		}
		require.Contains(t, f.logged(), "the disk of the model is full")
		require.Equal(t, 7, strings.Count(f.logged(), "level=ERROR msg=\"call failed\""), "a line as the number of failures doubles")
		require.Contains(t, f.logged(), "failures=64")
	})
}

// opening opens a run of echo, or of another model, of so many bytes.
func (f *fixture) opening(t testing.TB, model string, size int64, timeout time.Duration) *Run {
	t.Helper()
	ctx, stop := t.Context(), context.CancelFunc(func() {})
	if timeout > 0 {
		ctx, stop = context.WithTimeout(ctx, timeout)
	}
	t.Cleanup(stop)
	r, err := f.Open(ctx, new(admission.Caller), model, engine.Call{
		Inputs: []engine.Input{{Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{size}}, ChunkBytes: mib}},
	})
	require.NoError(t, err)
	return r
}

func TestTheInputsOfARunAreWrittenInAnyPieces(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		addPair(t, f)
		rng := testkit.Rand(t)
		for range 50 {
			rows, columns := rng.Int64N(200), 1+rng.Int64N(64)
			data := [][]byte{make([]byte, 4*columns), make([]byte, 4*rows*columns)} // small floats, so that sums are exact
			for _, d := range data {
				for i := 3; i < len(d); i += 4 {
					d[i] = 0x40
				}
			}
			want, scaled := pairWant(data[1], data[0])
			r, err := f.Open(t.Context(), new(admission.Caller), "pair", engine.Call{Inputs: []engine.Input{ // not in the model's order
				{Port: "w", Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{columns}}, ChunkBytes: 1 + rng.Int64N(1000)},
				{Port: "x", Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{rows, columns}}, ChunkBytes: 1 + rng.Int64N(1000)},
			}})
			require.NoError(t, err)
			written := make(chan error, 1)
			go func() {
				for i, rest := range data {
					for len(rest) > 0 {
						n := min(1+rng.IntN(3000), len(rest))
						if err := r.Write(t.Context(), i, rest[:n]); err != nil {
							written <- err
							return
						}
						rest = rest[n:]
					}
				}
				written <- nil
			}()
			got := [][]byte{make([]byte, len(want)), make([]byte, len(scaled))}
			for {
				o, err := r.Next(t.Context())
				if errors.Is(err, io.EOF) {
					break
				}
				require.NoError(t, err)
				copy(got[o.Port][o.Off:], o.Data)
				o.Release()
			}
			require.NoError(t, <-written)
			require.NoError(t, r.End(nil))
			require.NoError(t, r.End(nil), "a second end does nothing")
			require.True(t, bytes.Equal(want, got[0]))
			require.True(t, bytes.Equal(scaled, got[1]))
			require.ErrorIs(t, r.Write(t.Context(), 1, []byte{1}), engine.ErrClosed)
		}
		require.EqualValues(t, 50, f.ended("pair", frame.OK))
	})
}

func TestARunEndsAsItsOwnerItsModelOrItsTimeoutSays(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		f.addFailing(t, "broken", func() error { return engine.Publicf("the weights are wrong") })
		addGate(t, f, "gate") // never opened
		next := func(r *Run) error { _, err := r.Next(r.Context()); return err }

		r := f.opening(t, "echo", 10, 0)
		code, text := statusOf(r.End(r.Write(r.Context(), 0, make([]byte, 11))))
		require.Equal(t, frame.InvalidArgument, code, "an input too long: %s", text)
		require.Contains(t, text, "1 bytes more than its desc")

		r = f.opening(t, "broken", 10, 0)
		require.NoError(t, r.Write(r.Context(), 0, make([]byte, 10)))
		code, text = statusOf(r.End(next(r)))
		require.Equal(t, frame.Internal, code)
		require.Contains(t, text, "the weights are wrong")

		r = f.opening(t, "gate", 10, 20*time.Millisecond)
		require.NoError(t, r.Write(r.Context(), 0, make([]byte, 10)))
		code, text = statusOf(r.End(next(r)))
		require.Equal(t, frame.DeadlineExceeded, code)
		require.Contains(t, text, "timeout")

		r = f.opening(t, "echo", 0, 0) // an input without bytes
		for {
			o, err := r.Next(r.Context())
			if err != nil {
				require.ErrorIs(t, err, io.EOF)
				break
			}
			require.Empty(t, o.Data)
			o.Release()
		}
		require.NoError(t, r.End(nil))
		require.Error(t, r.Context().Err(), "it ends with the run")
		require.EqualValues(t, 1, f.ended("echo", frame.OK))
		require.EqualValues(t, 1, f.ended("echo", frame.InvalidArgument))
		require.EqualValues(t, 1, f.ended("gate", frame.DeadlineExceeded))
		require.EqualValues(t, 1, f.ended("broken", frame.Internal))
	})
}

func TestARunThatItsOwnerLeavesGivesItsResultsBack(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		r := f.opening(t, "echo", 3*mib, 0)
		require.NoError(t, r.Write(r.Context(), 0, make([]byte, 2*mib)))
		o, err := r.Next(r.Context())
		require.NoError(t, err)
		require.NotEmpty(t, o.Data)
		r.Abandon(errors.New("its handler panicked"))
		r.Abandon(errors.New("again"))
		o.Release() // late, and once
		f.isIdleSoon(t)
		require.Zero(t, f.Values().RunsAbandoned)
		require.EqualValues(t, 1, f.ended("echo", frame.Internal))
		require.Equal(t, Serving, f.healthOf("echo"))
	})
}
