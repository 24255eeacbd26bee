package stream

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestAHelloNamesWhatItsSideDecodes(t *testing.T) {
	hello := func(m *Machine) []uint8 {
		var f frame.Frame
		_, ok := m.Next(0, &f)
		require.True(t, ok)
		return f.Hello.Codecs
	}
	own := []codec.Codec{codec.LZ4}
	m := New(Config{Session: tensor.ID{1}, Codecs: own}, 0)
	own[0] = 77 // copied
	require.Equal(t, []uint8{1}, hello(m))
	require.Empty(t, hello(New(Config{Session: tensor.ID{1}}, 0)))
	require.Len(t, hello(New(Config{Session: tensor.ID{1}, Codecs: make([]codec.Codec, frame.HelloCodecs+1)}, 0)), frame.HelloCodecs)
}

func TestASideSendsInTheFirstOfThePeersCodecsThatItKnows(t *testing.T) {
	late := make([]uint8, frame.HelloCodecs+1)
	for i := range late {
		late[i] = 200
	}
	late[frame.HelloCodecs] = 1
	for name, tc := range map[string]struct {
		own  []codec.Codec
		peer []uint8
		want codec.Codec
	}{
		"both know it":              {codec.All(), []uint8{1}, codec.LZ4},
		"one of the future first":   {codec.All(), []uint8{255, 1}, codec.LZ4},
		"a peer without any":        {codec.All(), nil, codec.None},
		"a side without any":        {nil, []uint8{1}, codec.None},
		"further down than we look": {codec.All(), late, codec.None},
	} {
		t.Run(name, func(t *testing.T) {
			m := New(Config{Server: true, Codecs: tc.own}, 0)
			require.Equal(t, codec.None, m.Status().Codec, "before hello")
			require.NoError(t, m.Control(0, &frame.Frame{Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: 1, Codecs: tc.peer}}))
			require.Equal(t, tc.want, m.Status().Codec)
		})
	}
}

func TestABadChunkInACodecFailsItsTensorAndTheSessionLives(t *testing.T) {
	good := frame.Chunk{}
	data := make([]byte, 64)
	good.Data = [][]byte{data}
	require.True(t, encode(&good))
	for name, tc := range map[string]struct {
		own   []codec.Codec
		codec uint8
		data  []byte
		text  string
	}{
		"not named by our hello":  {nil, 1, good.Data[0], "is encoded in lz4, which the hello of this side does not name"},
		"one of the future":       {codec.All(), 7, good.Data[0], "is encoded in codec 7, which the hello"},
		"no number of the wire":   {codec.All(), 255, good.Data[0], "is encoded in codec 255, which the hello"},
		"as long as its place":    {codec.All(), 1, data, "has 64 bytes of lz4, its place has 64"},
		"empty":                   {codec.All(), 1, nil, "has 0 bytes of lz4"},
		"cut short":               {codec.All(), 1, good.Data[0], "chunk 1: payload does not decode"},
		"as it is, but too short": {codec.All(), 0, data[:63], "has 63 bytes, its place has 64"},
	} {
		t.Run(name, func(t *testing.T) {
			m := New(Config{Server: true, Codecs: tc.own}, 0)
			require.NoError(t, m.Control(0, &frame.Frame{Hello: &frame.Hello{Version: frame.Version, Session: tensor.ID{1}, Checksum: 1}}))
			begin := func(call, id tensor.ID) {
				d := bytesDesc(id, call, 128, 64)
				d.SizeBytes = 128
				require.NoError(t, m.Control(0, &frame.Frame{Calls: []frame.Call{{ID: call, Model: "m", Inputs: []frame.Binding{{Port: "x", Tensor: id}}}}, Descs: []frame.Desc{d}}))
				require.NoError(t, m.Lend(0, id, make([]byte, 128), nil))
			}
			send := func(ch frame.Chunk) {
				ch.Sum = m.cfg.Check.Seed(ch.Tensor, ch.Index)
				for _, v := range ch.Data {
					ch.Sum = m.cfg.Check.Update(ch.Sum, v)
				}
				var c Claim
				if ok, err := m.Claim(0, &ch, &c); ok {
					got, failed := c.Copy(ch.Data)
					m.Commit(0, &c, got, failed)
				} else {
					require.NoError(t, err)
				}
			}
			begin(tensor.ID{2}, tensor.ID{3})
			send(frame.Chunk{Tensor: tensor.ID{3}, Index: 1, Codec: tc.codec, Data: [][]byte{tc.data}})
			var f frame.Frame
			_, ok := m.Next(0, &f)
			require.True(t, ok)
			for !ok || len(f.Failures) == 0 { // after hello and credit
				f.Reset()
				_, ok = m.Next(0, &f)
				require.True(t, ok)
			}
			require.Equal(t, frame.InvalidArgument, f.Failures[0].Code)
			require.Contains(t, f.Failures[0].Message, "tensor "+tensor.ID{3}.String())
			require.Contains(t, f.Failures[0].Message, tc.text)
			require.Equal(t, frame.InvalidArgument, f.Dones[0].Code)
			require.NoError(t, m.Status().Err)

			begin(tensor.ID{4}, tensor.ID{5})
			send(frame.Chunk{Tensor: tensor.ID{5}, Index: 0, Data: [][]byte{data}})
			if tc.own != nil {
				send(frame.Chunk{Tensor: tensor.ID{5}, Index: 1, Codec: 1, Data: good.Data})
				require.True(t, m.in.tensors[tensor.ID{5}].Asm.Whole())
				require.EqualValues(t, 128, m.Status().Stats.BytesIn, "payload is counted decoded")
			}
		})
	}
}
