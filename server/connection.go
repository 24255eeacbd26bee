package server

import (
	"context"

	"google.golang.org/grpc/stats"

	"github.com/tensorferry/tensorferry/internal/wire"
)

// connections is how the server hears of the end of a connection. grpc tells a
// stats.Handler of it when reader and writer of the connection have ended, and
// tells nobody else. What it tells besides costs about 200 bytes a message.
type connections struct{}

type inFlightKey struct{}

// TagConn gives each connection the book of what is sent on it.
func (connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context {
	return context.WithValue(ctx, inFlightKey{}, new(wire.InFlight))
}

// inFlight returns the book of the connection that an RPC came over.
func inFlight(ctx context.Context) *wire.InFlight {
	f, _ := ctx.Value(inFlightKey{}).(*wire.InFlight)
	return f
}

// HandleConn gives back what a dead connection had in its queue.
func (connections) HandleConn(ctx context.Context, s stats.ConnStats) {
	if _, ok := s.(*stats.ConnEnd); ok {
		inFlight(ctx).Abandon()
	}
}

// TagRPC returns ctx.
func (connections) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC does nothing.
func (connections) HandleRPC(context.Context, stats.RPCStats) {}
