package tensorfile

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/tensor"
)

// zipped is a member of an archive that a test makes.
type zipped struct {
	zip.FileHeader
	data []byte
}

func npzOf(t testing.TB, members ...zipped) []byte {
	t.Helper()
	var out bytes.Buffer
	w := zip.NewWriter(&out)
	for _, m := range members {
		h := m.FileHeader
		f, err := w.CreateHeader(&h)
		require.NoError(t, err)
		_, err = f.Write(m.data)
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	return out.Bytes()
}

func stored(name string, data []byte) zipped {
	return zipped{zip.FileHeader{Name: name, Method: zip.Store}, data}
}

func deflated(name string, data []byte) zipped {
	return zipped{zip.FileHeader{Name: name, Method: zip.Deflate}, data}
}

var matrix = tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{30, 20}}

func matrixBytes() []byte {
	data := make([]byte, 30*20*4)
	for i := range data {
		data[i] = byte(i * 7)
	}
	return data
}

func TestAnNPZFileIsReadAsItsArrays(t *testing.T) {
	data := matrixBytes()
	file := npzOf(t,
		stored("plain.npy", npyOf(matrix, Layout{}, data)),
		deflated("layer/0.npy", npyOf(matrix, Layout{BigEndian: true}, data)),
		deflated("turned.npy", npyOf(matrix, Layout{Fortran: true}, data)),
		stored("empty.npy", npyOf(tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{0, 3}}, Layout{}, nil)),
	)
	path := filepath.Join(t.TempDir(), "x.npz")
	require.NoError(t, os.WriteFile(path, file, 0o600))
	z, err := OpenNPZ(path)
	require.NoError(t, err)
	require.Equal(t, []string{"plain", "layer/0", "turned", "empty"}, z.Names())
	for i, want := range []Layout{{}, {BigEndian: true}, {Fortran: true}} {
		a, err := z.Array(z.Names()[i])
		require.NoError(t, err)
		require.Equal(t, z.Names()[i], a.Name)
		require.Equal(t, want, a.Layout)
		require.True(t, a.Desc.Equal(matrix))
		got, err := io.ReadAll(a.Reader)
		require.NoError(t, err)
		require.True(t, bytes.Equal(data, got))
	}
	a, err := z.Array("empty")
	require.NoError(t, err)
	require.Equal(t, tensor.Shape{0, 3}, a.Shape)
	_, err = z.Array("none")
	require.ErrorIs(t, err, ErrNotFound)
	_, err = OpenNPZ(path + "none")
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestAnNPZFileThatIsNotOneIsRefused(t *testing.T) {
	data := matrixBytes()
	npy := npyOf(matrix, Layout{}, data)
	empty := npyOf(tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{0}}, Layout{}, nil)
	damage := func(file []byte, part []byte) []byte {
		at := bytes.Index(file, part)
		require.GreaterOrEqual(t, at, 0)
		file[at+len(part)-1] ^= 1
		return file
	}
	// sharing makes the entry of y in the directory point into x, behind by bytes.
	sharing := func(by byte) []byte {
		file := npzOf(t, stored("x.npy", npy), stored("y.npy", npy))
		at := bytes.LastIndex(file, []byte("PK\x01\x02")) + 42 // the offset of y
		binary.LittleEndian.PutUint32(file[at:], uint32(by))
		return file
	}
	inside := sharing(100)
	copy(inside[100:], inside[:30+len("x.npy")])
	for _, file := range [][]byte{sharing(0), inside} {
		_, err := readNPZ(bytes.NewReader(file), int64(len(file)))
		require.ErrorContains(t, err, "overlap")
	}
	bomb := npyOf(tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{1 << 40}}, Layout{}, nil)
	for name, tc := range map[string]struct {
		file []byte
		want error
	}{
		"no archive":                   {npy, ErrFormat},
		"nothing":                      {nil, ErrFormat},
		"cut":                          {npzOf(t, stored("x.npy", npy))[:2000], ErrFormat},
		"a member that is not .npy":    {npzOf(t, stored("x.txt", npy)), ErrUnsupported},
		"a member that lies":           {npzOf(t, stored("x.npy", []byte("hello"))), ErrFormat},
		"a member of objects":          {npzOf(t, stored("x.npy", npyFile(1, 0, "{'descr': '|O', 'fortran_order': False, 'shape': (3, 4), }\n"))), ErrUnsupported},
		"two entries for one member":   {sharing(0), ErrFormat},
		"two of a name":                {npzOf(t, stored("x.npy", npy), stored("x.npy", npy)), ErrFormat},
		"encrypted":                    {npzOf(t, zipped{zip.FileHeader{Name: "x.npy", Flags: 1}, npy}), ErrUnsupported},
		"a byte more":                  {npzOf(t, stored("x.npy", append(bytes.Clone(npy), 0))), ErrFormat},
		"a byte less":                  {npzOf(t, deflated("x.npy", npy[:len(npy)-1])), ErrFormat},
		"only a header of a tebibyte":  {npzOf(t, deflated("x.npy", bomb)), ErrFormat},
		"damaged bytes":                {damage(npzOf(t, stored("x.npy", npy)), data[:100]), ErrFormat},
		"a damaged header of an empty": {damage(npzOf(t, stored("x.npy", empty)), []byte("}  ")), ErrFormat},
	} {
		t.Run(name, func(t *testing.T) {
			z, err := readNPZ(bytes.NewReader(tc.file), int64(len(tc.file)))
			var a Array
			if err == nil {
				a, err = z.Array("x")
			}
			if err == nil {
				var got []byte
				got, err = io.ReadAll(a.Reader)
				require.Less(t, len(got), len(data), "the last byte of what is damaged")
			}
			require.ErrorIs(t, err, tc.want)
		})
	}
}

// A bomb takes no memory but what is read of it: its arrays are streams.
func TestAnArrayIsDecompressedAsItIsRead(t *testing.T) {
	d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{64 << 20}}
	file := npzOf(t, deflated("x.npy", npyOf(d, Layout{}, make([]byte, 64<<20))))
	require.Less(t, len(file), 100_000)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	z, err := readNPZ(bytes.NewReader(file), int64(len(file)))
	require.NoError(t, err)
	a, err := z.Array("x")
	require.NoError(t, err)
	n, err := io.Copy(io.Discard, a.Reader)
	require.NoError(t, err)
	require.EqualValues(t, 64<<20, n)
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(4<<20))
}

func FuzzNPZ(f *testing.F) {
	data := matrixBytes()
	f.Add(npzOf(f, stored("x.npy", npyOf(matrix, Layout{}, data)), deflated("y.npy", npyOf(matrix, Layout{BigEndian: true, Fortran: true}, data))))
	f.Add(npzOf(f, stored("x.npy", npyOf(tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{0}}, Layout{}, nil))))
	f.Fuzz(func(t *testing.T, file []byte) {
		typed := func(err error) {
			if err != nil && !errors.Is(err, ErrFormat) && !errors.Is(err, ErrUnsupported) {
				t.Fatalf("untyped error %v", err)
			}
		}
		z, err := readNPZ(bytes.NewReader(file), int64(len(file)))
		typed(err)
		if err != nil {
			return
		}
		for _, name := range z.Names() {
			a, err := z.Array(name)
			typed(err)
			if err != nil {
				continue
			}
			size, err := a.Bytes()
			if err != nil {
				t.Fatal(err)
			}
			if size == 0 {
				continue
			}
			n, err := io.Copy(io.Discard, a.Reader)
			typed(err)
			if err == nil && n != size || err != nil && n >= size {
				t.Fatalf("%d of %d bytes, %v", n, size, err)
			}
		}
	})
}
