package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/elements"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// diffOptions are the flags of diff.
type diffOptions struct {
	access
	elements.Tolerance
	first  int
	asJSON bool
}

func diffCommand() *cobra.Command {
	var o diffOptions
	c := &cobra.Command{
		Use:   "diff A B",
		Short: "compare tensors element by element",
		Long: `Diff compares tensors element by element. If they are equal, it prints nothing and
exits with 0. Otherwise, it prints how many elements differ, the largest differences
and the first few differing elements, and exits with 1.

A and B are files, as for show but not raw bytes, or @NAME for tensors in a server's
store, where NAME may be a glob, as for pull. If A and B are one tensor each, their
names do not matter; otherwise tensors are paired by name. The names of @model/ and
@model/* do not include model/, so they match those in model.safetensors.

Elements a and b are equal if |a-b| <= atol + rtol*|b|. An infinity equals only itself,
and NaN only NaN. Tensors with different data types or shapes are never equal.`,
		Example: `  tensorferry diff x.npy y.npy
  tensorferry diff model.safetensors '@model/*' --rtol 1e-5
  tensorferry diff @a @b --first 3 --json`,
		Args: takes(2, "A", "B"),
		RunE: o.diff,
	}
	o.flags(c)
	c.Flags().Func("atol", "absolute `tolerance`", toleranceIn(&o.Abs))
	c.Flags().Func("rtol", "relative `tolerance`", toleranceIn(&o.Rel))
	countsVar(c.Flags(), &o.first, "first", 5, 0, math.MaxInt32, "how many differing elements to print per tensor")
	jsonFlag(c, &o.asJSON)
	return c
}

// toleranceIn returns what parses a tolerance into to.
func toleranceIn(to *float64) func(text string) error {
	return func(text string) (err error) {
		*to, err = strconv.ParseFloat(text, 64)
		switch {
		case errors.Is(err, strconv.ErrSyntax):
			return errors.New("not a number")
		case !(*to >= 0 && *to <= math.MaxFloat64):
			return errors.New("use a finite number that is not negative")
		}
		return nil
	}
}

// side holds the tensors that one argument of diff names.
type side struct {
	title string
	names []string // in order
	of    map[string]compared
}

// compared is a tensor of a side. Its bytes are lent to use, once.
type compared struct {
	tensor.Desc
	read func(ctx context.Context, use func(io.Reader) error) error
}

func (s *side) add(name string, c compared) {
	s.names, s.of[name] = append(s.names, name), c
}

// diffJSON is a pair of tensors as diff --json prints it. A side may not have one.
type diffJSON struct {
	Tensor    string                `json:"tensor"`
	Equal     bool                  `json:"equal"`
	A         *descJSON             `json:"a,omitempty"`
	B         *descJSON             `json:"b,omitempty"`
	Elements  *int64                `json:"elements,omitempty"` // absent if they cannot be compared
	Different *int64                `json:"different,omitempty"`
	NonFinite int64                 `json:"non_finite,omitempty"` // of these; the others have the maxima
	MaxAbs    float64               `json:"max_abs,omitempty"`
	MaxRel    any                   `json:"max_rel,omitempty"` // a number, or "inf"
	First     []elements.Difference `json:"first,omitempty"`

	text string
}

func (o *diffOptions) diff(c *cobra.Command, args []string) error {
	ctx, in := c.Context(), opener{stdin: c.InOrStdin()}
	if args[0] == "-" && args[1] == "-" {
		return errStdinTwice
	}
	var cl *client.Client
	if strings.HasPrefix(args[0], "@") || strings.HasPrefix(args[1], "@") {
		var err error
		if cl, err = o.dial(client.Config{}); err != nil {
			return err
		}
		defer cl.Close()
	}
	a, err := sideOf(ctx, cl, args[0], &in)
	if err != nil {
		return err
	}
	b, err := sideOf(ctx, cl, args[1], &in)
	if err != nil {
		return err
	}
	both := len(a.names) == 1 && len(b.names) == 1
	if both {
		b.of = map[string]compared{a.names[0]: b.of[b.names[0]]}
		b.names = nil
	}
	list := []diffJSON{}
	different := false
	for _, name := range slices.Concat(a.names, slices.DeleteFunc(b.names, func(name string) bool { _, paired := a.of[name]; return paired })) {
		title := name
		if both || name == "" {
			title = a.title
		}
		x, inA := a.of[name]
		y, inB := b.of[name]
		d := diffJSON{Tensor: title}
		switch {
		case inA && inB:
			d, err = pair(ctx, title, x, y, o)
		case inA:
			d.A, d.text = new(describe(x.Desc)), fmt.Sprintf("%s: only in %s\n", plain(title), plain(a.title))
		default:
			d.B, d.text = new(describe(y.Desc)), fmt.Sprintf("%s: only in %s\n", plain(name), plain(b.title))
		}
		if err == nil && !o.asJSON {
			_, err = io.WriteString(c.OutOrStdout(), d.text)
		}
		if err != nil {
			return err
		}
		list = append(list, d)
		different = different || !d.Equal
	}
	if o.asJSON {
		err = writeJSON(c.OutOrStdout(), list)
	}
	if err == nil && different {
		err = fmt.Errorf("%s and %s differ", args[0], args[1])
	}
	return err
}

// sideOf returns the tensors that an argument names.
func sideOf(ctx context.Context, cl *client.Client, arg string, in *opener) (*side, error) {
	s := &side{title: arg, of: map[string]compared{}}
	name, stored := strings.CutPrefix(arg, "@")
	if !stored {
		found, err := in.open(ctx, arg)
		if err == nil {
			err = found.errors()
		}
		if err != nil {
			return nil, err
		}
		for _, in := range found.tensors {
			s.add(in.Name, compared{in.Desc, func(_ context.Context, use func(io.Reader) error) error { return use(in.bytes()) }})
		}
		return s, nil
	}
	list, err := storedOf(ctx, cl, []string{name})
	if err != nil {
		return nil, err
	}
	folder := sharedPrefix([]string{name})
	for _, t := range list {
		if path.Base(t.Name) == tensorfile.MetadataName {
			continue // not a tensor of the model
		}
		s.add(strings.TrimPrefix(t.Name, folder), compared{t.Desc, func(ctx context.Context, use func(io.Reader) error) error {
			return readStored(ctx, cl, client.Selection{Name: t.Name}, func(d tensor.Desc, r io.Reader) error {
				if !d.Equal(t.Desc) {
					return fmt.Errorf("tensor %q has changed since it was listed; try again", t.Name)
				}
				return use(r)
			})
		}})
	}
	return s, nil
}

// pair compares two tensors.
func pair(ctx context.Context, title string, a, b compared, o *diffOptions) (diffJSON, error) {
	d := diffJSON{Tensor: title, A: new(describe(a.Desc)), B: new(describe(b.Desc))}
	if !a.Desc.Equal(b.Desc) {
		d.text = fmt.Sprintf("%s: %v and %v\n", plain(title), a.Desc, b.Desc)
		return d, nil
	}
	c, err := interruptible(ctx, func() (c elements.Comparison, err error) {
		read := a.read(ctx, func(ra io.Reader) error {
			return b.read(ctx, func(rb io.Reader) error {
				c, err = elements.Compare(a.Desc, whileLasts{ctx, ra}, whileLasts{ctx, rb}, o.Tolerance, o.first)
				return err
			})
		})
		return c, read
	})
	if err != nil {
		return d, fmt.Errorf("%s: %w", title, err)
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
	fmt.Fprintf(&text, "%s  %v: %d of %d elements differ", plain(title), a.Desc, c.Different, c.Elements)
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
