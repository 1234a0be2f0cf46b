// plan_tp.c - the bytes of a planned run of train_gpt2_tp, by its own formulas (plan_stage.h).
#define main train_main // plan has its own
#include "../../train_gpt2_tp.cu"
#include "plan_formulas.h"

PLAN_EXPORT PlanBytes PLAN_FORMULA(const Plan* p, PlanStage stage) {
    GPT2 g;
    PlannedRanks ranks;
    long long t = p->t;
    (void)stage;
    plan_configure(p, &g, &ranks);
    mesh_check(&t, p->N, p->config);
    g.tp_options.sequence_parallel = p->sequence_parallel;
    g.tp_options.keep_gathered = p->keep_gathered;
    mesh_check_rows(&g.tp_options, p->t, p->B, p->T);
    mesh_plan(&g.mesh, &ranks.comm, p->t, 1);
    g.tp = g.mesh.tp;
    g.dp = g.mesh.dp;
    g.tokens = token_range(p->config.Vp, p->t, 0);
    g.accumulation = p->accumulation;
    int rows = classifier_rows_of(plan_classifier_elements(p), p->B * p->T, g.tokens.count);
    g.logits_rows = rows > p->t ? rows : p->t; // as gpt2_configure
    return plan_ask_part(p, &g, g.tokens.count);
}
