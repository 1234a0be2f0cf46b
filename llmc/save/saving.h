/*
saving.h - a save for which training stops only while the state is copied.

    begin   makes the folder and the files                                        collective
    start   copies this rank's ranges into a snapshot; a thread writes from there
    end     gives the checkpoint its name; a thread then removes older ones       collective, once all threads are done

The thread writes and syncs this rank's files. It has no communicator, prints nothing, and does not end the process: a
failure waits until the end. One save at a time is under way. Without a snapshot the steps are the same, but there are
no threads, and training waits for the disk. Either way the files are the same to the byte.

saving_end is that of one device; ranks_checkpoint.h has that of several ranks.
*/
#ifndef LLMC_SAVING_H
#define LLMC_SAVING_H
#include "param_ranges.h"

// An array that is saved in a file of its own next to the model: the errors of compressed gradients.
typedef struct {
    size_t (*elements)(const void* self); // how many; NULL: there is no such array
    // Makes the file w->files[0] in w->temporary, for one fp32 tensor of these elements, or dies by checkpoint_fail.
    // Returns them, on the device, a view; the backward pass may change them.
    const float* (*create)(void* self, CheckpointWriter* w);
    void* self;
} SaveBeside;

typedef struct {
    char* memory;             // (bytes) the snapshot, owned; NULL: none is taken
    size_t bytes;
    bool strict;              // strict mode: it is full of NaN until it is copied into
    bool under_way;           // a save has begun and not ended
    bool writes;              // this rank writes a part of the model
    CheckpointWriter w;       // of that part
    CheckpointWriter beside;  // of this rank's file next to the model, if there is one
    const float* values;      // (num_values) what to write into that, a view
    size_t num_values;
    ParamRange* ranges;       // (num_ranges) what to write, owned
    int num_ranges;
    char* out;                // the folder of the checkpoints, owned
    long long step, keep;     // of w.state; how many checkpoints stay, 0: all
    char* options;            // of w.state, owned
    CheckpointThread writer;
    bool has_thread;          // one that writes or removes
} Saving;

// ---- the snapshot ----

// Copies one array of a range to place *at. Returns the copy; NULL: there is no such array.
static inline void* saving_copy(Saving* s, size_t* at, bool on_host, const void* from, size_t bytes) {
    if (from == NULL) return NULL;
    char* to = s->memory + *at;
    *at += bytes;
    invariant(*at <= s->bytes, "the snapshot has %zu bytes, fewer than what this rank saves", s->bytes);
    if (on_host) memcpy(to, from, bytes);
    else snapshot_copy(to, from, bytes);
    return to;
}

// Puts copies in place of all that is to be written, except what another rank writes. fp32 comes first, so that it is
// aligned.
static inline void saving_copy_all(Saving* s) {
    size_t at = 0;
    if (s->strict) memset(s->memory, 0xff, s->bytes);
    for (ParamRange* p = s->ranges; p < s->ranges + s->num_ranges; p++) {
        if (p->is_replicated) continue;
        size_t bytes = p->n * sizeof(float);
        p->master = (float*)saving_copy(s, &at, p->on_host, p->master, bytes);
        p->m = (float*)saving_copy(s, &at, p->on_host, p->m, bytes);
        p->v = (float*)saving_copy(s, &at, p->on_host, p->v, bytes);
        p->momentum = (float*)saving_copy(s, &at, p->on_host, p->momentum, bytes);
    }
    char* beside = s->memory + at;
    at += s->num_values * sizeof(float);
    for (ParamRange* p = s->ranges; p < s->ranges + s->num_ranges; p++) {
        if (p->is_replicated) continue;
        p->params = (floatX*)saving_copy(s, &at, p->on_host, p->params, p->n * sizeof(floatX));
        p->on_host = true;
    }
    if (s->num_values == 0) return;
    device_to_host(beside, s->values, s->num_values * sizeof(float)); // waits, as they change before the next update
    s->values = (float*)(void*)beside;
}

// ---- writing ----

static inline void saving_write_beside(Saving* s) {
    SafeTensors* file = &s->beside.files[0];
    float* host = new_array(float, STAGED);
    for (size_t k = 0, n; k < s->num_values; k += n) {
        n = size_min(STAGED, s->num_values - k);
        const void* values = param_range_get(s->memory != NULL, host, s->values + k, n * sizeof(float));
        checkpoint_require_written(&s->beside, safetensors_write(file, &file->tensors[0], k, n, values, DTYPE_F32),
                                   file);
    }
    checkpoint_require_written(&s->beside, safetensors_sync(file), file);
    free(host);
}
static inline void saving_write(Saving* s) {
    if (s->writes) param_ranges_write(s->ranges, s->num_ranges, &s->w);
    if (s->writes) checkpoint_sync_files(&s->w);
    if (s->num_values > 0) saving_write_beside(s);
}

