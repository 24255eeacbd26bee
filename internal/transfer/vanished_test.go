//go:build unix

package transfer

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/fault"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// mapping is a Viewer of a mapped file.
type mapping struct {
	data  []byte
	views int
}

func (m *mapping) View(off, n int64) ([]byte, interface{ Release() }, error) {
	m.views++
	return m.data[off : off+n], m, nil
}

func (m *mapping) Release() { m.views-- }

func TestAMappingThatVanishesIsAnErrorNotTheEndOfTheProcess(t *testing.T) {
	const size = 1 << 20
	for _, k := range []codec.Codec{codec.None, codec.LZ4} {
		for name, digest := range map[string]codec.Digest{"hashed": {}, "known": {1}} {
			t.Run(k.String()+"/"+name, func(t *testing.T) {
				conn := &tape{}
				s := newSender(conn)
				s.Checksum, s.ChunkBytes, s.Codec = codec.CRC32C, size/4, k
				from := &mapping{data: testkit.CutMapping(t, size, size/2)}
				_, err := s.Send(t.Context(), &Tensor{Desc: vector(tensor.ID{1}, size), From: from, Digest: digest})
				require.ErrorIs(t, err, fault.ErrVanished)
				require.ErrorAs(t, err, new(*SourceError))
				require.Len(t, conn.frames, 2, "what is there is sent")
				require.Zero(t, from.views)
			})
		}
	}
}
