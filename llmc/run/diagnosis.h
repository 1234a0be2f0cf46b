/*
diagnosis.h - where the time of a run on several ranks went, by cause, and how well it scales: in the log at its end,
and in metrics.jsonl, from which build/advise says what to try first if too much is lost.

Each rank notes how long each step took, and how long it stood still in operations of each kind on each of its
communicators. `diagnose` turns these into causes. Every second has one cause:

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

The functions up to `diagnose` are pure, and free what they allocate. (test/unit/test_diagnosis.c)
*/
#ifndef LLMC_DIAGNOSIS_H
#define LLMC_DIAGNOSIS_H
#include "../base/common.h"
#include "../base/folder.h"
#include "../base/precision.h"
#include "../comm/comm.h"
#include "../data/dataloader.h"
#include "../model/gpt2.h"
#include "logger.h"
#include "trace.h"
#include "ranks.h"
#include <jansson.h>

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
// Communication is all of it along each axis, hidden or not; its part "per token" grows with the tokens of a
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
                least = grown_array(Channel, least, *n);
                least[(*n)++] = *c;
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

static inline int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}
// Sorts x (n > 0).
static inline double median_of(double* x, size_t n) {
    qsort(x, n, sizeof(double), compare_doubles);
    return 0.5 * (x[(n - 1) / 2] + x[n / 2]);
}

