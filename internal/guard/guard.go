// Package guard asks who sends each RPC of a server, and again and again while the RPC is
// open: whoever is not allowed any more loses it.
//
// It refuses to know certificates and tokens, which a Check judges, and RPCs, which a
// caller ends. A Guard is safe for concurrent use.
package guard

import (
	"context"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/tensorferry/tensorferry/internal/serving"
)

// every is how often it is asked again about open RPCs.
const every = 5 * time.Second

// Check returns the name of who sends an RPC over a connection, or why it is refused.
type Check func(info credentials.AuthInfo, authorization []string) (principal string, err error)

// Caller is who sends an RPC, and what shows it. A nil one is anybody.
type Caller struct {
	name          string
	addr          net.Addr
	info          credentials.AuthInfo
	authorization []string
}

// Name returns the name of the caller's principal.
func (c *Caller) Name() string {
	if c == nil {
		return ""
	}
	return c.name
}

// Guard asks a Check.
type Guard struct {
	check   Check // nil: everybody may
	log     *slog.Logger
	refused atomic.Int64
	sampler serving.LogSampler

	mu   sync.Mutex
	open map[*Caller]func(error) // guarded by mu: ends the RPC
}

// New returns a guard. With nil everybody may send RPCs, without a name.
func New(check Check, log *slog.Logger) *Guard {
	return &Guard{check: check, log: log, open: make(map[*Caller]func(error))}
}

// Refused returns how many RPCs were refused, or ended.
func (g *Guard) Refused() int64 { return g.refused.Load() }

// Ask returns who sends the RPC of ctx with these headers, or why it is refused.
func (g *Guard) Ask(ctx context.Context, header metadata.MD) (*Caller, error) {
	if g.check == nil {
		return nil, nil
	}
	c := &Caller{authorization: slices.Clone(header.Get("authorization"))}
	if p, ok := peer.FromContext(ctx); ok {
		c.addr, c.info = p.Addr, p.AuthInfo
	}
	var err error
	c.name, err = g.ask(c)
	return c, err
}

// ask asks the Check, and counts and logs what it refuses.
func (g *Guard) ask(c *Caller) (name string, err error) {
	if name, err = g.check(c.info, c.authorization); err == nil {
		return name, nil
	}
	g.refused.Add(1)
	if n, due := g.sampler.Again(); due {
		g.log.Warn("RPC refused", slog.Any("peer", c.addr), slog.String("error", err.Error()), slog.Int64("refused", n))
	}
	return "", err
}

// Remember has Watch end the RPC of a caller that Ask has let in, if it is not allowed any
// more, until Forget. Of a nil caller it does nothing, as Forget does.
func (g *Guard) Remember(c *Caller, end func(why error)) {
	if c == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open[c] = end
}

// Forget is called when the RPC has ended.
func (g *Guard) Forget(c *Caller) {
	if c == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.open, c)
}

// Watch asks again for every open RPC, every 5 s, until done is closed.
func (g *Guard) Watch(done <-chan struct{}) {
	if g.check == nil {
		return
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-done:
			return
		}
		g.mu.Lock()
		open := maps.Clone(g.open)
		g.mu.Unlock()
		for c, end := range open {
			if _, err := g.ask(c); err != nil {
				end(err) // a no-op on an RPC that has ended meanwhile
			}
		}
	}
}
