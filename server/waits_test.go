package server_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

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
