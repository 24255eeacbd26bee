package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/glob"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

func lsCommand() *cobra.Command {
	return asking(&cobra.Command{
		Use:   "ls [NAME...]",
		Short: "list the tensors and sources of a server",
		Long: `Ls lists the tensors in a server's store and, without a NAME, the sources for pull
--source. NAME may be a glob, as for pull. model/__metadata__ holds the metadata of a
model file, which show prints.

With --json, a tensor has a digest once the server has computed it: when it is pushed
or, for a tensor of a file in the server's folder, when it is first pulled.`,
		Example: `  tensorferry ls
  tensorferry ls 'model/*' --json`,
		Args: cobra.ArbitraryArgs,
	}, ls)
}

// storedJSON is a tensor that is stored, or was pushed, pulled or copied.
type storedJSON struct {
	Name string `json:"name"`
	*descJSON
	Bytes    int64             `json:"bytes"`
	Digest   string            `json:"digest,omitempty"`
	Stored   *time.Time        `json:"stored,omitempty"` // absent, too, if outside of JSON's years
	Durable  bool              `json:"durable"`
	File     string            `json:"file,omitempty"`
	Evicted  int               `json:"evicted,omitempty"` // other tensors
	Error    string            `json:"error,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

func ls(ctx context.Context, cl *client.Client, names []string, out printer) (err error) {
	var list []client.Stored
	var sources []string
	if len(names) > 0 {
		list, err = storedOf(ctx, cl, names)
	} else {
		list, sources, err = cl.List(ctx, "")
	}
	if err != nil {
		return err
	}
	listed := each(storedJSONs(list), func(j storedJSON) any { return j })
	for _, s := range sources {
		listed = append(listed, map[string]any{"name": s, "source": true})
	}
	return out.print(listed, func(w io.Writer) {
		fmt.Fprintln(w, "NAME\tTENSOR\tSIZE\tSTORED\tWHERE")
		for _, s := range list {
			where := cmp.Or(plain(s.File), map[bool]string{true: "disk"}[s.Durable], "memory")
			fmt.Fprintf(w, "%s\t%v\t%s\t%s\t%s\n", plain(s.Name), s.Desc, sizeText(s.Bytes), s.Stored.Local().Format(time.DateTime), where)
		}
		for _, s := range sources {
			fmt.Fprintf(w, "%s\t\t\t\tsource\n", plain(s))
		}
	})
}

func storedJSONs(list []client.Stored) []storedJSON {
	return each(list, func(s client.Stored) storedJSON {
		j := storedJSON{Name: s.Name, descJSON: new(describe(s.Desc)), Bytes: s.Bytes, Durable: s.Durable, File: s.File, Metadata: s.Metadata}
		if at := s.Stored.UTC(); at.Year() >= 0 && at.Year() <= 9999 {
			j.Stored = &at
		}
		if !s.Digest.IsZero() {
			j.Digest = s.Digest.String()
		}
		return j
	})
}

// sureMost is how many tensors rm removes without --yes: as many as fit in one look.
const sureMost = 100

func rmCommand() *cobra.Command {
	var yes bool
	c := asking(&cobra.Command{
		Use:   "rm NAME...",
		Short: "remove tensors from a server",
		Long: `Rm removes tensors from a server's store and prints their names. NAME may be a glob,
as for pull. If a NAME matches nothing, rm fails and removes nothing. A tensor of a
file in the server's folder cannot be removed; delete the file on the server.`,
		Example: `  tensorferry rm x
  tensorferry rm 'experiments/7/*'`,
		Args: takes(many, "NAME"),
	}, func(ctx context.Context, cl *client.Client, names []string, out printer) error {
		return rm(ctx, cl, names, yes, out)
	})
	c.Flags().BoolVar(&yes, "yes", false, "remove more than 100 tensors")
	return c
}

