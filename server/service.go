package server

import (
	"cmp"
	"context"
	"errors"
	"math"
	"net"
	"runtime"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/experimental"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/storing"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// Service is a gRPC service that is served beside the TensorService, with the same limits,
// metrics, health and draining.
type Service struct {
	// Register registers the service on r. Its handlers run models through m; errors of m
	// that they return reach the caller unchanged.
	Register func(r grpc.ServiceRegistrar, m *Models)
	// Listener, if not nil, serves only this service, health and reflection. Serve takes it
	// over. If nil, the service shares the server's listeners and their limits.
	Listener net.Listener
	// MessageBytes is the largest message received on Listener; 0 means that of a session. A
	// larger one takes three times its bytes of Config.ReceiveBytes until its handler has
	// returned or receives the next, and more than three quarters of that are not had for it.
	MessageBytes int
	// FirstMessage is how long the first message of an RPC on Listener may take, and Idle
	// how long a client stream may be silent; 0 means the limits of a session.
	FirstMessage, Idle time.Duration
}

// Models runs the models of a server for its Services, and reaches its store. Its calls and
// transfers are admitted, limited and counted like those of the TensorService. Errors of its methods are *terms.RefusedErrors, which
// a handler returns unchanged or inspects. Safe for concurrent use.
type Models struct {
	server *Server
	nobody admission.Caller // for contexts that do not belong to an RPC
}

// Run is a call whose inputs and results are streamed: Info describes its model, Write writes an
// input, Next takes a result, Context ends with the run. One goroutine writes and one takes; any
// may End it, with nil, an error of a method or the handler's own status, and returns what End
// returns. A handler must not hold memory of the run while it waits for its client: it receives
// first, then writes.
type Run = serving.Run

// Info describes the model of that name, if there is one that the sender of ctx's RPC may know.
func (m *Models) Info(ctx context.Context, name string) (i engine.Info, found bool) {
	model, release, err := m.server.cfg.Models.Lookup(name)
	if err != nil {
		return i, false
	}
	defer release()
	if m.server.hides(ctx, name) {
		return i, false
	}
	return model.Info(), true
}

// Infos returns the descriptions of all models, sorted by name.
func (m *Models) Infos() []engine.Info { return m.server.cfg.Models.Infos() }

// Ready reports whether the server takes new calls and can run the model; of the empty name, only
// the first.
func (m *Models) Ready(model string) bool {
	name := model
	if model != "" {
		name = modelHealth + model
	}
	now, err := m.server.health.Check(context.Background(), &healthpb.HealthCheckRequest{Service: name})
	return err == nil && now.GetStatus() == healthpb.HealthCheckResponse_SERVING
}

// Context returns a context that ends with the server, for what a service does outside its RPCs
// and for what it keeps between them.
func (m *Models) Context() context.Context { return m.server.core.Context() }

// Connection returns a context that ends with the connection of ctx's RPC, the same for all RPCs of
// that connection; of a ctx without one it is the server's.
func (m *Models) Connection(ctx context.Context) context.Context {
	if one := rpcOf(ctx).conn; one != nil {
		return one.Life
	}
	return m.Context()
}

// Hold charges bytes to Config.Budget that the handler of ctx's RPC is about to make, such as
// an inflated input, until the RPC has ended or the handler receives its next message.
func (m *Models) Hold(ctx context.Context, bytes int64) error {
	held := rpcOf(ctx).held
	if held == nil {
		return errors.New("server: Hold without an RPC")
	}
	return m.server.hold(held, bytes)
}

// Compute runs a model on tensors in memory for the RPC of ctx: those of the call's inputs, in any
// order, of which only the ports are given; that of the only one may be empty. The zero ID means a
// new one. It borrows in, and returns copies of the outputs, in the order of the ports of info.
// Inputs and outputs may take up to most bytes in each direction. They are charged to Config.Budget
// as those of Hold are, but inputs only beyond what the RPC's message and Hold are charged already.
func (m *Models) Compute(ctx context.Context, model string, call engine.Call, in []tensor.Tensor, most int64) (out []tensor.Tensor, info engine.Info, st engine.Stats, err error) {
	s, of := m.server, rpcOf(ctx)
	held := of.held
	if held == nil { // there is no RPC whose end would end it
		held = s.account()
		defer held.Close()
	}
	bytes := -(of.received.Holds() + held.Held()) / inbound.HeapShare
	for _, t := range in {
		bytes += int64(len(t.Data))
	}
	if err := s.hold(held, bytes); err != nil {
		s.core.Refuse(admission.Calls)
		return nil, info, st, err
	}
	return s.core.Compute(ctx, m.caller(ctx), model, call, in, most, func(bytes int64) error { return s.hold(held, bytes) })
}

// Open opens a call of a model for the RPC of ctx. The inputs are in any order; the port of the
// only one may be empty. The caller must call End.
func (m *Models) Open(ctx context.Context, model string, call engine.Call) (*Run, error) {
	run, err := m.server.core.Open(ctx, m.caller(ctx), model, call)
	if err != nil {
		return nil, err
	}
	of := rpcOf(ctx)
	of.mu.Lock()
	defer of.mu.Unlock()
	of.runs = append(slices.DeleteFunc(of.runs, (*Run).Ended), run)
	return run, nil
}

// Transfer is a tensor on its way into the store, by Put and Write, or out of it, by Get, Desc
// and Read. End takes the handler's error, or nil, and returns what the handler must return.
type Transfer = storing.Direct

// Put begins to store a tensor under a name, for the RPC of ctx. The caller must call End,
// which makes it visible.
func (m *Models) Put(ctx context.Context, name string, d tensor.Desc) (*Transfer, error) {
	return m.server.storing.Put(ctx, m.caller(ctx), name, d)
}

// Get opens a tensor of the store, or that of a source with its parameters, for the RPC of ctx.
// The caller must call End.
func (m *Models) Get(ctx context.Context, name string, source bool, params map[string]string) (*Transfer, error) {
	return m.server.storing.Get(ctx, m.caller(ctx), frame.Selection{Name: name, Source: source, Params: params})
}

// Buffer hands over memory of n bytes, with any content, for what a handler keeps beyond the
// message that it received last. It is charged to Config.Budget, as the messages of small calls
// are, until its last Release.
func (m *Models) Buffer(n int64) (*slab.Slab, error) {
	s, size, a := m.server, slab.SizeOf(n), m.server.account()
	if err := s.take(a, size); err != nil {
		return nil, err
	}
	mem, err := a.Get(s.cfg.Pool, int(n), size)
	if err != nil {
		return nil, s.storing.Explain(err)
	}
	return mem, nil
}

func (m *Models) caller(ctx context.Context) *admission.Caller {
	if one := rpcOf(ctx).conn; one != nil {
		return &one.Caller
	}
	return &m.nobody
}

// endpoint is a gRPC server with limits of its own.
type endpoint struct {
	Service
	server  *Server
	grpc    *grpc.Server
	methods map[string]bool // full names, as in a request
}

// endpoint returns a gRPC server for a service, health and reflection.
func (s *Server) endpoint(svc Service) *endpoint {
	session := int(s.cfg.Session.ChunkBytes) + wire.MaxControlBytes
	svc.MessageBytes = cmp.Or(svc.MessageBytes, session)
	svc.FirstMessage = cmp.Or(svc.FirstMessage, time.Duration(s.cfg.Session.FirstFrame))
	svc.Idle = cmp.Or(svc.Idle, time.Duration(s.cfg.Session.ChunkIdle))
	e := &endpoint{Service: svc, server: s, methods: make(map[string]bool)}
	cfg := &s.cfg
	options := append(e.intercept(),
		grpc.ForceServerCodecV2(wire.Codec{MaxRequestParts: requestParts * max(1, svc.MessageBytes/session)}),
		grpc.StatsHandler(statistics{s.conns}),
		experimental.BufferPool(wire.Buffers),
		grpc.ReadBufferSize(0), // an inbound.Conn has one
		grpc.InitialWindowSize(int32(cfg.WindowBytes)),
		grpc.InitialConnWindowSize(int32(cfg.WindowBytes)),
		grpc.MaxRecvMsgSize(svc.MessageBytes),
		grpc.MaxSendMsgSize(math.MaxInt32),
		grpc.MaxConcurrentStreams(uint32(min(cfg.StreamsPerConnection, math.MaxUint32))),
		grpc.MaxHeaderListSize(uint32(min(cfg.HeaderListBytes, math.MaxUint32))),
		grpc.ConnectionTimeout(cfg.Handshake),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: cfg.Keepalive, Timeout: cfg.KeepaliveTimeout, MaxConnectionIdle: time.Duration(s.cfg.Session.SessionIdle),
		}),
		grpc.InTapHandle(e.admit),
		grpc.NumStreamWorkers(uint32(runtime.GOMAXPROCS(0))), // whose stacks have grown: a new goroutine's grows in each RPC
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: cfg.KeepaliveMin, PermitWithoutStream: true}),
	)
	creds := cfg.Credentials
	if creds == nil {
		creds = insecure.NewCredentials()
	}
	e.grpc = grpc.NewServer(append(options, grpc.Creds(s.conns.Credentials(creds, int64(svc.MessageBytes), svc.Listener == nil)))...)
	svc.Register(registrar{e.grpc}, s.models)
	healthpb.RegisterHealthServer(registrar{e.grpc}, s.health)
	if cfg.Reflection {
		reflection.Register(e.grpc) // v1 and v1alpha
	}
	return e
}
