/*
diagnosis.h - where the time of a run on several ranks went, by cause, and what to try first if too much of it is lost.

Each rank notes how long each step took, and how long it stood still in operations of each kind on each of its communicators.
Here these become causes. Every second has one cause:

    computing   the rest of a step, as far as the rank had a core. On a GPU: all of that rest
    rest        the remainder: another thread or program had the core, or the rank slept
    exposed     A collective ends when the last rank has reached it. The rank of its communicator that waited least in a step
                found the others there, so what it waited for was communication. A wait until one's own message has left
                is exposed as well
    waiting     for slower ranks: what other ranks of that communicator waited longer than that one
    bubble      of a pipeline: waits for messages of other stages. After a rank's last action also what it waits for slower
                ranks, up to the last action of its pipeline
    data        the loader's thread had not read the next micro-batch yet

A rank that is late in one part of a step and early in another is not seen as late in either, so waiting is the least that it can
be. In a pipeline a slow rank makes the bubble longer.

All functions are pure, and free what they allocate. (test/unit/test_diagnosis.c)
*/
#ifndef LLMC_DIAGNOSIS_H
#define LLMC_DIAGNOSIS_H
#include "../base/common.h"
#include "../comm/comm.h"
#include "../parallel/axes.h"

#define DIAGNOSIS_STEPS 128   // so many of the last are diagnosed, and never the first, which touches memory for the first time
#define DIAGNOSIS_CHANNELS 20
enum { AXIS_ALL = MESH_AXES, DIAGNOSIS_AXES }; // AXIS_ALL: communicators of all ranks of a mesh that has several axes
static const char* const diagnosis_axis_names[DIAGNOSIS_AXES] = { "tp", "pp", "dp", "all axes" };

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

// Returns the channel of these operations, a new one if need be. NULL: there is no room for another.
static inline Channel* rank_channel(RankSteps* r, const char* comm, int axis, int kind) {
    for (int i = 0; i < r->num_channels; i++)
        if (r->channels[i].kind == kind && strcmp(r->channels[i].comm, comm) == 0) return &r->channels[i];
    if (r->num_channels == DIAGNOSIS_CHANNELS) return NULL;
    Channel* c = &r->channels[r->num_channels++];
    snprintf(c->comm, sizeof c->comm, "%s", comm);
    c->axis = axis;
    c->kind = kind;
    return c;
}

// ---- the causes ----
// Seconds of a step, on average. step = compute + rest + all of exposed + bubble + waiting + data.
typedef struct {
    double step, compute, rest, exposed[DIAGNOSIS_AXES][COMM_KINDS], bubble, waiting, data;
    double communication[DIAGNOSIS_AXES]; // all of it, hidden or not,
    double per_token;                     // and of this what grows with the tokens of a micro-batch, as computing does
} Causes;
#define NUM_CAUSES (sizeof(Causes) / sizeof(double))

static inline double causes_exposed_along(const Causes* c, int axis) {
    double sum = 0;
    for (int k = 0; k < COMM_KINDS; k++) sum += c->exposed[axis][k];
    return sum;
}
static inline double causes_exposed(const Causes* c) {
    double sum = 0;
    for (int a = 0; a < DIAGNOSIS_AXES; a++) sum += causes_exposed_along(c, a);
    return sum;
}
static inline double causes_communication(const Causes* c) {
    double sum = 0;
    for (int a = 0; a < DIAGNOSIS_AXES; a++) sum += c->communication[a];
    return sum;
}

