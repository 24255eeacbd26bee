// Package serving is the base of every service of a server: it admits what callers open,
// runs models within the memory budget, carries sessions, and counts. The native service
// and the services registered beside it use the same Core, so that one set of limits,
// metrics and health applies to all.
//
// It does not know gRPC (server does) or compute (engines do). A Core is safe for
// concurrent use. It owns no payload bytes: tensors are assembled in memory that engines
// lend, small ones in slabs of the configured pool until an engine lends its own.
package serving

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/internal/metrics"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/terms"
)

// errDraining refuses new work while the server drains.
var errDraining error = failures.TryLater(reason.Draining, "server is draining; use another one, or try again later")

// Config configures a Core. Every field is required; a server fills in the defaults.
type Config struct {
	Models *engine.Registry
	Pool   *slab.Pool   // memory that small tensors wait in
	Budget *slab.Budget // for that memory, and for what requests keep
	Log    *slog.Logger
	// PrincipalOf returns the name of the sender of ctx's RPC, if it has one.
	PrincipalOf func(ctx context.Context) string
	// May returns why the sender of ctx's RPC may not "compute" with a model or, asked by storing,
	// have a source "generate" a tensor. Asks: it asks the user's code, which may take long.
	May  func(ctx context.Context, verb, name string) error
	Asks bool
	// Session limits each session.
	Session stream.Limits
	// Open is the maximum number of each kind that may be open.
	Open [admission.Kinds]int
	// MemoryWait is how long a call waits for memory.
	MemoryWait time.Duration
	// Status returns the code and the text of why a session ended.
	Status func(error) (frame.Code, string)
	// Own returns the refusal that an error of a handler's own stands for, or nil if it is none.
	Own func(error) *terms.RefusedError
	// Tasks returns the Task of a put or a get, with the session locked, or finishes the call
	// and returns nil. Of a put's tensors, none has more than StoredBytes. Nil: sessions have
	// neither puts nor gets.
	Tasks       func(s *Session, m *stream.Machine, now stream.Instant, part *frame.Call) Task
	StoredBytes int64
	// Health is called when the health of a model changes, with the registry locked: it
	// must be quick.
	Health func(model string, h Health)
}

// Core admits, runs and counts. Create one with New.
type Core struct {
	Config // does not change
	admission.Gates
	counts
	Failures   *failures.Log // of calls, as far as their callers are not told why
	models     models
	unanswered sync.WaitGroup // requests between Begin and End; after draining is set, none is added
	allowances *slab.Kept     // for tensors on allowance
	Smalls     *slab.Kept     // for small calls: their runs and messages
	waited     error          // why a call ends that has waited for memory
	unwatch    func()         // stops watching the registry
	forget     sync.Once
	number     atomic.Int64 // of the last session
	oneWays    atomic.Int64 // of those, carriers of a push or a pull

	ctx  context.Context // ends with Close; the cause is failures.ErrShutdown
	stop context.CancelCauseFunc
	work sync.WaitGroup // calls and sessions

	mu       sync.Mutex            // guards all below
	sessions map[*Session]struct{} // open
	past     stream.Stats          // of sessions that have ended
	promised int64                 // bytes, of the allowances of all sessions
	draining bool
}

// New returns a core for the models of cfg. Close closes it.
func New(cfg Config) *Core {
	c := &Core{
		Failures: failures.New(cfg.Log),
		Config:   cfg, models: models{told: cfg.Health, all: make(map[string]*modelState)},
		sessions: make(map[*Session]struct{}),
		counts: counts{
			seconds: metrics.NewCallSeconds(), models: make(map[string]struct{}), sums: metrics.Values{
				OpenTransfers: map[string]int64{string(Push): 0, string(Pull): 0}, Ended: make(map[metrics.Outcome]int64),
				TransferBytes: make(map[metrics.Outcome]int64), EndedTensors: make(map[metrics.Outcome]int64), EndedRPCs: make(map[metrics.Outcome]int64),
			},
		},
	}
	c.ctx, c.stop = context.WithCancelCause(context.Background())
	c.waited = fmt.Errorf("%w: waited %v; try again later", failures.ErrMemory, c.MemoryWait)
	c.Limits = cfg.Open
	c.unwatch = cfg.Models.Watch(func(name string, m engine.Model) {
		c.counts.watch(name, m != nil)
		c.models.watch(name, m)
	})
	c.allowances, c.Smalls = cfg.Budget.Keep(c.Budget.Limit()/allowancesShare), cfg.Budget.Keep(c.Budget.Limit()/smallShare)
	return c
}

// Enter admits one more of a kind, or returns a *terms.RefusedError. Leave must follow.
func (c *Core) Enter(k admission.Kind, from *admission.Caller) error {
	if !c.Gates.Enter(k, from) {
		return failures.TryLater(reason.Open, "%v: the limit of the server is %d, of which a quarter is only for connections that have fewer than 4 open; try again later", k, c.Limits[k])
	}
	return nil
}

// EnterTransfer is Enter for a push or a pull, which it counts as open. LeaveTransfer must
// follow.
func (c *Core) EnterTransfer(k Direction, from *admission.Caller) error {
	err := c.Enter(admission.Transfers, from)
	if err == nil {
		c.transferOpen(k, 1)
	}
	return err
}

// LeaveTransfer undoes EnterTransfer.
func (c *Core) LeaveTransfer(k Direction, from *admission.Caller) {
	c.transferOpen(k, -1)
	c.Leave(admission.Transfers, from)
}

// Begin admits a request that Drain must wait for. While the server drains, it returns a
// *terms.RefusedError. End must follow.
func (c *Core) Begin() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.draining {
		return errDraining
	}
	c.unanswered.Add(1)
	return nil
}

// End undoes Begin, once the request has been answered.
func (c *Core) End() { c.unanswered.Done() }

// Context returns a context that ends when everything must; the cause is ErrShutdown.
func (c *Core) Context() context.Context { return c.ctx }

// Go runs f on a goroutine of its own, which Wait waits for.
func (c *Core) Go(f func()) { c.work.Go(f) }

// Patience calls cancel with why, unless it is stopped, when somebody has waited for memory
// for as long as anybody may.
func (c *Core) Patience(cancel context.CancelCauseFunc, why error) *time.Timer {
	return time.AfterFunc(c.MemoryWait, func() { cancel(why) })
}

// Drain admits nothing new and waits until everything open has ended. If ctx ends first,
// Drain returns its cause.
func (c *Core) Drain(ctx context.Context) error {
	c.mu.Lock()
	c.draining = true
	open := slices.Collect(maps.Keys(c.sessions))
	c.mu.Unlock()
	ended := make(chan error, len(open)+1)
	for _, s := range open { // each ends with ctx at the latest
		go func() { ended <- s.Drain(ctx, "server is shutting down") }()
	}
	go func() { // ends with the last request
		c.unanswered.Wait()
		ended <- nil
	}()
	for range cap(ended) {
		select {
		case err := <-ended:
			if err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// Close ends everything without waiting; Wait waits.
func (c *Core) Close() { c.stop(failures.ErrShutdown) }

// Wait waits, after Close, until calls and sessions have ended.
func (c *Core) Wait() { c.work.Wait() }

// Forget detaches the core from its registry and its budget. It must be called after Wait.
func (c *Core) Forget() {
	c.forget.Do(func() {
		c.unwatch()
		for _, s := range c.models.all { // nobody changes them any more
			s.stop()
		}
		c.allowances.End()
		c.Smalls.End()
	})
}
