package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/glob"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

type pushOptions struct {
	remote
	input    rawInput
	all      bool
	metadata []string
}

func pushCommand() *cobra.Command {
	var o pushOptions
	c := &cobra.Command{
		Use:   "push [NAME=]FILE...",
		Short: "store tensors on a server",
		Long: `Push uploads tensors to a server's store, each under a name. When it succeeds, every
tensor is stored completely and has been checked; if the store is a folder, it is on
disk. An existing tensor of the same name is replaced atomically.

FILE is one of
  x.npy              stored as x; so is a .pt or .pth file of one tensor
  model.safetensors  its tensors are stored as model/ and their own names; .npz files, and
                     .pt files of a dict of tensors, are stored in the same way
  FILE:name          only one tensor of a .safetensors, .npz or .pt file
  FOLDER             the model in it, one or more .safetensors files; for several, their
                     .safetensors.index.json means the same
  -                  stdin, which needs a NAME
With --dtype and --shape, FILE and stdin are raw bytes.

NAME=FILE stores one tensor as NAME, and those of a whole file as NAME/ and their own
names. The metadata of a model file is stored as NAME/__metadata__, so pull 'NAME/**'
restores the file. An = may also be part of a file's name: if the file lr=0.1.npy
exists, lr=0.1.npy pushes that file.

Push prints what it has stored. If some tensors fail or have an unsupported data type,
the others are still stored; with --all, none is, and nobody ever sees some of them.
A full store refuses tensors. If the server evicts others instead (serve --store
memory:SIZE,evict=lru), push says so, and those of this push count as failed.`,
		Example: `  tensorferry push x.npy model.safetensors models/llama/
  tensorferry push experiments/7/x=x.npy
  tensorferry gen --shape 1000,1000 | tensorferry push noise=-
  tensorferry push y=y.bin --dtype float32 --shape 1000,64`,
		Args: takes(many, "FILE"),
		RunE: o.push,
	}
	o.input.flags(c)
	o.remote.flags(c)
	o.pipeFlag(c)
	c.Flags().BoolVar(&o.all, "all", false, "store all tensors together, or none")
	c.Flags().StringArrayVar(&o.metadata, "metadata", nil, "store `key=value` with each tensor, for people; repeatable")
	return c
}

func (o *pushOptions) push(c *cobra.Command, args []string) error {
	metadata, err := paramsOf("--metadata", o.metadata)
	if err := cmp.Or(o.input.check(), err); err != nil {
		return err
	}
	ctx, stderr := c.Context(), c.ErrOrStderr()
	cl, waiting, err := o.dialPipes(ctx)
	if err != nil {
		return err
	}
	defer cl.Close()
	bars := newProgress(stderr, o.quiet, false, cl.Lanes)
	defer func() { bars.end(); o.tell(stderr, cl.Ways()) }()
	var r client.PushRequest
	lines := map[string]*bar{}
	in := opener{raw: o.input, stdin: c.InOrStdin(), idle: o.cfg.InputIdle}
	var spoiled error             // of tensors that cannot be read; the others are pushed
	wholes := map[string]string{} // files that are pushed whole, by the prefix of their tensors' names
	for _, text := range args {
		name, file, below, err := parsePushed(text)
		if err != nil {
			return err
		}
		found, err := in.open(ctx, file)
		if errors.Is(err, tensorfile.ErrUnsupported) {
			spoiled = errors.Join(spoiled, err)
			continue
		}
		if err != nil {
			return neither(text, file, err)
		}
		spoiled = errors.Join(spoiled, found.errors())
		list := found.tensors
		if _, member := memberOf(file); below && member == nil {
			wholes[name+"/"] = file
		}
		if at := slices.IndexFunc(list, func(s *source) bool { return s.Name == tensorfile.MetadataName }); below && at >= 0 {
			return fmt.Errorf("%s has a tensor named %q, under which the metadata of a model file is stored; rename it, or push it as NAME=%s:%[2]s", file, tensorfile.MetadataName, file)
		}
		if beside := found.document.Encode(); beside != nil {
			d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(len(beside))}}
			list = append(list, arraySource(file+":"+tensorfile.MetadataName, tensorfile.Array{Name: tensorfile.MetadataName, Desc: d, Data: beside}))
		}
		if len(list) == 0 && len(found.unknown) == 0 {
			return fmt.Errorf("%s has no tensors", file)
		}
		for _, s := range list {
			to := name
			if below {
				to += "/" + s.Name
			}
			s.Name, s.Metadata = to, metadata
			switch err := store.CheckNew(to); {
			case err != nil && below && store.CheckName(name) == nil: // the name is in the file
				return fmt.Errorf("%s: %w", file, err)
			case err != nil:
				return usageError{err}
			}
			if _, twice := lines[to]; twice {
				return usage("two tensors would be stored as %q; choose another name for one file with NAME=FILE", to)
			}
			lines[to] = bars.tensor(to, s.Desc)
			r.Tensors = append(r.Tensors, s.Input)
		}
	}
	if len(r.Tensors) == 0 || o.all && spoiled != nil {
		return spoiled
	}
	store := cl.Push
	if o.all {
		store = cl.PutAll
	}
	r.Progress = func(p client.Progress) { lines[p.Name].reach(p.Moved) }
	stored, err := interruptible(waiting, func() ([]client.Summary, error) { return store(ctx, r) })
	bars.end()
	if err == nil {
		err = tellOthers(ctx, cl, wholes, lines, stderr)
	}
	if ctx.Err() == nil { // the server can be asked
		err = errors.Join(err, forgotten(ctx, cl, stored, stderr), spoiled)
	}
	return cmp.Or(err, printMoved(printer{c.OutOrStdout(), o.asJSON}, stored))
}

