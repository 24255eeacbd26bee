package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/tensor"
)

// cutNames is what the names of pushes begin with that are cut off.
const cutNames = "cut-"

// job is one thing that a worker does, as often as its weight says.
type job struct {
	name   string
	weight int
	do     func(*worker, context.Context, *target) error
}

var jobs = []job{
	{"calls", 40, (*worker).calls},
	{"cancels", 6, (*worker).cancels},
	{"timeouts", 4, (*worker).timeouts},
	{"pushes", 15, (*worker).pushes},
	{"pulls", 15, (*worker).pulls},
	{"globs", 5, (*worker).globs},
	{"deletes", 4, (*worker).deletes},
	{"cut pushes", 3, (*worker).cutPush},
	{"cut pulls", 3, (*worker).cutPull},
	{"broken connections", 4, (*worker).broken},
	{"questions", 3, (*worker).questions},
}

// storedSizes are those of a worker's tensors, one each, so that a store comes to
// hold the same number of bytes all the time.
var storedSizes = []int{0, 1, 100, 1025, 16384, 30000, mib, mib + 4, 3*mib + 1, 8 * mib}

// worker does one thing after the other. What it has stored is its own: it knows
// what must be there.
type worker struct {
	soak   *soak
	rand   *rand.Rand
	prefix string
	stored map[place]*window // nil: not there
	number int               // of the next push that is cut off
}

// place is where a worker's tensor is.
type place struct {
	on *target
	i  int // of storedSizes
}

// work works until loaded ends; what it has begun then ends by itself.
func (w *worker) work(ctx, loaded context.Context) {
	weights := 0
	for _, j := range jobs {
		weights += j.weight
	}
	for loaded.Err() == nil {
		at := w.rand.IntN(weights)
		j := jobs[slices.IndexFunc(jobs, func(j job) bool {
			at -= j.weight
			return at < 0
		})]
		t := w.soak.targets[w.rand.IntN(len(w.soak.targets))]
		w.soak.rest.RLock()
		bounded, cancel := context.WithTimeout(ctx, jobWait)
		err := j.do(w, bounded, t)
		cancel()
		w.soak.rest.RUnlock()
		if ctx.Err() != nil {
			return
		}
		w.soak.done[j.name].Add(1)
		if err != nil {
			w.soak.add("%v: %s: %s: %v", time.Since(w.soak.began).Round(time.Second), t.name, j.name, err)
		}
	}
}

// tolerate returns err unless its code is among those expected. Wrong bytes are
// never.
func tolerate(err error, expected ...codes.Code) error {
	var w *wrongError
	if errors.As(err, &w) || !slices.Contains(expected, status.Code(err)) {
		return err
	}
	return nil
}

// visit calls do with a client: one that stays, or one that came for this.
func (w *worker) visit(t *target, do func(*client.Client) error) (err error) {
	if w.rand.IntN(3) > 0 {
		return do(t.clients[w.rand.IntN(len(t.clients))])
	}
	c, err := client.Dial(t.address, w.config())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	return do(c)
}

func (w *worker) config() client.Config {
	return client.Config{
		ChunkBytes: []int{0, 4 * kib, 100_000, 4 * mib}[w.rand.IntN(4)],
		Checksum:   []codec.Checksum{codec.CRC32C, codec.CRC32}[w.rand.IntN(2)],
		Codec:      []codec.Codec{codec.None, codec.LZ4}[w.rand.IntN(2)],
	}
}

// calls makes several calls at a time on a session that stays, or on one of its own.
func (w *worker) calls(ctx context.Context, t *target) error {
	if w.rand.IntN(3) == 0 {
		return w.callsOn(ctx, t.sessions[w.rand.IntN(len(t.sessions))], largestBytes)
	}
	return w.visit(t, func(c *client.Client) error {
		s, err := c.Session(ctx)
		if err != nil {
			return err
		}
		return errors.Join(w.callsOn(ctx, s, 8*mib), s.Close())
	})
}

