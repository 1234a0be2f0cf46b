/*
weight_chunks.h - the gradient of a matrix from rows that come in chunks, on every device, or from no rows. wte needs
chunks, because the classifier's logits are too large to exist all at once.
*/
#ifndef LLMC_WEIGHT_CHUNKS_H
#define LLMC_WEIGHT_CHUNKS_H
#include "device_api.h"
#include "layers_api.h"

// dw (bytes) and dbias (OC), which may be NULL, become the sums over no rows. Libraries are not asked for this: oneDNN
// does not write dw even if it should overwrite it, and cuBLAS had the same fault (pytorch#31421).
static inline void weight_without_rows(void* dw, size_t bytes, floatX* dbias, int OC, GradMode mode) {
    if (mode == GRAD_ADD) return;
    device_zero(dw, bytes);
    if (dbias != NULL) device_zero(dbias, (size_t)OC * sizeof(floatX));
}

// As matmul_backward_weight_chunk. sums (OC,C) holds the sum of the chunks so far; NULL if floatX is fp32.
static inline void weight_add_chunk(float* sums, floatX* dw, const floatX* dout, const floatX* inp, int row, int n,
                                    int N, int C, int OC, GradMode mode) {
    size_t size = (size_t)OC * (size_t)C;
    GradMode chunk_mode = row == 0 ? mode : GRAD_ADD;
    bool rounds_once = !NEEDS_MASTER || n == N;
    if (rounds_once) {
        matmul_backward_weight(dw, NULL, dout, inp, n, C, OC, chunk_mode);
        return;
    }
    invariant(sums != NULL, "%d of %d rows of a gradient in chunks, and layers_init was told of fewer rows", n, N);
    if (row == 0 && mode == GRAD_ADD) to_fp32(sums, dw, size);
    matmul_backward_weight_fp32(sums, dout, inp, n, C, OC, chunk_mode);
    if (row + n == N) from_fp32(dw, sums, size);
}
#endif
