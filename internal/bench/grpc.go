package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

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
			desc := stockStream
			desc.Handler = func(_ any, s grpc.ServerStream) error {
				return answers(&chunkLink{messages: s, end: func() error { return nil }}, p.To, size)
			}
			server := grpc.NewServer(grpc.WaitForHandlers(true)) // they write to memory that is lent
			server.RegisterService(&grpc.ServiceDesc{ServiceName: "bench", HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{desc}}, 0)
			defer context.AfterFunc(ctx, server.Stop)()
			return server.Serve(l)
		},
		Dial: func(_ context.Context, p Place) (Client, error) {
			conn, err := grpc.NewClient(Target, DialOptions(p)...)
			if err != nil {
				return Client{}, err
			}
			s, err := conn.NewStream(context.Background(), &stockStream, "/bench/Chunks") // until the connection is closed
			if err != nil {
				return Client{}, errors.Join(err, conn.Close())
			}
			return asks(&chunkLink{messages: s, end: sync.OnceValue(conn.Close)}, p, size), nil
		},
	}
}

// StockGRPC names Stock with chunks as tensorferry has them.
const StockGRPC = "gRPC, stock codec"

var stockStream = grpc.StreamDesc{StreamName: "Chunks", ServerStreams: true, ClientStreams: true}

// chunkLink sends chunks in one reused message. The client's first chunk says what it
// wants in place of the tensor's ID.
type chunkLink struct {
	messages
	op    Op // that the next message says
	out   tensorferryv1.Chunk
	first *tensorferryv1.Chunk // that was heard, and is received next
	sent  uint32
	end   func() error
}

// messages is either end of a gRPC stream.
type messages interface {
	SendMsg(m any) error
	RecvMsg(m any) error
}

func (l *chunkLink) Tell(op Op, first bool) error {
	if l.op = op; first { // it goes with the first chunk
		return nil
	}
	return l.Send(nil)
}

func (l *chunkLink) Hear() (Op, error) {
	c := new(tensorferryv1.Chunk)
	if err := l.RecvMsg(c); err != nil {
		return "", err
	}
	if len(c.Data) > 0 {
		l.first = c
	}
	return Op(c.TensorId), nil
}

func (l *chunkLink) Send(chunk []byte) error {
	c := &l.out
	c.TensorId = append(c.TensorId[:0], l.op...)
	l.op = ""
	c.Index, c.Data = l.sent, chunk
	l.sent++
	c.Checksum = codec.CRC32C.Update(codec.CRC32C.Seed(tensor.ID{}, c.Index), chunk)
	return l.SendMsg(c)
}

func (l *chunkLink) Receive(chunk []byte) error {
	c := l.first
	if l.first = nil; c == nil {
		c = new(tensorferryv1.Chunk)
		if err := l.RecvMsg(c); errors.Is(err, io.EOF) {
			return io.ErrUnexpectedEOF
		} else if err != nil {
			return err
		}
	}
	if len(c.Data) != len(chunk) {
		return fmt.Errorf("bench: a chunk of %d bytes came, want %d", len(c.Data), len(chunk))
	}
	copy(chunk, c.Data)
	return CheckSum(codec.CRC32C, chunk, codec.CRC32C.Seed(tensor.ID{}, c.Index), c.Checksum)
}

func (l *chunkLink) Close() error { return l.end() }
