// plan_ways.h - what the tables of build/plan compare: stages, numbers of ranks that share a replica of the model, schedules, and
// the ranks of a pipeline.
#ifndef DEV_PLAN_WAYS_H
#define DEV_PLAN_WAYS_H
#include "plan_options.h"

// What a table compares: stages, numbers of ranks that share a replica of the model, schedules, or ranks of a pipeline.
enum { MOST_WAYS = 6 };
typedef struct { PlanStage stage; Plan plan; char name[32]; } Way;
typedef struct { int n; Way ways[MOST_WAYS]; } Ways;

// Ranks that share a replica of the model and its micro-batches.
static int copy_ranks(const Plan* plan, PlanStage stage) {
    return (stage == PLAN_TP || stage == PLAN_3D ? plan->t : 1) * (stage >= PLAN_PP ? plan->pipe.p : 1);
}
// Sets the micro-batches of a step of so many tokens; 0: they are as they are. Returns false, with the reason, if there are
// none, or too many to play.
static bool plan_divide_batch(Plan* plan, PlanStage stage, long long tokens, char* why, size_t size) {
    int copies = plan->N / copy_ranks(plan, stage), most = stage >= PLAN_PP ? PLAYED_MICRO_BATCHES : MOST_MICRO_BATCHES;
    double rounds = (double)tokens / ((double)copies * plan->B * plan->T);
    if (tokens == 0) return true;
    if (rounds < 1 || rounds != floor(rounds)) {
        snprintf(why, size, "%lld tokens are no multiple of %d x %d x %d", tokens, copies, plan->B, plan->T);
        return false;
    }
    if (rounds > most) {
        snprintf(why, size, "%.0f micro-batches are more than the %d that can be planned", rounds, most);
        return false;
    }
    plan->accumulation = (int)rounds;
    return true;
}
static void ways_add(Ways* w, PlanStage stage, const Plan* plan) {
    Way* way = &w->ways[w->n++];
    way->stage = stage;
    way->plan = *plan;
    if (stage == PLAN_TP) snprintf(way->name, sizeof way->name, "tp %d", plan->t);
    else if (stage == PLAN_PP) snprintf(way->name, sizeof way->name, "pp %d", plan->pipe.p);
    else if (stage == PLAN_3D) snprintf(way->name, sizeof way->name, "mesh");
    else if (stage == PLAN_DDP && plan->compress.method != COMPRESS_NONE)
        snprintf(way->name, sizeof way->name, "ddp %s", compress_methods[plan->compress.method].name);
    else snprintf(way->name, sizeof way->name, "%s", plan_stage_names[stage]);
}
static Ways ways_of_stages(const Plan* plan) {
    Ways w;
    w.n = 0;
    for (int s = 0; s < PLAN_STAGES; s++) ways_add(&w, (PlanStage)s, plan);
    return w;
}
// asked: 0 for 1, 2, 4 and 8, as far as ranks and model divide
static Ways ways_of_tensor_parallel(Plan plan, int asked) {
    Ways w;
    w.n = 0;
    for (plan.t = asked ? asked : 1; plan.t <= (asked ? asked : 8); plan.t *= 2) {
        if (plan_divides(&plan)) ways_add(&w, PLAN_TP, &plan);
    }
    return w;
}
// Numbers of ranks, or if one is asked for the schedules that it can have, or if one of these is asked for that one.
static Ways ways_of_pipelines(const PlanOptions* o, Plan plan) {
    Ways w;
    w.n = 0;
    int asked = (int)o->pipeline_parallel;
    for (int p = asked ? asked : 2; p <= (asked ? asked : 8); p *= 2) {
        for (int s = o->compares ? 0 : o->schedule; s <= (o->compares ? SCHEDULE_ZB_H1 : o->schedule); s++) {
            Plan pipe = plan_of_pipe(o, plan, p, s);
            char unused[128];
            plan_divide_batch(&pipe, PLAN_PP, o->o.total_batch_size, unused, sizeof unused);
            if (!pipe_divides(&pipe)) continue;
            ways_add(&w, PLAN_PP, &pipe);
            char* name = w.ways[w.n - 1].name;
            if (!o->compares) continue;
            if (pipe.pipe.v == 1) snprintf(name, sizeof w.ways[0].name, "%s", schedule_names[s]);
            else snprintf(name, sizeof w.ways[0].name, "%s %d", schedule_names[s], pipe.pipe.v);
        }
    }
    return w;
}
// The ranks of one pipeline, or if these are too many the one that keeps most and the one that keeps least.
static Ways ways_of_ranks(Plan plan, PlanStage stage) {
    Ways w;
    w.n = 0;
    bool all = plan.pipe.p <= MOST_WAYS;
    int ranks[MOST_WAYS], n = all ? plan.pipe.p : 2;
    for (int i = 0; i < n; i++) ranks[i] = all ? i : plan_extreme_rank(&plan, stage, i == 0);
    for (int i = 0; i < n; i++) {
        plan.pipe.rank = ranks[i];
        ways_add(&w, stage, &plan);
        snprintf(w.ways[i].name, sizeof w.ways[i].name, "%s%s %d", all ? "" : i == 0 ? "most: " : "least: ",
                 stage == PLAN_3D ? "stage" : "rank", ranks[i]);
    }
    return w;
}
// ddp with and without compressed gradients; none if they are not compressed.
static Ways ways_of_compression(const PlanOptions* o, Plan plan) {
    PlanCompress how = { o->compress, o->error_feedback, o->fraction, (int)o->rank, o->bucket_mb, o->precision == FP16 };
    Ways w;
    w.n = 0;
    if (o->compress == COMPRESS_NONE || o->compress == COMPRESS_ALL) return w;
    ways_add(&w, PLAN_DDP, &plan);
    plan.compress = how;
    ways_add(&w, PLAN_DDP, &plan);
    return w;
}
static Plan recomputing(Plan plan, int recompute) {
    plan.recompute = recompute;
    return plan;
}
static size_t way_total(const Way* w, int recompute) {
    Plan plan = recomputing(w->plan, recompute);
    return plan_memory_total(&plan, w->stage);
}
static PlanBytes way_bytes(const Way* w, int recompute) {
    Plan plan = recomputing(w->plan, recompute);
    return plan_bytes(&plan, w->stage);
}

