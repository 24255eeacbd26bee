package server_test

import (
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/stream"
)

// saying says something every so often until the server is so much older.
func (f *fixture) saying(t testing.TB, more time.Duration, say func()) {
	t.Helper()
	age := func() int64 {
		info, err := f.server.GetServiceInfo(t.Context(), nil)
		require.NoError(t, err)
		return info.GetUptimeMillis()
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for until := age() + more.Milliseconds(); age() < until; <-tick.C {
		say()
	}
}

// patient serves with small times: for those who say nothing, and for those who say that
// they wait.
func patient(t testing.TB, idle, most time.Duration, change func(*server.Config)) *fixture {
	t.Helper()
	return serve(t, func(c *server.Config) {
		c.Session.ChunkIdle, c.Session.InputIdle = stream.Instant(idle), stream.Instant(most)
		change(c)
	})
}

func TestAPushWhoseClientSaysThatItWaitsIsWaitedForToTheBound(t *testing.T) {
	testkit.Start(t)
	const idle = 500 * time.Millisecond
	for name, most := range map[string]time.Duration{"in time": time.Hour, "too late": 3 * idle} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				m := shelf(t, 16*mib)
				f := patient(t, idle, most, func(c *server.Config) { c.Store = m })
				p := openPush(t, f)
				o := pack("x", testkit.Bytes(2*mib, 1), mib)
				p.announce(o)
				p.chunk(o.chunk(0))
				f.saying(t, 5*idle, func() { p.send(&pb.Frame{}) })
				p.chunk(o.chunk(1))
				if most == time.Hour {
					require.Equal(t, codes.OK, codes.Code(p.summary(o).GetCode()))
					return
				}
				st := p.finish()
				require.Equal(t, codes.DeadlineExceeded, st.Code())
				require.Contains(t, st.Message(), "--input-idle")
				f.isEmpty(t)
			})
		})
	}
}

func TestAPullWhoseClientSaysThatItWaitsIsWaitedFor(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		const idle = 500 * time.Millisecond
		m := shelf(t, 64*mib)
		data := testkit.Bytes(16*mib, 1)
		put(t, m, "x", data)
		log := &notes{}
		f := patient(t, idle, time.Hour, func(c *server.Config) { c.Store, c.Log = m, log.log() })
		h := greeting(newID())
		s := stall(t, f, &pb.PullTensorsRequest{Hello: h, Selections: []*pb.Selection{{Name: "x"}}})
		c := pb.NewTensorServiceClient(f.dial(t)) // it may be another connection
		// Longer than what lies unread keeps its connection.
		f.saying(t, 6*idle, func() {
			state, err := c.GetTransfer(t.Context(), &pb.GetTransferRequest{TransferId: h.SessionId, Waiting: true})
			require.NoError(t, err)
			require.True(t, state.GetOpen())
			require.Empty(t, state.GetTensors())
		})
		p := &pulled{hello: h, descs: map[string]*pb.TensorDesc{}, data: map[string][]byte{}, chunks: map[string][]uint32{}}
		for {
			frame, err := s.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err)
			p.take(t, frame)
		}
		p.status = status.New(codes.OK, "")
		require.Equal(t, digest(data), p.summary(t, "x").GetDigest())
		require.NotContains(t, log.String(), "does not read")
	})
}

func TestAPullThatOnlySaysThatItWaitsEndsAndGivesEverythingBack(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		const idle = 500 * time.Millisecond
		m := shelf(t, 64*mib)
		put(t, m, "x", testkit.Bytes(32*mib, 1))
		log := &notes{}
		f := patient(t, idle, 3*idle, func(c *server.Config) { c.Store, c.Log = m, log.log() })
		id := newID()
		stall(t, f, &pb.PullTensorsRequest{Hello: greeting(id), Selections: []*pb.Selection{{Name: "x"}}})
		c := pb.NewTensorServiceClient(f.dial(t))
		testkit.Eventually(t, func() bool { // it says so for ever
			_, err := c.GetTransfer(t.Context(), &pb.GetTransferRequest{TransferId: id, Waiting: true})
			require.NoError(t, err)
			return strings.Contains(log.String(), "does not read")
		}, "the connection's end")
		state := f.transfer(t, id)
		require.Equal(t, codes.DeadlineExceeded, codes.Code(state.GetCode()))
		saysWhy(t, state.GetMessage(), []string{"--input-idle"})
		remove(t, m, "x")
		testkit.Eventually(t, func() bool { used, _ := m.Used(); return used == 0 }, "what was not read to be free")
		f.isEmpty(t)
	})
}
