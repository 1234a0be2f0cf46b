/*
report_pipeline.h - what a pipelined run reports in addition to report.h: each rank's part of the model, the balance of
the parts, the current action, how long actions take, and finally the size of the bubble.
*/
#ifndef LLMC_REPORT_PIPELINE_H
#define LLMC_REPORT_PIPELINE_H
#include "../parallel/mesh.h"
#include "../parallel/stages.h"
#include "logger.h"
#include "trace.h"
#include "ranks.h"

// ---- how long actions take, measured by marks, so that the time on a GPU counts ----
typedef struct { ActionKind kind; int begins, ends; } TimedAction; // two marks
// until: seconds from the beginning of a step to the end of its last action
typedef struct { double seconds[4], until; long long done[4], steps; } ActionSums;
typedef struct {
    TimedAction* actions;   // (count) of the last step, owned
    int count;
    bool begun, over;       // the step has begun; all its actions have ended
    long long last_over;    // the number of the last step that is over
    int step_begins;        // a mark, if the step has begun
    bool warm;              // an earlier step, which warmed up caches and communicators, is over
    ActionSums sums;        // of all steps after the first: seconds of actions and how many, by kind
    double clock;           // when the current action began, for --emulate-ms
    Ranks* ranks;     // these are views
    const Stages* stages;
} ActionTimes;

// Adds up the last step, all of which the device has completed.
static inline void action_times_settle(ActionTimes* t) {
    for (int i = 0; i < t->count; i++) {
        TimedAction* x = &t->actions[i];
        if (t->warm) {
            t->sums.seconds[x->kind] += device_event_seconds(x->begins, x->ends);
            t->sums.done[x->kind]++;
        }
        if (t->warm && i == t->count - 1) t->sums.until += device_event_seconds(t->step_begins, x->ends);
        device_event_free(x->begins);
        device_event_free(x->ends);
    }
    if (t->begun) device_event_free(t->step_begins);
    if (t->warm && t->over) t->sums.steps++;
    t->warm = t->warm || t->over;
    t->begun = t->over = false;
    t->count = 0;
}

// Tells the timeline and the watchdog that the rank computes, sends and waits for this action from now on. Ignores
// evaluations, which run between the last action of a step and the next step.
static inline void action_announce(void* times, Action a) {
    static const char* const letters[] = { "F", "B", "I", "W" }; // as in parallel/pipeline.h
    ActionTimes* t = (ActionTimes*)times;
    char task[OP_TASK];
    if (flight_recorder_step_now(t->ranks->comm.world->recorder) == t->last_over) return;
    snprintf(task, sizeof task, "%s%d on stage %d", letters[a.kind], a.micro, stages_at(t->stages, a.chunk));
    flight_recorder_task(t->ranks->comm.world->recorder, task);
    task[strcspn(task, " ")] = '\0';
    trace_task(task);
    if (t->over) action_times_settle(t);
    if (!t->begun) t->step_begins = device_event();
    t->begun = true;
}
// Call when an action begins. --fault may strike in it. The mark "start" is the action's first slice in the timeline,
// which even an action of a stage without blocks needs.
static inline void action_begin(ActionTimes* t, Action a) {
    Ranks* w = t->ranks;
    action_announce(t, a);
    trace_compute("start", -1);
    long long step = flight_recorder_step_now(w->comm.world->recorder);
    if (a.kind == ACT_FORWARD) fault_strike_at(&w->fault, w->comm.rank, step, a.micro);
    TimedAction x = { a.kind, device_event(), -1 };
    t->actions = grown_array(TimedAction, t->actions, t->count);
    t->actions[t->count++] = x;
    t->clock = now_seconds();
}
// Call when an action ends, before its results are sent. With --emulate-ms, returns only when its time is over.
static inline void action_end(ActionTimes* t, Action a) {
    stages_emulate(t->stages, a, t->clock);
    t->actions[t->count - 1].ends = device_event();
}
// Call after the last action of a step: later compute belongs to no action until the next step begins.
static inline void actions_end(void* times) {
    ActionTimes* t = (ActionTimes*)times;
    Ranks* w = t->ranks;
    if (t->over || !t->begun) return; // an evaluation
    t->last_over = flight_recorder_step_now(w->comm.world->recorder);
    flight_recorder_task(w->comm.world->recorder, "");
    trace_task("");
    t->over = true;
    if (w->has_last_work) device_event_free(w->last_work);
    w->last_work = device_event();
    w->has_last_work = true;
}

