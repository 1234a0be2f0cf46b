/*
layernorm_backward.c - layernorm's gradients in several ways. With n = (inp - mean) * rstd and g = dout * w, in each of N rows
of C channels

    dinp += rstd * (g - mean(g) - n * mean(g * n))     sums along a row
    dw   += sum over rows of dout * n                  sums down the columns
    db   += sum over rows of dout

A row of dinp belongs to the thread that has the row, but dw and db belong to all rows: threads that share the rows all add to
the same C numbers, and threads that share the columns instead go through the arrays a second time. Three rows read (dinp, dout,
inp) and one written are counted.
*/
#include "variants.h"

struct Problem { int N, C; float *dout, *inp, *w, *mean, *rstd, *dinp, *dw, *db, *copies; }; // copies (threads,2,C)

static void make(Problem* p, Shape s) {
    *p = (Problem){ .N = s.rows, .C = s.cols };
    size_t n = (size_t)p->N * (size_t)p->C, C = (size_t)p->C;
    layers_init(layer_shapes(1, p->N, p->C, 1, 1, 1));
    p->dout = random_floats(n, 0, 1);
    p->inp = random_floats(n, 10, 1);
    p->w = random_floats(C, 1, 0.5f);
    p->mean = floats((size_t)p->N);
    p->rstd = floats((size_t)p->N);
    p->copies = floats((size_t)omp_get_max_threads() * 2 * C);
    Output *dinp = output_added_to("dinp", &p->dinp, n);
    Output *dw = output_added_to("dw", &p->dw, C), *db = output_added_to("db", &p->db, C);
    for (int i = 0; i < p->N; i++) {
        const float *x = p->inp + (size_t)i * C, *dout = p->dout + (size_t)i * C;
        double mean = 0, variance = 0, mean_g = 0, mean_gn = 0;
        for (size_t c = 0; c < C; c++) mean += (double)x[c] / (double)C;
        for (size_t c = 0; c < C; c++) variance += ((double)x[c] - mean) * ((double)x[c] - mean) / (double)C;
        p->mean[i] = (float)mean; // what forward leaves, and backward takes as it is
        p->rstd[i] = (float)(1 / sqrt(variance + (double)LAYERNORM_EPS));
        for (size_t c = 0; c < C; c++) {
            double n_c = ((double)x[c] - (double)p->mean[i]) * (double)p->rstd[i], g = (double)dout[c] * (double)p->w[c];
            mean_g += g / (double)C;
            mean_gn += g * n_c / (double)C;
            dw->want[c] += (double)dout[c] * n_c;
            db->want[c] += (double)dout[c];
        }
        for (size_t c = 0; c < C; c++) {
            double n_c = ((double)x[c] - (double)p->mean[i]) * (double)p->rstd[i], g = (double)dout[c] * (double)p->w[c];
            dinp->want[(size_t)i * C + c] += (double)p->rstd[i] * (g - mean_g - n_c * mean_gn);
        }
    }
}
static double work(const Problem* p) { return 16.0 * p->N * p->C; }
// One chain down a column of N = 8192 is off by about sqrt(N) = 90 roundings of its value; pieces of 64 by few.

// ---- 1: the formulas as they are printed ----
// A pass along rows for dinp, and one down columns for dw and db: no thread adds to another's sum. But every sum is one chain of
// additions, as in layernorm.c. And down a column each number lies in another cache line, which the nearest cache has lost by
// the time that the next column needs its neighbour.
VARIANT(layernorm_backward_1_naive, "a pass along rows, another down columns", 256) {
    size_t C = (size_t)p->C;
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < p->N; i++) {
        size_t row = (size_t)i * C;
        float sum_g = 0, sum_gn = 0, mean = p->mean[i], rstd = p->rstd[i];
        for (size_t c = 0; c < C; c++) {
            float g = p->dout[row + c] * p->w[c];
            sum_g += g;
            sum_gn += g * (p->inp[row + c] - mean) * rstd;
        }
        for (size_t c = 0; c < C; c++) {
            float g = p->dout[row + c] * p->w[c], n = (p->inp[row + c] - mean) * rstd;
            p->dinp[row + c] += rstd * (g - sum_g / (float)C - n * (sum_gn / (float)C));
        }
    }
    #pragma omp parallel for schedule(static)
    for (size_t c = 0; c < C; c++) {
        float sum_w = 0, sum_b = 0;
        for (int i = 0; i < p->N; i++) {
            size_t at = (size_t)i * C + c;
            sum_w += p->dout[at] * (p->inp[at] - p->mean[i]) * p->rstd[i];
            sum_b += p->dout[at];
        }
        p->dw[c] += sum_w;
        p->db[c] += sum_b;
    }
}

