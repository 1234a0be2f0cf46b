/* cpu/classifier.h - softmax and cross-entropy over the vocabulary, a row by one thread. */
#ifndef LLMC_CPU_CLASSIFIER_H
#define LLMC_CPU_CLASSIFIER_H
#include "math.h"
#include "workspace.h"

// e (V) = exp(logits - their maximum), which keeps every exponential in [0, 1]; *max and the sum of e. A row of e stays
// in the cache for what follows. A NaN or Inf among the logits makes the sum NaN, and so the loss: nothing hides it.
static float classifier_row_exp(float* e, float* max, const floatX* logits, int V) {
    float m = to_float(logits[0]), sum = 0;
    #pragma omp simd reduction(max:m)
    for (int v = 0; v < V; v++) m = to_float(logits[v]) > m ? to_float(logits[v]) : m;
    #pragma omp simd reduction(+:sum)
    for (int v = 0; v < V; v++) {
        float x = exp_f32(to_float(logits[v]) - m);
        e[v] = x;
        sum += x;
    }
    *max = m;
    return sum;
}

void classifier_forward(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp) {
    #pragma omp parallel for schedule(static) num_threads(cpu_layers.threads)
    for (int i = 0; i < N; i++) {
        losses[i] = 0;
        if (targets[i] < 0) continue;
        const floatX* row = logits + (size_t)i * Vp;
        float max, sum = classifier_row_exp(thread_scratch(), &max, row, V);
        losses[i] = logf(sum) - (to_float(row[targets[i]]) - max);
    }
}

void classifier_forward_backward(float* losses, floatX* logits, const int* targets, float dloss, int N, int V, int Vp) {
    #pragma omp parallel for schedule(static) num_threads(cpu_layers.threads)
    for (int i = 0; i < N; i++) {
        floatX* row = logits + (size_t)i * Vp;
        losses[i] = 0;
        if (targets[i] < 0) {
            memset(row, 0, (size_t)Vp * sizeof(floatX));
            continue;
        }
        float *e = thread_scratch(), max, sum = classifier_row_exp(e, &max, row, V);
        losses[i] = logf(sum) - (to_float(row[targets[i]]) - max);
        // loss = log(sum) - logit[target], so dlogit = (e / sum - onehot) * dloss
        float scale = dloss / sum;
        float target_gradient = e[targets[i]] * scale - dloss;
        #pragma omp simd
        for (int v = 0; v < V; v++) row[v] = to_floatX(e[v] * scale);
        row[targets[i]] = to_floatX(target_gradient);
        memset(row + V, 0, (size_t)(Vp - V) * sizeof(floatX));
    }
}
#endif
