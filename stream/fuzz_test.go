package stream

import (
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/lifecycle"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
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

var schedules = flag.Int("schedules", 20_000, "how many random schedules are run; a tenth of them with -short or the race detector")

func TestRandomSchedulesEndBitExactOrWithACode(t *testing.T) {
	n := *schedules
	if testing.Short() || raceEnabled {
		n /= 10
	}
	// A world is small and gone at once: with a heap of 4 MiB, collections were a quarter of
	// the work.
	percent := debug.SetGCPercent(3200)
	t.Cleanup(func() { debug.SetGCPercent(percent) })
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

// A rogue is a machine whose peer sends whatever it likes, and a program that
// does its part all the same.
type rogue struct {
	t      *testing.T
	m      *Machine
	script []byte
	now    Instant
	closed map[tensor.ID]bool
	offers []*piece
	lent   map[tensor.ID][]*lentMem // by tensor
	left   map[tensor.ID]int        // bytes of it that can be lent
	of     map[tensor.ID]tensor.ID  // its call
	serial byte
}

func (r *rogue) byte() int {
	if len(r.script) == 0 {
		return 0
	}
	b := r.script[0]
	r.script = r.script[1:]
	return int(b)
}

// pick returns one of a few IDs, so that frames meet.
func (r *rogue) pick(kind byte) tensor.ID { return tensor.ID{kind, byte(r.byte() % 6)} }

// any is an ID of any kind, those of this side among them.
func (r *rogue) any() tensor.ID { return r.pick("cttor"[r.byte()%5]) }

func (r *rogue) desc() frame.Desc {
	d := frame.Desc{
		Tensor: r.any(), Call: r.pick('c'), Port: [...]string{"", "a", "b", "\x00"}[r.byte()%4],
		ChunkBytes: uint32(r.byte() % 6), OnAllowance: r.byte()%2 == 0, RetainChunks: uint32(r.byte() % 3),
		Desc: tensor.Desc{DType: tensor.DataType(1 + 5*(r.byte()%4)), Shape: tensor.Shape{int64(r.byte() % 20)}},
	}
	if r.byte()%8 == 7 {
		d.Shape = tensor.Shape{1 << (r.byte() % 64), 1 << (r.byte() % 64), -1}
	}
	if n, err := d.Bytes(); err == nil && r.byte()%8 != 7 {
		d.SizeBytes = uint64(n)
	}
	return d
}

// frame makes a frame of anything.
func (r *rogue) frame() *frame.Frame {
	f := new(frame.Frame)
	for range 1 + r.byte()%4 {
		switch r.byte() % 15 {
		case 12:
			c := frame.Call{ID: r.pick('c'), Put: &frame.Put{All: r.byte()%2 == 0}}
			if r.byte()%4 == 0 {
				c.Put = nil
			}
			if k := r.byte() % 4; k < 2 {
				c.Get = &frame.Get{More: k == 0, Selections: make([]frame.Selection, r.byte()%3)}
			}
			f.Calls = append(f.Calls, c)
		case 13:
			if r.m.cfg.Server {
				f.Ends = append(f.Ends, frame.End{Call: r.pick('c'), Tensors: uint64(r.byte() % 4)})
			}
		case 14:
			f.Summaries = append(f.Summaries, frame.Summary{Call: r.pick('c'), Tensor: r.any(), Code: frame.Code(r.byte() % 3)})
		case 0:
			c := frame.Call{ID: r.pick('c'), Model: [...]string{"m", "m", "m", ""}[r.byte()%4], TimeoutMillis: uint64(r.byte() % 2)}
			for range r.byte() % 4 {
				c.Inputs = append(c.Inputs, frame.Binding{Port: string(rune('a' + r.byte()%3)), Tensor: r.pick('t')})
			}
			if k := r.byte(); k%4 == 0 {
				c.Sequence = &frame.Sequence{ID: r.pick('c'), MaxRows: uint64(k / 4 % 2), End: k/8%2 == 0}
			}
			f.Calls = append(f.Calls, c)
		case 1, 2:
			f.Descs = append(f.Descs, r.desc())
		case 3:
			f.Credits = append(f.Credits, frame.Credit{Tensor: r.any(), Limit: uint32(r.byte()) << (r.byte() % 32)})
		case 4, 5:
			a := frame.Ack{Tensor: r.any(), Below: uint32(r.byte() % 8)}
			for range r.byte() % 3 {
				a.Resend = append(a.Resend, uint32(r.byte())<<(r.byte()%32))
			}
			f.Acks = append(f.Acks, a)
		case 6:
			if r.m.cfg.Server {
				f.Cancels = append(f.Cancels, r.pick('c'))
			}
		case 7:
			f.Failures = append(f.Failures, frame.Failure{Tensor: r.any(), Code: frame.Code(r.byte() % 17), Message: "rogue"})
		case 8:
			if !r.m.cfg.Server {
				d := frame.Done{Call: r.pick('c'), Code: frame.Code(r.byte() % 2 * 3)}
				for range r.byte() % 3 {
					d.Outputs = append(d.Outputs, frame.Binding{Port: "y", Tensor: r.pick('t')})
				}
				f.Dones = append(f.Dones, d)
			}
		case 9:
			if r.byte()%16 == 1 {
				f.Drain = &frame.Drain{Reason: "rogue"}
			}
		case 10:
			if r.byte()%64 == 1 { // ends the session, so not too often
				f.Hello = &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: 1}
			}
		default:
			ch := frame.Chunk{Tensor: r.any(), Index: uint32(r.byte() % 8), Codec: [...]uint8{0, 0, 0, 0, 0, 1, 2, 255}[r.byte()%8]}
			data := bytes.Repeat([]byte{7}, r.byte()%6)
			ch.Data = [][]byte{data}
			ch.Sum = r.m.cfg.Check.Update(r.m.cfg.Check.Seed(ch.Tensor, ch.Index), data)
			switch r.byte() % 8 {
			case 0:
				ch.Sum++
			case 1:
				ch.Index <<= r.byte() % 32
			}
			f.Chunk = ch
		}
	}
	return f
}

func (r *rogue) events() {
	for {
		e, ok := r.m.Event()
		if !ok {
			return
		}
		if e.Kind != EventOpened && r.closed[e.Call] {
			r.t.Fatalf("event %d of call %v after its end", e.Kind, e.Call)
		}
		switch e.Kind {
		case EventTensor:
			r.of[e.Tensor] = e.Call
			r.left[e.Tensor] = int(e.Desc.SizeBytes)
			if e.Desc.OnAllowance {
				r.lend(e.Tensor, int(e.Desc.SizeBytes))
			}
		case EventFailed:
			r.m.Summarize(r.now, frame.Summary{Call: e.Call, Tensor: e.Tensor, Code: e.Code, Message: e.Text})
		case EventWhole:
			if r.byte()%2 == 0 {
				r.m.Summarize(r.now, frame.Summary{Call: e.Call, Tensor: e.Tensor})
			}
		case EventEnd:
			if r.byte()%2 == 0 {
				r.m.Finish(frame.Done{Call: e.Call})
			}
		case EventReady:
			r.work(e.Call)
		case EventClosed:
			r.closed[e.Call] = true
			for id, call := range r.of {
				if call == e.Call {
					for i, l := range r.lent[id] {
						if !l.back {
							r.t.Fatalf("call %v is closed, region %d of %v did not come back", call, i, id)
						}
					}
				}
			}
		}
		r.bounds()
	}
}

func (r *rogue) lend(id tensor.ID, n int) {
	l := &lentMem{mem: make([]byte, n)}
	err := r.m.Lend(r.now, id, l.mem, func(filled bool) {
		if l.back || r.closed[r.of[id]] {
			r.t.Fatalf("memory of %v came back twice, or after the end of its call", id)
		}
		if filled && bytes.ContainsFunc(l.mem, func(b rune) bool { return b != 7 }) {
			r.t.Fatalf("memory of %v came back full with %x", id, l.mem)
		}
		l.back = true
		clear(l.mem)
	})
	if err == nil {
		r.lent[id] = append(r.lent[id], l)
		r.left[id] -= n
	}
}

// work opens a tensor of ours for a call, offers it, and perhaps finishes.
func (r *rogue) work(call tensor.ID) {
	r.serial++
	id := tensor.ID{'o', r.serial % 6}
	if err := r.m.OpenTensor(r.now, frame.Desc{
		Tensor: id, Call: call, Port: "y", ChunkBytes: 2, RetainChunks: uint32(r.byte() % 3),
		Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{9}},
	}); err != nil {
		return
	}
	x := &piece{mem: make([]byte, 9)}
	if err := r.m.Offer(r.now, id, 0, x.mem, func() { x.releases++ }); err == nil {
		r.offers = append(r.offers, x)
	}
	if r.m.cfg.Server && r.byte()%2 == 0 {
		r.m.Finish(frame.Done{Call: call, Outputs: []frame.Binding{{Port: "y", Tensor: id}}})
	}
}

