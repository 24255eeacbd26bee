package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// mostStored is the size of the largest tensor that a stocker pushes, and noiseBytes that
// of the memory of which every one is a part.
const (
	mostStored = 8 * mib
	noiseBytes = 3 * mostStored
)

var storedNoise = sync.OnceValue(func() []byte { return testkit.Bytes(noiseBytes, 1) })

// content is what a tensor has: a part of storedNoise.
type content struct{ at, n int }

func (c content) data() []byte { return storedNoise()[c.at : c.at+c.n] }

// group is tensors of which it is known what they may be.
type group struct {
	names []string
	sizes [2]int      // of the first tensor: from, to; the others are smaller
	maybe [][]content // by name; nil: nothing is stored. The tensors are all of one of them.
}

// transferring is a push or a pull that somebody may cancel.
type transferring struct {
	stop      context.CancelFunc
	cancelled atomic.Bool
}

func (tr *transferring) cancel() {
	tr.cancelled.Store(true)
	tr.stop()
}

// stocker pushes tensors, a few together as a set, and pulls them. It belongs to one
// goroutine.
type stocker struct {
	world *laneWorld
	t     *testing.T
	rand  *rand.Rand
	name  string
	made  int
	now   atomic.Pointer[transferring]
	gone  [][]byte // memory of tensors whose pull has failed: it must not change

	of     *generation // whose store has what follows
	set    *group
	single []*group
}

// groups begins anew with a server of which nothing is known.
func (s *stocker) groups(g *generation) {
	if s.of == g {
		return
	}
	s.of, s.single = g, nil
	s.set = s.group(3)
	for range 2 {
		s.single = append(s.single, s.group(1))
	}
}

// group returns tensors under names that nobody has used.
func (s *stocker) group(n int) *group {
	s.made++
	g := &group{maybe: [][]content{nil}, sizes: [2]int{mostStored / 2, mostStored}}
	if n == 1 && s.made%2 == 0 {
		g.sizes = [2]int{0, 64 << 10}
	}
	for i := range n {
		g.names = append(g.names, fmt.Sprintf("%s/%d/%d", s.name, s.made, i))
	}
	return g
}

// fresh returns what the tensors are to be next.
func (g *group) fresh(r *rand.Rand) (next []content) {
	for i := range g.names {
		n := (g.sizes[0] + r.IntN(g.sizes[1]-g.sizes[0]+1)) >> (4 * i)
		next = append(next, content{r.IntN(noiseBytes - n + 1), n})
	}
	return next
}

// step makes one push or pull on a client's session. The error is one that must not be.
func (s *stocker) step(ctx context.Context, c *client.Client, watch *watched) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	tr := &transferring{stop: stop}
	s.now.Store(tr)
	var progress func(client.Progress)
	if s.rand.IntN(4) == 0 {
		left := s.rand.Int64N(mostStored)
		progress = func(p client.Progress) {
			if p.Moved >= left {
				tr.cancel()
			}
		}
	}
	var err error
	switch s.rand.IntN(4) {
	case 0:
		err = s.push(ctx, c, watch, tr, progress)
	case 1:
		err = s.putAll(ctx, c, watch, tr, progress)
	default:
		err = s.pull(ctx, c, watch, tr, progress)
	}
	return errors.Join(err, s.check())
}

// inputs returns the tensors of a push, in memory that is cleared once it is over, so that
// the race detector sees who still reads it.
func (s *stocker) inputs(g *group, next []content, released *atomic.Int64) (list []client.Input, over func()) {
	var mine [][]byte
	for i, name := range g.names {
		data := bytes.Clone(next[i].data())
		mine = append(mine, data)
		in := client.Input{Name: name, Desc: int8s(int64(len(data))), Data: data, Release: func() { released.Add(1) }}
		if s.rand.IntN(3) == 0 {
			in.Data, in.Reader = nil, bytes.NewReader(data)
		}
		list = append(list, in)
	}
	return list, func() {
		for _, data := range mine {
			clear(data)
		}
	}
}

