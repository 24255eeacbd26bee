package server_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
)

// TestAClientThatStillWritesIsReadWhenItsRPCHasFailed: gRPC's C core forgets the status when it
// cannot write. More than a window (4 MiB) of it is written here.
func TestAClientThatStillWritesIsReadWhenItsRPCHasFailed(t *testing.T) {
	testkit.Start(t)
	f := serve(t, func(c *server.Config) { c.Sessions, c.Transfers, c.Store = 1, 1, shelf(t, mib) })
	full := pb.NewTensorServiceClient(f.dial(t))
	holding, release := context.WithCancel(t.Context())
	defer release()
	_, err := full.StreamTensors(holding)
	require.NoError(t, err)
	_, err = full.PushTensors(holding)
	require.NoError(t, err)
	testkit.Eventually(t, func() bool { return f.counters(t)["open_transfers"] == 1 }, "the push")
	stub := pb.NewTensorServiceClient(f.dial(t))
	chunk := &pb.Frame{Chunk: &pb.Chunk{TensorId: newID(), Data: make([]byte, 64<<10)}}
	for name, open := range map[string]func() (grpc.ClientStream, error){
		"a session": func() (grpc.ClientStream, error) { return stub.StreamTensors(t.Context()) },
		"a push":    func() (grpc.ClientStream, error) { return stub.PushTensors(t.Context()) },
	} {
		s, err := open()
		require.NoError(t, err)
		for i := range 96 {
			require.NoError(t, s.SendMsg(chunk), "%s: %d", name, i)
		}
		st := status.Convert(s.RecvMsg(new(pb.Frame)))
		require.Equal(t, codes.ResourceExhausted, st.Code(), name)
		require.Contains(t, st.Message(), "the limit of the server is 1")

		endless, err := open() // it is read for so long and no longer
		require.NoError(t, err)
		sent := 0
		for endless.SendMsg(chunk) == nil {
			sent += len(chunk.GetChunk().GetData())
		}
		require.Less(t, sent, 32*mib, name)
		require.Equal(t, codes.ResourceExhausted, status.Code(endless.RecvMsg(new(pb.Frame))), name)
	}
}
