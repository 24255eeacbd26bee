package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/stress/known"
)

const (
	pushers     = 4 // pushes open at a time
	namesOfEach = 6 // names that one of them pushes, again and again
	pushedBytes = 8 * mib
	// lifeMost is the longest that a server lives between its check and its end.
	lifeMost = 400 * time.Millisecond
)

func runCrash(ctx context.Context, e *environment) error {
	fmt.Fprintf(e.out, "seed %d\n", e.seed)
	c := &crash{environment: e, store: cmp.Or(e.folder, filepath.Join(e.dir, "store")), rand: rand.New(rand.NewPCG(e.seed, 0))}
	if err := c.servers(ctx); err != nil {
		return err
	}
	if err := c.pushers(ctx); err != nil {
		return err
	}
	d, err := c.start(ctx)
	if err != nil {
		return err
	}
	return errors.Join(c.clients(ctx, d), d.Stop())
}

// crash is a folder whose server is killed again and again, and what must be in it.
type crash struct {
	*environment
	store string
	rand  *rand.Rand

	alone    [pushers][]*set // of one tensor, which no other pusher has
	together []*set          // pushed by one each
	tallies  [2]tally        // of those alone, and of those together

	reads       atomic.Int64 // of whole sets
	temps       [2]int
	manifests   int
	longestWait time.Duration // for a start
}

// tally counts what became of pushes and deletions.
type tally struct {
	acked                            atomic.Int64
	unacked, whole, absent, replaced int
}

func (c *crash) start(ctx context.Context) (*daemon, error) {
	return c.serve(ctx, "--metrics", "off", "--store", c.store)
}

// servers kills servers in the middle of pushes, and as often in the middle of sets.
func (c *crash) servers(ctx context.Context) error {
	for _, s := range []*set{newSet("few", 4, pushedBytes), newSet("many", 50, 256*kib), newSet("most", pinnedMost+50, 4*kib)} {
		s.tally = &c.tallies[1]
		c.together = append(c.together, s)
	}
	for i := range pushers * namesOfEach {
		s := newSet(fmt.Sprintf("crash/%d/%d", i%pushers, i/pushers), 1, pushedBytes)
		s.tally = &c.tallies[0]
		c.alone[i%pushers] = append(c.alone[i%pushers], s)
	}
	for kills := 0; kills <= 2*c.kills && len(c.all()) == 0; kills++ {
		begin := time.Now()
		d, err := c.start(ctx)
		if err != nil {
			return err
		}
		c.longestWait = max(c.longestWait, time.Since(begin))
		err = c.check(ctx, d)
		switch {
		case err != nil || kills == 2*c.kills:
			err = errors.Join(err, d.Stop())
		case kills%2 == 0:
			err = c.pushLife(ctx, d)
		default:
			err = c.setLife(ctx, d)
		}
		if err != nil {
			return fmt.Errorf("after %d kills: %w", kills, err)
		}
		if kills > 0 && kills%40 == 0 {
			fmt.Fprintf(c.out, "  %d kills\n", kills)
		}
	}
	for i, what := range []string{
		fmt.Sprintf("up to %d pushes were open", pushers),
		fmt.Sprintf("%d sets, of up to %d tensors, were pushed and pulled", len(c.together), pinnedMost+50),
	} {
		t := &c.tallies[i]
		fmt.Fprintf(c.out, `servers killed: %d, each while %s
  acknowledged     %d: all there, whole, after each kill
  unacknowledged   %d: %d whole, %d absent, %d with the older whole in their place; none in part
  temporary files  %d left by the kills, 0 left by the start after
`, c.kills, what, t.acked.Load(), t.unacked, t.whole, t.absent, t.replaced, c.temps[i])
	}
	fmt.Fprintf(c.out, `  pulls            %d of a set, each of one version
  manifests        %d left by the kills, 0 left by the start after
longest start      %v
`, c.reads.Load(), c.manifests, c.longestWait.Round(time.Millisecond))
	return nil
}

