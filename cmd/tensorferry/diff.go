package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/elements"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

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
		if cl, err = o.dial(); err != nil {
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
	if len(a) == 1 && len(b) == 1 {
		a[0].name, b[0].name = args[0], args[0]
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
		if o.asJSON {
			return nil
		}
		_, err := io.WriteString(c.OutOrStdout(), d.text)
		return err
	}
	for _, x := range a {
		d := diffJSON{Tensor: x.name, A: new(describe(x.Desc)), text: fmt.Sprintf(onlyIn, plain(x.name), plain(args[0]))}
		if y, paired := inB[x.name]; paired {
			delete(inB, x.name)
			d, err = o.pair(ctx, x, y)
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
			err = add(diffJSON{Tensor: y.name, B: new(describe(y.Desc)), text: fmt.Sprintf(onlyIn, plain(y.name), plain(args[1]))})
		}
		if err != nil {
			return err
		}
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
func sideOf(ctx context.Context, cl *client.Client, arg string, in *opener) (side []compared, err error) {
	name, stored := strings.CutPrefix(arg, "@")
	if !stored {
		found, err := in.open(ctx, arg)
		if err == nil {
			err = found.errors()
		}
		if err != nil {
			return nil, err
		}
		return each(found.tensors, func(s *source) compared {
			return compared{cmp.Or(s.Name, arg), s.Desc, func(use func(io.Reader) error) error { return use(s.bytes()) }}
		}), nil
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
		side = append(side, compared{strings.TrimPrefix(t.Name, folder), t.Desc, func(use func(io.Reader) error) error {
			return readStored(ctx, cl, client.Selection{Name: t.Name}, func(d tensor.Desc, r io.Reader) error {
				if !d.Equal(t.Desc) {
					return fmt.Errorf(changed, t.Name)
				}
				return use(r)
			})
		}})
	}
	return side, nil
}

// pair compares two tensors of one name.
func (o *diffOptions) pair(ctx context.Context, a, b compared) (diffJSON, error) {
	d := diffJSON{Tensor: a.name, A: new(describe(a.Desc)), B: new(describe(b.Desc))}
	if !a.Desc.Equal(b.Desc) {
		d.text = fmt.Sprintf("%s: %v and %v\n", plain(a.name), a.Desc, b.Desc)
		return d, nil
	}
	c, err := interruptible(ctx, func() (c elements.Comparison, err error) {
		err = a.read(func(ra io.Reader) error {
			return b.read(func(rb io.Reader) (err error) {
				c, err = elements.Compare(a.Desc, ra, rb, o.Tolerance, o.first)
				return err
			})
		})
		return c, err
	})
	if err != nil {
		return d, fmt.Errorf("%s: %w", a.name, err)
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
	fmt.Fprintf(&text, "%s  %v: %d of %d elements differ", plain(a.name), a.Desc, c.Different, c.Elements)
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
