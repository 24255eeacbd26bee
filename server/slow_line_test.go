package server_test

import (
	"context"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/slab"
)

// A push without a session, whose one chunk takes longer than a chunk may.
func TestATricklingPushHoldsMemoryOnlyWhileNobodyWaitsForIt(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		rate int // bytes a second
		wait bool
		code codes.Code
	}{
		"alone":           {2 << 10, false, codes.OK},
		"too slow":        {512, false, codes.DeadlineExceeded},
		"another waiting": {2 << 10, true, codes.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				m := shelf(t, 16*mib)
				f := serve(t, func(c *server.Config) { c.Store = m })
				dialer := grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
					c, err := connect(ctx, addr)
					return testkit.SlowConn{Conn: c, Rate: tc.rate}, err
				})
				conn, err := grpc.NewClient(f.addr, dialer, grpc.WithTransportCredentials(insecure.NewCredentials()))
				require.NoError(t, err)
				defer func() { require.NoError(t, conn.Close()) }()
				s, err := pb.NewTensorServiceClient(conn).PushTensors(t.Context())
				require.NoError(t, err)
				p := &pusher{t: t, stream: s, id: newID()}
				p.send(&pb.Frame{Hello: p.greeting()})
				o := pack("x", testkit.Bytes(mib/2, 1), mib)
				p.announce(o)
				if tc.wait {
					b := f.host.Budget()
					_, _, limit := b.Used()
					ctx, end := context.WithCancel(t.Context())
					holder, waited := slab.NewPrincipal("holder"), make(chan struct{})
					require.NoError(t, b.Acquire(ctx, holder, limit/2))
					go func() { // ends with ctx
						defer close(waited)
						_ = b.Acquire(ctx, slab.NewPrincipal("waiter"), limit/2)
					}()
					defer func() {
						end()
						<-waited
						b.Release(holder, limit/2)
					}()
				}
				p.chunk(o.chunk(0))
				if tc.code == codes.OK {
					p.stored(o)
					return
				}
				st := p.finish()
				require.Equal(t, tc.code, st.Code(), st.Message())
				require.Contains(t, st.Message(), "1024 bytes a second")
			})
		})
	}
}
