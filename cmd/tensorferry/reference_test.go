package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

var rewrite = flag.Bool("rewrite", false, "write docs/commands.md")

// reference is docs/commands.md, made from the commands themselves.
func reference() string {
	var b strings.Builder
	b.WriteString("# What does each command do?\n\n" +
		"Made from the commands by `make reference`; `tensorferry COMMAND --help` prints the same.\n\n" +
		"| command | what it does |\n|---|---|\n")
	var sections strings.Builder
	for _, c := range command().Commands() {
		if c.Hidden || c.Name() == "help" {
			continue
		}
		fmt.Fprintf(&b, "| [`%s`](#%s) | %s |\n", c.Name(), c.Name(), c.Short)
		section(&sections, c)
	}
	b.WriteString(`
stdout is data and nothing else, talk goes to stderr, and progress only to a terminal. ` + "`--json`" + ` prints one JSON value: a list where
there may be several things, names in snake case, sizes in bytes; what is not known is absent. An error says what and why, and ends with
a hint where there is something to do. An output file is complete or absent; ` + "`.tensorferry-…`" + ` beside it is
what a command writes before it is complete, and may be deleted if that command was killed. Commands that talk to a server find it at
` + "`--server`" + `, else at ` + "`TENSORFERRY_SERVER`" + `, else at ` + "`127.0.0.1:50051`" + `; ` + "`show`" + ` and ` + "`demo`" + ` ask one only with ` + "`--server`" + `, ` + "`diff`" + ` only for ` + "`@NAME`" + `.

| exit code | means |
|---|---|
`)
	for _, e := range exits {
		fmt.Fprintf(&b, "| %d | %s |\n", e.code, e.means)
	}
	return b.String() + sections.String()
}

func section(b *strings.Builder, c *cobra.Command) {
	fmt.Fprintf(b, "\n## %s\n\n", c.Name())
	about := c.Long
	if about == "" {
		about = strings.ToUpper(c.Short[:1]) + c.Short[1:] + "."
	}
	c.InitDefaultHelpFlag()
	fmt.Fprintf(b, "%s\n\n```\n%s\n```\n", about, c.UseLine())
	if c.Example != "" {
		fmt.Fprintf(b, "\nFor example\n\n```\n%s\n```\n", strings.ReplaceAll(c.Example[2:], "\n  ", "\n"))
	}
	if usages := c.LocalFlags().FlagUsages(); usages != "" {
		fmt.Fprintf(b, "\nFlags\n\n```\n%s```\n", usages)
	}
}

func TestTheReferenceIsWhatTheCommandsSay(t *testing.T) {
	const file = "../../docs/commands.md"
	if *rewrite {
		require.NoError(t, os.WriteFile(file, []byte(reference()), 0o666))
	}
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	if diff := cmp.Diff(strings.Split(string(text), "\n"), strings.Split(reference(), "\n")); diff != "" {
		t.Errorf("make reference writes it anew:\n%s", diff)
	}
}

func TestEveryCommandSaysWhatItDoes(t *testing.T) {
	for _, c := range command().Commands() {
		require.NotEmpty(t, c.Short, c.Name())
		require.Equal(t, strings.ToLower(c.Short[:1]), c.Short[:1], c.Name())
		require.False(t, strings.HasSuffix(c.Short, "."), c.Name())
		if c.Example != "" {
			for line := range strings.Lines(c.Example) {
				require.True(t, strings.HasPrefix(line, "  "), "%s: an example is indented by two", c.Name())
			}
		}
	}
}

func TestExitCodesAreInOneTable(t *testing.T) {
	for i, e := range exits {
		require.Equal(t, i, e.code, "codes have no gap")
		require.NotEmpty(t, e.means)
	}
	for _, code := range exitOf {
		require.Less(t, code, len(exits))
	}
}

// TestWhatIsMistypedExitsWithUsage mistypes each flag of each command, and gives those
// that take no text a value that they do not have.
func TestWhatIsMistypedExitsWithUsage(t *testing.T) {
	for _, c := range command().Commands() {
		exits := func(args ...string) {
			t.Helper()
			root := command()
			root.SetArgs(append([]string{c.Name()}, args...))
			root.SetOut(io.Discard)
			_, err := root.ExecuteContextC(t.Context())
			require.Error(t, err, args)
			require.Equal(t, exitUsage, exitCode(t.Context(), err), "%s %v: %v", c.Name(), args, err)
			require.NotRegexp(t, "strconv|parsing|pflag|time: ", said(err), "%s %v", c.Name(), args)
		}
		if c.DisableFlagParsing {
			continue
		}
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			exits("--" + f.Name + "x")
			if !slices.Contains([]string{"string", "stringArray", "store"}, f.Value.Type()) {
				exits("--" + f.Name + "=?")
			}
		})
	}
}
