/*
param_ranges.h - sets, loads and saves the state that a list of ranges names (model/param_range.h), whatever stage and cut it comes
from. A rank makes, reads and writes only what it has, so nothing is gathered, and a checkpoint knows nothing of the ranks
that wrote it.
*/
#ifndef LLMC_PARAM_RANGES_H
#define LLMC_PARAM_RANGES_H
#include "../comm/comm.h"
#include "../device/device.h"
#include "../model/param_range.h"
#include "checkpoint.h"

// State passes through a host buffer of this many elements at most.
#define STAGED ((size_t)1 << 20)

// ---- a range's elements in its unit ----

// Calls visit for each run of elements that follow one another in the unit: n from `at` on, which are [k, k+n) of [begin,
// end) of the range's part. is_replicated: another rank also has them (where a tensor is not cut, part 0), and they count there.
typedef void RunVisit(void* self, size_t at, size_t k, size_t n, bool is_replicated);
static inline void param_range_runs(GPT2Config c, const ParamRange* p, size_t begin, size_t end, RunVisit* visit, void* self) {
    if (p->parts == 1) { visit(self, begin, 0, end - begin, p->is_replicated); return; }
    size_t first = 0; // of the tensor's elements, in the part
    for (int i = 0; i < unit_tensors(p->unit); i++) {
        TensorRuns t = tensor_part(c, p->unit, i, p->part, p->parts);
        bool is_replicated = p->is_replicated || (p->part > 0 && unit_tensor(c, p->unit, i).cut == CUT_NONE);
        for (size_t r = 0; r < t.count; r++, first += t.n) {
            size_t low = size_max(begin, first), high = size_min(end, first + t.n);
            if (low < high) visit(self, t.begin + r * t.stride + (low - first), low - begin, high - low, is_replicated);
        }
    }
}

// A run's place is in a checkpoint that is read, in the initial weights, or in a checkpoint that is written.
typedef struct {
    GPT2Config config;
    uint64_t seed;           // of the initial weights,
    CheckpointReader* from;  // or where they are read; NULL: they are random
    CheckpointWriter* to;
    CheckpointPart what;
    int unit;
    char* host;              // the elements of [begin, end), views
} RangeRuns;
static inline void run_set(void* self, size_t at, size_t k, size_t n, bool is_replicated) {
    RangeRuns* r = (RangeRuns*)self;
    float* host = (float*)r->host + k;
    if (r->from == NULL) { unit_init_weights(r->config, r->seed, r->unit, at, at + n, host); return; }
    uint64_t checksum = r->from->checksum[r->what], elements = r->from->elements[r->what];
    checkpoint_read_unit(r->from, r->what, r->unit, at, at + n, host);
    if (!is_replicated) return;
    r->from->checksum[r->what] = checksum; // each element counts once, elsewhere
    r->from->elements[r->what] = elements;
}
static inline void run_write(void* self, size_t at, size_t k, size_t n, bool is_replicated) {
    RangeRuns* r = (RangeRuns*)self;
    if (is_replicated) return; // another rank writes it
    size_t size = dtype_size(checkpoint_part_dtype(&r->to->state, r->what));
    checkpoint_write_unit(r->to, r->what, r->unit, at, at + n, r->host + k * size);
}

// ---- copies between the host and where a range lies; they return when the host's side may be used again ----
static inline void param_range_put(const ParamRange* p, void* there, const void* host, size_t bytes) {
    if (p->on_host) { memcpy(there, host, bytes); return; }
    host_to_device(there, host, bytes);
    device_synchronize();
}
static inline void param_range_get(const ParamRange* p, void* host, const void* there, size_t bytes) {
    if (p->on_host) memcpy(host, there, bytes);
    else device_to_host(host, there, bytes);
}

// ---- setting and loading ----

// Sets elements [k, k+n) of a range's weights from host (n): fp32 masters where there are any, and the parameters rounded
// from them. rounded (n) is scratch.
static inline void param_range_put_weights(const ParamRange* p, size_t k, size_t n, const float* host, floatX* rounded) {
    convert_dtype(rounded, FLOATX_DTYPE, host, DTYPE_F32, n);
    if (p->params) param_range_put(p, p->params + k, rounded, n * sizeof(floatX));
    if (p->master) param_range_put(p, p->master + k, host, n * sizeof(float));
}

