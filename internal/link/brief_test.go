//go:build linux

package link_test

import (
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/link"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

func TestABriefConnectionReadsWritesAndEndsAsAnyOther(t *testing.T) {
	testkit.Start(t)
	for network, address := range map[string]string{"tcp": "127.0.0.1:0", "unix": t.TempDir() + "/s"} {
		t.Run(network, func(t *testing.T) {
			l, err := net.Listen(network, address)
			require.NoError(t, err)
			defer func() { _ = l.Close() }()
			a, err := net.Dial(network, l.Addr().String())
			require.NoError(t, err)
			b, err := l.Accept()
			require.NoError(t, err)
			a, b = link.Brief(a), link.Brief(b)
			for _, n := range []int{1, 3000, link.PacketBytes, link.PacketBytes + 1, 8 << 20} {
				data, got := testkit.Bytes(n, 1), make([]byte, n)
				wrote := make(chan error, 1)
				go func() { // ends with the read
					_, err := a.Write(data)
					wrote <- err
				}()
				_, err = io.ReadFull(b, got)
				require.NoError(t, err)
				require.NoError(t, <-wrote)
				require.Equal(t, data, got)
			}
			require.NoError(t, a.Close())
			_, err = b.Read(make([]byte, 1))
			require.Equal(t, io.EOF, err)
			require.NoError(t, b.Close())
			_, err = b.Read(make([]byte, 1))
			require.ErrorIs(t, err, net.ErrClosed)
			_, err = b.Write(make([]byte, 1))
			require.ErrorIs(t, err, net.ErrClosed)
		})
	}
	piped, other := net.Pipe()
	defer func() { _, _ = piped.Close(), other.Close() }()
	require.Equal(t, piped, link.Brief(piped), "a pipe is not a socket")
}
