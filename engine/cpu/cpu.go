// Package cpu runs models in host memory: stack models from folders, and a few
// built-in ones. It is pure Go on gonum's BLAS.
//
// A result is bit-identical however the input was cut into chunks and blocks: the
// float32 arithmetic of a row never depends on the rows it is computed with.
// float16, bfloat16 and float64 tensors are computed in float32 too and rounded to
// nearest even; only the built-in models keep float64. It starts no goroutine:
// blocks run on the workers of the engine.Host, which owns their memory.
package cpu
