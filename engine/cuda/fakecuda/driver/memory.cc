// The fake driver: device memory, registered host memory, copies.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fake.h"

namespace fake {

namespace {

constexpr std::chrono::microseconds lock_mib{100};  // to register 1 MiB, as an H200 takes

constexpr size_t grain = 512;  // device memory is counted and aligned in these

size_t grains(size_t n) { return (n + grain - 1) / grain * grain; }

std::string range(uint64_t address, size_t n) {
    char text[64];
    snprintf(text, sizeof text, "[%#llx,+%zu)", (unsigned long long)address, n);
    return text;
}

// once copies as much as one system call does.
ssize_t once(char *ours, uintptr_t host, size_t n, bool to_host) {
    iovec a{ours, n}, b{reinterpret_cast<void *>(host), n};
    ssize_t got = to_host ? process_vm_writev(getpid(), &a, 1, &b, 1, 0) : process_vm_readv(getpid(), &a, 1, &b, 1, 0);
    if (got >= 0 || errno == EFAULT) return got;
    // Some sandboxes refuse those calls.
    static const int mem = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    return to_host ? pwrite(mem, ours, n, host) : pread(mem, ours, n, host);
}

int copy(Call &c, const char *call, bool to_host, uint64_t device, uintptr_t host, size_t n, uint64_t handle) {
    StreamPtr stream = find_stream(handle, c.ctx);
    if (!stream) return INVALID_HANDLE;
    if (n == 0) return SUCCESS;
    if (!find_memory(device, n)) return INVALID_VALUE;
    uint64_t id = find_registered(host, n);
    if (id == straddles) return INVALID_VALUE;

    // Pageable memory: what goes to the device is copied now, what comes from it has
    // come when the call returns.
    std::shared_ptr<std::vector<char>> staged;
    if (id == 0 && !to_host) {
        staged = std::make_shared<std::vector<char>>(n);
        if (!copy_host(staged->data(), host, n, false)) {
            violate(std::string(call) + ": host memory " + range(host, n) + " is not mapped at the call");
            return INVALID_VALUE;
        }
    }

    Op op;
    op.call = call;
    op.kind = to_host ? "d2h" : "h2d";
    op.bytes = n;
    op.run = [=, ctx = c.ctx]() -> int {
        auto refuse = [&](const char *why) {
            violate(std::string(call) + ": " + range(host, n) + " " + why);
            return ILLEGAL_ADDRESS;
        };
        Lock lock(s.mu);
        AllocationPtr memory = find_memory(device, n);
        if (!memory || memory->ctx != ctx) return refuse("meets device memory that is gone at execution");
        if (id != 0 && find_registered(host, n) != id) return refuse("is no longer registered at execution");
        lock.unlock();
        char *at = reinterpret_cast<char *>(device ^ bias);
        bool mapped = true;
        if (staged)
            memcpy(at, staged->data(), n);
        else
            mapped = copy_host(at, host, n, to_host);
        lock.lock();
        if (!mapped) return refuse("is no longer mapped at execution");
        if (id != 0 && find_registered(host, n) != id) return refuse("was unregistered during the copy");
        return SUCCESS;
    };
    uint64_t number = enqueue(stream, std::move(op));
    if (id == 0 && to_host) {
        auto done = [=] { return stream->done >= number; };
        s.changed.wait(c.lock, done);  // also when the context fails: it may be writing
        return c.wait(done);
    }
    return SUCCESS;
}

}  // namespace

Allocation::~Allocation() { free(memory); }

bool Allocation::intact() const {
    for (size_t i = 0; i < guard; i++)
        if (static_cast<unsigned char>(memory[size + i]) != canary) return false;
    return true;
}

AllocationPtr find_memory(uint64_t address, size_t n) {
    auto it = s.allocations.upper_bound(address);
    if (it == s.allocations.begin()) return nullptr;
    --it;
    uint64_t offset = address - it->first;
    size_t size = it->second->size;
    return offset <= size && n <= size - offset ? it->second : nullptr;
}

uint64_t find_registered(uintptr_t address, size_t n) {
    if (n > UINTPTR_MAX - address) return straddles;
    auto it = s.registered.lower_bound(address + n);  // the first behind the range
    if (it == s.registered.begin()) return 0;
    --it;  // the last that begins before its end
    if (address >= it->first + it->second.size) return 0;
    bool within = it->first <= address && n <= it->second.size - (address - it->first);
    return within ? it->second.id : straddles;
}

bool copy_host(void *ours, uintptr_t host, size_t n, bool to_host) {
    for (size_t done = 0; done < n;) {
        ssize_t got = once(static_cast<char *>(ours) + done, host + done, n - done, to_host);
        if (got <= 0) return false;
        done += got;
    }
    return true;
}

}  // namespace fake

using namespace fake;

