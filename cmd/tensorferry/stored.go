package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"path"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// selectionsAtATime is how many tensors one request names: no more than a server takes.
const selectionsAtATime = 1000

func lsCommand() *cobra.Command {
	var server string
	var asJSON bool
	c := &cobra.Command{
		Use:   "ls [NAME...]",
		Short: "list the tensors and sources of a server",
		Long: `Ls lists what the store of a server holds, and the sources that pull --source may
name. NAME may be a glob, as for pull. A digest is there once somebody has computed
it: for what was pushed, not for the tensors of a file that was put into the folder.`,
		Example: `  tensorferry ls
  tensorferry ls 'model/*' --json`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			return ls(c.Context(), server, args, asJSON, c.OutOrStdout())
		},
	}
	serverFlag(c, &server)
	jsonFlag(c, &asJSON)
	c.ValidArgsFunction = completeStored
	return c
}

// storedJSON is a tensor at rest as ls --json prints it.
type storedJSON struct {
	Name    string       `json:"name"`
	DType   string       `json:"dtype"`
	Shape   tensor.Shape `json:"shape"`
	Bytes   int64        `json:"bytes"`
	Digest  string       `json:"digest,omitempty"`
	Stored  *time.Time   `json:"stored"` // null: no time that JSON has
	Durable bool         `json:"durable"`
	File    string       `json:"file,omitempty"`
}

func ls(ctx context.Context, server string, names []string, asJSON bool, stdout io.Writer) error {
	cl, err := dial(server, codec.None.String())
	if err != nil {
		return err
	}
	defer cl.Close()
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
	if asJSON {
		out := struct {
			Tensors []storedJSON `json:"tensors"`
			Sources []string     `json:"sources,omitempty"`
		}{make([]storedJSON, len(list)), sources}
		for i, s := range list {
			out.Tensors[i] = storedJSON{
				s.Name, s.DType.String(), append(tensor.Shape{}, s.Shape...), s.Bytes, "", nil, s.Durable, s.File,
			}
			if at := s.Stored.UTC(); at.Year() >= 0 && at.Year() <= 9999 {
				out.Tensors[i].Stored = &at
			}
			if !s.Digest.IsZero() {
				out.Tensors[i].Digest = s.Digest.String()
			}
		}
		return writeJSON(stdout, out)
	}
	w := tabwriter.NewWriter(stdout, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "NAME\tTENSOR\tSIZE\tSTORED\tWHERE")
	for _, s := range list {
		where := "memory"
		switch {
		case s.File != "":
			where = plain(s.File)
		case s.Durable:
			where = "disk"
		}
		fmt.Fprintf(w, "%s\t%v\t%s\t%s\t%s\n", plain(s.Name), s.Desc, sizeText(s.Bytes), s.Stored.Local().Format(time.DateTime), where)
	}
	for _, s := range sources {
		fmt.Fprintf(w, "%s\t\t\t\tsource\n", plain(s))
	}
	return w.Flush()
}

func rmCommand() *cobra.Command {
	var server string
	var asJSON bool
	c := &cobra.Command{
		Use:   "rm NAME...",
		Short: "remove tensors from a server",
		Long: `Rm removes tensors from the store of a server and prints their names. NAME may be
a glob, as for pull; one that picks nothing is an error, and then nothing is removed.
A tensor of a file that was put into the server's folder goes with that file only.`,
		Example: `  tensorferry rm x
  tensorferry rm 'experiments/7/*'`,
		Args: takes(many, "NAME"),
		RunE: func(c *cobra.Command, args []string) error {
			return rm(c.Context(), server, args, asJSON, c.OutOrStdout())
		},
	}
	serverFlag(c, &server)
	jsonFlag(c, &asJSON)
	c.ValidArgsFunction = completeStored
	return c
}

