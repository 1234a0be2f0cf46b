/*
flight_recorder.h - a rank's last 64 operations, and its progress on each communicator.

comm/ notes every operation here as it is issued, started and finished, and the one that the host waits for. The
watchdog tells rank 0 about it five times a second, and when a run fails every rank writes its last operations to a
file, from which build/ranks finds where the ranks diverged. Every function may be called from any thread.

A channel is a sequence that must be the same on all its ranks: the collectives of a communicator, or what one rank
sends to another. Operations are numbered on their channel, from 0, so the k-th of one rank belongs to the k-th of the
others, however many messages some of them have exchanged in between.
*/
#ifndef LLMC_FLIGHT_RECORDER_H
#define LLMC_FLIGHT_RECORDER_H
#include "rank_progress.h"
#include <pthread.h>

#define FLIGHT_RECORDER_LENGTH 64
#define OP_TEXT 256 // bytes that the words for an operation may take
typedef enum { OP_ISSUED, OP_STARTED, OP_FINISHED } OpState;
static const char* const op_state_names[] = { "issued", "started", "finished" };
typedef enum { WAY_COLLECTIVE, WAY_SEND, WAY_RECEIVE } OpWay;

// Plain data, which is sent to rank 0 byte for byte. Names are words without blanks,
// because it is also written as text.
typedef struct {
    long long number;                  // on its channel, from 0
    long long place;                   // among all operations of this rank, from 0
    long long step;                    // as the log counts them, from 1; 0: before the first
    unsigned long long elements;
    double issued, started, finished;  // seconds since this rank's flight_recorder_init; not yet: 0
    int peer;                          // world rank of the root, the receiver or the sender; -1: there is none
    int state;                         // OpState
    char communicator[24];             // "world"; different groups need different names: "shard.1"
    char collective[16];               // "all-reduce"; "send" and "receive" make channels of two ranks
    char type[8];                      // "fp32"
    char task[OP_TASK];                // what it is for: "F3 on stage 1"; "": no more is known
} OpRecord;

typedef struct {
    long long issued, finished; // how many of this rank's operations on it
    OpRecord last;              // the one issued last, if issued > 0
    int way;                    // OpWay
    int peer;                   // world rank of the other end; -1 for collectives
    char communicator[24];
} OpChannel;

typedef struct {
    pthread_mutex_t lock;
    OpRecord ring[FLIGHT_RECORDER_LENGTH]; // operation `place` is at place % FLIGHT_RECORDER_LENGTH
    long long count;             // operations so far
    RankProgress progress;       // where this rank is,
    SharedProgress* shared;      // and where others can see it; a view. NULL: they cannot
    OpChannel* channels;         // (num_channels), owned
    int num_channels;
    bool waiting;                // the host waits for `awaited`, since `since` of now_seconds()
    OpRecord awaited;
    double since, origin;
} FlightRecorder;

static inline void flight_recorder_init(FlightRecorder* l) {
    memset(l, 0, sizeof *l);
    pthread_mutex_init(&l->lock, NULL);
    l->origin = now_seconds();
}

static inline void flight_recorder_free(FlightRecorder* l) {
    free(l->channels);
    pthread_mutex_destroy(&l->lock);
    memset(l, 0, sizeof *l);
}

// Every name except these two is that of a collective.
static inline OpWay op_way(const char* collective) {
    if (strcmp(collective, "send") == 0) return WAY_SEND;
    return strcmp(collective, "receive") == 0 ? WAY_RECEIVE : WAY_COLLECTIVE;
}

static inline void op_name_set(char* to, size_t size, const char* name) {
    size_t n = strlen(name);
    invariant(n > 0 && n < size && strcspn(name, " \t\n") == n,
              "'%s' cannot be a name in the log of operations: use 1 to %zu characters without blanks", name, size - 1);
    memcpy(to, name, n + 1);
}

