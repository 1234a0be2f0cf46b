/*
checkpoint.h - a run's state on disk, the same bytes whatever stage and however many ranks wrote it.

    OUT/step_00000100/model.safetensors      parameters in the precision they were trained in, without the padding of wte
                      optimizer.safetensors  fp32 master.NAME (where the model has 16 bits), m.NAME, v.NAME
                      state.json             shape, step, data position, loss scale, options, checksums

Tensors are those of gpt2.h, in that order, weights as (out, in). A folder without optimizer.safetensors holds weights
only, as an import makes it: a run can start from it (--init-from), but not resume.

Saving     rank 0: checkpoint_begin - the others: checkpoint_attach - every rank: checkpoint_write_unit for what it owns -
           the others: checkpoint_detach - rank 0, after adding up everyone's w.checksum and w.elements: checkpoint_commit.
           Barriers between these are the caller's. All of it happens under a temporary name beside the final one and is
           synced before it is renamed, so a crash at any instant leaves the last good checkpoint.
Checksums  are sums over elements of a hash of (bits, place), so they add up over ranks and do not depend on who wrote what.
Failures   end the process with the file's name and the remedy; the temporary folder is removed.
*/
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H
#include "gpt2.h"
#include "safetensors.h"

#define CHECKPOINT_VERSION 1
#define CHECKPOINT_FORMAT "shard.c" // in the tensor files' metadata: no other program can mistake them for its own,
#define CHECKPOINT_LAYOUT "out_in"  // nor their (out, in) weights for (in, out)
#define CHECKPOINT_MAX_STATE (16u << 20) // bytes of a state.json that is believed

typedef enum { CHECKPOINT_MODEL, CHECKPOINT_MASTER, CHECKPOINT_M, CHECKPOINT_V, CHECKPOINT_PARTS } CheckpointPart;
static const char* const checkpoint_part_names[CHECKPOINT_PARTS] = { "model", "master", "m", "v" };

// All of a run that is not a tensor: what state.json holds.
typedef struct {
    GPT2Config config;
    DType dtype;               // of the parameters
    bool has_optimizer;        // false: weights only
    long long step;            // steps done
    long long epoch, position; // of the data: the next sequence to be seen
    long long adamw_t;         // updates done: steps without those that Inf or NaN made skip
    double loss_scale;
    long long good_steps;      // since the loss scale changed last
    long long seed, seq_len;
    char* options;             // JSON object of the run's options, for people to read; NULL: none
} TrainState;

static inline size_t checkpoint_tensor_count(GPT2Config c) { return ROOT_TENSORS + (size_t)c.L * BLOCK_TENSORS; }
// Whether a checkpoint has this part. A model in fp32 is its own master copy.
static inline bool checkpoint_has_part(const TrainState* s, CheckpointPart part) {
    return part == CHECKPOINT_MODEL || (s->has_optimizer && (part != CHECKPOINT_MASTER || s->dtype != DTYPE_F32));
}

// ---- checksums ----

// A bijection of the bits for every place, so that a single changed element always changes the sum (the mixing steps
// are those of splitmix64, Steele et al. 2014, with other constants).
static inline uint64_t checksum_element(uint64_t bits, uint64_t place) {
    uint64_t x = ((place + 1) * 0x9E3779B97F4A7C15ull) ^ bits;
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
    return x ^ (x >> 32);
}
// Of n elements of `size` (1, 2 or 4) bytes, the first of which is number `place` of its part. memcpy, since they may be
// floats and the compiler may assume that no integer is one.
static inline uint64_t checksum_elements(const void* data, size_t size, size_t n, uint64_t place) {
    const unsigned char* p = (const unsigned char*)data;
    uint64_t sum = 0;
    uint32_t four;
    uint16_t two;
    if (size == 4) for (size_t i = 0; i < n; i++) { memcpy(&four, p + 4 * i, 4); sum += checksum_element(four, place + i); }
    if (size == 2) for (size_t i = 0; i < n; i++) { memcpy(&two, p + 2 * i, 2); sum += checksum_element(two, place + i); }
    if (size == 1) for (size_t i = 0; i < n; i++) sum += checksum_element(p[i], place + i);
    return sum;
}

// ---- folders and their names ----

