/*
bias_backward.cu - a bias's gradient, in several kernels: dbias (OC) = the column sums of dout (N,OC).

dout is read once and next to nothing is written, so a kernel should reach the rate at which memory is read, which may be a
little more than the copy's that it is compared with. Two things matter: neighbouring threads must read along rows, because
neighbours in a column are OC elements apart; and the whole GPU must have work, although there are only OC sums.
*/
#include "variants.cuh"
#include "../../../llmc/device/cuda/bias_gelu.cuh"

struct Problem {
    int N, OC;
    double bytes; // that must be moved once
    Both<floatX> dout, dbias;
    float* partial; // (chunks,OC) sums of chunks of rows, owned by both.cuh's list

    Problem(Shape s) : N(s.rows), OC(s.cols), bytes((double)N * OC * sizeof(floatX)) {
        start_cpu(layer_shapes(1, N, OC, 1, 1, 1));
        dout = random_both((size_t)N * OC);
        dbias = unset_both(OC);
        Both<floatX> inp = random_both(N), dw = unset_both(OC); // the layer also computes dw: that of one input
        cpu::matmul_backward_weight(dw.cpu, dbias.cpu, dout.cpu, inp.cpu, N, 1, OC, GRAD_SET);
        partial = (float*)device_bytes(ceil_div(N, bias_chunk_rows(N)) * OC * sizeof(float));
        cuda_layers.workspace = partial;
    }
    void expect_right() { expect_near("dbias", dbias, 32 + 2 * sqrt(N)); } // a sum in one thread's order
};

// ---- 1: what one would write first ----
// One thread per column, which walks down all rows. Neighbours read neighbours; but a few thousand threads, each with one load
// under way at a time, leave most of the GPU idle.
__global__ void columns_kernel(floatX* dbias, const floatX* dout, int N, int OC) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= OC) return;
    float sum = 0;
    for (int i = 0; i < N; i++) sum += widen(dout[(size_t)i * OC + c]);
    dbias[c] = narrow<floatX>(sum);
}
VARIANT(bias_backward_1_columns, "one thread per column: too few threads") {
    columns_kernel<<<(unsigned)ceil_div(p.OC, threads), threads, 0, compute_stream>>>(p.dbias.gpu, p.dout.gpu, p.N, p.OC);
}

// ---- 2: one block per column ----
// There are enough threads, but neighbours read OC elements apart: every element brings a whole sector of 32 bytes from memory,
// and other blocks need the rest of it at some other time.
__global__ void block_kernel(floatX* dbias, const floatX* dout, int N, int OC) {
    __shared__ float of_warps[WARP];
    float sum = 0;
    for (int i = threadIdx.x; i < N; i += blockDim.x) sum += widen(dout[(size_t)i * OC + blockIdx.x]);
    sum = block_sum(sum, of_warps);
    if (threadIdx.x == 0) dbias[blockIdx.x] = narrow<floatX>(sum);
}
VARIANT(bias_backward_2_block, "one block per column: neighbours far apart") {
    block_kernel<<<p.OC, threads, 0, compute_stream>>>(p.dbias.gpu, p.dout.gpu, p.N, p.OC);
}

// ---- 3: one block per strip of 32 columns ----
// The lanes of a warp read along a row, the warps of the block take turns at the rows, and at the end the first warp adds up
// their sums. This has both, but OC/32 blocks are about one for every multiprocessor, or fewer.
template <typename T>
__global__ void strip_kernel(T* sums, const floatX* dout, int N, int OC, int chunk_rows) { // sums (chunks,OC)
    __shared__ float of_warps[WARP][WARP];
    int lane = threadIdx.x, c = blockIdx.x * WARP + lane, begin = blockIdx.y * chunk_rows, end = min(begin + chunk_rows, N);
    float sum = 0;
    for (int i = begin + threadIdx.y; i < end && c < OC; i += blockDim.y) sum += widen(dout[(size_t)i * OC + c]);
    of_warps[threadIdx.y][lane] = sum;
    __syncthreads(); // every warp's sums are there
    if (threadIdx.y != 0 || c >= OC) return;
    for (int y = 1; y < (int)blockDim.y; y++) sum += of_warps[y][lane];
    sums[(size_t)blockIdx.y * OC + c] = narrow<T>(sum);
}
VARIANT(bias_backward_3_strip, "one block per strip of columns: reads along rows, too few blocks") {
    dim3 block(WARP, threads / WARP);
    strip_kernel<floatX><<<(unsigned)ceil_div(p.OC, WARP), block, 0, compute_stream>>>(p.dbias.gpu, p.dout.gpu, p.N, p.OC, p.N);
}

// ---- 4: two stages ----
// Rows are also cut into chunks, so there are enough blocks. A second kernel adds up the chunks' sums, which are less than a
// hundredth of what was read. The shape fixes the order: the same bits every time.
VARIANT(bias_backward_4_two_stages, "one block per strip of some rows, then their sum") {
    int rows = bias_chunk_rows(p.N), chunks = (int)ceil_div(p.N, rows);
    dim3 grid((unsigned)ceil_div(p.OC, WARP), chunks), block(WARP, threads / WARP);
    strip_kernel<float><<<grid, block, 0, compute_stream>>>(p.partial, p.dout.gpu, p.N, p.OC, rows);
    add_up_chunks(p.dbias.gpu, NULL, p.partial, chunks, p.OC, GRAD_SET, "bias_backward_4_two_stages");
}

// ---- 5: llmc/'s ----
// As 4, with 16 bytes a load: a strip is 256 columns in 16 bits. Blocks have 256 threads.
VARIANT(bias_backward_5_llmc, "the same, 16 bytes a load") {
    if (threads != WARP * BIAS_WARPS) return not_offered();
    bias_backward(p.dbias.gpu, p.dout.gpu, p.N, p.OC, GRAD_SET);
}

OPERATION("rows are tokens, cols outputs", { 16384, 3072, 0 }, { 150, 264, 0 })
