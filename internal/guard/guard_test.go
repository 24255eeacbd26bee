package guard

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
)

var errTaken = errors.New("the token is not known any more")

func TestWhoIsNotAllowedAnyMoreLosesItsRPCs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		taken := ""
		g := New(func(_ credentials.AuthInfo, authorization []string) (string, error) {
			if len(authorization) == 0 || authorization[0] == taken {
				return "", errTaken
			}
			return authorization[0], nil
		}, slog.New(slog.DiscardHandler))
		_, err := g.Ask(t.Context(), nil)
		require.ErrorIs(t, err, errTaken)
		ended := make(map[string]error)
		ask := func(name string) *Caller {
			c, err := g.Ask(t.Context(), metadata.Pairs("authorization", name))
			require.NoError(t, err)
			require.Equal(t, name, c.Name())
			g.Remember(c, func(why error) { ended[name] = why })
			return c
		}
		ask("alice")
		ask("bob")
		gone := ask("carol")
		g.Forget(gone)
		done := make(chan struct{})
		go g.Watch(done)
		time.Sleep(every + time.Second)
		synctest.Wait()
		require.Empty(t, ended)
		taken = "bob"
		time.Sleep(every)
		synctest.Wait()
		require.Equal(t, map[string]error{"bob": errTaken}, ended)
		taken = "carol"
		time.Sleep(every)
		synctest.Wait()
		require.Len(t, ended, 1, "carol's RPC had ended")
		require.EqualValues(t, 2, g.Refused())
		close(done)
	})
}

func TestWithoutACheckEverybodyMay(t *testing.T) {
	g := New(nil, slog.New(slog.DiscardHandler))
	c, err := g.Ask(context.Background(), nil)
	require.NoError(t, err)
	require.Nil(t, c)
	require.Empty(t, c.Name())
	g.Remember(c, nil)
	g.Forget(c)
	g.Watch(nil)
	require.Zero(t, g.Refused())
}