// Makes messages announce the actions to which they belong.
static inline void action_times_init(ActionTimes* t, Ranks* w, const Stages* y, Messages* m) {
    t->ranks = w;
    t->stages = y;
    w->sleeps = y->options.emulate[0] != '\0';
    if (w->sleeps) ranks_are_artificial(w, "EMULATED TIMES (--emulate-ms)");
    m->times = t;
    m->announce = action_announce;
    m->finished = actions_end;
}

// ---- the bubble, measured and by its formula ----
typedef struct {
    double busy, min, max; // seconds of a step in which a rank computes: the mean, least and most of all ranks
    double until;          // seconds from the beginning of a step until every rank has ended its last action
    double formula;        // seconds that a rank of a balanced pipeline would wait if actions lasted this long
} Bubble;
static inline Bubble bubble_of(Pipeline pipe, const ActionSums* ranks, int size) {
    Bubble b = { 0, 1e30, 0, 0, 0 };
    for (int q = 0; q < size; q++) {
        const ActionSums* s = &ranks[q];
        double steps = (double)s->steps, busy = 0, each[4]; // each: of a kind, a micro-batch in all chunks
        for (int k = 0; k < 4; k++) {
            busy += s->seconds[k] / steps;
            each[k] = s->done[k] ? pipe.v * s->seconds[k] / (double)s->done[k] : 0;
        }
        b.busy += busy / size;
        b.min = fmin(b.min, busy);
        b.max = fmax(b.max, busy);
        b.until = fmax(b.until, s->until / steps);
        b.formula += pipeline_bubble(pipe, each[ACT_FORWARD], each[ACT_BACKWARD] + each[ACT_BACKWARD_INPUT],
                                     each[ACT_BACKWARD_WEIGHT]) / size;
    }
    return b;
}
// Prints the share of the time in which ranks computed, next to the one by the formula, and frees the times. Leaves out
// the first step, and prints nothing for a single stage. Collective; call it when the last step is over.
static inline void report_bubble(ActionTimes* t, Pipeline pipe) {
    Ranks* w = t->ranks;
    action_times_settle(t);
    free(t->actions);
    t->actions = NULL;
    if (pipe.p == 1 || t->sums.steps == 0) return;
    Bubble b = { 0, 0, 0, 0, 0 };
    ActionSums* ranks = (ActionSums*)control_gather_array(&w->control, &t->sums, sizeof t->sums);
    if (ranks) b = bubble_of(pipe, ranks, w->comm.size);
    free(ranks);
    control_share(&w->control, &b, sizeof b);
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    bool crowded = computes_on_cpu() && w->control.ranks.local_size > cores;
    printf("bubble     ranks computed for %.1f %% (%.1f to %.1f %%) of a step up to its last action, and waited for"
           " %.1f of %.1f ms\n", 100 * b.busy / b.until, 100 * b.min / b.until, 100 * b.max / b.until,
           1e3 * (b.until - b.busy), 1e3 * b.until);
    if (pipe.schedule == SCHEDULE_ZB_H1 && pipe.m < pipe.p)
        printf("  zb-h1 has no formula for fewer micro-batches than stages");
    else printf("  the formula says %.1f %% and %.1f ms, if all stages took the average of these times; the rest is"
                " imbalance, messages and jitter", 100 * b.busy / (b.busy + b.formula), 1e3 * b.formula);
    printf(" (build/schedule --trace shows which)\n");
    if (crowded)
        printf("  %d ranks share %ld core%s: the times of actions include waits for a core\n",
               w->control.ranks.local_size, cores, cores == 1 ? "" : "s");
}

