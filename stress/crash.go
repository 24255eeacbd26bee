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

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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

	names [pushers][]*named
	sets  []*set

	acked, ackedSets, reads                 atomic.Int64 // reads: of whole sets
	unacked, whole, absent, replaced, temps int
	unackedSets, wholeSets                  int
	manifests, setTemps                     int
	startMost                               time.Duration
}

// named is a name, and what it may stand for; nil is no tensor. It belongs to one
// pusher, and between the lives of a server to the check.
type named struct {
	text  string
	sure  *known.Window   // the last that was acknowledged
	maybe []*known.Window // tried after that, without an answer
}

func (c *crash) start(ctx context.Context) (*daemon, error) {
	return c.serve(ctx, "--metrics", "off", "--store", c.store)
}

// servers kills servers in the middle of pushes, and as often in the middle of sets.
func (c *crash) servers(ctx context.Context) error {
	c.sets = []*set{newSet("few", 4, pushedBytes), newSet("many", 50, 256*kib), newSet("most", pinnedMost+50, 4*kib)}
	for i := range pushers * namesOfEach {
		c.names[i%pushers] = append(c.names[i%pushers], &named{text: fmt.Sprintf("crash/%d/%d", i%pushers, i/pushers)})
	}
	for kills := 0; kills <= 2*c.kills && len(c.all()) == 0; kills++ {
		begin := time.Now()
		d, err := c.start(ctx)
		if err != nil {
			return err
		}
		c.startMost = max(c.startMost, time.Since(begin))
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
	fmt.Fprintf(c.out, `servers killed: %d, each while up to %d pushes were open
  acknowledged     %d tensors and deletions: all there, whole, after each kill
  unacknowledged   %d: %d whole, %d absent, %d with the older tensor whole in their place; none half
  temporary files  %d left by the kills, 0 left by the start after
servers killed: %d, each while %d sets, of up to %d tensors, were pushed and pulled
  acknowledged     %d sets: all there, whole, after each kill
  unacknowledged   %d: %d whole, %d absent, with the older set whole in their place; none in part
  pulls            %d of a set, each of one version
  manifests        %d left by the kills, and %d temporary files; 0 left by the start after
longest start      %v
`, c.kills, pushers, c.acked.Load(), c.unacked, c.whole, c.absent, c.replaced, c.temps,
		c.kills, len(c.sets), pinnedMost+50, c.ackedSets.Load(), c.unackedSets, c.wholeSets, c.unackedSets-c.wholeSets, c.reads.Load(), c.manifests, c.setTemps,
		c.startMost.Round(time.Millisecond))
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
	for i, own := range c.names {
		l.work(fmt.Sprint("pusher ", i), func(cl *client.Client, r *rand.Rand) error { return c.push(ctx, cl, r, own) })
	}
	most := lifeMost
	if c.rand.IntN(4) == 0 {
		most /= 20 // the first pushes
	}
	err := pause(ctx, time.Duration(c.rand.Int64N(int64(most))))
	l.end()
	for _, f := range c.files() {
		if strings.HasPrefix(f, ".push-") {
			c.temps++
		}
	}
	return err
}

// push pushes several tensors at a time, and deletes some, until that fails.
func (c *crash) push(ctx context.Context, cl *client.Client, r *rand.Rand, own []*named) error {
	for {
		if n := own[r.IntN(len(own))]; r.IntN(6) == 0 && n.sure != nil {
			n.maybe = append(n.maybe, nil)
			if _, err := cl.Delete(ctx, n.text); err != nil {
				return err
			}
			n.sure, n.maybe = nil, nil
			c.acked.Add(1)
		}
		r.Shuffle(len(own), func(i, j int) { own[i], own[j] = own[j], own[i] })
		batch := own[:1+r.IntN(4)]
		var req client.PushRequest
		for _, n := range batch {
			size := known.Size(r, pushedBytes)
			if r.IntN(2) == 0 {
				size = r.IntN(pushedBytes + 1)
			}
			w := known.Any(r, size)
			n.maybe = append(n.maybe, &w)
			req.Tensors = append(req.Tensors, w.Input(n.text, nil))
		}
		summaries, err := cl.Push(ctx, req)
		for i, s := range summaries {
			if s.Err != nil {
				continue
			}
			if !s.Durable {
				return fmt.Errorf("%s is acknowledged as not durable", s.Name)
			}
			n := batch[i]
			n.sure, n.maybe = n.maybe[len(n.maybe)-1], nil
			c.acked.Add(1)
		}
		if err != nil {
			return err
		}
	}
}

var pushedFile = regexp.MustCompile(`^[0-9a-f]{64}\.safetensors$`)

// check holds a server that has just started to what was acknowledged.
func (c *crash) check(ctx context.Context, d *daemon) error {
	files := 0
	for _, f := range c.files() {
		switch {
		case pushedFile.MatchString(f):
			files++
		case f != ".lock":
			c.add("%s is left in the folder", f)
		}
	}
	cl, err := client.Dial(d.address, client.Config{})
	if err != nil {
		return err
	}
	defer cl.Close()
	all := slices.Concat(c.names[:]...)
	var names []string
	for _, n := range all {
		names = append(names, n.text)
	}
	summaries, err := known.Pull(ctx, cl, names...)
	if err != nil {
		return err
	}
	there := 0
	for i := range summaries {
		s := &summaries[i]
		if s.Err == nil {
			there++
		} else if status.Code(s.Err) != codes.NotFound {
			c.add("%v", s.Err)
			continue
		}
		c.settle(all[i], s)
	}
	for _, s := range c.sets {
		unacked, fresh, err := s.settle(ctx, cl)
		if err != nil {
			return err
		}
		c.unackedSets += unacked
		if fresh {
			c.wholeSets++
		}
		there += s.stored()
	}
	if list, _, err := cl.List(ctx, ""); err != nil || len(list) != there || files != there {
		c.add("%d files, %d tensors listed, %d pulled: %v", files, len(list), there, err)
	}
	return nil
}

// settle finds what a name stands for now among what it may.
func (c *crash) settle(n *named, s *client.Summary) {
	tried := n.maybe
	n.maybe = nil
	c.unacked += len(tried)
	for _, w := range tried {
		if w.Is(s) == nil {
			if n.sure = w; w != nil {
				c.whole++
			} else {
				c.absent++
			}
			return
		}
	}
	switch err := n.sure.Is(s); {
	case err != nil:
		c.add("%s is neither what was acknowledged nor one of %d tried after that: %v", n.text, len(tried), err)
	case n.sure != nil:
		c.replaced += len(tried)
	default:
		c.absent += len(tried)
	}
}

// files returns the names in the folder.
func (c *crash) files() (list []string) {
	entries, err := os.ReadDir(c.store)
	if err != nil {
		c.add("%v", err)
	}
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
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
		whole, err := pulls[i%2].kill(ctx, time.Duration(c.rand.Int64N(int64(pulls[i%2].took)*5/4)), old)
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

// kill kills the command after a time. Its file held old before, or was not there if
// that is nil; then it is whole, or as it was.
func (p *puller) kill(ctx context.Context, after time.Duration, old []byte) (whole bool, err error) {
	if err = os.RemoveAll(p.file); err == nil && old != nil {
		err = os.WriteFile(p.file, old, 0o644)
	}
	if err != nil {
		return false, err
	}
	cmd := p.command()
	if err := cmd.Start(); err != nil {
		return false, err
	}
	err = pause(ctx, after)
	cmd.Kill()
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
