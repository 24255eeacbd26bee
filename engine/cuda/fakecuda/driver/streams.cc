// The fake driver: CUDA streams, events, launches.

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "fake.h"

namespace fake {

namespace {

constexpr std::chrono::microseconds with_time{4};  // of a stream's, for an event

constexpr size_t max_timeline = 1 << 20;  // entries, lest a long test eats the memory

void execute(Lock &lock, const StreamPtr &stream, const Op &op) {
    const ContextPtr &ctx = stream->ctx;
    auto gone = [&] { return ctx->dead || ctx->error != 0; };
    if (gone()) return;
    std::vector<std::string> names{op.call, op.kind};
    if (op.kind == "h2d" || op.kind == "d2h") names.push_back("copies");
    if (!strcmp(op.call, "cuLaunchKernel")) names.push_back("kernels");
    int64_t begin = now();
    if (op.ready) s.changed.wait(lock, [&] { return gone() || op.ready(); });
    linger(lock, names, gone);
    if (gone()) return;
    int code = fault(true, names);
    if (code == 0 && op.run) {
        lock.unlock();
        code = op.run();
        lock.lock();
    }
    if (code != 0)
        fail(ctx, code);
    else if (s.set.timeline.size() < max_timeline)
        s.set.timeline.push_back({ctx->device, stream->ordinal, op.kind, op.bytes, begin, now()});
}

// work is a CUDA stream's thread. It ends when the stream is destroyed and has no
// more ops, and skips them when their context is gone.
void work(StreamPtr stream) {
    Lock lock(s.mu);
    for (;;) {
        s.changed.wait(lock, [&] { return stream->closing || !stream->queue.empty(); });
        if (stream->queue.empty()) break;
        {
            Op op = std::move(stream->queue.front());
            stream->queue.pop_front();
            execute(lock, stream, op);
            if (op.end) op.end();
        }
        stream->done++;
        s.changed.notify_all();
    }
    lock.unlock();
    free_fibers();
    lock.lock();
    stream->ended = true;
    stream->ctx->workers--;
    s.workers--;
    s.changed.notify_all();
}

}  // namespace

StreamPtr find_stream(uint64_t handle, const ContextPtr &ctx) {
    auto it = s.streams.find(handle);
    return it != s.streams.end() && it->second->ctx == ctx ? it->second : nullptr;
}

uint64_t enqueue(const StreamPtr &stream, Op op) {
    stream->queue.push_back(std::move(op));
    s.changed.notify_all();
    return ++stream->enqueued;
}

static std::shared_ptr<Event> find_event(uint64_t handle, const ContextPtr &ctx) {
    auto it = s.events.find(handle);
    return it != s.events.end() && it->second->ctx == ctx ? it->second : nullptr;
}

}  // namespace fake

using namespace fake;

API cuStreamCreate(uint64_t *handle, unsigned flags) {
    ENTER(Current);
    if (!handle || flags > 1) return INVALID_VALUE;  // 1: non-blocking
    auto stream = std::make_shared<Stream>();
    stream->ctx = c.ctx;
    stream->ordinal = ++c.ctx->streams;
    stream->flags = flags;
    flagged(__func__, flags);
    // The host's signals are for its own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread(work, stream).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    s.workers++;
    c.ctx->workers++;
    *handle = s.handle();
    s.streams[*handle] = stream;
    return SUCCESS;
}

// Work in the stream goes on; the call does not wait for it.
API cuStreamDestroy_v2(uint64_t handle) {
    ENTER(Current);
    StreamPtr stream = find_stream(handle, c.ctx);
    if (!stream) return missing(__func__, INVALID_HANDLE);
    bool idle = stream->done == stream->enqueued;
    s.forget(s.streams, handle);
    stream->closing = true;
    s.changed.notify_all();
    if (idle) s.changed.wait(c.lock, [&] { return stream->ended; });
    return SUCCESS;
}

API cuStreamSynchronize(uint64_t handle) {
    ENTER(Current);
    StreamPtr stream = find_stream(handle, c.ctx);
    if (!stream) return INVALID_HANDLE;
    uint64_t number = stream->enqueued;
    return c.wait([&] { return stream->done >= number; });
}

API cuStreamWaitEvent(uint64_t handle, uint64_t event, unsigned flags) {
    ENTER(Enqueue);
    StreamPtr stream = find_stream(handle, c.ctx);
    auto e = find_event(event, c.ctx);
    if (!stream || !e) return missing(__func__, INVALID_HANDLE);
    if (flags > 1) return INVALID_VALUE;
    if (!e->mark) return SUCCESS;
    Op op;
    op.call = __func__;
    op.kind = "wait";
    op.ready = [mark = e->mark] { return mark->done; };
    enqueue(stream, std::move(op));
    return SUCCESS;
}

API cuEventCreate(uint64_t *handle, unsigned flags) {
    ENTER(Current);
    // 1: blocking wait, 2: no time, 4: between processes, which goes only without time.
    if (!handle || flags > 7 || (flags & 6) == 4) return INVALID_VALUE;
    auto e = std::make_shared<Event>();
    e->ctx = c.ctx;
    e->flags = flags;
    flagged(__func__, flags);
    *handle = s.handle();
    s.events[*handle] = e;
    return SUCCESS;
}

