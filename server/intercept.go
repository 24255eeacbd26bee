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
	"google.golang.org/grpc/tap"

	"github.com/tensorferry/tensorferry/stream"
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
		grpc.ChainUnaryInterceptor(came, interceptors.UnaryServerInterceptor(log), recovery.UnaryServerInterceptor(panicked)),
		grpc.ChainStreamInterceptor(streamCame, interceptors.StreamServerInterceptor(log), recovery.StreamServerInterceptor(panicked)),
	}
}

// awaitedKey leads to the clock, a *time.Timer, of an RPC whose first message has
// not come.
type awaitedKey struct{}

// tap has each RPC cancelled whose first message does not come in time: grpc waits
// for it without a limit before any handler, or interceptor, is called.
func (s *Server) tap(ctx context.Context, _ *tap.Info) (context.Context, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	first := time.Duration(s.limits.FirstFrame)
	t := time.AfterFunc(first, func() { cancel(fmt.Errorf("server: no message within %v", first)) })
	context.AfterFunc(ctx, func() { t.Stop() }) // ends with the RPC
	return context.WithValue(ctx, awaitedKey{}, t), nil
}

func stopAwaiting(ctx context.Context) {
	if t, ok := ctx.Value(awaitedKey{}).(*time.Timer); ok {
		t.Stop()
	}
}

// came is called when the message of a unary RPC has come.
func came(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	stopAwaiting(ctx)
	return handler(ctx, req)
}

// streamCame leaves the streams of clients to the clocks of their handlers, and waits
// for the one message of the others.
func streamCame(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if info.IsClientStream {
		stopAwaiting(ss.Context())
		return handler(srv, ss)
	}
	return handler(srv, firstMessage{ss})
}

type firstMessage struct{ grpc.ServerStream }

// RecvMsg waits for the message and stops the clock.
func (f firstMessage) RecvMsg(m any) error {
	err := f.ServerStream.RecvMsg(m)
	stopAwaiting(f.Context())
	return err
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
	level := slog.LevelInfo
	if err == nil || statusName(err) == codeName(stream.Cancelled) { // a client that goes ends what it has open
		level = slog.LevelDebug
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
