package cpu

import (
	"math/rand/v2"

	"github.com/tensorferry/tensorferry/tensor"
)

// fill makes all bytes random: any bit pattern, NaNs included.
func fill(data []byte, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 0))
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
}

// floatTensor is a float32 tensor of normal numbers.
func floatTensor(seed uint64, shape ...int64) tensor.Tensor {
	rng := rand.New(rand.NewPCG(seed, 0))
	n, err := tensor.Shape(shape).Elements()
	if err != nil {
		panic(err)
	}
	data := make([]float32, n)
	for i := range data {
		data[i] = float32(rng.NormFloat64())
	}
	t, err := tensor.Of(data, shape...)
	if err != nil {
		panic(err)
	}
	return t
}
