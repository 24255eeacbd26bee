// Package testkit is what this module's tests share: leak checks that are on by
// default, waiting for a condition, a network in memory, reproducible random data, and
// memory that is gone.
//
// It refuses to wait for a time to pass: Eventually is the one place where a
// test may wait at all. Only tests import it. What Bytes returns is the caller's,
// a mapping the test's.
package testkit

import (
	"encoding/binary"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/tensorferry/tensorferry/slab"
)

const (
	// patience bounds a wait for what must happen. It is far above what any
	// step takes on a loaded machine under the race detector, so that only a
	// hang reaches it.
	patience = 20 * time.Second
	// firstPause and longestPause are the steps of backing off while waiting.
	firstPause   = 50 * time.Microsecond
	longestPause = 10 * time.Millisecond
	// cachedBytes is what a test's pool keeps: enough for reuse to happen.
	cachedBytes = 64 << 20
	// seedVariable names the environment variable that repeats a failed run.
	seedVariable = "TESTKIT_SEED"
)

func init() { slog.SetDefault(slog.New(slog.DiscardHandler)) } // where servers without a log have theirs

// Start begins a test that leaves no goroutine behind: one that runs at the
// test's end and did not run at Start fails it, with its stack. It comes first
// in a test, because cleanups run in reverse order and this one has to see what
// the others leave. A test beside parallel ones cannot use it.
func Start(t testing.TB) {
	t.Helper()
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() {
		if t.Failed() {
			return // what is left behind is a consequence
		}
		var err error
		if !poll(func() bool { err = goleak.Find(before); return err == nil }) {
			t.Error(err)
		}
	})
}

// Pool returns a pool that fails the test when a slab is still handed out at
// its end. A slab that a goroutine is about to release is waited for.
func Pool(t testing.TB) *slab.Pool {
	t.Helper()
	p := slab.NewPool(cachedBytes, slab.System)
	t.Cleanup(func() {
		if t.Failed() {
			return
		}
		var slabs, bytes int64
		if !poll(func() bool { slabs, bytes = p.Live(); return slabs == 0 }) {
			t.Errorf("testkit: %d slabs of %d bytes in all were never released", slabs, bytes)
		}
	})
	return p
}

// Eventually waits until cond holds, and ends the test when that takes longer
// than anything healthy does. what completes "waited in vain for …". cond runs
// on the test's goroutine.
func Eventually(t testing.TB, cond func() bool, what string) {
	t.Helper()
	if !poll(cond) {
		t.Fatalf("testkit: waited in vain for %s", what)
	}
}

// Receive returns what comes from a channel, or its zero value when it is closed. It fails the
// test if nothing comes for a long time.
func Receive[T any](t testing.TB, from <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-from:
	case <-time.After(patience):
		t.Fatalf("testkit: nothing came within %v", patience)
	}
	return v
}

// poll tries cond with growing pauses until it holds or patience ends.
func poll(cond func() bool) bool {
	deadline := time.Now().Add(patience)
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		if cond() {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
		time.Sleep(pause)
	}
}

// Rand returns a random source that differs from run to run. When the test
// fails it logs the seed; TESTKIT_SEED=seed repeats the run. It belongs to one
// goroutine.
func Rand(t testing.TB) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	if text := os.Getenv(seedVariable); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("testkit: %s: %v", seedVariable, err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("testkit: to repeat: %s=%d", seedVariable, seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 0))
}

// Bytes hands over n pseudo-random bytes, the same ones for the same seed on
// every machine. It is safe for concurrent use.
func Bytes(n int, seed uint64) []byte {
	r := rand.NewPCG(seed, 0)
	b := make([]byte, n, n+8)
	for i := 0; i < n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:i+8], r.Uint64())
	}
	return b[:n:n]
}

// Must returns v, and panics if there is an error.
func Must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
