/*
report_diagnosis.h - what a run on several ranks says at its end about its time: how well it scales, where each step went, and
what to try first if too much is lost. diagnosis.h has the arithmetic; here it is measured and printed.
*/
#ifndef LLMC_REPORT_DIAGNOSIS_H
#define LLMC_REPORT_DIAGNOSIS_H
#include "../data/dataloader.h"
#include "../parallel/mesh.h"
#include "diagnosis.h"
#include "logger.h"
#include "single_run.h"
#include "trace.h"
#include "world.h"

// What is found at the end, on rank 0.
typedef struct {
    Diagnosis diagnosis;
    Setting setting;
    SingleRun single;
    long long last;       // step
    double rate;          // tokens per second
    char artificial[160]; // as what_is_artificial says
} Finding;

#define DIAGNOSIS_COMMS 8 // a stage has five at most
typedef struct {
    SingleRun single;
    RankSteps mine;       // step k of the run, counted from 1, is at (k - 2) % DIAGNOSIS_STEPS; the first has no place
    long long steps, last; // how many were noted; the last one of the run
    double exposed[DIAGNOSIS_COMMS][COMM_KINDS], busy[DIAGNOSIS_COMMS][COMM_KINDS]; // before the step at hand
    double running;       // thread_seconds() then
    int began;            // a mark, then
    bool warm;            // a step is over
} StepTimes;

// Returns the seconds that this thread has had a core, so far.
static inline double thread_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static inline bool computes_on_cpu(void) { return strncmp(device_name(), "CPU", 3) == 0; }

// Returns which axis of the mesh a communicator is. mesh NULL: all are of replicas of the model.
static inline int axis_of(const Mesh* mesh, const Comm* c) {
    if (mesh == NULL) return MESH_DP;
    const Comm* const axes[MESH_AXES] = { mesh->tp, mesh->pp, mesh->dp };
    for (int i = 0; i < MESH_AXES; i++) if (axes[i] == c) return i;
    if (c == mesh->tied) return MESH_PP;
    return AXIS_ALL;
}

