package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

func TestAnErrorIsSaidForPeople(t *testing.T) {
	full := &client.Error{Code: codes.ResourceExhausted, Message: `the store is full: tensor "x" takes 3 bytes`}
	var many []error
	for i := range fail.MostErrors + 5 {
		many = append(many, &client.Error{Code: codes.NotFound, Message: fmt.Sprint("tensor ", i)})
	}
	for name, tc := range map[string]struct {
		err  error
		want string
	}{
		"of a server":            {full, `the store is full: tensor "x" takes 3 bytes`},
		"of this side":           {&client.Error{Cause: client.ErrInput}, "bad input"},
		"wrapped":                {fmt.Errorf("x.npy: %w", full), `x.npy: the store is full: tensor "x" takes 3 bytes`},
		"of several packages":    {fail.In("x", fmt.Errorf("%w: %w: no", tensorfile.ErrNotFound, tensor.ErrShape)), "x: no such tensor: bad shape: no"},
		"of one in another":      {fmt.Errorf("engine: %w: it is so", &client.Error{Code: codes.Internal, Message: "memory: over"}), "memory: over: it is so"},
		"that names no package":  {errors.New(`my store: "x" is a tensor: y`), `my store: "x" is a tensor: y`},
		"of no server":           {&client.Error{Code: codes.Unavailable, Cause: fmt.Errorf("%w: dial tcp: refused", client.ErrNoConnection)}, "no connection: dial tcp: refused"},
		"the same for several":   {errors.Join(full, full, full), `the store is full: tensor "x" takes 3 bytes`},
		"others for several":     {errors.Join(full, client.ErrInput), "the store is full: tensor \"x\" takes 3 bytes\nbad input"},
		"that paints a terminal": {&client.Error{Code: codes.Internal, Message: "\x1b[31mred\a\u202e"}, "�[31mred��"},
		"that forges a line":     {&client.Error{Code: codes.Internal, Message: "a\nhint: b\r\nc"}, "a hint: b c"},
		"joined, with a hint":    {fail.AsUsage(fail.Hinted(errors.Join(errors.New("a\nb"), errors.New("c")), "d")), "a b\nc"},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, fail.Text(tc.err)) })
	}
	lines := strings.Split(fail.Text(errors.Join(many...)), "\n")
	require.Len(t, lines, fail.MostErrors+1)
	require.Equal(t, "and 5 more", lines[fail.MostErrors])
}

func TestAHintFitsTheCommand(t *testing.T) {
	broken := &client.Error{Code: codes.Unavailable, Message: "connection reset by peer"}
	full := &client.Error{Code: codes.ResourceExhausted, Message: "full: 3 bytes too many"}
	for name, tc := range map[string]struct {
		typed fail.Command
		err   error
		want  string
	}{
		"a broken connection":    {fail.Command{}, broken, "the connection broke, or the server takes nothing now; run it again"},
		"a limit of the server":  {fail.Command{}, full, "tensorferry info lists the server's limits"},
		"of another server":      {fail.Command{Server: "a:1"}, full, "tensorferry info --server a:1 lists the server's limits"},
		"nothing there":          {fail.Command{}, &client.Error{Code: codes.Unavailable, Cause: client.ErrNoConnection}, "is the server running?"},
		"no host":                {fail.Command{}, &client.Error{Code: codes.Unavailable, Cause: client.ErrHostNotFound}, "name the server with --server host:port"},
		"the other host":         {fail.Command{}, fail.At(&client.Error{Code: codes.Unavailable, Cause: client.ErrHostNotFound}, "x:1"), "name the server with --to host:port"},
		"another kind of server": {fail.Command{}, fmt.Errorf("%w: a:1", client.ErrNotServer), "something answers there, but it is not a tensorferry server"},
		"no answer":              {fail.Command{}, fmt.Errorf("%w from a:1", client.ErrNoAnswer), "something listens there and says nothing"},
		"a typing error":         {fail.Command{}, fail.Usage("no"), "pull --help for usage"},
	} {
		t.Run(name, func(t *testing.T) {
			tc.typed.Verb, tc.typed.Path = true, "tensorferry pull"
			require.Contains(t, fail.HintOf(tc.typed, fail.ExitCode(t.Context(), tc.err), tc.err), tc.want)
		})
	}
}

func TestAFailureOfAServerHasItsExitCodeAndHint(t *testing.T) {
	for code, want := range map[codes.Code]struct {
		exit int
		hint string
	}{
		codes.NotFound:          {fail.ExitFailure, "tensorferry ls"},
		codes.AlreadyExists:     {fail.ExitFailure, "another name"},
		codes.DataLoss:          {fail.ExitIntegrity, "push the tensor anew"},
		codes.ResourceExhausted: {fail.ExitLimit, "tensorferry info"},
		codes.InvalidArgument:   {fail.ExitFailure, ""},
		codes.Unauthenticated:   {fail.ExitAuth, "--ca names the CA"},
		codes.PermissionDenied:  {fail.ExitAuth, ""},
		codes.Unavailable:       {fail.ExitConnection, "run it again"},
	} {
		err := fmt.Errorf("pull: %w", &client.Error{Code: code, Message: "why"})
		got := fail.ExitCode(context.Background(), err)
		require.Equal(t, want.exit, got, code)
		hint := fail.HintOf(fail.Command{Verb: true}, got, err)
		require.Contains(t, hint, want.hint, code)
		require.Equal(t, want.hint == "", hint == "", code)
	}
}
