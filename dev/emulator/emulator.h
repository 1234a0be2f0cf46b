/*
emulator.h - what a kernel sees of the CUDA emulator. compile.sh includes it before everything else in a .cu source.

The idea: every CUDA thread is a fiber, which has its own stack and which an OS thread switches to and from. A block runs on one
OS thread; blocks are spread over the cores. A fiber hands over when it waits (barriers, warp functions) and, now and then, at
a jump or branch, so that threads interleave in an order which CUDA_EMULATOR_SEED decides.

This file has the interface of the engine (engine.cpp) and the language: indices, __shared__, launches. device_functions.h has
CUDA's own functions, written with that interface.
*/
#ifndef CUDA_EMULATOR
#define CUDA_EMULATOR 1
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace emulator {

// A place in a source. As a default argument, here() is the place of the call.
struct Site { const char* file; int line; };
constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return Site{file, line}; }

// A CUDA thread as its kernel sees it. `self` is the one that this OS thread is running; NULL in host code.
struct Thread {
    const char* kernel; // the launch's text: "softmax<float>"
    uint3 thread_idx, block_idx;
    dim3 block_dim, grid_dim;
    int lane; // 0..31 within its warp
};
extern __thread Thread* self;

// Prints "cuda emulator: KERNEL, block, thread, FILE:LINE: what" and exits with status 1.
[[noreturn]] void fail(const Thread* thread, Site site, const char* format, ...) __attribute__((format(printf, 3, 4)));

// --- memory ---
void* static_shared(const void* variable, size_t bytes, size_t alignment, Site site); // the block's own copy of a __shared__ variable
void* dynamic_shared(size_t alignment, Site site);                                    // the block's dynamic shared memory
template <class T, size_t alignment> T& shared_variable(const void* variable, Site site = here()) {
    return *static_cast<T*>(static_shared(variable, sizeof(T), std::max(alignof(T), alignment), site));
}
inline void check_aligned(const volatile void* p, size_t alignment, Site site) {
    if (reinterpret_cast<uintptr_t>(p) % alignment) fail(self, site, "misaligned address %p: it must divide by %zu", (const void*)p, alignment);
}
// For ThreadSanitizer: an atomic publishes what its thread did before a __threadfence(), and sees what others published that way.
void before_atomic(const volatile void* address);
void after_atomic(const volatile void* address);
void thread_fence(void);

// --- waiting for other threads (see engine.cpp, warp.cpp) ---
int block_barrier(const char* name, int predicate, Site site);          // returns for how many threads the predicate was true
void warp_barrier(unsigned mask, Site site);
uint64_t shuffle(const char* name, unsigned mask, uint64_t value, int source_lane, Site site);
unsigned ballot(const char* name, unsigned mask, bool predicate, Site site);
unsigned match_any(unsigned mask, uint64_t value, Site site);           // the lanes that hold the same value
enum class Reduce { ADD, MIN_S32, MAX_S32, MIN_U32, MAX_U32, AND, OR, XOR };
unsigned reduce(const char* name, unsigned mask, Reduce how, unsigned value, Site site);
unsigned active_mask(void);
void yield(void);                                                       // lets other threads run first


// --- asynchronous copies (cp.async): kept in batches until the thread waits ---
struct PendingCopy { void* destination; unsigned char bytes[16]; size_t size, batch; };
void pipeline_add(void* destination, const void* bytes, size_t size);
void pipeline_commit(void);
bool pipeline_next(size_t batches_that_may_wait, PendingCopy* copy);    // takes the next copy that must now be made

// --- matrix units (see matrix.h for what kernels call) ---
enum class Element { BF16, FP16 };
void mma_m16n8k16(Element type, float* d, const uint32_t* a, const uint32_t* b, Site site); // d (4) += a (4) * b (2): a lane's fragments
void load_matrices(const char* name, int count, bool transposed, const void* row, uint32_t* fragments, Site site);

