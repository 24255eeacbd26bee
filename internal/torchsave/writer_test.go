package torchsave

import (
	"bytes"
	"flag"
	"hash/crc32"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

var rewrite = flag.Bool("rewrite", false, "write testdata/written-*.pt")

func entryOf(name string, d tensor.DataType, shape ...int64) tensorfile.Entry {
	return tensorfile.Entry{Name: name, Desc: tensor.Desc{DType: d, Shape: shape}}
}

// written is the file of tensors whose bytes count.
func written(t testing.TB, tensors []tensorfile.Entry, bare bool) (file []byte, all [][]byte) {
	t.Helper()
	p, err := NewParts(tensors, bare)
	require.NoError(t, err)
	var crcs []uint32
	for i, e := range tensors {
		size, err := e.Desc.Bytes()
		require.NoError(t, err)
		data := make([]byte, size)
		for j := range data {
			data[j] = byte(i + j)
		}
		file = append(file, p.Gap(i, crcs)...)
		require.EqualValues(t, len(file), p.Offset(i))
		require.Zero(t, len(file)%align)
		file, all, crcs = append(file, data...), append(all, data), append(crcs, crc32.ChecksumIEEE(data))
	}
	require.EqualValues(t, len(file), p.Offset(len(tensors)))
	return append(file, p.Gap(len(tensors), crcs)...), all
}

func TestWhatIsWrittenIsWhatItWas(t *testing.T) {
	for name, tc := range map[string]struct {
		tensors []tensorfile.Entry
		bare    bool
	}{
		"float32": {[]tensorfile.Entry{entryOf("", tensor.Float32, 2, 3)}, true},
		"uint16":  {[]tensorfile.Entry{entryOf("", tensor.Uint16)}, true},
		"empty":   {[]tensorfile.Entry{entryOf("", tensor.BFloat16, 0, 1<<40)}, true},
		"none":    {nil, false},
		"dict": {[]tensorfile.Entry{entryOf("größe", tensor.Float8E5M2, 300), entryOf("", tensor.Bool, 0), entryOf("a.b", tensor.Complex128, 1, 2, 1, 2, 1),
			entryOf(strings.Repeat("n", maxText), tensor.Int64)}, false},
	} {
		t.Run(name, func(t *testing.T) {
			file, data := written(t, tc.tensors, tc.bare)
			path := filepath.Join("testdata", "written-"+name+".pt")
			if *rewrite {
				require.NoError(t, os.WriteFile(path, file, 0o600))
			}
			golden, err := os.ReadFile(path)
			require.NoError(t, err)
			require.True(t, bytes.Equal(golden, file), "other bytes than %s has", path)

			f, err := Open(path)
			require.NoError(t, err)
			require.Equal(t, tc.bare, f.Bare)
			require.Len(t, f.Names(), len(tc.tensors))
			for i, e := range tc.tensors {
				a, err := f.Array(e.Name)
				require.NoError(t, err)
				require.True(t, a.Equal(e.Desc))
				got, err := io.ReadAll(a.Reader)
				require.NoError(t, err)
				require.True(t, bytes.Equal(data[i], got))
			}
			_, err = f.Array("no such")
			require.ErrorIs(t, err, tensorfile.ErrNotFound)
			require.NoError(t, f.Close())
		})
	}
}

func TestWhatCannotBeWrittenIsRefused(t *testing.T) {
	x := entryOf("x", tensor.Int8, 3)
	for name, tc := range map[string]struct {
		tensors []tensorfile.Entry
		want    string
	}{
		"no data type":           {[]tensorfile.Entry{entryOf("x", 0, 1)}, "bad data type"},
		"a negative axis":        {[]tensorfile.Entry{entryOf("x", tensor.Int8, -1)}, "bad shape"},
		"a shape of 2^80":        {[]tensorfile.Entry{entryOf("x", tensor.Int8, 1<<40, 1<<40)}, "too large"},
		"2^62 bytes":             {[]tensorfile.Entry{entryOf("", tensor.Int8, 1<<31, 1<<31)}, "more than"},
		"a name twice":           {[]tensorfile.Entry{x, x}, `"x" is taken`},
		"a name that is no text": {[]tensorfile.Entry{entryOf("\xff", tensor.Int8)}, "not UTF-8"},
		"a name of 5000 bytes":   {[]tensorfile.Entry{entryOf(strings.Repeat("x", 5000), tensor.Int8)}, "too long"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := NewParts(tc.tensors, false)
			require.ErrorContains(t, err, tc.want)
			typed(t, err)
		})
	}
	_, err := Bare(tensor.Desc{})
	require.ErrorIs(t, err, tensor.ErrDataType)
}

func TestThousandsOfTensorsAreReadAgain(t *testing.T) {
	var tensors []tensorfile.Entry
	for i := range 1 << 16 {
		tensors = append(tensors, entryOf("layers."+strconv.Itoa(i)+".weight", tensor.Uint8, int64(i%2)))
	}
	file, _ := written(t, tensors, false)
	f, err := parse(file)
	require.NoError(t, err)
	require.Len(t, f.Names(), len(tensors))
	for i := range maxFilePickle / maxText {
		tensors[i].Name += strings.Repeat("n", maxText-100)
	}
	_, err = NewParts(tensors, false)
	require.ErrorIs(t, err, tensor.ErrTooLarge)
}

func TestNumbersAreWrittenAsShortAsTheyAre(t *testing.T) {
	for _, n := range []int64{0, 1, 255, 256, 65535, 65536, math.MaxInt32, math.MaxInt32 + 1, 1 << 40, math.MaxInt64} {
		m := machine{most: 100}
		require.NotZero(t, m.step([]byte("\x80\x02")))
		b := appendNumber(nil, n)
		require.Equal(t, len(b), m.step(b))
		require.NoError(t, m.err)
		require.Equal(t, []any{n}, m.stack)
	}
}
