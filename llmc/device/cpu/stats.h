/* cpu/stats.h - the numbers of a step: sums, norms, the clipping factor. */
#ifndef LLMC_CPU_STATS_H
#define LLMC_CPU_STATS_H
#include "../host_adamw.h"

static double chunk_sum(const void* array, DType t, size_t begin, size_t end) {
    (void)t; // fp32
    const float* x = (const float*)array;
    double sum = 0;
    #pragma omp simd reduction(+:sum)
    for (size_t i = begin; i < end; i++) sum += (double)x[i];
    return sum;
}
void add_sum(double* acc, const float* x, size_t n) { *acc += host_sum_chunks(chunk_sum, x, DTYPE_F32, n); }
void add_sum_squares(double* acc, const floatX* x, size_t n) { *acc += host_sum_squares(x, FLOATX_DTYPE, n); }
void add_sum_squares_fp32(double* acc, const float* x, size_t n) { *acc += host_sum_squares(x, DTYPE_F32, n); }

void add_in_place(floatX* x, const floatX* y, size_t n) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) x[i] = to_floatX(to_float(x[i]) + to_float(y[i]));
}

void add_in_place_fp32(float* x, const float* y, size_t n) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) x[i] += y[i];
}

void to_fp32(float* out, const floatX* x, size_t n) { convert_dtype(out, DTYPE_F32, x, FLOATX_DTYPE, n); }
void from_fp32(floatX* out, const float* x, size_t n) { convert_dtype(out, FLOATX_DTYPE, x, DTYPE_F32, n); }

void clip_gradients(StepStats* stats, float max_norm, float loss_scale) {
    double norm = sqrt(stats->grad_square) / (double)loss_scale;
    double factor = max_norm > 0 ? fmin(1.0, (double)max_norm / (norm + 1e-6)) : 1.0;
    stats->grad_norm = norm;
    stats->grad_scale = isfinite(norm) ? (float)(factor / (double)loss_scale) : 0.0f;
}
#endif
