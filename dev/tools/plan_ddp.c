// plan_ddp.c - the bytes of a planned run of train_gpt2_ddp, by its own formulas (plan_stage.h).
#define main train_main // plan has its own
#include "../../train_gpt2_ddp.cu"
#include "plan_formulas.h"

PLAN_EXPORT PlanBytes PLAN_FORMULA(const Plan* p, PlanStage stage) {
    GPT2 g;
    PlannedRanks ranks;
    (void)stage;
    plan_configure(p, &g, &ranks);
    return plan_ask(p, &g);
}
