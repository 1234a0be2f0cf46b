/*
report_diagnosis.h - the report of a run on several ranks about its time: where each step went, and how well it scales.
diagnosis.h does the arithmetic; this file measures, prints, and writes metrics.jsonl. From there build/advise says what
to try first if too much time is lost.
*/
#ifndef LLMC_REPORT_DIAGNOSIS_H
#define LLMC_REPORT_DIAGNOSIS_H
#include "../data/dataloader.h"
#include "diagnosis.h"
#include "logger.h"
#include "single_run.h"
#include "trace.h"
#include "all_ranks.h"

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
    char artificial[160]; // as what_is_artificial says
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

// Returns the seconds that this thread has had a core, so far.
static inline double thread_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static inline bool computes_on_cpu(void) { return strncmp(device_name(), "CPU", 3) == 0; }

// Before and after a step. The world has settled.
static inline void step_times_begin(StepTimes* t, Ranks* w) {
    const CommContext* all = w->comm.world;
    // Waited for before this step
    for (size_t i = trace.step_begin; i < trace.count; i++) trace.slices[i].outside = true;
    if (w->actions_done) device_event_free(w->actions_over);
    w->actions_done = false;
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
    double until = w->actions_done ? device_event_seconds(t->began, w->actions_over) : 0;
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
// ---- what the options say ----
static inline bool is_emulated(const OptionTable* t) {
    for (int i = 0; i < t->count; i++)
        if (strcmp(t->specs[i].name, "emulate-ms") == 0) return (*(const char**)t->specs[i].value)[0] != '\0';
    return false;
}
// What makes the times others than those of this machine; "": nothing.
static inline void what_is_artificial(char* out, size_t size, const OptionTable* t, const Ranks* w) {
    snprintf(out, size, "%s%s%s%s%s", is_emulated(t) ? " EMULATED TIMES (--emulate-ms);" : "",
             w->options.link > 0 ? " EMULATED LINK (--emulate-link);" : "",
             w->comm.world->host_link > 0 ? " EMULATED LINK TO THE HOST;" : "",
             w->comm.world->strict ? " STRICT MODE, WHICH HIDES NOTHING;" : "",
             w->fault.kind != FAULT_NONE ? " A FAULT ON PURPOSE (--fault);" : "");
}

// ---- words ----
static inline void cause_name(const Diagnosis* d, int cause, char* out, size_t size) {
    static const char* const names[] = {
        "bubble: waiting for other stages", "waiting for slower ranks", "waiting for data", "a step"
    };
    int k = cause - CAUSE_EXPOSED;
    bool one_is = d->most.of[CAUSE_WAITING] > 0.05 * d->first.of[CAUSE_STEP]; // else who waits least is chance
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
        printf("scaling    not known: run this model on one rank with --out DIR, then give"
               " --single-throughput DIR/metrics.jsonl\n");
    else
        printf("scaling    efficiency %.1f %% (%s): median of %.0f tok/s on %d ranks, %.0f on one\n", 100 * efficiency,
               kind, rate, ranks, one->tokens_per_second);
    if (one->device[0] && strcmp(one->device, device_name()) != 0)
        printf("  that rank ran on \"%s\", these run on \"%s\"\n", one->device, device_name());
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
        // dev/bench/compress_link.py takes the last of a name
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
static inline bool find_breakdown(Diagnosis* d, StepTimes* t, Ranks* w, const OptionTable* table) {
    if (w->comm.size == 1 || t->steps == 0) return false;
    // It sleeps instead of computing
    for (int s = 0; s < t->mine.steps && is_emulated(table); s++) t->mine.running[s] = -1;
    trace_steps(t);
    // Each as far as its last channel
    ControlBytes* given = control_gather(&w->control, &t->mine, rank_steps_bytes(&t->mine));
    if (given == NULL) return true;
    const RankSteps** ranks = (const RankSteps**)xcalloc((size_t)w->comm.size, sizeof(RankSteps*));
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
