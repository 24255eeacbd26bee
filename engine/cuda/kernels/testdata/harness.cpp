// Runs one kernel of kernels.cu on the host, in one thread.
//
// Arguments: the entry, the grid (x y), the threads of a block, then the parameters as
// unsigned integers: floats as their bits, pointers as the number of a buffer. Standard
// input and output: the buffers, each after its length as a uint64.
#undef _FORTIFY_SOURCE // whose longjmp takes a jump to another stack for a mistake
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

struct dim {
	unsigned x, y, z;
};
static dim threadIdx, blockIdx, blockDim, gridDim;

// The threads of a block take turns from barrier to barrier: by jumps, as swapcontext makes two
// system calls each time.
struct place {
	jmp_buf at;
};
static place turns, *running;
static void __syncthreads() {
	if (_setjmp(running->at) == 0) {
		_longjmp(turns.at, 1);
	}
}

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads, blocks)
#include "../kernels.cu"

static std::vector<std::vector<char>> buffers;
static std::vector<uint64_t> params;

template <typename T> static T param(size_t i) {
	T v;
	memcpy(&v, &params.at(i), sizeof v); // little-endian
	return v;
}
template <typename T> static T *buffer(size_t i) { return (T *)buffers.at(params.at(i)).data(); }
// The first buffer stands for none, where a kernel may be without.
template <typename T> static T *perhaps(size_t i) { return params.at(i) ? buffer<T>(i) : nullptr; }

static const std::map<std::string, std::function<void()>> entries = {
	{"relu_words", [] { relu_words(buffer<uint64_t>(0), param<uint64_t>(1), param<uint64_t>(2), param<uint64_t>(3), param<uint32_t>(4)); }},
	{"affine_f32", [] { affine_f32(buffer<uint8_t>(0), param<uint64_t>(1), param<float>(2), param<float>(3), param<uint32_t>(4)); }},
	{"affine_f64", [] { affine_f64(buffer<double>(0), param<uint64_t>(1), param<double>(2), param<double>(3)); }},
	{"store_u64", [] { store_u64(buffer<uint64_t>(0), param<uint64_t>(1)); }},
	{"linear_f32", [] { linear_f32(buffer<float>(0), buffer<uint8_t>(1), buffer<float>(2), buffer<float>(3), param<uint64_t>(4), param<uint32_t>(5), param<uint32_t>(6), param<uint32_t>(7), param<uint32_t>(8)); }},
	{"activate_f32", [] { activate_f32(buffer<float>(0), param<uint64_t>(1), param<uint32_t>(2)); }},
	{"scale_f32", [] { scale_f32(buffer<float>(0), param<uint64_t>(1), param<float>(2)); }},
	{"add_f32", [] { add_f32(buffer<float>(0), buffer<float>(1), param<uint64_t>(2), param<uint64_t>(3)); }},
	{"copy_f32", [] { copy_f32(buffer<float>(0), buffer<float>(1), param<uint64_t>(2)); }},
	{"convert", [] { convert(buffer<uint8_t>(0), buffer<uint8_t>(1), param<uint64_t>(2), param<uint32_t>(3), param<uint32_t>(4)); }},
	{"norm_f32", [] { norm_f32(buffer<float>(0), buffer<float>(1), buffer<float>(2), param<uint64_t>(3), param<uint32_t>(4), param<uint32_t>(5), param<double>(6)); }},
	{"softmax_f32", [] { softmax_f32(buffer<float>(0), param<uint64_t>(1), param<uint32_t>(2)); }},
	{"gate_f32", [] { gate_f32(buffer<float>(0), buffer<float>(1), param<uint64_t>(2), param<uint32_t>(3), param<uint32_t>(4)); }},
	{"embed_f32", [] { embed_f32(buffer<float>(0), buffer<uint8_t>(1), buffer<uint8_t>(2), param<uint64_t>(3), param<uint32_t>(4), param<uint32_t>(5), param<uint32_t>(6)); }},
	{"attention_f32", [] { attention_f32(buffer<float>(0), perhaps<uint8_t>(1), buffer<float>(2), param<uint64_t>(3), param<uint32_t>(4), param<uint32_t>(5), param<uint32_t>(6), param<uint32_t>(7), param<float>(8)); }},
};

static const std::function<void()> *kernel;
static std::vector<bool> ended;

static void thread() {
	(*kernel)();
	ended[threadIdx.x] = true;
	_longjmp(turns.at, 1);
}

static void block() {
	const size_t stack = 64 << 10;
	static std::vector<char> stacks(stack * blockDim.x);
	static std::vector<place> threads(blockDim.x);
	static unsigned i;
	static bool more, first; // that what is behind a jump finds them
	ended.assign(blockDim.x, false);
	for (more = first = true; more; first = false) {
		more = false;
		for (i = 0; i < blockDim.x; i++) {
			if (ended[i]) {
				continue;
			}
			threadIdx = {i, 0, 0};
			running = &threads[i];
			if (_setjmp(turns.at) == 0) {
				if (!first) {
					_longjmp(running->at, 1);
				}
				ucontext_t begin;
				getcontext(&begin);
				begin.uc_stack.ss_sp = &stacks[stack * i];
				begin.uc_stack.ss_size = stack;
				makecontext(&begin, thread, 0);
				setcontext(&begin);
			}
			more = more || !ended[i];
		}
	}
}

int main(int argc, char **argv) {
	if (argc < 5 || !entries.count(argv[1])) {
		return 2;
	}
	kernel = &entries.at(argv[1]);
	gridDim = {(unsigned)atoi(argv[2]), (unsigned)atoi(argv[3]), 1};
	blockDim = {(unsigned)atoi(argv[4]), 1, 1};
	for (int i = 5; i < argc; i++) {
		params.push_back(strtoull(argv[i], nullptr, 10));
	}
	for (uint64_t n; fread(&n, sizeof n, 1, stdin) == 1;) {
		buffers.emplace_back(n);
		if (fread(buffers.back().data(), 1, n, stdin) != n) {
			return 3;
		}
	}
	static const std::set<std::string> with = {"linear_f32", "norm_f32", "softmax_f32", "attention_f32"};
	bool barriers = with.count(argv[1]);
	for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++) {
		for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
			if (barriers) {
				block();
				continue;
			}
			for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) {
				(*kernel)();
			}
		}
	}
	for (auto &b : buffers) {
		uint64_t n = b.size();
		if (fwrite(&n, sizeof n, 1, stdout) != 1 || fwrite(b.data(), 1, n, stdout) != n) {
			return 4;
		}
	}
	return 0;
}
