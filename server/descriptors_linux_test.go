package server_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store/storetest"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// withoutDescriptors runs f while this process can open nothing.
func withoutDescriptors(t testing.TB, f func()) {
	t.Helper()
	var was unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &was))
	defer func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &was)) }()
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: was.Max}))
	f()
}

func TestAServerOutOfDescriptorsIsTriedAgainLaterAndSaysSoOnce(t *testing.T) {
	testkit.Start(t)
	s, dir := inFolder(t)
	storetest.Put(t, s, "x", []byte("0123456789"))
	log := &notes{}
	f := serve(t, func(c *server.Config) {
		quiet(t, log)(c)
		c.Store = s
	})
	c, err := client.Dial(f.addr, client.Config{})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	_, err = c.Info(t.Context())
	require.NoError(t, err)
	// A file that comes meanwhile is not what is known of it for good.
	x, err := tensor.Of([]byte("abc"))
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "late.safetensors")
	file, err := os.Create(path)
	require.NoError(t, err)
	require.NoError(t, tensorfile.WriteSafetensors(file, []tensorfile.Named{{Name: "x", Tensor: x}}, nil))
	require.NoError(t, file.Close())

	const rounds = 16
	withoutDescriptors(t, func() {
		require.NoError(t, os.Rename(path, filepath.Join(dir, "late.safetensors")))
		for range rounds {
			for at, use := range uses {
				err := use(t.Context(), c)
				var own *client.Error
				require.ErrorAs(t, err, &own, at)
				require.Equal(t, codes.Unavailable, own.Code, "%s: %v", at, err)
				require.Positive(t, own.RetryAfter, at)
				require.Contains(t, own.Message, "descriptors")
				require.NotContains(t, own.Message, dir)
			}
		}
	})
	lines := strings.Count(log.String(), "\n")
	require.Equal(t, lines, strings.Count(log.String(), "too many open files"), log.String())
	require.Positive(t, lines)
	require.Less(t, lines, 8, "as their number doubles:\n%s", log.String())
	require.Equal(t, []string{"late/x", "x"}, storetest.Names(t, s))
	require.NoError(t, pullX(t.Context(), c))
}
