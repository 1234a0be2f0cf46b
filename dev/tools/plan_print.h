// plan_print.h - prints what plan_ways.h compares and plan_times.h has timed, as tables to read.
#ifndef DEV_PLAN_PRINT_H
#define DEV_PLAN_PRINT_H
#include "plan_times.h"

// ---- bytes ----
static void print_ways(const char* title, const Ways* w) {
    printf("\n%-24s", title);
    for (int i = 0; i < w->n; i++) printf(" %16s", w->ways[i].name);
    printf("\n");
}
static void print_bytes(double bytes, bool exact) {
    char text[32];
    if (exact) printf(" %16.0f", bytes);
    else printf(" %16s", format_bytes(text, sizeof text, bytes));
}
static void print_device_sizes(const char* title, const DeviceSizes* d) {
    printf("\n%-24s", title);
    for (int i = 0; i < d->n; i++) printf(" %16s", d->sizes[i].name);
    printf("\n");
}
static const char* precision_name(int precision) { return precision == FP32 ? "fp32" : precision == BF16 ? "bf16" : "fp16"; }

static void print_total(const char* name, const Ways* w, int recompute, bool exact) {
    printf("%-24s", name);
    for (int i = 0; i < w->n; i++) print_bytes((double)way_total(&w->ways[i], recompute), exact);
    printf("\n");
}
// The rank of a pipeline that keeps most, or least.
static void print_extreme(const char* name, const Ways* w, int recompute, bool most) {
    printf("%-24s", name);
    for (int i = 0; i < w->n; i++) {
        Plan plan = recomputing(w->ways[i].plan, recompute);
        printf("%17d", pipe_extreme_rank(&plan, most));
    }
    printf("\n");
}
static void print_kind(const char* name, const PlanBytes* bytes, int n, int kind, bool exact) {
    printf("%-24s", name);
    for (int i = 0; i < n; i++) print_bytes((double)bytes[i].memory[kind], exact);
    printf("\n");
}
static bool has_kind(const PlanBytes* bytes, int n, int kind) {
    for (int i = 0; i < n; i++) if (bytes[i].memory[kind] > 0) return true;
    return false;
}
static void print_model_memory(const Ways* w, bool exact) { // with and without recomputation
    PlanBytes kept[MOST_WAYS], recomputed[MOST_WAYS];
    char title[64], name[32];
    snprintf(title, sizeof title, "bytes per rank of %d", w->ways[0].plan.N);
    print_ways(title, w);
    if (is_of_most(w)) {
        print_extreme("  on the rank with most", w, RECOMPUTE_NONE, true);
        print_extreme("    or recomputed", w, RECOMPUTE_BLOCK, true);
    }
    for (int i = 0; i < w->n; i++) {
        kept[i] = way_bytes(&w->ways[i], RECOMPUTE_NONE);
        recomputed[i] = way_bytes(&w->ways[i], RECOMPUTE_BLOCK);
    }
    for (int k = 0; k <= MEMORY_ERRORS; k++) {
        snprintf(name, sizeof name, "  %s", memory_kind_names[k]);
        if (k < MEMORY_WORKSPACE || has_kind(kept, w->n, k)) print_kind(name, kept, w->n, k, exact);
        if (k == MEMORY_ACTIVATIONS) print_kind("    or recomputed", recomputed, w->n, k, exact);
    }
    print_total("  total", w, RECOMPUTE_NONE, exact);
    print_total("    or recomputed", w, RECOMPUTE_BLOCK, exact);
    if (has_kind(kept, w->n, MEMORY_OFFLOADED)) print_kind("  state on the host", kept, w->n, MEMORY_OFFLOADED, exact);
    printf("  %-22s", "sent per step");
    for (int i = 0; i < w->n; i++) {
        const Plan* plan = &w->ways[i].plan;
        print_bytes(floor(plan_sent(plan, w->ways[i].stage) / plan->N), exact);
    }
    printf("\n");
}

static void print_fits(const Ways* w, const DeviceSizes* d) {
    for (int i = 0; i < w->n; i++) {
        if (way_is_repeated(&w->ways[i])) continue;
        printf("  %-22s", w->ways[i].name);
        for (int k = 0; k < d->n; k++) printf(" %16s", way_fits(&w->ways[i], d->sizes[k].bytes));
        printf("\n");
    }
}
static void print_largest(const Ways* w, const DeviceSizes* d) {
    for (int i = 0; i < w->n; i++) {
        if (way_is_repeated(&w->ways[i])) continue;
        printf("  %-22s", w->ways[i].name);
        for (int k = 0; k < d->n; k++) {
            char text[48] = "none";
            GPT2Config c = way_largest(&w->ways[i], d->sizes[k].bytes);
            if (c.L > 0) snprintf(text, sizeof text, "d%d, %.3g B", c.L, 1e-9 * (double)gpt2_num_parameters(c));
            printf(" %16s", text);
        }
        printf("\n");
    }
}

