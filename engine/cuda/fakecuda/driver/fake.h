// fake.h declares what the parts of the fake driver share. One mutex guards all of
// it; ops alone run without it. One condition is signalled for every change: a test
// has few threads, and none is woken that should not look again.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "kernel.h"

namespace fake {

// Result codes of cuda.h, under its names without CUDA_ERROR_.
enum : int {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_BINARY_FOR_GPU = 209, INVALID_PTX = 218, UNSUPPORTED_PTX_VERSION = 222,
    INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, CONTEXT_IS_DESTROYED = 709,
    HOST_MEMORY_ALREADY_REGISTERED = 712, HOST_MEMORY_NOT_REGISTERED = 713, MISALIGNED_ADDRESS = 716, NOT_SUPPORTED = 801,
};

// sticky reports whether a code ends the use of a context.
bool sticky(int code);

constexpr int max_devices = 16;
constexpr size_t overhead = 2 << 20;  // of device memory, that a context takes; hundreds of MiB on a GPU
constexpr unsigned char canary = 0xD5;

// A device address is the host's address XOR bias, which no processor accepts as an
// address: the host that dereferences one crashes, as it does with a real one.
constexpr uint64_t bias = 0x5a00000000000000;

// Behind every allocation lie guard bytes, to see a kernel that writes past its end.
// Address Sanitizer has its own.
#ifdef __SANITIZE_ADDRESS__
constexpr size_t guard = 0;
#else
constexpr size_t guard = 256;
#endif

using Lock = std::unique_lock<std::mutex>;

// Context is a device's primary context, from the retain that made it to the release
// or reset that ended it.
struct Context {
    uint64_t handle;
    int device;
    int error = 0;    // sticky: returned by every later call
    int pending = 0;  // of a failed op: returned by the next call
    bool dead = false;
    int workers = 0;
    int streams = 0;  // ever made, for ordinals
    size_t used = overhead;  // device memory
};
using ContextPtr = std::shared_ptr<Context>;

struct Allocation {
    char *memory;
    size_t size;
    ContextPtr ctx;
    Allocation(char *m, size_t n, ContextPtr c) : memory(m), size(n), ctx(std::move(c)) {}
    ~Allocation();
    bool intact() const;
};
using AllocationPtr = std::shared_ptr<Allocation>;

struct Registered {
    size_t size;
    uint64_t id;  // a range registered anew is another one
    ContextPtr ctx;
};

// Op is one entry of a CUDA stream.
struct Op {
    const char *call;  // the function that enqueued it
    std::string kind;  // in the timeline
    size_t bytes = 0;
    std::function<bool()> ready;  // with the lock; it waits until then
    std::function<int()> run;     // without the lock; a code
    std::function<void()> end;    // with the lock, always: also when the op was skipped
};

struct Stream {
    ContextPtr ctx;
    int ordinal;
    unsigned flags;
    std::deque<Op> queue;
    uint64_t enqueued = 0, done = 0;
    bool closing = false, ended = false;
};
using StreamPtr = std::shared_ptr<Stream>;

struct Mark {  // one cuEventRecord
    bool done = false;
    int64_t at = 0;
};

struct Event {
    ContextPtr ctx;
    unsigned flags;
    std::shared_ptr<Mark> mark;  // of the latest record; null before the first
};

struct Module {
    ContextPtr ctx;
    std::string ptx;
};

struct Function {
    ContextPtr ctx;
    uint64_t module;
    std::string name;
    const Twin *twin;
};

struct Fault {
    std::string name;
    int code;
    bool async;
    int64_t after, times;  // times < 0: without end
};

struct Entry {  // of the timeline
    int device, stream;
    std::string kind;
    size_t bytes;
    int64_t begin, end;
};

// Settings are what reset forgets.
struct Settings {
    int devices = 2;
    uint64_t memory = 64 << 20;
    int major = 8, minor = 0;
    int version = 12040;  // CUDA 12.4
    int refuse = 0;       // the code of cuMemHostRegister_v2
    bool sigaction = false, module_loaded = false;
    int failed[max_devices] = {};  // the sticky error of a context: no other one is made
    std::vector<Fault> faults;
    std::map<std::string, int64_t> delays;  // microseconds
    std::map<std::string, bool> hangs, crashes;
    bool heal = false;  // by a reset
    std::set<std::string> flags;  // a call and what it was given, each once
    std::vector<Entry> timeline;
    std::vector<std::string> violations;
};

// State is never destroyed: worker threads may outlive main.
struct State {
    std::mutex mu;
    std::condition_variable changed;
    bool initialized = false;
    uint64_t next = 1;
    std::vector<uint64_t> gone;  // handles, of which the last is given next: an old one may be another's
    Settings set;
    struct Device {
        int retained = 0;
        unsigned flags = 0;
        ContextPtr ctx;  // null while inactive
    } devices[max_devices];
    std::map<uint64_t, ContextPtr> contexts;
    std::map<uint64_t, StreamPtr> streams;
    std::map<uint64_t, std::shared_ptr<Event>> events;
    std::map<uint64_t, std::shared_ptr<Module>> modules;
    std::map<uint64_t, Function> functions;
    std::map<uint64_t, AllocationPtr> allocations;  // by device address
    std::map<uintptr_t, Registered> registered;
    int workers = 0;
    uint64_t handle() {
        if (gone.empty()) return 0x10000 + 16 * next++;
        uint64_t last = gone.back();
        gone.pop_back();
        return last;
    }
    template <typename Map>
    void forget(Map &objects, uint64_t handle) {
        objects.erase(handle);
        gone.push_back(handle);
    }
};

extern State &s;

// The rest is called with the lock, unless it says otherwise.

int64_t now();  // nanoseconds since the library was loaded; with or without the lock
void violate(const std::string &text);
// missing is a violation by a call that was given something that is not there, or another
// context's, and its code.
int missing(const char *call, int code);

// flagged records what flags a call was given.
inline void flagged(const char *call, unsigned flags) { s.set.flags.insert(std::string(call) + ' ' + std::to_string(flags)); }

// fault takes one use of a fault injected for any of the names.
int fault(bool async, const std::vector<std::string> &names);
// linger does what delays and hangs say of the names; gone ends it early.
void linger(Lock &lock, const std::vector<std::string> &names, const std::function<bool()> &gone);

// fail is a code that came up in ctx: one that ends its use stays, others are told once.
void fail(const ContextPtr &ctx, int code, bool ends);
inline void fail(const ContextPtr &ctx, int code) { fail(ctx, code, sticky(code)); }
size_t destroy(Lock &lock, const ContextPtr &ctx);  // returns how much was left in it

// Call is one call of the API: it takes the lock, then does what every call does
// first. code is not 0 when the call has to return it at once. Under the name of a
// call that enqueues its ops are delayed; it is "call:" and the name itself.
struct Call {
    Lock lock;
    ContextPtr ctx;
    int code = 0;
    enum Needs { Nothing, Init, Current, Enqueue };
    Call(const char *name, Needs needs);
    // wait blocks until done, or until the context fails, and returns the call's code.
    int wait(const std::function<bool()> &done);
    int wait_for_device();  // for all that its streams have now
};

StreamPtr find_stream(uint64_t handle, const ContextPtr &ctx);
uint64_t enqueue(const StreamPtr &stream, Op op);  // returns its number

// find_memory returns the live allocation that has [address, address+n), or null.
AllocationPtr find_memory(uint64_t address, size_t n);
// find_registered returns the id of the registration that has the range, 0 when no
// registered byte is in it, and straddles when only some are in one.
constexpr uint64_t straddles = ~uint64_t(0);
uint64_t find_registered(uintptr_t address, size_t n);

// copy_host copies between memory of this library and of the host, without a crash
// where the host's is not mapped or protected. Without the lock.
bool copy_host(void *ours, uintptr_t host, size_t n, bool to_host);

// run_grid runs a kernel. Without the lock.
void run_grid(const Twin &twin, void **args, const unsigned grid[3], const unsigned block[3]);
void free_fibers();  // of this thread

void disturb_signals();  // as set by the command sigaction

}  // namespace fake

#define API extern "C" __attribute__((visibility("default"))) int

// ENTER begins every function of the API.
#define ENTER(needs)                      \
    fake::Call c(__func__, Call::needs);  \
    if (c.code) return c.code