func (r *rogue) cancel(call tensor.ID) {
	if !r.m.cfg.Server {
		r.m.Finish(frame.Done{Call: call, Code: frame.Cancelled, Message: "tired of it"})
	}
}

// bounds checks that nothing has grown past what limits allow.
func (r *rogue) bounds() {
	m := r.m
	most := terms.HeldCalls*m.cfg.Limits.OpenCalls + pendingControl + 16
	if len(m.calls.open) > most || len(m.failures)+len(m.calls.answers) > pendingControl+64 || len(m.in.tensors) > m.cfg.Limits.OpenTensors*(len(m.calls.open)+1) || m.cfg.Server && m.calls.undecided > m.cfg.Limits.OpenCalls+1 {
		r.t.Fatalf("%d calls, %d failures, %d dones, %d incoming, running %d", len(m.calls.open), len(m.failures), len(m.calls.answers), len(m.in.tensors), m.calls.undecided)
	}
	if m.calls.retained > m.cfg.Limits.RetainedBytes() || m.waiting > pendingBytes+64*frame.TextBytes {
		r.t.Fatalf("%d bytes are retained of calls, %d bytes of text wait", m.calls.retained, m.waiting)
	}
	if problem := miscounted(m); problem != "" {
		r.t.Fatal("the machine ", problem)
	}
}

