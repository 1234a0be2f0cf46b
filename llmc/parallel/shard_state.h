/*
shard_state.h - the state that a rank keeps in fully sharded training: its shards of the fp32 weights, of the gradients and
of AdamW's moments. They lie on the device, or on the host (--cpu-offload all). A stage need not know where: it gathers, reduces
and updates them here.

On the host a rank also keeps the weights rounded to floatX, as they are gathered (in 16 bits), and room into which the
gradients of later micro-batches arrive (with accumulation). AdamW then runs on the CPU, and its cores wait for the
gradients. With --cpu-offload optimizer the device has a copy of the rounded weights, and ranks gather from it.
Copied to the host in a step: each micro-batch's reduced gradients. From the host: for each gather this rank's shard; with a copy
on the device only the new weights, once.
*/
#ifndef LLMC_SHARD_STATE_H
#define LLMC_SHARD_STATE_H
#include "../comm/comm.h"
#include "../comm/sums.h"
#include "../device/layers.h"
#include "../model/param_range.h"
#include "layout.h"

typedef struct {
    bool on_host;          // these are: all but `copy`
    CommType grad_type;    // COMM_F32 or COMM_FLOATX
    size_t n;              // elements
    float *params, *m, *v; // (n) owned
    char* grads;           // (n) of grad_type, owned
    char* arrived;         // (n) of grad_type, owned; NULL: none
    floatX* rounded;       // (n) params as they are gathered, owned; NULL: they are rounded on the way
    floatX* copy;          // (n) the same on the device, owned; NULL: gathers read the host's
    float grad_scale;      // on the host: what AdamW multiplies gradients by
    Comm* world;           // a view; its context has the emulated link
} Shards;

// ---- memory ----
static inline void* shards_take(const Shards* s, size_t size, MemoryKind kind) {
    return s->on_host ? offload_alloc(s->n * size) : device_alloc(s->n * size, kind);
}
static inline void shards_give(const Shards* s, void* p) {
    if (s->on_host) offload_free(p);
    else device_free(p);
}

// accumulates: a step has several micro-batches.
static inline void shards_init(Shards* s, const Sharding* options, Comm* world, size_t n, bool accumulates) {
    CommType grad_type = reduce_type(options);
    bool on_host = options->offload != OFFLOAD_NONE;
    memset(s, 0, sizeof *s);
    s->on_host = on_host;
    s->grad_type = grad_type;
    s->n = n;
    s->world = world;
    comm_emulate_host_link(world, options->host_link);
    s->params = (float*)shards_take(s, sizeof(float), MEMORY_PARAMETERS);
    s->grads = (char*)shards_take(s, comm_type_size(grad_type), MEMORY_GRADIENTS);
    s->m = (float*)shards_take(s, sizeof(float), MEMORY_OPTIMIZER);
    s->v = (float*)shards_take(s, sizeof(float), MEMORY_OPTIMIZER);
    if (on_host && accumulates) s->arrived = (char*)shards_take(s, comm_type_size(grad_type), MEMORY_GRADIENTS);
    if (on_host && NEEDS_MASTER) s->rounded = (floatX*)shards_take(s, sizeof(floatX), MEMORY_PARAMETERS);
    if (options->offload == OFFLOAD_OPTIMIZER) s->copy = (floatX*)device_alloc(n * sizeof(floatX), MEMORY_PARAMETERS);
}
static inline void shards_free(Shards* s) {
    shards_give(s, s->params); shards_give(s, s->grads); shards_give(s, s->m); shards_give(s, s->v);
    shards_give(s, s->arrived); shards_give(s, s->rounded);
    device_free(s->copy);
    memset(s, 0, sizeof *s);
}
// Adds what shards_init will allocate to bytes by kind.
static inline void shards_predict(const Sharding* options, size_t n, bool accumulates, size_t bytes[MEMORY_KINDS]) {
    size_t grad = reduce_size(options);
    bool on_host = options->offload != OFFLOAD_NONE;
    bytes[on_host ? MEMORY_OFFLOADED : MEMORY_PARAMETERS] += sizeof(float) * n;
    bytes[on_host ? MEMORY_OFFLOADED : MEMORY_GRADIENTS] += grad * n;
    bytes[on_host ? MEMORY_OFFLOADED : MEMORY_OPTIMIZER] += 2 * sizeof(float) * n;
    if (on_host) bytes[MEMORY_OFFLOADED] += ((accumulates ? grad : 0) + (NEEDS_MASTER ? sizeof(floatX) : 0)) * n;
    if (options->offload == OFFLOAD_OPTIMIZER) bytes[MEMORY_PARAMETERS] += sizeof(floatX) * n;
}

