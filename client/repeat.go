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
		own := failed(fmt.Errorf("%w: %d in a row; the next is made within %v", ErrCircuitOpen, c.cfg.BreakAfter, breakFor)).refused()
		own.RetryAfter = breakFor
		return nil, own
	}
	return settled, nil
}

// tries are the attempts at one thing.
type tries struct {
	client *Client
	n      int
	until  time.Time // none begins later
}

func (c *Client) tries() *tries { return &tries{client: c, until: time.Now().Add(c.cfg.RetryFor)} }

// again reports whether there is to be an attempt after one that failed with err, and waits
// before it. harmless: it does no harm when something happens twice.
func (t *tries) again(ctx context.Context, err error, harmless bool) bool {
	cfg := &t.client.cfg
	own, ok := errors.AsType[*Error](err)
	if cfg.Retry == nil || !ok || !own.Retryable() || !harmless && !own.Refused {
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
		own.until = context.Cause(ctx)
	case <-t.client.closing.Done():
		own.until = ErrClosed
	}
	return false
}

// Call is one run of a model, or several, one after another: with Config.Retry, Wait and
// Regions repeat what failed and may be repeated. Each attempt has an ID and timings of its own.
type Call struct {
	now   atomic.Pointer[run] // the latest attempt
	again *again              // nil if the call is not repeated
}

// again is what another attempt at a call needs.
type again struct {
	*tries
	ctx     context.Context
	cancel  context.CancelCauseFunc
	request Request
	begun   time.Time
	from    []int64 // by input: where its Reader was; nil if not all inputs can be read again

	mu  sync.Mutex // guards all below, and orders attempts
	err error      // of the last attempt
}

func newCall(first *run, err error) (*Call, error) {
	if err != nil {
		return nil, err
	}
	c := new(Call)
	c.now.Store(first)
	return c, nil
}

// Call is like Session.Call, on the session that Compute uses, or on a new one. With
// Config.Retry, it may also wait until a server takes the call.
func (c *Client) Call(ctx context.Context, r Request) (*Call, error) {
	c.tally.calls.Add(1)
	if c.cfg.Retry == nil {
		return newCall(c.run(ctx, r))
	}
	r.Inputs = slices.Clone(r.Inputs)
	a := &again{tries: c.tries(), request: r, begun: time.Now(), from: readAgain(r.Inputs)}
	if r.Timeout > 0 {
		a.until = a.begun.Add(min(r.Timeout, c.cfg.RetryFor))
	}
	a.ctx, a.cancel = context.WithCancelCause(ctx)
	call, err := newCall(a.start())
	if err != nil {
		a.cancel(nil)
		return nil, err
	}
	call.again = a
	return call, nil
}

// run starts an attempt at a call on the session that Compute uses.
func (c *Client) run(ctx context.Context, r Request) (*run, error) {
	s, err := c.sharedSession(ctx)
	if err != nil {
		return nil, err
	}
	return s.run(ctx, r)
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

// start starts an attempt, or several until one has started.
func (a *again) start() (first *run, err error) {
	for {
		q := a.request
		if q.Timeout > 0 {
			q.Timeout = max(q.Timeout-time.Since(a.begun), 1)
		}
		if first, err = a.client.run(a.ctx, q); err == nil {
			return first, nil
		}
		if !a.tries.again(a.ctx, err, false) {
			return nil, err
		}
		a.client.tally.retries.Add(1)
	}
}

// next starts an attempt after one that failed with err, unless there is one already. It
// returns why there is none.
func (c *Call) next(failed *run, err error) error {
	a := c.again
	if a == nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case c.now.Load() != failed:
		return nil
	case a.err != nil:
		return a.err
	}
	a.err = err
	if failed.handed.Load() || a.from == nil || !a.harmless(failed, err) || !a.tries.again(a.ctx, err, true) {
		return a.err
	}
	for i, in := range a.request.Inputs {
		if in.Reader == nil {
			continue
		}
		if _, err := in.Reader.(io.Seeker).Seek(a.from[i], io.SeekStart); err != nil {
			return a.err
		}
	}
	a.client.tally.retries.Add(1)
	first, err := a.start()
	if err != nil {
		a.err = err
		return err
	}
	a.err = nil
	c.now.Store(first)
	return nil
}

// harmless reports whether nothing happens twice when what failed with err is repeated, or that
// does no harm. If not, a.err says so.
func (a *again) harmless(failed *run, err error) bool {
	own, _ := errors.AsType[*Error](err)
	switch {
	case !retryable(err):
		return false
	case own.Refused, a.request.Idempotent, failed.session.idempotent[a.request.Model]:
		return true
	}
	a.err = own.with("; the model may have run and does not declare itself idempotent, so the call was not repeated")
	return false
}

// ID returns the ID of the latest attempt, under which the server has the cause of its failure.
func (c *Call) ID() tensor.ID { return c.now.Load().id }

// Cancel cancels the call. The server stops the model within one block.
func (c *Call) Cancel() {
	if c.again != nil {
		c.again.cancel(context.Canceled)
	}
	c.now.Load().stop(context.Canceled)
}

// Wait waits for the call to end and returns all its results, or an error. Afterwards the
// library uses neither inputs nor results. On a hung connection, Wait blocks until
// keep-alive closes the connection; on a hung lane, until the lane is given up.
func (c *Call) Wait() (Results, error) {
	for {
		now := c.now.Load()
		results, err := now.end()
		if err != nil {
			if err = c.next(now, err); err == nil {
				continue
			}
		}
		if c.again != nil {
			c.again.cancel(nil)
		}
		return results, err
	}
}

// Timings returns how long each stage took on the server. It must only be called after Wait.
func (c *Call) Timings() Timings {
	t := c.now.Load().done.Timings
	return Timings{
		time.Duration(t.Receive), time.Duration(t.Queue), time.Duration(t.H2D), time.Duration(t.Compute),
		time.Duration(t.D2H), time.Duration(t.FirstResult), time.Duration(t.Total),
	}
}

// Regions yields parts of the results as they arrive, until the call ends. If the call
// fails, the last pair has the error. Results that go to a Writer are omitted. Only one
// goroutine at a time may iterate.
func (c *Call) Regions() iter.Seq2[Region, error] {
	return func(yield func(Region, error) bool) {
		for {
			now := c.now.Load()
			if !now.regions(func(r Region) bool { return yield(r, nil) }) {
				return
			}
			err := now.err(context.Background())
			if err == nil {
				return
			}
			if c.again != nil {
				_, err = now.end() // its Readers are read again
			}
			if err = c.next(now, err); err != nil {
				yield(Region{}, err)
				return
			}
		}
	}
}