func rm(ctx context.Context, cl *client.Client, names []string, yes bool, out printer) error {
	list, err := storedOf(ctx, cl, names)
	if err != nil {
		return err
	}
	for _, s := range list {
		if s.File != "" {
			return fmt.Errorf("%q belongs to the file %q in the server's folder; delete the file on the server", s.Name, s.File)
		}
	}
	if len(list) > sureMost && !yes {
		return hinted{usage("these are %d tensors, and nothing was removed", len(list)), "--yes removes more than 100"}
	}
	removed, err := cl.Delete(ctx, each(list, func(s client.Stored) string { return s.Name })...)
	if out.json && err != nil {
		return err
	}
	return cmp.Or(err, out.print(append([]string{}, removed...), func(w io.Writer) {
		for _, name := range removed {
			fmt.Fprintln(w, plain(name))
		}
	}))
}

func verifyCommand() *cobra.Command {
	var bytesPerSecond int
	c := asking(&cobra.Command{
		Use:   "verify [NAME...]",
		Short: "check the tensors of a server against their digests",
		Long: `Verify pulls the tensors in a server's store, at most --rate bytes a second, and checks
them against the digests that the server has kept since they were pushed. It prints the
names of those that are damaged, and then fails; the server counts and logs them, too.
NAME may be a glob, as for pull; without one, all tensors are checked.

A tensor of a file in the server's folder has no digest until it is first pulled, by
verify or by anybody.`,
		Example: `  tensorferry verify
  tensorferry verify 'model/**' --rate 20MiB`,
		Args: cobra.ArbitraryArgs,
	}, func(ctx context.Context, cl *client.Client, names []string, out printer) error {
		return verify(ctx, cl, names, rate.NewLimiter(rate.Limit(bytesPerSecond), bytesPerSecond), out)
	})
	sizeVar(c.Flags(), &bytesPerSecond, "rate", 100<<20, 1<<10, math.MaxInt32, "most `bytes` to read in a second")
	return c
}

func verify(ctx context.Context, cl *client.Client, names []string, pace *rate.Limiter, out printer) error {
	list, _, err := cl.List(ctx, "")
	if len(names) > 0 {
		list, err = storedOf(ctx, cl, names)
	}
	if err != nil {
		return err
	}
	discard := writerFunc(func(p []byte) (int, error) {
		for part := range slices.Chunk(p, pace.Burst()) {
			if err := pace.WaitN(ctx, len(part)); err != nil {
				return 0, err
			}
		}
		return len(p), nil
	})
	got, err := pullTo(ctx, cl, selectionsOf(list), func(string, tensor.Desc) (io.Writer, error) { return discard, nil })
	damaged := slices.DeleteFunc(got, func(s client.Summary) bool { return s.Err == nil })
	if err != nil && len(damaged) == 0 || ctx.Err() != nil {
		return err
	}
	err = out.print(each(damaged, func(s client.Summary) storedJSON {
		return storedJSON{Name: s.Name, Bytes: s.Bytes, Error: s.Err.Error()}
	}), func(w io.Writer) {
		for _, s := range damaged {
			fmt.Fprintf(w, "%s\t%s\n", plain(s.Name), said(s.Err))
		}
	})
	if err == nil && len(damaged) > 0 {
		err = fmt.Errorf("%d of %d tensors are not as they were pushed: %w", len(damaged), len(list), damaged[0].Err)
	}
	return err
}

// globs are the characters that make a name a glob.
const globs = "*?["

// isGlob reports whether a name stands for any number of tensors.
func isGlob(name string) bool {
	return strings.ContainsAny(name, globs) || strings.HasSuffix(name, "/")
}

