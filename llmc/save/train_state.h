/*
train_state.h - state.json, all of a run that is not a tensor: shape, step, data position, loss scale, options, and
checksums of itself and of the tensors.

Checksums  are sums over elements of a hash of (bits, place), so they add up over ranks and do not depend on which one
           wrote what.
*/
#ifndef LLMC_TRAIN_STATE_H
#define LLMC_TRAIN_STATE_H
#include "../base/checksum.h"
#include "../base/folder.h"
#include "../model/gpt2.h"
#include "../base/precision.h"
#include <jansson.h>

#define CHECKPOINT_VERSION 1
#define CHECKPOINT_MAX_STATE (16u << 20) // bytes of the largest state.json that is read
#define CHECKPOINT_MAX_SHARDS (1 << 16)

typedef enum {
    CHECKPOINT_MODEL, CHECKPOINT_MASTER, CHECKPOINT_M, CHECKPOINT_V, CHECKPOINT_MOMENTUM, CHECKPOINT_PARTS
} CheckpointPart;
static const char* const checkpoint_part_names[CHECKPOINT_PARTS] = { "model", "master", "m", "v", "momentum" };

// For each part, the checksum and the number of the elements that a rank wrote or read; and how many of the weights
// that it read are too large for their new precision, with the place of the first of these. They add up over ranks.
typedef struct { uint64_t checksum[CHECKPOINT_PARTS], elements[CHECKPOINT_PARTS], large, first_large; } CheckpointSums;
static inline void checkpoint_sums_add(CheckpointSums* to, const CheckpointSums* share) {
    bool is_first = share->large > 0 && (to->large == 0 || share->first_large < to->first_large);
    if (is_first) to->first_large = share->first_large;
    to->large += share->large;
    for (int k = 0; k < CHECKPOINT_PARTS; k++) {
        to->checksum[k] += share->checksum[k];
        to->elements[k] += share->elements[k];
    }
}

// All of a run that is not a tensor: what state.json holds.
typedef struct {
    GPT2Config config;
    DType dtype;               // of the parameters
    bool has_optimizer;        // false: weights only
    bool is_muon;              // the matrices of blocks have a momentum; false: all tensors have AdamW's m and v
    long long step;            // steps done
    long long epoch, position; // of the data: the next sequence to be seen
    long long tokens;          // seen so far; -1: the checkpoint is older than this count
    uint64_t data_sum;         // checksum of the data, 0: not known
    long long adamw_t;         // updates done: steps except those skipped because of Inf or NaN
    double loss_scale;
    long long good_steps;      // since the loss scale changed last
    long long seed, seq_len;
    char* options;             // JSON object of the run's options, for people to read; NULL: none
    int shards;                // into how many files the model is cut, and the optimizer as well; 0: not cut
} TrainState;

// Returns true if a checkpoint has this part, of all tensors or some. A model in fp32 is its own master copy.
static inline bool checkpoint_has_part(const TrainState* s, CheckpointPart part) {
    bool is_used = part == CHECKPOINT_MASTER ? s->dtype != DTYPE_F32 : part != CHECKPOINT_MOMENTUM || s->is_muon;
    return part == CHECKPOINT_MODEL || (s->has_optimizer && is_used);
}
// Returns true if it has this part of tensor i of unit u.
static inline bool checkpoint_has_tensor(const TrainState* s, CheckpointPart part, int u, int i) {
    bool has_momentum = s->is_muon && is_block_matrix(u, unit_tensor(s->config, u, i));
    return checkpoint_has_part(s, part) && (part < CHECKPOINT_M || has_momentum == (part == CHECKPOINT_MOMENTUM));
}
// Returns the number of elements in a part.
static inline size_t checkpoint_part_elements(const TrainState* s, CheckpointPart part) {
    size_t n = 0;
    for (int u = 0; u < gpt2_num_units(s->config); u++)
        for (int i = 0; i < unit_tensors(u); i++)
            if (checkpoint_has_tensor(s, part, u, i)) n += tensor_stored_elements(unit_tensor(s->config, u, i));
    return n;
}

// ---- state.json ----

static inline json_t* checkpoint_hex(uint64_t value) {
    char text[17];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)value);
    return json_string(text);
}

// Returns the checksum of a state's fields: of its JSON without white space, keys sorted.
static inline json_t* train_state_checksum(const json_t* root) {
    char* text = json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS);
    require(text != NULL, "out of host memory while writing state.json");
    json_t* sum = checkpoint_hex(checksum_elements(text, 1, strlen(text), 0));
    free(text);
    return sum;
}

