package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/client/retry"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	// runMost is the longest that a run takes; upMost that a server lives, and awayMost that
	// it is away.
	runMost  = 20 * time.Millisecond
	upMost   = 400 * time.Millisecond
	awayMost = 100 * time.Millisecond
)

// The models: one whose calls may be repeated, and one whose calls may not.
const (
	again = "again"
	once  = "once"
)

// serveCounted is a server with the built-in models, and two that write the number of each
// call to a journal, until SIGTERM drains it or SIGINT ends it at once.
func serveCounted(ctx context.Context, address, journal string) error {
	file, err := os.OpenFile(journal, os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	host := cpu.NewHost(cpu.HostConfig{Workers: 16})
	defer host.Close()
	models := engine.NewRegistry()
	for _, m := range append(cpu.Builtins(host), cpu.Slow(host)) {
		err = errors.Join(err, models.Add(m))
	}
	port := func(name string) []engine.Port {
		return []engine.Port{{Name: name, DTypes: []tensor.DataType{tensor.Uint64}, Shape: []int64{1}}}
	}
	for _, name := range []string{again, once} {
		m, e := cpu.RowFunc{
			Info: engine.Info{Name: name, Inputs: port("x"), Outputs: port("y"), Idempotent: name == again},
			Rows: func(_ context.Context, b cpu.RowBlock) error {
				time.Sleep(rand.N(runMost / 2))
				_, err := fmt.Fprintf(file, "%s %d\n", name, binary.LittleEndian.Uint64(b.In[0]))
				time.Sleep(rand.N(runMost / 2))
				copy(b.Out[0], b.In[0])
				return err
			},
		}.Model(host)
		err = errors.Join(err, e, models.Add(m))
	}
	kept := memory.New(host.Pool(), 256*mib)
	defer kept.Close()
	s, e := server.New(server.Config{Models: models, Pool: host.Pool(), Budget: host.Budget(), Store: kept})
	if err = errors.Join(err, e); err != nil {
		return err
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGINT, syscall.SIGTERM)
	go func() { // ends with the server
		if <-told == syscall.SIGTERM {
			end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			_ = s.Shutdown(end)
		}
		s.Close()
	}()
	fmt.Println(l.Addr())
	return s.Serve(l)
}

// outcome is what a client heard of a call.
type outcome struct {
	model  string
	number uint64
	err    string // "" is success
}

// runRestarts ends a server at random under clients that repeat what fails, and starts it
// again: no call may be lost that retries cover, and no other may be computed twice.
func runRestarts(ctx context.Context, e *environment) error {
	fmt.Fprintf(e.out, "seed %d\n", e.seed)
	self, err := os.Executable()
	if err != nil {
		return err
	}
	journal, address := filepath.Join(e.dir, "journal"), "127.0.0.1:0"
	start := func() (*proc.Child, error) {
		c := proc.New(exec.CommandContext(ctx, self, "serve", address, journal))
		var out proc.Log
		c.Stdout = &out
		address, err = c.Listen(ctx, &out, func(line string) string { return line })
		return c, err
	}
	s, err := start()
	if err != nil {
		return err
	}
	var mu sync.Mutex
	var all []outcome // guarded by mu
	heard := func(one outcome) {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, one)
	}
	var over atomic.Bool
	var clients sync.WaitGroup
	var opened atomic.Int64 // when the port was last open, until somebody has succeeded
	var first []time.Duration
	clients.Go(func() { // ends after over
		_ = calls(address, client.Config{Wait: 30 * time.Second}, &over, 1<<50, func(one outcome) {
			if at := opened.Load(); at > 0 && one.err == "" && opened.CompareAndSwap(at, 0) {
				first = append(first, time.Since(time.Unix(0, at)))
			}
			if one.err == "" { // others retry
				heard(one)
			}
		})
	})
	for i := range e.clients {
		clients.Go(func() { // likewise
			if err := calls(address, client.Config{Retry: retry.Exponential()}, &over, uint64(i)<<32, heard); err != nil {
				e.add("%v", err)
			}
		})
	}
	random := rand.New(rand.NewPCG(e.seed, 0))
	for i := range e.kills {
		time.Sleep(time.Duration(random.Int64N(int64(upMost))))
		if i%3 == 0 {
			s.Kill()
		} else {
			_ = s.Process.Signal([]os.Signal{1: syscall.SIGTERM, 2: syscall.SIGINT}[i%3])
			if err := s.Stopped(); err != nil {
				return fmt.Errorf("a server that was to end: %w", err)
			}
		}
		opened.Store(0)
		time.Sleep(time.Duration(random.Int64N(int64(awayMost))))
		if s, err = start(); err != nil {
			return err
		}
		opened.Store(time.Now().UnixNano())
	}
	over.Store(true)
	clients.Wait()
	if err := s.Stop(); err != nil {
		return err
	}
	fmt.Fprintf(e.out, "%d restarts, %d clients\n", e.kills, e.clients)
	if len(first) > 0 {
		fmt.Fprintf(e.out, "with Wait, first success after the port is open: median %v, longest %v\n",
			bench.Quantile(first, 0.5).Round(time.Millisecond), slices.Max(first).Round(time.Millisecond))
	}
	return e.compare(journal, all)
}

// calls makes one call after another until over, of both models in turns.
func calls(address string, cfg client.Config, over *atomic.Bool, number uint64, tell func(outcome)) error {
	c, err := client.Dial(address, cfg)
	if err != nil {
		return err
	}
	defer c.Close()
	for ; !over.Load(); number++ {
		one := outcome{model: []string{again, once}[number%2], number: number}
		x, err := tensor.Of([]uint64{number})
		if err != nil {
			return err
		}
		y, err := c.Compute(context.Background(), one.model, x)
		switch {
		case err != nil:
			one.err = err.Error()
		case len(y.Data) != 8 || binary.LittleEndian.Uint64(y.Data) != number:
			one.err = "a wrong result"
		}
		tell(one)
	}
	return nil
}

// compare compares what clients heard with what models did.
func (e *environment) compare(journal string, heard []outcome) error {
	file, err := os.Open(journal)
	if err != nil {
		return err
	}
	defer file.Close()
	ran := make(map[string]int)
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		ran[lines.Text()]++
	}
	if err := lines.Err(); err != nil {
		return err
	}
	count, failures, repeated, lost := make(map[string]int), 0, 0, 0
	for _, o := range heard {
		count[o.model]++
		n := ran[fmt.Sprintf("%s %d", o.model, o.number)]
		if n > 1 {
			repeated++
		}
		if o.err != "" {
			failures++
		}
		if n == 0 && o.err != "" {
			lost++
		}
		switch {
		case o.model == once && n > 1:
			e.add("once %d ran %d times (%s)", o.number, n, o.err)
		case o.err == "" && n == 0:
			e.add("%s %d succeeded and did not run", o.model, o.number)
		case o.err != "" && (o.model == again || !strings.Contains(o.err, "may have run")):
			e.add("%s %d is lost: %s", o.model, o.number, o.err)
		}
	}
	fmt.Fprintf(e.out, "again  %d calls, all with their result, %d of them computed more than once\n", count[again], repeated)
	fmt.Fprintf(e.out, "once   %d calls, none computed twice; %d ended with an error that says that it may have run, %d of those had not\n", count[once], failures, lost)
	return nil
}
