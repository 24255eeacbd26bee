package worker

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// python is a config of a model of testdata/models.py.
func python(t testing.TB, name string) Config {
	t.Helper()
	exe := os.Getenv("TENSORFERRY_PYTHON")
	if exe == "" {
		var err error
		if exe, err = exec.LookPath("python3"); err != nil {
			t.Skip("there is no python3 here")
		}
	}
	source, err := filepath.Abs("../../python/src")
	require.NoError(t, err)
	models, err := filepath.Abs("testdata")
	require.NoError(t, err)
	return Config{
		Name: name, Version: "0.1.0-dev", Command: []string{exe, "-m", "tensorferry.worker", "--fd", "3", "models:" + name},
		Env: []string{"PYTHONPATH=" + source + ":" + models, "PYTHONDONTWRITEBYTECODE=1"}, MemoryBytes: 64 << 20, first: 10 * time.Millisecond,
		Log: slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
}

// testWriter is where a log goes that only a failed test shows.
type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}

// start starts a model that is closed with the test, which then holds nothing.
func start(t testing.TB, c Config) *Host {
	t.Helper()
	h, err := Start(c)
	require.NoError(t, err)
	t.Cleanup(func() {
		h.Close()
		require.NoError(t, h.idle())
		results, _, _ := h.results.Used()
		require.Zero(t, results)
	})
	return h
}

// idle says what runs still hold.
func (h *Host) idle() error {
	used, _, _ := h.budget.Used()
	if used != 0 {
		return errors.New("memory of inputs is still held")
	}
	return nil
}

func vector(n int) []tensor.Tensor {
	x, err := tensor.Of(testkit.Bytes(n*9, 7), int64(n), 9)
	if err != nil {
		panic(err)
	}
	return []tensor.Tensor{x}
}

// do has the model `does` do something.
func do(ctx context.Context, h *Host, what string) ([]tensor.Tensor, error) {
	return enginetest.Compute(ctx, h.Model(), vector(4), map[string]string{"do": what}, 1<<20, 0)
}

func TestPythonModelsPassTheSuite(t *testing.T) {
	same := func(in []tensor.Tensor) ([]tensor.Tensor, error) { return in, nil }
	change := func(f func(b []byte) []byte) func(in []tensor.Tensor) ([]tensor.Tensor, error) {
		return func(in []tensor.Tensor) ([]tensor.Tensor, error) {
			y := in[0]
			y.Data = f(bytes.Clone(y.Data))
			return []tensor.Tensor{y}, nil
		}
	}
	more := change(func(b []byte) []byte {
		for i := range b {
			b[i]++
		}
		return b
	})
	for name, want := range map[string]func([]tensor.Tensor) ([]tensor.Tensor, error){
		"echo": same, "plus_one": more, "later": more, "threads": more,
		"first": func(in []tensor.Tensor) ([]tensor.Tensor, error) {
			var b []byte
			for i := 0; i < len(in[0].Data); i += 9 {
				b = append(b, in[0].Data[i])
			}
			y, err := tensor.Of(b, in[0].Shape[0], 1)
			return []tensor.Tensor{y}, err
		},
		"backwards": change(func(b []byte) []byte { slices.Reverse(b); return b }),
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			hosts := map[int64]*Host{} // a process takes a while to start
			t.Cleanup(func() {
				for _, h := range hosts {
					h.Close()
				}
			})
			enginetest.Run(t, enginetest.Case{
				New: func(t testing.TB, memory int64) enginetest.Subject {
					memory = max(memory, 1<<20)
					h := hosts[memory]
					if h == nil {
						c := python(t, name)
						c.MemoryBytes, c.Log = memory, nil
						var err error
						if h, err = Start(c); err != nil {
							t.Fatal(err)
						}
						hosts[memory] = h
					}
					return enginetest.Subject{Model: h.Model(), Idle: h.idle}
				},
				Inputs: vector(100), Empty: vector(0), Want: want,
			})
		})
	}
}

