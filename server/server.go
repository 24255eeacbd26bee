// Package server implements the native gRPC service: sessions, pushes, pulls and metadata
// RPCs on the Core of internal/serving, and other services beside it.
//
// It does not compute (engines do), choose an engine (commands do) or keep tensors (stores
// do). A Server is safe for concurrent use. It owns no payload bytes: tensors are assembled
// in memory that engines lend; pushed ones are copied to the store.
package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/conns"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/metrics"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/storing"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/stream"
)

// Config configures a server. Only Models is required.
type Config struct {
	// Models are the models that calls may run; they may change while the server serves.
	Models *engine.Registry
	// Pool and Budget provide the memory in which small tensors wait until an engine lends
	// its own; those of the engines are a good choice. Nil means DefaultMemory.
	Pool   *slab.Pool
	Budget *slab.Budget
	// Store keeps pushed tensors and supplies pulled ones; nil means no store. Its owner
	// closes it, after the server.
	Store store.Store
	// Sources generate tensors when they are pulled; nil means no sources.
	Sources *store.Sources
	// Log receives what an operator should know; nil means slog.Default().
	Log *slog.Logger
	// Metrics, if not nil, is the registry of the server's metrics until Close. It serves
	// one server at a time.
	Metrics prometheus.Registerer
	// Lanes is how many lanes a session may have at a time (docs/lanes.md); 0 means
	// DefaultLanes, which is the maximum. A negative number means none.
	Lanes int
	// Services are served beside the TensorService, under the same limits.
	Services []Service
	// Credentials secure every connection; nil means no encryption.
	Credentials credentials.TransportCredentials
	// Identify, if not nil, returns the name of the sender of an RPC or refuses the RPC;
	// the error is then the text of the UNAUTHENTICATED status. It gets the AuthInfo that
	// Credentials made for the connection, and the RPC's authorization metadata. It is
	// called before anything else of the RPC is looked at, and every 5 s while the RPC is
	// open. For a lane it is called with the AuthInfo of the lane's connection and the
	// authorization of the session's RPC: it must return the session's principal. It must
	// be fast and safe for concurrent use. Package identity has an implementation.
	Identify func(info credentials.AuthInfo, authorization []string) (principal string, err error)
	// Authorize, if not nil, returns why the Principal of ctx may not do something; the program
	// itself may do everything. The client is told a *terms.RefusedError, or PERMISSION_DENIED with the
	// text of another error. One that wraps store.ErrNotFound hides a tensor or a source, unless it
	// is put: globs leave it out, and nothing tells it from one that does not exist. Any error
	// hides a model that is to be described. ctx ends with what was asked about: of VerbCompute
	// with the call, of VerbPut with the tensor or its set. It must be fast and safe for
	// concurrent use.
	Authorize func(ctx context.Context, a Action) error
	// UnaryInterceptors and StreamInterceptors run around the handlers of every RPC, the
	// first one outermost, inside the server's log and its recovery from panics. They
	// cannot read the messages of sessions, pushes and pulls.
	UnaryInterceptors  []grpc.UnaryServerInterceptor
	StreamInterceptors []grpc.StreamServerInterceptor
	// Reflection enables gRPC reflection, so that grpcurl works without proto files.
	Reflection bool
	// Version is shown by GetServiceInfo.
	Version string
	// Session limits each session; zero fields mean terms.DefaultLimits.
	Session stream.Limits
	// Sessions, Connections, Transfers (pushes and pulls) and QueuedCalls (calls of all
	// sessions) are how many may be open at a time; 0 means DefaultSessions,
	// DefaultConnections, DefaultTransfers and DefaultQueuedCalls.
	Sessions, Connections, Transfers, QueuedCalls int
	// StoredBytes is the largest tensor that may be pushed; 0 means DefaultStoredBytes.
	StoredBytes int64
	// ThinFrames is how many frames per second, on average, one connection may send that
	// open nothing and carry less than 3 KiB. More of them wait. Frames with a chunk or
	// many control parts count as several. 0 means DefaultThinFrames.
	ThinFrames int
	// WindowBytes is how many bytes a client may have in flight to one RPC before the
	// server reads them; 0 means DefaultWindow, less than 64 KiB means 64 KiB. Raise it if
	// bandwidth times round-trip time exceeds it.
	WindowBytes int
	// ReceiveBytes is the memory for what clients have sent and nothing has consumed yet,
	// in addition to 64 KiB per connection; 0 means half of Budget. It is at least sixteen
	// times the largest message of a session, whatever MessageBytes of Services are.
	ReceiveBytes int64
	// MemoryWait is how long a call waits for memory; 0 means DefaultMemoryWait.
	MemoryWait time.Duration
	// StreamsPerConnection is the maximum number of open RPCs of a connection; 0 means
	// DefaultStreamsPerConn.
	StreamsPerConnection int
	// HeaderListBytes limits the metadata of an RPC; 0 means DefaultHeaderListBytes.
	HeaderListBytes int
	// Handshake is the time limit for a new connection to speak HTTP/2; 0 means
	// DefaultHandshake.
	Handshake time.Duration
	// Keepalive is how long a client may be silent before the server pings it,
	// KeepaliveTimeout how long the client may take to answer, and KeepaliveMin the minimum
	// time between the client's own pings; 0 means DefaultKeepalive,
	// DefaultKeepaliveTimeout and DefaultKeepaliveMin. gRPC pings at most once a second.
	Keepalive, KeepaliveTimeout, KeepaliveMin time.Duration
}

