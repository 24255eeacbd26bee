package server_test

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

// scene is a call that has come to one of its phases.
type scene struct {
	*fixture
	phase string
	t     *testing.T
	gate  *gate
	proxy *proxy
	raw   *raw
	offer *offer
	told  bool // done has come
}

// reached waits for a phase, or for the call's end: a slow machine may take longer
// to the phase than to a timeout.
func (s *scene) reached(cond func() bool, what string) {
	s.t.Helper()
	testkit.Eventually(s.t, func() bool { return cond() || s.counters(s.t)["calls"] == 0 }, what)
}

// phases bring a call of the model "gate", 6 blocks of a chunk each, to where
// something happens to it.
var phases = []struct {
	name  string
	reach func(s *scene)
	// complete does what is missing for the call to end well.
	complete func(s *scene)
}{
	{"before desc", func(s *scene) {
		s.raw.send(&pb.Frame{Calls: []*pb.Call{s.offer.call}})
		testkit.Eventually(s.t, func() bool { return s.counters(s.t)["calls_total"] == 1 }, "the call")
	}, func(s *scene) {
		s.raw.send(&pb.Frame{Descs: []*pb.TensorDesc{s.offer.desc}})
		close(s.gate.open)
		s.raw.deliver(s.offer)
	}},
	{"before chunks", func(s *scene) {
		s.raw.open(s.offer)
		s.raw.credit(s.offer.desc.TensorId, 1)
	}, func(s *scene) {
		close(s.gate.open)
		s.raw.deliver(s.offer)
	}},
	{"amid chunks", func(s *scene) {
		s.raw.open(s.offer)
		s.raw.credit(s.offer.desc.TensorId, 2)
		s.raw.send(&pb.Frame{Chunk: s.raw.chunk(s.offer, 0)})
		s.raw.send(&pb.Frame{Chunk: s.raw.chunk(s.offer, 1)})
		s.reached(func() bool { return s.gate.started.Load() == 2 }, "two blocks computing")
	}, func(s *scene) {
		close(s.gate.open)
		s.raw.deliver(s.offer) // the first two are duplicates
	}},
	{"computing", func(s *scene) {
		s.raw.open(s.offer)
		s.raw.deliver(s.offer)
		s.reached(func() bool { return s.gate.started.Load() == 2 && s.counters(s.t)["received_chunks_total"] == 6 }, "the input")
	}, func(s *scene) {
		close(s.gate.open)
	}},
	{"results without credit", func(s *scene) {
		close(s.gate.open)
		s.raw.hold = true
		s.raw.open(s.offer)
		s.raw.deliver(s.offer)
		s.raw.until(func() bool { return len(s.raw.results)+len(s.raw.dones) > 0 })
	}, func(s *scene) {
		s.raw.hold = false
		for _, in := range s.raw.results {
			s.raw.send(&pb.Frame{Credits: []*pb.Credit{{TensorId: in.desc.TensorId, ChunkLimit: uint32(len(in.held))}}})
		}
	}},
	{"results not acknowledged", func(s *scene) {
		close(s.gate.open)
		s.raw.mute = true
		s.raw.open(s.offer)
		s.raw.deliver(s.offer)
		s.raw.result(s.offer)
		s.told = true
	}, func(s *scene) {
		for _, in := range s.raw.results {
			s.raw.send(&pb.Frame{Acks: []*pb.Ack{{TensorId: in.desc.TensorId, ReceivedBelow: uint32(len(in.held))}}})
		}
	}},
}

