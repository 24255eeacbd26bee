package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/folder"
	"github.com/tensorferry/tensorferry/tensor"
)

func bothStores(t *testing.T) map[string]storeMaker {
	return map[string]storeMaker{"memory": inMemory(64 * mib), "folder": inFolder(t.TempDir(), folder.Config{})}
}

func TestASetIsStoredTogetherOrNotAtAll(t *testing.T) {
	testkit.Start(t)
	for name, in := range bothStores(t) {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			c := storing(t, in, client.Config{})
			set := func(fill byte, sizes ...int64) (list []client.Input) {
				for i, n := range sizes {
					data := make([]byte, n)
					for j := range data {
						data[j] = fill
					}
					list = append(list, client.Input{Name: fmt.Sprint("t/", i), Desc: int8s(n), Data: data})
				}
				return list
			}
			sizes := []int64{0, 1, 1000, 3 * mib, 70_000}
			sums, err := c.PutAll(t.Context(), client.PushRequest{Tensors: set(1, sizes...)})
			require.NoError(t, err)
			require.Len(t, sums, len(sizes))

			bad := set(2, sizes...)
			bad = append(bad, client.Input{Name: "t/too large", Desc: int8s(1 << 40), Reader: zeros{}})
			sums, err = c.PutAll(t.Context(), client.PushRequest{Tensors: bad})
			require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
			for _, s := range sums {
				require.Error(t, s.Err)
			}
			_, err = c.PutAll(t.Context(), client.PushRequest{Tensors: append(set(3, 5), client.Input{Name: "", Desc: int8s(1), Data: []byte{1}})})
			require.Equal(t, codes.InvalidArgument, status.Code(err), "%v", err)
			list, _, err := c.List(t.Context(), "")
			require.NoError(t, err)
			require.Len(t, list, len(sizes))

			// Readers see one set or another, never some of each.
			var all sync.WaitGroup
			all.Go(func() {
				for fill := range byte(30) {
					_, err := c.PutAll(t.Context(), client.PushRequest{Tensors: set(fill, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)})
					require.NoError(t, err)
				}
			})
			all.Go(func() {
				for range 60 {
					got, err := c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "t/[1-3]"}}})
					require.NoError(t, err)
					fill := got[0].Data[0]
					for _, s := range got {
						require.Equal(t, fill, s.Data[0])
					}
				}
			})
			all.Wait()
		})
	}
}

// A set of which an input cannot be read is not stored, however small the input is.
func TestNothingOfASetIsStoredOfWhichAnInputFails(t *testing.T) {
	testkit.Start(t)
	for name, in := range bothStores(t) {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			c := storing(t, in, client.Config{})
			for _, size := range []int64{1, 100, mib, 3 * mib} {
				for at := range 3 {
					why := errors.New("the input is damaged")
					var list []client.Input
					for i := range 3 {
						x := client.Input{Name: fmt.Sprint("t/", i), Desc: int8s(size), Data: make([]byte, size)}
						if i == at {
							x.Data, x.Reader = nil, io.MultiReader(bytes.NewReader(make([]byte, size/2)), iotest.ErrReader(why))
						}
						list = append(list, x)
					}
					sums, err := c.PutAll(t.Context(), client.PushRequest{Tensors: list})
					require.ErrorIs(t, err, why)
					for _, s := range sums {
						require.ErrorIs(t, s.Err, why, s.Name)
					}
					stored, _, err := c.List(t.Context(), "")
					require.NoError(t, err)
					require.Empty(t, stored)
				}
			}
		})
	}
}

// What a refused push gave up has not moved.
func TestProgressIsCompleteOnlyOfWhatIsStored(t *testing.T) {
	testkit.Start(t)
	c := storing(t, inMemory(4*mib), client.Config{})
	told := map[string]client.Progress{}
	push := client.PushRequest{
		Tensors: []client.Input{
			{Name: "fits", Desc: int8s(2 * mib), Data: make([]byte, 2*mib)},
			{Name: "too large", Desc: int8s(8 * mib), Data: make([]byte, 8*mib)},
		},
		Progress: func(p client.Progress) { told[p.Name] = p },
	}
	_, err := c.Push(t.Context(), push)
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
	require.Equal(t, client.Progress{Name: "fits", Moved: 2 * mib, Bytes: 2 * mib}, told["fits"])
	require.Less(t, told["too large"].Moved, int64(8*mib))
	clear(told)
	_, err = c.PutAll(t.Context(), push)
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
	for name, p := range told {
		require.Less(t, p.Moved, p.Bytes, name)
	}
}

// filling is a folder on a disk that is full from an operation on.
type filling struct {
	*folder.Store
	left     atomic.Int64 // operations until then
	unsynced error        // of the names of a set, once it is committed
}

func (f *filling) fault() error {
	if f.left.Add(-1) < 0 {
		return fmt.Errorf("%w: %w", store.ErrFull, syscall.ENOSPC)
	}
	return nil
}

