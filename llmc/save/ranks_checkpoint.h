/*
ranks_checkpoint.h - how several ranks save their ranges (param_ranges.h) as one checkpoint (checkpoint.h):
ranks_saving_begin and ranks_saving_end, between which training goes on (saving.h), and their steps.

    rank 0: checkpoint_begin - the others: checkpoint_attach - every rank: checkpoint_write_unit for what it owns - the
    others: checkpoint_detach - rank 0, after adding up everyone's w.sums: ranks_checkpoint_commit

    sharded, every writer into files of its own - rank 0: checkpoint_begin_sharded - every writer, also rank 0:
    checkpoint_attach_shard - then as above

with barriers between these.
*/
#ifndef LLMC_RANKS_CHECKPOINT_H
#define LLMC_RANKS_CHECKPOINT_H
#include "../comm/comm.h"
#include "saving.h"

// Joins what rank 0 has begun with the same arguments.
static inline void checkpoint_attach(CheckpointWriter* w, const char* out, const TrainState* s) {
    checkpoint_writer_init_step(w, out, s, 0);
    for (int f = 0; f < checkpoint_kinds(s); f++) {
        char* path = checkpoint_file_path(w->temporary, &w->state, (CheckpointFile)f, 0);
        safetensors_open_with(&w->files[f], path, O_RDWR, "--out must be a folder that every rank sees");
        free(path);
    }
    checkpoint_writer_pieces(w);
}

// Begins OUT/step_NNNNNNNN for files that each writer, rank 0 included, makes by checkpoint_attach_shard.
static inline void checkpoint_begin_sharded(const char* out, const TrainState* s) {
    checkpoint_remove_stale(out);
    CheckpointWriter w;
    checkpoint_writer_init_step(&w, out, s, 0);
    checkpoint_make_folder(&w);
    checkpoint_writer_free(&w);
}

// Makes the files of writer `shard` (from 0) of `shards`, and reserves their space: one for the model, one for the
// optimizer, with room for these ranges of every part. No two writers' ranges overlap, and all of them together are the
// model.
static inline void checkpoint_attach_shard(CheckpointWriter* w, const char* out, const TrainState* s, int shard,
                                           int shards, const CheckpointRange* ranges, int num_ranges) {
    invariant(shard >= 0 && shard < shards && shards <= CHECKPOINT_MAX_SHARDS,
              "shard %d of %d: a checkpoint has 1 to %d shards, counted from 0", shard, shards, CHECKPOINT_MAX_SHARDS);
    checkpoint_writer_init_step(w, out, s, shards);
    checkpoint_create_files(w, shard, ranges, num_ranges);
}

// Ends an attached rank's share: what it wrote is on the disk. w.sums stay.
static inline void checkpoint_detach(CheckpointWriter* w) {
    checkpoint_sync_files(w);
    checkpoint_writer_free(w);
}

// For a sharded checkpoint: checks the files that all writers have put into the folder, and writes the indices.
static inline void checkpoint_write_indices(const CheckpointWriter* w) {
    CheckpointPieces pieces[CHECKPOINT_PARTS];
    memset(pieces, 0, sizeof pieces);
    for (int f = 0; f < checkpoint_kinds(&w->state); f++) {
        json_t* index = checkpoint_scan_files(pieces, w->temporary, &w->state, (CheckpointFile)f,
                                              "--out must be a folder that every rank sees");
        char *text = json_dumps(index, JSON_INDENT(2)), *path = checkpoint_index_path(w->temporary, (CheckpointFile)f);
        require(text != NULL, "out of host memory while writing %s", path);
        if (!file_write(path, text, strlen(text))) checkpoint_fail(w, path, "written");
        free(path);
        free(text);
        json_decref(index);
    }
    checkpoint_free_pieces(pieces);
}
// As checkpoint_commit, after all ranks have written.
static inline void ranks_checkpoint_commit(CheckpointWriter* w) {
    if (w->state.shards > 0) {
        checkpoint_require_whole(w);
        checkpoint_sync_files(w); // the indices are made from the files
        checkpoint_write_indices(w);
    }
    checkpoint_commit(w);
}

