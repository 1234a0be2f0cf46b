/*
attention_common.h - what attention.c and attention_backward.c share: where the rows of a head lie, and softmax in double. All
variants except the first consist of dot() and add_scaled().
*/
#ifndef DEV_CPU_ATTENTION_COMMON_H
#define DEV_CPU_ATTENTION_COMMON_H
#include "variants.h"

struct Problem {
    int T, C, NH, HS;
    float *qkv, *out, *stats;   // (T,3C), (T,C), (NH,T) log of the sum of a row's exponentials
    float *scratch;             // (threads,T,T)
    float *dout, *dqkv, *P, *D; // backward: (T,C), (T,3C), (NH,T,T) probabilities, (NH,T)
};
static inline const float* query(const Problem* p, int h, int t) { return p->qkv + (size_t)t * 3 * p->C + (size_t)h * p->HS; }
static inline const float* key(const Problem* p, int h, int t) { return query(p, h, t) + p->C; }
static inline const float* value(const Problem* p, int h, int t) { return query(p, h, t) + 2 * p->C; }
static inline float* result(const Problem* p, int h, int t) { return p->out + (size_t)t * p->C + (size_t)h * p->HS; }
static inline float* scratch_of_thread(const Problem* p) { return p->scratch + (size_t)omp_get_thread_num() * p->T * p->T; }

static void make_heads(Problem* p, Shape s) {
    p->T = s.rows;
    p->C = s.cols;
    p->HS = p->C % 64 == 0 ? 64 : p->C; // one head if channels are not whole heads
    p->NH = p->C / p->HS;
    size_t T = (size_t)p->T;
    layers_init(layer_shapes(1, p->T, p->C, p->NH, 1, 1));
    p->qkv = random_floats(T * 3 * (size_t)p->C, 0, 1);
    p->stats = floats((size_t)p->NH * T);
    p->scratch = floats((size_t)omp_get_max_threads() * T * T);
}
// e (t + 1) = the probabilities that query t of a head gives to the keys up to it; returns what stats has.
static double softmax_in_double(double* e, const Problem* p, int h, int t) {
    double max = -INFINITY, sum = 0;
    for (int u = 0; u <= t; u++) {
        e[u] = dot_in_double(query(p, h, t), key(p, h, u), p->HS) / sqrt(p->HS);
        max = fmax(max, e[u]);
    }
    for (int u = 0; u <= t; u++) sum += e[u] = exp(e[u] - max);
    for (int u = 0; u <= t; u++) e[u] /= sum;
    return max + log(sum);
}
#endif
