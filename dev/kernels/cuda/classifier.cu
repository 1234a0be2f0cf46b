/*
classifier.cu - softmax and cross-entropy over the vocabulary, loss and gradient in one, in several kernels: for each of N rows
of V logits, loss = log(sum of exp(logit)) - logit[target], and the logits are overwritten by
dlogit = (exp(logit) / sum - onehot) * dloss.

A row is 100 KB in 16 bits, more than any register file's share and more than some shared memories. The gradient needs the
whole row's sum before its first element can be written, so the row must be kept or read again. The kernels differ in how often.
One read and one write are counted.
*/
#include "variants.cuh"
#include "../../../llmc/device/cuda/classifier.cuh"

struct Problem {
    int N, V, Vp;
    float dloss;
    double bytes; // that must be moved once
    Both<floatX> logits;
    Both<int> targets;
    Both<float> losses;

    Problem(Shape s) : N(s.rows), V(s.cols), Vp((int)round_up(V, 128)), dloss(0.125f),
                       bytes(2.0 * N * Vp * sizeof(floatX)) {
        start_cpu(layer_shapes(1, N, 1, 1, Vp, 1));
        logits = random_both((size_t)N * Vp, 0, 3);
        targets = random_tokens(N, V);
        losses = unset_both<float>(N);
        cpu::classifier_forward_backward(losses.cpu, logits.cpu, targets.cpu, dloss, N, V, Vp);
    }
    void expect_right() {
        double slack = 32 + 2 * sqrt(V); // a sum in one thread's order is off by about sqrt(V) roundings
        expect_near("losses", losses, slack);
        expect_near("dlogits", logits, slack);
    }
};
#define KERNEL_ARGUMENTS(p) (p).losses.gpu, (p).logits.gpu, (p).targets.gpu, (p).dloss, (p).V, (p).Vp

// dlogit of one element
__device__ inline floatX gradient_of(float logit, float max, float sum, bool is_target, float dloss) {
    return narrow<floatX>((fast_exp(logit - max) / sum - (is_target ? 1.0f : 0.0f)) * dloss);
}

// ---- 1: what one would write first ----
// One row per thread: a thousand threads for a GPU that needs a hundred thousand, and neighbours read 100 KB apart.
__global__ void naive_kernel(float* losses, floatX* logits, const int* targets, float dloss, int V, int Vp, int N) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) return;
    floatX* row = logits + (size_t)i * Vp;
    float max = -INFINITY, sum = 0;
    for (int v = 0; v < V; v++) max = fmaxf(max, widen(row[v]));
    for (int v = 0; v < V; v++) sum += fast_exp(widen(row[v]) - max);
    losses[i] = logf(sum) - (widen(row[targets[i]]) - max);
    for (int v = 0; v < Vp; v++)
        row[v] = v < V ? gradient_of(widen(row[v]), max, sum, v == targets[i], dloss) : narrow<floatX>(0);
}
VARIANT(classifier_1_naive, "one thread per row") {
    naive_kernel<<<(unsigned)ceil_div(p.N, threads), threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), p.N);
}

// ---- 2: one block per row, three passes ----
// The maximum, the sum, the gradient: the row is read three times, though some of it perhaps from a cache.
__global__ void three_passes_kernel(float* losses, floatX* logits, const int* targets, float dloss, int V, int Vp) {
    __shared__ float of_warps[WARP];
    floatX* row = logits + (size_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x];
    float target_logit = widen(row[target]), max = -INFINITY, sum = 0; // read before the barriers, overwritten after them
    for (int v = threadIdx.x; v < V; v += blockDim.x) max = fmaxf(max, widen(row[v]));
    max = block_max(max, of_warps);
    for (int v = threadIdx.x; v < V; v += blockDim.x) sum += fast_exp(widen(row[v]) - max);
    sum = block_sum(sum, of_warps);
    for (int v = threadIdx.x; v < Vp; v += blockDim.x)
        row[v] = v < V ? gradient_of(widen(row[v]), max, sum, v == target, dloss) : narrow<floatX>(0);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) - (target_logit - max);
}
VARIANT(classifier_2_three_passes, "one block per row: maximum, sum, gradient") {
    three_passes_kernel<<<p.N, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p));
}

// ---- 3: maximum and sum in one pass ----
// Online softmax: when the maximum grows, the sum so far is scaled down. Two reads, but with one element at a time each costs
// one more exponential.
VARIANT(classifier_3_online, "maximum and sum in one pass") {
    classifier_kernel<1, true><<<p.N, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), false);
}

// ---- 4: 16 bytes a load ----
// The maximum is updated once per piece. llmc/ does this where a row does not fit in shared memory.
VARIANT(classifier_4_vectors, "the same, 16 bytes a load") {
    classifier_kernel<VEC, true><<<p.N, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), false);
}

// ---- 5: llmc/'s ----
// The row is kept in shared memory, and read once. Then one or two blocks fill a multiprocessor, so they must be large to keep
// memory busy: llmc/ takes 1024 threads.
VARIANT(classifier_5_llmc, "the same, the row kept in shared memory") {
    size_t row_bytes = (size_t)p.Vp * sizeof(floatX);
    if (row_bytes + WARP * sizeof(float) > (size_t)cuda_layers.shared_bytes) return not_offered();
    auto kernel = classifier_kernel<VEC, true>;
    allow_shared_memory(kernel, row_bytes, "classifier_5_llmc");
    kernel<<<p.N, threads, row_bytes, compute_stream>>>(KERNEL_ARGUMENTS(p), true);
}

OPERATION("rows are tokens, cols the vocabulary", { 1024, 50257, 0 }, { 5, 301, 0 })