// The step of a name that is exactly prefix and step_NNNNNNNN, else -1.
static inline long long checkpoint_name_step(const char* name, const char* prefix) {
    size_t n = strlen(prefix);
    if (strncmp(name, prefix, n) != 0 || strncmp(name + n, "step_", 5) != 0) return -1;
    long long step = strtoll(name + n + 5, NULL, 10);
    char expected[64];
    snprintf(expected, sizeof expected, "%sstep_%08lld", prefix, step);
    return step >= 0 && strcmp(name, expected) == 0 ? step : -1;
}

static inline int checkpoint_compare_steps(const void* a, const void* b) {
    long long x = *(const long long*)a, y = *(const long long*)b;
    return x < y ? 1 : x > y ? -1 : 0;
}
// Steps of the folders OUT/[prefix]step_*, newest first, into a new array; how many.
static inline int checkpoint_list(const char* out, const char* prefix, long long** steps) {
    int count = 0;
    *steps = NULL;
    DIR* folder = opendir(out);
    if (folder == NULL) return 0;
    for (struct dirent* e = readdir(folder); e != NULL; e = readdir(folder)) {
        long long step = checkpoint_name_step(e->d_name, prefix);
        if (step < 0) continue;
        *steps = (long long*)xrealloc(*steps, (size_t)(count + 1) * sizeof **steps);
        (*steps)[count++] = step;
    }
    closedir(folder);
    if (count > 1) qsort(*steps, (size_t)count, sizeof **steps, checkpoint_compare_steps);
    return count;
}

// A checkpoint that is being replaced waits under this prefix until the new one has its name.
#define CHECKPOINT_REPLACED ".replaced_"

// Path of the newest checkpoint under `out` that is older than step `before`, or NULL. The caller frees it.
static inline char* checkpoint_newest_before(const char* out, long long before) {
    static const char* const prefixes[] = { "", CHECKPOINT_REPLACED };
    char* newest = NULL;
    long long newest_step = -1;
    for (int p = 0; p < 2; p++) {
        long long* steps;
        int count = checkpoint_list(out, prefixes[p], &steps);
        for (int i = 0; i < count; i++) {
            if (steps[i] >= before || steps[i] <= newest_step) continue;
            char* state = format_string("%s/%sstep_%08lld/state.json", out, prefixes[p], steps[i]);
            bool complete = path_exists(state);
            if (complete) { free(newest); newest = path_parent(state); newest_step = steps[i]; }
            free(state);
        }
        free(steps);
    }
    return newest;
}
static inline char* checkpoint_newest(const char* out) { return checkpoint_newest_before(out, INT64_MAX); }

// The advice that ends every message about a damaged checkpoint: which older one there is. The caller frees it.
static inline char* checkpoint_remedy(const char* dir) {
    char *parent = path_parent(dir), *older = NULL;
    long long step = checkpoint_name_step(path_name(dir), "");
    if (step > 0) older = checkpoint_newest_before(parent, step);
    char* remedy = older ? format_string("copy it again from where it came, or fall back to %s", older)
                         : format_string("copy it again from where it came (there is no older checkpoint beside it)");
    free(parent);
    free(older);
    return remedy;
}

// ---- state.json ----

static inline json_t* checkpoint_hex(uint64_t value) {
    char text[17];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)value);
    return json_string(text);
}

// The checksum of a state's fields: of its JSON without white space, keys sorted.
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
    require(json_is_object(options), "the options of a run must be a JSON object, not %s", s->options);
    json_t* sums = json_object();
    for (int part = 0; part < CHECKPOINT_PARTS; part++)
        if (checkpoint_has_part(s, (CheckpointPart)part))
            json_object_set_new(sums, checkpoint_part_names[part], checkpoint_hex(checksum[part]));
    GPT2Config c = s->config;
    json_t* model = json_pack("{s:i, s:i, s:i, s:i, s:i}", "layers", c.L, "heads", c.NH, "channels", c.C,
                              "vocab_size", c.V, "max_seq_len", c.max_T);
    json_t* data = json_pack("{s:I, s:I, s:I, s:I}", "seed", (json_int_t)s->seed, "seq_len", (json_int_t)s->seq_len,
                             "epoch", (json_int_t)s->epoch, "position", (json_int_t)s->position);
    json_t* root = json_pack("{s:s, s:i, s:o, s:s, s:b, s:I, s:o, s:I, s:f, s:I, s:o, s:o}",
                             "format", "shard.c checkpoint", "version", CHECKPOINT_VERSION, "model", model,
                             "dtype", dtype_name(s->dtype), "has_optimizer", (int)s->has_optimizer,
                             "step", (json_int_t)s->step, "data", data, "adamw_t", (json_int_t)s->adamw_t,
                             "loss_scale", s->loss_scale, "good_steps", (json_int_t)s->good_steps,
                             "options", options, "checksums", sums);
    require(root != NULL, "state.json cannot be made: the loss scale is %g", s->loss_scale);
    json_object_set_new(root, "checksum_of_this", train_state_checksum(root));
    char* text = json_dumps(root, JSON_INDENT(2));
    require(text != NULL, "out of host memory while writing state.json");
    json_decref(root);
    return text;
}

