/*
gelu_backward.cu - the gradient of GELU where cuBLASLt's epilogue cannot do it, in several kernels: dinp (N,C) *= gelu'(pre),
the tanh form, where pre (N,C) is GELU's input in forward.

Two rows are read and one is written. The derivative costs an exponential and a division per element, but memory should still
hide them. The best kernel is no kernel: the product that makes dinp can multiply its tiles before they leave the chip.
*/
#include "variants.cuh"
#include "../../../llmc/device/cuda/bias_gelu.cuh"

// dinp (n) *= gelu'(pre), by the formula as it is printed, in double
static void gelu_backward_cpu(floatX* dinp, const floatX* pre, int n) {
    #pragma omp parallel for
    for (int i = 0; i < n; i++) {
        double x = number(pre[i]), t = tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
        double du = sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x), derivative = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du;
        set(&dinp[i], (float)(number(dinp[i]) * derivative));
    }
}
struct Problem {
    int N, C;
    double bytes; // that must be moved once
    Both<floatX> dinp, pre;

    Problem(Shape s) : N(s.rows), C(s.cols), bytes(3.0 * N * C * sizeof(floatX)) {
        size_t n = (size_t)N * C;
        start_cpu(layer_shapes(1, N, C, 1, 1, 1));
        require(n <= INT32_MAX / 2, "%d x %d elements are more than this file's kernels can count; choose fewer --rows", N, C);
        dinp = random_both(n); pre = random_both(n, 0, 3);
        gelu_backward_cpu(dinp.cpu, pre.cpu, N * C);
    }
    void expect_right() { expect_near("dinp", dinp, 32); }
};

// ---- 1: the formula as it is printed ----
// gelu'(x) = (1 + tanh u) / 2 + x (1 - tanh^2 u) du/dx / 2. One element per thread. tanhf has branches, and a warp often takes
// both. Where tanh u is near 1 or -1 the brackets lose their digits. This shows if the result has no larger element: in fp32
// with --rows 1 --cols 1 this kernel is WRONG.
__global__ void naive_kernel(floatX* dinp, const floatX* pre, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = widen(pre[i]), t = tanhf(GELU_SCALE * (x + GELU_CUBIC * x * x * x));
    float du = GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x), derivative = 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * du;
    dinp[i] = narrow<floatX>(widen(dinp[i]) * derivative);
}
VARIANT(gelu_backward_1_naive, "one element per thread, tanh as printed") {
    int n = p.N * p.C;
    naive_kernel<<<(unsigned)ceil_div(n, threads), threads, 0, compute_stream>>>(p.dinp.gpu, p.pre.gpu, n);
}

// ---- 2: with the sigmoid ----
// With s = sigmoid(2u) it is s + x s (1 - s) 2 du/dx, where s and 1 - s come from one exponential, and neither is a difference
// of near numbers: fewer instructions, and all digits. Still one element per thread: 2 or 4 bytes a load.
__global__ void sigmoid_kernel(floatX* dinp, const floatX* pre, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) dinp[i] = narrow<floatX>(widen(dinp[i]) * gelu_derivative(widen(pre[i])));
}
VARIANT(gelu_backward_2_sigmoid, "an exponential instead of tanh") {
    int n = p.N * p.C;
    sigmoid_kernel<<<(unsigned)ceil_div(n, threads), threads, 0, compute_stream>>>(p.dinp.gpu, p.pre.gpu, n);
}

// ---- 3: llmc/'s ----
// 16 bytes a load, one block per row. llmc/ takes as many threads as a row has pieces, at most 256.
VARIANT(gelu_backward_3_llmc, "the same, 16 bytes a load") {
    if (p.C % VEC != 0) return not_offered();
    gelu_backward_kernel<VEC><<<p.N, threads, 0, compute_stream>>>(p.dinp.gpu, p.pre.gpu, p.C);
}

OPERATION("rows are tokens, cols channels", { 16384, 3072, 0 }, { 9, 264, 0 })
