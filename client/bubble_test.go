package client_test

import (
	"context"
	"net"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

var (
	bubble = testkit.Bubble
	listen = testkit.Listen
)

// connect connects to what listen has returned.
func connect(addr string) (net.Conn, error) { return testkit.Dial(context.Background(), addr) }

// dial is client.Dial for a server of this test.
func dial(addr string, cfg client.Config) (*client.Client, error) {
	if n := testkit.InBubble(); n != nil {
		cfg = cfg.Dialling(n.Dial)
	}
	return client.Dial(addr, cfg)
}
