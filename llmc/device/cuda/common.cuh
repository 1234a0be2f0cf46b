/*
cuda/common.cuh - what the kernels share: floatX on the device, 16-byte access, sums in a fixed order, launches.

How every kernel of this folder is built:
- Memory is read and written in pieces of 16 bytes (VEC elements of floatX). A kernel is a template over W, the elements
  that a thread takes at a time: W = VEC where addresses and row lengths allow it, W = 1 everywhere else.
- Arithmetic is fp32, and what is stored in floatX is rounded once.
- Sums are formed in an order that depends on shapes alone, never by floating-point atomics: equal bits from run to run.
- A function of layers.h launches kernels on compute_stream and returns; nothing here waits for the GPU.
*/
#ifndef LLMC_CUDA_COMMON_CUH
#define LLMC_CUDA_COMMON_CUH
#include "../layers_api.h"
#include "check.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// ---- the global state of these files ----
typedef struct {
    LayerShapes shapes; // the largest that may be seen
    void* workspace;    // owned by layers_init; scratch of one layer call, which the next one on the stream overwrites
    floatX* bias_sums;  // (bias_most) within it: the gradient of a bias from a product's epilogue, before it is added
    float* weight_sums; // (Vp,C) within it, which only matmul_backward_weight_chunk touches; NULL as in cpu/workspace.h
    int shared_bytes;   // the most shared memory that a block of this GPU can be given
    AttentionChoice attention; // this and the next: what layers_choose was told
    bool deterministic;
    char description[640];
} CudaLayers;
static CudaLayers cuda_layers;

// ---- launches ----
// Follows each launch. A kernel's own faults show only when it runs, so a build with DEBUG waits for it here.
static inline void check_launch(const char* layer) {
    cuda_check(cudaGetLastError(), layer);
#ifdef DEBUG
    cuda_wait(layer);
#endif
}
// Asks for a kernel's dynamic shared memory, before its launch. Without that, static and dynamic memory together have
// 48 KB; a kernel's static memory is not known here, so it asks for however little.
template <typename Kernel> static inline void allow_shared_memory(Kernel* kernel, size_t bytes, const char* layer) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes), layer);
}

// ---- floatX on the device ----
constexpr int WARP = 32;
constexpr int VEC = 16 / sizeof(floatX); // elements in 16 bytes

__device__ inline float widen(float x) { return x; }
template <typename T> __device__ inline T narrow(float x);
template <> __device__ inline float narrow<float>(float x) { return x; }
#if defined(PRECISION_BF16)
__device__ inline float widen(floatX x) { return __bfloat162float(__ushort_as_bfloat16(x.bits)); }
template <> __device__ inline floatX narrow<floatX>(float x) {
    return { __bfloat16_as_ushort(__float2bfloat16_rn(x)) };
}
#elif defined(PRECISION_FP16)
__device__ inline float widen(floatX x) { return __half2float(__ushort_as_half(x.bits)); }
template <> __device__ inline floatX narrow<floatX>(float x) { return { __half_as_ushort(__float2half_rn(x)) }; }
#endif

// W neighbours of an array of floats or floatX: as they are stored, which takes fewer registers, and in fp32
template <int W, typename T> struct Stored { alignas(16) T x[W]; };
template <int W> struct Floats { float x[W]; };

template <int W, typename T> __device__ inline Stored<W, T> load_stored(const T* p) {
    Stored<W, T> element;
    if constexpr (W * sizeof(T) % 16 == 0) {
        #pragma unroll
        for (int i = 0; i < (int)(W * sizeof(T) / 16); i++) ((int4*)element.x)[i] = ((const int4*)p)[i];
    } else if constexpr (W * sizeof(T) == 8) {
        *(int2*)element.x = *(const int2*)p;
    } else {
        #pragma unroll
        for (int k = 0; k < W; k++) element.x[k] = p[k];
    }
    return element;
}
template <int W, typename T> __device__ inline Floats<W> widen(Stored<W, T> element) {
    Floats<W> f;
    #pragma unroll
    for (int k = 0; k < W; k++) f.x[k] = widen(element.x[k]);
    return f;
}
// The compiler may not use after this what it has widened of e before: it would keep both in registers over a barrier
// between.
template <int W, typename T> __device__ inline void forget_widened(Stored<W, T>* e) {
    if constexpr (W * sizeof(T) % 16 == 0) {
        #pragma unroll
        for (int i = 0; i < (int)(W * sizeof(T) / 4); i++) asm volatile("" : "+r"(((int*)e->x)[i]));
    }
}
template <int W, typename T> __device__ inline Floats<W> load(const T* p) { return widen(load_stored<W>(p)); }
template <int W, typename T> __device__ inline void store(T* p, Floats<W> f) {
    alignas(16) T element[W];
    #pragma unroll
    for (int k = 0; k < W; k++) element[k] = narrow<T>(f.x[k]);
    if constexpr (W * sizeof(T) % 16 == 0) {
        #pragma unroll
        for (int i = 0; i < (int)(W * sizeof(T) / 16); i++) ((int4*)p)[i] = ((const int4*)element)[i];
    } else if constexpr (W * sizeof(T) == 8) {
        *(int2*)p = *(const int2*)element;
    } else {
        #pragma unroll
        for (int k = 0; k < W; k++) p[k] = element[k];
    }
}
template <int W> __device__ inline void operator+=(Floats<W>& sum, const Floats<W>& x) {
    #pragma unroll
    for (int k = 0; k < W; k++) sum.x[k] += x.x[k];
}
// Returns true if rows of `cols` elements of these arrays are whole pieces of 16 bytes; NULL counts as aligned. Where a
// sum over a row is formed, equal bits need the same answer: arrays that device_alloc gave always get it.
template <typename... T> static inline bool rows_are_vectors(size_t cols, const T*... arrays) {
    return cols % VEC == 0 && (((uintptr_t)arrays % 16 == 0) && ...);
}

