package store_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// readAll reads a small tensor in pieces of three bytes.
func readAll(t *testing.T, r store.Reader) (all []byte) {
	t.Helper()
	size, err := r.Info().Bytes()
	require.NoError(t, err)
	for off := int64(0); off < size; off += 3 {
		data, held, err := r.View(t.Context(), off, min(3, size-off))
		require.NoError(t, err)
		all = append(all, data...)
		held.Release()
	}
	return all
}

func TestASourceIsFoundUnderItsNameOnly(t *testing.T) {
	var s store.Sources
	require.Empty(t, s.Names())
	src := store.Tensor(func(context.Context, map[string]string) (tensor.Tensor, error) { return tensor.Of([]int32{1, 2}) })
	require.NoError(t, s.Add("b", src))
	require.NoError(t, s.Add("a", src))
	require.ErrorIs(t, s.Add("a", src), store.ErrExists)
	require.ErrorIs(t, s.Add("", src), store.ErrName)
	require.ErrorIs(t, s.Add(strings.Repeat("n", store.MaxName+1), src), store.ErrName)
	require.Equal(t, []string{"a", "b"}, s.Names())
	_, ok := s.Lookup("c")
	require.False(t, ok)
	found, ok := s.Lookup("a")
	require.True(t, ok)
	r, err := found(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, []byte{1, 0, 0, 0, 2, 0, 0, 0}, readAll(t, r))
	require.Equal(t, store.Info{Desc: tensor.Desc{DType: tensor.Int32, Shape: tensor.Shape{2}}}, r.Info())
	_, _, err = r.View(t.Context(), 5, 4)
	require.ErrorIs(t, err, store.ErrRange)
	r.Release()
}

func TestASourcesErrorIsThePullers(t *testing.T) {
	for name, tc := range map[string]struct {
		t    tensor.Tensor
		err  error
		want error
	}{
		"its own":          {tensor.Tensor{}, errStopped, errStopped},
		"too few bytes":    {tensor.Tensor{Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{3}}, Data: []byte{1}}, nil, tensor.ErrShape},
		"no tensor at all": {tensor.Tensor{}, nil, tensor.ErrDataType},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := store.Tensor(func(context.Context, map[string]string) (tensor.Tensor, error) { return tc.t, tc.err })(t.Context(), nil)
			require.ErrorIs(t, err, tc.want)
		})
	}
}
