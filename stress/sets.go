package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
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
	"github.com/tensorferry/tensorferry/tensorfile"
)

const (
	// pinnedMost is how many tensors of a get are those of one state of the store, whatever
	// is pushed meanwhile: of more, docs/wire.md says, one that is replaced is ABORTED.
	pinnedMost = 128
	// manifestName is what a folder calls a set that is committed, while its files get
	// their names.
	manifestName = ".set"
	// manifestWait is how long a kill waits for a manifest, and manifestPoll how often it
	// looks: one is there for some milliseconds.
	manifestWait = 2 * time.Second
	manifestPoll = 100 * time.Microsecond
	// manifestMost is how much later the kill is, at most.
	manifestMost = 5 * time.Millisecond
	// clientSets is how many versions of a set killed clients push in turns.
	clientSets = 3
)

// version is the content of a set's tensors, in the order of their names; nil is none.
type version []known.Window

// set is tensors that are only pushed together, so that all of them are of one version, or
// one tensor. One at a time pushes it; it is safe for concurrent use by others that read it.
type set struct {
	names []string // sorted
	most  int      // bytes of one tensor
	tally *tally

	mu    sync.Mutex // guards all below
	tried []version  // from the last one known to be there
	acked int        // index of the last one that was acknowledged, or known to be there
}

func newSet(prefix string, n, most int) *set {
	s := &set{most: most, tried: []version{nil}, tally: new(tally)}
	for i := range n {
		s.names = append(s.names, fmt.Sprintf("%s/%03d", prefix, i))
	}
	return s
}

// glob matches the names.
func (s *set) glob() string { return filepath.Dir(s.names[0]) + "/*" }

// try notes that a version is being pushed.
func (s *set) try(v version) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tried = append(s.tried, v)
}

// ack notes that the last version is stored.
func (s *set) ack() {
	s.tally.acked.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.acked = len(s.tried) - 1
}

// push pushes versions until that fails.
func (s *set) push(ctx context.Context, cl *client.Client, r *rand.Rand) error {
	for {
		v := make(version, len(s.names))
		var req client.PushRequest
		for i, name := range s.names {
			v[i] = known.Any(r, known.Size(r, s.most))
			req.Tensors = append(req.Tensors, v[i].Input(name, r))
		}
		s.try(v)
		summaries, err := cl.PutAll(ctx, req)
		if err != nil {
			return err
		}
		for _, sum := range summaries {
			if !sum.Durable {
				return fmt.Errorf("%s of a set is acknowledged as not durable", sum.Name)
			}
		}
		s.ack()
	}
}

// read pulls the set by its glob, and returns which of the versions tried it is. An error
// that is not a WrongError is the pull's own.
func (s *set) read(ctx context.Context, cl *client.Client) (found int, err error) {
	s.mu.Lock()
	first := s.acked
	s.mu.Unlock()
	got, err := cl.Pull(ctx, client.PullRequest{Select: []client.Selection{{Name: s.glob()}}})
	if _, ofTensors := err.(interface{ Unwrap() []error }); err != nil && !ofTensors {
		return 0, err // not all of it was pulled
	}
	for i := range got {
		if e := got[i].Err; e != nil && status.Code(e) != codes.NotFound && status.Code(e) != codes.Aborted {
			return 0, e
		}
	}
	return s.judge(first, got)
}

// judge returns which of the versions from first on was pulled, all of it.
func (s *set) judge(first int, got []client.Summary) (found int, err error) {
	s.mu.Lock()
	tried := s.tried
	s.mu.Unlock()
	for i := len(tried) - 1; i >= first; i-- {
		if s.is(tried[i], got) {
			return i, nil
		}
	}
	return 0, s.mixture(tried, first, got)
}

// is reports whether all that was pulled is of version v.
func (s *set) is(v version, got []client.Summary) bool {
	if v == nil {
		return len(got) == 1 && status.Code(got[0].Err) == codes.NotFound
	}
	if len(got) != len(s.names) {
		return false
	}
	for i := range got {
		if got[i].Name != s.names[i] {
			return false
		}
		if s.excused(&got[i]) {
			continue
		}
		if v[i].Is(&got[i]) != nil {
			return false
		}
	}
	return true
}

// excused reports whether a tensor may be missing for having been replaced during the pull.
func (s *set) excused(sum *client.Summary) bool {
	return len(s.names) > pinnedMost && status.Code(sum.Err) == codes.Aborted
}

