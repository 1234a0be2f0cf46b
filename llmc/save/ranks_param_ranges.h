/* ranks_param_ranges.h - pieces (param_ranges.h) that several ranks save as one checkpoint. */
#ifndef LLMC_RANKS_PARAM_RANGES_H
#define LLMC_RANKS_PARAM_RANGES_H
#include "../comm/comm.h"
#include "param_ranges.h"
#include "ranks_checkpoint.h"

// Who saves: this rank is number `writer` of `writers`, or -1 where another rank saves the same state.
// Rank 0 is writer 0.
typedef struct {
    int writer, writers;
    bool sharded; // each writer saves files of its own
    // Every rank, writer or not, makes a file of its own, w->files[0], in w->temporary,
    // or dies by checkpoint_fail. NULL: none.
    void (*beside)(void* self, CheckpointWriter* w);
    void* beside_self;
} SaveShare;

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

static inline void param_ranges_save_beside(Comm* c, const char* out, const TrainState* state, SaveShare share) {
    CheckpointWriter w;
    char* path = checkpoint_step_path(out, state);
    checkpoint_writer_init(&w, path, state, c->size); // as many files: that is what a full disk has no room for
    share.beside(share.beside_self, &w);
    checkpoint_writer_free(&w);
    free(path);
}

// Saves a checkpoint under `out`, and removes all but the `keep` newest (0: none).
// Collective over c, which is the world.
// The writers' pieces together are the model. No rank returns before the checkpoint has its name.
static inline void ranks_pieces_save(Comm* c, const char* out, const TrainState* state, long long keep, SaveShare share,
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
    checkpoint_add_up(c, &w.sums); // all ranks have written
    if (c->rank == 0) ranks_checkpoint_commit(&w, keep);
    comm_barrier(c);
}
#endif
