// Package verbs has the commands of tensorferry: a file each, with its flags, its help, and one call
// of a package beside it. Nothing else knows cobra.
package verbs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/files"
	"github.com/tensorferry/tensorferry/internal/cli/serve"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
)

// Run runs a command line, and says on stderr why it failed.
func Run(ctx context.Context, root *cobra.Command) int {
	c, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	code := fail.ExitCode(ctx, err)
	if code == fail.ExitInterrupted {
		err = errors.New("interrupted") // which caused err
	}
	text, hint := fail.Text(err), fail.HintOf(typedOf(c), code, err)
	if code == fail.ExitUsage && (c.Name() == "serve" || c.Name() == "link") {
		code = fail.ExitSettings
	}
	if c.Name() == "serve" { // nobody may read what it says
		defer time.AfterFunc(serve.FlushWait, func() { os.Exit(code) }).Stop()
	}
	if f := c.Flag("log-format"); f != nil && f.Value.String() == serve.LogJSON { // of serve, whose log goes on
		attrs := []any{slog.String("error", text)}
		if hint != "" {
			attrs = append(attrs, slog.String("hint", hint))
		}
		slog.New(slog.NewJSONHandler(os.Stderr, nil)).Error("failed", append(attrs, slog.Int("exit_code", code))...)
		return code
	}
	fmt.Fprintf(os.Stderr, "tensorferry: %s\n", text)
	if hint != "" {
		fmt.Fprintf(os.Stderr, "hint: %s\n", hint)
	}
	return code
}

// typedOf says what was typed of a command that failed.
func typedOf(c *cobra.Command) fail.Command {
	was := fail.Command{Path: c.CommandPath(), Verb: c.HasParent()}
	if f := c.Flag("server"); f != nil && f.Changed {
		was.Server = f.Value.String()
	}
	return was
}

func streamsOf(c *cobra.Command) files.Streams {
	return files.Streams{In: c.InOrStdin(), Out: c.OutOrStdout(), Err: c.ErrOrStderr()}
}

// Command returns the program with its commands.
func Command() *cobra.Command {
	var version bool // a field of cobra's, whose templates keep every method of the program
	root := &cobra.Command{
		Use:                        "tensorferry",
		Short:                      "carry tensors between programs and through models",
		SilenceUsage:               true,
		SuggestionsMinimumDistance: 2,
		SilenceErrors:              true,
		Args:                       noCommand,
		RunE: func(c *cobra.Command, _ []string) error {
			if version {
				_, err := fmt.Fprintln(c.OutOrStdout(), serve.Version)
				return err
			}
			return c.Help()
		},
	}
	root.Flags().BoolVarP(&version, "version", "v", false, "print the version")
	root.SetFlagErrorFunc(flagError)
	root.AddCommand(
		serveCommand(), demoCommand(), benchCommand(), // start servers
		runCommand(), modelsCommand(), infoCommand(), // use a server
		pushCommand(), pullCommand(), lsCommand(), rmCommand(), cpCommand(), verifyCommand(), // use its store
		genCommand(), showCommand(), diffCommand(), certCommand(), // files
		versionCommand(), linkCommand(),
	)
	helpCommand(root)
	completeWords(root)
	return root
}

// helpCommand rejects topics that are not commands, for which cobra would list commands.
func helpCommand(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	help, _, err := root.Find([]string{"help"})
	if err != nil {
		panic(err) // InitDefaultHelpCmd has added it
	}
	help.Short = "show the help of a command"
	help.Args = func(_ *cobra.Command, args []string) error {
		_, rest, err := root.Find(args)
		if err != nil {
			return fail.AsUsage(err)
		}
		return noCommand(root, rest)
	}
}

// noCommand rejects arguments, which are not the name of a command.
func noCommand(root *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	err := fmt.Errorf("unknown command %q", args[0])
	if like := root.SuggestionsFor(args[0]); len(like) > 0 {
		err = fail.Hinted(err, "did you mean "+settings.Nearest(args[0], like)+"? tensorferry help lists the commands")
	}
	return fail.AsUsage(err)
}
