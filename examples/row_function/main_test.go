package main

import (
	"math"
	"testing"

	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestNormsPassTheSuite(t *testing.T) {
	x := make([]float32, 3000*7)
	for i := range x {
		x[i] = float32(i%97) - 48
	}
	in, err := tensor.Of(x, 3000, 7)
	if err != nil {
		t.Fatal(err)
	}
	enginetest.Run(t, enginetest.Case{
		New:    enginetest.On(newHost, norms.Model),
		Inputs: []tensor.Tensor{in},
		Want:   lengths,
	})
}

func newHost(memory int64) *cpu.Host {
	return cpu.NewHost(cpu.HostConfig{MemoryBytes: memory})
}

// lengths is the slow, obvious way.
func lengths(in []tensor.Tensor) ([]tensor.Tensor, error) {
	x, err := tensor.Slice[float32](in[0])
	if err != nil {
		return nil, err
	}
	width := int(in[0].Shape[1])
	y := make([]float32, in[0].Shape[0])
	for i := range y {
		var sum float64
		for _, v := range x[i*width : (i+1)*width] {
			sum += float64(v) * float64(v)
		}
		y[i] = float32(math.Sqrt(sum))
	}
	out, err := tensor.Of(y, in[0].Shape[0], 1)
	return []tensor.Tensor{out}, err
}
