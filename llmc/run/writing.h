/*
writing.h - all ranks of a run agree that it is the only one that writes under its --out (start.h).
*/
#ifndef LLMC_WRITING_H
#define LLMC_WRITING_H
#include "../watch/control.h"
#include "start.h"

// Rank 0 claims --out for this run. Dies on every rank if another run is still writing there after OUT_PATIENCE. Returns what
// the lock's file says, which the caller frees, or NULL if nothing is locked: --out is not there yet, or nothing can be made there.
// makes: --out, if it is not there. Collective.
static inline char* writing_claim(Control* c, const Options* o, bool makes) {
    bool alone = c->ranks.size == 1; // else the other ranks wait for rank 0, which must not take longer than they do
    double patience = alone ? OUT_PATIENCE : fmin(OUT_PATIENCE, c->timeout / 2);
    control_die_together(c, c->ranks.rank == 0 ? out_claim(o, patience, makes) : NULL, "");
    const char* record = writer_lock.record;
    ControlBytes text = control_broadcast(c, record, record ? strlen(record) + 1 : 0);
    if (text.bytes > 0) return text.data;
    free(text.data);
    return NULL;
}

// The other ranks that write share the lock. Dies on every rank, with the same error, if one of them cannot. Collective.
static inline void writing_share(Control* c, const char* out, const char* record, bool writes) {
    char *error = writes && c->ranks.rank > 0 ? writer_lock_join(out, record) : NULL, *first = NULL;
    ControlBytes* given = control_gather(c, error, error ? strlen(error) : 0);
    for (int q = 0; given && q < c->ranks.size && first == NULL; q++)
        if (given[q].bytes > 0) first = format_string("rank %d cannot write: %s", q, given[q].data);
    control_gathered_free(c, given);
    control_die_together(c, first, "");
    free(error);
}
#endif
