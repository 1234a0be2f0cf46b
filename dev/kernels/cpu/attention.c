/*
attention.c - causal self-attention, forward, in several ways: for each head, out = softmax(q k^T / sqrt(HS)) v, where a query
sees the keys up to its own position. qkv (T,3C) has q, k and v side by side, heads of HS = 64 channels within each; out (T,C).

Each pair of a query and a key that it sees costs 4 HS operations, which are counted, and one exponential. The matrix of scores,
(T,T) for each head, is larger than everything else together. One question is whether it must exist; the other is that of
matmul.c: how to keep the processor's vector units busy.
*/
#include "attention_common.h"

static void make(Problem* p, Shape s) {
    make_heads(p, s);
    size_t T = (size_t)p->T, C = (size_t)p->C;
    double* scratch = (double*)allocate((size_t)omp_get_max_threads() * T * sizeof(double));
    Output* out = output("out", &p->out, T * C);
    #pragma omp parallel for collapse(2) schedule(dynamic, 16)
    for (int h = 0; h < p->NH; h++)
        for (int t = 0; t < p->T; t++) {
            double *e = scratch + (size_t)omp_get_thread_num() * T, *want = out->want + (size_t)t * C + (size_t)(h * p->HS);
            softmax_in_double(e, p, h, t);
            memset(want, 0, (size_t)p->HS * sizeof(double));
            for (int u = 0; u <= t; u++) add_scaled_in_double(want, e[u], value(p, h, u), p->HS);
        }
}
static double work(const Problem* p) { return 2.0 * p->T * (p->T + 1.0) * p->C; }

// ---- 1: the formulas as they are printed ----
// Three loops for a head: scores into a (T,T) matrix, softmax of its rows, their product with v. The matrix is megabytes, written
// and read three times. Every sum is one chain, exponentials are calls, and down v the inner loop jumps 3C numbers a step.
static void naive_head(const Problem* p, int h, float* scores) {
    int T = p->T, HS = p->HS;
    for (int t = 0; t < T; t++)
        for (int u = 0; u <= t; u++) {
            float sum = 0;
            for (int i = 0; i < HS; i++) sum += query(p, h, t)[i] * key(p, h, u)[i];
            scores[(size_t)t * T + u] = sum / sqrtf((float)HS);
        }
    for (int t = 0; t < T; t++) {
        float *row = scores + (size_t)t * T, max = row[0], sum = 0;
        for (int u = 1; u <= t; u++) max = row[u] > max ? row[u] : max;
        for (int u = 0; u <= t; u++) sum += row[u] = expf(row[u] - max);
        for (int u = 0; u <= t; u++) row[u] /= sum;
    }
    for (int t = 0; t < T; t++)
        for (int i = 0; i < HS; i++) {
            float sum = 0;
            for (int u = 0; u <= t; u++) sum += scores[(size_t)t * T + u] * value(p, h, u)[i];
            result(p, h, t)[i] = sum;
        }
}
VARIANT(attention_1_naive, "the (T,T) matrix stored, three loops", 64) {
    #pragma omp parallel for schedule(dynamic)
    for (int h = 0; h < p->NH; h++) naive_head(p, h, scratch_of_thread(p));
}

// ---- 2: a query at a time ----
// A query needs only its row of scores: T numbers, which the nearest cache holds. The loops are reordered so that the inner
// ones go along memory, and may use vectors: dot products in any order, exponentials from llmc/device/cpu/math.h, and v's rows
// added to the result one by one.
VARIANT(attention_2_rows, "a query at a time, one row of scores: vectors", 64) {
    float scale = 1.0f / sqrtf((float)p->HS);
    #pragma omp parallel for collapse(2) schedule(dynamic, 16)
    for (int h = 0; h < p->NH; h++)
        for (int t = 0; t < p->T; t++) {
            float *row = scratch_of_thread(p), *out = result(p, h, t), max = -INFINITY, sum = 0;
            for (int u = 0; u <= t; u++) row[u] = scale * dot(query(p, h, t), key(p, h, u), p->HS);
            #pragma omp simd reduction(max:max)
            for (int u = 0; u <= t; u++) max = row[u] > max ? row[u] : max;
            #pragma omp simd reduction(+:sum)
            for (int u = 0; u <= t; u++) sum += row[u] = exp_f32(row[u] - max);
            memset(out, 0, (size_t)p->HS * sizeof(float));
            for (int u = 0; u <= t; u++) add_scaled(out, row[u] / sum, value(p, h, u), p->HS);
        }
}

// ---- 3: online softmax ----
// Not even a row is needed: keys come in blocks, only one block's scores are kept, and when the maximum grows, the sum and the
// result so far are scaled down (Milakov and Gimelshein, arXiv 1805.02867). This lets a GPU keep all of attention on the chip.
// Here a row fits in the cache anyway, so this only does more work. Its advantage is that a long context needs no more memory.
enum { KEYS = 64 };
VARIANT(attention_3_online, "online softmax, 64 keys at a time", 64) {
    float scale = 1.0f / sqrtf((float)p->HS);
    #pragma omp parallel for collapse(2) schedule(dynamic, 16)
    for (int h = 0; h < p->NH; h++)
        for (int t = 0; t < p->T; t++) {
            float *out = result(p, h, t), max = -INFINITY, sum = 0;
            memset(out, 0, (size_t)p->HS * sizeof(float));
            for (int first = 0; first <= t; first += KEYS) {
                int keys = int_min(KEYS, t + 1 - first);
                float e[KEYS], new_max = max;
                for (int u = 0; u < keys; u++) e[u] = scale * dot(query(p, h, t), key(p, h, first + u), p->HS);
                for (int u = 0; u < keys; u++) new_max = e[u] > new_max ? e[u] : new_max;
                float shrink = exp_f32(max - new_max); // 0 at first
                #pragma omp simd
                for (int u = 0; u < keys; u++) e[u] = exp_f32(e[u] - new_max);
                sum *= shrink;
                for (int u = 0; u < keys; u++) sum += e[u];
                for (int i = 0; i < p->HS; i++) out[i] *= shrink;
                for (int u = 0; u < keys; u++) add_scaled(out, e[u], value(p, h, first + u), p->HS);
                max = new_max;
            }
            for (int i = 0; i < p->HS; i++) out[i] /= sum;
        }
}

// ---- 4: llmc/'s ----
// 64 queries at a time, so that a key or value that has been loaded serves 64 times instead of once. Both products are oneDNN's,
// with numbers in registers as in matmul.c. The block of scores, 64 rows of the keys so far, stays in the second cache.
VARIANT(attention_4_llmc, "64 queries at a time, products by oneDNN", 64) {
    attention_forward(p->out, p->stats, p->qkv, 1, p->T, p->C, p->NH);
}

OPERATION("attention", "rows are tokens of one sequence, cols channels", { 1024, 768, 0 }, { 77, 128, 0 }, true)
