package client_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// fails adds a model that fails, or panics, and returns a call of it.
func (f *fixture) fails(t *testing.T, models *engine.Registry) func(c *client.Client, b byte) *client.Error {
	t.Helper()
	m, err := cpu.RowFunc{
		Info: engine.Info{
			Name: "broken", Rows: 1,
			Inputs:  []engine.Port{{Name: "x", Shape: []int64{engine.Free}}},
			Outputs: []engine.Port{{Name: "y", Shape: []int64{engine.Free}}},
		},
		Outs: func(in []tensor.Desc, _ map[string]string) ([]tensor.Desc, error) { return in, nil },
		Rows: func(_ context.Context, b cpu.RowBlock) error {
			if b.In[0][0] == 1 {
				panic("no such luck")
			}
			return errors.New("the disk of the model is full")
		},
	}.Model(f.host)
	require.NoError(t, err)
	require.NoError(t, models.Add(m))
	return func(c *client.Client, b byte) *client.Error {
		_, err := c.Compute(t.Context(), "broken", tensor.Tensor{Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{1}}, Data: []byte{b}})
		failed, ok := errors.AsType[*client.Error](err)
		require.True(t, ok)
		require.Equal(t, codes.Internal, failed.Code)
		require.NotContains(t, err.Error(), "disk")
		require.ErrorContains(t, err, "(call "+failed.Call.String()+")")
		return failed
	}
}

func TestTheCauseOfAFailedCallCanBeHad(t *testing.T) {
	testkit.Start(t)
	var models *engine.Registry
	f := startServer(t, "unix", client.Config{}, func(c *serverConfig) { models = c.Models })
	call := f.fails(t, models)
	first, second := call(f.client, 0), call(f.client, 1)
	cause, err := f.client.FailureOf(t.Context(), first.Call)
	require.NoError(t, err)
	require.Equal(t, "broken", cause.Model)
	require.Equal(t, codes.Internal, cause.Code)
	require.Contains(t, cause.Cause, "the disk of the model is full")
	require.Equal(t, first.Call, cause.Call)
	all, err := f.client.Failures(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 2)
	require.Equal(t, second.Call, all[0].Call)
	require.Regexp(t, `panicked: no such luck \(.*failures_test.go:\d+\)$`, all[0].Cause)
	for range 298 {
		_ = call(f.client, 0)
	}
	all, err = f.client.Failures(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 300, "more than a page")
	_, err = f.client.FailureOf(t.Context(), tensor.NewID())
	require.Equal(t, codes.NotFound, status.Code(err))
}

func TestEachPrincipalIsToldOfItsOwnFailures(t *testing.T) {
	testkit.Start(t)
	dir, change := secured(t)
	var models *engine.Registry
	as := func(f identity.ClientFiles) (cfg client.Config) {
		f.CA = filepath.Join(dir, identity.AuthorityFile)
		var err error
		cfg.Credentials, cfg.PerRPC, err = f.Credentials()
		require.NoError(t, err)
		return cfg
	}
	f := startServer(t, "unix", as(identity.ClientFiles{Cert: filepath.Join(dir, "alice.pem"), Key: filepath.Join(dir, "alice-key.pem")}), func(c *serverConfig) {
		change(c)
		models = c.Models
	})
	call := f.fails(t, models)
	carol, err := dial(f.addr, as(identity.ClientFiles{Token: filepath.Join(dir, "tokens")}))
	require.NoError(t, err)
	defer carol.Close()
	hers := map[*client.Client]*client.Error{f.client: call(f.client, 0), carol: call(carol, 0)}
	for c, own := range hers {
		list, err := c.Failures(t.Context())
		require.NoError(t, err)
		require.Len(t, list, 1)
		require.Equal(t, own.Call, list[0].Call)
		for _, one := range hers {
			_, err := c.FailureOf(t.Context(), one.Call)
			require.Equal(t, one == own, err == nil, "%v", err)
		}
	}
}
