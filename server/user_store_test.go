package server_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/folder"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/store/storetest"
	"github.com/tensorferry/tensorferry/tensor"
)

// panicking is a store whose writers panic, when told to, and count.
type panicking struct {
	*memory.Store
	at string
}

type panickingWriter struct {
	store.Writer
	at string
}

func (p *panicking) Create(ctx context.Context, name string, d tensor.Desc, metadata map[string]string) (store.Writer, error) {
	w, err := p.Store.Create(ctx, name, d, metadata)
	if p.at == "create" {
		w.Abort()
		panic("boom")
	}
	return &panickingWriter{w, p.at}, err
}

func (w *panickingWriter) WriteViews(ctx context.Context, off int64, views [][]byte) error {
	if w.at == "write" {
		panic("boom")
	}
	return w.Writer.WriteViews(ctx, off, views)
}

func (w *panickingWriter) Commit(ctx context.Context) (store.Info, error) {
	if w.at == "commit" {
		panic("boom")
	}
	return w.Writer.Commit(ctx)
}

func TestAStoreThatPanicsLeavesNothingOfThePush(t *testing.T) {
	testkit.Start(t)
	p := &panicking{}
	f := serve(t, func(c *server.Config) {
		p.Store = memory.New(c.Pool, 8*mib)
		c.Store = p
	})
	defer func() { require.NoError(t, p.Close()) }()
	c, err := client.Dial(f.addr, client.Config{ChunkBytes: 4096})
	require.NoError(t, err)
	defer c.Close()
	push := func(names ...string) error {
		var list []client.Input
		for _, n := range names {
			list = append(list, client.Input{Name: n, Desc: tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{9000}}, Data: make([]byte, 9000)})
		}
		_, err := c.Push(t.Context(), client.PushRequest{Tensors: list})
		return err
	}
	for _, at := range []string{"create", "write", "commit"} {
		t.Run(at, func(t *testing.T) {
			p.at = at
			require.Error(t, push("x", "y"))
			testkit.Eventually(t, func() bool { used, _ := p.Used(); return used == 0 }, "the room to come back")
			p.at = ""
			require.NoError(t, push("x"))
			_, err := c.Delete(t.Context(), "x")
			require.NoError(t, err)
		})
	}
}

// away is a store whose machine does not answer: at once, or as long as its caller
// waits.
type away struct {
	*memory.Store
	at    atomic.Value  // string: the method
	why   error         // its error, in place of ErrUnavailable
	waits chan struct{} // nil, or told of each call that waits
}

func (a *away) call(ctx context.Context, at string) error {
	switch {
	case at != a.at.Load():
		return nil
	case a.why != nil:
		return a.why
	case a.waits == nil:
		return fmt.Errorf("%w: dial tcp 10.0.0.7:443: %w", store.ErrUnavailable, context.DeadlineExceeded)
	}
	a.waits <- struct{}{}
	<-ctx.Done()
	a.waits <- struct{}{}
	return context.Cause(ctx)
}

type awayWriter struct {
	store.Writer
	*away
}

type awayReader struct {
	store.Reader
	*away
}

func (a *away) Create(ctx context.Context, name string, d tensor.Desc, metadata map[string]string) (store.Writer, error) {
	if err := a.call(ctx, "create"); err != nil {
		return nil, err
	}
	w, err := a.Store.Create(ctx, name, d, metadata)
	return awayWriter{w, a}, err
}

func (a *away) Open(ctx context.Context, name string) (store.Reader, error) {
	if err := a.call(ctx, "open"); err != nil {
		return nil, err
	}
	r, err := a.Store.Open(ctx, name)
	if err != nil {
		return nil, err
	}
	return awayReader{r, a}, nil
}

func (a *away) List(ctx context.Context, glob, after string, most int) ([]store.Info, error) {
	if _, asked := peer.FromContext(ctx); asked { // the server itself looks at its store, too
		if err := a.call(ctx, "list"); err != nil {
			return nil, err
		}
	}
	return a.Store.List(ctx, glob, after, most)
}

func (a *away) Delete(ctx context.Context, names ...string) ([]string, error) {
	if err := a.call(ctx, "delete"); err != nil {
		return nil, err
	}
	return a.Store.Delete(ctx, names...)
}

func (w awayWriter) WriteViews(ctx context.Context, off int64, views [][]byte) error {
	if err := w.call(ctx, "write"); err != nil {
		return err
	}
	return w.Writer.WriteViews(ctx, off, views)
}