// Before and after a step. The world has settled.
static inline void step_times_begin(StepTimes* t, World* w) {
    const CommContext* all = w->comm.world;
    trace_leave_out();
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
static inline void step_times_note(StepTimes* t, const World* w, const Mesh* mesh, double seconds, double data) {
    const CommContext* all = w->comm.world;
    RankSteps* r = &t->mine;
    int s = (int)(t->steps++ % DIAGNOSIS_STEPS);
    r->steps = t->steps < DIAGNOSIS_STEPS ? (int)t->steps : DIAGNOSIS_STEPS;
    r->seconds[s] = (float)seconds;
    r->data[s] = (float)data;
    r->running[s] = computes_on_cpu() ? (float)(thread_seconds() - t->running) : -1;
    r->until[s] = w->actions_done ? (float)device_event_seconds(t->began, w->actions_over) : 0;
    for (int i = 0; i < r->num_channels; i++) r->channels[i].exposed[s] = r->channels[i].busy[s] = 0;
    for (int i = 0; i < all->num_comms && i < DIAGNOSIS_COMMS; i++) {
        const Comm* c = all->comms[i];
        for (int k = 0; k < COMM_KINDS && c->size > 1; k++) {
            double exposed = c->stats[k].exposed - t->exposed[i][k], busy = c->stats[k].busy - t->busy[i][k];
            Channel* x = exposed > 0 || busy > 0 ? rank_channel(r, c->name, axis_of(mesh, c), k) : NULL;
            if (x == NULL) continue;
            x->exposed[s] = (float)exposed;
            x->busy[s] = (float)busy;
        }
    }
}
// seconds: of the step, of which `data` were waits for data.
static inline void step_times_end(StepTimes* t, World* w, const Mesh* mesh, long long step, double seconds, double data) {
    if (t->warm) step_times_note(t, w, mesh, seconds, data);
    device_event_free(t->began);
    t->warm = true;
    t->last = step;
}

// self: the Diagnosis to set; given: RankSteps. The answer says nothing.
static inline ControlBytes diagnosis_decide(void* self, const ControlBytes* given, int size) {
    RankSteps** ranks = (RankSteps**)xcalloc((size_t)size, sizeof(RankSteps*));
    for (int q = 0; q < size; q++) {
        ranks[q] = (RankSteps*)xcalloc(1, sizeof(RankSteps));
        memcpy(ranks[q], given[q].data, given[q].bytes);
    }
    *(Diagnosis*)self = diagnose((const RankSteps* const*)ranks, size);
    for (int q = 0; q < size; q++) free(ranks[q]);
    free(ranks);
    return control_bytes("", 1);
}

// ---- what the options say ----
// Returns an option's value as text; "": there is no such option, or it is empty.
static inline const char* option_text_of(const OptionTable* t, const char* name, char* out, size_t size) {
    out[0] = '\0';
    for (int i = 0; i < t->count; i++) if (strcmp(t->specs[i].name, name) == 0) option_format(&t->specs[i], out, size);
    return out;
}
// What may hide more communication along each axis, as these options are; NULL: nothing.
static inline void what_hides_more(const char* hides[DIAGNOSIS_AXES], const OptionTable* t) {
    char value[512];
    if (strcmp(option_text_of(t, "ddp", value, sizeof value), "naive") == 0) hides[MESH_DP] = "take --ddp bucketed";
    if (strcmp(value, "bucketed") == 0) hides[MESH_DP] = "a smaller --bucket-mb begins earlier";
    if (strcmp(t->program, "train_gpt2_zero") == 0) hides[MESH_DP] = "train_gpt2_fsdp gathers a block ahead";
    option_text_of(t, "prefetch", value, sizeof value);
    if (value[0] && strcmp(value, "backward-pre") != 0) hides[MESH_DP] = "take --prefetch backward-pre";
    if (strcmp(option_text_of(t, "overlap", value, sizeof value), "off") == 0) hides[MESH_TP] = "leave out --no-overlap";
}

// Returns what would halve the bytes that are sent; NULL: no option would.
static inline const char* what_halves_bytes(const OptionTable* t) {
    static const struct { const char *method, *halves; } methods[] = {
        { "none", sizeof(floatX) > 2 ? "--compress bf16 sends" : "--compress int8 sends" },
        { "bf16", "--compress int8 sends" }, { "fp16", "--compress int8 sends" }, { "int8", "--compress int4 sends" },
        { "top-k", "half of --top-k-fraction sends" }, { "powersgd", "half of --rank sends about" },
    };
    char method[512];
    option_text_of(t, "compress", method, sizeof method);
    for (size_t i = 0; i < sizeof methods / sizeof methods[0]; i++)
        if (strcmp(method, methods[i].method) == 0) return methods[i].halves;
    if (method[0]) return NULL; // a method that sends few bits of each element
    if (sizeof(floatX) > 2) return "make PRECISION=bf16 sends";
    return strcmp(t->program, "train_gpt2_ddp") == 0 ? "numbers have 16 bits already; train_gpt2_compress --compress int8 sends"
                                                     : "numbers have 16 bits already; 8 would be";
}

static inline bool is_emulated(const OptionTable* t) {
    char value[512];
    return option_text_of(t, "emulate-ms", value, sizeof value)[0] != '\0';
}
// What makes the times others than those of this machine; "": nothing.
static inline void what_is_artificial(char* out, size_t size, const OptionTable* t, const World* w) {
    snprintf(out, size, "%s%s%s%s", is_emulated(t) ? " EMULATED TIMES (--emulate-ms);" : "",
             w->options.link > 0 ? " EMULATED LINK (--emulate-link);" : "",
             w->comm.world->strict ? " STRICT MODE, WHICH HIDES NOTHING;" : "",
             w->fault.kind != FAULT_NONE ? " A FAULT ON PURPOSE (--fault);" : "");
}

// ---- words ----
static inline void diagnosis_row(const char* name, double first, double least, double most) {
    if (1e3 * most < 0.005) return; // it would be 0.00 on all ranks
    printf("  %-46s %9.2f %9.2f to %.2f\n", name, 1e3 * first, 1e3 * least, 1e3 * most);
}
static inline void diagnosis_rows(const Diagnosis* d) {
    const Causes *f = &d->first, *l = &d->least, *m = &d->most;
    char slowest[64];
    diagnosis_row("computing", f->compute, l->compute, m->compute);
    diagnosis_row("without a core, or asleep", f->rest, l->rest, m->rest);
    for (int a = 0; a < DIAGNOSIS_AXES; a++) for (int k = 0; k < COMM_KINDS; k++) {
        char name[64];
        snprintf(name, sizeof name, "exposed, %s: %s", diagnosis_axis_names[a], comm_kind_names[k]);
        diagnosis_row(name, f->exposed[a][k], l->exposed[a][k], m->exposed[a][k]);
    }
    bool one_is = m->waiting > 0.05 * f->step; // else who waits least is chance
    snprintf(slowest, sizeof slowest, "waiting for slower ranks");
    if (one_is) snprintf(slowest, sizeof slowest, "waiting for slower ranks (rank %d waits least)", d->slowest);
    diagnosis_row("bubble: waiting for other stages", f->bubble, l->bubble, m->bubble);
    diagnosis_row(slowest, f->waiting, l->waiting, m->waiting);
    diagnosis_row("waiting for data", f->data, l->data, m->data);
    diagnosis_row("a step", f->step, l->step, m->step);
}
static inline void report_scaling(const SingleRun* one, double rate, double efficiency, int ranks) {
    const char* kind = one->scaling ? one->scaling : "strong, if that run also had as many tokens in a step, else weak";
    if (one->tokens_per_second == 0)
        printf("scaling    not known: run this model on one rank with --out DIR, then give"
               " --single-throughput DIR/metrics.jsonl\n");
    else printf("scaling    efficiency %.1f %% (%s): median of %.0f tok/s on %d ranks, %.0f on one\n", 100 * efficiency, kind,
                rate, ranks, one->tokens_per_second);
    if (one->device[0] && strcmp(one->device, device_name()) != 0)
        printf("  that rank ran on \"%s\", these run on \"%s\"\n", one->device, device_name());
}

// ---- metrics.jsonl: a line {"diagnosis": {...}}, in ms of a step ----
static inline json_t* causes_record(const Causes* c) {
    json_t *o = json_object(), *exposed = json_object(), *communication = json_object();
    for (int a = 0; a < DIAGNOSIS_AXES; a++) {
        json_t* kinds = json_object();
        for (int k = 0; k < COMM_KINDS; k++)
            if (c->exposed[a][k] > 0) json_object_set_new(kinds, comm_kind_names[k], json_number(1e3 * c->exposed[a][k]));
        if (json_object_size(kinds) > 0) json_object_set_new(exposed, diagnosis_axis_names[a], kinds);
        else json_decref(kinds);
        if (c->communication[a] > 0)
            json_object_set_new(communication, diagnosis_axis_names[a], json_number(1e3 * c->communication[a]));
    }
    json_object_set_new(o, "total", json_number(1e3 * c->step));
    json_object_set_new(o, "computing", json_number(1e3 * c->compute));
    json_object_set_new(o, "rest", json_number(1e3 * c->rest));
    json_object_set_new(o, "exposed", exposed);
    json_object_set_new(o, "bubble", json_number(1e3 * c->bubble));
    json_object_set_new(o, "waiting", json_number(1e3 * c->waiting));
    json_object_set_new(o, "data", json_number(1e3 * c->data));
    json_object_set_new(o, "communication", communication);
    return o;
}
static inline json_t* diagnosis_record(const Finding* f) {
    const Diagnosis* d = &f->diagnosis;
    const SingleRun* one = &f->single;
    json_t *o = json_object(), *record = json_object();
    json_object_set_new(o, "from", json_integer(f->last - d->steps + 1));
    json_object_set_new(o, "to", json_integer(f->last));
    json_object_set_new(o, "rank_0", causes_record(&d->first));
    json_object_set_new(o, "mean", causes_record(&d->mean));
    json_object_set_new(o, "slowest_rank", json_integer(d->slowest));
    json_object_set_new(o, "efficiency_communication", json_number(efficiency_communication(&d->mean)));
    json_object_set_new(o, "efficiency_exposed", json_number(efficiency_exposed(&d->mean)));
    json_object_set_new(o, "tokens_per_second", json_number(f->rate));
    json_object_set_new(o, "single_tokens_per_second", json_number(one->tokens_per_second > 0 ? one->tokens_per_second : NAN));
    json_object_set_new(o, "scaling", one->scaling ? json_text(one->scaling) : json_null());
    json_object_set_new(o, "scaling_efficiency", json_number(f->setting.scaling > 0 ? f->setting.scaling : NAN));
    json_object_set_new(o, "artificial", json_text(f->artificial));
    json_object_set_new(record, "diagnosis", o);
    return record;
}

// ---- the end of a run ----
// Adds to the timeline what the causes are found from. One that became full in a step says nothing of it and of later ones.
static inline void trace_steps(const StepTimes* t) {
    const RankSteps* r = &t->mine;
    long long first = t->last - t->steps + 1; // the first that was noted
    if (trace.path == NULL) return;
    trace_note("{\"name\":\"pipeline\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"number\":%d}},\n", trace.rank, r->pipe);
    for (int i = 0; i < r->num_channels; i++)
        trace_note("{\"name\":\"communicator\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"%s\",\"axis\":%d}},\n", trace.rank,
                   r->channels[i].comm, r->channels[i].axis);
    for (long long step = t->last - r->steps + 1; step <= t->last && (trace.full == 0 || step < trace.full); step++) {
        int s = (int)((step - first) % DIAGNOSIS_STEPS);
        trace_note("{\"name\":\"step\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"step\":%lld,\"seconds\":%.9g,\"data\":%.9g,"
                   "\"running\":%.9g,\"until\":%.9g}},\n",
                   trace.rank, step, r->seconds[s], r->data[s], r->running[s], r->until[s]);
    }
}
// Finds the causes and sets *d on rank 0. Returns false, on all ranks, if there is one rank or no step but the first. Collective.
static inline bool find_causes(Diagnosis* d, StepTimes* t, World* w, const OptionTable* table) {
    if (w->comm.size == 1 || t->steps == 0) return false;
    for (int s = 0; s < t->mine.steps && is_emulated(table); s++) t->mine.running[s] = -1; // it sleeps instead of computing
    trace_steps(t);
    free(control_all_reduce(&w->control, &t->mine, rank_steps_bytes(&t->mine), diagnosis_decide, d).data);
    return true;
}
// Adds what follows from them, on rank 0.
static inline void finish_finding(Finding* f, Setting setting, const StepTimes* t, const OptionTable* table,
                                  const World* w) {
    double all = t->single.tokens_per_second * f->diagnosis.ranks; // as if nothing were lost
    f->single = t->single;
    f->last = t->last;
    f->rate = (double)setting.tokens_per_step / f->diagnosis.seconds;
    f->setting = setting;
    f->setting.scaling = all > 0 ? f->rate / all : 0;
    f->setting.share = all > 0 ? (double)setting.tokens_per_step / all : 0;
    what_is_artificial(f->artificial, sizeof f->artificial, table, w);
}
static inline void report_diagnosis(const Finding* f) {
    const Diagnosis* d = &f->diagnosis;
    char title[80];
    Advice a = diagnosis_advice(d, &f->setting);
    snprintf(title, sizeof title, "diagnosis  in ms, means of steps %lld to %lld", f->last - d->steps + 1, f->last);
    printf("%-48s    rank 0   of %d ranks\n", title, d->ranks);
    if (f->artificial[0]) printf("  NOT THE TIMES OF THIS MACHINE:%s\n", f->artificial);
    diagnosis_rows(d);
    printf("compute / (compute + communication) = %.1f %%; compute / (compute + exposed) = %.1f %% (means of all ranks)\n",
           100 * efficiency_communication(&d->mean), 100 * efficiency_exposed(&d->mean));
    report_scaling(&f->single, f->rate, f->setting.scaling, d->ranks);
    for (int i = 0; i < a.n; i++) printf("%s %s\n", i == 0 ? "below 60 %, try first:" : "  then:", a.lines[i]);
}
#endif
