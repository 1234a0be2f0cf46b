/*
layernorm_backward.cu - layernorm's gradients, in several kernels. With n = (inp - mean) * rstd and g = dout * w, in each of N
rows of C channels dinp += rstd * (g - mean(g) - n * mean(g * n)); and over all rows dw = sum of dout * n, db = sum of dout.

dinp needs sums along rows, dw and db sums down columns. What suits one does not suit the other; the aim is to go through the
arrays once for both. Three rows read (dinp, dout, inp) and one written are counted.
*/
#include "variants.cuh"
#include "../../../llmc/device/cuda/layernorm.cuh"

struct Problem {
    int N, C;
    double bytes; // that must be moved once
    Both<floatX> dinp, dw, db, dout, inp, w;
    Both<float> mean, rstd;
    float *sum_dw, *sum_db; // (C) each: sums in fp32. This and the next are owned by both.cuh's list
    float* partial;         // (LAYERNORM_BLOCKS,2,C): each block's sums for dw, then for db

    Problem(Shape s) : N(s.rows), C(s.cols), bytes(4.0 * N * C * sizeof(floatX)) {
        size_t n = (size_t)N * C;
        start_cpu(layer_shapes(1, N, C, 1, 1, 1));
        dinp = random_both(n); dout = random_both(n); inp = random_both(n, 0.5f); // dinp: the residual stream's gradient
        w = random_both(C, 1, 0.5f);
        dw = unset_both(C); db = unset_both(C);
        Both<floatX> b = random_both(C), out = unset_both(n);
        mean = unset_both<float>(N); rstd = unset_both<float>(N);
        cpu::residual_layernorm_forward(inp.cpu, out.cpu, mean.cpu, rstd.cpu, inp.cpu, NULL, w.cpu, b.cpu, N, C);
        mean = as_input(mean); rstd = as_input(rstd);
        cpu::layernorm_backward(dinp.cpu, dw.cpu, db.cpu, dout.cpu, inp.cpu, w.cpu, mean.cpu, rstd.cpu, N, C, GRAD_SET);
        sum_dw = (float*)device_bytes((size_t)C * sizeof(float));
        sum_db = (float*)device_bytes((size_t)C * sizeof(float));
        partial = (float*)device_bytes(LAYERNORM_BLOCKS * 2 * (size_t)C * sizeof(float));
    }
    void expect_right() {
        double slack = 32 + 2 * sqrt(C), of_columns = 32 + 2 * sqrt(N); // a sum in one thread's order
        expect_near("dinp", dinp, slack);
        expect_near("dw", dw, of_columns);
        expect_near("db", db, of_columns);
    }
};
#define KERNEL_PARAMETERS const floatX* dout, const floatX* inp, const floatX* w, const float* mean, const float* rstd, \
                          int N, int C
#define KERNEL_ARGUMENTS(p) (p).dout.gpu, (p).inp.gpu, (p).w.gpu, (p).mean.gpu, (p).rstd.gpu, (p).N, (p).C

// Row i of dinp, by the threads that have it. add(c, dw, db): what it gives to those sums.
template <typename Row, typename Add>
__device__ inline void row_backward(floatX* dinp, int i, Add add, KERNEL_PARAMETERS) {
    size_t row = (size_t)i * C;
    float m = mean[i], r = rstd[i], sum_g = 0, sum_gn = 0;
    (void)N;
    for (int c = Row::begin(); c < C; c += Row::step()) {
        float n = (widen(inp[row + c]) - m) * r, d = widen(dout[row + c]), g = d * widen(w[c]);
        sum_g += g;
        sum_gn += g * n;
        add(c, d * n, d);
    }
    float mean_g = Row::sum(sum_g) / C, mean_gn = Row::sum(sum_gn) / C;
    for (int c = Row::begin(); c < C; c += Row::step()) {
        float n = (widen(inp[row + c]) - m) * r, g = widen(dout[row + c]) * widen(w[c]);
        dinp[row + c] = narrow<floatX>(widen(dinp[row + c]) + r * (g - mean_g - n * mean_gn));
    }
}

