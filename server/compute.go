package server

import (
	"context"
	"math"
	"time"

	"google.golang.org/protobuf/proto"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// Compute runs one small call for a caller that has no session.
func (s *Server) Compute(ctx context.Context, req *pb.ComputeRequest) (*pb.ComputeResponse, error) {
	began := time.Now()
	held := &requestMemory{budget: s.cfg.Budget}
	defer func() { held.Release() }() // whose answer has it, or none
	if err := held.resize(proto.Size(req)); err != nil {
		s.core.Refused()
		return nil, err
	}
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
	if err := held.resize(proto.Size(resp)); err != nil {
		return nil, err
	}
	if answer, ok := ctx.Value(answerKey{}).(*wire.Answer); ok { // the client is to read it
		answer.Held, answer.Charged = held, true
		held = new(requestMemory)
	}
	return resp, nil
}

// smallCalls holds the memory of all small calls' requests and answers.
var smallCalls = slab.NewPrincipal("compute")

// requestMemory is what the budget has set aside for one small call: for its request
// until the model has run, then for its answer until the client has read it. All of
// them have half of the budget: the models that they wait for need the rest.
type requestMemory struct {
	budget *slab.Budget
	n      int64
}

// resize makes it as large as a message of so many bytes, which lies in Go's heap, needs,
// or says why not.
func (m *requestMemory) resize(bytes int) error {
	switch n := inbound.HeapShare * int64(bytes); {
	case n < m.n:
		m.budget.Release(smallCalls, m.n-n)
		m.n = n
	case n-m.n <= inbound.HeapShare*requestFree:
	case !m.budget.TryAcquire(smallCalls, n-m.n):
		_, _, limit := m.budget.Used()
		return serving.TryLater(frame.ResourceExhausted, "memory: %d bytes more for the message of a small call; all small calls together have half of memory_bytes, which is %d; try again later", n-m.n, limit)
	default:
		m.n = n
	}
	return nil
}

// Release gives all of it back.
func (m *requestMemory) Release() {
	if m.n > 0 {
		m.budget.Release(smallCalls, m.n)
		m.n = 0
	}
}
