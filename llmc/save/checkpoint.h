/*
checkpoint.h - the state of a run on disk. Every program can read it on any number of ranks, whichever program and ranks
wrote it.

    OUT/step_00000100/model.safetensors      parameters in the precision of training, without the padding of wte
                      optimizer.safetensors  fp32 master.NAME (if the model is in 16 bits); m.NAME and v.NAME, or with
                                             Muon for each matrix of a block momentum.NAME
                      state.json             train_state.h: shape, step, data position, loss scale, options, checksums
                      errors_METHOD_00001_of_00004.safetensors  only by train_gpt2_compress: errors_file.h

Tensors are those of gpt2.h, in that order, weights as (out, in). A folder without an optimizer holds weights only, as
an import makes it: a run can start from it (--init-from), but not resume. In a sharded checkpoint every writer
writes its own model and optimizer file, and two indices say what is where (checkpoint_files.h). Readers see no
difference.

Saving     checkpoint_begin - checkpoint_write_unit - checkpoint_commit - checkpoint_prune; ranks_checkpoint.h is for
           several ranks.
           Everything happens under a temporary name next to the final one and is synced before it is renamed, so a
           crash at any instant leaves the last good checkpoint.
Failures   end the process with the file's name and the remedy; the temporary folder is removed.
*/
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H
#include "../base/thread.h"
#include "checkpoint_files.h"

// ---- folders and their names ----

// Returns the step of a name that is exactly prefix and step_NNNNNNNN; -1: it is another name.
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
    return (x < y) - (x > y);
}
// Puts the steps of the folders OUT/[prefix]step_*, newest first, into a new array. Returns how many.
static inline int checkpoint_list(const char* out, const char* prefix, long long** steps) {
    int count = 0;
    *steps = NULL;
    DIR* folder = opendir(out);
    require(folder || !too_many_files(), "%s: cannot be read: %s", out, open_error(errno));
    if (folder == NULL) return 0;
    for (struct dirent* e = readdir(folder); e != NULL; e = readdir(folder)) {
        long long step = checkpoint_name_step(e->d_name, prefix);
        if (step < 0) continue;
        *steps = grown_array(long long, *steps, count);
        (*steps)[count++] = step;
    }
    closedir(folder);
    if (count > 1) qsort(*steps, (size_t)count, sizeof **steps, checkpoint_compare_steps);
    return count;
}

// A checkpoint that is being replaced waits under this prefix until the new one has taken its name.
#define CHECKPOINT_REPLACED ".replaced_"

// Returns the path of the newest checkpoint under `out` that is older than step `before`, or NULL. The caller frees it.
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

// Returns the advice that ends every message about a damaged checkpoint: which older one there is. The caller frees it.
static inline char* checkpoint_remedy(const char* dir) {
    char *parent = path_parent(dir), *older = NULL;
    const char* name = path_name(dir);
    long long step = checkpoint_name_step(name, "");
    if (step > 0) older = checkpoint_newest_before(parent, step);
    char* remedy = older ? format_string("copy it again from where it came, or fall back to %s", older)
                         : format_string("copy it again from where it came (there is no older checkpoint beside it)");
    free(parent);
    free(older);
    return remedy;
}
// ---- writing ----

// A thread that writes while training goes on (saving.h). It must not end the process, so it only notes a failure.
typedef struct {
    pthread_t thread;
    int stop, done;                      // atomic: a request to it; it has ended, or is about to
    char* failure;                       // the error, owned; NULL: none
} CheckpointThread;
__attribute__((noreturn))
static inline void checkpoint_thread_end(CheckpointThread* t) {
    __atomic_store_n(&t->done, 1, __ATOMIC_RELEASE);
    pthread_exit(NULL);
}
// Ends the thread if that is asked for.
static inline void checkpoint_thread_look(CheckpointThread* t) {
    if (__atomic_load_n(&t->stop, __ATOMIC_ACQUIRE)) checkpoint_thread_end(t);
}

typedef struct {
    TrainState state;                    // a copy; its options stay the caller's and must live until the commit
    char *final_path, *temporary;        // owned
    SafeTensors files[CHECKPOINT_FILES]; // owned: those that this rank writes into,
    CheckpointPieces pieces[CHECKPOINT_PARTS]; // and the pieces that belong in them
    CheckpointSums sums;                 // of everything this rank wrote. Add them up over ranks before rank 0 commits.
    CheckpointThread* writer;            // that writes, a view; NULL: the main thread does
} CheckpointWriter;