// Of the operations of one channel the least of all ranks in each step.
typedef struct { const Channel* first; float exposed[DIAGNOSIS_STEPS], busy[DIAGNOSIS_STEPS]; } Least;
typedef struct { Least* all; size_t n; } LeastTable;
static inline Least* least_find(const LeastTable* t, const Channel* c) {
    for (size_t i = 0; i < t->n; i++)
        if (t->all[i].first->kind == c->kind && strcmp(t->all[i].first->comm, c->comm) == 0) return &t->all[i];
    return NULL;
}
static inline LeastTable least_of(const RankSteps* const* ranks, int N) {
    LeastTable t = { NULL, 0 };
    for (int q = 0; q < N; q++)
        for (int i = 0; i < ranks[q]->num_channels; i++) {
            const Channel* c = &ranks[q]->channels[i];
            Least* l = least_find(&t, c);
            if (l == NULL) {
                t.all = (Least*)xrealloc(t.all, (t.n + 1) * sizeof(Least));
                l = &t.all[t.n++];
                l->first = c;
                memcpy(l->exposed, c->exposed, sizeof l->exposed);
                memcpy(l->busy, c->busy, sizeof l->busy);
            }
            for (int s = 0; s < DIAGNOSIS_STEPS; s++) {
                l->exposed[s] = fminf(l->exposed[s], c->exposed[s]);
                l->busy[s] = fminf(l->busy[s], c->busy[s]);
            }
        }
    return t;
}

// Returns how long after this rank's last action in step s the last one of its pipeline was over.
static inline double drain_of(const RankSteps* const* ranks, int N, int rank, int s) {
    const RankSteps* r = ranks[rank];
    double last = r->until[s];
    for (int q = 0; q < N && r->pipe >= 0; q++) if (ranks[q]->pipe == r->pipe) last = fmax(last, ranks[q]->until[s]);
    return last - r->until[s];
}

// *c += what rank `rank` did in step s.
static inline void causes_add_step(Causes* c, const RankSteps* const* ranks, int N, int rank, int s,
                                   const LeastTable* least) {
    const RankSteps* r = ranks[rank];
    double waits = 0, late = 0; // all of them; of these the waits for others that were late in a collective
    for (int i = 0; i < r->num_channels; i++) {
        const Channel* x = &r->channels[i];
        const Least* l = least_find(least, x);
        bool sends = x->kind == COMM_SEND, receives = x->kind == COMM_RECV;
        double pure = sends ? x->exposed[s] : receives ? 0 : l->exposed[s];
        double busy = sends ? x->busy[s] : receives ? 0 : l->busy[s]; // a receive is the same message as another's send
        waits += x->exposed[s];
        c->exposed[x->axis][x->kind] += pure;
        c->communication[x->axis] += fmax(busy, pure);
        if (sends || x->axis == MESH_TP) c->per_token += fmax(busy, pure); // activations; the others are parameters and gradients
        if (receives) c->bubble += x->exposed[s];
        else late += x->exposed[s] - pure;
    }
    double drain = fmin(late, drain_of(ranks, N, rank, s)), rest = r->seconds[s] - waits - r->data[s];
    double running = r->running[s] < 0 ? rest : fmin(rest, r->running[s]);
    c->step += r->seconds[s];
    c->compute += running;
    c->rest += rest - running;
    c->bubble += drain;
    c->waiting += late - drain;
    c->data += r->data[s];
}

// causes (N) = those of each rank.
static inline void causes_of_ranks(Causes* causes, const RankSteps* const* ranks, int N) {
    LeastTable least = least_of(ranks, N);
    memset(causes, 0, (size_t)N * sizeof *causes);
    for (int q = 0; q < N; q++) {
        for (int s = 0; s < ranks[q]->steps; s++) causes_add_step(&causes[q], ranks, N, q, s, &least);
        double* sums = &causes[q].step;
        for (size_t i = 0; i < NUM_CAUSES; i++) sums[i] /= ranks[q]->steps;
    }
    free(least.all);
}

