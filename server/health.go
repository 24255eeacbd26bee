package server

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/engine"
)

// modelHealth is what a model's name follows in the names of the health service.
const modelHealth = "model/"

// healthService answers for the whole, under "" and the TensorService's name, and
// for each model of the registry. A model of which a run was lost does not serve
// until another has taken its place: it holds memory, and a worker.
type healthService struct {
	*health.Server

	mu     sync.Mutex        // guards all below
	models map[string]uint64 // each one's number
	last   uint64
}

func newHealth() *healthService {
	h := &healthService{Server: health.NewServer(), models: make(map[string]uint64)}
	h.SetServingStatus(pb.TensorService_ServiceDesc.ServiceName, healthpb.HealthCheckResponse_SERVING)
	return h
}

// watch follows the registry.
func (h *healthService) watch(name string, here bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	status := healthpb.HealthCheckResponse_SERVING
	if here {
		h.last++
		h.models[name] = h.last
	} else {
		delete(h.models, name)
		status = healthpb.HealthCheckResponse_SERVICE_UNKNOWN // gRPC's service can not forget
	}
	h.SetServingStatus(modelHealth+name, status)
}

// number tells a model from the one that takes its place.
func (h *healthService) number(name string) uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.models[name]
}

// lost notes that a run of a model did not end, unless the model is out already.
func (h *healthService) lost(name string, number uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.models[name] == number {
		h.SetServingStatus(modelHealth+name, healthpb.HealthCheckResponse_NOT_SERVING)
	}
}

// Check answers for one name; a model that is gone is as unknown as one that never
// was.
func (h *healthService) Check(ctx context.Context, r *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	out, err := h.Server.Check(ctx, r)
	if out.GetStatus() == healthpb.HealthCheckResponse_SERVICE_UNKNOWN {
		return nil, errUnknownService
	}
	return out, err
}

// List answers for every name, without models that are gone.
func (h *healthService) List(ctx context.Context, r *healthpb.HealthListRequest) (*healthpb.HealthListResponse, error) {
	out, err := h.Server.List(ctx, r)
	for name, of := range out.GetStatuses() {
		if of.GetStatus() == healthpb.HealthCheckResponse_SERVICE_UNKNOWN {
			delete(out.Statuses, name)
		}
	}
	return out, err
}

// model finds a model for one run. over is called once, after the run's Close and
// with what that returned.
func (s *Server) model(name string) (m engine.Model, over func(closed error), err error) {
	number := s.health.number(name) // before Lookup, lest a loss be blamed on the next model
	m, unuse, err := s.cfg.Models.Lookup(name)
	if err != nil {
		return nil, nil, err
	}
	return m, func(closed error) {
		defer unuse()
		if closed == nil {
			return
		}
		s.runsAbandoned.Add(1)
		if errors.Is(closed, engine.ErrLost) {
			s.health.lost(name, number)
		}
	}, nil
}