static inline void checkpoint_writer_free(CheckpointWriter* w) {
    for (int f = 0; f < CHECKPOINT_FILES; f++) safetensors_close(&w->files[f]);
    checkpoint_free_pieces(w->pieces);
    free(w->final_path);
    free(w->temporary);
}

// Returns "PATH: cannot be WHAT: REASON; remedy". reason: errno
static inline char* checkpoint_failure(const CheckpointWriter* w, const char* path, const char* what, int reason) {
    bool is_full = reason == ENOSPC || reason == EDQUOT || reason == EFBIG;
    size_t bytes = (w->files[0].file_size + w->files[1].file_size) * size_max((size_t)w->state.shards, 1);
    char* out = path_parent(w->final_path);
    char* last = checkpoint_newest(out);
    bool is_step = checkpoint_name_step(path_name(w->final_path), "") >= 0;
    const char* why = path_reason(out, reason);
    char* first = why == no_inodes ? xstrdup("remove files")
                  : is_full        ? format_string("free %zu MB", bytes / 1000000 + 1)
                                   : xstrdup(reason == ENOENT   ? "make it a folder that every rank sees"
                                             : reason == EMFILE ? "resume"
                                                                : "make it writable");
    char* failure = format_string("%s: cannot be %s: %s; %s or choose another %s; the last good checkpoint is %s", path,
                                  what, why, first, is_step ? "--out" : "folder", last ? last : "none");
    free(first);
    free(last);
    free(out);
    return failure;
}
// Dies with that, by errno, and removes the temporary folder. A thread only ends; its failure is for the main thread.
__attribute__((noreturn))
static inline void checkpoint_fail(const CheckpointWriter* w, const char* path, const char* what) {
    int reason = errno;
    if (w->writer) {
        w->writer->failure = checkpoint_failure(w, path, what, reason);
        checkpoint_thread_end(w->writer);
    }
    // Folders are opened below
    for (int f = 0; f < CHECKPOINT_FILES; f++) if (w->files[f].source.path) close(w->files[f].fd);
    char* failure = checkpoint_failure(w, path, what, reason); // before files are removed
    // Every rank does it, because rank 0's watchdog may end rank 0, and removes nothing. Repeatedly, because another
    // rank may have just created a file in the folder.
    for (int tries = 0; tries < 20 && !folder_remove(w->temporary); tries++) usleep(5000);
    die("%s", failure);
}
static inline void checkpoint_require_written(const CheckpointWriter* w, bool written, const SafeTensors* file) {
    if (!written) checkpoint_fail(w, file->source.path, "written");
}

// Sets a checkpoint's path and contents; touches no file yet.
static inline void checkpoint_writer_init(CheckpointWriter* w, const char* path, const TrainState* s, int shards) {
    memset(w, 0, sizeof *w);
    w->state = *s;
    w->state.shards = shards;
    w->final_path = path_trim(path);
    w->temporary = folder_temporary(w->final_path);
}
// The same at OUT/step_NNNNNNNN.
static inline void checkpoint_writer_init_step(CheckpointWriter* w, const char* out, const TrainState* s, int shards) {
    char* path = format_string("%s/step_%08lld", out, s->step);
    checkpoint_writer_init(w, path, s, shards);
    free(path);
}

// Lists which pieces of each part belong in this rank's open files.
static inline void checkpoint_writer_pieces(CheckpointWriter* w) {
    for (int f = 0; f < checkpoint_kinds(&w->state); f++) {
        CheckpointTensor* tensors;
        int count = checkpoint_tensors(&w->state, (CheckpointFile)f, &tensors);
        checkpoint_add_pieces(w->pieces, &w->state, tensors, count, &w->files[f], 0);
        free(tensors);
    }
    checkpoint_sort_pieces(w->pieces);
}

// Makes the files for the whole model, or those of shard `shard` for these ranges of it.
static inline void checkpoint_create_files(CheckpointWriter* w, int shard, const CheckpointRange* ranges,
                                           int num_ranges) {
    json_t* metadata = json_pack("{s:s, s:s}", "format", CHECKPOINT_FORMAT, "layout", CHECKPOINT_LAYOUT);
    for (int f = 0; f < checkpoint_kinds(&w->state); f++) {
        SafeTensor* wanted;
        int count = checkpoint_wanted(&w->state, (CheckpointFile)f, ranges, num_ranges, &wanted);
        char* path = checkpoint_file_path(w->temporary, &w->state, (CheckpointFile)f, shard);
        checkpoint_require_written(w, safetensors_create(&w->files[f], path, wanted, count, metadata), &w->files[f]);
        checkpoint_free_wanted(wanted, count);
        free(path);
    }
    json_decref(metadata);
    checkpoint_writer_pieces(w);
}

