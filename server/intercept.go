package server

import (
	"context"
	"errors"
	"log/slog"
	"path"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/tap"

	"github.com/tensorferry/tensorferry/internal/conns"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/slab"
)

// intercept returns the interceptors of every RPC, outermost first: accounting on its
// connection, recovery from a handler's panic and the log, the user's own, and the conversion
// of errors to statuses.
func (e *endpoint) intercept() []grpc.ServerOption {
	unary := append([]grpc.UnaryServerInterceptor{e.came}, e.server.cfg.UnaryInterceptors...)
	streams := append([]grpc.StreamServerInterceptor{e.streamCame}, e.server.cfg.StreamInterceptors...)
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(append(unary, explained)...), grpc.ChainStreamInterceptor(append(streams, streamExplained)...),
	}
}

// explained converts the error of a handler to a status, and ends the runs that it left
// open.
func explained(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	defer rpcOf(ctx).abandon()
	resp, err := handler(ctx, req)
	return resp, brief(statusOf(err))
}

func streamExplained(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	defer rpcOf(ss.Context()).abandon()
	return brief(statusOf(handler(srv, ss)))
}

// rpcKey is the context key of an *rpc.
type rpcKey struct{}

// rpc is the state of an RPC from its headers on.
type rpc struct {
	conn          *conns.Conn
	authorization []string // what its sender has shown, besides the connection's certificate
	principal     string   // who that is
	received      *inbound.RPC
	first         *time.Timer // runs until the first message has arrived
	cancel        context.CancelCauseFunc
	held          *slab.Account // for what a handler makes, and for the outputs of Models.Compute

	stream atomic.Pointer[grpc.ServerTransportStream] // set once there is a handler
	told   atomic.Pointer[error]                      // why it must end

	mu   sync.Mutex     // guards all below
	runs []*serving.Run // opened by the handler of a service
}

// rpcOf returns the RPC of ctx, or an empty one if there is none.
func rpcOf(ctx context.Context) *rpc {
	if r, ok := ctx.Value(rpcKey{}).(*rpc); ok {
		return r
	}
	return new(rpc)
}

// end ends the RPC.
func (r *rpc) end(why error) {
	r.told.Store(&why)
	if s := r.stream.Load(); s != nil {
		endWith(*s, why)
	}
	r.cancel(why)
}

// abandon ends the runs that a handler left open when it returned or panicked.
func (r *rpc) abandon() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, run := range r.runs {
		run.Abandon(errors.New("server: the handler of a service returned without ending its run"))
	}
}

// handled records that the RPC of ctx has a handler.
func handled(ctx context.Context) {
	r, s := rpcOf(ctx), grpc.ServerTransportStreamFromContext(ctx)
	r.stream.Store(&s)
	if why := r.told.Load(); why != nil {
		endWith(s, *why)
	}
}

// admit rejects RPCs of unknown callers, and those for which there is no memory or no
// handler: they leave nothing behind. It cancels RPCs whose first message does not arrive in
// time: gRPC waits for it without a limit before it calls any handler or interceptor. An RPC
// with a deadline ends a little before that: at the deadline gRPC resets the stream, which is
// CANCELLED to a client whose clock is behind, though the status is on its way.
func (e *endpoint) admit(ctx context.Context, info *tap.Info) (_ context.Context, err error) {
	defer func() {
		if err != nil {
			conns.From(ctx).Reject()
		}
	}()
	if ctx.Err() != nil { // gRPC would say the same
		return ctx, statusOf(ctx.Err())
	}
	r := &rpc{conn: conns.From(ctx)}
	if e.server.asks() {
		r.authorization = slices.Clone(info.Header.Get("authorization"))
		if r.principal, err = e.server.ask(r); err != nil {
			return ctx, errUnauthenticated(err)
		}
	}
	if !e.methods[info.FullMethodName] {
		return ctx, errNoMethod(info.FullMethodName)
	}
	inner, cancel := context.WithCancelCause(ctx)
	stop := func() {}
	if end, ok := ctx.Deadline(); ok {
		left := time.Until(end)
		inner, stop = context.WithDeadline(inner, end.Add(-min(max(left/earlyShare, earlyLeast), earlyMost)))
	}
	r.cancel, r.held = cancel, e.server.account()
	var room bool
	if r.received, room = r.conn.Inbound.Open(info.Header, func(why error) { r.end(errNotReceived(why, info.FullMethodName)) }); !room {
		stop()
		cancel(nil)
		return ctx, statusOf(errReceived)
	}
	r.first = time.AfterFunc(e.FirstMessage, func() { r.end(errSilent(e.FirstMessage)) })
	if e.server.asks() {
		e.server.open.Store(r, nil)
	}
	context.AfterFunc(inner, func() { // ends with the RPC
		if inner.Err() == context.DeadlineExceeded {
			r.end(context.DeadlineExceeded)
		}
		stop()
		e.server.open.Delete(r)
		r.first.Stop()
		r.received.Cancelled()
	})
	return context.WithValue(inner, rpcKey{}, r), nil
}

// statistics are gRPC's events about connections and RPCs.
type statistics struct{ *conns.Set }

// HandleRPC follows an RPC from the start of its handler to its end. What is sent after the
// RPC's end gRPC drops.
func (statistics) HandleRPC(ctx context.Context, event stats.RPCStats) {
	switch event := event.(type) {
	case *stats.InHeader:
		rpcOf(ctx).received.Begun()
	case *stats.OutPayload:
		if m, ok := event.Payload.(interface{ Forget() }); ok && ctx.Err() != nil {
			m.Forget()
		}
	case *stats.End:
		rpcOf(ctx).received.End()
		rpcOf(ctx).held.Close()
	}
}

