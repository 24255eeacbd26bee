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
	"github.com/tensorferry/tensorferry/tensor"
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
	for i := range frameBytes / frame.ValueBytes {
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
		require.LessOrEqual(t, len(f.Calls)*frame.NameBytes, frameBytes+frame.NameBytes)
		require.LessOrEqual(t, len(f.Calls), frameParts)
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
		require.LessOrEqual(t, len(f.Dones), frameParts)
		dones += len(f.Dones)
	}
	require.Equal(t, 500, dones)
	require.True(t, srv.Idle())
}

// A receiver keeps a bounded list of what it has to ask for again.
func TestDamagedChunksThatWaitAreBounded(t *testing.T) {
	_, srv := pair(t, Limits{})
	call, id := tensor.ID{2}, tensor.ID{3}
	const n = chunker.MaxResends + 1
	d := bytesDesc(id, call, n, 1)
	d.SizeBytes = n
	require.NoError(t, srv.Control(0, &frame.Frame{Calls: []frame.Call{{ID: call, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: id}}}}, Descs: []frame.Desc{d}}))
	_, err := srv.Lend(0, id, make([]byte, n))
	require.NoError(t, err)
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

// TestSteadyStateAllocatesNothing moves chunks from one machine to another, with
// credits and acknowledgements back.
func TestSteadyStateAllocatesNothing(t *testing.T) {
	const chunk, region, chunks = 64, 256, 8192
	cli, srv := pair(t, Limits{AllowanceBytes: 1})
	call, id := tensor.ID{2}, tensor.ID{3}
	require.NoError(t, cli.OpenCall(0, frame.Call{ID: call, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: id}}}))
	d := bytesDesc(id, call, chunk*chunks, chunk)
	d.RetainChunks = 8
	require.NoError(t, cli.OpenTensor(0, d))
	data := bytesOf(id, chunk*chunks)
	require.NoError(t, cli.Offer(0, id, 0, data, nil))
	mem := make([]byte, chunk*chunks)
	var there, back frame.Frame
	var claim Claim
	lent, credits, acks, got := 0, 0, 0, 0
	step := func() {
		now := Instant(got)
		there.Reset()
		held, ok := cli.Next(now, &there)
		if ok {
			if err := srv.Control(now, &there); err != nil {
				t.Fatal(err)
			}
		}
		if ok && there.HasChunk() {
			there.Chunk.Sum = codec.CRC32C.Seed(id, there.Chunk.Index)
			for _, v := range there.Chunk.Data {
				there.Chunk.Sum = codec.CRC32C.Update(there.Chunk.Sum, v)
			}
			if place, err := srv.Claim(now, &there.Chunk, &claim); err != nil || !place {
				t.Fatal(place, err)
			}
			sum, failed := claim.Copy(there.Chunk.Data)
			srv.Commit(now, &claim, sum, failed)
			held.Release()
			got++
		}
		for e, ok := srv.Event(); ok; e, ok = srv.Event() {
			if e.Kind == EventRegion || e.Kind == EventTensor {
				if _, err := srv.Lend(now, id, mem[lent:lent+region]); err != nil {
					t.Fatal(err)
				}
				lent += region
			}
		}
		back.Reset()
		if _, ok := srv.Next(now, &back); ok {
			credits += len(back.Credits)
			acks += len(back.Acks)
			if err := cli.Control(now, &back); err != nil {
				t.Fatal(err)
			}
		}
		for _, ok := cli.Event(); ok; _, ok = cli.Event() {
		}
	}
	for range 500 {
		step()
	}
	if n := testing.AllocsPerRun(5000, step); n != 0 {
		t.Errorf("%v allocations per chunk, want 0", n)
	}
	require.Greater(t, got, 5000)
	require.Greater(t, credits, 1000)
	require.Greater(t, acks, 1000)
	require.True(t, bytes.Equal(data[:got/4*region], mem[:got/4*region]))
}

func TestNamesThatAPeerSendsAreChecked(t *testing.T) {
	for name, ok := range map[string]bool{
		"": true, "x": true, "größe 尺寸 😀": true, strings.Repeat("n", frame.NameBytes): true,
		strings.Repeat("n", frame.NameBytes+1): false, "a\nb": false, "\x7f": false, "\x00": false, "\u0085": false, "\xff": false,
	} {
		require.Equal(t, ok, frame.CheckName("port", name) == "", "%q", name)
	}
}

func TestStatsOfSessionsAddUp(t *testing.T) {
	s := Stats{1, 2, 3, 4, 5, 6, 7}
	s.Add(s)
	require.Equal(t, Stats{2, 4, 6, 8, 10, 12, 14}, s)
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
