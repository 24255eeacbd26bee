package worker

import (
	"errors"
	"os"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

func descriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(list)
}

// TestWorkersAreKilledAtAnyTime kills processes at random under calls; WORKER_KILLS says
// how often.
func TestWorkersAreKilledAtAnyTime(t *testing.T) {
	for _, name := range []string{"plus_one", "later", "threads"} {
		t.Run(name, func(t *testing.T) { killWorkers(t, name) })
	}
}

func killWorkers(t *testing.T, name string) {
	testkit.Start(t)
	kills := 10
	if n, err := strconv.Atoi(os.Getenv("WORKER_KILLS")); err == nil {
		kills = n
	}
	rng := testkit.Rand(t)
	before := descriptors(t)
	c := python(t, name)
	c.Processes, c.Log = 2, nil
	h := start(t, c)
	in := vector(100)
	want := in[0].Data[0] + 1
	stop := make(chan struct{})
	var calls sync.WaitGroup
	good := 0
	for i := range 4 {
		calls.Go(func() {
			for seed := uint64(i); ; seed++ {
				select {
				case <-stop:
					return
				default:
				}
				y, err := enginetest.Compute(t.Context(), h.Model(), in, nil, 1<<10, seed)
				switch {
				case err == nil && y[0].Data[0] != want:
					t.Error("a wrong result")
				case err != nil && !errors.Is(err, engine.ErrUnavailable):
					t.Error(err)
				case err == nil && i == 0:
					good++
				}
			}
		})
	}
	for range kills {
		<-time.After(time.Duration(rng.IntN(int(150 * time.Millisecond)))) // at any time: nothing is waited for
		pids := processes(t)
		if len(pids) > 0 {
			if err := syscall.Kill(pids[rng.IntN(len(pids))], syscall.SIGKILL); err != nil {
				require.ErrorIs(t, err, syscall.ESRCH, "it may have ended")
			}
		}
	}
	close(stop)
	calls.Wait()
	testkit.Eventually(t, func() bool { return h.gauges()[0].Value == 2 }, "both processes")
	_, err := enginetest.Compute(t.Context(), h.Model(), in, nil, 1<<10, 0)
	require.NoError(t, err)
	require.NoError(t, h.idle())
	t.Log("calls of the first caller that went well:", good)
	h.Close()
	testkit.Eventually(t, func() bool { return descriptors(t) <= before+2 }, "descriptors")
}

// processes are the children of this one, in whatever state.
func processes(t *testing.T) (pids []int) {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	require.NoError(t, err)
	for _, task := range tasks {
		text, err := os.ReadFile("/proc/self/task/" + task.Name() + "/children")
		if err != nil {
			continue // the thread has ended
		}
		n := 0
		for _, b := range text {
			if b == ' ' {
				pids, n = append(pids, n), 0
			} else {
				n = n*10 + int(b-'0')
			}
		}
	}
	return pids
}
