// Kernels for the tests of the fake driver alone.

extern "C" __global__ void relu_words(uint64_t *x, uint64_t words, uint64_t sign, uint64_t nan, uint32_t shift) {
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += uint64_t(gridDim.x) * blockDim.x) {
        uint64_t v = x[i], keep = (((v & ~sign) + nan) | ~v) & sign;
        x[i] = v & (keep | (keep - (keep >> (shift & 63))));
    }
}

extern "C" __global__ void affine_f32(float *x, uint64_t n, float a, float b) {
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += uint64_t(gridDim.x) * blockDim.x)
        x[i] = a * x[i] + b;
}

// sum_u64 adds the elements of each block of threads, in a tree with a barrier at
// every level. Threads from the middle of the block on end after the first.
extern "C" __global__ void sum_u64(const uint64_t *x, uint64_t *sums) {
    __shared__ uint64_t part[1024];
    unsigned i = threadIdx.x + threadIdx.y * blockDim.x, n = blockDim.x * blockDim.y;
    part[i] = x[uint64_t(blockIdx.x) * n + i];
    __syncthreads();
    if (i >= n / 2) return;
    for (unsigned half = n / 2; half > 0; half /= 2) {
        i = threadIdx.x + threadIdx.y * blockDim.x;  // still the same
        if (i < half) part[i] += part[i + half];
        __syncthreads();
    }
    if (i == 0) sums[blockIdx.x] = part[0];
}

// order notes which thread runs when: first how many have, then each.
extern "C" __global__ void order(uint64_t *x) {
    x[++x[0]] = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
}

// beyond writes behind the end of its memory.
extern "C" __global__ void beyond(uint64_t *x, uint64_t n) {
    x[n] = 1;
}

// orphan has other parameters than its PTX.
extern "C" __global__ void orphan(uint64_t *x, uint32_t n) {
    *x = n;
}
