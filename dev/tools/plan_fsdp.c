// plan_fsdp.c - the bytes of a planned run of train_gpt2_fsdp, by its own formulas (plan_stage.h).
#define main train_main // plan has its own
#include "../../train_gpt2_fsdp.cu"
#include "plan_formulas.h"

PLAN_EXPORT PlanBytes PLAN_FORMULA(const Plan* p, PlanStage stage) {
    GPT2 g;
    PlannedRanks ranks;
    (void)stage;
    plan_configure(p, &g, &ranks);
    g.options = plan_sharding(p);
    g.accumulation = p->accumulation;
    return plan_ask(p, &g);
}
