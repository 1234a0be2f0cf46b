/* cpu/muon.h - Muon: momentum, the steps of newton_schulz.h, and the update. */
#ifndef LLMC_CPU_MUON_H
#define LLMC_CPU_MUON_H
#include "../host_adamw.h"
#include "../newton_schulz.h"
#include "matmul.h"

void muon_momentum(floatNS* u, float* m, const floatX* grads, const float* grad_scale, float beta, size_t n) {
    float scale = *grad_scale, rest = 1 - beta;
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        float g = to_float(grads[i]) * scale, next = m[i] + rest * (g - m[i]);
        m[i] = scale != 0 ? next : m[i];
        u[i] = to_floatNS(scale != 0 ? next + rest * (g - next) : 0);
    }
}

// The factor is applied in double, because the reciprocal of a tiny norm is beyond fp32.
static void newton_schulz_normalise(floatNS* out, const floatNS* x, size_t n) {
    double square = host_sum_squares(x, FLOATNS_DTYPE, n), factor = square != 0 ? 1 / sqrt(square) : 0;
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) out[i] = to_floatNS((float)((double)from_floatNS(x[i]) * factor));
}

#ifndef COUNT_PRODUCT // test/unit/layers.cu counts the multiply-adds
#define COUNT_PRODUCT(M, N, K)
#endif
static void newton_schulz_product(floatNS* out, const floatNS* a, bool a_transposed, const floatNS* b,
                                  bool b_transposed, int M, int N, int K) {
    // in fp16, a and b are fp32 in spite of their type in Product, which product_by_tiles expects
    Product p = { { a_transposed, b_transposed, M, N, K, 0, 0, FLOATNS_DTYPE }, out, (const floatX*)(const void*)a,
                  (const floatX*)(const void*)b, NULL };
    COUNT_PRODUCT(M, N, K);
    if (FLOATNS_DTYPE == FLOATX_DTYPE) product(p);
    else product_by_tiles(p);
}

static void newton_schulz_polynomial(floatNS* b, const floatNS* a, int m) {
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < m; r++) {
        floatNS* to = b + (size_t)r * (size_t)m;
        const floatNS* from = a + (size_t)r * (size_t)m;
        #pragma omp simd
        for (int c = 0; c < m; c++) {
            float sum = NEWTON_SCHULZ_B * from_floatNS(from[c]) + NEWTON_SCHULZ_C * from_floatNS(to[c]);
            to[c] = to_floatNS(sum + (r == c ? NEWTON_SCHULZ_A : 0.0f));
        }
    }
}

void muon_update(Muon a, float scale, floatX* params, float* master, const floatNS* update, const float* grad_scale,
                 size_t n, double* square) {
    bool own_master = !NEEDS_MASTER && master == NULL;
    float* w = own_master ? (float*)(void*)params : master;
    floatX* rounded = own_master ? NULL : params;
    float decay = (float)(1 - a.lr * a.weight_decay), step = (float)(a.lr * (double)scale);
    bool skipped = *grad_scale == 0;
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < (skipped ? 0 : n); i++) w[i] = w[i] * decay - step * from_floatNS(update[i]);
    if (rounded != NULL && !skipped) convert_dtype(rounded, FLOATX_DTYPE, w, DTYPE_F32, n);
    if (square) *square += rounded ? host_sum_squares(rounded, FLOATX_DTYPE, n) : host_sum_squares(w, DTYPE_F32, n);
}
#endif
