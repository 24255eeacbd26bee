package client_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/client/retry"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// line is the connections of a client, which a test can cut.
type line struct {
	mu    sync.Mutex
	conns []net.Conn
}

func (l *line) config(cfg client.Config) client.Config {
	cfg.Lanes = -1
	return cfg.Dialling(func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		if err == nil {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.conns = append(l.conns, conn)
		}
		return conn, err
	})
}

func (l *line) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, conn := range l.conns {
		_ = conn.Close()
	}
	l.conns = nil
}

// cutting is a model that copies x, and whose first runs have done something when block cuts
// the line.
type cutting struct {
	runs  atomic.Int64
	block func(run int64)
}

func (c *cutting) model(t testing.TB, host *cpu.Host, name string, idempotent bool) engine.Model {
	m, err := cpu.RowFunc{
		Info: engine.Info{
			Name: name, Rows: 1, Idempotent: idempotent,
			Inputs:  []engine.Port{{Name: "x", Shape: []int64{engine.Free}}},
			Outputs: []engine.Port{{Name: "y", Shape: []int64{engine.Free}}},
		},
		Outs: func(in []tensor.Desc, _ map[string]string) ([]tensor.Desc, error) { return in, nil },
		Rows: func(_ context.Context, b cpu.RowBlock) error {
			copy(b.Out[0], b.In[0])
			if b.Row == 0 {
				c.block(c.runs.Add(1))
			}
			return nil
		},
	}.Model(host)
	require.NoError(t, err)
	return m
}

// startWith is startServer with the model "once".
func startWith(t testing.TB, cfg client.Config, change func(*serverConfig), m *cutting, idempotent bool) *fixture {
	t.Helper()
	var models *engine.Registry
	f := startServer(t, "tcp", cfg, func(c *serverConfig) {
		models = c.Models
		change(c)
	})
	require.NoError(t, models.Add(m.model(t, f.host, "once", idempotent)))
	return f
}

// often repeats at once, and for as long as a test may take.
func often(cfg client.Config) client.Config {
	cfg.Retry, cfg.RetryFor = retry.Fixed(time.Millisecond), time.Minute
	return cfg
}

// TestACallThatMayHaveBegunIsRepeatedOnlyWhereThatDoesNoHarm: the line is cut while the model runs.
func TestACallThatMayHaveBegunIsRepeatedOnlyWhereThatDoesNoHarm(t *testing.T) {
	testkit.Start(t)
	x := input(t, 3*mib)
	for name, tc := range map[string]struct {
		declared, said bool
		in             func() client.Input
		sink           client.Sink
		runs           int64
		err            string
	}{
		"the model says so":      {declared: true, runs: 3},
		"the caller says so":     {said: true, runs: 3},
		"nobody says so":         {runs: 1, err: "the model may have run and does not declare itself idempotent"},
		"a reader that seeks":    {said: true, runs: 3, in: func() client.Input { return client.FromReader("x", x.Desc, bytes.NewReader(x.Data)) }},
		"a reader that does not": {said: true, runs: 1, err: "Unavailable", in: func() client.Input { return client.FromReader("x", x.Desc, io.MultiReader(bytes.NewReader(x.Data))) }},
		"a result in memory":     {said: true, runs: 3, sink: client.Into(make([]byte, len(x.Data)))},
	} {
		t.Run(name, func(t *testing.T) {
			l := new(line)
			m := &cutting{block: func(run int64) {
				if run <= 2 {
					l.cut()
				}
			}}
			f := startWith(t, often(l.config(client.Config{})), func(*serverConfig) {}, m, tc.declared)
			in := client.From("x", x)
			if tc.in != nil {
				in = tc.in()
			}
			r := client.Request{Model: "once", Inputs: []client.Input{in}, Idempotent: tc.said}
			r.Results = map[string]client.Sink{"y": tc.sink}
			c, err := f.client.Call(t.Context(), r)
			require.NoError(t, err)
			results, err := c.Wait()
			s := f.client.Statistics()
			require.Equal(t, tc.runs, m.runs.Load())
			require.EqualValues(t, 1, s.Calls)
			require.Equal(t, tc.runs, s.Attempts)
			require.Equal(t, tc.runs-1, s.Retries)
			if tc.err != "" {
				require.ErrorContains(t, err, tc.err)
				require.Equal(t, map[codes.Code]int64{codes.Unavailable: 1}, s.Failures)
				return
			}
			require.NoError(t, err)
			require.Equal(t, x.Data, results["y"].Data)
			require.Equal(t, map[codes.Code]int64{codes.Unavailable: 2}, s.Failures)
			require.EqualValues(t, len(x.Data), s.Sent)
			require.EqualValues(t, len(x.Data), s.Received)
			require.Positive(t, s.Server.P50)
			require.GreaterOrEqual(t, s.Total.Max, s.Server.P99)
		})
	}
}

