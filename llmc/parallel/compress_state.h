/*
compress_state.h - the errors of compressed gradients in a checkpoint: one file per rank, next to the model.

    OUT/step_00000100/errors_int8_00001_of_00004.safetensors

It contains the tensor `state` in the layout of compress_methods.h. Its metadata are the loss scale of the state, a
checksum of the segments (`layout`), a checksum of AdamW's m, which identifies the checkpoint (`moments`), and a
checksum of everything.

Errors belong to a method and a number of ranks: each rank saves the part of its gradients that it has not sent. A run
with another method, other buckets or another number of ranks reports that it starts without errors. A program that does
not compress loads the rest of the checkpoint. A file is refused if it is damaged or missing, or belongs to another rank
or checkpoint.
*/
#ifndef LLMC_PARALLEL_COMPRESS_STATE_H
#define LLMC_PARALLEL_COMPRESS_STATE_H
#include "../device/checksum.h"
#include "../save/ranks_checkpoint.h"
#include "compress_methods.h"

typedef struct {
    double loss_scale;
    uint64_t layout, moments;
} ErrorsFacts;

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

// Returns the part of a file's checksum that does not cover its n floats: the facts, the rank and the number of ranks.
static inline uint64_t errors_facts_checksum(ErrorsFacts f, size_t n, int rank, int ranks) {
    uint64_t facts[] = { 0, f.layout, f.moments, (uint64_t)rank, (uint64_t)ranks }, sum = 0;
    memcpy(&facts[0], &f.loss_scale, sizeof f.loss_scale);
    for (int k = 0; k < 5; k++) sum += checksum_element(facts[k], n + (size_t)k);
    return sum;
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

static inline ErrorsFacts errors_read_facts(const SafeTensors* s) {
    const char* scale = json_string_value(json_object_get(s->metadata, "loss_scale"));
    require_file(s->source, scale != NULL, "its metadata have no \"loss_scale\"");
    uint64_t layout = train_state_hex(s->metadata, "layout", s->source);
    uint64_t moments = train_state_hex(s->metadata, "moments", s->source);
    ErrorsFacts f = { strtod(scale, NULL), layout, moments };
    return f;
}

// Checks this rank's whole file. If it was made with these buckets, sets the state and returns true.
static inline bool errors_read(Compress* c, const SafeTensors* s) {
    ErrorsFacts f = errors_read_facts(s), mine = errors_facts(c);
    const SafeTensor* t = safetensors_find(s, "state");
    require_file(s->source, t != NULL, "has no tensor \"state\"");
    bool fits = f.layout == mine.layout && t->elements == c->state_floats;
    uint64_t sum = errors_facts_checksum(f, t->elements, c->comm->rank, compress_ranks(c));
    float* host = new_array(float, STAGED);
    for (size_t k = 0, n; k < t->elements; k += n) {
        n = size_min(STAGED, t->elements - k);
        safetensors_read(s, t, k, n, host, DTYPE_F32);
        sum += checksum_elements(host, sizeof(float), n, k);
        if (!fits) continue;
        host_to_device(c->state + k, host, n * sizeof(float));
        device_synchronize(); // the copy reads host
    }
    free(host);
    require_file(s->source, sum == train_state_hex(s->metadata, "checksum", s->source),
                 "its values do not match their checksum: the file is damaged");
    require_file(s->source, f.moments == mine.moments,
                 "is of another run or step: it was not saved with this checkpoint's moments");
    if (fits) c->loss_scale = f.loss_scale;
    return fits;
}

// Reads this rank's file. Returns true if it set the state.
static inline bool errors_load(Compress* c, const char* folder) {
    char *path = checkpoint_errors_path(folder, errors_of(c), c->comm->rank), *advice = checkpoint_remedy(folder);
    char* remedy = format_string("%s; without its errors_* files errors begin at 0", advice);
    SafeTensors file;
    safetensors_open(&file, path, remedy);
    bool loaded = errors_read(c, &file);
    safetensors_close(&file);
    free(remedy);
    free(advice);
    free(path);
    return loaded;
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
