/*
compress_api.h - what compressed gradients are made of: fewer bits a number, fewer numbers, matrices of low rank.

Implemented by cpu/compress.h and cuda/compress.cuh; programs include compress.h, which picks one. Arrays are device
memory, calls are ordered like layer calls, and layers_init comes first: the GPU's kernels use the layers' workspace.

Error     What a rank did not send is kept (fp32) and added to what it sends next: x = gradient + error, kept = x -
          sent. `error` NULL: nothing is added. `kept` NULL: nothing is kept. kept may be error or x; it is another
          array where a step may be skipped, because the old errors are then needed again.
Rows      What N ranks sent lies in N rows, one behind the other. A sum over rows is formed in fp32 in their order and
          rounded once. So ranks that have the same rows have the same sum, to the bit. No rows add up to 0.
Sizes     n may be 0, which writes nothing, except for the k largest. The matrices of low rank are not empty.
Packed    rows are bytes for COMM_BYTE, and begin at an address that is a multiple of 4. Every size here is a multiple
          of 4. Rows that ranks exchange are multiples of 16 bytes, because NCCL copies any other row byte by byte.
Others    float arrays begin anywhere; from a multiple of 16 bytes on, the GPU reads them faster.
NaN       A NaN or an infinity that is sent gives NaN or an infinity to everyone, so that all ranks skip the same step.
Equal     What bf16, blocks and the k largest send and keep is the same bits on every device; other results are close.
*/
#ifndef LLMC_COMPRESS_API_H
#define LLMC_COMPRESS_API_H
#include "layers_api.h"

// ---- the error ----
void add_error(float* x, const floatX* grads, const float* error, size_t n); // x (n) = grads + error; x may be error
void scale_in_place_fp32(float* x, float factor, size_t n); // x (n) *= factor: for errors, if the loss scale changes

// ---- bf16 ----
// out (n) = grads + error, rounded to bf16; kept (n) = grads + error - out
void round_bf16(uint16_t* out, float* kept, const floatX* grads, const float* error, size_t n);
void widen_bf16(floatX* out, const uint16_t* in, size_t n); // out (n) = in, rounded to floatX

// ---- 8 and 4 bits, in blocks ----
// A packed block has QUANTISE_BLOCK elements: an fp32 scale = largest |x| / L, then x / scale rounded to a whole number
// in [-L,L]: a byte each, L = 127, or half a byte, L = 7, of which an even element has the low half. What is missing of
// a row's last block is 0. A row may be cut between blocks: block b begins at byte quantised_bytes(b * QUANTISE_BLOCK).
// If an element is not finite, the block's scale is NaN. Else each sent value differs from x by at most half a scale.
#define QUANTISE_BLOCK 256
static inline size_t quantised_bytes(size_t n, int bits) { // of a row of n elements; bits 8 or 4
    return ceil_div(n, QUANTISE_BLOCK) * (sizeof(float) + QUANTISE_BLOCK / 8 * (size_t)bits);
}
// A packed block has 260 or 132 bytes, and four of them are a multiple of 16. So rows that ranks exchange have a
// multiple of PACKED_ROW elements.
#define PACKED_ROW (4 * QUANTISE_BLOCK)
static inline void quantise_check(int bits) {
    invariant(bits == 8 || bits == 4, "blocks have 8 or 4 bits a number, not %d", bits);
}
// packed (quantised_bytes(n, bits)) = x (n) + error (n); kept (n) = x + error - what packed has.
// t: of x, fp32 or floatX
void quantise(void* packed, float* kept, const void* x, DType t, const float* error, size_t n, int bits);
// out (n) of type t, fp32 or floatX, = the sum of packed (rows, quantised_bytes(n, bits)); rows 1: what one row has
void dequantise_sum(void* out, DType t, const void* packed, int rows, size_t n, int bits);

// ---- signs, with one scale a row ----
// A row is an fp32 scale, the mean of |x|, which makes the error smallest. Then comes a bit for each element: bit i %
// 32 of word i / 32 is 1 where x is negative. 0 counts as positive. Padding up to a multiple of 16 bytes follows, which
// nobody writes or reads.
static inline size_t signs_bytes(size_t n) { return round_up(sizeof(float) + ceil_div(n, 32) * sizeof(uint32_t), 16); }
// packed (signs_bytes(n)) = the scale and signs of x (n); kept (n) = x - what packed has
void pack_signs(void* packed, float* kept, const float* x, size_t n);
// out (n) = the sum over packed (rows, signs_bytes(n)) of scale or -scale
void unpack_signs_sum(floatX* out, const void* packed, int rows, size_t n);

// ---- the k largest ----
// A row is k indices (uint32_t), ascending, then the k values (float) of these elements, then such padding. n is less
// than 2^32.
static inline size_t top_k_count(size_t n, double fraction) { // k: at least one element, and at most all
    return size_min(n, size_max(1, (size_t)((double)n * fraction)));
}
static inline void top_k_check(size_t n, size_t k) {
    invariant(k >= 1 && k <= n && n <= UINT32_MAX, "the %zu largest of %zu numbers cannot be chosen", k, n);
}
static inline size_t sparse_bytes(size_t k) { return round_up(k * (sizeof(uint32_t) + sizeof(float)), 16); }
// packed (sparse_bytes(k)) = the k elements of x (n) with the largest |x|; of equal ones those with the smallest index.
// NaN counts as larger than any number. kept (n) = x, with 0 where an element was sent. 1 <= k <= n.
void pack_top_k(void* packed, float* kept, const float* x, size_t n, size_t k);
// out (n) = the sum of packed (rows, sparse_bytes(k)); 0 where no row has an element
void sparse_sum_fp32(float* out, const void* packed, int rows, size_t n, size_t k);

// ---- a matrix of rank r: m (n,k) is close to p (n,r) q^T (r,k). PowerSGD (Vogels et al., arXiv 1905.13727) ----
// p (n,r) = m (n,k) q (k,r)
void skinny_product(float* p, const float* m, const float* q, int n, int k, int r);
// q (k,r) = m^T (k,n) p (n,r)
void skinny_product_transposed(float* q, const float* m, const float* p, int n, int k, int r);
// The columns of p (n,r), r <= n, become orthonormal, in place: those of Gram-Schmidt from the first column on, made
// twice against rounding. A column that depends on those before it, as any does if p is 0, is replaced by a column of
// the identity.
void orthonormalise(float* p, int n, int r);
// out (n,k) = p q^T, rounded to floatX; kept (n,k) = m - share * out.
// share is 1/N where out stands for the sum of N ranks' m.
void low_rank_apply(floatX* out, float* kept, const float* m, const float* p, const float* q, float share, int n, int k,
                    int r);

// ---- how far what was applied is from what should have been ----
typedef struct { double xx, yy, xy; } Comparison; // on the device: sums of x^2, y^2 and x y
// *acc += those of x (n) and y (n), in an order that depends on n alone.
void add_comparison(Comparison* acc, const floatX* x, const float* y, size_t n);
// ||x - y|| / ||y||, ||x|| / ||y|| and the cosine between x and y, on the host; 0 where y is 0.
static inline double comparison_error(Comparison c) {
    return c.yy > 0 ? sqrt(fmax(0, c.xx - 2 * c.xy + c.yy) / c.yy) : 0;
}
static inline double comparison_norm_ratio(Comparison c) { return c.yy > 0 ? sqrt(c.xx / c.yy) : 0; }
static inline double comparison_cosine(Comparison c) { return c.xx > 0 && c.yy > 0 ? c.xy / sqrt(c.xx * c.yy) : 0; }
#endif
