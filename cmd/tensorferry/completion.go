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

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
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
	complete(c, "dtype", each(tensor.DataTypes(), tensor.DataType.String))
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

// completeStored completes the names of a server's tensors, with --source its sources.
func (a *access) completeStored(c *cobra.Command, _ []string, start string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return a.complete(c, start, func(ctx context.Context, cl *client.Client) ([]string, error) {
		list, sources, err := cl.List(ctx, "")
		if source := c.Flag("source"); source != nil && source.Value.String() == "true" {
			return sources, err
		}
		return each(list, func(s client.Stored) string { return s.Name }), err
	})
}

// completeModels completes the name of a model of a server, as the only argument.
func (a *access) completeModels(c *cobra.Command, args []string, start string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.complete(c, start, func(ctx context.Context, cl *client.Client) ([]string, error) {
		models, err := cl.Models(ctx)
		return each(models, (*pb.Model).GetName), err
	})
}

// complete completes start with names from the server, or with none if it does not answer.
func (a *access) complete(c *cobra.Command, start string, names func(context.Context, *client.Client) ([]string, error)) (list []cobra.Completion, _ cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(c.Context(), completionWait)
	defer cancel()
	if cl, err := a.dial(client.Config{}); err == nil {
		defer cl.Close()
		list, _ = names(ctx, cl)
	}
	list = slices.DeleteFunc(list, func(name string) bool { return !strings.HasPrefix(name, start) || plain(name) != name })
	return list, cobra.ShellCompDirectiveNoFileComp
}
