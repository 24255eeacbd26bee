package calling

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

func TestAServerIsToldWhileTheCallersCodeRests(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		chunkIdle, limit time.Duration
		rests            []time.Duration // with no time between them
		signs            int
		over             string
	}{
		"not before a third of what the server waits": {30 * time.Second, 0, []time.Duration{10*time.Second - 1}, 0, ""},
		"then again and again":                        {30 * time.Second, 0, []time.Duration{time.Hour + 1}, 360, ""},
		"each rest is one":                            {30 * time.Second, 0, []time.Duration{9 * time.Second, 9 * time.Second, 19 * time.Second}, 1, ""},
		"more often when the server waits less":       {3 * time.Second, 0, []time.Duration{10*time.Second + 1}, 10, ""},
		"not more often than every 10 s":              {time.Hour, 0, []time.Duration{time.Minute + 1}, 6, ""},
		"nor than a hundred times a second":           {1, 0, []time.Duration{time.Second + 1}, 100, ""},
		"every 10 s if the server does not say":       {0, 0, []time.Duration{time.Minute + 1}, 6, ""},
		"to the limit of one rest":                    {30 * time.Second, time.Minute, []time.Duration{time.Minute - 1, time.Hour}, 10, `idle: nothing from or for tensor "x" in 1m0s`},
		"a limit below the first sign":                {30 * time.Second, time.Second, []time.Duration{time.Hour}, 0, " in 1s"},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			synctest.Test(t, func(t *testing.T) {
				signs, over := 0, []error(nil)
				c := newRestClock("push", "", tc.limit, tc.chunkIdle, func() { signs++ }, func(err error) { over = append(over, err) })
				c.of("x")
				for _, d := range tc.rests {
					c.start()
					<-time.After(d)
					synctest.Wait()
					c.stop()
				}
				<-time.After(time.Hour) // nobody rests
				synctest.Wait()
				require.Equal(t, tc.signs, signs)
				if tc.over == "" {
					require.Empty(t, over)
				} else {
					require.Len(t, over, 1)
					require.ErrorIs(t, over[0], Causes.InputIdle)
					require.ErrorContains(t, over[0], tc.over)
				}
				c.end()
				c.start() // is too late
				<-time.After(time.Hour)
				synctest.Wait()
				require.Equal(t, tc.signs, signs)
			})
		})
	}
}

func TestASlowSignDoesNotHoldUpTheCallersCode(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		signs, told := 0, make(chan struct{})
		c := newRestClock("pull", "", 0, 3*time.Second, func() { signs++; <-told }, nil)
		c.start()
		<-time.After(time.Minute)
		synctest.Wait()
		require.Equal(t, 1, signs, "one at a time")
		began := time.Now()
		c.stop()
		c.start()
		require.Zero(t, time.Since(began))
		close(told)
		<-time.After(3*time.Second + 1)
		synctest.Wait()
		require.Equal(t, 4, signs)
		c.end()
	})
}