// A member of `object` that is a whole number within [low, high].
static inline long long train_state_integer(const json_t* object, const char* key, long long low, long long high,
                                            FileSource from) {
    const json_t* value = json_object_get(object, key);
    require_file(from, json_is_integer(value), "has no whole number \"%s\"", key);
    long long number = (long long)json_integer_value(value);
    require_file(from, number >= low && number <= high, "\"%s\" must be between %lld and %lld, not %lld",
                 key, low, high, number);
    return number;
}

static inline uint64_t train_state_hex(const json_t* object, const char* key, FileSource from) {
    const char* text = json_string_value(json_object_get(object, key));
    require_file(from, text != NULL && strlen(text) == 16 && strspn(text,
                 "0123456789abcdef") == 16, "has no 16 hexadecimal digits \"%s\"",
                 key);
    return strtoull(text, NULL, 16);
}

static inline GPT2Config train_state_config(const json_t* root, FileSource from) {
    const json_t* model = json_object_get(root, "model");
    GPT2Config c;
    c.L = (int)train_state_integer(model, "layers", 1, MAX_UNITS - 1, from);
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

static inline void train_state_check_format(const json_t* root, FileSource from) {
    const char* format = json_string_value(json_object_get(root, "format"));
    require_file(from, format != NULL && strcmp(format,
                 "shard.c checkpoint") == 0, "is not the state of a shard.c checkpoint");
    long long version = train_state_integer(root, "version", 0, INT64_MAX, from);
    require(version == CHECKPOINT_VERSION,
            "%s: has version %lld where this program knows version %d; use the program that wrote it",
            from.path, version, CHECKPOINT_VERSION);
}

// The numbers of a run into s.
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
    s->adamw_t = train_state_integer(root, "adamw_t", 0, s->step, from);
    s->good_steps = train_state_integer(root, "good_steps", 0, s->step, from);
    s->loss_scale = json_number_value(json_object_get(root, "loss_scale"));
    require_file(from, s->loss_scale > 0, "\"loss_scale\" must be a number above 0");
}

// Dies unless the state is what was written. Takes the checksum out of it.
static inline void train_state_check_itself(json_t* root, FileSource from) {
    uint64_t stored = train_state_hex(root, "checksum_of_this", from);
    json_object_del(root, "checksum_of_this");
    json_object_set_new(root, "checksum_of_this", train_state_checksum(root));
    require_file(from, train_state_hex(root,
                 "checksum_of_this", from) == stored, "does not match its own checksum: it was damaged or edited");
}

// What state.json says into s (whose options the caller frees) and the parts' checksums; every field is checked.
// *json is the parsed text: the caller's, also if this dies (a fuzzer goes on).
static inline void train_state_parse(const char* text, size_t n, json_t** json, TrainState* s,
                                     uint64_t checksum[CHECKPOINT_PARTS], FileSource from) {
    json_error_t error;
    json_t* root = *json = json_loadb(text, n, JSON_REJECT_DUPLICATES, &error);
    require_file(from, root != NULL, "line %d is not valid JSON: %s", error.line, error.text);
    train_state_check_format(root, from);
    memset(s, 0, sizeof *s);
    s->config = train_state_config(root, from);
    s->dtype = train_state_dtype(root, from);
    train_state_numbers(root, s, from);
    const json_t *options = json_object_get(root, "options"), *sums = json_object_get(root, "checksums");
    require_file(from, json_is_object(options), "has no object \"options\"");
    for (int part = 0; part < CHECKPOINT_PARTS; part++)
        if (checkpoint_has_part(s, (CheckpointPart)part))
            checksum[part] = train_state_hex(sums, checkpoint_part_names[part], from);
    train_state_check_itself(root, from);
    s->options = json_dumps(options, JSON_COMPACT);
}

