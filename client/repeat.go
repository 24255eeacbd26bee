package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"
	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/client/retry"
	"github.com/tensorferry/tensorferry/internal/calling"
	"github.com/tensorferry/tensorferry/tensor"
)

// breaker lets no attempt through after many have failed.
type breaker = gobreaker.TwoStepCircuitBreaker[any]

func newBreaker(after int) *breaker {
	if after <= 0 {
		return nil
	}
	return gobreaker.NewTwoStepCircuitBreaker[any](gobreaker.Settings{
		Timeout:     breakFor,
		ReadyToTrip: func(n gobreaker.Counts) bool { return n.ConsecutiveFailures >= uint32(after) },
		IsSuccessful: func(err error) bool {
			own, ok := errors.AsType[*Error](err)
			return !ok || own.Code != codes.Unavailable && !errors.Is(err, ErrNoAnswer) && own.RetryAfter == 0
		},
	})
}

// attempt begins one at anything that a server is asked. settled takes its end.
func (c *Client) attempt() (settled func(error), err error) {
	if c.open == nil {
		return func(error) {}, nil
	}
	if settled, err = c.open.Allow(); err != nil {
		own := calling.AsRefused(calling.Failed(fmt.Errorf("%w: %d in a row; the next is made within %v", ErrCircuitOpen, c.cfg.BreakAfter, breakFor)))
		own.RetryAfter = breakFor
		return nil, own
	}
	return settled, nil
}

// attemptTask is attempt for a call, a put or a get.
func (c *Client) attemptTask() (ended func(calling.Outcome), err error) {
	settled, err := c.attempt()
	if err != nil {
		return nil, err
	}
	c.tally.attempts.Add(1)
	return func(o calling.Outcome) {
		settled(o.Err)
		c.tally.ended(calling.CodeOf(o.Err), o.Total, o.Server, o.Sent, o.Received)
	}, nil
}

// verb is what a server is asked for.
type verb int

const (
	calls      verb = iota
	idempotent      // calls
	pushes
	pulls
	questions
	deletes
)

// mayRepeat reports whether what failed with err can be repeated: it can succeed later, and the
// server refused it, or nothing is different when it happens twice.
func (v verb) mayRepeat(err error) bool {
	own, ok := errors.AsType[*Error](err)
	return ok && own.Retryable() && (own.Refused || v != calls && v != deletes)
}

// tries are the attempts at one thing.
type tries struct {
	client *Client
	n      int
	until  time.Time // none begins later
}

func (c *Client) tries() *tries { return &tries{client: c, until: time.Now().Add(c.cfg.RetryFor)} }

// repeat makes attempts until one succeeds, or the policy or the time ends them, or what failed may
// not be repeated, or prepare, if not nil, says that it cannot. It returns the error of the last one.
func (t *tries) repeat(ctx context.Context, v verb, attempt func() error, prepare func() bool) (err error) {
	for err = attempt(); v.mayRepeat(err) && t.wait(ctx, err) && (prepare == nil || prepare()); err = attempt() {
		if v < questions {
			t.client.tally.retries.Add(1)
		}
	}
	return err
}

// wait waits before another attempt, and reports whether there is to be one.
func (t *tries) wait(ctx context.Context, err error) bool {
	cfg := &t.client.cfg
	own, _ := errors.AsType[*Error](err)
	if cfg.Retry == nil {
		return false
	}
	t.n++
	wait, again := cfg.Retry(retry.Attempt{N: t.n, Err: err, After: own.RetryAfter})
	if !again || time.Until(t.until) < wait {
		return false
	}
	alarm := time.NewTimer(wait)
	defer alarm.Stop()
	select {
	case <-alarm.C:
		return true
	case <-ctx.Done():
		calling.Wait(own, context.Cause(ctx))
	case <-t.client.closing.Done():
		calling.Wait(own, ErrClosed)
	}
	return false
}

// Call is one run of a model, or several, one after another: with Config.Retry, Wait and
// Regions repeat what failed and may be repeated. Each attempt has an ID and timings of its own.
type Call struct {
	now     atomic.Pointer[calling.Call] // the latest attempt
	tries   *tries
	ctx     context.Context
	cancel  context.CancelCauseFunc // of ctx
	request Request
	begun   time.Time
	from    []int64 // by input: where its Reader was; nil if not all can be read again, or the call is not repeated

	mu      sync.Mutex // guards all below, and orders attempts
	session *Session   // of the last attempt
	err     error      // of the last attempt
}

