//go:build linux

package roads

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

// packets are two sockets, one at each end.
type packets struct {
	*testing.T
	road *Road
	at   [2]net.PacketConn
}

func newPackets(t *testing.T, r *Road) *packets {
	p := &packets{T: t, road: r}
	for i, e := range r.Ends {
		c, err := e.ListenPacket()
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, c.Close()) })
		p.at[i] = c
	}
	return p
}

// send sends numbered packets from an end, and returns what has become of them.
func (p *packets) send(from, count, size int) Counts {
	p.Helper()
	before := p.road.Counts(from)
	for i := range count {
		p.one(from, i, size)
	}
	var c Counts
	testkit.Eventually(p, func() bool {
		c = p.road.Counts(from)
		c.Packets, c.Lost, c.Dropped = c.Packets-before.Packets, c.Lost-before.Lost, c.Dropped-before.Dropped
		return c.Packets+c.Lost+c.Dropped == int64(count)
	}, "every packet to arrive, to be lost or to be dropped")
	return c
}

func (p *packets) one(from, number, size int) {
	p.Helper()
	_, err := p.at[from].WriteTo(binary.LittleEndian.AppendUint64(make([]byte, size-8), uint64(number)), p.at[1-from].LocalAddr())
	require.NoError(p, err)
}

// connect returns both ends of a TCP connection from end 0 to end 1.
func connect(t *testing.T, r *Road) (near, far net.Conn) {
	l, err := r.Ends[1].Listen()
	require.NoError(t, err)
	defer l.Close()
	near, err = r.Ends[0].Dial(t.Context(), l.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, near.Close()) })
	far, err = l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, far.Close()) })
	return near, far
}

func TestARoundTripTakesTwiceTheDelay(t *testing.T) {
	testkit.Start(t)
	r := Start(t, Link{Way: Way{Delay: 20 * time.Millisecond}})
	begin := time.Now()
	near, far := connect(t, r)
	require.GreaterOrEqual(t, time.Since(begin), 40*time.Millisecond)
	begin = time.Now()
	_, err := near.Write([]byte("x"))
	require.NoError(t, err)
	_, err = io.ReadFull(far, make([]byte, 1))
	require.NoError(t, err)
	require.GreaterOrEqual(t, time.Since(begin), 20*time.Millisecond)
	_, err = far.Write([]byte("y"))
	require.NoError(t, err)
	_, err = io.ReadFull(near, make([]byte, 1))
	require.NoError(t, err)
	require.GreaterOrEqual(t, time.Since(begin), 40*time.Millisecond)
}

func TestBytesTakeTheTimeOfTheRate(t *testing.T) {
	testkit.Start(t)
	const count, size, headers = 20, 1000, 28
	r := Start(t, Link{Way: Way{Rate: 1_000_000}})
	begin := time.Now()
	c := newPackets(t, r).send(0, count, size)
	require.Equal(t, int64(count), c.Packets)
	require.GreaterOrEqual(t, time.Since(begin), count*(size+headers)*8*time.Microsecond)
}

func TestLossLosesItsShare(t *testing.T) {
	testkit.Start(t)
	p := newPackets(t, Start(t, Link{Way: Way{Loss: 0.3}}))
	var all Counts
	for range 25 {
		c := p.send(0, 200, 100)
		all.Packets, all.Lost, all.Dropped = all.Packets+c.Packets, all.Lost+c.Lost, all.Dropped+c.Dropped
	}
	require.Zero(t, all.Dropped)
	require.InDelta(t, 0.3*5000, all.Lost, 0.05*5000) // more than seven standard deviations
}

func TestAFullQueueDrops(t *testing.T) {
	testkit.Start(t)
	p := newPackets(t, Start(t, Link{Way: Way{Rate: 1_000_000, Queue: 10 * 1028}}))
	c := p.send(0, 100, 1000)
	require.Positive(t, c.Dropped, "of 100 packets, ten have room")
	require.GreaterOrEqual(t, c.Packets, int64(10))
	require.Zero(t, c.Lost)
}

func TestPacketsAreAsLargeAsTheMTU(t *testing.T) {
	testkit.Start(t)
	p := newPackets(t, Start(t, Link{MTU: 9000}))
	require.Equal(t, int64(1), p.send(0, 1, 9000-28).Packets)
	p = newPackets(t, Start(t, Link{}))
	require.Equal(t, int64(1), p.send(0, 1, 1500-28).Packets)
}

func TestTheCongestionControlIsTheOneAskedFor(t *testing.T) {
	testkit.Start(t)
	for asked, want := range map[string]string{"": "cubic", "reno": "reno"} {
		t.Run(want, func(t *testing.T) {
			r := Start(t, Link{Congestion: asked})
			connect(t, r)
			for _, e := range r.Ends {
				found, err := e.Congestion(t.Context())
				require.NoError(t, err)
				require.Equal(t, map[string]int{want: 1}, found)
			}
		})
	}
}

func TestTheCongestionControlIsReadFromWhatSSPrints(t *testing.T) {
	require.Equal(t, map[string]int{"cubic": 2, "bbr": 1}, congestions([]byte(
		`0      0      192.0.2.1:5201  192.0.2.2:40000	 ts sack cubic wscale:7,7 rto:250 rtt:50.1/0.1
0      12     192.0.2.1:5201  192.0.2.2:40001	 cubic rto:250
0      0      192.0.2.1:5201  192.0.2.2:40002	 ts sack ecn ecnseen bbr wscale:7,7
`)))
	require.Empty(t, congestions(nil))
}

