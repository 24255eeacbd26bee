package store

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestASourceIsFoundUnderItsNameOnly(t *testing.T) {
	var s Sources
	require.Empty(t, s.Names())
	src := Tensor(func(context.Context, map[string]string) (tensor.Tensor, error) { return tensor.Of([]int32{1, 2}) })
	require.NoError(t, s.Add("b", src))
	require.NoError(t, s.Add("a", src))
	require.ErrorIs(t, s.Add("a", src), ErrExists)
	require.ErrorIs(t, s.Add("", src), ErrName)
	require.ErrorIs(t, s.Add(strings.Repeat("n", MaxName+1), src), ErrName)
	require.Equal(t, []string{"a", "b"}, s.Names())
	_, ok := s.Lookup("c")
	require.False(t, ok)
	found, ok := s.Lookup("a")
	require.True(t, ok)
	r, err := found(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, []byte{1, 0, 0, 0, 2, 0, 0, 0}, read(t, r, 3))
	require.Equal(t, Info{Desc: tensor.Desc{DType: tensor.Int32, Shape: tensor.Shape{2}}}, r.Info())
	_, _, err = r.View(t.Context(), 5, 4)
	require.ErrorIs(t, err, ErrRange)
	r.Release()
}

func TestASourcesErrorIsThePullers(t *testing.T) {
	for name, tc := range map[string]struct {
		t    tensor.Tensor
		err  error
		want error
	}{
		"its own":          {tensor.Tensor{}, errStopped, errStopped},
		"too few bytes":    {tensor.Tensor{Desc: vector(3), Data: []byte{1}}, nil, tensor.ErrShape},
		"no tensor at all": {tensor.Tensor{}, nil, tensor.ErrDataType},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Tensor(func(context.Context, map[string]string) (tensor.Tensor, error) { return tc.t, tc.err })(t.Context(), nil)
			require.ErrorIs(t, err, tc.want)
		})
	}
}

func TestWhoHasGoneIsMadeNoView(t *testing.T) {
	gone, end := context.WithCancelCause(t.Context())
	end(errStopped)
	f := closing(t, openFolder(t, t.TempDir(), FolderConfig{}))
	m := closing(t, NewMemory(testkit.Pool(t), 16*mib))
	put(t, f, "x", []byte("abc"))
	put(t, m, "x", []byte("abc"))
	for name, open := range map[string]func() (Reader, error){
		"a folder": func() (Reader, error) { return f.Open(t.Context(), "x") },
		"memory":   func() (Reader, error) { return m.Open(t.Context(), "x") },
		"a generator": func() (Reader, error) {
			return Generator()(t.Context(), map[string]string{"shape": "3", "dtype": "uint8"})
		},
		"a source": func() (Reader, error) {
			return Tensor(func(context.Context, map[string]string) (tensor.Tensor, error) { return tensor.Of([]uint8{1, 2, 3}) })(t.Context(), nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := open()
			require.NoError(t, err)
			defer r.Release()
			_, held, err := r.View(gone, 0, 3)
			require.ErrorIs(t, err, errStopped)
			require.Nil(t, held)
		})
	}
}
