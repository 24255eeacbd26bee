package stream

import (
	"bytes"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/flow"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

const (
	second      = terms.Second
	millisecond = terms.Millisecond
)

// pair returns two machines that have exchanged hellos.
func pair(t testing.TB, limits Limits) (cli, srv *Machine) {
	t.Helper()
	cli = New(Config{Session: tensor.ID{1}, Limits: limits}, 0)
	srv = New(Config{Server: true, Limits: limits}, 0)
	var there, back frame.Frame
	_, ok := cli.Next(0, &there)
	require.True(t, ok)
	require.NoError(t, srv.Control(0, &there))
	_, ok = srv.Next(0, &back)
	require.True(t, ok)
	require.NoError(t, cli.Control(0, &back))
	return cli, srv
}

func bytesDesc(id, call tensor.ID, n int64, chunk uint32) frame.Desc {
	return frame.Desc{Tensor: id, Call: call, Port: "x", ChunkBytes: chunk, Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{n}}}
}

// A frame may have 64 KiB beside its chunk: what is nearly that long goes alone.
func TestAFrameFullOfPartsCarriesNoChunk(t *testing.T) {
	cli, _ := pair(t, Limits{})
	call, id := tensor.ID{2}, tensor.ID{3}
	require.NoError(t, cli.OpenCall(0, frame.Call{ID: call, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: id}}}))
	require.NoError(t, cli.OpenTensor(0, bytesDesc(id, call, 8, 4)))
	require.NoError(t, cli.Offer(0, id, 0, make([]byte, 8), nil))
	next := func() (calls, descs, bytes int) {
		var f frame.Frame
		held, ok := cli.Next(0, &f)
		require.True(t, ok)
		if held != nil {
			held.Release()
		}
		return len(f.Calls), len(f.Descs), f.Chunk.Len()
	}
	shape := func(calls, descs, bytes int) [3]int { return [3]int{calls, descs, bytes} }
	require.Equal(t, [3]int{1, 1, 4}, shape(next()))
	params := map[string]string{}
	for i := range flow.FrameBytes / frame.ValueBytes {
		params[strconv.Itoa(i)] = strings.Repeat("v", frame.ValueBytes)
	}
	require.NoError(t, cli.OpenCall(0, frame.Call{ID: tensor.ID{4}, Model: "m", Params: params}))
	require.Equal(t, [3]int{1, 0, 0}, shape(next()))
	require.Equal(t, [3]int{0, 0, 4}, shape(next()))
	require.False(t, cli.Pending())
}

// Frames stay within what a receiver takes, however many parts wait.
func TestPartsAreSpreadOverFrames(t *testing.T) {
	cli, srv := pair(t, Limits{OpenTensors: 1000, OpenCalls: 1000})
	for i := range 500 {
		require.NoError(t, cli.OpenCall(0, frame.Call{ID: tensor.ID{2, byte(i), byte(i >> 8)}, Model: strings.Repeat("m", frame.NameBytes)}))
	}
	calls := 0
	for {
		var f frame.Frame
		if _, ok := cli.Next(0, &f); !ok {
			break
		}
		require.LessOrEqual(t, len(f.Calls)*frame.NameBytes, flow.FrameBytes+frame.NameBytes)
		require.LessOrEqual(t, len(f.Calls), 64)
		calls += len(f.Calls)
		require.NoError(t, srv.Control(0, &f))
	}
	require.Equal(t, 500, calls)
	srv.Drain("enough")
	for i := range 500 {
		srv.Finish(frame.Done{Call: tensor.ID{2, byte(i), byte(i >> 8)}})
	}
	dones := 0
	for {
		var f frame.Frame
		if _, ok := srv.Next(0, &f); !ok {
			break
		}
		require.LessOrEqual(t, len(f.Dones), 64)
		dones += len(f.Dones)
	}
	require.Equal(t, 500, dones)
	require.True(t, srv.Status().Calls == 0)
}

