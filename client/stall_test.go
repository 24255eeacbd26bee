package client

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/internal/wire"
)

// late is a gRPC stream whose messages come and go after a while.
type late struct {
	ctx   context.Context
	after time.Duration
}

func (l *late) Context() context.Context { return l.ctx }

func (l *late) RecvMsg(any) error {
	select {
	case <-time.After(l.after):
		return nil
	case <-l.ctx.Done():
		return l.ctx.Err()
	}
}

func (l *late) SendMsg(m any) error { return l.RecvMsg(m) }

func TestAStallIsWhatTheServerTakesWithoutMovingAnything(t *testing.T) {
	testkit.Start(t)
	const limit = time.Minute
	send := func(c *stallClock) error { return c.Send(new(frame.Frame), nil) }
	recv := func(c *stallClock) error {
		_, err := c.Recv()
		return err
	}
	for name, tc := range map[string]struct {
		after time.Duration // that a message takes
		use   func(c *stallClock) error
		ends  bool
	}{
		"one wait that is long enough": {limit - 1, recv, false},
		"one wait too long":            {limit + 1, recv, true},
		"a send too long":              {limit + 1, send, true},
		"messages that move nothing": {limit/2 + 1, func(c *stallClock) error {
			_ = recv(c)
			return recv(c)
		}, true},
		"messages that move": {limit/2 + 1, func(c *stallClock) error {
			_ = recv(c)
			c.moved()
			return recv(c)
		}, false},
		"sends": {limit/2 + 1, func(c *stallClock) error {
			_ = send(c)
			return send(c)
		}, false},
		"a slow writer of the caller's": {limit/2 - 1, func(c *stallClock) error {
			_ = recv(c)
			<-time.After(10 * limit)
			return recv(c)
		}, false},
		"bytes that are gone through in silence": {limit + time.Second - 1, func(c *stallClock) error {
			c.allow(silentRate)
			return recv(c)
		}, false},
		"and not for longer than they take": {limit + time.Second + 1, func(c *stallClock) error {
			c.allow(silentRate)
			return recv(c)
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				c := newStallClock(limit, cancel)
				c.Conn = wire.NewConn(&late{ctx, tc.after}, nil)
				err := tc.use(c)
				require.Equal(t, tc.ends, err != nil, "%v", err)
				if tc.ends {
					require.Equal(t, codes.DeadlineExceeded, status.Code(context.Cause(ctx)))
				} else {
					require.NoError(t, ctx.Err())
				}
			})
		})
	}
}
