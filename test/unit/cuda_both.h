/*
cuda_both.h - what the tests of llmc/device/cuda/ share: arrays that are both on the CPU and on the device, layers that are called
on both, comparisons, TAP.

A test includes the layers that it tests, then this, and is linked with cpu_layers.o, which has the CPU's under the same names
(here in the namespace cpu):

    Both<floatX> x = random_both(n), y = random_both(n), out = unset_both(n);
    BOTH(add, out, x, y, n);         cpu::add(out.cpu, x.cpu, y.cpu, n), and twice add(out.gpu, x.gpu, y.gpu, n)
    expect_near("out", out, 4);      the device's out is the CPU's within the rounding of stored values and 4 fp32 roundings
    NEAR(4, add, out, x, y, n);      all that in a line, for each array that the layer's declaration does not call const
    SAME_BITS(add, out, x, y, n);    and this if not a bit may differ

Each of the calls finds what its outputs held at the beginning, and both of the device's must leave the same bits. Each array on the
device is a separate allocation without padding at its end, so that an address sanitizer sees an access past it, and outputs hold
NaN before they are written.
*/
#ifndef TEST_CUDA_BOTH_H
#define TEST_CUDA_BOTH_H
#include "../../llmc/base/rng.h"
#include "../../llmc/device/device_api.h"
#include "claims.h"
#include <algorithm>
#include <functional>
#include <omp.h>
#include <string_view>
#include <tuple>
#include <vector>

