/*
plan_times.h - the seconds of a step of every way that plan_ways.h compares, as tables of rows. A row that cannot be timed says
why.

Rows      First of all stages, then of compressed gradients, of ranks that share a replica, of pipelines. Most tables have a row for
          each power of two up to 4096 ranks and for the number asked for; those that compare numbers of ranks that share a replica,
          or schedules, are for that number.
*/
#ifndef DEV_PLAN_TIMES_H
#define DEV_PLAN_TIMES_H
#include "plan_ways.h"
#include "../../llmc/run/logger.h"

enum { MOST_ROWS = 16, MOST_TABLES = PLAN_STAGES + 3 };
typedef struct {
    char name[32];          // number of ranks, or the way
    int ranks, micro_batches; // of a replica of the model
    char why_not[128];      // "": it is timed
    PipelineTime time;      // of other stages without bubble and formula
    double tensor;          // of a mesh: seconds of its sums along tp
    RunCost cost;           // 0: not known
    double mfu;             // NAN: the peak is not known
} TimeRow;
typedef struct { char title[32], rows_are[16]; PlanStage stage; int n; TimeRow rows[MOST_ROWS]; } TimeTable;
typedef struct { int n; TimeTable tables[MOST_TABLES]; } TimeTables;

// Numbers of ranks for a table: `first` times powers of two up to 4096, and the number asked for where `first` divides it.
typedef struct { int n, ranks[MOST_ROWS]; } Rows;
static Rows rows_of(int first, int asked) {
    Rows r;
    bool is_row = asked % first == 0;
    r.n = 0;
    for (int N = first; N <= 4096; N *= 2) {
        if (is_row && asked < N && (r.n == 0 || r.ranks[r.n - 1] < asked)) r.ranks[r.n++] = asked;
        r.ranks[r.n++] = N;
    }
    if (is_row && (r.n == 0 || r.ranks[r.n - 1] < asked)) r.ranks[r.n++] = asked;
    return r;
}

// ---- a row ----
// Returns false, with the reason, if a rank needs more than it has.
static bool plan_has_room(const PlanOptions* o, const Plan* plan, PlanStage stage, char* why, size_t size) {
    char needs[32], less[32];
    Plan again = recomputing(*plan, RECOMPUTE_BLOCK);
    double bytes = (double)plan_memory_total(plan, stage), recomputed = (double)plan_memory_total(&again, stage);
    double room = rank_room(o, plan->N);
    if (bytes <= room) return true;
    int n = snprintf(why, size, "does not fit: %s of %s", format_bytes(needs, sizeof needs, bytes), o->room_of);
    if (o->shares_room) n += snprintf(why + n, size - (size_t)n, ", which %d ranks share", plan->N);
    if (recomputed <= room)
        snprintf(why + n, size - (size_t)n, "; with --recompute block %s", format_bytes(less, sizeof less, recomputed));
    return false;
}
static void row_time(TimeRow* row, const Emulation* e, const Plan* plan, PlanStage stage, const Network* w, UnitSeconds s) {
    if (stage == PLAN_PP) row->time = pipeline_step(plan, w, s);
    else if (stage == PLAN_3D) {
        AxesTime t = axes_step(plan, w, s, e);
        PipelineTime all = { t.compute, t.bubble, NAN, t.communication, t.exposed, t.seconds, t.efficiency, t.tokens_per_s };
        row->time = all;
        row->tensor = t.tensor;
    } else {
        StepTime t = plan_step(plan, stage, w, s);
        PipelineTime all = { t.compute, 0, NAN, t.communication, t.exposed, t.seconds, t.efficiency, t.tokens_per_s };
        row->time = all;
    }
}
static double plan_peak(const PlanOptions* o) { // NAN: not known
    if (o->peak_flops > 0) return o->peak_flops;
    return o->compute_ms > 0 ? NAN : o->precision == FP32 ? H100_PEAK_FP32 : H100_PEAK;
}
static TimeRow time_row(const PlanOptions* o, Plan plan, PlanStage stage, const Network* w, UnitSeconds s, const char* name) {
    TimeRow row;
    memset(&row, 0, sizeof row);
    row.ranks = plan.N;
    if (name) snprintf(row.name, sizeof row.name, "%s", name);
    else snprintf(row.name, sizeof row.name, "%d", plan.N);
    if (!plan_divide_batch(&plan, stage, o->o.total_batch_size, row.why_not, sizeof row.why_not)) return row;
    if (!plan_has_room(o, &plan, stage, row.why_not, sizeof row.why_not)) return row;
    row.micro_batches = plan.accumulation;
    row_time(&row, &o->emulation, &plan, stage, w, s);
    row.mfu = gpt2_flops_per_token(plan.config, plan.T) * row.time.tokens_per_s / plan.N / plan_peak(o);
    row.cost = run_cost(o->run, row.time.tokens_per_s, plan.N);
    return row;
}

