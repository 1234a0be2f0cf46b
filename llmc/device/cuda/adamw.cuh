/* cuda/adamw.cuh - AdamW over flat memory: elementwise, and bound by memory alone. */
#ifndef LLMC_CUDA_ADAMW_CUH
#define LLMC_CUDA_ADAMW_CUH
#include "../host_adamw.h"
#include "stats.cuh"

// Updates elements [i, i + W), unless scale is 0, which leaves them unchanged:
// m = b1 m + (1-b1) g, v = b2 v + (1-b2) g^2, p = p decay - lr/(1-b1^t) m / (sqrt(v) / sqrt(1-b2^t) + eps)
// Each fused multiply-add is written out, so that every way of cutting an array into pieces gives the same bits.
// 16-bit params have a master copy, and may be NULL; fp32 params have none. Returns the sum of the squares of the
// params.
template <int W, typename T>
__device__ inline double adamw_piece(AdamWFactors f, float scale, T* params, float* master, float* m, float* v,
                                     const T* grads, size_t i, size_t no_decay) {
    constexpr bool has_master = sizeof(T) < sizeof(float);
    Floats<W> p = {};
    double square = 0;
    if (scale != 0) {
        Floats<W> g = load<W>(grads + i), mi = load<W>(m + i), vi = load<W>(v + i);
        if (has_master) p = load<W>(master + i);
        else p = load<W>(params + i);
        #pragma unroll
        for (int k = 0; k < W; k++) {
            float gradient = g.x[k] * scale, decay = i + k < no_decay ? 1.0f : f.decay;
            mi.x[k] = fmaf(f.beta1_rest, gradient - mi.x[k], mi.x[k]);
            vi.x[k] = fmaf(f.beta2_rest * gradient, gradient, vi.x[k] * f.beta2);
            float denominator = sqrtf(vi.x[k]) / f.root_correction + f.eps;
            p.x[k] = fmaf(p.x[k], decay, -(f.step_size * mi.x[k] / denominator));
        }
        store(m + i, mi);
        store(v + i, vi);
        if (has_master) store(master + i, p);
        if (!has_master || params != NULL) store(params + i, p);
    } else if (params != NULL) p = load<W>(params + i);
    #pragma unroll
    for (int k = 0; k < W; k++) square += (double)widen(narrow<T>(p.x[k])) * widen(narrow<T>(p.x[k]));
    return square;
}

// Each thread updates ADAMW_PIECE elements, one by one if W = 1. With 4 elements each load of a warp is contiguous: a
// thread reads 16 bytes of an fp32 array, and its neighbour the next 16. With 8, a load would touch only every second
// 16 bytes. partial (blocks) becomes each block's sum of the squares of its params; NULL: no sums. Moves 28 n bytes,
// with master weights: reads and writes m, v, master, reads g, writes p (fp32 without them: the same 28).
constexpr int ADAMW_PIECE = 16 / sizeof(float), ADAMW_THREADS = 256;
constexpr size_t ADAMW_BLOCKS = 4 << 20; // limit where squares are summed: 4 billion params a call
template <int W, typename T>
__global__ void adamw_kernel(AdamWFactors f, T* params, float* master, float* m, float* v, const T* grads,
                             const float* grad_scale, size_t n, size_t no_decay, double* partial) {
    __shared__ double of_warps[WARP];
    float scale = *grad_scale;
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * ADAMW_PIECE, end = min(i + ADAMW_PIECE, n);
    double square = 0;
    if (scale == 0 && partial == NULL) return;
    if (W == ADAMW_PIECE && i + W <= n) square = adamw_piece<W>(f, scale, params, master, m, v, grads, i, no_decay);
    else for (; i < end; i++) square += adamw_piece<1>(f, scale, params, master, m, v, grads, i, no_decay);
    if (partial == NULL) return;
    square = block_sum(square, of_warps);
    if (threadIdx.x == 0) partial[blockIdx.x] = square;
}

template <typename T>
static inline void adamw_launch(AdamW a, T* params, float* master, float* m, float* v, const T* grads,
                                const float* grad_scale, size_t n, size_t no_decay, double* square) {
    unsigned blocks = (unsigned)ceil_div(n, ADAMW_THREADS * ADAMW_PIECE);
    double* partial = square != NULL ? (double*)cuda_layers.workspace : NULL;
    if (n == 0) return;
    invariant(partial == NULL || (params != NULL && blocks <= ADAMW_BLOCKS),
              "adamw_update: params whose squares cannot be summed");
    bool vectors = rows_are_vectors(VEC, params, grads) && rows_are_vectors(VEC, master, m, v);
    auto kernel = vectors ? adamw_kernel<ADAMW_PIECE, T> : adamw_kernel<1, T>;
    kernel<<<blocks, ADAMW_THREADS, 0, compute_stream>>>(adamw_factors(a), params, master, m, v, grads, grad_scale, n,
                                                         no_decay, partial);
    if (square != NULL) sum_partial(square, partial, blocks);
    check_launch("adamw_update");
}
void adamw_update(AdamW a, floatX* params, float* master, float* m, float* v, const floatX* grads,
                  const float* grad_scale, size_t n, size_t no_decay, double* square) {
    // fp32: whichever of the two is given
    floatX* weights = NEEDS_MASTER || params != NULL ? params : (floatX*)(void*)master;
    adamw_launch(a, weights, master, m, v, grads, grad_scale, n, no_decay, square);
}
void adamw_update_fp32(AdamW a, float* params, float* m, float* v, const float* grads, const float* grad_scale,
                       size_t n, size_t no_decay) {
    adamw_launch(a, params, (float*)NULL, m, v, grads, grad_scale, n, no_decay, NULL);
}
#endif