// Call is like Session.Call, on the session that Compute uses, or on a new one. With
// Config.Retry, it may also wait until a server takes the call.
func (c *Client) Call(ctx context.Context, r Request) (*Call, error) {
	c.tally.calls.Add(1)
	call := &Call{tries: c.tries(), ctx: ctx, cancel: func(error) {}, request: r, begun: time.Now()}
	if c.cfg.Retry != nil {
		call.request.Inputs, call.from = slices.Clone(r.Inputs), readAgain(r.Inputs)
		if r.Timeout > 0 {
			call.tries.until = call.begun.Add(min(r.Timeout, c.cfg.RetryFor))
		}
		call.ctx, call.cancel = context.WithCancelCause(ctx)
	}
	if err := call.tries.repeat(call.ctx, calls, call.run, nil); err != nil {
		call.cancel(nil)
		return nil, err
	}
	return call, nil
}

// run starts an attempt.
func (c *Call) run() (err error) {
	if c.session, err = c.tries.client.sharedSession(c.ctx); err != nil {
		return err
	}
	q := c.request
	if q.Timeout > 0 {
		q.Timeout = max(q.Timeout-time.Since(c.begun), 1)
	}
	now, err := c.session.on.Call(c.ctx, q)
	if err == nil {
		c.now.Store(now)
	}
	return err
}

// readAgain returns where the Readers of inputs are, or nil if not all inputs can be read again.
func readAgain(inputs []Input) []int64 {
	from := make([]int64, len(inputs))
	for i, in := range inputs {
		seeker, ok := in.Reader.(io.Seeker)
		switch {
		case in.Next != nil, in.Release != nil, in.Reader != nil && !ok:
			return nil
		case ok:
			var err error
			if from[i], err = seeker.Seek(0, io.SeekCurrent); err != nil {
				return nil
			}
		}
	}
	return from
}

// rewind has Readers read again.
func rewind(inputs []Input, from []int64) bool {
	for i, in := range inputs {
		if in.Reader == nil {
			continue
		}
		if _, err := in.Reader.(io.Seeker).Seek(from[i], io.SeekStart); err != nil {
			return false
		}
	}
	return true
}

// notRepeated is added to the error of a call that is not.
const notRepeated = "; the model may have run and does not declare itself idempotent, so the call was not repeated"

// next starts an attempt after one that failed with err, unless there is one already. It
// returns why there is none.
func (c *Call) next(failed *calling.Call, err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.now.Load() != failed:
		return nil
	case c.err != nil:
		return c.err
	case c.from == nil || failed.Handed():
		c.err = err
		return err
	}
	v := calls
	if c.request.Idempotent || c.session.idempotent[c.request.Model] {
		v = idempotent
	}
	attempt := func() error { return err } // the one that failed
	c.err = c.tries.repeat(c.ctx, v, func() error { return attempt() }, func() bool {
		attempt = c.run
		return rewind(c.request.Inputs, c.from)
	})
	if calling.Retryable(c.err) && !v.mayRepeat(c.err) {
		own, _ := errors.AsType[*Error](c.err)
		said := *own
		if said.Message += notRepeated; own.Cause != nil {
			said.Cause = fmt.Errorf("%w%s", own.Cause, notRepeated)
		}
		c.err = &said
	}
	return c.err
}

// ID returns the ID of the latest attempt, under which the server has the cause of its failure.
func (c *Call) ID() tensor.ID { return c.now.Load().ID() }

// Cancel cancels the call. The server stops the model within one block.
func (c *Call) Cancel() {
	c.cancel(context.Canceled)
	c.now.Load().Stop(context.Canceled)
}

// Wait waits for the call to end and returns all its results, or an error. Afterwards the
// library uses neither inputs nor results. On a hung connection, Wait blocks until
// keep-alive closes the connection; on a hung lane, until the lane is given up.
func (c *Call) Wait() (Results, error) {
	for {
		now := c.now.Load()
		results, err := now.Wait()
		if err != nil {
			if err = c.next(now, err); err == nil {
				continue
			}
		}
		c.cancel(nil)
		return results, err
	}
}

// Timings returns how long each stage took on the server. It must only be called after Wait.
func (c *Call) Timings() Timings { return c.now.Load().Timings() }

// Regions yields parts of the results as they arrive, until the call ends. If the call
// fails, the last pair has the error. Results that go to a Writer are omitted. Only one
// goroutine at a time may iterate.
func (c *Call) Regions() iter.Seq2[Region, error] {
	return func(yield func(Region, error) bool) {
		for {
			now := c.now.Load()
			if !now.Regions(func(r Region) bool { return yield(r, nil) }) {
				return
			}
			err := now.Err()
			if err == nil {
				return
			}
			if c.from != nil {
				_, err = now.Wait() // its Readers are read again
			}
			if err = c.next(now, err); err != nil {
				yield(Region{}, err)
				return
			}
		}
	}
}
