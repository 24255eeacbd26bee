package client

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

// late is a conn whose messages come and go after a while.
type late struct {
	ctx   context.Context
	after time.Duration
}

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
	for name, tc := range map[string]struct {
		after time.Duration // that a message takes
		use   func(c *stallClock) error
		ends  bool
	}{
		"one wait that is long enough": {limit - 1, func(c *stallClock) error { return c.RecvMsg(nil) }, false},
		"one wait too long":            {limit + 1, func(c *stallClock) error { return c.RecvMsg(nil) }, true},
		"a send too long":              {limit + 1, func(c *stallClock) error { return c.SendMsg(nil) }, true},
		"messages that move nothing": {limit/2 + 1, func(c *stallClock) error {
			_ = c.RecvMsg(nil)
			return c.RecvMsg(nil)
		}, true},
		"messages that move": {limit/2 + 1, func(c *stallClock) error {
			_ = c.RecvMsg(nil)
			c.moved()
			return c.RecvMsg(nil)
		}, false},
		"sends": {limit/2 + 1, func(c *stallClock) error {
			_ = c.SendMsg(nil)
			return c.SendMsg(nil)
		}, false},
		"a slow writer of the caller's": {limit/2 - 1, func(c *stallClock) error {
			_ = c.RecvMsg(nil)
			<-time.After(10 * limit)
			return c.RecvMsg(nil)
		}, false},
		"bytes that are gone through in silence": {limit + time.Second - 1, func(c *stallClock) error {
			c.allow(silentRate)
			return c.RecvMsg(nil)
		}, false},
		"and not for longer than they take": {limit + time.Second + 1, func(c *stallClock) error {
			c.allow(silentRate)
			return c.RecvMsg(nil)
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				c := newStallClock(limit, cancel)
				c.Conn = &late{ctx, tc.after}
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