static inline void checkpoint_make_folder(const CheckpointWriter* w) {
    if (!folder_begin(w->final_path)) checkpoint_fail(w, w->temporary, "made");
}
// Begins a checkpoint at exactly this path. The path is free, an empty folder, or a checkpoint of the same step,
// which is replaced.
static inline void checkpoint_begin_at(CheckpointWriter* w, const char* path, const TrainState* s) {
    checkpoint_writer_init(w, path, s, 0);
    checkpoint_make_folder(w);
    checkpoint_create_files(w, 0, NULL, 0);
}
// Removes the remains of crashes under `out`. A complete checkpoint that could not get its name stays until there is a
// later one.
static inline void checkpoint_remove_stale(const char* out) {
    long long *steps, *saved, newest = checkpoint_list(out, "", &saved) > 0 ? saved[0] : -1;
    int count = checkpoint_list(out, ".tmp_", &steps);
    for (int i = 0; i < count; i++) {
        char *stale = format_string("%s/.tmp_step_%08lld", out, steps[i]),
             *state = format_string("%s/state.json", stale);
        if (steps[i] < newest || !path_exists(state)) folder_remove(stale);
        free(stale);
        free(state);
    }
    free(steps);
    free(saved);
}

// Begins OUT/step_NNNNNNNN and reserves its disk space; removes the remains of crashes under `out`.
static inline void checkpoint_begin(CheckpointWriter* w, const char* out, const TrainState* s) {
    checkpoint_remove_stale(out);
    checkpoint_writer_init_step(w, out, s, 0);
    checkpoint_make_folder(w);
    checkpoint_create_files(w, 0, NULL, 0);
}

// Writes places [first, last) of a tensor. host: of state.dtype for CHECKPOINT_MODEL, otherwise float.
static inline void checkpoint_write_places(CheckpointWriter* w, const CheckpointTensor* t, size_t first, size_t last,
                                           const void* host) {
    SafeTensors* file = &w->files[checkpoint_part_file(t->part)];
    size_t size = dtype_size(checkpoint_part_dtype(&w->state, t->part));
    for (size_t place = first, n; place < last; place += n) {
        const CheckpointPiece* p = checkpoint_find_piece(&w->pieces[t->part], place);
        invariant(p != NULL, "%s: element %zu of tensor '%s' is in none of the ranges that this rank was to write",
                  w->final_path, place - t->begin, t->name);
        n = size_min(p->end, last) - place;
        const char* data = (const char*)host + (place - first) * size;
        bool written = pwrite_all(file->fd, data, n * size, p->offset + (place - p->begin) * size);
        checkpoint_require_written(w, written, file);
    }
    w->sums.checksum[t->part] += checksum_elements(host, size, last - first, first);
    w->sums.elements[t->part] += last - first;
}

// Writes elements [begin, end) of unit u, laid out as in memory (with wte's padding rows,
// which are left out of the file).
// host (end - begin): of state.dtype for CHECKPOINT_MODEL, otherwise float.
static inline void checkpoint_write_unit(CheckpointWriter* w, CheckpointPart part, int u, size_t begin, size_t end,
                                         const void* host) {
    invariant(checkpoint_has_part(&w->state, part),
              "%s: a checkpoint in %s %s optimizer state has no part \"%s\" to write", w->final_path,
              dtype_name(w->state.dtype), w->state.has_optimizer ? "with" : "without", checkpoint_part_names[part]);
    CheckpointRange range = { u, begin, end };
    size_t size = dtype_size(checkpoint_part_dtype(&w->state, part)), first, last;
    if (w->writer) checkpoint_thread_look(w->writer);
    for (int i = 0; i < unit_tensors(u); i++) {
        CheckpointTensor t = checkpoint_tensor(w->state.config, part, u, i);
        checkpoint_range_places(&t, range, &first, &last);
        if (first < last)
            checkpoint_write_places(w, &t, first, last,
                                    (const char*)host + (t.offset + (first - t.begin) - begin) * size);
    }
}

static inline void checkpoint_sync_files(CheckpointWriter* w) {
    for (int f = 0; f < checkpoint_kinds(&w->state); f++)
        checkpoint_require_written(w, safetensors_sync(&w->files[f]), &w->files[f]);
}

