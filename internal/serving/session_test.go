package serving

import (
	"bytes"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

func TestCallsAndTensorsOverASessionsLimitsAreRefusedAlone(t *testing.T) {
	testkit.Start(t)
	limits := func(c *Config) { c.Session.OpenTensors, c.Session.OpenCalls = 4, 3 }
	t.Run("calls", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			p := serve(t, limits).session(t)
			var open []*offer
			for range 3 {
				o := small("echo")
				p.open(o)
				open = append(open, o)
			}
			over := small("echo")
			p.open(over)
			done := p.done(over)
			require.Equal(t, frame.ResourceExhausted, done.Code)
			require.Contains(t, done.Message, "open calls: the limit of a session is 3")
			require.Positive(t, done.RetryAfterMillis)
			for _, o := range open {
				p.deliver(o)
				require.Equal(t, o.data, p.result(o)["y"])
			}
			p.good()
		})
	})
	t.Run("tensors", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			f := serve(t, limits)
			addPair(t, f)
			p := f.session(t)
			var open []*offer
			for range 2 { // two inputs each, of which none is complete
				x := offering("pair", make([]byte, 8), 4).as(tensor.Float32, 2, 1)
				w := x.beside("w", tensor.Float32, make([]byte, 4), 1)
				p.send(&frame.Frame{Calls: []frame.Call{x.call}, Descs: []frame.Desc{x.desc, w.desc}})
				open = append(open, x)
			}
			over := small("echo")
			p.open(over)
			done := p.done(over)
			require.Equal(t, frame.ResourceExhausted, done.Code)
			require.Contains(t, done.Message, "open tensors: the limit of a session is 4")
			for _, o := range open {
				p.send(&frame.Frame{Cancels: []tensor.ID{o.call.ID}})
				p.done(o)
			}
			p.good()
		})
	})
}

// TestInputsMayComeOnAllowanceOrOnCreditInAnyMix has call and descs in one frame, or apart.
func TestInputsMayComeOnAllowanceOrOnCreditInAnyMix(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, nil)
		addPair(t, f)
		p := f.session(t)
		for _, rows := range []int{0, 1, 1000, 6000} {
			for mix := range 8 {
				x := offering("pair", floats(rows*100), 1000).as(tensor.Float32, int64(rows), 100)
				w := x.beside("w", tensor.Float32, floats(100), 100)
				w.desc.ChunkBytes, w.desc.OnAllowance, x.desc.OnAllowance = 64, mix&1 > 0, mix&2 > 0 && len(x.data) < mib/2
				if mix&4 > 0 {
					slices.Reverse(x.call.Inputs)
					p.send(&frame.Frame{Calls: []frame.Call{x.call}})
					p.send(&frame.Frame{Descs: []frame.Desc{x.desc}})
					p.send(&frame.Frame{Descs: []frame.Desc{w.desc}})
				} else {
					p.send(&frame.Frame{Calls: []frame.Call{x.call}, Descs: []frame.Desc{w.desc, x.desc}})
				}
				p.deliver(w)
				p.deliver(x)
				out := p.result(x)
				sum, scaled := pairWant(x.data, w.data)
				require.True(t, bytes.Equal(scaled, out["scaled"]))
				require.True(t, bytes.Equal(sum, out["sum"]))
			}
		}
	})
}

func TestLimitsOfTheServerAreNamedWhenTheyAreReached(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		const limit = 6
		f := serve(t, func(c *Config) { c.Open[admission.Sessions], c.Open[admission.Calls] = limit, limit })
		g := addGate(t, f, "gate")
		var from admission.Caller
		var sessions []*peer
		var calls []*offer
		for range limit - 1 { // one place is for others
			p, err := f.dialFrom(t, &from)
			require.NoError(t, err)
			p.greet()
			o := small("gate")
			p.open(o)
			p.deliver(o)
			sessions, calls = append(sessions, p), append(calls, o)
		}
		testkit.Eventually(t, func() bool { return f.Values().Calls == limit-1 }, "the calls")

		over := small("echo")
		sessions[0].open(over)
		done := sessions[0].done(over)
		require.Equal(t, frame.ResourceExhausted, done.Code)
		saysWhy(t, done.Message, []string{"calls: the limit of the server is 6", "later"})
		require.Positive(t, done.RetryAfterMillis)

		_, err := f.dialFrom(t, &from)
		why, ok := errors.AsType[*terms.RefusedError](err)
		require.True(t, ok, "%v", err)
		require.Equal(t, frame.ResourceExhausted, why.Code)
		saysWhy(t, why.Text, []string{"open sessions", "limit of the server is 6"})
		require.Positive(t, why.RetryMillis)
		v := f.Values()
		require.EqualValues(t, 1, v.SessionsRefused)
		require.EqualValues(t, 1, v.CallsRefused)

		close(g.open)
		for i, p := range sessions {
			require.Equal(t, calls[i].data, p.result(calls[i])["y"])
		}
		testkit.Eventually(t, func() bool { return f.Values().Calls == 0 }, "the calls' end")
		sessions[0].good()
	})
}

