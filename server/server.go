// Package server is the native gRPC service: sessions, pushes, pulls and metadata RPCs,
// on the Core of internal/serving, and other services beside it.
//
// It refuses to compute (engines do), to pick an engine (commands do) and to keep
// tensors (stores do). A Server is safe for concurrent use. It owns no payload
// bytes: tensors are assembled in memory that engines lend; pushed ones where the
// store says.
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/internal/guard"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/lane"
	"github.com/tensorferry/tensorferry/internal/metrics"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/storing"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/stream"
)

// Config of a server. Only Models, Pool and Budget are needed.
type Config struct {
	// Models are what calls may ask for; they may change while serving.
	Models *engine.Registry
	// Pool and Budget give the memory small tensors wait in until an engine lends
	// its own; the engines' are a good choice.
	Pool   *slab.Pool
	Budget *slab.Budget
	// Store is where pushed tensors rest and pulled ones come from; nil: there is
	// none. Its owner closes it, after the server.
	Store store.Store
	// Sources make tensors when they are pulled; nil: there are none.
	Sources *store.Sources
	// Log receives what an operator should know; nil discards it.
	Log *slog.Logger
	// Metrics, if not nil, is where the server's metrics are registered until Close;
	// one server at a time.
	Metrics prometheus.Registerer
	// Lanes is how many lanes a session may have at a time (docs/lanes.md); 0 means 1,
	// the most there can be, less than 0 none. Connections that Credentials secure have none.
	Lanes int
	// Services are served beside the TensorService, under the same limits.
	Services []Service
	// Credentials secure every connection; nil: they are not encrypted.
	Credentials credentials.TransportCredentials
	// Identify, if not nil, returns the name of who sends an RPC, or refuses it: its error
	// is the text of UNAUTHENTICATED. It is asked with what Credentials say of the
	// connection and the RPC's authorization metadata, before anything else of the RPC is
	// looked at, and every 5 s while the RPC is open. It must be fast and safe for
	// concurrent use. Package identity has one.
	Identify func(info credentials.AuthInfo, authorization []string) (principal string, err error)
	// UnaryInterceptors and StreamInterceptors run around the handlers of every RPC,
	// the first one outermost, inside the server's log and its guard against panics.
	// Messages of sessions, pushes and pulls are not theirs to read.
	UnaryInterceptors  []grpc.UnaryServerInterceptor
	StreamInterceptors []grpc.StreamServerInterceptor
	// Reflection answers gRPC reflection, so that grpcurl works without files.
	Reflection bool
	// Version is shown by GetServiceInfo.
	Version string
	// Session bounds each session; zero fields mean stream.DefaultLimits.
	Session stream.Limits
	// Sessions is how many sessions are open at a time; 0 means DefaultSessions.
	Sessions int
	// Connections is how many connections are accepted at a time; 0 means
	// DefaultConnections.
	Connections int
	// Transfers is how many pushes and pulls are open at a time; 0 means
	// DefaultTransfers.
	Transfers int
	// StoredBytes is the largest tensor that may be pushed; 0 means
	// DefaultStoredBytes.
	StoredBytes int64
	// QueuedCalls is how many calls of all sessions are open at a time; 0 means
	// DefaultQueuedCalls.
	QueuedCalls int
	// ThinFrames is how many frames a second one connection may send, over a time,
	// that open nothing and carry less than 3 KiB; more of them wait, and those with
	// a chunk or many control parts count as several. 0 means DefaultThinFrames.
	ThinFrames int
	// WindowBytes is how many bytes a client may have on their way to one RPC, before
	// the server reads them; 0 means DefaultWindow, less
	// than 64 KiB means 64 KiB. Raise it when rate times round trip exceeds it.
	WindowBytes int
	// ReceiveBytes is the memory for what clients have sent and nothing has consumed yet,
	// beside 64 KiB of each connection; 0 means half of Budget. It is sixteen of the
	// largest messages at least.
	ReceiveBytes int64
	// MemoryWait is how long a call waits for memory; 0 means DefaultMemoryWait.
	MemoryWait time.Duration
	// StreamsPerConnection is how many RPCs a connection may have at a time; 0 means
	// DefaultStreamsPerConn.
	StreamsPerConnection int
	// HeaderListBytes bounds the metadata of an RPC; 0 means DefaultHeaderListBytes.
	HeaderListBytes int
	// Handshake is how long a new connection may take until it speaks HTTP/2; 0
	// means DefaultHandshake.
	Handshake time.Duration
	// Keepalive is after how long without a word a client is pinged,
	// KeepaliveTimeout how long it may take to answer, and KeepaliveMin the least
	// time between its own pings; 0 means DefaultKeepalive, DefaultKeepaliveTimeout
	// and DefaultKeepaliveMin. gRPC pings once a second at most.
	Keepalive, KeepaliveTimeout, KeepaliveMin time.Duration
}

// Server serves the TensorService. Make one with New.
type Server struct {
	pb.UnimplementedTensorServiceServer
	cfg       Config
	limits    stream.Limits
	log       *slog.Logger
	core      *serving.Core
	storing   *storing.Service
	models    *Models
	endpoints []*endpoint // the first is Serve's
	health    healthService
	started   time.Time
	forget    func() // takes the server off its registry of metrics

	connections connections
	guard       *guard.Guard
	lanes       *lane.Offers // nil: there are none
	serving     sync.Once

	failedRPCs, failedSessions serving.LogSampler
}

