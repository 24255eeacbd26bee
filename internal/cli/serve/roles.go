package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
	"github.com/tensorferry/tensorferry/internal/glob"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/terms"
)

const (
	// What others store and delete under the names of a principal counts after countEvery. At its
	// limit it is counted for each put, but not within countPause: 60 000 tensors take 30 ms.
	countEvery  = 10 * time.Second
	countPause  = 100 * time.Millisecond
	retryMillis = 100 // when a client may try again: a call of its own may end at any time
)

// rights are those of a line: to run models; to store, replace and delete tensors; to list and get
// them and those of sources; and all of that.
var rights = []string{"compute", "push", "pull", "admin"}

// role is the line of a principal.
type role struct {
	rights           []string
	models, names    []*glob.Glob // none: all
	bytes, calls     int64        // 0: no limit
	storing, calling *tally       // what they limit
}

func (its *role) set(word string) (err error) {
	key, value, limit := strings.Cut(word, "=")
	switch {
	case !limit:
		its.rights = strings.Split(word, ",")
		if slices.ContainsFunc(its.rights, func(right string) bool { return !slices.Contains(rights, right) }) {
			err = fmt.Errorf("the rights are %s", strings.Join(rights, ","))
		}
	case key == "models" && its.models == nil:
		its.models, err = parseGlobs(value)
	case key == "names" && its.names == nil:
		its.names, err = parseGlobs(value)
	case key == "bytes" && its.bytes == 0:
		its.bytes, err = settings.ParseSize(value)
	case key == "calls" && its.calls == 0:
		its.calls, err = strconv.ParseInt(value, 10, 32)
	default:
		return errors.New("use models=, names=, bytes= and calls=, each once")
	}
	if err == nil && (key == "bytes" && its.bytes <= 0 || key == "calls" && its.calls <= 0) {
		err = errors.New("use a number above 0")
	}
	return err
}

func parseGlobs(text string) (all []*glob.Glob, err error) {
	for pattern := range strings.SplitSeq(text, ",") {
		one, err := glob.Parse(pattern)
		if err != nil {
			return nil, err
		}
		all = append(all, one)
	}
	return all, nil
}

func matches(all []*glob.Glob, name string) bool {
	return len(all) == 0 || slices.ContainsFunc(all, func(g *glob.Glob) bool { return g.Match(name) })
}

// roles decide what principals may do. Safe for concurrent use.
type roles struct {
	now     func() map[string]*role // by principal
	reread  func()
	stored  store.Store
	tallies map[string]*tally // stay when the file is read again, which is one at a time
}

// readRoles reads a file with a line per principal, and again when it has changed.
func readRoles(path string, log *slog.Logger) (r *roles, err error) {
	r = &roles{tallies: make(map[string]*tally)}
	r.now, r.reread, err = identity.Watch(path, log, func(text string) (map[string]*role, error) {
		all, err := r.parse(text)
		if err == nil {
			log.Info("roles were read", slog.String("file", path), slog.Int("principals", len(all)))
		}
		return all, err
	})
	return r, err
}

func (r *roles) parse(text string) (map[string]*role, error) {
	all := make(map[string]*role)
	for n, line := range strings.Split(text, "\n") {
		words := strings.Fields(line)
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		its, who, names := new(role), words[0], ""
		for _, word := range words[1:] {
			if err := its.set(word); err != nil {
				return nil, fmt.Errorf("line %d: %s: %w", n+1, word, err)
			}
			if strings.HasPrefix(word, "names=") {
				names = word
			}
		}
		if all[who] != nil || its.rights == nil {
			return nil, fmt.Errorf("line %d: %q needs rights after the name, and no second line", n+1, who)
		}
		all[who], its.storing, its.calling = its, r.tally(names), r.tally("calls of "+who)
	}
	return all, nil
}

func (r *roles) tally(of string) *tally {
	if r.tallies[of] == nil {
		r.tallies[of] = new(tally)
	}
	return r.tallies[of]
}

