/* cpu/layernorm.h - layernorm (Ba et al., arXiv 1607.06450) and the residual addition before it. */
#ifndef LLMC_CPU_LAYERNORM_H
#define LLMC_CPU_LAYERNORM_H
#include "workspace.h"

#define LAYERNORM_EPS 1e-5f

// One row: out = (x - mean) * rstd * w + b. The variance is summed around the mean in a second pass: E[x^2] - E[x]^2
// cancels.
static void layernorm_row_forward(floatX* out, float* mean, float* rstd, const floatX* x, const floatX* w,
                                  const floatX* b, int C) {
    float sum = 0, square = 0;
    #pragma omp simd reduction(+:sum)
    for (int c = 0; c < C; c++) sum += to_float(x[c]);
    float m = sum / (float)C;
    #pragma omp simd reduction(+:square)
    for (int c = 0; c < C; c++) square += (to_float(x[c]) - m) * (to_float(x[c]) - m);
    float r = 1.0f / sqrtf(square / (float)C + LAYERNORM_EPS);
    #pragma omp simd
    for (int c = 0; c < C; c++) out[c] = to_floatX((to_float(x[c]) - m) * r * to_float(w[c]) + to_float(b[c]));
    *mean = m;
    *rstd = r;
}

void residual_layernorm_forward(floatX* res, floatX* out, float* mean, float* rstd, const floatX* inp1,
                                const floatX* inp2, const floatX* w, const floatX* b, int N, int C) {
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < N; i++) {
        floatX* r = res + (size_t)i * C;
        if (inp2 != NULL) {
            const floatX *x1 = inp1 + (size_t)i * C, *x2 = inp2 + (size_t)i * C;
            #pragma omp simd
            for (int c = 0; c < C; c++) r[c] = to_floatX(to_float(x1[c]) + to_float(x2[c]));
        }
        layernorm_row_forward(out + (size_t)i * C, mean + i, rstd + i, r, w, b, C);
    }
}

// dw and db are sums over rows: rows are cut into at most this many chunks, each summed by one thread.
#define LAYERNORM_CHUNKS 128
static inline int layernorm_chunk_rows(int N) { return (int)size_max(8, ceil_div((size_t)N, LAYERNORM_CHUNKS)); }
static inline size_t layernorm_scratch_floats(int N, int C) { // for any number of rows up to N
    return size_min(LAYERNORM_CHUNKS, ceil_div((size_t)N, 8)) * 2 * (size_t)C;
}

// One row. forward, with n = (x - mean) * rstd: out = n * w + b, so dw += dout * n, db += dout, and with g = dout * w
// dinp += rstd * (g - mean(g) - n * mean(g * n)): x acts on out directly, and through the mean and rstd of its row.
static void layernorm_row_backward(floatX* dinp, float* dw, float* db, const floatX* dout, const floatX* x,
                                   const floatX* w, float mean, float rstd, int C) {
    float sum_g = 0, sum_gn = 0;
    #pragma omp simd reduction(+:sum_g, sum_gn)
    for (int c = 0; c < C; c++) {
        float d = to_float(dout[c]), n = (to_float(x[c]) - mean) * rstd, g = d * to_float(w[c]);
        sum_g += g;
        sum_gn += g * n;
        dw[c] += d * n;
        db[c] += d;
    }
    float mean_g = sum_g / (float)C, mean_gn = sum_gn / (float)C;
    #pragma omp simd
    for (int c = 0; c < C; c++) {
        float n = (to_float(x[c]) - mean) * rstd, g = to_float(dout[c]) * to_float(w[c]);
        dinp[c] = to_floatX(to_float(dinp[c]) + rstd * (g - mean_g - n * mean_gn));
    }
}

void layernorm_backward(floatX* dinp, floatX* dw, floatX* db, const floatX* dout, const floatX* inp, const floatX* w,
                        const float* mean, const float* rstd, int N, int C, GradMode mode) {
    int rows = layernorm_chunk_rows(N), chunks = (int)ceil_div((size_t)N, (size_t)rows);
    float* partial = cpu_layers.shared; // (chunks, 2, C): each chunk's dw, then its db
    #pragma omp parallel for schedule(static)
    for (int k = 0; k < chunks; k++) {
        float *chunk_dw = partial + (size_t)k * 2 * C, *chunk_db = chunk_dw + C;
        memset(chunk_dw, 0, 2 * (size_t)C * sizeof(float));
        int end = (k + 1) * rows < N ? (k + 1) * rows : N;
        for (int i = k * rows; i < end; i++) {
            size_t row = (size_t)i * C;
            layernorm_row_backward(dinp + row, chunk_dw, chunk_db, dout + row, inp + row, w, mean[i], rstd[i], C);
        }
    }
    #pragma omp parallel for schedule(static)
    for (int c = 0; c < C; c++) {
        float sum_w = 0, sum_b = 0;
        for (int k = 0; k < chunks; k++) {
            sum_w += partial[(size_t)k * 2 * C + c];
            sum_b += partial[(size_t)k * 2 * C + C + c];
        }
        dw[c] = to_floatX(mode == GRAD_ADD ? to_float(dw[c]) + sum_w : sum_w);
        db[c] = to_floatX(mode == GRAD_ADD ? to_float(db[c]) + sum_b : sum_b);
    }
}
#endif