// hazards are what may happen to a call. Each leaves the server without sessions.
var hazards = []struct {
	name string
	// prepare changes the call before it begins.
	prepare func(s *scene)
	strike  func(s *scene)
}{
	{"cancel", nil, func(s *scene) {
		s.raw.send(&pb.Frame{Cancels: []*pb.Cancel{{CallId: s.offer.call.Id}}})
		if done := s.raw.done(s.offer.call.Id); !s.told {
			require.Equal(s.t, codes.Canceled, codes.Code(done.Code), done.Message)
		}
		s.raw.hold, s.raw.mute = false, false
		s.raw.good()
		s.raw.end()
	}},
	{"timeout", func(s *scene) {
		if s.offer.call.TimeoutMillis = 300; s.phase == "results not acknowledged" {
			s.offer.call.TimeoutMillis = 60_000 // the call has ended well before
		}
	}, func(s *scene) {
		if done := s.raw.done(s.offer.call.Id); !s.told {
			require.Equal(s.t, codes.DeadlineExceeded, codes.Code(done.Code), done.Message)
			require.Contains(s.t, done.Message, "timeout")
		}
		s.raw.hold, s.raw.mute = false, false
		s.raw.good()
		s.raw.end()
	}},
	{"end of the stream's context", nil, func(s *scene) {
		s.raw.end()
		require.Equal(s.t, codes.Canceled, s.raw.status().Code())
	}},
	{"loss of the connection", nil, func(s *scene) {
		s.proxy.cut()
		require.Equal(s.t, codes.Unavailable, s.raw.status().Code())
	}},
	{"close of the server", nil, func(s *scene) {
		s.server.Close()
		st := s.raw.status()
		require.Equal(s.t, codes.Unavailable, st.Code())
		require.True(s.t, tellsWhenToRetry(st), st)
	}},
	{"shutdown without patience", nil, func(s *scene) {
		ctx, cancel := context.WithCancelCause(context.Background())
		cancel(fmt.Errorf("no patience"))
		err := s.server.Shutdown(ctx)
		require.ErrorContains(s.t, err, "no patience")
		require.Equal(s.t, codes.Unavailable, s.raw.status().Code())
	}},
}

func stage(t *testing.T) *scene {
	s := &scene{fixture: serve(t, nil), t: t}
	s.gate = addGate(t, s.fixture, "gate")
	s.proxy = newProxy(t, s.addr, -1)
	s.raw = openRaw(t, s.proxy.addr)
	s.offer = offering("gate", testkit.Bytes(6*mib, 1), mib)
	return s
}

func TestWhateverHappensAtWhateverPhaseNothingIsLeftBehind(t *testing.T) {
	testkit.Start(t)
	for _, phase := range phases {
		for _, hazard := range hazards {
			t.Run(phase.name+"/"+hazard.name, func(t *testing.T) {
				testkit.Start(t)
				s := stage(t)
				s.phase = phase.name
				if hazard.prepare != nil {
					hazard.prepare(s)
				}
				phase.reach(s)
				hazard.strike(s)
				s.isEmpty(t)
				require.Equal(t, s.gate.started.Load(), s.gate.ended.Load(), "blocks still computing")
				used, _, _ := s.host.Budget().Used()
				require.Zero(t, used)
				// Of six blocks only those two computed that had begun.
				if n := s.gate.started.Load(); phase.complete != nil && !isOpen(s.gate.open) {
					require.LessOrEqual(t, n, int64(2), "the model goes on")
				}
			})
		}
	}
}

func isOpen(gate chan struct{}) bool {
	select {
	case <-gate:
		return true
	default:
		return false
	}
}

func TestADrainingServerFinishesWhatIsOpenAndTakesNothingNew(t *testing.T) {
	testkit.Start(t)
	for _, phase := range phases {
		t.Run(phase.name, func(t *testing.T) {
			testkit.Start(t)
			s := stage(t)
			phase.reach(s)
			down := make(chan error, 1)
			go func() { down <- s.server.Shutdown(context.Background()) }()
			s.raw.until(func() bool { return s.raw.drained })

			late := small("echo")
			s.raw.open(late)
			done := s.raw.done(late.call.Id)
			require.Equal(t, codes.Unavailable, codes.Code(done.Code))
			require.Contains(t, done.Message, "draining")
			require.Positive(t, done.RetryAfterMillis)

			other, err := tryRaw(t, s.addr)
			if err == nil {
				other.send(&pb.Frame{Hello: other.greeting()})
				err = other.status().Err()
			}
			require.Equal(t, codes.Unavailable, status.Code(err), err)

			phase.complete(s)
			require.Equal(t, s.offer.data, s.raw.result(s.offer)["y"].data)
			require.NoError(t, <-down)
			require.Equal(t, codes.Unavailable, s.raw.status().Code())
			s.isEmpty(t)
		})
	}
}