func (w *worker) callsOn(ctx context.Context, s *client.Session, most int) error {
	n := 1 + w.rand.IntN(6)
	type one struct {
		call  *client.Call
		model string
		want  []byte
	}
	var open []one
	var err error
	for range n {
		x := anyOf(w.rand, sizeOf(w.rand, most))
		model, want := "echo", x.data()
		if w.rand.IntN(2) == 0 && x.n%4 == 0 {
			model, want = "relu", x.relu()
		}
		c, e := s.Call(ctx, client.Request{Model: model, Inputs: []client.Input{x.input("", w.rand)}})
		if e != nil {
			err = errors.Join(err, e)
			break
		}
		open = append(open, one{c, model, want})
	}
	for _, o := range open {
		results, e := o.call.Wait()
		var refused *client.Error
		switch {
		case e == nil:
			e = same(o.model, results["y"].Data, o.want)
		case errors.As(e, &refused) && refused.Code == codes.ResourceExhausted && refused.RetryAfter > 0:
			w.soak.busy.Add(1)
			e = nil
		}
		err = errors.Join(err, e)
	}
	return err
}

// cancels ends a call that could not end by itself.
func (w *worker) cancels(ctx context.Context, t *target) error {
	x := anyOf(w.rand, mib+w.rand.IntN(4*mib)/4*4)
	let := make(chan struct{})
	c, err := t.sessions[w.rand.IntN(len(t.sessions))].Call(ctx, client.Request{Model: "relu", Inputs: []client.Input{
		client.FromReader("", x.desc(), held(x.data(), let)),
	}})
	if err != nil {
		close(let)
		return err
	}
	err = pause(ctx, time.Duration(w.rand.Int64N(int64(20*time.Millisecond))))
	c.Cancel()
	close(let)
	if _, e := c.Wait(); status.Code(e) != codes.Canceled {
		err = errors.Join(err, fmt.Errorf("a cancelled call ends with %w", e))
	}
	return err
}

// timeouts gives calls less time than they take.
func (w *worker) timeouts(ctx context.Context, t *target) error {
	x := anyOf(w.rand, 8*kib)
	c, err := t.sessions[w.rand.IntN(len(t.sessions))].Call(ctx, client.Request{
		Model: "slow", Params: map[string]string{"delay": "30s"}, Timeout: time.Duration(1 + w.rand.Int64N(int64(50*time.Millisecond))),
		Inputs: []client.Input{client.From("", x.tensor())},
	})
	if err != nil {
		return err
	}
	if _, err := c.Wait(); status.Code(err) != codes.DeadlineExceeded {
		return fmt.Errorf("a call without time ends with %w", err)
	}
	return nil
}

func (w *worker) name(i int) string { return fmt.Sprintf("%s%d", w.prefix, i) }

// some returns the numbers of a few stored tensors.
func (w *worker) some() []int { return w.rand.Perm(len(storedSizes))[:1+w.rand.IntN(4)] }

func (w *worker) pushes(ctx context.Context, t *target) error {
	at := w.some()
	var req client.PushRequest
	var fresh []*window
	for _, i := range at {
		x := anyOf(w.rand, storedSizes[i])
		req.Tensors = append(req.Tensors, x.input(w.name(i), w.rand))
		fresh = append(fresh, &x)
	}
	return w.visit(t, func(c *client.Client) error {
		_, err := c.Push(ctx, req)
		if err == nil {
			for k, i := range at {
				w.stored[place{t, i}] = fresh[k]
			}
		}
		return err
	})
}

func (w *worker) pulls(ctx context.Context, t *target) error {
	var req client.PullRequest
	at := w.some()
	for _, i := range at {
		req.Select = append(req.Select, client.Selection{Name: w.name(i)})
	}
	return w.visit(t, func(c *client.Client) error {
		got, err := c.Pull(ctx, req)
		if len(got) != len(at) {
			return fmt.Errorf("%d summaries of %d tensors: %w", len(got), len(at), err)
		}
		err = nil
		for k, i := range at {
			err = errors.Join(err, w.stored[place{t, i}].is(&got[k]))
		}
		return err
	})
}

// globs holds a list, and a pull of all a worker has, to what it has.
func (w *worker) globs(ctx context.Context, t *target) error {
	own := map[string]*window{}
	for at, x := range w.stored {
		if at.on == t {
			own[w.name(at.i)] = x
		}
	}
	return w.visit(t, func(c *client.Client) error {
		list, _, err := c.List(ctx, w.prefix+"*")
		if err != nil {
			return err
		}
		for _, st := range list {
			x := own[st.Name]
			if x == nil || st.Bytes != int64(x.n) {
				return wrong("%s is listed with %d bytes", st.Name, st.Bytes)
			}
		}
		if len(list) != len(own) {
			return wrong("%d tensors are listed, not %d", len(list), len(own))
		}
		got, err := c.Pull(ctx, client.PullRequest{Select: []client.Selection{{Name: w.prefix + "*"}}})
		if len(own) == 0 {
			return tolerate(err, codes.NotFound)
		}
		if len(got) != len(own) {
			return fmt.Errorf("the glob picks %d of %d tensors: %w", len(got), len(own), err)
		}
		err = nil
		for i := range got {
			err = errors.Join(err, own[got[i].Name].is(&got[i]))
		}
		return err
	})
}

