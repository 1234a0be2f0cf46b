/*
cuda/layernorm.cuh - layernorm (Ba et al., arXiv 1607.06450) and the residual addition before it.
*/
#ifndef LLMC_CUDA_LAYERNORM_CUH
#define LLMC_CUDA_LAYERNORM_CUH
#include "common.cuh"
constexpr float LAYERNORM_EPS = 1e-5f;
constexpr size_t LAYERNORM_SHARED = 48 << 10; // bytes of shared memory that a block uses at most

// One warp per row, blocks of (32, rows). The row of res stays in shared memory, as floatX, while its mean and then its
// variance around the mean are found (E[x^2] - E[x]^2 would cancel). A lane reads there only what it has written, so
// nothing has to be synchronised. inp2 NULL: res is read, not written.
// Reads 2 rows, writes 2: 8 N C bytes in 16 bits.
template <int W>
__global__ void residual_layernorm_forward_kernel(floatX* res, floatX* out, float* mean, float* rstd, const floatX* inp1,
                                                  const floatX* inp2, const floatX* w, const floatX* b, int N, int C) {
    extern __shared__ int4 shared_memory[];
    int i = blockIdx.x * blockDim.y + threadIdx.y, first = threadIdx.x * W;
    if (i >= N) return;
    floatX* x = (floatX*)shared_memory + (size_t)threadIdx.y * C;
    size_t row = (size_t)i * C;
    float sum = 0, square = 0;
    for (int c = first; c < C; c += WARP * W) {
        Floats<W> r = load<W>(inp1 + row + c);
        if (inp2 != NULL) {
            Floats<W> r2 = load<W>(inp2 + row + c);
            #pragma unroll
            for (int k = 0; k < W; k++) r.x[k] += r2.x[k];
            store(res + row + c, r);
        }
        store(x + c, r);
        r = load<W>(x + c); // what was rounded is what is normalised
        #pragma unroll
        for (int k = 0; k < W; k++) sum += r.x[k];
    }
    float m = warp_sum(sum) / C;
    for (int c = first; c < C; c += WARP * W) {
        Floats<W> r = load<W>(x + c);
        #pragma unroll
        for (int k = 0; k < W; k++) square += (r.x[k] - m) * (r.x[k] - m);
    }
    float s = 1.0f / sqrtf(warp_sum(square) / C + LAYERNORM_EPS);
    for (int c = first; c < C; c += WARP * W) {
        Floats<W> r = load<W>(x + c), weight = load<W>(w + c), bias = load<W>(b + c);
        #pragma unroll
        for (int k = 0; k < W; k++) r.x[k] = (r.x[k] - m) * s * weight.x[k] + bias.x[k];
        store(out + row + c, r);
    }
    if (threadIdx.x != 0) return;
    mean[i] = m;
    rstd[i] = s;
}

// Rows that a block works on at a time, a warp each: as many as fit in its shared memory, at most 8.
static inline unsigned layernorm_warps(size_t bytes_per_warp) {
    require(bytes_per_warp <= LAYERNORM_SHARED, "layernorm: a row takes %zu bytes of shared memory, but there are %zu;"
            " choose fewer --channels", bytes_per_warp, LAYERNORM_SHARED);
    return (unsigned)size_min(8, LAYERNORM_SHARED / bytes_per_warp);
}

void residual_layernorm_forward(floatX* res, floatX* out, float* mean, float* rstd, const floatX* inp1, const floatX* inp2,
                                const floatX* w, const floatX* b, int N, int C) {
    size_t row_bytes = (size_t)C * sizeof(floatX);
    dim3 block(WARP, layernorm_warps(row_bytes));
    unsigned grid = (unsigned)ceil_div(N, block.y);
    bool vectors = rows_are_vectors(C, res, out, inp1, inp2, w, b);
    auto kernel = vectors ? residual_layernorm_forward_kernel<VEC> : residual_layernorm_forward_kernel<1>;
    kernel<<<grid, block, block.y * row_bytes, compute_stream>>>(res, out, mean, rstd, inp1, inp2, w, b, N, C);
    check_launch("residual_layernorm_forward");
}

// dw and db are sums over rows: at most this many blocks each sum their own rows. (About four per multiprocessor of a large
// GPU. It does not depend on the GPU, so that results do not either.)
constexpr int LAYERNORM_BLOCKS = 512;

static inline int layernorm_blocks(int N, int C) {
    return (int)size_min(LAYERNORM_BLOCKS, ceil_div(N, layernorm_warps(2 * (size_t)C * sizeof(float))));
}
static inline size_t layernorm_workspace_bytes(LayerShapes s) {
    return (size_t)layernorm_blocks(s.B * s.T, s.C) * 2 * (size_t)s.C * sizeof(float);
}

