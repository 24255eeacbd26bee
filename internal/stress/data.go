package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"

	"github.com/tensorferry/tensorferry/tensor"
)

// base returns the memory that tensors are windows of: float32 of whole numbers,
// so that relu is exact and lz4 finds something; and what relu makes of it.
var base = sync.OnceValues(func() (x, y []byte) {
	x, y = make([]byte, baseBytes), make([]byte, baseBytes)
	r := rand.New(rand.NewPCG(1, 2))
	for at := 0; at < baseBytes; at += 4 {
		v := float32(r.IntN(1<<12) - 1<<11)
		binary.LittleEndian.PutUint32(x[at:], math.Float32bits(v))
		binary.LittleEndian.PutUint32(y[at:], math.Float32bits(max(v, 0)))
	}
	return x, y
})

// window is the content of one tensor: two that begin at different places differ
// in nearly every element.
type window struct{ at, n int }

// pick returns the window of n bytes that number says.
func pick(number uint64, n int) window {
	places := uint64(baseBytes-n)/4 + 1
	return window{int(number * 7919 % places * 4), n}
}

// data returns the bytes, which are shared, read-only.
func (w window) data() []byte {
	x, _ := base()
	return x[w.at : w.at+w.n : w.at+w.n]
}

// relu returns what relu makes of them, shared, read-only.
func (w window) relu() []byte {
	_, y := base()
	return y[w.at : w.at+w.n : w.at+w.n]
}

// desc has float32 where the bytes are whole ones.
func (w window) desc() tensor.Desc {
	if w.n%4 == 0 {
		return tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{int64(w.n / 4)}}
	}
	return tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(w.n)}}
}

// tensorOf returns a tensor of the bytes, which are shared, read-only.
func tensorOf(w window) tensor.Tensor { return tensor.Tensor{Desc: w.desc(), Data: w.data()} }

// same says how got differs from want.
func same(what string, got, want []byte) error {
	switch {
	case bytes.Equal(got, want):
		return nil
	case len(got) != len(want):
		return wrong("%s: %d bytes, not %d", what, len(got), len(want))
	}
	for at, b := range got {
		if b != want[at] {
			return wrong("%s: byte %d of %d is %#x, not %#x", what, at, len(want), b, want[at])
		}
	}
	return nil
}

// wrongError is the worst that can happen.
type wrongError struct{ text string }

func (e *wrongError) Error() string { return "wrong bytes: " + e.text }

func wrong(format string, args ...any) error { return &wrongError{fmt.Sprintf(format, args...)} }

// sizeOf returns a random size up to most: the edges, and each order of magnitude
// as often as another.
func sizeOf(r *rand.Rand, most int) int {
	if r.IntN(8) == 0 {
		edges := []int{0, 1, 4, 1023, 1024, 1025, 16383, 16384, 16385, mib - 1, mib, mib + 1}
		return min(edges[r.IntN(len(edges))], most)
	}
	return min(int(math.Exp(r.Float64()*math.Log(float64(most)+1))), most)
}

func mibs(n float64) string { return fmt.Sprintf("%.1f MiB", n/mib) }
