package metrics

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"
)

// Handler answers /metrics with what g gathers, /healthz with 200 as long as
// serving says so and with 503 after, and, if profiles is set, /debug/pprof/.
func Handler(g prometheus.Gatherer, serving func() bool, profiles bool) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(g, promhttp.HandlerOpts{MaxRequestsInFlight: scrapes, Timeout: writeWait / 2}))
	mux.HandleFunc("GET /healthz", healthz(serving))
	if profiles {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return mux
}

func healthz(serving func() bool) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if serving() {
			_, _ = io.WriteString(w, "serving\n") // whoever asked may have gone
			return
		}
		http.Error(w, "draining", http.StatusServiceUnavailable)
	}
}

// Probes answers /healthz as Handler does, and gRPC's health service by health, and
// nothing else.
func Probes(serving func() bool, health http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", healthz(serving))
	mux.Handle("POST /grpc.health.v1.Health/", health)
	return mux
}

// Serve serves h on l, which it takes over, until ctx ends: by HTTP/1, and without TLS, which
// secure configures unless it is nil, by HTTP/2, too. What peers do wrong is logged at debug.
// It returns when every answer has ended or been cut off.
func Serve(ctx context.Context, l net.Listener, secure *tls.Config, h http.Handler, log *slog.Logger) error {
	s := &http.Server{
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		Handler:  h, ReadTimeout: readWait, ReadHeaderTimeout: readWait, WriteTimeout: writeWait, IdleTimeout: 2 * writeWait, MaxHeaderBytes: headerBytes,
		Protocols: new(http.Protocols), HTTP2: &http.HTTP2Config{MaxConcurrentStreams: streams},
	}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	if l = netutil.LimitListener(l, connections); secure != nil {
		l = tls.NewListener(l, secure) // outermost, or the server does not see it
	}
	stopped := make(chan struct{})
	unhook := context.AfterFunc(ctx, func() {
		defer close(stopped)
		wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeWait)
		defer cancel()
		if s.Shutdown(wait) != nil {
			_ = s.Close() // it only closes sockets
		}
	})
	err := s.Serve(l)
	if !unhook() {
		<-stopped
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
