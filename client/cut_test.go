package client_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// dam stands between a client and a server, and reads no more than so many bytes of
// the client's.
type dam struct {
	addr string
	full chan struct{} // closed when it reads no more
	cut  func()        // ends all connections
}

// newDam has Unix sockets: what they keep is far less than a chunk.
func newDam(t *testing.T, network, to string, most int64) *dam {
	t.Helper()
	path := filepath.Join(t.TempDir(), "dam")
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	d := &dam{addr: "unix:" + path, full: make(chan struct{})}
	var mu sync.Mutex
	var conns []net.Conn // guarded by mu
	var work sync.WaitGroup
	var left atomic.Int64
	left.Store(most)
	ended := make(chan struct{})
	d.cut = sync.OnceFunc(func() {
		close(ended)
		mu.Lock()
		defer mu.Unlock()
		for _, c := range conns {
			_ = c.Close()
		}
		_ = l.Close()
	})
	full := sync.OnceFunc(func() { close(d.full) })
	work.Go(func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial(network, to)
			if err != nil {
				_ = from.Close()
				continue
			}
			mu.Lock()
			conns = append(conns, from, server)
			mu.Unlock()
			work.Go(func() { _, _ = io.Copy(from, server) })
			work.Go(func() {
				b := make([]byte, 4<<10)
				for left.Load() > 0 {
					n, err := from.Read(b)
					if _, e := server.Write(b[:n]); e != nil || err != nil {
						return
					}
					left.Add(int64(-n))
				}
				full()
				<-ended
			})
		}
	})
	t.Cleanup(func() {
		d.cut()
		work.Wait()
	})
	return d
}

// holds waits until the dam is full, and a writer waits in gRPC with a chunk.
func (d *dam) holds(t *testing.T) {
	t.Helper()
	<-d.full
	stacks := make([]byte, 4*mib)
	testkit.Eventually(t, func() bool {
		return bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("transport.(*writeQuota).get("))
	}, "a writer that waits for its connection")
}

// behindDam returns a client whose connection takes no more than a part of a chunk, and
// an input that is larger.
func behindDam(t *testing.T) (d *dam, c *client.Client, in client.Input, released *atomic.Int32) {
	f := start(t, "tcp", client.Config{})
	d = newDam(t, "tcp", f.addr, 256<<10)
	c, err := client.Dial(d.addr, client.Config{Lanes: -1}) // what a lane writes comes back at once
	require.NoError(t, err)
	pool, released := slab.NewPool(0, slab.System), new(atomic.Int32)
	s, err := pool.Get(16 * mib)
	require.NoError(t, err)
	in = client.From("", tensor.Tensor{Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{16 * mib}}, Data: s.Bytes()})
	in.Name = "in"
	in.Release = func() {
		clear(s.Bytes()) // which the race detector sees, should it be read
		s.Release()
		released.Add(1)
	}
	t.Cleanup(func() {
		require.NoError(t, c.Close())
		require.EqualValues(t, 1, released.Load())
		n, _ := pool.Live()
		require.Zero(t, n)
	})
	return d, c, in, released
}

func TestAnInputComesBackFromAConnectionThatDied(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		stop func(*client.Call, *client.Session)
		held bool // until the connection dies
	}{
		"while the call runs":          {func(*client.Call, *client.Session) {}, true},
		"after the call was cancelled": {func(c *client.Call, _ *client.Session) { c.Cancel() }, true},
		"after the session was closed": {func(_ *client.Call, s *client.Session) { go s.Close() }, false},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			d, c, in, released := behindDam(t)
			s, err := c.Session(t.Context())
			require.NoError(t, err)
			call, err := s.Call(t.Context(), client.Request{Model: "echo", Inputs: []client.Input{in}})
			require.NoError(t, err)
			d.holds(t)
			tc.stop(call, s)
			waited := make(chan error, 1)
			go func() {
				_, err := call.Wait()
				waited <- err
			}()
			if tc.held {
				require.Empty(t, waited)
				require.Zero(t, released.Load(), "gRPC still reads it")
			}
			d.cut()
			require.Error(t, <-waited)
			require.EqualValues(t, 1, released.Load())
		})
	}
}

func TestATensorThatIsPushedComesBackFromAConnectionThatDied(t *testing.T) {
	testkit.Start(t)
	for name, stop := range map[string]struct {
		stop func(cancel func())
		code codes.Code
	}{
		"while it is pushed":           {func(func()) {}, codes.Unavailable},
		"after the push was cancelled": {func(cancel func()) { cancel() }, codes.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			d, c, in, released := behindDam(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			pushed := make(chan error, 1)
			go func() {
				_, err := c.Push(ctx, client.PushRequest{Tensors: []client.Input{in}})
				pushed <- err
			}()
			d.holds(t)
			stop.stop(cancel)
			require.Zero(t, released.Load(), "gRPC still reads it")
			d.cut()
			require.Equal(t, stop.code, status.Code(<-pushed))
			require.EqualValues(t, 1, released.Load())
		})
	}
}