// ---- 2: both passes along rows ----
// A thread has a strip of columns, and goes through the rows of the strip: neighbours are added to neighbours, so vectors
// need no change of order, and the strip's sums stay in the nearest cache. The sums along rows may be in any order ("simd
// reduction"). But dout and inp still come from memory twice.
static void row_dinp(const Problem* p, int i) {
    int C = p->C;
    const float *dout = p->dout + (size_t)i * C, *x = p->inp + (size_t)i * C, *w = p->w;
    float *dinp = p->dinp + (size_t)i * C, mean = p->mean[i], rstd = p->rstd[i], sum_g = 0, sum_gn = 0;
    #pragma omp simd reduction(+:sum_g, sum_gn)
    for (int c = 0; c < C; c++) {
        float g = dout[c] * w[c];
        sum_g += g;
        sum_gn += g * (x[c] - mean) * rstd;
    }
    float mean_g = sum_g / (float)C, mean_gn = sum_gn / (float)C;
    #pragma omp simd
    for (int c = 0; c < C; c++) dinp[c] += rstd * (dout[c] * w[c] - mean_g - (x[c] - mean) * rstd * mean_gn);
}
// dw, db (C) += row i's part of them, in columns [begin, end)
static void row_dw(const Problem* p, float* dw, float* db, int i, int begin, int end) {
    const float *dout = p->dout + (size_t)i * p->C, *x = p->inp + (size_t)i * p->C;
    float mean = p->mean[i], rstd = p->rstd[i];
    #pragma omp simd
    for (int c = begin; c < end; c++) {
        dw[c] += dout[c] * (x[c] - mean) * rstd;
        db[c] += dout[c];
    }
}
VARIANT(layernorm_backward_2_strips, "both along rows, one of them in strips: vectors", 256) {
    const int strip = 128;
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < p->N; i++) row_dinp(p, i);
    #pragma omp parallel for schedule(static)
    for (int begin = 0; begin < p->C; begin += strip)
        for (int i = 0; i < p->N; i++) row_dw(p, p->dw, p->db, i, begin, int_min(begin + strip, p->C));
}

// ---- 3: one pass, sums by atomics ----
// While a row is in the cache, its part of dw and db is added as well; no other thread's addition can come between the load and
// the store of an atomic one. But an atomic addition costs as much as dozens of others even if no other thread needs the number,
// there are two for each element, none of them uses vectors, and the cache lines of dw and db travel from core to core. The order
// in which threads come decides the last bits, which differ from run to run.
VARIANT(layernorm_backward_3_atomics, "one pass, atomics for sums over rows", 256) {
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < p->N; i++) {
        const float *dout = p->dout + (size_t)i * p->C, *x = p->inp + (size_t)i * p->C;
        row_dinp(p, i);
        for (int c = 0; c < p->C; c++) {
            float dw = dout[c] * (x[c] - p->mean[i]) * p->rstd[i];
            #pragma omp atomic
            p->dw[c] += dw;
            #pragma omp atomic
            p->db[c] += dout[c];
        }
    }
}

// ---- 4: one pass, each thread with its own sums ----
// Each thread adds to a dw and db of its own, in its nearest cache, and at the end they are added up in the order of the
// threads: the same bits from run to run. But another number of threads has other partial sums, and so other bits.
VARIANT(layernorm_backward_4_copies, "one pass, a dw and db for each thread, added up", 256) {
    size_t C = (size_t)p->C;
    int threads = omp_get_max_threads();
    float *dw = p->copies, *db = p->copies + (size_t)threads * C; // (threads,C) each
    memset(p->copies, 0, (size_t)threads * 2 * C * sizeof(float));
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < p->N; i++) {
        size_t own = (size_t)omp_get_thread_num() * C;
        row_dinp(p, i);
        row_dw(p, dw + own, db + own, i, 0, p->C);
    }
    add_up(p->dw, dw, threads, C);
    add_up(p->db, db, threads, C);
}

// ---- 5: llmc/'s ----
// Sums of pieces of the rows, at most 128 pieces, whose size depends only on N: whichever thread has a piece, the bits are the
// same. Short sums of short sums are also more exact than one long one. And each row is read twice instead of three times,
// because its sums, dw and db need the same numbers.
VARIANT(layernorm_backward_5_llmc, "one pass, a dw and db for each piece of the rows", 64) {
    layernorm_backward(p->dinp, p->dw, p->db, p->dout, p->inp, p->w, p->mean, p->rstd, p->N, p->C, GRAD_ADD);
}

OPERATION("layernorm_backward", "rows are tokens, cols channels", { 8192, 768, 0 }, { 11, 264, 0 }, false)
