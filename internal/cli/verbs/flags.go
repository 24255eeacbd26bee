package verbs

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
	"github.com/tensorferry/tensorferry/tensor"
)

// flagError makes a usage error of one of pflag, and suggests the nearest flag.
func flagError(c *cobra.Command, err error) error {
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok && unknown.GetSpecifiedShortnames() == "" {
		like := settings.Nearest(unknown.GetSpecifiedName(), settings.FlagNames(c.Flags(), func(f *pflag.Flag) bool { return !f.Hidden }))
		return fail.AsUsage(fail.Hinted(err, fmt.Sprintf("did you mean --%s? see %s --help for usage", like, c.CommandPath())))
	}
	if invalid, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		f := invalid.GetFlag()
		err = fmt.Errorf("--%s %w", f.Name, settings.ValueError(f.Value, invalid.GetValue(), invalid.Unwrap()))
	}
	return fail.AsUsage(err)
}

func dtypeFlag(c *cobra.Command, to *string, value, text string) {
	c.Flags().StringVar(to, "dtype", value, text)
	complete(c, "dtype", display.Each(tensor.DataTypes(), tensor.DataType.String))
}

func complete(c *cobra.Command, flag string, values []string) {
	if err := c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // the command has no such flag
	}
}

// jsonFlag adds --json to a command whose output a script may read; docs/commands.md says what
// it prints. A command that fails prints nothing, with two exceptions: one that stores several
// tensors prints the result of each, and diff prints the differences.
func jsonFlag(c *cobra.Command, to *bool) {
	c.Flags().BoolVar(to, "json", false, "print JSON")
}

const many = math.MaxInt // as the limit of takes: none

// Takes checks that a command has an argument for each of needs, and no more than most.
func Takes(most int, needs ...string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		switch {
		case len(args) < len(needs):
			return fail.Usage("missing %s; usage: %s", strings.Join(needs[len(args):], " and "), c.UseLine())
		case len(args) > most && most == 0:
			return fail.Usage("%s takes no arguments, not %q", c.CommandPath(), args[0])
		case len(args) > most:
			return fail.Usage("unexpected argument %q; usage: %s", args[most], c.UseLine())
		}
		return nil
	}
}

// completeWords has the shell complete the flags whose values are few words.
func completeWords(root *cobra.Command) {
	for _, c := range root.Commands() {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if words := settings.Words(f.Value); len(words) > 0 {
				complete(c, f.Name, words)
			}
		})
	}
}

func quietFlag(c *cobra.Command, to *bool) {
	c.Flags().BoolVarP(to, "quiet", "q", false, "show no progress")
}