// state.json's text, with the parts' checksums; the caller frees it.
static inline char* train_state_text(const TrainState* s, const uint64_t checksum[CHECKPOINT_PARTS]) {
    json_t* options = s->options ? json_loads(s->options, JSON_REJECT_DUPLICATES, NULL) : json_object();
    invariant(json_is_object(options), "the options of a run must be a JSON object, not %s", s->options);
    json_t* sums = json_object();
    for (int part = 0; part < CHECKPOINT_PARTS; part++)
        if (checkpoint_has_part(s, (CheckpointPart)part))
            json_object_set_new(sums, checkpoint_part_names[part], checkpoint_hex(checksum[part]));
    GPT2Config c = s->config;
    json_t* model = json_pack("{s:i, s:i, s:i, s:i, s:i}", "layers", c.L, "heads", c.NH, "channels", c.C,
                              "vocab_size", c.V, "max_seq_len", c.max_T);
    json_t* data = json_pack("{s:I, s:I, s:I, s:I}", "seed", (json_int_t)s->seed, "seq_len", (json_int_t)s->seq_len,
                             "epoch", (json_int_t)s->epoch, "position", (json_int_t)s->position);
    if (s->data_sum) json_object_set_new(data, "checksum", checkpoint_hex(s->data_sum));
    json_t* root = json_pack("{s:s, s:i, s:o, s:s, s:b, s:I, s:o, s:I, s:f, s:I, s:o, s:o}",
                             "format", "shard.c checkpoint", "version", CHECKPOINT_VERSION, "model", model,
                             "dtype", dtype_name(s->dtype), "has_optimizer", (int)s->has_optimizer,
                             "step", (json_int_t)s->step, "data", data, "adamw_t", (json_int_t)s->adamw_t,
                             "loss_scale", s->loss_scale, "good_steps", (json_int_t)s->good_steps,
                             "options", options, "checksums", sums);
    invariant(root != NULL, "state.json cannot be made: the loss scale is %g", s->loss_scale);
    if (s->is_muon) json_object_set_new(root, "optimizer", json_string("Muon"));
    if (s->tokens >= 0) json_object_set_new(root, "tokens", json_integer(s->tokens));
    if (s->shards > 0) json_object_set_new(root, "shards", json_integer(s->shards));
    json_object_set_new(root, "checksum_of_this", train_state_checksum(root));
    char* text = json_dumps(root, JSON_INDENT(2));
    require(text != NULL, "out of host memory while writing state.json");
    json_decref(root);
    return text;
}

// Returns a member of `object` that is a whole number within [low, high].
static inline long long train_state_integer(const json_t* object, const char* key, long long low, long long high,
                                            FileSource from) {
    const json_t* value = json_object_get(object, key);
    require_file(from, json_is_integer(value), "has no whole number \"%s\"", key);
    long long number = (long long)json_integer_value(value);
    require_file(from, number >= low && number <= high, "\"%s\" must be between %lld and %lld, not %lld", key, low,
                 high, number);
    return number;
}

static inline uint64_t train_state_hex(const json_t* object, const char* key, FileSource from) {
    const char* text = json_string_value(json_object_get(object, key));
    bool is_hex = text != NULL && strlen(text) == 16 && strspn(text, "0123456789abcdef") == 16;
    require_file(from, is_hex, "has no \"%s\" of 16 hexadecimal digits", key);
    return strtoull(text, NULL, 16);
}

static inline GPT2Config train_state_config(const json_t* root, FileSource from) {
    const json_t* model = json_object_get(root, "model");
    GPT2Config c;
    c.L = (int)train_state_integer(model, "layers", 1, MAX_BLOCKS, from);
    c.NH = (int)train_state_integer(model, "heads", 1, 1 << 16, from);
    c.C = (int)train_state_integer(model, "channels", 1, 1 << 16, from);
    c.V = (int)train_state_integer(model, "vocab_size", 1, 1 << 24, from);
    c.max_T = (int)train_state_integer(model, "max_seq_len", 1, 1 << 20, from);
    c.Vp = gpt2_padded_vocabulary(c.V);
    gpt2_check_config(c, from.path);
    return c;
}

static inline DType train_state_dtype(const json_t* root, FileSource from) {
    const char* name = json_string_value(json_object_get(root, "dtype"));
    for (int d = DTYPE_F32; d <= DTYPE_F16; d++)
        if (name != NULL && strcmp(name, dtype_name((DType)d)) == 0) return (DType)d;
    die("%s: \"dtype\" must be fp32, bf16 or fp16, not %s; %s", from.path, name ? name : "missing", from.remedy);
}