// ---- tables ----
static TimeTable* tables_add(TimeTables* t, PlanStage stage, const char* title, const char* rows_are) {
    require(t->n < MOST_TABLES, "there is room for %d tables of times", MOST_TABLES);
    TimeTable* table = &t->tables[t->n++];
    table->stage = stage;
    table->n = 0;
    snprintf(table->title, sizeof table->title, "%s", title);
    snprintf(table->rows_are, sizeof table->rows_are, "%s", rows_are);
    return table;
}
// A way on more and more ranks; `first`: the fewest that it can have.
static void tables_add_ranks(TimeTables* t, const PlanOptions* o, const Way* way, int first, const Network* w, UnitSeconds s) {
    TimeTable* table = tables_add(t, way->stage, way->name, "ranks");
    Plan plan = way->plan;
    Rows rows = rows_of(first, plan.N);
    for (int i = 0; i < rows.n; i++) {
        plan.N = rows.ranks[i];
        table->rows[table->n++] = time_row(o, plan, way->stage, w, s, NULL);
    }
}
// All ways of `ways` on the ranks that are asked for. shows_number: of the ranks that share a replica, instead of the name.
static void tables_add_ways(TimeTables* t, const PlanOptions* o, const Ways* ways, const char* title, bool shows_number,
                            const Network* w, UnitSeconds s) {
    TimeTable* table = tables_add(t, ways->ways[0].stage, title, shows_number ? "t" : o->compares ? "" : "p");
    for (int i = 0; i < ways->n; i++) {
        const Way* way = &ways->ways[i];
        char name[32];
        snprintf(name, sizeof name, "%d", copy_ranks(&way->plan, way->stage));
        table->rows[table->n++] = time_row(o, way->plan, way->stage, w, s, shows_number ? name : way->name);
    }
}
static void tables_add_shared(TimeTables* t, const PlanOptions* o, const Compared* c, const Network* w, UnitSeconds s) {
    const Ways *tp = &c->tensor, *pp = &c->pipelines;
    char title[32];
    snprintf(title, sizeof title, "tp of %d", c->plan.N);
    if (tp->n == 1 && o->tensor_parallel) tables_add_ranks(t, o, &tp->ways[0], tp->ways[0].plan.t, w, s);
    else if (tp->n > 1) tables_add_ways(t, o, tp, title, true, w, s);
    if (pp->n == 0) return; // there is none, or --mesh has its own
    int p = pp->ways[0].plan.pipe.p;
    if (o->compares) snprintf(title, sizeof title, "pp %d of %d", p, c->plan.N);
    else snprintf(title, sizeof title, "pp of %d", c->plan.N);
    if (o->pipeline_parallel && !o->compares) tables_add_ranks(t, o, &pp->ways[0], p, w, s);
    else tables_add_ways(t, o, pp, title, false, w, s);
}
// Overwrites t. s: of a whole model on one rank.
static void tables_of(TimeTables* t, const PlanOptions* o, const Compared* c, const Network* w, UnitSeconds s) {
    t->n = 0;
    for (int i = 0; i < c->stages.n; i++) {
        const Way* way = &c->stages.ways[i];
        int first = way->stage == PLAN_FSDP && o->sharding == SHARD_HYBRID ? (int)o->shard_group : 1;
        tables_add_ranks(t, o, way, first, w, s);
    }
    for (int i = 0; i < c->mesh.n; i++) {
        const Way* way = &c->mesh.ways[i];
        tables_add_ranks(t, o, way, copy_ranks(&way->plan, PLAN_3D), w, s);
    }
    if (c->compressed.n > 0) tables_add_ranks(t, o, &c->compressed.ways[1], 1, w, s);
    tables_add_shared(t, o, c, w, s);
}

// Seconds of a micro-batch on one rank.
static double micro_batch_seconds(const PlanOptions* o, const Plan* plan) {
    if (o->compute_ms > 0) return 1e-3 * o->compute_ms;
    return plan_flops_done(plan) * plan->B * plan->T / (plan_peak(o) * o->mfu);
}
#endif
