//go:build linux

package relay_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/internal/link/linktest"
	"github.com/tensorferry/tensorferry/internal/relay"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store/memory"
)

const (
	mib     = 1 << 20
	uint8T  = 6
	patient = 10_000 // milliseconds
	// processors are two: there may be one here.
	processors = 2
)

// fixture is a server, a relay and its guest, with connection 1.
type fixture struct {
	*linktest.Guest
	addr  string
	quota *slab.Budget
	ended chan error
}

func start(t testing.TB, quota int64) *fixture {
	testkit.Start(t)
	host := cpu.NewHost(cpu.HostConfig{MemoryBytes: 256 * mib, Workers: 2})
	models := engine.NewRegistry()
	for _, m := range append(cpu.Builtins(host), cpu.Slow(host)) {
		require.NoError(t, models.Add(m))
	}
	s, err := server.New(server.Config{Models: models, Pool: host.Pool(), Budget: host.Budget(), Store: memory.New(host.Pool(), 64*mib)})
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }() // ends with Close

	before := runtime.GOMAXPROCS(0)
	t.Cleanup(func() { runtime.GOMAXPROCS(before) })
	socket, g := linktest.Pair(t)
	heap := link.NewHeap(2*quota + relay.PiecesBytes)
	f := &fixture{Guest: g, addr: l.Addr().String(), quota: slab.NewBudget("link memory", quota), ended: make(chan error, 1)}
	conn := link.New(socket, link.Config{Heap: heap, Pool: slab.NewPool(quota, heap), Quota: f.quota})
	go func() { // ends with the guest
		f.ended <- relay.Serve(conn, relay.Config{Dial: client.Dial, Processors: processors, Explain: explain, Verbs: map[string]relay.Verb{
			"many": func(_ context.Context, _ *client.Client, args []string, w io.Writer) error {
				return json.NewEncoder(w).Encode(bytes.Repeat([]byte(args[0]), 20))
			},
		}})
		conn.Close()
		close(f.ended)
	}()
	t.Cleanup(func() {
		f.Close()
		for range f.ended { // until it is closed
		}
		used, _, _ := f.quota.Used()
		require.Zero(t, used, "memory of the link is still used")
		s.Close()
		require.NoError(t, <-served)
		models.Close()
		host.Close()
	})
	require.JSONEq(t, `{"connection":1}`, string(f.ask(`{"verb":"connect","target":"`+f.addr+`"}`).JSON))
	return f
}

func explain(err error) relay.Failure {
	f := relay.Failure{Code: 2, Message: err.Error()}
	if e, ok := errors.AsType[*client.Error](err); ok {
		f.Code = uint16(e.Code)
	} else if errors.Is(err, client.ErrInput) {
		f.Code = 3
	}
	return f
}

func (f *fixture) ask(text string) *link.Done {
	f.T.Helper()
	f.Send(&link.Ask{Head: link.Head{ID: f.ID()}, Millis: patient, JSON: []byte(text)})
	return linktest.Must[*link.Done](f.Guest)
}

// one is a call with one input of bytes.
func (f *fixture) one(model string, n int64, in link.Input) *link.Call {
	in.DType, in.Shape = uint8T, []int64{n}
	return &link.Call{Head: link.Head{ID: f.ID()}, Connection: 1, Millis: patient, Model: model, Inputs: []link.Input{in}}
}

// collect takes the results of a call or a pull until done, by name; pieces are given back.
func (f *fixture) collect() (map[string][]byte, *link.Done) {
	f.T.Helper()
	var all [][]byte
	results := make(map[string][]byte)
	result := func(m link.Announced) {
		require.Equal(f.T, len(all), int(m.Result))
		data := make([]byte, m.Shape[0])
		if m.How == link.Whole && m.Range.Len > 0 {
			data = f.Bytes(m.Range)
		}
		all = append(all, data)
		results[m.Name] = data
	}
	for {
		m, err := f.Recv()
		require.NoError(f.T, err)
		switch m := m.(type) {
		case *link.Result:
			result(m.Announced)
		case *link.Region:
			if m.Flags&link.Piece != 0 {
				copy(all[m.Result][m.Offset:], f.Bytes(m.Range))
				f.Give(m.Range)
			}
		case *link.Done:
			for _, a := range m.Results {
				result(a)
			}
			return results, m
		}
	}
}

