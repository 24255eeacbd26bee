// Package relay carries what another process of this machine wants of servers, over a
// link to it: calls, pushes, pulls, and what is rare. docs/link.md is its protocol.
//
// It refuses to know who is at the other end. Payload stays in the memory of the link:
// inputs are sent from there, results received there. A Relay serves one guest.
package relay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/client/retry"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/slab"
)

// Config is what a relay does beside calls, pushes and pulls.
type Config struct {
	// Client configures the clients of connections; a connection may say how many Lanes.
	Client client.Config
	Dial   func(target string, cfg client.Config) (*client.Client, error)
	// Verbs are what a guest may ask a server, by name.
	Verbs map[string]Verb
	// Processors, unless 0, are those that the runtime uses for all but a few small calls, which
	// one does sooner: another is woken for each goroutine that can run, finds it gone, and sleeps again.
	Processors int
	// Explain says what a guest is told of an error.
	Explain func(err error) Failure
}

// Failure is the JSON of a done with a code, which is gRPC's.
type Failure struct {
	Code        uint16 `json:"-"`
	Message     string `json:"message"`
	Hint        string `json:"hint,omitempty"`
	RetryMillis int64  `json:"retry_millis,omitempty"` // when waiting helps; else 0
	Retryable   bool   `json:"retryable"`              // the same can succeed later
	Call        string `json:"call,omitempty"`         // the server's id of what failed
	Reason      string `json:"reason,omitempty"`       // of package reason
}

// Verb asks a server, and writes a JSON value.
type Verb func(ctx context.Context, c *client.Client, args []string, w io.Writer) error