func TestNothingIsCopiedOnTheWay(t *testing.T) {
	testkit.Start(t)
	h := start(t, python(t, "echo"))
	in := vector(7)
	r, err := h.Model().Open(t.Context(), enginetest.Call(h.Model(), in, nil, 1<<20))
	require.NoError(t, err)
	b, err := r.Borrow(t.Context())
	require.NoError(t, err)
	copy(b.In[0], in[0].Data)
	r.Filled(b)
	o, err := r.Next(t.Context())
	require.NoError(t, err)
	require.Equal(t, in[0].Data, o.Data)
	require.Same(t, &b.In[0][0], &o.Data[0], "the result lies where the input was filled in")
	_, ok := h.heap.RangeOf(o.Data)
	require.True(t, ok)
	o.Release()
	require.NoError(t, r.Close())
}

func TestTheFailureOfAModelIsToldAndTheNextCallWorks(t *testing.T) {
	testkit.Start(t)
	h := start(t, python(t, "does"))
	for what, want := range map[string]string{
		"fail": "ZeroDivisionError in the model's code; the server has the cause under the call's id", "public": "no such weather",
	} {
		_, err := do(t.Context(), h, what)
		require.ErrorIs(t, err, engine.ErrModel)
		var public engine.PublicError
		require.ErrorAs(t, err, &public)
		require.Equal(t, want, public.Public())
		_, err = do(t.Context(), h, "")
		require.NoError(t, err)
	}
	_, err := do(t.Context(), h, "rows")
	require.ErrorContains(t, err, "the first dimension of a block of 4 rows is to be that")
	_, err = h.Model().Open(t.Context(), enginetest.Call(h.Model(), vector(4), map[string]string{"dont": ""}, 1))
	require.ErrorIs(t, err, engine.ErrParam)
	require.Zero(t, h.restarts.Load())
}

// well waits until the model serves again.
func well(t *testing.T, h *Host) {
	t.Helper()
	testkit.Eventually(t, func() bool {
		_, err := do(t.Context(), h, "")
		if err != nil {
			require.ErrorIs(t, err, engine.ErrUnavailable)
		}
		return err == nil
	}, "the worker")
}

func TestAWorkerThatDiesOrBreaksTheProtocolFailsItsCallAndComesBack(t *testing.T) {
	testkit.Start(t)
	c := python(t, "does")
	c.block = 500 * time.Millisecond
	h := start(t, c)
	for what, want := range map[string]string{
		"kill":     `the worker of model "does" ended (signal: killed)`,
		"exit":     `the worker of model "does" ended (exit status 3)`,
		"garbage":  "bad message",
		"foreign":  "is not the guest's",
		"twice":    "nobody waits for",
		"sleep 50": "a block took more than 500ms",
	} {
		t.Run(what, func(t *testing.T) {
			before := h.restarts.Load()
			_, err := do(t.Context(), h, what)
			if what != "twice" || !errors.Is(err, engine.ErrModel) { // the first answer may be the call's
				require.ErrorIs(t, err, engine.ErrUnavailable)
				require.ErrorContains(t, err, want)
			}
			testkit.Eventually(t, func() bool { return h.restarts.Load() > before }, "the end of the worker")
			well(t, h)
		})
	}
}

func TestAWorkerThatWritesOverAllOfItsMemoryHarmsNobodyElse(t *testing.T) {
	testkit.Start(t)
	h, other := start(t, python(t, "does")), start(t, python(t, "echo"))
	r, err := other.Model().Open(t.Context(), enginetest.Call(other.Model(), vector(7), nil, 1<<20))
	require.NoError(t, err)
	b, err := r.Borrow(t.Context())
	require.NoError(t, err)
	copy(b.In[0], vector(7)[0].Data)
	_, err = do(t.Context(), h, "scribble")
	require.NoError(t, err)
	well(t, h)
	r.Filled(b)
	o, err := r.Next(t.Context())
	require.NoError(t, err)
	require.Equal(t, vector(7)[0].Data, o.Data)
	o.Release()
	require.NoError(t, r.Close())
}