typedef struct { int blocks, slots; size_t bytes; } StageReport; // of a rank
// Says in capitals that times are emulated.
static inline void report_emulation(const PipelineParallel* options, Pipeline pipe) {
    const double* ms = options->ms;
    double bubble = pipeline_bubble(pipe, ms[0], ms[1], ms[2]), step = pipe.m * (ms[0] + ms[1] + ms[2]) + bubble;
    if (options->emulate[0] == '\0') return;
    printf("EMULATED TIMES: F, I AND W %sLAST AT LEAST %g, %g AND %g MS (--emulate-ms); ",
           options->head > 0 ? "OF A BLOCK " : "", ms[0], ms[1], ms[2]);
    if (options->head > 0) printf("THE HEAD TAKES AS LONG AS %g BLOCKS\n", options->head);
    else printf("A BUBBLE OF %.0f MS IN A STEP OF %.0f\n", bubble, step);
}

// Prints the schedule with its bubble, and the parts of each stage. The views in t must be set. bytes: the predicted
// memory of this rank. Collective.
static inline void report_stages(const ActionTimes* t, const Mesh* mesh, Pipeline pipe, GPT2Config c, size_t bytes) {
    Ranks* w = t->ranks;
    const Stages* y = t->stages;
    static const char* const names[] = { "gpipe", "1f1b", "interleaved", "zb-h1" };
    if (y->p == 1) { report_emulation(&y->options, pipe); return; } // there is nothing to balance
    SplitCosts costs = split_costs(c.Vp, c.C);
    StageReport mine;
    memset(&mine, 0, sizeof mine); // even the padding is sent
    mine.blocks = stages_num_blocks(y);
    mine.slots = pipeline_slots(pipe);
    mine.bytes = bytes;
    StageReport* all = (StageReport*)control_all_gather(&w->control, &mine, sizeof mine);
    double bubble = pipeline_bubble(pipe, 1, 1, 1), work = 3.0 * pipe.m;
    int replicas = mesh->dp->size, ranks = y->p * mesh->tp->size;
    printf("pipeline   %d replica%s of the model, each in %d stage%s on %d rank%s; %s: with equal times a bubble"
           " of %.1f %% of a step, %.1f %% of the work\n", replicas, replicas == 1 ? "" : "s", y->count,
           y->count == 1 ? "" : "s", ranks, ranks == 1 ? "" : "s", names[pipe.schedule],
           100 * bubble / (work + bubble), 100 * bubble / work);
    for (int q = 0; q < y->p; q++) {
        char text[32];
        AxesPlace place = { { 0, q, 0 } }; // tp, pp, dp: of the first replica
        int rank = axes_rank(mesh->axes, place);
        StageReport r = all[rank];
        format_bytes(text, sizeof text, (double)r.bytes);
        printf("  rank %-4d %d block%s%s%s; activations of %d micro-batch%s%s; %s\n", rank, r.blocks,
               r.blocks == 1 ? "" : "s", q == 0 ? ", embedding" : "", q == y->p - 1 ? ", head" : "", r.slots,
               r.slots == 1 ? "" : "es", y->v > 1 ? " and chunks" : "", text);
    }
    free(all);
    int even[MAX_STAGES];
    split_even(even, c.L, y->p, y->v);
    printf("split      ranks compute for %.0f %% of the time without a bubble; with equal numbers of blocks it is"
           " %.0f %%\n", 100 * split_efficiency(y->blocks, y->p, y->v, costs),
           100 * split_efficiency(even, y->p, y->v, costs));
    fflush(stdout);
    report_emulation(&y->options, pipe);
}
#endif
