package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/tensor"
)

// cpOptions are the flags of cp.
type cpOptions struct {
	remote
	to     string
	asJSON bool
}

func cpCommand() *cobra.Command {
	var o cpOptions
	c := &cobra.Command{
		Use:   "cp NAME... TO",
		Short: "copy tensors on a server, or from one to another",
		Long: `Cp copies tensors of a server's store to another name, or with --to to another
server. The bytes come here and go on, a few chunks at a time, and are checked both
ways; nothing is stored under the new name unless all of it is right.

NAME may be a glob, as for pull. If TO ends in a slash, or there are several
tensors, each is stored under TO and the last part of its name.`,
		Example: `  tensorferry cp x backup/x
  tensorferry cp 'model/*' model-2/
  tensorferry cp x x --to 127.0.0.1:50055`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			return cp(c.Context(), args[:len(args)-1], args[len(args)-1], o, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	o.flags(c)
	c.Flags().StringVar(&o.to, "to", "", "`address` of the server to copy to (default the one to copy from)")
	jsonFlag(c, &o.asJSON)
	return c
}

func cp(ctx context.Context, names []string, to string, o cpOptions, stdout, stderr io.Writer) error {
	from, err := o.dial()
	if err != nil {
		return err
	}
	defer from.Close()
	target := from
	if o.to != "" {
		if target, err = dial(o.to, o.codec); err != nil {
			return err
		}
		defer target.Close()
	}
	list, err := storedOf(ctx, from, names)
	if err != nil {
		return err
	}
	if len(list) > 1 && !strings.HasSuffix(to, "/") {
		return usage("%d tensors can not all be called %q; end it in a slash", len(list), to)
	}
	bars := newProgress(stderr, o.quiet)
	defer bars.end()
	var copied []client.Summary
	for _, s := range list {
		name := to
		if strings.HasSuffix(to, "/") {
			name += path.Base(s.Name)
		}
		if target == from && name == s.Name {
			return usage("%q would be copied onto itself", name)
		}
		var sum client.Summary
		err := readStored(ctx, from, s, func(d tensor.Desc, r io.Reader) error {
			in := client.FromReader("", d, bars.tensor(name, d).reader(r))
			in.Name = name
			stored, err := target.Push(ctx, client.PushRequest{Tensors: []client.Input{in}})
			if err == nil {
				sum = stored[0]
			}
			return err
		})
		if err != nil {
			return err
		}
		copied = append(copied, sum)
	}
	bars.end()
	return tellMoved(stdout, copied, o.asJSON)
}

// readStored gives the bytes of a stored tensor to use as they come. The reader
// keeps the last byte back until all are known to be the server's, so that use,
// if it reads to the end, never ends well with wrong ones.
func readStored(ctx context.Context, cl *client.Client, s client.Stored, use func(tensor.Desc, io.Reader) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r, w := io.Pipe()
	held := &heldBack{r: r, left: s.Bytes, verdict: make(chan error, 1)}
	used := make(chan error, 1)
	go func() { // ends with use, which the pipe's end brings about
		err := use(s.Desc, held)
		_ = r.CloseWithError(errors.Join(errUnread, err)) // it never fails
		used <- err
	}()
	_, err := cl.Pull(ctx, client.PullRequest{
		Select: []client.Selection{{Name: s.Name}},
		To: func(name string, d tensor.Desc) (client.Sink, error) {
			if !d.Equal(s.Desc) {
				return client.Sink{}, fmt.Errorf("tensor %q has changed since it was listed; run it again", name)
			}
			return client.Writer(func(tensor.Desc) (io.Writer, error) { return w, nil }), nil
		},
	})
	held.verdict <- err
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
	verdict chan error
}

func (h *heldBack) Read(p []byte) (int, error) {
	switch {
	case len(p) == 0:
		return 0, nil
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
	if h.verdict == nil {
		return nil
	}
	err := <-h.verdict
	h.verdict = nil
	return err
}