func TestAResultIsNeverLostToTheEndOfADrain(t *testing.T) {
	testkit.Start(t)
	for range 50 {
		f := serve(t, nil)
		g := addGate(t, f, "gate")
		r := openRaw(t, f.addr)
		o := small("gate")
		r.open(o)
		r.deliver(o)
		testkit.Eventually(t, func() bool { return g.started.Load() == 1 }, "the block")
		down := make(chan error, 1)
		go func() { down <- f.server.Shutdown(context.Background()) }()
		r.until(func() bool { return r.drained })
		require.NoError(t, r.stream.CloseSend()) // so that done is the very last frame
		close(g.open)
		r.hold = true
		require.Equal(t, o.data, r.result(o)["y"].data)
		require.NoError(t, <-down)
		r.status()
	}
}

func TestAConnectionCutAnywhereLeavesNothingBehind(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	data := testkit.Bytes(3*mib, 1)
	x, err := tensor.Of(data)
	require.NoError(t, err)
	random := testkit.Rand(t)
	const whole = 6*mib + 100<<10 // both ways, with headers
	for i := range 40 {
		cut := int64(i * 20) // among the first frames
		if i >= 20 {
			cut = random.Int64N(whole)
		}
		p := newProxy(t, f.addr, cut)
		c, err := client.Dial(p.addr, client.Config{})
		require.NoError(t, err)
		y, err := c.Compute(t.Context(), "echo", x)
		if err != nil {
			require.Equal(t, codes.Unavailable, status.Code(err), "cut at %d: %v", cut, err)
		} else {
			require.Equal(t, string(data), string(y.Data))
		}
		require.NoError(t, c.Close())
		f.isEmpty(t)
	}
}

// crawl is a request to the slow model: 32 blocks of 20 ms.
func crawl(data []byte) client.Request {
	d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(len(data))}}
	return client.Request{
		Model: "slow", Inputs: []client.Input{client.From("", tensor.Tensor{Desc: d, Data: data})},
		Params: map[string]string{"delay": "20ms"},
	}
}

func TestTheSlowModelStopsWithinABlockOfItsCallersEnd(t *testing.T) {
	testkit.Start(t)
	data := testkit.Bytes(32*mib, 1)
	for name, tc := range map[string]struct {
		strike func(f *fixture, s *client.Session, cancel context.CancelFunc, p *proxy)
		code   codes.Code
	}{
		"cancel": {func(_ *fixture, _ *client.Session, cancel context.CancelFunc, _ *proxy) { cancel() }, codes.Canceled},
		"close of the session": {func(_ *fixture, s *client.Session, _ context.CancelFunc, _ *proxy) {
			_ = s.Close()
		}, codes.Canceled},
		"loss of the connection": {func(_ *fixture, _ *client.Session, _ context.CancelFunc, p *proxy) { p.cut() }, codes.Unavailable},
		"close of the server":    {func(f *fixture, _ *client.Session, _ context.CancelFunc, _ *proxy) { f.server.Close() }, codes.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			f := serve(t, nil)
			p := newProxy(t, f.addr, -1)
			c, err := client.Dial(p.addr, client.Config{})
			require.NoError(t, err)
			defer func() { require.NoError(t, c.Close()) }()
			s, err := c.Session(t.Context())
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			call, err := s.Call(ctx, crawl(data))
			require.NoError(t, err)
			for _, err := range call.Regions() {
				require.NoError(t, err)
				break // results flow
			}
			tc.strike(f, s, cancel, p)
			_, err = call.Wait()
			require.Equal(t, tc.code, status.Code(err), err)
			require.Zero(t, call.Timings().Total, "it did not end well")
			f.isIdleSoon(t)
		})
	}
}

func (f *fixture) isIdleSoon(t testing.TB) {
	t.Helper()
	testkit.Eventually(t, f.isIdle, "the end of every call")
}

func TestAFailureAmidTheTensorIsReportedOnceAndTheSessionLivesOn(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	s := f.session(t, client.Config{})
	data := testkit.Bytes(8*mib, 1)
	r := crawl(data)
	r.Params = map[string]string{"fail_at": fmt.Sprint(3*mib + 5)}
	call, err := s.Call(t.Context(), r)
	require.NoError(t, err)
	_, err = call.Wait()
	require.Equal(t, codes.Internal, status.Code(err))
	require.ErrorContains(t, err, "row 3145733")
	f.isIdleSoon(t)
	x, err := tensor.Of(data)
	require.NoError(t, err)
	y, err := s.Compute(t.Context(), "echo", x)
	require.NoError(t, err)
	require.Equal(t, string(data), string(y.Data))
}

