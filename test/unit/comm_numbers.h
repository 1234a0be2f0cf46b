/* comm_numbers.h - for the tests of collectives: elements of every type, and numbers whose sums over ranks are known. */
#ifndef TEST_COMM_NUMBERS_H
#define TEST_COMM_NUMBERS_H
#include "../../llmc/comm/comm.h"
#include "claims.h"

static const CommType types[] = { COMM_F32, COMM_BF16, COMM_F16, COMM_F64, COMM_BYTE };
enum { NUM_TYPES = COUNT(types), NUM_SUMMED = 4 };

static inline double element_get(const void* p, size_t i, CommType t) {
    float x;
    if (t == COMM_F64) return ((const double*)p)[i];
    if (t == COMM_BYTE) return ((const uint8_t*)p)[i];
    convert_dtype(&x, DTYPE_F32, (const char*)p + i * comm_type_size(t), (DType)t, 1);
    return (double)x;
}
static inline void element_set(void* p, size_t i, CommType t, double x) {
    float f = (float)x;
    if (t == COMM_F64) ((double*)p)[i] = x;
    else if (t == COMM_BYTE) ((uint8_t*)p)[i] = (uint8_t)x;
    else convert_dtype((char*)p + i * comm_type_size(t), (DType)t, &f, DTYPE_F32, 1);
}

// Small whole numbers: sums over 8 ranks are exact in every type, in any order.
static inline double whole(int rank, size_t i) { return (double)(int)((i * 7 + (size_t)rank * 5 + i / 16) % 16); }
static inline double whole_sum(int ranks, size_t i) {
    double sum = 0;
    for (int q = 0; q < ranks; q++) sum += whole(q, i);
    return sum;
}
// Numbers whose sum depends on the order: signs alternate, sizes differ by a factor of 1000, all bits are in use.
static inline double rough(int rank, size_t i) {
    uint32_t h = (uint32_t)(i * 2654435761u) ^ (uint32_t)(rank + 1) * 40503u * 65537u;
    h ^= h >> 15; h *= 2246822519u; h ^= h >> 13;
    double x = (double)h / 4294967296.0 + 0.01;
    return (h & 1 ? x : -x) * (h & 6 ? 1 : 1000);
}
#endif
