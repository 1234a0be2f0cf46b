/* cuda/adamw.cuh - AdamW over flat memory: elementwise, and bound by memory alone. */
#ifndef LLMC_CUDA_ADAMW_CUH
#define LLMC_CUDA_ADAMW_CUH
#include "../host_adamw.h"
#include "common.cuh"

// W neighbours, the first of them element i:
// m = b1 m + (1-b1) g, v = b2 v + (1-b2) g^2, p = p decay - lr/(1-b1^t) m / (sqrt(v) / sqrt(1-b2^t) + eps)
// Each fused multiply-add is written out, so that every way of cutting an array into pieces gives the same bits.
// 16-bit params have a master copy, and may be NULL; fp32 params have none.
template <int W, typename T>
__device__ inline void adamw_piece(AdamWFactors f, float scale, T* params, float* master, float* m, float* v,
                                   const T* grads, size_t i, size_t no_decay) {
    constexpr bool has_master = sizeof(T) < sizeof(float);
    Floats<W> g = load<W>(grads + i), mi = load<W>(m + i), vi = load<W>(v + i), p;
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
}

// One piece of W elements per thread, and the thread after the last whole piece does the rest. With W = 4 each load of a warp is
// contiguous: a thread takes 16 bytes of an fp32 array, and its neighbour the next 16. With W = 8 it would take every second 16.
// Moves 28 n bytes, with master weights: reads and writes m, v, master, reads g, writes p (fp32 without them: the same 28).
template <int W, typename T>
__global__ void adamw_kernel(AdamWFactors f, T* params, float* master, float* m, float* v, const T* grads,
                             const float* grad_scale, size_t n, size_t no_decay) {
    float scale = *grad_scale;
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (scale == 0) return;
    if (i + W <= n) adamw_piece<W>(f, scale, params, master, m, v, grads, i, no_decay);
    else for (; i < n; i++) adamw_piece<1>(f, scale, params, master, m, v, grads, i, no_decay);
}

template <typename T>
static inline void adamw_launch(AdamW a, T* params, float* master, float* m, float* v, const T* grads, const float* grad_scale,
                                size_t n, size_t no_decay) {
    constexpr int W = 16 / sizeof(float);
    const unsigned threads = 256;
    AdamWFactors f = adamw_factors(a);
    if (n == 0) return;
    bool vectors = rows_are_vectors(VEC, params, grads) && rows_are_vectors(VEC, master, m, v);
    auto kernel = vectors ? adamw_kernel<W, T> : adamw_kernel<1, T>;
    unsigned blocks = (unsigned)ceil_div(n, threads * (vectors ? W : 1));
    kernel<<<blocks, threads, 0, compute_stream>>>(f, params, master, m, v, grads, grad_scale, n, no_decay);
    check_launch("adamw_update");
}
void adamw_update(AdamW a, floatX* params, float* master, float* m, float* v, const floatX* grads, const float* grad_scale,
                  size_t n, size_t no_decay) {
    floatX* weights = NEEDS_MASTER || params != NULL ? params : (floatX*)(void*)master; // fp32: whichever of the two is given
    adamw_launch(a, weights, master, m, v, grads, grad_scale, n, no_decay);
}
void adamw_update_fp32(AdamW a, float* params, float* m, float* v, const float* grads, const float* grad_scale,
                       size_t n, size_t no_decay) {
    adamw_launch(a, params, (float*)NULL, m, v, grads, grad_scale, n, no_decay);
}
#endif
