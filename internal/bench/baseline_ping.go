package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// GRPCPing is what a small call over grpc-go costs with nothing around it: a
// message goes and comes back on an open gRPC stream. It belongs to one goroutine.
type GRPCPing struct {
	kind      pingKind
	out, back []byte
	pair      *grpcPair
	stream    grpc.ClientStream
	cancel    context.CancelFunc
}

// pingKind is a way to write the two ends.
type pingKind struct {
	server []grpc.ServerOption
	call   []grpc.CallOption
	// echo receives a message and sends it back.
	echo func(grpc.ServerStream) error
	// trip sends out and returns the bytes that came back, in the client's own
	// memory: back, or memory of the message's.
	trip func(s grpc.ClientStream, out, back []byte) ([]byte, error)
}

// NewStockPing is GRPCPing as one writes it with generated code: the proto codec
// and a message that has one bytes field.
func NewStockPing(network string, size int) (*GRPCPing, error) {
	return newPing(network, size, pingKind{
		echo: func(s grpc.ServerStream) error {
			var m wrapperspb.BytesValue
			if err := s.RecvMsg(&m); err != nil {
				return err
			}
			return s.SendMsg(&m)
		},
		trip: func(s grpc.ClientStream, out, _ []byte) ([]byte, error) {
			if err := s.SendMsg(wrapperspb.Bytes(out)); err != nil {
				return nil, err
			}
			var m wrapperspb.BytesValue
			err := s.RecvMsg(&m)
			return m.GetValue(), err
		},
	})
}

// NewRawPing is the least that GRPCPing can be: its codec passes bytes through,
// the server sends back the very buffers it received, and the client copies
// once.
func NewRawPing(network string, size int) (*GRPCPing, error) {
	return newPing(network, size, pingKind{
		server: []grpc.ServerOption{grpc.ForceServerCodecV2(rawCodec{})},
		call:   []grpc.CallOption{grpc.ForceCodecV2(rawCodec{})},
		echo: func(s grpc.ServerStream) error {
			var m rawBuffers
			if err := s.RecvMsg(&m); err != nil {
				return err
			}
			return s.SendMsg(&m)
		},
		trip: func(s grpc.ClientStream, out, back []byte) ([]byte, error) {
			if err := s.SendMsg(rawBytes(out)); err != nil {
				return nil, err
			}
			var in rawBuffers
			if err := s.RecvMsg(&in); err != nil {
				return nil, err
			}
			defer in.data.Free()
			return back[:in.data.CopyTo(back)], nil
		},
	})
}

// newPing connects over "tcp" or "unix" for messages of size bytes, and starts
// goroutines that serve until Close.
func newPing(network string, size int, kind pingKind) (*GRPCPing, error) {
	desc := grpc.StreamDesc{
		StreamName: "Ping", ServerStreams: true, ClientStreams: true,
		Handler: func(_ any, s grpc.ServerStream) error {
			for {
				if err := kind.echo(s); err != nil {
					return err // io.EOF, or the cancellation that ends the baseline
				}
			}
		},
	}
	server := grpc.NewServer(kind.server...)
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "tensorferry.bench.Ping", HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{desc},
	}, struct{}{})
	pair, err := newGRPCPair(network, server, grpc.WithDefaultCallOptions(kind.call...))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s, err := pair.conn.NewStream(ctx, &desc, "/tensorferry.bench.Ping/Ping")
	if err != nil {
		cancel()
		return nil, errors.Join(err, pair.close())
	}
	out := make([]byte, size)
	for i := range out {
		out[i] = byte(i * 7)
	}
	return &GRPCPing{kind: kind, out: out, back: make([]byte, size), pair: pair, stream: s, cancel: cancel}, nil
}

// Ping makes one round trip and returns its time. The bytes that came back are
// compared outside it.
func (p *GRPCPing) Ping(ctx context.Context) (time.Duration, error) {
	defer context.AfterFunc(ctx, p.cancel)()
	clear(p.back)
	begin := time.Now()
	got, err := p.kind.trip(p.stream, p.out, p.back)
	elapsed := time.Since(begin)
	if err == nil && !bytes.Equal(got, p.out) {
		err = errors.New("bench: the echo is not what was sent")
	}
	return elapsed, err
}

// Close ends the connection and waits for the serving goroutines.
func (p *GRPCPing) Close() error {
	p.cancel()
	return p.pair.close()
}

// rawBytes is a message that is lent to the codec, rawBuffers one that owns a
// reference of each of its buffers and hands them over when it is sent.
type (
	rawBytes   []byte
	rawBuffers struct{ data mem.BufferSlice }
)

// rawCodec passes bytes through.
type rawCodec struct{}

func (rawCodec) Name() string { return "raw" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	switch v := v.(type) {
	case rawBytes:
		return mem.BufferSlice{mem.SliceBuffer(v)}, nil
	case *rawBuffers:
		return v.data, nil
	}
	return nil, fmt.Errorf("bench: %T is no raw message", v)
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	m, ok := v.(*rawBuffers)
	if !ok {
		return fmt.Errorf("bench: %T is no raw message", v)
	}
	data.Ref()
	m.data = data
	return nil
}
