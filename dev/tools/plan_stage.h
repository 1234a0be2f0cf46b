/*
plan_stage.h - what plan asks a stage: the bytes of a planned run, kept and sent.

The answers are the stages' own. plan_ddp.c, plan_zero.c, plan_fsdp.c and plan_tp.c each include a stage file, set the fields
that its gpt2_predict_memory and gpt2_predict_sent read, and export one function. Each is compiled for fp32 and for bf16,
because a stage's floatX is chosen when it is compiled. (fp16 has bf16's size.)
*/
#ifndef DEV_PLAN_STAGE_H
#define DEV_PLAN_STAGE_H
#include "../../llmc/device/device_contract.h"
#include "../../llmc/model/gpt2.h"
#include "../../llmc/parallel/layout.h"

// The first PLAN_STAGES are data parallel alone, and every rank has a micro-batch of its own. In PLAN_TP t ranks share one.
typedef enum { PLAN_DDP, PLAN_ZERO1, PLAN_ZERO2, PLAN_ZERO3, PLAN_FSDP, PLAN_STAGES, PLAN_TP = PLAN_STAGES } PlanStage;

typedef struct {
    GPT2Config config;
    int B, T;            // a rank's micro-batch, or in tp that of the t ranks that share a copy of the model
    int accumulation;    // micro-batches per step
    int recompute;       // RECOMPUTE_NONE or RECOMPUTE_BLOCK
    size_t X;            // bytes of floatX; 2: with an fp32 master copy
    int N;               // ranks
    bool gpu;            // the GPU's program (over NCCL), or the CPU's (over MPI)
    int rooms;           // fsdp: how many groups, besides the root, may be gathered at a time
    int wrap_blocks;     // fsdp: blocks of a group; 0: the whole model is one
    int t;               // tp: ranks that share a copy of the model
    bool sequence_parallel, keep_gathered; // tp: as train_gpt2_tp's options of these names
} Plan;

typedef struct {
    size_t memory[MEMORY_KINDS]; // per rank; of the layers' workspace only wte's fp32 sums
    double sent;                 // per rank and step
} PlanBytes;

typedef PlanBytes PlanFormula(const Plan* p, PlanStage stage);
PlanFormula plan_ddp_fp32, plan_ddp_bf16, plan_zero_fp32, plan_zero_bf16, plan_fsdp_fp32, plan_fsdp_bf16;
PlanFormula plan_tp_fp32, plan_tp_bf16; // they die as the stage does where ranks, model or rows do not divide

// How fsdp is planned: everything sharded, gradients reduced in fp32, and both prefetches where they have room.
static inline Sharding plan_sharding(const Plan* p) {
    Sharding how;
    memset(&how, 0, sizeof how); // SHARD_FULL, REDUCE_FP32
    how.wrap_blocks = p->wrap_blocks;
    how.rooms = p->rooms;
    how.prefetch = p->rooms > 1 ? PREFETCH_PRE : PREFETCH_NONE;
    how.forward_prefetch = p->rooms > 1;
    sharding_check(&how, p->N);
    return how;
}
#endif