// ---- the two tensor files ----

typedef enum { CHECKPOINT_FILE_MODEL, CHECKPOINT_FILE_OPTIMIZER, CHECKPOINT_FILES } CheckpointFile;
static const char* const checkpoint_file_names[CHECKPOINT_FILES] = { "model.safetensors", "optimizer.safetensors" };

static inline bool checkpoint_has_file(const TrainState* s, CheckpointFile f) {
    return f == CHECKPOINT_FILE_MODEL || s->has_optimizer;
}
static inline CheckpointFile checkpoint_part_file(CheckpointPart part) {
    return part == CHECKPOINT_MODEL ? CHECKPOINT_FILE_MODEL : CHECKPOINT_FILE_OPTIMIZER;
}
static inline DType checkpoint_part_dtype(const TrainState* s, CheckpointPart part) {
    return part == CHECKPOINT_MODEL ? s->dtype : DTYPE_F32;
}

// The tensors of a file in their order, into a new array to be given to checkpoint_free_wanted; how many.
static inline int checkpoint_wanted(const TrainState* s, CheckpointFile file, SafeTensor** wanted) {
    int count = 0;
    *wanted = (SafeTensor*)xcalloc(checkpoint_tensor_count(s->config) * CHECKPOINT_PARTS, sizeof(SafeTensor));
    for (int p = 0; p < CHECKPOINT_PARTS; p++) {
        CheckpointPart part = (CheckpointPart)p;
        if (!checkpoint_has_part(s, part) || checkpoint_part_file(part) != file) continue;
        for (int u = 0; u <= s->config.L; u++)
            for (int i = 0; i < unit_tensors(u); i++) {
                TensorInfo t = unit_tensor(s->config, u, i);
                char* name = format_string(part == CHECKPOINT_MODEL ? "%.0s%s" : "%s.%s", checkpoint_part_names[part], t.name);
                (*wanted)[count++] = safetensor_wanted(name, checkpoint_part_dtype(s, part), t.stored_rows, t.cols);
            }
    }
    return count;
}
static inline void checkpoint_free_wanted(SafeTensor* wanted, int count) {
    for (int i = 0; i < count; i++) free(wanted[i].name);
    free(wanted);
}

// Tensor i of unit u of a part, in its file, and which of the part's elements is the tensor's first.
static inline const SafeTensor* checkpoint_tensor(const SafeTensors* files, const TrainState* s, CheckpointPart part,
                                                  int u, int i, uint64_t* place) {
    const SafeTensor* first = files[checkpoint_part_file(part)].tensors;
    for (int p = CHECKPOINT_MASTER; p < (int)part; p++) // the parts before it in the same file
        if (checkpoint_has_part(s, (CheckpointPart)p)) first += checkpoint_tensor_count(s->config);
    const SafeTensor* t = first + i + (u == 0 ? 0 : (int)ROOT_TENSORS + (u - 1) * (int)BLOCK_TENSORS);
    *place = (t->begin - first->begin) / dtype_size(t->dtype);
    return t;
}

// ---- writing ----

typedef struct {
    TrainState state;                    // a copy; its options stay the caller's and must live until the commit
    char *final_path, *temporary;        // owned
    SafeTensors files[CHECKPOINT_FILES]; // owned
    uint64_t checksum[CHECKPOINT_PARTS]; // of what this rank wrote; so are the numbers of elements.
    uint64_t elements[CHECKPOINT_PARTS]; // Add both up over ranks before rank 0 commits.
} CheckpointWriter;

static inline void checkpoint_writer_free(CheckpointWriter* w) {
    for (int f = 0; f < CHECKPOINT_FILES; f++) safetensors_close(&w->files[f]);
    free(w->final_path);
    free(w->temporary);
}