func (w *worker) deletes(ctx context.Context, t *target) error {
	i := w.rand.IntN(len(storedSizes))
	at := place{t, i}
	return w.visit(t, func(c *client.Client) error {
		gone, err := c.Delete(ctx, w.name(i))
		if w.stored[at] == nil {
			return tolerate(err, codes.NotFound)
		}
		if err == nil && !slices.Equal(gone, []string{w.name(i)}) {
			err = fmt.Errorf("deleting %s says %q", w.name(i), gone)
		}
		if err == nil {
			delete(w.stored, at)
		}
		return err
	})
}

// uncertain returns a push of one tensor that may or may not come to its end.
func (w *worker) uncertain(t *target) client.PushRequest {
	x := anyOf(w.rand, w.rand.IntN(8*mib))
	name := fmt.Sprintf("%s%s-%d", cutNames, strings.ReplaceAll(w.prefix, "/", "-"), w.number)
	w.number++
	t.mu.Lock()
	t.cut[name] = x
	t.mu.Unlock()
	return client.PushRequest{Tensors: []client.Input{x.input(name, nil)}}
}

// cut calls do with a context that ends within some milliseconds.
func (w *worker) cut(ctx context.Context, t *target, do func(context.Context, *client.Client) error) error {
	return w.visit(t, func(c *client.Client) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		after := time.Duration(w.rand.Int64N(int64(20 * time.Millisecond)))
		if w.rand.IntN(2) == 0 {
			defer time.AfterFunc(after, cancel).Stop()
		} else {
			var end context.CancelFunc
			ctx, end = context.WithTimeout(ctx, after)
			defer end()
		}
		return tolerate(do(ctx, c), codes.Canceled, codes.DeadlineExceeded)
	})
}

func (w *worker) cutPush(ctx context.Context, t *target) error {
	return w.cut(ctx, t, func(ctx context.Context, c *client.Client) error {
		_, err := c.Push(ctx, w.uncertain(t))
		return err
	})
}

func (w *worker) cutPull(ctx context.Context, t *target) error {
	i := w.rand.IntN(len(storedSizes))
	return w.cut(ctx, t, func(ctx context.Context, c *client.Client) error {
		got, err := c.Pull(ctx, client.PullRequest{Select: []client.Selection{{Name: w.name(i)}}})
		if len(got) == 1 && got[0].Err == nil {
			return w.stored[place{t, i}].is(&got[0])
		}
		return tolerate(err, codes.NotFound)
	})
}

// broken has a connection break in the middle of calls and a push.
func (w *worker) broken(ctx context.Context, t *target) (err error) {
	cfg := w.config()
	cfg.OpenTimeout, cfg.Credentials = time.Second, cutAfter(w.rand.IntN(8*mib))
	c, err := client.Dial(t.address, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for err == nil {
		if w.rand.IntN(2) == 0 {
			_, err = c.Push(ctx, w.uncertain(t))
			continue
		}
		x := anyOf(w.rand, w.rand.IntN(mib)*4)
		var y tensor.Tensor
		if y, err = c.Compute(ctx, "relu", x.tensor()); err == nil {
			err = same("relu", y.Data, x.relu())
		}
	}
	return tolerate(err, codes.Unavailable, codes.DeadlineExceeded)
}

// questions asks for what the server knows of itself.
func (w *worker) questions(ctx context.Context, t *target) error {
	return w.visit(t, func(c *client.Client) error {
		if _, err := c.Models(ctx); err != nil {
			return err
		}
		if _, err := c.Info(ctx); err != nil {
			return err
		}
		got, err := c.Pull(ctx, client.PullRequest{Select: []client.Selection{{Name: "nobody/has/this"}}})
		if err = tolerate(err, codes.NotFound); err != nil || len(got) != 1 {
			return fmt.Errorf("a pull of nothing: %d summaries, %w", len(got), err)
		}
		tr, err := c.Transfer(ctx, got[0].Transfer)
		if err == nil && (tr.Push || len(tr.Tensors) != 1) {
			err = fmt.Errorf("the transfer is told as %+v", tr)
		}
		return err
	})
}
