// plan_pp.c - the bytes of a planned run of train_gpt2_pp, by its own formulas (plan_stage.h).
#define main train_main // plan has its own
#include "../../train_gpt2_pp.cu"
#include "plan_formulas.h"

// Of what a rank sends: the stage's formula without micro-batches, and without other replicas, says how much these are.
static void plan_sent_by_kind(GPT2* g, PlanBytes* b) {
    double p = g->pp->size, rest;
    Comm alone = *g->dp, *dp = g->dp;
    alone.size = 1;
    g->pipeline.m = 0;
    rest = gpt2_predict_sent(g);
    b->sent_as[SENT_MESSAGES] = b->sent - rest;
    g->dp = &alone;
    b->sent_as[SENT_COPIES] = rest - gpt2_predict_sent(g);
    g->dp = dp;
    b->sent_as[SENT_NUMBERS] = 2 * (p - 1) / p * 3 * sizeof(double);
    b->sent_as[SENT_ROOT] = rest - b->sent_as[SENT_COPIES] - b->sent_as[SENT_NUMBERS];
}

PLAN_EXPORT PlanBytes PLAN_FORMULA(const Plan* p, PlanStage stage) {
    GPT2 g;
    PlannedRanks ranks;
    long long n = p->pipe.p;
    (void)stage;
    plan_configure(p, &g, &ranks);
    mesh_check_stages(&n, p->N);
    ranks.comm.rank = p->pipe.rank;
    mesh_plan(&g.mesh, &ranks.comm, 1, p->pipe.p);
    g.pp = g.mesh.pp;
    g.tied = g.mesh.tied;
    g.dp = g.mesh.dp;
    g.pp_options.schedule = p->pipe.schedule;
    g.pp_options.chunks = p->pipe.v;
    g.pp_options.split = p->pipe.split;
    g.pp_options.emulate = "";
    // the rest as gpt2_configure
    g.stages = stages_cut(&g.pp_options, p->config, g.pp->rank, g.pp->size);
    g.most_blocks = stages_most_blocks(&g.stages);
    Pipeline l = { (Schedule)p->pipe.schedule, g.stages.p, p->accumulation, g.stages.v };
    pipeline_check(l);
    g.pipeline = l;
    g.num_slots = pipeline_slots(l, g.pp->rank);
    int rows = classifier_rows_of(plan_classifier_elements(p), p->B * p->T, p->config.Vp);
    g.logits_rows = stages_have_head(&g.stages) ? rows : 1;
    PlanBytes b = plan_ask_part(p, &g, p->config.Vp);
    plan_sent_by_kind(&g, &b);
    return b;
}
