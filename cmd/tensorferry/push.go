package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
)

// remote are the flags of a command that moves tensors to or from a server.
type remote struct {
	server string
	codec  string
	quiet  bool
}

func (r *remote) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&r.server, "server", defaultListen, "`address` of the server: host:port or unix:/path")
	f.StringVar(&r.codec, "codec", "none", "compress chunks on their way: none or lz4")
	quietFlag(c, &r.quiet)
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
on disk.

FILE is .npy, named like the file; .safetensors, whose tensors are named like the
file, a slash and the tensor, or the one that stands behind it as :name; raw bytes
with --dtype and --shape; or "-" for stdin, which needs a NAME. A tensor of that
name that is there already is replaced at once, when the new one is whole.`,
		Example: `  tensorferry push x.npy model.safetensors
  tensorferry push experiments/7/x=x.npy
  tensorferry gen --shape 1000,1000 | tensorferry push noise=-
  tensorferry push y=y.bin --dtype float32 --shape 1000,64`,
		Args: cobra.MinimumNArgs(1),
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
	var sources []*source
	lines := map[string]*bar{}
	for _, text := range args {
		in, err := openPush(text, o.input, stdin)
		if err != nil {
			return err
		}
		defer in.Close() // at the end, when the push reads no more
		for _, s := range in.tensors {
			if slices.ContainsFunc(sources, func(other *source) bool { return other.Name == s.Name }) {
				return usage("two tensors would be called %q; write another name and = before one of the files", s.Name)
			}
			if s.title == "stdin" && slices.ContainsFunc(sources, func(other *source) bool { return other.title == "stdin" }) {
				return usage("stdin is one tensor, not two")
			}
			sources = append(sources, s)
			lines[s.Name] = bars.tensor(s.Name, s.Desc)
			r.Tensors = append(r.Tensors, s.Input)
		}
	}
	moved := map[string]int64{}
	r.Progress = func(p client.Progress) {
		lines[p.Name].add(int(p.Moved - moved[p.Name]))
		moved[p.Name] = p.Moved
	}
	var stored []client.Summary
	err = interruptible(ctx, func() (err error) {
		stored, err = cl.Push(ctx, r)
		return err
	})
	bars.end()
	for _, s := range sources {
		if e := s.atEnd(); err == nil && e != nil {
			err = fmt.Errorf("%w; what was stored is its beginning", e)
		}
	}
	if e := tellMoved(stdout, stored, o.asJSON); err == nil {
		err = e
	}
	return err
}

// openPush opens [NAME=]FILE and gives its tensors the names they are stored under.
func openPush(text string, raw rawInput, stdin io.Reader) (*inputFile, error) {
	name, file, named := strings.Cut(text, "=")
	if !named {
		name, file = "", text
	}
	if named && name == "" {
		return nil, usage("%q names nothing before the =", text)
	}
	if file == "-" && !named {
		return nil, usage("stdin has no name; write NAME=-")
	}
	if !named {
		path, _, _ := strings.Cut(file, ".safetensors:")
		name = strings.TrimSuffix(filepath.Base(path), filepath.Ext(path))
		if strings.Contains(file, ".safetensors:") {
			name = filepath.Base(path)
		}
	}
	in, err := openInput(file, raw, stdin)
	if err != nil {
		return nil, err
	}
	for _, s := range in.tensors {
		member := s.Name // in a file of several
		s.Name = name
		if member != "" && !(named && len(in.tensors) == 1 && strings.Contains(file, ".safetensors:")) {
			s.Name += "/" + member
		}
	}
	return in, nil
}

// movedJSON is a tensor of a push or a pull as --json prints it.
type movedJSON struct {
	Name    string  `json:"name"`
	DType   string  `json:"dtype,omitempty"`
	Shape   []int64 `json:"shape,omitempty"`
	Bytes   int64   `json:"bytes"`
	Digest  string  `json:"digest,omitempty"`
	Durable bool    `json:"durable"`
	Error   string  `json:"error,omitempty"`
}

// tellMoved prints how each tensor of a push ended.
func tellMoved(w io.Writer, list []client.Summary, asJSON bool) error {
	if asJSON {
		out := make([]movedJSON, 0, len(list))
		for _, s := range list {
			j := movedJSON{Name: s.Name, Shape: s.Shape, Bytes: s.Bytes, Durable: s.Durable}
			if s.Err != nil {
				j.Error = s.Err.Error()
			} else {
				j.DType, j.Digest = s.DType.String(), s.Digest.String()
			}
			out = append(out, j)
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
		fmt.Fprintf(t, "%s\t%v\t%s\t%v\t%s\n", s.Name, s.Desc, sizeText(s.Bytes), s.Digest, rests)
	}
	return t.Flush()
}
