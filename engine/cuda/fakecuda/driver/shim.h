// shim.h makes a kernel's .cu file compile with g++, as code of the host: it comes
// before the file, in place of what a compiler for the device has. No kernel may use
// what is not declared here, dynamic shared memory and warps among it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define __global__
#define __device__
#define __launch_bounds__(threads, blocks)

// A block runs on one thread of the host, and one block at a time on each: so a
// block's shared memory may be the thread's.
#define __shared__ static __thread

struct fake_dim3 {
    unsigned x, y, z;
};

// Set before a thread of a block runs, and again when it goes on behind a barrier.
#define FAKE_INDEX __attribute__((visibility("hidden")))
extern __thread fake_dim3 threadIdx FAKE_INDEX, blockIdx FAKE_INDEX, blockDim FAKE_INDEX, gridDim FAKE_INDEX;

void __syncthreads();
