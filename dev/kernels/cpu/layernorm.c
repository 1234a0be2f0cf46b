/*
layernorm.c - the residual addition and layernorm, forward, in several ways: res = inp1 + inp2, and
out = (res - mean) * rstd * w + b over each of N rows of C channels.

Two rows are read and two are written, and those bytes are counted. A row fits in the nearest cache, so reading it again is
cheap; going through whole arrays again is not. The rows here have a mean of 10 and a standard deviation of 1, as rows of a
network may. With such rows the ways to find the variance differ: see the column "error".
*/
#include "variants.h"

struct Problem { int N, C; float *inp1, *inp2, *w, *b, *res, *out, *mean, *rstd; }; // (N,C), (C) and (N)

static void make(Problem* p, Shape s) {
    *p = (Problem){ .N = s.rows, .C = s.cols };
    size_t n = (size_t)p->N * (size_t)p->C, C = (size_t)p->C;
    layers_init(layer_shapes(1, p->N, p->C, 1, 1, 1));
    p->inp1 = random_floats(n, 8, 0.8f);
    p->inp2 = random_floats(n, 2, 0.6f);
    p->w = random_floats(C, 1, 0.5f);
    p->b = random_floats(C, 0, 0.5f);
    p->mean = floats((size_t)p->N);
    Output *res = output("res", &p->res, n), *out = output("out", &p->out, n), *rstd = output("rstd", &p->rstd, (size_t)p->N);
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < p->N; i++) {
        size_t row = (size_t)i * C;
        double mean = 0, variance = 0;
        for (size_t c = row; c < row + C; c++) res->want[c] = (double)(p->inp1[c] + p->inp2[c]);
        for (size_t c = row; c < row + C; c++) mean += res->want[c] / (double)C;
        for (size_t c = row; c < row + C; c++) variance += (res->want[c] - mean) * (res->want[c] - mean) / (double)C;
        rstd->want[i] = 1 / sqrt(variance + (double)LAYERNORM_EPS);
        for (size_t c = 0; c < C; c++)
            out->want[row + c] = (res->want[row + c] - mean) * rstd->want[i] * (double)p->w[c] + (double)p->b[c];
    }
}
static double work(const Problem* p) { return 16.0 * p->N * p->C; }
// A chain of C additions is off by about sqrt(C) roundings of the sum, and x - mean has them tenfold.

static void normalise(float* out, const float* x, float mean, float rstd, const Problem* p) {
    #pragma omp simd
    for (int c = 0; c < p->C; c++) out[c] = (x[c] - mean) * rstd * p->w[c] + p->b[c];
}

// ---- 1: the formulas as they are printed ----
// One loop per formula, over whole arrays. The results of one loop are no longer in the cache when the next one starts: two rows
// read and one written, then one read, one read, and one read and one written. And a sum of floats is one chain of additions: the
// compiler may not change its order, so it cannot use vectors, and each addition waits for the one before.
VARIANT(layernorm_1_naive, "a loop over whole arrays for each formula", 400) {
    size_t n = (size_t)p->N * (size_t)p->C;
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) p->res[i] = p->inp1[i] + p->inp2[i];
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < p->N; i++) {
        float sum = 0;
        for (int c = 0; c < p->C; c++) sum += p->res[(size_t)i * p->C + c];
        p->mean[i] = sum / (float)p->C;
    }
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < p->N; i++) {
        float square = 0;
        for (int c = 0; c < p->C; c++) {
            float x = p->res[(size_t)i * p->C + c] - p->mean[i];
            square += x * x;
        }
        p->rstd[i] = 1.0f / sqrtf(square / (float)p->C + LAYERNORM_EPS);
    }
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < p->N; i++) normalise(p->out + (size_t)i * p->C, p->res + (size_t)i * p->C, p->mean[i], p->rstd[i], p);
}

// ---- 2: a row at a time ----
// All four loops over one row, which stays in the nearest cache: memory is touched once. The sums are still chains.
// Variants 3 and 4 differ only in how they find a row's moments, while they add x1 and x2 to x (C).
typedef struct { float mean, variance; } Moments;
static void each_row(Problem* p, Moments (*moments)(float* x, const float* x1, const float* x2, int C)) {
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < p->N; i++) {
        size_t row = (size_t)i * p->C;
        Moments m = moments(p->res + row, p->inp1 + row, p->inp2 + row, p->C);
        p->mean[i] = m.mean;
        p->rstd[i] = 1.0f / sqrtf(m.variance + LAYERNORM_EPS);
        normalise(p->out + row, p->res + row, m.mean, p->rstd[i], p);
    }
}
static Moments two_passes(float* x, const float* x1, const float* x2, int C) {
    float sum = 0, square = 0;
    for (int c = 0; c < C; c++) {
        x[c] = x1[c] + x2[c];
        sum += x[c];
    }
    float mean = sum / (float)C;
    for (int c = 0; c < C; c++) square += (x[c] - mean) * (x[c] - mean);
    return (Moments){ mean, square / (float)C };
}
VARIANT(layernorm_2_rows, "all loops over one row, then the next", 400) { each_row(p, two_passes); }

// ---- 3: one pass for mean and variance, after Welford ----
// Each element updates both: the new mean moves by a part of the difference, and the sum of squares grows by the difference from
// the old mean times that from the new. This keeps the digits, but the chain now has a division in it.
static Moments welford(float* x, const float* x1, const float* x2, int C) {
    float mean = 0, square = 0;
    for (int c = 0; c < C; c++) {
        x[c] = x1[c] + x2[c];
        float from_old = x[c] - mean;
        mean += from_old / (float)(c + 1);
        square += from_old * (x[c] - mean);
    }
    return (Moments){ mean, square / (float)C };
}
VARIANT(layernorm_3_welford, "mean and variance in one pass, a division each", 400) { each_row(p, welford); }

// ---- 4: one pass, E[x^2] - E[x]^2 ----
// Two sums side by side. The programmer allows another order ("simd reduction"), so they use vectors. Nothing is faster on the
// chip. But the difference of two numbers near 101 is near 1: the sums' last two digits are lost, and with a mean of 1000 hardly
// one would be left.
static Moments squares(float* x, const float* x1, const float* x2, int C) {
    float sum = 0, square = 0;
    #pragma omp simd reduction(+:sum, square)
    for (int c = 0; c < C; c++) {
        x[c] = x1[c] + x2[c];
        sum += x[c];
        square += x[c] * x[c];
    }
    float mean = sum / (float)C;
    return (Moments){ mean, square / (float)C - mean * mean };
}
VARIANT(layernorm_4_squares, "one pass, E[x^2] - E[x]^2: vectors, but it loses digits", 4000) { each_row(p, squares); }

// ---- 5: llmc/'s ----
// One row at a time, the variance around the mean in a pass of its own, sums that may use vectors: as fast as 4 where both wait
// for memory, because the second pass reads the nearest cache.
VARIANT(layernorm_5_llmc, "two passes over a row, sums as vectors", 64) {
    residual_layernorm_forward(p->res, p->out, p->mean, p->rstd, p->inp1, p->inp2, p->w, p->b, p->N, p->C);
}

OPERATION("layernorm", "rows are tokens, cols channels", { 8192, 768, 0 }, { 11, 264, 0 }, false)
