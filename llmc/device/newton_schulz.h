/*
newton_schulz.h - the iteration that orthogonalises Muon's updates, on every device. cpu/muon.h and cuda/muon.cuh
implement its steps.

The products are m x m inside, where m is the smaller side, and no matrix is transposed in memory. For a wide X, A is
X X^T and the next X is B X; for a tall one, A is X^T X and the next X is X B. B = aI + bA + cA^2 includes the identity,
which saves a pass over X, and in bf16 one rounding of it.

Everything lies in the caller's work space, on 16-byte boundaries whatever the address of x: a library may choose
another algorithm, and then other bits, for another alignment.
*/
#ifndef LLMC_NEWTON_SCHULZ_H
#define LLMC_NEWTON_SCHULZ_H
#include "device_api.h"
#include "muon_api.h"

// out (n) = x / its norm, or 0 if that is 0. The order of the sum depends only on n.
static void newton_schulz_normalise(floatNS* out, const floatNS* x, size_t n);
// out (M,N) = a b, where a (M,K) is stored as (K,M) if a_transposed, and b (K,N) as (N,K) if b_transposed. The bits
// depend only on the operands and shapes.
static void newton_schulz_product(floatNS* out, const floatNS* a, bool a_transposed, const floatNS* b,
                                  bool b_transposed, int M, int N, int K);
// b (m,m) = aI + bA + cA^2, where b was A^2, and a (m,m) is A
static void newton_schulz_polynomial(floatNS* b, const floatNS* a, int m);

void newton_schulz(floatNS* x, floatNS* work, int rows, int cols) {
    invariant(rows >= 1 && cols >= 1, "newton_schulz of a matrix of %d x %d", rows, cols);
    bool tall = rows > cols;
    int m = tall ? cols : rows, n = tall ? rows : cols;
    size_t count = (size_t)m * (size_t)n, whole = round_up(count, 8), square = round_up((size_t)m * (size_t)m, 8);
    floatNS* now = (floatNS*)(void*)round_up((uintptr_t)work, 16);
    floatNS *next = now + whole, *a = next + whole, *b = a + square;
    newton_schulz_normalise(now, x, count);
    for (int i = 0; i < NEWTON_SCHULZ_ITERATIONS; i++) {
        newton_schulz_product(a, now, tall, now, !tall, m, m, n);
        newton_schulz_product(b, a, false, a, true, m, m, m); // A is symmetric, and most libraries like b transposed
        newton_schulz_polynomial(b, a, m);
        if (tall) newton_schulz_product(next, now, false, b, true, n, m, m);
        else newton_schulz_product(next, b, false, now, false, m, n, m);
        floatNS* used = now;
        now = next;
        next = used;
    }
    device_copy(x, now, count * sizeof(floatNS));
}
#endif
