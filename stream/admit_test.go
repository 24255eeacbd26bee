package stream

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestACallIsRefusedForTheFirstReasonThatHolds(t *testing.T) {
	sound := frame.Call{ID: tensor.ID{1}, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: tensor.ID{2}}}}
	for name, tc := range map[string]struct {
		change func(c *frame.Call, l *calls)
		code   frame.Code
	}{
		"nothing":              {func(*frame.Call, *calls) {}, frame.OK},
		"at the limit":         {func(_ *frame.Call, l *calls) { l.undecided = 64 }, frame.OK},
		"one past the limit":   {func(_ *frame.Call, l *calls) { l.undecided = 65 }, frame.ResourceExhausted},
		"too many results":     {func(_ *frame.Call, l *calls) { hold(l, heldCalls*64+1) }, frame.ResourceExhausted},
		"the server drains":    {func(c *frame.Call, l *calls) { l.draining, c.Model = true, "" }, frame.Unavailable},
		"no model":             {func(c *frame.Call, _ *calls) { c.Model = "" }, frame.InvalidArgument},
		"a put":                {func(c *frame.Call, _ *calls) { *c = frame.Call{Put: new(frame.Put)} }, frame.FailedPrecondition},
		"nothing can be kept":  {func(_ *frame.Call, l *calls) { l.retained = l.cfg.Limits.retainedBytes() }, frame.ResourceExhausted},
		"a port that is twice": {func(c *frame.Call, _ *calls) { c.Inputs = append(c.Inputs, c.Inputs[0]) }, frame.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			m, call := New(Config{Server: true}, 0), sound
			m.calls.undecided = 1
			hold(&m.calls, 1)
			tc.change(&call, &m.calls)
			d := m.calls.refuse(&call)
			require.Equal(t, tc.code == frame.OK, d == nil)
			if d != nil {
				require.Equal(t, tc.code, d.Code, d.Message)
			}
		})
	}
}

// hold has n calls open.
func hold(c *calls, n int) {
	for i := range n {
		c.open[tensor.ID{byte(i), byte(i >> 8), 1}] = new(call)
	}
}
