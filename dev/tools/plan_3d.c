// plan_3d.c - the bytes of a planned run of train_gpt2_3d, by its own formulas (plan_stage.h).
#define main train_main // plan has its own
#include "../../train_gpt2_3d.cu"
#define PLAN_SENT(g, b) gpt2_predict_sent(g, (b).sent_along)
#include "plan_formulas.h"

// Places a rank of stage p->pipe.rank on the mesh. On each stage all ranks keep and send the same.
static void plan_place(const Plan* p, GPT2* g, PlannedRanks* ranks) {
    Axes axes = axes_of(p->t, p->pipe.p, p->N / (p->t * p->pipe.p), false);
    AxesPlace place = { { 0, p->pipe.rank, 0 } }; // tp, pp, dp
    ranks->comm.rank = axes_rank(axes, place);
    mesh_plan_axes(&g->mesh, &ranks->comm, axes);
    g->tp = g->mesh.tp;
    g->pp = g->mesh.pp;
    g->tied = g->mesh.tied;
    g->dp = g->mesh.dp;
}

// As gpt2_configure, once g has its place.
static void plan_cut(const Plan* p, GPT2* g) {
    g->tokens = token_range(p->config.Vp, p->t, 0);
    g->stages = stages_cut(&g->pp_options, p->config, g->pp->rank, g->pp->size);
    g->most_blocks = stages_most_blocks(&g->stages);
    Pipeline l = { (Schedule)p->pipe.schedule, g->stages.p, p->accumulation, g->stages.v };
    pipeline_check(l);
    g->pipeline = l;
    g->num_slots = pipeline_slots(l, g->pp->rank);
    int rows = classifier_rows_of(plan_classifier_elements(p), p->B * p->T, g->tokens.count);
    if (!stages_have_head(&g->stages)) rows = 1;
    g->logits_rows = rows > p->t ? rows : p->t;
    mesh_check_rows(&g->tp_options, p->t, p->B, p->T);
}

PLAN_EXPORT PlanBytes PLAN_FORMULA(const Plan* p, PlanStage stage) {
    GPT2 g;
    PlannedRanks ranks;
    int model = p->t * p->pipe.p;
    (void)stage;
    plan_configure(p, &g, &ranks);
    require(p->N % model == 0, "--mesh tp=%d,pp=%d: %d does not divide %d ranks; choose a multiple of %d", p->t, p->pipe.p,
            model, p->N, model);
    mesh_check_model("--mesh tp=", p->t, p->config);
    g.zero_stage = p->zero_stage;
    g.tp_options.sequence_parallel = p->sequence_parallel;
    g.tp_options.keep_gathered = p->keep_gathered;
    g.pp_options.from_mesh = true;
    g.pp_options.schedule = p->pipe.schedule;
    g.pp_options.chunks = p->pipe.v;
    g.pp_options.split = p->pipe.split;
    g.pp_options.emulate = "";
    plan_place(p, &g, &ranks);
    plan_cut(p, &g);
    return plan_ask_part(p, &g, g.tokens.count);
}
