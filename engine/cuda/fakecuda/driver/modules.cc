// The fake driver: modules. It reads as much of the PTX as a driver checks before it
// compiles, and runs the kernels' twins.

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fake.h"

namespace fake {

namespace {

// Options of cuModuleLoadDataEx, in cuda.h CU_JIT_...
enum { ERROR_LOG_BUFFER = 5, ERROR_LOG_BUFFER_SIZE_BYTES = 6 };

// skip returns p behind white space and comments.
const char *skip(const char *p) {
    for (;;) {
        while (isspace(static_cast<unsigned char>(*p))) p++;
        if (!strncmp(p, "//", 2)) {
            p += strcspn(p, "\n");
        } else if (!strncmp(p, "/*", 2)) {
            const char *end = strstr(p, "*/");
            p = end ? end + 2 : p + strlen(p);
        } else {
            return p;
        }
    }
}

// newest returns the PTX ISA, times ten, that came with a version of CUDA.
int newest(int cuda) {
    int major = cuda / 1000, minor = cuda % 1000 / 10;
    switch (major) {
    case 10: return 63 + minor;
    case 11: return 70 + minor;
    case 12: return minor <= 5 ? 80 + minor : 79 + minor;  // 12.6 brought none
    }
    return major < 10 ? 60 : 90 + minor;
}

int check(const char *ptx, std::string &log) {
    int major, minor, target, used = 0;
    const char *p = skip(ptx);
    if (sscanf(p, ".version %d.%d%n", &major, &minor, &used) != 2) {
        log = "ptxas fatal : Missing .version directive at start of file";
        return INVALID_PTX;
    }
    if (10 * major + minor > newest(s.set.version)) {
        log = "ptxas fatal : Unsupported .version " + std::to_string(major) + "." + std::to_string(minor);
        return UNSUPPORTED_PTX_VERSION;
    }
    p = skip(p + used);
    used = 0;
    if (sscanf(p, ".target sm_%d%n", &target, &used) != 1) {
        log = "ptxas fatal : Missing .target directive";
        return INVALID_PTX;
    }
    int device = 10 * s.set.major + s.set.minor;
    bool only = p[used] == 'a';  // for this capability and no later one
    if (target > device || (only && target != device)) {
        log = "ptxas fatal : SM version specified by .target is higher than that of the device";
        return NO_BINARY_FOR_GPU;
    }
    return SUCCESS;
}

// entry returns the list of parameters of an entry, from behind its parenthesis, or
// null.
const char *entry(const std::string &ptx, const std::string &name) {
    for (size_t at = 0; (at = ptx.find(".entry", at)) != std::string::npos;) {
        const char *p = skip(ptx.c_str() + (at += 6));
        if (strncmp(p, name.c_str(), name.size()) != 0) continue;
        p = skip(p + name.size());
        if (*p == '(') return p + 1;
    }
    return nullptr;
}

// sizes returns how many bytes each parameter has.
std::vector<size_t> sizes(const char *p) {
    std::vector<size_t> all;
    std::string list(p, strcspn(p, ")"));
    for (size_t at = list.find(".param"); at != std::string::npos;) {
        size_t next = list.find(".param", at + 1);
        std::string one = list.substr(at + 6, next == std::string::npos ? next : next - at - 6);
        size_t size = 0;
        for (const char *type : {".u", ".s", ".b", ".f"}) {
            size_t found = one.find(type);
            if (found != std::string::npos && isdigit(static_cast<unsigned char>(one[found + 2])))
                size = strtoul(one.c_str() + found + 2, nullptr, 10) / 8;
        }
        size_t array = one.find('[');
        if (array != std::string::npos) size *= strtoul(one.c_str() + array + 1, nullptr, 10);
        all.push_back(size);
        at = next;
    }
    return all;
}

std::map<std::string, Twin> &registry() {
    static auto &all = *new std::map<std::string, Twin>;
    return all;
}

}  // namespace

void register_twin(const char *name, Twin twin) { registry()[name] = std::move(twin); }

}  // namespace fake

using namespace fake;

API cuModuleLoadDataEx(uint64_t *module, const void *image, unsigned n, const int *options, void **values) {
    ENTER(Current);
    if (!module || !image || (n > 0 && (!options || !values))) return INVALID_VALUE;
    if (int code = c.wait_for_device()) return code;
    if (!s.set.module_loaded) disturb_signals();
    s.set.module_loaded = true;
    const char *text = static_cast<const char *>(image);
    for (const char *magic : {"\x7f" "ELF", "\x50\xed\x55\xba"})  // cubin and fatbin: no machine for them
        if (!strncmp(text, magic, 4)) return INVALID_IMAGE;

    std::string log, ptx = text;
    int code = check(ptx.c_str(), log);
    char *buffer = nullptr;
    size_t size = 0, *told = nullptr;
    for (unsigned i = 0; i < n; i++) {
        if (options[i] == ERROR_LOG_BUFFER) buffer = static_cast<char *>(values[i]);
        if (options[i] == ERROR_LOG_BUFFER_SIZE_BYTES) {
            size = reinterpret_cast<uintptr_t>(values[i]) & 0xffffffff;
            told = reinterpret_cast<size_t *>(&values[i]);
        }
    }
    if (told) {
        *told = 0;
        if (buffer && size > 0) *told = std::min<size_t>(snprintf(buffer, size, "%s", log.c_str()), size - 1);
    }
    if (code) return code;
    auto m = std::make_shared<Module>();
    m->ctx = c.ctx;
    m->ptx = std::move(ptx);
    *module = s.handle();
    s.modules[*module] = m;
    return SUCCESS;
}

API cuModuleUnload(uint64_t module) {
    ENTER(Current);
    auto it = s.modules.find(module);
    if (it == s.modules.end() || it->second->ctx != c.ctx) return missing(__func__, INVALID_HANDLE);
    s.forget(s.modules, module);
    std::vector<uint64_t> functions;
    for (auto &[handle, f] : s.functions)
        if (f.module == module) functions.push_back(handle);
    for (uint64_t handle : functions) s.forget(s.functions, handle);
    return c.wait_for_device();
}

API cuModuleGetFunction(uint64_t *function, uint64_t module, const char *name) {
    ENTER(Current);
    if (!function || !name) return INVALID_VALUE;
    auto it = s.modules.find(module);
    if (it == s.modules.end() || it->second->ctx != c.ctx) return INVALID_HANDLE;
    const char *params = entry(it->second->ptx, name);
    if (!params) return NOT_FOUND;

    // A PTX that is not that of the sources is the tester's mistake, and said aloud.
    auto twin = registry().find(name);
    if (twin == registry().end()) {
        violate(std::string(name) + " is in the PTX, but not among the kernels this driver was built with");
        return NOT_FOUND;
    }
    std::vector<size_t> want;
    for (auto &p : twin->second.params) want.push_back(p.size);
    if (sizes(params) != want) {
        violate(std::string(name) + ": the parameters in the PTX are not those in the source");
        return NOT_FOUND;
    }
    *function = s.handle();
    s.functions[*function] = Function{c.ctx, module, name, &twin->second};
    return SUCCESS;
}
