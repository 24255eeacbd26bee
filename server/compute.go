package server

import (
	"context"
	"math"
	"time"

	"google.golang.org/protobuf/proto"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// Compute runs one small call for a caller that has no session.
func (s *Server) Compute(ctx context.Context, req *pb.ComputeRequest) (*pb.ComputeResponse, error) {
	began := time.Now()
	free, err := s.hold(proto.Size(req))
	if err != nil {
		s.core.Refuse(admission.Calls)
		return nil, err
	}
	defer free()
	received(ctx).Consumed()
	in := make([]serving.Tensor, len(req.GetInputs()))
	for i, t := range req.GetInputs() { // which share the request's bytes
		d := tensor.Desc{DType: tensor.DataType(min(max(t.GetDtype(), 0), math.MaxUint8)), Shape: t.GetShape()}
		in[i] = serving.Tensor{Port: t.GetPort(), Tensor: tensor.Tensor{Desc: d, Data: t.GetData()}}
	}
	results, st, err := s.core.Compute(ctx, &s.conns.Of(ctx).Caller, serving.Request{
		Model: req.GetModel(), Params: req.GetParams(), Timeout: serving.Millis(req.GetTimeoutMillis()),
	}, in, computeBytes)
	if err != nil {
		return nil, err
	}
	resp := &pb.ComputeResponse{Outputs: make([]*pb.NamedTensor, len(results)), Timings: &pb.Timings{
		QueueNanos: int64(st.Queue), H2DNanos: int64(st.H2D), ComputeNanos: int64(st.Compute), D2HNanos: int64(st.D2H),
		TotalNanos: int64(time.Since(began)),
	}}
	for i, t := range results {
		resp.Outputs[i] = &pb.NamedTensor{Port: t.Port, Dtype: pb.DataType(t.DType), Shape: t.Shape, Data: t.Data}
	}
	return resp, nil
}

// smallCalls holds the memory of all small calls' requests.
var smallCalls = slab.NewPrincipal("compute")

// hold sets memory aside for a small call's request of so many bytes, which lies in Go's
// heap until the model has run, or says why not. All of them have half of the budget: the
// models that they wait for need the rest.
func (s *Server) hold(bytes int) (free func(), err error) {
	if bytes <= requestFree {
		return func() {}, nil
	}
	n := inbound.HeapShare * int64(bytes)
	if !s.cfg.Budget.TryAcquire(smallCalls, n) {
		_, _, limit := s.cfg.Budget.Used()
		return nil, serving.TryLater(frame.ResourceExhausted, "memory: %d bytes more for the message of a small call; all small calls together have half of memory_bytes, which is %d; try again later", n, limit)
	}
	return func() { s.cfg.Budget.Release(smallCalls, n) }, nil
}
