// Package splitlearn serves the gRPC service of SplitLearnComm, splitlearn.comm.ComputeService, so
// that its unmodified clients run the models of a server. It refuses to guess: bytes that none of
// their codecs makes of a shape are refused, and so is what a model has no port for.
//
// New makes a Service for server.Config, which is safe for concurrent use. It borrows the bytes of
// requests, and hands over those of answers.
package splitlearn

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	pb "github.com/tensorferry/tensorferry/api/splitlearn/comm"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// version is that of their server.
const version = "1.0.0"

type service struct {
	pb.UnimplementedComputeServiceServer
	training
	monitor
	model    string // the default
	began    time.Time
	requests atomic.Int64
}

// New returns the service. Requests that name no model are for the one of that name. The server
// that serves it takes the listener over.
func New(l net.Listener, model string) server.Service {
	return server.Service{
		Listener: l, MessageBytes: messageBytes, FirstMessage: firstMessage,
		Register: func(r grpc.ServiceRegistrar, m *server.Models) {
			s := &service{model: model, began: time.Now()}
			s.models, s.token, s.leases = m, rand.Text(), make(map[string]*lease)
			s.gone = make(map[string][]string)
			pb.RegisterComputeServiceServer(r, s)
		},
	}
}

// find returns the ports of a model.
func (s *service) find(ctx context.Context, name string) (p ports, err error) {
	info, found := s.models.Info(ctx, name)
	p.Info = info.Of(nil) // no request has what is optional
	_, p.trains = s.models.Info(ctx, name+"/train")
	p.past, p.data = layers(p.Inputs, "past")
	p.present, p.result = layers(p.Outputs, "present")
	switch {
	case !found:
		err = frame.Errorf(frame.NotFound, "no model %.100q", name)
	case p.data < 0 || p.result < 0:
		err = frame.Errorf(unimplemented, "model %q must take one tensor and return one, beside past_key_0, past_value_0, present_key_0, present_value_0 and so on", name)
	}
	return p, err
}

// makers returns what makes the inputs of a run, no more than it may have, and its outputs.
func (s *service) makers(ctx context.Context) (inputs, outputs maker) {
	left := int64(tensorBytes)
	outputs = maker{ctx, func(bytes int64) error { return s.models.Hold(ctx, bytes) }}
	return maker{ctx, func(bytes int64) error {
		if left -= bytes; left < 0 {
			return invalid("the inputs of a run have up to %d bytes, inflated or widened", tensorBytes)
		}
		return outputs.hold(bytes)
	}}, outputs
}

// Compute runs a model.
func (s *service) Compute(ctx context.Context, req *pb.ComputeRequest) (*pb.ComputeResponse, error) {
	began := time.Now()
	inputs, outputs := s.makers(ctx)
	s.requests.Add(1)
	p, err := s.find(ctx, cmp.Or(req.GetModelId(), s.model))
	if err != nil {
		return nil, err
	}
	if req.GetUseCache() && len(p.present) == 0 {
		return nil, invalid("use_cache: model %q does not declare the outputs present_key_0, present_value_0 and so on", p.Name)
	}
	data, codec, err := decode("data", req.GetData(), req.GetShape(), inputs)
	if err != nil {
		return nil, err
	}
	in, err := p.inputs(data, req.GetPastKeyValues(), inputs)
	if err != nil {
		return nil, err
	}
	resp := &pb.ComputeResponse{RequestId: req.RequestId}
	var out []tensor.Tensor
	if !p.trains || !req.GetTrainingMode() {
		out, _, _, err = s.models.Compute(ctx, p.Name, engine.Call{Inputs: inputsOf(p.Inputs)}, in, tensorBytes)
	} else if id := cmp.Or(req.GetForwardId(), uuid.NewString()); len(id) > frame.NameBytes {
		err = invalid("forward_id has %d bytes; at most %d are kept", len(id), frame.NameBytes)
	} else {
		resp.ForwardId = &id
		out, err = s.forward(ctx, &p, id, in)
	}
	if r := refused(err); r != nil {
		return nil, invalid("%s", r.Text)
	}
	if err == nil {
		err = p.answer(resp, out, codec, req.GetUseCache(), outputs)
	}
	resp.MonitoringData, resp.ComputeTimeMs = s.snapshot(s.models), millis(began)
	return resp, err
}

