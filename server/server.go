// Package server serves sessions into an engine.
//
// It refuses to compute (engines do) and to pick an engine (commands do). A
// Server is safe for concurrent use. It owns no payload bytes: tensors are
// assembled in memory that engines lend, small ones in slabs of the configured
// pool until an engine lends.
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/slab"
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
	// Log receives what an operator should know; nil discards it.
	Log *slog.Logger
	// Version is shown by GetServiceInfo.
	Version string
	// Session bounds each session; zero fields mean stream.DefaultLimits.
	Session stream.Limits
	// Sessions is how many sessions are open at a time; 0 means DefaultSessions.
	Sessions int
	// QueuedCalls is how many calls of all sessions are open at a time; 0 means
	// DefaultQueuedCalls.
	QueuedCalls int
	// WindowBytes is how many bytes a client may have on their way to the server on
	// one connection, before the server reads them; 0 means DefaultWindow, less
	// than 64 KiB means 64 KiB. Raise it when rate times round trip exceeds it.
	WindowBytes int
	// MemoryWait is how long a call waits for memory; 0 means DefaultMemoryWait.
	MemoryWait time.Duration
}

// Server serves the TensorService. Make one with New.
type Server struct {
	pb.UnimplementedTensorServiceServer
	cfg     Config
	limits  stream.Limits
	log     *slog.Logger
	grpc    *grpc.Server
	health  *health.Server
	started time.Time

	closing chan struct{} // closed when sessions must end
	once    sync.Once
	work    sync.WaitGroup // calls and sessions that wind down

	mu       sync.Mutex
	sessions map[*peer]struct{} // guarded by mu
	past     stream.Stats       // of sessions that have ended; guarded by mu
	draining bool               // guarded by mu

	calls                                atomic.Int64 // open now
	callsOK, callsFailed, callsCancelled atomic.Int64
	sessionsOpened, sessionsRefused      atomic.Int64
	runsAbandoned                        atomic.Int64
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
	def(&cfg.MemoryWait, DefaultMemoryWait)
	def(&cfg.WindowBytes, DefaultWindow)
	cfg.WindowBytes = min(max(cfg.WindowBytes, 64<<10), math.MaxInt32)
	s := &Server{
		cfg: cfg, limits: cfg.Session.WithDefaults(), log: cfg.Log, started: time.Now(),
		closing: make(chan struct{}), sessions: make(map[*peer]struct{}), health: health.NewServer(),
	}
	s.grpc = grpc.NewServer(
		grpc.ForceServerCodecV2(wire.Codec{}),
		grpc.StatsHandler(connections{}),
		experimental.BufferPool(wire.Buffers),
		grpc.InitialWindowSize(int32(cfg.WindowBytes)),
		grpc.InitialConnWindowSize(int32(cfg.WindowBytes)),
		grpc.MaxRecvMsgSize(int(s.limits.ChunkBytes)+wire.MaxControlBytes),
		grpc.MaxSendMsgSize(math.MaxInt32),
		grpc.MaxConcurrentStreams(DefaultStreamsPerConn),
		grpc.MaxHeaderListSize(DefaultHeaderListBytes),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: DefaultKeepalive, Timeout: DefaultKeepaliveTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: DefaultKeepaliveMin, PermitWithoutStream: true}),
	)
	pb.RegisterTensorServiceServer(s.grpc, s)
	healthpb.RegisterHealthServer(s.grpc, s.health)
	return s, nil
}

func def[T int | time.Duration](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

// Serve serves on a listener, which it takes over, until Shutdown or Close. It
// may be called for several listeners.
func (s *Server) Serve(l net.Listener) error { return s.grpc.Serve(l) }

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
		<-stopped
	}
}