func TestACancelIsHeardOrElseTheWorkerIsKilled(t *testing.T) {
	testkit.Start(t)
	c := python(t, "does")
	c.obey = 200 * time.Millisecond
	h := start(t, c)
	for _, what := range []string{"wait", "sleep 50"} {
		ctx, cancel := context.WithCancel(t.Context())
		var calls sync.WaitGroup
		for range 3 { // two of them wait for the process
			calls.Go(func() {
				_, err := do(ctx, h, what)
				if !errors.Is(err, context.Canceled) && !errors.Is(err, engine.ErrUnavailable) {
					t.Error(err)
				}
			})
		}
		testkit.Eventually(t, func() bool {
			h.mu.Lock()
			defer h.mu.Unlock()
			for g := range h.guests {
				return len(g.flight) == 1 && g.flight[0].sent && h.lines[0].len() == 2
			}
			return false
		}, "blocks that wait for another")
		cancel()
		calls.Wait()
		if what == "wait" {
			require.Zero(t, h.restarts.Load())
		}
		well(t, h)
	}
	require.EqualValues(t, 1, h.restarts.Load())
}

func TestAModelThatDoesNotLoadSaysWhy(t *testing.T) {
	testkit.Start(t)
	for name, want := range map[string]string{
		"broken":  `worker: model "broken": it did not load: RuntimeError: no weights here`,
		"dies":    "ended while loading (signal: killed)",
		"missing": "has no attribute 'missing'",
	} {
		_, err := Start(python(t, name))
		require.ErrorContains(t, err, want)
	}
	c := python(t, "echo")
	c.Command = []string{"/does/not/exist"}
	_, err := Start(c)
	require.ErrorIs(t, err, os.ErrNotExist)
	c = python(t, "echo")
	c.Version = "9"
	_, err = Start(c)
	require.ErrorContains(t, err, "version")
}

func TestCallsThatAProcessComputesAtOnceEndWithIt(t *testing.T) {
	testkit.Start(t)
	h := start(t, python(t, "waits"))
	var calls sync.WaitGroup
	for _, what := range []string{"", "", "", "exit"} {
		calls.Go(func() {
			if _, err := do(t.Context(), h, what); !errors.Is(err, engine.ErrUnavailable) || !strings.Contains(err.Error(), "exit status 3") {
				t.Errorf("%q: %v", what, err)
			}
		})
	}
	calls.Wait()
	testkit.Eventually(t, func() bool { return h.gauges()[0].Value == 1 }, "another process")
}

func TestHealthIsThatOfTheProcesses(t *testing.T) {
	testkit.Start(t)
	c := python(t, "once")
	path := filepath.Join(t.TempDir(), "once")
	c.Env = append(c.Env, "ONCE="+path)
	h := start(t, c)
	health := make(chan error, 10)
	w, ok := engine.As[engine.HealthWatcher](h.Model())
	require.True(t, ok)
	defer w.WatchHealth(func(err error) { health <- err })()
	require.NoError(t, <-health)
	_, err := do(t.Context(), h, "kill")
	require.ErrorIs(t, err, engine.ErrUnavailable)
	require.ErrorContains(t, <-health, "signal: killed")
	testkit.Eventually(t, func() bool { return h.restarts.Load() > 2 }, "attempts to load")
	_, err = do(t.Context(), h, "")
	require.ErrorIs(t, err, engine.ErrUnavailable)
	require.NoError(t, os.Remove(path))
	require.NoError(t, <-health)
	_, err = do(t.Context(), h, "")
	require.NoError(t, err)
}

func TestOfSeveralProcessesOneIsEnough(t *testing.T) {
	testkit.Start(t)
	c := python(t, "does")
	c.Processes = 2
	h := start(t, c)
	pids := map[string]bool{}
	testkit.Eventually(t, func() bool {
		var calls sync.WaitGroup
		var mu sync.Mutex
		for range 4 {
			calls.Go(func() {
				y, err := do(t.Context(), h, "pid")
				mu.Lock()
				defer mu.Unlock()
				require.NoError(t, err)
				pids[string(y[0].Data[:8])] = true
			})
		}
		calls.Wait()
		return len(pids) == 2
	}, "calls of both")
	_, err := do(t.Context(), h, "kill")
	require.ErrorIs(t, err, engine.ErrUnavailable)
	for range 10 { // no call is lost while the other is started
		_, err := do(t.Context(), h, "")
		require.NoError(t, err)
	}
	testkit.Eventually(t, func() bool { return h.gauges()[0].Value == 2 }, "the other")
}

