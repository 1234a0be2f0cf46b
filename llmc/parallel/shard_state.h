/*
shard_state.h - the state that a rank keeps in fully sharded training: its shards of the fp32 weights, of the gradients
and of AdamW's moments. They lie on the device, or on the host (--cpu-offload all). The functions of this file gather,
reduce and update them in either place.

On the host, a rank also keeps the weights rounded to floatX for gathers (in 16 bits), and a buffer for the gradients of
later micro-batches (with accumulation). AdamW then runs on the CPU and waits for the gradients. With --cpu-offload
optimizer, the device has a copy of the rounded weights, and ranks gather from it.
Each micro-batch copies reduced gradients to the host. Each gather copies this rank's shard from the host; if the device
has a copy of the weights, only the new weights are copied, once per step.
*/
#ifndef LLMC_SHARD_STATE_H
#define LLMC_SHARD_STATE_H
#include "../comm/comm.h"
#include "../comm/sums.h"
#include "../device/layers.h"
#include "../model/param_range.h"
#include "layout.h"

typedef struct {
    bool on_host;          // the memory below is, except `copy`
    CommType grad_type;    // COMM_F32 or COMM_FLOATX
    size_t n;              // elements
    float *params, *m, *v; // (n) owned
    char* grads;           // (n) of grad_type, owned
    char* arrived;         // (n) of grad_type, owned; NULL: none
    floatX* rounded;       // (n) params rounded for gathers, owned; NULL: each gather rounds them
    floatX* copy;          // (n) rounded params on the device, owned; NULL: gathers read the host
    float grad_scale;      // on the host: the factor by which AdamW scales gradients
    Comm* world;           // a view; its context contains the emulated link
} Shards;

// ---- memory ----
static inline void* shards_take(const Shards* s, size_t size, MemoryKind kind) {
    return s->on_host ? offload_alloc(s->n * size) : device_alloc(s->n * size, kind);
}
static inline void shards_give(const Shards* s, void* p) {
    if (s->on_host) offload_free(p);
    else device_free(p);
}

// accumulates: true if a step has several micro-batches.
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

// Sets the pointers of a range whose first element is number `at` of the shards.
static inline void shards_place(const Shards* s, ParamRange* p, size_t at) {
    p->on_host = s->on_host;
    p->params = NEEDS_MASTER ? s->rounded ? s->rounded + at : NULL : (floatX*)(s->params + at);
    p->master = NEEDS_MASTER ? s->params + at : NULL;
    p->grads = (floatX*)(s->grads + at * comm_type_size(s->grad_type)); // which may be fp32
    p->m = s->m + at;
    p->v = s->v + at;
}
// Returns the fp32 weights of a range.
static inline float* range_weights(ParamRange p) { return p.master ? p.master : (float*)p.params; }

// Call after the host has changed elements [at, at+n) of the parameters: updates the device's copy, if there is one.
static inline void shards_renew(const Shards* s, size_t at, size_t n) {
    if (s->copy == NULL) return;
    host_to_device(s->copy + at, s->rounded ? (const void*)(s->rounded + at) : s->params + at, n * sizeof(floatX));
    comm_host_link_until(s->world, true, n * sizeof(floatX));
}

// ---- parameters and gradients for the collectives of a program ----

// Returns this rank's shard of a group's parameters, in floatX, to be sent. If only fp32 weights are kept, rounds them
// into own (shard), and returns that.
static inline const floatX* shards_rounded(const Shards* s, floatX* own, Shard shard) {
    const float* weights = s->params + shard.offset;
    comm_trace_data(s->world, weights, shard.n * sizeof(float));
    if (s->copy) return s->copy + shard.offset;
    if (s->rounded) return s->rounded + shard.offset;
    if (!NEEDS_MASTER) return (const floatX*)weights;
    from_fp32(own, weights, shard.n);
    return own;
}

static inline char* shards_grads_at(const Shards* s, Shard shard) {
    return s->grads + shard.offset * comm_type_size(s->grad_type);
}
// Returns this rank's shard of a group's gradients, for sending.
static inline void* shards_grads(const Shards* s, Shard shard) {
    comm_trace_data(s->world, s->params + shard.offset, shard.n * sizeof(float)); // the weights of these gradients
    return shards_grads_at(s, shard);
}

// Returns the output of a reduce-scatter of whole (S,shard) in a later micro-batch of a step, from where
// shards_add_grads adds it to the gradients: this rank's part of `whole`, or a buffer on the host.
static inline void* shards_later_sum(const Shards* s, Comm* c, void* whole, Shard shard) {
    size_t size = comm_type_size(s->grad_type);
    shards_grads(s, shard); // for the trace
    return s->on_host ? s->arrived + shard.offset * size : (char*)whole + (size_t)c->rank * shard.n * size;
}
// This rank's shard of a group's gradients += sum.
static inline void shards_add_grads(const Shards* s, const void* sum, Shard shard) {
    char* grads = shards_grads_at(s, shard);
    if (s->on_host) {
        device_synchronize(); // the host is about to read it
        comm_add(grads, sum, shard.n, s->grad_type);
    } else if (s->grad_type == COMM_F32) add_in_place_fp32((float*)grads, (const float*)sum, shard.n);
    else add_in_place((floatX*)grads, (const floatX*)sum, shard.n);
}

// Returns a shard of the gradients on the device: itself, or if it is on the host, its copy in `there` (shard).
static inline void* shards_grads_to_device(const Shards* s, void* there, Shard shard) {
    size_t bytes = shard.n * comm_type_size(s->grad_type);
    void* grads = shards_grads(s, shard);
    if (!s->on_host) return grads;
    device_synchronize(); // the gradients have arrived
    host_to_device(there, grads, bytes);
    sleep_until(comm_host_link_until(s->world, true, bytes));
    return there;
}
// Copies a shard of the gradients from the device back to the host.
static inline void shards_grads_to_host(const Shards* s, const void* there, Shard shard) {
    size_t bytes = shard.n * comm_type_size(s->grad_type);
    device_to_host(shards_grads_at(s, shard), there, bytes);
    sleep_until(comm_host_link_until(s->world, false, bytes));
}

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

// Call before the updates of a step.
static inline void shards_begin_update(Shards* s, const StepStats* stats) {
    if (s->on_host) device_to_host(&s->grad_scale, &stats->grad_scale, sizeof s->grad_scale);
}
// Runs AdamW on a range that is on the host.
static inline void shards_update_on_host(const Shards* s, ParamRange p, AdamW adamw) {
    size_t at = (size_t)(p.m - s->m);
    host_adamw_update(adamw, s->rounded ? s->rounded + at : NULL, range_weights(p), p.m, p.v, p.grads,
                      (DType)s->grad_type, s->grad_scale, p.n, p.no_decay, NULL);
    shards_renew(s, at, p.n);
}
// Runs AdamW on fp32 weights (n) on the device. grads (n) are of type t.
static inline void adamw_update_typed(AdamW a, float* weights, float* m, float* v, const void* grads, CommType t,
                                      const float* grad_scale, size_t n, size_t no_decay) {
    if (t == COMM_F32) adamw_update_fp32(a, weights, m, v, (const float*)grads, grad_scale, n, no_decay);
    else adamw_update(a, NULL, weights, m, v, (const floatX*)grads, grad_scale, n, no_decay, NULL);
}
#endif
