// The fake driver: initialization, devices, contexts, names of errors.

#include "fake.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace fake {

namespace {

thread_local uint64_t current;  // the handle of the calling thread's context

// The result codes of cuda.h that this driver returns, or that a test may inject.
const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "PTX JIT compiler library not found"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {223, "CUDA_ERROR_JIT_COMPILATION_DISABLED", "PTX JIT compilation was disabled"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {710, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {714, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", "operation not supported on global/shared address space"},
    {718, "CUDA_ERROR_INVALID_PC", "invalid program counter"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ContextPtr &owner(const Registered &r) { return r.ctx; }
const ContextPtr &owner(const Function &f) { return f.ctx; }
template <typename T>
const ContextPtr &owner(const std::shared_ptr<T> &object) { return object->ctx; }

// drop removes what is of a context, and returns how much that was.
template <typename Map>
size_t drop(Map &objects, const ContextPtr &ctx, bool handles) {
    size_t n = 0;
    for (auto it = objects.begin(); it != objects.end();) {
        if (owner(it->second) != ctx) {
            ++it;
            continue;
        }
        n++;
        if (handles) s.gone.push_back(it->first);
        it = objects.erase(it);
    }
    return n;
}

bool valid(int device) { return device >= 0 && device < s.set.devices; }

}  // namespace

bool sticky(int code) {
    switch (code) {
    case 214: case 700: case 702: case 710: case 714: case 715: case 716: case 717: case 718: case 719: case 999:
        return true;
    }
    return false;
}

void fail(const ContextPtr &ctx, int code, bool ends) {
    int &to = ends ? ctx->error : ctx->pending;
    if (to == 0) to = code;
    if (ends && s.set.failed[ctx->device] == 0) s.set.failed[ctx->device] = code;
    s.changed.notify_all();
}

Call::Call(const char *name, Needs needs) : lock(s.mu) {
    linger(lock, {needs == Enqueue ? std::string("call:") + name : name}, [] { return false; });
    code = fault(false, {name});
    if (needs == Nothing) return;
    if (code == 0 && !s.initialized) code = NOT_INITIALIZED;
    if (needs == Init) return;
    auto found = s.contexts.find(current);
    if (found != s.contexts.end()) ctx = found->second;
    if (code != 0) {
        if (ctx && sticky(code)) fail(ctx, code);
    } else if (current == 0) {
        violate(std::string(name) + " without a context");
        code = INVALID_CONTEXT;
    } else if (!ctx) {
        code = CONTEXT_IS_DESTROYED;
    } else if ((code = ctx->error) == 0) {
        std::swap(code, ctx->pending);
    }
}

int Call::wait_for_device() {
    std::vector<std::pair<StreamPtr, uint64_t>> all;
    for (auto &[handle, stream] : s.streams)
        if (stream->ctx == ctx) all.emplace_back(stream, stream->enqueued);
    return wait([&] { return std::all_of(all.begin(), all.end(), [](auto &of) { return of.first->done >= of.second; }); });
}

int Call::wait(const std::function<bool()> &done) {
    s.changed.wait(lock, [&] { return done() || ctx->error != 0 || ctx->dead; });
    if (ctx->error != 0) return ctx->error;
    if (ctx->dead) return CONTEXT_IS_DESTROYED;
    int code = 0;
    std::swap(code, ctx->pending);
    return code;
}

size_t destroy(Lock &lock, const ContextPtr &ctx) {
    ctx->dead = true;
    s.forget(s.contexts, ctx->handle);
    s.devices[ctx->device].ctx.reset();
    for (auto &[handle, stream] : s.streams)
        if (stream->ctx == ctx) stream->closing = true;
    s.changed.notify_all();
    s.changed.wait(lock, [&] { return ctx->workers == 0; });
    drop(s.functions, ctx, true);
    return drop(s.streams, ctx, true) + drop(s.events, ctx, true) + drop(s.modules, ctx, true) + drop(s.allocations, ctx, false) +
           drop(s.registered, ctx, false);
}

}  // namespace fake

using namespace fake;

API cuInit(unsigned flags) {
    ENTER(Nothing);
    if (flags != 0) return INVALID_VALUE;
    s.initialized = true;
    disturb_signals();
    return SUCCESS;
}

API cuDriverGetVersion(int *version) {
    ENTER(Nothing);
    if (!version) return INVALID_VALUE;
    *version = s.set.version;
    return SUCCESS;
}

API cuDeviceGetCount(int *count) {
    ENTER(Init);
    if (!count) return INVALID_VALUE;
    *count = s.set.devices;
    return SUCCESS;
}

API cuDeviceGet(int *device, int ordinal) {
    ENTER(Init);
    if (!device) return INVALID_VALUE;
    if (!valid(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

API cuDeviceGetName(char *name, int len, int device) {
    ENTER(Init);
    if (!name || len <= 0) return INVALID_VALUE;
    if (!valid(device)) return INVALID_DEVICE;
    snprintf(name, len, "Fake GPU %d", device);
    return SUCCESS;
}

API cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER(Init);
    if (!value) return INVALID_VALUE;
    if (!valid(device)) return INVALID_DEVICE;
    switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break;         // threads per block, its x and y
    case 4: *value = 64; break;                           // its z
    case 5: *value = 0x7fffffff; break;                   // blocks per grid, x
    case 6: case 7: *value = 65535; break;                // y and z
    case 8: *value = 48 << 10; break;                     // shared memory per block
    case 10: *value = 32; break;                          // threads per warp
    case 16: *value = 4; break;                           // multiprocessors
    case 18: *value = 0; break;                           // integrated
    case 20: *value = 0; break;                           // compute mode: default
    case 31: *value = 1; break;                           // concurrent kernels
    case 33: *value = device + 1; break;                  // PCI bus
    case 34: case 50: *value = 0; break;                  // PCI device and domain
    case 40: *value = 2; break;                           // copy engines
    case 41: *value = 1; break;                           // unified addressing
    case 75: *value = s.set.major; break;                 // compute capability
    case 76: *value = s.set.minor; break;
    case 99: *value = s.set.refuse != NOT_SUPPORTED; break;  // host memory can be registered
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}

API cuDeviceTotalMem_v2(size_t *bytes, int device) {
    ENTER(Init);
    if (!bytes) return INVALID_VALUE;
    if (!valid(device)) return INVALID_DEVICE;
    *bytes = s.set.memory;
    return SUCCESS;
}

API cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) {
    ENTER(Init);
    if (!valid(device)) return INVALID_DEVICE;
    unsigned schedule = flags & 7;  // spin, yield or block; one of them at most
    if (flags & ~0xffu || schedule & (schedule - 1)) return INVALID_VALUE;
    s.devices[device].flags = flags;
    flagged(__func__, flags);
    return SUCCESS;
}

// Once a context has failed, R580 makes no other in the process, whatever is reset or released.
// The command heal says that another driver does.
API cuDevicePrimaryCtxRetain(uint64_t *ctx, int device) {
    ENTER(Init);
    if (!ctx) return INVALID_VALUE;
    if (!valid(device)) return INVALID_DEVICE;
    if (int code = s.set.failed[device]) return code;
    auto &d = s.devices[device];
    if (!d.ctx) {
        if (s.set.memory < overhead) return OUT_OF_MEMORY;
        d.ctx = std::make_shared<Context>();
        d.ctx->handle = s.handle();
        d.ctx->device = device;
        s.contexts[d.ctx->handle] = d.ctx;
    }
    d.retained++;
    *ctx = d.ctx->handle;
    return SUCCESS;
}

API cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER(Init);
    if (!valid(device)) return INVALID_DEVICE;
    auto &d = s.devices[device];
    if (d.retained == 0) return INVALID_CONTEXT;
    if (--d.retained == 0)
        if (ContextPtr ctx = d.ctx)
            if (size_t left = destroy(c.lock, ctx); left > 0 && ctx->error == 0)
                violate(std::string(__func__) + ": " + std::to_string(left) + " things were left in the context");
    return SUCCESS;
}

// A reset does not release the context, says cuda.h: who retained it still has to.
API cuDevicePrimaryCtxReset_v2(int device) {
    ENTER(Init);
    if (!valid(device)) return INVALID_DEVICE;
    if (ContextPtr ctx = s.devices[device].ctx) destroy(c.lock, ctx);
    if (s.set.heal) s.set.failed[device] = 0;
    return SUCCESS;
}

API cuCtxSetCurrent(uint64_t ctx) {
    ENTER(Init);
    if (ctx != 0 && !s.contexts.count(ctx)) return INVALID_CONTEXT;
    current = ctx;
    return SUCCESS;
}

API cuCtxGetCurrent(uint64_t *ctx) {
    ENTER(Init);
    if (!ctx) return INVALID_VALUE;
    *ctx = current;
    return SUCCESS;
}

API cuGetErrorName(int code, const char **name) {
    ENTER(Nothing);
    if (!name) return INVALID_VALUE;
    *name = nullptr;
    for (auto &e : errors)
        if (e.code == code) *name = e.name;
    return *name ? SUCCESS : INVALID_VALUE;
}

API cuGetErrorString(int code, const char **text) {
    ENTER(Nothing);
    if (!text) return INVALID_VALUE;
    *text = nullptr;
    for (auto &e : errors)
        if (e.code == code) *text = e.text;
    return *text ? SUCCESS : INVALID_VALUE;
}
