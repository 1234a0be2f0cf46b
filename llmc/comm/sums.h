/* sums.h - sums over ranks in host memory, for a backend that moves data through it. */
#ifndef LLMC_COMM_SUMS_H
#define LLMC_COMM_SUMS_H
#include "comm_api.h"

static inline void comm_add_rows_fp64(double* out, const void* const* rows, int N, size_t begin, size_t n) {
    for (size_t i = begin; i < begin + n; i++) {
        double sum = ((const double*)rows[0])[i];
        for (int q = 1; q < N; q++) sum += ((const double*)rows[q])[i];
        out[i] = sum;
    }
}
#define COMM_SUM_BLOCK 512 // elements, which stay in the cache
// Elements [begin, begin+n) of the sum, of at most COMM_SUM_BLOCK.
__attribute__((unused))
static void comm_add_block(void* out, const void* const* rows, int N, size_t begin, size_t n, CommType t) {
    float sum[COMM_SUM_BLOCK], term[COMM_SUM_BLOCK];
    size_t at = begin * comm_type_size(t);
    convert_slice(sum, DTYPE_F32, (const char*)rows[0] + at, (DType)t, n);
    for (int q = 1; q < N; q++) {
        convert_slice(term, DTYPE_F32, (const char*)rows[q] + at, (DType)t, n);
        for (size_t k = 0; k < n; k++) sum[k] += term[k];
    }
    convert_slice((char*)out + at, (DType)t, sum, DTYPE_F32, n);
}
static inline void comm_add_fp32(float* out, const float* a, const float* b, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = a[i] + b[i];
}
// The same in fp32 of two or more rows, without conversions.
// Only two rows may be added where the sum goes, because that may be a later row.
static inline void comm_add_block_fp32(float* out, const void* const* rows, int N, size_t begin, size_t n) {
    float sum[COMM_SUM_BLOCK], *to = N == 2 ? out + begin : sum;
    comm_add_fp32(to, (const float*)rows[0] + begin, (const float*)rows[1] + begin, n);
    for (int q = 2; q < N; q++) comm_add_fp32(to, to, (const float*)rows[q] + begin, n);
    if (to == sum) memcpy(out + begin, sum, n * sizeof(float));
}

// out (n) = rows[0] + rows[1] + ... + rows[N-1], each (n), in this order, rounded once. out may be one of the rows.
static inline void comm_add_rows(void* out, const void* const* rows, int N, size_t n, CommType t) {
    // up to 8192 elements, waking threads would take longer than the sum
    #pragma omp parallel for schedule(static) if (n > 16 * COMM_SUM_BLOCK)
    for (size_t i = 0; i < n; i += COMM_SUM_BLOCK) {
        size_t m = size_min(n - i, COMM_SUM_BLOCK);
        if (t == COMM_F64) comm_add_rows_fp64((double*)out, rows, N, i, m);
        else if (t == COMM_F32 && N > 1) comm_add_block_fp32((float*)out, rows, N, i, m);
        else comm_add_block(out, rows, N, i, m, t);
    }
}
// into (n) += from (n)
static inline void comm_add(void* into, const void* from, size_t n, CommType t) {
    const void* rows[2] = { into, from };
    comm_add_rows(into, rows, 2, n, t);
}
#endif
