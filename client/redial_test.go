package client_test

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// comeAndGo returns the address of no server, and a function that starts one there and returns
// one that stops it.
func comeAndGo(t *testing.T) (address string, start func() (stop func())) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address = l.Addr().String()
	require.NoError(t, l.Close())
	return address, func() func() {
		s, err := server.New(server.Config{Models: engine.NewRegistry(), Pool: slab.NewPool(0, slab.System), Budget: slab.NewBudget("memory", 1<<30)})
		require.NoError(t, err)
		l, err := net.Listen("tcp", address)
		require.NoError(t, err)
		served := goServe(s, l)
		return func() {
			s.Close()
			require.NoError(t, <-served)
		}
	}
}

// TestAServerThatComesBackIsFoundByTheNextAttempt has gRPC wait a second or more between two
// dials of its own.
func TestAServerThatComesBackIsFoundByTheNextAttempt(t *testing.T) {
	testkit.Start(t)
	address, start := comeAndGo(t)
	c, err := client.Dial(address, client.Config{Lanes: -1})
	require.NoError(t, err)
	defer c.Close()
	x, err := tensor.Of([]float32{1})
	require.NoError(t, err)
	for range 3 {
		_, err = c.Info(t.Context())
		require.Error(t, err, "perhaps on the connection that was being closed")
		for range 2 {
			_, err = c.Info(t.Context())
			require.ErrorIs(t, err, client.ErrNoConnection)
			_, err = c.Compute(t.Context(), "x", x)
			require.ErrorIs(t, err, client.ErrNoConnection)
		}
		stop := start()
		_, err = c.Info(t.Context())
		require.NoError(t, err)
		_, err = c.Compute(t.Context(), "x", x)
		require.ErrorContains(t, err, "x", "there is a server, without this model")
		require.NotErrorIs(t, err, client.ErrNoConnection)
		stop()
	}
}

// TestACallThatMissesTheNewConnectionUsesIt has gRPC connect of its own accord, between two calls,
// while the second still fails with the error of the attempt before.
func TestACallThatMissesTheNewConnectionUsesIt(t *testing.T) {
	testkit.Start(t)
	address, start := comeAndGo(t)
	defer start()()
	c, err := client.Dial(address, client.Config{Lanes: -1})
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Info(t.Context())
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	begun := 0
	err = c.Fresh(ctx, func() error {
		if begun++; begun == 1 {
			return status.Error(codes.Unavailable, "connection error: desc = of the attempt before")
		}
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, 2, begun)
}

func TestEachCallOfAClientThatIsHungUpOnDialsAndSaysSo(t *testing.T) {
	testkit.Start(t)
	for name, hangUp := range map[string]func(net.Conn){
		"at once":       func(net.Conn) {},
		"after it read": func(c net.Conn) { _, _ = c.Read(make([]byte, 1)) },
		"with a reset":  func(c net.Conn) { _ = c.(*net.TCPConn).SetLinger(0) },
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			var accepted atomic.Int64
			ended := make(chan struct{})
			go func() { // ends with l
				defer close(ended)
				for {
					conn, err := l.Accept()
					if err != nil {
						return
					}
					accepted.Add(1)
					hangUp(conn)
					_ = conn.Close()
				}
			}()
			c, err := client.Dial(l.Addr().String(), client.Config{Lanes: -1})
			require.NoError(t, err)
			for n := range int64(4) {
				_, err = c.Info(t.Context())
				require.ErrorIs(t, err, client.ErrNoConnection)
				require.Greater(t, accepted.Load(), n)
				var e *client.Error
				require.ErrorAs(t, err, &e)
				require.True(t, e.Refused)
			}
			require.NoError(t, c.Close())
			require.NoError(t, l.Close())
			<-ended
		})
	}
}

func TestManyAttemptsShareADial(t *testing.T) {
	testkit.Start(t)
	address, _ := comeAndGo(t)
	var dials atomic.Int64
	c, err := client.Dial(address, client.Config{}.Dialling(func(ctx context.Context, network, address string) (net.Conn, error) {
		dials.Add(1)
		return new(net.Dialer).DialContext(ctx, network, address)
	}))
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Info(t.Context())
	require.ErrorIs(t, err, client.ErrNoConnection)
	const callers = 100
	before := dials.Load()
	errs := make(chan error, callers)
	for range callers {
		go func() { // ends with its dial
			_, err := c.Info(context.Background())
			errs <- err
		}()
	}
	for range callers {
		require.ErrorIs(t, <-errs, client.ErrNoConnection)
	}
	require.Greater(t, dials.Load(), before, "none fails with the error of an older one")
	require.Less(t, dials.Load(), before+callers/2)
}