static bool is_of_most(const Ways* w) { return w->ways[0].stage == PLAN_PP && w->ways[0].plan.pipe.rank == PLAN_MOST; }

// ---- everything that is compared ----
// With --mesh nothing else is.
typedef struct { Plan plan; Ways stages, compressed, tensor, pipelines, mesh; } Compared;

// Gives each way the micro-batches of --total-batch-size, where it divides; where it does not, the times say so.
static void ways_divide_batch(Ways* w, long long tokens) {
    char unused[128];
    for (int i = 0; i < w->n; i++) plan_divide_batch(&w->ways[i].plan, w->ways[i].stage, tokens, unused, sizeof unused);
}
static Compared compared_from_options(const PlanOptions* o) {
    Compared c;
    memset(&c, 0, sizeof c);
    c.plan = plan_from_options(o);
    c.plan.recompute = o->o.recompute;
    char unused[128];
    plan_divide_batch(&c.plan, PLAN_DDP, o->o.total_batch_size, unused, sizeof unused);
    if (o->mesh[0] != '\0') {
        Plan mesh = plan_of_mesh(o, c.plan);
        ways_add(&c.mesh, PLAN_3D, &mesh);
        ways_divide_batch(&c.mesh, o->o.total_batch_size);
        return c;
    }
    c.stages = ways_of_stages(&c.plan);
    c.compressed = ways_of_compression(o, c.plan);
    c.tensor = ways_of_tensor_parallel(c.plan, (int)o->tensor_parallel);
    ways_divide_batch(&c.tensor, o->o.total_batch_size);
    c.pipelines = ways_of_pipelines(o, c.plan);
    return c;
}

// ---- what fits ----
// The devices of the tables of what fits: the one that is asked for, or nominal sizes.
typedef struct { char name[24]; double bytes; } DeviceSize;
typedef struct { int n; DeviceSize sizes[4]; } DeviceSizes;

static DeviceSizes device_sizes(const PlanOptions* o) {
    static const double nominal[] = { 24, 40, 80, 141 };
    DeviceSizes d;
    bool known = o->gpu || o->memory > 0;
    d.n = known ? 1 : 4;
    for (int i = 0; i < d.n; i++) {
        if (known) snprintf(d.sizes[i].name, sizeof d.sizes[i].name, "%s", o->room_of);
        else snprintf(d.sizes[i].name, sizeof d.sizes[i].name, "%.0f GB", nominal[i]);
        d.sizes[i].bytes = known ? rank_room(o, (int)o->ranks) : 1e9 * nominal[i];
    }
    return d;
}
static const char* way_fits(const Way* w, double bytes) {
    bool recomputed = (double)way_total(w, RECOMPUTE_BLOCK) <= bytes;
    return (double)way_total(w, RECOMPUTE_NONE) <= bytes ? "yes" : recomputed ? "recomputed" : "no";
}
// The largest dN, recomputed, that such a device can train; L is 0 if there is none.
static GPT2Config way_largest(const Way* w, double bytes) {
    GPT2Config c = w->plan.config;
    Plan with = recomputing(w->plan, RECOMPUTE_BLOCK);
    c.L = c.NH = plan_largest_depth(with, w->stage, bytes);
    c.C = 64 * c.L;
    return c;
}
// tp of one rank is ddp, whose row is there.
static bool way_is_repeated(const Way* w) { return w->stage == PLAN_TP && w->plan.t == 1; }
#endif