API cuMemAlloc_v2(uint64_t *address, size_t n) {
    ENTER(Current);
    if (!address || n == 0) return INVALID_VALUE;
    if (n > s.set.memory || c.ctx->used + grains(n) > s.set.memory) return OUT_OF_MEMORY;
    void *memory;
    if (posix_memalign(&memory, grain, n + guard) != 0) return OUT_OF_MEMORY;
    memset(memory, canary, n + guard);
    *address = reinterpret_cast<uintptr_t>(memory) ^ bias;
    s.allocations[*address] = std::make_shared<Allocation>(static_cast<char *>(memory), n, c.ctx);
    c.ctx->used += grains(n);
    return SUCCESS;
}

// It waits for the device, as the real one does, but cuda.h does not promise that: an op
// that has not ended before this call finds its memory gone.
API cuMemFree_v2(uint64_t address) {
    ENTER(Current);
    if (address == 0) return SUCCESS;
    auto it = s.allocations.find(address);
    if (it == s.allocations.end() || it->second->ctx != c.ctx) return missing(__func__, INVALID_VALUE);
    if (it->second.use_count() > 1) violate("cuMemFree_v2: " + range(address, it->second->size) + " is in use");
    if (!it->second->intact()) violate("cuMemFree_v2: the bytes behind " + range(address, it->second->size) + " were written");
    c.ctx->used -= grains(it->second->size);
    s.allocations.erase(it);
    return c.wait_for_device();
}

API cuMemGetInfo_v2(size_t *free, size_t *total) {
    ENTER(Current);
    if (!free || !total) return INVALID_VALUE;
    size_t used = c.ctx->used;
    *total = s.set.memory;
    *free = used < *total ? *total - used : 0;
    return SUCCESS;
}

API cuMemHostRegister_v2(void *p, size_t n, unsigned flags) {
    ENTER(Current);
    if (s.set.refuse) return s.set.refuse;
    auto address = reinterpret_cast<uintptr_t>(p);
    if (!p || n == 0 || n > UINTPTR_MAX - address || flags & ~0xfu) return INVALID_VALUE;
    if (find_registered(address, n) != 0) return HOST_MEMORY_ALREADY_REGISTERED;
    size_t page = sysconf(_SC_PAGESIZE);
    uintptr_t first = address / page * page;
    std::vector<unsigned char> resident((address + n - first + page - 1) / page);
    if (mincore(reinterpret_cast<void *>(first), address + n - first, resident.data()) != 0) return INVALID_VALUE;
    s.registered[address] = Registered{n, s.next++, c.ctx};
    flagged(__func__, flags);
    s.changed.wait_for(c.lock, lock_mib * (n >> 20), [] { return false; });
    return SUCCESS;
}

API cuMemHostUnregister(void *p) {
    ENTER(Current);
    if (!p) return INVALID_VALUE;
    if (!s.registered.erase(reinterpret_cast<uintptr_t>(p))) return missing(__func__, HOST_MEMORY_NOT_REGISTERED);
    return c.wait_for_device();
}

API cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, uint64_t stream) {
    ENTER(Enqueue);
    return copy(c, __func__, false, to, reinterpret_cast<uintptr_t>(from), n, stream);
}

API cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, uint64_t stream) {
    ENTER(Enqueue);
    return copy(c, __func__, true, from, reinterpret_cast<uintptr_t>(to), n, stream);
}

// It runs on the legacy default stream: after all that blocking streams have, in no
// order with the others.
API cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t n) {
    ENTER(Current);
    if (n == 0) return SUCCESS;
    std::vector<std::pair<StreamPtr, uint64_t>> before;
    for (auto &[handle, stream] : s.streams)
        if (stream->ctx == c.ctx && stream->flags == 0) before.emplace_back(stream, stream->enqueued);
    int code = c.wait([&] {
        for (auto &[stream, number] : before)
            if (stream->done < number) return false;
        return true;
    });
    if (code) return code;
    AllocationPtr memory = find_memory(to, n);
    if (!memory || memory->ctx != c.ctx) return INVALID_VALUE;
    int64_t begin = now();
    if (!copy_host(reinterpret_cast<void *>(to ^ bias), reinterpret_cast<uintptr_t>(from), n, false)) return INVALID_VALUE;
    s.set.timeline.push_back({c.ctx->device, 0, "h2d", n, begin, now()});
    return SUCCESS;
}

API cuMemsetD8Async(uint64_t to, unsigned char value, size_t n, uint64_t handle) {
    ENTER(Enqueue);
    StreamPtr stream = find_stream(handle, c.ctx);
    if (!stream) return INVALID_HANDLE;
    if (n == 0) return SUCCESS;
    if (!find_memory(to, n)) return INVALID_VALUE;
    Op op;
    op.call = __func__;
    op.kind = "memset";
    op.bytes = n;
    op.run = [=, ctx = c.ctx]() -> int {
        Lock lock(s.mu);
        AllocationPtr memory = find_memory(to, n);
        if (!memory || memory->ctx != ctx) {
            violate("cuMemsetD8Async: device memory " + range(to, n) + " is gone at execution");
            return ILLEGAL_ADDRESS;
        }
        lock.unlock();
        memset(reinterpret_cast<void *>(to ^ bias), value, n);
        return SUCCESS;
    };
    enqueue(stream, std::move(op));
    return SUCCESS;
}