func (w awayWriter) Commit(ctx context.Context) (store.Info, error) {
	if err := w.call(ctx, "commit"); err != nil {
		w.Abort()
		return store.Info{}, err
	}
	return w.Writer.Commit(ctx)
}

func (r awayReader) View(ctx context.Context, off, n int64) ([]byte, store.Releaser, error) {
	if err := r.call(ctx, "view"); err != nil {
		return nil, nil, err
	}
	return r.Reader.View(ctx, off, n)
}

// uses are what a client does to a store that has x, by the method that it comes to.
var uses = map[string]func(ctx context.Context, c *client.Client) error{
	"create": pushZeros, "write": pushZeros, "commit": pushZeros,
	"open": pullX, "view": pullX,
	"list": func(ctx context.Context, c *client.Client) error {
		_, _, err := c.List(ctx, "")
		return err
	},
	"delete": func(ctx context.Context, c *client.Client) error {
		_, err := c.Delete(ctx, "x")
		return err
	},
}

func pushZeros(ctx context.Context, c *client.Client) error {
	in := client.Input{Name: "y", Desc: tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{9000}}, Data: make([]byte, 9000)}
	_, err := c.Push(ctx, client.PushRequest{Tensors: []client.Input{in}})
	return err
}

func pullX(ctx context.Context, c *client.Client) error {
	_, err := c.Pull(ctx, client.PullRequest{Select: []client.Selection{{Name: "x"}}})
	return err
}

func TestAStoreThatIsAwayIsTriedAgainLater(t *testing.T) {
	testkit.Start(t)
	a := &away{}
	log := &notes{}
	f := serve(t, func(c *server.Config) {
		a.Store = memory.New(slab.NewPool(0, slab.System), 8*mib)
		c.Store, c.Log = a, log.log()
	})
	defer func() { require.NoError(t, a.Close()) }()
	storetest.Put(t, a.Store, "x", []byte{1})
	c, err := client.Dial(f.addr, client.Config{})
	require.NoError(t, err)
	defer c.Close()
	for at, use := range uses {
		t.Run(at, func(t *testing.T) {
			a.at.Store(at)
			err := use(t.Context(), c)
			var own *client.Error
			require.ErrorAs(t, err, &own)
			require.Equal(t, codes.Unavailable, own.Code)
			require.Positive(t, own.RetryAfter)
			require.NotContains(t, err.Error(), "10.0.0.7", "what the store's machine is called is nobody's business")
			require.Contains(t, log.String(), "10.0.0.7", "but the operator's")
		})
	}
	a.at.Store("")
	require.NoError(t, pullX(t.Context(), c))
	require.NoError(t, pushZeros(t.Context(), c))
}

func TestAStoreThatCannotBeWrittenSaysSo(t *testing.T) {
	testkit.Start(t)
	a := &away{why: fmt.Errorf("%w: make room for tensor \"x\": open /srv/secret/x: %w", store.ErrUnwritable, syscall.EROFS)}
	a.at.Store("create")
	log := &notes{}
	f := serve(t, func(c *server.Config) {
		a.Store = memory.New(slab.NewPool(0, slab.System), 8*mib)
		c.Store, c.Log = a, log.log()
	})
	defer func() { require.NoError(t, a.Close()) }()
	c, err := client.Dial(f.addr, client.Config{})
	require.NoError(t, err)
	defer c.Close()
	var own *client.Error
	require.ErrorAs(t, pushZeros(t.Context(), c), &own)
	require.Equal(t, codes.FailedPrecondition, own.Code)
	require.Zero(t, own.RetryAfter)
	require.Equal(t, `tensor "y": the server's store cannot be written; its log says why`, own.Message)
	require.Contains(t, log.String(), "/srv/secret", "the place is the operator's business")
}