func TestTheTextOfAModelsErrorStaysHereUnlessItIsPublic(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	private := &fs.PathError{Op: "open", Path: "/secret/place", Err: fs.ErrNotExist}
	for name, tc := range map[string]struct {
		err  error
		want string
	}{
		"private":        {private, "model failed; the server's log has the cause under the call's id"},
		"public":         {engine.Publicf("row %d is not finite", 3), "model failed: row 3 is not finite"},
		"public-wrapped": {fmt.Errorf("/secret/place: %w", engine.Publicf("no luck")), "model failed: no luck"},
	} {
		f.add(t, cpu.RowFunc{
			Info: engine.Info{
				Name: name, Rows: engine.AllAxes,
				Inputs:  []engine.Port{{Name: "x", Shape: []int64{engine.AnyAxes}}},
				Outputs: []engine.Port{{Name: "y", Shape: []int64{engine.AnyAxes}}},
			},
			Rows: func(context.Context, cpu.RowBlock) error { return tc.err },
		})
		r := openRaw(t, f.addr)
		o := small(name)
		r.open(o)
		r.deliver(o)
		done := r.done(o.call.Id)
		require.Equal(t, codes.Internal, codes.Code(done.Code))
		require.Equal(t, tc.want, done.Message)
	}
}

func TestAModelThatPanicsFailsItsCallAlone(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	f.add(t, cpu.RowFunc{
		Info: engine.Info{
			Name: "panics", Rows: engine.AllAxes,
			Inputs:  []engine.Port{{Name: "x", Shape: []int64{engine.AnyAxes}}},
			Outputs: []engine.Port{{Name: "y", Shape: []int64{engine.AnyAxes}}},
		},
		Rows: func(context.Context, cpu.RowBlock) error { panic("no such luck") },
	})
	r := openRaw(t, f.addr)
	o := small("panics")
	r.open(o)
	r.deliver(o)
	done := r.done(o.call.Id)
	require.Equal(t, codes.Internal, codes.Code(done.Code))
	require.Contains(t, done.Message, `"panics" panicked`)
	require.NotContains(t, done.Message, "no such luck", "the value of a panic is for logs")
	require.NotContains(t, done.Message, ".go:", "a stack is for logs")
	r.good()
}

func TestSessionsThatCompeteForATinyBudgetAllFinish(t *testing.T) {
	testkit.Start(t)
	f := serveWithin(t, 5*mib, nil)
	data := floats(3 << 20) // 12 MiB
	want := mapFloats(data, relu)
	x, err := tensor.New(tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{3 << 20}}, data)
	require.NoError(t, err)
	ended := make(chan error)
	const sessions = 4
	for range sessions {
		s := f.session(t, client.Config{})
		go func() { // ends with its calls
			for range 3 {
				y, err := s.Compute(t.Context(), "relu", x)
				if err == nil && string(y.Data) != string(want) {
					err = fmt.Errorf("wrong result")
				}
				if err != nil {
					ended <- err
					return
				}
			}
			ended <- nil
		}()
	}
	for range sessions {
		require.NoError(t, <-ended)
	}
	_, peak, limit := f.host.Budget().Used()
	require.LessOrEqual(t, peak, limit)
}

func TestACallThatCanNeverFitIsRefusedNamingTheLimit(t *testing.T) {
	testkit.Start(t)
	f := serveWithin(t, 4*mib, nil)
	r := openRaw(t, f.addr)
	o := offering("sink", make([]byte, 8*mib), mib) // needs it whole
	r.open(o)
	done := r.done(o.call.Id)
	require.Equal(t, codes.ResourceExhausted, codes.Code(done.Code))
	require.Contains(t, done.Message, fmt.Sprint(4*mib))
	require.Contains(t, done.Message, fmt.Sprintf("%d bytes asked", 8*mib+4096)) // and the result, which takes a page
	require.Zero(t, done.RetryAfterMillis, "waiting does not help")
	r.good()
}

func TestTooManyChunksForTheBudgetAreRefusedNamingIt(t *testing.T) {
	testkit.Start(t)
	f := serveWithin(t, 4*mib, nil)
	r := openRaw(t, f.addr)
	o := offering("echo", make([]byte, mib), 1)
	r.open(o)
	done := r.done(o.call.Id)
	require.Equal(t, codes.ResourceExhausted, codes.Code(done.Code))
	require.Contains(t, done.Message, "larger chunks")
	require.Contains(t, done.Message, fmt.Sprint(4*mib))
	r.good()
}