func TestACallTakesItsInputFromAndPutsItsResultIntoTheLink(t *testing.T) {
	f := start(t, 64*mib)
	for _, n := range []int{0, 1, 4096, 30_000, 3*mib + 1} {
		data := testkit.Bytes(n, 1)
		in := link.Input{How: link.Whole}
		if n > 0 {
			in.Range = f.Put(data)
		}
		c := f.one("echo", int64(n), in)
		c.Flags = link.Regions
		f.Send(c)
		results, done := f.collect()
		require.Zero(t, done.Code, string(done.JSON))
		require.Positive(t, done.Timings[6])
		require.True(t, bytes.Equal(data, results["y"]), n)
	}
}

func TestOneProcessorDoesAFewSmallCallsAndAllDoLargeOnes(t *testing.T) {
	f := start(t, 64*mib)
	for _, tc := range []struct{ n, processors int }{{30_000, 1}, {256 << 10, 1}, {256<<10 + 1, processors}} {
		f.Send(f.one("echo", int64(tc.n), link.Input{How: link.Whole, Range: f.Put(make([]byte, tc.n))}))
		_, done := f.collect()
		require.Zero(t, done.Code, string(done.JSON))
		require.Equal(t, tc.processors, runtime.GOMAXPROCS(0), tc.n)
	}
}

func TestAResultGoesIntoTheRangeOfItsSink(t *testing.T) {
	f := start(t, 64*mib)
	data := testkit.Bytes(5000, 2)
	r := f.Put(data)
	into := f.Take(5000)
	c := f.one("echo", 5000, link.Input{How: link.Whole, Range: r})
	c.Sinks = []link.Sink{{Port: "y", How: link.Whole, Range: into}}
	f.Send(c)
	_, done := f.collect()
	require.Zero(t, done.Code)
	require.Equal(t, data, f.Bytes(into))
}

func TestAnInputInPiecesAndAResultThatDoesNotFitComeInPieces(t *testing.T) {
	f := start(t, 24*mib)
	const n = 40*mib + 7
	c := f.one("echo", n, link.Input{})
	f.Send(c)
	want := testkit.Bytes(n, 3)
	got := make([]byte, n)
	sent, out := 0, 0
	for {
		for out < 8 && sent < n {
			r := f.takeWhile(got, min(mib, n-sent))
			copy(f.Bytes(r), want[sent:])
			f.Send(&link.Data{Head: link.Head{ID: c.ID}, Range: r})
			sent += int(r.Len)
			out++
		}
		m, err := f.RecvOrGiven() // all results may be here
		require.NoError(t, err)
		switch m := m.(type) {
		case *link.Region:
			f.piece(got, m)
		case *link.Done:
			require.Zero(t, m.Code, string(m.JSON))
			require.True(t, bytes.Equal(want, got))
			return
		}
		out -= len(f.Given)
		f.Give(f.Given...)
		f.Given = nil
	}
}

func (f *fixture) piece(into []byte, m *link.Region) {
	require.Equal(f.T, uint8(link.Piece), m.Flags)
	copy(into[m.Offset:], f.Bytes(m.Range))
	f.Give(m.Range)
}

// takeWhile takes a range while regions come.
func (f *fixture) takeWhile(into []byte, n int) link.Range {
	f.Send(&link.Take{Head: link.Head{ID: f.ID()}, Bytes: uint64(n), Millis: patient})
	for {
		m, err := f.Recv()
		require.NoError(f.T, err)
		switch m := m.(type) {
		case *link.Region:
			f.piece(into, m)
		case *link.Give:
			r := m.Ranges[0]
			r.Len = uint64(n)
			return r
		case *link.Done:
			require.Fail(f.T, "over early", string(m.JSON))
		}
	}
}