// push pushes single tensors.
func (s *stocker) push(ctx context.Context, c *client.Client, watch *watched, tr *transferring, progress func(client.Progress)) error {
	var r client.PushRequest
	var next [][]content
	var released atomic.Int64
	r.Progress = progress
	for _, g := range s.single {
		what := g.fresh(s.rand)
		in, over := s.inputs(g, what, &released)
		defer over()
		r.Tensors, next = append(r.Tensors, in...), append(next, what)
	}
	sums, err := c.Push(ctx, r)
	if n := released.Load(); n != int64(len(r.Tensors)) {
		return fmt.Errorf("%d of %d inputs of a push were released: %w", n, len(r.Tensors), err)
	}
	err = nil
	for i, sum := range sums {
		g := s.single[i]
		if err = errors.Join(err, s.judge(watch, tr, &sum)); sum.Err == nil {
			err = errors.Join(err, sameDigest(&sum, next[i][0]))
			g.maybe = [][]content{next[i]}
			continue
		}
		g.maybe = append(g.maybe, next[i])
		err = errors.Join(err, s.retire(&s.single[i]))
	}
	return err
}

// putAll pushes a set.
func (s *stocker) putAll(ctx context.Context, c *client.Client, watch *watched, tr *transferring, progress func(client.Progress)) error {
	var released atomic.Int64
	next := s.set.fresh(s.rand)
	in, over := s.inputs(s.set, next, &released)
	defer over()
	sums, err := c.PutAll(ctx, client.PushRequest{Tensors: in, Progress: progress})
	if n := released.Load(); n != int64(len(in)) {
		return fmt.Errorf("%d of %d inputs of a set were released: %w", n, len(in), err)
	}
	if err == nil {
		for i := range sums {
			err = errors.Join(err, s.judge(watch, tr, &sums[i]), sameDigest(&sums[i], next[i]))
		}
		s.set.maybe = [][]content{next}
		return err
	}
	err = nil
	for i := range sums {
		if sums[i].Err == nil {
			err = fmt.Errorf("%s of a set that failed has no error", sums[i].Name)
		}
		err = errors.Join(err, s.judge(watch, tr, &sums[i]))
	}
	s.set.maybe = append(s.set.maybe, next)
	return errors.Join(err, s.retire(&s.set))
}

// retire looks at tensors of which the last push failed, and which may still come to be
// stored, and takes others in their place.
func (s *stocker) retire(of **group) error {
	g := *of
	*of = s.group(len(g.names))
	c := s.of.client // whose lanes do not fail
	for range 2 {
		got, err := c.Pull(context.Background(), client.PullRequest{Select: []client.Selection{{Name: g.glob()}}})
		if over, cut := s.of.drains(); over || cut {
			return nil
		}
		if err := g.is(got); err != nil {
			return errors.Join(errors.New("after a push that failed"), err)
		}
		if err != nil && (len(got) != 1 || status.Code(got[0].Err) != codes.NotFound) {
			return err
		}
	}
	_, _ = c.Delete(context.Background(), g.glob()) // there may be none
	return nil
}

func (g *group) glob() string { return g.names[0][:len(g.names[0])-1] + "*" }

// is returns an error unless the summaries of a pull by the glob are all of one state that
// the tensors may have. What has an error may be anything.
func (g *group) is(got []client.Summary) error {
	for _, state := range g.maybe {
		if g.isState(state, got) {
			return nil
		}
	}
	var text []string
	for i := range got {
		text = append(text, fmt.Sprintf("%v: %d bytes", &got[i], len(got[i].Data)))
	}
	return fmt.Errorf("%d tensors are none of %d states that they may have: %v", len(got), len(g.maybe), text)
}

