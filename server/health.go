package server

import (
	"context"
	"maps"
	"net/http"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/tensorferry/tensorferry/internal/serving"
)

// healthService answers for the whole server, under "", for each service by its name, for the
// store, and for each model of the registry, under model/ and its name. A model that lost a run does not serve until the run has
// ended or another model has taken its place: the run holds memory and a worker.
type healthService struct {
	*health.Server
	server *Server
}

// Health returns a handler of gRPC's health service alone, for a listener of its own: whoever
// probes may have no credentials.
func (s *Server) Health() http.Handler {
	g := grpc.NewServer(grpc.MaxRecvMsgSize(requestFree)) // nobody has shown who they are
	healthpb.RegisterHealthServer(g, s.health)
	return g
}

// statuses maps the health of a model to gRPC's. gRPC's health service cannot forget a name.
var statuses = map[serving.Health]healthpb.HealthCheckResponse_ServingStatus{
	serving.Serving:    healthpb.HealthCheckResponse_SERVING,
	serving.NotServing: healthpb.HealthCheckResponse_NOT_SERVING,
	serving.Gone:       healthpb.HealthCheckResponse_SERVICE_UNKNOWN,
}

// modelHealth begins the names of models.
const modelHealth = "model/"

func (h healthService) model(name string, is serving.Health) {
	h.SetServingStatus(modelHealth+name, statuses[is])
}

// storeHealth is the name of the store.
const storeHealth = "store"

// lookAtStore sets the health of the store to whether it can be used.
func (s *Server) lookAtStore() {
	ctx, cancel := context.WithTimeout(context.Background(), lookEvery)
	defer cancel()
	is, available := serving.NotServing, int64(0)
	if s.storing.Available(ctx) {
		is, available = serving.Serving, 1
	}
	s.available.Store(available)
	s.health.SetServingStatus(storeHealth, statuses[is])
}

// Check answers for one name. A removed model is as unknown as one that never existed.
func (h healthService) Check(ctx context.Context, r *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	out, err := h.Server.Check(ctx, h.known(ctx, r))
	if out.GetStatus() == healthpb.HealthCheckResponse_SERVICE_UNKNOWN {
		return nil, errUnknownService
	}
	return out, err
}

// List answers for every name except those of removed models.
func (h healthService) List(ctx context.Context, r *healthpb.HealthListRequest) (*healthpb.HealthListResponse, error) {
	out, err := h.Server.List(ctx, r)
	maps.DeleteFunc(out.GetStatuses(), func(name string, of *healthpb.HealthCheckResponse) bool {
		return of.GetStatus() == healthpb.HealthCheckResponse_SERVICE_UNKNOWN || h.hides(ctx, name)
	})
	return out, err
}

// Watch sends the status of one name, and each change of it.
func (h healthService) Watch(r *healthpb.HealthCheckRequest, to healthpb.Health_WatchServer) error {
	return h.Server.Watch(h.known(to.Context(), r), to)
}

func (h healthService) hides(ctx context.Context, name string) bool {
	model, is := strings.CutPrefix(name, modelHealth)
	return is && h.server.hides(ctx, model)
}

// known returns the request, or, if its name is hidden, one for a name that no model has.
func (h healthService) known(ctx context.Context, r *healthpb.HealthCheckRequest) *healthpb.HealthCheckRequest {
	if h.hides(ctx, r.GetService()) {
		return &healthpb.HealthCheckRequest{Service: modelHealth}
	}
	return r
}
