/*
param_range.h - the part of the model that a rank holds, and its memory, as a list of ranges.

Every program describes its part in a few lines, however it cuts the model. The optimizer iterates over the list, and
save/param_ranges.h initialises, loads and saves its ranges.
*/
#ifndef LLMC_PARAM_RANGE_H
#define LLMC_PARAM_RANGE_H
#include "../base/precision.h"
#include "gpt2.h"

typedef struct {
    int unit, part, parts;   // part `part` of `parts` of a unit, as tensor_part in gpt2.h cuts it (1: the whole unit)
    size_t begin, n;         // elements [begin, begin+n) of that part
    size_t no_decay;         // the first no_decay of them have no weight decay
    bool on_host;            // in host memory (parallel/shard_state.h)
    bool is_replicated;      // copies of another rank's elements, which count and are saved on that rank
    floatX *params, *grads;  // (n) views. params NULL: rounded from master when needed
    float *master, *m, *v;   // (n) views. master NULL: params are fp32 and their own master
    float* momentum;         // (n) of Muon, a view, instead of m and v; NULL: AdamW updates the range
} ParamRange;

// Returns the range of elements [begin, begin+n) of unit u, in device memory. The caller sets the pointers.
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

// Returns elements [begin, begin+n) of a range; fewer if it ends before them.
static inline ParamRange param_range_within(ParamRange p, size_t begin, size_t n) {
    p.begin += begin;
    p.n = size_min(n, p.n - begin);
    p.no_decay -= size_min(p.no_decay, begin);
    return p;
}

// Returns the range of part `part` of `parts` of unit u. The caller sets the pointers.
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
