/*
errors_file.h - the errors of compressed gradients in a checkpoint: one file per rank, next to the model.

    OUT/step_00000100/errors_int8_00001_of_00004.safetensors

It contains the tensor `state` in the layout of compress_methods.h. Its metadata are the loss scale of the state, a
checksum of the segments (`layout`), a checksum of AdamW's m, which identifies the checkpoint (`moments`), and a
checksum of everything. A file is refused if it is damaged or missing, or belongs to another rank or checkpoint.
*/
#ifndef LLMC_ERRORS_FILE_H
#define LLMC_ERRORS_FILE_H
#include "../device/device.h"
#include "checkpoint.h"

typedef struct {
    double loss_scale;
    uint64_t layout, moments;
} ErrorsFacts;

// Returns the part of a file's checksum that does not cover its n floats: the facts, the rank and the number of ranks.
static inline uint64_t errors_facts_checksum(ErrorsFacts f, size_t n, int rank, int ranks) {
    uint64_t facts[] = { 0, f.layout, f.moments, (uint64_t)rank, (uint64_t)ranks }, sum = 0;
    memcpy(&facts[0], &f.loss_scale, sizeof f.loss_scale);
    for (int k = 0; k < 5; k++) sum += checksum_element(facts[k], n + (size_t)k);
    return sum;
}

// Opens the file of this rank in a checkpoint.
static inline void errors_open(SafeTensors* s, const char* folder, CheckpointErrors e, int rank) {
    char *path = checkpoint_errors_path(folder, e, rank), *advice = checkpoint_remedy(folder);
    char* remedy = format_string("%s; without its errors_* files errors begin at 0", advice);
    safetensors_open(s, path, remedy);
    free(remedy);
    free(advice);
    free(path);
}
static inline const SafeTensor* errors_tensor(const SafeTensors* s) {
    const SafeTensor* t = safetensors_find(s, "state");
    require_file(s->source, t != NULL, "has no tensor \"state\"");
    return t;
}
static inline ErrorsFacts errors_read_facts(const SafeTensors* s) {
    const char* scale = json_string_value(json_object_get(s->metadata, "loss_scale"));
    require_file(s->source, scale != NULL, "its metadata have no \"loss_scale\"");
    uint64_t layout = train_state_hex(s->metadata, "layout", s->source);
    uint64_t moments = train_state_hex(s->metadata, "moments", s->source);
    ErrorsFacts f = { strtod(scale, NULL), layout, moments };
    return f;
}

// Reads all errors of a rank into device memory, or nowhere (NULL). Dies if the file is damaged, which is known at its
// end.
static inline void errors_read(const SafeTensors* s, ErrorsFacts f, int rank, int ranks, float* into) {
    const SafeTensor* t = errors_tensor(s);
    const size_t slice = (size_t)1 << 20;
    uint64_t sum = errors_facts_checksum(f, t->elements, rank, ranks);
    float* host = new_array(float, slice);
    for (size_t k = 0, n; k < t->elements; k += n) {
        n = size_min(slice, t->elements - k);
        safetensors_read(s, t, k, n, host, DTYPE_F32);
        sum += checksum_elements(host, sizeof(float), n, k);
        if (into == NULL) continue;
        host_to_device(into + k, host, n * sizeof(float));
        device_synchronize(); // the copy reads host
    }
    free(host);
    require_file(s->source, sum == train_state_hex(s->metadata, "checksum", s->source),
                 "its values do not match their checksum: the file is damaged");
}
#endif
