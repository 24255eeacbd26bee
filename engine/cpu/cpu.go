// Package cpu runs models in host memory: Go functions, chains of models, stack
// models from folders, and a few built-in ones. It is pure Go on gonum's BLAS.
//
// A result is bit-identical however the input was cut into chunks and blocks: the float32
// arithmetic of a row never depends on the rows it is computed with. float16, bfloat16 and
// float64 tensors are computed in float32 too and rounded to nearest even; only the built-in
// models keep float64. Blocks run on the workers of a Host, which owns their memory.
package cpu
