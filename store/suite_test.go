package store_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/folder"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/store/storetest"
	"github.com/tensorferry/tensorferry/tensor"
)

var errStopped = errors.New("stopped")

func TestAnEndedContextEndsWhatTakesLong(t *testing.T) {
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(errStopped)
	for name, s := range map[string]store.Store{
		"memory": storetest.Close(t, memory.New(testkit.Pool(t), 1<<20)),
		"folder": storetest.Close(t, testkit.Must(folder.Open(t.TempDir(), folder.Config{}))),
	} {
		storetest.Put(t, s, "x", []byte{1})
		_, err := s.Create(ended, "y", storetest.Vector(1), nil)
		require.ErrorIs(t, err, errStopped, name)
		_, err = s.List(ended, "", "", 10)
		require.ErrorIs(t, err, errStopped, name)
		deleted, err := s.Delete(ended, "x")
		require.ErrorIs(t, err, errStopped, name)
		require.Empty(t, deleted, name)
		storetest.Get(t, s, "x")
	}
}

func TestWhoHasGoneIsMadeNoView(t *testing.T) {
	gone, end := context.WithCancelCause(t.Context())
	end(errStopped)
	f := storetest.Close(t, testkit.Must(folder.Open(t.TempDir(), folder.Config{})))
	m := storetest.Close(t, memory.New(testkit.Pool(t), 1<<20))
	storetest.Put(t, f, "x", []byte("abc"))
	storetest.Put(t, m, "x", []byte("abc"))
	for name, open := range map[string]func() (store.Reader, error){
		"a folder": func() (store.Reader, error) { return f.Open(t.Context(), "x") },
		"memory":   func() (store.Reader, error) { return m.Open(t.Context(), "x") },
		"a generator": func() (store.Reader, error) {
			return store.Generator()(t.Context(), map[string]string{"shape": "3", "dtype": "uint8"})
		},
		"a source": func() (store.Reader, error) {
			return store.Tensor(func(context.Context, map[string]string) (tensor.Tensor, error) { return tensor.Of([]uint8{1, 2, 3}) })(t.Context(), nil)
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