func (g *group) isState(state []content, got []client.Summary) bool {
	if state == nil {
		return !slices.ContainsFunc(got, func(s client.Summary) bool { return s.Err == nil })
	}
	for i := range got {
		at := slices.Index(g.names, got[i].Name)
		switch {
		case status.Code(got[i].Err) == codes.NotFound:
			return false
		case got[i].Err != nil:
		case at < 0 || sameDigest(&got[i], state[at]) != nil || !bytes.Equal(got[i].Data, state[at].data()):
			return false
		}
	}
	return len(got) == len(g.names) || slices.ContainsFunc(got, func(s client.Summary) bool { return s.Err != nil })
}

func sameDigest(s *client.Summary, c content) error {
	if want := digestOf(c.data()); s.Digest != want {
		return fmt.Errorf("%s has digest %v, not %v", s.Name, s.Digest, want)
	}
	return nil
}

// pull pulls everything, to places of all kinds.
func (s *stocker) pull(ctx context.Context, c *client.Client, watch *watched, tr *transferring, progress func(client.Progress)) error {
	if on := watch.of(tensor.ID{}); on.mayPull() {
		defer on.pulled()
	} else {
		return nil
	}
	into := map[string][]byte{}
	written := map[string]*bytes.Buffer{}
	groups := append([]*group{s.set}, s.single...)
	r := client.PullRequest{Progress: progress, To: func(name string, d tensor.Desc) (client.Sink, error) {
		n, err := d.Bytes()
		switch s.rand.IntN(3) {
		case 0:
			into[name] = make([]byte, n)
			return client.Into(into[name]), err
		case 1:
			written[name] = new(bytes.Buffer)
			return client.Writer(func(tensor.Desc) (io.Writer, error) { return written[name], nil }), err
		}
		return client.Sink{}, err
	}}
	for _, g := range groups {
		r.Select = append(r.Select, client.Selection{Name: g.glob()})
	}
	got, failed := c.Pull(ctx, r)
	if _, ofTensors := failed.(interface{ Unwrap() []error }); ofTensors {
		failed = nil // each of them is looked at
	}
	all := s.judge(watch, tr, &client.Summary{Transfer: transferOf(got), Err: failed})
	for i := range got {
		sum := &got[i]
		switch b := written[sum.Name]; {
		case sum.Err != nil && into[sum.Name] != nil:
			for j := range into[sum.Name] {
				into[sum.Name][j] = 0xdb
			}
			s.gone = append(s.gone, into[sum.Name])
		case sum.Err != nil:
		case b != nil:
			sum.Data = b.Bytes()
		case into[sum.Name] != nil:
			sum.Data = into[sum.Name]
		}
		if sum.Err != nil && status.Code(sum.Err) != codes.NotFound {
			all = errors.Join(all, s.judge(watch, tr, sum))
		}
	}
	for _, g := range groups {
		var own []client.Summary
		for _, sum := range got {
			if sum.Name == g.glob() || slices.Contains(g.names, sum.Name) {
				own = append(own, sum)
			}
		}
		if failed != nil { // there may be less
			own = append(own, client.Summary{Name: g.glob(), Err: failed})
		}
		all = errors.Join(all, g.is(own))
	}
	return all
}

func transferOf(got []client.Summary) (id tensor.ID) {
	if len(got) > 0 {
		id = got[0].Transfer
	}
	return id
}

// judge returns an error that must not be.
func (s *stocker) judge(watch *watched, tr *transferring, sum *client.Summary) error {
	s.world.mu.Lock()
	s.world.stored[status.Code(sum.Err)]++
	s.world.mu.Unlock()
	on := watch.of(sum.Transfer)
	if sum.Err == nil || tr.cancelled.Load() && status.Code(sum.Err) == codes.Canceled || on.legitimate(sum.Transfer, sum.Err) {
		return nil
	}
	return on.blame(sum.Err)
}

// check looks whether memory was written after it was taken back.
func (s *stocker) check() error {
	defer func() { s.gone = nil }()
	return untouched(s.gone)
}