func TestAStoreWaitsNoLongerThanItsCaller(t *testing.T) {
	testkit.Start(t)
	a := &away{waits: make(chan struct{})}
	f := serve(t, func(c *server.Config) {
		a.Store = memory.New(slab.NewPool(0, slab.System), 8*mib)
		c.Store = a
	})
	defer func() { require.NoError(t, a.Close()) }()
	storetest.Put(t, a.Store, "x", []byte{1})
	c, err := client.Dial(f.addr, client.Config{})
	require.NoError(t, err)
	defer c.Close()
	for at, use := range uses {
		t.Run(at, func(t *testing.T) {
			a.at.Store(at)
			ctx, cancel := context.WithCancel(t.Context())
			used := make(chan error, 1)
			go func() { used <- use(ctx, c) }()
			<-a.waits
			cancel()
			<-a.waits // its context has ended
			require.ErrorIs(t, <-used, context.Canceled)
		})
	}
	require.NoError(t, c.Close())
	f.isEmpty(t)
	testkit.Eventually(t, func() bool { used, _ := a.Used(); return used == slab.SizeOf(1) }, "the room of what was not pushed to come back")
}

func TestEveryShutdownEnds(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) {
		c.Store = memory.New(c.Pool, 8*mib)
	})
	p := openPush(t, f)
	testkit.Eventually(t, func() bool { return f.counters(t)["open_transfers"] == 1 }, "the push")
	ended := make(chan error, 2)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for range 2 {
		go func() { ended <- f.server.Shutdown(ctx) }()
	}
	require.Empty(t, ended)
	p.finish()
	for range 2 {
		require.NoError(t, <-ended)
	}
}

type setPanics struct{ *memory.Store }

func (setPanics) CommitAll(context.Context, []store.Writer) ([]store.Info, error) { panic("boom") }

type abortPanics struct{ *memory.Store }

type abortWriter struct{ store.Writer }

func (a abortPanics) Create(ctx context.Context, name string, d tensor.Desc, metadata map[string]string) (store.Writer, error) {
	w, err := a.Store.Create(ctx, name, d, metadata)
	return abortWriter{w}, err
}

func (abortWriter) WriteViews(context.Context, int64, [][]byte) error { return errors.New("no") }

func (w abortWriter) Abort() {
	w.Writer.Abort()
	panic("boom")
}

func TestAStoreWhoseEndsPanicFailsItsPushAlone(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		of  func(*memory.Store) store.Store
		all bool
	}{
		"a set's commit": {func(m *memory.Store) store.Store { return setPanics{m} }, true},
		"an abort":       {func(m *memory.Store) store.Store { return abortPanics{m} }, false},
		"a set's abort":  {func(m *memory.Store) store.Store { return abortPanics{m} }, true},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			m := shelf(t, 8*mib)
			f := serve(t, func(c *server.Config) { c.Store = tc.of(m) })
			c, err := client.Dial(f.addr, client.Config{})
			require.NoError(t, err)
			defer c.Close()
			for range 2 {
				x := client.Input{Name: "x", Desc: tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{9000}}, Data: make([]byte, 9000)}
				push := c.Push
				if tc.all {
					push = c.PutAll
				}
				_, err = push(t.Context(), client.PushRequest{Tensors: []client.Input{x}})
				require.Error(t, err)
			}
			testkit.Eventually(t, func() bool { used, _ := m.Used(); return used == 0 }, "the room to come back")
		})
	}
}

// TestTheHealthOfAStoreFollowsWhetherItCanBeUsed: models are served meanwhile.
func TestTheHealthOfAStoreFollowsWhetherItCanBeUsed(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "store")
		kept, err := folder.Open(dir, folder.Config{Log: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, kept.Close()) })
		f := serve(t, func(c *server.Config) {
			c.Store, c.Authorize = kept, func(context.Context, server.Action) error { return nil }
		})
		health := healthpb.NewHealthClient(f.dial(t))
		is := func(want healthpb.HealthCheckResponse_ServingStatus) bool {
			r, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "store"})
			return err == nil && r.GetStatus() == want
		}
		testkit.Eventually(t, func() bool { return is(healthpb.HealthCheckResponse_SERVING) && f.counters(t)["store_available"] == 1 }, "a store")
		c := f.counters(t)
		require.Less(t, c["store_limit_bytes"], int64(1)<<60, "what the disk has room for")
		require.NoError(t, os.Rename(dir, dir+" away"))
		testkit.Eventually(t, func() bool {
			return is(healthpb.HealthCheckResponse_NOT_SERVING) && f.counters(t)["store_available"] == 0
		}, "no store")
		r, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{})
		require.NoError(t, err)
		require.Equal(t, healthpb.HealthCheckResponse_SERVING, r.GetStatus())
		require.NoError(t, os.Rename(dir+" away", dir))
		testkit.Eventually(t, func() bool { return is(healthpb.HealthCheckResponse_SERVING) }, "the store, back")
	})
}
