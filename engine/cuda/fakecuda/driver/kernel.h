// kernel.h declares how a compiled kernel is known to the driver: its twin. Each .cu
// file is compiled with a line KERNEL(name) for each of its entries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace fake {

struct Param {
    size_t size;
    size_t points_to;  // the alignment of what a pointer points to, 0 for others
};

template <typename T>
constexpr Param param() {
    if constexpr (std::is_pointer<T>::value)
        return {sizeof(T), alignof(std::remove_pointer_t<T>)};
    else
        return {sizeof(T), 0};
}

// Twin is a kernel compiled for the host. run calls it once, as one thread of a block,
// with the addresses of its arguments.
struct Twin {
    std::vector<Param> params;
    void (*run)(void **args);
};

void register_twin(const char *name, Twin twin);

template <auto F>
struct Caller;

template <typename... A, void (*F)(A...)>
struct Caller<F> {
    template <size_t... I>
    static void unpack(void **args, std::index_sequence<I...>) {
        F(*static_cast<A *>(args[I])...);
    }
    static void run(void **args) { unpack(args, std::index_sequence_for<A...>()); }
    static Twin twin() { return {{param<A>()...}, run}; }
};

struct Registration {
    Registration(const char *name, Twin twin) { register_twin(name, std::move(twin)); }
};

}  // namespace fake

#define KERNEL(name) static fake::Registration fake_twin_##name(#name, fake::Caller<name>::twin());