// Returns the channel, made if it is new. peer: of a send or a receive. The caller holds the lock.
static inline OpChannel* flight_recorder_channel(FlightRecorder* l, const char* communicator, OpWay way, int peer) {
    if (way == WAY_COLLECTIVE) peer = -1;
    for (int i = 0; i < l->num_channels; i++) {
        OpChannel* c = &l->channels[i];
        if (c->way == (int)way && c->peer == peer && strcmp(c->communicator, communicator) == 0) return c;
    }
    l->channels = grown_array(OpChannel, l->channels, l->num_channels);
    OpChannel* c = &l->channels[l->num_channels++];
    memset(c, 0, sizeof *c);
    c->way = way;
    c->peer = peer;
    op_name_set(c->communicator, sizeof c->communicator, communicator);
    return c;
}

// Notes that this rank belongs to a communicator, so that it is missed even if it hangs before its first operation on
// it.
static inline void flight_recorder_join(FlightRecorder* l, const char* communicator) {
    pthread_mutex_lock(&l->lock);
    flight_recorder_channel(l, communicator, WAY_COLLECTIVE, -1);
    pthread_mutex_unlock(&l->lock);
}

// From now on operations belong to this step.
static inline void flight_recorder_step(FlightRecorder* l, long long step) {
    pthread_mutex_lock(&l->lock);
    l->progress.step = step;
    progress_write(l->shared, &l->progress);
    pthread_mutex_unlock(&l->lock);
}

// From now on operations are for this: "F3 on stage 1". "": they are for the step as a whole.
static inline void flight_recorder_task(FlightRecorder* l, const char* task) {
    pthread_mutex_lock(&l->lock);
    snprintf(l->progress.task, sizeof l->progress.task, "%.*s", OP_TASK - 1, task);
    progress_write(l->shared, &l->progress);
    pthread_mutex_unlock(&l->lock);
}

static inline long long flight_recorder_step_now(FlightRecorder* l) {
    pthread_mutex_lock(&l->lock);
    long long step = l->progress.step;
    pthread_mutex_unlock(&l->lock);
    return step;
}

// Notes a new operation. The functions below identify it by this record.
static inline OpRecord flight_recorder_issue(FlightRecorder* l, const char* communicator, const char* collective,
                                             size_t elements, const char* type, int peer) {
    OpRecord r;
    memset(&r, 0, sizeof r);
    op_name_set(r.communicator, sizeof r.communicator, communicator);
    op_name_set(r.collective, sizeof r.collective, collective);
    op_name_set(r.type, sizeof r.type, type);
    r.elements = elements;
    r.peer = peer;
    r.state = OP_ISSUED;
    pthread_mutex_lock(&l->lock);
    OpChannel* c = flight_recorder_channel(l, communicator, op_way(collective), peer);
    r.number = c->issued++;
    r.place = l->count++;
    r.step = l->progress.step;
    memcpy(r.task, l->progress.task, sizeof r.task);
    r.issued = now_seconds() - l->origin;
    c->last = r;
    l->ring[r.place % FLIGHT_RECORDER_LENGTH] = r;
    pthread_mutex_unlock(&l->lock);
    return r;
}

// The caller holds the lock. An operation that is no longer in the ring is ignored.
static inline void flight_recorder_note(FlightRecorder* l, const OpRecord* r) {
    OpRecord* kept = &l->ring[r->place % FLIGHT_RECORDER_LENGTH];
    if (kept->place == r->place) *kept = *r;
}

static inline void flight_recorder_start(FlightRecorder* l, OpRecord* r) {
    pthread_mutex_lock(&l->lock);
    r->state = OP_STARTED;
    r->started = now_seconds() - l->origin;
    flight_recorder_note(l, r);
    pthread_mutex_unlock(&l->lock);
}

