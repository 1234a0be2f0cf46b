/*
tp_rows.h - the rows (B,T,C) of a micro-batch among t ranks of tensor parallelism: every rank has all of them, or with
--sequence-parallel 1/t (Korthikanti et al., arXiv 2205.05198, section 4.2.2).

A column-parallel layer takes all rows (tp_gather), and a row-parallel one makes a term of a sum (tp_reduce). Where every rank has
all rows, a gather sends nothing and a sum is an all-reduce; else they are an all-gather and a reduce-scatter, which together send
as much.
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
    int count, first;       // this rank's rows of the micro-batch are [first, first + count)
    floatX* gathered;       // (B,T,C) for rows that are gathered and not kept, a view
} TpRows;

// The options are set. Dies unless the B*T rows of a micro-batch can be cut, where they are. Where they are not, all are kept.
static inline void tp_init(TpRows* r, Comm* tp, GPT2Config c, int B, int T) {
    int t = tp->size, cut = r->options.sequence_parallel;
    r->tp = tp;
    r->C = (size_t)c.C;
    require(cut || !r->options.keep_gathered, "--keep-gathered is about what --sequence-parallel gathers: give both or neither");
    require(!cut || B * T % t == 0, "--sequence-parallel cuts the tokens of a micro-batch into %d parts,"
            " and --batch-size %d x --seq-len %d = %d does not divide; choose a multiple of %d", t, B, T, B * T, t);
    if (!cut) r->options.keep_gathered = 1;
}
// Returns how many of so many rows are this rank's; in samples the last rank's may go beyond them.
static inline size_t tp_count(const TpRows* r, size_t rows) {
    return r->options.sequence_parallel ? ceil_div(rows, (size_t)r->tp->size) : rows;
}
// Allocates activations that are summed among the t ranks; and some that are gathered, where rows are cut.
static inline floatX* tp_alloc(const TpRows* r, size_t n) {
    return (floatX*)comm_alloc(r->tp, n * sizeof(floatX), MEMORY_ACTIVATIONS);
}
static inline floatX* tp_gather_alloc(const TpRows* r, size_t n) {
    return r->options.sequence_parallel ? tp_alloc(r, n) : (floatX*)device_alloc(n * sizeof(floatX), MEMORY_ACTIVATIONS);
}
// Call it when a micro-batch of so many rows begins.
static inline void tp_begin(TpRows* r, int rows) {
    r->count = (int)tp_count(r, (size_t)rows);
    r->first = r->options.sequence_parallel ? r->tp->rank * r->count : 0;
}
static inline size_t tp_elements(const TpRows* r) { return (size_t)r->count * r->C; }

// Returns where this rank's rows are in x (B,T,C).
static inline floatX* tp_own(const TpRows* r, floatX* x) { return x + (size_t)r->first * r->C; }
// The same of what a block keeps of a layernorm's output: with --keep-gathered all rows, else only this rank's.
static inline floatX* tp_kept(const TpRows* r, floatX* ln) { return r->options.keep_gathered ? tp_own(r, ln) : ln; }
// Returns where all rows of it are, once tp_gather has gathered them.
static inline floatX* tp_gathered(const TpRows* r, floatX* ln) { return r->options.keep_gathered ? ln : r->gathered; }

// Of what is summed over t ranks, one adds the bias.
static inline floatX* tp_bias(const TpRows* r, floatX* bias) { return r->tp->rank == 0 ? bias : NULL; }

// What a block's backward pass sends travels while something else is computed, unless --no-overlap says otherwise.
static inline CommOp tp_beside(const TpRows* r, CommOp op) {
    if (!r->options.overlap) comm_finish(r->tp, &op);
    return op;
}

// Makes `own` this rank's rows of the sum of the ranks' x (B,T,C). Where every rank has all rows, own is x.
static inline CommOp tp_issue_sum(const TpRows* r, floatX* own, floatX* x) {
    return r->options.sequence_parallel ? (comm_reduce_scatter)(r->tp, own, x, tp_elements(r), COMM_FLOATX)
                                        : (comm_all_reduce)(r->tp, x, tp_elements(r), COMM_FLOATX);
}
static inline void tp_reduce_to(const TpRows* r, floatX* own, floatX* x) { comm_wait(r->tp, tp_issue_sum(r, own, x)); }
// The same in place. Returns where this rank's rows of the sum are.
static inline floatX* tp_reduce(const TpRows* r, floatX* x) {
    tp_reduce_to(r, tp_own(r, x), x);
    return tp_own(r, x);
}
// The same in two halves, the first of which returns at once. The layers between them run beside the sum.
static inline CommOp tp_reduce_begin(const TpRows* r, floatX* x) {
    CommOp op = tp_beside(r, tp_issue_sum(r, tp_own(r, x), x));
    layers_beside_sum(op != NO_OP && comm_has_kernels(r->tp));
    return op;
}
static inline floatX* tp_reduced(const TpRows* r, CommOp* op, floatX* x) {
    layers_beside_sum(false);
    comm_finish(r->tp, op);
    return tp_own(r, x);
}

// Sums what is small, `count` parts of n elements: side by side in scratch, which has room for so many at a time.
static inline void tp_reduce_together(const TpRows* r, floatX* const* parts, int count, size_t n, floatX* scratch, int room) {
    if (r->tp->size == 1) return; // of one row there is room for none
    for (int first = 0; first < count; first += room) {
        int now = count - first < room ? count - first : room;
        for (int i = 0; i < now; i++) device_copy(scratch + (size_t)i * n, parts[first + i], n * sizeof(floatX));
        comm_wait(r->tp, (comm_all_reduce)(r->tp, scratch, (size_t)now * n, COMM_FLOATX));
        for (int i = 0; i < now; i++) device_copy(parts[first + i], scratch + (size_t)i * n, n * sizeof(floatX));
    }
}

// Makes `all` (B,T,C) the rows of all ranks. Returns where they are: where every rank has all, that is where they were.
static inline floatX* tp_gather(const TpRows* r, floatX* all, floatX* own) {
    if (!r->options.sequence_parallel) return own;
    comm_wait(r->tp, (comm_all_gather)(r->tp, all, own, tp_elements(r), COMM_FLOATX));
    return all;
}
// Gathers what a block keeps of a layernorm's output, for a column-parallel layer.
static inline floatX* tp_gather_norm(const TpRows* r, floatX* ln) { return tp_gather(r, tp_gathered(r, ln), tp_kept(r, ln)); }
// Copies all rows of a gradient to `kept` (B,T,C), which it returns.
static inline floatX* tp_gather_kept(const TpRows* r, floatX* kept, floatX* own) {
    if (tp_gather(r, kept, own) != kept) device_copy(kept, own, tp_elements(r) * sizeof(floatX));
    return kept;
}
// Gathers in the backward pass what the forward pass gathered and did not keep, in two halves. Returns where all rows are.
static inline CommOp tp_regather_begin(const TpRows* r, floatX* ln) {
    if (r->options.keep_gathered) return NO_OP;
    return tp_beside(r, (comm_all_gather)(r->tp, r->gathered, ln, tp_elements(r), COMM_FLOATX));
}
static inline floatX* tp_regathered(const TpRows* r, CommOp* op, floatX* ln) {
    comm_finish(r->tp, op);
    return tp_gathered(r, ln);
}

// For the timeline, the caller of these is who communicates.
static inline const TpRows* tp_from(const TpRows* r, const char* caller) {
    comm_from(r->tp, caller);
    return r;
}
#define tp_reduce_to(r, ...) tp_reduce_to(tp_from(r, __func__), __VA_ARGS__)
#define tp_reduce(r, ...) tp_reduce(tp_from(r, __func__), __VA_ARGS__)
#define tp_reduce_begin(r, ...) tp_reduce_begin(tp_from(r, __func__), __VA_ARGS__)
#define tp_reduce_together(r, ...) tp_reduce_together(tp_from(r, __func__), __VA_ARGS__)
#define tp_gather(r, ...) tp_gather(tp_from(r, __func__), __VA_ARGS__)
#define tp_gather_norm(r, ...) tp_gather_norm(tp_from(r, __func__), __VA_ARGS__)
#define tp_gather_kept(r, ...) tp_gather_kept(tp_from(r, __func__), __VA_ARGS__)
#define tp_regather_begin(r, ...) tp_regather_begin(tp_from(r, __func__), __VA_ARGS__)
#endif
