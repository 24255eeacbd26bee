package stream

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

// runWorld runs a schedule and returns what went wrong.
func runWorld(choose func(int) int, steps int, keep bool) (problem string, trace []string) {
	var w *world
	defer func() {
		switch r := recover().(type) {
		case nil:
		case fault:
			problem = string(r)
		default:
			if keep {
				fmt.Println(strings.Join(w.trace, "\n"))
			}
			panic(r)
		}
		if w != nil {
			trace = w.trace
		}
	}()
	w = newWorld(choose)
	w.keep = keep
	w.run(steps)
	return "", nil
}

// schedules is how many random schedules TestRandomSchedules runs.
const schedules = 100_000

func TestRandomSchedulesEndBitExactOrWithACode(t *testing.T) {
	n := schedules
	switch {
	case testing.Short():
		n /= 50
	case raceEnabled:
		n /= 20
	}
	const shards = 4
	for shard := range shards {
		t.Run(fmt.Sprintf("shard=%d", shard), func(t *testing.T) {
			t.Parallel()
			for seed := uint64(shard); seed < uint64(n); seed += shards {
				schedule := func(keep bool) (string, []string) {
					r := rand.New(rand.NewPCG(seed, 0))
					return runWorld(r.IntN, int(seed%200), keep)
				}
				if problem, _ := schedule(false); problem != "" {
					_, trace := schedule(true)
					t.Fatalf("seed %d: %s\n%s", seed, problem, strings.Join(trace, "\n"))
				}
			}
		})
	}
}

// FuzzMachine lets the fuzzer make the choices of a world.
func FuzzMachine(f *testing.F) {
	for seed := range uint64(16) {
		r := rand.New(rand.NewPCG(seed, 0))
		script := make([]byte, 40*(seed+1))
		for i := range script {
			script[i] = byte(r.Uint32())
		}
		f.Add(script)
	}
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) > 2000 {
			return
		}
		choices := func() func(int) int {
			rest := script
			return func(n int) int {
				if len(rest) == 0 {
					return 0
				}
				c := int(rest[0]) % n
				rest = rest[1:]
				return c
			}
		}
		if problem, _ := runWorld(choices(), len(script)/2, false); problem != "" {
			_, trace := runWorld(choices(), len(script)/2, true)
			t.Fatalf("%s\n%s", problem, strings.Join(trace, "\n"))
		}
	})
}