// Server serves the TensorService. Create one with New.
type Server struct {
	pb.UnimplementedTensorServiceServer
	cfg       Config
	log       *slog.Logger
	core      *serving.Core
	smalls    *slab.Principal // holds the memory of the messages of small calls
	storing   *storing.Service
	models    *Models
	endpoints []*endpoint // the first serves the listeners given to Serve
	health    healthService
	available atomic.Int64 // 1 if there is a store, and it can be used
	started   time.Time
	forget    func() // unregisters the metrics

	conns    *conns.Set
	received *inbound.Memory // charged for what peers have sent and nothing has consumed
	open     sync.Map        // of *rpc: those whose senders are asked about again
	serving  sync.Once

	unauthenticated            atomic.Int64          // RPCs that were refused or ended
	refusals                   admission.LogSamplers // by reason
	failedRPCs, failedSessions admission.LogSampler
}

// New returns a server that Serve starts. It starts goroutines that serve RPCs, which end with Close.
func New(cfg Config) (*Server, error) {
	if cfg.Models == nil {
		return nil, errors.New("server: Config needs Models")
	}
	for _, svc := range cfg.Services {
		if svc.Listener == nil && (svc.MessageBytes > 0 || svc.FirstMessage > 0 || svc.Idle > 0) {
			return nil, errors.New("server: Config.Services: a service without a Listener has the limits of the server; give it one, or leave its own at 0")
		}
	}
	cfg.setDefaults()
	s := &Server{
		cfg: cfg, log: cfg.Log, started: time.Now(),
		received: inbound.NewMemory(cfg.ReceiveBytes, int64(cfg.Session.ChunkBytes)+wire.MaxControlBytes), forget: func() {},
	}
	s.health = healthService{health.NewServer(), s}
	s.conns = conns.New(conns.Config{
		Log: cfg.Log, Connections: cfg.Connections, ThinFrames: cfg.ThinFrames, Memory: s.received, Lanes: cfg.Lanes, Full: full(cfg.Connections),
	})
	s.core = serving.New(serving.Config{
		Models: cfg.Models, Pool: cfg.Pool, Budget: cfg.Budget, Log: cfg.Log, PrincipalOf: Principal, Session: cfg.Session, MemoryWait: cfg.MemoryWait,
		May:    func(ctx context.Context, verb, name string) error { return s.may(ctx, Verb(verb), name, 0) },
		Asks:   cfg.Authorize != nil,
		Open:   [...]int{admission.Sessions: cfg.Sessions, admission.Transfers: cfg.Transfers, admission.Calls: cfg.QueuedCalls, admission.Sequences: cfg.QueuedCalls},
		Health: s.health.model, Status: statusParts, Own: ownStatus, StoredBytes: cfg.StoredBytes,
		Tasks: func(on *serving.Session, m *stream.Machine, now stream.Instant, part *frame.Call) serving.Task {
			return s.storing.Task(on, m, now, part)
		},
	})
	s.smalls = slab.NewPrincipal("compute").In(s.core.Smalls)
	s.models = &Models{server: s}
	s.storing = &storing.Service{Core: s.core, Store: s.restrict(VerbGet), Sources: cfg.Sources}
	if cfg.Metrics != nil {
		all := metrics.New(cfg.Version, s.core.Seconds(), s.values)
		if err := cfg.Metrics.Register(all); err != nil {
			s.core.Forget()
			return nil, fmt.Errorf("server: Config.Metrics: %w; give each server a registry", err)
		}
		s.forget = func() { cfg.Metrics.Unregister(all) }
	}
	s.endpoints = append(s.endpoints, s.endpoint(Service{Register: func(r grpc.ServiceRegistrar, _ *Models) {
		pb.RegisterTensorServiceServer(r, s)
	}}))
	for _, svc := range cfg.Services {
		if svc.Listener == nil {
			svc.Register(registrar{s.endpoints[0].grpc}, s.models)
		} else {
			s.endpoints = append(s.endpoints, s.endpoint(svc))
		}
	}
	for _, e := range s.endpoints {
		for service, info := range e.grpc.GetServiceInfo() {
			if !strings.HasPrefix(service, "grpc.") { // health and reflection themselves
				s.health.SetServingStatus(service, healthpb.HealthCheckResponse_SERVING)
			}
			for _, m := range info.Methods {
				e.methods["/"+service+"/"+m.Name] = true
			}
		}
	}
	return s, nil
}

