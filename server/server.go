// Package server serves sessions into an engine, pushes into a store, pulls from it
// and from sources, and what is asked about all of them.
//
// It refuses to compute (engines do), to pick an engine (commands do) and to keep
// tensors (stores do). A Server is safe for concurrent use. It owns no payload
// bytes: tensors are assembled in memory that engines lend, small ones in slabs of
// the configured pool until an engine lends; pushed ones where the store says.
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
	"google.golang.org/grpc/experimental"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/metrics"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

var errShutdown = errors.New("server: shutting down")

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
	cfg     Config
	limits  stream.Limits
	log     *slog.Logger
	grpc    *grpc.Server
	health  *healthService
	started time.Time
	counts
	forget func() // takes the server off its registry of models and that of metrics

	closing chan struct{} // closed when sessions must end
	once    sync.Once
	work    sync.WaitGroup // calls and sessions that wind down

	transfers   transfers
	records     records
	promises    promises
	storeFull   rare
	connections connections
	watching    sync.Once

	mu       sync.Mutex
	sessions map[*peer]struct{} // guarded by mu
	past     stream.Stats       // of sessions that have ended; guarded by mu
	draining bool               // guarded by mu
}

// New returns a server that Serve starts.
func New(cfg Config) (*Server, error) {
	if cfg.Models == nil || cfg.Pool == nil || cfg.Budget == nil {
		return nil, errors.New("server: Config needs Models, Pool and Budget")
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	def(&cfg.Sessions, DefaultSessions)
	def(&cfg.QueuedCalls, DefaultQueuedCalls)
	def(&cfg.Connections, DefaultConnections)
	def(&cfg.Transfers, DefaultTransfers)
	def(&cfg.StoredBytes, DefaultStoredBytes)
	if cfg.Sources == nil {
		cfg.Sources = new(store.Sources)
	}
	def(&cfg.MemoryWait, DefaultMemoryWait)
	def(&cfg.ThinFrames, DefaultThinFrames)
	def(&cfg.WindowBytes, DefaultWindow)
	def(&cfg.StreamsPerConnection, DefaultStreamsPerConn)
	def(&cfg.HeaderListBytes, DefaultHeaderListBytes)
	def(&cfg.Handshake, DefaultHandshake)
	def(&cfg.Keepalive, DefaultKeepalive)
	def(&cfg.KeepaliveTimeout, DefaultKeepaliveTimeout)
	def(&cfg.KeepaliveMin, DefaultKeepaliveMin)
	cfg.WindowBytes = min(max(cfg.WindowBytes, 64<<10), math.MaxInt32)
	s := &Server{
		cfg: cfg, limits: cfg.Session.WithDefaults(), log: cfg.Log, started: time.Now(),
		closing: make(chan struct{}), sessions: make(map[*peer]struct{}), transfers: transfers{most: cfg.Transfers}, connections: connections{log: cfg.Log, most: cfg.Connections, thin: cfg.ThinFrames}, health: newHealth(), counts: newCounts(),
	}
	if err := s.follow(); err != nil {
		return nil, err
	}
	s.grpc = grpc.NewServer(append(s.intercept(),
		grpc.ForceServerCodecV2(wire.Codec{MaxRequestParts: requestParts}),
		grpc.StatsHandler(&s.connections),
		experimental.BufferPool(wire.Buffers),
		grpc.InitialWindowSize(int32(cfg.WindowBytes)),
		grpc.InitialConnWindowSize(int32(cfg.WindowBytes)),
		grpc.MaxRecvMsgSize(int(s.limits.ChunkBytes)+wire.MaxControlBytes),
		grpc.MaxSendMsgSize(math.MaxInt32),
		grpc.MaxConcurrentStreams(uint32(min(cfg.StreamsPerConnection, math.MaxUint32))),
		grpc.MaxHeaderListSize(uint32(min(cfg.HeaderListBytes, math.MaxUint32))),
		grpc.ConnectionTimeout(cfg.Handshake),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: cfg.Keepalive, Timeout: cfg.KeepaliveTimeout, MaxConnectionIdle: time.Duration(s.limits.SessionIdle),
		}),
		grpc.InTapHandle(s.tap),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: cfg.KeepaliveMin, PermitWithoutStream: true}),
	)...)
	pb.RegisterTensorServiceServer(s.grpc, s)
	healthpb.RegisterHealthServer(s.grpc, s.health)
	if cfg.Reflection {
		reflection.Register(s.grpc) // v1 and v1alpha
	}
	return s, nil
}

// follow has metrics and health follow the models, metrics be asked for, and the
// budget ask for what is not needed.
func (s *Server) follow() error {
	all := metrics.New(s.cfg.Version, s.seconds, s.values)
	if s.cfg.Metrics != nil {
		if err := s.cfg.Metrics.Register(all); err != nil {
			return fmt.Errorf("server: Config.Metrics: %w; give each server a registry", err)
		}
	}
	stop := s.cfg.Models.Watch(func(name string, here bool) {
		s.counts.watch(name, here)
		s.health.watch(name, here)
	})
	keep := s.cfg.Budget.Reclaim(s.promises.reclaim)
	s.forget = sync.OnceFunc(func() {
		stop()
		keep()
		if s.cfg.Metrics != nil {
			s.cfg.Metrics.Unregister(all)
		}
	})
	return nil
}

