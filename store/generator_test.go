package store_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/background"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/generate"
	"github.com/tensorferry/tensorferry/tensor"
)

// bytesAt returns bytes [off,+n) of the tensor.
func bytesAt(off int64, n int, d tensor.DataType, seed uint64, fill generate.Fill) []byte {
	p := make([]byte, n)
	generate.Bytes(p, off, d, seed, fill)
	return p
}

func TestAGeneratorGivesViewsOfWhatItWasAskedFor(t *testing.T) {
	src := store.Generator()
	r, err := src(t.Context(), map[string]string{"dtype": "bfloat16", "shape": "50000000000,1", "seed": "9"})
	require.NoError(t, err)
	defer r.Release()
	require.Equal(t, tensor.Desc{DType: tensor.BFloat16, Shape: tensor.Shape{50000000000, 1}}, r.Info().Desc)
	const off = 99_999_999_990 // of 100 GB
	data, held, err := r.View(t.Context(), off, 10)
	require.NoError(t, err)
	require.Equal(t, bytesAt(off, 10, tensor.BFloat16, 9, generate.FillNormal), data)
	held.Release()
	_, _, err = r.View(t.Context(), off, 11)
	require.ErrorIs(t, err, store.ErrRange)

	scalar, err := src(t.Context(), map[string]string{"shape": ""})
	require.NoError(t, err)
	data, held, err = scalar.View(t.Context(), 0, 4)
	require.NoError(t, err)
	require.Equal(t, bytesAt(0, 4, tensor.Float32, 0, generate.FillNormal), data)
	held.Release()
	scalar.Release()
}

func TestGeneratedTensorsTakeTurns(t *testing.T) {
	for range max(1, runtime.GOMAXPROCS(0)-1) {
		var others background.Turn
		require.NoError(t, others.Work(t.Context()))
		defer others.End()
	}
	r, err := store.Generator()(t.Context(), map[string]string{"shape": "1000,1000"})
	require.NoError(t, err)
	defer r.Release()
	_, held, err := r.View(t.Context(), 0, background.PieceBytes)
	require.NoError(t, err, "what takes no time waits for nobody")
	held.Release()
	ctx, leave := context.WithCancelCause(t.Context())
	gone := errors.New("gone")
	time.AfterFunc(time.Millisecond, func() { leave(gone) })
	_, _, err = r.View(ctx, 0, background.PieceBytes+1)
	require.ErrorIs(t, err, gone)
}

func TestAGeneratedTensorIsTheSameInViewsOfAnySize(t *testing.T) {
	r, err := store.Generator()(t.Context(), map[string]string{"shape": "100000", "dtype": "complex64", "seed": "3"})
	require.NoError(t, err)
	defer r.Release()
	for _, n := range []int64{background.PieceBytes - 1, background.PieceBytes, background.PieceBytes + 1, 3*background.PieceBytes + 5} {
		data, held, err := r.View(t.Context(), 7, n)
		require.NoError(t, err)
		require.True(t, string(bytesAt(7, int(n), tensor.Complex64, 3, generate.FillNormal)) == string(data), n)
		held.Release()
	}
}

func TestAGeneratorSaysWhichParameterIsWrong(t *testing.T) {
	for text, params := range map[string]map[string]string{
		"shape is missing":                {},
		`no parameter "size"`:             {"shape": "2", "size": "2"},
		`"2x2"`:                           {"shape": "2x2"},
		"float33":                         {"shape": "2", "dtype": "float33"},
		`seed "-1" is not a whole number`: {"shape": "2", "seed": "-1"},
		`"noise" is not a fill`:           {"shape": "2", "fill": "noise"},
		"use uniform":                     {"shape": "2", "fill": "normal", "dtype": "int8"},
		"2^63":                            {"shape": "1099511627776,1099511627776"},
	} {
		r, err := store.Generator()(t.Context(), params)
		require.ErrorIs(t, err, store.ErrParams)
		require.ErrorContains(t, err, text)
		require.Nil(t, r)
	}
}

func TestAGeneratorQuotesNoMoreThanTheBeginningOfAValue(t *testing.T) {
	long := strings.Repeat("\x01", 4096)
	for _, key := range append([]string{"dtype", "fill", "seed", "shape"}, long) {
		params := map[string]string{"shape": "2"}
		params[key] = long
		_, err := store.Generator()(t.Context(), params)
		require.ErrorIs(t, err, store.ErrParams)
		require.ErrorContains(t, err, `\x01`)
		require.Less(t, len(err.Error()), 1024)
	}
}
