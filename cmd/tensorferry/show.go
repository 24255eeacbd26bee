package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/elements"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

const (
	showColumns = 40          // maximum number of bins in a histogram
	leastBar    = 16 << 20    // smallest tensor with a progress bar, in bytes
	sliceHead   = 100         // elements of a slice that are printed by default
	headColumns = 10          // maximum number of elements per line
	ramp        = " ▁▂▃▄▅▆▇█" // draws a bin of a histogram, from none to many elements
)

type showOptions struct {
	input  rawInput
	access // if its server is empty, show reads files
	sourceFlags
	asJSON, stats, quiet bool
	slice                string
	head                 int
}

func showCommand() *cobra.Command {
	var o showOptions
	c := &cobra.Command{
		Use:   "show FILE... | show --server ADDRESS NAME...",
		Short: "show what tensors contain: range, mean, NaN, a histogram",
		Long: `Show prints the data type, shape and size of tensors; the minimum, maximum, mean and
population standard deviation of their finite elements; the number of zero, NaN and
infinite elements; and a histogram with equal bins from minimum to maximum. Complex
numbers count by their magnitude, bool as 0 and 1. Show reads each tensor once and
never holds a whole one in memory.

FILE is .npy, .npz, .pt or .pth, a model, raw bytes with --dtype and --shape, or "-" for
stdin. FILE:name is one tensor of a .npz file or of a model. A model is a .safetensors
file, the .safetensors.index.json of several, a folder with one of these, or a .pt file
of a dict of tensors; show lists its metadata and tensors, and reads the tensors only
with --stats, --head or --slice. Of a .pt file nothing is executed: what holds more than
tensors, such as an optimizer's state, is refused.

With --server, NAME is a tensor in the server's store or a glob, as for pull, or, with
--source, a source.

--head N also prints the first N elements, with the index of the first one on each
line. --slice shows only a part of each tensor, with its first 100 elements unless
--head says otherwise. A slice is written as in NumPy, with positive steps: an index
or start:stop:step for each axis, separated by commas. A negative index counts from
the end, and ... stands for all axes that are not given.`,
		Example: `  tensorferry show x.npy
  tensorferry show weights.safetensors
  tensorferry show weights.safetensors:layer.0.bias --json
  tensorferry show x.npy --head 20
  tensorferry show images.npy --slice 0,:,::2
  tensorferry gen --shape 1000000 | tensorferry show -
  tensorferry show y.bin --dtype float32 --shape 1000,64
  tensorferry show --server 127.0.0.1:50051 'model/*'`,
		Args: takes(many, "FILE (NAME with --server)"),
		RunE: o.show,
	}
	o.input.flags(c)
	c.Flags().StringVar(&o.server, "server", "", "show tensors of the server at this `address`, not files")
	o.identityFlags(c)
	o.waitFlags(c)
	o.sourceFlags.flags(c)
	jsonFlag(c, &o.asJSON)
	countsVar(c.Flags(), &o.head, "head", 0, 0, math.MaxInt32, "also print the first `N` elements")
	c.Flags().StringVar(&o.slice, "slice", "", "show only a `part` of each tensor, such as 0,:,1:10:2")
	c.Flags().BoolVar(&o.stats, "stats", false, "also read the tensors of a model file")
	quietFlag(c, &o.quiet)
	return c
}