// A receiver keeps a bounded list of what it has to ask for again.
func TestDamagedChunksThatWaitAreBounded(t *testing.T) {
	_, srv := pair(t, Limits{})
	call, id := tensor.ID{2}, tensor.ID{3}
	const n = chunker.MaxResends + 1
	d := bytesDesc(id, call, n, 1)
	d.SizeBytes = n
	require.NoError(t, srv.Control(0, &frame.Frame{Calls: []frame.Call{{ID: call, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: id}}}}, Descs: []frame.Desc{d}}))
	require.NoError(t, srv.Lend(0, id, make([]byte, n), nil))
	for i := range uint32(n) {
		var c Claim
		ok, err := srv.Claim(0, &frame.Chunk{Tensor: id, Index: i, Data: [][]byte{{1}}}, &c)
		require.NoError(t, err)
		require.True(t, ok)
		got, failed := c.Copy([][]byte{{1}})
		srv.Commit(0, &c, got, failed)
	}
	var f frame.Frame
	_, ok := srv.Next(0, &f)
	require.True(t, ok)
	require.Len(t, f.Dones, 1)
	require.Equal(t, frame.DataLoss, f.Dones[0].Code)
	require.Contains(t, f.Dones[0].Message, "1025 chunks")
}

// A sender does, too, whatever it is asked for.
func TestResendsAPeerAsksForAreBounded(t *testing.T) {
	cli, _ := pair(t, Limits{})
	call, id := tensor.ID{2}, tensor.ID{3}
	const n = chunker.MaxResends + 1
	require.NoError(t, cli.OpenCall(0, frame.Call{ID: call, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: id}}}))
	require.NoError(t, cli.OpenTensor(0, bytesDesc(id, call, n, 1)))
	released := 0
	require.NoError(t, cli.Offer(0, id, 0, make([]byte, n), func() { released++ }))
	for {
		var f frame.Frame
		held, ok := cli.Next(0, &f)
		if !ok {
			break
		}
		held.Release()
	}
	a := frame.Ack{Tensor: id}
	for i := range uint32(n) {
		a.Resend = append(a.Resend, n-1-i)
	}
	require.NoError(t, cli.Control(0, &frame.Frame{Acks: []frame.Ack{a}}))
	var closed *frame.Done
	for e, ok := cli.Event(); ok; e, ok = cli.Event() {
		if e.Kind == EventClosed {
			closed = e.Done
		}
	}
	require.NotNil(t, closed)
	require.Equal(t, frame.InvalidArgument, closed.Code)
	require.Equal(t, 1, released)
}

// upload moves chunks of one tensor from one machine to another, with credits and
// acknowledgements back.
type upload struct {
	cli, srv    *Machine
	id          tensor.ID
	data, mem   []byte
	there, back frame.Frame
	claim       Claim
	full        func(filled bool)
	lent        int
	got         int // chunks
	credits     int
	acks        int
}

const flowChunk, flowRegion = 64, 256 // bytes

func newUpload(t testing.TB, chunks int) *upload {
	x := &upload{id: tensor.ID{3}}
	x.cli, x.srv = pair(t, Limits{AllowanceBytes: 1})
	call := tensor.ID{2}
	require.NoError(t, x.cli.OpenCall(0, frame.Call{ID: call, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: x.id}}}))
	d := bytesDesc(x.id, call, int64(flowChunk*chunks), flowChunk)
	d.RetainChunks = 8
	require.NoError(t, x.cli.OpenTensor(0, d))
	x.data, x.mem = bytesOf(x.id, d.Shape[0]), make([]byte, d.Shape[0])
	require.NoError(t, x.cli.Offer(0, x.id, 0, x.data, nil))
	return x
}

// lend lends the next region, when the one before is full.
func (x *upload) lend(t testing.TB) {
	if x.lent == len(x.mem) {
		return
	}
	if err := x.srv.Lend(Instant(x.got), x.id, x.mem[x.lent:x.lent+flowRegion], x.full); err != nil {
		t.Fatal(err)
	}
	x.lent += flowRegion
}

