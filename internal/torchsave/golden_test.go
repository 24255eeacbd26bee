package torchsave

import (
	"bytes"
	"compress/zlib"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"hash/crc32"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// golden is a file of a torch, and what is in it. testdata/make.py writes them.
type golden struct {
	name, torch string
	file        []byte
	File        string
	Refused     *string
	Tensors     []struct {
		Name, DType, Hex string
		Shape            tensor.Shape
		Strides          []int64
	}
}

// large is a file of 4 GiB of zeros, and what comes before and behind them.
type large struct {
	Head, Tail string
	Zeros      int64
}

func goldens(t testing.TB) []golden {
	list, _ := allGoldens(t)
	return list
}

func unpacked(t testing.TB, text string) []byte {
	t.Helper()
	packed, err := base64.StdEncoding.DecodeString(text)
	require.NoError(t, err)
	r, err := zlib.NewReader(bytes.NewReader(packed))
	require.NoError(t, err)
	data, err := io.ReadAll(r)
	require.NoError(t, err)
	return data
}

func allGoldens(t testing.TB) (list []golden, largest []large) {
	t.Helper()
	paths, err := filepath.Glob("testdata/torch-*.json")
	require.NoError(t, err)
	require.Len(t, paths, 2)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		var all struct {
			Version string
			Large   large
			Cases   map[string]golden
		}
		require.NoError(t, json.Unmarshal(text, &all))
		largest = append(largest, all.Large)
		for _, name := range slices.Sorted(maps.Keys(all.Cases)) {
			g := all.Cases[name]
			g.name, g.torch, g.file = name, all.Version, unpacked(t, g.File)
			list = append(list, g)
		}
	}
	return list, largest
}

// goldenOf returns the file of one case of the newest torch.
func goldenOf(t testing.TB, name string) []byte {
	t.Helper()
	for _, g := range goldens(t) {
		if g.name == name && strings.HasPrefix(g.torch, "2.") {
			return g.file
		}
	}
	t.Fatalf("no golden file %q", name)
	return nil
}

// read feeds a file in pieces to a Reader.
func read(file []byte, pieces int, most int64) (l Layout, known bool, window []byte, err error) {
	r := NewReader(most)
	for piece := range slices.Chunk(file, pieces) {
		for len(piece) > 0 {
			var data []byte
			if data, piece, err = r.Next(piece); err != nil {
				l, known = r.Layout()
				return l, known, window, err
			}
			window = append(window, data...)
		}
	}
	l, known = r.Layout()
	return l, known, window, r.Close()
}

// dense returns the bytes of a tensor, row-major.
func dense(t testing.TB, l Layout, window []byte) []byte {
	t.Helper()
	size, err := l.Bytes()
	require.NoError(t, err)
	require.Len(t, window, int(l.Window))
	data := make([]byte, size)
	l.Gather(data, window, 0)
	if l.Dense() {
		require.Equal(t, window, append([]byte(nil), data...))
	}
	return data
}

func TestWhatTorchSavesIsRead(t *testing.T) {
	for _, g := range goldens(t) {
		t.Run(g.torch+" "+g.name, func(t *testing.T) {
			f, err := parse(g.file)
			_, _, _, streamed := read(g.file, len(g.file), 1<<32)
			if g.Refused != nil {
				for _, err := range []error{err, streamed} {
					require.ErrorContains(t, err, *g.Refused)
					require.ErrorIs(t, err, tensorfile.ErrUnsupported)
				}
				return
			}
			require.NoError(t, err)
			require.Len(t, f.Names(), len(g.Tensors))
			require.Equal(t, len(g.Tensors) == 1 && g.Tensors[0].Name == "", f.Bare)
			if !f.Bare {
				require.ErrorContains(t, streamed, "a dict of tensors")
			}
			for i, want := range g.Tensors {
				require.Equal(t, want.Name, f.Names()[i])
				a, err := f.Array(want.Name)
				require.NoError(t, err)
				require.Equal(t, want.DType, a.DType.String())
				require.True(t, slices.Equal(want.Shape, a.Shape), "%v", a.Shape)
				require.True(t, slices.Equal(want.Strides, f.entries[want.Name].Strides))
				if size, _ := a.Bytes(); want.Hex == "" && size > 0 {
					continue // too large to have been written down
				}
				data, err := io.ReadAll(a.Reader)
				require.NoError(t, err)
				require.Equal(t, want.Hex, hex.EncodeToString(data))
				if !f.Bare {
					continue
				}
				for _, pieces := range []int{1, 7, 64, 4096, len(g.file)} {
					l, known, window, err := read(g.file, pieces, 1<<32)
					require.NoError(t, err)
					require.True(t, known)
					require.True(t, l.Equal(a.Desc))
					require.Equal(t, want.Hex, hex.EncodeToString(dense(t, l, window)))
				}
				testWritten(t, a.Desc, data)
			}
		})
	}
}

// testWritten writes a tensor, and reads it again.
func testWritten(t *testing.T, d tensor.Desc, data []byte) {
	t.Helper()
	p, err := Bare(d)
	require.NoError(t, err)
	head := p.Gap(0, nil)
	file := slices.Concat(head, data, p.Gap(1, []uint32{crc32.ChecksumIEEE(data)}))
	require.Len(t, file, int(p.Size()))
	require.Zero(t, len(head)%align)
	l, _, window, err := read(file, 100, int64(len(data)))
	require.NoError(t, err)
	require.True(t, l.Equal(d))
	require.True(t, l.Dense())
	require.Equal(t, data, append([]byte{}, window...))
	f, err := parse(file)
	require.NoError(t, err)
	require.True(t, f.Bare)
}

// The layout is known before the storage comes.
func TestTheLayoutIsKnownEarly(t *testing.T) {
	for _, g := range goldens(t) {
		if len(g.Tensors) != 1 || g.Tensors[0].Name != "" || g.name == "rank 32" {
			continue
		}
		_, known, _, err := read(g.file[:400], 400, 1<<40)
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		require.True(t, known, g.name)
	}
}

// From 4 GiB on sizes and offsets are in ZIP64's fields.
func TestAStorageOfFourGiB(t *testing.T) {
	d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{1 << 32}}
	zeros, sum := make([]byte, 1<<20), uint32(0)
	for range 1 << 12 {
		sum = crc32.Update(sum, crc32.IEEETable, zeros)
	}
	p, err := Bare(d)
	require.NoError(t, err)
	files := [][2][]byte{{p.Gap(0, nil), p.Gap(1, []uint32{sum})}}
	_, all := allGoldens(t)
	for _, l := range all {
		require.EqualValues(t, 1<<32, l.Zeros)
		files = append(files, [2][]byte{unpacked(t, l.Head), unpacked(t, l.Tail)})
	}
	for _, file := range files {
		r, window := NewReader(1<<32), int64(0)
		feed := func(piece []byte) {
			for len(piece) > 0 {
				data, rest, err := r.Next(piece)
				require.NoError(t, err)
				window, piece = window+int64(len(data)), rest
			}
		}
		feed(file[0])
		l, known := r.Layout()
		require.True(t, known)
		require.True(t, l.Equal(d))
		for range 1 << 12 {
			feed(zeros)
		}
		feed(file[1])
		require.NoError(t, r.Close())
		require.EqualValues(t, 1<<32, window)
	}
	require.EqualValues(t, len(files[0][0])+1<<32+len(files[0][1]), p.Size())
}