// ---- all together ----

// The ranks that save: this one is number `writer` of `writers`, or -1 if another rank saves the same state. Rank 0 is
// writer 0.
typedef struct {
    int writer, writers;
    bool sharded; // each writer saves files of its own
    SaveBeside beside; // every rank, writer or not, saves this
} SaveShare;
static inline size_t save_beside_elements(const SaveShare* s) {
    return s->beside.elements ? s->beside.elements(s->beside.self) : 0;
}

// A sharded checkpoint's writer says first which elements it will write.
typedef struct { CheckpointRange* ranges; int count, unit; } RangeList;
static inline void run_list(void* self, size_t at, size_t k, size_t n, bool is_replicated) {
    RangeList* r = (RangeList*)self;
    CheckpointRange range = { r->unit, at, at + n };
    (void)k;
    if (is_replicated) return; // another rank writes it
    r->ranges = grown_array(CheckpointRange, r->ranges, r->count);
    r->ranges[r->count++] = range;
}
static inline void param_ranges_attach_shard(const ParamRange* ranges, int num_ranges, CheckpointWriter* w,
                                             const char* out, const TrainState* s, SaveShare share) {
    RangeList list = { NULL, 0, 0 };
    for (const ParamRange* p = ranges; p < ranges + num_ranges; p++) {
        list.unit = p->unit;
        param_range_runs(s->config, p, p->begin, p->begin + p->n, run_list, &list);
    }
    checkpoint_attach_shard(w, out, s, share.writer, share.writers, list.ranges, list.count);
    free(list.ranges);
}

// After each rank has written or read its share of a checkpoint: the sums become those of all ranks together.
static inline void checkpoint_add_up(Comm* c, CheckpointSums* sums) {
    CheckpointSums* all = (CheckpointSums*)control_gather_array(c->world->control, sums, sizeof *sums);
    for (int q = 1; all && q < c->size; q++) checkpoint_sums_add(sums, &all[q]);
    free(all);
    control_share(c->world->control, sums, sizeof *sums);
}

// As saving_begin. The writers' pieces together are the model. Collective over c, the world.
static inline void ranks_saving_begin(Saving* s, Comm* c, const char* out, const TrainState* state, long long keep,
                                      SaveShare share, const ParamRange* ranges, int num_ranges) {
    saving_init(s, out, state, keep);
    s->writes = share.writer >= 0;
    s->num_values = save_beside_elements(&share);
    checkpoint_writer_init_step(&s->beside, out, state, c->size); // as many files, if the disk is full
    if (c->rank == 0 && share.sharded) checkpoint_begin_sharded(out, state);
    else if (c->rank == 0) checkpoint_begin(&s->w, out, state);
    comm_barrier(c); // now the folder exists
    if (s->num_values > 0) s->values = share.beside.create(share.beside.self, &s->beside);
    if (s->writes && share.sharded) param_ranges_attach_shard(ranges, num_ranges, &s->w, out, state, share);
    else if (s->writes && c->rank > 0) checkpoint_attach(&s->w, out, state);
    saving_start(s, ranges, num_ranges);
}

// As saving_end: dies on every rank if the thread of any rank has failed. No rank returns before the checkpoint has its
// name. Collective.
static inline void ranks_saving_end(Saving* s, Comm* c) {
    Control* control = c->world->control;
    saving_join(s);
    char* failure = control_first_error(control, s->writer.failure);
    if (failure) folder_remove(s->beside.temporary); // no rank writes any more
    control_die_together(control, failure, "");
    checkpoint_add_up(c, &s->w.sums);
    if (c->rank == 0) ranks_checkpoint_commit(&s->w);
    else checkpoint_writer_free(&s->w);
    checkpoint_writer_free(&s->beside);
    comm_barrier(c);
    saving_finish(s, c->rank == 0);
}
#endif
