/*
variants.cuh - what the files of this folder share. Each of them is one operation in several kernels, from naive to llmc/'s.

Such a file has a struct Problem (the arrays of one shape, the CPU's result, what has to be compared), a VARIANT for each kernel,
name_1_naive, name_2_..., and OPERATION, which is its main(). That checks every variant at every block size against the CPU's
layer, and then, on a GPU, times it. Under the emulator (make DEVICE=emulated) times mean nothing, and only the check is made.

How times are taken: each call alone, by events on the stream, after a pass over memory that leaves nothing of the operation's
arrays in the cache; the median counts. They are compared with a rate measured in the same run: that of a copy or, where an
operation is arithmetic (library.cuh), that of a large matrix product.
*/
#ifndef DEV_CUDA_VARIANTS_CUH
#define DEV_CUDA_VARIANTS_CUH
#include "../../../llmc/device/cuda/common.cuh"
#include "../../../llmc/device/cuda/device.cuh"
#include "both.cuh"
#include "../others.h"
#include "../variant_options.h"

// Frees all arrays, and prepares the CPU's layers for these shapes. The variant prepares the device's layers.
static inline void start_cpu(LayerShapes s) {
    free_all();
    cpu::layers_init(s);
}
#include <string>

struct Problem; // each file's own
struct Variant {
    const char* name;
    void (*launch)(Problem& p, int threads);
    const char* idea;
    bool own_blocks = false; // it chooses its blocks itself, as a library does: it is launched once, with 0 threads
};
constexpr bool OWN_BLOCKS = true;
static std::vector<Variant> variants; // in the order of the file
static bool is_offered; // by the variant that was launched last
static inline void not_offered(void) { is_offered = false; }
// VARIANT(adamw_5_mine, "the idea") { ... } is a function of (Problem& p, int threads). It puts the operation on compute_stream in
// blocks of so many threads, a multiple of 32. If the kernel cannot do this shape or this block size, it does nothing but set
// is_offered to false.
#define VARIANT(name, ...) \
    static void name(Problem& p, int threads); \
    [[maybe_unused]] static const bool added_##name = (variants.push_back({ #name, name, __VA_ARGS__ }), true); \
    static void name(Problem& p, [[maybe_unused]] int threads)

#ifdef CUDA_EMULATOR
constexpr bool variants_are_timed = false;
#else
constexpr bool variants_are_timed = true;
#endif
static std::vector<int> block_sizes(const Variant& v) {
    if (v.own_blocks) return { 0 };
    return { 32, 64, 128, 256, 512, 1024 };
}

// ---- who has a row: one thread, one warp or one block; or a result, which is a sum along a row ----
// A thread takes elements begin(), begin() + step(), ... of row(); sum and max are over all of the row's threads.
struct ThreadPerRow {
    static unsigned blocks(size_t rows, int threads) { return (unsigned)ceil_div(rows, threads); }
    __device__ static int row() { return blockIdx.x * blockDim.x + threadIdx.x; }
    __device__ static int begin() { return 0; }
    __device__ static int step() { return 1; }
    __device__ static float sum(float x) { return x; }
    __device__ static float max(float x) { return x; }
};
struct WarpPerRow {
    static unsigned blocks(size_t rows, int threads) { return (unsigned)ceil_div(rows, threads / WARP); }
    __device__ static int row() { return (blockIdx.x * blockDim.x + threadIdx.x) / WARP; }
    __device__ static int begin() { return threadIdx.x % WARP; }
    __device__ static int step() { return WARP; }
    __device__ static float sum(float x) { return warp_sum(x); }
    __device__ static float max(float x) { return warp_max(x); }
};
struct BlockPerRow {
    static unsigned blocks(size_t rows, int) { return (unsigned)rows; }
    __device__ static int row() { return blockIdx.x; }
    __device__ static int begin() { return threadIdx.x; }
    __device__ static int step() { return blockDim.x; }
    __device__ static float sum(float x) { return combine(x, Plus()); }
    __device__ static float max(float x) { return combine(x, Larger()); }
    template <typename Op> __device__ static float combine(float x, Op op) {
        __shared__ float of_warps[WARP];
        return combine_block(x, of_warps, op);
    }
};

