package bench

import (
	"context"
	"errors"
	"fmt"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/types/known/wrapperspb"

	tensorferryv1 "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/tensor"
)

// DialOptions have a gRPC client connect over "tcp" and "unix" alike, without
// encryption and without a proxy; its target is Target. They lend nothing.
func DialOptions(p Place) []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, p.Network, p.Address)
		}),
	}
}

// Target is resolved by nobody.
const Target = "passthrough:///bench"

// StockGRPC is what one writes with generated code: a bidirectional gRPC stream
// of frames, the proto codec and every window as gRPC has it, CRC32C computed
// and checked for each chunk, the payload copied to its place.
var StockGRPC = Kind{
	Name: "gRPC, stock codec",
	Serve: func(l net.Listener, p Place) (Server, error) {
		server := grpc.NewServer(grpc.WaitForHandlers(true)) // they write to memory that is lent until Close
		s := stockServer{remote: p.To, idle: make(chan struct{}, 1)}
		tensorferryv1.RegisterTensorServiceServer(server, s)
		return Go(func() error { return server.Serve(l) }, server.Stop, s.idle), nil
	},
	Dial: func(_ context.Context, p Place) (Client, error) {
		conn, err := grpc.NewClient(Target, DialOptions(p)...)
		if err != nil {
			return Client{}, err
		}
		s, err := tensorferryv1.NewTensorServiceClient(conn).StreamTensors(context.Background()) // until the connection is closed
		if err != nil {
			return Client{}, errors.Join(err, conn.Close())
		}
		return asks(newFrameLink(s, p.To, conn.Close), p, ChunkBytes), nil
	},
}

// stockServer serves one gRPC stream.
type stockServer struct {
	tensorferryv1.UnimplementedTensorServiceServer
	remote []byte
	idle   chan struct{}
}

// StreamTensors receives one source after the other, until the client leaves.
func (s stockServer) StreamTensors(stream grpc.BidiStreamingServer[tensorferryv1.Frame, tensorferryv1.Frame]) error {
	defer close(s.idle) // there is one gRPC stream
	return answers(newFrameLink(stream, s.remote, func() error { return nil }), s.remote, ChunkBytes, s.idle)
}

// benchTensor is the tensor that every chunk is said to be of.
var benchTensor = tensor.ID{15: 1}

// frameStream is either end of a gRPC stream.
type frameStream interface {
	Send(*tensorferryv1.Frame) error
	Recv() (*tensorferryv1.Frame, error)
}

// frameLink sends chunks in one reused frame.
type frameLink struct {
	frameStream
	frame   tensorferryv1.Frame
	chunks  int // of a tensor
	in, out int // chunks so far
	end     func() error
}

func newFrameLink(s frameStream, tensor []byte, end func() error) *frameLink {
	l := &frameLink{frameStream: s, chunks: (len(tensor) + ChunkBytes - 1) / ChunkBytes, end: end}
	l.frame.Chunk = &tensorferryv1.Chunk{TensorId: benchTensor[:]}
	return l
}

func (l *frameLink) Tell(op Op) error {
	return l.frameStream.Send(&tensorferryv1.Frame{Calls: []*tensorferryv1.Call{{Model: string(op)}}})
}

func (l *frameLink) Hear() (Op, error) {
	f, err := l.Recv()
	if err == nil && len(f.Calls) != 1 {
		err = fmt.Errorf("bench: a frame with a call is due, not %v", f)
	}
	if err != nil {
		return "", err
	}
	return Op(f.Calls[0].Model), nil
}

func (l *frameLink) Send(chunk []byte) error {
	c := l.frame.Chunk
	c.Index, c.Data = uint32(l.out%l.chunks), chunk
	l.out++
	c.Checksum = codec.CRC32C.Update(codec.CRC32C.Seed(benchTensor, c.Index), chunk)
	return l.frameStream.Send(&l.frame)
}

