/*
diagnosis.h - where the time of a run on several ranks went, by cause. (build/advise says what to try first if too much
is lost.)

Each rank notes how long each step took, and how long it stood still in operations of each kind on each of its
communicators. This file turns these into causes. Every second has one cause:

    computing   the rest of a step, as far as the rank had a core. On a GPU: all of that rest
    rest        the remainder: another thread or program had the core, or the rank slept
    exposed     A collective ends when the last rank has reached it. The shortest wait of any rank of its communicator
                in a step therefore counts as communication. The same holds for the messages of a ring. A wait until a
                rank's own message has left is also exposed
    waiting     for slower ranks: the time that other ranks of that communicator waited longer than that
    bubble      of a pipeline: waits for messages of other stages. After a rank's last action also what it waits for
                slower ranks, up to the last action of its pipeline
    data        the loader's thread had not read the next micro-batch yet

A rank that is late in one part of a step and early in another is not seen as late in either, so waiting is the least
that it can be. In a pipeline a slow rank makes the bubble longer.

All functions are pure, and free what they allocate. (test/unit/test_diagnosis.c)
*/
#ifndef LLMC_DIAGNOSIS_H
#define LLMC_DIAGNOSIS_H
#include "../base/common.h"
#include "../comm/comm.h"

// As many of the last steps are diagnosed, and never the first one, which touches memory for the first time.
#define DIAGNOSIS_STEPS 128
#define DIAGNOSIS_CHANNELS 20
static const char* const diagnosis_axis_names[COMM_AXES] = { "tp", "pp", "dp", "cp", "all axes" };

// ---- what a rank has noted ----
// Operations of one kind on one communicator, in seconds of each step; busy: from the start to the end of each
typedef struct {
    char comm[24];
    int axis, kind;
    float exposed[DIAGNOSIS_STEPS], busy[DIAGNOSIS_STEPS];
} Channel;
typedef struct {
    int pipe;              // ranks with the same number are stages of the same pipeline; -1: there is none
    int steps, num_channels;
    float seconds[DIAGNOSIS_STEPS], data[DIAGNOSIS_STEPS]; // of a step; of these the wait for data
    float running[DIAGNOSIS_STEPS]; // in which this thread had a core; -1: not known, as on a GPU
    float until[DIAGNOSIS_STEPS];   // until the last action of a pipeline was over
    Channel channels[DIAGNOSIS_CHANNELS]; // (num_channels)
} RankSteps;
static inline size_t rank_steps_bytes(const RankSteps* r) {
    return offsetof(RankSteps, channels) + (size_t)r->num_channels * sizeof(Channel);
}

// Returns the place of the channel of these operations among n; n: there is none.
static inline int channel_index(const Channel* all, int n, const char* comm, int kind) {
    int i = 0;
    while (i < n && (all[i].kind != kind || strcmp(all[i].comm, comm) != 0)) i++;
    return i;
}
// Returns the channel of these operations, a new one if need be. NULL: there is no room for another.
static inline Channel* rank_channel(RankSteps* r, const char* comm, int axis, int kind) {
    int i = channel_index(r->channels, r->num_channels, comm, kind);
    if (i == DIAGNOSIS_CHANNELS) return NULL;
    Channel* c = &r->channels[i];
    if (i < r->num_channels) return c;
    r->num_channels++;
    snprintf(c->comm, sizeof c->comm, "%s", comm);
    c->axis = axis;
    c->kind = kind;
    return c;
}

// ---- the causes ----
// Seconds of a step, on average. A step is computing + rest + all that is exposed + bubble + waiting + data.
// Communication is all of it along each axis, hidden or not. Of this "per token" is what grows with the tokens of a
// micro-batch, as computing does.
enum {
    CAUSE_COMPUTING, CAUSE_REST, CAUSE_EXPOSED, CAUSE_BUBBLE = CAUSE_EXPOSED + COMM_AXES * COMM_KINDS, CAUSE_WAITING,
    CAUSE_DATA, CAUSE_STEP, CAUSE_COMMUNICATION, CAUSE_PER_TOKEN = CAUSE_COMMUNICATION + COMM_AXES, CAUSES
};
typedef struct { double of[CAUSES]; } TimeBreakdown;
static inline int exposed_at(int axis, int kind) { return CAUSE_EXPOSED + axis * COMM_KINDS + kind; }

static inline double breakdown_sum(const TimeBreakdown* c, int begin, int end) {
    double sum = 0;
    for (int i = begin; i < end; i++) sum += c->of[i];
    return sum;
}
static inline double breakdown_exposed(const TimeBreakdown* c) { return breakdown_sum(c, CAUSE_EXPOSED, CAUSE_BUBBLE); }
static inline double breakdown_communication(const TimeBreakdown* c) {
    return breakdown_sum(c, CAUSE_COMMUNICATION, CAUSE_PER_TOKEN);
}

// The course's figure, and the one of communication that nothing hides. Both leave out what is no communication.
static inline double efficiency_communication(const TimeBreakdown* c) {
    return c->of[CAUSE_COMPUTING] / (c->of[CAUSE_COMPUTING] + breakdown_communication(c));
}
static inline double efficiency_exposed(const TimeBreakdown* c) {
    return c->of[CAUSE_COMPUTING] / (c->of[CAUSE_COMPUTING] + breakdown_exposed(c));
}

