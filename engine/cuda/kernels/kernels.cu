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

// affine_f32 and affine_f64 round the product before they add, as engine/cpu does. The
// elements of affine_f32 are of any type, and computed in float32.
extern "C" __global__ void affine_f32(uint8_t *x, uint64_t n, float a, float b, uint32_t type) {
	for (uint64_t i = first(); i < n; i += stride()) {
		// Not fused: the compilers' flags say so.
		floats::put(x, i, type, a * floats::get(x, i, type) + b);
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

// add_f32 adds y, of so many elements, to each as many of x.
extern "C" __global__ void add_f32(float *x, const float *y, uint64_t n, uint64_t of) {
	for (uint64_t i = first(); i < n; i += stride()) {
		x[i] = x[i] + y[i % of];
	}
}

extern "C" __global__ void copy_f32(float *dst, const float *src, uint64_t n) {
	for (uint64_t i = first(); i < n; i += stride()) {
		dst[i] = src[i];
	}
}

// convert makes elements of one type of those of another.
extern "C" __global__ void convert(uint8_t *__restrict__ dst, const uint8_t *__restrict__ src, uint64_t n, uint32_t to, uint32_t from) {
	for (uint64_t i = first(); i < n; i += stride()) {
		floats::put(dst, i, to, floats::get(src, i, from));
	}
}

// gate_f32 makes rows of width numbers of rows of twice as many.
extern "C" __global__ void gate_f32(float *__restrict__ y, const float *__restrict__ x, uint64_t n, uint32_t width, uint32_t activation) {
	for (uint64_t i = first(); i < n; i += stride()) {
		const float *half = x + i / width * 2 * width + i % width;
		y[i] = floats::activate(half[0], activation) * half[width];
	}
}

// embed_f32 looks up weights, of any type, by int32 or, if wide, int64.
extern "C" __global__ void embed_f32(float *__restrict__ y, const uint8_t *__restrict__ ids, const uint8_t *__restrict__ weight,
                                     uint64_t n, uint32_t width, uint32_t wide, uint32_t type) {
	for (uint64_t i = first(); i < n; i += stride()) {
		uint64_t at = i / width;
		uint64_t id = wide ? ((const uint64_t *)ids)[at] : ((const uint32_t *)ids)[at];
		y[i] = floats::get(weight, id * width + i % width, type);
	}
}

// team is how many threads share a row: more for a wide one, so that few of those keep
// a GPU busy, too. A sum depends on it, and so on nothing but the row.
static __device__ inline uint32_t team(uint32_t width) { return width <= 4096 ? 32 : 256; }

struct plus {
	static __device__ inline double of(double a, double b) { return a + b; }
};
struct largest {
	static __device__ inline double of(double a, double b) { return b > a || b != b ? b : a; }
};

// gathered returns Op of what all threads of a team have, to each of them.
template <typename Op> static __device__ inline double gathered(double x, double *all, uint32_t of) {
	all[threadIdx.x] = x;
	__syncthreads();
	for (uint32_t half = of / 2; half > 0; half /= 2) {
		if (threadIdx.x % of < half) {
			all[threadIdx.x] = Op::of(all[threadIdx.x], all[threadIdx.x + half]);
		}
		__syncthreads();
	}
	x = all[threadIdx.x / of * of];
	__syncthreads();
	return x;
}

// norm_f32 and softmax_f32 sum up in float64, as engine/cpu does: rows are read from
// memory more often than a sum takes, even on GPUs that have one such unit to 64 others.
extern "C" __global__ void norm_f32(float *x, const float *__restrict__ weight, const float *__restrict__ bias, uint64_t rows, uint32_t width, uint32_t centered, double eps) {
	__shared__ double all[256];
	uint32_t of = team(width), teams = blockDim.x / of, begin = threadIdx.x % of;
	for (uint64_t row0 = (uint64_t)blockIdx.x * teams; row0 < rows; row0 += (uint64_t)gridDim.x * teams) {
		uint64_t row = row0 + threadIdx.x / of;
		uint32_t n = row < rows ? width : 0;
		float *line = x + row * width;
		double mean = 0, squares = 0;
		if (centered) {
			for (uint32_t i = begin; i < n; i += of) {
				mean += line[i];
			}
			mean = gathered<plus>(mean, all, of) / width;
		}
		for (uint32_t i = begin; i < n; i += of) {
			double d = line[i] - mean;
			squares += d * d;
		}
		double scale = 1 / __builtin_sqrt(gathered<plus>(squares, all, of) / width + eps);
		for (uint32_t i = begin; i < n; i += of) {
			line[i] = (float)((line[i] - mean) * scale * weight[i] + bias[i]);
		}
	}
}

extern "C" __global__ void softmax_f32(float *x, uint64_t rows, uint32_t width) {
	__shared__ double all[256];
	uint32_t of = team(width), teams = blockDim.x / of, begin = threadIdx.x % of;
	for (uint64_t row0 = (uint64_t)blockIdx.x * teams; row0 < rows; row0 += (uint64_t)gridDim.x * teams) {
		uint64_t row = row0 + threadIdx.x / of;
		uint32_t n = row < rows ? width : 0;
		float *line = x + row * width;
		double top = -__builtin_inf(), sum = 0;
		for (uint32_t i = begin; i < n; i += of) {
			top = largest::of(top, line[i]);
		}
		top = gathered<largest>(top, all, of);
		for (uint32_t i = begin; i < n; i += of) {
			float e = floats::exponential(line[i], (float)top);
			sum += e;
			line[i] = e;
		}
		sum = gathered<plus>(sum, all, of);
		for (uint32_t i = begin; i < n; i += of) {
			line[i] = line[i] / (float)sum;
		}
	}
}

// four is what a thread loads from shared memory at once: one access, not four that
// meet in a bank.
typedef float four __attribute__((vector_size(16), may_alias));

// A block of 256 threads computes a tile of 64 rows × 64 columns of a product: each keeps
// 4 × 4 sums, and in steps of 16 all load what they share. A line in shared memory has
// four more than it needs: so a four stays aligned, and the 16 inputs of a row, which
// neighbors store, lie in 8 banks and not in one.
enum { side = 64, depth = 16, own = 4, lines = 256 / depth, pitch = side + 4 };
typedef float line[pitch];

// multiply adds the products of what the threads have loaded, in order. It may skip those
// with an x of 0, whatever w is.
template <bool skip = false> static __device__ inline void multiply(float sum[own][own], const line *xs, const line *ws, uint32_t top, uint32_t left) {
	// clang takes a cast of the arrays themselves for less aligned than it is.
	const four *xfours = (const four *)&xs[0][top], *wfours = (const four *)&ws[0][left];
#pragma unroll
	for (uint32_t k = 0; k < depth; k++) {
		four a = xfours[k * pitch / own], b = wfours[k * pitch / own];
#pragma unroll
		for (uint32_t i = 0; i < own; i++) {
#pragma unroll
			for (uint32_t j = 0; j < own; j++) {
				if (!skip || a[i] != 0) {
					sum[i][j] = __builtin_fmaf(a[i], b[j], sum[i][j]);
				}
			}
		}
	}
}

// linear computes linear_f32 for weights of one type.
template <typename W>
static __device__ inline void linear(const float *__restrict__ x, const W *__restrict__ w, const float *__restrict__ bias, float *__restrict__ y,
                                     uint64_t rows, uint32_t in, uint32_t out, uint32_t activation, line *xs, line *ws) {
	// What a thread loads: an input of every 16th row and output. What it computes.
	uint32_t column = threadIdx.x % depth, begin = threadIdx.x / depth;
	uint32_t left = threadIdx.x % (side / own) * own, top = threadIdx.x / (side / own) * own;
	float xn[side / lines], wn[side / lines]; // are loaded while others are multiplied
	uint32_t half = 0;                        // of xs and ws: others may still read from the other
	for (uint64_t row0 = (uint64_t)blockIdx.y * side; row0 < rows; row0 += (uint64_t)gridDim.y * side) {
		for (uint64_t out0 = (uint64_t)blockIdx.x * side; out0 < out; out0 += (uint64_t)gridDim.x * side) {
			// Of the rows and outputs here, those before these are there.
			uint64_t xr = rows - row0, wr = out - out0, step = (uint64_t)lines * in;
			const float *xp = x + (row0 + begin) * in;
			const W *wp = w + (out0 + begin) * in;
			auto load = [&](uint64_t k) {
#pragma unroll
				for (uint32_t i = 0; i < side / lines; i++) {
					// Behind the last input the product is -0, which leaves any sum as
					// it is; 0 would turn -0 into 0.
					xn[i] = begin + i * lines < xr && k < in ? xp[i * step + k] : 0.0f;
					wn[i] = begin + i * lines < wr && k < in ? floats::widen(wp[i * step + k]) : -0.0f;
				}
			};
			float sum[own][own] = {};
			load(column);
			for (uint64_t in0 = 0; in0 < in; in0 += depth, half ^= depth) {
#pragma unroll
				for (uint32_t i = 0; i < side / lines; i++) {
					xs[half + column][begin + i * lines] = xn[i];
					ws[half + column][begin + i * lines] = wn[i];
				}
				__syncthreads();
				load(in0 + depth + column);
				multiply(sum, xs + half, ws + half, top, left);
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

// linear_f32 has a tile per block. A sum adds the products in the order of the inputs and
// nothing else, so its bits do not depend on the number of rows, nor on the tile it is in.
// Two blocks, which have 128 registers a thread, run on a multiprocessor at once.
extern "C" __launch_bounds__(256, 2) __global__ void linear_f32(const float *__restrict__ x, const uint8_t *__restrict__ w, const float *__restrict__ bias, float *__restrict__ y,
                                      uint64_t rows, uint32_t in, uint32_t out, uint32_t activation, uint32_t type) {
	__shared__ __attribute__((aligned(16))) line xs[2 * depth], ws[2 * depth];
	switch (type) {
	case floats::F16: return linear(x, (const floats::f16 *)w, bias, y, rows, in, out, activation, xs, ws);
	case floats::BF16: return linear(x, (const floats::bf16 *)w, bias, y, rows, in, out, activation, xs, ws);
	}
	linear(x, (const float *)w, bias, y, rows, in, out, activation, xs, ws);
}

// attention_f32 computes a tile of 64 queries of one head of one item per block, against
// 64 keys after the other, with the softmax of those so far: what was summed up is
// multiplied by e^(largest score before - now) at each step. So it needs no memory for
// scores, and the order of its sums depends on the item alone. A head of more than 64
// columns has its scores computed again for each 64.
extern "C" __global__ void attention_f32(const float *__restrict__ qkv, const uint8_t *__restrict__ mask, float *__restrict__ y,
                                         uint64_t items, uint32_t positions, uint32_t width, uint32_t heads, uint32_t causal, float scale) {
	__shared__ __attribute__((aligned(16))) line as[depth], bs[depth], scores[side];
	__shared__ float parts[side][4], most[side], sums[side], shrink[side];
	uint32_t column = threadIdx.x % depth, begin = threadIdx.x / depth;
	uint32_t left = threadIdx.x % (side / own) * own, top = threadIdx.x / (side / own) * own;
	uint32_t mine = threadIdx.x / 4, quarter = threadIdx.x % 4; // of a row of scores
	uint32_t tiles = (positions + side - 1) / side;
	for (uint64_t job = blockIdx.x; job < items * heads * tiles; job += gridDim.x) {
		uint64_t item = job / tiles / heads, pitch3 = 3 * (uint64_t)width;
		uint32_t size = width / heads, head = job / tiles % heads, query0 = job % tiles * side;
		const float *q = qkv + item * positions * pitch3 + head * size, *k = q + width, *v = k + width;
		const uint8_t *seen = mask ? mask + item * positions : mask;
		uint32_t keys = causal && query0 + side < positions ? query0 + side : positions;
		for (uint32_t out0 = 0; out0 < size; out0 += side) {
			float sum[own][own] = {};
			if (quarter == 0) {
				most[mine] = -__builtin_inff(), sums[mine] = 0;
			}
			for (uint32_t key0 = 0; key0 < keys; key0 += side) {
				float score[own][own] = {};
				for (uint32_t in0 = 0; in0 < size; in0 += depth) {
					uint32_t c = in0 + column;
					for (uint32_t i = begin; i < side; i += lines) {
						as[column][i] = query0 + i < positions && c < size ? q[(query0 + i) * pitch3 + c] : 0;
						bs[column][i] = key0 + i < positions && c < size ? k[(key0 + i) * pitch3 + c] : 0;
					}
					__syncthreads();
					multiply(score, as, bs, top, left);
					__syncthreads();
				}
				for (uint32_t i = 0; i < own; i++) {
					for (uint32_t j = 0; j < own; j++) {
						// What a query does not see has a score that counts 0; one that it sees is more.
						uint32_t key = key0 + left + j;
						bool sees = key < positions && !(causal && key > query0 + top + i) && !(seen && !seen[key]);
						scores[top + i][left + j] = sees ? floats::larger(score[i][j] * scale, -__FLT_MAX__) : -__builtin_inff();
					}
				}
				__syncthreads();
				float now = most[mine];
				for (uint32_t i = quarter; i < side; i += 4) {
					now = floats::larger(now, scores[mine][i]);
				}
				parts[mine][quarter] = now;
				__syncthreads();
				const float *p = parts[mine];
				now = floats::larger(floats::larger(p[0], p[1]), floats::larger(p[2], p[3]));
				float total = 0;
				for (uint32_t i = quarter; i < side; i += 4) {
					float s = scores[mine][i];
					total += scores[mine][i] = s == -__builtin_inff() ? 0 : floats::exponential(s, now);
				}
				__syncthreads();
				parts[mine][quarter] = total;
				__syncthreads();
				if (quarter == 0) {
					shrink[mine] = most[mine] == now ? 1 : floats::exponential(most[mine], now);
					sums[mine] = sums[mine] * shrink[mine] + ((p[0] + p[1]) + (p[2] + p[3]));
					most[mine] = now;
				}
				__syncthreads();
				for (uint32_t i = 0; i < own; i++) {
					for (uint32_t j = 0; j < own; j++) {
						sum[i][j] *= shrink[top + i];
					}
				}
				for (uint32_t from = 0; from < side; from += depth) {
					for (uint32_t i = begin; i < side; i += lines) { // as[key][query], bs[key][output]
						as[column][i] = scores[i][from + column];
					}
					for (uint32_t i = threadIdx.x; i < depth * side; i += blockDim.x) {
						uint32_t key = key0 + from + i / side, c = out0 + i % side;
						// Whatever a key has that the mask hides, it counts 0.
						bool there = key < positions && c < size && !(seen && !seen[key]);
						bs[i / side][i % side] = there ? v[key * pitch3 + c] : 0;
					}
					__syncthreads();
					// Nor may a NaN come from a later key, of which only these are here.
					if (causal && key0 == query0) {
						multiply<true>(sum, as, bs, top, left);
					} else {
						multiply(sum, as, bs, top, left);
					}
					__syncthreads();
				}
			}
			for (uint32_t i = 0; i < own; i++) {
				for (uint32_t j = 0; j < own; j++) {
					uint32_t query = query0 + top + i, c = out0 + left + j;
					if (query < positions && c < size) {
						// A query that sees no key has 0, one that sees only scores of -inf a NaN, as by softmax.
						float total = most[top + i] == -__FLT_MAX__ ? __builtin_nanf("") : sums[top + i];
						y[(item * positions + query) * width + head * size + c] = total == 0 ? 0 : sum[i][j] / total;
					}
				}
			}
			__syncthreads();
		}
	}
}
