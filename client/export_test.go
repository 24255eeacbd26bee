package client

import (
	"context"
	"net"

	"google.golang.org/grpc"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
)

// Dialling has a client dial by dial.
func (cfg Config) Dialling(dial func(ctx context.Context, network, address string) (net.Conn, error)) Config {
	cfg.dial = dial
	return cfg
}

// SessionStream is the RPC of a session.
type SessionStream = grpc.BidiStreamingClient[pb.Frame, pb.Frame]

// WrapSessions has the sessions that c opens use what wrap makes of their RPCs.
func (c *Client) WrapSessions(wrap func(SessionStream) SessionStream) {
	c.stub = wrappedStub{c.stub, wrap}
}

// SharedSession returns the session of Call, Push and Pull.
func (c *Client) SharedSession(ctx context.Context) (*Session, error) { return c.sharedSession(ctx) }

type wrappedStub struct {
	pb.TensorServiceClient
	wrap func(SessionStream) SessionStream
}

// StreamTensors opens a session's RPC.
func (w wrappedStub) StreamTensors(ctx context.Context, opts ...grpc.CallOption) (SessionStream, error) {
	s, err := w.TensorServiceClient.StreamTensors(ctx, opts...)
	if err != nil {
		return nil, err
	}
	return w.wrap(s), nil
}

// Fresh begins an RPC as calls do.
func (c *Client) Fresh(ctx context.Context, begin func() error) error { return c.fresh(ctx, begin) }

// GRPCTexts are the texts of gRPC that are matched.
var GRPCTexts = map[string]string{"notConnected": notConnected, "noProtocol": noProtocol, "noPreface": noPreface, "otherHTTP": otherHTTP, "otherType": otherType}