static void print_tensor_parallel_memory(const Ways* tp, const PlanOptions* p) {
    const Plan* plan = &tp->ways[0].plan;
    if (tp->n == 1 && p->tensor_parallel == 0) {
        if (plan->N > 1) printf("\ntensor parallelism: none of 2, 4 and 8 divides %d ranks, %d heads and %d tokens\n",
                                plan->N, plan->config.NH, plan->config.Vp);
        return;
    }
    printf("\ntp t: t ranks share a replica of the model, and %d x %d tokens per micro-batch%s", plan->B, plan->T,
           !plan->sequence_parallel ? "" : plan->keep_gathered ? "; they cut its rows, and keep what they gather"
                                                               : "; they cut its rows");
    print_model_memory(tp, p->exact);
}
static void print_compressed_memory(const Ways* w, const PlanOptions* o) {
    if (w->n == 0) return;
    const Plan* plan = &w->ways[1].plan;
    printf("\n%s: train_gpt2_compress, from the step on in which it compresses", w->ways[1].name);
    if (o->compress == COMPRESS_TOP_K) printf("; it sends %g of the elements of a matrix", plan->compress.fraction);
    if (o->compress == COMPRESS_POWERSGD) printf("; rank %d", plan->compress.rank);
    if (plan->memory_bandwidth == 0) printf("; compressing takes no time here, because no --memory-bandwidth is known");
    print_model_memory(w, o->exact);
}

// What a rank of a pipeline sends, by kind.
static void print_sent_kinds(const Ways* w, bool exact) {
    static const char* const names[SENT_KINDS] = { "messages", "root", "to other replicas", "loss and norms" };
    for (int k = 0; k < SENT_KINDS; k++) {
        printf("    %-20s", names[k]);
        for (int i = 0; i < w->n; i++) print_bytes(floor(way_bytes(&w->ways[i], RECOMPUTE_NONE).sent_as[k] + 1e-3), exact);
        printf("\n");
    }
}
// What the rank of each pipeline with least keeps.
static void print_least(const Ways* w, int recompute, bool exact) {
    Ways least = *w;
    print_extreme(recompute ? "    recomputed, on rank" : "  on the rank with least", w, recompute, false);
    for (int i = 0; i < w->n; i++) {
        Plan plan = recomputing(w->ways[i].plan, recompute);
        least.ways[i].plan.pipe.rank = pipe_extreme_rank(&plan, false);
    }
    print_total("    total", &least, recompute, exact);
}

static void print_slots(const Ways* w) { // in an interleaved schedule each of one chunk
    printf("%-24s", "  activations at a time");
    for (int i = 0; i < w->n; i++) {
        const Plan* plan = &w->ways[i].plan;
        int rank = is_of_most(w) ? pipe_extreme_rank(plan, true) : plan->pipe.rank;
        printf("%17d", pipeline_slots(plan_pipeline(plan), rank));
    }
    printf("\n");
}
static void print_blocks(const Ways* ranks) {
    printf("%-24s", "  blocks");
    for (int i = 0; i < ranks->n; i++) printf("%17d", pipe_blocks_of(&ranks->ways[i].plan, ranks->ways[i].plan.pipe.rank));
    printf("\n");
}

static int way_parts(const Way* w) { return w->plan.pipe.p * w->plan.pipe.v; }
static void print_splits(const Ways* pp) { // each once
    for (int i = 0; i < pp->n; i++) {
        int blocks[MAX_UNITS];
        const Plan* plan = &pp->ways[i].plan;
        bool seen = false;
        for (int j = 0; j < i; j++) seen = seen || way_parts(&pp->ways[j]) == way_parts(&pp->ways[i]);
        if (seen) continue;
        pipe_split(plan, blocks);
        printf("split      ");
        for (int g = 0; g < way_parts(&pp->ways[i]); g++) printf("%s%d", g ? "," : "", blocks[g]);
        printf(": ranks compute for %.0f %% of the time without a bubble; with equal numbers of blocks for %.0f %%\n",
               100 * pipe_balance(plan, blocks), 100 * pipe_balance_of_even_split(plan));
    }
}

