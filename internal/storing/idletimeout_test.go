package storing

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/stream"
)

// restless is a peer that sends nothing in a frame, and reads one, every so often.
type restless struct {
	Conn
	ctx     context.Context
	every   time.Duration
	excused int
}

func (r *restless) Excuse() { r.excused++ }

func (r *restless) Recv() (*frame.Frame, error) {
	select {
	case <-time.After(r.every):
		return new(frame.Frame), nil
	case <-r.ctx.Done():
		return nil, r.ctx.Err()
	}
}

func (r *restless) Send(*frame.Frame, interface{ Release() }) error {
	_, err := r.Recv()
	return err
}

func TestAPeerThatSaysItWaitsIsWaitedForToTheBound(t *testing.T) {
	testkit.Start(t)
	const idle, most = 30 * time.Second, time.Hour
	for name, tc := range map[string]struct {
		kind  serving.Direction
		every time.Duration // a push: between two frames; a pull: between two words
		read  time.Duration // a pull: until a frame is read; 0: never
		ends  time.Duration // after the last move; 0: it does not
		says  string
	}{
		"a push that says so":               {serving.Push, 10 * time.Second, 0, most, "no chunk arrived for 1h0m0s (serve --input-idle)"},
		"a push that says so too rarely":    {serving.Push, idle + 1, 0, idle, "no chunk arrived for 30s, and the client did not say"},
		"a push that says so all the time":  {serving.Push, time.Second, 0, most, "--input-idle"},
		"a pull that says so":               {serving.Pull, 10 * time.Second, 0, most, "not read for 1h0m0s (serve --input-idle)"},
		"a pull that says so too rarely":    {serving.Pull, idle + 1, 0, idle, "not read for 30s;"},
		"a pull that is read in the end":    {serving.Pull, 10 * time.Second, most - 1, 0, ""},
		"a pull that is read just too late": {serving.Pull, 10 * time.Second, most + 1, most, "--input-idle"},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				peer := &restless{ctx: ctx, every: tc.every}
				w := newIdleTimeout(peer, tc.kind, stream.Limits{FirstFrame: stream.Instant(idle), ChunkIdle: stream.Instant(idle), InputIdle: stream.Instant(most)}, cancel)
				for range 2 { // the bound begins anew with each move
					began := time.Now()
					if tc.kind == serving.Push {
						w.begun.Store(true)
						w.rewind()
						for ctx.Err() == nil {
							_, _ = w.Recv()
						}
					} else {
						stop := make(chan struct{})
						said := make(chan struct{})
						go func() {
							defer close(said)
							tick := time.NewTicker(tc.every)
							defer tick.Stop()
							for {
								select {
								case <-tick.C:
									w.waits()
								case <-stop:
									return
								}
							}
						}()
						peer.every = tc.read
						if tc.read == 0 {
							peer.every = 100 * most
						}
						err := w.Send(new(frame.Frame), nil)
						close(stop)
						<-said
						w.waits() // nothing waits to be read any more
						if tc.ends == 0 {
							require.NoError(t, err)
							continue
						}
					}
					require.Error(t, ctx.Err())
					require.Equal(t, tc.ends, time.Since(began))
					require.ErrorContains(t, w.err(), tc.says)
					return
				}
				require.Zero(t, tc.ends)
				require.NoError(t, ctx.Err())
				require.Positive(t, peer.excused)
			})
		})
	}
}
