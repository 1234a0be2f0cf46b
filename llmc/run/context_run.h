/*
context_run.h - the additions of context parallelism to a run on several ranks (ranks_run.h): ranks that share sequences
read the same data, and the work of each rank is predicted, counted and printed.
*/
#ifndef LLMC_CONTEXT_RUN_H
#define LLMC_CONTEXT_RUN_H
#include "../parallel/context.h"
#include "ranks_run.h"

// ---- before the model ----
// Sets who shares what; each group reads a part of every step. For --predict this is a rank that sends most.
static inline DataReaders context_readers(void* self, Run* run, int stage) {
    ContextParallel* cp = (ContextParallel*)self;
    Comm* world = ranks_world(run);
    if (stage != RANKS_JOINED) world->rank = cp->ranks == 1 || world->size == 1 ? 0 : 1;
    context_plan(cp, world, run->config, (int)run->o.seq_len);
    DataReaders groups = { world->rank / cp->c, world->size / cp->c, cp->c > 1 ? "groups of ranks" : "ranks", 1 };
    run->ranks->along[AXIS_CP] = cp->c;
    return groups;
}
static inline void context_open(void* self, Run* run) { context_split((ContextParallel*)self, ranks_world(run)); }

// ---- before the first step, and after the last ----
// Prints which ranks share sequences, and the most work of any rank relative to the mean.
static inline void context_report(void* self, Run* run) {
    const ContextParallel* cp = (const ContextParallel*)self;
    static const char* const ways[] = { "heads for tokens (ulysses)", "all keys and values at once (allgather)",
                                        "keys and values in a ring" };
    int T = (int)run->o.seq_len, groups = run->ranks->all.comm.size / cp->c;
    unsigned long long most = 0, all = 0;
    for (int r = 0; r < cp->c; r++) {
        unsigned long long pairs = context_pairs(cp, r, 1, T, (int)cp->NH);
        most = pairs > most ? pairs : most;
        all += pairs;
    }
    if (cp->c > 1)
        printf("context    %d group%s of %d ranks; each has %d tokens of a sequence%s; attention exchanges %s; the"
               " busiest rank has %.2f times the mean's pairs of query and key\n",
               groups, groups == 1 ? "" : "s", cp->c, context_tokens(cp, T), cp->chunks == 2 ? " in zigzag" : "",
               ways[cp->how], (double)most * cp->c / (double)all);
    fflush(stdout);
}
// Prints the pairs that ranks have counted per step in backward passes, for the rank with most, next to the prediction.
// Returns true if all are as predicted. Collective.
static inline bool context_report_pairs(Run* run, const ContextParallel* cp) {
    Ranks* w = &run->ranks->all;
    typedef struct { unsigned long long counted, predicted; } Pairs;
    Pairs mine = { w->steps > 0 ? cp->pairs / (unsigned long long)w->steps : 0, 0 };
    mine.predicted = (unsigned long long)(run->accumulation * run->config.L)
                   * context_pairs(cp, cp->rank, (int)run->o.batch_size, (int)run->o.seq_len, (int)cp->NH);
    if (w->steps == 0) return true;
    Pairs *all = (Pairs*)control_all_gather(&w->control, &mine, sizeof mine), most = all[0];
    bool as_predicted = true;
    for (int r = 0; r < w->comm.size; r++) {
        as_predicted &= all[r].counted == all[r].predicted;
        if (all[r].counted != all[r].predicted || (as_predicted && all[r].counted > most.counted)) most = all[r];
    }
    free(all);
    report_header("attention, in a step");
    printf("  %-24s %12llu %12llu   %s\n", "pairs, busiest rank", most.predicted, most.counted,
           as_predicted ? "as predicted" : "NOT AS PREDICTED");
    fflush(stdout);
    return as_predicted;
}

// Call after the program's options are added.
static inline void ranks_share_sequences(Run* run, ContextParallel* cp) {
    RankSharing sharing = { cp, context_readers, context_open, context_report, NULL, NULL, false, -1 };
    run->ranks->sharing = sharing;
}
#endif