// Removes the checkpoint OUT/PREFIXstep_NNNNNNNN. It loses its name first,
// so that half of it is not taken for all of it.
static inline void checkpoint_remove(const char* out, const char* prefix, long long step) {
    char* path = format_string("%s/%sstep_%08lld", out, prefix, step);
    char* condemned = format_string("%s/.tmp_step_%08lld", out, step);
    if (!folder_remove(condemned) || rename(path, condemned) != 0 || !folder_remove(condemned))
        warn("%s: an old checkpoint could not be removed: %s", path, strerror(errno));
    free(path);
    free(condemned);
}

// Removes all checkpoints except the `keep` newest (0: keeps all) and the one of `step`.
// Removes what that one has replaced.
static inline void checkpoint_prune(const char* out, long long step, long long keep) {
    checkpoint_remove_stale(out); // also a complete one, because this checkpoint is later
    long long* steps;
    int count = checkpoint_list(out, "", &steps);
    for (int i = 0; i < count; i++) if (keep > 0 && i >= keep && steps[i] != step) checkpoint_remove(out, "", steps[i]);
    free(steps);
    count = checkpoint_list(out, CHECKPOINT_REPLACED, &steps);
    for (int i = 0; i < count; i++) if (steps[i] <= step) checkpoint_remove(out, CHECKPOINT_REPLACED, steps[i]);
    free(steps);
}

// Gives the filled folder its final name. A folder, or a link to one, that already has this name is first moved
// to a name that checkpoint_newest knows, so that there is a good checkpoint at every instant. Whatever fails, the
// new one stays.
static inline void checkpoint_publish(CheckpointWriter* w) {
    bool is_link = path_is_link(w->final_path);
    if (folder_publish(w->final_path)) return;
    bool is_taken = errno == ENOTEMPTY || errno == EEXIST || (errno == ENOTDIR && is_link);
    if (!is_taken) folder_die_complete(w->final_path);
    char* parent = path_parent(w->final_path);
    char* aside = format_string("%s/" CHECKPOINT_REPLACED "%s", parent, path_name(w->final_path));
    if (!folder_remove(aside) || rename(w->final_path, aside) != 0 || !folder_publish(w->final_path))
        folder_die_complete(w->final_path);
    free(aside);
    free(parent);
}

// Dies unless every element was written exactly once, by whichever rank.
static inline void checkpoint_require_whole(const CheckpointWriter* w) {
    for (int part = 0; part < CHECKPOINT_PARTS; part++) {
        uint64_t written = w->sums.elements[part], expected = checkpoint_part_elements(&w->state, (CheckpointPart)part);
        invariant(written == expected,
                  "%s: %llu of the %llu elements of \"%s\" were written: the ranks' shares do not add up to the model",
                  w->final_path, (unsigned long long)written, (unsigned long long)expected,
                  checkpoint_part_names[part]);
    }
}

// Syncs all bytes and gives the checkpoint its final name. Only then may older ones go.
static inline void checkpoint_commit(CheckpointWriter* w) {
    w->writer = NULL; // it has ended
    checkpoint_require_whole(w);
    checkpoint_sync_files(w);
    char* text = train_state_text(&w->state, w->sums.checksum);
    char* path = format_string("%s/state.json", w->temporary);
    if (!file_write(path, text, strlen(text))) checkpoint_fail(w, path, "written");
    checkpoint_publish(w);
    free(path);
    free(text);
    checkpoint_writer_free(w);
}

// ---- reading ----

// Whose errors of compressed gradients are next to the model (errors_file.h). ranks 0: there are none.
typedef struct { char method[24]; int ranks; } CheckpointErrors;
static inline char* checkpoint_errors_path(const char* path, CheckpointErrors e, int rank) {
    return format_string("%s/errors_%s_%05d_of_%05d.safetensors", path, e.method, rank, e.ranks);
}
static inline CheckpointErrors checkpoint_errors(const char* path) {
    CheckpointErrors found = { "", 0 }, one = found;
    int rank;
    DIR* folder = opendir(path);
    require(folder || !too_many_files(), "%s: cannot be read: %s", path, open_error(errno));
    if (folder == NULL) return found;
    for (struct dirent* e = readdir(folder); e != NULL; e = readdir(folder))
        if (sscanf(e->d_name, "errors_%23[a-z0-9-]_%d_of_%d.safetensors", one.method, &rank, &one.ranks) == 3)
            found = one;
    closedir(folder);
    return found;
}

typedef struct { char* path; int fd, shard; } CheckpointOpenFile; // path owned; NULL: none is open

