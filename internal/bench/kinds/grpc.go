package kinds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	tensorferryv1 "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/tensor"
)

// DialOptions have a gRPC client connect over "tcp" and "unix" alike, without
// encryption and without a proxy; its target is Target. They lend nothing.
func DialOptions(p bench.Place) []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, p.Network, p.Address)
		}),
	}
}

// Target is resolved by nobody.
const Target = "passthrough:///bench"

// StockGRPC is what one writes with generated code: a bidirectional gRPC stream of
// messages, the proto codec and every window as gRPC has it, CRC-32C computed and
// checked for each chunk, the payload copied to its place. A small call is a message
// there and a message back.
var StockGRPC = stock("gRPC, stock codec", bench.ChunkBytes, false)

// StockTLS is StockGRPC with encryption.
var StockTLS = stock(StockGRPC.Name+OverTLS, bench.ChunkBytes, true)

// StockSmall is StockGRPC with messages of 1 KiB: many small tensors, which have no names.
var StockSmall = stock(StockGRPC.Name+", 1 KiB", 1<<10, false)

func stock(name string, size int, secure bool) bench.Kind {
	return bench.Kind{
		Name: name,
		Serve: func(l net.Listener, p bench.Place) (bench.Server, error) {
			idle := bench.NewIdle()
			desc := stockStream
			desc.Handler = func(_ any, s grpc.ServerStream) error {
				defer close(idle) // there is one gRPC stream
				return answers(&chunkLink{messages: s, end: func() error { return nil }}, p.To, size, idle)
			}
			creds, err := serverCredentials(p, secure)
			if err != nil {
				return bench.Server{}, errors.Join(err, l.Close())
			}
			server := grpc.NewServer(grpc.Creds(creds), grpc.WaitForHandlers(true)) // they write to memory that is lent until Close
			server.RegisterService(&grpc.ServiceDesc{ServiceName: "bench", HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{desc}}, 0)
			return bench.Go(func() error { return server.Serve(l) }, server.Stop, idle), nil
		},
		Dial: func(_ context.Context, p bench.Place) (bench.Client, error) {
			creds, err := clientCredentials(p, secure)
			if err != nil {
				return bench.Client{}, err
			}
			conn, err := grpc.NewClient(Target, append(DialOptions(p), grpc.WithTransportCredentials(creds))...)
			if err != nil {
				return bench.Client{}, err
			}
			s, err := conn.NewStream(context.Background(), &stockStream, "/bench/Chunks") // until the connection is closed
			if err != nil {
				return bench.Client{}, errors.Join(err, conn.Close())
			}
			return asks(&chunkLink{messages: s, end: conn.Close}, p, size), nil
		},
	}
}

var stockStream = grpc.StreamDesc{StreamName: "Chunks", ServerStreams: true, ClientStreams: true}

// chunkLink sends chunks in one reused message. The client's first chunk says what it
// wants in place of the tensor's ID.
type chunkLink struct {
	messages
	op    bench.Op // that the next message says
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

func (l *chunkLink) Tell(op bench.Op, first bool) error {
	if l.op = op; first { // it goes with the first chunk
		return nil
	}
	return l.Send(nil)
}

func (l *chunkLink) Hear() (bench.Op, error) {
	c := new(tensorferryv1.Chunk)
	if err := l.RecvMsg(c); err != nil {
		return "", err
	}
	if len(c.Data) > 0 {
		l.first = c
	}
	return bench.Op(c.TensorId), nil
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
