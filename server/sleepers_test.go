package server_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// blocking opens calls whose model does not answer, one of a session and one of Compute:
// as many as the server has workers.
func (f *fixture) blocking(ctx context.Context, t testing.TB, model string, params map[string]string) (ended <-chan error) {
	t.Helper()
	x, err := tensor.Of([]byte{1})
	require.NoError(t, err)
	call, err := f.session(t, client.Config{}).Call(ctx, client.Request{Model: model, Params: params, Inputs: []client.Input{client.From("", x)}})
	require.NoError(t, err)
	ask := asking(model, pb.DataType_DATA_TYPE_UINT8, x.Data, 1)
	ask.Params = params
	stub := pb.NewTensorServiceClient(f.dial(t))
	both := make(chan error, 2)
	go func() { // ends with ctx, as the next
		_, err := stub.Compute(ctx, ask)
		both <- err
	}()
	go func() {
		_, err := call.Wait()
		both <- err
	}()
	testkit.Eventually(t, func() bool { return f.counters(t)["calls"] == 2 }, "both calls to be open")
	return both
}

// serves holds the server to small calls of a client that has nothing to do with others.
func (f *fixture) serves(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	s, stub := f.session(t, client.Config{}), pb.NewTensorServiceClient(f.dial(t))
	x, err := tensor.Of([]float32{-1, 2, -3, 4})
	require.NoError(t, err)
	for range 20 {
		y, err := s.Compute(ctx, "relu", x)
		require.NoError(t, err)
		values, err := tensor.Slice[float32](y)
		require.NoError(t, err)
		require.Equal(t, []float32{0, 2, 0, 4}, values)
		_, err = stub.Compute(ctx, asking("relu", pb.DataType_DATA_TYPE_FLOAT32, x.Data, 4))
		require.NoError(t, err)
	}
}

func TestCallsThatSleepHoldUpNobody(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := f.blocking(ctx, t, "slow", map[string]string{"delay": "1m"})
	f.serves(t)
	require.Empty(t, ended, "the calls that sleep are still open")
	cancel()
	require.Error(t, <-ended)
	require.Error(t, <-ended)
}

func TestAModelThatBlocksHoldsUpNobodyElse(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	let := make(chan struct{})
	running := f.addBlocker(t, let)
	ended := f.blocking(t.Context(), t, "blocker", nil)
	testkit.Eventually(t, func() bool { return running.Load() == 2 }, "both workers to be held")
	f.serves(t)
	require.Empty(t, ended, "the calls that block are still open")
	close(let)
	require.NoError(t, <-ended)
	require.NoError(t, <-ended)
}
