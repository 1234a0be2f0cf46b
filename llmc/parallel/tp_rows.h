/*
tp_rows.h - the rows (B,T,C) of a micro-batch among t ranks of tensor parallelism: how many each rank keeps, and the
buffers through which they communicate. The communication is in the programs: tp_enter and the other seams of section 4.

By default every rank has all rows. With --sequence-parallel a rank keeps only its own 1/t of them between the matrix
products (arXiv 2205.05198), and all rows exist in buffers for a moment.
*/
#ifndef LLMC_TP_ROWS_H
#define LLMC_TP_ROWS_H
#include "../device/layers.h"
#include "mesh.h"
#include "shard.h"

typedef struct {
    Comm* tp;               // the t ranks, a view
    TensorParallel options;
    size_t C;
    size_t max_rows;        // B*T rows of the largest micro-batch
    size_t max_count;       // this rank's part of them
    int count, first;       // this rank's rows of the current micro-batch: [first, first + count)
    floatX* in;             // (B,T,C) gathered input of a column-parallel layer; NULL if ranks have all rows; a view
    floatX* out;            // (B,T,C) output of a row-parallel layer, or its gathered gradient; a view
    CommOp gather, sum;     // operations that a backward pass has begun
} TpRows;

// Returns how many of `rows` rows belong to this rank. For samples, the rows of the last rank may end beyond them.
static inline size_t tp_count(const TpRows* r, size_t rows) {
    return r->options.sequence_parallel ? ceil_div(rows, (size_t)r->tp->size) : rows;
}
// Call after the options are set. Dies if --sequence-parallel cannot cut the B*T rows of a micro-batch.
static inline void tp_init(TpRows* r, Comm* tp, GPT2Config c, int B, int T) {
    int t = tp->size, cut = r->options.sequence_parallel;
    r->tp = tp;
    r->C = (size_t)c.C;
    r->gather = r->sum = NO_OP;
    r->max_rows = (size_t)B * (size_t)T;
    r->max_count = tp_count(r, r->max_rows);
    require(!cut || B * T % t == 0, "--sequence-parallel cuts the tokens of a micro-batch into %d parts,"
            " and --batch-size %d x --seq-len %d = %d does not divide; choose a multiple of %d", t, B, T, B * T, t);
}

// ---- activations, n elements per row ----
// For all rows, which are summed over the t ranks. Memory from comm_alloc is known to the backend, which then sends
// from it without a copy. acts_alloc, in the programs, is for activations that are not communicated.
static inline floatX* tp_sum_alloc(const TpRows* r, size_t n) {
    return (floatX*)comm_alloc(r->tp, r->max_rows * n * sizeof(floatX), MEMORY_ACTIVATIONS);
}
static inline floatX* tp_rows_alloc(const TpRows* r, size_t n) {
    return r->options.sequence_parallel ? (floatX*)comm_alloc(r->tp, n * sizeof(floatX), MEMORY_ACTIVATIONS)
                                        : (floatX*)device_alloc(n * sizeof(floatX), MEMORY_ACTIVATIONS);
}
// For all rows, which are gathered with --sequence-parallel.
static inline floatX* tp_gather_alloc(const TpRows* r, size_t n) { return tp_rows_alloc(r, r->max_rows * n); }
// For this rank's rows, and for one number of each: a layernorm's mean or rstd.
static inline floatX* tp_acts_alloc(const TpRows* r, size_t n) { return tp_rows_alloc(r, r->max_count * n); }
static inline float* tp_stats_alloc(const TpRows* r) {
    return (float*)device_alloc(r->max_count * sizeof(float), MEMORY_ACTIVATIONS);
}
static inline void tp_buffers_alloc(TpRows* r) {
    r->out = tp_sum_alloc(r, r->C);
    if (r->options.sequence_parallel) r->in = tp_sum_alloc(r, r->C);
}

// ---- this rank's rows ----
static inline size_t tp_elements(const TpRows* r) { return (size_t)r->count * r->C; }
// Returns this rank's rows in x (B,T,C).
static inline floatX* tp_own_rows(const TpRows* r, floatX* x) { return x + (size_t)r->first * r->C; }
// Call at the beginning of a micro-batch of `rows` rows.
static inline void tp_begin(TpRows* r, int rows) {
    r->count = (int)tp_count(r, (size_t)rows);
    r->first = r->options.sequence_parallel ? r->tp->rank * r->count : 0;
}

// Returns x (a bias, or wpe) on rank 0 and NULL on the others, because layers' outputs are summed over the t ranks.
static inline floatX* tp_added_once(const TpRows* r, floatX* x) { return r->tp->rank == 0 ? x : NULL; }

// ---- operations that overlap with layers ----
// Returns where a term of a sum goes whose rows tp_leave stores in `own`.
static inline floatX* tp_term(const TpRows* r, floatX* own) { return r->options.sequence_parallel ? r->out : own; }
// Call after `gather` or `sum` is set to an operation that has begun. With --no-overlap, they wait for it.
static inline void tp_gather_begun(TpRows* r) { if (!r->options.overlap) comm_finish(r->tp, &r->gather); }
static inline void tp_sum_begun(TpRows* r) {
    if (!r->options.overlap) comm_finish(r->tp, &r->sum);
    layers_beside_sum(r->sum != NO_OP && comm_has_kernels(r->tp)); // layers leave multiprocessors for its kernels
}

// ---- gradients of layernorms ----
// Copy n elements of each of `count` parts to and from scratch (count,n).
static inline void tp_pack(floatX* scratch, floatX* const* parts, int count, size_t n) {
    for (int i = 0; i < count; i++) device_copy(scratch + (size_t)i * n, parts[i], n * sizeof(floatX));
}
static inline void tp_unpack(floatX* const* parts, const floatX* scratch, int count, size_t n) {
    for (int i = 0; i < count; i++) device_copy(parts[i], scratch + (size_t)i * n, n * sizeof(floatX));
}
#endif
