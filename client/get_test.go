package client

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// generous announces more tensors than a pull selects, on allowance.
type generous struct {
	pb.UnimplementedTensorServiceServer
	tensors int
}

func (g *generous) StreamTensors(s pb.TensorService_StreamTensorsServer) error {
	f, err := s.Recv()
	if err != nil {
		return err
	}
	if err := s.Send(&pb.Frame{Hello: &pb.Hello{Version: 1, SessionId: f.GetHello().GetSessionId(), Checksum: f.GetHello().GetChecksum(), Stores: true, AllowanceBytes: 1 << 20}}); err != nil {
		return err
	}
	for {
		f, err := s.Recv()
		if err != nil {
			return nil
		}
		for _, c := range f.GetCalls() {
			out := &pb.Frame{}
			for range g.tensors {
				id := tensor.NewID()
				out.Descs = append(out.Descs, &pb.TensorDesc{TensorId: id[:], Dtype: 6, Shape: []int64{50000}, SizeBytes: 50000, ChunkBytes: 50000, Name: "x", CallId: c.GetId(), OnAllowance: true})
			}
			if err := s.Send(out); err != nil {
				return err
			}
		}
		for _, id := range f.GetCancels() {
			if err := s.Send(&pb.Frame{Dones: []*pb.Done{{CallId: id.GetCallId(), Code: 1}}}); err != nil {
				return err
			}
		}
	}
}

func TestAPullOfTooManyTensorsGivesItsMemoryBack(t *testing.T) {
	testkit.Start(t)
	for _, n := range []int{1, 2, 3} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		srv := grpc.NewServer()
		pb.RegisterTensorServiceServer(srv, &generous{tensors: n})
		go func() { _ = srv.Serve(l) }()
		c, err := Dial(l.Addr().String(), Config{})
		require.NoError(t, err)
		for range 5 {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			_, err = c.Pull(ctx, PullRequest{Select: []Selection{{Name: "x"}}})
			cancel()
			require.Error(t, err)
		}
		slabs, bytes := c.pool.Live()
		require.Zero(t, slabs, "%d tensors, %d bytes", n, bytes)
		require.NoError(t, c.Close())
		srv.Stop()
	}
}
