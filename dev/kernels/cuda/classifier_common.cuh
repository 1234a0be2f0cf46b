// classifier_common.cuh - shared by classifier.cu and classifier_forward.cu: the problem, with or without the gradient,
// and the formula as it is printed, by one thread or one block for each row.
#ifndef DEV_CUDA_CLASSIFIER_COMMON_CUH
#define DEV_CUDA_CLASSIFIER_COMMON_CUH
#include "variants.cuh"
#include "../../../llmc/device/cuda/classifier.cuh"

template <bool GRADIENT> struct ClassifierProblem {
    int N, V, Vp;
    float dloss;
    double bytes; // that must be moved once
    Both<floatX> logits;
    Both<int> targets;
    Both<float> losses;

    ClassifierProblem(Shape s) : N(s.rows), V(s.cols), Vp((int)round_up(V, 128)), dloss(0.125f),
                                 bytes((GRADIENT ? 2.0 * Vp : V) * N * sizeof(floatX)) {
        start_cpu(layer_shapes(1, N, 1, 1, Vp, 1));
        logits = random_both((size_t)N * Vp, 0, 3);
        targets = random_tokens(N, V);
        losses = unset_both<float>(N);
        if (GRADIENT) cpu::classifier_forward_backward(losses.cpu, logits.cpu, targets.cpu, dloss, N, V, Vp);
        else cpu::classifier_forward(losses.cpu, logits.cpu, targets.cpu, N, V, Vp);
    }
    void expect_right() {
        double slack = 32 + 2 * sqrt(V); // a sum in one thread's order is off by about sqrt(V) roundings
        expect_near("losses", losses, slack);
        expect_near(GRADIENT ? "dlogits" : "logits", logits, slack);
    }
};
#define KERNEL_ARGUMENTS(p) (p).losses.gpu, (p).logits.gpu, (p).targets.gpu, (p).dloss, (p).V, (p).Vp

// The maximum, the sum, the gradient: a pass over the row for each.
template <typename Row, bool GRADIENT>
__global__ void passes_kernel(float* losses, floatX* logits, const int* targets, float dloss, int V, int Vp, int N) {
    int i = Row::row();
    if (i >= N) return;
    floatX* row = logits + (size_t)i * Vp;
    int target = targets[i];
    float target_logit = widen(row[target]), max = -INFINITY, sum = 0; // read before the barriers, overwritten after
    for (int v = Row::begin(); v < V; v += Row::step()) max = fmaxf(max, widen(row[v]));
    max = Row::max(max);
    for (int v = Row::begin(); v < V; v += Row::step()) sum += fast_exp(widen(row[v]) - max);
    sum = Row::sum(sum);
    if (Row::begin() == 0) losses[i] = logf(sum) - (target_logit - max);
    for (int v = Row::begin(); GRADIENT && v < Vp; v += Row::step()) {
        float gradient = (fast_exp(widen(row[v]) - max) / sum - (v == target ? 1.0f : 0.0f)) * dloss;
        row[v] = narrow<floatX>(v < V ? gradient : 0);
    }
}
template <typename Row, bool GRADIENT> static void launch_passes(ClassifierProblem<GRADIENT>& p, int threads) {
    unsigned blocks = Row::blocks(p.N, threads);
    passes_kernel<Row, GRADIENT><<<blocks, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), p.N);
}
#endif
