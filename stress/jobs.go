package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/attack"
	"github.com/tensorferry/tensorferry/stress/known"
	"github.com/tensorferry/tensorferry/tensor"
)

// cutNames is what the names of pushes begin with that are cut off.
const cutNames = "cut-"

// job is one thing that a worker does at a server, as often as its weight says.
type job struct {
	name   string
	weight int
	do     func(*worker, context.Context, visit) error
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
	stored map[*target]map[string]*known.Window // by name
	number int                                  // of the next push that is cut off
}

// visit is a server, with a client and a session that stay, or that came for one job.
type visit struct {
	*target
	client  *client.Client
	session *client.Session
}

// work works until loaded ends; what it has begun then ends by itself.
func (w *worker) work(ctx, loaded context.Context) {
	var weighted []job
	for _, j := range jobs {
		weighted = append(weighted, slices.Repeat([]job{j}, j.weight)...)
	}
	for loaded.Err() == nil {
		j, t := weighted[w.rand.IntN(len(weighted))], w.soak.targets[w.rand.IntN(len(w.soak.targets))]
		w.soak.rest.RLock()
		bounded, cancel := context.WithTimeout(ctx, jobWait)
		err := w.visit(bounded, t, func(v visit) error { return j.do(w, bounded, v) })
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

// visit calls do with what stays or, one of three times each, with a session or with a
// client that came for this.
func (w *worker) visit(ctx context.Context, t *target, do func(visit) error) (err error) {
	i := w.rand.IntN(len(t.clients))
	v := visit{t, t.clients[i], t.sessions[i]}
	way := w.rand.IntN(3)
	if way == 0 {
		return do(v)
	}
	if way == 1 {
		if v.client, err = client.Dial(t.address, w.config(t)); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, v.client.Close()) }()
	}
	if v.session, err = v.client.Session(ctx); err != nil {
		return err
	}
	return errors.Join(do(v), v.session.Close())
}

// tolerate returns err unless its code is among those expected. Wrong bytes are
// never.
func tolerate(err error, expected ...codes.Code) error {
	var w *known.WrongError
	if errors.As(err, &w) || !slices.Contains(expected, status.Code(err)) {
		return err
	}
	return nil
}

func (w *worker) config(t *target) client.Config {
	return client.Config{
		Credentials: t.credentials, PerRPC: t.perRPC,
		ChunkBytes: []int{0, 4 * kib, 100_000, 4 * mib}[w.rand.IntN(4)],
		Checksum:   []codec.Checksum{codec.CRC32C, codec.CRC32}[w.rand.IntN(2)],
		Codec:      []codec.Codec{codec.None, codec.LZ4}[w.rand.IntN(2)],
	}
}

// calls makes several calls at a time.
func (w *worker) calls(ctx context.Context, v visit) (err error) {
	most := known.LargestBytes
	if w.rand.IntN(2) == 0 {
		most = 8 * mib
	}
	var open []*client.Call
	var wants [][]byte
	for range 1 + w.rand.IntN(6) {
		x := known.Any(w.rand, known.Size(w.rand, most))
		model, want := "echo", x.Data()
		if w.rand.IntN(2) == 0 && len(want)%4 == 0 {
			model, want = "relu", x.ReLU()
		}
		c, e := v.session.Call(ctx, client.Request{Model: model, Inputs: []client.Input{x.Input("", w.rand)}})
		if err = errors.Join(err, e); e != nil {
			break
		}
		open, wants = append(open, c), append(wants, want)
	}
	for i, c := range open {
		results, e := c.Wait()
		var refused *client.Error
		switch {
		case e == nil:
			e = known.Same("a result", results["y"].Data, wants[i])
		case errors.As(e, &refused) && refused.Code == codes.ResourceExhausted && refused.RetryAfter > 0:
			w.soak.busy.Add(1)
			e = nil
		}
		err = errors.Join(err, e)
	}
	return err
}

