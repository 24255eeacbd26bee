package folder

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/store/storetest"
)

const (
	// killsVariable says how many processes are killed; without it defaultKills.
	killsVariable = "STORE_KILLS"
	defaultKills  = 10
	// childVariable makes the test binary the process that is killed: its folder
	// and the first version it pushes.
	childVariable = "STORE_CHILD"
)

// version is the n-th content of a tensor: its first 8 bytes are n.
func version(n uint64) []byte {
	size := 8 + int(n*7919%300_000)
	if n%16 == 0 {
		size += writeBack // so that write-back has begun
	}
	data := testkit.Bytes(size, n)
	binary.LittleEndian.PutUint64(data, n)
	return data
}

// TestChild is the process that is killed. After each change it says which, and
// before a deletion too.
func TestChild(t *testing.T) {
	dir, first, ok := strings.Cut(os.Getenv(childVariable), "\n")
	if !ok {
		t.Skip("run by TestWhatWasAcknowledgedSurvivesAKill")
	}
	next, err := strconv.ParseUint(first, 10, 64)
	require.NoError(t, err)
	f := openFolder(t, dir, Config{})
	var wg sync.WaitGroup
	for id := range uint64(2) {
		wg.Go(func() {
			for n := next + id; ; n += 2 {
				name := fmt.Sprintf("%d/%d", id, n/2%5)
				what := "pushed"
				if n/2%7 == 6 {
					fmt.Printf("deleting %s %d\n", name, n)
					what = "deleted"
					_, _ = f.Delete(t.Context(), name) // which may not be there
				} else {
					data := version(n)
					storetest.Push(t, f, name, storetest.Vector(int64(len(data))), data, 64<<10, nil)
				}
				fmt.Printf("%s %s %d\n", what, name, n) // one write, so whole or absent
			}
		})
	}
	wg.Wait()
}

func killsOf(t *testing.T) int {
	text := os.Getenv(killsVariable)
	if text == "" {
		return defaultKills
	}
	kills, err := strconv.Atoi(text)
	require.NoError(t, err)
	return kills
}

func TestWhatWasAcknowledgedSurvivesAKill(t *testing.T) {
	kills := killsOf(t)
	rand := testkit.Rand(t)
	dir := t.TempDir()
	type ack struct {
		deleted bool
		version uint64
	}
	acked := map[string]ack{}       // the last one of each name
	deleting := map[string]uint64{} // the last deletion that began
	next, pushes, temps := uint64(1), 0, 0
	for range kills {
		pushes += runAndKill(t, rand, "TestChild", dir, next, func(what, name string, n uint64) {
			next = max(next, n+1)
			if what == "deleting" {
				deleting[name] = n
				return
			}
			acked[name] = ack{what == "deleted", n}
		})
		for _, name := range filesIn(t, dir) {
			if strings.HasPrefix(name, tempPrefix) {
				temps++
			}
		}
		next += 4 // what was not acknowledged has a version of its own

		var log logged
		f := openFolder(t, dir, Config{Log: log.logger()})
		there := map[string]bool{}
		for _, name := range storetest.Names(t, f) {
			there[name] = true
			got := storetest.Get(t, f, name) // which holds it to its digest
			n := binary.LittleEndian.Uint64(got)
			require.Equal(t, version(n), got)
			last := acked[name]
			require.GreaterOrEqual(t, n, last.version, "%s is older than acknowledged", name)
			require.False(t, last.deleted && n == last.version, "%s is back", name)
		}
		for name, last := range acked {
			if !last.deleted && !there[name] { // it may be gone, but not acknowledged as such
				require.Greater(t, deleting[name], last.version, "%s is lost", name)
			}
		}
		require.Zero(t, log.count(""), "%s", &log.text)
		for _, name := range filesIn(t, dir) {
			require.True(t, isPushedName(name), "%s is left", name)
		}
		require.NoError(t, f.Close())
	}
	t.Logf("%d kills, %d changes acknowledged, %d pushes interrupted", kills, pushes, temps)
}

var setNames = []string{"a", "b", "c", "d", "e"}

// TestSetChild is the process that is killed while it commits sets.
func TestSetChild(t *testing.T) {
	dir, first, ok := strings.Cut(os.Getenv(childVariable), "\n")
	if !ok {
		t.Skip("run by TestASetSurvivesAKillWholeOrNotAtAll")
	}
	next, err := strconv.ParseUint(first, 10, 64)
	require.NoError(t, err)
	f := openFolder(t, dir, Config{})
	for n := next; ; n++ {
		_, err := f.CommitAll(t.Context(), storetest.Begin(t, f, version(n)[:8+n*7919%50_000], setNames...))
		require.NoError(t, err)
		fmt.Printf("pushed set %d\n", n)
	}
}

func TestASetSurvivesAKillWholeOrNotAtAll(t *testing.T) {
	rand := testkit.Rand(t)
	dir := t.TempDir()
	acked, manifests := uint64(0), 0
	next := uint64(1)
	for range killsOf(t) {
		runAndKill(t, rand, "TestSetChild", dir, next, func(_, _ string, n uint64) { acked = n })
		if _, err := os.Stat(filepath.Join(dir, manifestFile)); err == nil {
			manifests++
		}
		var log logged
		f := openFolder(t, dir, Config{Log: log.logger()})
		got := storetest.Get(t, f, setNames[0])
		n := binary.LittleEndian.Uint64(got)
		require.GreaterOrEqual(t, n, acked)
		for _, name := range setNames {
			require.Equal(t, version(n)[:8+n*7919%50_000], storetest.Get(t, f, name), "%s, the first has version %d", name, n)
		}
		next = n + 1
		require.Zero(t, log.count(""), "%s", &log.text)
		for _, name := range filesIn(t, dir) {
			require.True(t, isPushedName(name), "%s is left", name)
		}
		require.NoError(t, f.Close())
	}
	t.Logf("the last of %d sets, %d of them killed with a manifest", acked, manifests)
}

// runAndKill lets a child push until a random moment, and returns how many
// changes it acknowledged.
func runAndKill(t *testing.T, rand *rand.Rand, test, dir string, next uint64, acked func(what, name string, n uint64)) (count int) {
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+test+"$", "-test.timeout=2m")
	child.Env = append(os.Environ(), fmt.Sprintf("%s=%s\n%d", childVariable, dir, next))
	child.Stderr = os.Stderr
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	after, pause := rand.IntN(12), time.Duration(rand.Int64N(int64(5*time.Millisecond)))
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var what, name string
		var n uint64
		if _, err := fmt.Sscanf(lines.Text(), "%s %s %d", &what, &name, &n); err != nil {
			t.Errorf("the child says %q", lines.Text())
			break
		}
		acked(what, name, n)
		if what == "deleting" {
			continue
		}
		if count++; count == after+1 {
			time.AfterFunc(pause, func() { _ = child.Process.Kill() })
		}
	}
	require.Error(t, child.Wait(), "the child ended by itself")
	return count
}
