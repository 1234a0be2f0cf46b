// plan_zero.c - the bytes of a planned run of train_gpt2_zero, by its own formulas (plan_stage.h).
#define main train_main // plan has its own
#include "../../train_gpt2_zero.cu"
#include "plan_formulas.h"

PLAN_EXPORT PlanBytes PLAN_FORMULA(const Plan* p, PlanStage stage) {
    GPT2 g;
    PlannedRanks ranks;
    plan_configure(p, &g, &ranks);
    g.zero_stage = 1 + stage - PLAN_ZERO1;
    g.accumulation = p->accumulation;
    return plan_ask(p, &g);
}