// Says where a range lies whose first element is number `at` of the shards.
static inline void shards_place(const Shards* s, ParamRange* p, size_t at) {
    p->on_host = s->on_host;
    p->params = NEEDS_MASTER ? s->rounded ? s->rounded + at : NULL : (floatX*)(s->params + at);
    p->master = NEEDS_MASTER ? s->params + at : NULL;
    p->m = s->m + at;
    p->v = s->v + at;
}

// The host has changed elements [at, at+n) of the parameters: renews the device's copy, if there is one.
static inline void shards_renew(const Shards* s, size_t at, size_t n) {
    if (s->copy == NULL) return;
    host_to_device(s->copy + at, s->rounded ? (const void*)(s->rounded + at) : s->params + at, n * sizeof(floatX));
    comm_host_link_until(s->world, true, n * sizeof(floatX));
}

// ---- parameters and gradients on their way; n elements from `at` on are this rank's shard of a group ----

// Begins to gather: whole (S,n) becomes the parameters of all ranks' shards, in floatX.
static inline CommOp shards_gather(const Shards* s, Comm* c, floatX* whole, size_t at, size_t n) {
    floatX* own = whole + (size_t)c->rank * n;
    const void* shard = s->rounded ? (const void*)(s->rounded + at) : s->params + at;
    comm_trace_data(c, s->params + at, n * sizeof(float));
    if (s->copy) return (comm_all_gather)(c, whole, s->copy + at, n, COMM_FLOATX);
    if (s->on_host) return (comm_all_gather_from_host)(c, whole, shard, n, COMM_FLOATX);
    from_fp32(own, s->params + at, n);
    return (comm_all_gather)(c, whole, own, n, COMM_FLOATX);
}

// Returns where a reduction puts this rank's sum. first: of a step's first micro-batch, which overwrites the gradients; that of
// a later one is added to them.
static inline char* shards_sum(const Shards* s, const Comm* c, void* whole, size_t at, size_t n, bool first) {
    size_t size = comm_type_size(s->grad_type);
    if (first) return s->grads + at * size;
    return s->on_host ? s->arrived + at * size : (char*)whole + (size_t)c->rank * n * size;
}
// Begins to reduce whole (S,n) of grad_type to every rank's shard.
static inline CommOp shards_reduce(const Shards* s, Comm* c, void* whole, size_t at, size_t n, bool first) {
    char* sum = shards_sum(s, c, whole, at, n, first);
    comm_trace_data(c, s->params + at, n * sizeof(float)); // whose gradients they are
    return s->on_host ? (comm_reduce_scatter_to_host)(c, sum, whole, n, s->grad_type)
                      : (comm_reduce_scatter)(c, sum, whole, n, s->grad_type);
}
// After the wait for it: adds what a later micro-batch has brought.
static inline void shards_add(const Shards* s, const Comm* c, void* whole, size_t at, size_t n, bool first) {
    if (first) return;
    char *sum = shards_sum(s, c, whole, at, n, first), *grads = s->grads + at * comm_type_size(s->grad_type);
    if (s->on_host) {
        device_synchronize(); // the host is about to read it
        comm_add(grads, sum, n, s->grad_type);
    } else if (s->grad_type == COMM_F32) add_in_place_fp32((float*)grads, (const float*)sum, n);
    else add_in_place((floatX*)grads, (const floatX*)sum, n);
}