// home checks that all that was lent came back and was not touched after.
func (r *rogue) home() {
	for id, all := range r.lent {
		for i, l := range all {
			if !l.back || !bytes.Equal(l.mem, make([]byte, len(l.mem))) {
				r.t.Fatalf("region %d of %v: back %v, %x", i, id, l.back, l.mem)
			}
		}
	}
}

// FuzzRogueFrames feeds one machine frames of anything: it does not panic, keeps
// within its limits, counts right, and in the end holds nothing.
func FuzzRogueFrames(f *testing.F) {
	for seed := range uint64(16) {
		r := rand.New(rand.NewPCG(seed, 1))
		script := make([]byte, 100*(seed+1))
		for i := range script {
			script[i] = byte(r.Uint32())
		}
		f.Add(seed%2 == 0, script)
	}
	f.Fuzz(func(t *testing.T, server bool, script []byte) {
		if len(script) > 3000 {
			return
		}
		r := &rogue{
			t: t, script: script, closed: map[tensor.ID]bool{}, lent: map[tensor.ID][]*lentMem{}, left: map[tensor.ID]int{}, of: map[tensor.ID]tensor.ID{},
			m: New(Config{Server: server, Session: tensor.ID{1}, Codecs: codec.All(), Stores: true, StoredBytes: 100, OneWay: server && len(script)%8 == 1, Limits: Limits{
				ChunkBytes: 5, AllowanceBytes: 24, TensorBytes: 200, OpenTensors: 3, OpenCalls: 3, InputIdle: rogueIdle,
			}}, 0),
		}
		if err := r.m.Control(0, &frame.Frame{Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: 1, MaxOpenTensors: 2, AllowanceBytes: 10}}); err != nil {
			t.Fatal(err)
		}
		var held []chunker.Releaser
		for len(r.script) > 0 {
			switch op := r.byte() % 16; op {
			case 0:
				if !server {
					c := frame.Call{ID: r.pick('c'), Model: "m", Inputs: []frame.Binding{{Port: "a", Tensor: tensor.ID{'o', r.serial%6 + 1}}}}
					if r.m.OpenCall(r.now, c) == nil {
						r.work(c.ID)
					}
				}
			case 1:
				r.cancel(r.pick('c'))
			case 2:
				if d := (frame.Done{Call: r.pick('c'), Code: frame.Code(r.byte() % 2)}); server {
					r.m.Finish(d)
				}
			case 3:
				id := r.any()
				if r.m.in.tensors[id] != nil {
					r.lend(id, min(r.left[id], r.byte()%6))
				}
			case 4:
				r.now += Instant(r.byte()) * second / 8
				if err := r.m.Tick(r.now); err != nil {
					r.script = nil
				}
				r.events()
				r.rests()
				if r.m.Status().Calls == 0 && r.m.tombstones.Len() == 0 { // what has ended is forgotten: its IDs may be used again
					r.home()
					clear(r.closed)
					clear(r.lent)
					clear(r.of)
				}
			case 5:
				r.m.FailTensor(r.any(), frame.Internal, "cannot take it")
			case 6, 7, 8:
				out := new(frame.Frame)
				if h, ok := r.m.Next(r.now, out); h != nil {
					held = append(held, h)
				} else if !ok && !out.Empty() {
					t.Fatalf("frame %+v, and there is none", out)
				}
				if len(held) > 2 {
					held[0].Release()
					held = held[1:]
				}
			case 9:
				switch r.byte() % 32 {
				case 1:
					r.m.PeerDone(r.now)
				case 2:
					r.m.Waits()
				case 3:
					if err := r.m.Control(r.now, new(frame.Frame)); err != nil {
						t.Fatal(err)
					}
				}
			default:
				in := r.frame()
				err := r.m.Control(r.now, in)
				r.events()
				var c Claim
				if ok, cerr := r.m.Claim(r.now, &in.Chunk, &c); ok {
					if r.byte()%4 == 0 { // something else happens meanwhile
						r.cancel(r.of[in.Chunk.Tensor])
						if server {
							r.m.Finish(frame.Done{Call: r.of[in.Chunk.Tensor], Code: frame.Internal, Message: "broken"})
						}
						r.events()
					}
					got, failed := c.Copy(in.Chunk.Data)
					r.m.Commit(r.now, &c, got, failed)
				} else if cerr != nil && err == nil {
					t.Fatal(cerr)
				}
				if err != nil {
					if r.m.Status().Err == nil {
						t.Fatal("an error that does not last")
					}
					r.script = nil
				}
			}
			r.events()
			r.bounds()
		}
		r.m.Close(frame.Unavailable, "the session has ended")
		r.events()
		r.bounds()
		if n := len(r.m.calls.open) + len(r.m.in.tensors) + len(r.m.out.tensors); n > 0 {
			t.Fatalf("%d calls, %d incoming and %d outgoing tensors are left", len(r.m.calls.open), len(r.m.in.tensors), len(r.m.out.tensors))
		}
		for _, h := range held {
			h.Release()
		}
		for i, x := range r.offers {
			if x.releases != 1 {
				t.Fatalf("offer %d was released %d times", i, x.releases)
			}
		}
		r.home()
	})
}