// Returns true if the optimizer is Muon. AdamW is not named.
static inline bool train_state_is_muon(const json_t* root, FileSource from) {
    const json_t* optimizer = json_object_get(root, "optimizer");
    const char* name = json_string_value(optimizer);
    require_file(from, optimizer == NULL || (name && strcmp(name, "Muon") == 0),
                 "\"optimizer\" must be Muon, or missing if it is AdamW, not %s", name ? name : "another type");
    return optimizer != NULL;
}

static inline void train_state_check_format(const json_t* root, FileSource from) {
    const char* format = json_string_value(json_object_get(root, "format"));
    bool is_ours = format != NULL && strcmp(format, "shard.c checkpoint") == 0;
    require_file(from, is_ours, "is not the state of a shard.c checkpoint");
    long long version = train_state_integer(root, "version", 0, INT64_MAX, from);
    require(version == CHECKPOINT_VERSION,
            "%s: has version %lld where this program knows version %d; use the program that wrote it", from.path,
            version, CHECKPOINT_VERSION);
}

// Reads the numbers of a run into s.
static inline void train_state_numbers(const json_t* root, TrainState* s, FileSource from) {
    const long long big = 1000000000000000;
    const json_t *data = json_object_get(root, "data"), *has_optimizer = json_object_get(root, "has_optimizer");
    require_file(from, json_is_boolean(has_optimizer), "\"has_optimizer\" must be true or false");
    s->has_optimizer = json_is_true(has_optimizer);
    s->step = train_state_integer(root, "step", 0, big, from);
    s->seed = train_state_integer(data, "seed", 0, INT64_MAX, from);
    s->seq_len = train_state_integer(data, "seq_len", 1, s->config.max_T, from);
    s->epoch = train_state_integer(data, "epoch", 0, big, from);
    s->position = train_state_integer(data, "position", 0, big, from);
    s->tokens = json_object_get(root, "tokens") ? train_state_integer(root, "tokens", 0, INT64_MAX, from) : -1;
    if (json_object_get(data, "checksum")) s->data_sum = train_state_hex(data, "checksum", from);
    s->adamw_t = train_state_integer(root, "adamw_t", 0, s->step, from);
    s->good_steps = train_state_integer(root, "good_steps", 0, s->step, from);
    s->loss_scale = json_number_value(json_object_get(root, "loss_scale"));
    require_file(from, s->loss_scale > 0, "\"loss_scale\" must be a number above 0");
}

// Dies if the state was changed after it was written: recomputes its checksum, which does not cover itself.
static inline void train_state_check_itself(json_t* root, FileSource from) {
    uint64_t stored = train_state_hex(root, "checksum_of_this", from);
    json_object_del(root, "checksum_of_this");
    json_object_set_new(root, "checksum_of_this", train_state_checksum(root));
    bool is_same = train_state_hex(root, "checksum_of_this", from) == stored;
    require_file(from, is_same, "does not match its own checksum: it was damaged or edited");
}

// Reads state.json into s (whose options the caller frees) and the parts' checksums; checks every field.
// *json is the parsed text, which the caller frees, even if this dies (a fuzzer goes on).
static inline void train_state_parse(const char* text, size_t n, json_t** json, TrainState* s,
                                     uint64_t checksum[CHECKPOINT_PARTS], FileSource from) {
    json_error_t error;
    json_t* root = *json = json_loadb(text, n, JSON_REJECT_DUPLICATES, &error);
    require_file(from, root != NULL, "line %d is not valid JSON: %s", error.line, error.text);
    train_state_check_format(root, from);
    memset(s, 0, sizeof *s);
    s->config = train_state_config(root, from);
    s->dtype = train_state_dtype(root, from);
    s->is_muon = train_state_is_muon(root, from);
    train_state_numbers(root, s, from);
    bool is_sharded = json_object_get(root, "shards") != NULL;
    s->shards = is_sharded ? (int)train_state_integer(root, "shards", 1, CHECKPOINT_MAX_SHARDS, from) : 0;
    const json_t *options = json_object_get(root, "options"), *sums = json_object_get(root, "checksums");
    require_file(from, json_is_object(options), "has no object \"options\"");
    for (int part = 0; part < CHECKPOINT_PARTS; part++)
        if (checkpoint_has_part(s, (CheckpointPart)part))
            checksum[part] = train_state_hex(sums, checkpoint_part_names[part], from);
    train_state_check_itself(root, from);
    s->options = json_dumps(options, JSON_COMPACT);
}
#endif
