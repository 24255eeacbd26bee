package client_test

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// A chunk takes longer than any timeout of either side; the bytes of it are a sign of life.
func TestASlowLineIsServedToTheEnd(t *testing.T) {
	testkit.Start(t)
	pushes := func(ctx context.Context, c *client.Client, x tensor.Tensor) error {
		_, err := c.Push(ctx, client.PushRequest{Tensors: []client.Input{{Name: "x", Desc: x.Desc, Data: x.Data}}})
		return err
	}
	computes := func(ctx context.Context, c *client.Client, x tensor.Tensor) error {
		_, err := c.Compute(ctx, "sink", x)
		return err
	}
	for name, tc := range map[string]struct {
		rate  int
		least uint32 // what a call may send without credit
		send  func(context.Context, *client.Client, tensor.Tensor) error
	}{
		"a push":                   {2 << 10, 1 << 20, pushes},
		"a push, hardly":           {1100, 1 << 20, pushes},
		"an input on an allowance": {2 << 10, 1 << 20, computes},
		"an input on credit":       {2 << 10, 1, computes},
		"a push that is too slow":  {512, 1 << 20, pushes},
		"an input that is":         {512, 1, computes},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				n := testkit.InBubble()
				f := startServer(t, "tcp", client.Config{}, func(c *serverConfig) { c.Session.AllowanceBytes = tc.least })
				c, err := client.Dial(f.addr, client.Config{}.Dialling(func(ctx context.Context, network, address string) (net.Conn, error) {
					c, err := n.Dial(ctx, network, address)
					return testkit.SlowConn{Conn: c, Rate: tc.rate}, err
				}))
				require.NoError(t, err)
				defer func() { require.NoError(t, c.Close()) }()
				x, err := tensor.Of(testkit.Bytes(1<<20, 1))
				require.NoError(t, err)
				began := time.Now()
				err = tc.send(t.Context(), c, x)
				if tc.rate > 1<<10 {
					require.NoError(t, err)
					require.Greater(t, time.Since(began), time.Minute)
					return
				}
				require.ErrorContains(t, err, "1024 bytes a second")
				require.Less(t, time.Since(began), 2*time.Minute)
			})
		})
	}
}
