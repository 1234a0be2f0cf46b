/*
plan_stage.h - what plan asks a stage: the bytes of a planned run, kept and sent.

The answers are the stages' own. plan_ddp.c, plan_zero.c, plan_fsdp.c, plan_tp.c, plan_pp.c, plan_3d.c and plan_compress.c each
include a stage file, set the fields that its gpt2_predict_memory and gpt2_predict_sent read, and export one function. Each is
compiled for fp32 and for bf16, because a stage's floatX is chosen when it is compiled. (fp16 has bf16's size; plan_compress.c is
compiled for it as well, because there train_gpt2_compress keeps two copies of its state.)
*/
#ifndef DEV_PLAN_STAGE_H
#define DEV_PLAN_STAGE_H
#include "../../llmc/device/device_api.h"
#include "../../llmc/model/gpt2.h"
#include "../../llmc/parallel/axes.h"
#include "../../llmc/parallel/layout.h"

// The first PLAN_STAGES are data parallel alone, and every rank has a micro-batch of its own. In PLAN_TP t ranks share one. In
// PLAN_PP micro-batches pass through p ranks. PLAN_3D has copies of p stages of t ranks.
typedef enum { PLAN_DDP, PLAN_ZERO1, PLAN_ZERO2, PLAN_ZERO3, PLAN_FSDP, PLAN_STAGES, PLAN_TP = PLAN_STAGES, PLAN_PP,
               PLAN_3D } PlanStage;

// pp: p ranks share a replica of the model, each with v chunks of its blocks.
typedef struct {
    int p, schedule, v;  // as in llmc/parallel/pipeline.h
    int rank;            // of the p; PLAN_MOST: the one that keeps most
    const char* split;   // as train_gpt2_pp's --split
} PlanPipe;
enum { PLAN_MOST = -1 };

// fsdp: train_gpt2_fsdp's options of these names, and what an offloaded state is moved with.
typedef struct {
    int sharding, shard_group, reduce_dtype; // as in llmc/parallel/layout.h
    bool offload;
    double host_link;      // bytes per second between a rank's device and the host, each way; 0: it takes no time
    double host_bandwidth; // of the host's memory, for one rank's AdamW; 0: it takes no time
} PlanFsdp;

// ddp: train_gpt2_compress's options of these names, from the step on in which it compresses.
typedef struct {
    int method;            // COMPRESS_NONE, ... of llmc/parallel/compress_methods.h
    int feedback;          // 0, 1, or PLAN_USUAL: as the method has it by default
    double fraction;       // top-k
    int rank;              // powersgd
    double bucket_mb;      // 0: the program's default
    bool fp16;             // of X 2: it is fp16, not bf16
} PlanCompress;
enum { PLAN_USUAL = -1 };

typedef struct {
    GPT2Config config;
    int B, T;            // a rank's micro-batch, or in tp that of the t ranks that share a replica of the model
    int accumulation;    // micro-batches per step; in pp those of a replica of the model
    int recompute;       // RECOMPUTE_NONE or RECOMPUTE_BLOCK
    size_t X;            // bytes of floatX; 2: with an fp32 master copy
    int N;               // ranks
    bool gpu;            // the GPU's program (over NCCL), or the CPU's (over MPI)
    int rooms;           // fsdp: how many groups, besides the root, may be gathered at a time
    int wrap_blocks;     // fsdp: blocks of a group; 0: the whole model is one
    int t;               // tp: ranks that share a replica of the model
    bool sequence_parallel, keep_gathered; // tp: as train_gpt2_tp's options of these names
    double memory_bandwidth; // of a rank's device, bytes per second; 0: the update takes no time
    PlanPipe pipe;
    int zero_stage;      // 3d: what is sharded over replicas of the model, 0 nothing, 1 the optimizer's state
    PlanFsdp fsdp;
    PlanCompress compress;
} Plan;

// What a rank of a pipeline sends: activations and their gradients to its neighbours; the root's gradients to the rank that
// also has it; gradients and loss to other replicas; the loss and two norms to all stages.
typedef enum { SENT_MESSAGES, SENT_ROOT, SENT_COPIES, SENT_NUMBERS, SENT_KINDS } SentKind;

// What compressed gradients are sent in: how many operations, and the bytes of their largest buffers together; and the bytes of
// memory that packing and unpacking them read and write.
typedef struct {
    int sums, exchanges, gathers; // all-reduces, all-to-alls, all-gathers
    double summed, exchanged, gathered, packing, unpacking;
} PlanPackets;

typedef struct {
    size_t memory[MEMORY_KINDS]; // per rank; of the layers' workspace only wte's fp32 sums
    double sent;                 // per rank and step
    double sent_as[SENT_KINDS];  // pp: parts of it
    double sent_along[MESH_AXES]; // 3d: parts of it
    PlanPackets root, blocks;    // compressed gradients: of the root, and of all blocks
} PlanBytes;

typedef PlanBytes PlanFormula(const Plan* p, PlanStage stage);
PlanFormula plan_compress_fp32, plan_compress_bf16, plan_compress_fp16; // these die where gradients cannot travel so
PlanFormula plan_ddp_fp32, plan_ddp_bf16, plan_zero_fp32, plan_zero_bf16, plan_fsdp_fp32, plan_fsdp_bf16;
// These die as the stage does where ranks, model, rows or micro-batches do not divide. plan_pp_ and plan_3d_ want to know a rank
// of the p.
PlanFormula plan_tp_fp32, plan_tp_bf16, plan_pp_fp32, plan_pp_bf16, plan_3d_fp32, plan_3d_bf16;

// How fsdp is planned: with both prefetches where they have room. Dies as the stage does where options do not go together.
static inline Sharding plan_sharding(const Plan* p) {
    Sharding how;
    memset(&how, 0, sizeof how);
    how.sharding = p->fsdp.sharding;
    how.shard_group = p->fsdp.shard_group;
    how.reduce_dtype = p->fsdp.reduce_dtype;
    how.offload = p->fsdp.offload;
    how.wrap_blocks = p->wrap_blocks;
    how.limit_all_gathers = p->rooms;
    how.prefetch = p->rooms > 1 ? PREFETCH_PRE : PREFETCH_NONE;
    how.forward_prefetch = p->rooms > 1;
    sharding_check(&how, p->N);
    return how;
}
#endif
