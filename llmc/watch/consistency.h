/*
consistency.h - ranks compare what must be the same on all of them, with --check-every also the state of training while it runs.
Messages name a rank that differs and what differs. (run/run_fingerprint.h compares options, program, model and data at the start.)
*/
#ifndef LLMC_CONSISTENCY_H
#define LLMC_CONSISTENCY_H
#include "control.h"

// Compares another rank's bytes with what this one has, in `self`. Returns the difference in words, which the caller frees,
// or NULL if there is none.
typedef char* CompareBytes(void* self, ControlBytes theirs, int rank);
typedef struct { CompareBytes* compare; void* self; } ComparedBytes;

// self: ComparedBytes. The answer is the first difference in words, or empty.
static inline ControlBytes first_difference(void* self, const ControlBytes* given, int size) {
    const ComparedBytes* a = (const ComparedBytes*)self;
    char* difference = NULL;
    for (int q = 1; q < size && difference == NULL; q++) difference = a->compare(a->self, given[q], q);
    ControlBytes answer = control_bytes(difference, difference ? strlen(difference) : 0);
    free(difference);
    return answer;
}

// Dies on every rank, with the first difference that rank 0 finds and what to do about it, unless the ranks' bytes agree.
static inline void require_same(Control* c, const void* data, size_t bytes, CompareBytes* compare, void* self,
                                const char* what_to_do) {
    ComparedBytes a = { compare, self };
    ControlBytes difference = control_all_reduce(c, data, bytes, first_difference, &a);
    require(difference.bytes == 0, "%s%s", difference.data, what_to_do);
    free(difference.data);
}

// "rank 5 (dp 1, pp 0, tp 1)"; without a mesh "rank 5"
typedef struct { char text[RANK_NAME + 20]; } RankLabel;
static inline RankLabel rank_label(const Control* c, int r) {
    RankLabel a;
    int n = snprintf(a.text, sizeof a.text, "rank %d", r);
    watchdog_name(c, r, a.text + n, sizeof a.text - (size_t)n);
    return a;
}

// ---- messages ----
static inline OpChannel channel_of(ControlBytes channels, size_t i) {
    OpChannel k;
    memcpy(&k, channels.data + i * sizeof k, sizeof k);
    return k;
}
// Returns how many messages rank `from` has sent to rank `to`, or the other way received from it, on a communicator.
static inline long long messages_counted(ControlBytes channels, OpWay way, const char* communicator, int other) {
    for (size_t i = 0; (i + 1) * sizeof(OpChannel) <= channels.bytes; i++) {
        OpChannel k = channel_of(channels, i);
        if (k.way == (int)way && k.peer == other && strcmp(k.communicator, communicator) == 0) return k.issued;
    }
    return 0;
}
// self: Control; given: OpChannels. The answer is the first pair of ranks whose counts differ, in words, or empty.
static inline ControlBytes first_lost_message(void* self, const ControlBytes* given, int size) {
    for (int q = 0; q < size; q++) {
        for (size_t i = 0; (i + 1) * sizeof(OpChannel) <= given[q].bytes; i++) {
            OpChannel k = channel_of(given[q], i);
            if (k.way == WAY_COLLECTIVE) continue;
            OpWay other_way = k.way == WAY_SEND ? WAY_RECEIVE : WAY_SEND;
            long long theirs = messages_counted(given[k.peer], other_way, k.communicator, q);
            if (k.issued == theirs) continue;
            bool sends = k.way == WAY_SEND;
            RankLabel from = rank_label((const Control*)self, sends ? q : k.peer);
            RankLabel to = rank_label((const Control*)self, sends ? k.peer : q);
            char* difference = format_string("%lld messages went from %s to %s of %s, and %lld were received",
                                             sends ? k.issued : theirs, from.text, to.text, k.communicator,
                                             sends ? theirs : k.issued);
            ControlBytes answer = control_bytes(difference, strlen(difference));
            free(difference);
            return answer;
        }
    }
    return control_bytes(NULL, 0);
}
// Dies on every rank unless each message that was sent was also received. Small messages wait in buffers: if a receive is left
// out, nobody waits, and every later one takes the message before its own. Collective; call it where none is under way.
static inline void require_same_messages(Control* c, long long step) {
    pthread_mutex_lock(&c->recorder.lock);
    size_t bytes = (size_t)c->recorder.num_channels * sizeof(OpChannel);
    ControlBytes mine = control_bytes(c->recorder.channels, bytes);
    pthread_mutex_unlock(&c->recorder.lock);
    ControlBytes difference = control_all_reduce(c, mine.data, mine.bytes, first_lost_message, c);
    require(difference.bytes == 0, "after step %lld: %s: a receive was left out, and later ones took messages of other"
            " actions; the program is at fault", step, difference.data);
    free(difference.data);
    free(mine.data);
}

// ---- while training ----

typedef struct { const Control* control; const char* what; int n, parts; long long step; } UnitSums;

#define UNIT_ELSEWHERE UINT64_MAX // instead of a sum
static inline uint64_t unit_sum(ControlBytes sums, int u) {
    uint64_t sum;
    memcpy(&sum, sums.data + (size_t)u * sizeof sum, sizeof sum);
    return sum;
}

// self: UnitSums; given: sums (n). The answer is the first difference in words, or empty.
static inline ControlBytes first_unequal_unit(void* self, const ControlBytes* given, int size) {
    const UnitSums* s = (const UnitSums*)self;
    for (int q = s->parts; q < size; q++) {
        int first = q, u = 0;
        for (; u < s->n; u++) {
            first = q % s->parts;
            while (first < q && unit_sum(given[first], u) == UNIT_ELSEWHERE) first += s->parts;
            if (unit_sum(given[q], u) != unit_sum(given[first], u) && unit_sum(given[q], u) != UNIT_ELSEWHERE) break;
        }
        if (u == s->n) continue;
        RankLabel a = rank_label(s->control, first), b = rank_label(s->control, q);
        char* difference = format_string("after step %lld the %s of unit %d differ between %s and %s",
                                         s->step, s->what, u, a.text, b.text);
        ControlBytes answer = control_bytes(difference, strlen(difference));
        free(difference);
        return answer;
    }
    return control_bytes(NULL, 0);
}

// Dies on every rank, naming ranks and unit, unless each rank's sums (n) are those of rank number rank % parts; sums[i] belongs
// to unit i. parts 1: unless they are the same everywhere. A rank that does not have a unit gives UNIT_ELSEWHERE.
static inline void require_same_units(Control* c, const char* what, const uint64_t* sums, int n, int parts, long long step) {
    UnitSums mine = { c, what, n, parts, step };
    ControlBytes difference = control_all_reduce(c, sums, (size_t)n * sizeof *sums, first_unequal_unit, &mine);
    require(difference.bytes == 0, "%s: memory, the network or the program is at fault; continue from the last checkpoint"
            " with --resume", difference.data);
    free(difference.data);
}
#endif
