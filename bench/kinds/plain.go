package kinds

import (
	"context"
	"errors"
	"io"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tensorferry/tensorferry/internal/bench"
)

// Steps names tensorferry whose calls are steps of a sequence, as README shows them, and
// Plain what one writes without it: a stream of messages of bytes, unchecked.
const (
	Steps = bench.Tensorferry + ", steps"
	Plain = "gRPC stream, BytesValue"
)

// plain echoes a message of a stream.
var plain = bench.Kind{
	Name: Plain, OwnMemory: true,
	Serve: func(ctx context.Context, l net.Listener, _ bench.Place) error {
		s := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
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
		}))
		defer context.AfterFunc(ctx, s.Stop)()
		return s.Serve(l)
	},
	Dial: func(_ context.Context, p bench.Place) (bench.Client, error) {
		conn, err := grpc.NewClient(bench.Target, bench.DialOptions(p)...)
		if err != nil {
			return bench.Client{}, err
		}
		own, cancel := context.WithCancel(context.Background()) // until Close
		s, err := conn.NewStream(own, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/bench/plain")
		if err != nil {
			cancel()
			return bench.Client{}, errors.Join(err, conn.Close())
		}
		return bench.Client{
			Run: func(context.Context, bench.Op, *time.Time) error {
				if err := s.SendMsg(&wrapperspb.BytesValue{Value: p.Source}); err != nil {
					return err
				}
				m := new(wrapperspb.BytesValue)
				if err := s.RecvMsg(m); err != nil {
					return err
				}
				copy(p.To, m.Value)
				return nil
			},
			Close: func() error {
				cancel()
				return conn.Close()
			},
		}, nil
	},
}