func rm(ctx context.Context, server string, names []string, asJSON bool, stdout io.Writer) error {
	cl, err := dial(server, codec.None.String())
	if err != nil {
		return err
	}
	defer cl.Close()
	list, err := storedOf(ctx, cl, names)
	if err != nil {
		return err
	}
	for _, s := range list {
		if s.File != "" {
			return fmt.Errorf("%q is a tensor of the file %q in the server's folder; it goes with that file, which is not for a client to delete", s.Name, s.File)
		}
	}
	removed := []string{}
	for some := range slices.Chunk(list, selectionsAtATime) {
		requested := make([]string, len(some))
		for i, s := range some {
			requested[i] = s.Name
		}
		var gone []string
		gone, err = cl.Delete(ctx, requested...)
		removed = append(removed, gone...)
		if err != nil {
			break
		}
	}
	switch {
	case !asJSON:
		for _, name := range removed {
			fmt.Fprintln(stdout, plain(name))
		}
	case err == nil:
		err = writeJSON(stdout, removed)
	}
	return err
}

// literally makes a glob of a name that matches nothing else.
var literally = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`)

// malformed reports whether that is why a server refused to look for a glob.
func malformed(glob string, err error) bool {
	_, bad := path.Match(glob, "")
	return bad != nil && status.Code(err) == codes.InvalidArgument
}

// storedOf lists the tensors that names and globs pick, each once. One that picks
// nothing is an error.
func storedOf(ctx context.Context, cl *client.Client, names []string) ([]client.Stored, error) {
	if err := checkNames(names); err != nil {
		return nil, err
	}
	var list []client.Stored
	seen := map[string]bool{}
	var sources []string
	for _, n := range names {
		literal := func() (_ client.Stored, err error) {
			var list []client.Stored
			list, sources, err = cl.List(ctx, literally.Replace(n))
			switch {
			case err != nil:
				return client.Stored{}, err
			case len(list) == 0:
				return client.Stored{}, store.ErrNotFound
			}
			return list[0], nil
		}
		for s, err := range store.Pick(n, literal, listedBy(ctx, cl, n)) {
			switch {
			case errors.Is(err, store.ErrNotFound):
				return nil, noTensor(n, sources)
			case malformed(n, err):
				return nil, usage("%q is no name and no glob: a [ lacks its ], or a \\ the letter behind it", n)
			case err != nil:
				return nil, err
			case !seen[s.Name]:
				seen[s.Name] = true
				list = append(list, s)
			}
		}
	}
	return list, nil
}

// listedBy yields the tensors that a server lists for a glob.
func listedBy(ctx context.Context, cl *client.Client, glob string) iter.Seq2[client.Stored, error] {
	return func(yield func(client.Stored, error) bool) {
		list, _, err := cl.List(ctx, glob)
		if err != nil {
			yield(client.Stored{}, err)
			return
		}
		for _, s := range list {
			if !yield(s, nil) {
				return
			}
		}
	}
}

// missing is the error of a pull, for people if the one thing it names is not there.
func missing(err error, selections []client.Selection) error {
	if status.Code(err) != codes.NotFound || len(selections) != 1 {
		return err
	}
	kind := "tensor"
	if selections[0].Source {
		kind = "source"
	}
	return noSuch(kind, selections[0].Name)
}

func noSuch(kind, name string) error {
	return hinted{fmt.Errorf("the server has no %s %q", kind, name), "tensorferry ls lists what it has"}
}

// noTensor is noSuch for a name that may be one of the sources of the server.
func noTensor(name string, sources []string) error {
	if !slices.Contains(sources, name) {
		return noSuch("tensor", name)
	}
	return hinted{fmt.Errorf("the server has no tensor %q", name),
		fmt.Sprintf("%q is a source: pull and show take it with --source; it cannot be copied or removed", name)}
}

// checkNames is for before a server is asked: to list what no name picks is to list all.
func checkNames(names []string) error {
	if slices.Contains(names, "") {
		return usage("a NAME is empty")
	}
	return nil
}

// sourceFlags are the flags that have a server make a tensor.
type sourceFlags struct {
	source bool
	params []string
}

func (o *sourceFlags) flags(c *cobra.Command) {
	c.Flags().BoolVar(&o.source, "source", false, "NAME is a source of the server, not a tensor")
	c.Flags().StringArrayVarP(&o.params, "param", "p", nil, "parameter of the source, `key=value`; repeatable")
}

// selections are what names pick: tensors, globs or sources.
func (o *sourceFlags) selections(names []string) ([]client.Selection, error) {
	params, err := paramsOf(o.params)
	if err == nil {
		err = checkNames(names)
	}
	if err != nil {
		return nil, err
	}
	if len(params) > 0 && !o.source {
		return nil, usage("--param is for a source; add --source")
	}
	list := make([]client.Selection, len(names))
	for i, n := range names {
		list[i] = client.Selection{Name: n, Source: o.source, Params: params}
	}
	return list, nil
}

// paramsOf reads key=value.
func paramsOf(texts []string) (map[string]string, error) {
	params := map[string]string{}
	for _, text := range texts {
		k, v, ok := strings.Cut(text, "=")
		if !ok {
			return nil, usage("--param %q has no =; write key=value", text)
		}
		if _, twice := params[k]; twice {
			return nil, usage("--param %s is given twice", k)
		}
		params[k] = v
	}
	return params, nil
}

// selected are selections of one tensor each: sources as they are, of the store what
// names and globs pick.
func (o *sourceFlags) selected(ctx context.Context, cl *client.Client, names []string) ([]client.Selection, error) {
	list, err := o.selections(names)
	if err != nil || o.source {
		return list, err
	}
	stored, err := storedOf(ctx, cl, names)
	return selectionsOf(stored), err
}

// selectionsOf selects each of a list.
func selectionsOf(stored []client.Stored) []client.Selection {
	list := make([]client.Selection, len(stored))
	for i, s := range stored {
		list[i].Name = s.Name
	}
	return list
}

// readStored gives the bytes of a tensor of the server to use as they come. The
// reader keeps the last byte back until all are known to be the server's, so that
// use, if it reads to the end, never ends well with wrong ones.
func readStored(ctx context.Context, cl *client.Client, s client.Selection, use func(tensor.Desc, io.Reader) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r, w := io.Pipe()
	verdict, used := make(chan error, 1), make(chan error, 1)
	begun := false
	_, err := cl.Pull(ctx, client.PullRequest{
		Select: []client.Selection{s},
		To: func(name string, d tensor.Desc) (client.Sink, error) {
			size, err := d.Bytes()
			if begun && err == nil {
				err = fmt.Errorf("%q has become a glob: the tensor of that name was removed; run it again", s.Name)
			}
			if err != nil {
				return client.Sink{}, err
			}
			begun = true
			go func() { // ends with use, which the pipe's end brings about
				err := use(d, &heldBack{r: r, left: size, verdict: func() error { return <-verdict }})
				if err != nil {
					cancel(errUnread)
				}
				_ = r.CloseWithError(errUnread) // it never fails
				used <- err
			}()
			return client.Writer(func(tensor.Desc) (io.Writer, error) { return w, nil }), nil
		},
	})
	if !begun {
		return cmp.Or(missing(err, []client.Selection{s}), fmt.Errorf("the server sent nothing of %q", s.Name))
	}
	verdict <- err
	_ = w.CloseWithError(err) // it never fails; nil is the end
	if e := <-used; e != nil && (err == nil || errors.Is(err, errUnread)) {
		return e
	}
	return err
}

// errUnread ends the pull of a tensor whose reader gave up.
var errUnread = errors.New("nobody reads on")

// heldBack gives the last byte of a tensor only after the verdict on all of them.
type heldBack struct {
	r       io.Reader
	left    int64
	verdict func() error // nil once asked
	err     error        // the verdict
}

func (h *heldBack) Read(p []byte) (int, error) {
	switch {
	case len(p) == 0 || h.err != nil:
		return 0, h.err
	case h.left == 0:
		if err := h.judged(); err != nil {
			return 0, err
		}
		return 0, io.EOF
	case h.left > 1:
		n, err := h.r.Read(p[:min(int64(len(p)), h.left-1)])
		h.left -= int64(n)
		return n, err
	}
	var last [1]byte
	if _, err := io.ReadFull(h.r, last[:]); err != nil {
		return 0, err
	}
	if err := h.judged(); err != nil {
		return 0, err
	}
	h.left, p[0] = 0, last[0]
	return 1, nil
}

// judged waits for the verdict, once.
func (h *heldBack) judged() error {
	if h.verdict != nil {
		h.err, h.verdict = h.verdict(), nil
	}
	return h.err
}