// tellOthers reports tensors under a file's prefix that are not from that file, such as
// those of an older version: a pull of the file would include them.
func tellOthers(ctx context.Context, cl *client.Client, wholes map[string]string, pushed map[string]*bar, stderr io.Writer) error {
	for prefix, file := range wholes {
		list, err := others(ctx, cl, glob.Quote(prefix)+"**", pushed)
		if err != nil {
			return err
		}
		if len(list) > 0 {
			fmt.Fprintf(stderr, "note: %q has %d tensors that are not in %s, such as %q; tensorferry rm can remove them\n", prefix, len(list), file, list[0].Name)
		}
	}
	return nil
}

// forgotten fails each tensor that was stored and has been evicted, perhaps for another one of
// the same push, and reports how many others were.
func forgotten(ctx context.Context, cl *client.Client, stored []client.Summary, stderr io.Writer) error {
	evicted, bytes := 0, int64(0)
	for _, s := range stored {
		evicted, bytes = evicted+s.Evicted, bytes+s.EvictedBytes
	}
	if evicted == 0 {
		return nil
	}
	list, _, err := cl.List(ctx, "")
	if err != nil {
		return err
	}
	there := namesOf(list)
	var gone []error
	for i, s := range stored {
		if s.Err == nil && !s.Durable && !there[s.Name] {
			stored[i].Err = &client.Error{Code: codes.ResourceExhausted, Message: fmt.Sprintf(
				"tensor %q was stored and then evicted: the store is full and evicts the least recently used tensors", s.Name)}
			gone = append(gone, stored[i].Err)
			bytes -= s.Bytes
		}
	}
	if others := evicted - len(gone); others > 0 {
		fmt.Fprintf(stderr, "note: the store is full and has evicted the least recently used tensors to make room: %d, of %s\n", others, sizeText(bytes))
	}
	if len(gone) == 0 {
		return nil
	}
	return hinted{errors.Join(gone...), "push less, or start the server with a larger --store, or without evict=lru"}
}

// parsePushed parses [NAME=]FILE. The default NAME is the file's without what it ends in, or the
// folder's. below means that each tensor is stored under NAME, a slash and its own name.
func parsePushed(text string) (name, file string, below bool, err error) {
	name, file = nameOf(text)
	path, member := memberOf(file)
	inFile := isModel(path) || holdsSeveral(path)
	switch {
	case file == "-" && name == "" && text == file:
		return "", "", false, usage("stdin has no name; use NAME=-")
	case name == "" && text != file:
		return "", "", false, usage("%q has no name before the =; use NAME=FILE", text)
	case file == "":
		return "", "", false, usage("%q has no file; use NAME=FILE", text)
	case name != "":
		if below = inFile && member == nil; below && name != "/" {
			name = strings.TrimSuffix(name, "/")
		}
		return name, file, below, nil
	}
	base := filepath.Base(path)
	if isDir(path) {
		if whole, err := filepath.Abs(path); err == nil { // also for "."
			base = filepath.Base(whole)
		}
		return base, file, true, nil
	}
	if stem, ok := strings.CutSuffix(base, tensorfile.IndexSuffix); ok {
		return stem, file, true, nil
	}
	return strings.TrimSuffix(base, filepath.Ext(base)), file, inFile, nil
}

// printMoved prints the result of each tensor.
func printMoved(out printer, list []client.Summary) error {
	moved := each(list, func(s client.Summary) storedJSON {
		j := storedJSON{Name: s.Name, Bytes: s.Bytes, Durable: s.Durable, Evicted: s.Evicted, Metadata: s.Metadata}
		if s.DType != 0 {
			j.descJSON = new(describe(s.Desc))
		}
		if s.Err != nil {
			j.Error = said(s.Err)
		} else {
			j.Digest = s.Digest.String()
		}
		return j
	})
	return out.print(moved, func(w io.Writer) {
		for _, s := range list {
			if s.Err != nil {
				continue // its error is printed
			}
			rests := cmp.Or(map[bool]string{true: "on disk"}[s.Durable], "in memory")
			fmt.Fprintf(w, "%s\t%v\t%s\t%v\t%s\n", plain(s.Name), s.Desc, sizeText(s.Bytes), s.Digest, rests)
		}
	})
}