// mixture says what was pulled that is none of the versions from first on: beside each of
// them, the tensors of others.
func (s *set) mixture(tried []version, first int, got []client.Summary) error {
	var of []string
	for n, v := range tried {
		var not []string
		for i := range got {
			if at, ok := slices.BinarySearch(s.names, got[i].Name); !ok || v == nil || v[at].Is(&got[i]) != nil {
				not = append(not, fmt.Sprintf("%s (%d bytes, %v, error %v)", got[i].Name, got[i].Bytes, got[i].Digest, got[i].Err))
			}
		}
		of = append(of, fmt.Sprintf("not of %d are %d: %s", n, len(not), strings.Join(not[:min(len(not), problemsKept)], ", ")))
	}
	return known.Wrong("%d tensors of a set of %d are not all of one of the versions %d to %d: %s", len(got), len(s.names), first, len(tried)-1, strings.Join(of, "; "))
}

// settle finds which version is there now, when nobody pushes, and forgets the others. It
// reports whether that is the last one tried.
func (s *set) settle(ctx context.Context, cl *client.Client) (last bool, err error) {
	found, err := s.read(ctx, cl)
	if err != nil {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	last = found == len(s.tried)-1
	unacked := len(s.tried) - 1 - s.acked
	s.tally.unacked += unacked
	switch {
	case s.tried[found] == nil:
		s.tally.absent += unacked
	case found > s.acked:
		s.tally.whole += unacked
	default:
		s.tally.replaced += unacked
	}
	s.tried, s.acked = []version{s.tried[found]}, 0
	return last, nil
}

// stored returns how many tensors of it were acknowledged last.
func (s *set) stored() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.tried[s.acked])
}

// setLife has sets pushed and read until the server is killed: at a random moment, or
// when a set has just been committed. Beside them single tensors are pushed.
func (c *crash) setLife(ctx context.Context, d *daemon) error {
	l := &life{crash: c, daemon: d}
	for _, s := range c.together {
		l.work("pusher of "+s.glob(), func(cl *client.Client, r *rand.Rand) error { return s.push(ctx, cl, r) })
		l.work("reader of "+s.glob(), func(cl *client.Client, _ *rand.Rand) error {
			for {
				if _, err := s.read(ctx, cl); err != nil {
					return err
				}
				c.reads.Add(1)
			}
		})
	}
	l.work("pusher", func(cl *client.Client, r *rand.Rand) error { return c.push(ctx, cl, r, c.alone[0]) })
	err := pause(ctx, time.Duration(c.rand.Int64N(int64(lifeMost))))
	if err == nil && c.rand.IntN(2) == 0 {
		err = c.untilManifest(ctx)
	}
	l.end()
	c.count(&c.temps[1])
	return err
}

// untilManifest waits until a set is committed whose files may not all have their names.
func (c *crash) untilManifest(ctx context.Context) error {
	for end := time.Now().Add(manifestWait); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(manifestPoll) {
		if _, err := os.Stat(filepath.Join(c.store, manifestName)); err == nil {
			return pause(ctx, time.Duration(c.rand.Int64N(int64(manifestMost))))
		}
	}
	return context.Cause(ctx)
}

// pushers kills clients while they push a set, to a server with a folder and to one with
// a store in memory.
func (c *crash) pushers(ctx context.Context) error {
	s := newSet("pushed", 12, 8*mib)
	var versions []version
	var files []string
	for i := range clientSets {
		v := make(version, len(s.names))
		var list []tensorfile.Named
		for j, name := range s.names {
			// The same sizes in each version, so that a store always holds as much.
			v[j] = known.Pick(uint64(i*len(s.names)+j), s.most>>j)
			list = append(list, tensorfile.Named{Name: filepath.Base(name), Tensor: v[j].Tensor()})
		}
		file := filepath.Join(c.dir, fmt.Sprintf("set-%d.safetensors", i))
		f, err := os.Create(file)
		if err == nil {
			err = errors.Join(tensorfile.WriteSafetensors(f, list, nil), f.Close())
		}
		if err != nil {
			return err
		}
		versions, files = append(versions, v), append(files, file)
	}
	folder := filepath.Join(c.dir, "pushed")
	for _, where := range []string{folder, "memory"} {
		s.tried, s.acked = []version{nil}, 0
		d, err := c.serve(ctx, "--metrics", "127.0.0.1:0", "--store", where)
		if err != nil {
			return err
		}
		p := &killedPushers{c: c, s: s, d: d, versions: versions, files: files}
		if where == folder {
			p.folder = folder
		}
		if err := errors.Join(p.run(ctx), d.Stop()); err != nil {
			return fmt.Errorf("clients killed that push a set to %s: %w", filepath.Base(where), err)
		}
		fmt.Fprintf(c.out, `clients killed: %d, each while it pushed a set of %d tensors, %s, to a store in %s
  store            %d times the new set, %d times the older one, none of it mixed; %d times after the client's end
  pulls            %d meanwhile, each of one version
`, c.kills, len(s.names), mibs(p.bytes), map[bool]string{true: "a folder", false: "memory"}[where == folder], p.fresh, c.kills-p.fresh, p.ended, p.reads)
	}
	return nil
}