func TestWhatTheCallerHasOfAResultIsNotRepeated(t *testing.T) {
	testkit.Start(t)
	x := input(t, 3*mib)
	for name, use := range map[string]func(c *client.Call, cut func()) error{
		"regions": func(c *client.Call, cut func()) (err error) {
			for _, err = range c.Regions() {
				cut()
			}
			return err
		},
		"a writer": func(c *client.Call, cut func()) error {
			_, err := c.Wait()
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			l, hold := new(line), make(chan struct{})
			m := &cutting{block: func(int64) {}}
			f := startWith(t, often(l.config(client.Config{})), func(*serverConfig) {}, m, true)
			cut := sync.OnceFunc(func() {
				l.cut()
				close(hold)
			})
			r := client.Request{Model: "once", Inputs: []client.Input{client.FromReader("x", x.Desc, &waitsAt{Reader: bytes.NewReader(x.Data), at: 2 * mib, until: hold})}}
			if name == "a writer" {
				r.Results = map[string]client.Sink{"y": client.Writer(func(tensor.Desc) (io.Writer, error) {
					return writer(func(p []byte) (int, error) { cut(); return len(p), nil }), nil
				})}
			}
			c, err := f.client.Call(t.Context(), r)
			require.NoError(t, err)
			err = use(c, cut)
			require.Error(t, err)
			_, err = c.Wait()
			require.Error(t, err)
			require.Zero(t, f.client.Statistics().Retries)
		})
	}
}

// waitsAt is a file that stops at an offset until a channel is closed.
type waitsAt struct {
	*bytes.Reader
	at    int64
	until <-chan struct{}
}

func (h *waitsAt) Read(p []byte) (int, error) {
	at, _ := h.Seek(0, io.SeekCurrent)
	if at >= h.at {
		<-h.until
	} else {
		p = p[:min(int64(len(p)), h.at-at)]
	}
	return h.Reader.Read(p)
}

// TestWhatAServerRefusesIsRepeated: a model that is not idempotent, on a server of one call.
func TestWhatAServerRefusesIsRepeated(t *testing.T) {
	testkit.Start(t)
	begun, hold := make(chan struct{}, 9), make(chan struct{})
	m := &cutting{block: func(run int64) {
		begun <- struct{}{}
		if run == 1 {
			<-hold
		}
	}}
	var waits atomic.Int64
	cfg := client.Config{Retry: func(a retry.Attempt) (time.Duration, bool) {
		if waits.Add(1) == 3 {
			close(hold)
		}
		return time.Millisecond, a.After > 0
	}}
	f := startWith(t, cfg, func(c *serverConfig) { c.QueuedCalls = 1 }, m, false)
	x := input(t, 100)
	first, err := f.client.Call(t.Context(), client.Request{Model: "once", Inputs: []client.Input{client.From("x", x)}})
	require.NoError(t, err)
	<-begun
	all := make(chan error, 8)
	for range cap(all) {
		go func() { // ends with its call
			_, err := f.client.Compute(context.Background(), "once", x)
			all <- err
		}()
	}
	for range cap(all) {
		require.NoError(t, <-all)
	}
	_, err = first.Wait()
	require.NoError(t, err)
	require.EqualValues(t, 9, m.runs.Load())
	require.GreaterOrEqual(t, f.client.Statistics().Retries, int64(3))
}

// failing is a store whose first commits end with the line.
type failing struct {
	store.Store
	line    *line
	commits atomic.Int64
	after   bool // the commit, not before it
}

func (s *failing) Create(ctx context.Context, name string, d tensor.Desc, metadata map[string]string) (store.Writer, error) {
	w, err := s.Store.Create(ctx, name, d, metadata)
	return &failingWriter{w, s}, err
}

type failingWriter struct {
	store.Writer
	of *failing
}

