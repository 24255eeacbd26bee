package serving

import (
	"bytes"
	"context"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// immediate is echo, but what it computes at once are ones.
type immediate struct {
	engine.Model
	busy          bool
	asked, opened atomic.Int64
}

func (m *immediate) AtOnce(_ engine.Call, data []byte) bool {
	m.asked.Add(1)
	for i := range data {
		data[i] = 1
	}
	return !m.busy
}

func (m *immediate) Open(ctx context.Context, c engine.Call) (engine.Run, error) {
	m.opened.Add(1)
	return m.Model.Open(ctx, c)
}

func TestASmallCallIsComputedAtOnceIfNothingHasToWait(t *testing.T) {
	testkit.Start(t)
	whole := func(p *peer, o *offer) {
		f := o.chunk(0)
		f.Calls, f.Descs = []frame.Call{o.call}, []frame.Desc{o.desc}
		p.send(f)
	}
	apart := func(p *peer, o *offer) {
		p.open(o)
		p.deliver(o)
	}
	for name, tc := range map[string]struct {
		asks, busy bool
		change     func(o *offer)
		send       func(p *peer, o *offer)
		asked      int64
		atOnce     bool
	}{
		"in one frame":               {send: whole, asked: 1, atOnce: true},
		"its chunk comes later":      {send: apart, asked: 1, atOnce: true},
		"by a port's empty name":     {send: whole, change: func(o *offer) { o.call.Inputs[0].Port, o.desc.Port = "", "" }, asked: 1, atOnce: true},
		"with a time limit":          {send: whole, change: func(o *offer) { o.call.TimeoutMillis = 60_000 }, asked: 1, atOnce: true},
		"in two chunks":              {send: apart, change: func(o *offer) { o.desc.ChunkBytes = 5 }},
		"on credit":                  {send: apart, change: func(o *offer) { o.desc.OnAllowance = false }},
		"its model is busy":          {send: whole, busy: true, asked: 1},
		"somebody is asked about it": {send: whole, asks: true},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := serve(t, func(c *Config) { c.Asks = tc.asks })
				m := &immediate{Model: f.named(t, "at once"), busy: tc.busy}
				require.NoError(t, f.models.Add(m))
				p := f.session(t)
				const times = 3
				for range times {
					o := small("at once")
					o.desc.ChunkBytes = 10
					if tc.change != nil {
						tc.change(o)
					}
					tc.send(p, o)
					want := o.data
					if tc.atOnce {
						want = bytes.Repeat([]byte{1}, len(o.data))
					}
					require.Equal(t, want, p.result(o)["y"])
				}
				require.Equal(t, times*tc.asked, m.asked.Load())
				require.Equal(t, tc.atOnce, m.opened.Load() == 0)
				f.isIdleSoon(t)
				require.EqualValues(t, times, f.ended("at once", frame.OK))
			})
		})
	}
}

// What is wrong with a call is told as for any other.
func TestACallThatIsNotComputedAtOnceHasTheUsualError(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		m := &immediate{Model: f.named(t, "at once")}
		require.NoError(t, f.models.Add(m))
		p := f.session(t)
		o := small("at once")
		o.desc.ChunkBytes = 10
		o.call.Inputs[0].Port, o.desc.Port = "z", "z"
		p.open(o)
		p.deliver(o)
		require.Equal(t, frame.InvalidArgument, p.done(o).Code)
		require.Zero(t, m.asked.Load())
		f.isIdleSoon(t)
	})
}

// A step has its turn when it is announced, whenever its chunk comes.
func TestAStepWhoseChunkIsToComeHasItsTurn(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, func(c *Config) { c.Open[admission.Sequences] = 1 })
		m := &immediate{Model: f.named(t, "at once")}
		require.NoError(t, f.models.Add(m))
		p := f.session(t)
		begin := &offer{call: frame.Call{ID: tensor.NewID(), Model: "at once", Sequence: &frame.Sequence{ID: tensor.NewID(), MaxRows: 100}}}
		p.send(&frame.Frame{Calls: []frame.Call{begin.call}})
		require.Equal(t, frame.OK, p.done(begin).Code)
		step := func() *offer {
			o := small("")
			o.desc.ChunkBytes = 10
			o.call.Sequence = &frame.Sequence{ID: begin.call.Sequence.ID}
			return o
		}
		first, second := step(), step()
		p.open(first)
		p.open(second)
		p.deliver(second)
		done := p.done(second)
		require.Equal(t, frame.FailedPrecondition, done.Code)
		require.Contains(t, done.Message, "a step is under way")
		p.deliver(first)
		require.Equal(t, first.data, p.result(first)["y"])
		third := step()
		p.open(third)
		p.deliver(third)
		p.result(third)
	})
}
