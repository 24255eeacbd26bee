package moving

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/files"
	"github.com/tensorferry/tensorferry/internal/glob"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// PushOptions are the flags of push.
type PushOptions struct {
	Remote
	Input    files.RawInput
	All      bool
	Metadata []string
}

// Push stores the tensors of files.
func (o *PushOptions) Push(ctx context.Context, args []string, std files.Streams) error {
	metadata, err := paramsOf("--metadata", o.Metadata)
	if err := cmp.Or(o.Input.Check(), err); err != nil {
		return err
	}
	stderr := std.Err
	cl, waiting, err := o.dialPipes(ctx)
	if err != nil {
		return err
	}
	defer cl.Close()
	bars := files.NewProgress(stderr, o.Quiet, false, cl.Lanes)
	defer func() { bars.End(); o.printWays(stderr, cl.Ways()) }()
	var r client.PushRequest
	lines := map[string]*files.Bar{}
	in := files.Opener{Raw: o.Input, Stdin: std.In, Idle: o.Cfg.InputIdle}
	var spoiled error             // of tensors that cannot be read; the others are pushed
	wholes := map[string]string{} // files that are pushed whole, by the prefix of their tensors' names
	for _, text := range args {
		name, file, given, err := parsePushed(text)
		if err != nil {
			return err
		}
		found, err := in.Open(ctx, file)
		if errors.Is(err, tensorfile.ErrUnsupported) {
			spoiled = errors.Join(spoiled, err)
			continue
		}
		if err != nil {
			return files.HintMissing(text, file, err)
		}
		spoiled = errors.Join(spoiled, found.Errors())
		list := found.Tensors
		below := found.Named && (found.Whole || !given) // under the name, a slash and its own
		if below && name != "/" {
			name = strings.TrimSuffix(name, "/")
		}
		if below && found.Whole {
			wholes[name+"/"] = file
		}
		if at := slices.IndexFunc(list, func(s *files.Source) bool { return s.Name == tensorfile.MetadataName }); below && at >= 0 {
			return fmt.Errorf("%s has a tensor named %q, under which the metadata of a model file is stored; rename it, or push it as NAME=%s:%[2]s", file, tensorfile.MetadataName, file)
		}
		if beside := found.Document.Encode(); beside != nil {
			d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(len(beside))}}
			list = append(list, files.ArraySource(file+":"+tensorfile.MetadataName, tensorfile.Array{Name: tensorfile.MetadataName, Desc: d, Data: beside}))
		}
		if len(list) == 0 && len(found.Unknown) == 0 {
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
				return fail.In(file, err)
			case err != nil:
				return fail.AsUsage(err)
			}
			if _, twice := lines[to]; twice {
				return fail.Usage("two tensors would be stored as %q; choose another name for one file with NAME=FILE", to)
			}
			lines[to] = bars.Tensor(to, s.Desc)
			r.Tensors = append(r.Tensors, s.Input)
		}
	}
	if len(r.Tensors) == 0 || o.All && spoiled != nil {
		return spoiled
	}
	store := cl.Push
	if o.All {
		store = cl.PutAll
	}
	r.Progress = func(p client.Progress) { lines[p.Name].Set(p.Moved) }
	stored, err := files.Interruptible(waiting, func() ([]client.Summary, error) { return store(ctx, r) })
	bars.End()
	if err == nil {
		err = noteOthers(ctx, cl, wholes, lines, stderr)
	}
	if ctx.Err() == nil { // the server can be asked
		err = errors.Join(err, reportEvicted(ctx, cl, stored, stderr), spoiled)
	}
	return cmp.Or(err, printMoved(display.NewPrinter(std.Out, o.AsJSON), stored))
}

// noteOthers reports tensors under a file's prefix that are not from that file, such as
// those of an older version: a pull of the file would include them.
func noteOthers(ctx context.Context, cl *client.Client, wholes map[string]string, pushed map[string]*files.Bar, stderr io.Writer) error {
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

// reportEvicted fails each tensor that was stored and has been evicted, perhaps for another one of
// the same push, and reports how many others were.
func reportEvicted(ctx context.Context, cl *client.Client, stored []client.Summary, stderr io.Writer) error {
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
		fmt.Fprintf(stderr, "note: the store is full and has evicted the least recently used tensors to make room: %d, of %s\n", others, display.Size(bytes))
	}
	if len(gone) == 0 {
		return nil
	}
	return fail.Hinted(errors.Join(gone...), "push less, or start the server with a larger --store, or without evict=lru")
}

// parsePushed parses [NAME=]FILE. If NAME is not given, it is the file's without what it ends in,
// or the folder's.
func parsePushed(text string) (name, file string, given bool, err error) {
	name, file = files.NameOf(text)
	switch {
	case file == "-" && name == "" && text == file:
		return "", "", false, fail.Usage("stdin has no name; use NAME=-")
	case name == "" && text != file:
		return "", "", false, fail.Usage("%q has no name before the =; use NAME=FILE", text)
	case file == "":
		return "", "", false, fail.Usage("%q has no file; use NAME=FILE", text)
	case name != "":
		return name, file, true, nil
	}
	path, _ := files.MemberOf(file)
	base := filepath.Base(path)
	if files.IsDir(path) {
		if whole, err := filepath.Abs(path); err == nil { // also for "."
			base = filepath.Base(whole)
		}
		return base, file, false, nil
	}
	if stem, ok := strings.CutSuffix(base, tensorfile.IndexSuffix); ok {
		return stem, file, false, nil
	}
	return strings.TrimSuffix(base, filepath.Ext(base)), file, false, nil
}

// printMoved prints the result of each tensor.
func printMoved(out display.Printer, list []client.Summary) error {
	moved := display.Each(list, func(s client.Summary) StoredJSON {
		j := StoredJSON{Name: s.Name, Bytes: s.Bytes, Durable: s.Durable, Evicted: s.Evicted, Metadata: s.Metadata}
		if s.DType != 0 {
			j.Desc = new(display.Describe(s.Desc))
		}
		if s.Err != nil {
			j.Error = fail.Text(s.Err)
		} else {
			j.Digest = s.Digest.String()
		}
		return j
	})
	return out.Print(moved, func(w io.Writer) {
		for _, s := range list {
			if s.Err != nil {
				continue // its error is printed
			}
			rests := cmp.Or(map[bool]string{true: "on disk"}[s.Durable], "in memory")
			fmt.Fprintf(w, "%s\t%v\t%s\t%v\t%s\n", display.Plain(s.Name), s.Desc, display.Size(s.Bytes), s.Digest, rests)
		}
	})
}
