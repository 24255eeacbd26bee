package kinds

import (
	"context"
	"errors"
	"io"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tensorferry/tensorferry/internal/bench"
)

// What one writes without tensorferry: messages of bytes, unchecked, on a stream or as calls
// of their own.
const (
	Plain = "gRPC stream, BytesValue"
	Unary = "gRPC unary, BytesValue"
)

// plain is a client of either kind; the server echoes both.
func plain(name string, open func(context.Context, *grpc.ClientConn) (caller, error)) bench.Kind {
	return bench.Kind{
		Name: name, OwnMemory: true,
		Serve: func(ctx context.Context, l net.Listener, _ bench.Place) error {
			s := grpc.NewServer(grpc.UnknownServiceHandler(echoes))
			s.RegisterService(&grpc.ServiceDesc{ServiceName: "bench", HandlerType: (*any)(nil), Methods: []grpc.MethodDesc{{MethodName: "unary", Handler: echo}}}, nil)
			defer context.AfterFunc(ctx, s.Stop)()
			return s.Serve(l)
		},
		Dial: func(_ context.Context, p bench.Place) (bench.Client, error) {
			conn, err := grpc.NewClient(bench.Target, bench.DialOptions(p)...)
			if err != nil {
				return bench.Client{}, err
			}
			own, cancel := context.WithCancel(context.Background()) // until it is closed
			return calling(p, func() (caller, error) { return open(own, conn) }, func() error {
				cancel()
				return conn.Close()
			})
		},
	}
}

// echoes answers each message of a stream with the same.
func echoes(_ any, s grpc.ServerStream) error {
	for {
		m := new(wrapperspb.BytesValue)
		if err := s.RecvMsg(m); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := s.SendMsg(m); err != nil {
			return err
		}
	}
}

// echo answers a call with what it brought.
func echo(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) { //nolint:revive // as gRPC has it
	m := new(wrapperspb.BytesValue)
	return m, decode(m)
}

func streams(own context.Context, conn *grpc.ClientConn) (caller, error) {
	s, err := conn.NewStream(own, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/bench/stream")
	return func(_ context.Context, data []byte) ([]byte, error) {
		if err := s.SendMsg(&wrapperspb.BytesValue{Value: data}); err != nil {
			return nil, err
		}
		m := new(wrapperspb.BytesValue)
		err := s.RecvMsg(m)
		return m.Value, err
	}, err
}

func unary(_ context.Context, conn *grpc.ClientConn) (caller, error) {
	return func(ctx context.Context, data []byte) ([]byte, error) {
		m := new(wrapperspb.BytesValue)
		err := conn.Invoke(ctx, "/bench/unary", &wrapperspb.BytesValue{Value: data}, m)
		return m.Value, err
	}, nil
}
