package main

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/tensor"
)

// base returns the memory that tensors are windows of, float32 of few digits, so that
// lz4 finds something; and what relu makes of it.
var base = sync.OnceValues(func() (x, y []byte) {
	x = make([]byte, baseBytes)
	bench.FillFloats(x)
	for at := 0; at < baseBytes; at += 4 {
		x[at], x[at+1] = 0, 0
	}
	y = bytes.Clone(x)
	bench.Rectify(y)
	return x, y
})

// window is the content of one tensor: two that begin at different places differ
// in nearly every element.
type window struct{ at, n int } //nolint:recvcheck // nil is no tensor, in is

// pick returns the window of n bytes that number says.
func pick(number uint64, n int) window {
	places := uint64(baseBytes-n)/4 + 1
	return window{int(number * 7919 % places * 4), n}
}

// anyOf returns a window of n bytes.
func anyOf(r *rand.Rand, n int) window { return pick(r.Uint64N(1<<32), n) }

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

// tensor returns one of the bytes, which are shared, read-only.
func (w window) tensor() tensor.Tensor { return tensor.Tensor{Desc: w.desc(), Data: w.data()} }

// input is the tensor under a name, from memory or, one of three times, from a reader.
// Without r it is from memory.
func (w window) input(name string, r *rand.Rand) client.Input {
	in := client.Input{Name: name, Desc: w.desc(), Data: w.data()}
	if r != nil && r.IntN(3) == 0 {
		in.Data, in.Reader = nil, bytes.NewReader(w.data())
	}
	return in
}

// is returns an error if a pulled tensor is not w; nil is a tensor that must not be
// there.
func (w *window) is(s *client.Summary) error {
	switch {
	case w == nil && status.Code(s.Err) == codes.NotFound:
		return nil
	case w == nil:
		return wrong("%s is there, with %d bytes: %v", s.Name, s.Bytes, s.Err)
	case s.Err != nil:
		return s.Err
	case !s.Desc.Equal(w.desc()):
		return wrong("%s is %v, not %v", s.Name, s.Desc, w.desc())
	}
	return same(s.Name, s.Data, w.data())
}

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

func mibs[T int | int64 | float64](n T) string { return fmt.Sprintf("%.1f MiB", float64(n)/mib) }
