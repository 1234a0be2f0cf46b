/*
writing.h - all ranks of a run agree that it is the only one that writes under its --out (start.h).
*/
#ifndef LLMC_WRITING_H
#define LLMC_WRITING_H
#include "../watch/control.h"
#include "start.h"

typedef struct { const Options* o; double patience; bool makes; } WritingClaim; // makes: --out, if it is not there

// Rank 0 takes the lock. The answer is "+" and what the lock's file says, "-" and an error, or nothing where nothing is
// locked: --out is not there yet, or nothing can be made there.
static inline ControlBytes writing_decide(void* self, const ControlBytes* given, int size) {
    const WritingClaim* w = (const WritingClaim*)self;
    (void)given; (void)size;
    char *error = out_claim(w->o, w->patience, w->makes), *record = writer_lock.record;
    char* answer = error ? format_string("-%s", error) : record ? format_string("+%s", record) : xstrdup("");
    ControlBytes bytes = control_bytes(answer, strlen(answer));
    free(answer);
    free(error);
    return bytes;
}

// Claims --out for this run. Dies on every rank if another run is still writing there after OUT_PATIENCE. Returns what
// the lock's file says, which the caller frees, or NULL if nothing is locked. Collective.
static inline char* writing_claim(Control* c, const Options* o, bool makes) {
    bool alone = c->ranks.size == 1; // else the other ranks wait for rank 0, which must not take longer than they do
    double patience = alone ? OUT_PATIENCE : fmin(OUT_PATIENCE, c->timeout / 2);
    WritingClaim claim = { o, patience, makes };
    ControlBytes answer = control_all_reduce(c, "", 0, writing_decide, &claim);
    require(answer.bytes == 0 || answer.data[0] == '+', "%s", answer.data + 1);
    char* record = answer.bytes > 0 ? xstrdup(answer.data + 1) : NULL;
    free(answer.data);
    return record;
}

// given: each rank's error, or nothing. The answer is the first.
static inline ControlBytes writing_first_error(void* self, const ControlBytes* given, int size) {
    (void)self;
    for (int q = 0; q < size; q++) {
        if (given[q].bytes == 0) continue;
        char* error = format_string("rank %d cannot write: %s", q, given[q].data);
        ControlBytes answer = control_bytes(error, strlen(error));
        free(error);
        return answer;
    }
    return control_bytes("", 0);
}

// The other ranks that write share the lock. Dies on every rank, with the same error, if one of them cannot. Collective.
static inline void writing_share(Control* c, const char* out, const char* record, bool writes) {
    char* error = writes && c->ranks.rank > 0 ? writer_lock_join(out, record) : NULL;
    ControlBytes first = control_all_reduce(c, error ? error : "", error ? strlen(error) : 0, writing_first_error, NULL);
    require(first.bytes == 0, "%s", first.data);
    free(first.data);
    free(error);
}
#endif
