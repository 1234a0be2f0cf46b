/*
sequence.h - the reference of sequence parallelism (Korthikanti et al., arXiv 2205.05198, section 4.2.2). It adds to the references of
tensor.h and data.h, which are included before it. Of the t ranks that share a replica of the model each has 1/t of a micro-batch's rows
wherever a layernorm is, and so makes a term of the gradients of its weights.

The terms are added up over the micro-batches of a step, as on a rank. When the gradients' norm is computed they are summed as ranks sum
them: over the replicas of the model first, as all gradients are, then over the t parts of a copy. Each sum is in rank order, in fp32,
rounded once to floatX.

-DSEQUENCE_PARTS replaces the number of parts; in one part it changes nothing. -DSEQUENCE_SUM=1 sums over the parts of a copy first, which
has other bits. Both may be expressions that are computed when the program runs.
*/
#if !defined(SPLIT_TENSOR_H) || !defined(SPLIT_DATA_H)
#error "include tensor.h and data.h before sequence.h"
#endif
#ifndef SEQUENCE_PARTS
#define SEQUENCE_PARTS TENSOR_PARTS
#endif
#ifndef SEQUENCE_SUM
#define SEQUENCE_SUM 0
#endif

#undef layernorm_backward // data.h's
#undef add_sum_squares

// Of layernorms: what each part of each copy has, (t,N,C), or (N,t,C) where the parts of a copy are summed first.
static SplitGradients split_sequence;

// The term that part q of copy k has of the gradient (C) that goes to sum.
static inline floatX* sequence_term(floatX* sum, int C, int k, int q) {
    int t = SEQUENCE_PARTS, N = DATA_PARTS;
    return split_gradient(&split_sequence, sum, (size_t)C, t * N)->apart + (SEQUENCE_SUM == 1 ? k * t + q : q * N + k) * C;
}

static inline void sequence_layernorm_backward(floatX* dinp, floatX* dw, floatX* db, const floatX* dout, const floatX* inp,
                                               const floatX* w, const float* mean, const float* rstd, int N, int C,
                                               GradMode mode) {
    int t = SEQUENCE_PARTS;
    FOR_PARTS(s, N) {
        int n = s.rows / t;
        require(s.rows % t == 0, "%d rows do not divide into %d parts", s.rows, t);
        for (int q = 0; q < t; q++) {
            size_t i = (size_t)(s.first + q * n), at = i * (size_t)C;
            layernorm_backward(dinp + at, sequence_term(dw, C, s.q, q), sequence_term(db, C, s.q, q), dout + at, inp + at, w,
                               mean + i, rstd + i, n, C, mode);
        }
    }
}

// Sums terms as (outer,inner,C): over inner first.
static inline void sequence_sum(SplitGradient g, int outer, int inner) {
    size_t C = g.n;
    floatX* sums = (floatX*)split_alloc((size_t)outer * C * sizeof(floatX));
    for (int i = 0; i < outer; i++) split_sum(sums + (size_t)i * C, g.apart + (size_t)(i * inner) * C, inner, C);
    split_sum(g.in_program, sums, outer, C);
    split_free(sums);
}

// Where x (n) are gradients, they become their sums first.
static inline void sequence_add_sum_squares(double* acc, const floatX* x, size_t n) {
    int t = SEQUENCE_PARTS, N = DATA_PARTS;
    for (int i = 0; i < split_sequence.num; i++) {
        SplitGradient g = split_sequence.all[i];
        if (split_is_in(&g, x, n)) sequence_sum(g, SEQUENCE_SUM == 1 ? N : t, SEQUENCE_SUM == 1 ? t : N);
    }
    data_add_sum_squares(acc, x, n);
}

// ---- what the program calls ----
#define layernorm_backward sequence_layernorm_backward
#define add_sum_squares sequence_add_sum_squares
