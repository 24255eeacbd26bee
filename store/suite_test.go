package store_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/storetest"
)

func TestMemoryIsAStore(t *testing.T) {
	storetest.Run(t, func(t testing.TB) store.Store { return store.NewMemory(testkit.Pool(t), 64<<20) })
}

func TestAFolderIsAStore(t *testing.T) {
	storetest.Run(t, func(t testing.TB) store.Store {
		f, err := store.OpenFolder(t.TempDir(), store.FolderConfig{})
		require.NoError(t, err)
		return f
	})
}

func TestAStoreBesideOthersIsAStore(t *testing.T) {
	storetest.Run(t, func(t testing.TB) store.Store {
		f, err := store.OpenFiles(t.TempDir(), store.FilesConfig{})
		require.NoError(t, err)
		return store.Beside(store.NewMemory(testkit.Pool(t), 64<<20), f)
	})
}

func TestAFolderWithFilesOfOthersIsAStore(t *testing.T) {
	storetest.Run(t, func(t testing.TB) store.Store {
		s, err := store.OpenDir(t.TempDir(), store.FolderConfig{})
		require.NoError(t, err)
		return s
	})
}
