package cpu

import (
	"fmt"
	"strconv"
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
// It is elementwise and in place. Its blocks wait all at once, each with a goroutine of its
// own: they hold no worker of h.
func Slow(h *Host) engine.Model {
	made, err := h.engine.Model(blocks.Model{Info: builtin.Slow, Bind: func(c engine.Call) (blocks.Bound, error) {
		p, err := bindSlow(c)
		return blocks.Bound{Results: blocks.InPlace, Outs: c.Descs(), Program: p}, err
	}})
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
			return p, fmt.Errorf("%w: \"delay\": wanted a duration from 0s to %v, got %q", engine.ErrParam, builtin.MaxDelay, text)
		}
	}
	if text, ok := c.Params["fail_at"]; ok {
		if p.failAt, err = strconv.ParseInt(text, 10, 64); err != nil || p.failAt < 0 {
			return p, fmt.Errorf("%w: \"fail_at\": wanted a row, got %q", engine.ErrParam, text)
		}
	}
	return p, nil
}

// pass ends a block when its time has come, or its run or the host ends.
func (p nap) pass(w *blocks.Work, over <-chan struct{}) {
	select {
	case <-w.Context().Done():
		w.End(nil)
	case <-over:
		w.End(engine.ErrClosed)
	case <-time.After(p.delay):
		var err error
		if p.failAt >= w.Row && p.failAt-w.Row < w.Rows {
			err = engine.Publicf("asked to fail at row %d", p.failAt)
		}
		w.Done(err, blocks.Times{Compute: p.delay})
	}
}
