/* sums.h - sums over ranks in host memory, for a backend that moves data through it. */
#ifndef LLMC_COMM_SUMS_H
#define LLMC_COMM_SUMS_H
#include "contract.h"

// out (n) = rows[0] + rows[1] + ... + rows[N-1], each (n), in this order, rounded once. out may be one of the rows.
__attribute__((unused))
static void comm_add_rows(void* out, const void* const* rows, int N, size_t n, CommType t) {
    if (t == COMM_F64) {
        for (size_t i = 0; i < n; i++) {
            double sum = ((const double*)rows[0])[i];
            for (int q = 1; q < N; q++) sum += ((const double*)rows[q])[i];
            ((double*)out)[i] = sum;
        }
        return;
    }
    enum { BLOCK = 512 }; // stays in the cache
    float sum[BLOCK], term[BLOCK];
    const size_t size = comm_type_size(t);
    for (size_t i = 0; i < n; i += BLOCK) {
        size_t m = size_min(n - i, BLOCK);
        convert_dtype(sum, DTYPE_F32, (const char*)rows[0] + i * size, (DType)t, m);
        for (int q = 1; q < N; q++) {
            convert_dtype(term, DTYPE_F32, (const char*)rows[q] + i * size, (DType)t, m);
            for (size_t k = 0; k < m; k++) sum[k] += term[k];
        }
        convert_dtype((char*)out + i * size, (DType)t, sum, DTYPE_F32, m);
    }
}
// into (n) += from (n)
static inline void comm_add(void* into, const void* from, size_t n, CommType t) {
    const void* rows[2] = { into, from };
    comm_add_rows(into, rows, 2, n, t);
}
#endif