// Serve serves the guest of a link until it ends, and returns why: nil if the guest
// has closed its end. It does not close the link.
func Serve(conn *link.Conn, cfg Config) error {
	ctx, cancel := context.WithCancelCause(context.Background())
	r := &relay{
		cfg: cfg, conn: conn, ctx: ctx, cancel: cancel, ended: make(chan error, 1),
		pieces:  slab.NewBudget("memory for pieces of results", PiecesBytes),
		callers: make(map[uint32]caller), ops: make(map[uint64]*op), turn: make(chan struct{}),
	}
	r.running.Go(r.receive)
	err := <-r.ended
	cancel(errors.New("relay: the guest has ended"))
	conn.Shutdown() // whoever sends may be waiting for room
	r.running.Wait()
	for _, o := range r.ops { // that the link ended before they ran
		o.unshare()
	}
	for _, c := range r.callers {
		if own, ok := c.(*client.Client); ok {
			_ = own.Close() // it breaks connections, with which sequences end
		}
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

type relay struct {
	cfg     Config
	conn    *link.Conn
	pieces  *slab.Budget // of results, beside the link's quota: they must get through when that is full
	ctx     context.Context
	cancel  context.CancelCauseFunc
	running sync.WaitGroup
	turn    chan struct{} // to receive, for one that has run something
	resting atomic.Bool   // there is one
	ended   chan error    // capacity 1: why nothing more is received

	mu      sync.Mutex // guards all below
	last    uint32     // the newest of callers
	callers map[uint32]caller
	ops     map[uint64]*op
	large   int       // how many of ops are for all processors
	calm    time.Time // when the last of these ended
}

// op is something the guest has begun, and that ends with one done.
type op struct {
	*relay
	id     uint64
	ctx    context.Context
	cancel context.CancelCauseFunc
	inputs []*pieces        // by the number of the input; nil for a whole one
	shared []*link.Block    // of the guest's, until the op ends
	rest   []link.Announced // results that go with done

	timings client.Timings // of a call that has ended
	large   bool           // guarded by the relay's mu

	mu      sync.Mutex
	results []*result // guarded by mu, as they were announced
}

// receive takes the guest's messages until the link ends. It never waits for anything
// else: the guest may be waiting for room in the socket. What a message begins runs on
// this goroutine, which a small call notices; another one goes on to receive, one that has
// run something before if it can: a new one's stack would have to grow.
func (r *relay) receive() {
	for {
		m, err := r.conn.Recv()
		if err != nil {
			r.ended <- err
			return
		}
		var run func()
		switch m := m.(type) {
		case *link.Ask:
			run, err = r.ask(m)
		case *link.Call:
			run, err = r.call(m)
		case *link.Data:
			err = r.data(m)
		case *link.Cancel:
			if o := r.op(m.ID); o != nil {
				o.cancel(context.Canceled)
			}
		default:
			err = fmt.Errorf("%w: kind %d is not a client's", link.ErrMessage, link.KindOf(m))
		}
		if err != nil {
			r.ended <- err
			return
		}
		if run == nil {
			continue
		}
		select {
		case r.turn <- struct{}{}:
		default:
			r.running.Go(r.receive)
		}
		if run(); r.resting.Swap(true) {
			return
		}
		select {
		case <-r.turn:
			r.resting.Store(false)
		case <-r.ctx.Done():
			return
		}
	}
}

func (r *relay) op(id uint64) *op {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ops[id]
}

// begin makes an op. An error ends the link.
func (r *relay) begin(id uint64) (*op, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ops[id] != nil {
		return nil, fmt.Errorf("%w: id %d is in use", link.ErrMessage, id)
	}
	o := &op{relay: r, id: id}
	o.ctx, o.cancel = context.WithCancelCause(r.ctx)
	r.ops[id] = o
	if r.cfg.Processors > 0 && r.large == 0 && time.Since(r.calm) > time.Second {
		runtime.GOMAXPROCS(1)
	}
	return o, nil
}

// moves notes that the op moves n bytes: if they are many, or it is one of many, all processors work until a second
// after its end.
func (o *op) moves(n int64) {
	o.relay.mu.Lock()
	defer o.relay.mu.Unlock()
	if o.large || n <= 256<<10 && len(o.ops) <= 4 {
		return
	}
	o.large = true
	if o.relay.large++; o.relay.large == 1 {
		runtime.GOMAXPROCS(o.cfg.Processors) // 0 changes nothing
	}
}

// share shares a range of the guest's until the op ends.
func (o *op) share(at link.Range) ([]byte, error) {
	if at.Len == 0 {
		return []byte{}, nil
	}
	o.moves(int64(at.Len))
	data, b, err := o.conn.Shared(at)
	if err == nil {
		o.shared = append(o.shared, b)
	}
	return data, err
}

func (o *op) unshare() {
	for _, b := range o.shared {
		b.Release()
	}
}

// run returns what runs the work of an op to its end.
func (o *op) run(millis uint32, work func() (answer []byte, err error)) func() {
	return func() {
		if millis > 0 {
			d := time.Duration(millis) * time.Millisecond
			ctx, stop := context.WithTimeoutCause(o.ctx, d, fmt.Errorf("%w: not done within its timeout of %v", context.DeadlineExceeded, d))
			defer stop()
			o.ctx = ctx
		}
		answer, err := work()
		o.unshare()
		if cause := context.Cause(o.ctx); err != nil && errors.Is(cause, client.ErrInput) {
			err = cause // whatever it broke
		}
		o.relay.mu.Lock()
		delete(o.ops, o.id) // what the guest still sends goes back to it
		if o.large {
			o.relay.large--
			o.relay.calm = time.Now()
		}
		o.relay.mu.Unlock()
		for _, p := range o.inputs {
			p.drop()
		}
		o.cancel(nil)
		o.done(answer, err)
	}
}

// done ends an op for the guest. An error of sending is that of receive too.
func (o *op) done(answer []byte, err error) {
	t := o.timings
	m := &link.Done{Head: link.Head{ID: o.id}, Results: o.rest}
	for i, d := range []time.Duration{t.Receive, t.Queue, t.H2D, t.Compute, t.D2H, t.FirstResult, t.Total} {
		m.Timings[i] = uint64(max(0, d))
	}
	if err == nil {
		m.Flags, m.JSON, err = o.conn.Fit(answer, o.room)
	}
	if err != nil {
		f := o.cfg.Explain(err)
		text, _ := json.Marshal(f) // texts and a number marshal
		m.Code = f.Code
		m.Flags, m.JSON, _ = o.conn.Fit(text, o.room) // the code says the most
	}
	_ = o.conn.Send(m)
}

// room returns a block for an answer. What the guest owns must not keep it from the end of an op.
func (o *op) room(n int64) (*link.Block, error) {
	if b, err := o.conn.TryNew(n); b != nil || err != nil {
		return b, err
	}
	ctx, stop := context.WithTimeout(o.relay.ctx, pieceWait)
	defer stop()
	return o.conn.New(ctx, o.pieces, n)
}

// request is the JSON of an ask. Each verb has its own fields of it.
type request struct {
	Verb        string `json:"verb"`
	Connection  uint32 `json:"connection"`
	Target      string `json:"target"`
	Lanes       *int   `json:"lanes"`
	WaitMillis  uint32 `json:"wait_millis"`
	Retry       string `json:"retry"` // as retry.Parse reads it
	RetryMillis uint32 `json:"retry_for_millis"`
	BreakAfter  int    `json:"break_after"`
	TLS         bool   `json:"tls"`
	identity.ClientFiles
	Model   string            `json:"model"`
	Params  map[string]string `json:"params"`
	MaxRows int64             `json:"max_rows"`
	Glob    string            `json:"glob"`
	Names   []string          `json:"names"`
	Tensors []pushed          `json:"tensors"`
	All     bool              `json:"all"`
	Select  []selection       `json:"select"`
	// To says where tensors of a pull go: ranges by name, or in pieces, one or all.
	To    orPieces[map[string]orPieces[extent]] `json:"to"`
	Range *extent                               `json:"range"`
}

// ask begins what is rare. An error ends the link.
func (r *relay) ask(m *link.Ask) (run func(), err error) {
	var q request
	bad := json.Unmarshal(m.JSON, &q)
	switch {
	case bad != nil:
	case q.Verb == "push":
		return r.push(m, &q)
	case q.Verb == "loop": // it measures the link, not what begins an op
		answer, err := json.Marshal(map[string]any{"range": q.Range})
		if err == nil && r.conn.TrySend(&link.Done{Head: link.Head{ID: m.ID}, JSON: answer}) {
			return nil, nil
		}
	}
	o, err := r.begin(m.ID)
	if err != nil {
		return nil, err
	}
	return o.run(m.Millis, func() ([]byte, error) {
		if bad != nil {
			return nil, fmt.Errorf("%w: the json of an ask: %w", client.ErrInput, bad)
		}
		if q.Verb == "pull" {
			return o.pull(&q, m.Flags)
		}
		return o.answer(&q)
	}), nil
}

// answer does what an ask asks for.
func (o *op) answer(q *request) ([]byte, error) {
	switch q.Verb {
	case "connect":
		cfg := o.cfg.Client
		cfg.Wait, cfg.RetryFor = time.Duration(q.WaitMillis)*time.Millisecond, time.Duration(q.RetryMillis)*time.Millisecond
		var err error
		if cfg.Retry, err = retry.Parse(q.Retry); err != nil {
			return nil, fmt.Errorf("%w: %w", client.ErrInput, err)
		}
		cfg.BreakAfter = q.BreakAfter
		if n := q.Lanes; n != nil {
			if *n < 0 || *n > mostLanes {
				return nil, fmt.Errorf("%w: lanes is %d; it is 0 to %d", client.ErrInput, *n, mostLanes)
			}
			if cfg.Lanes = *n; *n == 0 {
				cfg.Lanes = -1
			}
		}
		if q.TLS || q.ClientFiles != (identity.ClientFiles{}) {
			if cfg.Credentials, cfg.PerRPC, err = q.Credentials(); err != nil {
				return nil, fmt.Errorf("%w: %w", client.ErrInput, err)
			}
		}
		c, err := o.cfg.Dial(q.Target, cfg)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", client.ErrInput, err)
		}
		return o.opened(c), nil
	case "disconnect":
		o.relay.mu.Lock()
		c := o.callers[q.Connection]
		delete(o.callers, q.Connection)
		o.relay.mu.Unlock()
		if c == nil {
			return nil, nil
		}
		return nil, c.Close()
	case "loop":
		return json.Marshal(map[string]any{"range": q.Range})
	}
	c, err := o.client(q.Connection)
	if err != nil {
		return nil, err
	}
	switch q.Verb {
	case "statistics":
		return json.Marshal(c.Statistics())
	case "sequence":
		s, err := c.Sequence(o.ctx, client.SequenceRequest{Model: q.Model, MaxRows: q.MaxRows, Params: q.Params})
		if err != nil {
			return nil, err
		}
		return o.opened(s), nil
	}
	verb := o.cfg.Verbs[q.Verb]
	if verb == nil {
		return nil, fmt.Errorf("%w: there is no verb %q", client.ErrInput, q.Verb)
	}
	args := q.Names
	if q.Glob != "" {
		args = append(args, q.Glob)
	}
	var answer bytes.Buffer
	err = verb(o.ctx, c, args, &answer)
	return answer.Bytes(), err
}

// caller is a connection, a *client.Client, or a *client.Sequence.
type caller interface {
	Call(ctx context.Context, q client.Request) (*client.Call, error)
	Close() error
}

// opened gives a caller a number, and returns the answer that tells it.
func (r *relay) opened(c caller) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last++
	r.callers[r.last] = c
	return fmt.Appendf(nil, `{"connection": %d}`, r.last)
}

// caller finds one by its number.
func (r *relay) caller(n uint32) (caller, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.callers[n]; c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("%w: connection %d is closed", client.ErrInput, n)
}

// client finds a connection.
func (r *relay) client(n uint32) (*client.Client, error) {
	c, err := r.caller(n)
	if own, ok := c.(*client.Client); ok || err != nil {
		return own, err
	}
	return nil, fmt.Errorf("%w: %d is a sequence, not a connection", client.ErrInput, n)
}