func (w *failingWriter) Commit(ctx context.Context) (store.Info, error) {
	n := w.of.commits.Add(1)
	if !w.of.after && n == 1 {
		w.of.line.cut()
		w.Abort()
		return store.Info{}, store.ErrUnavailable
	}
	info, err := w.Writer.Commit(ctx)
	if n == 1 {
		w.of.line.cut()
	}
	return info, err
}

func TestAPushIsRepeatedUnlessTheServerHasIt(t *testing.T) {
	testkit.Start(t)
	for name, after := range map[string]bool{"it has": true, "it has not": false} {
		t.Run(name, func(t *testing.T) {
			l := new(line)
			s := &failing{line: l, after: after}
			f := startServer(t, "tcp", often(l.config(client.Config{})), func(c *serverConfig) { s.Store, c.Store = c.Store, s })
			x, y := input(t, 100), input(t, 2*mib)
			in := []client.Input{client.From("", x), client.FromReader("", y.Desc, bytes.NewReader(y.Data))}
			in[0].Name, in[1].Name = "a[1]*", `b\?`
			sums, err := f.client.Push(t.Context(), client.PushRequest{Tensors: in})
			require.NoError(t, err)
			require.Len(t, sums, 2)
			list, _, err := f.client.List(t.Context(), "")
			require.NoError(t, err)
			require.Len(t, list, 2)
			for i, sum := range sums {
				require.NoError(t, sum.Err)
				require.Equal(t, list[i].Digest, sum.Digest)
			}
			got, err := f.client.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "b*"}}})
			require.NoError(t, err)
			require.Equal(t, y.Data, got[0].Data)
			st := f.client.Statistics()
			require.EqualValues(t, 2, st.Calls)
			require.EqualValues(t, 1, st.Retries)
		})
	}
}

// TestAPullIsRepeated has the line cut when the first bytes of c have come.
func TestAPullIsRepeated(t *testing.T) {
	testkit.Start(t)
	l := new(line)
	f := startServer(t, "tcp", often(l.config(client.Config{})), func(*serverConfig) {})
	var in []client.Input
	for _, name := range []string{"a/1", "a/2", "c"} {
		in = append(in, client.From("", input(t, (1+9*len(in))*mib))) // c does not fit the allowance
		in[len(in)-1].Name = name
	}
	_, err := f.client.Push(t.Context(), client.PushRequest{Tensors: in})
	require.NoError(t, err)
	cut := sync.OnceFunc(l.cut)
	r := client.PullRequest{Select: []client.Selection{{Name: "none"}, {Name: "a/*"}, {Name: "c"}}, Progress: func(p client.Progress) {
		if p.Name == "c" {
			cut()
		}
	}}
	list, err := f.client.Pull(t.Context(), r)
	require.ErrorContains(t, err, `"none"`)
	require.Len(t, list, 4)
	require.Error(t, list[0].Err)
	for i, want := range in {
		require.NoError(t, list[i+1].Err)
		require.Equal(t, want.Name, list[i+1].Name)
		require.Equal(t, want.Data, list[i+1].Data)
	}
	require.EqualValues(t, 1, f.client.Statistics().Retries)

	cut, opened := sync.OnceFunc(l.cut), 0
	r.Progress = nil
	r.To = func(string, tensor.Desc) (client.Sink, error) {
		opened++
		return client.Writer(func(tensor.Desc) (io.Writer, error) {
			return writer(func(p []byte) (int, error) { cut(); return len(p), nil }), nil
		}), nil
	}
	r.Select = r.Select[2:]
	_, err = f.client.Pull(t.Context(), r)
	require.Error(t, err, "it cannot be written twice")
	require.Equal(t, 1, opened)
}