// life is a server from its start until it is killed, and those who work with it.
type life struct {
	*crash
	*daemon
	killed atomic.Bool
	all    sync.WaitGroup
}

// work has somebody work on a goroutine that ends with the server. An error before that is
// a problem, and wrong bytes are one at any time.
func (l *life) work(what string, do func(cl *client.Client, r *rand.Rand) error) {
	r := rand.New(rand.NewPCG(l.rand.Uint64(), 0))
	l.all.Go(func() {
		cl, err := client.Dial(l.address, client.Config{})
		if err == nil {
			err = do(cl, r)
			_ = cl.Close() // which fails as the server does
		}
		var wrong *known.WrongError
		if errors.As(err, &wrong) || !l.killed.Load() {
			l.add("%s: %v", what, err)
		}
	})
}

// end kills the server.
func (l *life) end() {
	l.killed.Store(true)
	l.Kill()
	l.all.Wait()
}

// pushLife has tensors pushed until a random moment, when the server is killed.
func (c *crash) pushLife(ctx context.Context, d *daemon) error {
	l := &life{crash: c, daemon: d}
	for i, own := range c.alone {
		l.work(fmt.Sprint("pusher ", i), func(cl *client.Client, r *rand.Rand) error { return c.push(ctx, cl, r, own) })
	}
	most := lifeMost
	if c.rand.IntN(4) == 0 {
		most /= 20 // the first pushes
	}
	err := pause(ctx, time.Duration(c.rand.Int64N(int64(most))))
	l.end()
	c.count(&c.temps[0])
	return err
}

// count counts what a kill has left.
func (c *crash) count(temps *int) {
	entries, err := os.ReadDir(c.store)
	if err != nil {
		c.add("%v", err)
	}
	for _, e := range entries {
		switch {
		case e.Name() == manifestName:
			c.manifests++
		case strings.HasPrefix(e.Name(), ".push-"):
			*temps++
		}
	}
}

// push pushes several tensors at a time, and deletes some, until that fails.
func (c *crash) push(ctx context.Context, cl *client.Client, r *rand.Rand, own []*set) error {
	for {
		if s := own[r.IntN(len(own))]; r.IntN(6) == 0 && s.stored() > 0 {
			s.try(nil)
			if _, err := cl.Delete(ctx, s.names...); err != nil {
				return err
			}
			s.ack()
		}
		r.Shuffle(len(own), func(i, j int) { own[i], own[j] = own[j], own[i] })
		batch := own[:1+r.IntN(4)]
		var req client.PushRequest
		for _, s := range batch {
			size := known.Size(r, pushedBytes)
			if r.IntN(2) == 0 {
				size = r.IntN(pushedBytes + 1)
			}
			w := known.Any(r, size)
			s.try(version{w})
			req.Tensors = append(req.Tensors, w.Input(s.names[0], nil))
		}
		summaries, err := cl.Push(ctx, req)
		for i, sum := range summaries {
			if sum.Err != nil {
				continue
			}
			if !sum.Durable {
				return fmt.Errorf("%s is acknowledged as not durable", sum.Name)
			}
			batch[i].ack()
		}
		if err != nil {
			return err
		}
	}
}

var pushedFile = regexp.MustCompile(`^[0-9a-f]{64}\.safetensors$`)

// check holds a server that has just started to what was acknowledged.
func (c *crash) check(ctx context.Context, d *daemon) error {
	files, err := tidy(c.store)
	if err != nil {
		c.add("%v", err)
	}
	cl, err := client.Dial(d.address, client.Config{})
	if err != nil {
		return err
	}
	defer cl.Close()
	there := 0
	for _, s := range append(slices.Concat(c.alone[:]...), c.together...) {
		if _, err := s.settle(ctx, cl); err != nil {
			return err
		}
		there += s.stored()
	}
	if list, _, err := cl.List(ctx, ""); err != nil || len(list) != there || files != there {
		c.add("%d files, %d tensors listed, %d pulled: %v", files, len(list), there, err)
	}
	return nil
}