// killedPushers kills clients that push a set to one server.
type killedPushers struct {
	c        *crash
	s        *set
	d        *daemon
	folder   string // of the store; empty if it is in memory
	versions []version
	files    []string

	took                time.Duration // by a client that is not killed
	bytes               int64
	fresh, ended, reads int
}

func (p *killedPushers) client(ctx context.Context, i int) *proc.Child {
	return proc.New(exec.CommandContext(ctx, p.c.command, "push", "--quiet", "--all", "--server", p.d.address, filepath.Dir(p.s.names[0])+"="+p.files[i%len(p.files)]))
}

func (p *killedPushers) run(ctx context.Context) error {
	cl, err := client.Dial(p.d.address, client.Config{})
	if err != nil {
		return err
	}
	defer cl.Close()
	for range 2 { // the second time nothing is new
		p.s.try(p.versions[0])
		begin := time.Now()
		if _, err := p.client(ctx, 0).Output(); err != nil {
			return err
		}
		p.took = time.Since(begin)
		p.s.ack()
	}
	f, err := p.atRest(ctx)
	if err != nil {
		return err
	}
	used := f["tensorferry_store_used_bytes"]
	for _, w := range p.versions[0] {
		p.bytes += int64(len(w.Data()))
	}
	for i := 1; i <= p.c.kills; i++ {
		if err := p.round(ctx, cl, i); err != nil {
			return fmt.Errorf("after %d kills: %w", i, err)
		}
	}
	_, err = p.d.until(ctx, fmt.Sprintf("at rest with %v bytes in the store", used), func(f figures) bool {
		return f["tensorferry_open_transfers"] == 0 && f["tensorferry_store_used_bytes"] == used
	})
	return err
}

// atRest waits until the server has ended every push and pull.
func (p *killedPushers) atRest(ctx context.Context) (figures, error) {
	return p.d.until(ctx, "without a transfer", func(f figures) bool { return f["tensorferry_open_transfers"] == 0 })
}

// round kills one client, while somebody reads.
func (p *killedPushers) round(ctx context.Context, cl *client.Client, i int) error {
	p.s.try(p.versions[i%len(p.versions)])
	var over atomic.Bool
	read := make(chan error, 1)
	go func() { // ends when it is over
		for !over.Load() {
			if _, err := p.s.read(ctx, cl); err != nil {
				read <- err
				return
			}
			p.reads++
		}
		read <- nil
	}()
	ended, err := p.c.kill(ctx, p.client(ctx, i), p.took)
	if ended {
		p.ended++
		p.s.ack()
	}
	over.Store(true)
	if err = errors.Join(err, <-read); err != nil {
		return err
	}
	if _, err := p.atRest(ctx); err != nil {
		return err
	}
	last, err := p.s.settle(ctx, cl)
	if last {
		p.fresh++
	}
	if p.folder == "" || err != nil {
		return err
	}
	end := time.Now().Add(settleWait)
	for err = p.tidy(); err != nil && time.Now().Before(end); err = p.tidy() { // a writer may be waiting for the disk
		if err := pause(ctx, pollEvery); err != nil {
			return err
		}
	}
	return err
}

// tidy reports a file in the folder that is not that of a tensor.
func (p *killedPushers) tidy() error {
	n, err := tidy(p.folder)
	if err == nil && n != len(p.s.names) {
		err = fmt.Errorf("%d files of %d tensors", n, len(p.s.names))
	}
	return err
}
