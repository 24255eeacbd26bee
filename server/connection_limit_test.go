package server_test

import (
	"context"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/stream"
)

func TestAnRPCWhoseMessageNeverComesIsEnded(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) { c.Session = stream.Limits{FirstFrame: stream.Instant(50 * time.Millisecond)} })
	conn, err := grpc.NewClient(f.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	for _, method := range []string{"GetServiceInfo", "Compute", "PullTensors", "StreamTensors"} {
		t.Run(method, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			// As a stream of the client's, so that the request stays away.
			s, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/tensorferry.v1.TensorService/"+method)
			require.NoError(t, err)
			err = s.RecvMsg(new(pb.Frame))
			require.Error(t, err)
			require.NotErrorIs(t, err, io.EOF)
			require.NoError(t, ctx.Err(), "the server ended it")
			require.Contains(t, []codes.Code{codes.DeadlineExceeded, codes.Canceled}, status.Code(err), "%v", err)
		})
	}
}

func TestTheFirstMessagesClockIsNotTheCalls(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) { c.Session = stream.Limits{FirstFrame: stream.Instant(30 * time.Millisecond)} })
	conn, err := grpc.NewClient(f.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	_, err = pb.NewTensorServiceClient(conn).Compute(t.Context(), &pb.ComputeRequest{
		Model: "slow", Params: map[string]string{"delay": "120ms"},
		Inputs: []*pb.NamedTensor{{Dtype: pb.DataType_DATA_TYPE_INT8, Shape: []int64{1}, Data: []byte{1}}},
	})
	require.NoError(t, err)
}