// step moves at most one chunk.
func (x *upload) step(t testing.TB) {
	now := Instant(x.got)
	x.there.Reset()
	held, ok := x.cli.Next(now, &x.there)
	if ok {
		if err := x.srv.Control(now, &x.there); err != nil {
			t.Fatal(err)
		}
	}
	if c := &x.there.Chunk; ok && x.there.HasChunk() {
		c.Sum = codec.CRC32C.Seed(x.id, c.Index)
		for _, v := range c.Data {
			c.Sum = codec.CRC32C.Update(c.Sum, v)
		}
		if place, err := x.srv.Claim(now, c, &x.claim); err != nil || !place {
			t.Fatal(place, err)
		}
		sum, failed := x.claim.Copy(c.Data)
		x.srv.Commit(now, &x.claim, sum, failed)
		held.Release()
		x.got++
	}
	for e, ok := x.srv.Event(); ok; e, ok = x.srv.Event() {
		if e.Kind == EventTensor {
			x.full = func(filled bool) { x.lend(t) }
			x.lend(t)
		}
	}
	x.back.Reset()
	if _, ok := x.srv.Next(now, &x.back); ok {
		x.credits += len(x.back.Credits)
		x.acks += len(x.back.Acks)
		if err := x.cli.Control(now, &x.back); err != nil {
			t.Fatal(err)
		}
	}
	for _, ok := x.cli.Event(); ok; _, ok = x.cli.Event() {
	}
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	x := newUpload(t, 8192)
	for range 500 {
		x.step(t)
	}
	if n := testing.AllocsPerRun(5000, func() { x.step(t) }); n != 0 {
		t.Errorf("%v allocations per chunk, want 0", n)
	}
	require.Greater(t, x.got, 5000)
	require.Greater(t, x.credits, 1000)
	require.Greater(t, x.acks, 1000)
	n := x.got / 4 * flowRegion
	require.True(t, bytes.Equal(x.data[:n], x.mem[:n]))
}

// BenchmarkChunk moves chunks of one tensor, four to a piece of lent memory.
func BenchmarkChunk(b *testing.B) {
	x := newUpload(b, 4*(b.N/2+8))
	b.ReportAllocs()
	b.SetBytes(flowChunk)
	for b.ResetTimer(); x.got < b.N; {
		x.step(b)
	}
}

func TestNamesThatAPeerSendsAreChecked(t *testing.T) {
	for name, ok := range map[string]bool{
		"": true, "x": true, "größe 尺寸 😀": true, strings.Repeat("n", frame.NameBytes): true,
		strings.Repeat("n", frame.NameBytes+1): false, "a\nb": false, "\x7f": false, "\x00": false, "\u0085": false, "\xff": false,
	} {
		require.Equal(t, ok, frame.CheckName("port", name) == "", "%q", name)
	}
}

func TestAFrameIsEmptyAfterReset(t *testing.T) {
	f := frame.Frame{
		Hello: &frame.Hello{}, Calls: make([]frame.Call, 1, 8), Descs: make([]frame.Desc, 1), Credits: make([]frame.Credit, 1), Acks: make([]frame.Ack, 1),
		Cancels: make([]tensor.ID, 1), Failures: make([]frame.Failure, 1), Dones: make([]frame.Done, 1), Drain: &frame.Drain{}, Chunk: frame.Chunk{Tensor: tensor.ID{1}},
	}
	require.False(t, f.Empty())
	f.Reset()
	require.True(t, f.Empty())
	require.Equal(t, 8, cap(f.Calls))
}