// storedOf lists the tensors that names and globs match, each once. A name that ends in a slash
// matches all that begin with it. If a tensor's name equals a glob, the glob matches only that
// tensor. Matching nothing is an error.
func storedOf(ctx context.Context, cl *client.Client, names []string) ([]client.Stored, error) {
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
			return nil, usage("%q is not a valid glob: unclosed [ or trailing \\", n)
		case err != nil:
			return nil, err
		case len(found) == 0:
			hint := "tensorferry ls" + atServer + " lists its tensors and sources"
			if below, _, err := cl.List(ctx, glob.Quote(n)+"/**"); err == nil && len(below) > 0 {
				hint = fmt.Sprintf("%q has %d tensors; end the name in a slash", n+"/", len(below))
			} else if slices.Contains(sources, n) {
				hint = fmt.Sprintf("%q is a source: use pull or show with --source; it cannot be copied or removed", n)
			}
			return nil, hinted{fmt.Errorf("the server has no tensor %q", n), hint}
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
			return usage("NAME must not be empty")
		case !utf8.ValidString(name):
			return usage("%q is not UTF-8, as names are", name)
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

// sourceFlags has the flags that make a server generate a tensor.
type sourceFlags struct {
	source bool
	params []string
}

func (o *sourceFlags) flags(c *cobra.Command) {
	c.Flags().BoolVar(&o.source, "source", false, "NAME is a source of the server, not a tensor")
	c.Flags().StringArrayVarP(&o.params, "param", "p", nil, "parameter of the source, `key=value`; repeatable")
}

// selections returns what names select: tensors, globs or sources.
func (o *sourceFlags) selections(names []string) ([]client.Selection, error) {
	params, err := paramsOf("--param", o.params)
	if err == nil {
		err = checkNames(names)
	}
	if err != nil {
		return nil, err
	}
	if len(params) > 0 && !o.source {
		return nil, usage("--param needs --source")
	}
	return each(names, func(n string) client.Selection {
		return client.Selection{Name: n, Source: o.source, Params: params}
	}), nil
}

// paramsOf parses the key=value texts of a flag.
func paramsOf(flag string, texts []string) (map[string]string, error) {
	params := map[string]string{}
	for _, text := range texts {
		k, v, ok := strings.Cut(text, "=")
		if !ok {
			return nil, usage("%s %q has no =; use key=value", flag, text)
		}
		if _, twice := params[k]; twice {
			return nil, usage("%s %s is given twice", flag, k)
		}
		params[k] = v
	}
	return params, nil
}

func selectionsOf(stored []client.Stored) []client.Selection {
	return each(stored, func(s client.Stored) client.Selection { return client.Selection{Name: s.Name} })
}

// readStored passes the bytes of a tensor of the server to use as they arrive. The reader
// holds back the last byte until the pull has succeeded, so a use that reads to the end
// never succeeds with wrong bytes.
func readStored(ctx context.Context, cl *client.Client, s client.Selection, use func(tensor.Desc, io.Reader) error) error {
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
			err := use(d, &heldBack{r, size, sync.OnceValue(func() error { return <-verdict })})
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

// shownDocument is the largest document, in bytes, that show describes; most are smaller.
const shownDocument = 64 << 10

// isDocument reports whether a tensor may be the metadata and index of a model file.
func isDocument(s client.Stored) bool {
	return path.Base(s.Name) == tensorfile.MetadataName && s.DType == tensor.Uint8 && len(s.Shape) == 1
}

// pullDocument pulls the document of a model file.
func pullDocument(ctx context.Context, cl *client.Client, s client.Stored) (tensorfile.Document, []client.Summary, error) {
	const hint = "pull the other tensors without it, or remove it"
	if !isDocument(s) {
		return tensorfile.Document{}, nil, hinted{fmt.Errorf("%q is %v, not the metadata of a model file", s.Name, s.Desc), hint}
	}
	got, err := cl.Pull(ctx, client.PullRequest{Select: selectionsOf([]client.Stored{s})})
	if err != nil {
		return tensorfile.Document{}, nil, err
	}
	d, err := tensorfile.ParseDocument(got[0].Data)
	if err != nil {
		return d, nil, hinted{fmt.Errorf("%q is not the metadata of a model file: %w", s.Name, err), hint}
	}
	return d, got, nil
}