static inline void flight_recorder_finish(FlightRecorder* l, OpRecord* r) {
    pthread_mutex_lock(&l->lock);
    r->state = OP_FINISHED;
    r->finished = now_seconds() - l->origin;
    flight_recorder_channel(l, r->communicator, op_way(r->collective), r->peer)->finished++;
    flight_recorder_note(l, r);
    pthread_mutex_unlock(&l->lock);
}

// The host waits for r from here to flight_recorder_wait_end: this is the wait that has a deadline.
static inline void flight_recorder_wait_begin(FlightRecorder* l, const OpRecord* r) {
    pthread_mutex_lock(&l->lock);
    l->waiting = true;
    l->awaited = *r;
    l->since = now_seconds();
    pthread_mutex_unlock(&l->lock);
}
static inline void flight_recorder_wait_end(FlightRecorder* l) {
    pthread_mutex_lock(&l->lock);
    l->waiting = false;
    pthread_mutex_unlock(&l->lock);
}

// "all-reduce #41 of world (1048576 fp32, step 7)", "broadcast #0 of world (64 bf16, root 0, step 1)",
// "send #3 to rank 2 of pp.0 (64 bf16, step 1, F3 on stage 1)"
static inline void op_text(const OpRecord* r, char* out, size_t size) {
    OpWay way = op_way(r->collective);
    char peer[32] = "", root[32] = "", what[48] = "";
    if (way != WAY_COLLECTIVE) snprintf(peer, sizeof peer, " %s rank %d", way == WAY_SEND ? "to" : "from", r->peer);
    else if (r->peer >= 0) snprintf(root, sizeof root, "root %d, ", r->peer);
    if (r->elements) snprintf(what, sizeof what, "%llu %s, ", r->elements, r->type);
    snprintf(out, size, "%s #%lld%s of %s (%s%sstep %lld%s%s)", r->collective, r->number, peer, r->communicator, what,
             root, r->step, r->task[0] ? ", " : "", r->task);
}

// ---- the file: first two lines, a line for each channel, a line for each operation ----

#define FLIGHT_RECORDER_MAGIC "shard.c operations 1"

// The last operations as text, oldest first. Format, in words separated by blanks; "-" stands for no peer:
//   channel COMMUNICATOR collective|send|receive PEER ISSUED FINISHED
//   op NUMBER COMMUNICATOR COLLECTIVE ELEMENTS TYPE PEER STEP STATE ISSUED STARTED FINISHED
// run: a word that identifies the run.
static inline void flight_recorder_write(FlightRecorder* l, FILE* f, const char* run, int rank, int size) {
    static const char* const ways[] = { "collective", "send", "receive" };
    pthread_mutex_lock(&l->lock);
    fprintf(f, FLIGHT_RECORDER_MAGIC "\nrun %s rank %d of %d step %lld operations %lld\n", run, rank, size,
            l->progress.step, l->count);
    for (int i = 0; i < l->num_channels; i++) {
        const OpChannel* c = &l->channels[i];
        char peer[16] = "-";
        if (c->peer >= 0) snprintf(peer, sizeof peer, "%d", c->peer);
        fprintf(f, "channel %s %s %s %lld %lld\n", c->communicator, ways[c->way], peer, c->issued, c->finished);
    }
    for (long long i = l->count > FLIGHT_RECORDER_LENGTH ? l->count - FLIGHT_RECORDER_LENGTH : 0; i < l->count; i++) {
        const OpRecord* r = &l->ring[i % FLIGHT_RECORDER_LENGTH];
        char peer[16] = "-";
        if (r->peer >= 0) snprintf(peer, sizeof peer, "%d", r->peer);
        fprintf(f, "op %lld %s %s %llu %s %s %lld %s %.6f %.6f %.6f\n", r->number, r->communicator, r->collective,
                r->elements, r->type, peer, r->step, op_state_names[r->state], r->issued, r->started, r->finished);
    }
    fprintf(f, "end\n");
    pthread_mutex_unlock(&l->lock);
}
#endif
