package client

import (
	"context"

	"github.com/tensorferry/tensorferry/internal/calling"
	"github.com/tensorferry/tensorferry/tensor"
)

// SequenceRequest describes a sequence.
type SequenceRequest struct {
	Model   string
	MaxRows int64             // of all steps together, 1 or more; the server may reserve memory for them
	Params  map[string]string // of each step
}

// Sequence is a series of calls of a model, its steps, that share a state on the server, such as
// the keys and values of attention. It lives on its session, and ends if no step comes for as long as
// a session may be idle, or with a step that fails after it has begun; the error of any further one has
// reason.StateLost. Its methods are safe for concurrent use: while a step is under way, others are refused.
type Sequence struct {
	client *Client
	on     *calling.Sequence
}

// Sequence begins a sequence and waits for the server. Close must follow.
func (s *Session) Sequence(ctx context.Context, r SequenceRequest) (*Sequence, error) {
	on, err := s.on.Begin(ctx, Request{Model: r.Model, Params: r.Params}, r.MaxRows)
	if err != nil {
		return nil, err
	}
	return &Sequence{s.client, on}, nil
}

// Sequence is like Session.Sequence, on the session that Compute uses, or on a new one.
func (c *Client) Sequence(ctx context.Context, r SequenceRequest) (q *Sequence, err error) {
	s, err := c.sharedSession(ctx)
	if err == nil {
		q, err = s.Sequence(ctx, r)
	}
	return q, err
}

// Step runs the model on the next rows, and returns theirs of its only result. It shares x until then.
func (q *Sequence) Step(ctx context.Context, x tensor.Tensor) (tensor.Tensor, error) {
	return compute(ctx, q.Call, "", x, nil)
}

// Call is like Session.Call, for a step. r has neither a model nor params.
func (q *Sequence) Call(ctx context.Context, r Request) (*Call, error) {
	q.client.tally.calls.Add(1)
	return started(q.on.Call(ctx, r))
}

// Rows returns how many rows have been answered.
func (q *Sequence) Rows() int64 { return q.on.Rows() }

// Close ends the sequence, and waits for the server at most OpenTimeout. A step that is under way
// goes on. A second time is a no-op.
func (q *Sequence) Close() error {
	ctx, stop := context.WithTimeoutCause(context.Background(), q.client.cfg.OpenTimeout, q.client.noAnswer())
	defer stop()
	return q.on.Close(ctx)
}