func TestFailuresSayWhatAndTheNextCallWorks(t *testing.T) {
	f := start(t, 64*mib)
	r := f.Put([]byte("abc"))
	for name, tc := range map[string]struct {
		send func() uint64
		code uint16
		want string
	}{
		"no such model":     {func() uint64 { c := f.one("nix", 3, link.Input{How: link.Whole, Range: r}); f.Send(c); return c.ID }, 5, "nix"},
		"a range too short": {func() uint64 { c := f.one("echo", 4, link.Input{How: link.Whole, Range: r}); f.Send(c); return c.ID }, 3, "needs 4 bytes, got 3"},
		"no data type": {func() uint64 {
			c := f.one("echo", 3, link.Input{How: link.Whole, Range: r})
			c.Inputs[0].DType = 99
			f.Send(c)
			return c.ID
		}, 3, "data type"},
		"no such connection": {func() uint64 {
			c := f.one("echo", 3, link.Input{How: link.Whole, Range: r})
			c.Connection = 9
			f.Send(c)
			return c.ID
		}, 3, "connection 9 is closed"},
		"too much data": {func() uint64 {
			c := f.one("echo", 3, link.Input{})
			f.Send(c)
			f.Send(&link.Data{Head: link.Head{ID: c.ID}, Range: f.Put([]byte("four"))})
			return c.ID
		}, 3, "a piece of 4 bytes after 0 of 3"},
		"cancelled": {func() uint64 {
			c := f.one("echo", 3, link.Input{})
			f.Send(c)
			f.Send(&link.Cancel{Head: link.Head{ID: c.ID}})
			return c.ID
		}, 1, "canceled"},
		"timeout": {func() uint64 {
			c := f.one("echo", 3, link.Input{})
			c.Millis = 50
			f.Send(c)
			return c.ID
		}, 4, ""},
		"no verb": {func() uint64 {
			f.Send(&link.Ask{Head: link.Head{ID: 999}, JSON: []byte(`{"verb":"dance","connection":1}`)})
			return 999
		}, 3, `no verb \"dance\"`},
		"no json": {func() uint64 { f.Send(&link.Ask{Head: link.Head{ID: 998}, JSON: []byte(`nix`)}); return 998 }, 3, "json"},
		"no address": {func() uint64 {
			f.Send(&link.Ask{Head: link.Head{ID: 997}, JSON: []byte(`{"verb":"connect","target":"x"}`)})
			return 997
		}, 3, "host:port"},
		"too many lanes": {func() uint64 {
			f.Send(&link.Ask{Head: link.Head{ID: 995}, JSON: []byte(`{"verb":"connect","target":"x","lanes":65}`)})
			return 995
		}, 3, "lanes is 65; it is 0 to 64"},
		"fewer lanes than none": {func() uint64 {
			f.Send(&link.Ask{Head: link.Head{ID: 994}, JSON: []byte(`{"verb":"connect","target":"x","lanes":-1}`)})
			return 994
		}, 3, "lanes is -1"},
		"lanes that are no number": {func() uint64 {
			f.Send(&link.Ask{Head: link.Head{ID: 993}, JSON: []byte(`{"verb":"connect","target":"x","lanes":"none"}`)})
			return 993
		}, 3, "json"},
		"not in store": {func() uint64 {
			f.Send(&link.Ask{Head: link.Head{ID: 996}, Millis: patient, JSON: []byte(`{"verb":"pull","connection":1,"select":[{"name":"x"}]}`)})
			return 996
		}, 0, `"code":5`},
		"sent too late": {func() uint64 {
			f.Send(&link.Data{Head: link.Head{ID: 12345}, Range: f.Put([]byte("x"))})
			return f.ok()
		}, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			id := tc.send()
			m := linktest.Must[*link.Done](f.Guest)
			require.Equal(t, id, m.ID)
			require.Equal(t, tc.code, m.Code, string(m.JSON))
			require.Contains(t, string(m.JSON), tc.want)
			f.ok()
			linktest.Must[*link.Done](f.Guest)
		})
	}
}

// ok asks for something that works, whose done is the next but for what was begun before.
func (f *fixture) ok() uint64 {
	id := f.ID()
	f.Send(&link.Ask{Head: link.Head{ID: id}, JSON: []byte(`{"verb":"loop","range":[1,2,3]}`)})
	return id
}