// Dies with "PATH: cannot be WHAT: REASON; remedy". What was begun goes when the process exits (llmc/folder.h).
__attribute__((noreturn))
static inline void checkpoint_fail(const CheckpointWriter* w, const char* path, const char* what) {
    int reason = errno;
    bool is_full = reason == ENOSPC || reason == EDQUOT || reason == EFBIG;
    size_t bytes = w->files[0].file_size + w->files[1].file_size;
    char* out = path_parent(w->final_path);
    char* last = checkpoint_newest(out);
    bool is_step = checkpoint_name_step(path_name(w->final_path), "") >= 0;
    char* first = is_full ? format_string("free %zu MB", bytes / 1000000 + 1) : xstrdup("make it writable");
    die("%s: cannot be %s: %s; %s or choose another %s; the last good checkpoint is %s",
        path, what, strerror(reason), first, is_step ? "--out" : "folder", last ? last : "none");
}

static inline void checkpoint_require_written(const CheckpointWriter* w, bool written, const SafeTensors* file) {
    if (!written) checkpoint_fail(w, file->source.path, "written");
}

static inline void checkpoint_create_files(CheckpointWriter* w) {
    json_t* metadata = json_pack("{s:s, s:s}", "format", CHECKPOINT_FORMAT, "layout", CHECKPOINT_LAYOUT);
    for (int f = 0; f < CHECKPOINT_FILES; f++) {
        if (!checkpoint_has_file(&w->state, (CheckpointFile)f)) continue;
        SafeTensor* wanted;
        int count = checkpoint_wanted(&w->state, (CheckpointFile)f, &wanted);
        char* path = format_string("%s/%s", w->temporary, checkpoint_file_names[f]);
        checkpoint_require_written(w, safetensors_create(&w->files[f], path, wanted, count, metadata), &w->files[f]);
        checkpoint_free_wanted(wanted, count);
        free(path);
    }
    json_decref(metadata);
}

// Begins a checkpoint at exactly this path (not there yet, an empty folder, or the same step's, which is replaced).
static inline void checkpoint_begin_at(CheckpointWriter* w, const char* path, const TrainState* s) {
    memset(w, 0, sizeof *w);
    w->state = *s;
    w->final_path = path_trim(path);
    w->temporary = folder_temporary(w->final_path);
    if (!folder_begin(w->final_path)) checkpoint_fail(w, w->temporary, "made");
    checkpoint_create_files(w);
}

// Begins OUT/step_NNNNNNNN and takes its disk space; other crashes' leftovers there are removed.
static inline void checkpoint_begin(CheckpointWriter* w, const char* out, const TrainState* s) {
    long long* steps;
    int count = checkpoint_list(out, ".tmp_", &steps);
    for (int i = 0; i < count; i++) {
        char* stale = format_string("%s/.tmp_step_%08lld", out, steps[i]);
        folder_remove(stale);
        free(stale);
    }
    free(steps);
    char* path = format_string("%s/step_%08lld", out, s->step);
    checkpoint_begin_at(w, path, s);
    free(path);
}

// Joins what rank 0 has begun with the same arguments.
static inline void checkpoint_attach(CheckpointWriter* w, const char* out, const TrainState* s) {
    memset(w, 0, sizeof *w);
    w->state = *s;
    w->final_path = format_string("%s/step_%08lld", out, s->step);
    w->temporary = folder_temporary(w->final_path);
    for (int f = 0; f < CHECKPOINT_FILES; f++) {
        if (!checkpoint_has_file(s, (CheckpointFile)f)) continue;
        char* path = format_string("%s/%s", w->temporary, checkpoint_file_names[f]);
        safetensors_attach(&w->files[f], path, "--out must be a folder that every rank sees");
        free(path);
    }
}

