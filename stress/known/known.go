// Package known has tensors of which every byte is known, however many there are, and
// holds what a server gives back against them. It is what the loads of this module
// send. Every tensor is a window of one memory, which is shared and nobody writes to.
package known

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	mib = 1 << 20
	// baseBytes is the memory that every tensor is a window of.
	baseBytes = 48 * mib
	// LargestBytes is the most of it that one tensor has.
	LargestBytes = 32 * mib
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

// Window is the content of one tensor: two that begin at different places differ
// in nearly every element.
type Window struct{ at, n int } //nolint:recvcheck // nil is no tensor, in Is

// Pick returns the window of n bytes that number says.
func Pick(number uint64, n int) Window {
	places := uint64(baseBytes-n)/4 + 1
	return Window{int(number * 7919 % places * 4), n}
}

// Any returns a window of n bytes.
func Any(r *rand.Rand, n int) Window { return Pick(r.Uint64N(1<<32), n) }

// Data returns the bytes, which are shared, read-only.
func (w Window) Data() []byte {
	x, _ := base()
	return x[w.at : w.at+w.n : w.at+w.n]
}

// ReLU returns what relu makes of them, shared, read-only.
func (w Window) ReLU() []byte {
	_, y := base()
	return y[w.at : w.at+w.n : w.at+w.n]
}

// Desc has float32 where the bytes are whole ones.
func (w Window) Desc() tensor.Desc {
	if w.n%4 == 0 {
		return tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{int64(w.n / 4)}}
	}
	return tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(w.n)}}
}

// Tensor returns one of the bytes, which are shared, read-only.
func (w Window) Tensor() tensor.Tensor { return tensor.Tensor{Desc: w.Desc(), Data: w.Data()} }

// Input shares the tensor under a name, from memory or, one of three times, from a reader.
// Without r it is from memory.
func (w Window) Input(name string, r *rand.Rand) client.Input {
	in := client.Input{Name: name, Desc: w.Desc(), Data: w.Data()}
	if r != nil && r.IntN(3) == 0 {
		in.Data, in.Reader = nil, bytes.NewReader(w.Data())
	}
	return in
}

// Pull pulls tensors by their names. Each summary has its own error.
func Pull(ctx context.Context, c *client.Client, names ...string) ([]client.Summary, error) {
	var req client.PullRequest
	for _, name := range names {
		req.Select = append(req.Select, client.Selection{Name: name})
	}
	got, err := c.Pull(ctx, req)
	if len(got) != len(names) {
		return nil, fmt.Errorf("%d summaries of %d tensors: %w", len(got), len(names), err)
	}
	return got, nil
}

// Is returns an error if a pulled tensor is not w; nil is a tensor that must not be
// there.
func (w *Window) Is(s *client.Summary) error {
	switch {
	case w == nil && status.Code(s.Err) == codes.NotFound:
		return nil
	case w == nil:
		return Wrong("%s is there, with %d bytes: %v", s.Name, s.Bytes, s.Err)
	case s.Err != nil:
		return s.Err
	case !s.Desc.Equal(w.Desc()):
		return Wrong("%s is %v, not %v", s.Name, s.Desc, w.Desc())
	}
	return Same(s.Name, s.Data, w.Data())
}

// Same says how got differs from want. It borrows both.
func Same(what string, got, want []byte) error {
	switch {
	case bytes.Equal(got, want):
		return nil
	case len(got) != len(want):
		return Wrong("%s: %d bytes, not %d", what, len(got), len(want))
	}
	for at, b := range got {
		if b != want[at] {
			return Wrong("%s: byte %d of %d is %#x, not %#x", what, at, len(want), b, want[at])
		}
	}
	return nil
}

// WrongError is the worst that can happen.
type WrongError struct{ text string }

func (e *WrongError) Error() string { return "wrong bytes: " + e.text }

// Wrong returns a WrongError.
func Wrong(format string, args ...any) error { return &WrongError{fmt.Sprintf(format, args...)} }

// Size returns a random size up to most: the edges, and each order of magnitude
// as often as another.
func Size(r *rand.Rand, most int) int {
	if r.IntN(8) == 0 {
		edges := []int{0, 1, 4, 1023, 1024, 1025, 16383, 16384, 16385, mib - 1, mib, mib + 1}
		return min(edges[r.IntN(len(edges))], most)
	}
	return min(int(math.Exp(r.Float64()*math.Log(float64(most)+1))), most)
}

// Held shares data: it is a reader whose second half comes when it is let go.
func Held(data []byte, let <-chan struct{}) io.Reader {
	half := len(data) / 2
	return io.MultiReader(bytes.NewReader(data[:half]), gate(let), bytes.NewReader(data[half:]))
}

// gate is a reader of nothing, until it is let go.
type gate <-chan struct{}

func (g gate) Read([]byte) (int, error) {
	<-g
	return 0, io.EOF
}
