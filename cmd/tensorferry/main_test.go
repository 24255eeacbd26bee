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
		"of a server":            {full, `store: full: tensor "x" takes 3 bytes`},
		"of this side":           {&client.Error{Cause: client.ErrInput}, "bad input"},
		"wrapped":                {fmt.Errorf("x.npy: %w", full), "x.npy: " + full.Error()},
		"of no server":           {&client.Error{Code: codes.Unavailable, Message: `connection error: desc = "transport: Error while dialing: dial tcp: refused"`}, "no connection: dial tcp: refused"},
		"the same for several":   {errors.Join(full, full, full), `store: full: tensor "x" takes 3 bytes`},
		"others for several":     {errors.Join(full, client.ErrInput), "store: full: tensor \"x\" takes 3 bytes\nbad input"},
		"that paints a terminal": {&client.Error{Code: codes.Internal, Message: "\x1b[31mred\a\u202e"}, "�[31mred��"},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, said(tc.err)) })
	}
	lines := strings.Split(said(errors.Join(many...)), "\n")
	require.Len(t, lines, mostErrors+1)
	require.Equal(t, "and 5 more", lines[mostErrors])
}

func TestAFailureOfAServerHasItsExitCodeAndHint(t *testing.T) {
	for code, want := range map[codes.Code]struct {
		exit int
		hint string
	}{
		codes.NotFound:          {exitFailure, "tensorferry ls"},
		codes.AlreadyExists:     {exitFailure, "another name"},
		codes.DataLoss:          {exitIntegrity, "push the tensor anew"},
		codes.ResourceExhausted: {exitLimit, "tensorferry rm"},
		codes.InvalidArgument:   {exitFailure, ""},
		codes.Unauthenticated:   {exitAuth, ""},
		codes.PermissionDenied:  {exitAuth, ""},
		codes.Unavailable:       {exitConnection, "run it again"},
	} {
		err := fmt.Errorf("pull: %w", &client.Error{Code: code, Message: "why"})
		got := exitCode(context.Background(), err)
		require.Equal(t, want.exit, got, code)
		hint := hintOf(got, err)
		require.Contains(t, hint, want.hint, code)
		require.Equal(t, want.hint == "", hint == "", code)
	}
}
