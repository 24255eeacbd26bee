// The kernels of package kernels: one entry for each of its launch structs, with the
// same parameters in the same order. Sizes have 64 bits, and every loop goes on by the
// size of the grid, so that any grid computes everything.
#include "floats.h"

// first and stride are where a thread begins in a row of elements, and how far it goes
// from one to its next.
static __device__ inline uint64_t first() {
	return (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

static __device__ inline uint64_t stride() {
	return (uint64_t)gridDim.x * blockDim.x;
}

// relu_words computes max(x, 0) for all elements of a word at once, as engine/cpu
// does: sign has the sign bit of each, nan the least magnitude that is NaN taken from
// its top, shift the bits of an element less one.
extern "C" __global__ void relu_words(uint64_t *x, uint64_t words, uint64_t sign, uint64_t nan, uint32_t shift) {
	for (uint64_t i = first(); i < words; i += stride()) {
		uint64_t v = x[i];
		uint64_t keep = (((v & ~sign) + nan) | ~v) & sign;
		x[i] = v & (keep | (keep - (keep >> (shift & 63))));
	}
}

// affine_f32 and affine_f64 round the product before they add, as engine/cpu does.
extern "C" __global__ void affine_f32(float *x, uint64_t n, float a, float b) {
	for (uint64_t i = first(); i < n; i += stride()) {
		x[i] = a * x[i] + b; // not fused: the compilers' flags say so
	}
}

extern "C" __global__ void affine_f64(double *x, uint64_t n, double a, double b) {
	for (uint64_t i = first(); i < n; i += stride()) {
		x[i] = a * x[i] + b;
	}
}

extern "C" __global__ void store_u64(uint64_t *y, uint64_t v) {
	if (first() == 0) {
		*y = v;
	}
}

extern "C" __global__ void activate_f32(float *x, uint64_t n, uint32_t activation) {
	for (uint64_t i = first(); i < n; i += stride()) {
		x[i] = floats::activate(x[i], activation);
	}
}

extern "C" __global__ void scale_f32(float *x, uint64_t n, float factor) {
	for (uint64_t i = first(); i < n; i += stride()) {
		x[i] = factor * x[i];
	}
}

extern "C" __global__ void add_f32(float *x, const float *y, uint64_t n) {
	for (uint64_t i = first(); i < n; i += stride()) {
		x[i] = x[i] + y[i];
	}
}

extern "C" __global__ void copy_f32(float *dst, const float *src, uint64_t n) {
	for (uint64_t i = first(); i < n; i += stride()) {
		dst[i] = src[i];
	}
}

// four is what a thread loads from shared memory at once: one access, not four that
// meet in a bank.
typedef float four __attribute__((vector_size(16), may_alias));

// linear_f32 computes a tile of 64 rows × 64 outputs per block, which has 256 threads:
// each keeps 4 × 4 sums, and in steps of 16 inputs all load what they share. A sum adds
// the products in the order of the inputs and nothing else, so its bits do not depend
// on the number of rows, nor on the tile it is in.
extern "C" __global__ void linear_f32(const float *__restrict__ x, const float *__restrict__ w,
                                      const float *__restrict__ bias, float *__restrict__ y,
                                      uint64_t rows, uint32_t in, uint32_t out, uint32_t activation) {
	// A line in shared memory has four more than it needs: so a four stays aligned, and
	// the 16 inputs of a row, which neighbors store, lie in 8 banks and not in one.
	enum { side = 64, depth = 16, own = 4, lines = 256 / depth, pitch = side + 4 };
	__shared__ __attribute__((aligned(16))) float xs[depth][pitch];
	__shared__ __attribute__((aligned(16))) float ws[depth][pitch];
	// What a thread loads: an input of every 16th row and output. What it computes.
	uint32_t column = threadIdx.x % depth, line = threadIdx.x / depth;
	uint32_t left = threadIdx.x % (side / own) * own, top = threadIdx.x / (side / own) * own;
	// clang takes a cast of the arrays themselves for less aligned than it is.
	const four *xfours = (const four *)&xs[0][top], *wfours = (const four *)&ws[0][left];

	for (uint64_t row0 = (uint64_t)blockIdx.y * side; row0 < rows; row0 += (uint64_t)gridDim.y * side) {
		for (uint64_t out0 = (uint64_t)blockIdx.x * side; out0 < out; out0 += (uint64_t)gridDim.x * side) {
			float sum[own][own] = {};
			for (uint64_t in0 = 0; in0 < in; in0 += depth) {
				uint64_t k = in0 + column;
#pragma unroll
				for (uint32_t i = line; i < line + side; i += lines) {
					uint64_t r = row0 + i, o = out0 + i;
					// Behind the last input the product is -0, which leaves any sum as
					// it is; 0 would turn -0 into 0.
					xs[column][i] = r < rows && k < in ? x[r * in + k] : 0.0f;
					ws[column][i] = o < out && k < in ? w[o * in + k] : -0.0f;
				}
				__syncthreads();
#pragma unroll
				for (uint32_t k = 0; k < depth; k++) {
					four a = xfours[k * pitch / own], b = wfours[k * pitch / own];
#pragma unroll
					for (uint32_t i = 0; i < own; i++) {
#pragma unroll
						for (uint32_t j = 0; j < own; j++) {
							sum[i][j] = __builtin_fmaf(a[i], b[j], sum[i][j]);
						}
					}
				}
				__syncthreads();
			}
#pragma unroll
			for (uint32_t i = 0; i < own; i++) {
#pragma unroll
				for (uint32_t j = 0; j < own; j++) {
					uint64_t r = row0 + top + i, o = out0 + left + j;
					if (r < rows && o < out) {
						y[r * out + o] = floats::activate(sum[i][j] + bias[o], activation);
					}
				}
			}
		}
	}
}