func (o *showOptions) show(c *cobra.Command, names []string) error {
	ctx, stdout, stderr := c.Context(), c.OutOrStdout(), c.ErrOrStderr()
	if err := o.input.check(); err != nil {
		return err
	}
	listing := o.slice == "" && !o.stats && !c.Flag("head").Changed // of model files
	if o.slice != "" && !c.Flag("head").Changed {
		o.head = sliceHead
	}
	listed := []fmt.Stringer{}
	found := func(s fmt.Stringer) error { // what show prints about a tensor or a model file
		if o.asJSON {
			listed = append(listed, s)
			return nil
		}
		_, err := io.WriteString(stdout, s.String())
		return err
	}
	var err error
	switch {
	case o.server == "" && c.Flag("server").Changed:
		return usage("--server must not be empty")
	case o.server != "" && o.input.given():
		return usage("--dtype and --shape are for raw bytes in a file; omit them with --server")
	case o.server != "":
		err = o.showStored(ctx, names, stderr, found)
	case o.source || len(o.params) > 0:
		return usage("--source and --param need --server")
	default:
		in := opener{raw: o.input, stdin: c.InOrStdin()}
		for _, file := range names {
			if err = o.showFile(ctx, file, &in, listing, stderr, found); err != nil {
				break
			}
		}
	}
	if err == nil && o.asJSON {
		err = writeJSON(stdout, listed)
	}
	return err
}