func TestPushAndPullByRangeAndInPieces(t *testing.T) {
	f := start(t, 64*mib)
	a, b := testkit.Bytes(10_000, 4), testkit.Bytes(3*mib, 5)
	r := f.Put(a)
	push := link.Ask{Head: link.Head{ID: f.ID(), Flags: link.Regions}, Millis: patient, JSON: fmt.Appendf(nil,
		`{"verb":"push","connection":1,"tensors":[{"name":"a","dtype":"uint8","shape":[10000],"range":[%d,%d,%d]},{"name":"b","dtype":"uint8","shape":[%d]},{"name":"e","dtype":"uint8","shape":[0],"range":[0,0,0]}]}`,
		r.Memory, r.Off, r.Len, len(b))}
	var ranges []link.Range
	for off := 0; off < len(b); off += mib {
		ranges = append(ranges, f.Put(b[off:off+mib]))
	}
	f.Send(&push)
	for _, r := range ranges {
		f.Send(&link.Data{Head: link.Head{ID: push.ID}, Input: 1, Range: r})
	}
	moved := make([]uint64, 3)
	var done *link.Done
	for done == nil {
		m, err := f.Recv()
		require.NoError(t, err)
		if p, ok := m.(*link.Region); ok {
			require.Equal(t, moved[p.Result], p.Offset)
			moved[p.Result] += p.Len
			continue
		}
		done = m.(*link.Done)
	}
	require.Zero(t, done.Code, string(done.JSON))
	require.Contains(t, string(done.JSON), `"digest":"xxh3`)
	require.NotContains(t, string(done.JSON), `"error"`)
	require.Equal(t, []uint64{10_000, 3 * mib, 0}, moved)

	into := f.Take(10_000)
	id := f.ID()
	f.Send(&link.Ask{Head: link.Head{ID: id}, Millis: patient, JSON: fmt.Appendf(nil,
		`{"verb":"pull","connection":1,"select":[{"name":"*"}],"to":{"a":[%d,%d,10000],"b":"pieces"}}`, into.Memory, into.Off)})
	results, done := f.collect()
	require.Zero(t, done.Code, string(done.JSON))
	require.Equal(t, a, f.Bytes(into))
	require.True(t, bytes.Equal(b, results["b"]))
	require.Contains(t, results, "e")
	f.Send(&link.Ask{Head: link.Head{ID: f.ID()}, Millis: patient, JSON: []byte(`{"verb":"pull","connection":1,"select":[{"name":"b"}],"to":"pieces"}`)})
	results, _ = f.collect()
	require.True(t, bytes.Equal(b, results["b"]))
	f.Send(&link.Ask{Head: link.Head{ID: f.ID()}, Millis: patient, JSON: []byte(`{"verb":"pull","connection":1,"select":[{"name":"b"}]}`)})
	results, _ = f.collect()
	require.True(t, bytes.Equal(b, results["b"]))
}

func TestLongJSONTravelsInARange(t *testing.T) {
	f := start(t, 64*mib)
	text := fmt.Appendf(nil, `{"verb":"many","connection":1,"names":["%0*d"]}`, 100_000, 7)
	r := f.Put(text)
	f.Send(&link.Ask{Head: link.Head{ID: f.ID(), Flags: link.Long}, JSON: link.AppendRange(nil, r)})
	done := linktest.Must[*link.Done](f.Guest)
	require.Zero(t, done.Code, string(done.JSON))
	require.Equal(t, uint8(link.Long), done.Flags)
	at := link.LongRange(done.JSON)
	require.Greater(t, len(f.Bytes(at)), mib)
	f.Give(at)
}

func TestWhatIsUnderWayEndsWithItsGuest(t *testing.T) {
	f := start(t, 64*mib)
	f.Send(f.one("echo", 100*mib, link.Input{}))
	for range 10 {
		c := f.one("slow", 10, link.Input{How: link.Whole, Range: f.Put(make([]byte, 10))})
		c.Params = [][2]string{{"delay", "1m"}}
		f.Send(c)
	}
	f.Send(&link.Ask{Head: link.Head{ID: f.ID()}, JSON: []byte(`{"verb":"push","connection":1,"tensors":[{"name":"a","dtype":"uint8","shape":[10000]}]}`)})
	f.Close()
	require.NoError(t, <-f.ended)
}