API cuEventDestroy_v2(uint64_t event) {
    ENTER(Current);
    if (!find_event(event, c.ctx)) return missing(__func__, INVALID_HANDLE);
    s.forget(s.events, event);
    return SUCCESS;
}

API cuEventRecord(uint64_t event, uint64_t handle) {
    ENTER(Enqueue);
    StreamPtr stream = find_stream(handle, c.ctx);
    auto e = find_event(event, c.ctx);
    if (!stream || !e) return missing(__func__, INVALID_HANDLE);
    auto mark = e->mark = std::make_shared<Mark>();
    Op op;
    op.call = __func__;
    op.kind = "record";
    if (!(e->flags & 2)) op.run = [] { return std::this_thread::sleep_for(with_time), SUCCESS; };
    op.end = [mark] {
        mark->done = true;
        mark->at = now();
    };
    enqueue(stream, std::move(op));
    return SUCCESS;
}

API cuEventQuery(uint64_t event) {
    ENTER(Current);
    auto e = find_event(event, c.ctx);
    if (!e) return missing(__func__, INVALID_HANDLE);
    return !e->mark || e->mark->done ? SUCCESS : NOT_READY;
}

API cuEventSynchronize(uint64_t event) {
    ENTER(Current);
    auto e = find_event(event, c.ctx);
    if (!e) return missing(__func__, INVALID_HANDLE);
    auto mark = e->mark;
    return c.wait([&] { return !mark || mark->done; });
}

API cuEventElapsedTime(float *millis, uint64_t start, uint64_t end) {
    ENTER(Current);
    auto a = find_event(start, c.ctx), b = find_event(end, c.ctx);
    if (!millis) return INVALID_VALUE;
    if (!a || !b) return missing(__func__, INVALID_HANDLE);
    if (!a->mark || !b->mark || (a->flags | b->flags) & 2) return INVALID_HANDLE;
    if (!a->mark->done || !b->mark->done) return NOT_READY;
    *millis = static_cast<float>((b->mark->at - a->mark->at) / 1e6);
    return SUCCESS;
}

API cuLaunchKernel(uint64_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   uint64_t handle, void **params, void **extra) {
    ENTER(Enqueue);
    StreamPtr stream = find_stream(handle, c.ctx);
    auto f = s.functions.find(function);
    if (!stream || f == s.functions.end() || f->second.ctx != c.ctx) return INVALID_HANDLE;
    if (gx == 0 || gy == 0 || gz == 0 || gx > 0x7fffffff || gy > 65535 || gz > 65535) return INVALID_VALUE;
    if (bx == 0 || by == 0 || bz == 0 || bx > 1024 || by > 1024 || bz > 64 || uint64_t(bx) * by * bz > 1024) return INVALID_VALUE;
    if (shared > 48 << 10) return INVALID_VALUE;
    if (extra || shared) return NOT_SUPPORTED;  // by this driver
    const Twin *twin = f->second.twin;
    if (!params && !twin->params.empty()) return INVALID_VALUE;

    // The caller may use its arguments again when the call returns.
    struct Slot {
        alignas(16) char bytes[16];
    };
    std::vector<std::vector<Slot>> values;
    for (size_t i = 0; i < twin->params.size(); i++) {
        values.emplace_back((twin->params[i].size + sizeof(Slot) - 1) / sizeof(Slot));
        memcpy(values[i].data(), params[i], twin->params[i].size);
    }
    Op op;
    op.call = __func__;
    op.kind = f->second.name;
    op.run = [=, name = f->second.name, ctx = c.ctx]() mutable -> int {
        std::vector<AllocationPtr> used;
        std::vector<void *> args;
        Lock lock(s.mu);
        for (size_t i = 0; i < values.size(); i++) {
            args.push_back(values[i].data());
            uint64_t address;
            if (twin->params[i].points_to == 0) continue;
            memcpy(&address, args[i], sizeof address);
            if (address == 0) continue;
            AllocationPtr memory = find_memory(address, 1);
            if (!memory) memory = find_memory(address, 0);  // an end, which no thread may use
            if (!memory || memory->ctx != ctx) {
                violate(name + ": parameter " + std::to_string(i) + " points to no device memory at execution");
                return ILLEGAL_ADDRESS;
            }
            if (address % twin->params[i].points_to != 0) return MISALIGNED_ADDRESS;
            address ^= bias;
            memcpy(args[i], &address, sizeof address);
            used.push_back(memory);
        }
        lock.unlock();
        const unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
        run_grid(*twin, args.data(), grid, block);
        lock.lock();
        for (auto &memory : used)
            if (!memory->intact()) {
                violate(name + " wrote past the end of its memory");
                return ILLEGAL_ADDRESS;
            }
        return SUCCESS;
    };
    enqueue(stream, std::move(op));
    return SUCCESS;
}
