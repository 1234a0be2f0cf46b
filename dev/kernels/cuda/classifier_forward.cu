/*
classifier_forward.cu - the loss alone, as validation needs it, in several kernels: for each of N rows of V logits,
loss = log(sum of exp(logit)) - logit[target].

As classifier.cu, with nothing to write: no element waits for the whole row's sum, so none must be kept, and one pass is
enough. What remains is to read memory at its full rate, and to hide one exponential per element behind it.
*/
#include "variants.cuh"
#include "../../../llmc/device/cuda/classifier.cuh"

struct Problem {
    int N, V, Vp;
    double bytes; // that must be moved once
    Both<floatX> logits;
    Both<int> targets;
    Both<float> losses;

    Problem(Shape s) : N(s.rows), V(s.cols), Vp((int)round_up(V, 128)), bytes(1.0 * N * V * sizeof(floatX)) {
        start_cpu(layer_shapes(1, N, 1, 1, Vp, 1));
        logits = random_both((size_t)N * Vp, 0, 3);
        targets = random_tokens(N, V);
        losses = unset_both<float>(N);
        cpu::classifier_forward(losses.cpu, logits.cpu, targets.cpu, N, V, Vp);
    }
    void expect_right() { expect_near("losses", losses, 32 + 2 * sqrt(V)); } // a sum in one thread's order
};
#define KERNEL_ARGUMENTS(p) (p).losses.gpu, (p).logits.gpu, (p).targets.gpu

// ---- 1: the formula as it is printed ----
// One thread per row, the maximum first: a thousand threads for a GPU that needs a hundred thousand, and neighbours read
// 100 KB apart.
__global__ void naive_kernel(float* losses, const floatX* logits, const int* targets, int V, int Vp, int N) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) return;
    const floatX* row = logits + (size_t)i * Vp;
    float max = -INFINITY, sum = 0;
    for (int v = 0; v < V; v++) max = fmaxf(max, widen(row[v]));
    for (int v = 0; v < V; v++) sum += fast_exp(widen(row[v]) - max);
    losses[i] = logf(sum) - (widen(row[targets[i]]) - max);
}
VARIANT(classifier_forward_1_naive, "one thread per row") {
    unsigned blocks = (unsigned)ceil_div(p.N, threads);
    naive_kernel<<<blocks, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), p.V, p.Vp, p.N);
}

// ---- 2: one block per row, two passes ----
// Neighbours read neighbours, twice: the second time some of the row may still be in a cache.
__global__ void two_passes_kernel(float* losses, const floatX* logits, const int* targets, int V, int Vp) {
    __shared__ float of_warps[WARP];
    const floatX* row = logits + (size_t)blockIdx.x * Vp;
    float max = -INFINITY, sum = 0;
    for (int v = threadIdx.x; v < V; v += blockDim.x) max = fmaxf(max, widen(row[v]));
    max = block_max(max, of_warps);
    for (int v = threadIdx.x; v < V; v += blockDim.x) sum += fast_exp(widen(row[v]) - max);
    sum = block_sum(sum, of_warps);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) - (widen(row[targets[blockIdx.x]]) - max);
}
VARIANT(classifier_forward_2_two_passes, "one block per row: the maximum, then the sum") {
    two_passes_kernel<<<p.N, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), p.V, p.Vp);
}

// ---- 3: maximum and sum in one pass ----
// Online softmax: when the maximum grows, the sum so far is scaled down. One read, but with one element at a time each costs
// one more exponential. (llmc/'s kernel, with one element a load.)
VARIANT(classifier_forward_3_online, "maximum and sum in one pass") {
    classifier_kernel<1, false><<<p.N, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), 0.0f, p.V, p.Vp, false);
}

// ---- 4: llmc/'s ----
// 16 bytes a load, and the maximum is updated once per piece. llmc/ takes 1024 threads, as for the gradient; here no
// row fills shared memory, so more than one block of a smaller size can be on a multiprocessor.
VARIANT(classifier_forward_4_llmc, "the same, 16 bytes a load") {
    classifier_kernel<VEC, false><<<p.N, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), 0.0f, p.V, p.Vp, false);
}

OPERATION("rows are tokens, cols the vocabulary", { 1024, 50257, 0 }, { 5, 301, 0 })
