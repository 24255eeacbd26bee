package server_test

import (
	"math"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// carrier returns what carries n bytes to a model of f, and back from echo, again
// and again.
func carrier(t *testing.T, f *fixture, model string, n int) (carry func()) {
	s := f.session(t, client.Config{})
	x, err := tensor.New(tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{int64(n / 4)}}, make([]byte, n))
	require.NoError(t, err)
	r := client.Request{Model: model, Inputs: []client.Input{client.From("", x)}}
	if model == "echo" {
		r.Results = map[string]client.Sink{"y": client.Into(make([]byte, n))}
	}
	return func() {
		c, err := s.Call(t.Context(), r)
		require.NoError(t, err)
		_, err = c.Wait()
		require.NoError(t, err)
	}
}

func TestATransferAllocatesUnderOnePercentOfItsBytes(t *testing.T) {
	testkit.Start(t)
	if raceEnabled {
		t.Skip("the race detector empties sync.Pool at random")
	}
	f := serve(t, nil)
	const size = 64 * mib
	for model, payload := range map[string]uint64{"sink": size, "echo": 2 * size} {
		carry := carrier(t, f, model, size)
		carry()
		// A collection in between would empty the pools, which tells how often it
		// ran and nothing about us.
		percent := debug.SetGCPercent(-1)
		least := uint64(math.MaxUint64)
		for range 3 {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			carry()
			runtime.ReadMemStats(&after)
			least = min(least, after.TotalAlloc-before.TotalAlloc)
		}
		debug.SetGCPercent(percent)
		t.Logf("%s allocates %d bytes for %d of payload: %.2f %%", model, least, payload, 100*float64(least)/float64(payload))
		require.Less(t, least, payload/100, model)
	}
}

func TestNothingOfOursIsAllocatedPerChunk(t *testing.T) {
	testkit.Start(t)
	if raceEnabled {
		t.Skip("the race detector empties sync.Pool at random")
	}
	rate := runtime.MemProfileRate
	runtime.MemProfileRate = 1
	defer func() { runtime.MemProfileRate = rate }()
	f := serve(t, nil)
	for _, model := range []string{"sink", "echo"} {
		// What a call costs once is in both counts, what a chunk costs is not.
		const few, many = 16, 80
		count := func(chunks int) map[string]int64 {
			carry := carrier(t, f, model, chunks*mib)
			carry()
			percent := debug.SetGCPercent(-1)
			defer debug.SetGCPercent(percent)
			before := allocations()
			carry() // fills the pools, which counting has emptied
			carry()
			after := allocations()
			for where, n := range before {
				after[where] -= n
			}
			return after
		}
		short, long := count(few), count(many)
		for where, n := range long {
			// Tables grow a few times, and the slow timers allocate once a second.
			n -= short[where]
			require.Less(t, n, int64(many-few)/2, "%s: allocations in %s for %d chunks more", model, where, 2*(many-few))
		}
	}
}

// allocations counts what was allocated so far by functions of this module.
func allocations() map[string]int64 {
	runtime.GC() // a profile is as old as the last collection but one
	runtime.GC()
	var records []runtime.MemProfileRecord
	for n, ok := runtime.MemProfile(nil, true); !ok; {
		records = make([]runtime.MemProfileRecord, n+50)
		n, ok = runtime.MemProfile(records, true)
		records = records[:min(n, len(records))]
	}
	const ours = "github.com/tensorferry/tensorferry/"
	count := make(map[string]int64)
	for _, r := range records {
		frames := runtime.CallersFrames(r.Stack())
		for more := true; more; {
			var frame runtime.Frame
			frame, more = frames.Next()
			if name, mine := strings.CutPrefix(frame.Function, ours); mine {
				// The pool that grpc receives into grows with what is in flight: that
				// is grpc's, and in the bytes of the other test.
				if !strings.HasPrefix(name, "server_test") && !strings.HasPrefix(name, "internal/wire.(*buffers") {
					count[name] += r.AllocObjects
				}
				break
			}
			if strings.HasPrefix(frame.Function, "google.golang.org/") {
				break
			}
		}
	}
	return count
}