typedef struct {
    TrainState state;                    // options owned
    char *path, *remedy;                 // owned
    CheckpointPieces pieces[CHECKPOINT_PARTS]; // where everything is, and
    CheckpointOpenFile open[CHECKPOINT_FILES]; // the file of each kind that was read last
    uint64_t stored[CHECKPOINT_PARTS];   // checksums by state.json
    CheckpointSums sums;                 // of everything that was read. Add them up over ranks before checkpoint_close.
    DType into;                          // the weights' precision in memory, set by the caller; fp32 holds all of them
} CheckpointReader;

// Dies for a folder without state.json: names the kind of folder, and the right path.
__attribute__((noreturn))
static inline void checkpoint_die_foreign(const char* path) {
    char* config = format_string("%s/config.json", path);
    char* newest = checkpoint_newest(path);
    require(!path_exists(config), HUGGINGFACE_LAYOUT, path);
    require(newest == NULL, "%s: is a folder of checkpoints, not a checkpoint; its newest is %s", path, newest);
    die("%s: is not a checkpoint: it has no state.json; give a folder such as DIR/step_00000100", path);
}

// Finds where everything is in the files f, and checks these files and their index.
static inline void checkpoint_open_files(CheckpointReader* r, CheckpointFile f) {
    json_t *made = checkpoint_scan_files(r->pieces, r->path, &r->state, f, r->remedy), *index = NULL;
    char* path = checkpoint_index_path(r->path, f);
    if (r->state.shards > 0) {
        FileSource from = { path, r->remedy };
        size_t n;
        char* text = file_read(from, CHECKPOINT_MAX_INDEX, &n);
        checkpoint_check_index(text, n, &index, made, from);
        free(text);
    }
    free(path);
    json_decref(index);
    json_decref(made);
}

// Opens a checkpoint and checks all of it except the values, which are checked while they are read.
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
    for (int f = 0; f < checkpoint_kinds(&r->state); f++) checkpoint_open_files(r, (CheckpointFile)f);
}

static inline void checkpoint_close_file(CheckpointOpenFile* o) {
    if (o->path != NULL) close(o->fd);
    free(o->path);
    o->path = NULL;
}
// Opens file `shard` of a kind, and closes the one of that kind that was open.
static inline const CheckpointOpenFile* checkpoint_use_file(CheckpointReader* r, CheckpointFile f, int shard) {
    CheckpointOpenFile* o = &r->open[f];
    if (o->path != NULL && o->shard == shard) return o;
    checkpoint_close_file(o);
    o->path = checkpoint_file_path(r->path, &r->state, f, shard);
    o->shard = shard;
    o->fd = file_open(file_source(o->path, r->remedy), O_RDONLY, NULL);
    return o;
}

// Reads at most n elements of a stored part from `place` on as floats,
// as many as fit one piece and a small buffer; returns how many.
static inline size_t checkpoint_read_some(CheckpointReader* r, CheckpointPart part, CheckpointPart stored_part,
                                          size_t place, size_t n, float* host) {
    const CheckpointPiece* p = checkpoint_find_piece(&r->pieces[stored_part], place);
    invariant(p != NULL, "%s: element %zu of the model has no \"%s\" to read", r->path, place,
              checkpoint_part_names[stored_part]);
    const CheckpointOpenFile* file = checkpoint_use_file(r, checkpoint_part_file(stored_part), p->shard);
    DType dtype = checkpoint_part_dtype(&r->state, stored_part);
    uint32_t buffer[1 << 14];
    size_t size = dtype_size(dtype), count = size_min(size_min(n, p->end - place), sizeof buffer / sizeof(float));
    bool complete = pread_all(file->fd, buffer, count * size, p->offset + (place - p->begin) * size);
    require_file(file_source(file->path, r->remedy), complete, "cannot be read: %s",
                 errno ? strerror(errno) : "the file shrank");
    r->sums.checksum[part] += checksum_elements(buffer, size, count, place);
    convert_dtype(host, DTYPE_F32, buffer, dtype, count);
    return count;
}

// Returns the part that stores the values of `part`: in fp32 the model is its own master copy.
static inline CheckpointPart checkpoint_stored_part(const TrainState* s, CheckpointPart part) {
    return part == CHECKPOINT_MASTER && s->dtype == DTYPE_F32 ? CHECKPOINT_MODEL : part;
}

