package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
)

// GRPCPing is the least a small call over grpc-go can cost: a message goes and
// comes back on an open gRPC stream. Its codec passes bytes through: the server
// sends back the very buffers it received, and the client copies once, into
// memory of its own. It belongs to one goroutine.
type GRPCPing struct {
	out, back []byte
	pair      *grpcPair
	stream    grpc.ClientStream
	cancel    context.CancelFunc
}

var pingStream = grpc.StreamDesc{StreamName: "Ping", ServerStreams: true, ClientStreams: true, Handler: pingHandler}

// NewGRPCPing connects over "tcp" or "unix" for messages of size bytes, and
// starts goroutines that serve until Close.
func NewGRPCPing(network string, size int) (*GRPCPing, error) {
	server := grpc.NewServer(grpc.ForceServerCodecV2(rawCodec{}))
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "tensorferry.bench.Ping", HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{pingStream},
	}, struct{}{})
	pair, err := newGRPCPair(network, server, grpc.WithDefaultCallOptions(grpc.ForceCodecV2(rawCodec{})))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s, err := pair.conn.NewStream(ctx, &pingStream, "/tensorferry.bench.Ping/Ping")
	if err != nil {
		cancel()
		return nil, errors.Join(err, pair.close())
	}
	out := make([]byte, size)
	for i := range out {
		out[i] = byte(i * 7)
	}
	return &GRPCPing{out: out, back: make([]byte, size), pair: pair, stream: s, cancel: cancel}, nil
}

// Name says what it is.
func (p *GRPCPing) Name() string { return fmt.Sprintf("bare grpc-go echo of %d bytes", len(p.out)) }

// Ping makes one round trip and returns its time. The bytes that came back are
// compared outside it.
func (p *GRPCPing) Ping(ctx context.Context) (time.Duration, error) {
	defer context.AfterFunc(ctx, p.cancel)()
	clear(p.back)
	begin := time.Now()
	if err := p.stream.SendMsg(rawBytes(p.out)); err != nil {
		return 0, err
	}
	var in rawBuffers
	if err := p.stream.RecvMsg(&in); err != nil {
		return 0, err
	}
	n := in.data.CopyTo(p.back)
	in.data.Free()
	elapsed := time.Since(begin)
	if n != len(p.out) || !bytes.Equal(p.back, p.out) {
		return 0, errors.New("bench: the echo is not what was sent")
	}
	return elapsed, nil
}

// Close ends the connection and waits for the serving goroutines.
func (p *GRPCPing) Close() error {
	p.cancel()
	return p.pair.close()
}

func pingHandler(_ any, s grpc.ServerStream) error {
	for {
		var m rawBuffers
		if err := s.RecvMsg(&m); err != nil {
			return err // io.EOF, or the cancellation that ends the baseline
		}
		if err := s.SendMsg(&m); err != nil {
			return err
		}
	}
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
