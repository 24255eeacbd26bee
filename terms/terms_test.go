package terms

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestACallIsRefusedForTheFirstReasonThatHolds(t *testing.T) {
	sound := frame.Call{ID: tensor.ID{1}, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: tensor.ID{2}}}}
	for name, tc := range map[string]struct {
		change func(c *frame.Call, l *Load)
		code   frame.Code
	}{
		"nothing":              {func(*frame.Call, *Load) {}, frame.OK},
		"at the limit":         {func(_ *frame.Call, l *Load) { l.Undecided = 64 }, frame.OK},
		"one past the limit":   {func(_ *frame.Call, l *Load) { l.Undecided = 65 }, frame.ResourceExhausted},
		"too many results":     {func(_ *frame.Call, l *Load) { l.Calls = HeldCalls*64 + 1 }, frame.ResourceExhausted},
		"the server drains":    {func(c *frame.Call, l *Load) { l.Draining, c.Model = true, "" }, frame.Unavailable},
		"no model":             {func(c *frame.Call, _ *Load) { c.Model = "" }, frame.InvalidArgument},
		"a put":                {func(c *frame.Call, _ *Load) { *c = frame.Call{Put: new(frame.Put)} }, frame.FailedPrecondition},
		"nothing can be kept":  {func(_ *frame.Call, l *Load) { l.Retained = DefaultLimits().RetainedBytes() }, frame.ResourceExhausted},
		"a port that is twice": {func(c *frame.Call, _ *Load) { c.Inputs = append(c.Inputs, c.Inputs[0]) }, frame.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			c := Config{Server: true}
			c.SetDefaults()
			call, load := sound, Load{Undecided: 1, Calls: 1}
			tc.change(&call, &load)
			d := c.Refuse(&call, load)
			require.Equal(t, tc.code == frame.OK, d == nil)
			if d != nil {
				require.Equal(t, tc.code, d.Code, d.Message)
			}
		})
	}
}

func TestStatsOfSessionsAddUp(t *testing.T) {
	s := Stats{1, 2, 3, 4, 5, 6, 7, 8, 9}
	s.Add(s)
	require.Equal(t, Stats{2, 4, 6, 8, 10, 12, 14, 16, 18}, s)
}