func TestAttemptsEndWithThePolicyTheTimeTheContextAndTheClient(t *testing.T) {
	testkit.Start(t)
	x := input(t, 10)
	var stop func()
	for name, tc := range map[string]struct {
		cfg client.Config
		err error
	}{
		"none":       {client.Config{}, client.ErrNoConnection},
		"the policy": {client.Config{Retry: retry.Waits(0, 0)}, client.ErrNoConnection},
		"the time":   {client.Config{Retry: retry.Fixed(time.Hour)}, client.ErrNoConnection},
		"the caller": {client.Config{Retry: func(retry.Attempt) (time.Duration, bool) { stop(); return time.Second, true }}, client.ErrNoConnection},
		"the host":   {client.Config{Retry: retry.Fixed(0)}, client.ErrHostNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			address, _ := comeAndGo(t)
			if name == "the host" {
				address = "nowhere.invalid:1"
			}
			c, err := client.Dial(address, tc.cfg)
			require.NoError(t, err)
			defer c.Close()
			for _, use := range []func(context.Context) error{
				func(ctx context.Context) error { _, err := c.Compute(ctx, "relu", x); return err },
				func(ctx context.Context) error { _, err := c.Info(ctx); return err },
				func(ctx context.Context) error {
					_, err := c.Push(ctx, client.PushRequest{Tensors: []client.Input{{Name: "x", Desc: x.Desc, Data: x.Data}}})
					return err
				},
				func(ctx context.Context) error {
					_, err := c.Pull(ctx, client.PullRequest{Select: []client.Selection{{Name: "x"}}})
					return err
				},
			} {
				var ctx context.Context
				ctx, stop = context.WithCancel(t.Context())
				err := use(ctx)
				require.ErrorIs(t, err, tc.err)
				if name == "the caller" {
					require.ErrorIs(t, err, context.Canceled)
				}
				stop()
			}
			if s := c.Statistics(); name == "the policy" { // RPCs about metadata do not count
				require.EqualValues(t, []int64{3, 9, 6}, []int64{s.Calls, s.Attempts, s.Retries})
				require.Equal(t, map[codes.Code]int64{codes.Unavailable: 9}, s.Failures)
			}
		})
	}
}

func TestAfterManyFailuresNoAttemptIsMadeForAWhile(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		address := "127.0.0.1:1"
		var dials atomic.Int64
		c, err := client.Dial(address, client.Config{BreakAfter: 3}.Dialling(func(context.Context, string, string) (net.Conn, error) {
			dials.Add(1)
			return nil, io.ErrUnexpectedEOF
		}))
		require.NoError(t, err)
		defer c.Close()
		for range 3 {
			_, err = c.Info(t.Context())
			require.ErrorIs(t, err, client.ErrNoConnection)
		}
		before := dials.Load()
		_, err = c.Info(t.Context())
		require.ErrorIs(t, err, client.ErrCircuitOpen)
		_, err = c.Session(t.Context())
		require.ErrorIs(t, err, client.ErrCircuitOpen)
		require.Equal(t, before, dials.Load(), "nobody has waited")
		<-time.After(11 * time.Second)
		_, err = c.Info(t.Context())
		require.ErrorIs(t, err, client.ErrNoConnection)
		_, err = c.Info(t.Context())
		require.ErrorIs(t, err, client.ErrCircuitOpen)
	})
}

// TestAServerThatEndsAsSoonAsItIsReachedIsTriedAgain: it may be one that is ending.
func TestAServerThatEndsAsSoonAsItIsReachedIsTriedAgain(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	l := listen(t)
	go func() { // ends with its connection
		if conn, err := l.Accept(); err == nil {
			_ = conn.Close()
		}
	}()
	var dials atomic.Int64
	c, err := client.Dial(f.addr, often(client.Config{Lanes: -1}).Dialling(func(ctx context.Context, network, address string) (net.Conn, error) {
		if dials.Add(1) == 1 {
			address = l.Addr().String()
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	}))
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Info(t.Context())
	require.NoError(t, err)
	require.GreaterOrEqual(t, dials.Load(), int64(2))
}

// TestOneAfterAnotherFitsALimitOfOne: what has ended for the caller takes no place.
func TestOneAfterAnotherFitsALimitOfOne(t *testing.T) {
	testkit.Start(t)
	f := startServer(t, "tcp", client.Config{}, func(c *serverConfig) { c.Sessions, c.QueuedCalls, c.Transfers = 1, 1, 1 })
	for _, n := range []int{100, 3 * mib} {
		x := client.From("", input(t, n))
		x.Name = "x"
		for range 100 {
			y, err := f.client.Compute(t.Context(), "echo", tensor.Tensor{Desc: x.Desc, Data: x.Data})
			require.NoError(t, err)
			require.Equal(t, x.Data, y.Data)
			_, err = f.client.Push(t.Context(), client.PushRequest{Tensors: []client.Input{x}})
			require.NoError(t, err)
			_, err = f.client.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "x"}}})
			require.NoError(t, err)
		}
	}
}
