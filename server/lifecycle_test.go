package server_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// scene is a call that has come to one of its phases.
type scene struct {
	*fixture
	t     *testing.T
	gate  *gate
	proxy *proxy
	raw   *raw
	offer *offer
}

// phases bring a call of the model "gate", 6 blocks of a chunk each, to where something
// happens to it. internal/serving has those that need no connection.
var phases = []struct {
	name  string
	reach func(s *scene)
}{
	{"before desc", func(s *scene) {
		s.raw.send(&pb.Frame{Calls: []*pb.Call{s.offer.call}})
		testkit.Eventually(s.t, func() bool { return s.counters(s.t)["calls_total"] == 1 }, "the call")
	}},
	{"before chunks", func(s *scene) {
		s.raw.open(s.offer)
		s.raw.credit(s.offer.desc.TensorId, 1)
	}},
	{"amid chunks", func(s *scene) {
		s.raw.open(s.offer)
		s.raw.credit(s.offer.desc.TensorId, 2)
		s.raw.send(&pb.Frame{Chunk: s.raw.chunk(s.offer, 0)})
		s.raw.send(&pb.Frame{Chunk: s.raw.chunk(s.offer, 1)})
		testkit.Eventually(s.t, func() bool { return s.gate.started.Load() == 2 }, "two blocks computing")
	}},
	{"computing", compute},
	{"results without credit", func(s *scene) {
		close(s.gate.open)
		s.raw.hold = true
		s.raw.open(s.offer)
		s.raw.deliver(s.offer)
		s.raw.until(func() bool { return len(s.raw.results)+len(s.raw.dones) > 0 })
	}},
	{"results not acknowledged", func(s *scene) {
		close(s.gate.open)
		s.raw.mute = true
		s.raw.open(s.offer)
		s.raw.deliver(s.offer)
		s.raw.result(s.offer)
	}},
}

// compute brings a call to where its whole input is there, and two blocks compute.
func compute(s *scene) {
	s.raw.open(s.offer)
	s.raw.deliver(s.offer)
	testkit.Eventually(s.t, func() bool { return s.gate.started.Load() == 2 && s.counters(s.t)["received_chunks_total"] == 6 }, "the input")
}

// hazards are what may happen to the RPC of a session. Each leaves the server without
// sessions.
var hazards = []struct {
	name   string
	strike func(s *scene)
}{
	{"end of the stream's context", func(s *scene) {
		s.raw.end()
		require.Equal(s.t, codes.Canceled, s.raw.status().Code())
	}},
	{"loss of the connection", func(s *scene) {
		s.proxy.cut()
		require.Equal(s.t, codes.Unavailable, s.raw.status().Code())
	}},
	{"close of the server", func(s *scene) {
		s.server.Close()
		st := s.raw.status()
		require.Equal(s.t, codes.Unavailable, st.Code())
		require.True(s.t, tellsWhenToRetry(st), st)
	}},
	{"shutdown without patience", func(s *scene) {
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
			if phase.name != "computing" && hazard.name != "loss of the connection" {
				continue // internal/serving has it
			}
			t.Run(phase.name+"/"+hazard.name, func(t *testing.T) {
				testkit.Start(t)
				s := stage(t)
				phase.reach(s)
				hazard.strike(s)
				s.isEmpty(t)
				require.Equal(t, s.gate.started.Load(), s.gate.ended.Load(), "blocks still computing")
				used, _, _ := s.host.Budget().Used()
				require.Zero(t, used)
				// Of six blocks only those two computed that had begun.
				if n := s.gate.started.Load(); !isOpen(s.gate.open) {
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
	s := stage(t)
	compute(s)
	down := make(chan error, 1)
	go func() { down <- s.server.Shutdown(context.Background()) }()
	s.raw.until(func() bool { return s.raw.drained })

	other, err := tryRaw(t, s.addr)
	if err == nil {
		other.send(&pb.Frame{Hello: other.greeting()})
		err = other.status().Err()
	}
	require.Equal(t, codes.Unavailable, status.Code(err), err)

	close(s.gate.open)
	require.Equal(t, s.offer.data, s.raw.result(s.offer)["y"].data)
	require.NoError(t, <-down)
	require.Equal(t, codes.Unavailable, s.raw.status().Code())
	s.isEmpty(t)
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