// Of the operations of each channel the least of all ranks in each step: *n channels, owned by the caller.
static inline Channel* least_of(const RankSteps* const* ranks, int N, int* n) {
    Channel* least = NULL;
    *n = 0;
    for (int q = 0; q < N; q++)
        for (int i = 0; i < ranks[q]->num_channels; i++) {
            const Channel* c = &ranks[q]->channels[i];
            int k = channel_index(least, *n, c->comm, c->kind);
            if (k == *n) {
                least = (Channel*)xrealloc(least, (size_t)++*n * sizeof(Channel));
                least[k] = *c;
            }
            for (int s = 0; s < DIAGNOSIS_STEPS; s++) {
                least[k].exposed[s] = fminf(least[k].exposed[s], c->exposed[s]);
                least[k].busy[s] = fminf(least[k].busy[s], c->busy[s]);
            }
        }
    return least;
}

// Returns how long after this rank's last action in step s the last one of its pipeline was over.
static inline double drain_of(const RankSteps* const* ranks, int N, int rank, int s) {
    const RankSteps* r = ranks[rank];
    double last = r->until[s];
    for (int q = 0; q < N && r->pipe >= 0; q++) if (ranks[q]->pipe == r->pipe) last = fmax(last, ranks[q]->until[s]);
    return last - r->until[s];
}

// Adds what rank `rank` did in step s. least (n): of each channel.
static inline void breakdown_add_step(TimeBreakdown* c, const RankSteps* const* ranks, int N, int rank, int s,
                                      const Channel* least, int n) {
    const RankSteps* r = ranks[rank];
    double waits = 0, late = 0; // all of them; of these the waits for others that were late in a collective
    for (int i = 0; i < r->num_channels; i++) {
        const Channel *x = &r->channels[i], *l = &least[channel_index(least, n, x->comm, x->kind)];
        bool sends = x->kind == COMM_SEND, receives = x->kind == COMM_RECV, in_pipe = receives && x->axis != AXIS_CP;
        double pure = sends ? x->exposed[s] : in_pipe ? 0 : l->exposed[s];
        double busy = sends ? x->busy[s] : receives ? 0 : l->busy[s]; // a receive is the same message as another's send
        waits += x->exposed[s];
        c->of[exposed_at(x->axis, x->kind)] += pure;
        c->of[CAUSE_COMMUNICATION + x->axis] += fmax(busy, pure);
        bool activations = sends || x->axis == AXIS_TP || x->axis == AXIS_CP; // not parameters and gradients
        if (activations) c->of[CAUSE_PER_TOKEN] += fmax(busy, pure);
        if (in_pipe) c->of[CAUSE_BUBBLE] += x->exposed[s];
        else late += x->exposed[s] - pure;
    }
    double drain = fmin(late, drain_of(ranks, N, rank, s)), rest = r->seconds[s] - waits - r->data[s];
    double running = r->running[s] < 0 ? rest : fmin(rest, r->running[s]);
    c->of[CAUSE_STEP] += r->seconds[s];
    c->of[CAUSE_COMPUTING] += running;
    c->of[CAUSE_REST] += rest - running;
    c->of[CAUSE_BUBBLE] += drain;
    c->of[CAUSE_WAITING] += late - drain;
    c->of[CAUSE_DATA] += r->data[s];
}

// causes (N) = those of each rank.
static inline void breakdown_of_ranks(TimeBreakdown* causes, const RankSteps* const* ranks, int N) {
    int n;
    Channel* least = least_of(ranks, N, &n);
    memset(causes, 0, (size_t)N * sizeof *causes);
    for (int q = 0; q < N; q++) {
        for (int s = 0; s < ranks[q]->steps; s++) breakdown_add_step(&causes[q], ranks, N, q, s, least, n);
        for (int i = 0; i < CAUSES; i++) causes[q].of[i] /= ranks[q]->steps;
    }
    free(least);
}

// ---- all ranks together ----
typedef struct {
    int ranks, steps;
    TimeBreakdown first, least, most, mean; // rank 0's; of each cause the least, the most and the mean of all ranks
    int slowest;                     // the rank that waited least for others,
    TimeBreakdown slow, others;             // its causes, and means of the others: its rest makes them wait,
                                            // and counts there
    double seconds;                  // of rank 0's median step
} Diagnosis;

static inline int compare_floats(const void* a, const void* b) {
    float x = *(const float*)a, y = *(const float*)b;
    return (x > y) - (x < y);
}
static inline double median_of(const float* x, int n) {
    float sorted[DIAGNOSIS_STEPS];
    memcpy(sorted, x, (size_t)n * sizeof(float));
    qsort(sorted, (size_t)n, sizeof(float), compare_floats);
    return 0.5 * (sorted[(n - 1) / 2] + sorted[n / 2]);
}

static inline Diagnosis diagnose(const RankSteps* const* ranks, int N) {
    Diagnosis d;
    TimeBreakdown* all = (TimeBreakdown*)xcalloc((size_t)N, sizeof(TimeBreakdown));
    memset(&d, 0, sizeof d);
    breakdown_of_ranks(all, ranks, N);
    d.ranks = N;
    d.steps = ranks[0]->steps;
    d.first = d.least = d.most = all[0];
    d.seconds = median_of(ranks[0]->seconds, d.steps);
    for (int q = 0; q < N; q++) {
        for (int i = 0; i < CAUSES; i++) {
            d.least.of[i] = fmin(d.least.of[i], all[q].of[i]);
            d.most.of[i] = fmax(d.most.of[i], all[q].of[i]);
            d.mean.of[i] += all[q].of[i] / N;
        }
        const double *mine = all[q].of, *slow = all[d.slowest].of;
        if (mine[CAUSE_WAITING] + mine[CAUSE_BUBBLE] < slow[CAUSE_WAITING] + slow[CAUSE_BUBBLE]) d.slowest = q;
    }
    d.slow = all[d.slowest];
    for (int q = 0; q < N; q++)
        for (int i = 0; i < CAUSES && q != d.slowest; i++) d.others.of[i] += all[q].of[i] / (N - 1);
    free(all);
    return d;
}
#endif
