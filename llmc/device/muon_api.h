/*
muon_api.h - Muon, an optimizer for matrices: what a program may call, documented once, as in layers_api.h (Jordan 2024,
kellerjordan.github.io/posts/muon; Liu et al. 2025, Moonlight, arXiv 2502.16982). Programs include muon.h.
A matrix has at least one row and one column; n may be 0, as in layers_api.h.
*/
#ifndef LLMC_MUON_API_H
#define LLMC_MUON_API_H
#include "../base/precision.h"

typedef struct { double lr, beta, weight_decay; } Muon;
// Nesterov momentum of g = grads * *grad_scale: m (n) = beta m + (1 - beta) g, then u (n) = beta m + (1 - beta) g.
// *grad_scale (device) 0, a step that is skipped: m stays as it is, and u is 0.
void muon_momentum(floatNS* u, float* m, const floatX* grads, const float* grad_scale, float beta, size_t n);
// x (rows,cols) = U p(p(p(p(p(S / |S|))))) V^T, where x was U S V^T, and p(s) = a s + b s^3 + c s^5. Newton-Schulz
// iterations X = aX + b (X X^T) X + c (X X^T)^2 X compute it without an SVD. They do not converge to 1: most singular
// values end between 0.7 and 1.2, but a square matrix has some that are so small that they stay below. |S| is the
// Frobenius norm, which bounds the largest singular value. No epsilon is added to it, so x may be as small as it likes;
// zeros stay zeros. A NaN or Inf in x makes all of x NaN. work has newton_schulz_work elements. Equal x give equal bits
// on every rank, wherever x and work lie.
void newton_schulz(floatNS* x, floatNS* work, int rows, int cols);
enum { NEWTON_SCHULZ_ITERATIONS = 5 };
#define NEWTON_SCHULZ_A 3.4445f // Jordan's: a large slope at 0, for which he gave up convergence
#define NEWTON_SCHULZ_B (-4.7750f)
#define NEWTON_SCHULZ_C 2.0315f
// Two matrices of x's shape and two of the smaller side squared, each from a multiple of 16 bytes on
static inline size_t newton_schulz_work(int rows, int cols) {
    const size_t unit = 8, m = size_min((size_t)rows, (size_t)cols);
    return 2 * round_up((size_t)rows * (size_t)cols, unit) + 2 * round_up(m * m, unit) + unit;
}
// Two FLOPs per multiply-add of an iteration's products: X X^T (m^2 n), its square (m^3), and the polynomial of both
// times X (m^2 n). m is the smaller side: X X^T of a tall X is really X^T X, which gives the same result.
static inline double newton_schulz_flops(int rows, int cols) {
    double m = rows < cols ? rows : cols, n = rows < cols ? cols : rows;
    return NEWTON_SCHULZ_ITERATIONS * (4 * m * m * n + 2 * m * m * m);
}
// w -= lr (weight_decay w + scale update), where params, master, *grad_scale and *square are those of adamw_update, and
// update (n) is what newton_schulz left. Moonlight's scale is 0.2 sqrt(max(rows, cols)): updates have the root mean
// square of AdamW's, and the same lr.
void muon_update(Muon a, float scale, floatX* params, float* master, const floatNS* update, const float* grad_scale,
                 size_t n, double* square);
#endif