// BenchmarkCall opens and ends calls with one small input and one small result.
func BenchmarkCall(b *testing.B) {
	cli, srv := pair(b, Limits{})
	in, out := make([]byte, 64), make([]byte, 64)
	var f frame.Frame
	var claim Claim
	move := func(from, to *Machine) {
		for {
			f.Reset()
			held, ok := from.Next(0, &f)
			if !ok {
				return
			}
			require.NoError(b, to.Control(0, &f))
			lendAll(to, in)
			if f.HasChunk() {
				f.Chunk.Sum = codec.CRC32C.Update(codec.CRC32C.Seed(f.Chunk.Tensor, f.Chunk.Index), f.Chunk.Data[0])
				_, err := to.Claim(0, &f.Chunk, &claim)
				require.NoError(b, err)
				sum, failed := claim.Copy(f.Chunk.Data)
				to.Commit(0, &claim, sum, failed)
				held.Release()
				lendAll(to, in)
			}
		}
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		call, x, y := number('c', i), number('x', i), number('y', i)
		require.NoError(b, cli.OpenCall(0, frame.Call{ID: call, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: x}}}))
		require.NoError(b, cli.OpenTensor(0, bytesDesc(x, call, 64, 64)))
		require.NoError(b, cli.Offer(0, x, 0, out, nil))
		move(cli, srv)
		require.NoError(b, srv.OpenTensor(0, bytesDesc(y, call, 64, 64)))
		require.NoError(b, srv.Offer(0, y, 0, out, nil))
		srv.Finish(frame.Done{Call: call, Outputs: []frame.Binding{{Port: "x", Tensor: y}}})
		move(srv, cli)
		require.NoError(b, cli.Tick(cli.NextTick())) // acknowledgements
		move(cli, srv)
	}
}

// lendAll takes a machine's events and lends mem to what is announced.
func lendAll(m *Machine, mem []byte) {
	for e, ok := m.Event(); ok; e, ok = m.Event() {
		if e.Kind == EventTensor {
			_ = m.Lend(0, e.Tensor, mem, nil)
		}
	}
}

func TestAPutThatIsSentAgainWithOtherContentFails(t *testing.T) {
	call, id := tensor.ID{2}, tensor.ID{3}
	d := frame.Desc{Tensor: id, Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{4}}, SizeBytes: 4, ChunkBytes: 1, Call: call, Name: "x"}
	other := d
	other.Name = "y"
	for name, again := range map[string]*frame.Frame{
		"all":          {Calls: []frame.Call{{ID: call, Put: &frame.Put{All: true}}}},
		"a get":        {Calls: []frame.Call{{ID: call, Get: &frame.Get{Selections: []frame.Selection{{Name: "x"}}}}}},
		"params":       {Calls: []frame.Call{{ID: call, Put: &frame.Put{}, TimeoutMillis: 9}}},
		"another name": {Descs: []frame.Desc{other}},
	} {
		t.Run(name, func(t *testing.T) {
			m := New(Config{Server: true, Stores: true, StoredBytes: 1 << 20}, 0)
			require.NoError(t, m.Control(0, &frame.Frame{
				Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: 1},
				Calls: []frame.Call{{ID: call, Put: &frame.Put{}}}, Descs: []frame.Desc{d},
			}))
			require.NoError(t, m.Control(1, again))
			failed := false
			for e, ok := m.Event(); ok; e, ok = m.Event() {
				failed = failed || e.Code == frame.InvalidArgument
			}
			require.True(t, failed, "it is ignored")
		})
	}
}

