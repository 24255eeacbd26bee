package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/session"
)

// hostileWait bounds what a hostile peer waits for.
const hostileWait = 15 * time.Second

// hello is a correct one.
func hello() *pb.Hello {
	id := session.NewID()
	return &pb.Hello{Version: 1, SessionId: id[:], MaxChunkBytes: mib, AllowanceBytes: mib, Checksum: pb.Checksum_CHECKSUM_CRC32C, MaxOpenTensors: 64}
}

// pastTheEnd is for pushes only: in a session such a tensor waits for its call.
const pastTheEnd = "a chunk past the end"

// lies are frames that no session or push may survive, each beginning with what is
// sent before them.
var lies = map[string]func(r *rand.Rand) []*pb.Frame{
	"no hello": func(*rand.Rand) []*pb.Frame {
		return []*pb.Frame{{Chunk: &pb.Chunk{TensorId: hello().SessionId, Data: []byte("x")}}}
	},
	"two hellos": func(*rand.Rand) []*pb.Frame { return []*pb.Frame{{Hello: hello()}, {Hello: hello()}} },
	"a version of tomorrow": func(*rand.Rand) []*pb.Frame {
		h := hello()
		h.Version = 99
		return []*pb.Frame{{Hello: h}}
	},
	"an ID of 3 bytes": func(*rand.Rand) []*pb.Frame {
		return []*pb.Frame{{Hello: hello()}, {Chunk: &pb.Chunk{TensorId: []byte("abc"), Data: []byte("x")}}}
	},
	"a frame that is too large": func(*rand.Rand) []*pb.Frame {
		return []*pb.Frame{{Hello: hello()}, {Chunk: &pb.Chunk{TensorId: hello().SessionId, Data: make([]byte, 2*mib)}}}
	},
	pastTheEnd: func(r *rand.Rand) []*pb.Frame {
		id := hello().SessionId
		return []*pb.Frame{{Hello: hello()}, {
			Descs: []*pb.TensorDesc{{TensorId: id, Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{8}, SizeBytes: 8, ChunkBytes: 8, Name: "lie"}},
			Chunk: &pb.Chunk{TensorId: id, Index: 1 + r.Uint32(), Data: []byte("12345678")},
		}}
	},
}

// junk sends bytes as they are.
type junk struct{}

// Marshal copies nothing: v is the bytes.
func (junk) Marshal(v any) ([]byte, error) { return v.([]byte), nil }

// Unmarshal drops what came.
func (junk) Unmarshal([]byte, any) error { return nil }

// Name is that of the stock codec.
func (junk) Name() string { return "proto" }

// hostile breaks the protocol in one way, and holds the server to an error that
// says so.
func hostile(ctx context.Context, address string, r *rand.Rand) error {
	ctx, cancel := context.WithTimeout(ctx, hostileWait)
	defer cancel()
	if r.IntN(4) == 0 {
		return hostileBytes(ctx, address, r)
	}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	stub := pb.NewTensorServiceClient(conn)
	which, push := "random bytes", r.IntN(2) == 0
	if r.IntN(4) == 0 {
		err = randomFrames(ctx, conn, r, push)
	} else {
		at := r.IntN(len(lies))
		for which = range lies {
			if at--; at < 0 {
				break
			}
		}
		if push = push || which == pastTheEnd; push {
			err = lie(ctx, stub.PushTensors, which, r, func(s grpc.ClientStreamingClient[pb.Frame, pb.PushTensorsResponse]) error {
				resp, err := s.CloseAndRecv()
				if err == nil { // it may have been told of the one tensor
					for _, sum := range resp.GetSummaries() {
						err = errors.Join(err, status.Error(codes.Code(sum.GetCode()), sum.GetMessage()))
					}
				}
				return err
			})
		} else {
			err = lie(ctx, stub.StreamTensors, which, r, func(s grpc.BidiStreamingClient[pb.Frame, pb.Frame]) error {
				for {
					if _, err := s.Recv(); err != nil {
						return err
					}
				}
			})
		}
	}
	switch code := status.Code(err); code {
	case codes.InvalidArgument, codes.ResourceExhausted, codes.FailedPrecondition, codes.Unimplemented, codes.DataLoss, codes.NotFound:
		return nil
	default:
		return fmt.Errorf("the answer to %s (push: %v) is %v: %w", which, push, code, err)
	}
}

type sender interface {
	Send(*pb.Frame) error
	CloseSend() error
}

// lie sends the frames and returns what the server says to them.
func lie[S sender](ctx context.Context, open func(context.Context, ...grpc.CallOption) (S, error), which string, r *rand.Rand, end func(S) error) error {
	s, err := open(ctx)
	if err != nil {
		return err
	}
	for _, f := range lies[which](r) {
		if err := s.Send(f); err != nil && !errors.Is(err, io.EOF) { // EOF: the server has answered
			return err
		}
	}
	return end(s)
}

// randomFrames sends messages of random bytes.
func randomFrames(ctx context.Context, conn *grpc.ClientConn, r *rand.Rand, push bool) error {
	method := "/tensorferry.v1.TensorService/StreamTensors"
	if push {
		method = "/tensorferry.v1.TensorService/PushTensors"
	}
	s, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method, grpc.ForceCodec(junk{}))
	if err != nil {
		return err
	}
	for range 3 {
		data := make([]byte, 1+r.IntN(4*kib))
		for i := range data {
			data[i] = byte(r.Uint32())
		}
		if err := s.SendMsg(data); err != nil {
			break // the server has answered
		}
	}
	if err := s.CloseSend(); err != nil {
		return err
	}
	for {
		if err := s.RecvMsg(new([]byte)); err != nil {
			return err
		}
	}
}

// hostileBytes is no gRPC at all. The server may say what it likes, as long as it
// ends the connection.
func hostileBytes(ctx context.Context, address string, r *rand.Rand) error {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer c.Close()
	end, _ := ctx.Deadline()
	if err := c.SetDeadline(end); err != nil {
		return err
	}
	data := make([]byte, 64+r.IntN(8*kib))
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	if r.IntN(2) == 0 {
		data = append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), data...)
	}
	_, _ = c.Write(data) // it may be closed already
	if r.IntN(4) == 0 {
		return nil // and goes
	}
	_, err = io.Copy(io.Discard, c)
	var slow net.Error
	if errors.As(err, &slow) && slow.Timeout() {
		return errors.New("a connection that speaks no HTTP/2 is still open")
	}
	return nil
}
