/*
tp_rows.h - the rows (B,T,C) of a micro-batch among t ranks of tensor parallelism, and the communication between layers
that are replicated or cut by rows and layers that are cut by columns.

A column-parallel layer reads all rows (tp_enter, the paper's f). A row-parallel layer computes on each rank one term of
a sum (tp_leave, the paper's g; Shoeybi et al., arXiv 1909.08053, section 3):

                        every rank has all rows          --sequence-parallel: each has 1/t of them (arXiv 2205.05198)
    tp_enter            nothing                          all-gather
    tp_leave            all-reduce                       reduce-scatter
    tp_leave_backward   nothing                          all-gather
    tp_enter_backward   all-reduce                       reduce-scatter

Both columns send the same number of bytes, because an all-reduce is a reduce-scatter and an all-gather. With
--sequence-parallel a rank keeps only its own rows of a layernorm's output, and gathers all rows again in the backward
pass. A function that ends in _begin starts an operation, which overlaps with computation until _end waits for it.
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

// ---- activations, n elements per row. Those that are communicated are allocated by comm_alloc ----
// For all rows, which are summed over the t ranks.
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
// Call at the beginning of a micro-batch of `rows` rows. Returns this rank's rows of `out`, where tp_leave puts a sum.
static inline floatX* tp_begin(TpRows* r, int rows) {
    r->count = (int)tp_count(r, (size_t)rows);
    r->first = r->options.sequence_parallel ? r->tp->rank * r->count : 0;
    return tp_own_rows(r, r->out);
}

// Only rank 0 adds the bias, because outputs are summed over the t ranks.
static inline floatX* tp_bias(const TpRows* r, floatX* bias) { return r->tp->rank == 0 ? bias : NULL; }

// ---- communication around layers; own: this rank's rows ----

static inline floatX* tp_gather(const TpRows* r, floatX* all, floatX* own) {
    if (!r->options.sequence_parallel) return own;
    comm_wait(r->tp, (comm_all_gather)(r->tp, all, own, tp_elements(r), COMM_FLOATX));
    return all;
}
// Returns all rows, the input of a column-parallel layer.
static inline floatX* tp_enter(const TpRows* r, floatX* own) { return tp_gather(r, r->in, own); }
// Sets `own` to this rank's rows of the sum of x (B,T,C) over the ranks; own may lie in x. If every rank has all rows,
// own is x.
static inline void tp_leave(const TpRows* r, floatX* own, floatX* x) {
    comm_wait(r->tp, r->options.sequence_parallel ? (comm_reduce_scatter)(r->tp, own, x, tp_elements(r), COMM_FLOATX)
                                                  : (comm_all_reduce)(r->tp, x, tp_elements(r), COMM_FLOATX));
}
// Returns all rows of the gradient of such a sum, which is also the gradient of each term.
static inline floatX* tp_leave_backward(const TpRows* r, floatX* own) { return tp_gather(r, r->out, own); }

// In the backward pass of a block, communication overlaps with computation, unless --no-overlap is given.
static inline CommOp tp_beside(const TpRows* r, CommOp op) {
    if (!r->options.overlap) comm_finish(r->tp, &op);
    return op;
}
// Begins to sum the ranks' gradients x (B,T,C) of a column-parallel layer's input, in place. Other layers may run until
// tp_enter_backward_end, which returns this rank's rows of the sum.
static inline void tp_enter_backward_begin(TpRows* r, floatX* x) {
    r->sum = tp_beside(r, r->options.sequence_parallel
                          ? (comm_reduce_scatter)(r->tp, tp_own_rows(r, x), x, tp_elements(r), COMM_FLOATX)
                          : (comm_all_reduce)(r->tp, x, tp_elements(r), COMM_FLOATX));
    layers_beside_sum(r->sum != NO_OP && comm_has_kernels(r->tp));
}
static inline floatX* tp_enter_backward_end(TpRows* r, floatX* x) {
    layers_beside_sum(false);
    comm_finish(r->tp, &r->sum);
    return tp_own_rows(r, x);
}
// tp_enter in two halves, for the gradients of the layer's weights, which need its input again.
static inline void tp_enter_begin(TpRows* r, floatX* own) {
    if (r->options.sequence_parallel)
        r->gather = tp_beside(r, (comm_all_gather)(r->tp, r->in, own, tp_elements(r), COMM_FLOATX));
}
static inline floatX* tp_enter_end(TpRows* r, floatX* own) {
    comm_finish(r->tp, &r->gather);
    return r->options.sequence_parallel ? r->in : own;
}

// Sums the gradients of the first n parameters of each unit that this rank has over the ranks, in few all-reduces.
// Copies those of `room` units at a time into scratch (room,n).
static inline void tp_reduce_units(const TpRows* r, floatX* grads, const Unit* units, int num_units, size_t n,
                                   floatX* scratch, int room) {
    floatX* parts[MAX_UNITS];
    int count = 0;
    if (r->tp->size == 1) return; // room may then be 0
    for (int u = 0; u < num_units; u++) if (units[u].size > 0) parts[count++] = grads + units[u].offset;
    for (int first = 0; first < count; first += room) {
        int now = count - first < room ? count - first : room;
        for (int i = 0; i < now; i++) device_copy(scratch + (size_t)i * n, parts[first + i], n * sizeof(floatX));
        comm_wait(r->tp, (comm_all_reduce)(r->tp, scratch, (size_t)now * n, COMM_FLOATX));
        for (int i = 0; i < now; i++) device_copy(parts[first + i], scratch + (size_t)i * n, n * sizeof(floatX));
    }
}

// For the timeline, the caller of these is who communicates.
static inline TpRows* tp_from(TpRows* r, const char* caller) {
    comm_from(r->tp, caller);
    return r;
}
#define tp_gather(r, ...) tp_gather(tp_from(r, __func__), __VA_ARGS__)
#define tp_enter(r, ...) tp_enter(tp_from(r, __func__), __VA_ARGS__)
#define tp_leave(r, ...) tp_leave(tp_from(r, __func__), __VA_ARGS__)
#define tp_leave_backward(r, ...) tp_leave_backward(tp_from(r, __func__), __VA_ARGS__)
#define tp_enter_backward_begin(r, ...) tp_enter_backward_begin(tp_from(r, __func__), __VA_ARGS__)
#define tp_enter_begin(r, ...) tp_enter_begin(tp_from(r, __func__), __VA_ARGS__)
#define tp_reduce_units(r, ...) tp_reduce_units(tp_from(r, __func__), __VA_ARGS__)
#endif