// Sums the gradients of the ranks of c, which hold the same shard. Begins at once on the device; on the host all of it is
// left to shards_replicated, which passes it through `there` (n), device memory that nothing else uses.
static inline CommOp shards_replicate(const Shards* s, Comm* c, size_t at, size_t n) {
    if (s->on_host) return NO_OP;
    comm_trace_data(c, s->params + at, n * sizeof(float));
    return (comm_all_reduce)(c, s->grads + at * comm_type_size(s->grad_type), n, s->grad_type);
}
static inline void shards_replicated(const Shards* s, Comm* c, CommOp* op, void* there, size_t at, size_t n) {
    size_t size = comm_type_size(s->grad_type);
    if (!s->on_host) { comm_finish(c, op); return; }
    device_synchronize(); // the gradients have arrived
    host_to_device(there, s->grads + at * size, n * size);
    sleep_until(comm_host_link_until(c, true, n * size));
    comm_trace_data(c, s->params + at, n * sizeof(float));
    comm_wait(c, (comm_all_reduce)(c, there, n, s->grad_type));
    device_to_host(s->grads + at * size, there, n * size);
    sleep_until(comm_host_link_until(c, false, n * size));
}
// For the timeline, the caller of these is who communicates.
#define shards_gather(s, c, ...) shards_gather(s, comm_from(c, __func__), __VA_ARGS__)
#define shards_reduce(s, c, ...) shards_reduce(s, comm_from(c, __func__), __VA_ARGS__)
#define shards_replicate(s, c, ...) shards_replicate(s, comm_from(c, __func__), __VA_ARGS__)
#define shards_replicated(s, c, ...) shards_replicated(s, comm_from(c, __func__), __VA_ARGS__)

// ---- the optimizer ----

// *acc, on the device, += a sum of squares that was computed on the host
static inline void shards_add_host_sum(double* acc, double squares) {
    double sum;
    device_to_host(&sum, acc, sizeof sum);
    sum += squares;
    host_to_device(acc, &sum, sizeof sum);
    device_synchronize(); // the copy reads sum
}
// Adds the squares of all gradients, or of all parameters, to *acc, which is on the device.
static inline void shards_add_grad_squares(const Shards* s, double* acc) {
    if (s->on_host) {
        device_synchronize(); // the gradients have arrived
        shards_add_host_sum(acc, host_sum_squares(s->grads, (DType)s->grad_type, s->n));
    } else if (s->grad_type == COMM_F32) add_sum_squares_fp32(acc, (const float*)s->grads, s->n);
    else add_sum_squares(acc, (const floatX*)s->grads, s->n);
}
static inline void shards_add_param_squares(const Shards* s, double* acc) {
    if (s->on_host) shards_add_host_sum(acc, host_sum_squares(s->params, DTYPE_F32, s->n));
    if (s->copy) sleep_until(comm_host_link_until(s->world, true, 0)); // layers come after these copies
    if (!s->on_host) add_sum_squares_fp32(acc, s->params, s->n);
}

// Call before the first shards_update of a step.
static inline void shards_begin_update(Shards* s, const StepStats* stats) {
    if (s->on_host) device_to_host(&s->grad_scale, &stats->grad_scale, sizeof s->grad_scale);
}
// AdamW on a range.
static inline void shards_update(const Shards* s, const ParamRange* p, AdamW adamw, const StepStats* stats) {
    size_t at = (size_t)(p->m - s->m);
    const void* grads = s->grads + at * comm_type_size(s->grad_type);
    float* weights = s->params + at;
    if (s->on_host) {
        host_adamw_update(adamw, s->rounded ? s->rounded + at : NULL, weights, p->m, p->v, grads, (DType)s->grad_type,
                          s->grad_scale, p->n, p->no_decay, NULL);
        shards_renew(s, at, p->n);
    } else if (s->grad_type == COMM_F32)
        adamw_update_fp32(adamw, weights, p->m, p->v, (const float*)grads, &stats->grad_scale, p->n, p->no_decay);
    else adamw_update(adamw, NULL, weights, p->m, p->v, (const floatX*)grads, &stats->grad_scale, p->n, p->no_decay, NULL);
}
#endif
