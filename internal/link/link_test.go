//go:build linux

package link_test

import (
	"context"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/internal/link/linktest"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
)

const mib = 1 << 20

// fixture is a link and its guest. received gets what the host receives, and then the
// error.
type fixture struct {
	*linktest.Guest
	heap     *link.Heap
	pool     *slab.Pool
	quota    *slab.Budget
	conn     *link.Conn
	received chan any
}

func start(t testing.TB, quota int64) *fixture {
	testkit.Start(t)
	host, g := linktest.Pair(t)
	f := &fixture{Guest: g, heap: link.NewHeap(4 * quota), quota: slab.NewBudget("link memory", quota), received: make(chan any, 100)}
	f.pool = slab.NewPool(quota, f.heap)
	f.conn = link.New(host, link.Config{Heap: f.heap, Pool: f.pool, Quota: f.quota})
	go func() { // ends with Close
		for {
			m, err := f.conn.Recv()
			if err != nil {
				f.received <- err
				return
			}
			f.received <- m
		}
	}()
	t.Cleanup(func() {
		f.conn.Close()
		used, _, _ := f.quota.Used()
		slabs, _ := f.pool.Live()
		require.Zero(t, used, "bytes of the quota are still used")
		require.Zero(t, slabs, "blocks are still held")
	})
	return f
}

func (f *fixture) used() int64 { n, _, _ := f.quota.Used(); return n }

func TestMemoryIsSharedOnceAndGivenBack(t *testing.T) {
	f := start(t, 64*mib)
	a, b := f.Take(100), f.Take(5000)
	require.NotEqual(t, a, b)
	big := f.Take(3 * mib)
	require.Equal(t, 3, f.Memories(), "one for each size class")
	require.Equal(t, int64(4096+8192+4*mib), f.used())
	copy(f.Bytes(a), "hello")
	data, block, err := f.conn.Shared(a)
	require.NoError(t, err)
	require.Equal(t, "hello", string(data[:5]))
	f.Give(a, b, big)
	testkit.Eventually(t, func() bool { return f.used() == 4096 }, "what is shared stays")
	c := f.Take(100)
	require.NotEqual(t, a, c, "nobody gets what is still shared")
	block.Release()
	require.Equal(t, a, f.Take(100), "memory is used again")
}

func TestATakeBeyondTheQuotaWaitsOrIsRefused(t *testing.T) {
	f := start(t, 4*mib)
	a := f.Take(3 * mib)
	f.Send(&link.Take{Head: link.Head{ID: 70}, Bytes: 2 * mib, Millis: 20})
	d := linktest.Must[*link.Done](f.Guest)
	require.Equal(t, uint64(70), d.ID)
	require.Equal(t, link.Deadline, d.Code)
	require.Contains(t, string(d.JSON), "link memory budget of 4194304 did not become free")
	f.Send(&link.Take{Head: link.Head{ID: 71}, Bytes: 1 << 63, Millis: 20})
	d = linktest.Must[*link.Done](f.Guest)
	require.Equal(t, link.Exhausted, d.Code)
	require.Contains(t, string(d.JSON), "the budget is 4194304")
	f.Send(&link.Take{Head: link.Head{ID: 72}, Bytes: 2 * mib, Millis: 10_000})
	f.Give(a)
	require.Equal(t, uint64(72), linktest.Must[*link.Give](f.Guest).ID)
}

func TestWhatIsHandedOverComesBack(t *testing.T) {
	f := start(t, 4*mib)
	r := f.Put([]byte("abc"))
	f.Send(&link.Data{Head: link.Head{ID: 1}, Range: r})
	m := (<-f.received).(*link.Data)
	b, err := f.conn.Taken(m.Range)
	require.NoError(t, err)
	require.Equal(t, "abc", string(b.Bytes()[:3]))
	_, err = f.conn.Taken(m.Range)
	require.ErrorIs(t, err, link.ErrMessage, "it is not the guest's any more")
	f.conn.GiveBack(b)
	for len(f.Given) == 0 {
		f.Give(f.Take(1)) // it comes before or after an answer
	}
	require.Equal(t, r.Off, f.Given[0].Off)
}