// authorize is a server.Config's Authorize.
func (r *roles) authorize(ctx context.Context, a server.Action) error {
	who := server.Principal(ctx)
	its := r.now()[who]
	if its == nil {
		return fmt.Errorf("the server's roles have no line for %q", who)
	}
	right, names := "pull", its.names
	switch a.Verb {
	case server.VerbEnter:
		return nil
	case server.VerbDescribe, server.VerbCompute:
		right, names = "compute", its.models
	case server.VerbPut, server.VerbDelete:
		right = "push"
	}
	switch {
	case !slices.Contains(its.rights, right) && !slices.Contains(its.rights, "admin"):
		return fmt.Errorf("the server's roles do not let %q %s", who, right)
	case !matches(names, a.Name) && (a.Verb == server.VerbPut || right == "compute"):
		return fmt.Errorf("the server's roles do not let %q %s %q", who, right, a.Name)
	case !matches(names, a.Name):
		return store.ErrNotFound
	case a.Verb == server.VerbCompute && its.calls > 0:
		return its.calling.call(ctx, its.calls)
	case a.Verb == server.VerbPut && its.bytes > 0:
		return its.storing.put(ctx, r.stored, its, a)
	}
	return nil
}

// tally knows what is open, and how many bytes the tensors of some names have at most: those that
// were counted, and all that were put since.
type tally struct {
	mu      sync.Mutex // guards all below
	open    []underway
	bytes   int64
	counted time.Time // when counting began
}

// underway is a call, or a put, until ctx ends.
type underway struct {
	ctx   context.Context
	name  string
	bytes int64
}

// drop drops what has ended.
func (t *tally) drop() {
	t.open = slices.DeleteFunc(t.open, func(o underway) bool { return o.ctx.Err() != nil })
}

// call admits a call, unless there are too many.
func (t *tally) call(ctx context.Context, most int64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.drop(); int64(len(t.open)) >= most {
		text := fmt.Sprintf("calls: the server's roles let you have %d at a time; try again later", most)
		return &terms.RefusedError{Code: frame.ResourceExhausted, Reason: reason.RoleCalls, Text: text, RetryMillis: retryMillis}
	}
	t.open = append(t.open, underway{ctx: ctx})
	return nil
}

// put admits a tensor if there is room for it.
func (t *tally) put(ctx context.Context, stored store.Store, its *role, a server.Action) error {
	came := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	if (a.Bytes > its.bytes-t.bytes || time.Since(t.counted) > countEvery) && t.counted.Before(came) {
		time.Sleep(time.Until(t.counted.Add(countPause))) // those that come meanwhile share the count
		if err := t.count(ctx, stored, its); err != nil {
			return &terms.RefusedError{Code: frame.Unavailable, Reason: reason.StoreUnavailable, Text: "bytes: the server's store cannot be listed now; try again later", RetryMillis: retryMillis}
		}
	}
	if a.Bytes > its.bytes-t.bytes {
		text := fmt.Sprintf("bytes: the server's roles let tensors of your names have %d; they have %d, and this one has %d; delete some", its.bytes, t.bytes, a.Bytes)
		return &terms.RefusedError{Code: frame.ResourceExhausted, Reason: reason.RoleBytes, Text: text}
	}
	t.bytes += a.Bytes
	if len(t.open) == cap(t.open) {
		t.drop()
	}
	t.open = append(t.open, underway{ctx, a.Name, a.Bytes})
	return nil
}

// count counts what is on its way and then what is stored, which may be the same.
func (t *tally) count(ctx context.Context, stored store.Store, its *role) error {
	began, bytes, coming := time.Now(), int64(0), make(map[string]int64)
	t.drop()
	for _, o := range t.open {
		bytes += o.bytes
		coming[o.name] += o.bytes
	}
	for info, err := range store.Each(ctx, stored, "") {
		if err != nil {
			return err
		}
		if size, _ := info.Bytes(); matches(its.names, info.Name) {
			bytes += max(0, size-coming[info.Name])
		}
	}
	t.bytes, t.counted = bytes, began
	return nil
}