// ---- time ----
// What times a call: two events, and twice a cache's worth of memory, which is read before each call so that the operation
// finds nothing of its own in the cache.
typedef struct {
    int4* memory; // (n) zeros; this and `sink` are owned by both.cuh's list
    size_t n;
    int* sink;    // (1)
    cudaEvent_t begin, end; // owned
    int repetitions;
} Timer;

__global__ void read_kernel(const int4* x, size_t n, int* sink) {
    int bits = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        bits |= x[i].x | x[i].y | x[i].z | x[i].w;
    if (bits != 0) *sink = bits; // never; but a compiler that knew would leave the reads out
}
static Timer timer_init(int repetitions) {
    int device, bytes;
    cuda_check(cudaGetDevice(&device), "the cache's size");
    cuda_check(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device), "the cache's size");
    Timer t = { NULL, 2 * (size_t)bytes / sizeof(int4), NULL, NULL, NULL, repetitions };
    t.memory = (int4*)device_bytes(t.n * sizeof(int4));
    t.sink = (int*)device_bytes(sizeof(int));
    cuda_check(cudaMemset(t.memory, 0, t.n * sizeof(int4)), "clearing the timer's memory");
    cuda_check(cudaDeviceSynchronize(), "clearing the timer's memory");
    cuda_check(cudaEventCreate(&t.begin), "timing");
    cuda_check(cudaEventCreate(&t.end), "timing");
    return t;
}
static void timer_free(Timer t) {
    cuda_check(cudaEventDestroy(t.begin), "timing");
    cuda_check(cudaEventDestroy(t.end), "timing");
}
// The median in milliseconds of some calls, after two that warm up.
template <typename F> static double median_ms(Timer t, F call) {
    std::vector<float> ms((size_t)t.repetitions);
    call();
    call();
    for (float& m : ms) {
        read_kernel<<<1024, 256, 0, compute_stream>>>(t.memory, t.n, t.sink);
        cuda_check(cudaEventRecord(t.begin, compute_stream), "timing");
        call();
        cuda_check(cudaEventRecord(t.end, compute_stream), "timing");
        cuda_check(cudaEventSynchronize(t.end), "timing");
        cuda_check(cudaEventElapsedTime(&m, t.begin, t.end), "timing");
    }
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2];
}

// ---- what this GPU's memory can do ----
__global__ void copy_kernel(int4* dst, const int4* src, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) dst[i] = src[i];
}
// GB/s, read and written, of 1 GiB copied by a kernel or by cudaMemcpy, whichever is faster.
static double copy_rate(Timer t) {
    const size_t bytes = (size_t)1 << 30, n = bytes / sizeof(int4);
    void *src, *dst;
    cuda_check(cudaMalloc(&src, bytes), "memory to measure a copy");
    cuda_check(cudaMalloc(&dst, bytes), "memory to measure a copy");
    double by_kernel = median_ms(t, [&] {
        copy_kernel<<<(unsigned)(n / 256), 256, 0, compute_stream>>>((int4*)dst, (const int4*)src, n);
    });
    double by_library = median_ms(t, [&] {
        cuda_check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, compute_stream), "measuring a copy");
    });
    cuda_check(cudaFree(src), "memory to measure a copy");
    cuda_check(cudaFree(dst), "memory to measure a copy");
    return 2e-6 * (double)bytes / fmin(by_kernel, by_library);
}

// What an operation is judged by: bytes that must be moved once, compared with a copy. library.cuh has the other, arithmetic.
template <typename P, typename = void> struct Measure {
    static constexpr const char *work_is = "MB moved", *rate_is = "GB/s", *peak_is = "a copy";
    static double work(const P& p) { return 1e-6 * p.bytes; } // MB in a millisecond are GB/s
    static double peak(Timer t) { return copy_rate(t); }
};

// ---- check ----
// What a variant is at one block size.
typedef enum { VARIANT_RIGHT, VARIANT_WRONG, VARIANT_NOT_OFFERED } Verdict;

template <typename P> static Verdict check_variant(const Variant& v, P& p, int threads) {
    failures_in_test = 0;
    for (auto& begin : beginnings) begin(); // outputs are NaN: what is not written shows
    is_offered = true;
    v.launch(p, threads);
    if (!is_offered) return VARIANT_NOT_OFFERED;
    cudaError_t launched = cudaGetLastError();
    if (launched == cudaErrorLaunchOutOfResources) return VARIANT_NOT_OFFERED; // too few registers for so many threads
    cuda_check(launched, v.name);
    cuda_check(cudaStreamSynchronize(compute_stream), v.name);
    std::string blocks = threads ? ", " + std::to_string(threads) + " threads a block" : "";
    snprintf(failures_of, sizeof failures_of, "%s%s", v.name, blocks.c_str());
    p.expect_right();
    return failures_in_test ? VARIANT_WRONG : VARIANT_RIGHT;
}

