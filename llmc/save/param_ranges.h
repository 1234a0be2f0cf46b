/*
param_ranges.h - initialises, loads and saves the state in a list of ranges (model/param_range.h), for every program and
every way to cut the model. A rank initialises, reads and writes only its own elements, so nothing is gathered, and a
checkpoint does not depend on the ranks that wrote it (ranks_checkpoint.h: how they save together).
*/
#ifndef LLMC_PARAM_RANGES_H
#define LLMC_PARAM_RANGES_H
#include "../device/device.h"
#include "../model/param_range.h"
#include "checkpoint.h"

// State passes through a host buffer of at most this many elements.
#define STAGED ((size_t)1 << 20)

// ---- a range's elements in its unit ----

// Splits elements [begin, end) of the range's part into runs that are contiguous in the unit, and calls visit for each:
// n elements, which start at `at` in the unit and at begin + k in the part. is_replicated: another rank also stores
// these elements (part 0, if a tensor is not cut), and counts them.
typedef void RunVisit(void* self, size_t at, size_t k, size_t n, bool is_replicated);
static inline void param_range_runs(GPT2Config c, const ParamRange* p, size_t begin, size_t end, RunVisit* visit,
                                    void* self) {
    if (p->parts == 1) { visit(self, begin, 0, end - begin, p->is_replicated); return; }
    size_t first = 0; // the run's first element, in the part
    for (int i = 0; i < unit_tensors(p->unit); i++) {
        TensorRuns t = tensor_part(c, p->unit, i, p->part, p->parts);
        bool is_replicated = p->is_replicated || (p->part > 0 && unit_tensor(c, p->unit, i).cut == CUT_NONE);
        for (size_t r = 0; r < t.count; r++, first += t.n) {
            size_t low = size_max(begin, first), high = size_min(end, first + t.n);
            if (low < high) visit(self, t.begin + r * t.stride + (low - first), low - begin, high - low, is_replicated);
        }
    }
}

// Where runs come from or go to: initial weights, a checkpoint to read, or a checkpoint to write.
typedef struct {
    GPT2Config config;
    uint64_t seed;           // of random initial weights, if from is NULL
    CheckpointReader* from;  // NULL unless runs are read
    CheckpointWriter* to;    // NULL unless runs are written
    CheckpointPart what;
    int unit;
    const char* host;        // the elements of [begin, end), a view
} RangeRuns;
static inline void run_set(void* self, size_t at, size_t k, size_t n, bool is_replicated) {
    RangeRuns* r = (RangeRuns*)self;
    float* host = (float*)(void*)(r->host + k * sizeof(float));
    if (r->from == NULL) { unit_init_weights(r->config, r->seed, r->unit, at, at + n, host); return; }
    CheckpointSums before = r->from->sums;
    checkpoint_read_unit(r->from, r->what, r->unit, at, at + n, host);
    if (is_replicated) r->from->sums = before; // checksums count each element once, on another rank
}
static inline void run_write(void* self, size_t at, size_t k, size_t n, bool is_replicated) {
    RangeRuns* r = (RangeRuns*)self;
    if (is_replicated) return; // another rank writes it
    size_t size = dtype_size(checkpoint_part_dtype(&r->to->state, r->what));
    checkpoint_write_unit(r->to, r->what, r->unit, at, at + n, r->host + k * size);
}

// ---- copies between the host and a range's memory; they return when the host's memory may be used again ----
static inline void param_range_put(const ParamRange* p, void* there, const void* host, size_t bytes) {
    if (p->on_host) { memcpy(there, host, bytes); return; }
    host_to_device(there, host, bytes);
    device_synchronize();
}
// Returns the values on the host, a view: copied into `host` (bytes), or at `there` if they are on the host already.
static inline const void* param_range_get(bool on_host, void* host, const void* there, size_t bytes) {
    if (!on_host) device_to_host(host, there, bytes);
    return on_host ? there : host;
}

// Returns a range's fp32 values (n) of this part, a view: for the model, its master weights. NULL: there are none.
static inline float* param_range_fp32(const ParamRange* p, CheckpointPart what) {
    float* const values[CHECKPOINT_PARTS] = { p->master, p->master, p->m, p->v, p->momentum };
    return values[what];
}