// came runs when the message of a unary RPC has arrived.
func (e *endpoint) came(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	r := rpcOf(ctx)
	r.first.Stop()
	r.received.Next()
	if err = e.server.run(ctx, info.FullMethod, func() (err error) {
		resp, err = handler(ctx, req)
		return err
	}); err != nil {
		return nil, err
	}
	if answer := r.conn.Answer(resp); answer != nil {
		return answer, nil
	}
	return nil, statusOf(errReceived)
}

// streamCame ends the client streams of services other than the TensorService, such as reflection,
// when no request arrives for a while, or the server is closed; those of the TensorService it leaves
// to their handlers.
func (e *endpoint) streamCame(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx := ss.Context()
	handled(ctx)
	r := rpcOf(ctx)
	booked := accounted{ss, r, func() { r.first.Stop() }, make(chan struct{}, 1)}
	if info.IsClientStream {
		r.first.Stop()
	}
	err := e.server.run(ctx, info.FullMethod, func() error {
		if _, ours := srv.(*Server); info.IsClientStream && !ours { // its handler has no timeout
			idle := time.AfterFunc(e.Idle, func() { r.end(errSilent(e.Idle)) })
			defer idle.Stop()
			defer context.AfterFunc(e.server.core.Context(), func() { r.end(failures.ErrShutdown) })()
			booked.arrived = func() { idle.Reset(e.Idle) }
		}
		return handler(srv, booked)
	})
	if err != nil && info.IsClientStream && r.told.Load() == nil {
		e.server.drop(booked)
	}
	return err
}

// run runs a handler, whose panic it makes an error, and counts and logs the end of its RPC, without
// the text of its error, which may name a tensor.
func (s *Server) run(ctx context.Context, method string, handler func() error) (err error) {
	began := time.Now()
	defer func() {
		if p := recover(); p != nil {
			s.core.Panicked(p)
			err = errInternal
		}
		err = endOf(ctx, err)
		s.core.RPCEnded(path.Dir(method)[1:], statusName(err))
		if level := levelOf(err, &s.failedRPCs); s.log.Enabled(ctx, level) {
			s.log.LogAttrs(ctx, level, "rpc ended", slog.String("rpc", method), slog.String("code", statusName(err)),
				slog.Float64("took_seconds", time.Since(began).Seconds()), slog.String("peer", rpcOf(ctx).conn.RemoteAddr().String()), slog.String("principal", Principal(ctx)))
		}
	}()
	return handler()
}

// drop receives and drops what a client still writes to an RPC that has failed. gRPC's C core,
// which Python has, forgets the status of an RPC when it cannot write. drop returns when no
// message has come for dropIdle, after dropMost, or after dropBytes.
func (s *Server) drop(from accounted) {
	idle, over := time.NewTimer(dropIdle), make(chan struct{})
	defer idle.Stop()
	s.core.Go(func() { // ends with the RPC
		defer close(over)
		var m wire.Message
		for left := dropBytes; left > 0 && from.RecvMsg(&m) == nil; idle.Reset(dropIdle) {
			left -= m.Control + m.Frame.Chunk.Len()
			m.Free()
		}
	})
	select {
	case <-over:
	case <-idle.C:
	case <-time.After(dropMost):
	case <-s.core.Context().Done():
	}
}

// accounted is a gRPC stream whose messages are accounted for on its connection.
type accounted struct {
	grpc.ServerStream
	rpc     *rpc
	arrived func()        // called when a request has
	reading chan struct{} // held by who receives: a goroutine of the handler's may when drop does
}

// SendMsg sends a frame, or an answer for which there is room.
func (a accounted) SendMsg(m any) error {
	if _, frame := m.(*wire.Message); frame {
		return a.ServerStream.SendMsg(m)
	}
	if answer := a.rpc.conn.Answer(m); answer != nil {
		return a.ServerStream.SendMsg(answer)
	}
	return statusOf(errReceived)
}

// RecvMsg receives a frame or a request; the previous one counts as consumed. Invalid bytes
// are the peer's fault, but gRPC's own code for them is that of a defect.
func (a accounted) RecvMsg(m any) error {
	a.reading <- struct{}{}
	defer func() { <-a.reading }()
	a.rpc.received.Next()
	if _, frame := m.(*wire.Message); frame { // nothing is held beside frames
		return receiveError(a.Context(), a.ServerStream.RecvMsg(m))
	}
	a.rpc.held.Release(a.rpc.held.Held())
	req := wire.Request{Message: m}
	if err := a.ServerStream.RecvMsg(&req); err != nil {
		return receiveError(a.Context(), err)
	}
	if req.Err != nil {
		return statusOf(req.Err)
	}
	a.arrived()
	return nil
}

// registrar registers services whose unary methods report invalid bytes of a request as
// RecvMsg does: gRPC decodes the request before it calls an interceptor.
type registrar struct{ *grpc.Server }

// RegisterService registers a service.
func (r registrar) RegisterService(desc *grpc.ServiceDesc, impl any) {
	d := *desc
	d.Methods = slices.Clone(d.Methods)
	for i, m := range d.Methods {
		d.Methods[i].Handler = func(srv any, ctx context.Context, decode func(any) error, in grpc.UnaryServerInterceptor) (any, error) {
			handled(ctx)
			return m.Handler(srv, ctx, func(v any) error {
				req := wire.Request{Message: v}
				if err := decode(&req); err != nil {
					return err
				}
				return statusOf(req.Err)
			}, in)
		}
	}
	r.Server.RegisterService(&d, impl)
}
