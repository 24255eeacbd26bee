package main

import (
	"io"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// shells are those that cobra writes completions for.
var shells = map[string]func(root *cobra.Command, w io.Writer) error{
	"bash":       func(root *cobra.Command, w io.Writer) error { return root.GenBashCompletionV2(w, true) },
	"zsh":        func(root *cobra.Command, w io.Writer) error { return root.GenZshCompletion(w) },
	"fish":       func(root *cobra.Command, w io.Writer) error { return root.GenFishCompletion(w, true) },
	"powershell": func(root *cobra.Command, w io.Writer) error { return root.GenPowerShellCompletionWithDesc(w) },
}

func completionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "completion SHELL",
		Short: "print a script that completes commands in a shell",
		Long: `Completion prints a script for bash, zsh, fish or powershell that completes
commands, flags and their values. Load it in a shell's start-up file; for bash
the package bash-completion has to be there.`,
		Example: `  source <(tensorferry completion bash)
  tensorferry completion zsh > "${fpath[1]}/_tensorferry"
  tensorferry completion fish | source
  tensorferry completion powershell | Out-String | Invoke-Expression`,
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: slices.Sorted(maps.Keys(shells)),
		RunE: func(c *cobra.Command, args []string) error {
			return shells[args[0]](c.Root(), c.OutOrStdout())
		},
	}
}

// completeDTypes completes the values of --dtype.
func completeDTypes(c *cobra.Command) {
	var names []string
	for _, d := range tensor.DataTypes() {
		names = append(names, d.String())
	}
	complete(c, "dtype", names)
}

// completeFills completes the values of --fill.
func completeFills(c *cobra.Command) { complete(c, "fill", store.Fills()) }

func complete(c *cobra.Command, flag string, values []string) {
	if err := c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // the command has no such flag
	}
}