func (f *filling) Create(ctx context.Context, name string, d tensor.Desc, metadata map[string]string) (store.Writer, error) {
	if err := f.fault(); err != nil {
		return nil, err
	}
	w, err := f.Store.Create(ctx, name, d, metadata)
	return fillingWriter{w, f}, err
}

func (f *filling) Ready(ctx context.Context, w store.Writer) (store.Info, error) {
	if err := f.fault(); err != nil {
		return store.Info{}, err
	}
	return f.Store.Ready(ctx, w.(fillingWriter).Writer)
}

func (f *filling) CommitAll(ctx context.Context, set []store.Writer) ([]store.Info, error) {
	if err := f.fault(); err != nil {
		for _, w := range set {
			w.Abort()
		}
		return nil, err
	}
	own := make([]store.Writer, len(set))
	for i, w := range set {
		own[i] = w.(fillingWriter).Writer
	}
	infos, err := f.Store.CommitAll(ctx, own)
	return infos, errors.Join(err, f.unsynced)
}

type fillingWriter struct {
	store.Writer
	folder *filling
}

func (w fillingWriter) WriteViews(ctx context.Context, off int64, views [][]byte) error {
	if err := w.folder.fault(); err != nil {
		return err
	}
	return w.Writer.WriteViews(ctx, off, views)
}

func TestADiskThatFillsUpDuringASetLeavesTheOlderTensors(t *testing.T) {
	testkit.Start(t)
	dir := t.TempDir()
	kept, err := folder.Open(dir, folder.Config{})
	require.NoError(t, err)
	f := &filling{Store: kept}
	c := storing(t, func(testing.TB, *slab.Pool) store.Store { return f }, client.Config{})
	sizes := []int64{0, 1, 1000, 3 * mib, 70_000}
	put := func(seed uint64, left int64) ([]client.Summary, error) {
		f.left.Store(left)
		var r client.PushRequest
		for i, n := range sizes {
			r.Tensors = append(r.Tensors, client.Input{Name: fmt.Sprint("t/", i), Desc: int8s(n), Data: noise(seed, n)})
		}
		return c.PutAll(t.Context(), r)
	}
	requireIs := func(seed uint64) {
		got, err := c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "t/*"}}})
		require.NoError(t, err)
		require.Len(t, got, len(sizes))
		for i, n := range sizes {
			require.True(t, bytes.Equal(noise(seed, n), got[i].Data), got[i].Name)
			require.Equal(t, digestOf(got[i].Data), got[i].Digest)
		}
	}
	_, err = put(1, math.MaxInt64)
	require.NoError(t, err)
	before, _ := f.Used()
	steps := int64(0)
	for ; ; steps++ { // each time a later one fails
		sums, err := put(2, steps)
		if err == nil {
			break
		}
		require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
		for _, s := range sums {
			require.Error(t, s.Err)
		}
		requireIs(1)
		testkit.Eventually(t, func() bool { used, _ := f.Used(); return used == before }, "the room of the new tensors")
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Len(t, entries, len(sizes)+1, "the tensors' files, and the lock")
	}
	require.Greater(t, steps, int64(3*len(sizes)))
	requireIs(2)

	f.unsynced = errors.New("the disk is on fire")
	sums, err := put(3, math.MaxInt64)
	require.Equal(t, codes.Internal, status.Code(err), "%v", err)
	require.ErrorContains(t, sums[0].Err, "stored, but may not survive")
	requireIs(3)
}

// zeros never ends.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// TestWhatOneRequestCannotNameIsPulledAndDeletedInParts: 1 024 names are a request.
func TestWhatOneRequestCannotNameIsPulledAndDeletedInParts(t *testing.T) {
	testkit.Start(t)
	c := storing(t, inMemory(64*mib), client.Config{})
	var r client.PushRequest
	var q client.PullRequest
	var names []string
	for i := range 2100 {
		name := fmt.Sprintf("t/%04d", i)
		names = append(names, name)
		r.Tensors = append(r.Tensors, client.Input{Name: name, Desc: int8s(2), Data: []byte{byte(i), byte(i >> 8)}})
		q.Select = append(q.Select, client.Selection{Name: name})
	}
	_, err := c.PutAll(t.Context(), r)
	require.NoError(t, err)
	q.Select[1500] = client.Selection{Name: "t/none"}
	q.Select = append(q.Select, client.Selection{Name: "t/000[01]"})
	got, err := c.Pull(t.Context(), q)
	require.ErrorContains(t, err, `"t/none"`)
	require.Len(t, got, 2102)
	for i, s := range got {
		if i == 1500 {
			require.Error(t, s.Err)
			continue
		}
		n := i % 2100
		require.NoError(t, s.Err)
		require.Equal(t, names[n], s.Name)
		require.Equal(t, []byte{byte(n), byte(n >> 8)}, s.Data)
	}
	deleted, err := c.Delete(t.Context(), names...)
	require.NoError(t, err)
	require.Equal(t, names, deleted)
	list, _, err := c.List(t.Context(), "")
	require.NoError(t, err)
	require.Empty(t, list)
}
