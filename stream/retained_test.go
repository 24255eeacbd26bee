package stream

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/recent"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// number names the i-th of a kind.
func number(kind byte, i int) tensor.ID { return tensor.ID{kind, byte(i), byte(i >> 8), byte(i >> 16)} }

// entries returns as many as may be, of n bytes in all.
func entries(n int) map[string]string {
	m := make(map[string]string)
	for i := range frame.Entries {
		m[fmt.Sprintf("k%03d", i)] = strings.Repeat("v", n/frame.Entries-4)
	}
	return m
}

// heap returns the bytes that are live.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return int64(s.HeapAlloc)
}

// What a peer says that reads nothing of the answers is kept within a bound, whatever
// it says, until the session ends.
func TestWhatAPeerSaysAndDoesNotReadIsKeptWithinABound(t *testing.T) {
	most := int64(terms.DefaultLimits().RetainedBytes()) + pendingControl*640 + pendingBytes + 256<<10
	name := strings.Repeat(`"`, frame.NameBytes) // twice as long when it is quoted
	sound := func(id, call tensor.ID) frame.Desc {
		d := bytesDesc(id, call, frame.AllowanceChunks, 1)
		d.SizeBytes = frame.AllowanceChunks
		return d
	}
	opened := func(i int) frame.Frame {
		id, in := number('c', i), number('t', i)
		return frame.Frame{Calls: []frame.Call{{ID: id, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: in}}}}, Descs: []frame.Desc{sound(in, id)}}
	}
	for what, flood := range map[string]func(i int) frame.Frame{
		"shapes of many axes": func(i int) frame.Frame {
			f := opened(i)
			f.Descs[0].Shape = make(tensor.Shape, 60_000)
			return f
		},
		"failures that say much": func(i int) frame.Frame {
			f := opened(i)
			f.Failures = []frame.Failure{{Tensor: f.Descs[0].Tensor, Code: frame.Aborted, Message: strings.Repeat("x", 60_000)}}
			return f
		},
		"metadata": func(i int) frame.Frame {
			f := opened(i)
			f.Descs[0].Metadata = entries(frame.EntriesBytes)
			f.Cancels = []tensor.ID{f.Calls[0].ID}
			return f
		},
		"metadata of what is refused": func(i int) frame.Frame {
			f := opened(i)
			f.Descs[0].Metadata, f.Descs[0].SizeBytes = entries(frame.EntriesBytes), 5
			return f
		},
		"params": func(i int) frame.Frame {
			f := opened(i)
			f.Calls[0].Params = entries(frame.EntriesBytes)
			f.Cancels = []tensor.ID{f.Calls[0].ID}
			return f
		},
		"names": func(i int) frame.Frame {
			f := opened(i)
			f.Calls[0].Inputs = nil
			for k := range 64 {
				f.Calls[0].Inputs = append(f.Calls[0].Inputs, frame.Binding{Port: fmt.Sprintf("%d%s", k, name[3:]), Tensor: number('u', i*64+k)})
			}
			f.Calls[0].Inputs[63].Port = f.Calls[0].Inputs[0].Port
			return f
		},
		"many inputs, each of many chunks": func(i int) frame.Frame {
			f := opened(i)
			f.Calls[0].Inputs, f.Descs = nil, nil
			for k := range 64 {
				in := number('u', i*64+k)
				f.Calls[0].Inputs = append(f.Calls[0].Inputs, frame.Binding{Port: "x" + fmt.Sprint(k), Tensor: in})
				d := sound(in, f.Calls[0].ID)
				d.Port = "x" + fmt.Sprint(k)
				f.Descs = append(f.Descs, d)
			}
			f.Cancels = []tensor.ID{f.Calls[0].ID}
			return f
		},
	} {
		t.Run(what, func(t *testing.T) {
			m := New(Config{Server: true}, 0)
			require.NoError(t, m.Control(0, &frame.Frame{Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: 1}}))
			mem := make([]byte, 4096)
			before, peak := heap(), int64(0)
			for i := range 3 * pendingControl {
				f := flood(i)
				err := m.Control(0, &f)
				for e, ok := m.Event(); ok; e, ok = m.Event() {
					if e.Kind == EventTensor {
						_ = m.Lend(0, e.Tensor, mem, nil) // its call may have been cancelled by the same frame
					}
				}
				if i%512 == 511 {
					peak = max(peak, heap()-before)
				}
				if err != nil {
					break
				}
			}
			require.Error(t, m.Status().Err, "a peer that reads nothing is sent away at last")
			peak = max(peak, heap()-before)
			t.Logf("%d KiB at most", peak>>10)
			require.Less(t, peak, most)
			runtime.KeepAlive(m)
		})
	}
}

// Calls that say as much as they may are taken until the session's bound, and again
// when some have ended.
func TestCallsThatSayMuchAreRefusedAtTheBoundAndTakenAgainAfter(t *testing.T) {
	m := New(Config{Server: true}, 0)
	require.NoError(t, m.Control(0, &frame.Frame{Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: 1}}))
	call := func(i int) *call {
		require.NoError(t, m.Control(0, &frame.Frame{Calls: []frame.Call{{ID: number('c', i), Model: "m", Params: entries(frame.EntriesBytes), Inputs: []frame.Binding{{Port: "x", Tensor: number('t', i)}}}}}))
		return m.calls.open[number('c', i)]
	}
	var i int
	for i = 0; call(i).done.Code == frame.OK; i++ {
		require.Less(t, i, 64, "nothing is refused")
	}
	refused := m.calls.open[number('c', i)]
	require.Equal(t, frame.ResourceExhausted, refused.done.Code)
	require.Contains(t, refused.done.Message, "the limit of a session's calls is")
	require.NotZero(t, refused.done.RetryAfterMillis)
	require.Zero(t, refused.retained)
	m.Finish(frame.Done{Call: number('c', 0), Code: frame.Aborted, Message: "enough"})
	require.Equal(t, frame.ResourceExhausted, call(i+1).done.Code, "done has not gone")
	for ok := true; ok; {
		_, ok = m.Next(0, new(frame.Frame))
	}
	require.Equal(t, frame.OK, call(i+2).done.Code)
	d := bytesDesc(number('t', 1), number('c', 1), 4, 4)
	d.SizeBytes, d.Metadata = 4, entries(frame.EntriesBytes)
	require.NoError(t, m.Control(0, &frame.Frame{Descs: []frame.Desc{d}}))
	require.Equal(t, frame.ResourceExhausted, m.calls.open[number('c', 1)].done.Code, "metadata count, too")
	require.Empty(t, m.in.tensors)
	require.Empty(t, miscounted(m))
}