static inline void* saving_thread(void* self) {
    Saving* s = (Saving*)self;
    host_set_threads(1); // the cores belong to training
    while (!snapshot_is_done()) {
        checkpoint_thread_look(&s->writer);
        usleep(200);
    }
    saving_write(s);
    checkpoint_thread_end(&s->writer);
}

// True while the thread writes.
static inline bool saving_is_writing(const Saving* s) {
    return s->has_thread && !__atomic_load_n(&s->writer.done, __ATOMIC_ACQUIRE);
}
static inline void saving_start_thread(Saving* s, void* (*function)(void*)) {
    int error = thread_start(&s->writer.thread, function, s);
    require(error == 0, "cannot start a thread for checkpoints: %s", strerror(error));
    s->has_thread = true;
}
// Returns when the thread has ended.
static inline void saving_join(Saving* s) {
    if (s->has_thread) pthread_join(s->writer.thread, NULL);
    s->has_thread = false;
}

// Registered with atexit after folder_abandon, so it runs before that removes the folder.
static Saving* saving_at_exit; // the one with a thread
static inline void saving_stop_at_exit(void) {
    Saving* s = saving_at_exit;
    if (s == NULL || !s->has_thread || pthread_equal(s->writer.thread, pthread_self())) return;
    __atomic_store_n(&s->writer.stop, 1, __ATOMIC_RELEASE);
    saving_join(s);
}

static inline void saving_init(Saving* s, const char* out, const TrainState* state, long long keep) {
    saving_join(s); // older checkpoints are gone
    s->out = xstrdup(out);
    memset(&s->w, 0, sizeof s->w);
    memset(&s->beside, 0, sizeof s->beside);
    s->step = state->step;
    s->keep = keep;
    s->options = state->options;
}
// Begin has filled in w, writes, beside and values. Returns when the ranges may change.
static inline void saving_start(Saving* s, const ParamRange* ranges, int num_ranges) {
    s->under_way = true;
    s->num_ranges = num_ranges;
    s->ranges = (ParamRange*)memcpy(new_array(ParamRange, num_ranges), ranges, (size_t)num_ranges * sizeof *ranges);
    if (s->memory == NULL) { saving_write(s); return; }
    if (!s->writes) s->num_ranges = 0;
    saving_copy_all(s);
    memset(&s->writer, 0, sizeof s->writer);
    s->w.writer = s->beside.writer = &s->writer;
    if (saving_at_exit == NULL) invariant(atexit(saving_stop_at_exit) == 0, "cannot register a function with atexit");
    saving_at_exit = s;
    saving_start_thread(s, saving_thread);
}

static inline void* saving_remove(void* self) {
    Saving* s = (Saving*)self;
    checkpoint_prune(s->out, s->step, s->keep);
    free(s->out);
    return NULL;
}
// After the commit. With a snapshot, the rank that removes older checkpoints does so on a thread, because a GB takes
// the disk 0.2 s.
static inline void saving_finish(Saving* s, bool removes) {
    free(s->options);
    free(s->ranges);
    s->under_way = false;
    if (!removes) free(s->out);
    else if (s->memory) saving_start_thread(s, saving_remove);
    else saving_remove(s);
}
static inline void saving_free(Saving* s) {
    saving_join(s);
    snapshot_free(s->memory);
}

// ---- on one device ----

// Begins a checkpoint under `out`, after which all but the `keep` newest are removed (0: none). The ranges are the
// model. state's options are its own from here on. Returns when the ranges may change.
static inline void saving_begin(Saving* s, const char* out, const TrainState* state, long long keep,
                                const ParamRange* ranges, int num_ranges) {
    saving_init(s, out, state, keep);
    checkpoint_begin(&s->w, out, state);
    s->writes = true;
    saving_start(s, ranges, num_ranges);
}
// Dies if the thread has failed.
static inline void saving_end(Saving* s) {
    saving_join(s);
    require(s->writer.failure == NULL, "%s", s->writer.failure); // which removes the folder
    checkpoint_commit(&s->w);
    saving_finish(s, true);
}
#endif
