package moving

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/glob"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// removeUnasked is how many tensors rm removes without --yes: as many as fit in one look.
const removeUnasked = 100

// Remove removes the tensors that names match, and prints their names.
func Remove(ctx context.Context, cl *client.Client, names []string, yes bool, out display.Printer) error {
	list, err := StoredOf(ctx, cl, names)
	if err != nil {
		return err
	}
	for _, s := range list {
		if s.File != "" {
			return fmt.Errorf("%q belongs to the file %q in the server's folder; delete the file on the server", s.Name, s.File)
		}
	}
	if len(list) > removeUnasked && !yes {
		return fail.Hinted(fail.Usage("these are %d tensors, and nothing was removed", len(list)), "--yes removes more than 100")
	}
	removed, err := cl.Delete(ctx, display.Each(list, func(s client.Stored) string { return s.Name })...)
	if out.JSON && err != nil {
		return err
	}
	return cmp.Or(err, out.Print(append([]string{}, removed...), func(w io.Writer) {
		for _, name := range removed {
			fmt.Fprintln(w, display.Plain(name))
		}
	}))
}

// Verify pulls tensors, and prints those that are not as they were pushed.
func Verify(ctx context.Context, cl *client.Client, names []string, pace *rate.Limiter, out display.Printer) error {
	list, _, err := cl.List(ctx, "")
	if len(names) > 0 {
		list, err = StoredOf(ctx, cl, names)
	}
	if err != nil {
		return err
	}
	discard := WriterFunc(func(p []byte) (int, error) {
		for part := range slices.Chunk(p, pace.Burst()) {
			if err := pace.WaitN(ctx, len(part)); err != nil {
				return 0, err
			}
		}
		return len(p), nil
	})
	got, err := pullTo(ctx, cl, SelectionsOf(list), func(string, tensor.Desc) (io.Writer, error) { return discard, nil })
	damaged := slices.DeleteFunc(got, func(s client.Summary) bool { return s.Err == nil })
	if err != nil && len(damaged) == 0 || ctx.Err() != nil {
		return err
	}
	err = out.Print(display.Each(damaged, func(s client.Summary) StoredJSON {
		return StoredJSON{Name: s.Name, Bytes: s.Bytes, Error: s.Err.Error()}
	}), func(w io.Writer) {
		for _, s := range damaged {
			fmt.Fprintf(w, "%s\t%s\n", display.Plain(s.Name), fail.Text(s.Err))
		}
	})
	if err == nil && len(damaged) > 0 {
		err = fmt.Errorf("%d of %d tensors are not as they were pushed: %w", len(damaged), len(list), damaged[0].Err)
	}
	return err
}

// pullTo pulls selections into the writers that to returns, until one fails.
func pullTo(ctx context.Context, cl *client.Client, selections []client.Selection, to func(string, tensor.Desc) (io.Writer, error)) ([]client.Summary, error) {
	if len(selections) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	return cl.Pull(ctx, client.PullRequest{Select: selections, To: func(name string, d tensor.Desc) (client.Sink, error) {
		w, err := to(name, d)
		if err != nil {
			cancel(err)
			return client.Sink{}, err
		}
		cancelling := WriterFunc(func(p []byte) (int, error) {
			n, err := w.Write(p)
			if err != nil {
				cancel(err)
			}
			return n, err
		})
		return client.Writer(func(tensor.Desc) (io.Writer, error) { return cancelling, nil }), nil
	}})
}

// WriterFunc is a function that is a writer.
type WriterFunc func(p []byte) (int, error)

func (f WriterFunc) Write(p []byte) (int, error) { return f(p) }

