/*
param_range.h - what a rank holds of the model, and where it lies: a list of ranges.

Every stage can say this in a few lines, however it cuts the model. The optimizer walks the list, and save/param_ranges.h sets,
loads and saves what it names.
*/
#ifndef LLMC_PARAM_RANGE_H
#define LLMC_PARAM_RANGE_H
#include "../base/precision.h"
#include "gpt2.h"

typedef struct {
    int unit, part, parts;   // of part `part` of `parts` of a unit, as tensor_part of gpt2.h cuts it (1: the whole unit),
    size_t begin, n;         // elements [begin, begin+n)
    size_t no_decay;         // the first of which are never decayed
    bool on_host;            // they are in host memory (parallel/shard_state.h)
    bool is_replicated;      // another rank has them, too; only there they count and are saved
    floatX *params, *grads;  // (n) views. params NULL: they are made from master whenever they are needed
    float *master, *m, *v;   // (n) views. master NULL: params are fp32 and their own master
} ParamRange;

// Returns the elements [begin, begin+n) of unit u, in device memory. The caller sets where they lie.
static inline ParamRange param_range(GPT2Config c, int u, size_t begin, size_t n) {
    size_t no_decay = unit_no_decay(c, u);
    ParamRange p;
    memset(&p, 0, sizeof p);
    p.unit = u;
    p.parts = 1;
    p.begin = begin;
    p.n = n;
    p.no_decay = no_decay - size_min(no_decay, begin);
    return p;
}

// Of all that a range has, elements [begin, begin+n), as far as there are any.
static inline ParamRange param_range_within(ParamRange p, size_t begin, size_t n) {
    p.begin += begin;
    p.n = size_min(n, p.n - begin);
    p.no_decay -= size_min(p.no_decay, begin);
    return p;
}

// All that part `part` of `parts` has of unit u, likewise.
static inline ParamRange param_range_part(GPT2Config c, int u, int part, int parts) {
    ParamRange p = param_range(c, u, 0, unit_part_elements(c, u, parts));
    p.part = part;
    p.parts = parts;
    p.no_decay = 0;
    for (int i = 0; i < unit_tensors(u); i++) {
        TensorInfo t = unit_tensor(c, u, i);
        if (t.cols == 0) p.no_decay += tensor_part_elements(t, parts);
    }
    return p;
}
#endif
