/*
cuda/muon.cuh - Muon: momentum, the steps of newton_schulz.h, and the update. Everything but the products is bound by
memory.
*/
#ifndef LLMC_CUDA_MUON_CUH
#define LLMC_CUDA_MUON_CUH
#include "../newton_schulz.h"
#include "adamw.cuh"
#include "matmul.cuh"

struct Momentum { // reads m and grads, writes m and u: 12 n bytes in 16 bits
    floatNS* u; float* m; const floatX* grads; const float* grad_scale; float beta;
    template <int W> __device__ void at(size_t i) const {
        float scale = *grad_scale, rest = 1 - beta;
        Floats<W> next = {};
        if (scale != 0) {
            Floats<W> g = load<W>(grads + i), mi = load<W>(m + i);
            #pragma unroll
            for (int k = 0; k < W; k++) {
                float gradient = g.x[k] * scale;
                mi.x[k] = fmaf(rest, gradient - mi.x[k], mi.x[k]);
                next.x[k] = fmaf(rest, gradient - mi.x[k], mi.x[k]);
            }
            store(m + i, mi);
        }
        store(u + i, next);
    }
};
void muon_momentum(floatNS* u, float* m, const floatX* grads, const float* grad_scale, float beta, size_t n) {
    for_pieces(n, rows_are_vectors(VEC, u, m, grads), Momentum { u, m, grads, grad_scale, beta }, "muon_momentum");
}

struct Normalise { // the factor is applied in double, because the reciprocal of a tiny norm is beyond fp32
    floatNS* out; const floatNS* x; const double* square;
    template <int W> __device__ void at(size_t i) const {
        double factor = *square != 0 ? 1 / sqrt(*square) : 0;
        Floats<W> piece = load<W>(x + i);
        #pragma unroll
        for (int k = 0; k < W; k++) piece.x[k] = (float)((double)piece.x[k] * factor);
        store(out + i, piece);
    }
};
static void newton_schulz_normalise(floatNS* out, const floatNS* x, size_t n) {
    double* square = (double*)cuda_layers.workspace + STATS_BLOCKS; // behind the partial sums
    cuda_check(cudaMemsetAsync(square, 0, sizeof *square, compute_stream), "newton_schulz");
    add_sum_of(square, x, n, Square(), "newton_schulz");
    for_pieces(n, rows_are_vectors(VEC, out, x), Normalise { out, x, square }, "newton_schulz");
}

#ifndef COUNT_PRODUCT // test/unit/layers.cu counts the multiply-adds
#define COUNT_PRODUCT(M, N, K)
#endif
// out^T = op(b)^T op(a)^T. layers_prepare does not try these products: cuBLASLt's first suggestion for the shape is the
// same on every rank, and the fastest of a trial might not be.
static void newton_schulz_product(floatNS* out, const floatNS* a, bool a_transposed, const floatNS* b,
                                  bool b_transposed, int M, int N, int K) {
    ProductShape shape = { b_transposed, a_transposed, N, M, K, CUBLASLT_EPILOGUE_DEFAULT, 0, 1, 0, 0 };
    COUNT_PRODUCT(shape.m, shape.n, shape.k);
    const floatX *A = (const floatX*)(const void*)b, *B = (const floatX*)(const void*)a; // shape has their type
    product({ "newton_schulz", shape, out, A, B, NULL, NULL, 0 });
}

struct Polynomial {
    floatNS* b; const floatNS* a; size_t m;
    template <int W> __device__ void at(size_t i) const {
        Floats<W> ai = load<W>(a + i), bi = load<W>(b + i);
        #pragma unroll
        for (int k = 0; k < W; k++) {
            bool diagonal = (i + k) % (m + 1) == 0;
            bi.x[k] = fmaf(NEWTON_SCHULZ_B, ai.x[k], NEWTON_SCHULZ_C * bi.x[k]) + (diagonal ? NEWTON_SCHULZ_A : 0.0f);
        }
        store(b + i, bi);
    }
};
static void newton_schulz_polynomial(floatNS* b, const floatNS* a, int m) {
    for_pieces((size_t)m * (size_t)m, rows_are_vectors(VEC, b, a), Polynomial { b, a, (size_t)m }, "newton_schulz");
}

// Updates elements [i, i + W), unless scale is 0, which leaves them unchanged: p = p decay - step update. params and
// master are those of adamw_piece, as is the sum of squares that it returns.
template <int W> __device__ inline double muon_piece(float decay, float step, float scale, floatX* params,
                                                     float* master, const floatNS* update, size_t i) {
    Floats<W> p = {};
    double square = 0;
    if (scale != 0) {
        Floats<W> u = load<W>(update + i);
        if (NEEDS_MASTER) p = load<W>(master + i);
        else p = load<W>(params + i);
        #pragma unroll
        for (int k = 0; k < W; k++) p.x[k] = fmaf(p.x[k], decay, -(step * u.x[k]));
        if (NEEDS_MASTER) store(master + i, p);
        if (params != NULL) store(params + i, p);
    } else if (params != NULL) p = load<W>(params + i);
    #pragma unroll
    for (int k = 0; k < W; k++) square += (double)widen(narrow<floatX>(p.x[k])) * widen(narrow<floatX>(p.x[k]));
    return square;
}
// The pieces, blocks and partial sums of adamw_kernel. Moves 12 n bytes with master weights, and 12 in fp32.
template <int W> __global__ void muon_kernel(float decay, float step, floatX* params, float* master,
                                             const floatNS* update, const float* grad_scale, size_t n,
                                             double* partial) {
    __shared__ double of_warps[WARP];
    float scale = *grad_scale;
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * ADAMW_PIECE, end = min(i + ADAMW_PIECE, n);
    double square = 0;
    if (scale == 0 && partial == NULL) return;
    if (W == ADAMW_PIECE && i + W <= n) square = muon_piece<W>(decay, step, scale, params, master, update, i);
    else for (; i < end; i++) square += muon_piece<1>(decay, step, scale, params, master, update, i);
    if (partial == NULL) return;
    square = block_sum(square, of_warps);
    if (threadIdx.x == 0) partial[blockIdx.x] = square;
}
void muon_update(Muon a, float scale, floatX* params, float* master, const floatNS* update, const float* grad_scale,
                 size_t n, double* square) {
    // fp32: whichever of the two is given
    floatX* weights = NEEDS_MASTER || params != NULL ? params : (floatX*)(void*)master;
    unsigned blocks = (unsigned)ceil_div(n, ADAMW_THREADS * ADAMW_PIECE);
    double* partial = square != NULL ? (double*)cuda_layers.workspace : NULL;
    if (n == 0) return;
    invariant(partial == NULL || (weights != NULL && blocks <= ADAMW_BLOCKS),
              "muon_update: params whose squares cannot be summed");
    bool vectors = rows_are_vectors(VEC, weights, update) && rows_are_vectors(VEC, master);
    auto kernel = vectors ? muon_kernel<ADAMW_PIECE> : muon_kernel<1>;
    kernel<<<blocks, ADAMW_THREADS, 0, compute_stream>>>((float)(1 - a.lr * a.weight_decay), (float)(a.lr * scale),
                                                         weights, master, update, grad_scale, n, partial);
    if (square != NULL) sum_partial(square, partial, blocks);
    check_launch("muon_update");
}
#endif
