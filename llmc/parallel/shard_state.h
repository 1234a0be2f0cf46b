/*
shard_state.h - a rank's state in fully sharded training: its shard of every group's fp32 weights, of the gradients and
of AdamW's moments. They are on the device, or on the host (--cpu-offload). The functions of this file read, add up and
update them in either place, and prepare the memory for the collectives, which the program itself issues.

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
    const Layout* layout;  // a view, as is the next
    const Sharding* options;
    size_t n;              // elements: one shard of every group
    float* params;         // (n) fp32 weights, owned, as are the next three
    char* grads;           // (n) of grad_type
    float *m, *v;          // (n) AdamW moments
    CommType grad_type;    // COMM_F32 or COMM_FLOATX: --reduce-dtype
    bool on_host;          // where these four are
    Comm* world;           // a view; its context contains the emulated link
    // only with offload:
    char* arrived;         // (n) of grad_type on the host, owned; NULL: none
    floatX* rounded;       // (n) params rounded for gathers, on the host, owned; NULL: each gather rounds them
    floatX* copy;          // (n) rounded params on the device, owned; NULL: gathers read the host
} Shards;

// ---- memory ----
static inline void* shards_alloc(const Shards* s, size_t element_bytes, MemoryKind kind) {
    return s->on_host ? offload_alloc(s->n * element_bytes) : device_alloc(s->n * element_bytes, kind);
}
// Allocates the state of this rank's shards.
static inline void shards_init(Shards* s, const Sharding* options, const Layout* y, Comm* world) {
    memset(s, 0, sizeof *s);
    s->layout = y;
    s->options = options;
    s->n = y->own_elements;
    s->grad_type = reduce_type(options);
    s->on_host = options->offload != OFFLOAD_NONE;
    s->world = world;
    s->params = (float*)shards_alloc(s, sizeof(float), MEMORY_PARAMETERS);
    s->grads = (char*)shards_alloc(s, reduce_size(options), MEMORY_GRADIENTS);
    s->m = (float*)shards_alloc(s, sizeof(float), MEMORY_OPTIMIZER);
    s->v = (float*)shards_alloc(s, sizeof(float), MEMORY_OPTIMIZER);
    device_emulate_link(options->host_link);
    if (s->on_host && options->accumulates) s->arrived = (char*)offload_alloc(s->n * reduce_size(options));
    if (s->on_host && NEEDS_MASTER) s->rounded = (floatX*)offload_alloc(s->n * sizeof(floatX));
    if (options->offload == OFFLOAD_OPTIMIZER)
        s->copy = (floatX*)device_alloc(s->n * sizeof(floatX), MEMORY_PARAMETERS);
}
static inline void shards_free(Shards* s) {
    void* const state[] = { s->params, s->grads, s->m, s->v };
    for (int i = 0; i < 4; i++) {
        if (s->on_host) offload_free(state[i]);
        else device_free(state[i]);
    }
    offload_free(s->arrived); offload_free(s->rounded);
    device_free(s->copy);
    memset(s, 0, sizeof *s);
}
// With offload: counts the state as host memory, and adds the bytes that shards_init will allocate.
static inline void shards_predict_offload(const Sharding* options, size_t n, size_t bytes[MEMORY_KINDS]) {
    bool accumulates = options->accumulates;
    if (!options->offload) return;
    bytes[MEMORY_OFFLOADED] += bytes[MEMORY_PARAMETERS] + bytes[MEMORY_GRADIENTS] + bytes[MEMORY_OPTIMIZER];
    bytes[MEMORY_PARAMETERS] = bytes[MEMORY_GRADIENTS] = bytes[MEMORY_OPTIMIZER] = 0;
    bytes[MEMORY_OFFLOADED] += ((accumulates ? reduce_size(options) : 0) + (NEEDS_MASTER ? sizeof(floatX) : 0)) * n;
    if (options->offload == OFFLOAD_OPTIMIZER) bytes[MEMORY_PARAMETERS] += sizeof(floatX) * n;
}

// Sets the range of unit u in this rank's shard, with its memory. Returns false if other ranks have all of the unit.
static inline bool shards_range(const Shards* s, GPT2Config c, int u, ParamRange* p) {
    size_t at;
    if (!layout_range(s->layout, c, u, p, &at)) return false;
    p->on_host = s->on_host;
    p->params = NEEDS_MASTER ? s->rounded ? s->rounded + at : NULL : (floatX*)(s->params + at);
    p->master = NEEDS_MASTER ? s->params + at : NULL;
    p->grads = (floatX*)(s->grads + at * comm_type_size(s->grad_type)); // of grad_type: only for shards_adamw_update
    p->m = s->m + at;
    p->v = s->v + at;
    return true;
}

// Call after the host has changed elements [at, at+n) of the parameters: updates the device's copy, if there is one.
static inline void shards_renew(const Shards* s, size_t at, size_t n) {
    if (s->copy == NULL) return;
    host_to_device(s->copy + at, s->rounded ? (const void*)(s->rounded + at) : s->params + at, n * sizeof(floatX));
    device_link_until(true, n * sizeof(floatX));
}
// Call after all parameters have been loaded.
static inline void shards_loaded(const Shards* s) { shards_renew(s, 0, s->n); }

// ---- parameters and gradients for the collectives of a program ----

// Returns this rank's shard of a group's parameters, in floatX, to be gathered into `whole` (S,shard). If only fp32
// weights are kept, rounds them into their place there, and returns that.
static inline const floatX* shards_rounded(const Shards* s, floatX* whole, Shard shard) {
    const float* weights = s->params + shard.offset;
    comm_trace_data(s->world, weights, shard.n * sizeof(float));
    if (s->copy) return s->copy + shard.offset;
    if (s->rounded) return s->rounded + shard.offset;
    if (!NEEDS_MASTER) return (const floatX*)weights;
    floatX* own = whole + (size_t)s->layout->shard_number * shard.n;
    from_fp32(own, weights, shard.n);
    return own;
}

// Returns a bucket's gradients (S,shard) in grad_type. If that is wider than floatX, copies them into the memory behind
// grads, which bucket_element_bytes counts.
static inline void* grads_as_sent(const Shards* s, floatX* grads, Shard shard) {
    comm_trace_data(s->world, s->params + shard.offset, shard.n * sizeof(float)); // the weights of these gradients
    if (!reduces_wider(s->options)) return grads;
    size_t whole = (size_t)s->options->shards * shard.n;
    to_fp32((float*)(grads + whole), grads, whole);
    return grads + whole;
}

// Returns this rank's shard of a group's gradients, of grad_type.
static inline char* shards_grads(const Shards* s, Shard shard) {
    return s->grads + shard.offset * comm_type_size(s->grad_type);
}
// Returns this rank's part (shard) of the gradients `sent` (S,shard): a sum that shards_add_grads will add to earlier
// ones may take its place. With offload such a sum goes to the host, and this returns a buffer there.
static inline void* shards_own_part(const Shards* s, void* sent, Shard shard) {
    size_t size = comm_type_size(s->grad_type);
    if (s->arrived) return s->arrived + shard.offset * size;
    return (char*)sent + (size_t)s->layout->shard_number * shard.n * size;
}
// This rank's shard of a group's gradients += sum.
static inline void shards_add_grads(const Shards* s, const void* sum, Shard shard) {
    char* grads = shards_grads(s, shard);
    if (s->on_host) {
        device_synchronize(); // the host is about to read it
        comm_add(grads, sum, shard.n, s->grad_type);
    } else if (s->grad_type == COMM_F32) add_in_place_fp32((float*)grads, (const float*)sum, shard.n);
    else add_in_place((floatX*)grads, (const floatX*)sum, shard.n);
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
// Both add the squares of this rank's gradients, or parameters, to *acc, which is on the device.
static inline void shards_add_grad_squares(const Shards* s, double* acc) {
    if (s->on_host) {
        device_synchronize(); // the gradients have arrived
        shards_add_host_sum(acc, host_sum_squares(s->grads, (DType)s->grad_type, s->n));
    } else if (s->grad_type == COMM_F32) add_sum_squares_fp32(acc, (const float*)s->grads, s->n);
    else add_sum_squares(acc, (const floatX*)s->grads, s->n);
}
static inline void shards_add_param_squares(const Shards* s, double* acc) {
    if (s->on_host) shards_add_host_sum(acc, host_sum_squares(s->params, DTYPE_F32, s->n));
    if (s->copy) sleep_until(device_link_until(true, 0)); // layers come after these copies
    if (!s->on_host) add_sum_squares_fp32(acc, s->params, s->n);
}

// Runs AdamW on a range.
static inline void shards_adamw_update(const Shards* s, AdamW adamw, ParamRange p, const StepStats* stats) {
    float* weights = p.master ? p.master : (float*)p.params;
    if (s->on_host) {
        size_t at = (size_t)(weights - s->params);
        float grad_scale;
        device_to_host(&grad_scale, &stats->grad_scale, sizeof grad_scale);
        host_adamw_update(adamw, s->rounded ? s->rounded + at : NULL, weights, p.m, p.v, p.grads, (DType)s->grad_type,
                          grad_scale, p.n, p.no_decay, NULL);
        shards_renew(s, at, p.n);
    } else if (s->grad_type == COMM_F32) {
        adamw_update_fp32(adamw, weights, p.m, p.v, (const float*)p.grads, &stats->grad_scale, p.n, p.no_decay);
    } else adamw_update(adamw, NULL, weights, p.m, p.v, p.grads, &stats->grad_scale, p.n, p.no_decay, NULL);
}
#endif
