package main

import (
	"cmp"
	"errors"
	"io"
	"path"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

type cpOptions struct {
	remote
	to      string
	toFiles identity.ClientFiles
}

func cpCommand() *cobra.Command {
	var o cpOptions
	c := &cobra.Command{
		Use:   "cp NAME... TO",
		Short: "copy tensors within a server or to another server",
		Long: `Cp copies tensors in a server's store to other names or, with --to, to another
server. The bytes pass through this machine a few chunks at a time. They are checked
on the way in and on the way out, and a copy is stored only if it is complete and
correct. Cp stops at the first tensor that fails, and prints the copies it has made.

NAME may be a glob, as for pull. If TO ends in a slash, as it must for several
tensors, the last part of each name is appended to it. If NAME ends in a slash, too,
everything after that slash is appended: cp model/ copy/ copies model/a/b to
copy/a/b.

The flags that identify you to the server are for both, unless one of --to-ca,
--to-cert, --to-key, --to-token and --to-server-name is given: then only those are
for the server of --to.`,
		Example: `  tensorferry cp x backup/x
  tensorferry cp model/ model-2/
  tensorferry cp x y --to 127.0.0.1:50055`,
		Args: takes(many, "NAME", "TO"),
		RunE: o.cp,
	}
	o.flags(c)
	c.Flags().StringVar(&o.to, "to", "", "`address` of the server to copy to (default the same server)")
	for _, s := range fileFlags(&o.toFiles) {
		c.Flags().StringVar(s.value, "to-"+s.flag, "", "for --to: "+s.text)
	}
	return c
}

func (o *cpOptions) cp(c *cobra.Command, args []string) error {
	ctx, names, to := c.Context(), args[:len(args)-1], args[len(args)-1]
	if strings.ContainsAny(to, globs) {
		return usage("TO must not be a glob: %q", to)
	}
	from, err := o.dial()
	if err != nil {
		return err
	}
	defer from.Close()
	target := from
	if o.to != "" {
		other := o.remote
		other.server = o.to
		if o.toFiles != (identity.ClientFiles{}) { // a token of one server is not for the other
			other.tls, other.files = true, o.toFiles
		}
		if target, err = other.dial(); err != nil {
			return err
		}
		defer target.Close()
	}
	list, err := storedOf(ctx, from, names)
	if err != nil {
		return err
	}
	if len(list) > 1 && !strings.HasSuffix(to, "/") {
		return usage("cannot copy %d tensors to one name, %q; end TO in a slash", len(list), to)
	}
	bars := newProgress(c.ErrOrStderr(), o.quiet, false, nil)
	defer bars.end()
	called := make(map[string]string, len(list)) // old names by new name
	copies, lines := make([]string, len(list)), make([]*bar, len(list))
	for i, s := range list {
		name := to
		if strings.HasSuffix(to, "/") {
			name += below(names, s.Name)
		}
		if other, twice := called[name]; twice {
			return usage("%q and %q would both be copied to %q; copy them one by one", other, s.Name, name)
		}
		if err := store.CheckNew(name); err != nil {
			return usageError{err}
		}
		if target == from && name == s.Name {
			return usage("cannot copy %q to itself", name)
		}
		called[name] = s.Name
		copies[i], lines[i] = name, bars.tensor(name, s.Desc)
	}
	var copied []client.Summary
	for i, s := range list {
		var stored []client.Summary
		err = readStored(ctx, from, client.Selection{Name: s.Name}, func(d tensor.Desc, r io.Reader) (err error) {
			in := client.FromReader("", d, io.TeeReader(r, lines[i]))
			in.Name, in.Metadata = copies[i], s.Metadata
			stored, err = target.Push(ctx, client.PushRequest{Tensors: []client.Input{in}})
			if err != nil && target != from {
				err = toError{err, o.to}
			}
			return err
		})
		if err != nil {
			break
		}
		copied = append(copied, stored...)
	}
	bars.end()
	o.tell(c.ErrOrStderr(), from.Ways())
	if target != from {
		o.tell(c.ErrOrStderr(), target.Ways())
	}
	err = errors.Join(err, forgotten(ctx, target, copied, c.ErrOrStderr()))
	return cmp.Or(err, printMoved(printer{c.OutOrStdout(), o.asJSON}, copied))
}

// below returns what a copy keeps of a name: what follows a NAME with a slash, or the last part.
func below(names []string, name string) string {
	for _, n := range names {
		if rest, ok := strings.CutPrefix(name, n); ok && strings.HasSuffix(n, "/") && rest != "" {
			return rest
		}
	}
	return path.Base(name)
}

// toError is an error of the server of --to, not of --server.
type toError struct {
	error
	server string
}

func (e toError) Error() string { return e.server + ": " + e.error.Error() }

func (e toError) Unwrap() error { return e.error }