func TestCallsWithStateStayWithTheirProcess(t *testing.T) {
	testkit.Start(t)
	c := python(t, "counts")
	c.Processes = 2
	h := start(t, c)
	want := vector(50)[0].Data
	for i := range want {
		want[i] += byte(i / 9 / 3 * 3)
	}
	var calls sync.WaitGroup
	for range 6 {
		calls.Go(func() {
			y, err := enginetest.Compute(t.Context(), h.Model(), vector(50), nil, 1<<20, 0)
			if err != nil {
				t.Error(err)
				return
			}
			if !bytes.Equal(want, y[0].Data) {
				t.Error("blocks of a call were computed elsewhere, or not in their order")
			}
		})
	}
	calls.Wait()
}

func TestWhatAWorkerSaysIsLoggedWithItsCall(t *testing.T) {
	testkit.Start(t)
	var mu sync.Mutex
	var log bytes.Buffer
	c := python(t, "does")
	c.Log = slog.New(slog.NewTextHandler(writerFunc(func(b []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return log.Write(b)
	}), nil))
	h := start(t, c)
	said := func() string {
		mu.Lock()
		defer mu.Unlock()
		return log.String()
	}
	_, err := do(t.Context(), h, "say hello")
	require.NoError(t, err)
	testkit.Eventually(t, func() bool {
		return strings.Contains(said(), `model=does line="computing hello"`)
	}, "the line")
	_, err = do(t.Context(), h, "many 3000")
	require.NoError(t, err)
	_, err = do(t.Context(), h, "fail")
	require.Error(t, err)
	testkit.Eventually(t, func() bool { return strings.Contains(said(), `line="line 900"`) }, "lines")
	require.NotContains(t, said(), `line="line 2999"`)
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func TestAWorkerIsKilledWhileItIsFilledAndRead(t *testing.T) {
	testkit.Start(t)
	h := start(t, python(t, "echo"))
	in := vector(7 * 40)
	kill := func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		for g := range h.guests {
			require.NoError(t, syscall.Kill(g.pid, syscall.SIGKILL))
		}
	}
	gone := func() {
		testkit.Eventually(t, func() bool { return h.gauges()[0].Value == 0 || h.restarts.Load() > 0 }, "the death")
	}
	r, err := h.Model().Open(t.Context(), enginetest.Call(h.Model(), in, nil, 63))
	require.NoError(t, err)
	b, err := r.Borrow(t.Context())
	require.NoError(t, err)
	copy(b.In[0], in[0].Data)
	kill()
	gone()
	r.Filled(b) // into memory that is still there
	_, err = r.Next(t.Context())
	require.ErrorIs(t, err, engine.ErrUnavailable)
	require.NoError(t, r.Close())

	testkit.Eventually(t, func() bool { return h.gauges()[0].Value == 1 }, "the worker")
	r, err = h.Model().Open(t.Context(), enginetest.Call(h.Model(), in, nil, 63))
	require.NoError(t, err)
	b, err = r.Borrow(t.Context())
	require.NoError(t, err)
	copy(b.In[0], in[0].Data)
	r.Filled(b)
	o, err := r.Next(t.Context())
	require.NoError(t, err)
	kill()
	testkit.Eventually(t, func() bool { return h.restarts.Load() == 2 }, "the second death")
	require.Equal(t, in[0].Data[:63], o.Data, "a result stays readable")
	o.Release()
	_, err = r.Next(t.Context())
	require.Error(t, err)
	require.NotErrorIs(t, err, io.EOF)
	require.NoError(t, r.Close())
}
