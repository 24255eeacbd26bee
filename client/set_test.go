package client_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/store"
)

func TestASetIsStoredTogetherOrNotAtAll(t *testing.T) {
	testkit.Start(t)
	for name, in := range map[string]storeMaker{
		"memory": inMemory(64 * mib),
		"folder": inFolder(t.TempDir(), store.FolderConfig{}),
	} {
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

// zeros never ends.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