// StreamTensors serves one session.
func (s *Server) StreamTensors(conn grpc.BidiStreamingServer[pb.Frame, pb.Frame]) error {
	p := &peer{server: s, calls: make(map[tensor.ID]*call), side: side{budget: s.cfg.Budget, promise: promise(s.limits)}}
	s.mu.Lock()
	switch {
	case s.draining:
		s.mu.Unlock()
		return errDraining
	case len(s.sessions) >= s.cfg.Sessions:
		s.mu.Unlock()
		s.sessionsRefused.Add(1)
		return errSessions(s.cfg.Sessions)
	}
	p.sess = session.New(conn, stream.Config{Server: true, Limits: s.limits}, p, inFlight(conn.Context()))
	s.sessions[p] = struct{}{}
	s.work.Add(1)
	s.mu.Unlock()
	s.sessionsOpened.Add(1)

	p.sess.Start()
	select {
	case <-p.sess.Stopped():
	case <-conn.Context().Done():
		p.sess.Stop(context.Cause(conn.Context()))
	case <-s.closing:
		p.sess.Stop(errShutdown)
	}
	cause := p.sess.Cause()
	// The goroutines of the session end when the RPC has, that is, after this
	// function returns: what is left is seen to behind it.
	go func() {
		defer s.work.Done()
		p.sess.Wait(stream.Unavailable, "session ended")
		s.leave(p)
	}()
	if err := sessionStatus(cause); err != nil {
		s.log.Info("session ended", slog.String("session", p.name()), slog.String("cause", cause.Error()))
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
	s.past.Add(st)
}

// ListModels names the models.
func (s *Server) ListModels(context.Context, *pb.ListModelsRequest) (*pb.ListModelsResponse, error) {
	out := &pb.ListModelsResponse{}
	for _, i := range s.cfg.Models.Infos() {
		out.Models = append(out.Models, &pb.Model{
			Name: i.Name, Version: i.Version, Device: i.Device, Rows: int32(i.Rows),
			Inputs: ports(i.Inputs), Outputs: ports(i.Outputs),
		})
	}
	return out, nil
}

func ports(in []engine.Port) []*pb.Port {
	var out []*pb.Port
	for _, p := range in {
		q := &pb.Port{Name: p.Name, Shape: p.Shape, Whole: p.Whole}
		for _, d := range p.DTypes {
			q.Dtypes = append(q.Dtypes, pb.DataType(d))
		}
		out = append(out, q)
	}
	return out
}

// GetServiceInfo tells limits and counters.
func (s *Server) GetServiceInfo(context.Context, *pb.GetServiceInfoRequest) (*pb.GetServiceInfoResponse, error) {
	used, peak, limit := s.cfg.Budget.Used()
	l := s.limits
	st, open := s.stats()
	return &pb.GetServiceInfoResponse{
		Version:      s.cfg.Version,
		UptimeMillis: time.Since(s.started).Milliseconds(),
		Limits: map[string]int64{
			"chunk_bytes": int64(l.ChunkBytes), "chunks_per_tensor": 1 << 20, "allowance_bytes": int64(l.AllowanceBytes),
			"tensor_bytes": l.TensorBytes, "open_tensors_per_session": int64(l.OpenTensors), "open_calls_per_session": int64(l.OpenCalls),
			"first_frame_millis": int64(l.FirstFrame / 1e6), "chunk_idle_millis": int64(l.ChunkIdle / 1e6),
			"session_idle_millis": int64(l.SessionIdle / 1e6), "sessions": int64(s.cfg.Sessions), "calls": int64(s.cfg.QueuedCalls),
			"memory_bytes": limit, "memory_wait_millis": s.cfg.MemoryWait.Milliseconds(),
			"message_bytes": int64(l.ChunkBytes) + wire.MaxControlBytes, "window_bytes": int64(s.cfg.WindowBytes), "streams_per_connection": DefaultStreamsPerConn,
			"header_list_bytes": DefaultHeaderListBytes,
		},
		Counters: map[string]int64{
			"received_bytes_total": st.BytesIn, "sent_bytes_total": st.BytesOut, "received_chunks_total": st.ChunksIn,
			"sent_chunks_total": st.ChunksOut, "corrupt_chunks_total": st.Corrupt, "duplicate_chunks_total": st.Duplicate,
			"calls_total": st.CallsOpened, "calls": s.calls.Load(), "calls_ok_total": s.callsOK.Load(),
			"calls_failed_total": s.callsFailed.Load(), "calls_cancelled_total": s.callsCancelled.Load(),
			"sessions_total": s.sessionsOpened.Load(), "sessions_refused_total": s.sessionsRefused.Load(), "sessions": int64(open),
			"memory_used_bytes": used, "memory_peak_bytes": peak, "runs_abandoned_total": s.runsAbandoned.Load(),
		},
	}, nil
}

// count counts a call that has ended, whether or not it ever was ready.
func (s *Server) count(code stream.Code) {
	switch code {
	case stream.OK:
		s.callsOK.Add(1)
	case stream.Cancelled:
		s.callsCancelled.Add(1)
	default:
		s.callsFailed.Add(1)
	}
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