// ---- 1: what one would write first ----
// One thread per row for dinp, one per column for dw and db. Down a column neighbouring threads read neighbours, but C
// threads are a few hundred on a GPU that needs a hundred thousand; and dout and inp are read a second time.
__global__ void rows_kernel(floatX* dinp, KERNEL_PARAMETERS) {
    int i = ThreadPerRow::row();
    if (i < N) row_backward<ThreadPerRow>(dinp, i, [](int, float, float) {}, dout, inp, w, mean, rstd, N, C);
}
__global__ void columns_kernel(floatX* dw, floatX* db, KERNEL_PARAMETERS) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    (void)w;
    if (c >= C) return;
    float sum_w = 0, sum_b = 0;
    for (int i = 0; i < N; i++) {
        float d = widen(dout[(size_t)i * C + c]);
        sum_w += d * (widen(inp[(size_t)i * C + c]) - mean[i]) * rstd[i];
        sum_b += d;
    }
    dw[c] = narrow<floatX>(sum_w);
    db[c] = narrow<floatX>(sum_b);
}
VARIANT(layernorm_backward_1_naive, "one thread per row, then one per column") {
    rows_kernel<<<(unsigned)ceil_div(p.N, threads), threads, 0, compute_stream>>>(p.dinp.gpu, KERNEL_ARGUMENTS(p));
    columns_kernel<<<(unsigned)ceil_div(p.C, threads), threads, 0, compute_stream>>>(p.dw.gpu, p.db.gpu, KERNEL_ARGUMENTS(p));
}

// ---- 2: one warp per row, which adds to dw and db as it goes ----
// Everything in one pass and neighbours read neighbours, but 2 N C atomics at 2 C addresses queue up, and their order decides
// the last bits. The sums are fp32, because in 16 bits each addition would round; a second kernel rounds them once.
__global__ void warp_kernel(floatX* dinp, float* sum_dw, float* sum_db, KERNEL_PARAMETERS) {
    int i = WarpPerRow::row();
    auto add = [&](int c, float dw, float db) {
        atomicAdd(&sum_dw[c], dw);
        atomicAdd(&sum_db[c], db);
    };
    if (i < N) row_backward<WarpPerRow>(dinp, i, add, dout, inp, w, mean, rstd, N, C);
}
__global__ void round_kernel(floatX* dw, floatX* db, const float* sum_dw, const float* sum_db, int C) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    dw[c] = narrow<floatX>(sum_dw[c]);
    db[c] = narrow<floatX>(sum_db[c]);
}
VARIANT(layernorm_backward_2_atomics, "one warp per row, atomics for sums over rows") {
    size_t bytes = (size_t)p.C * sizeof(float);
    cuda_check(cudaMemsetAsync(p.sum_dw, 0, bytes, compute_stream), "layernorm_backward_2_atomics");
    cuda_check(cudaMemsetAsync(p.sum_db, 0, bytes, compute_stream), "layernorm_backward_2_atomics");
    unsigned rows = (unsigned)ceil_div(p.N, threads / WARP), columns = (unsigned)ceil_div(p.C, threads);
    warp_kernel<<<rows, threads, 0, compute_stream>>>(p.dinp.gpu, p.sum_dw, p.sum_db, KERNEL_ARGUMENTS(p));
    round_kernel<<<columns, threads, 0, compute_stream>>>(p.dw.gpu, p.db.gpu, p.sum_dw, p.sum_db, p.C);
}