// rogueIdle is how long the machine of a rogue's peer waits for one that says it is alive.
const rogueIdle = 60 * second

// rests checks that nothing waits for the peer for longer, whatever that says.
func (r *rogue) rests() {
	if r.m.ticked != r.now || r.m.err != nil {
		return
	}
	for _, k := range r.m.calls.open {
		if k.part.Stored() {
			if k.state < lifecycle.Answering && k.owes(r.m.cfg.Server) && r.now >= k.last+rogueIdle {
				r.t.Fatalf("%v rests since %d, it is %d", k.part.ID, k.last, r.now)
			}
			continue
		}
		for _, t := range k.ins {
			if !t.Dead && t.Asm.Held() < t.Limit && r.now >= t.last+rogueIdle {
				r.t.Fatalf("tensor %v rests since %d, it is %d", t.Desc.Tensor, t.last, r.now)
			}
		}
		for _, t := range k.outs {
			if r.m.cfg.Server && !t.Dead && t.Waits() && r.now >= t.last+rogueIdle {
				r.t.Fatalf("result %v rests since %d, it is %d", t.Desc.Tensor, t.last, r.now)
			}
		}
	}
}

// A peer that never reads makes the session end, not grow.
func TestAPeerThatNeverReadsEndsTheSession(t *testing.T) {
	for name, flood := range map[string]func(i int) frame.Frame{
		"unknown tensors": func(i int) frame.Frame {
			return frame.Frame{Credits: []frame.Credit{{Tensor: tensor.ID{9, byte(i), byte(i >> 8)}, Limit: 1}}}
		},
		"calls without a model": func(i int) frame.Frame {
			return frame.Frame{Calls: []frame.Call{{ID: tensor.ID{9, byte(i), byte(i >> 8)}}}}
		},
		"calls of many inputs": func(i int) frame.Frame {
			return frame.Frame{Calls: []frame.Call{{ID: tensor.ID{9, byte(i), byte(i >> 8)}, Model: "m", Inputs: make([]frame.Binding, 1000)}}}
		},
		"calls that end at once": func(i int) frame.Frame {
			return frame.Frame{Calls: []frame.Call{{ID: tensor.ID{9, byte(i), byte(i >> 8)}, Model: "m"}}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := New(Config{Server: true}, 0)
			require.NoError(t, m.Control(0, &frame.Frame{Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: 1}}))
			for i := range pendingControl {
				f := flood(i)
				require.NoError(t, m.Control(0, &f))
				for e, ok := m.Event(); ok; e, ok = m.Event() {
					if e.Kind == EventReady {
						m.Finish(frame.Done{Call: e.Call})
					}
				}
			}
			f := flood(pendingControl)
			err := m.Control(0, &f)
			require.ErrorContains(t, err, "answers wait to be read")
			require.Equal(t, err, m.Status().Err)
			require.LessOrEqual(t, len(m.calls.open)+len(m.failures), pendingControl+1)
			for _, c := range m.calls.open {
				require.Empty(t, c.part.Inputs, "what was refused is not kept")
			}
		})
	}
}