static inline Diagnosis diagnose(const RankSteps* const* ranks, int N) {
    Diagnosis d;
    double seconds[DIAGNOSIS_STEPS];
    TimeBreakdown* all = new_array(TimeBreakdown, N);
    memset(&d, 0, sizeof d);
    breakdown_of_ranks(all, ranks, N);
    d.ranks = N;
    d.steps = ranks[0]->steps;
    d.first = d.least = d.most = all[0];
    for (int s = 0; s < d.steps; s++) seconds[s] = ranks[0]->seconds[s];
    d.seconds = median_of(seconds, (size_t)d.steps);
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

// ---- --single-throughput ----
typedef struct {
    double tokens_per_second; // 0: not known
    const char* scaling;      // "strong": a step of that run had as many tokens as one of this; "weak": as many as a
                              // rank's share of this; NULL: a number was given, which does not say
    char device[96];          // what it ran on; "": not known
} SingleRun;
typedef struct { GPT2Config config; long long seq_len, tokens_per_step; int ranks; } RunShape; // of this run

// Dies unless the first line of a metrics.jsonl, run, is that of a run on one rank that can be compared.
static inline void single_run_check(const char* path, const json_t* run, const RunShape* now) {
    static const char* const keys[] = { "layers", "heads", "channels", "vocabulary" };
    const int here[] = { now->config.L, now->config.NH, now->config.C, now->config.V };
    const char* precision = json_string_value(json_object_get(run, "precision"));
    json_int_t size = json_integer_value(json_object_get(run, "world_size"));
    json_int_t T = json_integer_value(json_object_get(json_object_get(run, "options"), "seq-len"));
    require(precision != NULL && size > 0,
            "--single-throughput %s: its first line is not that of a metrics.jsonl; give the one under --out of a run "
            "on one rank, or a number of tokens per second",
            path);
    require(size == 1, "--single-throughput %s: that run had %lld ranks; give a run on one rank", path,
            (long long)size);
    require(strcmp(precision, FLOATX_NAME) == 0,
            "--single-throughput %s: that run was in %s, this one is in %s; give one in %s", path, precision,
            FLOATX_NAME, FLOATX_NAME);
    for (int i = 0; i < 4; i++) {
        json_int_t there = json_integer_value(json_object_get(run, keys[i]));
        require(there == here[i],
                "--single-throughput %s: that model has %s %lld, this one %d; give a run of the same model", path,
                keys[i], (long long)there, here[i]);
    }
    require(T == now->seq_len,
            "--single-throughput %s: that run had --seq-len %lld, this one has %lld; give one with the same", path,
            (long long)T, now->seq_len);
}

// Sets s->scaling by the tokens that a step of that run had. Dies if they fit neither strong nor weak scaling.
static inline void single_run_compare(SingleRun* s, const char* path, long long tokens, const RunShape* now) {
    if (tokens == now->tokens_per_step) s->scaling = "strong";
    else if (tokens * now->ranks == now->tokens_per_step) s->scaling = "weak";
    require(s->scaling != NULL,
            "--single-throughput %s: a step of that run had %lld tokens; give one with --total-batch-size %lld (strong "
            "scaling) or %lld / %d ranks (weak scaling)",
            path, tokens, now->tokens_per_step, now->tokens_per_step, now->ranks);
}

// Returns the median of the steps after the first in a metrics.jsonl.
static inline SingleRun single_run_of_file(const char* path, const RunShape* now) {
    SingleRun s = { 0, NULL, "" };
    char* text = NULL;
    size_t capacity = 0, n = 0;
    double* rates = NULL;
    // tokens: of the last step, because a resumed run may change their number
    long long lines = 0, seen = 0, tokens = 0;
    FILE* f = fopen(path, "r");
    require(f != NULL,
            "--single-throughput %s: neither a number of tokens per second above 0 nor a file that can be read (%s); "
            "give the metrics.jsonl of a run on one rank, or a number",
            path, open_error(errno));
    for (ssize_t length; (length = getline(&text, &capacity, f)) > 0;) {
        json_t* line = json_loadb(text, (size_t)length, 0, NULL);
        if (lines++ == 0) {
            json_t* run = json_object_get(line, "run");
            single_run_check(path, run, now);
            const char* device = json_string_value(json_object_get(run, "device"));
            snprintf(s.device, sizeof s.device, "%s", device ? device : "");
        }
        double rate = json_number_value(json_object_get(line, "tokens_per_s"));
        json_int_t step = json_integer_value(json_object_get(line, "step"));
        if (rate > 0 && step > 0) {
            tokens = json_integer_value(json_object_get(line, "tokens")) - seen;
            seen += tokens;
            rates = grown_array(double, rates, n);
            rates[n++] = rate;
        }
        json_decref(line);
    }
    fclose(f);
    free(text);
    require(lines > 0, "--single-throughput %s: the file is empty; give the metrics.jsonl of a run on one rank", path);
    require(n >= 2,
            "--single-throughput %s: that run had %zu step%s; the first does not count, so give one with 2 or more",
            path, n, n == 1 ? "" : "s");
    single_run_compare(&s, path, tokens, now);
    s.tokens_per_second = median_of(rates + 1, n - 1);
    free(rates);
    return s;
}

// Reads the option's value; "": nothing is known. Dies if it is of no use.
static inline SingleRun single_run_read(const char* text, const RunShape* now) {
    SingleRun s = { 0, NULL, "" };
    char* end = NULL;
    if (text[0] == '\0') return s;
    double number = strtod(text, &end);
    if (*end != '\0') return single_run_of_file(text, now);
    require(isfinite(number) && number > 0, "--single-throughput %s: tokens per second must be a number above 0", text);
    s.tokens_per_second = number;
    return s;
}

// The findings at the end, on rank 0.
typedef struct {
    Diagnosis diagnosis;
    // facts about the run that advice needs besides its options: the ranks on this machine, and its cores (0: ranks
    // compute on GPUs); micro-batches and stages of a step and a replica of the model
    int local_ranks, micro_batches, stages;
    long cores;
    long long tokens_per_step;
    SingleRun single;
    long long last;       // step
    double rate, scaling; // tokens per second, and the measured efficiency; 0: not known
    char artificial[160]; // as in Ranks
} DiagnosisReport;

#define DIAGNOSIS_COMMS 8 // a program has at most five
typedef struct {
    SingleRun single;
    RankSteps mine;       // step k of the run, counted from 1, is at (k - 2) % DIAGNOSIS_STEPS; the first has no place
    long long steps, last; // how many were noted; the last one of the run, 0: none is over
    double exposed[DIAGNOSIS_COMMS][COMM_KINDS], busy[DIAGNOSIS_COMMS][COMM_KINDS]; // before the step at hand
    double running;       // thread_seconds() then
    int began;            // a mark, then
} StepTimes;

// Returns the seconds that this thread has spent on a core so far.
static inline double thread_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Before and after a step. The world has settled.
static inline void step_times_begin(StepTimes* t, Ranks* w) {
    const CommContext* all = w->comm.world;
    // Waited for before this step
    for (size_t i = trace.step_begin; i < trace.count; i++) trace.slices[i].outside = true;
    if (w->has_last_work) device_event_free(w->last_work);
    w->has_last_work = false;
    for (int i = 0; i < all->num_comms && i < DIAGNOSIS_COMMS; i++)
        for (int k = 0; k < COMM_KINDS; k++) {
            t->exposed[i][k] = all->comms[i]->stats[k].exposed;
            t->busy[i][k] = all->comms[i]->stats[k].busy;
        }
    t->running = thread_seconds();
    t->began = device_event();
}
// seconds: of the step, of which `data` were waits for data.
static inline void step_times_end(StepTimes* t, const Ranks* w, long long step, double seconds, double data) {
    const CommContext* all = w->comm.world;
    double until = w->has_last_work ? device_event_seconds(t->began, w->last_work) : 0;
    bool first = t->last == 0;
    device_event_free(t->began);
    t->last = step;
    if (first) return;
    RankSteps* r = &t->mine;
    int s = (int)(t->steps++ % DIAGNOSIS_STEPS);
    r->steps = t->steps < DIAGNOSIS_STEPS ? (int)t->steps : DIAGNOSIS_STEPS;
    r->seconds[s] = (float)seconds;
    r->data[s] = (float)data;
    r->running[s] = computes_on_cpu() ? (float)(thread_seconds() - t->running) : -1;
    r->until[s] = (float)until;
    for (int i = 0; i < r->num_channels; i++) r->channels[i].exposed[s] = r->channels[i].busy[s] = 0;
    for (int i = 0; i < all->num_comms && i < DIAGNOSIS_COMMS; i++) {
        const Comm* c = all->comms[i];
        for (int k = 0; k < COMM_KINDS && c->size > 1; k++) {
            double exposed = c->stats[k].exposed - t->exposed[i][k], busy = c->stats[k].busy - t->busy[i][k];
            Channel* x = exposed > 0 || busy > 0 ? rank_channel(r, c->name, c->axis, k) : NULL;
            if (x == NULL) continue;
            x->exposed[s] = (float)exposed;
            x->busy[s] = (float)busy;
        }
    }
}
// ---- words ----
static inline void cause_name(const Diagnosis* d, int cause, char* out, size_t size) {
    static const char* const names[] = {
        "bubble: waiting for other stages", "waiting for slower ranks", "waiting for data", "a step"
    };
    int k = cause - CAUSE_EXPOSED;
    bool one_is = d->most.of[CAUSE_WAITING] > 0.05 * d->first.of[CAUSE_STEP]; // or the rank that waits least is chance
    if (cause < CAUSE_EXPOSED)
        snprintf(out, size, "%s", cause == CAUSE_COMPUTING ? "computing" : "without a core, or asleep");
    else if (cause < CAUSE_BUBBLE)
        snprintf(out, size, "exposed, %s: %s", diagnosis_axis_names[k / COMM_KINDS], comm_kind_names[k % COMM_KINDS]);
    else if (cause == CAUSE_WAITING && one_is) snprintf(out, size, "%s (rank %d waits least)", names[1], d->slowest);
    else snprintf(out, size, "%s", names[cause - CAUSE_BUBBLE]);
}
static inline void diagnosis_rows(const Diagnosis* d) {
    for (int i = 0; i <= CAUSE_STEP; i++) {
        char name[64];
        if (1e3 * d->most.of[i] < 0.005) continue; // it would be 0.00 on all ranks
        cause_name(d, i, name, sizeof name);
        printf("  %-46s %9.2f %9.2f to %.2f\n", name, 1e3 * d->first.of[i], 1e3 * d->least.of[i], 1e3 * d->most.of[i]);
    }
}
static inline void report_scaling(const SingleRun* one, double rate, double efficiency, int ranks) {
    const char* kind = one->scaling ? one->scaling : "strong, if that run also had as many tokens in a step, else weak";
    if (one->tokens_per_second == 0)
        printf("scaling    unknown: run this model on one rank with --out DIR, then give"
               " --single-throughput DIR/metrics.jsonl\n");
    else
        printf("scaling    efficiency %.1f %% (%s): median of %.0f tok/s on %d ranks, %.0f on one\n", 100 * efficiency,
               kind, rate, ranks, one->tokens_per_second);
    if (one->device[0] && strcmp(one->device, device_name()) != 0)
        printf("  the single rank ran on \"%s\", these ranks on \"%s\"\n", one->device, device_name());
}

// ---- metrics.jsonl: a line {"diagnosis": {...}}, in ms of a step ----
static inline json_t* breakdown_record(const TimeBreakdown* c) {
    static const struct { const char* name; int cause; } parts[] = {
        { "total", CAUSE_STEP }, { "computing", CAUSE_COMPUTING }, { "rest", CAUSE_REST }, { "bubble", CAUSE_BUBBLE },
        { "waiting", CAUSE_WAITING }, { "data", CAUSE_DATA }, { "per_token", CAUSE_PER_TOKEN }
    };
    json_t *o = json_object(), *exposed = json_object(), *communication = json_object();
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        json_object_set_new(o, parts[i].name, json_number(1e3 * c->of[parts[i].cause]));
    for (int a = 0; a < COMM_AXES; a++) {
        double ms = 1e3 * c->of[CAUSE_COMMUNICATION + a];
        json_t* kinds = json_object();
        for (int k = 0; k < COMM_KINDS; k++) {
            double exposed_ms = 1e3 * c->of[exposed_at(a, k)];
            if (exposed_ms > 0) json_object_set_new(kinds, comm_kind_names[k], json_number(exposed_ms));
        }
        if (json_object_size(kinds) > 0) json_object_set(exposed, diagnosis_axis_names[a], kinds);
        if (ms > 0) json_object_set_new(communication, diagnosis_axis_names[a], json_number(ms));
        json_decref(kinds);
    }
    json_object_set_new(o, "exposed", exposed);
    json_object_set_new(o, "communication", communication);
    return o;
}
static inline json_t* positive_number(double x) { return x > 0 ? json_number(x) : json_null(); }
static inline json_t* diagnosis_record(const DiagnosisReport* f) {
    const Diagnosis* d = &f->diagnosis;
    return json_pack("{s:{sI, sI, so, si, so, so, so, so, so, so, so, so, so, so, si, sI, si, si, sI}}", "diagnosis",
        "from", (json_int_t)(f->last - d->steps + 1), "to", (json_int_t)f->last,
        "rank_0", breakdown_record(&d->first), "slowest_rank", d->slowest, "slowest", breakdown_record(&d->slow),
        // experiments/compress_link.py takes the last of a name
        "others", breakdown_record(&d->others), "mean", breakdown_record(&d->mean),
        "efficiency_communication", json_number(efficiency_communication(&d->mean)),
        "efficiency_exposed", json_number(efficiency_exposed(&d->mean)),
        "tokens_per_second", json_number(f->rate),
        "single_tokens_per_second", positive_number(f->single.tokens_per_second),
        "scaling", f->single.scaling ? json_text(f->single.scaling) : json_null(),
        "scaling_efficiency", positive_number(f->scaling), "artificial", json_text(f->artificial),
        "local_ranks", f->local_ranks, "cores", (json_int_t)f->cores,
        "micro_batches", f->micro_batches, "stages", f->stages,
        "tokens_per_step", (json_int_t)f->tokens_per_step);
}

// ---- the end of a run ----
// Adds to the timeline what build/overlap needs of each step. One that became full in a step says nothing of it and of
// later ones.
static inline void trace_steps(const StepTimes* t) {
    const RankSteps* r = &t->mine;
    long long first = t->last - t->steps + 1; // the first that was noted
    for (long long step = t->last - r->steps + 1;
         trace.path && step <= t->last && (trace.full == 0 || step < trace.full); step++) {
        int s = (int)((step - first) % DIAGNOSIS_STEPS);
        char* notes = format_string("%s{\"name\":\"step\",\"ph\":\"M\",\"pid\":%d,"
                                    "\"args\":{\"step\":%lld,\"seconds\":%.9g,\"data\":%.9g,\"running\":%.9g}},\n",
                                    trace.notes ? trace.notes : "", trace.rank, step, r->seconds[s], r->data[s],
                                    r->running[s]);
        free(trace.notes);
        trace.notes = notes;
    }
}
// Finds the causes and sets *d on rank 0. Returns false, on all ranks,
// if there is one rank or no step but the first. Collective.
static inline bool find_breakdown(Diagnosis* d, StepTimes* t, Ranks* w) {
    if (w->comm.size == 1 || t->steps == 0) return false;
    for (int s = 0; s < t->mine.steps && w->sleeps; s++) t->mine.running[s] = -1;
    trace_steps(t);
    // Each as far as its last channel
    ControlBytes* given = control_gather(&w->control, &t->mine, rank_steps_bytes(&t->mine));
    if (given == NULL) return true;
    const RankSteps** ranks = new_array(const RankSteps*, w->comm.size);
    for (int q = 0; q < w->comm.size; q++) ranks[q] = (const RankSteps*)given[q].data;
    *d = diagnose(ranks, w->comm.size);
    free(ranks);
    control_gathered_free(&w->control, given);
    return true;
}
// out: where metrics.jsonl is; "": there is none.
static inline void report_diagnosis(const DiagnosisReport* f, const char* out) {
    const Diagnosis* d = &f->diagnosis;
    char title[80];
    snprintf(title, sizeof title, "diagnosis  in ms, means of steps %lld to %lld", f->last - d->steps + 1, f->last);
    printf("%-48s    rank 0   of %d ranks\n", title, d->ranks);
    if (f->artificial[0]) printf("  NOT THE TIMES OF THIS MACHINE:%s\n", f->artificial);
    diagnosis_rows(d);
    printf("compute / (compute + communication) = %.1f %%; compute / (compute + exposed) = %.1f %% (means of all "
           "ranks)\n",
           100 * efficiency_communication(&d->mean), 100 * efficiency_exposed(&d->mean));
    report_scaling(&f->single, f->rate, f->scaling, d->ranks);
    printf("advice     python3 dev/tools/advise.py %s/metrics.jsonl says what to try first%s\n", out[0] ? out : "DIR",
           out[0] ? "" : ", of a run with --out DIR");
}
#endif
