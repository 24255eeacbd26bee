package server

import (
	"context"
	"net/netip"

	"google.golang.org/grpc/peer"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/tensor"
)

// ListFailures tells a caller why calls failed: if the server identifies callers, its own;
// otherwise the one that it names, or all if it is on this machine.
func (s *Server) ListFailures(ctx context.Context, req *pb.ListFailuresRequest) (*pb.ListFailuresResponse, error) {
	named := len(req.GetCallId()) > 0
	call, valid := tensor.ParseID(req.GetCallId())
	switch {
	case named && !valid:
		return nil, frame.Errorf(frame.InvalidArgument, "call_id: %d bytes; an id has %d, which are not all 0", len(req.GetCallId()), len(call))
	case !named && s.cfg.Identify == nil && !onThisMachine(ctx):
		return nil, frame.Errorf(frame.FailedPrecondition, "this server does not know who you are: name the call, or ask from its own machine")
	case !received(ctx).Take(failuresBytes):
		return nil, errReceived
	}
	who := Principal(ctx)
	list := s.core.Failures.Before(req.GetBefore(), failuresPage, func(f *failures.Failure) bool {
		return f.Principal == who && (!named || f.Call == call)
	})
	out := &pb.ListFailuresResponse{Failures: each(list, func(f failures.Failure) *pb.CallFailure {
		return &pb.CallFailure{CallId: f.Call[:], Model: f.Model, Code: uint32(f.Code), Cause: f.Cause, FailedMillis: f.At.UnixMilli()}
	})}
	if len(list) == failuresPage {
		out.NextBefore = list[len(list)-1].Number
	}
	return out, nil
}

// onThisMachine reports whether the sender of ctx's RPC is on this machine.
func onThisMachine(ctx context.Context) bool {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return false
	}
	at, err := netip.ParseAddrPort(p.Addr.String())
	return p.Addr.Network() == "unix" || err == nil && at.Addr().Unmap().IsLoopback()
}
