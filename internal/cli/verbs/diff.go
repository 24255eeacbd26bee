package verbs

import (
	"errors"
	"math"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/cli/looking"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
)

func diffCommand() *cobra.Command {
	var o looking.DiffOptions
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
		Args: Takes(2, "A", "B"),
		RunE: func(c *cobra.Command, args []string) error {
			return o.Diff(c.Context(), args[0], args[1], streamsOf(c))
		},
	}
	accessFlags(c, &o.Access)
	c.Flags().Func("atol", "absolute `tolerance`", toleranceIn(&o.Abs))
	c.Flags().Func("rtol", "relative `tolerance`", toleranceIn(&o.Rel))
	settings.CountIn(c.Flags(), &o.First, "first", 5, 0, math.MaxInt32, "how many differing elements to print per tensor")
	jsonFlag(c, &o.AsJSON)
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
