package moving

import (
	"cmp"
	"context"
	"errors"
	"io"
	"path"
	"strings"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/files"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// CopyOptions are the flags of cp.
type CopyOptions struct {
	Remote
	To      string
	ToFiles identity.ClientFiles
}

// Copy copies the named tensors to a name, or below a folder.
func (o *CopyOptions) Copy(ctx context.Context, names []string, to string, std files.Streams) error {
	if strings.ContainsAny(to, globs) {
		return fail.Usage("TO must not be a glob: %q", to)
	}
	from, err := o.Dial()
	if err != nil {
		return err
	}
	defer from.Close()
	target := from
	if o.To != "" {
		other := o.Remote
		other.Server = o.To
		if o.ToFiles != (identity.ClientFiles{}) { // a token of one server is not for the other
			other.TLS, other.Files = true, o.ToFiles
		}
		if target, err = other.Dial(); err != nil {
			return err
		}
		defer target.Close()
	}
	list, err := StoredOf(ctx, from, names)
	if err != nil {
		return err
	}
	if len(list) > 1 && !strings.HasSuffix(to, "/") {
		return fail.Usage("cannot copy %d tensors to one name, %q; end TO in a slash", len(list), to)
	}
	bars := files.NewProgress(std.Err, o.Quiet, false, nil)
	defer bars.End()
	called := make(map[string]string, len(list)) // old names by new name
	copies, lines := make([]string, len(list)), make([]*files.Bar, len(list))
	for i, s := range list {
		name := to
		if strings.HasSuffix(to, "/") {
			name += keptOf(names, s.Name)
		}
		if other, twice := called[name]; twice {
			return fail.Usage("%q and %q would both be copied to %q; copy them one by one", other, s.Name, name)
		}
		if err := store.CheckNew(name); err != nil {
			return fail.AsUsage(err)
		}
		if target == from && name == s.Name {
			return fail.Usage("cannot copy %q to itself", name)
		}
		called[name] = s.Name
		copies[i], lines[i] = name, bars.Tensor(name, s.Desc)
	}
	var copied []client.Summary
	for i, s := range list {
		var stored []client.Summary
		err = ReadStored(ctx, from, client.Selection{Name: s.Name}, func(d tensor.Desc, r io.Reader) (err error) {
			in := client.FromReader("", d, io.TeeReader(r, lines[i]))
			in.Name, in.Metadata = copies[i], s.Metadata
			stored, err = target.Push(ctx, client.PushRequest{Tensors: []client.Input{in}})
			if err != nil && target != from {
				err = fail.At(err, o.To)
			}
			return err
		})
		if err != nil {
			break
		}
		copied = append(copied, stored...)
	}
	bars.End()
	o.printWays(std.Err, from.Ways())
	if target != from {
		o.printWays(std.Err, target.Ways())
	}
	err = errors.Join(err, reportEvicted(ctx, target, copied, std.Err))
	return cmp.Or(err, printMoved(display.NewPrinter(std.Out, o.AsJSON), copied))
}

// keptOf returns what a copy keeps of a name: what follows a NAME with a slash, or the last part.
func keptOf(names []string, name string) string {
	for _, n := range names {
		if rest, ok := strings.CutPrefix(name, n); ok && strings.HasSuffix(n, "/") && rest != "" {
			return rest
		}
	}
	return path.Base(name)
}