// ---- setting and loading ----

// Sets the weights to random values by seed (from NULL), or to a checkpoint's model or master weights. CHECKPOINT_M and
// CHECKPOINT_V set AdamW's moments, CHECKPOINT_MOMENTUM Muon's. Padding is not touched: it is 0. Dies if the checkpoint
// cannot be read.
static inline void param_ranges_set_weights(const ParamRange* ranges, int num_ranges, GPT2Config c, uint64_t seed,
                                      CheckpointReader* from, CheckpointPart what) {
    float* host = new_array(float, STAGED);
    floatX* rounded = new_array(floatX, STAGED);
    if (from) from->into = FLOATX_DTYPE;
    for (const ParamRange* p = ranges; p < ranges + num_ranges; p++) {
        RangeRuns runs = { c, seed, from, NULL, what, p->unit, (char*)host };
        floatX* params = what <= CHECKPOINT_MASTER ? p->params : NULL;
        float* fp32 = param_range_fp32(p, what);
        if (params == NULL && fp32 == NULL) continue;
        for (size_t k = 0, n; k < p->n; k += n) {
            n = size_min(STAGED, p->n - k);
            param_range_runs(c, p, p->begin + k, p->begin + k + n, run_set, &runs);
            if (params) convert_dtype(rounded, FLOATX_DTYPE, host, DTYPE_F32, n);
            if (params) param_range_put(p, params + k, rounded, n * sizeof(floatX));
            if (fp32) param_range_put(p, fp32 + k, host, n * sizeof(float));
        }
    }
    free(host);
    free(rounded);
}

// Loads the state of a resumed run: weights, from their masters, and optimizer state. Dies if it cannot be read.
static inline void param_ranges_load(const ParamRange* ranges, int num_ranges, CheckpointReader* from) {
    for (int what = CHECKPOINT_MASTER; what < CHECKPOINT_PARTS; what++)
        param_ranges_set_weights(ranges, num_ranges, from->state.config, 0, from, (CheckpointPart)what);
}

// ---- saving ----

// Writes elements [k, k+n) of a range. host and rounded (n) are scratch.
static inline void param_range_write(const ParamRange* p, RangeRuns* runs, size_t k, size_t n, float* host,
                                     floatX* rounded) {
    const void* model = rounded;
    if (p->params) model = param_range_get(p->on_host, rounded, p->params + k, n * sizeof(floatX));
    else convert_dtype(rounded, FLOATX_DTYPE, param_range_get(p->on_host, host, p->master + k, n * sizeof(float)),
                       DTYPE_F32, n);
    runs->what = CHECKPOINT_MODEL;
    runs->host = (const char*)model;
    param_range_runs(runs->config, p, p->begin + k, p->begin + k + n, run_write, runs);
    for (int what = CHECKPOINT_MASTER; what < CHECKPOINT_PARTS; what++) {
        runs->what = (CheckpointPart)what;
        const float* fp32 = param_range_fp32(p, runs->what);
        if (fp32 == NULL || !checkpoint_has_part(&runs->to->state, runs->what)) continue;
        runs->host = (const char*)param_range_get(p->on_host, host, fp32 + k, n * sizeof(float));
        param_range_runs(runs->config, p, p->begin + k, p->begin + k + n, run_write, runs);
    }
}

static inline void param_ranges_write(const ParamRange* ranges, int num_ranges, CheckpointWriter* w) {
    float* host = new_array(float, STAGED);
    floatX* rounded = new_array(floatX, STAGED);
    for (const ParamRange* p = ranges; p < ranges + num_ranges; p++) {
        if (p->is_replicated) continue; // another rank writes it
        RangeRuns runs = { w->state.config, 0, NULL, w, CHECKPOINT_MODEL, p->unit, NULL };
        for (size_t k = 0, n; k < p->n; k += n) {
            n = size_min(STAGED, p->n - k);
            param_range_write(p, &runs, k, n, host, rounded);
        }
    }
    free(host);
    free(rounded);
}
#endif
