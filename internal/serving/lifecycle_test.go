package serving

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// scene is a call that has come to one of its phases.
type scene struct {
	*fixture
	phase string
	t     *testing.T
	gate  *gate
	peer  *peer
	offer *offer
	told  bool // done has come
}

// reached waits for a phase, or for the call's end.
func (s *scene) reached(cond func() bool, what string) {
	s.t.Helper()
	testkit.Eventually(s.t, func() bool { return cond() || s.Values().Calls == 0 }, what)
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
		s.peer.send(&frame.Frame{Calls: []frame.Call{s.offer.call}})
		testkit.Eventually(s.t, func() bool { return s.Values().CallsOpened == 1 }, "the call")
	}, func(s *scene) {
		s.peer.send(&frame.Frame{Descs: []frame.Desc{s.offer.desc}})
		close(s.gate.open)
		s.peer.deliver(s.offer)
	}},
	{"before chunks", func(s *scene) {
		s.peer.open(s.offer)
		s.peer.credit(s.offer, 1)
	}, func(s *scene) {
		close(s.gate.open)
		s.peer.deliver(s.offer)
	}},
	{"amid chunks", func(s *scene) {
		s.peer.open(s.offer)
		s.peer.credit(s.offer, 2)
		s.peer.send(s.offer.chunk(0))
		s.peer.send(s.offer.chunk(1))
		s.reached(func() bool { return s.gate.started.Load() == 2 }, "two blocks computing")
	}, func(s *scene) {
		close(s.gate.open)
		s.peer.deliver(s.offer) // the first two are duplicates
	}},
	{"computing", func(s *scene) {
		s.peer.open(s.offer)
		s.peer.deliver(s.offer)
		s.reached(func() bool { return s.gate.started.Load() == 2 && s.Values().ReceivedChunks == 6 }, "the input")
	}, func(s *scene) {
		close(s.gate.open)
	}},
	{"results without credit", func(s *scene) {
		close(s.gate.open)
		s.peer.hold = true
		s.peer.open(s.offer)
		s.peer.deliver(s.offer)
		s.peer.until(func() bool { return len(s.peer.results)+len(s.peer.dones) > 0 })
	}, func(s *scene) {
		s.peer.hold = false
		for id, in := range s.peer.results {
			s.peer.send(&frame.Frame{Credits: []frame.Credit{{Tensor: id, Limit: uint32(len(in.held))}}})
		}
	}},
	{"results not acknowledged", func(s *scene) {
		close(s.gate.open)
		s.peer.mute = true
		s.peer.open(s.offer)
		s.peer.deliver(s.offer)
		s.peer.result(s.offer)
		s.told = true
	}, func(s *scene) {
		for id, in := range s.peer.results {
			s.peer.send(&frame.Frame{Acks: []frame.Ack{{Tensor: id, Below: uint32(len(in.held))}}})
		}
	}},
}

// hazards are what may happen to a call. Each leaves the core without sessions.
var hazards = []struct {
	name string
	// prepare changes the call before it begins.
	prepare func(s *scene)
	strike  func(s *scene)
}{
	{"cancel", nil, func(s *scene) {
		s.peer.send(&frame.Frame{Cancels: []tensor.ID{s.offer.call.ID}})
		if done := s.peer.done(s.offer); !s.told {
			require.Equal(s.t, frame.Cancelled, done.Code, done.Message)
		}
		s.peer.hold, s.peer.mute = false, false
		s.peer.good()
		s.peer.end()
	}},
	{"timeout", func(s *scene) {
		if s.offer.call.TimeoutMillis = 300; s.phase == "results not acknowledged" {
			s.offer.call.TimeoutMillis = 60_000 // the call has ended well before
		}
	}, func(s *scene) {
		if done := s.peer.done(s.offer); !s.told {
			require.Equal(s.t, frame.DeadlineExceeded, done.Code, done.Message)
			require.Contains(s.t, done.Message, "timeout")
		}
		s.peer.hold, s.peer.mute = false, false
		s.peer.good()
		s.peer.end()
	}},
	{"end of the RPC", nil, func(s *scene) {
		s.peer.end()
		code, _ := s.peer.status()
		require.Equal(s.t, frame.Cancelled, code)
	}},
	{"close of the core", nil, func(s *scene) {
		s.Close()
		code, _ := s.peer.status()
		require.Equal(s.t, frame.Unavailable, code)
		require.ErrorIs(s.t, s.peer.err, failures.ErrShutdown)
	}},
	{"shutdown without patience", nil, func(s *scene) {
		enough := errors.New("no patience")
		ctx, cancel := context.WithCancelCause(context.Background())
		cancel(enough)
		require.ErrorIs(s.t, s.Drain(ctx), enough)
		s.Close()
		code, _ := s.peer.status()
		require.Equal(s.t, frame.Unavailable, code)
	}},
}

func stage(t *testing.T, phase string) *scene {
	s := &scene{fixture: serve(t, nil), t: t, phase: phase}
	s.gate = addGate(t, s.fixture, "gate")
	s.peer = s.session(t)
	s.offer = offering("gate", testkit.Bytes(6*mib, 1), mib)
	return s
}

func TestWhateverHappensAtWhateverPhaseNothingIsLeftBehind(t *testing.T) {
	testkit.Start(t)
	for _, phase := range phases {
		for _, hazard := range hazards {
			t.Run(phase.name+"/"+hazard.name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					s := stage(t, phase.name)
					if hazard.prepare != nil {
						hazard.prepare(s)
					}
					phase.reach(s)
					hazard.strike(s)
					s.isEmpty(t)
					require.Equal(t, s.gate.started.Load(), s.gate.ended.Load(), "blocks still computing")
					// Of six blocks only those two computed that had begun.
					if !isClosed(s.gate.open) {
						require.LessOrEqual(t, s.gate.started.Load(), int64(2), "the model goes on")
					}
				})
			})
		}
	}
}