// Sets the weights: random by seed, or those of a checkpoint. what: its model, or its masters. Padding is not touched: it
// is 0.
static inline void param_ranges_set_weights(const ParamRange* ranges, int num_ranges, GPT2Config c, uint64_t seed,
                                      CheckpointReader* from, CheckpointPart what) {
    float* host = (float*)xcalloc(STAGED, sizeof(float));
    floatX* rounded = (floatX*)xcalloc(STAGED, sizeof(floatX));
    for (const ParamRange* p = ranges; p < ranges + num_ranges; p++) {
        RangeRuns runs = { c, seed, from, NULL, what, p->unit, (char*)host };
        for (size_t k = 0, n; k < p->n; k += n) {
            n = size_min(STAGED, p->n - k);
            param_range_runs(c, p, p->begin + k, p->begin + k + n, run_set, &runs);
            param_range_put_weights(p, k, n, host, rounded);
        }
    }
    free(host);
    free(rounded);
}

// Loads all that a resumed run needs: weights from their masters, and AdamW's moments.
static inline void param_ranges_load(const ParamRange* ranges, int num_ranges, CheckpointReader* from) {
    GPT2Config c = from->state.config;
    param_ranges_set_weights(ranges, num_ranges, c, 0, from, CHECKPOINT_MASTER);
    float* host = (float*)xcalloc(STAGED, sizeof(float));
    for (const ParamRange* p = ranges; p < ranges + num_ranges; p++) {
        RangeRuns m = { c, 0, from, NULL, CHECKPOINT_M, p->unit, (char*)host }, v = m;
        v.what = CHECKPOINT_V;
        for (size_t k = 0, n; k < p->n; k += n) {
            n = size_min(STAGED, p->n - k);
            param_range_runs(c, p, p->begin + k, p->begin + k + n, run_set, &m);
            param_range_put(p, p->m + k, host, n * sizeof(float));
            param_range_runs(c, p, p->begin + k, p->begin + k + n, run_set, &v);
            param_range_put(p, p->v + k, host, n * sizeof(float));
        }
    }
    free(host);
}

// ---- saving ----

// Who saves: this rank is number `writer` of `writers`, or -1 where another rank saves the same state. Rank 0 is writer 0.
typedef struct {
    int writer, writers;
    bool sharded; // each writer saves files of its own
    // Every rank, writer or not: makes a file of its own, w->files[0], in w->temporary, and dies as checkpoint_fail says if it
    // cannot. NULL: there is none.
    void (*beside)(void* self, CheckpointWriter* w);
    void* beside_self;
} SaveShare;

// Writes elements [k, k+n) of a range. host and rounded (n) are scratch.
static inline void param_range_write(const ParamRange* p, RangeRuns* runs, size_t k, size_t n, float* host, floatX* rounded) {
    const float* const state[CHECKPOINT_PARTS] = { NULL, p->master, p->m, p->v };
    const CheckpointPart parts[] = { CHECKPOINT_MASTER, CHECKPOINT_M, CHECKPOINT_V };
    if (p->params) param_range_get(p, rounded, p->params + k, n * sizeof(floatX));
    else {
        param_range_get(p, host, p->master + k, n * sizeof(float));
        convert_dtype(rounded, FLOATX_DTYPE, host, DTYPE_F32, n);
    }
    runs->what = CHECKPOINT_MODEL;
    runs->host = (char*)rounded;
    param_range_runs(runs->config, p, p->begin + k, p->begin + k + n, run_write, runs);
    runs->host = (char*)host;
    for (int i = 0; i < 3; i++) {
        runs->what = parts[i];
        if (!checkpoint_has_part(&runs->to->state, runs->what)) continue;
        param_range_get(p, host, state[1 + i] + k, n * sizeof(float));
        param_range_runs(runs->config, p, p->begin + k, p->begin + k + n, run_write, runs);
    }
}

static inline void param_ranges_write(const ParamRange* ranges, int num_ranges, CheckpointWriter* w) {
    float* host = (float*)xcalloc(STAGED, sizeof(float));
    floatX* rounded = (floatX*)xcalloc(STAGED, sizeof(floatX));
    for (const ParamRange* p = ranges; p < ranges + num_ranges; p++) {
        RangeRuns runs = { w->state.config, 0, NULL, w, CHECKPOINT_MODEL, p->unit, NULL };
        for (size_t k = 0, n; k < p->n; k += n) {
            n = size_min(STAGED, p->n - k);
            param_range_write(p, &runs, k, n, host, rounded);
        }
    }
    free(host);
    free(rounded);
}

