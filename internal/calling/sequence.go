package calling

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// Sequence is a series of calls that share a state of a model. Its methods are safe for concurrent use.
type Sequence struct {
	session *Session
	id      tensor.ID

	// Guarded by the session's lock.
	rows   uint64
	lost   error // why it has ended
	closed bool
}

// Begin begins a sequence, of a model and params that r has, and waits for the server. All steps
// together have at most so many rows.
func (s *Session) Begin(ctx context.Context, r Request, maxRows int64) (*Sequence, error) {
	if maxRows < 1 {
		return nil, fmt.Errorf("%w: a sequence of at most %d rows; wanted 1 or more", Causes.Input, maxRows)
	}
	if !s.Status().PeerSequences {
		return nil, &Error{Code: codes.Unimplemented, Message: "the server has no sequences: it is older than this client"}
	}
	q := &Sequence{session: s, id: tensor.NewID()}
	c, err := s.call(ctx, r, nil, &frame.Sequence{ID: q.id, MaxRows: uint64(maxRows)})
	if err == nil {
		_, err = c.Wait()
	}
	if err != nil {
		return nil, err
	}
	return q, nil
}

// Call starts a step, as Session.Call does a call. r has neither model nor params. A step that
// fails after it has begun ends the sequence.
func (q *Sequence) Call(ctx context.Context, r Request) (c *Call, err error) {
	q.session.Do(func(*stream.Machine, stream.Instant) { err = q.lost })
	switch {
	case err != nil:
		return nil, err
	case r.Model != "" || len(r.Params) > 0 || len(r.Inputs) == 0:
		return nil, fmt.Errorf("%w: a step of a sequence has inputs, and the model and the params that the sequence began with", Causes.Input)
	}
	if c, err = q.session.call(ctx, r, q, &frame.Sequence{ID: q.id}); err != nil && q.session.Cause() != nil { // else nothing was sent
		q.session.Do(func(*stream.Machine, stream.Instant) { err = q.failed(err) })
	}
	return c, err
}

// failed returns the error of a step that has failed with err; the session is locked.
func (q *Sequence) failed(err error) error {
	own, ok := errors.AsType[*Error](err)
	switch ended := q.session.Cause(); {
	case ended != nil:
		q.end(errors.New("its connection to the server has ended: " + textOf(ended)))
		return q.lost
	case ok && (!own.Refused || own.Reason == reason.StateLost):
		q.end(fmt.Errorf("a step has failed: %w", err))
	}
	return err
}

// end notes why there are no more steps; the session is locked.
func (q *Sequence) end(why error) {
	if q.lost == nil {
		q.lost = &Error{
			Code: codes.FailedPrecondition, Reason: reason.StateLost,
			Cause: fmt.Errorf("client: the sequence is over after %d rows: %w", q.rows, why),
		}
	}
}

// Rows returns how many rows have been answered.
func (q *Sequence) Rows() (n int64) {
	q.session.Do(func(*stream.Machine, stream.Instant) { n = int64(q.rows) })
	return n
}

// Close ends the sequence and waits for the server, also after a step that has failed on this side
// alone: there it may not have begun. A step that is under way goes on.
func (q *Sequence) Close(ctx context.Context) error {
	again := false
	q.session.Do(func(*stream.Machine, stream.Instant) {
		again, q.closed = q.closed, true
		q.end(errors.New("it was closed"))
	})
	if again {
		return nil
	}
	c, err := q.session.call(ctx, Request{}, nil, &frame.Sequence{ID: q.id, End: true})
	if err == nil {
		_, err = c.Wait()
	}
	if q.session.Cause() != nil { // the sequence has ended with the session
		return nil
	}
	return err
}