// setDefaults replaces zero values.
func (cfg *Config) setDefaults() {
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.Pool == nil {
		cfg.Pool = slab.NewPool(DefaultMemory, slab.System)
	}
	if cfg.Budget == nil {
		cfg.Budget = slab.NewBudget("memory", DefaultMemory)
	}
	if cfg.Sources == nil {
		cfg.Sources = new(store.Sources)
	}
	def(&cfg.Sessions, DefaultSessions)
	def(&cfg.QueuedCalls, DefaultQueuedCalls)
	def(&cfg.Connections, DefaultConnections)
	def(&cfg.Transfers, DefaultTransfers)
	def(&cfg.StoredBytes, DefaultStoredBytes)
	def(&cfg.MemoryWait, DefaultMemoryWait)
	def(&cfg.ReceiveBytes, cfg.Budget.Limit()/receiveShare)
	def(&cfg.ThinFrames, DefaultThinFrames)
	def(&cfg.WindowBytes, DefaultWindow)
	def(&cfg.StreamsPerConnection, DefaultStreamsPerConn)
	def(&cfg.HeaderListBytes, DefaultHeaderListBytes)
	cfg.Lanes = max(0, min(cmp.Or(cfg.Lanes, DefaultLanes), DefaultLanes))
	def(&cfg.Handshake, DefaultHandshake)
	def(&cfg.Keepalive, DefaultKeepalive)
	def(&cfg.KeepaliveTimeout, DefaultKeepaliveTimeout)
	def(&cfg.KeepaliveMin, DefaultKeepaliveMin)
	cfg.WindowBytes = min(max(cfg.WindowBytes, 64<<10), math.MaxInt32)
	cfg.Session = cfg.Session.WithDefaults()
}

func def[T int | int64 | time.Duration](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

// ListenAndServe serves models at address, unix:/path or host:port of this machine alone, until
// ctx ends; then open calls have DefaultDrainWait to end. The error is nil, or why it could not
// serve. It has no store and no sources, and no encryption, which other machines would need: for
// all of them there is New.
func ListenAndServe(ctx context.Context, address string, models ...engine.Model) error {
	all := engine.NewRegistry()
	for _, m := range models {
		if err := all.Add(m); err != nil {
			return err
		}
	}
	s, err := New(Config{Models: all})
	if err != nil {
		return err
	}
	defer s.Close()
	network := "tcp"
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		network, address = "unix", path
	} else if host, _, err := net.SplitHostPort(address); err == nil && host != "localhost" && !net.ParseIP(host).IsLoopback() {
		return fmt.Errorf("server: other machines could reach %s without encryption; use New, with Credentials", address)
	}
	l, err := net.Listen(network, address)
	if err != nil {
		return fmt.Errorf("server: %w", err)
	}
	drained := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(drained)
		wait, cancel := context.WithTimeout(context.Background(), DefaultDrainWait)
		defer cancel()
		_ = s.Shutdown(wait) // it cancels what is left
	})
	if err = s.Serve(l); !stop() {
		<-drained
	}
	return err
}

