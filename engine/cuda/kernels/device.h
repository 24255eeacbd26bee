// What kernels.cu needs when clang compiles it for a GPU, without CUDA's headers. A
// compiler for the host includes its own definitions of the same words instead.
#pragma once

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(threads, blocks) __attribute__((launch_bounds(threads, blocks)))

#include <__clang_cuda_builtin_vars.h> // threadIdx and its like; clang brings it