func TestADrainingCoreFinishesWhatIsOpenAndTakesNothingNew(t *testing.T) {
	testkit.Start(t)
	for _, phase := range phases {
		t.Run(phase.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := stage(t, phase.name)
				phase.reach(s)
				down := make(chan error, 1)
				go func() { down <- s.Drain(context.Background()) }()
				s.peer.until(func() bool { return s.peer.drained })

				late := small("echo")
				s.peer.open(late)
				done := s.peer.done(late)
				require.Equal(t, frame.Unavailable, done.Code)
				require.Contains(t, done.Message, "draining")
				require.Positive(t, done.RetryAfterMillis)

				_, err := s.dialFrom(t, new(admission.Caller))
				require.ErrorIs(t, err, errDraining)
				code, _ := s.compute(t.Context(), asking("echo", tensor.Uint8, []byte("abc"), 3))
				require.Equal(t, frame.Unavailable, code)
				require.Empty(t, down, "a call is open")

				phase.complete(s)
				require.Equal(t, s.offer.data, s.peer.result(s.offer)["y"])
				require.NoError(t, <-down)
				s.Close()
				code, _ = s.peer.status()
				require.Equal(t, frame.Unavailable, code)
				s.isEmpty(t)
			})
		})
	}
}

func TestTheSlowModelStopsWithinABlockOfItsCallersEnd(t *testing.T) {
	testkit.Start(t)
	data := testkit.Bytes(32*mib, 1)
	for name, strike := range map[string]func(f *fixture, p *peer, o *offer) frame.Code{
		"cancel": func(_ *fixture, p *peer, o *offer) frame.Code {
			p.send(&frame.Frame{Cancels: []tensor.ID{o.call.ID}})
			return p.done(o).Code
		},
		"end of the RPC": func(_ *fixture, p *peer, _ *offer) frame.Code {
			p.end()
			code, _ := p.status()
			return code
		},
		"close of the core": func(f *fixture, p *peer, _ *offer) frame.Code {
			f.Close()
			code, _ := p.status()
			return code
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := serve(t, nil)
				p := f.session(t)
				o := offering("slow", data, mib)
				const delay = 20 * time.Millisecond // for each of 32 blocks
				o.call.Params = map[string]string{"delay": delay.String()}
				p.open(o)
				p.deliver(o)
				p.until(func() bool { // results flow
					for _, in := range p.results {
						return in.left < len(in.held)
					}
					return false
				})
				require.False(t, p.isDone(o.call.ID))
				began := time.Now()
				require.NotEqual(t, frame.OK, strike(f, p, o))
				f.isIdleSoon(t)
				require.LessOrEqual(t, time.Since(began), 2*delay)
			})
		})
	}
}

// blocking opens calls whose model does not answer, one of a session and one outside: as
// many as the host has workers.
func (f *fixture) blocking(ctx context.Context, t testing.TB, model string, params map[string]string) (ended <-chan frame.Code) {
	t.Helper()
	p, o := f.session(t), offering(model, []byte{1}, 1)
	o.call.Params = params
	p.open(o)
	p.deliver(o)
	outside := asking(model, tensor.Uint8, []byte{1}, 1)
	outside.params = params
	both := make(chan frame.Code, 2)
	go func() { // ends with ctx, as the next
		code, _ := f.compute(ctx, outside)
		both <- code
	}()
	go func() {
		stop := context.AfterFunc(ctx, func() { p.send(&frame.Frame{Cancels: []tensor.ID{o.call.ID}}) })
		defer stop()
		for !p.isDone(o.call.ID) && p.recv() {
		}
		both <- p.dones[o.call.ID].Code
	}()
	testkit.Eventually(t, func() bool { return f.Values().Calls == 2 }, "both calls to be open")
	return both
}

// serves holds the core to small calls of a caller that has nothing to do with others.
func (f *fixture) serves(t testing.TB) {
	t.Helper()
	p, x := f.session(t), floats(4)
	for range 20 {
		require.Equal(t, relus(x), p.run(offering("relu", x, 16).as(tensor.Float32, 4))["y"])
		code, text := f.compute(t.Context(), asking("relu", tensor.Float32, x, 4))
		require.Equal(t, frame.OK, code, text)
	}
}

func TestCallsThatSleepHoldUpNobody(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		began := time.Now()
		ended := f.blocking(ctx, t, "slow", map[string]string{"delay": "1m"})
		f.serves(t)
		require.Empty(t, ended, "the calls that sleep are still open")
		require.Less(t, time.Since(began), time.Second)
		cancel()
		require.Equal(t, frame.Cancelled, <-ended)
		require.Equal(t, frame.Cancelled, <-ended)
	})
}

func TestAModelThatBlocksHoldsUpNobodyElse(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		g := addGate(t, f, "blocker")
		ended := f.blocking(t.Context(), t, "blocker", nil)
		testkit.Eventually(t, func() bool { return g.started.Load() == 2 }, "both workers to be held")
		f.serves(t)
		require.Empty(t, ended, "the calls that block are still open")
		close(g.open)
		require.Equal(t, frame.OK, <-ended)
		require.Equal(t, frame.OK, <-ended)
	})
}