func TestABlockOfTheHostBecomesTheGuests(t *testing.T) {
	f := start(t, 4*mib)
	freed := make(chan struct{})
	b, err := f.conn.New(context.Background(), nil, 10)
	require.NoError(t, err)
	b.Freed = func() { close(freed) }
	copy(b.Bytes(), "0123456789")
	r := b.Range(10)
	f.conn.Own(b)
	require.NoError(t, f.conn.Send(&link.Result{Announced: link.Announced{How: link.Whole, Range: r}}))
	got := linktest.Must[*link.Result](f.Guest)
	require.Equal(t, "0123456789", string(f.Bytes(got.Range)))
	f.Give(got.Range)
	<-freed
	b, err = f.conn.TryNew(3 * mib)
	require.NoError(t, err)
	require.Nil(t, b, "more than half of the quota")
}

// What a guest must not do, each of which ends the link.
func TestAGuestThatBreaksARuleEndsTheLink(t *testing.T) {
	for name, tc := range map[string]struct {
		do   func(f *fixture, mine link.Range)
		want string
	}{
		"gives what is not there":     {func(f *fixture, _ link.Range) { f.Give(link.Range{Memory: 99, Len: 1}) }, "[0,+1) of memory 99 is not the guest's"},
		"gives twice":                 {func(f *fixture, r link.Range) { f.Give(r, r) }, "is not the guest's"},
		"gives a part":                {func(f *fixture, r link.Range) { r.Off++; r.Len--; f.Give(r) }, "hands over all or nothing"},
		"gives its neighbour":         {func(f *fixture, r link.Range) { r.Off += 4096; f.Give(r) }, "is not the guest's"},
		"gives more than it has":      {func(f *fixture, r link.Range) { r.Len = 1 << 62; f.Give(r) }, "is not the guest's"},
		"gives beyond the memory":     {func(f *fixture, r link.Range) { r.Off = 1<<64 - 4096; f.Give(r) }, "is not the guest's"},
		"gives none":                  {func(f *fixture, r link.Range) { f.Give(link.Range{}) }, "is not the guest's"},
		"sends nothing that is known": {func(f *fixture, _ link.Range) { f.Write([]byte("what is this supposed to be?")) }, "does not begin with its length"},
		"sends an empty packet":       {func(f *fixture, _ link.Range) { f.Write([]byte{}) }, ""},
		"sends a long packet":         {func(f *fixture, _ link.Range) { f.Write(make([]byte, link.PacketBytes+1)) }, "a packet of 65537 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t, 4*mib)
			tc.do(f, f.Put([]byte("mine")))
			err := (<-f.received).(error)
			if tc.want == "" {
				require.ErrorIs(t, err, io.EOF)
				return
			}
			require.ErrorIs(t, err, link.ErrMessage)
			require.ErrorContains(t, err, tc.want)
		})
	}
}

func TestTheEndOfTheGuestFreesWhatItHad(t *testing.T) {
	f := start(t, 4*mib)
	f.Take(mib)
	f.Send(&link.Take{Head: link.Head{ID: 9}, Bytes: 4 * mib, Millis: 60_000}) // waits
	f.Close()
	require.Equal(t, io.EOF, <-f.received)
	f.conn.Close()
	require.Zero(t, f.used())
	b, err := f.conn.New(context.Background(), nil, 1)
	require.NoError(t, err)
	f.conn.Own(b) // released at once
	_, _, err = f.conn.Shared(link.Range{Memory: 1, Len: 1})
	require.ErrorIs(t, err, io.EOF)
}