// A client that takes results and never says so is refused, after a while, and
// heard again when its results have expired.
func TestCallsWhoseResultsNobodyAcknowledgesAreBounded(t *testing.T) {
	m := New(Config{Server: true, Limits: Limits{OpenCalls: 2}}, 0)
	require.NoError(t, m.Control(0, &frame.Frame{Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: 1, AllowanceBytes: 1024}}))
	call := func(i int, now Instant) (code frame.Code) {
		code = frame.Aborted // unless a done says otherwise
		id := tensor.ID{'c', byte(i)}
		require.NoError(t, m.Control(now, &frame.Frame{Calls: []frame.Call{{ID: id, Model: "m"}}}))
		for e, ok := m.Event(); ok; e, ok = m.Event() {
			if e.Kind == EventReady {
				out := tensor.ID{'o', byte(i)}
				require.NoError(t, m.OpenTensor(now, frame.Desc{Tensor: out, Call: id, ChunkBytes: 4, Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{4}}}))
				require.NoError(t, m.Offer(now, out, 0, make([]byte, 4), nil))
				m.Finish(frame.Done{Call: id, Outputs: []frame.Binding{{Port: "y", Tensor: out}}})
			}
		}
		for {
			f := new(frame.Frame)
			held, ok := m.Next(now, f)
			if held != nil {
				held.Release()
			}
			for _, d := range f.Dones {
				code = d.Code
			}
			if !ok {
				return code
			}
		}
	}
	for i := range terms.HeldCalls * 2 {
		require.Equal(t, frame.OK, call(i, 0))
	}
	require.Equal(t, frame.ResourceExhausted, call(50, 0))
	require.Equal(t, terms.HeldCalls*2, m.Status().Calls)
	require.NoError(t, m.Tick(31*second))
	require.Zero(t, m.Status().Calls)
	require.Equal(t, frame.OK, call(60, 31*second))
}