// Elements [begin, end) of unit u, laid out as in memory (with wte's padding rows, which are left out of the file).
// host (end - begin): of state.dtype for CHECKPOINT_MODEL, else float.
static inline void checkpoint_write_unit(CheckpointWriter* w, CheckpointPart part, int u, size_t begin, size_t end,
                                         const void* host) {
    require(checkpoint_has_part(&w->state, part),
            "%s: a checkpoint in %s %s optimizer state has no part \"%s\" to write", w->final_path,
            dtype_name(w->state.dtype), w->state.has_optimizer ? "with" : "without", checkpoint_part_names[part]);
    SafeTensors* file = &w->files[checkpoint_part_file(part)];
    size_t size = dtype_size(checkpoint_part_dtype(&w->state, part));
    for (int i = 0; i < unit_tensors(u); i++) {
        TensorInfo t = unit_tensor(w->state.config, u, i);
        size_t low = size_max(begin, t.offset), high = size_min(end, t.offset + tensor_stored_elements(t));
        if (low >= high) continue;
        uint64_t place;
        const SafeTensor* stored = checkpoint_tensor(w->files, &w->state, part, u, i, &place);
        const char* data = (const char*)host + (low - begin) * size;
        bool written = safetensors_write(file, stored, low - t.offset, high - low, data, stored->dtype);
        checkpoint_require_written(w, written, file);
        w->checksum[part] += checksum_elements(data, size, high - low, place + (low - t.offset));
        w->elements[part] += high - low;
    }
}

static inline void checkpoint_sync_files(CheckpointWriter* w) {
    for (int f = 0; f < CHECKPOINT_FILES; f++)
        if (checkpoint_has_file(&w->state, (CheckpointFile)f))
            checkpoint_require_written(w, safetensors_sync(&w->files[f]), &w->files[f]);
}

// Ends an attached rank's share: what it wrote is on the disk. w.checksum and w.elements stay.
static inline void checkpoint_detach(CheckpointWriter* w) {
    checkpoint_sync_files(w);
    checkpoint_writer_free(w);
}

// Removes the checkpoint OUT/PREFIXstep_NNNNNNNN. It loses its name first, so that no half of it can be taken for a whole.
static inline void checkpoint_remove(const char* out, const char* prefix, long long step) {
    char* path = format_string("%s/%sstep_%08lld", out, prefix, step);
    char* condemned = format_string("%s/.tmp_step_%08lld", out, step);
    if (rename(path, condemned) != 0 || !folder_remove(condemned))
        fprintf(stderr, "warning: %s: an old checkpoint could not be removed: %s\n", path, strerror(errno));
    free(path);
    free(condemned);
}

// Removes all but the `keep` newest checkpoints (0: none), never the one of `step`, and what that one has replaced.
static inline void checkpoint_prune(const char* out, long long step, long long keep) {
    long long* steps;
    int count = checkpoint_list(out, "", &steps);
    for (int i = 0; i < count; i++) if (keep > 0 && i >= keep && steps[i] != step) checkpoint_remove(out, "", steps[i]);
    free(steps);
    count = checkpoint_list(out, CHECKPOINT_REPLACED, &steps);
    for (int i = 0; i < count; i++) if (steps[i] <= step) checkpoint_remove(out, CHECKPOINT_REPLACED, steps[i]);
    free(steps);
}

// Gives the filled folder its final name. One that has the name already steps aside first, under a name that
// checkpoint_newest knows, so that there is a good checkpoint at every instant.
static inline void checkpoint_publish(CheckpointWriter* w) {
    if (folder_publish(w->final_path)) return;
    if (errno != ENOTEMPTY && errno != EEXIST) checkpoint_fail(w, w->final_path, "given its name");
    char* parent = path_parent(w->final_path);
    char* aside = format_string("%s/" CHECKPOINT_REPLACED "%s", parent, path_name(w->final_path));
    if (!folder_remove(aside) || rename(w->final_path, aside) != 0 || !folder_publish(w->final_path))
        checkpoint_fail(w, w->final_path, "replaced");
    free(aside);
    free(parent);
}

// Makes the checkpoint real: all bytes on the disk, then its final name, then - only then - older ones beyond the `keep`
// newest are removed (0: none). Everything must have been written, by whatever rank, exactly once.
static inline void checkpoint_commit(CheckpointWriter* w, long long keep) {
    uint64_t expected = gpt2_num_parameters(w->state.config);
    for (int part = 0; part < CHECKPOINT_PARTS; part++) {
        bool is_whole = !checkpoint_has_part(&w->state, (CheckpointPart)part) || w->elements[part] == expected;
        require(is_whole, "%s: %llu of the %llu elements of \"%s\" were written: the ranks' shares do not add up to the model",
                w->final_path, (unsigned long long)w->elements[part], (unsigned long long)expected, checkpoint_part_names[part]);
    }
    checkpoint_sync_files(w);
    char* text = train_state_text(&w->state, w->checksum);
    char* path = format_string("%s/state.json", w->temporary);
    if (!file_write(path, text, strlen(text))) checkpoint_fail(w, path, "written");
    checkpoint_publish(w);
    char* out = path_parent(w->final_path);
    if (checkpoint_name_step(path_name(w->final_path), "") == w->state.step) checkpoint_prune(out, w->state.step, keep);
    free(out);
    free(path);
    free(text);
    checkpoint_writer_free(w);
}