func TestAnAttemptThatMayWaitFindsTheServer(t *testing.T) {
	testkit.Start(t)
	address, start := comeAndGo(t)
	failed := make(chan struct{}, 100)
	c, err := client.Dial(address, client.Config{Wait: time.Minute, Lanes: -1}.Dialling(func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		if err != nil {
			failed <- struct{}{}
		}
		return conn, err
	}))
	require.NoError(t, err)
	defer c.Close()
	found := make(chan error, 2)
	go func() { // ends with the server
		_, err := c.Info(context.Background())
		found <- err
	}()
	go func() { // likewise
		s, err := c.Session(context.Background())
		if err == nil {
			err = s.Close()
		}
		found <- err
	}()
	for range 3 {
		<-failed
	}
	defer start()()
	require.NoError(t, <-found)
	require.NoError(t, <-found)
}

func TestCloseEndsAnAttemptThatWaits(t *testing.T) {
	testkit.Start(t)
	address, _ := comeAndGo(t)
	tried := make(chan struct{}, 1000)
	c, err := client.Dial(address, client.Config{Wait: time.Hour, Lanes: -1}.Dialling(func(ctx context.Context, network, address string) (net.Conn, error) {
		tried <- struct{}{}
		return new(net.Dialer).DialContext(ctx, network, address)
	}))
	require.NoError(t, err)
	ended := make(chan error, 2)
	go func() { // ends with Close
		_, err := c.Info(context.Background())
		ended <- err
	}()
	go func() { // likewise
		_, err := c.Session(context.Background())
		ended <- err
	}()
	<-tried
	<-tried
	require.NoError(t, c.Close())
	require.ErrorIs(t, <-ended, client.ErrClosed)
	require.ErrorIs(t, <-ended, client.ErrClosed)
}

func TestAnAttemptWaitsNoLongerThanItsContext(t *testing.T) {
	testkit.Start(t)
	address, _ := comeAndGo(t)
	ctx, cancel := context.WithCancel(t.Context())
	tried := 0
	c, err := client.Dial(address, client.Config{Wait: time.Minute}.Dialling(func(ctx context.Context, network, address string) (net.Conn, error) {
		if tried++; tried == 3 {
			cancel()
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	}))
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Info(ctx)
	require.ErrorIs(t, err, context.Canceled)
}

func TestTheClientOfAFullServerIsToldToComeBack(t *testing.T) {
	testkit.Start(t)
	dir := t.TempDir()
	_, err := identity.WriteCertificates(dir, nil, "alice")
	require.NoError(t, err)
	file := func(name string) string { return filepath.Join(dir, name) }
	id, err := identity.NewServer(identity.ServerFiles{Cert: file(identity.ServerFile), Key: file(identity.ServerKeyFile)}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	trusting, _, err := identity.ClientFiles{CA: file(identity.AuthorityFile)}.Credentials()
	require.NoError(t, err)
	for name, tc := range map[string]struct {
		server server.Config
		client client.Config
	}{
		"plain": {},
		"TLS":   {server.Config{Credentials: id.Credentials()}, client.Config{Credentials: trusting}},
	} {
		t.Run(name, func(t *testing.T) {
			tc.server.Models, tc.server.Connections, tc.server.Log = engine.NewRegistry(), 1, slog.New(slog.DiscardHandler)
			s, err := server.New(tc.server)
			require.NoError(t, err)
			defer s.Close()
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			served := goServe(s, l)
			dial := func() *client.Client {
				c, err := client.Dial(l.Addr().String(), tc.client)
				require.NoError(t, err)
				return c
			}
			first := dial()
			_, err = first.Info(t.Context())
			require.NoError(t, err)
			second := dial()
			defer second.Close()
			for range 3 {
				_, err = second.Info(t.Context())
				var e *client.Error
				require.ErrorAs(t, err, &e)
				require.Equal(t, codes.Unavailable, e.Code)
				require.Contains(t, e.Message, "overload: all 1 connections that the server takes are open")
				require.True(t, e.Retryable())
				require.Positive(t, e.RetryAfter)
				_, err = second.Session(t.Context())
				require.ErrorContains(t, err, "overload")
			}
			require.NoError(t, first.Close())
			testkit.Eventually(t, func() bool { _, err := second.Info(t.Context()); return err == nil }, "room")
			s.Close()
			require.NoError(t, <-served)
		})
	}
}
