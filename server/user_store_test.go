package server_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// panicking is a store whose writers panic, when told to, and count.
type panicking struct {
	*store.Memory
	at string
}

type panickingWriter struct {
	store.Writer
	at string
}

func (p *panicking) Create(ctx context.Context, name string, d tensor.Desc) (store.Writer, error) {
	w, err := p.Memory.Create(ctx, name, d)
	if p.at == "create" {
		w.Abort()
		panic("boom")
	}
	return &panickingWriter{w, p.at}, err
}

func (w *panickingWriter) WriteViews(off int64, views [][]byte) error {
	if w.at == "write" && off > 0 {
		panic("boom")
	}
	return w.Writer.WriteViews(off, views)
}

func (w *panickingWriter) Commit() (store.Info, error) {
	if w.at == "commit" {
		panic("boom")
	}
	return w.Writer.Commit()
}

func TestAStoreThatPanicsLeavesNothingOfThePush(t *testing.T) {
	testkit.Start(t)
	p := &panicking{}
	f := serve(t, func(c *server.Config) {
		p.Memory = store.NewMemory(c.Pool, 8*mib)
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

func TestEveryShutdownEnds(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) {
		c.Store = store.NewMemory(c.Pool, 8*mib)
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