// ---- reading ----

typedef struct {
    TrainState state;                    // options owned
    char *path, *remedy;                 // owned
    SafeTensors files[CHECKPOINT_FILES]; // owned
    uint64_t stored[CHECKPOINT_PARTS];   // checksums by state.json
    uint64_t checksum[CHECKPOINT_PARTS]; // of what was read; with several ranks, add up this
    uint64_t elements[CHECKPOINT_PARTS]; // and this over them before checkpoint_close
} CheckpointReader;

#define HUGGINGFACE_LAYOUT "%s: this is a Hugging Face layout, use build/hf_import to make a checkpoint of it"

// A folder without state.json: what is it, and what would be right?
__attribute__((noreturn))
static inline void checkpoint_die_foreign(const char* path) {
    char* config = format_string("%s/config.json", path);
    char* newest = checkpoint_newest(path);
    require(!path_exists(config), HUGGINGFACE_LAYOUT, path);
    require(newest == NULL, "%s: is a folder of checkpoints, not a checkpoint; its newest is %s", path, newest);
    die("%s: is not a checkpoint: it has no state.json; give a folder such as DIR/step_00000100", path);
}

static inline void checkpoint_check_metadata(const SafeTensors* file, const char* key, const char* expected) {
    const char* value = json_string_value(json_object_get(file->metadata, key));
    require_file(file->source, value && strcmp(value, expected) == 0,
                 "its metadata say \"%s\": \"%s\" where a checkpoint has \"%s\"", key, value ? value : "", expected);
}

// A tensor file must hold exactly what the state says, in our order and layout.
static inline void checkpoint_check_file(const CheckpointReader* r, CheckpointFile f) {
    const SafeTensors* file = &r->files[f];
    bool is_huggingface = safetensors_find(file, "transformer.wte.weight") || safetensors_find(file, "wte.weight");
    require(!is_huggingface, HUGGINGFACE_LAYOUT, file->source.path);
    checkpoint_check_metadata(file, "format", CHECKPOINT_FORMAT);
    checkpoint_check_metadata(file, "layout", CHECKPOINT_LAYOUT);
    SafeTensor* wanted;
    int count = checkpoint_wanted(&r->state, f, &wanted);
    require_file(file->source, file->count == count, "has %d tensors where state.json's model has %d", file->count, count);
    for (int i = 0; i < count; i++) {
        const SafeTensor *t = &file->tensors[i], *e = &wanted[i];
        require_file(file->source, strcmp(t->name, e->name) == 0, "tensor %d is '%s' where '%s' belongs",
                     i, t->name, e->name);
        require_file(file->source, strcmp(t->stored_as, e->stored_as) == 0,
                     "tensor '%s' is stored as %s where state.json says %s",
                     t->name, t->stored_as, e->stored_as);
        bool same_shape = t->rank == e->rank && t->shape[0] == e->shape[0] && (t->rank == 1 || t->shape[1] == e->shape[1]);
        require_file(file->source, same_shape,
                     "tensor '%s' does not have the shape (%zu, %zu) that state.json's model needs",
                     t->name, e->shape[0], e->shape[1]);
    }
    checkpoint_free_wanted(wanted, count);
}