// ---- all ranks together ----
typedef struct {
    int ranks, steps;
    Causes first, least, most, mean; // rank 0's; of each cause the least, the most and the mean of all ranks
    int slowest;                     // the rank that waited least for others
    double slowest_busy, others_busy; // seconds of a step in which it and, on average, the others did not wait for others
    double others_rest, others_waiting; // their means: without the slowest, whose rest makes others wait and counts there
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
    Causes* all = (Causes*)xcalloc((size_t)N, sizeof(Causes));
    memset(&d, 0, sizeof d);
    causes_of_ranks(all, ranks, N);
    d.ranks = N;
    d.steps = ranks[0]->steps;
    d.first = d.least = d.most = all[0];
    d.seconds = median_of(ranks[0]->seconds, d.steps);
    for (int q = 0; q < N; q++) {
        const double* x = &all[q].step;
        for (size_t i = 0; i < NUM_CAUSES; i++) {
            (&d.least.step)[i] = fmin((&d.least.step)[i], x[i]);
            (&d.most.step)[i] = fmax((&d.most.step)[i], x[i]);
            (&d.mean.step)[i] += x[i] / N;
        }
        if (all[q].waiting + all[q].bubble < all[d.slowest].waiting + all[d.slowest].bubble) d.slowest = q;
    }
    for (int q = 0; q < N; q++) {
        double busy = all[q].compute + all[q].rest + all[q].data;
        if (q == d.slowest) d.slowest_busy = busy;
        else d.others_busy += busy / (N - 1);
        if (q != d.slowest) d.others_rest += all[q].rest / (N - 1);
        if (q != d.slowest) d.others_waiting += all[q].waiting / (N - 1);
    }
    free(all);
    return d;
}

// The course's figure, and the one of communication that nothing hides. Both leave out what is no communication.
static inline double efficiency_communication(const Causes* c) { return c->compute / (c->compute + causes_communication(c)); }
static inline double efficiency_exposed(const Causes* c) { return c->compute / (c->compute + causes_exposed(c)); }

// ---- what to try first ----
#define EFFICIENCY_GOAL 0.6
typedef struct {
    int local_size;             // ranks on this machine,
    long cores;                 // and its cores; 0: ranks compute on GPUs
    int micro_batches, stages;  // of a step and a replica of the model
    long long batch_size, tokens_per_step;
    double sent;                // bytes, by a rank in a step
    const char* halves;         // what would halve them, "make PRECISION=bf16 sends"; NULL: no option would
    const char* to_hide[DIAGNOSIS_AXES]; // what may hide more of the communication along an axis; NULL: no option would
    double scaling;             // measured efficiency; 0: not known
    double share;               // seconds that a perfect share of one rank's step would take; 0: not known
} Setting;
typedef struct { char lines[5][320]; int n; } Advice;

PRINTF_LIKE(2, 3)
static inline void advise(Advice* a, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(a->lines[a->n], sizeof a->lines[0], format, args);
    va_end(args);
    a->n++;
}

// Where ranks do not compute, or compute for longer than they should.
static inline void advise_on_rest(Advice* a, const Diagnosis* d, const Setting* s) {
    double rest = 1e3 * d->others_rest, step = 1e3 * d->mean.step;
    if (s->cores > 0 && s->local_size > s->cores)
        advise(a, "cores: %d ranks share %ld, and a rank had none for %.1f of %.1f ms; start %ld ranks here", s->local_size,
               s->cores, rest, step, s->cores);
    else advise(a, "rest: a rank slept or had no core for %.1f of %.1f ms; see what else runs on this machine", rest, step);
}
static inline void advise_on_waiting(Advice* a, const Diagnosis* d) {
    advise(a, "slowest rank: ranks wait for slower ones for %.1f of %.1f ms, and rank %d least; a step keeps it busy for %.1f ms"
              " and the others for %.1f; see what else runs there", 1e3 * d->others_waiting, 1e3 * d->mean.step, d->slowest,
           1e3 * d->slowest_busy, 1e3 * d->others_busy);
}
static inline void advise_on_bubble(Advice* a, const Causes* m, const Setting* s) {
    int more = 4;
    advise(a, "bubble: stages wait for %.1f of %.1f ms, with %d micro-batch%s on %d stages; with %d (--total-batch-size %lld) it is"
              " as long, and %.0f %% of a step instead of %.0f", 1e3 * m->bubble, 1e3 * m->step, s->micro_batches,
           s->micro_batches == 1 ? "" : "es", s->stages,
           more * s->micro_batches, more * s->tokens_per_step, 100 * m->bubble / (more * (m->step - m->bubble) + m->bubble),
           100 * m->bubble / m->step);
}
static inline void advise_on_share(Advice* a, const Causes* m, const Setting* s) {
    advise(a, "computing: a rank computes for %.1f ms, and a perfect share of one rank's step is %.1f; ranks share memory or cores,"
              " repeat work such as the update, or have products too small to be fast", 1e3 * m->compute, 1e3 * s->share);
}
// The largest loss that is no communication, if it is larger than what is exposed and a tenth of a step.
static inline void advise_on_cause(Advice* a, const Diagnosis* d, const Setting* s) {
    const Causes* m = &d->mean;
    double losses[] = { d->others_rest, d->others_waiting, m->bubble, m->data, s->share > 0 ? m->compute - s->share : 0 };
    double most = fmax(causes_exposed(m), 0.1 * m->step);
    int largest = -1;
    for (int i = 0; i < 5; i++) if (losses[i] > most) { most = losses[i]; largest = i; }
    if (largest == 0) advise_on_rest(a, d, s);
    if (largest == 1) advise_on_waiting(a, d);
    if (largest == 2) advise_on_bubble(a, m, s);
    if (largest == 3) advise(a, "data: steps wait for it for %.1f of %.1f ms; put --data on a faster disk", 1e3 * m->data,
                             1e3 * m->step);
    if (largest == 4) advise_on_share(a, m, s);
}