// The tensors of a get come from the server: what a client announces for one leaves nothing.
func TestADescOfAGetIsRefused(t *testing.T) {
	m := New(Config{Server: true, Stores: true, StoredBytes: 1 << 20}, 0)
	get := tensor.ID{2}
	require.NoError(t, m.Control(0, &frame.Frame{
		Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: 1},
		Calls: []frame.Call{{ID: get, Get: &frame.Get{Selections: []frame.Selection{{Name: "x"}}}}},
	}))
	for i := range 100 {
		id := tensor.ID{3, byte(i)}
		require.NoError(t, m.Control(1, &frame.Frame{Descs: []frame.Desc{{
			Tensor: id, Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{4}}, SizeBytes: 4, ChunkBytes: 1, Call: get, Name: "x",
		}}}))
		for e, ok := m.Event(); ok; e, ok = m.Event() {
			require.NotEqual(t, EventFailed, e.Kind)
		}
		var f frame.Frame
		for held, ok := m.Next(1, &f); ok && len(f.Failures) == 0; held, ok = m.Next(1, &f) {
			require.Nil(t, held)
		}
		require.Len(t, f.Failures, 1)
		require.Equal(t, frame.InvalidArgument, f.Failures[0].Code)
		require.Equal(t, id, f.Failures[0].Tensor)
	}
}

// A client cannot keep a get open with empty parts.
func TestAGetOfEmptyPartsExpires(t *testing.T) {
	for name, more := range map[string]frame.Get{"empty": {More: true}, "with a selection": {More: true, Selections: []frame.Selection{{Name: "y"}}}} {
		t.Run(name, func(t *testing.T) {
			m := New(Config{Server: true, Stores: true}, 0)
			get := tensor.ID{2}
			require.NoError(t, m.Control(0, &frame.Frame{
				Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: 1},
				Calls: []frame.Call{{ID: get, Get: &frame.Get{More: true, Selections: []frame.Selection{{Name: "x"}}}}},
			}))
			var ended frame.Code
			for now := Instant(0); now <= 40*second; now += second {
				require.NoError(t, m.Control(now, &frame.Frame{Calls: []frame.Call{{ID: get, Get: &more}}}))
				require.NoError(t, m.Tick(now))
				var f frame.Frame
				for _, ok := m.Next(now, &f); ok && len(f.Dones) > 0; _, ok = m.Next(now, &f) {
					ended = f.Dones[0].Code
					f.Reset()
				}
			}
			require.Equal(t, len(more.Selections) == 0, ended == frame.DeadlineExceeded)
		})
	}
}

// A client that gives up a tensor, or acknowledges more than was sent, is not told that it has it.
func TestATensorOfAGetThatItsClientGaveUpDoesNotEndWell(t *testing.T) {
	for name, tc := range map[string]struct {
		given *frame.Frame
		code  frame.Code
	}{
		"a failure":   {&frame.Frame{Failures: []frame.Failure{{Tensor: tensor.ID{3}, Code: frame.DataLoss}}}, frame.DataLoss},
		"a wrong ack": {&frame.Frame{Acks: []frame.Ack{{Tensor: tensor.ID{3}, Below: 9}}}, frame.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			m := New(Config{Server: true, Stores: true, StoredBytes: 1 << 20}, 0)
			get, id := tensor.ID{2}, tensor.ID{3}
			require.NoError(t, m.Control(0, &frame.Frame{
				Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: 1, MaxChunkBytes: 1 << 20, MaxOpenTensors: 8},
				Calls: []frame.Call{{ID: get, Get: &frame.Get{Selections: []frame.Selection{{Name: "x"}}}}},
			}))
			require.NoError(t, m.OpenTensor(0, frame.Desc{
				Tensor: id, Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{4}}, ChunkBytes: 1, Call: get, Name: "x",
			}))
			require.NoError(t, m.Offer(0, id, 0, make([]byte, 4), func() {}))
			m.Summarize(0, frame.Summary{Call: get, Tensor: id, Name: "x"})
			var f frame.Frame
			_, ok := m.Next(0, &f) // hello, and the desc: it has no credit
			require.True(t, ok)
			require.NoError(t, m.Control(1, tc.given))
			for f.Reset(); len(f.Summaries) == 0; f.Reset() {
				_, ok = m.Next(1, &f)
				require.True(t, ok)
				if len(f.Summaries) > 0 {
					break
				}
			}
			require.Equal(t, tc.code, f.Summaries[0].Code)
			require.Zero(t, f.Summaries[0].Digest)
		})
	}
}
