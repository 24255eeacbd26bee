// Package guard authenticates the senders of a server's RPCs. It checks again while an RPC
// is open, and ends the RPC once its sender is no longer allowed.
//
// It does not know certificates and tokens, which a Check judges, or RPCs, which its caller
// ends. A Guard is safe for concurrent use.
package guard

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/tensorferry/tensorferry/internal/admission"
)

// Every is the interval at which Look is to be called.
const Every = 5 * time.Second

// errRenamed ends the RPC of a caller who has another name now, and with it other rights.
var errRenamed = errors.New("your credentials are those of another principal now; send the RPC again")

// reasons is how many reasons to refuse RPCs are counted, and logged, each by itself.
const reasons = 64

// Check returns the name of the sender of an RPC over a connection, or why it is refused.
type Check func(info credentials.AuthInfo, authorization []string) (principal string, err error)

// Caller is the sender of an RPC, with its evidence. A nil Caller is anonymous.
type Caller struct {
	name          string
	addr          string
	info          credentials.AuthInfo
	authorization []string
}

// Known returns a caller of that name, without evidence.
func Known(name string) *Caller { return &Caller{name: name} }

// Name returns the name of the caller's principal; "" for a nil Caller.
func (c *Caller) Name() string {
	if c == nil {
		return ""
	}
	return c.name
}

// Guard applies a Check.
type Guard struct {
	check   Check // nil: everybody is allowed
	log     *slog.Logger
	refused atomic.Int64
	open    sync.Map // of *Caller, to the func(error) that ends its RPC

	mu       sync.Mutex
	samplers map[string]*admission.LogSampler // by reason; that of "" is for all beyond reasons
}

// New returns a guard. If check is nil, everybody may send RPCs, without a name.
func New(check Check, log *slog.Logger) *Guard {
	return &Guard{check: check, log: log, samplers: make(map[string]*admission.LogSampler)}
}

// Refused returns how many RPCs were refused or ended.
func (g *Guard) Refused() int64 { return g.refused.Load() }

// Ask returns the sender of the RPC of ctx with these headers, or why the RPC is refused.
func (g *Guard) Ask(ctx context.Context, header metadata.MD) (*Caller, error) {
	if g.check == nil {
		return nil, nil
	}
	c := &Caller{authorization: slices.Clone(header.Get("authorization"))}
	if p, ok := peer.FromContext(ctx); ok {
		c.addr, c.info = p.Addr.String(), p.AuthInfo
	}
	var err error
	c.name, err = g.ask(c)
	return c, err
}

// ask calls the Check, and counts and logs refusals.
func (g *Guard) ask(c *Caller) (name string, err error) {
	if name, err = g.check(c.info, c.authorization); err == nil {
		return name, nil
	}
	g.refused.Add(1)
	if n, due := g.sampler(err.Error()).Again(); due {
		g.log.Warn("RPC refused", slog.String("peer", c.addr), slog.String("principal", c.name), slog.String("error", err.Error()), slog.Int64("refused", n))
	}
	return "", err
}

func (g *Guard) sampler(reason string) *admission.LogSampler {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.samplers[reason] == nil && len(g.samplers) >= reasons {
		reason = ""
	}
	if g.samplers[reason] == nil {
		g.samplers[reason] = new(admission.LogSampler)
	}
	return g.samplers[reason]
}

// Permits reports whether the peer of another connection is the caller's principal: the
// Check names it so, given the same authorization. A nil caller permits everybody.
func (g *Guard) Permits(c *Caller, info credentials.AuthInfo) bool {
	if c == nil {
		return true
	}
	name, err := g.check(info, c.authorization)
	return err == nil && name == c.name
}

// Remember makes Look call end once a caller that Ask has admitted is no longer allowed,
// until Forget. For a nil caller, Remember and Forget do nothing.
func (g *Guard) Remember(c *Caller, end func(why error)) {
	if c != nil {
		g.open.Store(c, end)
	}
}

// Forget must be called when the RPC has ended.
func (g *Guard) Forget(c *Caller) {
	g.open.Delete(c)
}

// Look checks the callers of open RPCs again.
func (g *Guard) Look() {
	for c, end := range g.open.Range {
		name, err := g.ask(c.(*Caller))
		if err == nil && name != c.(*Caller).name {
			err = errRenamed
		}
		if err != nil {
			end.(func(error))(err) // a no-op on an RPC that has ended meanwhile
		}
	}
}
