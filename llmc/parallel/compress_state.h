/*
compress_state.h - saves and loads the errors of compressed gradients (save/errors_file.h).

Errors belong to a method and a number of ranks: each rank saves the part of its gradients that it has not sent. A run
with another method, other buckets or another number of ranks reports that it starts without errors. A program that does
not compress loads the rest of the checkpoint.
*/
#ifndef LLMC_PARALLEL_COMPRESS_STATE_H
#define LLMC_PARALLEL_COMPRESS_STATE_H
#include "../device/checksum.h"
#include "../save/errors_file.h"
#include "../save/ranks_checkpoint.h"
#include "compress_methods.h"

// Returns a checksum of the segments, which give each float of the state its meaning.
static inline uint64_t compress_layout(const Compress* c) {
    uint64_t sum = checksum_element((uint64_t)c->o.feedback, 0), place = 1;
    for (int i = 0; i < c->num_segments; i++) {
        const Segment* s = &c->segments[i];
        SegmentCost cost = segment_cost(c, s);
        const size_t facts[] = { s->at, s->n, s->rows, s->cols, s->state_at, cost.x, cost.part, cost.q };
        for (int k = 0; k < 8; k++) sum += checksum_element(facts[k], place++);
    }
    return sum;
}

static inline ErrorsFacts errors_facts(const Compress* c) {
    uint64_t moments = device_checksum(c->m, sizeof(float), c->num_elements);
    ErrorsFacts f = { c->loss_scale, compress_layout(c), moments };
    return f;
}

static inline CheckpointErrors errors_of(const Compress* c) {
    CheckpointErrors e = { "", compress_ranks(c) };
    snprintf(e.method, sizeof e.method, "%s", compress_method(c)->name);
    return e;
}

// ---- saving ----

static inline json_t* errors_metadata(const Compress* c) {
    ErrorsFacts f = errors_facts(c);
    uint64_t sum = errors_facts_checksum(f, c->state_floats, c->comm->rank, compress_ranks(c))
                 + device_checksum(c->state, sizeof(float), c->state_floats);
    return json_pack("{so, so, so, so}", "loss_scale", json_sprintf("%.17g", f.loss_scale),
                     "layout", checkpoint_hex(f.layout), "moments", checkpoint_hex(f.moments),
                     "checksum", checkpoint_hex(sum));
}

// For SaveBeside.create: self is the Compress.
static inline const float* compress_create(void* self, CheckpointWriter* w) {
    const Compress* c = (const Compress*)self;
    char name[] = "state", *path = checkpoint_errors_path(w->temporary, errors_of(c), c->comm->rank);
    json_t* metadata = errors_metadata(c);
    SafeTensor wanted = safetensor_wanted(name, DTYPE_F32, c->state_floats, 0);
    checkpoint_require_written(w, safetensors_create(&w->files[0], path, &wanted, 1, metadata), &w->files[0]);
    json_decref(metadata);
    free(path);
    return c->state;
}

// How many errors each rank will save.
static inline size_t compress_saves(const void* self) {
    const Compress* c = (const Compress*)self;
    return compress_keeps(c) ? compress_state_floats(c) : 0;
}
static inline SaveBeside compress_beside(Compress* c) {
    SaveBeside errors = { compress_saves, compress_create, c };
    return errors;
}

// ---- loading ----

// Reads this rank's file. Returns true if it was made with these buckets, which sets the state.
static inline bool errors_load(Compress* c, const char* folder) {
    SafeTensors file;
    errors_open(&file, folder, errors_of(c), c->comm->rank);
    ErrorsFacts f = errors_read_facts(&file), mine = errors_facts(c);
    bool fits = f.layout == mine.layout && errors_tensor(&file)->elements == c->state_floats;
    errors_read(&file, f, c->comm->rank, compress_ranks(c), fits ? c->state : NULL);
    require_file(file.source, f.moments == mine.moments,
                 "is of another run or step: it was not saved with this checkpoint's moments");
    if (fits) c->loss_scale = f.loss_scale;
    safetensors_close(&file);
    return fits;
}

// Loads the errors of the checkpoint c->resumed, or reports their loss. The moments must be loaded already.
static inline void compress_load(Compress* c) {
    const char* folder = c->resumed;
    if (folder == NULL || !compress_keeps(c)) return; // then run_load reports the loss
    CheckpointErrors there = checkpoint_errors(folder), mine = errors_of(c);
    bool own = strcmp(there.method, mine.method) == 0 && there.ranks == mine.ranks;
    if (own && errors_load(c, folder)) return;
    const char* buckets = "other buckets (--bucket-mb, --rank, --error-feedback, precision)";
    char lost[128] = "";
    if (own) snprintf(lost, sizeof lost, "; those of %s are lost", buckets);
    else if (there.ranks > 0)
        snprintf(lost, sizeof lost, "; those of %s on %d rank%s are lost", there.method, there.ranks,
                 there.ranks == 1 ? "" : "s");
    printf("compress   %s has no errors of %s on %d rank%s%s: they begin at 0%s\n", folder, mine.method, mine.ranks,
           mine.ranks == 1 ? "" : "s", own ? " with these buckets" : "", lost);
}
#endif
