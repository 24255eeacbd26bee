// Package looking has commands that print: what tensors contain, how they differ, and what a server
// has, counts and forgets.
package looking

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/files"
	"github.com/tensorferry/tensorferry/internal/cli/moving"
	"github.com/tensorferry/tensorferry/internal/elements"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

const (
	showColumns = 40       // maximum number of bins in a histogram
	leastBar    = 16 << 20 // smallest tensor with a progress bar, in bytes
	sliceHead   = 100      // elements of a slice that are printed by default
	headColumns = 10       // maximum number of elements per line
)

// ShowOptions are the flags of show.
type ShowOptions struct {
	Input         files.RawInput
	moving.Access // if its server is empty, show reads files
	moving.SourceFlags
	AsJSON, Stats, Quiet bool
	Slice                string
	Head                 int
	Headed               bool // head was set
}

// Show prints what named files, or tensors of a server, contain.
func (o *ShowOptions) Show(ctx context.Context, names []string, std files.Streams) error {
	stdout, stderr := std.Out, std.Err
	if err := o.Input.Check(); err != nil {
		return err
	}
	listing := o.Slice == "" && !o.Stats && !o.Headed // of model files
	if o.Slice != "" && !o.Headed {
		o.Head = sliceHead
	}
	listed := []fmt.Stringer{}
	found := func(s fmt.Stringer) error { // what show prints about a tensor or a model file
		if o.AsJSON {
			listed = append(listed, s)
			return nil
		}
		_, err := io.WriteString(stdout, s.String())
		return err
	}
	var err error
	switch {
	case o.Server != "" && o.Input.Given():
		return fail.Usage("--dtype and --shape are for raw bytes in a file; omit them with --server")
	case o.Server != "":
		err = o.showStored(ctx, names, stderr, found)
	case o.Source || len(o.Params) > 0:
		return fail.Usage("--source and --param need --server")
	default:
		in := files.Opener{Raw: o.Input, Stdin: std.In}
		for _, file := range names {
			if err = o.showFile(ctx, file, &in, listing, stderr, found); err != nil {
				break
			}
		}
	}
	if err == nil && o.AsJSON {
		err = display.JSON(stdout, listed)
	}
	return err
}

