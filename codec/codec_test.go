package codec

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestACodecIsReadByTheNameItPrints(t *testing.T) {
	for k := range Codec(255) {
		got, err := ParseCodec(k.String())
		if k.Known() {
			require.NoError(t, err)
			require.Equal(t, k, got)
		} else {
			require.Error(t, err, "%v", k)
		}
	}
	for _, text := range []string{"", "LZ4", "zstd", "lz4 "} {
		_, err := ParseCodec(text)
		require.Error(t, err, "%q", text)
	}
}

func TestTheCodecIsTheFirstOfThePeersThatIsOursToo(t *testing.T) {
	for name, tc := range map[string]struct {
		own  []Codec
		peer []uint8
		want Codec
	}{
		"both":                          {[]Codec{LZ4}, []uint8{1}, LZ4},
		"the peer names none":           {[]Codec{LZ4}, nil, None},
		"we name none":                  {nil, []uint8{1}, None},
		"one of the future comes first": {[]Codec{LZ4}, []uint8{255, 7, 1}, LZ4},
		"only those of the future":      {[]Codec{LZ4}, []uint8{255, 7}, None},
		"as they are comes first":       {[]Codec{LZ4}, []uint8{0, 1}, None},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, Choose(tc.own, tc.peer)) })
	}
}

func TestZerosEncodeAndDecode(t *testing.T) {
	data := make([]byte, 1<<20)
	p := LZ4.Encode([][]byte{data[:5], data[5:]})
	require.NotNil(t, p)
	defer p.Release()
	back := bytes.Repeat([]byte{1}, len(data))
	require.NoError(t, LZ4.Decode([][]byte{back}, [][]byte{p.Bytes()}))
	require.Equal(t, data, back)
}