// Serve accepts connections on a listener, which it takes over, until Shutdown or Close. It
// may be called for several listeners. The first call also serves those of Config.Services.
func (s *Server) Serve(l net.Listener) error {
	s.serving.Do(func() { // all end with Close
		// Sent data may stay unread for so long, or twice as long, before its connection is
		// closed. The RPC itself fails before that.
		go s.every(2*time.Duration(min(s.cfg.Session.ChunkIdle, 1<<61)), s.received.Look)
		go s.every(lookEvery, s.askAgain)
		if s.cfg.Store != nil {
			go func() {
				s.lookAtStore()
				s.every(lookEvery, s.lookAtStore)
			}()
		}
		if slices.ContainsFunc(s.endpoints, func(e *endpoint) bool { return e.MessageBytes > s.endpoints[0].MessageBytes }) {
			go s.every(inbound.HeapLook, s.received.ReturnHeap())
		}
		for _, e := range s.endpoints[1:] {
			go func() {
				if err := e.grpc.Serve(s.conns.Listener(e.Listener)); err != nil {
					s.log.Error("service ended", slog.String("address", e.Listener.Addr().String()), slog.String("error", err.Error()))
				}
			}()
		}
	})
	err := s.endpoints[0].grpc.Serve(s.conns.Listener(l))
	if errors.Is(err, grpc.ErrServerStopped) { // stopped before it began
		return nil
	}
	return err
}

// every calls look again and again until the server is closed.
func (s *Server) every(d time.Duration, look func()) {
	tick := time.NewTicker(d)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			look()
		case <-s.core.Context().Done():
			return
		}
	}
}

// Shutdown refuses new work, waits for open calls to finish, and closes the server. If ctx
// ends first, Shutdown cancels the rest and returns the cause of ctx.
func (s *Server) Shutdown(ctx context.Context) error {
	s.health.Shutdown()
	err := s.core.Drain(ctx)
	s.Close()
	return err
}

// Close ends every session and call now. It returns when they have ended, or after a time
// limit.
func (s *Server) Close() {
	s.core.Close()
	stopped := make(chan struct{})
	go func() { // ends with the last handler and call; both have time limits
		for _, e := range s.endpoints {
			e.grpc.GracefulStop()
		}
		s.core.Wait()
		close(stopped)
	}()
	select {
	case <-stopped:
	case <-time.After(DefaultCloseWait):
		for _, e := range s.endpoints {
			e.grpc.Stop()
		}
	}
	select {
	case <-stopped:
	case <-time.After(DefaultCloseWait):
		s.log.Error("work left behind: a model, a store or a source did not end")
	}
	for _, e := range s.endpoints[1:] {
		_ = e.Listener.Close() // in case it was never served
	}
	s.core.Forget()
	s.forget()
}

// Principal returns the name of the sender of ctx's RPC; "" if the server has no Identify.
func Principal(ctx context.Context) string { return rpcOf(ctx).principal }

// StreamTensors serves one session.
func (s *Server) StreamTensors(conn grpc.BidiStreamingServer[pb.Frame, pb.Frame]) error {
	r := rpcOf(conn.Context())
	sess, err := s.core.OpenSession(&r.conn.Caller)
	if err != nil {
		return err
	}
	r.received.Admitted()
	defer s.conns.OfferLanes(sess, r.principal, func(info credentials.AuthInfo) bool {
		principal, err := s.identify(info, r.authorization)
		return err == nil && principal == r.principal
	})()
	// The session ends with the RPC.
	cause := sess.Serve(conn.Context(), r.conn.Frames(conn, r.received))
	if err := statusOf(cause); err != nil {
		s.log.Log(context.Background(), levelOf(err, &s.failedSessions), "session ended", slog.String("session", sess.ID().String()), slog.String("cause", cause.Error()))
		return err
	}
	return nil
}