// --- asynchronous units of compute capability 9.0 (see hopper.h for what kernels call, hopper.cpp for how they work) ---
uint32_t shared_address(const void* p, Site site);
void mbarrier_init(uint64_t* barrier, unsigned arrivals, Site site);
void mbarrier_init_fence(void);
void mbarrier_arrive(uint64_t* barrier, unsigned expected_bytes, Site site);
void mbarrier_wait(uint64_t* barrier, unsigned parity, Site site);
struct TileStart { int rank, x, y, z; }; // x counts elements of a row; z, of rank 3 alone, planes
size_t tma_check(const void* tile, const CUtensorMap* map, int rank, uint64_t* barrier, Site site); // returns the tile's bytes
void tma_load(void* tile, const CUtensorMap* map, TileStart start, uint64_t* barrier, Site site);
struct WarpgroupProduct { Element type; int n; bool a_in_registers, a_transposed, b_transposed; uint64_t a, b; };
// d (n/2): this thread's part of the sums (64,n). fragment (4): this thread's part of A, or NULL if A is in shared memory.
void wgmma(WarpgroupProduct product, float* d, uint32_t* fragment, Site site);
void wgmma_settle(uint32_t* fragment, Site site);
void wgmma_fence(void);
void wgmma_commit(void);
void wgmma_wait(size_t groups_that_may_wait, Site site);

// --- launches ---
struct Configuration {
    const char* kernel;
    Site site;
    dim3 grid, block;
    size_t shared_bytes;
};
void allow_shared_memory(const void* kernel, size_t bytes);             // cudaFuncAttributeMaxDynamicSharedMemorySize
void check_configuration(const Configuration& configuration, const void* kernel);
void check_argument(const Configuration& configuration, int number, const void* p); // device or pinned memory, or NULL
template <class T> void check_argument(const Configuration&, int, const T&) {}
template <class T> void check_argument(const Configuration& configuration, int number, T* const& p) {
    check_argument(configuration, number, static_cast<const void*>(p));
}
void enqueue_kernel(const Configuration& configuration, cudaStream_t stream, const void* kernel, std::function<void()> work);
void run(const Configuration& configuration, const void* kernel, void (*body)(void*), void* closure);

// kernel<<<grid, block, shared, stream>>>(arguments) becomes
// emulator::launch("kernel", here, grid, block, shared, stream)(kernel, arguments): arguments are copied once, as CUDA does, and
// the kernel runs when the stream gets to it.
struct Launch {
    Configuration configuration;
    cudaStream_t stream;
    template <class... Parameters, class... Arguments>
    void operator()(void (*kernel)(Parameters...), Arguments&&... arguments) const {
        std::tuple<void (*)(Parameters...), std::tuple<Parameters...>> call(kernel, {std::forward<Arguments>(arguments)...});
        check_arguments(std::get<1>(call), std::index_sequence_for<Parameters...>());
        const void* key = reinterpret_cast<const void*>(kernel);
        enqueue_kernel(configuration, stream, key, [c = configuration, key, call]() mutable {
            run(c, key, call_kernel<Parameters...>, &call);
        });
    }
    template <class Tuple, size_t... I> void check_arguments(const Tuple& parameters, std::index_sequence<I...>) const {
        (void)parameters;
        (check_argument(configuration, static_cast<int>(I), std::get<I>(parameters)), ...);
    }
    template <class... Parameters> static void call_kernel(void* call) {
        auto& c = *static_cast<std::tuple<void (*)(Parameters...), std::tuple<Parameters...>>*>(call);
        unpack(std::get<0>(c), std::get<1>(c), std::index_sequence_for<Parameters...>());
    }
    template <class Kernel, class Tuple, size_t... I> static inline __attribute__((always_inline))
    void unpack(Kernel kernel, Tuple& parameters, std::index_sequence<I...>) { (void)parameters; kernel(std::get<I>(parameters)...); }
};
inline Launch launch(const char* kernel, Site site, dim3 grid, dim3 block, size_t shared_bytes = 0,
                     cudaStream_t stream = nullptr) {
    return Launch{{kernel, site, grid, block, shared_bytes}, stream};
}
} // namespace emulator

// launch.py rewrites __shared__ declarations and launches; the rest of the language is names.
#undef __shared__
#undef __launch_bounds__
#define __launch_bounds__(...)
#define threadIdx (emulator::self->thread_idx)
#define blockIdx (emulator::self->block_idx)
#define blockDim (emulator::self->block_dim)
#define gridDim (emulator::self->grid_dim)
constexpr int warpSize = 32;
template <class F, class = std::enable_if_t<std::is_function<F>::value>>
cudaError_t cudaFuncSetAttribute(F* kernel, cudaFuncAttribute attribute, int value) {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize)
        emulator::allow_shared_memory(reinterpret_cast<const void*>(kernel), static_cast<size_t>(value));
    return cudaSuccess;
}

#include "device_functions.h"
#include "matrix.h"
#include "hopper.h"
#define __CUDACC__ 1 // makes sources take their path for nvcc; not earlier, because CUDA's own headers would then expect nvcc
#endif
