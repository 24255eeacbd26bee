package main

import (
	"context"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/tensor"
)

// shells has a writer of the completion script for each shell.
var shells = map[string]func(root *cobra.Command, w io.Writer) error{
	"bash":       func(root *cobra.Command, w io.Writer) error { return root.GenBashCompletionV2(w, true) },
	"zsh":        func(root *cobra.Command, w io.Writer) error { return root.GenZshCompletion(w) },
	"fish":       func(root *cobra.Command, w io.Writer) error { return root.GenFishCompletion(w, true) },
	"powershell": func(root *cobra.Command, w io.Writer) error { return root.GenPowerShellCompletionWithDesc(w) },
}

func completionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "completion SHELL",
		Short: "print a shell completion script",
		Long: `Completion prints a script that completes commands, flags and their values in bash,
zsh, fish or powershell. Load it in the shell's startup file. For bash, the package
bash-completion must be installed.`,
		Example: `  source <(tensorferry completion bash)
  tensorferry completion zsh > "${fpath[1]}/_tensorferry"
  tensorferry completion fish | source
  tensorferry completion powershell | Out-String | Invoke-Expression`,
		Args:      takes(1, "SHELL"),
		ValidArgs: slices.Sorted(maps.Keys(shells)),
		RunE: func(c *cobra.Command, args []string) error {
			if err := cobra.OnlyValidArgs(c, args); err != nil {
				return usageError{err}
			}
			return shells[args[0]](c.Root(), c.OutOrStdout())
		},
	}
}

// dtypeFlag adds --dtype.
func dtypeFlag(c *cobra.Command, to *string, value, text string) {
	c.Flags().StringVar(to, "dtype", value, text)
	var names []string
	for _, d := range tensor.DataTypes() {
		names = append(names, d.String())
	}
	complete(c, "dtype", names)
}

// complete registers the values of a flag for completion.
func complete(c *cobra.Command, flag string, values []string) {
	if err := c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // the command has no such flag
	}
}

// completeChoices registers the words of every choice flag for completion.
func completeChoices(c *cobra.Command) {
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if of, ok := f.Value.(choice); ok {
			complete(c, f.Name, of.words)
		}
	})
}

// completionWait is how long completion waits for a server.
const completionWait = time.Second

// completeStored completes the names of a server's tensors, or with --source those of
// its sources.
func completeStored(c *cobra.Command, _ []string, start string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return ask(c, start, func(ctx context.Context, cl *client.Client) ([]string, error) {
		list, sources, err := cl.List(ctx, "")
		if source := c.Flag("source"); source != nil && source.Value.String() == "true" {
			return sources, err
		}
		names := make([]string, len(list))
		for i, s := range list {
			names[i] = s.Name
		}
		return names, err
	})
}

// completeModels completes the name of a model of a server, as the only argument.
func completeModels(c *cobra.Command, args []string, start string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return ask(c, start, func(ctx context.Context, cl *client.Client) ([]string, error) {
		models, err := cl.Models(ctx)
		names := make([]string, len(models))
		for i, m := range models {
			names[i] = m.GetName()
		}
		return names, err
	})
}

// ask completes start with names from the server of --server, or with none if the server
// does not answer.
func ask(c *cobra.Command, start string, names func(context.Context, *client.Client) ([]string, error)) (list []cobra.Completion, _ cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(c.Context(), completionWait)
	defer cancel()
	if cl, err := accessOf(c).dial(client.Config{}); err == nil {
		defer cl.Close()
		list, _ = names(ctx, cl)
	}
	list = slices.DeleteFunc(list, func(name string) bool { return !strings.HasPrefix(name, start) || plain(name) != name })
	return list, cobra.ShellCompDirectiveNoFileComp
}
