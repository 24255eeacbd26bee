package wire

import (
	"bytes"
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/stats"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// unsent is what a server's stats.Handler does.
type unsent struct{ cut atomic.Int64 }

func (*unsent) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (*unsent) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (*unsent) HandleConn(context.Context, stats.ConnStats)                       {}
func (u *unsent) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if out, ok := s.(*stats.OutPayload); ok && ctx.Err() != nil {
		u.cut.Add(1)
		Unsent(out.Payload)
	}
}

// flood sends frames until the RPC has ended.
type flood struct {
	pb.UnimplementedTensorServiceServer
	flight         InFlight
	sent, released atomic.Int64
}

// Release clears nothing: the payload is that of all frames.
func (f *flood) Release() { f.released.Add(1) }

func (f *flood) send(c *Conn) {
	payload := bytes.Repeat([]byte{7}, 4000)
	for {
		f.sent.Add(1)
		err := c.Send(&frame.Frame{Chunk: frame.Chunk{Tensor: tensor.ID{1}, Data: [][]byte{payload}}}, f)
		if err != nil {
			return
		}
	}
}

func (f *flood) StreamTensors(s grpc.BidiStreamingServer[pb.Frame, pb.Frame]) error {
	c := NewConn(s, &f.flight)
	go func() { // ends with the RPC
		for {
			if _, err := c.Recv(); err != nil {
				return
			}
		}
	}()
	f.send(c)
	return nil
}

// Whether gRPC forgets a frame depends on the moment of its RPC's end: here it forgets
// some on both sides.
func TestEveryLoanOfRPCsThatAreCancelledEndsWithoutACollection(t *testing.T) {
	testkit.Start(t)
	rpcs := 500
	if testing.Short() {
		rpcs = 100
	}
	there, here, handler := new(flood), new(flood), new(unsent)
	server := grpc.NewServer(grpc.ForceServerCodecV2(Codec{}), grpc.StatsHandler(handler))
	pb.RegisterTensorServiceServer(server, there)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }() // ends with Stop
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(Track(insecure.NewCredentials())),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(Codec{}), grpc.MaxRetryRPCBufferSize(0)))
	if err != nil {
		t.Fatal(err)
	}
	var work sync.WaitGroup
	slots := make(chan struct{}, 4)
	for i := range rpcs {
		slots <- struct{}{}
		work.Go(func() {
			defer func() { <-slots }()
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			s, err := pb.NewTensorServiceClient(conn).StreamTensors(ctx)
			if err != nil {
				t.Error(err)
				return
			}
			c := NewConn(s, nil)
			if err := c.Send(&frame.Frame{Drain: &frame.Drain{}}, nil); err != nil {
				t.Error(err)
				return
			}
			var sender sync.WaitGroup
			sender.Go(func() { here.send(c) })
			for range i % 8 {
				if _, err := c.Recv(); err != nil {
					t.Error(err)
				}
				c.Free()
			}
			cancel()
			for err == nil { // until the RPC has ended
				_, err = c.Recv()
			}
			sender.Wait()
			c.Finish()
		})
	}
	work.Wait()
	for side, f := range map[string]*flood{"server": there, "client": here} {
		testkit.Eventually(t, func() bool { return f.released.Load() == f.sent.Load() }, "the loans of the "+side)
	}
	t.Logf("%d frames of the server, %d of the client; %d of the server's were sent when the RPC was over", there.sent.Load(), here.sent.Load(), handler.cut.Load())
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	server.Stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
	if there.released.Load() != there.sent.Load() || here.released.Load() != here.sent.Load() {
		t.Error("a loan ended twice")
	}
}