// cancels ends a call that could not end by itself.
func (w *worker) cancels(ctx context.Context, v visit) error {
	x := known.Any(w.rand, mib+w.rand.IntN(4*mib)/4*4)
	let := make(chan struct{})
	c, err := v.session.Call(ctx, client.Request{Model: "relu", Inputs: []client.Input{client.FromReader("", x.Desc(), known.Held(x.Data(), let))}})
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
func (w *worker) timeouts(ctx context.Context, v visit) error {
	c, err := v.session.Call(ctx, client.Request{
		Model: "slow", Params: map[string]string{"delay": "30s"}, Timeout: time.Duration(1 + w.rand.Int64N(int64(50*time.Millisecond))),
		Inputs: []client.Input{client.From("", known.Any(w.rand, 8*kib).Tensor())},
	})
	if err == nil {
		_, err = c.Wait()
	}
	if status.Code(err) != codes.DeadlineExceeded {
		return fmt.Errorf("a call without time ends with %w", err)
	}
	return nil
}

func (w *worker) name(i int) string { return fmt.Sprintf("%s%d", w.prefix, i) }

// some returns the numbers of a few stored tensors.
func (w *worker) some() []int { return w.rand.Perm(len(storedSizes))[:1+w.rand.IntN(4)] }

func (w *worker) pushes(ctx context.Context, v visit) error {
	var req client.PushRequest
	fresh := make(map[string]*known.Window)
	for _, i := range w.some() {
		x := known.Any(w.rand, storedSizes[i])
		req.Tensors = append(req.Tensors, x.Input(w.name(i), w.rand))
		fresh[w.name(i)] = &x
	}
	_, err := v.client.Push(ctx, req)
	if err == nil {
		maps.Copy(w.stored[v.target], fresh)
	}
	return err
}

func (w *worker) pulls(ctx context.Context, v visit) error {
	var names []string
	for _, i := range w.some() {
		names = append(names, w.name(i))
	}
	got, err := known.Pull(ctx, v.client, names...)
	for i := range got {
		err = errors.Join(err, w.stored[v.target][names[i]].Is(&got[i]))
	}
	return err
}

// globs holds a list, and a pull of all a worker has, to what it has.
func (w *worker) globs(ctx context.Context, v visit) error {
	own := w.stored[v.target]
	list, _, err := v.client.List(ctx, w.prefix+"*")
	if err != nil {
		return err
	}
	for _, st := range list {
		if x := own[st.Name]; x == nil || st.Bytes != int64(len(x.Data())) {
			return known.Wrong("%s is listed with %d bytes", st.Name, st.Bytes)
		}
	}
	if len(list) != len(own) {
		return known.Wrong("%d tensors are listed, not %d", len(list), len(own))
	}
	got, err := v.client.Pull(ctx, client.PullRequest{Select: []client.Selection{{Name: w.prefix + "*"}}})
	if len(own) == 0 {
		return tolerate(err, codes.NotFound)
	}
	if len(got) != len(own) {
		return fmt.Errorf("the glob picks %d of %d tensors: %w", len(got), len(own), err)
	}
	err = nil
	for i := range got {
		err = errors.Join(err, own[got[i].Name].Is(&got[i]))
	}
	return err
}

func (w *worker) deletes(ctx context.Context, v visit) error {
	name, own := w.name(w.rand.IntN(len(storedSizes))), w.stored[v.target]
	gone, err := v.client.Delete(ctx, name)
	if own[name] == nil {
		return tolerate(err, codes.NotFound)
	}
	if err == nil && !slices.Equal(gone, []string{name}) {
		err = fmt.Errorf("deleting %s says %q", name, gone)
	}
	if err == nil {
		delete(own, name)
	}
	return err
}

// uncertain returns a push of one tensor that may or may not come to its end.
func (w *worker) uncertain(t *target) client.PushRequest {
	x := known.Any(w.rand, w.rand.IntN(8*mib))
	name := fmt.Sprintf("%s%s-%d", cutNames, strings.ReplaceAll(w.prefix, "/", "-"), w.number)
	w.number++
	t.mu.Lock()
	t.cut[name] = x
	t.mu.Unlock()
	return client.PushRequest{Tensors: []client.Input{x.Input(name, nil)}}
}

// cut calls do with a context that ends within some milliseconds.
func (w *worker) cut(ctx context.Context, do func(context.Context) error) error {
	after := time.Duration(w.rand.Int64N(int64(20 * time.Millisecond)))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if w.rand.IntN(2) == 0 {
		defer time.AfterFunc(after, cancel).Stop()
	} else {
		var end context.CancelFunc
		ctx, end = context.WithTimeout(ctx, after)
		defer end()
	}
	return tolerate(do(ctx), codes.Canceled, codes.DeadlineExceeded)
}

func (w *worker) cutPush(ctx context.Context, v visit) error {
	return w.cut(ctx, func(ctx context.Context) error {
		_, err := v.client.Push(ctx, w.uncertain(v.target))
		return err
	})
}

func (w *worker) cutPull(ctx context.Context, v visit) error {
	name := w.name(w.rand.IntN(len(storedSizes)))
	return w.cut(ctx, func(ctx context.Context) error {
		got, err := known.Pull(ctx, v.client, name)
		switch {
		case err != nil:
			return err
		case got[0].Err == nil:
			return w.stored[v.target][name].Is(&got[0])
		}
		return tolerate(got[0].Err, codes.NotFound)
	})
}

// broken has a connection break in the middle of calls and a push.
func (w *worker) broken(ctx context.Context, v visit) (err error) {
	cfg := w.config(v.target)
	cfg.OpenTimeout, cfg.Credentials = time.Second, attack.CutAfter(w.rand.IntN(8*mib), cfg.Credentials)
	c, err := client.Dial(v.address, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for err == nil {
		if w.rand.IntN(2) == 0 {
			_, err = c.Push(ctx, w.uncertain(v.target))
			continue
		}
		x := known.Any(w.rand, w.rand.IntN(mib)*4)
		var y tensor.Tensor
		if y, err = c.Compute(ctx, "relu", x.Tensor()); err == nil {
			err = known.Same("relu", y.Data, x.ReLU())
		}
	}
	return tolerate(err, codes.Unavailable, codes.DeadlineExceeded)
}

// questions asks for what the server knows of itself.
func (w *worker) questions(ctx context.Context, v visit) error {
	_, err := v.client.Models(ctx)
	_, e := v.client.Info(ctx)
	if err = errors.Join(err, e); err != nil {
		return err
	}
	got, err := known.Pull(ctx, v.client, "nobody/has/this")
	if err != nil {
		return err
	}
	var nothing *known.Window
	if err := nothing.Is(&got[0]); err != nil {
		return err
	}
	tr, err := v.client.Transfer(ctx, got[0].Transfer)
	if err == nil && (tr.Push || len(tr.Tensors) != 1) {
		err = fmt.Errorf("the transfer is told as %+v", tr)
	}
	return err
}
