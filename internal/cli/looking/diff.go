package looking

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"path"
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

// DiffOptions are the flags of diff.
type DiffOptions struct {
	moving.Access
	elements.Tolerance
	First  int
	AsJSON bool
}

// compared is a tensor to compare. Its bytes are lent to use, once.
type compared struct {
	name string
	tensor.Desc
	read func(use func(io.Reader) error) error
}

// diffJSON is a pair of tensors as diff --json prints it. A side may not have one.
type diffJSON struct {
	Tensor    string                `json:"tensor"`
	Equal     bool                  `json:"equal"`
	A         *display.Desc         `json:"a,omitempty"`
	B         *display.Desc         `json:"b,omitempty"`
	Elements  *int64                `json:"elements,omitempty"` // absent if they cannot be compared
	Different *int64                `json:"different,omitempty"`
	NonFinite int64                 `json:"non_finite,omitempty"` // of these; the others have the maxima
	MaxAbs    float64               `json:"max_abs,omitempty"`
	MaxRel    any                   `json:"max_rel,omitempty"` // a number, or "inf"
	First     []elements.Difference `json:"first,omitempty"`

	text string
}

// Diff compares what two arguments name.
func (o *DiffOptions) Diff(ctx context.Context, nameA, nameB string, std files.Streams) error {
	in := files.Opener{Stdin: std.In}
	if nameA == "-" && nameB == "-" {
		return fail.Usage(files.StdinTwice)
	}
	var cl *client.Client
	if strings.HasPrefix(nameA, "@") || strings.HasPrefix(nameB, "@") {
		var err error
		if cl, err = o.Dial(); err != nil {
			return err
		}
		defer cl.Close()
	}
	a, err := sideOf(ctx, cl, nameA, &in)
	if err != nil {
		return err
	}
	b, err := sideOf(ctx, cl, nameB, &in)
	if err != nil {
		return err
	}
	if len(a) == 1 && len(b) == 1 {
		a[0].name, b[0].name = nameA, nameA
	}
	const onlyIn = "%s: only in %s\n"
	inB := map[string]compared{} // and not compared
	for _, y := range b {
		inB[y.name] = y
	}
	list := []diffJSON{}
	different := false
	add := func(d diffJSON) error {
		list = append(list, d)
		different = different || !d.Equal
		if o.AsJSON {
			return nil
		}
		_, err := io.WriteString(std.Out, d.text)
		return err
	}
	for _, x := range a {
		d := diffJSON{Tensor: x.name, A: new(display.Describe(x.Desc)), text: fmt.Sprintf(onlyIn, display.Plain(x.name), display.Plain(nameA))}
		if y, paired := inB[x.name]; paired {
			delete(inB, x.name)
			d, err = o.comparePair(ctx, x, y)
		}
		if err == nil {
			err = add(d)
		}
		if err != nil {
			return err
		}
	}
	for _, y := range b {
		if _, left := inB[y.name]; left {
			err = add(diffJSON{Tensor: y.name, B: new(display.Describe(y.Desc)), text: fmt.Sprintf(onlyIn, display.Plain(y.name), display.Plain(nameB))})
		}
		if err != nil {
			return err
		}
	}
	if o.AsJSON {
		err = display.JSON(std.Out, list)
	}
	if err == nil && different {
		err = fmt.Errorf("%s and %s differ", nameA, nameB)
	}
	return err
}

// sideOf returns the tensors that an argument names.
func sideOf(ctx context.Context, cl *client.Client, arg string, in *files.Opener) (side []compared, err error) {
	name, stored := strings.CutPrefix(arg, "@")
	if !stored {
		found, err := in.Open(ctx, arg)
		if err == nil {
			err = found.Errors()
		}
		if err != nil {
			return nil, err
		}
		return display.Each(found.Tensors, func(s *files.Source) compared {
			return compared{cmp.Or(s.Name, arg), s.Desc, func(use func(io.Reader) error) error { return use(s.Open()) }}
		}), nil
	}
	list, err := moving.StoredOf(ctx, cl, []string{name})
	if err != nil {
		return nil, err
	}
	folder := moving.SharedPrefix([]string{name})
	for _, t := range list {
		if path.Base(t.Name) == tensorfile.MetadataName {
			continue // not a tensor of the model
		}
		side = append(side, compared{strings.TrimPrefix(t.Name, folder), t.Desc, func(use func(io.Reader) error) error {
			return moving.ReadStored(ctx, cl, client.Selection{Name: t.Name}, func(d tensor.Desc, r io.Reader) error {
				if !d.Equal(t.Desc) {
					return fmt.Errorf(files.Changed, t.Name)
				}
				return use(r)
			})
		}})
	}
	return side, nil
}

// comparePair compares two tensors of one name.
func (o *DiffOptions) comparePair(ctx context.Context, a, b compared) (diffJSON, error) {
	d := diffJSON{Tensor: a.name, A: new(display.Describe(a.Desc)), B: new(display.Describe(b.Desc))}
	if !a.Desc.Equal(b.Desc) {
		d.text = fmt.Sprintf("%s: %v and %v\n", display.Plain(a.name), a.Desc, b.Desc)
		return d, nil
	}
	c, err := files.Interruptible(ctx, func() (c elements.Comparison, err error) {
		err = a.read(func(ra io.Reader) error {
			return b.read(func(rb io.Reader) (err error) {
				c, err = elements.Compare(a.Desc, ra, rb, o.Tolerance, o.First)
				return err
			})
		})
		return c, err
	})
	if err != nil {
		return d, fail.In(a.name, err)
	}
	d.Elements, d.Different, d.Equal = &c.Elements, &c.Different, c.Different == 0
	d.NonFinite, d.MaxAbs, d.First = c.NonFinite, c.MaxAbs, c.First
	rel := fmt.Sprintf("%.6g", c.MaxRel)
	if d.MaxRel = c.MaxRel; c.MaxRel == 0 {
		d.MaxRel = nil
	} else if math.IsInf(c.MaxRel, 1) {
		rel, d.MaxRel = "inf", "inf"
	}
	if d.Equal {
		return d, nil
	}
	var text strings.Builder
	fmt.Fprintf(&text, "%s  %v: %d of %d elements differ", display.Plain(a.name), a.Desc, c.Different, c.Elements)
	these := ","
	if c.NonFinite > 0 {
		fmt.Fprintf(&text, ", %d of them infinite or NaN", c.NonFinite)
		these = ", the others"
	}
	if c.MaxAbs > 0 {
		fmt.Fprintf(&text, "%s by up to %.6g, relative %s", these, c.MaxAbs, rel)
	}
	text.WriteByte('\n')
	for _, f := range c.First {
		fmt.Fprintf(&text, "  %v  %s  %s\n", f.Index, f.TextA, f.TextB)
	}
	if more := c.Different - int64(len(c.First)); more > 0 && len(c.First) > 0 {
		fmt.Fprintf(&text, "  and %d more\n", more)
	}
	d.text = text.String()
	return d, nil
}
