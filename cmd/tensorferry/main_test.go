package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

func TestAnErrorIsSaidForPeople(t *testing.T) {
	full := &client.Error{Code: codes.ResourceExhausted, Message: `store: full: tensor "x" takes 3 bytes`}
	var many []error
	for i := range mostErrors + 5 {
		many = append(many, &client.Error{Code: codes.NotFound, Message: fmt.Sprint("tensor ", i)})
	}
	for name, tc := range map[string]struct {
		err  error
		want string
	}{
		"of a server":            {full, `the store is full: tensor "x" takes 3 bytes`},
		"of this side":           {&client.Error{Cause: client.ErrInput}, "bad input"},
		"wrapped":                {fmt.Errorf("x.npy: %w", full), `x.npy: the store is full: tensor "x" takes 3 bytes`},
		"of several packages":    {fmt.Errorf("x.npy: %w: %w: client: no", tensorfile.ErrNotFound, tensor.ErrShape), "x.npy: no such tensor: bad shape: no"},
		"of one in another":      {fmt.Errorf("engine: %w: it is so", &client.Error{Code: codes.Internal, Message: "slab: over"}), "over: it is so"},
		"that names no package":  {errors.New(`my store: "x" is a tensor: y`), `my store: "x" is a tensor: y`},
		"of no server":           {&client.Error{Code: codes.Unavailable, Cause: fmt.Errorf("%w: dial tcp: refused", client.ErrNoConnection)}, "no connection: dial tcp: refused"},
		"the same for several":   {errors.Join(full, full, full), `the store is full: tensor "x" takes 3 bytes`},
		"others for several":     {errors.Join(full, client.ErrInput), "the store is full: tensor \"x\" takes 3 bytes\nbad input"},
		"that paints a terminal": {&client.Error{Code: codes.Internal, Message: "\x1b[31mred\a\u202e"}, "�[31mred��"},
		"that forges a line":     {&client.Error{Code: codes.Internal, Message: "a\nhint: b\r\nc"}, "a hint: b c"},
		"joined, with a hint":    {usageError{hinted{errors.Join(errors.New("a\nb"), errors.New("c")), "d"}}, "a b\nc"},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, said(tc.err)) })
	}
	lines := strings.Split(said(errors.Join(many...)), "\n")
	require.Len(t, lines, mostErrors+1)
	require.Equal(t, "and 5 more", lines[mostErrors])
}

func TestEveryPackageThatNamesItselfInItsErrorsIsKnown(t *testing.T) {
	list, err := program(t, "go", "list", "-deps", "-f", "{{with .Module}}{{if .Main}}{{$.Name}} {{$.Dir}}{{end}}{{end}}", ".").Output()
	require.NoError(t, err)
	for line := range strings.Lines(string(list)) {
		name, dir, ours := strings.Cut(strings.TrimSpace(line), " ")
		if !ours {
			continue
		}
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		require.NoError(t, err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			if !strings.HasSuffix(file, "_test.go") && strings.Contains(string(text), `"`+name+`: `) {
				require.Contains(t, packages, name, file)
			}
		}
	}
}

func TestAHintFitsTheCommand(t *testing.T) {
	broken := &client.Error{Code: codes.Unavailable, Message: "connection reset by peer"}
	full := &client.Error{Code: codes.ResourceExhausted, Message: "store: full: 3 bytes too many"}
	for name, tc := range map[string]struct {
		flags []string
		err   error
		want  string
	}{
		"a broken connection":           {nil, broken, "the connection broke; run it again"},
		"a broken connection to a file": {[]string{"-o", "x"}, broken, "the connection broke; an output file is written whole or not at all, so run it again"},
		"a limit of the server":         {nil, full, "tensorferry info lists the server's limits"},
		"of another server":             {[]string{"--server", "a:1"}, full, "tensorferry info --server a:1 lists the server's limits"},
		"nothing there":                 {nil, &client.Error{Code: codes.Unavailable, Cause: client.ErrNoConnection}, "is the server running?"},
		"no host":                       {nil, &client.Error{Code: codes.Unavailable, Cause: client.ErrHostNotFound}, "name the server with --server host:port"},
		"the other host":                {nil, toError{&client.Error{Code: codes.Unavailable, Cause: client.ErrHostNotFound}, "x:1"}, "name the server with --to host:port"},
		"another kind of server":        {nil, fmt.Errorf("%w: a:1", client.ErrNotServer), "something answers there, but it is not a tensorferry server"},
		"no answer":                     {nil, fmt.Errorf("%w from a:1", client.ErrNoAnswer), "something listens there and says nothing"},
		"a typing error":                {nil, usage("no"), "pull --help for usage"},
	} {
		t.Run(name, func(t *testing.T) {
			root := command()
			c, _, err := root.Find([]string{"pull"})
			require.NoError(t, err)
			require.NoError(t, c.ParseFlags(tc.flags))
			require.Contains(t, hintOf(c, exitCode(t.Context(), tc.err), tc.err), tc.want)
		})
	}
}

func TestAFailureOfAServerHasItsExitCodeAndHint(t *testing.T) {
	for code, want := range map[codes.Code]struct {
		exit int
		hint string
	}{
		codes.NotFound:          {exitFailure, "tensorferry ls"},
		codes.AlreadyExists:     {exitFailure, "another name"},
		codes.DataLoss:          {exitIntegrity, "push the tensor anew"},
		codes.ResourceExhausted: {exitLimit, "tensorferry info"},
		codes.InvalidArgument:   {exitFailure, ""},
		codes.Unauthenticated:   {exitAuth, "--ca names the CA"},
		codes.PermissionDenied:  {exitAuth, ""},
		codes.Unavailable:       {exitConnection, "run it again"},
	} {
		err := fmt.Errorf("pull: %w", &client.Error{Code: code, Message: "why"})
		got := exitCode(context.Background(), err)
		require.Equal(t, want.exit, got, code)
		hint := hintOf(pullCommand(), got, err)
		require.Contains(t, hint, want.hint, code)
		require.Equal(t, want.hint == "", hint == "", code)
	}
}