// Elements [begin, end) of unit u in memory layout into host (end - begin): fp32, padding 0. Only these are read from
// the disk. Read nothing twice: the checksums would count it twice.
static inline void checkpoint_read_unit(CheckpointReader* r, CheckpointPart part, int u, size_t begin, size_t end,
                                        float* host) {
    CheckpointPart stored_part = checkpoint_stored_part(&r->state, part);
    require(stored_part == CHECKPOINT_MODEL || r->state.has_optimizer,
            "%s: holds weights only; start from it with --init-from instead of resuming", r->path);
    CheckpointRange range = { u, begin, end };
    memset(host, 0, (end - begin) * sizeof(float));
    for (int i = 0; i < unit_tensors(u); i++) {
        CheckpointTensor t = checkpoint_tensor(r->state.config, part, u, i);
        size_t first, last, at = 0;
        checkpoint_range_places(&t, range, &first, &last);
        if (first == last) continue;
        float* here = host + (t.offset + (first - t.begin) - begin);
        for (size_t place = first; place < last; )
            place += checkpoint_read_some(r, part, stored_part, place, last - place, here + (place - first));
        r->sums.elements[part] += last - first;
        size_t large = part <= CHECKPOINT_MASTER ? count_too_large(here, last - first, r->into, &at) : 0;
        CheckpointSums more = { { 0 }, { 0 }, large, first + at };
        checkpoint_sums_add(&r->sums, &more);
    }
}

// Dies if weights that were read are too large for their new precision, because every loss would be NaN.
static inline void checkpoint_require_narrow(const CheckpointReader* r) {
    CheckpointTensor *tensors, *t;
    if (r->sums.large == 0) return;
    checkpoint_tensors(&r->state, CHECKPOINT_FILE_MODEL, &tensors);
    for (t = tensors; r->sums.first_large < t->begin || r->sums.first_large >= t->end; t++) {}
    die("%s: %llu of its weights are too large for %s, the first of them in tensor '%s'; choose %sfp32", r->path,
        (unsigned long long)r->sums.large, dtype_name(r->into), t->name, r->into == DTYPE_F16 ? "bf16 or " : "");
}

// Checks the checksum of each part that was read completely, and that all weights fit their precision; frees r.
static inline void checkpoint_close(CheckpointReader* r) {
    for (int part = 0; part < CHECKPOINT_PARTS; part++) {
        CheckpointPart stored_part = checkpoint_stored_part(&r->state, (CheckpointPart)part);
        char* path = checkpoint_all_files_path(r->path, &r->state, checkpoint_part_file(stored_part));
        bool all = r->sums.elements[part] == checkpoint_part_elements(&r->state, stored_part);
        require(!all || r->sums.checksum[part] == r->stored[stored_part],
                "%s: the values of \"%s\" do not match their checksum: the file is damaged; %s", path,
                checkpoint_part_names[stored_part], r->remedy);
        free(path);
    }
    checkpoint_require_narrow(r);
    for (int f = 0; f < CHECKPOINT_FILES; f++) checkpoint_close_file(&r->open[f]);
    checkpoint_free_pieces(r->pieces);
    free(r->state.options);
    free(r->path);
    free(r->remedy);
}

// Dies unless a run with this optimizer can continue from the checkpoint.
static inline void checkpoint_require_optimizer(const CheckpointReader* r, bool is_muon) {
    static const char* const names[] = { "AdamW", "Muon" };
    require(r->state.has_optimizer,
            "--resume: %s has weights only, no optimizer state; use --init-from to start from them", r->path);
    require(r->state.is_muon == is_muon,
            "--resume: %s has the state of %s, and this program trains with %s; --init-from loads the weights alone",
            r->path, names[r->state.is_muon], names[is_muon]);
}

// Dies unless the checkpoint has the shape that the run asks for.
static inline void checkpoint_require_config(const CheckpointReader* r, GPT2Config wanted) {
    GPT2Config c = r->state.config;
    require(c.L == wanted.L, "%s has %d layers, this run asks for %d", r->path, c.L, wanted.L);
    require(c.NH == wanted.NH, "%s has %d heads, this run asks for %d", r->path, c.NH, wanted.NH);
    require(c.C == wanted.C, "%s has %d channels, this run asks for %d", r->path, c.C, wanted.C);
    require(c.V == wanted.V, "%s has a vocabulary of %d tokens, this run asks for %d", r->path, c.V, wanted.V);
    require(c.max_T == wanted.max_T, "%s has sequences of at most %d tokens, this run asks for %d", r->path, c.max_T,
            wanted.max_T);
}
#endif