func TestAGuestThatBreaksARuleIsLeft(t *testing.T) {
	for name, tc := range map[string]struct {
		m    func(f *fixture) link.Message
		want string
	}{
		"a worker's message": {func(*fixture) link.Message { return &link.Answer{} }, "kind 22 is not a client's"},
		"an input of others": {func(f *fixture) link.Message {
			return f.one("echo", 3, link.Input{How: link.Whole, Range: link.Range{Memory: 1, Off: 4096, Len: 3}})
		}, "is not the guest's"},
		"a sink of others": {func(f *fixture) link.Message {
			c := f.one("echo", 0, link.Input{How: link.Whole})
			c.Sinks = []link.Sink{{Port: "y", How: link.Whole, Range: link.Range{Memory: 1, Off: 4096, Len: 3}}}
			return c
		}, "is not the guest's"},
		"data of others": {func(*fixture) link.Message { return &link.Data{Range: link.Range{Memory: 1, Off: 4096, Len: 3}} }, "is not the guest's"},
		"a push of others": {func(f *fixture) link.Message {
			return &link.Ask{Head: link.Head{ID: f.ID()}, JSON: []byte(`{"verb":"push","tensors":[{"dtype":"uint8","shape":[3],"range":[1,4096,3]}]}`)}
		}, "is not the guest's"},
		"long json of others": {func(f *fixture) link.Message {
			return &link.Ask{Head: link.Head{ID: f.ID(), Flags: link.Long}, JSON: link.AppendRange(nil, link.Range{Memory: 1, Off: 4096, Len: 3})}
		}, "is not the guest's"},
		"long json out of it": {func(f *fixture) link.Message {
			r := f.Put([]byte("x"))
			r.Len = 1 << 40
			return &link.Ask{Head: link.Head{ID: f.ID(), Flags: link.Long}, JSON: link.AppendRange(nil, r)}
		}, "not the guest's"},
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t, 64*mib)
			f.Put([]byte("mine"))
			f.Send(tc.m(f))
			err := <-f.ended
			require.ErrorIs(t, err, link.ErrMessage)
			require.ErrorContains(t, err, tc.want)
		})
	}
}

// full has the guest leave so much unread that the relay waits for room in the socket.
func (f *fixture) full() {
	for range 2000 {
		f.Send(&link.Ask{Head: link.Head{ID: f.ID()}, Millis: patient, JSON: []byte(`{"verb":"loop","range":[1,2,3]}`)})
	}
}

func TestALinkEndsThoughItsSocketIsFull(t *testing.T) {
	t.Run("garbage", func(t *testing.T) {
		f := start(t, 64*mib)
		f.full()
		f.Write([]byte("garbage that is no message"))
		require.ErrorIs(t, <-f.ended, link.ErrMessage)
	})
	t.Run("the guest sends no more", func(t *testing.T) {
		f := start(t, 64*mib)
		f.full()
		require.NoError(t, f.Socket.CloseWrite())
		require.NoError(t, <-f.ended)
	})
}

func TestALongAnswerComesThoughTheQuotaIsFull(t *testing.T) {
	f := start(t, 4*mib)
	f.Take(2 * mib)
	f.Take(2 * mib)
	done := f.ask(fmt.Sprintf(`{"verb":"many","connection":1,"names":["%05000d"]}`, 7))
	require.Zero(t, done.Code, string(done.JSON))
	require.Equal(t, uint8(link.Long), done.Flags)
}

func TestAnIDInUseEndsTheLink(t *testing.T) {
	f := start(t, 4*mib)
	r := f.Put([]byte("abc"))
	id := f.ID()
	push := func(tensor string) {
		f.Send(&link.Ask{Head: link.Head{ID: id}, Millis: patient, JSON: []byte(`{"verb":"push","connection":1,"tensors":[` + tensor + `]}`)})
	}
	push(`{"name":"a","dtype":"uint8","shape":[3]}`)
	push(fmt.Sprintf(`{"name":"b","dtype":"uint8","shape":[3],"range":[%d,%d,3]}`, r.Memory, r.Off))
	require.ErrorContains(t, <-f.ended, "is in use")
}
