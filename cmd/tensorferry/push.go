package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// remote are the flags of a command that moves tensors to or from a server.
type remote struct {
	server string
	codec  string
	quiet  bool
}

func (r *remote) flags(c *cobra.Command) {
	serverFlag(c, &r.server)
	codecFlag(c, &r.codec)
	quietFlag(c, &r.quiet)
}

// serverFlag adds --server, which every command has that talks to one.
func serverFlag(c *cobra.Command, to *string) {
	c.Flags().StringVar(to, "server", cmp.Or(os.Getenv(serverEnv), defaultListen), "`address` of the server: host:port or unix:/path; also "+serverEnv)
	c.Flag("server").DefValue = defaultListen // --help says the same everywhere
}

func codecFlag(c *cobra.Command, to *string) {
	c.Flags().StringVar(to, "codec", codec.None.String(), "compress chunks on their way: none or lz4")
	complete(c, "codec", []string{codec.None.String(), codec.LZ4.String()})
}

// dial connects to the server; the caller closes the client.
func (r *remote) dial() (*client.Client, error) { return dial(r.server, r.codec) }

func dial(server, codecName string) (*client.Client, error) {
	k, err := codec.ParseCodec(codecName)
	if err != nil {
		return nil, usage("--codec %s: there are none and lz4", codecName)
	}
	cl, err := client.Dial(server, client.Config{Codec: k})
	if err != nil {
		return nil, usageError{err}
	}
	return cl, nil
}

// pushOptions are the flags of push.
type pushOptions struct {
	remote
	input  rawInput
	asJSON bool
}