// New returns a server that Serve starts.
func New(cfg Config) (*Server, error) {
	if cfg.Models == nil || cfg.Pool == nil || cfg.Budget == nil {
		return nil, errors.New("server: Config needs Models, Pool and Budget")
	}
	for _, svc := range cfg.Services {
		if svc.Listener == nil && (svc.MessageBytes > 0 || svc.FirstMessage > 0 || svc.Idle > 0) {
			return nil, errors.New("server: Config.Services: a service without a Listener has the limits of the server; give it one, or leave its own at 0")
		}
	}
	cfg.setDefaults()
	s := &Server{
		cfg: cfg, limits: cfg.Session, log: cfg.Log, started: time.Now(), health: healthService{health.NewServer()},
		connections: connections{log: cfg.Log, most: cfg.Connections, thin: cfg.ThinFrames, memory: inbound.NewMemory(cfg.ReceiveBytes, cfg.messageBytes())}, guard: guard.New(cfg.Identify, cfg.Log), forget: func() {},
	}
	if cfg.Lanes >= 0 && cfg.Credentials == nil {
		s.lanes = new(lane.Offers)
	}
	s.core = serving.New(serving.Config{
		Models: cfg.Models, Pool: cfg.Pool, Budget: cfg.Budget, Log: cfg.Log, Session: cfg.Session, MemoryWait: cfg.MemoryWait,
		Open:   [...]int{serving.Sessions: cfg.Sessions, serving.Transfers: cfg.Transfers, serving.Calls: cfg.QueuedCalls},
		Health: s.health.model,
	})
	s.models = &Models{server: s}
	s.storing = storing.New(storing.Config{
		Core: s.core, Store: cfg.Store, Sources: cfg.Sources, Budget: cfg.Budget, Log: cfg.Log, Limits: cfg.Session,
		StoredBytes: cfg.StoredBytes, MemoryWait: cfg.MemoryWait,
		Status: statusParts,
	})
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
		s.health.serves(e.grpc)
		for service, info := range e.grpc.GetServiceInfo() {
			for _, m := range info.Methods {
				e.methods["/"+service+"/"+m.Name] = true
			}
		}
	}
	return s, nil
}

// messageBytes is the largest message of all services.
func (cfg *Config) messageBytes() int64 {
	most := int64(cfg.Session.ChunkBytes) + wire.MaxControlBytes
	for _, svc := range cfg.Services {
		most = max(most, int64(svc.MessageBytes))
	}
	return most
}

// setDefaults replaces what is zero.
func (cfg *Config) setDefaults() {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
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
	_, _, memory := cfg.Budget.Used()
	def(&cfg.ReceiveBytes, memory/receiveShare)
	def(&cfg.ThinFrames, DefaultThinFrames)
	def(&cfg.WindowBytes, DefaultWindow)
	def(&cfg.StreamsPerConnection, DefaultStreamsPerConn)
	def(&cfg.HeaderListBytes, DefaultHeaderListBytes)
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

// Serve serves on a listener, which it takes over, until Shutdown or Close. It may
// be called for several listeners. The first call also serves those of Config.Services.
func (s *Server) Serve(l net.Listener) error {
	s.serving.Do(func() { // all end with Close
		s.core.Start()
		go s.connections.watch(unread(s.limits), s.core.Done())
		go s.guard.Watch(s.core.Done())
		for _, e := range s.endpoints[1:] {
			go func() {
				if err := e.grpc.Serve(listener{e.Listener, &s.connections}); err != nil {
					s.log.Error("service ended", slog.String("address", e.Listener.Addr().String()), slog.String("error", err.Error()))
				}
			}()
		}
	})
	err := s.endpoints[0].grpc.Serve(listener{l, &s.connections})
	if errors.Is(err, grpc.ErrServerStopped) { // before it began
		return nil
	}
	return err
}

// Shutdown opens nothing new, lets open calls finish, and ends. When ctx ends
// first, the rest is cancelled and ctx's cause returned.
func (s *Server) Shutdown(ctx context.Context) error {
	s.health.Shutdown()
	err := s.core.Drain(ctx)
	s.Close()
	return err
}

// Close ends every session and call now, and returns when nothing of them is
// left or the bounded wait for it is over.
func (s *Server) Close() {
	s.core.Close()
	stopped := make(chan struct{})
	go func() { // ends when the last handler and call have; both are bounded
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
		select {
		case <-stopped:
		case <-time.After(DefaultCloseWait):
			s.log.Error("work is left behind: a model, a store or a source does not end")
		}
	}
	for _, e := range s.endpoints[1:] {
		_ = e.Listener.Close() // of one that was never served
	}
	s.core.Forget()
	s.forget()
}

// Principal returns the name of who sends the RPC of ctx; "" if the server does not ask.
func Principal(ctx context.Context) string {
	if o, ok := ctx.Value(openedKey{}).(*opened); ok {
		return o.caller.Name()
	}
	return ""
}

// StreamTensors serves one session.
func (s *Server) StreamTensors(conn grpc.BidiStreamingServer[pb.Frame, pb.Frame]) error {
	one := s.connections.of(conn.Context())
	sess, err := s.core.OpenSession(&one.Caller)
	if err != nil {
		return err
	}
	received(conn.Context()).Admitted()
	defer s.offerLanes(sess)()
	// The session ends with the RPC.
	cause := sess.Serve(conn.Context(), s.frames(conn))
	if err := statusOf(cause); err != nil {
		s.log.Log(context.Background(), levelOf(err, &s.failedSessions), "session ended", slog.String("session", sess.ID().String()), slog.String("cause", cause.Error()))
		return err
	}
	return nil
}

// frames are those of a gRPC stream, at the rate of its connection.
func (s *Server) frames(conn grpc.ServerStream) *rateLimit {
	one := s.connections.of(conn.Context())
	return &rateLimit{frames: wire.NewConn(conn, &one.flight), thin: one.thin, received: received(conn.Context())}
}
