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
	began, r := time.Now(), rpcOf(ctx)
	if err := r.hold(s.cfg.Budget, int64(proto.Size(req))); err != nil {
		s.core.Refuse(admission.Calls)
		return nil, err
	}
	r.received.Consumed() // from now on it lies in the budget
	in := make([]Tensor, len(req.GetInputs()))
	for i, t := range req.GetInputs() { // which share the request's bytes
		d := tensor.Desc{DType: tensor.DataType(min(max(t.GetDtype(), 0), math.MaxUint8)), Shape: t.GetShape()}
		in[i] = Tensor{Port: t.GetPort(), Tensor: tensor.Tensor{Desc: d, Data: t.GetData()}}
	}
	results, st, err := s.models.Compute(ctx, Request{
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

// small is memory set aside for a call whose inputs and outputs lie in Go's heap until it
// has been computed. All of them have half of the budget, first of the part that is kept for
// small calls: the models that they wait for need the rest.
type small struct {
	budget *slab.Budget
	holder *slab.Principal // of all of them
	bytes  int64
}

func (s *Server) small() small { return small{budget: s.cfg.Budget, holder: s.smalls} }

// take sets memory aside for so many bytes more, or says why not.
func (h *small) take(bytes int64) error {
	if bytes <= requestFree {
		return nil
	}
	return h.takeMemory(inbound.HeapShare * bytes)
}

// takeMemory is take for bytes that do not lie in Go's heap. As much again, up to smallSpare, stays
// free, for smaller ones.
func (h *small) takeMemory(n int64) error {
	spare := min(n, smallSpare)
	if h.budget.TryAcquire(h.holder, n+spare) {
		h.budget.Release(h.holder, spare)
		h.bytes += n
		return nil
	}
	_, _, limit := h.budget.Used()
	why := serving.TryLater(frame.ResourceExhausted, "memory: %d bytes more for the message of a small call, or for what a service keeps; all of these together have half of memory_bytes, which is %d", n, limit)
	if n+spare > limit/2 { // and never will be
		why.RetryMillis = 0
		return why
	}
	why.Text += "; try again later"
	return why
}

// free gives the memory back.
func (h *small) free() {
	if h.bytes > 0 {
		h.budget.Release(h.holder, h.bytes)
		h.bytes = 0
	}
}
