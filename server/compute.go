package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// errRequestMemory: what others ask leaves no room for a request, or for its answer.
var errRequestMemory = errors.New("server: no memory for the message of a small call")

// Compute runs one small call for a caller that has no session.
func (s *Server) Compute(ctx context.Context, req *pb.ComputeRequest) (*pb.ComputeResponse, error) {
	began := time.Now()
	if err := s.admit(); err != nil {
		return nil, err
	}
	defer s.transfers.unanswered.Add(-1)
	one := s.connections.of(ctx)
	if !s.beginCall(one) {
		return nil, errCalls(s.cfg.QueuedCalls)
	}
	defer s.endCall(one)
	held := &requestMemory{budget: s.cfg.Budget}
	defer func() { held.Release() }() // whose answer has it, or none
	if err := held.resize(proto.Size(req)); err != nil {
		s.callsRefused.Add(1)
		return nil, unaryStatus(callCode(err))
	}
	s.callsUnary.Add(1)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if t := req.GetTimeoutMillis(); t > 0 {
		alarm := time.AfterFunc(timeoutOf(t), func() { cancel(context.DeadlineExceeded) })
		defer alarm.Stop()
	}
	over := make(chan struct{})
	defer close(over)
	go func() { // ends with the call
		select {
		case <-s.closing:
			cancel(errShutdown)
		case <-over:
		}
	}()
	id := session.NewID()
	resp, err := s.compute(ctx, cancel, id, req)
	if err == nil {
		resp.Timings.TotalNanos = int64(time.Since(began))
		err = held.resize(proto.Size(resp))
	}
	code, text, retry := frame.OK, "", uint32(0)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil { // outranks what it caused
			err = cause
		}
		code, text, retry = callCode(err)
	}
	s.callEnded(req.GetModel(), code, time.Since(began))
	if code == frame.Internal {
		s.log.Error("call failed", slog.String("call", id.String()), slog.String("error", err.Error()))
	}
	if err != nil {
		return nil, unaryStatus(code, text, retry)
	}
	if answer, ok := ctx.Value(answerKey{}).(*wire.Answer); ok { // the client is to read it
		answer.Held = held
		held = new(requestMemory)
	}
	return resp, nil
}

// requestMemory is what the budget has set aside for one small call: for its request
// until the model has run, then for its answer until the client has read it. All of
// them have half of the budget: the models that they wait for need the rest.
type requestMemory struct {
	budget *slab.Budget
	n      int64
}

// resize makes it as large as a message of so many bytes needs, or says why not.
func (m *requestMemory) resize(bytes int) error {
	switch n := int64(bytes); {
	case n < m.n:
		m.budget.Release(requestHolder, m.n-n)
		m.n = n
	case n-m.n <= requestFree:
	case !m.budget.TryAcquire(requestHolder, n-m.n):
		_, _, limit := m.budget.Used()
		return fmt.Errorf("%w: %d bytes more; all small calls together have half of memory_bytes, which is %d; try again later", errRequestMemory, n-m.n, limit)
	default:
		m.n = n
	}
	return nil
}

// Release gives all of it back.
func (m *requestMemory) Release() {
	if m.n > 0 {
		m.budget.Release(requestHolder, m.n)
		m.n = 0
	}
}

// compute checks a small call's inputs and runs its model. Waiting for memory ends
// the call by cancel.
func (s *Server) compute(ctx context.Context, cancel context.CancelCauseFunc, id tensor.ID, req *pb.ComputeRequest) (*pb.ComputeResponse, error) {
	if problem := frame.CheckEntries("params", req.GetParams()); problem != "" {
		return nil, fmt.Errorf("%w: %s", errBinding, problem)
	}
	if err := store.CheckName(req.GetModel()); err != nil { // the rules are the same, and no error repeats a name of a MiB
		return nil, fmt.Errorf("%w: model: %w", errBinding, err)
	}
	model, over, err := s.model(req.GetModel())
	if err != nil {
		return nil, err
	}
	var lost error
	defer func() { over(lost) }()
	info := model.Info()
	tensors, inputs, err := smallInputs(info, req.GetInputs())
	if err != nil {
		return nil, err
	}
	patience := time.AfterFunc(s.cfg.MemoryWait, func() { cancel(s.waitedForMemory()) })
	run, err := model.Open(ctx, engine.Call{ID: id, Session: "compute " + id.String(), Inputs: inputs, Params: req.GetParams()})
	patience.Stop()
	if err != nil {
		return nil, err
	}
	results, st, err := engine.Collect(ctx, info, run, tensors, computeBytes)
	if errors.Is(err, engine.ErrLost) {
		lost = err
	}
	if errors.Is(err, tensor.ErrTooLarge) {
		err = fmt.Errorf("%w; a session has no such limit", err)
	}
	if err != nil {
		return nil, err
	}
	out := make([]*pb.NamedTensor, len(results))
	for i, t := range results {
		out[i] = &pb.NamedTensor{Port: info.Outputs[i].Name, Dtype: pb.DataType(t.DType), Shape: t.Shape, Data: t.Data}
	}
	return &pb.ComputeResponse{Outputs: out, Timings: &pb.Timings{
		QueueNanos: int64(st.Queue), H2DNanos: int64(st.H2D), ComputeNanos: int64(st.Compute), D2HNanos: int64(st.D2H),
	}}, nil
}

// smallInputs puts a small call's tensors, whose bytes they share, in the order of
// the model's ports.
func smallInputs(info engine.Info, list []*pb.NamedTensor) ([]tensor.Tensor, []engine.Input, error) {
	if len(list) != len(info.Inputs) {
		return nil, nil, fmt.Errorf("%w: %q has %d inputs, the call has %d", errBinding, info.Name, len(info.Inputs), len(list))
	}
	tensors := make([]tensor.Tensor, len(list))
	inputs := make([]engine.Input, len(list))
	left := int64(computeBytes)
	for i, port := range info.Inputs {
		at := slices.IndexFunc(list, func(t *pb.NamedTensor) bool {
			return t.GetPort() == port.Name || t.GetPort() == "" && len(list) == 1
		})
		if at < 0 {
			return nil, nil, fmt.Errorf("%w: %q needs input %q", errBinding, info.Name, port.Name)
		}
		in := list[at]
		d := tensor.Desc{DType: tensor.DataType(min(max(in.GetDtype(), 0), math.MaxUint8)), Shape: in.GetShape()}
		t, err := tensor.New(d, in.GetData())
		if err != nil {
			return nil, nil, fmt.Errorf("%w: input %q: %w", errBinding, port.Name, err)
		}
		if left -= int64(len(t.Data)); left < 0 {
			return nil, nil, fmt.Errorf("%w: the inputs have more than %d bytes; a session has no such limit", tensor.ErrTooLarge, computeBytes)
		}
		tensors[i] = t
		inputs[i] = engine.Input{Port: port.Name, Desc: d, ChunkBytes: tensor.ChunkFor(d, computeBytes)}
	}
	return tensors, inputs, nil
}