func TestAMemoryWithoutUsersIsForgotten(t *testing.T) {
	f := start(t, 4*mib)
	f.pool = slab.NewPool(0, f.heap) // keeps nothing
	host, g := linktest.Pair(t)
	c := link.New(host, link.Config{Heap: f.heap, Pool: f.pool, Quota: f.quota})
	defer c.Close()
	go func() {
		for {
			if _, err := c.Recv(); err != nil {
				return
			}
		}
	}()
	r := g.Take(2 * mib)
	require.Equal(t, 1, g.Memories())
	g.Give(r)
	testkit.Eventually(t, func() bool { return f.used() == 0 }, "it is back")
	// What says so has no place among the answers.
	testkit.Eventually(t, func() bool {
		g.Give(g.Take(1))
		return g.Memories() == 1
	}, "the large one is gone")
}

func TestGreet(t *testing.T) {
	const own = "1.2"
	for name, tc := range map[string]struct {
		send func(g *linktest.Guest)
		want string
	}{
		"fits": {func(g *linktest.Guest) {
			g.Send(&link.Hello{JSON: []byte(`{"link":1,"version":"1.2","role":"client","memory":5}`)})
		}, ""},
		"another version": {func(g *linktest.Guest) {
			g.Send(&link.Hello{JSON: []byte(`{"link":1,"version":"1.3","role":"client"}`)})
		}, "version 1.3"},
		"another role": {func(g *linktest.Guest) {
			g.Send(&link.Hello{JSON: []byte(`{"link":1,"version":"1.2","role":"worker"}`)})
		}, "is a worker"},
		"another link": {func(g *linktest.Guest) {
			g.Send(&link.Hello{JSON: []byte(`{"link":2,"version":"1.2","role":"client"}`)})
		}, "link 2"},
		"no json":  {func(g *linktest.Guest) { g.Send(&link.Hello{JSON: []byte(`{`)}) }, "hello: unexpected end"},
		"no hello": {func(g *linktest.Guest) { g.Send(&link.Cancel{}) }, "kind 13 came before hello"},
		"garbage":  {func(g *linktest.Guest) { g.Write([]byte("x")) }, "does not begin with its length"},
		"silence":  {func(*linktest.Guest) {}, "i/o timeout"},
		"nobody":   {func(g *linktest.Guest) { g.Close() }, "EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			host, g := linktest.Pair(t)
			defer func() { _ = host.Close() }()
			tc.send(g)
			wait := time.Minute
			if name == "silence" {
				wait = 10 * time.Millisecond
			}
			guest, err := link.Greet(host, wait, link.Greeting{Version: own, Role: "client"}, func(n int64) int64 { return n + 1 })
			if tc.want != "" {
				require.ErrorContains(t, err, tc.want)
				return
			}
			require.NoError(t, err)
			require.Equal(t, int64(5), guest.Memory)
			require.JSONEq(t, `{"link":1,"version":"1.2","role":"client","memory":6}`, string(linktest.Must[*link.Hello](g).JSON))
		})
	}
}

func TestWatchTellsOfTheEndOfAProcess(t *testing.T) {
	testkit.Start(t)
	cmd := exec.CommandContext(t.Context(), "cat")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	ended := make(chan struct{})
	stop, err := link.Watch(cmd.Process.Pid, func() { close(ended) })
	require.NoError(t, err)
	never, err := link.Watch(os.Getpid(), func() { t.Error("this process has not ended") })
	require.NoError(t, err)
	require.NoError(t, in.Close())
	<-ended
	require.NoError(t, cmd.Wait())
	stop()
	never()
	_, err = link.Watch(1<<30, func() {})
	require.Error(t, err)
}

func TestFromFDRefusesWhatIsNoLink(t *testing.T) {
	fd, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0) // no os.File, which would close it, too
	require.NoError(t, err)
	_, err = link.FromFD(fd)
	require.ErrorContains(t, err, "is not a socket")
	_, err = link.FromFD(1 << 20)
	require.Error(t, err)
}
