/*
cuda_both.h - what the tests of llmc/device/cuda/ share: arrays that are both on the CPU and on the device, comparisons, TAP.

A test includes the layers that it tests, then this. It calls the CPU's layer on x.cpu (the same functions, in the namespace
cpu: link with cpu_layers.o), the device's on x.gpu, and compares. Each array on the device is a separate allocation without
padding at its end, so that an address sanitizer sees an access past it, and outputs hold NaN before they are written.
*/
#ifndef TEST_CUDA_BOTH_H
#define TEST_CUDA_BOTH_H
#include "../../llmc/base/rng.h"
#include "../../llmc/device/device_contract.h"
#include <algorithm>
#include <omp.h>
#include <string_view>
#include <tuple>
#include <vector>

// ---- the same functions on the CPU, from cpu_layers.c ----
#define OF_CPU(f) decltype(::f) f;
namespace cpu { extern "C" {
OF_CPU(device_init) OF_CPU(layers_init) OF_CPU(layers_free) OF_CPU(encoder_forward) OF_CPU(encoder_backward)
OF_CPU(encoder_part_forward) OF_CPU(encoder_part_backward) OF_CPU(residual_layernorm_forward) OF_CPU(layernorm_backward)
OF_CPU(matmul_forward) OF_CPU(matmul_forward_fp32) OF_CPU(matmul_gelu_forward) OF_CPU(matmul_backward_input)
OF_CPU(matmul_backward_input_fp32) OF_CPU(matmul_gelu_backward_input) OF_CPU(matmul_backward_weight) OF_CPU(attention_forward)
OF_CPU(attention_backward) OF_CPU(classifier_forward) OF_CPU(classifier_forward_backward) OF_CPU(classifier_part_stats)
OF_CPU(classifier_part_forward) OF_CPU(classifier_part_forward_backward) OF_CPU(add_sum) OF_CPU(add_sum_squares)
OF_CPU(scale_in_place) OF_CPU(add_in_place) OF_CPU(add_in_place_fp32) OF_CPU(add_sum_squares_fp32) OF_CPU(clip_gradients)
OF_CPU(adamw_update)
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

static bool quick; // leave out cases that show nothing new about races, because race detection is slow

// ---- results, as TAP ----
static int failures_in_test;
#define fail(...) do { \
    if (failures_in_test++ < 5) { printf("# %s:%d: ", __FILE__, __LINE__); printf(__VA_ARGS__); printf("\n"); } \
} while (0)
#define expect(cond, ...) do { if (!(cond)) fail(__VA_ARGS__); } while (0)

// ---- arrays: the same numbers for the CPU's layer and on the device ----
template <typename T> struct Both {
    T *cpu, *gpu; // (n), owned by the list below
    size_t n;
    std::vector<T> start; // what both held at the beginning
};
static std::vector<void*> on_host, on_device;
static uint64_t next_stream;

static inline void* device_bytes(size_t bytes) {
    void* p = NULL;
    cuda_check(cudaMalloc(&p, bytes ? bytes : 1), "the test's memory");
    on_device.push_back(p);
    return p;
}
template <typename T> static void to_device(T* dst, const T* src, size_t n) {
    cuda_check(cudaDeviceSynchronize(), "the kernels before a copy");
    cuda_check(cudaMemcpy(dst, src, n * sizeof(T), cudaMemcpyHostToDevice), "a copy to the device");
    cuda_check(cudaDeviceSynchronize(), "a copy to the device"); // a copy from pageable memory may still be in flight
}
template <typename T> static std::vector<T> from_device(const T* src, size_t n) {
    std::vector<T> x(n);
    cuda_check(cudaStreamSynchronize(compute_stream), "the kernels before a copy");
    cuda_check(cudaMemcpy(x.data(), src, n * sizeof(T), cudaMemcpyDeviceToHost), "a copy from the device");
    return x;
}
// On the device the array begins `offset` elements after an aligned address.
static int arrays, unaligned_array = -1; // the array of this number begins one element later
template <typename T> static Both<T> both_of(const std::vector<T>& start, size_t offset = 0) {
    if (arrays++ == unaligned_array) offset++;
    T* gpu = (T*)device_bytes((offset + start.size()) * sizeof(T)) + offset;
    Both<T> b = { (T*)xcalloc(start.size(), sizeof(T)), gpu, start.size(), start };
    on_host.push_back(b.cpu);
    std::copy(start.begin(), start.end(), b.cpu);
    to_device(b.gpu, start.data(), start.size());
    return b;
}
static inline void set(float* x, float value) { *x = value; }
#if !defined(PRECISION_FP32)
static inline void set(floatX* x, float value) { *x = to_floatX(value); }
static inline double number(floatX x) { return (double)to_float(x); }
#endif
static inline double number(float x) { return (double)x; }

// n numbers from N(mean, std)
template <typename T = floatX> static Both<T> random_both(size_t n, float mean = 0, float std = 1, size_t offset = 0) {
    std::vector<T> x(n);
    next_stream++;
    for (size_t i = 0; i < n; i++) set(&x[i], mean + std * random_normal(42, next_stream, i));
    return both_of(x, offset);
}
// n NaNs, which show where a write was forgotten
template <typename T = floatX> static Both<T> unset_both(size_t n) {
    std::vector<T> x(n);
    for (size_t i = 0; i < n; i++) set(&x[i], NAN);
    return both_of(x);
}
static inline Both<int> random_tokens(size_t n, int V) {
    std::vector<int> x(n);
    next_stream++;
    for (size_t i = 0; i < n; i++) x[i] = (int)(random_uniform(7, next_stream, i) * (float)V);
    return both_of(x);
}

static inline void free_all(void) {
    cpu::layers_free();
    for (void* p : on_host) free(p);
    for (void* p : on_device) cuda_check(cudaFree(p), "freeing the test's memory");
    on_host.clear();
    on_device.clear();
    next_stream = 0;
    arrays = 0;
}
// Frees all arrays, and prepares both sides for these shapes. The device's workspace holds NaN and is no larger than its layers ask for.
static inline void start_both(LayerShapes s, size_t workspace_bytes) {
    free_all();
    cpu::layers_init(s);
    memset(&cuda_layers, 0, sizeof cuda_layers);
    cuda_layers.shapes = s;
    cuda_layers.shared_bytes = 99 << 10;
    cuda_layers.workspace = device_bytes(workspace_bytes);
    cuda_check(cudaMemset(cuda_layers.workspace, 0xff, workspace_bytes), "filling the workspace");
}

// ---- comparisons ----
template <typename T> static std::vector<T> result_of(const Both<T>& b) { return from_device(b.gpu, b.n); }
template <typename T> static void begin_again(const Both<T>& b) { to_device(b.gpu, b.start.data(), b.n); }
template <typename T> static void expect_bits(const char* what, const std::vector<T>& got, const std::vector<T>& want) {
    for (size_t i = 0; i < want.size(); i++)
        if (memcmp(&got[i], &want[i], sizeof(T)) != 0) {
            fail("%s: element %zu of %zu differs", what, i, want.size());
            return;
        }
}
// Runs call() twice from the same beginning; `outputs` must be the same after both. (The race detector needs only one run.)
template <typename F, typename... T> static void run_twice(const char* what, F call, const Both<T>&... outputs) {
    call();
    if (quick) return;
    std::tuple<std::vector<T>...> first(result_of(outputs)...);
    (begin_again(outputs), ...);
    call();
    std::apply([&](const std::vector<T>&... f) { (expect_bits(what, result_of(outputs), f), ...); }, first);
}
// Makes the CPU's result the input of the next layer on both sides.
template <typename T> static Both<T> as_input(const Both<T>& b) { return both_of(std::vector<T>(b.cpu, b.cpu + b.n)); }
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
inline constexpr GradMode both_modes[2] = { GRAD_SET, GRAD_ADD };
// The initial contents of a parameter gradient, before it is set or added to.
static inline Both<floatX> gradient_before(size_t n, GradMode mode) { return mode == GRAD_SET ? unset_both(n) : random_both(n); }

// ---- tests ----
// TEST(a_claim) { ... } is run by main(), in the order of the file. -DONLY='",a_claim,another,"' leaves other tests out of the program,
// which then compiles faster.
static std::vector<std::pair<const char*, void (*)(void)>> all_tests;
#ifndef ONLY
#define ONLY ""
#endif
constexpr bool is_wanted(std::string_view name) { return *ONLY == 0 || std::string_view(ONLY).find(name) != std::string_view::npos; }
#define TEST(name) \
    static void test_##name(void); \
    [[maybe_unused]] static const bool registered_##name = [] { \
        if constexpr (is_wanted("," #name ",")) all_tests.push_back({ #name, test_##name }); \
        return true; \
    }(); \
    static void test_##name(void)

// The program's arguments: [quick] [PART OF A NAME...]. Results as TAP; returns main's result.
static inline int run_tests(int argc, char** argv) {
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    cpu::device_init(0, 1);
    omp_set_num_threads(1); // a race detector does not see how OpenMP's threads wait for each other
    int tests = 0, failures = 0;
    for (auto [name, test] : all_tests) {
        bool wanted = argc <= 1 + quick;
        for (int k = 1 + quick; k < argc; k++) wanted |= strstr(name, argv[k]) != NULL;
        if (!wanted) continue;
        failures_in_test = 0;
        test();
        free_all();
        failures += failures_in_test > 0;
        printf("%s %d - %s, " FLOATX_NAME "\n", failures_in_test ? "not ok" : "ok", ++tests, name);
        fflush(stdout);
    }
    require(tests > 0, "no test has such a name");
    printf("1..%d\n", tests);
    return failures > 0;
}
#ifndef CUDA_OWN_MAIN
int main(int argc, char** argv) { return run_tests(argc, argv); }
#endif
#endif