static void print_pipeline_memory(const Ways* pp, const PlanOptions* o) {
    if (pp->n == 0) return;
    const Plan* plan = &pp->ways[0].plan;
    bool one = o->pipeline_parallel && !o->compares;
    Ways ranks = one ? ways_of_ranks(*plan, PLAN_PP) : *pp;
    printf("\npp p: p ranks share a replica of the model, each with some of its blocks; %d x %d tokens per micro-batch, ",
           plan->B, plan->T);
    if (o->o.total_batch_size > 0) printf("%lld tokens a step\n", o->o.total_batch_size);
    else if (o->accumulation || o->pipeline_parallel) printf("%d a step\n", plan->accumulation);
    else printf("p a step\n");
    print_splits(pp);
    print_model_memory(&ranks, o->exact);
    print_sent_kinds(&ranks, o->exact);
    print_slots(&ranks);
    if (one) print_blocks(&ranks);
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_BLOCK && !one; recompute++)
        print_least(pp, recompute, o->exact);
    int v = o->chunks ? (int)o->chunks : 2;
    if (o->compares && pp->n < SCHEDULE_ZB_H1 + 1)
        printf("interleaved with %d chunks is left out: it needs a multiple of %d micro-batches, and %d blocks\n", v,
               plan->pipe.p, v * plan->pipe.p);
}
static void print_mesh_memory(const Ways* mesh, const PlanOptions* o) {
    if (mesh->n == 0) return;
    const Plan* plan = &mesh->ways[0].plan;
    Ways ranks = ways_of_ranks(*plan, PLAN_3D);
    printf("\nmesh dp=%d,tp=%d,pp=%d: replicas of the model, ranks that share its matrices, stages; %d x %d tokens per micro-batch,"
           " %d a step\n", axes_copies(plan), plan->t, plan->pipe.p, plan->B, plan->T, plan->accumulation);
    print_splits(mesh);
    print_model_memory(&ranks, o->exact);
    for (int axis = 0; axis < MESH_AXES; axis++) {
        printf("    along %-14s", mesh_axis_names[axis]);
        for (int i = 0; i < ranks.n; i++)
            print_bytes(floor(way_bytes(&ranks.ways[i], plan->recompute).sent_along[axis] + 0.5), o->exact);
        printf("\n");
    }
    print_slots(&ranks);
    print_blocks(&ranks);
}
// How fsdp shards, if not as usual.
static void print_sharding(const Plan* plan) {
    static const char* const shardings[] = { "full", "grad-op", "hybrid", "none" };
    Sharding how = plan_sharding(plan);
    const PlanFsdp* f = &plan->fsdp;
    if (f->sharding == SHARD_FULL && f->reduce_dtype == REDUCE_FP32 && !f->offload) return;
    printf("fsdp       sharding %s", shardings[f->sharding]);
    if (f->sharding == SHARD_HYBRID) printf(": %d replicas of the model, of %d ranks each", plan->N / how.shards, how.shards);
    printf("; gradients reduced in %s%s\n", f->reduce_dtype == REDUCE_FP32 ? "fp32" : "the model's precision",
           f->offload ? "; shards on the host" : "");
}
static void print_what_fits(const Compared* c, const PlanOptions* o) {
    DeviceSizes sizes = device_sizes(o);
    print_device_sizes("fits", &sizes);
    print_fits(&c->stages, &sizes);
    print_fits(&c->tensor, &sizes);
    print_fits(&c->pipelines, &sizes);
    print_fits(&c->mesh, &sizes);
    if (c->mesh.n > 0) return;
    print_device_sizes("largest dN, recomputed", &sizes);
    print_largest(&c->stages, &sizes);
    print_largest(&c->tensor, &sizes);
    if (strcmp(o->split, "auto") == 0) print_largest(&c->pipelines, &sizes);
}