func TestACallWaitsForMemoryABoundedTime(t *testing.T) {
	testkit.Start(t)
	f := serveWithin(t, 8*mib, func(c *server.Config) { c.MemoryWait = 200 * time.Millisecond })
	g := addGate(t, f, "gate")
	first, second := openRaw(t, f.addr), openRaw(t, f.addr)
	o := offering("gate", make([]byte, 6*mib), mib)
	first.open(o)
	first.credit(o.desc.TensorId, 1)
	over := offering("sink", make([]byte, 6*mib), mib)
	second.open(over)
	done := second.done(over.call.Id)
	require.Equal(t, codes.ResourceExhausted, codes.Code(done.Code))
	require.Contains(t, done.Message, "200ms")
	require.Contains(t, done.Message, fmt.Sprint(8*mib))
	require.Positive(t, done.RetryAfterMillis)
	close(g.open)
	first.deliver(o)
	require.Equal(t, o.data, first.result(o)["y"].data)
	testkit.Eventually(t, func() bool { used, _, _ := f.host.Budget().Used(); return used == 0 }, "free memory")
	second.run(offering("sink", make([]byte, 6*mib), mib))
}

func TestAnAllowanceThatTheBudgetDoesNotHoldIsRefusedAsLater(t *testing.T) {
	testkit.Start(t)
	f := serveWithin(t, mib, nil)
	g := addGate(t, f, "gate")
	holder := openRaw(t, f.addr)
	held := offering("gate", make([]byte, 980<<10), mib)
	holder.open(held)
	holder.credit(held.desc.TensorId, 1)
	r := openRaw(t, f.addr)
	o := offering("echo", make([]byte, 64<<10), mib)
	require.GreaterOrEqual(t, r.hello.AllowanceBytes, uint32(64<<10))
	o.desc.OnAllowance = true
	r.open(o)
	done := r.done(o.call.Id)
	require.Equal(t, codes.ResourceExhausted, codes.Code(done.Code))
	require.Contains(t, done.Message, "allowance")
	require.Positive(t, done.RetryAfterMillis)
	close(g.open)
	holder.deliver(held)
	holder.result(held)
	r.good()
}

func TestAllowancesThatAreGrantedCanAllBeKept(t *testing.T) {
	testkit.Start(t)
	f := serveWithin(t, 16*mib, nil)
	var granted []uint32
	var all []*raw
	var sum uint32
	for range 60 {
		r := openRaw(t, f.addr)
		all = append(all, r)
		granted = append(granted, r.hello.AllowanceBytes)
		sum += r.hello.AllowanceBytes
	}
	require.EqualValues(t, mib, granted[0])
	require.True(t, slices.IsSortedFunc(granted, func(a, b uint32) int { return cmp.Compare(b, a) }), granted)
	require.LessOrEqual(t, sum, uint32(8*mib), "half of the budget is for allowances")
	require.Greater(t, sum, uint32(6*mib))
	require.Zero(t, granted[59], granted)
	// All at the same time.
	var sent []*offer
	for i, r := range all {
		o := offering("echo", make([]byte, max(granted[i], 1)), mib)
		o.desc.OnAllowance = granted[i] > 0
		r.open(o)
		sent = append(sent, o)
	}
	for i, r := range all {
		if granted[i] > 0 {
			r.deliver(sent[i])
		}
	}
	// Each reads what it asked for: results are copied into gRPC's queues, which
	// Config.ReceiveBytes bounds.
	var reading sync.WaitGroup
	for i, r := range all {
		reading.Go(func() {
			if granted[i] == 0 { // waits for credit, as a large tensor does
				r.credit(sent[i].desc.TensorId, 1)
				r.deliver(sent[i])
			}
			if got := r.result(sent[i])["y"].data; !bytes.Equal(sent[i].data, got) {
				t.Errorf("session %d: %d bytes, want %d", i, len(got), len(sent[i].data))
			}
		})
	}
	reading.Wait()
	for _, r := range all {
		r.end()
	}
	f.isEmpty(t)
	require.EqualValues(t, mib, openRaw(t, f.addr).hello.AllowanceBytes, "what sessions were granted comes back with their end")
}
