/* cpu/classifier.h - softmax and cross-entropy over the vocabulary; a thread computes whole rows. */
#ifndef LLMC_CPU_CLASSIFIER_H
#define LLMC_CPU_CLASSIFIER_H
#include "math.h"
#include "workspace.h"
#include <float.h>

// Sets e (V) = exp(logits - *max), which lies in [0, 1], and *max, the largest logit; returns the sum of e. The row e
// stays in the cache for the next steps. A NaN or Inf among the logits makes the sum, and therefore the loss, NaN.
// V may be 0. If all logits of this part of the vocabulary are -Inf, the other parts take all the probability.
static float classifier_row_exp(float* e, float* max, const floatX* logits, int V) {
    float m = -FLT_MAX, sum = 0;
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

// Replaces a row (Vp) of logits by its gradient, with 0 in the padding. e (V) and sum come from classifier_row_exp;
// target is -1 if another part of the vocabulary contains it.
static void classifier_row_gradient(floatX* row, const float* e, float sum, int target, float dloss, int V, int Vp) {
    // loss = log(sum) - logit[target], so dlogit = (e / sum - onehot) * dloss
    float scale = dloss / sum;
    #pragma omp simd
    for (int v = 0; v < V; v++) row[v] = to_floatX(e[v] * scale);
    if (target >= 0) row[target] = to_floatX(e[target] * scale - dloss);
    memset(row + V, 0, (size_t)(Vp - V) * sizeof(floatX));
}

// gradients is logits, which they replace, or NULL to compute only the losses.
static void classifier_rows_of(float* losses, const floatX* logits, floatX* gradients, const int* targets, float dloss,
                               int N, int V, int Vp) {
    #pragma omp parallel for schedule(static) num_threads(cpu_layers.threads)
    for (int i = 0; i < N; i++) {
        const floatX* row = logits + (size_t)i * Vp;
        floatX* gradient = gradients != NULL ? gradients + (size_t)i * Vp : NULL;
        losses[i] = 0;
        if (targets[i] < 0 && gradient != NULL) memset(gradient, 0, (size_t)Vp * sizeof(floatX));
        if (targets[i] < 0) continue;
        float *e = thread_scratch(), max, sum = classifier_row_exp(e, &max, row, V);
        losses[i] = logf(sum) - (to_float(row[targets[i]]) - max);
        if (gradient != NULL) classifier_row_gradient(gradient, e, sum, targets[i], dloss, V, Vp);
    }
}
void classifier_forward(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp) {
    classifier_rows_of(losses, logits, NULL, targets, 0, N, V, Vp);
}
void classifier_forward_backward(float* losses, floatX* logits, const int* targets, float dloss, int N, int V, int Vp) {
    classifier_rows_of(losses, logits, logits, targets, dloss, N, V, Vp);
}

// ---- in parts ----
void classifier_part_stats(float* stats, const floatX* logits, const int* targets, TokenRange range, int N, int V) {
    int tokens = tokens_in_range(range, V);
    #pragma omp parallel for schedule(static) num_threads(cpu_layers.threads)
    for (int i = 0; i < N; i++) {
        const floatX* row = logits + (size_t)i * range.count;
        float* s = stats + 3 * (size_t)i;
        int target = token_row(range, targets[i]);
        s[1] = classifier_row_exp(thread_scratch(), &s[0], row, tokens);
        s[2] = target >= 0 ? to_float(row[target]) : 0;
    }
}

// Returns the loss of row i, and its maximum and sum over the whole vocabulary, from all (parts,N,3). The exponentials
// of a part are relative to its own maximum, so its sum is scaled by exp(own maximum - maximum of all parts).
static float classifier_row_of_parts(float* max, float* sum, const float* all, int i, int parts, int N) {
    float m = -FLT_MAX, s = 0, target_logit = 0; // is 0 in all parts but one
    const float* stats = all + 3 * (size_t)i;
    size_t part = 3 * (size_t)N;
    for (int q = 0; q < parts; q++) m = stats[q * part] > m ? stats[q * part] : m;
    for (int q = 0; q < parts; q++) {
        s += stats[q * part + 1] * exp_f32(stats[q * part] - m);
        target_logit += stats[q * part + 2];
    }
    *max = m;
    *sum = s;
    return logf(s) - (target_logit - m);
}

void classifier_part_forward(float* losses, const float* all, const int* targets, int parts, int N) {
    for (int i = 0; i < N; i++) {
        float max, sum, loss = classifier_row_of_parts(&max, &sum, all, i, parts, N);
        losses[i] = targets[i] < 0 ? 0 : loss;
    }
}

void classifier_part_forward_backward(float* losses, floatX* logits, const float* all, const int* targets, float dloss,
                                      TokenRange range, int parts, int N, int V) {
    int tokens = tokens_in_range(range, V);
    #pragma omp parallel for schedule(static) num_threads(cpu_layers.threads)
    for (int i = 0; i < N; i++) {
        floatX* row = logits + (size_t)i * range.count;
        losses[i] = 0;
        if (targets[i] < 0) {
            memset(row, 0, (size_t)range.count * sizeof(floatX));
            continue;
        }
        float *e = thread_scratch(), max, sum;
        losses[i] = classifier_row_of_parts(&max, &sum, all, i, parts, N);
        #pragma omp simd
        for (int v = 0; v < tokens; v++) e[v] = exp_f32(to_float(row[v]) - max);
        classifier_row_gradient(row, e, sum, token_row(range, targets[i]), dloss, tokens, range.count);
    }
}
#endif
