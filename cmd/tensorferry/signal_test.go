package main

import (
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestASignalRightBehindTheFirstIsTheSameOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		signals := make(chan os.Signal, 2)
		stopped, ended := false, false
		go func() {
			handleSignals(signals, func() { stopped = true })
			ended = true
		}()
		synctest.Wait()
		require.False(t, stopped)
		for _, step := range []struct {
			after time.Duration
			ends  bool
		}{{0, false}, {0, false}, {signalRepeat - 1, false}, {1, true}} {
			<-time.After(step.after)
			signals <- syscall.SIGTERM
			synctest.Wait()
			require.True(t, stopped)
			require.Equal(t, step.ends, ended, "%v", step)
		}
	})
}
