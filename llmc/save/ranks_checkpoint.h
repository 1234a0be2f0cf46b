/*
ranks_checkpoint.h - how several ranks write one checkpoint (checkpoint.h).

    rank 0: checkpoint_begin - the others: checkpoint_attach - every rank: checkpoint_write_unit for what it owns - the
    others: checkpoint_detach - rank 0, after adding up everyone's w.sums: ranks_checkpoint_commit

    sharded, every writer into files of its own - rank 0: checkpoint_begin_sharded - every writer, also rank 0:
    checkpoint_attach_shard - then as above

The caller puts barriers between these.
*/
#ifndef LLMC_RANKS_CHECKPOINT_H
#define LLMC_RANKS_CHECKPOINT_H
#include "checkpoint.h"

// Joins what rank 0 has begun with the same arguments.
static inline void checkpoint_attach(CheckpointWriter* w, const char* out, const TrainState* s) {
    char* path = checkpoint_step_path(out, s);
    checkpoint_writer_init(w, path, s, 0);
    free(path);
    for (int f = 0; f < checkpoint_kinds(s); f++) {
        path = checkpoint_file_path(w->temporary, &w->state, (CheckpointFile)f, 0);
        safetensors_open_with(&w->files[f], path, O_RDWR, "--out must be a folder that every rank sees");
        free(path);
    }
    checkpoint_writer_pieces(w);
}

// Begins OUT/step_NNNNNNNN for files that each writer, rank 0 included, makes by checkpoint_attach_shard.
static inline void checkpoint_begin_sharded(const char* out, const TrainState* s) {
    checkpoint_remove_stale(out);
    CheckpointWriter w;
    char* path = checkpoint_step_path(out, s);
    checkpoint_writer_init(&w, path, s, 0);
    if (!folder_begin(w.final_path)) checkpoint_fail(&w, w.temporary, "made");
    checkpoint_writer_free(&w);
    free(path);
}

// Makes the files of writer `shard` (from 0) of `shards`, and reserves their space: one for the model, one for the
// optimizer, with room for these ranges of every part. No two writers' ranges overlap, and all of them together are the
// model.
static inline void checkpoint_attach_shard(CheckpointWriter* w, const char* out, const TrainState* s, int shard,
                                           int shards, const CheckpointRange* ranges, int num_ranges) {
    invariant(shard >= 0 && shard < shards && shards <= CHECKPOINT_MAX_SHARDS,
              "shard %d of %d: a checkpoint has 1 to %d shards, counted from 0", shard, shards, CHECKPOINT_MAX_SHARDS);
    char* path = checkpoint_step_path(out, s);
    checkpoint_writer_init(w, path, s, shards);
    checkpoint_create_files(w, shard, ranges, num_ranges);
    free(path);
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
static inline void ranks_checkpoint_commit(CheckpointWriter* w, long long keep) {
    if (w->state.shards > 0) {
        checkpoint_require_whole(w);
        checkpoint_sync_files(w); // the indices are made of what is in the files
        checkpoint_write_indices(w);
    }
    checkpoint_commit(w, keep);
}
#endif