// A tensor of a put for which nothing more can be retained fails alone, and may come again.
func TestATensorOfAPutIsRefusedAtTheBoundOfWhatIsRetained(t *testing.T) {
	m := New(Config{Server: true, Stores: true, StoredBytes: 1 << 20}, 0)
	require.NoError(t, m.Control(0, &frame.Frame{
		Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: 1}, Calls: []frame.Call{{ID: number('c', 0), Put: new(frame.Put)}},
	}))
	code := frame.OK
	for i := 0; code == frame.OK; i++ {
		require.Less(t, i, 64, "nothing is refused")
		d := bytesDesc(number('t', i), number('c', 0), 4, 4)
		d.SizeBytes, d.Metadata = 4, entries(frame.EntriesBytes)
		require.NoError(t, m.Control(0, &frame.Frame{Descs: []frame.Desc{d}}))
		for e, ok := m.Event(); ok; e, ok = m.Event() {
			if e.Kind == EventFailed {
				code = e.Code
			}
		}
	}
	require.Equal(t, frame.ResourceExhausted, code)
	require.Equal(t, 1, m.Status().Calls)
	require.Empty(t, miscounted(m))
}

// What a peer says of a failure is cut.
func TestTheTextOfAPeersFailureIsCut(t *testing.T) {
	m := New(Config{Server: true}, 0)
	id, in := number('c', 1), number('t', 1)
	d := bytesDesc(in, id, 4, 4)
	d.SizeBytes = 4
	require.NoError(t, m.Control(0, &frame.Frame{
		Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: 1},
		Calls: []frame.Call{{ID: id, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: in}}}}, Descs: []frame.Desc{d},
		Failures: []frame.Failure{{Tensor: in, Code: frame.Aborted, Message: strings.Repeat("é", frame.FailureTextBytes)}},
	}))
	require.Equal(t, strings.Repeat("é", frame.FailureTextBytes/2), m.calls.open[id].done.Message)
	require.Equal(t, strings.Repeat("é", 1), frame.Clip("éé", 3), "no half of a character")
}

// A session at rest keeps little of what it once was sent, and forgets what ended.
func TestAMachineAtRestKeepsLittle(t *testing.T) {
	const n = 8
	before := heap()
	var all []*Machine
	for range n {
		m := New(Config{Server: true, Limits: Limits{OpenCalls: 500, OpenTensors: 500}}, 0)
		require.NoError(t, m.Control(0, &frame.Frame{Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: 1}}))
		var f frame.Frame
		for i := range 500 {
			id, in := number('c', i), number('t', i)
			d := bytesDesc(in, id, 4, 4)
			d.SizeBytes = 4
			f.Calls = append(f.Calls, frame.Call{ID: id, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: in}}})
			f.Descs = append(f.Descs, d)
			f.Credits = append(f.Credits, frame.Credit{Tensor: number('u', i), Limit: 1})
			f.Cancels = append(f.Cancels, id)
		}
		require.NoError(t, m.Control(0, &f))
		for _, ok := m.Event(); ok; _, ok = m.Event() {
		}
		for ok := true; ok; {
			_, ok = m.Next(0, new(frame.Frame))
		}
		for _, ok := m.Event(); ok; _, ok = m.Event() {
		}
		require.True(t, m.Status().Calls == 0)
		require.Equal(t, recent.Most, m.tombstones.Len())
		require.LessOrEqual(t, m.NextTick(), lateFrames)
		require.NoError(t, m.Tick(m.NextTick()))
		require.Zero(t, m.tombstones.Len())
		require.Equal(t, m.cfg.Limits.SessionIdle, m.NextTick())
		all = append(all, m)
	}
	kept := (heap() - before) / n
	t.Logf("%d bytes each", kept)
	require.Less(t, kept, int64(8<<10))
	runtime.KeepAlive(all)
}

// A frame keeps what the next one will likely need, and no more.
func TestAFrameThatWasFatGivesItsMemoryBack(t *testing.T) {
	f := frame.Frame{Acks: []frame.Ack{{Resend: make([]uint32, 4)}}, Chunk: frame.Chunk{Data: [][]byte{{1}, {2}}}}
	f.Reset()
	require.Equal(t, 1, cap(f.Acks))
	require.Equal(t, 2, cap(f.Chunk.Data))
	require.Nil(t, f.Acks[:1][0].Resend, "or it would be kept")
	require.Nil(t, f.Chunk.Data[:2][1])
	f = frame.Frame{Acks: make([]frame.Ack, 0, frame.KeptParts/2), Calls: make([]frame.Call, frame.KeptParts/2+1), Chunk: frame.Chunk{Data: make([][]byte, frame.KeptViews+1)}}
	f.Reset()
	require.Zero(t, cap(f.Acks)+cap(f.Calls)+cap(f.Chunk.Data))
}
