/*
shard_state.h - where a rank of fully sharded training keeps its shards of the fp32 weights, of the gradients and of
AdamW's moments: on the device, or on the host (--cpu-offload). The program allocates them with shards_alloc, and the
functions of this file read, add up and update them in either place.

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
    size_t n;              // elements
    float* params;         // (n) fp32 weights, a view
    char* grads;           // (n) of grad_type, a view
    CommType grad_type;    // COMM_F32 or COMM_FLOATX
    bool on_host;          // where these two and the moments are
    Comm* world;           // a view; its context contains the emulated link
    // only with offload:
    char* arrived;         // (n) of grad_type on the host, owned; NULL: none
    floatX* rounded;       // (n) params rounded for gathers, on the host, owned; NULL: each gather rounds them
    floatX* copy;          // (n) rounded params on the device, owned; NULL: gathers read the host
    float grad_scale;      // on the host: the factor by which AdamW scales gradients
} Shards;

// ---- memory ----
static inline void* shards_alloc(const Sharding* options, size_t bytes, MemoryKind kind) {
    return options->offload ? offload_alloc(bytes) : device_alloc(bytes, kind);
}
// p: from shards_alloc
static inline void shards_free(const Shards* s, void* p) {
    if (s->on_host) offload_free(p);
    else device_free(p);
}

// Sets the views of n elements, and allocates what offload adds. accumulates: a step has several micro-batches.
static inline void shards_init(Shards* s, const Sharding* options, Comm* world, float* params, void* grads, size_t n,
                               bool accumulates) {
    memset(s, 0, sizeof *s);
    s->n = n;
    s->params = params;
    s->grads = (char*)grads;
    s->grad_type = reduce_type(options);
    s->on_host = options->offload != OFFLOAD_NONE;
    s->world = world;
    comm_emulate_host_link(world, options->host_link);
    if (s->on_host && accumulates) s->arrived = (char*)offload_alloc(n * reduce_size(options));
    if (s->on_host && NEEDS_MASTER) s->rounded = (floatX*)offload_alloc(n * sizeof(floatX));
    if (options->offload == OFFLOAD_OPTIMIZER) s->copy = (floatX*)device_alloc(n * sizeof(floatX), MEMORY_PARAMETERS);
}
// Frees what shards_init has allocated.
static inline void shards_free_offload(Shards* s) {
    offload_free(s->arrived); offload_free(s->rounded);
    device_free(s->copy);
    memset(s, 0, sizeof *s);
}
// With offload: counts the state as host memory, and adds the bytes that shards_init will allocate.
static inline void shards_predict_offload(const Sharding* options, size_t n, bool accumulates,
                                          size_t bytes[MEMORY_KINDS]) {
    if (!options->offload) return;
    bytes[MEMORY_OFFLOADED] += bytes[MEMORY_PARAMETERS] + bytes[MEMORY_GRADIENTS] + bytes[MEMORY_OPTIMIZER];
    bytes[MEMORY_PARAMETERS] = bytes[MEMORY_GRADIENTS] = bytes[MEMORY_OPTIMIZER] = 0;
    bytes[MEMORY_OFFLOADED] += ((accumulates ? reduce_size(options) : 0) + (NEEDS_MASTER ? sizeof(floatX) : 0)) * n;
    if (options->offload == OFFLOAD_OPTIMIZER) bytes[MEMORY_PARAMETERS] += sizeof(floatX) * n;
}

// Sets the weights of a range whose first element is number `at` of the shards.
static inline void shards_place_weights(const Shards* s, ParamRange* p, size_t at) {
    p->on_host = s->on_host;
    p->params = NEEDS_MASTER ? s->rounded ? s->rounded + at : NULL : (floatX*)(s->params + at);
    p->master = NEEDS_MASTER ? s->params + at : NULL;
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

// With offload: returns the output of a reduce-scatter in a later micro-batch of a step, on the host, from where
// shards_add_grads adds it to the gradients.
static inline void* offloaded_later_sum(const Shards* s, Shard shard) {
    return s->arrived + shard.offset * comm_type_size(s->grad_type);
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

// With offload: copies a shard of the gradients to the device, and returns the copy, which is `there` (shard).
static inline void* offloaded_grads_to_device(const Shards* s, const void* grads, void* there, Shard shard) {
    size_t bytes = shard.n * comm_type_size(s->grad_type);
    device_synchronize(); // the gradients have arrived
    host_to_device(there, grads, bytes);
    sleep_until(comm_host_link_until(s->world, true, bytes));
    return there;
}
// With offload: waits for op, which sums that copy over c, and takes the sum back to the host.
static inline void offloaded_grads_wait(const Shards* s, const void* there, Shard shard, Comm* c, CommOp* op) {
    size_t bytes = shard.n * comm_type_size(s->grad_type);
    comm_finish(c, op);
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
// Runs AdamW on n of the fp32 weights and on their moments, which have n elements, too. grads (n) are of s->grad_type.
static inline void shards_adamw_update(const Shards* s, AdamW adamw, float* weights, float* m, float* v,
                                       const void* grads, const float* grad_scale, size_t n, size_t no_decay) {
    if (s->on_host) {
        size_t at = (size_t)(weights - s->params);
        host_adamw_update(adamw, s->rounded ? s->rounded + at : NULL, weights, m, v, grads, (DType)s->grad_type,
                          s->grad_scale, n, no_decay, NULL);
        shards_renew(s, at, n);
    } else if (s->grad_type == COMM_F32) {
        adamw_update_fp32(adamw, weights, m, v, (const float*)grads, grad_scale, n, no_decay);
    } else adamw_update(adamw, NULL, weights, m, v, (const floatX*)grads, grad_scale, n, no_decay, NULL);
}
#endif
