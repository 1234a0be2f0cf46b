/*
rounded.h - a reference of train_gpt2_zeropp with --quantise-weights none that has the bits of one with int8: weights are rounded to
blocks of 8 bits where a shard becomes floatX, and travel in floatX.
*/
#ifndef SPLIT_ROUNDED_H
#define SPLIT_ROUNDED_H
#include "split.h"
#include "../../llmc/device/compress.h"

// As from_fp32 for fp32 programs, which call it for the secondary shard, in whole rows.
static inline void rounded_from_fp32(floatX* out, const float* x, size_t n) {
    void* packed = split_alloc(quantised_bytes(n, 8));
    quantise(packed, NULL, x, DTYPE_F32, NULL, n, 8);
    dequantise_sum(out, FLOATX_DTYPE, packed, 1, n, 8);
    split_free(packed);
}
#define from_fp32 rounded_from_fp32
#endif
