package cpu

import (
	"fmt"
	"testing"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/builtin"
	"github.com/tensorferry/tensorferry/engine/stack"
	"github.com/tensorferry/tensorferry/tensor"
)

func BenchmarkReLU(b *testing.B) {
	for _, d := range []tensor.DataType{tensor.Float32, tensor.BFloat16} {
		b.Run("dtype="+d.String(), func(b *testing.B) {
			data := make([]byte, 1<<20)
			fill(data, 1)
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			for b.Loop() {
				relu(builtin.WordsOf(d), data)
			}
		})
	}
}

func BenchmarkLinear(b *testing.B) {
	for _, width := range []int64{128, 784, 1024, 4096} {
		b.Run(fmt.Sprintf("width=%d", width), func(b *testing.B) {
			w := floatTensor(1, width, width)
			m, err := stack.New(stack.Spec{Layers: []stack.Layer{{Kind: "linear", Weight: "w"}}}, map[string]tensor.Tensor{"w": w})
			if err != nil {
				b.Fatal(err)
			}
			layers := compile(m).kernels
			t := tile{rows: tileRows, width: int(width), x: make([]float32, tileRows*width), y: make([]float32, tileRows*width)}
			for i := range t.x {
				t.x[i] = float32(i%7) + 0.5
			}
			b.ReportAllocs()
			for b.Loop() {
				layers[0](b.Context(), &t)
				for i := range t.x {
					t.x[i] = 1
				}
			}
			b.ReportMetric(2*float64(tileRows*width*width)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
		})
	}
}

func BenchmarkAttention(b *testing.B) {
	const width = 768
	for _, positions := range []int{128, 512, 2048} {
		b.Run(fmt.Sprintf("positions=%d", positions), func(b *testing.B) {
			l := layers{head: width / 12}
			_, scores, queries := l.sizes(positions, positions)
			x, y := make([]float32, 3*width*positions), make([]float32, 3*width*positions)
			for i := range x {
				x[i] = float32(i%7) - 3
			}
			compute := attention(&stack.Step{In: 3 * width, Out: width, Heads: 12})
			t := tile{scores: make([]float32, scores), queries: make([]float32, queries)}
			b.ReportAllocs()
			for b.Loop() {
				t.rows, t.x, t.y = positions, x, y
				compute(b.Context(), &t)
			}
			b.ReportMetric(4*float64(positions*positions*width)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
		})
	}
}

// BenchmarkStep is a call of one position behind others, whose keys and values the sequence has.
func BenchmarkStep(b *testing.B) {
	const width = 128
	for _, past := range []int64{1, 64, 512} {
		b.Run(fmt.Sprintf("past=%d", past), func(b *testing.B) {
			h := NewHost(HostConfig{})
			defer h.Close()
			m, err := newStack(h, decoder(4, 4), decoderWeights(tensor.Float32, width))
			if err != nil {
				b.Fatal(err)
			}
			s := begin(b, m, past+1)
			defer s.Close()
			x := floatTensor(9, 1, past, width)
			for _, n := range []int64{past, 1} {
				if _, err := engine.Step(b.Context(), m, s, part(x, 0, n)); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				s.(*sequence).past = int(past)
				if _, err := engine.Step(b.Context(), m, s, part(x, 0, 1)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