// showStored passes each named tensor of a server to found.
func (o *ShowOptions) showStored(ctx context.Context, names []string, stderr io.Writer, found func(fmt.Stringer) error) error {
	list, err := o.Selections(names)
	if err != nil {
		return err
	}
	cl, err := o.Dial()
	if err != nil {
		return err
	}
	defer cl.Close()
	stored := make([]client.Stored, len(list)) // zero for sources
	if !o.Source {
		if stored, err = moving.StoredOf(ctx, cl, names); err != nil {
			return err
		}
		list = moving.SelectionsOf(stored)
	}
	for i, s := range list {
		var what fmt.Stringer
		if moving.IsDocument(stored[i]) && stored[i].Bytes <= moving.ShownDocument {
			if d, _, err := moving.PullDocument(ctx, cl, stored[i]); err == nil {
				what = described(s.Name, d)
			}
		}
		if what == nil {
			err = moving.ReadStored(ctx, cl, s, func(d tensor.Desc, r io.Reader) error {
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
func (o *ShowOptions) showFile(ctx context.Context, file string, opener *files.Opener, listing bool, stderr io.Writer, found func(fmt.Stringer) error) error {
	in, err := opener.Open(ctx, file)
	if err != nil {
		return err
	}
	whole := in.Model && in.Whole
	if whole && (in.Document.Encode() != nil || len(in.Tensors)+len(in.Unknown) == 0) {
		if err := found(described(file, in.Document)); err != nil {
			return err
		}
	}
	for _, t := range in.Tensors {
		var what fmt.Stringer
		if whole && listing {
			size, bad := t.Bytes()
			what, err = &listed{Tensor: t.Title, Desc: new(display.Describe(t.Desc)), Bytes: &size}, bad
		} else {
			what, err = o.look(ctx, t.Title, t.Desc, t.Open(), stderr)
		}
		if err == nil {
			err = found(what)
		}
		if err != nil {
			return err
		}
	}
	if o.Stats {
		return in.Errors()
	}
	for _, u := range in.Unknown {
		if err := found(&listed{Tensor: in.Path + ":" + u.Name, Error: fail.Text(u.Err)}); err != nil {
			return err
		}
	}
	return nil
}

// listed is a tensor whose bytes were not read, or the metadata and index of a model file.
type listed struct {
	Tensor string `json:"tensor"`
	*display.Desc
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
		is = fmt.Sprintf("%s%v  %s", l.DType, l.Shape, display.Size(*l.Bytes))
	case l.Index != "":
		is = fmt.Sprintf("%s of %d files", display.Plain(l.Index), l.shards)
	case len(l.Metadata) > 0:
		is = "metadata"
	}
	return display.Plain(l.Tensor) + "  " + is + "\n" + metadataText(l.Metadata)
}

func metadataText(metadata map[string]string) string {
	return strings.Join(display.Each(slices.Sorted(maps.Keys(metadata)), func(k string) string {
		return fmt.Sprintf("  %s: %s\n", display.Plain(k), display.Plain(metadata[k]))
	}), "")
}

// shown describes the contents of a tensor as show --json prints it. Min, max, mean, std
// and histogram are those of the finite elements, and absent if there are none.
type shown struct {
	Tensor string `json:"tensor"`
	Slice  string `json:"slice,omitempty"`
	display.Desc
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
func (o *ShowOptions) look(ctx context.Context, title string, d tensor.Desc, r io.Reader, stderr io.Writer) (*shown, error) {
	if size, err := d.Bytes(); err == nil && size >= leastBar {
		bars := files.NewProgress(stderr, o.Quiet, true, nil)
		defer bars.End()
		r = io.TeeReader(r, bars.Tensor(title, d))
	}
	seen, err := files.Interruptible(ctx, func() (*shown, error) { return o.summarize(d, r) })
	if err != nil {
		return nil, fail.In(title, err)
	}
	seen.Tensor = title
	return seen, nil
}

func (o *ShowOptions) summarize(d tensor.Desc, r io.Reader) (*shown, error) {
	part, err := elements.ParseSlice(o.Slice, d)
	if err != nil {
		return nil, fail.AsUsage(err)
	}
	if o.Slice != "" {
		if r, err = part.Reader(r); err != nil {
			return nil, err
		}
	}
	d = part.Desc
	size, err := d.Bytes()
	if err != nil {
		return nil, err
	}
	if size == 0 && o.Slice != "" { // nothing else reads r to its end
		if _, err := io.Copy(io.Discard, r); err != nil {
			return nil, err
		}
	}
	width := int64(d.DType.Bits() / 8)
	var head bytes.Buffer
	r = io.MultiReader(io.TeeReader(io.LimitReader(r, min(int64(o.Head), size/width)*width), &head), r)
	s, err := elements.Summarize(r, d)
	if err != nil {
		return nil, err
	}
	seen := &shown{
		Slice: o.Slice, Desc: display.Describe(d), Bytes: size, Elements: s.Elements,
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
	title := display.Plain(s.Tensor)
	if s.Slice != "" {
		title += "[" + s.Slice + "]"
	}
	fmt.Fprintf(&b, "%s  %s%v  %s\n%s", title, s.DType, s.Shape, display.Size(s.Bytes), metadataText(s.Metadata))
	if s.Elements == 0 {
		return b.String() + "  no elements\n"
	}
	b.WriteString("  ")
	digits := s.digits()
	least, most := formatNumber(s.Min, digits), formatNumber(s.Max, digits)
	if s.Histogram != nil {
		if s.Of != "" {
			fmt.Fprintf(&b, "%s: ", s.Of)
		}
		fmt.Fprintf(&b, "min %s  max %s  mean %.*g  std %.6g  ", least, most, digits, *s.Mean, *s.Std)
	}
	fmt.Fprintf(&b, "zeros %d  NaN %d  +Inf %d  -Inf %d\n", s.Zeros, s.NaN, s.PosInf, s.NegInf)
	if s.Histogram != nil {
		fmt.Fprintf(&b, "  %s |%s| %s\n", least, display.Bars(s.Histogram.Counts), most)
	}
	return b.String() + s.lines
}

// digits returns how many digits to print: two more than tell Min from Max, and 6 or more.
func (s *shown) digits() int {
	digits := 6
	for s.Min != s.Max && digits < 17 && formatNumber(s.Min, digits-2) == formatNumber(s.Max, digits-2) {
		digits++
	}
	return digits
}

// formatNumber formats a number: all digits of an integer, so many digits of others.
func formatNumber(n json.Number, digits int) string {
	v, err := n.Float64()
	if err != nil || !strings.ContainsAny(n.String(), ".eE") {
		return n.String()
	}
	return strconv.FormatFloat(v, 'g', digits, 64)
}
