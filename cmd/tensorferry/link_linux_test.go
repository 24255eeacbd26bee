package main

import (
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/serve"
	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/internal/link/linktest"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// linkGuest is the guest of a link that runs here.
type linkGuest struct {
	*linktest.Guest
	in, out link.Range // of a call
}

// ask asks for something, or makes a call, and returns the answer.
func (g *linkGuest) ask(m link.Message) []byte {
	g.T.Helper()
	g.Send(m)
	for {
		m, err := g.Recv()
		require.NoError(g.T, err)
		if done, ok := m.(*link.Done); ok { // else it tells of a result
			require.Zero(g.T, done.Code, string(done.JSON))
			return done.JSON
		}
	}
}

func (g *linkGuest) verb(text string) []byte {
	g.T.Helper()
	return g.ask(&link.Ask{Head: link.Head{ID: g.ID()}, Millis: 20_000, JSON: []byte(text)})
}

// byLane makes a large call and returns how many bytes the server has received by lanes.
func (g *linkGuest) byLane(connection int) int64 {
	g.T.Helper()
	g.ask(&link.Call{
		Head: link.Head{ID: g.ID()}, Connection: uint32(connection), Millis: 20_000, Model: "echo",
		Inputs: []link.Input{{DType: 6, Shape: []int64{int64(g.in.Len)}, How: link.Whole, Range: g.in}},
		Sinks:  []link.Sink{{Port: "y", How: link.Whole, Range: g.out}},
	})
	var info struct {
		Counters map[string]int64 `json:"counters"`
	}
	require.NoError(g.T, json.Unmarshal(g.verb(fmt.Sprintf(`{"verb":"info","connection":%d}`, connection)), &info))
	require.Contains(g.T, info.Counters, "lane_received_bytes_total")
	return info.Counters["lane_received_bytes_total"]
}

func TestAConnectionOfALinkHasItsLanesOrThoseOfTheFlag(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		flag  int
		says  string
		lanes bool
	}{
		"the default":                {1, ``, true},
		"the flag turns them off":    {-1, ``, false},
		"the guest turns them off":   {1, `,"lanes":0`, false},
		"the guest turns them on":    {-1, `,"lanes":1`, true},
		"the guest says the default": {1, `,"lanes":1`, true},
	} {
		t.Run(name, func(t *testing.T) {
			address := serving(t, "--engine", "cpu")
			host, guest := linktest.Pair(t)
			file, err := host.File()
			require.NoError(t, err)
			fd, err := unix.Dup(int(file.Fd())) // serveLink takes it over
			require.NoError(t, err)
			require.NoError(t, file.Close())
			require.NoError(t, host.Close())
			served := make(chan error, 1)
			go func() { served <- serve.Link(fd, client.Config{Lanes: tc.flag}) }() // ends with the guest
			g := &linkGuest{Guest: guest}
			hello, err := json.Marshal(link.Greeting{Link: link.Version, Version: serve.Version, Role: "client", PID: os.Getpid()})
			require.NoError(t, err)
			g.Send(&link.Hello{JSON: hello})
			linktest.Must[*link.Hello](guest)
			require.JSONEq(t, `{"connection":1}`, string(g.verb(`{"verb":"connect","target":"`+address+`"`+tc.says+`}`)))
			g.in, g.out = g.Put(testkit.Bytes(8<<20, 1)), g.Take(8<<20)
			if tc.lanes { // it is opened beside the first call
				testkit.Eventually(t, func() bool { return g.byLane(1) > 0 }, "a lane")
			} else {
				for range 3 {
					require.Zero(t, g.byLane(1))
				}
			}
			require.Equal(t, g.Bytes(g.in), g.Bytes(g.out))
			g.Close()
			require.NoError(t, <-served)
		})
	}
}
