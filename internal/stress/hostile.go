package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

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
var lies = map[string]func(h *pb.Hello, r *rand.Rand) []*pb.Frame{
	"no hello": func(h *pb.Hello, _ *rand.Rand) []*pb.Frame {
		return []*pb.Frame{{Chunk: &pb.Chunk{TensorId: h.SessionId, Data: []byte("x")}}}
	},
	"two hellos": func(h *pb.Hello, _ *rand.Rand) []*pb.Frame { return []*pb.Frame{{Hello: h}, {Hello: hello()}} },
	"a version of tomorrow": func(h *pb.Hello, _ *rand.Rand) []*pb.Frame {
		h.Version = 99
		return []*pb.Frame{{Hello: h}}
	},
	"an ID of 3 bytes": func(h *pb.Hello, _ *rand.Rand) []*pb.Frame {
		return []*pb.Frame{{Hello: h}, {Chunk: &pb.Chunk{TensorId: []byte("abc"), Data: []byte("x")}}}
	},
	"a frame that is too large": func(h *pb.Hello, _ *rand.Rand) []*pb.Frame {
		return []*pb.Frame{{Hello: h}, {Chunk: &pb.Chunk{TensorId: h.SessionId, Data: make([]byte, 2*mib)}}}
	},
	pastTheEnd: func(h *pb.Hello, r *rand.Rand) []*pb.Frame {
		id := hello().SessionId
		return []*pb.Frame{{Hello: h}, {
			Descs: []*pb.TensorDesc{{TensorId: id, Dtype: pb.DataType_DATA_TYPE_UINT8, Shape: []int64{8}, SizeBytes: 8, ChunkBytes: 8, Name: "lie"}},
			Chunk: &pb.Chunk{TensorId: id, Index: 1 + r.Uint32(), Data: []byte("12345678")},
		}}
	},
}

// junk sends bytes as they are, and returns those that came.
type junk struct{}

// Marshal copies nothing: v is the bytes.
func (junk) Marshal(v any) ([]byte, error) { return v.([]byte), nil }

// Unmarshal copies.
func (junk) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = slices.Clone(data)
	return nil
}

// Name is that of the stock codec.
func (junk) Name() string { return "proto" }

// random returns up to so many bytes, at least one.
func random(r *rand.Rand, most int) []byte {
	data := make([]byte, 1+r.IntN(most))
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	return data
}

// hostile breaks the protocol in one way, and holds the server to an error that
// says so.
func hostile(ctx context.Context, address string, r *rand.Rand) error {
	ctx, cancel := context.WithTimeout(ctx, hostileWait)
	defer cancel()
	if r.IntN(4) == 0 {
		return hostileBytes(ctx, address, r)
	}
	which, method, messages := "random bytes", "StreamTensors", [][]byte{random(r, 4*kib), random(r, 4*kib), random(r, 4*kib)}
	if r.IntN(4) > 0 {
		which, messages = slices.Sorted(maps.Keys(lies))[r.IntN(len(lies))], nil
		for _, f := range lies[which](hello(), r) {
			data, err := proto.Marshal(f)
			if err != nil {
				return err
			}
			messages = append(messages, data)
		}
	}
	if r.IntN(2) == 0 || which == pastTheEnd {
		method = "PushTensors"
	}
	err := say(ctx, address, method, messages)
	switch code := status.Code(err); code {
	case codes.InvalidArgument, codes.ResourceExhausted, codes.FailedPrecondition, codes.Unimplemented, codes.DataLoss, codes.NotFound:
		return nil
	default:
		return fmt.Errorf("the answer of %s to %s is %v: %w", method, which, code, err)
	}
}

// say sends messages, ends a push, and returns what the server says to them in the end.
func say(ctx context.Context, address, method string, messages [][]byte) error {
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	desc := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	s, err := conn.NewStream(ctx, desc, "/tensorferry.v1.TensorService/"+method, grpc.ForceCodec(junk{}))
	if err != nil {
		return err
	}
	for _, m := range messages {
		if err := s.SendMsg(m); errors.Is(err, io.EOF) { // the server has answered
			break
		} else if err != nil {
			return err
		}
	}
	if method == "PushTensors" {
		if err := s.CloseSend(); err != nil {
			return err
		}
	}
	for {
		var data []byte
		err := s.RecvMsg(&data)
		var told pb.PushTensorsResponse
		if err == nil && method == "PushTensors" { // of the one tensor
			err = proto.Unmarshal(data, &told)
		}
		for _, sum := range told.GetSummaries() {
			err = errors.Join(err, status.Error(codes.Code(sum.GetCode()), sum.GetMessage()))
		}
		if err != nil {
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
	data := append(random(r, 64), random(r, 8*kib)...)
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