// Opens a checkpoint and checks all of it but the values, which are checked while they are read.
static inline void checkpoint_open(CheckpointReader* r, const char* dir) {
    memset(r, 0, sizeof *r);
    r->path = path_trim(dir);
    r->remedy = checkpoint_remedy(r->path);
    require(path_exists(r->path), "%s: there is no such checkpoint", r->path);
    char* path = format_string("%s/state.json", r->path);
    if (!path_exists(path)) checkpoint_die_foreign(r->path);
    size_t n;
    FileSource from = { path, r->remedy };
    char* text = file_read(from, CHECKPOINT_MAX_STATE, &n);
    json_t* json;
    train_state_parse(text, n, &json, &r->state, r->stored, from);
    json_decref(json);
    free(text);
    free(path);
    for (int f = 0; f < CHECKPOINT_FILES; f++) {
        if (!checkpoint_has_file(&r->state, (CheckpointFile)f)) continue;
        path = format_string("%s/%s", r->path, checkpoint_file_names[f]);
        safetensors_open(&r->files[f], path, r->remedy);
        free(path);
        checkpoint_check_file(r, (CheckpointFile)f);
    }
}

// n elements of a stored tensor from number `first`, as floats; adds to the part's checksum.
static inline void checkpoint_read_tensor(CheckpointReader* r, CheckpointPart part, CheckpointPart stored_part, int u, int i,
                                          size_t first, size_t n, float* host) {
    uint64_t place;
    const SafeTensor* t = checkpoint_tensor(r->files, &r->state, stored_part, u, i, &place);
    uint32_t piece[1 << 14];
    for (size_t done = 0, count; done < n; done += count) {
        count = size_min(n - done, sizeof piece / sizeof(float));
        safetensors_read(&r->files[checkpoint_part_file(stored_part)], t, first + done, count, piece, t->dtype);
        r->checksum[part] += checksum_elements(piece, dtype_size(t->dtype), count, place + first + done);
        convert_dtype(host + done, DTYPE_F32, piece, t->dtype, count);
    }
    r->elements[part] += n;
}

// Elements [begin, end) of unit u in memory layout into host (end - begin): fp32, padding 0. Only these are read from
// the disk. The master copy of a model in fp32 is the model. Read nothing twice: the checksums would count it twice.
static inline void checkpoint_read_unit(CheckpointReader* r, CheckpointPart part, int u, size_t begin, size_t end,
                                        float* host) {
    CheckpointPart stored_part = part == CHECKPOINT_MASTER && r->state.dtype == DTYPE_F32 ? CHECKPOINT_MODEL : part;
    require(checkpoint_has_part(&r->state, stored_part),
            "%s: holds weights only; start from it with --init-from instead of resuming",
            r->path);
    r->stored[part] = r->stored[stored_part];
    memset(host, 0, (end - begin) * sizeof(float));
    for (int i = 0; i < unit_tensors(u); i++) {
        TensorInfo t = unit_tensor(r->state.config, u, i);
        size_t low = size_max(begin, t.offset), high = size_min(end, t.offset + tensor_stored_elements(t));
        if (low < high) checkpoint_read_tensor(r, part, stored_part, u, i, low - t.offset, high - low, host + (low - begin));
    }
}

// Checks each part of which everything has been read, and frees r.
static inline void checkpoint_close(CheckpointReader* r) {
    for (int part = 0; part < CHECKPOINT_PARTS; part++)
        require(r->elements[part] != gpt2_num_parameters(r->state.config) || r->checksum[part] == r->stored[part],
                "%s/%s: the values of \"%s\" do not match their checksum: the file is damaged; %s", r->path,
                checkpoint_file_names[checkpoint_part_file((CheckpointPart)part)], checkpoint_part_names[part], r->remedy);
    for (int f = 0; f < CHECKPOINT_FILES; f++) safetensors_close(&r->files[f]);
    free(r->state.options);
    free(r->path);
    free(r->remedy);
}

// Dies unless the checkpoint has the shape that the run asks for.
static inline void checkpoint_require_config(const CheckpointReader* r, GPT2Config wanted) {
    GPT2Config c = r->state.config;
    require(c.L == wanted.L, "%s has %d layers, this run asks for %d", r->path, c.L, wanted.L);
    require(c.NH == wanted.NH, "%s has %d heads, this run asks for %d", r->path, c.NH, wanted.NH);
    require(c.C == wanted.C, "%s has %d channels, this run asks for %d", r->path, c.C, wanted.C);
    require(c.V == wanted.V, "%s has a vocabulary of %d tokens, this run asks for %d", r->path, c.V, wanted.V);
    require(c.max_T == wanted.max_T,
            "%s has sequences of at most %d tokens, this run asks for %d", r->path, c.max_T, wanted.max_T);
}
#endif
