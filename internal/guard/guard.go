// Package guard asks who sends each RPC of a server, and again and again while the RPC is
// open: whoever is not allowed any more loses it.
//
// It refuses to know certificates and tokens, which a Check judges, and RPCs, which a
// caller ends. A Guard is safe for concurrent use.
package guard

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/tensorferry/tensorferry/internal/serving"
)

// every is how often it is asked again about open RPCs.
const every = 5 * time.Second

// Check returns the name of who sends an RPC over a connection, or why it is refused.
type Check func(info credentials.AuthInfo, authorization []string) (principal string, err error)

// Caller is who sends an RPC, and what shows it.
type Caller struct {
	Name          string
	Addr          string
	Info          credentials.AuthInfo
	Authorization []string
}

// Guard asks a Check.
type Guard struct {
	check   Check // nil: everybody may
	log     *slog.Logger
	refused atomic.Int64

	mu      sync.Mutex
	open    map[*Caller]func(error) // guarded by mu: ends the RPC
	sampler serving.LogSampler
}

// New returns a guard. With nil everybody may send RPCs, without a name.
func New(check Check, log *slog.Logger) *Guard {
	return &Guard{check: check, log: log, open: make(map[*Caller]func(error))}
}

// Refused returns how many RPCs were refused, or ended.
func (g *Guard) Refused() int64 { return g.refused.Load() }

// Ask sets the caller's name, or returns why its RPC is refused.
func (g *Guard) Ask(c *Caller) (err error) {
	if g.check == nil {
		return nil
	}
	if c.Name, err = g.check(c.Info, c.Authorization); err == nil {
		return nil
	}
	g.refused.Add(1)
	if n, due := g.sampler.Again(); due {
		g.log.Warn("RPC refused", slog.String("peer", c.Addr), slog.String("error", err.Error()), slog.Int64("refused", n))
	}
	return err
}

// Remember has Watch end the RPC of a caller that Ask has let in, if it is not allowed any
// more, until Forget.
func (g *Guard) Remember(c *Caller, end func(why error)) {
	if g.check == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open[c] = end
}

// Forget is called when the RPC has ended.
func (g *Guard) Forget(c *Caller) {
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
		for _, c := range g.all() {
			again := *c // others read its name
			if err := g.Ask(&again); err != nil {
				g.end(c, err)
			}
		}
	}
}

func (g *Guard) all() (all []*Caller) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for c := range g.open {
		all = append(all, c)
	}
	return all
}

// end ends an RPC that is still open.
func (g *Guard) end(c *Caller, why error) {
	g.mu.Lock()
	end := g.open[c]
	g.mu.Unlock()
	if end != nil {
		end(why)
	}
}