func TestADialIsRefusedAndCancelled(t *testing.T) {
	testkit.Start(t)
	r := Start(t, Link{})
	address := netip.AddrPortFrom(r.Ends[1].Addr, 9).String() // nobody listens there
	_, err := r.Ends[0].Dial(t.Context(), address)
	require.ErrorIs(t, err, unix.ECONNREFUSED)

	r = Start(t, Link{Way: Way{Loss: 1}})
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	failed := make(chan error, 1)
	go func() {
		_, err := r.Ends[0].Dial(ctx, address)
		failed <- err
	}()
	testkit.Eventually(t, func() bool { return r.Counts(0).Lost > 0 }, "the first packet of the connection")
	cancel(enough)
	require.ErrorIs(t, <-failed, enough)
}

func TestARoadWithoutRootHasAUserNamespace(t *testing.T) {
	testkit.Start(t)
	e, err := startEnd(t.Context(), Link{MTU: 1500, Congestion: "cubic"}, addresses[0], true)
	if no := new(UnavailableError); errors.As(err, &no) {
		t.Skip(err)
	}
	require.NoError(t, err)
	out, err := e.Command(t.Context(), "ip", "-o", "addr", "show", device).CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), addresses[0].String())
	require.NoError(t, e.close())
}

func TestCommandsAreNoMoreUrgentThanOthers(t *testing.T) {
	testkit.Start(t)
	r := Start(t, Link{})
	t.Cleanup(func() { require.NoError(t, schedule(unix.SchedAttr{Policy: unix.SCHED_NORMAL})) })
	if err := Hurry(); err != nil {
		t.Skipf("the system refuses it: %v", err)
	}
	out, err := exec.CommandContext(t.Context(), "chrt", "--pid", strconv.Itoa(os.Getpid())).Output()
	require.NoError(t, err)
	require.Contains(t, string(out), "SCHED_RR")
	out, err = r.Ends[0].Command(t.Context(), "sh", "-c", "chrt --pid $$").Output()
	require.NoError(t, err)
	require.Contains(t, string(out), "SCHED_OTHER")
}

func TestNothingIsLeftAfterClose(t *testing.T) {
	testkit.Start(t)
	r := Start(t, Link{})
	c := r.Ends[1].Command(t.Context(), "sh", "-c", "sleep 1000 & sleep 1000")
	require.NoError(t, c.Start())
	namespace := namespaceOf(t, r.Ends[1].holder.Process.Pid)
	testkit.Eventually(t, func() bool { return len(inside(namespace)) == 4 }, "holder, shell and two children")
	require.NoError(t, r.Close())
	require.Error(t, c.Wait())
	require.Empty(t, inside(namespace))
	require.NoError(t, r.Close(), "closing twice")
}

func TestNothingIsLeftAfterAnError(t *testing.T) {
	testkit.Start(t)
	Start(t, Link{}) // or there are none here
	before := children(t)
	_, err := New(t.Context(), Link{Congestion: "nonesuch"})
	require.ErrorContains(t, err, "nonesuch")
	require.Equal(t, before, children(t))
	for what, l := range map[string]Link{
		"MTU":   {MTU: 100},
		"delay": {Way: Way{Delay: time.Hour}},
		"lost":  {Way: Way{Loss: 2}},
		"rate":  {Way: Way{Rate: -1}},
		"queue": {Way: Way{Queue: -1}},
	} {
		_, err := New(t.Context(), l)
		require.ErrorContains(t, err, what)
	}
}

func TestNothingIsLeftWhenTheProgramDies(t *testing.T) {
	const child = "ROADS_TEST_CHILD"
	if os.Getenv(child) != "" {
		r := Start(t, Link{})
		require.NoError(t, r.Ends[0].Command(t.Context(), "sleep", "1000").Start())
		for _, e := range r.Ends {
			fmt.Println(e.holder.Process.Pid)
		}
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	}
	testkit.Start(t)
	Start(t, Link{})
	self, err := os.Executable()
	require.NoError(t, err)
	c := exec.CommandContext(t.Context(), self, "-test.run=^"+t.Name()+"$", "-test.timeout=2m")
	c.Env = append(os.Environ(), child+"=1")
	out, err := c.Output()
	require.Error(t, err)
	var holders [2]int
	_, err = fmt.Sscan(string(out), &holders[0], &holders[1])
	require.NoError(t, err, string(out))
	for _, pid := range holders {
		testkit.Eventually(t, func() bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) }, "the holder to end")
	}
}

func TestASystemWithoutTheToolsSaysSo(t *testing.T) {
	testkit.Start(t)
	t.Setenv("PATH", t.TempDir())
	_, err := New(t.Context(), Link{})
	no := new(UnavailableError)
	require.ErrorAs(t, err, &no)
	require.ErrorContains(t, err, "there is no nsenter command")
}

func TestAQueueIsFirstInFirstOut(t *testing.T) {
	var q queue
	var model []time.Duration
	random := testkit.Rand(t)
	for i := range 10_000 {
		if random.IntN(2) == 0 || i < 500 {
			q.push(packet{due: time.Duration(i)})
			model = append(model, time.Duration(i))
		} else if len(model) > 0 {
			require.Equal(t, model[0], q.pop().due)
			model = model[1:]
		}
		require.Equal(t, len(model) == 0, q.empty())
	}
}

// children returns the processes that this one has started.
func children(t *testing.T) (all []string) {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	require.NoError(t, err)
	for _, task := range tasks {
		text, err := os.ReadFile(task)
		require.NoError(t, err)
		all = append(all, strings.Fields(string(text))...)
	}
	slices.Sort(all)
	return all
}

func namespaceOf(t *testing.T, pid int) string {
	t.Helper()
	of, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
	require.NoError(t, err)
	return of
}