// ---- 3: each block takes one row at a time, with its sums in shared memory ----
// A thread has the same channels in every row, so no other thread adds to their sums: no atomics, and the order is fixed. A
// block's sums over its rows go to memory once, and a second kernel adds up the blocks. But each row has four barriers, two for
// each mean, and between them the whole block waits for its slowest load.
__global__ void block_kernel(floatX* dinp, float* partial, KERNEL_PARAMETERS) {
    extern __shared__ int4 shared_memory[];
    float *dw = (float*)shared_memory, *db = dw + C; // (C) each
    auto add = [&](int c, float row_dw, float row_db) { dw[c] += row_dw; db[c] += row_db; };
    for (int c = threadIdx.x; c < C; c += blockDim.x) dw[c] = db[c] = 0;
    for (int i = blockIdx.x; i < N; i += gridDim.x)
        row_backward<BlockPerRow>(dinp, i, add, dout, inp, w, mean, rstd, N, C);
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        partial[(size_t)blockIdx.x * 2 * C + c] = dw[c];
        partial[(size_t)blockIdx.x * 2 * C + C + c] = db[c];
    }
}
static void add_up_blocks(Problem& p, int blocks) {
    add_up_chunks(p.dw.gpu, p.db.gpu, p.partial, blocks, p.C, GRAD_SET, "dw and db");
}
VARIANT(layernorm_backward_3_block, "a block takes a row at a time, sums in shared memory") {
    size_t bytes = 2 * (size_t)p.C * sizeof(float);
    int blocks = (int)size_min(LAYERNORM_BLOCKS, p.N);
    if (bytes + WARP * sizeof(float) > LAYERNORM_SHARED) return not_offered();
    block_kernel<<<blocks, threads, bytes, compute_stream>>>(p.dinp.gpu, p.partial, KERNEL_ARGUMENTS(p));
    add_up_blocks(p, blocks);
}

// ---- 4: one warp per row, with its sums in shared memory ----
// One warp per row again. Each warp of a block has its own sums, which the block adds up at its end: that is the only barrier.
// 16 bytes a load. What it costs: 8 C bytes of shared memory per warp, so that few warps are at work where rows are long (at
// C = 1600 three in a block, 12 on a multiprocessor that could hold 64). 16 bytes per element to and from shared memory, and as
// a lane has 32 neighbouring bytes and takes 16 of them at a time, two lanes of eight meet in each bank. And dout and inp are
// read again for dinp: those rows of all warps are larger than the L1 that so much shared memory leaves.
template <int W>
__global__ void warps_kernel(floatX* dinp, float* partial, KERNEL_PARAMETERS) {
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
        partial[(size_t)blockIdx.x * 2 * C + c] = sum_w;
        partial[(size_t)blockIdx.x * 2 * C + C + c] = sum_b;
    }
}

VARIANT(layernorm_backward_4_warps, "one warp per row, each with its own sums in shared memory") {
    unsigned warps = threads / WARP;
    size_t bytes = warps * 2 * (size_t)p.C * sizeof(float);
    if (bytes > LAYERNORM_SHARED) return not_offered();
    int blocks = (int)size_min(LAYERNORM_BLOCKS, ceil_div(p.N, warps));
    auto kernel = p.C % VEC == 0 ? warps_kernel<VEC> : warps_kernel<1>;
    kernel<<<blocks, dim3(WARP, warps), bytes, compute_stream>>>(p.dinp.gpu, p.partial, KERNEL_ARGUMENTS(p));
    add_up_blocks(p, blocks);
}

// ---- 5: llmc/'s ----
// As 3, with as many rows at a time as a block has room for. A thread has one piece of 16 bytes of a row: what it read waits in
// registers for the row's means, and so do its sums until the end. One barrier for both means of all these rows. llmc/ takes
// blocks of 256 threads or, if it is longer, of a row.
VARIANT(layernorm_backward_5_llmc, "some rows at a time, read once, sums in registers") {
    int W = p.C % VEC == 0 ? VEC : 1;
    unsigned of_row = layernorm_backward_block(p.C, W).x, rows = threads / of_row;
    size_t bytes = rows > 1 ? rows * 2 * (size_t)p.C * sizeof(float) : 0;
    if (rows == 0 || of_row * W < (unsigned)p.C || bytes > LAYERNORM_SHARED) return not_offered();
    int blocks = layernorm_blocks(p.N, dim3(of_row, rows));
    auto kernel = W == VEC ? layernorm_backward_kernel<VEC> : layernorm_backward_kernel<1>;
    kernel<<<blocks, dim3(of_row, rows), bytes, compute_stream>>>(p.dinp.gpu, p.partial, KERNEL_ARGUMENTS(p));
    add_up_blocks(p, blocks);
}

OPERATION("rows are tokens, cols channels", { 32768, 768, 0 }, { 11, 264, 0 })
