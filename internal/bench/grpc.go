package bench

import (
	"context"
	"fmt"
	"net"
	"path"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	tensorferryv1 "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/tensor"
)

// DialOptions have a gRPC client connect as p says, without encryption of gRPC's own and
// without a proxy; its target is Target. They lend nothing.
func DialOptions(p Place) []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return p.Connect(ctx) }),
	}
}

// Target is resolved by nobody.
const Target = "passthrough:///bench"

// Stock is what one writes with generated code: a bidirectional gRPC stream of
// messages, the proto codec and every window as gRPC has it, CRC-32C computed and
// checked for each chunk of size bytes, the payload copied to its place. A small call
// is a message there and a message back.
func Stock(name string, size int) Kind {
	return Kind{
		Name: name,
		Serve: func(ctx context.Context, l net.Listener, p Place) error {
			server := grpc.NewServer(grpc.WaitForHandlers(true), // they write to memory that is lent
				grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
					method, _ := grpc.MethodFromServerStream(s)
					return Answer(&chunkLink{messages: s}, Op(path.Base(method)), p.To, size)
				}))
			defer context.AfterFunc(ctx, server.Stop)()
			return server.Serve(l)
		},
		Dial: func(_ context.Context, p Place) (Client, error) {
			conn, err := grpc.NewClient(Target, DialOptions(p)...)
			if err != nil {
				return Client{}, err
			}
			desc := &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
			return asks(p, size, func(_ context.Context, op Op) (Link, error) {
				ctx, cancel := context.WithCancel(context.Background()) // until it is closed
				s, err := conn.NewStream(ctx, desc, "/bench/"+string(op))
				return &chunkLink{messages: s, cancel: cancel}, err
			}, conn.Close), nil
		},
	}
}

// StockGRPC names Stock with chunks as tensorferry has them.
const StockGRPC = "gRPC, stock codec"

// chunkLink sends chunks in one reused message.
type chunkLink struct {
	messages
	out    tensorferryv1.Chunk
	sent   uint32
	cancel func() // at the client
}

// messages is either end of a gRPC stream.
type messages interface {
	SendMsg(m any) error
	RecvMsg(m any) error
}

func (l *chunkLink) Send(chunk []byte) error {
	c := &l.out
	c.Index, c.Data = l.sent, chunk
	l.sent++
	c.Checksum = codec.CRC32C.Update(codec.CRC32C.Seed(tensor.ID{}, c.Index), chunk)
	return l.SendMsg(c)
}

func (l *chunkLink) Receive(chunk []byte) error {
	c := new(tensorferryv1.Chunk)
	if err := l.RecvMsg(c); err != nil {
		return err
	}
	if len(c.Data) != len(chunk) {
		return fmt.Errorf("bench: a chunk of %d bytes came, want %d", len(c.Data), len(chunk))
	}
	copy(chunk, c.Data)
	return CheckSum(codec.CRC32C, chunk, codec.CRC32C.Seed(tensor.ID{}, c.Index), c.Checksum)
}

func (l *chunkLink) Close() error {
	l.cancel()
	return nil
}
