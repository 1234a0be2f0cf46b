/*
cuda/bias_gelu.cuh - what follows a matrix product where no epilogue of cuBLASLt does it: bias, GELU, their gradients.
Called by cuda/matmul.cuh.
*/
#ifndef LLMC_CUDA_BIAS_GELU_CUH
#define LLMC_CUDA_BIAS_GELU_CUH
#include "common.cuh"
constexpr float GELU_SCALE = 0.7978845608028654f; // sqrt(2/pi)
constexpr float GELU_CUBIC = 0.044715f;

// gelu and gelu' as cpu/math.h has them, where the formulas are derived.
__device__ inline float gelu(float x) {
    float u = GELU_SCALE * x * fmaf(GELU_CUBIC * x, x, 1.0f);
    return x / (1.0f + fast_exp(-2.0f * u));
}
__device__ inline float gelu_derivative(float x) {
    float u = GELU_SCALE * x * fmaf(GELU_CUBIC * x, x, 1.0f);
    float du = GELU_SCALE * fmaf(3.0f * GELU_CUBIC * x, x, 1.0f);
    float e = fast_exp(-2.0f * fabsf(u)), larger = 1.0f / (1.0f + e), smaller = e * larger;
    return fmaf(x * larger * smaller, 2.0f * du, x < 0 ? smaller : larger);
}

// out (N,OC) += bias (OC); act (N,OC) = gelu(out), act NULL: not wanted. One block per row, W columns per thread. Reads
// and writes a row, writes another for act: 4 or 6 N OC bytes in 16 bits.
template <int W>
__global__ void bias_gelu_forward_kernel(floatX* act, floatX* out, const floatX* bias, int OC) {
    size_t row = (size_t)blockIdx.x * OC;
    for (int c = threadIdx.x * W; c < OC; c += blockDim.x * W) {
        Floats<W> x = load<W>(out + row + c);
        x += load<W>(bias + c);
        store(out + row + c, x);
        if (act == NULL) continue;
        #pragma unroll
        // Of what was stored: backward reads that
        for (int k = 0; k < W; k++) x.x[k] = gelu(widen(narrow<floatX>(x.x[k])));
        store(act + row + c, x);
    }
}
static inline void bias_gelu_forward(floatX* act, floatX* out, const floatX* bias, int N, int OC) {
    bool vectors = rows_are_vectors(OC, act, out, bias);
    auto kernel = vectors ? bias_gelu_forward_kernel<VEC> : bias_gelu_forward_kernel<1>;
    kernel<<<N, row_threads(OC, vectors), 0, compute_stream>>>(act, out, bias, OC);
    check_launch("bias and gelu");
}

// dinp (N,C), which is dout w, *= gelu'(pre), pre (N,C). One block per row, W columns per thread.
// Moves 6 N C bytes in 16 bits.
template <int W>
__global__ void gelu_backward_kernel(floatX* dinp, const floatX* pre, int C) {
    size_t row = (size_t)blockIdx.x * C;
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        Floats<W> d = load<W>(dinp + row + c), x = load<W>(pre + row + c);
        #pragma unroll
        for (int k = 0; k < W; k++) d.x[k] *= gelu_derivative(x.x[k]);
        store(dinp + row + c, d);
    }
}
static inline void gelu_backward(floatX* dinp, const floatX* pre, int N, int C) {
    bool vectors = rows_are_vectors(C, dinp, pre);
    auto kernel = vectors ? gelu_backward_kernel<VEC> : gelu_backward_kernel<1>;
    kernel<<<N, row_threads(C, vectors), 0, compute_stream>>>(dinp, pre, C);
    check_launch("gelu backward");
}

// ---- the bias's gradient: column sums ----
constexpr int BIAS_WARPS = 8;
constexpr int BIAS_CHUNKS = 128;    // rows are cut into at most this many chunks,
constexpr int BIAS_CHUNK_ROWS = 64; // of at least this many rows

static inline int bias_chunk_rows(int N) { return (int)size_max(BIAS_CHUNK_ROWS, ceil_div(N, BIAS_CHUNKS)); }
// The most outputs that a linear layer has: 4C, or where ranks share it the larger of their part of these and C
static inline size_t bias_most(LayerShapes s) { return size_max(4 * (size_t)s.C / (size_t)s.parts, (size_t)s.C); }
static inline size_t bias_workspace_bytes(LayerShapes s) {
    size_t N = (size_t)layer_rows(s);
    return ceil_div(N, bias_chunk_rows((int)N)) * bias_most(s) * sizeof(float);
}
static inline size_t bias_sums_bytes(LayerShapes s) { return round_up(bias_most(s) * sizeof(floatX), 256); }

// partial (chunks, OC) = sums of dout (N,OC) over each chunk's rows. Block (32,8) for 32 W columns of one chunk: each
// warp takes every 8th row, lanes take W columns each, then the first warp adds up the warps. Reads 2 N OC bytes in 16
// bits.
template <int W>
__global__ void bias_backward_kernel(float* partial, const floatX* dout, int N, int OC, int chunk_rows) {
    __shared__ float sums[BIAS_WARPS][WARP * W];
    int c = (blockIdx.x * WARP + threadIdx.x) * W;
    int begin = blockIdx.y * chunk_rows, end = min(begin + chunk_rows, N);
    Floats<W> sum = {};
    for (int i = begin + threadIdx.y; i < end && c < OC; i += BIAS_WARPS) sum += load<W>(dout + (size_t)i * OC + c);
    sum_of_warps(&sum, sums);
    if (threadIdx.y == 0 && c < OC) store(partial + (size_t)blockIdx.y * OC + c, sum);
}
// forward: out = ... + bias, so dbias (OC) set or += column sums of dout (N,OC)
static inline void bias_backward(floatX* dbias, const floatX* dout, int N, int OC, GradMode mode) {
    float* partial = (float*)cuda_layers.workspace;
    int rows = bias_chunk_rows(N), chunks = (int)ceil_div(N, rows);
    bool vectors = rows_are_vectors(OC, dout);
    auto kernel = vectors ? bias_backward_kernel<VEC> : bias_backward_kernel<1>;
    dim3 grid((unsigned)ceil_div(OC, WARP * (vectors ? VEC : 1)), chunks);
    kernel<<<grid, dim3(WARP, BIAS_WARPS), 0, compute_stream>>>(partial, dout, N, OC, rows);
    check_launch("a bias's gradient");
    add_up_chunks(dbias, NULL, partial, chunks, OC, mode, "a bias's gradient");
}
#endif