// forward, with n = (x - mean) * rstd: out = n * w + b, so dw += dout * n, db += dout, and with g = dout * w
// dinp += rstd * (g - mean(g) - n * mean(g * n)): x acts on out directly, and through the mean and rstd of its row.
// Blocks of (32, warps), one row per warp at a time, all rows by strides of the grid. Each warp adds its rows' dw and db
// up in shared memory (warps, 2, C), each lane its own channels; then the block adds up its warps and writes
// partial_dw, partial_db (blocks, C). The second read of dout and inp comes from L1.
// Reads 3 rows, writes 1: 8 N C bytes in 16 bits.
template <int W>
__global__ void layernorm_backward_kernel(floatX* dinp, float* partial_dw, float* partial_db, const floatX* dout,
                                          const floatX* inp, const floatX* w, const float* mean, const float* rstd, int N, int C) {
    extern __shared__ int4 shared_memory[];
    float *sums = (float*)shared_memory, *dw = sums + (size_t)threadIdx.y * 2 * C, *db = dw + C;
    int first = threadIdx.x * W;
    for (int c = first; c < C; c += WARP * W) {
        store(dw + c, Floats<W>{});
        store(db + c, Floats<W>{});
    }
    for (int i = blockIdx.x * blockDim.y + threadIdx.y; i < N; i += gridDim.x * blockDim.y) {
        size_t row = (size_t)i * C;
        float m = mean[i], r = rstd[i], sum_g = 0, sum_gn = 0;
        for (int c = first; c < C; c += WARP * W) {
            Floats<W> d = load<W>(dout + row + c), x = load<W>(inp + row + c), weight = load<W>(w + c);
            Floats<W> sum_w = load<W>(dw + c), sum_b = load<W>(db + c);
            #pragma unroll
            for (int k = 0; k < W; k++) {
                float n = (x.x[k] - m) * r, g = d.x[k] * weight.x[k];
                sum_g += g;
                sum_gn += g * n;
                sum_w.x[k] += d.x[k] * n;
                sum_b.x[k] += d.x[k];
            }
            store(dw + c, sum_w);
            store(db + c, sum_b);
        }
        float mean_g = warp_sum(sum_g) / C, mean_gn = warp_sum(sum_gn) / C;
        for (int c = first; c < C; c += WARP * W) {
            Floats<W> d = load<W>(dout + row + c), x = load<W>(inp + row + c), weight = load<W>(w + c);
            Floats<W> gradient = load<W>(dinp + row + c);
            #pragma unroll
            for (int k = 0; k < W; k++) {
                float n = (x.x[k] - m) * r, g = d.x[k] * weight.x[k];
                gradient.x[k] += r * (g - mean_g - n * mean_gn);
            }
            store(dinp + row + c, gradient);
        }
    }
    __syncthreads(); // every warp's sums are there
    for (int c = threadIdx.y * WARP + threadIdx.x; c < C; c += blockDim.y * WARP) {
        float sum_w = 0, sum_b = 0;
        for (int y = 0; y < (int)blockDim.y; y++) {
            sum_w += sums[(size_t)y * 2 * C + c];
            sum_b += sums[(size_t)y * 2 * C + C + c];
        }
        partial_dw[(size_t)blockIdx.x * C + c] = sum_w;
        partial_db[(size_t)blockIdx.x * C + c] = sum_b;
    }
}

void layernorm_backward(floatX* dinp, floatX* dw, floatX* db, const floatX* dout, const floatX* inp, const floatX* w,
                        const float* mean, const float* rstd, int N, int C, GradMode mode) {
    size_t warp_bytes = 2 * (size_t)C * sizeof(float);
    dim3 block(WARP, layernorm_warps(warp_bytes));
    int grid = layernorm_blocks(N, C);
    float *partial_dw = (float*)cuda_layers.workspace, *partial_db = partial_dw + (size_t)grid * C;
    auto kernel = rows_are_vectors(C, dinp, dout, inp, w) ? layernorm_backward_kernel<VEC> : layernorm_backward_kernel<1>;
    kernel<<<grid, block, block.y * warp_bytes, compute_stream>>>(dinp, partial_dw, partial_db, dout, inp, w, mean, rstd, N, C);
    check_launch("layernorm_backward");
    add_up_chunks(dw, partial_dw, grid, C, mode, "layernorm_backward, dw");
    add_up_chunks(db, partial_db, grid, C, mode, "layernorm_backward, db");
}
#endif
