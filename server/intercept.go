package server

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"google.golang.org/grpc"
	grpcpeer "google.golang.org/grpc/peer"
)

// intercept returns what every RPC goes through: the log, and inside it the one
// that makes a handler's panic an error, so that the log tells of it too.
func (s *Server) intercept() []grpc.ServerOption {
	log := interceptors.CommonReportableFunc(func(ctx context.Context, c interceptors.CallMeta) (interceptors.Reporter, context.Context) {
		return &rpcLog{ctx: ctx, log: s.log, rpc: c.FullMethod()}, ctx
	})
	panicked := recovery.WithRecoveryHandlerContext(func(_ context.Context, p any) error {
		return s.panicked(p)
	})
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(interceptors.UnaryServerInterceptor(log), recovery.UnaryServerInterceptor(panicked)),
		grpc.ChainStreamInterceptor(interceptors.StreamServerInterceptor(log), recovery.StreamServerInterceptor(panicked)),
	}
}

// panicked counts and logs a panic, of which the peer learns no more than that
// something went wrong. It is called while the panic unwinds.
func (s *Server) panicked(p any) error {
	s.panics.Add(1)
	s.log.Error("handler panicked", slog.String("panic", fmt.Sprint(p)), slog.String("stack", string(debug.Stack())))
	return errInternal
}

// rpcLog logs the end of an RPC: neither its payload nor the text of its error,
// which may name a tensor.
type rpcLog struct {
	interceptors.NoopReporter
	ctx context.Context
	log *slog.Logger
	rpc string
}

// PostCall logs that the RPC is over: what went well for who debugs, the rest for
// who operates.
func (r *rpcLog) PostCall(err error, took time.Duration) {
	level := slog.LevelDebug
	if err != nil {
		level = slog.LevelInfo
	}
	if !r.log.Enabled(r.ctx, level) {
		return
	}
	from := ""
	if p, ok := grpcpeer.FromContext(r.ctx); ok {
		from = p.Addr.String()
	}
	r.log.LogAttrs(r.ctx, level, "rpc ended", slog.String("rpc", r.rpc), slog.String("code", statusName(err)),
		slog.Duration("took", took), slog.String("peer", from))
}
