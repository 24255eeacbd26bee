package client_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

func TestAnErrorIsWhatGoUsersTestFor(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	x := input(t, 1000)
	wait := func(ctx context.Context, r client.Request) error {
		r.Model = "slow"
		if r.Params == nil {
			r.Model = "echo"
		}
		if r.Inputs == nil {
			r.Inputs = []client.Input{client.From("", x)}
		}
		call, err := f.client.Call(ctx, r)
		require.NoError(t, err)
		_, err = call.Wait()
		require.Error(t, err)
		return err
	}
	long := map[string]string{"delay": "1m"}

	err := wait(t.Context(), client.Request{Params: long, Timeout: 20 * time.Millisecond})
	require.ErrorIs(t, err, context.DeadlineExceeded, "of the server")
	require.Equal(t, codes.DeadlineExceeded, status.Code(err))

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, wait(ctx, client.Request{Params: long}), context.DeadlineExceeded, "of the caller")

	mine := errors.New("the disk is gone")
	broken := client.FromReader("", x.Desc, io.MultiReader(iotest.ErrReader(mine)))
	err = wait(t.Context(), client.Request{Inputs: []client.Input{broken}})
	require.ErrorIs(t, err, mine)
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	require.NotErrorIs(t, err, context.Canceled)

	err = wait(t.Context(), client.Request{Results: map[string]client.Sink{"z": client.Into(make([]byte, 1000))}})
	require.ErrorIs(t, err, client.ErrInput)
	require.ErrorContains(t, err, `there is no result "z"; the results are ["y"]`)
}