// e^x where many are needed: the GPU's own instruction is off by a few ulp, which a floatX of 16 bits does not show.
__device__ inline float fast_exp(float x) { return NEEDS_MASTER ? __expf(x) : expf(x); }

// Returns the row of a token in a matrix that has a range's rows; -1 if it has none.
__device__ inline int token_row(TokenRange range, int token) {
    int row = token - range.first;
    return row >= 0 && row < range.count ? row : -1;
}

// ---- sums over threads, in a fixed order: every thread gets the same bits ----
struct Plus { template <typename T> __device__ T operator()(T a, T b) const { return a + b; } };
struct Larger { __device__ float operator()(float a, float b) const { return fmaxf(a, b); } };

// neighbours, a power of two
template <int LANES, typename T, typename Op> __device__ inline T combine_lanes(T x, Op op) {
    #pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) x = op(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}
template <typename T> __device__ inline T warp_sum(T x) { return combine_lanes<WARP>(x, Plus()); }
__device__ inline float warp_max(float x) { return combine_lanes<WARP>(x, Larger()); }
// Over a block of whole warps, at most 32. `of_warps` (32) is shared memory.
template <typename T, typename Op> __device__ inline T combine_block(T x, T* of_warps, Op op) {
    x = combine_lanes<WARP>(x, op);
    __syncthreads(); // an earlier use of of_warps has been read
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = x;
    __syncthreads();
    x = of_warps[0];
    for (int w = 1; w < (int)(blockDim.x / WARP); w++) x = op(x, of_warps[w]);
    return x;
}
template <typename T> __device__ inline T block_sum(T x, T* of_warps) { return combine_block(x, of_warps, Plus()); }
__device__ inline float block_max(float x, float* of_warps) { return combine_block(x, of_warps, Larger()); }

// The first warp's sum += those of the other warps of a block (32,WARPS), W columns a lane. `sums` is shared memory.
template <int WARPS, int W> __device__ inline void sum_of_warps(Floats<W>* sum, float (&sums)[WARPS][WARP * W]) {
    // Neighbouring lanes in neighbouring banks
    for (int k = 0; k < W; k++) sums[threadIdx.y][k * WARP + threadIdx.x] = sum->x[k];
    __syncthreads();
    if (threadIdx.y != 0) return;
    #pragma unroll
    for (int k = 0; k < W; k++)
        for (int y = 1; y < WARPS; y++) sum->x[k] += sums[y][k * WARP + threadIdx.x];
}

// ---- column sums: the second half of every parameter gradient that is a sum over rows ----
// One launch makes two gradients where their partial sums lie side by side: a, b (cols) set or += column sums of
// partial (chunks,2,cols). b NULL: there is only a, and partial is (chunks,cols). One block of 32x32 threads per 32
// columns: each row of threads adds up every 32nd chunk, then the first row adds up the rows. Moves 4 chunks bytes per
// column.
__global__ void add_up_chunks_kernel(floatX* a, floatX* b, const float* partial, int chunks, int cols, GradMode mode) {
    __shared__ float sums[WARP][WARP];
    int c = blockIdx.x * WARP + threadIdx.x, all = b != NULL ? 2 * cols : cols;
    float sum = 0;
    for (int k = threadIdx.y; k < chunks && c < all; k += WARP) sum += partial[(size_t)k * all + c];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || c >= all) return;
    for (int y = 1; y < WARP; y++) sum += sums[y][threadIdx.x];
    floatX* dst = c < cols ? a + c : b + (c - cols);
    *dst = narrow<floatX>(mode == GRAD_ADD ? widen(*dst) + sum : sum);
}
static inline void add_up_chunks(floatX* a, floatX* b, const float* partial, int chunks, int cols, GradMode mode,
                                 const char* layer) {
    unsigned strips = (unsigned)ceil_div(b != NULL ? 2 * (size_t)cols : (size_t)cols, WARP);
    add_up_chunks_kernel<<<strips, dim3(WARP, WARP), 0, compute_stream>>>(a, b, partial, chunks, cols, mode);
    check_launch(layer);
}

// Threads of a block that shares one row of `cols` elements, taken as vectors or one by one: whole warps.
static inline unsigned row_threads(size_t cols, bool vectors, unsigned most = 256) {
    return (unsigned)size_min(round_up(vectors ? cols / VEC : cols, WARP), most);
}
#endif