// A sharded checkpoint's writer says first which elements it will write.
typedef struct { CheckpointRange* ranges; int count, unit; } RangeList;
static inline void run_list(void* self, size_t at, size_t k, size_t n, bool is_replicated) {
    RangeList* r = (RangeList*)self;
    CheckpointRange range = { r->unit, at, at + n };
    (void)k;
    if (is_replicated) return; // another rank writes it
    if ((r->count & (r->count - 1)) == 0) // it is full: 0, 1, 2, 4, ...
        r->ranges = (CheckpointRange*)xrealloc(r->ranges, (size_t)(r->count ? 2 * r->count : 1) * sizeof(CheckpointRange));
    r->ranges[r->count++] = range;
}
static inline void param_ranges_attach_shard(const ParamRange* ranges, int num_ranges, CheckpointWriter* w, const char* out,
                                       const TrainState* s, SaveShare share) {
    RangeList list = { NULL, 0, 0 };
    for (const ParamRange* p = ranges; p < ranges + num_ranges; p++) {
        list.unit = p->unit;
        param_range_runs(s->config, p, p->begin, p->begin + p->n, run_list, &list);
    }
    checkpoint_attach_shard(w, out, s, share.writer, share.writers, list.ranges, list.count);
    free(list.ranges);
}

// After each rank has written or read its share of a checkpoint: checksum and elements become those of all ranks together.
typedef struct { uint64_t checksum[CHECKPOINT_PARTS], elements[CHECKPOINT_PARTS]; } CheckpointSums;
static inline ControlBytes checkpoint_sum(void* self, const ControlBytes* shares, int ranks) {
    CheckpointSums all, one;
    (void)self;
    memset(&all, 0, sizeof all);
    for (int q = 0; q < ranks; q++) {
        memcpy(&one, shares[q].data, sizeof one);
        for (int k = 0; k < CHECKPOINT_PARTS; k++) {
            all.checksum[k] += one.checksum[k];
            all.elements[k] += one.elements[k];
        }
    }
    return control_bytes(&all, sizeof all);
}
static inline void checkpoint_add_up(Comm* c, uint64_t checksum[CHECKPOINT_PARTS], uint64_t elements[CHECKPOINT_PARTS]) {
    CheckpointSums sums;
    memcpy(sums.checksum, checksum, sizeof sums.checksum);
    memcpy(sums.elements, elements, sizeof sums.elements);
    ControlBytes all = control_all_reduce(c->world->control, &sums, sizeof sums, checkpoint_sum, NULL);
    memcpy(&sums, all.data, sizeof sums);
    memcpy(checksum, sums.checksum, sizeof sums.checksum);
    memcpy(elements, sums.elements, sizeof sums.elements);
    free(all.data);
}

static inline void param_ranges_save_beside(Comm* c, const char* out, const TrainState* state, SaveShare share) {
    CheckpointWriter w;
    char* path = checkpoint_step_path(out, state);
    checkpoint_writer_init(&w, path, state, c->size); // as many files: that is what a full disk has no room for
    share.beside(share.beside_self, &w);
    checkpoint_writer_free(&w);
    free(path);
}

// Saves a checkpoint under `out`, and removes all but the `keep` newest (0: none). Collective over c, which is the world.
// The writers' ranges together are the model. No rank returns before the checkpoint has its name.
static inline void param_ranges_save(Comm* c, const char* out, const TrainState* state, long long keep, SaveShare share,
                               const ParamRange* ranges, int num_ranges) {
    CheckpointWriter w;
    memset(&w, 0, sizeof w);
    bool writes = share.writer >= 0;
    if (c->rank == 0 && share.sharded) checkpoint_begin_sharded(out, state);
    else if (c->rank == 0) checkpoint_begin(&w, out, state);
    comm_barrier(c); // now the folder exists
    if (share.beside) param_ranges_save_beside(c, out, state, share);
    if (writes && share.sharded) param_ranges_attach_shard(ranges, num_ranges, &w, out, state, share);
    else if (writes && c->rank > 0) checkpoint_attach(&w, out, state);
    if (writes) param_ranges_write(ranges, num_ranges, &w);
    if (writes && c->rank > 0) checkpoint_detach(&w);
    checkpoint_add_up(c, w.checksum, w.elements); // all ranks have written
    if (c->rank == 0) checkpoint_commit(&w, keep);
    comm_barrier(c);
}
#endif
