package serving

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// newCore returns a core without models, of which so much may be open.
func newCore(t *testing.T, open int) *Core {
	c := New(Config{
		Models: engine.NewRegistry(), Pool: testkit.Pool(t), Budget: slab.NewBudget("memory", 1<<20), Log: slog.New(slog.DiscardHandler),
		Session: terms.DefaultLimits(), Open: [admission.Kinds]int{open, open, open}, Health: func(string, Health) {},
	})
	t.Cleanup(func() {
		c.Close()
		c.Wait()
		c.Forget()
	})
	return c
}

func TestACallerIsToldOfTheLimit(t *testing.T) {
	testkit.Start(t)
	c := newCore(t, 10)
	var flood admission.Caller
	for range 8 { // a quarter is for others
		require.NoError(t, c.Enter(admission.Calls, &flood))
	}
	why, ok := errors.AsType[*terms.RefusedError](c.Enter(admission.Calls, &flood))
	require.True(t, ok)
	require.Equal(t, frame.ResourceExhausted, why.Code)
	require.Contains(t, why.Text, "calls: the limit of the server is 10")
	require.NotZero(t, why.RetryMillis)
	c.Leave(admission.Calls, &flood)
	require.NoError(t, c.Enter(admission.Calls, &flood))
}

func TestADrainingCoreAnswersWhatItAdmitted(t *testing.T) {
	testkit.Start(t)
	c := newCore(t, 1)
	require.NoError(t, c.Begin())
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	cancel(enough)
	require.ErrorIs(t, c.Drain(ctx), enough, "somebody waits for an answer")
	require.ErrorIs(t, c.Begin(), errDraining)
	_, err := c.OpenSession(new(admission.Caller))
	require.ErrorIs(t, err, errDraining)
	c.End()
	require.NoError(t, c.Drain(t.Context()))
}

func TestTheFirstRuleThatFitsSaysWhatACallerIsTold(t *testing.T) {
	secret := errors.New("/etc/passwd is not a tensor")
	for name, tc := range map[string]struct {
		err    error
		code   frame.Code
		retry  bool
		secret bool
	}{
		"a timeout that ended a model":   {errors.Join(context.DeadlineExceeded, engine.ErrModel), frame.DeadlineExceeded, false, false},
		"no memory in time":              {fmt.Errorf("%w: %w", failures.ErrMemory, context.Canceled), frame.ResourceExhausted, true, false},
		"the end of the server":          {errors.Join(failures.ErrShutdown, context.Canceled), frame.Unavailable, true, false},
		"no such model":                  {engine.ErrNotFound, frame.NotFound, false, false},
		"an input that does not fit":     {&engine.InputError{Model: "m", Port: "x"}, frame.FailedPrecondition, false, false},
		"a tensor beyond all bounds":     {tensor.ErrTooLarge, frame.ResourceExhausted, false, false},
		"a device that is lost":          {engine.ErrUnavailable, frame.Unavailable, true, false},
		"a model's own failure":          {fmt.Errorf("%w: %w", engine.ErrModel, secret), frame.Internal, false, true},
		"what nobody expected":           {secret, frame.Internal, false, true},
		"what says itself what it is":    {failures.TryLater("ABORTED", "later"), frame.Aborted, true, false},
		"a peer that broke the protocol": {frame.Errorf(frame.InvalidArgument, "no"), frame.InvalidArgument, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			why := failures.ExplainCall(tc.err)
			require.Equal(t, tc.code, why.Code)
			require.Equal(t, tc.retry, why.RetryMillis > 0)
			require.Equal(t, tc.secret, why.Secret)
			require.NotContains(t, why.Text, "passwd")
		})
	}
}

func TestInputsAreFoundByThePortsOfTheModelInAnyOrder(t *testing.T) {
	ports := func(names ...string) (list []engine.Port) {
		for _, n := range names {
			name, optional := strings.CutSuffix(n, "?")
			list = append(list, engine.Port{Name: name, Optional: optional})
		}
		return list
	}
	for name, tc := range map[string]struct {
		model []engine.Port
		call  []string
		want  []int
	}{
		"none":             {ports(), nil, []int{}},
		"one":              {ports("x"), []string{"x"}, []int{0}},
		"one without name": {ports("x"), []string{""}, []int{0}},
		"turned around":    {ports("a", "b", "c"), []string{"c", "a", "b"}, []int{1, 2, 0}},
		"too few":          {ports("a", "b"), []string{"a"}, nil},
		"too many":         {ports("a"), []string{"a", "b"}, nil},
		"another's":        {ports("a", "b"), []string{"a", "c"}, nil},
		"two without name": {ports("a", "b"), []string{"", ""}, nil},
		"for none":         {ports(), []string{"a"}, nil},
		"the same twice":   {ports("a", "b"), []string{"a", "a"}, nil},

		"with what is optional":              {ports("a", "b?"), []string{"b", "a"}, []int{1, 0}},
		"without":                            {ports("a", "b?", "c"), []string{"c", "a"}, []int{1, 0}},
		"one without name beside":            {ports("a?", "b"), []string{""}, []int{0}},
		"only what is optional":              {ports("a", "b?"), []string{"b"}, nil},
		"none but what is optional":          {ports("a", "b?"), nil, nil},
		"another's instead of what may miss": {ports("a", "b?", "c?"), []string{"a", "d"}, nil},
		"the same twice beside":              {ports("a", "b?"), []string{"a", "a"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var in []engine.Input
			for _, port := range tc.call {
				in = append(in, engine.Input{Port: port})
			}
			info, got, inputs, err := bind(engine.Info{Name: "m", Inputs: tc.model}, in)
			if tc.want == nil {
				require.ErrorIs(t, err, failures.ErrPorts)
				for _, port := range tc.model {
					name := port.Name
					if port.Optional {
						name += "?"
					}
					require.ErrorContains(t, err, strconv.Quote(name))
				}
				return
			}
			require.NoError(t, err)
			require.Equal(t, tc.want, got)
			require.Len(t, info.Inputs, len(tc.want))
			for i, port := range info.Inputs {
				require.Equal(t, port.Name, inputs[i].Port)
			}
		})
	}
}
