// The fake driver: the threads of a block. They run on the thread of their CUDA
// stream, one after the other and in no order, as fibers that change places at a barrier.
//
// A fiber runs threads from a loop until one comes to a barrier; it is then that
// thread's, and the next fiber goes on with the loop. So a kernel without barriers
// needs one fiber and no switch at all.

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "kernel.h"
#include "shim.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

__thread fake_dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace fake {

void run_grid(const Twin &twin, void **args, const unsigned grid[3], const unsigned block[3]);
void free_fibers();

namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr size_t stack_size = 256 << 10;
#else
constexpr size_t stack_size = 64 << 10;
#endif
constexpr size_t fence = 4096;  // below a stack, where writing faults

struct Fiber {
    ucontext_t context;
    jmp_buf at;  // where it goes on: swapcontext makes two system calls for the mask of signals
    bool begun = false;
    char *map = nullptr;  // fence and stack
    const void *bottom = nullptr;
    size_t size = 0;
};

struct Runner {
    const Twin *twin;
    void **args;
    unsigned next, count;  // threads of the block that have begun, and all
    std::vector<unsigned> blocks, threads;  // in the order in which they run
    std::minstd_rand random;  // always the same, so that what fails does so again
    Fiber main, *running = &main;
    std::vector<Fiber *> idle;
    std::vector<Fiber *> waiting;  // at the barrier
    std::vector<Fiber *> round;    // that go on from it
    size_t turn = 0;

    ~Runner() {
        for (Fiber *f : idle) {
#ifdef __SANITIZE_ADDRESS__
            __asan_unpoison_memory_region(f->bottom, f->size);  // its frames never returned
#endif
            munmap(f->map, fence + stack_size);
            delete f;
        }
    }
    Fiber *take();
    void hop();
    void barrier();
    void loop();
    void shuffle(std::vector<unsigned> &order, size_t n) {
        order.resize(n);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
    }
};

thread_local Runner *runner;

void begin() {
#ifdef __SANITIZE_ADDRESS__
    // The first fiber ever comes from the thread, whose stack is learnt here.
    const void *bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (!runner->main.bottom) runner->main.bottom = bottom, runner->main.size = size;
#endif
    runner->loop();
}

Fiber *Runner::take() {
    if (!idle.empty()) {
        Fiber *f = idle.back();
        idle.pop_back();
        return f;
    }
    auto *f = new Fiber;
    void *map = mmap(nullptr, fence + stack_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED || mprotect(map, fence, PROT_NONE) != 0) abort();
    f->map = static_cast<char *>(map);
    f->bottom = f->map + fence;
    f->size = stack_size;
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->map + fence;
    f->context.uc_stack.ss_size = stack_size;
    f->context.uc_link = nullptr;
    makecontext(&f->context, begin, 0);
    return f;
}

// hop runs whoever is next, and returns when it is the caller's turn again.
void Runner::hop() {
    Fiber *from = running, *to = &main;
    if (next < count) {
        to = take();
    } else {
        if (turn == round.size()) {  // all have come to the barrier, or ended
            round.swap(waiting);
            waiting.clear();
            std::shuffle(round.begin(), round.end(), random);
            turn = 0;
        }
        if (turn < round.size()) to = round[turn++];
    }
    if (to == from) return;
    running = to;
#ifdef __SANITIZE_ADDRESS__
    void *mine;
    __sanitizer_start_switch_fiber(&mine, to->bottom, to->size);
    swapcontext(&from->context, &to->context);
    __sanitizer_finish_switch_fiber(mine, nullptr, nullptr);
#else
    from->begun = true;
    if (_setjmp(from->at)) return;
    if (to->begun) _longjmp(to->at, 1);
    setcontext(&to->context);
#endif
}

void Runner::barrier() {
    fake_dim3 me = threadIdx;
    waiting.push_back(running);
    hop();
    threadIdx = me;
}

void Runner::loop() {
    for (;;) {
        while (next < count) {
            unsigned i = threads[next++];
            threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
            twin->run(args);
        }
        idle.push_back(running);
        hop();
    }
}

}  // namespace

void run_grid(const Twin &twin, void **args, const unsigned grid[3], const unsigned block[3]) {
    if (!runner) runner = new Runner;
    runner->twin = &twin;
    runner->args = args;
    runner->count = block[0] * block[1] * block[2];
    blockDim = {block[0], block[1], block[2]};
    gridDim = {grid[0], grid[1], grid[2]};
    runner->shuffle(runner->blocks, uint64_t(grid[0]) * grid[1] * grid[2]);
    for (unsigned i : runner->blocks) {
        blockIdx = {i % grid[0], i / grid[0] % grid[1], i / grid[0] / grid[1]};
        runner->shuffle(runner->threads, runner->count);
        runner->next = 0;
        runner->hop();
    }
}

void free_fibers() {
    delete runner;
    runner = nullptr;
}

}  // namespace fake

void __syncthreads() { fake::runner->barrier(); }
