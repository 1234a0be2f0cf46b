/*
both.cuh - arrays that are both on the CPU and on the device, and comparisons, for the kernels in variants: an operation's result comes from
the CPU's layer, which cpu_layers.o has under the same name (here in the namespace cpu).

    Both<floatX> x = random_both(n), y = random_both(n), out = unset_both(n);
    cpu::add(out.cpu, x.cpu, y.cpu, n), and add(out.gpu, x.gpu, y.gpu, n)
    expect_near("out", out, 4);      the device's out is the CPU's within the rounding of stored values and 4 fp32 roundings

Each array on the device is a separate allocation without padding at its end, so that an address sanitizer sees an access past it, and
outputs hold NaN before they are written.
*/
#ifndef DEV_CUDA_BOTH_CUH
#define DEV_CUDA_BOTH_CUH
#include "../../../llmc/base/rng.h"
#include "../../../llmc/device/device_api.h"
#include <algorithm>
#include <functional>
#include <omp.h>
#include <vector>

// ---- the same functions on the CPU, from cpu_layers.c ----
#define OF_CPU(f) decltype(::f) f;
namespace cpu { extern "C" {
OF_CPU(device_init) OF_CPU(layers_init) OF_CPU(layers_free) OF_CPU(encoder_forward) OF_CPU(encoder_backward)
OF_CPU(residual_layernorm_forward) OF_CPU(layernorm_backward) OF_CPU(matmul_forward) OF_CPU(matmul_backward_input)
OF_CPU(matmul_backward_weight) OF_CPU(attention_forward) OF_CPU(attention_backward) OF_CPU(classifier_forward)
OF_CPU(classifier_forward_backward) OF_CPU(add_sum_squares) OF_CPU(adamw_update)
} }

// Half a unit in the last place of floatX, relative.
#if defined(PRECISION_BF16)
#define ROUNDING (1.0 / 256)
#elif defined(PRECISION_FP16)
#define ROUNDING (1.0 / 2048)
#else
#define ROUNDING (1.0 / 16777216)
#endif
#define F32_ROUNDING (1.0 / 16777216)

// ---- results ----
static int failures_in_test, failures_shown = 5;
static char failures_of[128]; // what has failed
#define fail(...) do { \
    if (failures_in_test++ < failures_shown) { \
        printf("# %s: ", failures_of); \
        printf(__VA_ARGS__); \
        printf("\n"); \
    } \
} while (0)
#define expect(cond, ...) do { if (!(cond)) fail(__VA_ARGS__); } while (0)

// ---- arrays: the same numbers for the CPU's layer and on the device ----
template <typename T> struct Both {
    T *cpu, *gpu; // (n), owned by the list below
    size_t n;
    std::vector<T> start; // what both held at the beginning
};
template <typename T> static const Both<T> none = {}; // where a layer takes NULL
static std::vector<void*> on_host, on_device;
static std::vector<std::function<void()>> beginnings; // each gives an array what it held at first
static uint64_t next_stream;

static inline void* device_bytes(size_t bytes) {
    void* p = NULL;
    cuda_check(cudaMalloc(&p, bytes ? bytes : 1), "the test's memory");
    on_device.push_back(p);
    return p;
}
static inline void to_device(void* dst, const void* src, size_t bytes) {
    if (bytes == 0) return;
    cuda_check(cudaDeviceSynchronize(), "the kernels before a copy");
    cuda_check(cudaMemcpy(dst, src, bytes, cudaMemcpyHostToDevice), "a copy to the device");
    cuda_check(cudaDeviceSynchronize(), "a copy to the device"); // a copy from pageable memory may still be in flight
}
template <typename T> static std::vector<T> from_device(const T* src, size_t n) {
    std::vector<T> x(n);
    cuda_check(cudaStreamSynchronize(compute_stream), "the kernels before a copy");
    if (n > 0) cuda_check(cudaMemcpy(x.data(), src, n * sizeof(T), cudaMemcpyDeviceToHost), "a copy from the device");
    return x;
}
template <typename T> static std::vector<T> result_of(const Both<T>& b) { return from_device(b.gpu, b.n); }
template <typename T> static void begin_again(const Both<T>& b) { to_device(b.gpu, b.start.data(), b.n * sizeof(T)); }
template <typename T> static Both<T> both_of(const std::vector<T>& start) {
    Both<T> b = { (T*)xcalloc(start.size(), sizeof(T)), (T*)device_bytes(start.size() * sizeof(T)), start.size(), start };
    on_host.push_back(b.cpu);
    beginnings.push_back([b] { begin_again(b); });
    std::copy(b.start.begin(), b.start.end(), b.cpu);
    begin_again(b);
    return b;
}
template <typename T> static inline void set(T* x, double value) { *x = (T)value; }
#if !defined(PRECISION_FP32)
static inline void set(floatX* x, double value) { *x = to_floatX((float)value); }
static inline double number(floatX x) { return (double)to_float(x); }
#endif
static inline double number(float x) { return (double)x; }

// value(i) for each of n elements
template <typename T = floatX, typename F> static std::vector<T> numbers(size_t n, F value) {
    std::vector<T> x(n);
    for (size_t i = 0; i < n; i++) set(&x[i], value(i));
    return x;
}
template <typename T = floatX, typename F> static Both<T> made_both(size_t n, F value) {
    return both_of(numbers<T>(n, value));
}
template <typename T = floatX> static Both<T> same_both(size_t n, double value) { return made_both<T>(n, [=](size_t) { return value; }); }
// n numbers from N(mean, std)
template <typename T = floatX> static Both<T> random_both(size_t n, float mean = 0, float std = 1) {
    next_stream++;
    return made_both<T>(n, [=](size_t i) { return mean + std * random_normal(42, next_stream, i); });
}
// n NaNs, which show where a write was forgotten
template <typename T = floatX> static Both<T> unset_both(size_t n) { return same_both<T>(n, NAN); }
static inline Both<int> random_tokens(size_t n, int V) {
    next_stream++;
    return made_both<int>(n, [=](size_t i) { return random_uniform(7, next_stream, i) * (float)V; });
}
// The CPU's result as what both begin with.
template <typename T> static Both<T> as_input(const Both<T>& b) { return both_of(std::vector<T>(b.cpu, b.cpu + b.n)); }

static inline void free_all(void) {
    cpu::layers_free();
    for (void* p : on_host) free(p);
    for (void* p : on_device) cuda_check(cudaFree(p), "freeing the test's memory");
    beginnings.clear();
    on_host.clear();
    on_device.clear();
    next_stream = 0;
}
// ---- comparisons ----
// Compares the device's numbers with the CPU layer's. Each side rounds nearly the same number for itself; the numbers may differ
// by `roundings` fp32 roundings of the largest result, and by more[i] if that is not empty.
template <typename T>
static void expect_near(const char* what, const Both<T>& b, double roundings, const std::vector<double>& more = {}) {
    std::vector<T> got = result_of(b);
    double scale = 0, relative = sizeof(T) == sizeof(floatX) ? 2.02 * ROUNDING : 0;
    for (size_t i = 0; i < b.n; i++) scale = fmax(scale, fabs(number(b.cpu[i])));
    for (size_t i = 0; i < b.n; i++) {
        double g = number(got[i]), want = number(b.cpu[i]);
        double tolerance = relative * fabs(want) + roundings * F32_ROUNDING * scale + (more.empty() ? 0 : more[i]);
        if (!(fabs(g - want) <= tolerance)) {
            fail("%s: element %zu of %zu is %.9g, not %.9g within %.3g", what, i, b.n, g, want, tolerance);
            return;
        }
    }
}
#endif
