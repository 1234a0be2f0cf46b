/*
global_norm.cu - the sum of squares of all n gradients, in several kernels: *acc += sum of x^2, as clipping needs it.

Every element is read once and nothing is written, so a kernel should reach the rate at which memory is read, which may be a
little more than the copy's that it is compared with. The work is to combine the sums of many threads, in double, as on the
CPU. The result of floating-point atomics depends on which thread comes first: its last bits change from run to run, and with
them every later step of a training run.
*/
#include "variants.cuh"
#include "../../../llmc/device/cuda/stats.cuh"

struct Problem {
    size_t n;
    double bytes; // that must be moved once
    Both<floatX> x;
    Both<double> acc;
    double* partial; // (STATS_BLOCKS) sums of blocks, owned by both.cuh's list

    Problem(Shape s) : n((size_t)s.rows * s.cols), bytes((double)n * sizeof(floatX)) {
        start_cpu(layer_shapes(1, 1, 1, 1, 1, 1));
        x = random_both(n);
        acc = both_of(std::vector<double>(1, 7)); // the sum is added to what is there
        partial = (double*)device_bytes(STATS_BLOCKS * sizeof(double));
        cpu::add_sum_squares(acc.cpu, x.cpu, n);
    }
    // The sums are double, of exact squares: what remains is far below a rounding of fp32.
    void expect_right() {
        double got = result_of(acc)[0], want = acc.cpu[0];
        expect(fabs(got - want) <= 1e-11 * want, "the sum is %.17g, not %.17g", got, want);
    }
};

// ---- 1: all threads add to one number ----
// One atomic per element, all at one address: they queue up, and memory idles.
__global__ void atomics_kernel(double* acc, const floatX* x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(acc, (double)widen(x[i]) * (double)widen(x[i]));
}
VARIANT(global_norm_1_atomics, "one atomic per element: they queue at one address") {
    atomics_kernel<<<(unsigned)ceil_div(p.n, threads), threads, 0, compute_stream>>>(p.acc.gpu, p.x.gpu, p.n);
}

// ---- 2: one atomic per block ----
// Blocks add up their own elements first. Fast, if blocks are not too small; but the bits still depend on which block is first.
__global__ void block_atomics_kernel(double* acc, const floatX* x, size_t n) {
    __shared__ double of_warps[WARP];
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    double sum = i < n ? (double)widen(x[i]) * (double)widen(x[i]) : 0;
    sum = block_sum(sum, of_warps);
    if (threadIdx.x == 0) atomicAdd(acc, sum);
}
VARIANT(global_norm_2_block_atomics, "one atomic per block; the last bits change from run to run") {
    block_atomics_kernel<<<(unsigned)ceil_div(p.n, threads), threads, 0, compute_stream>>>(p.acc.gpu, p.x.gpu, p.n);
}

// ---- 3: two stages ----
// A fixed number of blocks goes through the array by strides, each leaves its sum, and one block adds those up: no atomics,
// the same bits every time. (llmc/'s kernel, reading one element at a time.)
VARIANT(global_norm_3_two_stages, "sums of blocks, then their sum: the same bits every time") {
    unsigned blocks = stats_blocks(p.n);
    sum_kernel<1, floatX, Square><<<blocks, threads, 0, compute_stream>>>(p.partial, p.x.gpu, p.n, Square());
    sum_partial(p.acc.gpu, p.partial, blocks);
}

// ---- 4: llmc/'s ----
// As 3, in pieces of 16 bytes. llmc/ takes blocks of 256 on every GPU: the order of the sum must not depend on the GPU.
VARIANT(global_norm_4_llmc, "the same, 16 bytes a load") {
    unsigned blocks = stats_blocks(p.n);
    sum_kernel<VEC, floatX, Square><<<blocks, threads, 0, compute_stream>>>(p.partial, p.x.gpu, p.n, Square());
    sum_partial(p.acc.gpu, p.partial, blocks);
}

OPERATION("rows times cols gradients", { 8192, 4096, 0 }, { 9, 347, 0 })
