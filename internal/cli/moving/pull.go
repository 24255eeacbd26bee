package moving

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/files"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// PullOptions are the flags of pull.
type PullOptions struct {
	Remote
	SourceFlags
	Output, Prefix string
	Raw            bool
}

// Pull writes the named tensors of a server to a file or a folder.
func (o *PullOptions) Pull(ctx context.Context, names []string, std files.Streams) error {
	selections, err := o.Selections(names)
	if err != nil {
		return err
	}
	whole := strings.HasSuffix(o.Output, tensorfile.FileSuffix) || files.IsTorch(o.Output) && (len(names) != 1 || isGlob(names[0]))
	folder := strings.HasSuffix(o.Output, "/") || files.IsDir(o.Output)
	several := (whole || folder) && !o.Source
	switch {
	case o.AsJSON && o.Output == "-":
		return fail.Usage(files.JSONOutput)
	case o.Prefix != "" && (!whole || o.Source):
		return fail.Usage("--prefix needs a .safetensors file as --output, or a .pt file of several tensors, and no --source")
	case len(selections) != 1 && !several:
		return oneTensorOnly(o.Output)
	}
	stderr := std.Err
	cl, waiting, err := o.dialPipes(ctx)
	if err != nil {
		return err
	}
	defer cl.Close()
	var out files.Output
	var bars *files.ProgressBars
	var writer func(name string, d tensor.Desc) (io.Writer, error)
	if several && !whole {
		out, err = files.NewFolderTarget(o.Output)
	} else {
		var t *files.Target
		t, err = files.NewTarget(o.Output, o.Raw, std.Out)
		out, writer = t, func(name string, d tensor.Desc) (io.Writer, error) { return t.Open(name, d, bars) }
	}
	if err != nil {
		return err
	}
	defer out.Abandon()
	bars = files.NewProgress(stderr, o.Quiet, false, cl.Lanes)
	defer func() { bars.End(); o.printWays(stderr, cl.Ways()) }()

	var got []client.Summary
	if !o.Source {
		list, err := StoredOf(ctx, cl, names)
		if err != nil {
			return err
		}
		if several {
			if err := noteLeftOut(ctx, cl, names, list, stderr); err != nil {
				return err
			}
			var beside tensorfile.Document // of the prefix's model file
			prefix := SharedPrefix(names)
			if i := slices.IndexFunc(list, func(s client.Stored) bool { return s.Name == prefix+tensorfile.MetadataName }); i >= 0 {
				if prefix == "" && len(list) > 1 { // of no model: an older server has it
					fmt.Fprintf(stderr, "note: %q is left out: files reserve that name; pull it alone, or remove it\n", list[i].Name)
				} else if beside, got, err = PullDocument(ctx, cl, list[i]); err != nil {
					return err
				}
				list = slices.Delete(list, i, i+1)
			}
			if writer, err = o.Begin(out, list, prefix, beside, bars); err != nil {
				return err
			}
		} else if len(list) != 1 {
			list = slices.DeleteFunc(list, func(s client.Stored) bool { return IsDocument(s) && !slices.Contains(names, s.Name) })
			if len(list) != 1 {
				return oneTensorOnly(o.Output)
			}
		}
		selections = SelectionsOf(list)
	}
	summaries, err := files.Interruptible(waiting, func() ([]client.Summary, error) { return pullTo(ctx, cl, selections, writer) })
	got = append(got, summaries...)
	if err == nil {
		err = out.Commit()
	}
	if err != nil || !o.AsJSON {
		return err
	}
	bars.End()
	return printMoved(display.NewPrinter(std.Out, true), got)
}

// Begin begins an output of the listed tensors, and returns what returns the writer of each.
// In a file, --prefix replaces the prefix of names.
func (o *PullOptions) Begin(out files.Output, list []client.Stored, prefix string, beside tensorfile.Document, bars *files.ProgressBars) (func(name string, d tensor.Desc) (io.Writer, error), error) {
	writers, err := out.Begin(display.Each(list, func(s client.Stored) tensorfile.Entry {
		name := s.Name
		if rest, ok := strings.CutPrefix(name, prefix); ok {
			name = o.Prefix + rest
		}
		return tensorfile.Entry{Name: name, Desc: s.Desc}
	}), beside)
	if err != nil {
		return nil, err
	}
	byName := make(map[string]*files.TensorWriter, len(list))
	for i, s := range list {
		byName[s.Name] = writers[i]
		writers[i].Bar = bars.Tensor(s.Name, s.Desc)
	}
	return func(name string, d tensor.Desc) (io.Writer, error) {
		w, ok := byName[name]
		if !ok || !w.Desc.Equal(d) {
			return nil, fmt.Errorf(files.Changed, name)
		}
		return w, nil
	}, nil
}

func oneTensorOnly(output string) error {
	return fail.Usage("--output %s takes one tensor; use a .safetensors or .pt file for several", output)
}

// SharedPrefix returns the folder that all names share: model/ for model/*, and none for x.
func SharedPrefix(names []string) (shared string) {
	for i, n := range names {
		if at := strings.IndexAny(n, globs+`\`); at >= 0 {
			n = n[:at]
		}
		folder := n[:strings.LastIndexByte(n, '/')+1]
		if i == 0 {
			shared = folder
		}
		for !strings.HasPrefix(folder, shared) {
			shared = shared[:strings.LastIndexByte(strings.TrimSuffix(shared, "/"), '/')+1]
		}
	}
	return shared
}

// noteLeftOut reports tensors that a glob such as model/* does not match because their names
// have more slashes: they would be missing from a model file.
func noteLeftOut(ctx context.Context, cl *client.Client, names []string, list []client.Stored, stderr io.Writer) error {
	have := namesOf(list)
	for _, n := range names {
		if !strings.HasSuffix(n, "/*") {
			continue
		}
		rest, err := others(ctx, cl, n+"*", have)
		if err != nil {
			return err
		}
		if len(rest) > 0 {
			fmt.Fprintf(stderr, "note: %q leaves out %d tensors such as %q; use %q to include them\n", n, len(rest), rest[0].Name, n+"*")
		}
	}
	return nil
}