// StoredJSON is a tensor that is stored, or was pushed, pulled or copied.
type StoredJSON struct {
	Name string `json:"name"`
	*display.Desc
	Bytes    int64             `json:"bytes"`
	Digest   string            `json:"digest,omitempty"`
	Stored   *time.Time        `json:"stored,omitempty"` // absent, too, if outside of JSON's years
	Durable  bool              `json:"durable"`
	File     string            `json:"file,omitempty"`
	Evicted  int               `json:"evicted,omitempty"` // other tensors
	Error    string            `json:"error,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// StoredJSONs returns tensors of a store as JSON has them.
func StoredJSONs(list []client.Stored) []StoredJSON {
	return display.Each(list, func(s client.Stored) StoredJSON {
		j := StoredJSON{Name: s.Name, Desc: new(display.Describe(s.Desc)), Bytes: s.Bytes, Durable: s.Durable, File: s.File, Metadata: s.Metadata}
		if at := s.Stored.UTC(); at.Year() >= 0 && at.Year() <= 9999 {
			j.Stored = &at
		}
		if !s.Digest.IsZero() {
			j.Digest = s.Digest.String()
		}
		return j
	})
}

// globs are the characters that make a name a glob.
const globs = "*?["

// isGlob reports whether a name stands for any number of tensors.
func isGlob(name string) bool {
	return strings.ContainsAny(name, globs) || strings.HasSuffix(name, "/")
}

// StoredOf lists the tensors that names and globs match, each once. A name that ends in a slash
// matches all that begin with it. If a tensor's name equals a glob, the glob matches only that
// tensor. Matching nothing is an error.
func StoredOf(ctx context.Context, cl *client.Client, names []string) ([]client.Stored, error) {
	if err := checkNames(names); err != nil {
		return nil, err
	}
	var list []client.Stored
	seen := map[string]bool{}
	for _, n := range names {
		pattern := glob.Quote(n)
		if strings.HasSuffix(n, "/") { // never the name of a tensor
			pattern += "**"
		}
		found, sources, err := cl.List(ctx, pattern)
		if err == nil && len(found) == 0 && strings.ContainsAny(n, globs) {
			found, _, err = cl.List(ctx, n)
		}
		switch _, bad := path.Match(n, ""); {
		case bad != nil && status.Code(err) == codes.InvalidArgument:
			return nil, fail.Usage("%q is not a valid glob: unclosed [ or trailing \\", n)
		case err != nil:
			return nil, err
		case len(found) == 0:
			hint := "tensorferry ls" + reason.Asked + " lists its tensors and sources"
			if below, _, err := cl.List(ctx, glob.Quote(n)+"/**"); err == nil && len(below) > 0 {
				hint = fmt.Sprintf("%q has %d tensors; end the name in a slash", n+"/", len(below))
			} else if slices.Contains(sources, n) {
				hint = fmt.Sprintf("%q is a source: use pull or show with --source; it cannot be copied or removed", n)
			}
			return nil, fail.Hinted(fmt.Errorf("the server has no tensor %q", n), hint)
		}
		for _, s := range found {
			if !seen[s.Name] {
				seen[s.Name] = true
				list = append(list, s)
			}
		}
	}
	return list, nil
}

// checkNames rejects names that no server has, and an empty one, which would mean all.
func checkNames(names []string) error {
	for _, name := range names {
		switch {
		case name == "":
			return fail.Usage("NAME must not be empty")
		case !utf8.ValidString(name):
			return fail.Usage("%q is not UTF-8, as names are", name)
		}
	}
	return nil
}

func namesOf(list []client.Stored) map[string]bool {
	names := make(map[string]bool, len(list))
	for _, s := range list {
		names[s.Name] = true
	}
	return names
}

// others lists the tensors that a glob matches, without those that are known.
func others[T any](ctx context.Context, cl *client.Client, glob string, known map[string]T) ([]client.Stored, error) {
	list, _, err := cl.List(ctx, glob)
	return slices.DeleteFunc(list, func(s client.Stored) bool {
		_, ok := known[s.Name]
		return ok
	}), err
}

// SourceFlags has the flags that make a server generate a tensor.
type SourceFlags struct {
	Source bool
	Params []string
}

// Selections returns what names select: tensors, globs or sources.
func (o *SourceFlags) Selections(names []string) ([]client.Selection, error) {
	params, err := paramsOf("--param", o.Params)
	if err == nil {
		err = checkNames(names)
	}
	if err != nil {
		return nil, err
	}
	if len(params) > 0 && !o.Source {
		return nil, fail.Usage("--param needs --source")
	}
	return display.Each(names, func(n string) client.Selection {
		return client.Selection{Name: n, Source: o.Source, Params: params}
	}), nil
}

// paramsOf parses the key=value texts of a flag.
func paramsOf(flag string, texts []string) (map[string]string, error) {
	params := map[string]string{}
	for _, text := range texts {
		k, v, ok := strings.Cut(text, "=")
		if !ok {
			return nil, fail.Usage("%s %q has no =; use key=value", flag, text)
		}
		if _, twice := params[k]; twice {
			return nil, fail.Usage("%s %s is given twice", flag, k)
		}
		params[k] = v
	}
	return params, nil
}

// SelectionsOf selects tensors of a store.
func SelectionsOf(stored []client.Stored) []client.Selection {
	return display.Each(stored, func(s client.Stored) client.Selection { return client.Selection{Name: s.Name} })
}

// ReadStored passes the bytes of a tensor of the server to use as they arrive. The reader
// holds back the last byte until the pull has succeeded, so a use that reads to the end
// never succeeds with wrong bytes.
func ReadStored(ctx context.Context, cl *client.Client, s client.Selection, use func(tensor.Desc, io.Reader) error) error {
	r, w := io.Pipe()
	verdict, used := make(chan error, 1), make(chan error, 1)
	begun := false
	_, err := pullTo(ctx, cl, []client.Selection{s}, func(_ string, d tensor.Desc) (io.Writer, error) {
		size, err := d.Bytes()
		if begun && err == nil {
			err = fmt.Errorf("tensor %q was removed, so the name became a glob; try again", s.Name)
		}
		if err != nil {
			return nil, err
		}
		begun = true
		go func() { // ends with use, which ends with the pipe
			err := use(d, tensorfile.HoldBack(r, size, sync.OnceValue(func() error { return <-verdict })))
			_ = r.CloseWithError(errUnread) // it never fails
			used <- err
		}()
		return w, nil
	})
	if !begun {
		return cmp.Or(err, fmt.Errorf("the server did not send %q", s.Name))
	}
	verdict <- err
	_ = w.CloseWithError(err) // it never fails; nil is the end
	if e := <-used; e != nil && (err == nil || errors.Is(err, errUnread)) {
		return e
	}
	return err
}

// errUnread ends the pull of a tensor whose reader has returned early.
var errUnread = errors.New("the reader has stopped")

// ShownDocument is the largest document, in bytes, that show describes; most are smaller.
const ShownDocument = 64 << 10

// IsDocument reports whether a tensor may be the metadata and index of a model file.
func IsDocument(s client.Stored) bool {
	return path.Base(s.Name) == tensorfile.MetadataName && s.DType == tensor.Uint8 && len(s.Shape) == 1
}

// PullDocument pulls the document of a model file.
func PullDocument(ctx context.Context, cl *client.Client, s client.Stored) (tensorfile.Document, []client.Summary, error) {
	const hint = "pull the other tensors without it, or remove it"
	if !IsDocument(s) {
		return tensorfile.Document{}, nil, fail.Hinted(fmt.Errorf("%q is %v, not the metadata of a model file", s.Name, s.Desc), hint)
	}
	got, err := cl.Pull(ctx, client.PullRequest{Select: SelectionsOf([]client.Stored{s})})
	if err != nil {
		return tensorfile.Document{}, nil, err
	}
	d, err := tensorfile.ParseDocument(got[0].Data)
	if err != nil {
		return d, nil, fail.Hinted(fmt.Errorf("%q is not the metadata of a model file: %w", s.Name, err), hint)
	}
	return d, got, nil
}
