package client_test

import (
	"bytes"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// halting is a Reader and a Writer that rests in the middle, until let returns.
type halting struct {
	data []byte // to be read
	at   int
	got  bytes.Buffer // what was written
	let  func()
	once sync.Once
}

const (
	haltBytes = 16 * mib // more than a server sends ahead
	haltAt    = haltBytes / 4
)

func newHalting(let func()) *halting {
	h := &halting{data: testkit.Bytes(haltBytes, 3), let: let}
	h.got.Grow(haltBytes) // with the race detector that takes more than a second
	return h
}

func (h *halting) Read(p []byte) (int, error) {
	if h.at >= haltAt {
		h.once.Do(h.let)
	}
	n := copy(p, h.data[h.at:])
	h.at += n
	return n, nil
}

func (h *halting) Write(p []byte) (int, error) {
	if h.got.Len() >= haltAt {
		h.once.Do(h.let)
	}
	return h.got.Write(p)
}

func (h *halting) next(<-chan struct{}) ([]byte, func(), error) {
	if h.at >= haltAt {
		h.once.Do(h.let)
	}
	h.at += mib
	return h.data[h.at-mib : h.at], func() {}, nil
}

func (h *halting) sink() client.Sink {
	return client.Writer(func(tensor.Desc) (io.Writer, error) { return h, nil })
}

// halts are the ways in which the caller's code may rest, each with what it moves.
var halts = map[string]func(t *testing.T, c *client.Client, h *halting) ([]byte, error){
	"a reader of a call": func(t *testing.T, c *client.Client, h *halting) ([]byte, error) {
		return echo(t, c, client.FromReader("", int8s(haltBytes), h), client.Sink{})
	},
	"a Next of a call": func(t *testing.T, c *client.Client, h *halting) ([]byte, error) {
		return echo(t, c, client.Input{Desc: int8s(haltBytes), Next: h.next}, client.Sink{})
	},
	"a writer of a call": func(t *testing.T, c *client.Client, h *halting) ([]byte, error) {
		_, err := echo(t, c, client.Input{Desc: int8s(haltBytes), Data: h.data}, h.sink())
		return h.got.Bytes(), err
	},
	"a reader of a push": func(t *testing.T, c *client.Client, h *halting) ([]byte, error) {
		list, err := c.Push(t.Context(), client.PushRequest{Tensors: []client.Input{{Name: "x", Desc: int8s(haltBytes), Reader: h}}})
		require.Len(t, list, 1)
		if err == nil {
			require.Equal(t, digestOf(h.data), list[0].Digest)
		}
		return h.data, err
	},
	"a writer of a pull": func(t *testing.T, c *client.Client, h *halting) ([]byte, error) {
		_, err := c.Push(t.Context(), client.PushRequest{Tensors: []client.Input{{Name: "y", Desc: int8s(haltBytes), Data: h.data}}})
		require.NoError(t, err)
		_, err = c.Pull(t.Context(), client.PullRequest{
			Select: []client.Selection{{Name: "y"}}, To: func(string, tensor.Desc) (client.Sink, error) { return h.sink(), nil },
		})
		return h.got.Bytes(), err
	},
}

func echo(t *testing.T, c *client.Client, in client.Input, to client.Sink) ([]byte, error) {
	s, err := c.Session(t.Context())
	require.NoError(t, err)
	defer s.Close()
	r := client.Request{Model: "echo", Inputs: []client.Input{in}}
	r.To = func(string, tensor.Desc) (client.Sink, error) { return to, nil }
	call, err := s.Call(t.Context(), r)
	require.NoError(t, err)
	out, err := call.Wait()
	return out["y"].Data, err
}

func TestACallerMayRestForLongerThanAServerWaitsForTheDead(t *testing.T) {
	testkit.Start(t)
	for name, run := range halts {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) { rests(t, run) })
		})
	}
}

func rests(t *testing.T, run func(t *testing.T, c *client.Client, h *halting) ([]byte, error)) {
	const idle = time.Second // a session looks once a second
	f := startServer(t, "tcp", client.Config{}, func(c *serverConfig) { c.Session.ChunkIdle = stream.Instant(idle) })
	age := func() int64 {
		info, err := f.client.Info(t.Context())
		require.NoError(t, err)
		return info.Uptime.Milliseconds()
	}
	h := newHalting(func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for until := age() + 3*idle.Milliseconds(); age() < until; <-tick.C {
		}
	})
	got, err := run(t, f.client, h)
	require.NoError(t, err)
	require.True(t, bytes.Equal(h.data, got))
}

func TestACallerWhoRestsForLongerThanInputIdleIsToldSo(t *testing.T) {
	testkit.Start(t)
	for name, run := range halts {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				idled := make(chan error, 1)
				f := start(t, "tcp", client.Config{InputIdle: 500 * time.Millisecond, Idled: func(err error) { idled <- err }})
				var cause error
				h := newHalting(func() { cause = <-idled })
				_, err := run(t, f.client, h)
				for _, err := range []error{err, cause} {
					require.ErrorIs(t, err, client.ErrInputIdle)
					require.Equal(t, codes.DeadlineExceeded, status.Code(err), err)
					require.ErrorContains(t, err, " in 500ms")
				}
			})
		})
	}
}

func TestACallerWhoRestsLearnsThatTheServerHasGivenTheCallUp(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		idled := make(chan error, 100)
		f := startServer(t, "tcp", client.Config{Idled: func(err error) { idled <- err }}, func(c *serverConfig) {
			c.Session.ChunkIdle, c.Session.InputIdle = stream.Instant(time.Second), stream.Instant(2*time.Second)
		})
		var cause error
		_, err := halts["a reader of a call"](t, f.client, newHalting(func() { cause = <-idled }))
		require.Equal(t, err, cause)
		require.Equal(t, codes.DeadlineExceeded, status.Code(err))
		require.ErrorContains(t, err, "serve --input-idle")
	})
}
