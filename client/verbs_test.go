package client

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/internal/calling"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// What may have happened when an attempt has failed, for each verb: nothing, where the server
// refused it or was not reached; else a model may have run, what is pushed may be stored, and what
// is deleted may be gone, and of another who has stored it since.
func TestWhatMayHaveHappenedIsRepeatedOnlyWhereTwiceIsOnce(t *testing.T) {
	testkit.Start(t)
	lost, refused := &Error{Code: codes.Unavailable, Message: "gone"}, calling.AsRefused(&Error{Code: codes.Unavailable})
	full := &Error{Code: codes.ResourceExhausted, RetryAfter: time.Second, Refused: true}
	late := calling.Failed(fmt.Errorf("%w: late", ErrNoAnswer))
	bad, damaged, never := &Error{Code: codes.InvalidArgument, Refused: true}, &Error{Code: codes.DataLoss}, calling.Failed(ErrHostNotFound)
	all := []error{lost, refused, full, late, damaged, bad, never, errors.New("client: not of the server"), nil}
	for name, tc := range map[string]struct {
		verb verb
		may  []error
	}{
		"a call":                              {calls, []error{refused, full}},
		"a call of a model that says so":      {idempotent, []error{lost, refused, full, late, damaged}},
		"a push, whose tensors are asked for": {pushes, []error{lost, refused, full, late, damaged}},
		"a pull":                              {pulls, []error{lost, refused, full, late, damaged}},
		"a question":                          {questions, []error{lost, refused, full, late, damaged}},
		"a deletion":                          {deletes, []error{refused, full}},
	} {
		t.Run(name, func(t *testing.T) {
			var may []error
			for _, err := range all {
				if tc.verb.mayRepeat(err) {
					may = append(may, err)
				}
			}
			require.Equal(t, tc.may, may)
		})
	}
}
