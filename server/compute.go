package server

import (
	"context"
	"math"
	"time"

	"google.golang.org/protobuf/proto"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// Compute runs one small call for a caller that has no session.
func (s *Server) Compute(ctx context.Context, req *pb.ComputeRequest) (*pb.ComputeResponse, error) {
	began, r := time.Now(), rpcOf(ctx)
	if err := s.hold(r.held, int64(proto.Size(req))); err != nil {
		s.core.Refuse(admission.Calls)
		return nil, err
	}
	r.received.Consumed() // from now on it lies in the budget
	call := engine.Call{Params: req.GetParams(), Inputs: make([]engine.Input, len(req.GetInputs()))}
	in := make([]tensor.Tensor, len(call.Inputs))
	for i, t := range req.GetInputs() { // which share the request's bytes
		d := tensor.Desc{DType: tensor.DataType(min(max(t.GetDtype(), 0), math.MaxUint8)), Shape: t.GetShape()}
		call.Inputs[i].Port, in[i] = t.GetPort(), tensor.Tensor{Desc: d, Data: t.GetData()}
	}
	if timeout := time.Duration(min(req.GetTimeoutMillis(), 1<<40)) * time.Millisecond; timeout > 0 {
		limited, stop := context.WithTimeout(ctx, timeout)
		defer stop()
		ctx = limited
	}
	results, info, st, err := s.models.Compute(ctx, req.GetModel(), call, in, computeBytes)
	if err != nil {
		return nil, err
	}
	resp := &pb.ComputeResponse{Outputs: make([]*pb.NamedTensor, len(results)), Timings: &pb.Timings{
		QueueNanos: int64(st.Queue), H2DNanos: int64(st.H2D), ComputeNanos: int64(st.Compute), D2HNanos: int64(st.D2H),
		TotalNanos: int64(time.Since(began)),
	}}
	for i, t := range results {
		resp.Outputs[i] = &pb.NamedTensor{Port: info.Outputs[i].Name, Dtype: pb.DataType(t.DType), Shape: t.Shape, Data: t.Data}
	}
	return resp, nil
}

// The memory of small calls is set aside while their inputs and outputs lie in Go's heap. All
// of them have half of the budget, first of the part that is kept for small calls: the models
// that they wait for need the rest.

// account returns an empty account of small calls.
func (s *Server) account() *slab.Account { return s.cfg.Budget.Account(s.smalls) }

// hold takes memory for so many bytes more in Go's heap, or says why not.
func (s *Server) hold(a *slab.Account, bytes int64) error {
	if bytes <= requestFree {
		return nil
	}
	return s.take(a, inbound.HeapShare*bytes)
}

// take takes n bytes more, or says why not. As much again, up to computeBytes, stays free, for
// smaller ones.
func (s *Server) take(a *slab.Account, n int64) error {
	spare := min(n, computeBytes)
	if a.Take(n + spare) {
		a.Release(spare)
		return nil
	}
	limit := s.cfg.Budget.Limit()
	why := failures.TryLater(reason.Memory, "memory: %d bytes more for the message of a small call, or for what a service keeps; all of these together have half of memory_bytes, which is %d", n, limit)
	if n+spare > limit/2 { // and never will be
		why.RetryMillis = 0
		return why
	}
	why.Text += "; try again later"
	return why
}