// ---- seconds ----
static void print_times_title(const TimeTable* t, const PlanOptions* o) {
    int left = 14 - (int)strlen(t->title); // of the first column, for what the rows are
    printf("%s%*s", t->title, left < 6 ? 6 : left, t->rows_are);
    if (t->stage == PLAN_PP) {
        printf(" %9s %9s %8s %8s %9s %14s %9s %9s %12s %11s", "compute", "bubble", "of step", "of work", "formula",
               "communication", "exposed", "step ms", "tokens/s", "efficiency");
    } else if (t->stage == PLAN_3D) {
        printf(" %12s %10s %10s %14s %10s %10s %12s %11s", "compute ms", "tp", "bubble", "communication", "exposed", "step ms",
               "tokens/s", "efficiency");
    } else printf(" %12s %14s %12s %12s %14s %11s", "compute ms", "communication", "exposed", "step", "tokens/s", "efficiency");
    if (o->run.tokens > 0) printf(" %9s %10s", "hours", "GPU-hours");
    if (o->run.tokens > 0 && o->run.watts > 0) printf(" %10s", "kWh");
    if (o->run.price > 0) printf(" %12s", "price");
    printf("\n");
}
static void print_row(const TimeTable* table, const TimeRow* row, const PlanOptions* o) {
    const PipelineTime* t = &row->time;
    char formula[32] = "-";
    if (row->why_not[0] != '\0') {
        printf("%14s  %s\n", row->name, row->why_not);
        return;
    }
    if (!isnan(t->formula)) snprintf(formula, sizeof formula, "%.2f", 1e3 * t->formula);
    if (table->stage == PLAN_PP) {
        printf("%14s %9.2f %9.2f %7.1f%% %7.1f%% %9s %14.2f %9.2f %9.2f %12.0f %10.1f%%", row->name, 1e3 * t->compute,
               1e3 * t->bubble, 100 * t->bubble / (t->compute + t->bubble), 100 * t->bubble / t->compute, formula,
               1e3 * t->communication, 1e3 * t->exposed, 1e3 * t->seconds, t->tokens_per_s, 100 * t->efficiency);
    } else if (table->stage == PLAN_3D) {
        printf("%14s %12.2f %10.2f %10.2f %14.2f %10.2f %10.2f %12.0f %10.1f%%", row->name, 1e3 * t->compute, 1e3 * row->tensor,
               1e3 * t->bubble, 1e3 * t->communication, 1e3 * t->exposed, 1e3 * t->seconds, t->tokens_per_s, 100 * t->efficiency);
    } else {
        printf("%14s %12.2f %14.2f %12.2f %12.2f %14.0f %10.1f%%", row->name, 1e3 * t->compute, 1e3 * t->communication,
               1e3 * t->exposed, 1e3 * t->seconds, t->tokens_per_s, 100 * t->efficiency);
    }
    if (o->run.tokens > 0) printf(" %9.4g %10.4g", row->cost.hours, row->cost.gpu_hours);
    if (o->run.tokens > 0 && o->run.watts > 0) printf(" %10.4g", row->cost.kwh);
    if (o->run.price > 0) printf(" %12.4g", row->cost.price);
    printf("\n");
}
static void print_messages(const Ways* pp, const Network* network) {
    for (int i = 0; i < pp->n; i++) {
        const Plan* plan = &pp->ways[i].plan;
        char size[32];
        if (plan->pipe.p == 1) continue;
        printf("%s: %d messages of %s between stages in a step of a copy, each in %.3f ms%s\n", pp->ways[i].name,
               pipe_messages(plan), format_bytes(size, sizeof size, pipe_message_bytes(plan)),
               1e3 * pipe_message_seconds(plan, network), pipe_crosses_nodes(plan, network) ? ", between nodes" : "");
    }
}
// What the times assume.
static void print_assumptions(const PlanOptions* o, const Plan* plan, const Network* w) {
    static const char* const algorithms[] = { "rings", "trees", "NCCL's algorithms" };
    printf("\ntimes of a step: %.4g GFLOP per token, ", 1e-9 * gpt2_flops_per_token(plan->config, plan->T));
    if (o->compute_ms > 0) printf("a micro-batch takes %.4g ms", o->compute_ms);
    else printf("%.4g TFLOP/s x %.3g", 1e-12 * plan_peak(o), o->mfu);
    printf("%s\n", plan->recompute == RECOMPUTE_BLOCK ? ", blocks recomputed" : "");
    if (o->communication_ms > 0) printf("summing all gradients whole takes %.4g ms on %d ranks", o->communication_ms, plan->N);
    else printf("%s over %s", algorithms[w->algorithm], o->gpu_links ? o->gpu->what : link_description(o->link));
    if (w->ranks_per_node) printf("; nodes of %d ranks and %d interfaces", w->ranks_per_node, w->nics);
    if (w->ranks_per_node && !o->gpu_links) printf(": %s", link_description(o->inter_link));
    if (plan->memory_bandwidth > 0) printf("; an update at %.4g TB/s", 1e-12 * plan->memory_bandwidth);
    printf("\n");
    if (plan->fsdp.offload) printf("offloaded shards pass a link of %.3g GB/s, and AdamW has %.3g GB/s of the host's memory\n",
                                   1e-9 * plan->fsdp.host_link, 1e-9 * plan->fsdp.host_bandwidth);
    if (o->run.tokens > 0) printf("cost of %.4g tokens%s\n", o->run.tokens,
                                  o->run.watts > 0 ? "; kWh are the GPUs' at their limit, without the rest of a node" : "");
    if (o->mesh[0] == '\0')
        printf("zero-3 waits for each unit that it gathers, as train_gpt2_zero does; DeepSpeed's prefetches, as fsdp does here\n");
}
static void print_times(const TimeTables* times, const Compared* c, const PlanOptions* o, const Network* w) {
    print_assumptions(o, &c->plan, w);
    for (int i = 0; i < times->n; i++) {
        const TimeTable* table = &times->tables[i];
        if (table->stage == PLAN_PP) print_messages(&c->pipelines, w);
        print_times_title(table, o);
        for (int k = 0; k < table->n; k++) print_row(table, &table->rows[k], o);
    }
}
#endif