func (l *frameLink) Receive(chunk []byte) error {
	f, err := l.Recv()
	if err != nil {
		return err
	}
	c, i := f.Chunk, uint32(l.in%l.chunks)
	l.in++
	if c.GetIndex() != i || len(c.GetData()) != len(chunk) {
		return fmt.Errorf("bench: chunk %d of %d bytes came, want %d of %d", c.GetIndex(), len(c.GetData()), i, len(chunk))
	}
	copy(chunk, c.Data)
	return CheckSum(codec.CRC32C, chunk, codec.CRC32C.Seed(benchTensor, i), c.Checksum)
}

func (l *frameLink) Close() error { return l.end() }

// pings are what a small call over grpc-go costs with nothing around it: a message
// goes and comes back on an open gRPC stream, and is copied to its place. The first
// is as one writes it with generated code; the second is the least that it can be:
// its codec passes bytes through, and the server sends back the very buffers it
// received.
const (
	PingStock = "gRPC, one message"
	PingRaw   = "gRPC, bytes passed through"
)

var pings = []Kind{
	ping(PingStock, pingCodec{
		message: func() any { return new(wrapperspb.BytesValue) },
		out:     func(data []byte) any { return wrapperspb.Bytes(data) },
		take:    func(m any, back []byte) int { return copy(back, m.(*wrapperspb.BytesValue).Value) },
	}),
	ping(PingRaw, pingCodec{
		server:  []grpc.ServerOption{grpc.ForceServerCodecV2(rawCodec{})},
		call:    []grpc.CallOption{grpc.ForceCodecV2(rawCodec{})},
		message: func() any { return new(mem.BufferSlice) },
		out:     func(data []byte) any { return &mem.BufferSlice{mem.SliceBuffer(data)} },
		take: func(m any, back []byte) int {
			in := *m.(*mem.BufferSlice)
			defer in.Free()
			return in.CopyTo(back)
		},
	}),
}

// pingCodec is a way to write the messages.
type pingCodec struct {
	server  []grpc.ServerOption
	call    []grpc.CallOption
	message func() any // an empty one
	out     func(data []byte) any
	take    func(m any, back []byte) int
}

func ping(name string, c pingCodec) Kind {
	desc := grpc.StreamDesc{
		StreamName: "Ping", ServerStreams: true, ClientStreams: true,
		Handler: func(_ any, s grpc.ServerStream) error {
			for {
				m := c.message()
				if err := s.RecvMsg(m); err != nil {
					return err // io.EOF, or the cancellation that ends it
				}
				if err := s.SendMsg(m); err != nil {
					return err
				}
			}
		},
	}
	return Kind{
		Name: name, OwnMemory: true,
		Serve: func(l net.Listener, _ Place) (Server, error) {
			server := grpc.NewServer(c.server...)
			server.RegisterService(&grpc.ServiceDesc{
				ServiceName: "tensorferry.bench.Ping", HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{desc},
			}, struct{}{})
			return Go(func() error { return server.Serve(l) }, server.Stop, always), nil
		},
		Dial: func(_ context.Context, p Place) (Client, error) {
			conn, err := grpc.NewClient(Target, DialOptions(p)...)
			if err != nil {
				return Client{}, err
			}
			s, err := conn.NewStream(context.Background(), &desc, "/tensorferry.bench.Ping/Ping", c.call...) // until the connection is closed
			if err != nil {
				return Client{}, errors.Join(err, conn.Close())
			}
			return Client{Run: func(ctx context.Context, _ Op) error {
				defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
				m := c.message()
				err := s.SendMsg(c.out(p.Source))
				if err == nil {
					err = s.RecvMsg(m)
				}
				if err == nil && c.take(m, p.To) != len(p.To) {
					err = errors.New("bench: the echo is shorter than what was sent")
				}
				return err
			}, Close: conn.Close}, nil
		},
	}
}

// rawCodec passes the bytes of a *mem.BufferSlice through, with the references that
// it owns.
type rawCodec struct{}

func (rawCodec) Name() string { return "raw" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) { return *v.(*mem.BufferSlice), nil }

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	data.Ref()
	*v.(*mem.BufferSlice) = data
	return nil
}