// tidy returns how many files of tensors are in a folder, and an error that has all others.
func tidy(folder string) (n int, err error) {
	entries, err := os.ReadDir(folder)
	for _, e := range entries {
		switch {
		case pushedFile.MatchString(e.Name()):
			n++
		case e.Name() != ".lock":
			err = errors.Join(err, fmt.Errorf("%s is left in the folder", e.Name()))
		}
	}
	return n, err
}

// kill kills a client after a random time, which at most is a quarter more than it takes.
func (c *crash) kill(ctx context.Context, cmd *proc.Child, takes time.Duration) (ended bool, err error) {
	if err := cmd.Start(); err != nil {
		return false, err
	}
	err = pause(ctx, time.Duration(c.rand.Int64N(int64(takes)*5/4)))
	_ = cmd.Process.Kill() // it may have ended
	return cmd.Wait() == nil, err
}

// puller is a command that pulls, and what its file holds in the end.
type puller struct {
	file    string
	command func() *proc.Child
	want    []byte
	took    time.Duration
}

// clients kills clients while they pull into a file.
func (c *crash) clients(ctx context.Context, d *daemon) error {
	cl, err := client.Dial(d.address, client.Config{})
	if err != nil {
		return err
	}
	defer cl.Close()
	var req client.PushRequest
	for i := range 3 {
		req.Tensors = append(req.Tensors, known.Pick(uint64(i), known.LargestBytes-i*mib).Input(fmt.Sprintf("large/%d", i), nil))
	}
	if _, err := cl.Push(ctx, req); err != nil {
		return err
	}
	dir := filepath.Join(c.dir, "pulled")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	var pulls []*puller
	for _, what := range [][2]string{{"large/0", "one.npy"}, {"large/*", "all.safetensors"}} {
		p := &puller{file: filepath.Join(dir, what[1])}
		p.command = func() *proc.Child {
			return proc.New(exec.CommandContext(ctx, c.command, "pull", "--quiet", "--server", d.address, "-o", p.file, what[0]))
		}
		for range 2 { // the second time nothing is new
			begin := time.Now()
			if _, err := p.command().Output(); err != nil {
				return err
			}
			p.took = time.Since(begin)
		}
		if p.want, err = os.ReadFile(p.file); err != nil {
			return err
		}
		pulls = append(pulls, p)
	}
	ended, temps := 0, 0
	for i := range c.kills {
		var old []byte // what the file held before, on every other round
		if i/2%2 == 1 {
			old = pulls[0].want[:mib]
		}
		whole, err := pulls[i%2].kill(ctx, c, old)
		if whole {
			ended++
		}
		left, e := filepath.Glob(filepath.Join(dir, ".tensorferry-*"))
		for _, f := range left {
			temps++
			e = errors.Join(e, os.Remove(f))
		}
		if err = errors.Join(err, e); err != nil {
			return err
		}
	}
	fmt.Fprintf(c.out, `clients killed: %d, each while it pulled %s or %s into a file
  output           %d whole, %d absent or as it was; none half
  temporary files  %d left beside it, where a kill met one
`, c.kills, mibs(len(pulls[0].want)), mibs(len(pulls[1].want)), ended, c.kills-ended, temps)
	return nil
}

// kill kills the command. Its file held old before, or was not there if that is nil; then it
// is whole, or as it was.
func (p *puller) kill(ctx context.Context, c *crash, old []byte) (whole bool, err error) {
	if err = os.RemoveAll(p.file); err == nil && old != nil {
		err = os.WriteFile(p.file, old, 0o644)
	}
	if err == nil {
		_, err = c.kill(ctx, p.command(), p.took)
	}
	if err != nil {
		return false, err
	}
	got, err := os.ReadFile(p.file)
	switch {
	case err == nil && bytes.Equal(got, p.want):
		return true, nil
	case errors.Is(err, fs.ErrNotExist) == (old == nil) && bytes.Equal(got, old):
		return false, nil
	}
	return false, errors.Join(fmt.Errorf("%s after a kill: %d bytes of %d", p.file, len(got), len(p.want)), err)
}