// ComputeBackward gives the gradient of the input of a run in training mode, once.
func (s *service) ComputeBackward(ctx context.Context, req *pb.BackwardRequest) (*pb.BackwardResponse, error) {
	began, id := time.Now(), req.GetForwardId()
	inputs, outputs := s.makers(ctx)
	gradient, codec, err := decode("grad_output_data", req.GetGradOutputData(), req.GetGradOutputShape(), inputs)
	if err != nil {
		return nil, err
	}
	run, found := s.take(s.models.Connection(ctx), nameOf(ctx, id), req.GetModelId())
	again := false // which clients do
	if found {
		defer func() { s.settle(run, again) }()
	}
	p, err := s.find(ctx, cmp.Or(run.model, req.GetModelId(), s.model))
	switch {
	case err != nil:
		return nil, err
	case !p.trains:
		return nil, frame.Errorf(frame.FailedPrecondition, "Training mode not enabled on server") // as theirs says
	case !found:
		return nil, noPass(id)
	}
	gradient, err = s.backward(ctx, &p, run, gradient)
	if r, ok := errors.AsType[*terms.RefusedError](err); ok && r.RetryMillis > 0 {
		again = true
	} else if refused(err) != nil { // the model had no memory for it, or its process was started anew
		err = noPass(id)
	}
	if err != nil {
		return nil, err
	}
	resp := &pb.BackwardResponse{ForwardId: id}
	resp.GradInputData, resp.GradInputShape, err = encode(gradient, codec, outputs)
	resp.MonitoringData, resp.BackwardTimeMs = s.snapshot(s.models), millis(began)
	return resp, err
}

// millis returns the milliseconds since then, more than 0.
func millis(began time.Time) *float32 {
	return new(float32(max(time.Since(began), 1).Seconds() * 1000))
}

// HealthCheck says ok while calls of the default model are taken: their clients connect to
// nothing else.
func (s *service) HealthCheck(context.Context, *pb.HealthRequest) (*pb.HealthResponse, error) {
	resp := &pb.HealthResponse{Status: "ok", Message: "service is healthy", Version: version, UptimeSeconds: new(float32(time.Since(s.began).Seconds()))}
	if !s.models.Ready(s.model) {
		resp.Status, resp.Message = "unavailable", "the server is draining, or the model cannot be run now"
	}
	return resp, nil
}

// GetServiceInfo describes the default model.
func (s *service) GetServiceInfo(ctx context.Context, _ *pb.ServiceInfoRequest) (*pb.ServiceInfoResponse, error) {
	p, _ := s.find(ctx, s.model) // or nothing is known of it
	return &pb.ServiceInfoResponse{
		ServiceName: s.model, Version: version, Device: cmp.Or(p.Device, "unknown"), UptimeSeconds: new(float32(time.Since(s.began).Seconds())),
		TotalRequests: s.requests.Load(), CustomInfo: p.About,
	}, nil
}

// unimplemented is a code that sessions do not have. Their clients retry everything but this one,
// PERMISSION_DENIED, INVALID_ARGUMENT, NOT_FOUND and UNAUTHENTICATED.
const unimplemented = frame.Code(codes.Unimplemented)

// noPass says what theirs says.
func noPass(id string) error {
	return frame.Errorf(frame.NotFound, "'Activation %s not found in cache (may have expired or never cached)'", id)
}

func invalid(format string, args ...any) error {
	return frame.Errorf(frame.InvalidArgument, format, args...)
}

// refused returns an error whose code is FAILED_PRECONDITION, or nil: a model does not take its
// input, or its state does not allow a call.
func refused(err error) *terms.RefusedError {
	if r, ok := errors.AsType[*terms.RefusedError](err); ok && r.Code == frame.FailedPrecondition {
		return r
	}
	return nil
}