func pushCommand() *cobra.Command {
	var o pushOptions
	c := &cobra.Command{
		Use:   "push [NAME=]FILE...",
		Short: "store tensors on a server",
		Long: `Push uploads tensors into the store of a server, each under a name. When it ends
well every tensor is there, whole and checked; where the store is a folder, it is
on disk. A tensor that is there already is replaced at once, when the new one is
whole.

FILE is .npy; .safetensors, with :name behind it for one of its tensors; raw bytes
with --dtype and --shape; or "-" for stdin, which needs a NAME. Without a NAME the
tensor of x.npy is called x, and those of model.safetensors model/ and their own
name; NAME=model.safetensors calls them NAME/ and their own name. If there is a file
whose name is the whole argument, = and all, it is that one.

What was stored is printed. If some tensors fail, the others are stored all the
same. A store in memory that is full forgets what was used longest ago; if it has
forgotten tensors of this push for its later ones, they count as failed.`,
		Example: `  tensorferry push x.npy model.safetensors
  tensorferry push experiments/7/x=x.npy
  tensorferry gen --shape 1000,1000 | tensorferry push noise=-
  tensorferry push y=y.bin --dtype float32 --shape 1000,64`,
		Args: takes(many, "FILE"),
		RunE: func(c *cobra.Command, args []string) error {
			return push(c.Context(), args, o, c.InOrStdin(), c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	o.input.flags(c)
	o.flags(c)
	jsonFlag(c, &o.asJSON)
	return c
}

func push(ctx context.Context, args []string, o pushOptions, stdin io.Reader, stdout, stderr io.Writer) error {
	if err := o.input.check(); err != nil {
		return err
	}
	cl, err := o.dial()
	if err != nil {
		return err
	}
	defer cl.Close()
	bars := newProgress(stderr, o.quiet)
	defer bars.end()
	var r client.PushRequest
	lines := map[string]*bar{}
	stdinTaken := false
	for _, text := range args {
		p, err := parsePushed(text)
		if err != nil {
			return err
		}
		if p.file == "-" {
			if stdinTaken {
				return usage("stdin is one tensor, not two")
			}
			stdinTaken = true
		}
		// What is mapped stays so: a push that is interrupted may still read it.
		in, err := p.open(ctx, o.input, stdin)
		if err != nil {
			return neither(text, p.file, text != p.file, err)
		}
		for _, s := range in.tensors {
			if err := store.CheckName(s.Name); err != nil {
				return usageError{err}
			}
			if _, twice := lines[s.Name]; twice {
				return usage("two tensors would be called %q; write another name and = before one of the files", s.Name)
			}
			lines[s.Name] = bars.tensor(s.Name, s.Desc)
			r.Tensors = append(r.Tensors, s.Input)
		}
	}
	moved := map[string]int64{}
	r.Progress = func(p client.Progress) {
		lines[p.Name].add(int(p.Moved - moved[p.Name]))
		moved[p.Name] = p.Moved
	}
	ended := make(chan []client.Summary, 1)
	err = interruptible(ctx, func() error {
		stored, err := cl.Push(ctx, r)
		ended <- stored
		return err
	})
	bars.end()
	if ctx.Err() != nil {
		return err
	}
	stored := <-ended
	err = errors.Join(err, forgotten(ctx, cl, stored))
	if e := tellMoved(stdout, stored, o.asJSON); err == nil {
		err = e
	}
	return err
}

// forgotten looks whether what was stored is there yet: a store in memory that is full
// forgets what was used longest ago, and so the first of many tensors for the last.
// Those that are gone have failed, each with an error of its own.
func forgotten(ctx context.Context, cl *client.Client, stored []client.Summary) error {
	mayGo := map[string]*client.Summary{}
	for i := range stored {
		if s := &stored[i]; s.Err == nil && !s.Durable {
			mayGo[s.Name] = s
		}
	}
	if len(mayGo) < 2 {
		return nil
	}
	list, _, err := cl.List(ctx, "")
	if err != nil {
		return err
	}
	for _, s := range list {
		delete(mayGo, s.Name)
	}
	var gone []error
	for _, name := range slices.Sorted(maps.Keys(mayGo)) {
		err := &client.Error{Code: codes.ResourceExhausted, Message: fmt.Sprintf(
			"tensor %q was stored and is gone again: the store is in memory, and full, and forgets what was used longest ago", name)}
		mayGo[name].Err = err
		gone = append(gone, err)
	}
	if len(gone) == 0 {
		return nil
	}
	return hinted{errors.Join(gone...), "push less, or start the server with a larger --store memory:SIZE, or with a folder, which forgets nothing"}
}

// pushed is [NAME=]FILE.
type pushed struct {
	name, file string
	exact      bool // the file's one tensor is called name
}

// parsePushed reads it. Without a NAME it is the file's: x of x.npy, model of
// model.safetensors and of one tensor of it.
func parsePushed(text string) (pushed, error) {
	name, file, named := nameOf(text)
	path, _, member := strings.Cut(file, ".safetensors:")
	switch {
	case file == "-" && !named:
		return pushed{}, usage("stdin has no name; write NAME=-")
	case named && name == "":
		return pushed{}, usage("%q has no name before the =", text)
	case file == "":
		return pushed{}, usage("%q has no file", text)
	case named:
		return pushed{name, file, member || !strings.HasSuffix(file, ".safetensors")}, nil
	case member:
		return pushed{filepath.Base(path), file, false}, nil
	}
	base := filepath.Base(path)
	return pushed{strings.TrimSuffix(base, filepath.Ext(base)), file, !strings.HasSuffix(file, ".safetensors")}, nil
}

// open opens the file and gives its tensors the names they are stored under: one of
// several is called after the file, a slash and its own name.
func (p pushed) open(ctx context.Context, raw rawInput, stdin io.Reader) (*inputFile, error) {
	in, err := openInput(ctx, p.file, raw, stdin)
	if err != nil {
		return nil, err
	}
	for _, s := range in.tensors {
		if p.exact {
			s.forCall("", p.name)
		} else {
			s.forCall("", p.name+"/"+s.Name)
		}
	}
	return in, nil
}

// movedJSON is a tensor of a push, a pull or a copy as --json prints it.
type movedJSON struct {
	Name    string       `json:"name"`
	DType   string       `json:"dtype,omitempty"`
	Shape   tensor.Shape `json:"shape,omitzero"`
	Bytes   int64        `json:"bytes"`
	Digest  string       `json:"digest,omitempty"`
	Durable bool         `json:"durable"`
	Error   string       `json:"error,omitempty"`
}

// tellMoved prints how each tensor ended.
func tellMoved(w io.Writer, list []client.Summary, asJSON bool) error {
	if asJSON {
		out := make([]movedJSON, len(list))
		for i, s := range list {
			j := movedJSON{Name: s.Name, Bytes: s.Bytes, Durable: s.Durable}
			if s.DType != 0 {
				j.DType, j.Shape = s.DType.String(), append(tensor.Shape{}, s.Shape...)
			}
			if s.Err != nil {
				j.Error = said(s.Err)
			} else {
				j.Digest = s.Digest.String()
			}
			out[i] = j
		}
		return writeJSON(w, out)
	}
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	for _, s := range list {
		if s.Err != nil {
			continue // the error says it
		}
		rests := "in memory"
		if s.Durable {
			rests = "on disk"
		}
		fmt.Fprintf(t, "%s\t%v\t%s\t%v\t%s\n", plain(s.Name), s.Desc, sizeText(s.Bytes), s.Digest, rests)
	}
	return t.Flush()
}