// Returns the axis along which most is exposed.
static inline int most_exposed_axis(const Causes* m) {
    int axis = 0;
    for (int i = 1; i < DIAGNOSIS_AXES; i++) if (causes_exposed_along(m, i) > causes_exposed_along(m, axis)) axis = i;
    return axis;
}
// The course's order: is it overlapped? Is there enough to compute for each byte? Then send less.
// "Up to", because the update does not take longer with more tokens, though it counts as computing here.
static inline void advise_on_communication(Advice* a, const Causes* m, const Setting* s) {
    double all = causes_communication(m), exposed = causes_exposed(m), K = m->compute, fixed = all - m->per_token;
    int axis = most_exposed_axis(m);
    const char* hides = s->to_hide[axis] ? s->to_hide[axis] : "no option would hide more";
    if (exposed < 0.25 * all)
        advise(a, "overlap: it is good, only %.1f of %.1f ms of communication are exposed", 1e3 * exposed, 1e3 * all);
    else advise(a, "overlap: %.1f of %.1f ms of communication are exposed, most along %s; %.1f ms of computing could hide some:"
                   " %s", 1e3 * exposed, 1e3 * all, diagnosis_axis_names[axis], 1e3 * K, hides);
    if (fixed >= m->per_token)
        advise(a, "size: a rank computes for %.1f ms and sends %.1f MB; with 4 times the tokens (--batch-size %lld) gradients are"
                  " as many, and compute / (compute + communication) would be up to %.0f %%", 1e3 * K, 1e-6 * s->sent,
               4 * s->batch_size, 100 * 4 * K / (4 * K + fixed + 4 * m->per_token));
    else advise(a, "size: a rank computes for %.1f ms and sends %.1f MB; activations take longest, but twice the channels compute 4"
                   " times as much and send twice, and compute / (compute + communication) would be up to %.0f %%", 1e3 * K,
                1e-6 * s->sent, 100 * 4 * K / (4 * K + 4 * fixed + 2 * m->per_token));
    if (s->halves == NULL) return;
    advise(a, "compress: %s half of the %.1f MB, and with as much computing that figure would be %.0f %%", s->halves, 1e-6 * s->sent,
           100 * K / (K + all / 2));
}

// Nothing if all figures reach the goal.
static inline Advice diagnosis_advice(const Diagnosis* d, const Setting* s) {
    Advice a = { { "" }, 0 };
    const Causes* m = &d->mean;
    bool sends_too_much = efficiency_communication(m) < EFFICIENCY_GOAL;
    bool scales = s->scaling == 0 || s->scaling >= EFFICIENCY_GOAL;
    if (!sends_too_much && scales && m->compute >= EFFICIENCY_GOAL * m->step) return a;
    advise_on_cause(&a, d, s);
    if (sends_too_much || a.n == 0) advise_on_communication(&a, m, s);
    return a;
}
#endif
