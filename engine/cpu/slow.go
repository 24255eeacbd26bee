package cpu

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/engine/builtin"
)

// Slow returns a model for tests of timeouts, made ready on h.
//
//	slow    x -> y      echo, after param "delay" (a Go duration, 0 to 1m) per block; a
//	                    block that holds row "fail_at", if given, fails
//
// It is elementwise and in place. Its blocks wait on timers, all at once: they hold no
// worker of h, and the model cannot be part of a Chain.
func Slow(h *Host) engine.Model {
	made, err := h.late.Model(builtinModel(builtin.Slow, bindSlow))
	if err != nil {
		panic("cpu: built-in model: " + err.Error()) // only a mistake in builtin.Slow
	}
	return made
}

// nap is the program of slow tied to a call.
type nap struct {
	delay  time.Duration
	failAt int64 // -1 for no row
}

func bindSlow(c engine.Call) (p nap, err error) {
	p.failAt = -1
	if text, ok := c.Params["delay"]; ok {
		if p.delay, err = time.ParseDuration(text); err != nil || p.delay < 0 || p.delay > builtin.MaxDelay {
			return p, fmt.Errorf("param \"delay\": wanted a duration from 0s to %v, got %q", builtin.MaxDelay, text)
		}
	}
	if text, ok := c.Params["fail_at"]; ok {
		if p.failAt, err = strconv.ParseInt(text, 10, 64); err != nil || p.failAt < 0 {
			return p, fmt.Errorf("param \"fail_at\": wanted a row, got %q", text)
		}
	}
	return p, nil
}

// wake ends a block whose time has come.
func (p nap) wake(w *blocks.Work) {
	var err error
	if p.failAt >= w.Row && p.failAt-w.Row < w.Rows {
		err = engine.Publicf("asked to fail at row %d", p.failAt)
	}
	w.Done(err, blocks.Times{Compute: p.delay})
}

// sleepers are the device of slow: blocks that wait for their time.
type sleepers struct {
	mu     sync.Mutex // guards all below
	asleep map[*blocks.Work]*time.Timer
	closed bool
}

// Start implements blocks.Device.
func (s *sleepers) Start(w *blocks.Work) {
	p := w.Program.(nap)
	s.mu.Lock()
	if s.closed || w.Context().Err() != nil {
		s.mu.Unlock()
		end(w)
		return
	}
	defer s.mu.Unlock()
	s.asleep[w] = time.AfterFunc(p.delay, func() {
		if s.take(w) {
			p.wake(w)
		}
	})
}

// take reports whether w was asleep, and takes it.
func (s *sleepers) take(w *blocks.Work) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, asleep := s.asleep[w]
	delete(s.asleep, w)
	return asleep
}

// Cancel implements blocks.Canceler.
func (s *sleepers) Cancel(run context.Context) {
	s.end(func(w *blocks.Work) bool { return w.Context() == run })
}

// close ends all blocks, and those that are started later.
func (s *sleepers) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.end(func(*blocks.Work) bool { return true })
}

// end ends the blocks that which names before their time.
func (s *sleepers) end(which func(*blocks.Work) bool) {
	var over []*blocks.Work
	s.mu.Lock()
	for w, timer := range s.asleep {
		if which(w) && timer.Stop() { // else its time has come
			delete(s.asleep, w)
			over = append(over, w)
		}
	}
	s.mu.Unlock()
	for _, w := range over {
		end(w)
	}
}