// ---- the same functions on the CPU, from cpu_layers.c ----
#define OF_CPU(f) decltype(::f) f;
namespace cpu { extern "C" {
OF_CPU(device_init) OF_CPU(layers_init) OF_CPU(layers_free) OF_CPU(encoder_forward) OF_CPU(encoder_backward)
OF_CPU(encoder_part_forward) OF_CPU(encoder_part_backward) OF_CPU(residual_layernorm_forward) OF_CPU(layernorm_backward)
OF_CPU(matmul_forward) OF_CPU(matmul_gelu_forward) OF_CPU(matmul_backward_input)
OF_CPU(matmul_gelu_backward_input) OF_CPU(matmul_backward_weight) OF_CPU(attention_forward)
OF_CPU(attention_backward) OF_CPU(classifier_forward) OF_CPU(classifier_forward_backward) OF_CPU(classifier_part_stats)
OF_CPU(classifier_part_forward) OF_CPU(classifier_part_forward_backward) OF_CPU(add_sum) OF_CPU(add_sum_squares)
OF_CPU(add_in_place) OF_CPU(add_in_place_fp32) OF_CPU(add_sum_squares_fp32) OF_CPU(clip_gradients)
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
static int failures_in_test, failures_shown = 5;
static char failures_of[128]; // what has failed, where that says more than a line of the test; else ""
#define fail(...) do { \
    if (failures_in_test++ < failures_shown) { \
        if (failures_of[0]) printf("# %s: ", failures_of); else printf("# %s:%d: ", __FILE__, __LINE__); \
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
template <typename T> static void both_begin_again(const Both<T>& b) {
    std::copy(b.start.begin(), b.start.end(), b.cpu);
    begin_again(b);
}
// On the device the array begins `offset` elements after an aligned address.
static int arrays, unaligned_array = -1; // the array of this number begins one element later
template <typename T> static Both<T> both_of(const std::vector<T>& start, size_t offset = 0) {
    if (arrays++ == unaligned_array) offset++;
    T* gpu = (T*)device_bytes((offset + start.size()) * sizeof(T)) + offset;
    Both<T> b = { (T*)xcalloc(start.size(), sizeof(T)), gpu, start.size(), start };
    on_host.push_back(b.cpu);
    beginnings.push_back([b] { begin_again(b); });
    both_begin_again(b);
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
template <typename T = floatX, typename F> static Both<T> made_both(size_t n, F value, size_t offset = 0) {
    return both_of(numbers<T>(n, value), offset);
}
template <typename T = floatX> static Both<T> same_both(size_t n, double value) { return made_both<T>(n, [=](size_t) { return value; }); }
// n numbers from N(mean, std)
template <typename T = floatX> static Both<T> random_both(size_t n, float mean = 0, float std = 1, size_t offset = 0) {
    next_stream++;
    return made_both<T>(n, [=](size_t i) { return mean + std * random_normal(42, next_stream, i); }, offset);
}
// n NaNs, which show where a write was forgotten
template <typename T = floatX> static Both<T> unset_both(size_t n) { return same_both<T>(n, NAN); }
static inline Both<int> random_tokens(size_t n, int V) {
    next_stream++;
    return made_both<int>(n, [=](size_t i) { return random_uniform(7, next_stream, i) * (float)V; });
}
// Elements [first, first + n) of what b held at the beginning, as an array of their own.
template <typename T> static Both<T> piece_of(const Both<T>& b, size_t first, size_t n) {
    return both_of(std::vector<T>(b.start.begin() + first, b.start.begin() + first + n));
}
// The same elements in their place.
template <typename T> static Both<T> inside(const Both<T>& b, size_t first, size_t n) {
    return { b.cpu + first, b.gpu + first, n, std::vector<T>(b.start.begin() + first, b.start.begin() + first + n) };
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
    arrays = 0;
}
// Frees all arrays, and prepares both sides for these shapes. The device's workspace holds NaN, and no more than is asked for.
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
template <typename T> static void expect_bits(const char* what, const std::vector<T>& got, const std::vector<T>& want) {
    expect(got.size() == want.size(), "%s: %zu elements, not %zu", what, got.size(), want.size());
    for (size_t i = 0; i < std::min(got.size(), want.size()); i++)
        if (memcmp(&got[i], &want[i], sizeof(T)) != 0) {
            fail("%s: element %zu of %zu differs", what, i, want.size());
            return;
        }
}
template <typename T> static void expect_cpus_bits(const char* what, const Both<T>& b) {
    expect_bits(what, result_of(b), std::vector<T>(b.cpu, b.cpu + b.n));
}
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

// ---- calls ----
// Calls twice from the same beginning; `outputs` must be the same after both. (The race detector needs only one call.)
template <typename F, typename... T> static void run_twice(const char* what, F call, const Both<T>&... outputs) {
    (begin_again(outputs), ...);
    call();
    if (quick) return;
    std::tuple<std::vector<T>...> first(result_of(outputs)...);
    (begin_again(outputs), ...);
    call();
    std::apply([&](const std::vector<T>&... f) { (expect_bits(what, result_of(outputs), f), ...); }, first);
}
// Of an argument: what each side's function is given, and whether the function, which takes it as a P, may write to it.
template <typename T> static T* of_cpu(const Both<T>& b) { return b.cpu; }
template <typename T> static T* of_gpu(const Both<T>& b) { return b.gpu; }
template <typename T> static T of_cpu(const T& x) { return x; }
template <typename T> static T of_gpu(const T& x) { return x; }
template <typename P, typename T> static auto written(const Both<T>& b) {
    if constexpr (std::is_const_v<std::remove_pointer_t<P>>) return std::tuple<>();
    else return std::tuple<const Both<T>&>(b);
}
template <typename P, typename T> static auto written(const T&) { return std::tuple<>(); }
template <typename C, typename... P, typename... A>
static void on_both(const char* what, void (*cpus)(P...), void (*gpus)(P...), C compare, const A&... arguments) {
    std::apply([&](const auto&... outputs) {
        (both_begin_again(outputs), ...);
        cpus(of_cpu(arguments)...);
        run_twice(what, [&] { gpus(of_gpu(arguments)...); }, outputs...);
        (compare(what, outputs), ...);
    }, std::tuple_cat(written<P>(arguments)...));
}
inline constexpr auto not_compared = [](const char*, const auto&) {};
#define ON_BOTH(compare, f, ...) on_both(#f, cpu::f, f, compare, __VA_ARGS__)
#define BOTH(f, ...) ON_BOTH(not_compared, f, __VA_ARGS__)
#define NEAR(roundings, f, ...) \
    ON_BOTH([&](const char* what, const auto& output) { expect_near(what, output, roundings); }, f, __VA_ARGS__)
#define SAME_BITS(f, ...) ON_BOTH([](const char* what, const auto& output) { expect_cpus_bits(what, output); }, f, __VA_ARGS__)

// ---- tests ----
// TEST(a_claim) { ... } is run by main(), in the order of the file. -DONLY='",a_claim,another,"' leaves other tests out of the
// program, which then compiles faster.
#ifndef ONLY
#define ONLY ""
#endif
constexpr bool is_wanted(std::string_view name) { return *ONLY == 0 || std::string_view(ONLY).find(name) != std::string_view::npos; }
#define TEST(name) \
    static void test_##name(void); \
    __attribute__((constructor)) static void register_##name(void) { \
        if constexpr (is_wanted("," #name ",")) claim_add(#name, test_##name, __COUNTER__); \
    } \
    static void test_##name(void)

void before_each(void) __attribute__((weak)); // may prepare both sides (start_both) before a test
// The program's arguments: [quick] [PART OF A NAME...]. Results as TAP; returns main's result.
static inline int run_tests(int argc, char** argv) {
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    cpu::device_init(0, 1);
    omp_set_num_threads(1); // a race detector does not see how OpenMP's threads wait for each other
    int tests = 0, failures = 0;
    for (const Claim* c = claims; c < claims + num_claims; c++) {
        bool wanted = argc <= 1 + quick;
        for (int k = 1 + quick; k < argc; k++) wanted |= strstr(c->name, argv[k]) != NULL;
        if (!wanted) continue;
        failures_in_test = 0;
        if (before_each) before_each();
        c->run();
        free_all();
        failures += failures_in_test > 0;
        printf("%s %d - %s, " FLOATX_NAME "\n", failures_in_test ? "not ok" : "ok", ++tests, c->name);
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