// ---- the table ----
// Prints a variant's row, preceded by its first wrong element, if any. Returns true if it was right at every block size that it
// offers.
template <typename P> static bool variant_row(const Variant& v, P& p, Timer t, double peak) {
    std::string wrong_at, sweep;
    double best = INFINITY;
    int best_threads = 0, offered = 0; // offered: block sizes
    for (int threads : block_sizes(v)) {
        failures_shown = wrong_at.empty();
        Verdict verdict = check_variant(v, p, threads);
        char text[32] = " -";
        offered += verdict != VARIANT_NOT_OFFERED;
        if (verdict == VARIANT_WRONG) wrong_at += " " + std::to_string(threads);
        if (verdict == VARIANT_RIGHT && variants_are_timed) {
            double ms = median_ms(t, [&] { v.launch(p, threads); });
            if (ms < best) { best = ms; best_threads = threads; }
            snprintf(text, sizeof text, " %.4f", ms);
        }
        sweep += text;
    }
    bool right = wrong_at.empty();
    std::string verdict = !offered ? "not offered" : right ? "right" : v.own_blocks ? "WRONG" : "WRONG at" + wrong_at;
    printf("| %s | %s | %s |", v.name, v.idea, verdict.c_str());
    if (best < INFINITY) {
        double rate = Measure<P>::work(p) / best;
        printf(" %s | %.4f | %.4g | %.0f %% |%s |", v.own_blocks ? "its own" : std::to_string(best_threads).c_str(), best, rate,
               100 * rate / peak, sweep.c_str());
    } else if (variants_are_timed) printf(" | | | | |");
    printf("\n");
    fflush(stdout);
    return right;
}

// An operation; `usual` is the shape on a GPU, `small` under the emulator. P, the file's Problem, is made of a Shape.
template <typename P> static int run_variants(int argc, char** argv, const char* shape_means, Shape usual, Shape small) {
    const std::string named(variants[0].name, strstr(variants[0].name, "_1_")); // "adamw_1_naive" is a variant of "adamw"
    const char* operation = named.c_str();
    Shape shape = variants_are_timed ? usual : small;
    VariantOptions o = parse_variant_options(argc, argv, operation, shape_means, shape, shape, 50, 0);
    device_init(0, 1);
    cpu::device_init(0, 1);
    cuda_check(cudaDeviceGetAttribute(&cuda_layers.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), operation);
    P p(o.shape);
    typedef Measure<P> M;
    printf("%s, %s, %s (%s), %.1f %s, on %s\n", operation, FLOATX_NAME, shape_text(o.shape), shape_means, M::work(p),
           M::work_is, device_name());
    Timer t = {};
    double peak = 0;
    if (variants_are_timed) {
        t = timer_init((int)o.repetitions);
        peak = M::peak(t);
        printf("peak measured here: %s, %.4g %s\n", M::peak_is, peak, M::rate_is);
    } else printf("without a GPU: results are checked, times are not taken\n");
    printf("\n| variant | idea | result |");
    const char* more = " best block | ms | %s | of the peak | ms at blocks of 32, 64, 128, 256, 512, 1024 |";
    if (variants_are_timed) printf(more, M::rate_is);
    printf("\n|---|---|---|%s\n", variants_are_timed ? "---|---|---|---|---|" : "");
    int tried = 0, wrong = 0;
    CoreSeconds begin = core_seconds();
    for (const Variant& v : variants) {
        if (strstr(v.name, o.wanted) == NULL) continue;
        tried++;
        wrong += !variant_row(v, p, t, peak);
    }
    require(tried > 0, "no variant has '%s' in its name", o.wanted);
    if (variants_are_timed) {
        say_if_peak_changed(peak, M::peak(t), M::rate_is);
        say_if_others_ran(begin);
        timer_free(t);
    }
    free_all();
    device_shutdown();
    return wrong > 0;
}
// main(), from what the shape means, the usual shape and the small one.
#define OPERATION(...) int main(int argc, char** argv) { return run_variants<Problem>(argc, argv, __VA_ARGS__); }
#endif
