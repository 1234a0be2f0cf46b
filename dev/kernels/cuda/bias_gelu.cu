/*
bias_gelu.cu - what follows the first product of the MLP where its own epilogue cannot do it, in several kernels:
out (N,OC) += bias (OC), rounded to floatX, and act (N,OC) = gelu(out), the tanh form.

One row is read and two are written. GELU costs an exponential and a division per element. That is the most arithmetic that any
of these operations has, but memory should still hide it. The best kernel is no kernel: cuBLASLt adds the bias and applies GELU
to a product's tile before it leaves the chip.
*/
#include "variants.cuh"
#include "../../../llmc/device/cuda/bias_gelu.cuh"

// act (N,OC), out (N,OC) += bias (OC), by the formula as it is printed, in double
static void bias_gelu_cpu(floatX* act, floatX* out, const floatX* bias, int N, int OC) {
    #pragma omp parallel for
    for (int i = 0; i < N * OC; i++) {
        set(&out[i], (float)number(out[i]) + (float)number(bias[i % OC]));
        double x = number(out[i]), u = sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
        set(&act[i], (float)(0.5 * x * (1 + tanh(u))));
    }
}
struct Problem {
    int N, OC;
    double bytes; // that must be moved once
    Both<floatX> act, out, bias;

    Problem(Shape s) : N(s.rows), OC(s.cols), bytes(3.0 * N * OC * sizeof(floatX)) {
        size_t n = (size_t)N * OC;
        start_cpu(layer_shapes(1, N, OC, 1, 1, 1));
        require(n <= INT32_MAX / 2, "%d x %d elements are more than this file's kernels can count; choose fewer --rows", N, OC);
        out = random_both(n, 0, 3); bias = random_both(OC);
        act = unset_both(n);
        bias_gelu_cpu(act.cpu, out.cpu, bias.cpu, N, OC);
    }
    void expect_right() {
        expect_near("out", out, 0);
        expect_near("act", act, 32);
    }
};
#define KERNEL_ARGUMENTS(p) (p).act.gpu, (p).out.gpu, (p).bias.gpu

// ---- 1: the formula as it is printed ----
// One element per thread. tanhf has branches, and a warp often takes both; near -1 the sum 1 + tanh loses its digits.
__global__ void naive_kernel(floatX* act, floatX* out, const floatX* bias, int n, int OC) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] = narrow<floatX>(widen(out[i]) + widen(bias[i % OC]));
    float x = widen(out[i]), u = GELU_SCALE * (x + GELU_CUBIC * x * x * x);
    act[i] = narrow<floatX>(0.5f * x * (1.0f + tanhf(u)));
}
VARIANT(bias_gelu_1_naive, "one element per thread, tanh as printed") {
    int n = p.N * p.OC;
    naive_kernel<<<(unsigned)ceil_div(n, threads), threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), n, p.OC);
}

// ---- 2: a kernel for each step ----
// Such kernels are easier to combine, but the sum goes to memory and comes back: four rows are moved instead of three.
__global__ void bias_kernel(floatX* out, const floatX* bias, int n, int OC) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = narrow<floatX>(widen(out[i]) + widen(bias[i % OC]));
}
__global__ void gelu_kernel(floatX* act, const floatX* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) act[i] = narrow<floatX>(gelu(widen(out[i])));
}
VARIANT(bias_gelu_2_two_kernels, "bias, then gelu: one more row to move") {
    int n = p.N * p.OC;
    unsigned blocks = (unsigned)ceil_div(n, threads);
    bias_kernel<<<blocks, threads, 0, compute_stream>>>(p.out.gpu, p.bias.gpu, n, p.OC);
    gelu_kernel<<<blocks, threads, 0, compute_stream>>>(p.act.gpu, p.out.gpu, n);
}

// ---- 3: gelu(x) = x sigmoid(2u) ----
// The same function with an exponential and a division, no branch and no lost digits. One block per row, so that no division
// is needed to find the column. (llmc/'s kernel, with one element a load.)
VARIANT(bias_gelu_3_sigmoid, "one block per row, an exponential instead of tanh") {
    bias_gelu_forward_kernel<1><<<p.N, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), p.OC);
}

// ---- 4: llmc/'s ----
// 16 bytes a load. llmc/ takes as many threads as a row has pieces, at most 256.
VARIANT(bias_gelu_4_llmc, "the same, 16 bytes a load") {
    if (p.OC % VEC != 0) return not_offered();
    bias_gelu_forward_kernel<VEC><<<p.N, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), p.OC);
}

OPERATION("rows are tokens, cols outputs", { 16384, 3072, 0 }, { 9, 264, 0 })