func def[T int | int64 | time.Duration](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

// Serve serves on a listener, which it takes over, until Shutdown or Close. It
// may be called for several listeners.
func (s *Server) Serve(l net.Listener) error {
	s.watching.Do(func() { // both end with Close
		go s.connections.watch(unread(s.limits), s.closing)
		go s.promises.watch(s.cfg.Budget, s.closing)
	})
	return s.grpc.Serve(listener{l, &s.connections})
}

// Shutdown opens nothing new, lets open calls finish, and ends. When ctx ends
// first, the rest is cancelled and ctx's cause returned.
func (s *Server) Shutdown(ctx context.Context) error {
	s.health.Shutdown()
	s.mu.Lock()
	s.draining = true
	open := make([]*peer, 0, len(s.sessions))
	for p := range s.sessions {
		open = append(open, p)
	}
	s.mu.Unlock()
	var err error
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, p := range open {
		wg.Go(func() { // ends with the session, or with ctx
			if e := p.sess.Drain(ctx, "server is shutting down"); e != nil {
				mu.Lock()
				err = e
				mu.Unlock()
			}
		})
	}
	wg.Go(func() { // ends with the last transfer, or with ctx
		if e := s.transfers.wait(ctx); e != nil {
			mu.Lock()
			err = e
			mu.Unlock()
		}
	})
	wg.Wait()
	s.Close()
	return err
}

// Close ends every session and call now, and returns when nothing of them is
// left or the bounded wait for it is over.
func (s *Server) Close() {
	s.once.Do(func() { close(s.closing) })
	stopped := make(chan struct{})
	go func() { // ends when the last handler and call have; both are bounded
		s.grpc.GracefulStop()
		s.work.Wait()
		close(stopped)
	}()
	select {
	case <-stopped:
	case <-time.After(DefaultCloseWait):
		s.grpc.Stop()
		select {
		case <-stopped:
		case <-time.After(DefaultCloseWait):
			s.log.Error("work is left behind: a model, a store or a source does not end")
		}
	}
	s.forget()
}

// StreamTensors serves one session.
func (s *Server) StreamTensors(conn grpc.BidiStreamingServer[pb.Frame, pb.Frame]) error {
	one := s.connections.of(conn.Context())
	p := &peer{server: s, conn: one, paced: &paced{ServerStream: conn, thin: one.thin}, calls: make(map[tensor.ID]*call), side: side{budget: s.cfg.Budget, promise: promise(s.limits), all: &s.promises}}
	s.mu.Lock()
	switch {
	case s.draining:
		s.mu.Unlock()
		return errDraining
	case len(s.sessions) >= s.cfg.Sessions && one.sessions.Load() >= ownOpen:
		s.mu.Unlock()
		s.sessionsRefused.Add(1)
		return errSessions(s.cfg.Sessions)
	}
	p.sess = session.New(p.paced, stream.Config{Server: true, Limits: s.limits, Codecs: codec.All()}, p, &one.flight)
	s.sessions[p] = struct{}{}
	one.sessions.Add(1)
	s.work.Add(1)
	s.mu.Unlock()
	p.number = s.sessionsOpened.Add(1)

	p.sess.Start()
	defer func() { // also when this function panics
		p.sess.Stop(errInternal)
		// The goroutines of the session end when the RPC has, that is, after this
		// function returns: what is left is seen to behind it.
		go func() {
			defer s.work.Done()
			p.sess.Wait(frame.Unavailable, "session ended")
			s.leave(p)
		}()
	}()
	select {
	case <-p.sess.Stopped():
	case <-conn.Context().Done():
		p.sess.Stop(context.Cause(conn.Context()))
	case <-s.closing:
		p.sess.Stop(errShutdown)
	}
	cause := p.sess.Cause()
	if err := sessionStatus(cause); err != nil {
		s.log.Log(context.Background(), levelOf(err), "session ended", slog.String("session", p.name()), slog.String("cause", cause.Error()))
		return err
	}
	return nil
}

func (s *Server) leave(p *peer) {
	var st stream.Stats
	p.sess.Do(func(m *stream.Machine, _ stream.Instant) { st = m.Stats() })
	p.side.close() // its calls are over
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, p)
	p.conn.sessions.Add(-1)
	s.past.Add(st)
}

// stats adds up what all sessions have done, and counts the open ones.
func (s *Server) stats() (stream.Stats, int) {
	s.mu.Lock()
	sum := s.past
	open := make([]*peer, 0, len(s.sessions))
	for p := range s.sessions {
		open = append(open, p)
	}
	s.mu.Unlock()
	for _, p := range open {
		p.sess.Do(func(m *stream.Machine, _ stream.Instant) { sum.Add(m.Stats()) })
	}
	return sum, len(open)
}

// String names the server in panics and tests.
func (s *Server) String() string { return fmt.Sprintf("tensorferry server (%d calls)", s.calls.Load()) }