func TestWhoHasLittleOpenIsServedThoughTheLimitsAreReached(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, func(c *Config) { c.Open = [admission.Kinds]int{8, 8, 8} })
		addGate(t, f, "gate") // never opened
		greedy := f.session(t)
		for range 7 {
			greedy.open(small("gate"))
		}
		testkit.Eventually(t, func() bool { return f.Values().CallsRefused == 1 }, "the limit")
		modest := f.session(t) // of another caller
		for range 100 {
			modest.good()
		}
		code, text := f.compute(t.Context(), asking("echo", tensor.Uint8, []byte("abc"), 3))
		require.Equal(t, frame.OK, code, text)
	})
}

func TestACallWhoseInputsDoNotComeExpires(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, func(c *Config) { c.Session.ChunkIdle = stream.Instant(time.Second) })
		p := f.session(t)
		undescribed, unsent, stuck := small("echo"), small("echo"), offering("echo", make([]byte, 64*mib), mib)
		p.send(&frame.Frame{Calls: []frame.Call{undescribed.call}})
		p.open(unsent)
		p.open(stuck)
		for o, text := range map[*offer]string{undescribed: "not announced", unsent: "no chunk", stuck: "no chunk"} {
			done := p.done(o)
			require.Equal(t, frame.DeadlineExceeded, done.Code)
			require.Contains(t, done.Message, text)
		}
		p.hold = true
		untaken := offering("echo", make([]byte, 64*mib), mib)
		p.open(untaken)
		p.deliver(untaken)
		done := p.done(untaken)
		require.Equal(t, frame.DeadlineExceeded, done.Code)
		require.Contains(t, done.Message, `nobody took result "y"`)
		p.hold = false
		p.good()
	})
}

func TestAnIdleSessionEnds(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		const after = 100 * time.Millisecond
		f := serve(t, func(c *Config) { c.Session.SessionIdle = stream.Instant(after) })
		began := time.Now()
		code, text := f.session(t).status()
		require.Equal(t, frame.DeadlineExceeded, code)
		require.Contains(t, text, "no call")
		require.GreaterOrEqual(t, time.Since(began), after)
	})
}

func TestAHalfClosedStream(t *testing.T) {
	testkit.Start(t)
	for name, test := range map[string]func(t *testing.T, p *peer){
		"with complete inputs still yields results": func(t *testing.T, p *peer) {
			o, slow := small("echo"), small("slow")
			slow.call.Params = map[string]string{"delay": "50ms"}
			for _, o := range []*offer{o, slow} {
				p.open(o)
				p.deliver(o)
			}
			p.hold = true // nothing can be answered any more
			close(p.in)
			require.Equal(t, o.data, p.result(o)["y"])
			require.Equal(t, slow.data, p.result(slow)["y"])
			code, text := p.status()
			require.Equal(t, frame.OK, code, text)
		},
		"with open tensors is reported": func(t *testing.T, p *peer) {
			undescribed, begun := small("echo"), small("echo")
			p.send(&frame.Frame{Calls: []frame.Call{undescribed.call}})
			p.open(begun)
			p.send(begun.chunk(0))
			close(p.in)
			for _, o := range []*offer{undescribed, begun} {
				done := p.done(o)
				require.Equal(t, frame.InvalidArgument, done.Code)
				require.Contains(t, done.Message, "before every input was complete")
			}
			p.status()
		},
		"without calls ends the session": func(t *testing.T, p *peer) {
			close(p.in)
			code, text := p.status()
			require.Equal(t, frame.OK, code, text)
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := serve(t, nil)
				test(t, f.session(t))
				f.isEmpty(t)
			})
		})
	}
}

