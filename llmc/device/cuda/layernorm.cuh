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
__global__ void residual_layernorm_forward_kernel(floatX* res, floatX* out, float* mean, float* rstd,
                                                  const floatX* inp1, const floatX* inp2, const floatX* w,
                                                  const floatX* b, int N, int C) {
    extern __shared__ int4 shared_memory[];
    int i = blockIdx.x * blockDim.y + threadIdx.y, first = threadIdx.x * W;
    if (i >= N) return;
    floatX* x = (floatX*)shared_memory + (size_t)threadIdx.y * C;
    size_t row = (size_t)i * C;
    float sum = 0, square = 0;
    for (int c = first; c < C; c += WARP * W) {
        Floats<W> r = load<W>(inp1 + row + c);
        if (inp2 != NULL) {
            r += load<W>(inp2 + row + c);
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

void residual_layernorm_forward(floatX* res, floatX* out, float* mean, float* rstd, const floatX* inp1,
                                const floatX* inp2, const floatX* w, const floatX* b, int N, int C) {
    if (N == 0) return;
    size_t row_bytes = (size_t)C * sizeof(floatX);
    dim3 block(WARP, layernorm_warps(row_bytes));
    unsigned grid = (unsigned)ceil_div(N, block.y);
    bool vectors = rows_are_vectors(C, res, out, inp1, inp2, w, b);
    auto kernel = vectors ? residual_layernorm_forward_kernel<VEC> : residual_layernorm_forward_kernel<1>;
    kernel<<<grid, block, block.y * row_bytes, compute_stream>>>(res, out, mean, rstd, inp1, inp2, w, b, N, C);
    check_launch("residual_layernorm_forward");
}

// dw and db are sums over rows: at most this many blocks each sum their own rows. (About four per multiprocessor of a
// large GPU. It does not depend on the GPU, so that results do not either.)
constexpr int LAYERNORM_BLOCKS = 512;
constexpr unsigned LAYERNORM_THREADS = 256; // of a block that takes several rows at a time

// Backward's block for rows of C channels, W to a thread: (threads of a row, rows at a time).
// It walks through longer rows.
static inline dim3 layernorm_backward_block(int C, int W) {
    unsigned x = (unsigned)size_min(1024, round_up(ceil_div(C, W), WARP));
    return dim3(x, (unsigned)size_max(1, LAYERNORM_THREADS / x));
}
static inline int layernorm_blocks(int N, dim3 block) { return (int)size_min(LAYERNORM_BLOCKS, ceil_div(N, block.y)); }
static inline size_t layernorm_workspace_bytes(LayerShapes s) {
    layernorm_warps((size_t)s.C * sizeof(floatX)); // forward's limit is reported before anything runs
    // The most: vectors take more rows at a time
    int blocks = layernorm_blocks(layer_rows(s), layernorm_backward_block(s.C, 1));
    return (size_t)blocks * 2 * (size_t)s.C * sizeof(float);
}

// forward, with n = (x - mean) * rstd: out = n * w + b, so dw += dout * n, db += dout, and with g = dout * w
// dinp += rstd * (g - mean(g) - n * mean(g * n)): x acts on out directly, and through the mean and rstd of its row.
template <int W> struct NormPiece { Floats<W> d, n, g; }; // a thread's W channels of a row

template <int W>
__device__ inline NormPiece<W> norm_piece(Floats<W> d, Floats<W> x, Floats<W> weight, float m, float r) {
    NormPiece<W> p = { d, {}, {} };
    #pragma unroll
    for (int k = 0; k < W; k++) {
        p.n.x[k] = (x.x[k] - m) * r;
        p.g.x[k] = d.x[k] * weight.x[k];
    }
    return p;
}
// sum += g and g * n; dw, db += what a piece gives them
template <int W> __device__ inline void norm_add(float2* sum, Floats<W>* dw, Floats<W>* db, const NormPiece<W>& p) {
    #pragma unroll
    for (int k = 0; k < W; k++) {
        sum->x += p.g.x[k];
        sum->y += p.g.x[k] * p.n.x[k];
        dw->x[k] += p.d.x[k] * p.n.x[k];
        db->x[k] += p.d.x[k];
    }
}
// Returns the gradient that was there plus a piece's; mean: of g and g * n over its row.
template <int W>
__device__ inline Floats<W> norm_gradient(Floats<W> gradient, const NormPiece<W>& p, float r, float2 mean) {
    #pragma unroll
    for (int k = 0; k < W; k++) gradient.x[k] += r * (p.g.x[k] - mean.x - p.n.x[k] * mean.y);
    return gradient;
}
// Returns the mean over a row's C channels of what its threads, those of one threadIdx.y, have added up. All of the
// block call this together. `of_warps` (32) is shared memory: two calls in a row must have different ones, and then one
// barrier is enough, because a thread that writes to the first again has passed the second's, and so all have read the
// first.
__device__ inline float2 row_mean(float2 sum, float2* of_warps, int C) {
    int warps = blockDim.x / WARP, first = threadIdx.y * warps;
    sum.x = warp_sum(sum.x);
    sum.y = warp_sum(sum.y);
    if (threadIdx.x % WARP == 0) of_warps[first + threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = of_warps[first];
    for (int i = first + 1; i < first + warps; i++) {
        sum.x += of_warps[i].x;
        sum.y += of_warps[i].y;
    }
    return { sum.x / C, sum.y / C };
}

// Block (x,y): y rows at a time, all rows by strides of the grid. A thread has the same W channels of each of its rows,
// so it keeps the sums that they add to dw and db in registers; and what it read of a row, as it was stored, until the
// row's means are known: widened it would not fit there. Nothing is read twice. At its end the block adds up its y sums
// and writes its part of partial (blocks,2,C): dw's sums, then db's. Reads 3 rows, writes 1: 8 N C bytes in 16 bits.
//
// Why so, on paper. To keep an H100's memory busy (3.35 TB/s, answers after 0.7 us) each of its 132 multiprocessors
// must have 18 KB under way. In 16 bits and at 64 registers a thread four blocks of this kernel fit on a
// multiprocessor, and read 37 KB at C = 768 (96 x 2 threads), 38 KB at C = 1600 (224 x 1). Why a warp per row, with its
// sums in shared memory, has less under way: the fourth variant in dev/kernels/cuda/layernorm_backward.cu.
template <int W>
__global__ void __launch_bounds__(1024)
layernorm_backward_kernel(floatX* dinp, float* partial, const floatX* dout, const floatX* inp, const floatX* w,
                          const float* mean, const float* rstd, int N, int C) {
    extern __shared__ int4 shared_memory[]; // (y,2,C) floats, where y > 1
    __shared__ float2 of_warps[2][WARP];
    int c = threadIdx.x * W, rows = gridDim.x * blockDim.y, turn = 0;
    Floats<W> dw = {}, db = {};
    Stored<W, floatX> weight = {};
    if (c < C) weight = load_stored<W>(w + c);
    for (int i = blockIdx.x * blockDim.y + threadIdx.y; i - (int)threadIdx.y < N; i += rows, turn ^= 1) {
        bool mine = i < N && c < C; // else this thread only comes to the barrier
        size_t at = (size_t)i * C + c;
        Stored<W, floatX> gradient = {}, d = {}, x = {};
        float2 sum = {};
        float m = 0, r = 0;
        if (mine) {
            gradient = load_stored<W>(dinp + at); // before the barrier: all of a row's loads are under way together
            d = load_stored<W>(dout + at);
            x = load_stored<W>(inp + at);
            m = mean[i], r = rstd[i];
            norm_add(&sum, &dw, &db, norm_piece(widen(d), widen(x), widen(weight), m, r));
        }
        float2 means = row_mean(sum, of_warps[turn], C);
        if (!mine) continue;
        forget_widened(&d);
        forget_widened(&x);
        auto piece = norm_piece(widen(d), widen(x), widen(weight), m, r);
        store(dinp + at, norm_gradient(widen(gradient), piece, r, means));
    }
    partial += (size_t)blockIdx.x * 2 * C;
    if (blockDim.y == 1) {
        if (c < C) store(partial + c, dw);
        if (c < C) store(partial + C + c, db);
        return;
    }
    float* sums = (float*)shared_memory;
    if (c < C) store(sums + (size_t)threadIdx.y * 2 * C + c, dw);
    if (c < C) store(sums + (size_t)threadIdx.y * 2 * C + C + c, db);
    __syncthreads(); // every row's sums are there
    for (int k = threadIdx.y * blockDim.x + threadIdx.x; k < 2 * C; k += blockDim.x * blockDim.y) {
        float total = 0;
        for (int y = 0; y < (int)blockDim.y; y++) total += sums[(size_t)y * 2 * C + k];
        partial[k] = total;
    }
}

// The same for rows that 1024 threads cannot keep (C > 8192 in 16 bits): a block takes one row at a time, and adds to
// its part of partial as it goes. It reads dout and inp twice, and 16 more bytes per element go to the cache and back.
template <int W>
__global__ void __launch_bounds__(1024)
layernorm_backward_long_kernel(floatX* dinp, float* partial, const floatX* dout, const floatX* inp, const floatX* w,
                               const float* mean, const float* rstd, int N, int C) {
    __shared__ float2 of_warps[2][WARP];
    float *dw = partial + (size_t)blockIdx.x * 2 * C, *db = dw + C;
    int begin = threadIdx.x * W, step = blockDim.x * W, turn = 0;
    for (int i = blockIdx.x; i < N; i += gridDim.x, turn ^= 1) {
        size_t row = (size_t)i * C;
        float m = mean[i], r = rstd[i];
        auto piece_at = [&](int c) {
            return norm_piece(load<W>(dout + row + c), load<W>(inp + row + c), load<W>(w + c), m, r);
        };
        float2 sum = {};
        for (int c = begin; c < C; c += step) { // no other thread has these channels, in any row
            Floats<W> sum_w = {}, sum_b = {};
            if (i != (int)blockIdx.x) sum_w = load<W>(dw + c), sum_b = load<W>(db + c); // else it is the first row
            norm_add(&sum, &sum_w, &sum_b, piece_at(c));
            store(dw + c, sum_w);
            store(db + c, sum_b);
        }
        float2 means = row_mean(sum, of_warps[turn], C);
        for (int c = begin; c < C; c += step)
            store(dinp + row + c, norm_gradient(load<W>(dinp + row + c), piece_at(c), r, means));
    }
}

void layernorm_backward(floatX* dinp, floatX* dw, floatX* db, const floatX* dout, const floatX* inp, const floatX* w,
                        const float* mean, const float* rstd, int N, int C, GradMode mode) {
    bool vectors = rows_are_vectors(C, dinp, dout, inp, w);
    int W = vectors ? VEC : 1;
    dim3 block = layernorm_backward_block(C, W);
    int grid = layernorm_blocks(N, block);
    float* partial = (float*)cuda_layers.workspace;
    auto kernel = vectors ? layernorm_backward_kernel<VEC> : layernorm_backward_kernel<1>;
    if ((int)block.x * W < C)
        kernel = vectors ? layernorm_backward_long_kernel<VEC> : layernorm_backward_long_kernel<1>;
    size_t shared = block.y > 1 ? block.y * 2 * (size_t)C * sizeof(float) : 0; // at most 16 KB
    if (N > 0) kernel<<<grid, block, shared, compute_stream>>>(dinp, partial, dout, inp, w, mean, rstd, N, C);
    check_launch("layernorm_backward");
    add_up_chunks(dw, db, partial, grid, C, mode, "layernorm_backward, dw and db");
}
#endif
