package tensorfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/tensor"
)

// laidOut is the obvious conversion of a tensor into a layout: element by element.
func laidOut(d tensor.Desc, l Layout, data []byte) []byte {
	width := d.DType.Bits() / 8
	out := make([]byte, len(data))
	index := make([]int64, len(d.Shape))
	for at := 0; at < len(data); at += width {
		to, step := int64(at/width), int64(1)
		if l.Fortran {
			to = 0
			for i, dim := range d.Shape {
				to += index[i] * step
				step *= dim
			}
		}
		e := out[int(to)*width:][:width]
		copy(e, data[at:])
		if l.BigEndian {
			for unit := swapped(d.DType); len(e) > 0; e = e[unit:] {
				slices.Reverse(e[:unit])
			}
		}
		for i := len(index) - 1; i >= 0; i-- {
			if index[i]++; index[i] < d.Shape[i] {
				break
			}
			index[i] = 0
		}
	}
	return out
}

// npyOf makes a .npy file of a tensor in a layout.
func npyOf(d tensor.Desc, l Layout, data []byte) []byte {
	var header bytes.Buffer
	if err := WriteNPYHeader(&header, d); err != nil {
		panic(err)
	}
	text := header.String()[10:]
	if l.BigEndian {
		text = strings.Replace(text, "'<", "'>", 1)
	}
	if l.Fortran {
		text = strings.Replace(text, "False", "True", 1)
	}
	return append(npyFile(1, 0, text), laidOut(d, l, data)...)
}

func TestEveryLayoutIsConverted(t *testing.T) {
	shapes := []tensor.Shape{{}, {0}, {5}, {1, 7}, {3, 4}, {2, 0, 3}, {2, 3, 4}, {5, 1, 2, 3}, {3, 40_000}, {40_000, 3}}
	for _, dtype := range []tensor.DataType{tensor.Bool, tensor.Int16, tensor.Float32, tensor.Complex64, tensor.Int64, tensor.Complex128} {
		for _, shape := range shapes {
			d := tensor.Desc{DType: dtype, Shape: shape}
			size, err := d.Bytes()
			require.NoError(t, err)
			data := make([]byte, size)
			for i := range data {
				data[i] = byte(rand.Uint32())
			}
			for _, l := range []Layout{{}, {BigEndian: true}, {Fortran: true}, {BigEndian: true, Fortran: true}} {
				t.Run(d.String()+" "+fmt.Sprint(l), func(t *testing.T) {
					file := npyOf(d, l, data)
					path := filepath.Join(t.TempDir(), "x.npy")
					require.NoError(t, os.WriteFile(path, file, 0o600))
					a, closer, err := OpenNPY(path)
					require.NoError(t, err)
					got := a.Data
					if a.Reader != nil {
						require.NotEmpty(t, a.Layout)
						got, err = io.ReadAll(iotest.OneByteReader(a.Reader))
						require.NoError(t, err)
					}
					require.True(t, bytes.Equal(data, got))
					require.NoError(t, closer.Close())

					r := bytes.NewReader(file)
					seen, layout, err := ReadNPYLayout(r)
					require.NoError(t, err)
					require.Equal(t, a.Layout, layout)
					require.True(t, seen.Equal(d))
					in, err := layout.Stream(seen, iotest.HalfReader(r))
					require.NoError(t, err)
					got, err = io.ReadAll(in)
					require.NoError(t, err)
					require.True(t, bytes.Equal(data, got))
				})
			}
		}
	}
}

func TestALongRowIsTransposedInPieces(t *testing.T) {
	d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{2, 3, 4<<20 + 1}}
	size, err := d.Bytes()
	require.NoError(t, err)
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(i * i >> 7)
	}
	got, err := io.ReadAll(Layout{Fortran: true}.reader(d, laidOut(d, Layout{Fortran: true}, data)))
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, got))
}

func TestAStreamThatEndsWithinAnArrayIsAnError(t *testing.T) {
	d := tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{2, 2}}
	for name, l := range map[string]Layout{"big-endian": {BigEndian: true}, "Fortran": {Fortran: true}} {
		t.Run(name, func(t *testing.T) {
			for n := 1; n < 16; n++ {
				r, err := l.Stream(d, bytes.NewReader(make([]byte, n)))
				require.NoError(t, err)
				got, err := io.ReadAll(r)
				require.Less(t, len(got), 16)
				require.True(t, n%4 == 0 && !l.Fortran || errors.Is(err, io.ErrUnexpectedEOF), "%d bytes: %v", n, err)
			}
		})
	}
	_, err := Layout{Fortran: true}.Stream(tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{2, MaxFortranStream}}, nil)
	require.ErrorIs(t, err, ErrUnsupported)
	_, _, err = OpenNPY(filepath.Join(t.TempDir(), "none.npy"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestAnArrayInFortranOrderIsHeldOnceAndUntilItsLastByte(t *testing.T) {
	const size = 16 << 20
	d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{1 << 12, 1 << 12}}
	var readers []io.Reader
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range 4 {
		r, err := Layout{Fortran: true}.Stream(d, zeros{})
		require.NoError(t, err)
		readers = append(readers, r)
		_, err = io.CopyN(io.Discard, r, size)
		require.NoError(t, err)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	require.Less(t, after.HeapAlloc, before.HeapAlloc+size/4)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(4*(size+1<<20)))
	for _, r := range readers {
		_, err := r.Read(make([]byte, 1))
		require.Equal(t, io.EOF, err)
	}
}

// zeros yields zero bytes without end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