// saying says something every so often for so long.
func saying(d time.Duration, say func()) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for until := time.Now().Add(d); time.Now().Before(until); <-tick.C {
		say()
	}
}

func TestASessionWhoseClientSaysThatItWaitsIsWaitedFor(t *testing.T) {
	testkit.Start(t)
	const nothing = time.Second // a session looks once a second
	for name, rest := range map[string]func(p *peer, o *offer){
		"for its input": func(p *peer, o *offer) {
			p.open(o)
			p.credit(o, 2)
			p.send(o.chunk(1))
		},
		"for whoever takes its output": func(p *peer, o *offer) {
			p.hold = true
			p.open(o)
			p.deliver(o)
			p.until(func() bool { return len(p.results) == 1 })
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := serve(t, func(c *Config) { c.Session = idle(nothing, time.Hour) })
				p := f.session(t)
				require.EqualValues(t, nothing.Milliseconds(), p.hello.ChunkIdleMillis)
				o := offering("echo", testkit.Bytes(3*mib, 1), mib)
				rest(p, o)
				saying(3*nothing, func() { p.send(&frame.Frame{}) })
				if p.hold {
					p.hold = false
					for id := range p.results {
						p.send(&frame.Frame{Credits: []frame.Credit{{Tensor: id, Limit: 3}}})
					}
				} else {
					p.send(o.chunk(0))
					p.credit(o, 3)
					p.send(o.chunk(2))
				}
				require.True(t, bytes.Equal(o.data, p.result(o)["y"]))
			})
		})
	}
}

func TestASessionThatOnlySaysThatItWaitsEndsWithTheBound(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, func(c *Config) { c.Session = idle(time.Second, 2*time.Second) })
		p := f.session(t)
		o, undescribed := offering("echo", make([]byte, 3*mib), mib), small("echo")
		p.open(o)
		p.send(&frame.Frame{Calls: []frame.Call{undescribed.call}})
		saying(4*time.Second, func() { p.send(&frame.Frame{}) })
		for o, text := range map[*offer]string{o: "(serve --input-idle)", undescribed: "not announced"} {
			done := p.done(o)
			require.Equal(t, frame.DeadlineExceeded, done.Code)
			require.Contains(t, done.Message, text)
		}
		p.good()
	})
}

func TestTheEndsOfOneWaySessionsAreCounted(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := serve(t, func(c *Config) { c.Open[admission.Transfers] = 4 })
		var from admission.Caller
		var open []*Session
		for range 4 {
			s, err := f.OpenOneWay(&from, Push, 8)
			require.NoError(t, err)
			require.True(t, s.OneWay())
			open = append(open, s)
		}
		_, err := f.OpenOneWay(&from, Pull, 8)
		why, ok := errors.AsType[*terms.RefusedError](err)
		require.True(t, ok, "%v", err)
		require.Equal(t, frame.ResourceExhausted, why.Code)
		saysWhy(t, why.Text, []string{"open transfers: the limit of the server is 4", "later"})
		v := f.Values()
		require.EqualValues(t, 4, v.OpenTransfers["push"])
		require.Zero(t, v.Sessions, "they are no sessions")
		for _, s := range open {
			l := newLink(t)
			go l.end()
			require.Error(t, s.Serve(l.ctx, l))
		}
		testkit.Eventually(t, func() bool { return f.Values().OpenTransfers["push"] == 0 }, "the ends")
		require.Zero(t, f.Values().SessionsOpened)
		s, err := f.OpenOneWay(&from, Pull, 8)
		require.NoError(t, err, "there is room again")
		s.Stop(ErrServed)
		l := newLink(t)
		require.ErrorIs(t, s.Serve(l.ctx, l), ErrServed)
		l.end()
		testkit.Eventually(t, func() bool { return f.Values().OpenTransfers["pull"] == 0 }, "the end")
		require.Empty(t, f.Values().TransferBytes, "their calls never began")
		f.TransferEnded(Push, frame.DataLoss, 7)
		require.EqualValues(t, 7, f.Values().TransferBytes[of("push", frame.DataLoss)])
		f.TensorsEnded(Pull, frame.NotFound, 1)
		require.EqualValues(t, 1, f.Values().EndedTensors[of("pull", frame.NotFound)])
	})
}