// showStored passes each named tensor of a server to found.
func (o *showOptions) showStored(ctx context.Context, names []string, stderr io.Writer, found func(fmt.Stringer) error) error {
	list, err := o.selections(names)
	if err != nil {
		return err
	}
	cl, err := o.dial()
	if err != nil {
		return err
	}
	defer cl.Close()
	stored := make([]client.Stored, len(list)) // zero for sources
	if !o.source {
		if stored, err = storedOf(ctx, cl, names); err != nil {
			return err
		}
		list = selectionsOf(stored)
	}
	for i, s := range list {
		var what fmt.Stringer
		if isDocument(stored[i]) && stored[i].Bytes <= shownDocument {
			if d, _, err := pullDocument(ctx, cl, stored[i]); err == nil {
				what = described(s.Name, d)
			}
		}
		if what == nil {
			err = readStored(ctx, cl, s, func(d tensor.Desc, r io.Reader) error {
				seen, err := o.look(ctx, s.Name, d, r, stderr)
				if err == nil {
					seen.Metadata, what = stored[i].Metadata, seen
				}
				return err
			})
		}
		if err == nil {
			err = found(what)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// showFile passes each tensor of a file to found. Listing does not read those of a model.
func (o *showOptions) showFile(ctx context.Context, file string, opener *opener, listing bool, stderr io.Writer, found func(fmt.Stringer) error) error {
	in, err := opener.open(ctx, file)
	if err != nil {
		return err
	}
	_, member := memberOf(file)
	whole := member == nil && !o.input.given() && isModel(file)
	if whole && (in.document.Encode() != nil || len(in.tensors)+len(in.unknown) == 0) {
		if err := found(described(file, in.document)); err != nil {
			return err
		}
	}
	for _, t := range in.tensors {
		var what fmt.Stringer
		if whole && listing {
			size, bad := t.Bytes()
			what, err = &listed{Tensor: t.title, descJSON: new(describe(t.Desc)), Bytes: &size}, bad
		} else {
			what, err = o.look(ctx, t.title, t.Desc, t.bytes(), stderr)
		}
		if err == nil {
			err = found(what)
		}
		if err != nil {
			return err
		}
	}
	if o.stats {
		return in.errors()
	}
	for _, u := range in.unknown {
		if err := found(&listed{Tensor: in.path + ":" + u.name, Error: said(u.err)}); err != nil {
			return err
		}
	}
	return nil
}

// listed is a tensor whose bytes were not read, or the metadata and index of a model file.
type listed struct {
	Tensor string `json:"tensor"`
	*descJSON
	Bytes    *int64            `json:"bytes,omitempty"`
	Error    string            `json:"error,omitempty"` // why it cannot be read
	Metadata map[string]string `json:"metadata,omitempty"`
	Index    string            `json:"index,omitempty"` // of a model of several files
	shards   int
}

// described returns the metadata and index of a model file as listed.
func described(title string, d tensorfile.Document) *listed {
	return &listed{Tensor: title, Metadata: d.Common(), Index: d.Index, shards: len(d.Shards)}
}

func (l *listed) String() string {
	is := "no tensors"
	switch {
	case l.Error != "":
		is = "cannot be read: " + l.Error
	case l.Bytes != nil:
		is = fmt.Sprintf("%s%v  %s", l.DType, l.Shape, sizeText(*l.Bytes))
	case l.Index != "":
		is = fmt.Sprintf("%s of %d files", plain(l.Index), l.shards)
	case len(l.Metadata) > 0:
		is = "metadata"
	}
	return plain(l.Tensor) + "  " + is + "\n" + metadataText(l.Metadata)
}

func metadataText(metadata map[string]string) string {
	return strings.Join(each(slices.Sorted(maps.Keys(metadata)), func(k string) string {
		return fmt.Sprintf("  %s: %s\n", plain(k), plain(metadata[k]))
	}), "")
}

// shown describes the contents of a tensor as show --json prints it. Min, max, mean, std
// and histogram are those of the finite elements, and absent if there are none.
type shown struct {
	Tensor string `json:"tensor"`
	Slice  string `json:"slice,omitempty"`
	descJSON
	Bytes     int64               `json:"bytes"`
	Elements  int64               `json:"elements"`
	Of        string              `json:"of,omitempty"` // "magnitude" for complex elements
	Min       json.Number         `json:"min,omitempty"`
	Max       json.Number         `json:"max,omitempty"`
	Mean      *float64            `json:"mean,omitempty"`
	Std       *float64            `json:"std,omitempty"`
	Zeros     int64               `json:"zeros"`
	NaN       int64               `json:"nan"`
	PosInf    int64               `json:"positive_inf"`
	NegInf    int64               `json:"negative_inf"`
	Histogram *elements.Histogram `json:"histogram,omitempty"`
	Head      []json.RawMessage   `json:"head,omitempty"`
	Metadata  map[string]string   `json:"metadata,omitempty"`

	lines string // of the head
}

// look reads a tensor from r until its end or the end of ctx, with progress on stderr if it
// is large, and describes it or the part that the options select.
func (o *showOptions) look(ctx context.Context, title string, d tensor.Desc, r io.Reader, stderr io.Writer) (*shown, error) {
	if size, err := d.Bytes(); err == nil && size >= leastBar {
		bars := newProgress(stderr, o.quiet, true, nil)
		defer bars.end()
		r = io.TeeReader(r, bars.tensor(title, d))
	}
	seen, err := interruptible(ctx, func() (*shown, error) { return o.summarize(d, r) })
	if err != nil {
		return nil, fmt.Errorf("%s: %w", title, err)
	}
	seen.Tensor = title
	return seen, nil
}

func (o *showOptions) summarize(d tensor.Desc, r io.Reader) (*shown, error) {
	part, err := elements.ParseSlice(o.slice, d)
	if err != nil {
		return nil, usageError{err}
	}
	if o.slice != "" {
		if r, err = part.Reader(r); err != nil {
			return nil, err
		}
	}
	d = part.Desc
	size, err := d.Bytes()
	if err != nil {
		return nil, err
	}
	if size == 0 && o.slice != "" { // nothing else reads r to its end
		if _, err := io.Copy(io.Discard, r); err != nil {
			return nil, err
		}
	}
	width := int64(d.DType.Bits() / 8)
	var head bytes.Buffer
	r = io.MultiReader(io.TeeReader(io.LimitReader(r, min(int64(o.head), size/width)*width), &head), r)
	s, err := elements.Summarize(r, d)
	if err != nil {
		return nil, err
	}
	seen := &shown{
		Slice: o.slice, descJSON: describe(d), Bytes: size, Elements: s.Elements,
		Min: s.Min, Max: s.Max, Zeros: s.Zeros, NaN: s.NaN, PosInf: s.PosInf, NegInf: s.NegInf,
	}
	if d.DType == tensor.Complex64 || d.DType == tensor.Complex128 {
		seen.Of = "magnitude"
	}
	if s.Min != "" {
		h := s.Histogram(showColumns)
		seen.Mean, seen.Std, seen.Histogram = &s.Mean, &s.Std, &h
	}
	seen.printHead(part, head.Bytes())
	return seen, nil
}

// printHead sets the head of s from data, the first elements of a part.
func (s *shown) printHead(part elements.Slice, data []byte) {
	width := part.Desc.DType.Bits() / 8
	row := int64(1)
	if axes := part.Desc.Shape; len(axes) > 0 {
		row = axes[len(axes)-1]
	}
	var b strings.Builder
	for i := range int64(len(data) / width) {
		e := data[i*int64(width):]
		s.Head = append(s.Head, elements.JSON(part.Desc.DType, e))
		if i%row%headColumns == 0 {
			if i > 0 {
				b.WriteByte('\n')
			}
			fmt.Fprintf(&b, "  %v ", part.Index(i))
		}
		b.WriteString(" " + elements.Text(part.Desc.DType, e))
	}
	if b.Len() > 0 {
		b.WriteByte('\n')
	}
	s.lines = b.String()
}

func (s *shown) String() string {
	var b strings.Builder
	title := plain(s.Tensor)
	if s.Slice != "" {
		title += "[" + s.Slice + "]"
	}
	fmt.Fprintf(&b, "%s  %s%v  %s\n%s", title, s.DType, s.Shape, sizeText(s.Bytes), metadataText(s.Metadata))
	if s.Elements == 0 {
		return b.String() + "  no elements\n"
	}
	b.WriteString("  ")
	digits := s.digits()
	least, most := short(s.Min, digits), short(s.Max, digits)
	if s.Histogram != nil {
		if s.Of != "" {
			fmt.Fprintf(&b, "%s: ", s.Of)
		}
		fmt.Fprintf(&b, "min %s  max %s  mean %.*g  std %.6g  ", least, most, digits, *s.Mean, *s.Std)
	}
	fmt.Fprintf(&b, "zeros %d  NaN %d  +Inf %d  -Inf %d\n", s.Zeros, s.NaN, s.PosInf, s.NegInf)
	if s.Histogram != nil {
		fmt.Fprintf(&b, "  %s |%s| %s\n", least, columns(s.Histogram.Counts), most)
	}
	return b.String() + s.lines
}

// digits returns how many digits to print: two more than tell Min from Max, and 6 or more.
func (s *shown) digits() int {
	digits := 6
	for s.Min != s.Max && digits < 17 && short(s.Min, digits-2) == short(s.Max, digits-2) {
		digits++
	}
	return digits
}

// short formats a number: all digits of an integer, so many digits of others.
func short(n json.Number, digits int) string {
	v, err := n.Float64()
	if err != nil || !strings.ContainsAny(n.String(), ".eE") {
		return n.String()
	}
	return strconv.FormatFloat(v, 'g', digits, 64)
}

// plain replaces what is not printable in a name: it may command a terminal.
func plain(name string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return utf8.RuneError
	}, name)
}

// columns draws counts: the largest as the last of ramp, and only zeros as the first.
func columns(counts []int64) string {
	levels := []rune(ramp)
	var b strings.Builder
	for _, n := range counts {
		level := math.Ceil(float64(n) / float64(slices.Max(counts)) * float64(len(levels)-1))
		b.WriteRune(levels[int(level)])
	}
	return b.String()
}

// sizeText formats a number of bytes in a readable unit.
func sizeText(n int64) string {
	text := fmt.Sprintf("%d bytes", n)
	for i, unit := range []string{"KiB", "MiB", "GiB", "TiB"} {
		if in := float64(n) / math.Ldexp(1, 10*(i+1)); in >= 1 && (in < 1024 || unit == "TiB") {
			return fmt.Sprintf("%.1f %s", in, unit)
		}
	}
	return text
}
