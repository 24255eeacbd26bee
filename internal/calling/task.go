package calling

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// task is what a call, a put and a get have in common.
type task struct {
	session *Session
	id      tensor.ID
	stored  bool               // it is a put or a get
	step    *Sequence          // that it is a step of, or nil
	ctx     context.Context    // ends with the session's last event of the task
	cancel  context.CancelFunc // of ctx
	unhook  func() bool        // of the caller's context
	news    session.News

	begun time.Time
	ended func(Outcome) // called once

	// Guarded by the session's lock until ctx has ended.
	done           frame.Done
	cause          error // why this side ended the task
	sent, received int64 // bytes of tensors
}

// open opens the task, which h handles, and calls then, if not nil, with the session locked. The end of
// the caller's ctx stops it.
func (t *task) open(ctx context.Context, s *Session, part frame.Call, h handler, then func(m *stream.Machine, now stream.Instant) error) (err error) {
	if ctx.Err() != nil {
		return CauseError(context.Cause(ctx))
	}
	if t.ended, err = s.cfg.Attempt(); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			t.ended(Outcome{Err: err})
		}
	}()
	t.session, t.id, t.stored, t.news, t.begun = s, part.ID, part.Stored(), make(session.News, 1), time.Now()
	t.ctx, t.cancel = context.WithCancel(context.Background())
	s.DoSend(func(m *stream.Machine, now stream.Instant) {
		if err = m.OpenCall(now, part); err == nil {
			if s.open[t.id] = h; then != nil {
				err = then(m, now)
			}
		}
	})
	switch {
	case errors.Is(err, stream.ErrDraining):
		return AsRefused(Failed(Causes.Draining))
	case errors.Is(err, stream.ErrClosed):
		select {
		case <-s.Over:
			return AsRefused(s.Err)
		case <-ctx.Done():
			return CauseError(context.Cause(ctx))
		}
	case err != nil:
		return fmt.Errorf("%w: %w", Causes.Input, err)
	}
	t.unhook = func() bool { return false }
	if ctx.Done() != nil {
		t.unhook = context.AfterFunc(ctx, func() { t.Stop(context.Cause(ctx)) })
	}
	return nil
}

// over implements handler.
func (t *task) over(e stream.Event) {
	switch {
	case e.Kind == stream.EventStop && t.stored && t.cause == nil && e.Code == frame.DeadlineExceeded: // otherwise it was not for the server
		t.cause = fmt.Errorf("%w: the server made no progress for %v (Config.StallTimeout); try again, or raise it for a slow server", Causes.NoAnswer, t.session.cfg.StallTimeout)
	case e.Kind == stream.EventClosed:
		delete(t.session.open, t.id)
		if t.done = *e.Done; t.step != nil && t.done.Code == frame.OK {
			t.step.rows = t.done.Rows
		}
		t.ended(Outcome{t.failed(), time.Since(t.begun), time.Duration(t.done.Timings.Total), t.sent, t.received})
		t.cancel()
	}
}

// ID returns the ID of the call, put or get.
func (t *task) ID() tensor.ID { return t.id }

// Stop cancels the task with a cause on this side, unless it has ended.
func (t *task) Stop(cause error) {
	t.session.Do(func(m *stream.Machine, _ stream.Instant) {
		if t.session.open[t.id] != nil && t.cause == nil {
			t.cause = cause
		}
		m.Finish(frame.Done{Call: t.id, Code: frame.Cancelled, Message: "cancelled by the caller"})
	})
}

// wait waits for news. It returns false when the task has ended.
func (t *task) wait() bool { return t.news.Wait(t.ctx) == nil }

// err returns the task's error. The end of the caller's ctx outranks what it caused. It must
// only be called after the task's ctx has ended.
func (t *task) err(ctx context.Context) (err error) {
	t.session.Do(func(*stream.Machine, stream.Instant) {
		err = t.failed()
	})
	if err != nil && ctx.Err() != nil {
		err = t.named(CauseError(context.Cause(ctx)))
	}
	return err
}

// named returns an error of the task.
func (t *task) named(e *Error) *Error {
	copied := *e
	copied.Call = t.id
	return &copied
}

// failed returns why the task has failed, or nil; the session is locked.
func (t *task) failed() (err error) {
	if t.cause != nil {
		err = t.named(CauseError(t.cause))
	} else if err = refused(t.id, t.done.Code, t.done.Reason, t.done.Message, t.done.RetryAfterMillis); err != nil {
		own, _ := errors.AsType[*Error](err)
		own.Refused = t.done.Refused
	}
	if err != nil && t.step != nil {
		err = t.step.failed(err)
	}
	return err
}

// rests returns a clock for the caller's code. While that blocks, the server is told.
func (t *task) rests(kind, name string) (r *restClock) {
	cfg := &t.session.cfg
	r = newRestClock(kind, name, cfg.InputIdle, time.Duration(t.session.Status().PeerChunkIdle), func() {
		if t.ctx.Err() == nil {
			t.session.waits(r.every)
			return
		}
		r.end()
		if err := t.err(context.Background()); err != nil {
			cfg.Idled(err)
		}
	}, func(cause error) {
		t.Stop(cause)
		cfg.Idled(CauseError(cause))
	})
	return r
}
