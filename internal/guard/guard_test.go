package guard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
)

var errTaken = errors.New("the token is not known any more")

func TestWhoIsNotAllowedAnyMoreLosesItsRPCs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		taken, ended := "", make(map[string]error)
		take := func(name string) {
			mu.Lock()
			defer mu.Unlock()
			taken = name
		}
		lost := func() map[string]error {
			mu.Lock()
			defer mu.Unlock()
			return maps.Clone(ended)
		}
		g := New(func(_ credentials.AuthInfo, authorization []string) (string, error) {
			mu.Lock()
			defer mu.Unlock()
			if len(authorization) == 0 || authorization[0] == taken {
				return "", errTaken
			}
			return authorization[0], nil
		}, slog.New(slog.DiscardHandler))
		_, err := g.Ask(t.Context(), nil)
		require.ErrorIs(t, err, errTaken)
		ask := func(name string) *Caller {
			c, err := g.Ask(t.Context(), metadata.Pairs("authorization", name))
			require.NoError(t, err)
			require.Equal(t, name, c.Name())
			g.Remember(c, func(why error) {
				mu.Lock()
				defer mu.Unlock()
				ended[name] = why
			})
			return c
		}
		ask("alice")
		ask("bob")
		gone := ask("carol")
		g.Forget(gone)
		g.Look()
		require.Empty(t, lost())
		take("bob")
		g.Look()
		require.Equal(t, map[string]error{"bob": errTaken}, lost())
		take("carol")
		g.Look()
		require.Len(t, lost(), 1, "carol's RPC had ended")
		require.EqualValues(t, 2, g.Refused())
	})
}

func TestWhoIsSomebodyElseNowLosesItsRPCs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var name atomic.Value
		name.Store("alice")
		g := New(func(credentials.AuthInfo, []string) (string, error) { return name.Load().(string), nil }, slog.New(slog.DiscardHandler))
		c, err := g.Ask(t.Context(), nil)
		require.NoError(t, err)
		ended := make(chan error, 1)
		g.Remember(c, func(why error) { ended <- why })
		g.Look()
		require.Empty(t, ended)
		name.Store("intern")
		g.Look()
		require.Len(t, ended, 1)
		require.ErrorIs(t, <-ended, errRenamed)
	})
}

func TestEachReasonIsLoggedByItself(t *testing.T) {
	var log bytes.Buffer
	g := New(func(_ credentials.AuthInfo, authorization []string) (string, error) {
		return "", errors.New(authorization[0])
	}, slog.New(slog.NewTextHandler(&log, nil)))
	for range 3 { // the third time no line is due
		for i := range reasons + 5 {
			_, err := g.Ask(t.Context(), metadata.Pairs("authorization", fmt.Sprint("reason ", i, ".")))
			require.Error(t, err)
		}
	}
	require.Equal(t, 2, strings.Count(log.String(), "reason 0."))
	require.Equal(t, 2, strings.Count(log.String(), fmt.Sprint("reason ", reasons-1, ".")))
	require.Less(t, strings.Count(log.String(), "\n"), 2*reasons+5, "the rest are one reason")
}

func TestWithoutACheckEverybodyMay(t *testing.T) {
	g := New(nil, slog.New(slog.DiscardHandler))
	c, err := g.Ask(context.Background(), nil)
	require.NoError(t, err)
	require.Nil(t, c)
	require.Empty(t, c.Name())
	g.Remember(c, nil)
	g.Forget(c)
	g.Look()
	require.Zero(t, g.Refused())
}
