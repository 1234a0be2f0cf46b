/*
Train GPT-2 with pipeline parallelism: p ranks share one replica of the model, and each has a stage: some of the blocks. A step's
micro-batches flow through the stages, activations forward and their gradients back, so that all stages compute at the same
time (Narayanan et al., arXiv 2104.04473, section 2.2). With --pipeline-parallel p, N/p replicas of the model are data parallel,
as in train_gpt2_ddp.cu.

Schedule  The order of a stage's actions: forward and backward passes of micro-batches. llmc/parallel/pipeline.h has a function
          for each schedule, and train_step plays it. Every schedule adds gradients up in the order of the micro-batches, so
          all give the same bits.
Bubble    A stage waits until the first micro-batch reaches it, and again after the last one has left it: (p-1)/(m+p-1) of a
          step of m micro-batches with gpipe and 1f1b, if all stages take equal times. --split auto makes them about equal.
wte       is tied: the first stage embeds with it, and the last one makes logits with it. Both have the root, and once a step
          its gradients are summed over the two.

Memory    per rank, in bytes: 16 for each parameter it has: 12C^2 + 13C a block, and (Vp + max_T + 2)C on the first and the
          last stage. A micro-batch between its forward and its backward pass keeps 16C elements per token and block (25C with
          zb-h1): m micro-batches with gpipe, min(m, p - r) on rank r with 1f1b, min(m, p) with zb-h1.
Sent      per stage and micro-batch: BTC elements to the next stage and BTC back to the one before, where there is one. Per
          rank and step: the root on the first and the last, three doubles, and what DDP sends, of this rank's parameters.
Run       make train_gpt2_pp && mpirun -np 4 ./train_gpt2_pp --schedule 1f1b               (--help lists the options)
Before    train_gpt2_ddp.cu: every rank has the whole model. New here: stages, slots for micro-batches, and a schedule.
          A bucket of DDP is a unit here.
*/
// ----------------------------------------------------------------------------
// 1. libraries, in reading order
#include "llmc/base/common.h"          // defines: require, die, xcalloc
#include "llmc/base/precision.h"       // defines: floatX, to_floatX, NEEDS_MASTER
#include "llmc/model/gpt2.h"           // defines: GPT2Config, Unit, unit_elements, LNFW, ..., FCPROJW
#include "llmc/model/param_range.h"    // defines: ParamRange, param_range
#include "llmc/model/lr_schedule.h"    // defines: learning_rate, LossScaler
#include "llmc/device/device.h"        // defines: device_alloc, device_zero, host_to_device, device_to_host
#include "llmc/device/layers.h"        // defines: encoder, layernorm, matmul, attention, classifier, AdamW, StepStats
#include "llmc/comm/comm.h"            // defines: Comm, CommOp, comm_all_reduce, comm_broadcast, comm_send, comm_recv
#include "llmc/data/dataloader.h"      // defines: DataLoader, dataloader_next
#include "llmc/parallel/mesh.h"        // defines: Mesh, add_range_squares
#include "llmc/parallel/pipeline.h"    // defines: Pipeline, Action, pipeline_action, pipeline_slot: the schedules
#include "llmc/parallel/shard.h"       // defines: NO_OP, comm_finish
#include "llmc/parallel/stages.h"      // defines: Stages, stages_cut, P2P, p2p_wait, p2p_isend
#include "llmc/run/report_stages.h"    // defines: report_stages, ActionTimes, action_begin, action_end
#include "llmc/run/trace.h"            // defines: trace_compute, trace_step
#include "llmc/run/run.h"              // defines: Run: options, data, log, checkpoints and reports, alike in all stages
#include "llmc/run/ranks_run.h"        // defines: ranks_start, ranks_load, ...: what several ranks add to a run
#include "llmc/run/mesh_run.h"         // defines: mesh_start, mesh_recompute: what a mesh of ranks adds
#include "llmc/run/predict.h"          // defines: run_predict

// ----------------------------------------------------------------------------
// 2. the model: views of its parameters

// Views carve named tensors out of a unit's memory, in the order of llmc/model/gpt2.h. They own nothing. Gradients use the
// same views.
typedef struct { floatX *lnfw, *lnfb, *wpe, *wte; } RootParams; // (C) (C) (max_T,C) (Vp,C)
typedef struct {
    floatX *ln1w, *ln1b, *qkvb, *projb;     // (C) (C) (3C) (C)
    floatX *ln2w, *ln2b, *fcb, *fcprojb;    // (C) (C) (4C) (C)
    floatX *qkvw, *projw, *fcw, *fcprojw;   // (3C,C) (C,C) (4C,C) (C,4C)
} BlockParams;

static RootParams root_view(GPT2Config c, floatX* base) {
    size_t C = (size_t)c.C;
    RootParams p;
    p.lnfw = base; base += C;
    p.lnfb = base; base += C;
    p.wpe  = base; base += (size_t)c.max_T*C;
    p.wte  = base;
    return p;
}

static BlockParams block_view(GPT2Config c, floatX* base) {
    size_t C = (size_t)c.C;
    BlockParams p;
    p.ln1w    = base; base += C;
    p.ln1b    = base; base += C;
    p.qkvb    = base; base += 3*C;
    p.projb   = base; base += C;
    p.ln2w    = base; base += C;
    p.ln2b    = base; base += C;
    p.fcb     = base; base += 4*C;
    p.fcprojb = base; base += C;
    p.qkvw    = base; base += 3*C*C;
    p.projw   = base; base += C*C;
    p.fcw     = base; base += 4*C*C;
    p.fcprojw = base;
    return p;
}

// ----------------------------------------------------------------------------
// 3. the model: buffers and their owners

// The activations that a block's forward pass keeps for its backward pass.
typedef struct {
    floatX *res1;                       // (B,T,C) the residual stream as it enters
    floatX *ln1, *qkv, *atty;           // (B,T,C) (B,T,3C) (B,T,C)
    floatX *res2, *ln2, *fch, *gelu;    // (B,T,C) (B,T,C) (B,T,4C) (B,T,4C)
    float *ln1_mean, *ln1_rstd;         // (B,T) (B,T)
    float *att_stats;                   // (B,NH,T)
    float *ln2_mean, *ln2_rstd;         // (B,T) (B,T)
    // The gradients of its matrices' outputs, which W needs to compute the gradients of the matrices.
    floatX *dout, *dgelu, *dmid, *dqkv; // (B,T,C) (B,T,4C) (B,T,C) (B,T,3C)
} BlockActs;

// What a stage keeps of a micro-batch between its forward and its backward pass.
typedef struct {
    BlockActs acts[MAX_UNITS];      // of the stage's blocks
    floatX *resf, *lnf;             // (B,T,C) (B,T,C) before and after the final layernorm; NULL on ranks without the head
    float *lnf_mean, *lnf_rstd;     // (B,T) (B,T) NULL on ranks without the head
    int *inputs, *targets;          // (B,T) (B,T)
} Slot;

typedef struct {
    GPT2Config config;
    int max_B, seq_len;             // largest micro-batch: max_B sequences of seq_len tokens
    int B, T;                       // of the current micro-batch
    int recompute;                  // RECOMPUTE_NONE or RECOMPUTE_BLOCK
    int num_units;                  // L + 1
    Unit units[MAX_UNITS];
    size_t num_params;
    floatX *params, *grads;         // (num_params) owned
    float *master;                  // (num_params) fp32 weights, owned; NULL where floatX is fp32
    float *m, *v;                   // (num_params) AdamW moments, owned
    int num_ranges;
    ParamRange ranges[MAX_UNITS];   // all of this state, as the optimizer and checkpoints walk it; views
    GradMode grad_mode;             // whether this micro-batch's gradients overwrite or add
    Slot* slots;                    // (num_slots) owned; with recomputation blocks share all but res1 (has_own_acts)
    int num_slots;
    BlockActs acts[MAX_UNITS];      // acts[l] for block l. acts, resf, lnf, lnf_*, inputs, targets: views of the current slot's
    floatX *branch;                 // (B,T,C) a block's output that is not yet added to the residual stream
    floatX *resf, *lnf;             // (B,T,C) (B,T,C) before and after the final layernorm
    float *lnf_mean, *lnf_rstd;     // (B,T) (B,T)
    int logits_rows;                // rows of logits that exist at a time
    floatX *logits;                 // (logits_rows,Vp)
    float *losses;                  // (B,T)
    floatX *dres, *dbtc;            // (B,T,C) gradient of the residual stream; (B,T,C) scratch
    P2P p2p;                        // (B,T,C) each: what comes next, what goes on to the next stage, and back; owned
    int *inputs, *targets;          // (B,T)
    StepStats *stats;               // on the device, read once a step
    Mesh mesh;                      // owned
    Comm *pp, *tied, *dp;           // the p ranks that share this replica; the two with the root; the data-parallel ranks; views
    Stages stages;                  // which blocks are where, by --schedule, --chunks, --split
    Pipeline pipeline;              // the schedule
    Action action;                  // the current action,
    int stage, first, last;         // its stage, and that stage's blocks: [first, last)
    ActionTimes times;              // how long actions take, for the report
    bool last_micro;                // this micro-batch makes the step's gradients final
    int missing[MAX_UNITS];         // how many of a unit's gradients are not final yet
    CommOp reduced[MAX_UNITS];      // the sum of its gradients over dp, once missing is 0
} GPT2;

static bool is_first(const GPT2* g) { return g->stage == 0; }
static bool is_last(const GPT2* g) { return g->stage == g->stages.count - 1; }

static floatX* acts_alloc(size_t n) { return (floatX*)device_alloc(n * sizeof(floatX), MEMORY_ACTIVATIONS); }
static float* stats_alloc(size_t n) { return (float*)device_alloc(n * sizeof(float), MEMORY_ACTIVATIONS); }

// Allocates everything except res1, which every block has for itself even when the rest is shared.
static void block_acts_init(BlockActs* a, GPT2Config c, size_t BT) {
    size_t C = (size_t)c.C;
    a->ln1 = acts_alloc(BT*C);   a->ln1_mean = stats_alloc(BT); a->ln1_rstd = stats_alloc(BT);
    a->qkv = acts_alloc(BT*3*C); a->att_stats = stats_alloc(BT*(size_t)c.NH);
    a->atty = acts_alloc(BT*C);
    a->res2 = acts_alloc(BT*C);
    a->ln2 = acts_alloc(BT*C);   a->ln2_mean = stats_alloc(BT); a->ln2_rstd = stats_alloc(BT);
    a->fch = acts_alloc(BT*4*C);
    a->gelu = acts_alloc(BT*4*C);
}

static int delayed_sets(const GPT2* g) { return pipeline_delayed_sets(g->pipeline, g->pp->rank, g->recompute); }
// True if block i of slot s has memory of its own for the gradients that its W needs, and for its activations. Others share
// that of block 0 of slot 0, because B needs both for one block at a time.
static bool has_own_grads(const GPT2* g, int s, int i) { return s + i == 0 || s < delayed_sets(g); }
static bool has_own_acts(const GPT2* g, int s, int i) { return has_own_grads(g, s, i) || g->recompute == RECOMPUTE_NONE; }

// Elements that this rank has of a unit.
static size_t unit_size(const GPT2* g, int u) { return stages_have(&g->stages, u) ? unit_elements(g->config, u) : 0; }

static void gpt2_init_params(GPT2* g) {
    for (int u = 0; u < g->num_units; u++) {
        g->units[u].offset = g->num_params;
        g->units[u].size = unit_size(g, u);
        g->num_params += g->units[u].size;
        g->reduced[u] = NO_OP;
    }
    g->params = (floatX*)device_alloc(g->num_params * sizeof(floatX), MEMORY_PARAMETERS);
    g->grads = (floatX*)device_alloc(g->num_params * sizeof(floatX), MEMORY_GRADIENTS);
    if (NEEDS_MASTER) g->master = (float*)device_alloc(g->num_params * sizeof(float), MEMORY_OPTIMIZER);
    g->m = (float*)device_alloc(g->num_params * sizeof(float), MEMORY_OPTIMIZER);
    g->v = (float*)device_alloc(g->num_params * sizeof(float), MEMORY_OPTIMIZER);
}

// Lists what this rank has of the model, and where.
static void gpt2_init_ranges(GPT2* g) {
    for (int u = 0; u < g->num_units; u++) {
        size_t at = g->units[u].offset;
        if (g->units[u].size == 0) continue;
        ParamRange p = param_range(g->config, u, 0, g->units[u].size);
        p.is_replicated = u == 0 && g->pp->rank > 0; // the last stage's root is a copy of the first one's
        p.params = g->params + at;
        p.grads = g->grads + at;
        p.master = g->master ? g->master + at : NULL;
        p.m = g->m + at;
        p.v = g->v + at;
        g->ranges[g->num_ranges++] = p;
    }
}

static void slot_init(GPT2* g, int s) {
    size_t BT = (size_t)g->max_B * (size_t)g->seq_len, C = (size_t)g->config.C;
    Slot* slot = &g->slots[s];
    for (int i = 0; i < g->stages.most_blocks; i++) {
        BlockActs *a = &slot->acts[i], shared = g->slots[0].acts[0];
        *a = shared;
        if (has_own_acts(g, s, i)) block_acts_init(a, g->config, BT);
        if (has_own_grads(g, s, i)) {
            a->dout = acts_alloc(BT*C); a->dgelu = acts_alloc(BT*4*C);
            a->dmid = acts_alloc(BT*C); a->dqkv = acts_alloc(BT*3*C);
        }
        a->res1 = acts_alloc(BT*C);
    }
    if (stages_have_head(&g->stages)) {
        slot->resf = acts_alloc(BT*C);
        slot->lnf = acts_alloc(BT*C); slot->lnf_mean = stats_alloc(BT); slot->lnf_rstd = stats_alloc(BT);
    }
    slot->inputs = (int*)device_alloc(BT * sizeof(int), MEMORY_ACTIVATIONS);
    slot->targets = (int*)device_alloc(BT * sizeof(int), MEMORY_ACTIVATIONS);
}

static void gpt2_init_acts(GPT2* g) {
    GPT2Config c = g->config;
    size_t BT = (size_t)g->max_B * (size_t)g->seq_len, C = (size_t)c.C;
    g->slots = (Slot*)xcalloc((size_t)g->num_slots, sizeof(Slot));
    for (int s = 0; s < g->num_slots; s++) slot_init(g, s);
    g->branch = acts_alloc(BT*C);
    g->logits = acts_alloc((size_t)g->logits_rows * (size_t)c.Vp);
    g->losses = stats_alloc(BT);
    g->dres = acts_alloc(BT*C);
    g->dbtc = acts_alloc(BT*C);
    p2p_init(&g->p2p, g->pp, g->pipeline, BT*C);
    g->stats = (StepStats*)device_alloc(sizeof(StepStats), MEMORY_ACTIVATIONS);
}

static LayerShapes gpt2_shapes(const GPT2* g) {
    LayerShapes s = layer_shapes(g->max_B, g->seq_len, g->config.C, g->config.NH, g->config.Vp, 1);
    return s;
}

// Allocates everything. The fields of gpt2_configure are set.
static void gpt2_init(GPT2* g) {
    gpt2_init_params(g);
    gpt2_init_ranges(g);
    gpt2_init_acts(g);
    layers_init(gpt2_shapes(g));
}

static void gpt2_free(GPT2* g) {
    layers_free();
    device_free(g->params); device_free(g->grads); device_free(g->master); device_free(g->m); device_free(g->v);
    device_free_all(MEMORY_ACTIVATIONS); // slots share some of them
    free(g->slots);
    mesh_free(&g->mesh);
}

// Bytes by kind that gpt2_init will allocate, from formulas: a run compares them with what it measured.
static void gpt2_predict_memory(const GPT2* g, size_t bytes[MEMORY_KINDS]) {
    GPT2Config c = g->config;
    size_t P = stages_elements(&g->stages, c), X = sizeof(floatX), F = sizeof(float);
    size_t BT = (size_t)g->max_B * (size_t)g->seq_len, C = (size_t)c.C, slots = (size_t)g->num_slots;
    size_t most = (size_t)g->stages.most_blocks, blocks = slots * most;
    size_t grads_kept = size_max(size_min(blocks, 1), (size_t)delayed_sets(g) * most);
    size_t blocks_kept = g->recompute == RECOMPUTE_BLOCK ? grads_kept : blocks;
    size_t per_token = blocks * C*X + blocks_kept * (15*C*X + (4 + (size_t)c.NH) * F) + grads_kept * 9*C*X
                     + slots * (stages_have_head(&g->stages) * (2*C*X + 2*F) + 2 * sizeof(int))
                     + 3*C*X + p2p_elements(g->pipeline, C) * X + F; // outside the blocks
    memset(bytes, 0, MEMORY_KINDS * sizeof bytes[0]);
    bytes[MEMORY_PARAMETERS] = X * P;
    bytes[MEMORY_GRADIENTS] = X * P;
    bytes[MEMORY_OPTIMIZER] = (NEEDS_MASTER ? 12 : 8) * P;
    bytes[MEMORY_ACTIVATIONS] = BT * per_token + (size_t)g->logits_rows * (size_t)c.Vp * X + sizeof(StepStats);
    bytes[MEMORY_COMMUNICATION] = mesh_bytes(&g->mesh);
    bytes[MEMORY_WORKSPACE] = layers_workspace_bytes(gpt2_shapes(g));
}

// Bytes that this rank will send per step. Each of its stages sends a message per micro-batch to the next one, and one back
// to the one before, if there is one. Then the root, the loss and two norms; among data-parallel ranks 2(d-1)/d of its
// gradients and of the loss.
static double gpt2_predict_sent(const GPT2* g) {
    int p = g->pp->size, messages = p == 1 ? 0 : 2 * g->stages.v - (g->pp->rank == 0) - (g->pp->rank == p - 1);
    double X = sizeof(floatX), gradients = (double)stages_elements(&g->stages, g->config) * X;
    double micro = (double)messages * g->max_B * g->seq_len * g->config.C * X;
    double root = p > 1 ? (double)unit_size(g, 0) * X : 0;
    return g->pipeline.m * micro + root + ring_bytes(3 * sizeof(double), p) + ring_bytes(gradients + sizeof(double), g->dp->size);
}

// ----------------------------------------------------------------------------
// 4. one transformer block

// Computes everything in a block's forward pass that its backward pass needs. The block's input is x + branch. branch NULL:
// the input is x alone, which is then a.res1 itself.
static void block_activations(GPT2* g, BlockParams p, BlockActs a, const floatX* x, const floatX* branch) {
    int B = g->B, T = g->T, C = g->config.C, NH = g->config.NH, BT = B * T;
    residual_layernorm_forward(a.res1, a.ln1, a.ln1_mean, a.ln1_rstd, x, branch, p.ln1w, p.ln1b, BT, C);
    matmul_forward(a.qkv, a.ln1, p.qkvw, p.qkvb, BT, C, 3*C);
    attention_forward(a.atty, a.att_stats, a.qkv, B, T, C, NH);
    matmul_forward(g->branch, a.atty, p.projw, p.projb, BT, C, C);
    residual_layernorm_forward(a.res2, a.ln2, a.ln2_mean, a.ln2_rstd, a.res1, g->branch, p.ln2w, p.ln2b, BT, C);
    matmul_gelu_forward(a.gelu, a.fch, a.ln2, p.fcw, p.fcb, BT, C, 4*C);
}

// The block's output is the pair a.res2, g->branch: the next layernorm adds the two.
static void block_forward(GPT2* g, BlockParams p, BlockActs a, const floatX* x, const floatX* branch) {
    int BT = g->B * g->T, C = g->config.C;
    block_activations(g, p, a, x, branch);
    matmul_forward(g->branch, a.gelu, p.fcprojw, p.fcprojb, BT, 4*C, C);
}

// The backward pass calls this when the gradient of tensor i of unit u is complete. In the last micro-batch it is final, and
// after a unit's last tensor the sum over dp begins. It must not be read before gpt2_reduce has waited.
static void grad_ready(GPT2* g, int u, int i) {
    (void)i;
    if (!g->last_micro || --g->missing[u] > 0) return;
    g->reduced[u] = comm_all_reduce(g->dp, g->grads + g->units[u].offset, g->units[u].size, COMM_FLOATX);
}

// W, in two halves: only the update waits for the gradients of matrices and their biases.
static void mlp_backward_weight(GPT2* g, int u, BlockParams dp, BlockActs a) {
    int C = g->config.C, BT = g->B * g->T;
    matmul_backward_weight(dp.fcprojw, dp.fcprojb, a.dout, a.gelu, BT, 4*C, C, g->grad_mode);
    grad_ready(g, u, FCPROJW);
    grad_ready(g, u, FCPROJB);
    matmul_backward_weight(dp.fcw, dp.fcb, a.dgelu, a.ln2, BT, C, 4*C, g->grad_mode);
    grad_ready(g, u, FCW);
    grad_ready(g, u, FCB);
}
static void attention_backward_weight(GPT2* g, int u, BlockParams dp, BlockActs a) {
    int C = g->config.C, BT = g->B * g->T;
    matmul_backward_weight(dp.projw, dp.projb, a.dmid, a.atty, BT, C, C, g->grad_mode);
    grad_ready(g, u, PROJW);
    grad_ready(g, u, PROJB);
    matmul_backward_weight(dp.qkvw, dp.qkvb, a.dqkv, a.ln1, BT, C, 3*C, g->grad_mode);
    grad_ready(g, u, QKVW);
    grad_ready(g, u, QKVB);
}

// g->dres holds the gradient of the block's output on entry, of its input on return.
// This is I, and in B also W. What W needs stays in a.
static void block_backward(GPT2* g, int u, BlockParams p, BlockParams dp, BlockActs a) {
    int B = g->B, T = g->T, C = g->config.C, NH = g->config.NH, BT = B * T;
    GradMode mode = g->grad_mode;
    bool delayed = g->action.kind != ACT_BACKWARD;
    floatX *dgelu = a.dgelu, *dqkv = a.dqkv;
    if (!delayed) a.dout = a.dmid = g->dres; // W comes before it changes
    // out = res2 + gelu(fch) fcprojw^T + fcprojb
    if (delayed) device_copy(a.dout, g->dres, (size_t)BT * (size_t)C * sizeof(floatX));
    matmul_gelu_backward_input(dgelu, a.dout, p.fcprojw, a.fch, BT, 4*C, C);
    // fch = ln2 fcw^T + fcb
    matmul_backward_input(g->dbtc, dgelu, p.fcw, BT, C, 4*C);
    if (!delayed) mlp_backward_weight(g, u, dp, a);
    // ln2 = layernorm(res2)
    layernorm_backward(g->dres, dp.ln2w, dp.ln2b, g->dbtc, a.res2, p.ln2w, a.ln2_mean, a.ln2_rstd, BT, C, mode);
    grad_ready(g, u, LN2W);
    grad_ready(g, u, LN2B);
    // res2 = res1 + atty projw^T + projb
    if (delayed) device_copy(a.dmid, g->dres, (size_t)BT * (size_t)C * sizeof(floatX));
    matmul_backward_input(g->dbtc, a.dmid, p.projw, BT, C, C);
    // atty = attention(qkv)
    attention_backward(dqkv, g->dbtc, a.qkv, a.atty, a.att_stats, B, T, C, NH);
    // qkv = ln1 qkvw^T + qkvb
    matmul_backward_input(g->dbtc, dqkv, p.qkvw, BT, C, 3*C);
    if (!delayed) attention_backward_weight(g, u, dp, a);
    // ln1 = layernorm(res1)
    layernorm_backward(g->dres, dp.ln1w, dp.ln1b, g->dbtc, a.res1, p.ln1w, a.ln1_mean, a.ln1_rstd, BT, C, mode);
    grad_ready(g, u, LN1W);
    grad_ready(g, u, LN1B);
}

// ----------------------------------------------------------------------------
// 5. the whole model: where a unit lives, forward, backward

// Returns unit u's parameters, ready for use until unit_release.
static floatX* unit_params(GPT2* g, int u) {
    return g->params + g->units[u].offset;
}

// Ends the use of unit u's parameters until the next unit_params. Here they stay where they are.
static void unit_release(GPT2* g, int u) {
    (void)g;
    (void)u;
}

// Returns the memory that unit u's gradients go to.
static floatX* unit_grads(GPT2* g, int u) {
    return g->grads + g->units[u].offset;
}

// Copies a micro-batch to the device: inputs and targets are (B,T) on the host. targets NULL: none.
static void gpt2_load_batch(GPT2* g, const int* inputs, const int* targets, int B, int T) {
    size_t bytes = (size_t)B * (size_t)T * sizeof(int);
    g->B = B;
    g->T = T;
    host_to_device(g->inputs, inputs, bytes);
    if (targets) host_to_device(g->targets, targets, bytes);
}

// Makes a slot's activations the model's, and the stage of a chunk the current one. What blocks recompute is in slot `set`.
static void gpt2_select(GPT2* g, int slot, int set, int chunk) {
    Slot* s = &g->slots[slot];
    g->stage = stages_at(&g->stages, chunk);
    g->first = g->stages.begin[g->stage];
    g->last = g->stages.begin[g->stage + 1];
    for (int l = g->first; l < g->last; l++) {
        g->acts[l] = g->slots[set].acts[l - g->first];
        g->acts[l].res1 = s->acts[l - g->first].res1;
    }
    g->resf = s->resf; g->lnf = s->lnf; g->lnf_mean = s->lnf_mean; g->lnf_rstd = s->lnf_rstd;
    g->inputs = s->inputs; g->targets = s->targets;
}

// Computes g->lnf, the classifier's input, from g->inputs.
// Only the first stage begins with g->inputs, others with what they have received; only the last ends with g->lnf.
static void gpt2_forward(GPT2* g) {
    GPT2Config c = g->config;
    int BT = g->B * g->T;
    RootParams root = root_view(c, unit_params(g, 0));
    if (is_first(g)) {
        trace_compute("forward, embedding", -1);
        encoder_forward(g->acts[0].res1, g->inputs, root.wte, root.wpe, g->B, g->T, c.C);
    }
    const floatX *x = g->first < g->last ? g->acts[g->first].res1 : g->resf, *branch = NULL;
    for (int l = g->first; l < g->last; l++) {
        trace_compute("forward, block", l);
        BlockParams p = block_view(c, unit_params(g, 1 + l));
        block_forward(g, p, g->acts[l], x, branch);
        unit_release(g, 1 + l);
        x = g->acts[l].res2;
        branch = g->branch;
    }
    if (!is_last(g)) { // on one device the next layernorm adds the two
        floatX* out = p2p_send_buffer(&g->p2p);
        device_copy(out, x, (size_t)BT * (size_t)c.C * sizeof(floatX));
        add_in_place(out, branch, (size_t)BT * (size_t)c.C);
        return;
    }
    trace_compute("head", -1);
    residual_layernorm_forward(g->resf, g->lnf, g->lnf_mean, g->lnf_rstd, x, branch, root.lnfw, root.lnfb, BT, c.C);
    unit_release(g, 0);
}

// Computes g->losses. The classifier runs on a few rows at a time, so that no (B,T,V) tensor exists.
static void head_forward(GPT2* g, const floatX* wte) {
    GPT2Config c = g->config;
    int BT = g->B * g->T;
    if (!is_last(g)) return; // their losses stay 0
    for (int row = 0; row < BT; row += g->logits_rows) {
        int n = row + g->logits_rows < BT ? g->logits_rows : BT - row;
        matmul_forward(g->logits, g->lnf + (size_t)row*c.C, wte, NULL, n, c.C, c.Vp);
        classifier_forward(g->losses + row, g->logits, g->targets + row, n, c.V, c.Vp);
    }
}

// Computes g->losses and goes backward at once, while the logits exist: g->dbtc becomes the gradient of g->lnf.
// dloss: the weight of one token's loss.
static void head_forward_backward(GPT2* g, const floatX* wte, floatX* dwte, float dloss) {
    GPT2Config c = g->config;
    int BT = g->B * g->T;
    for (int row = 0; row < BT; row += g->logits_rows) {
        int n = row + g->logits_rows < BT ? g->logits_rows : BT - row;
        const floatX* lnf = g->lnf + (size_t)row*c.C;
        matmul_forward(g->logits, lnf, wte, NULL, n, c.C, c.Vp);
        classifier_forward_backward(g->losses + row, g->logits, g->targets + row, dloss, n, c.V, c.Vp);
        // logits = lnf wte^T
        matmul_backward_weight_chunk(dwte, g->logits, lnf, row, n, BT, c.C, c.Vp, g->grad_mode);
        matmul_backward_input(g->dbtc + (size_t)row*c.C, g->logits, wte, n, c.C, c.Vp);
    }
}

// Computes a stage's gradients, from that of its output in g->dres. The last one adds this micro-batch's losses to g->stats.
static void gpt2_backward(GPT2* g, float dloss) {
    GPT2Config c = g->config;
    int BT = g->B * g->T;
    RootParams root = root_view(c, unit_params(g, 0));
    RootParams droot = root_view(c, unit_grads(g, 0));
    if (is_last(g)) {
        trace_compute("head", -1);
        head_forward_backward(g, root.wte, droot.wte, dloss);
        add_sum(&g->stats->loss, g->losses, (size_t)BT);
        // lnf = layernorm(resf)
        device_zero(g->dres, (size_t)BT * (size_t)c.C * sizeof(floatX));
        layernorm_backward(g->dres, droot.lnfw, droot.lnfb, g->dbtc, g->resf, root.lnfw, g->lnf_mean, g->lnf_rstd, BT, c.C,
                           g->grad_mode);
    }
    for (int l = g->last - 1; l >= g->first; l--) {
        trace_compute("backward, block", l);
        BlockParams p = block_view(c, unit_params(g, 1 + l));
        BlockParams dp = block_view(c, unit_grads(g, 1 + l));
        if (g->recompute == RECOMPUTE_BLOCK) block_activations(g, p, g->acts[l], g->acts[l].res1, NULL);
        block_backward(g, 1 + l, p, dp, g->acts[l]);
        unit_release(g, 1 + l);
    }
    if (!is_first(g)) return;
    trace_compute("backward, embedding", -1);
    // res1 of block 0 = wte[inputs] + wpe
    encoder_backward(droot.wte, droot.wpe, g->dres, g->inputs, g->B, g->T, c.C, g->grad_mode);
    unit_release(g, 0);
}

// W: computes the gradients of matrices that I has put off.
static void gpt2_backward_weight(GPT2* g) {
    for (int l = g->last - 1; l >= g->first; l--) {
        trace_compute("weights, block", l);
        BlockParams dp = block_view(g->config, unit_grads(g, 1 + l));
        mlp_backward_weight(g, 1 + l, dp, g->acts[l]);
        attention_backward_weight(g, 1 + l, dp, g->acts[l]);
    }
}

// Call before a step. A stage computes only some of the root's gradients: the rest must be 0, not the sum of the step
// before, which would be added to the other stage's.
static void gpt2_begin_step(GPT2* g) {
    for (int u = 0; u < g->num_units; u++) g->missing[u] = unit_tensors(u);
    if (g->pp->size > 1) device_zero(unit_grads(g, 0), g->units[0].size * sizeof(floatX));
    g->B = g->max_B;
    g->T = g->seq_len;
}

// Call before an action of micro-batch `micro` of a step's `accumulation`. The backward pass of the last one makes gradients final.
static void gpt2_begin_micro(GPT2* g, int micro, int accumulation) {
    g->grad_mode = micro == 0 ? GRAD_SET : GRAD_ADD;
    g->last_micro = micro == accumulation - 1;
}

// Call after the last backward pass. On return each gradient in g->ranges is the mean over the global batch, the same on every
// rank that has it, and g->stats->loss is the sum over all replicas. dloss contains the division by their number.
static void gpt2_reduce(GPT2* g) {
    trace_compute("wait for gradients", -1);
    CommOp loss = comm_all_reduce(g->dp, &g->stats->loss, 1, COMM_F64);
    // wte is tied: its gradient is a sum over the embedding's stage and the head's. (Of the rest of the root one has zeros.)
    size_t root = g->units[0].size;
    if (root > 0) comm_wait(g->tied, comm_all_reduce(g->tied, unit_grads(g, 0), root, COMM_FLOATX));
    for (int i = 0; i < ROOT_TENSORS && root > 0; i++) grad_ready(g, 0, i);
    comm_wait(g->dp, loss);
    loss = comm_all_reduce(g->pp, &g->stats->loss, 1, COMM_F64); // the last stage has it; beside dp's sums
    for (int u = 0; u < g->num_units; u++) comm_finish(g->dp, &g->reduced[u]);
    comm_wait(g->pp, loss);
}

// Where a stage's input is: res1 of its first block, or resf if it has only the head.
static floatX** stage_input(GPT2* g, int slot, int chunk) {
    Slot* s = &g->slots[slot];
    return g->stages.blocks[stages_at(&g->stages, chunk)] > 0 ? &s->acts[0].res1 : &s->resf;
}
static size_t message_elements(const GPT2* g) { return (size_t)g->B * (size_t)g->T * (size_t)g->config.C; }

// Computes g->lnf on the last stage from g->inputs of slot 0, in all stages, without a backward pass.
static void gpt2_forward_only(GPT2* g) {
    for (int chunk = 0; chunk < g->stages.v; chunk++) {
        Action a = { ACT_FORWARD, 0, chunk };
        p2p_irecv(&g->p2p, a, message_elements(g));
        p2p_wait(&g->p2p, a, stage_input(g, 0, chunk), &g->dres);
        gpt2_select(g, 0, 0, chunk);
        gpt2_forward(g);
        p2p_isend(&g->p2p, a, message_elements(g), &g->dres);
    }
    p2p_wait_sends(&g->p2p);
}

// ----------------------------------------------------------------------------
// 6. the optimizer

// *acc += the sum of squares over the whole model of x, which is laid out like the parameters. Copies count once.
static void add_squares(GPT2* g, double* acc, const floatX* x) {
    for (int i = 0; i < g->num_ranges; i++)
        add_range_squares(acc, g->config, &g->ranges[i], x + (g->ranges[i].params - g->params));
    comm_wait(g->pp, comm_all_reduce(g->pp, acc, 1, COMM_F64));
}

// Computes the global gradient norm, and from it the factor that AdamW multiplies gradients by. Both stay on the device.
static void gpt2_clip(GPT2* g, float max_norm, float loss_scale) {
    add_squares(g, &g->stats->grad_square, g->grads);
    clip_gradients(g->stats, max_norm, loss_scale);
}

// Calls AdamW once per range, then sums the squares of the new parameters for their norm.
static void gpt2_update(GPT2* g, AdamW adamw) {
    for (int i = 0; i < g->num_ranges; i++) {
        ParamRange p = g->ranges[i];
        adamw_update(adamw, p.params, p.master, p.m, p.v, p.grads, &g->stats->grad_scale, p.n, p.no_decay, NULL);
    }
    add_squares(g, &g->stats->param_square, g->params);
}

// ----------------------------------------------------------------------------
// 7. weights and state: initial, loaded, saved

// Sends the first replica's weights, master weights and moments to the others.
static void gpt2_broadcast(GPT2* g) {
    size_t n = g->num_params;
    comm_wait(g->dp, comm_broadcast(g->dp, g->params, n, COMM_FLOATX, 0));
    if (g->master) comm_wait(g->dp, comm_broadcast(g->dp, g->master, n, COMM_F32, 0));
    comm_wait(g->dp, comm_broadcast(g->dp, g->m, n, COMM_F32, 0));
    comm_wait(g->dp, comm_broadcast(g->dp, g->v, n, COMM_F32, 0));
}

// Sets the weights: random ones, or a checkpoint's; a resumed run loads all its state. The first replica has it first.
static void gpt2_load(GPT2* g, Run* run) {
    ranks_load(run, g->ranges, g->dp->rank == 0 ? g->num_ranges : 0);
    gpt2_broadcast(g);
}

// All replicas are the same, and the ranks of the first one save what they have.
static void gpt2_save(GPT2* g, Run* run, long long step) {
    ranks_save(run, step, g->ranges, g->num_ranges);
}

// ----------------------------------------------------------------------------
// 8. training

// Sets what gpt2_predict_memory and gpt2_init need to know.
static void gpt2_configure(GPT2* g, Run* run) {
    g->config = run->config;
    g->max_B = (int)run->o.batch_size;
    g->seq_len = (int)run->o.seq_len;
    g->num_units = run->config.L + 1;
    g->pp = g->mesh.pp;
    g->tied = g->mesh.tied;
    g->dp = g->mesh.dp;
    stages_cut(&g->stages, g->config, g->pp->rank, g->pp->size);
    g->pipeline = stages_pipeline(&g->stages, run->accumulation);
    g->num_slots = pipeline_slots(g->pipeline, g->pp->rank);
    action_times_init(&g->times, &run->ranks->context, &g->stages, &g->p2p);
    g->logits_rows = stages_have_head(&g->stages) ? classifier_rows(g->max_B * g->seq_len, g->config.Vp) : 1; // for samples
    mesh_choose_writers(run, false);
}

// Mean loss over the first --eval-steps global batches of the validation data, which are divided as in training.
static EvalLoss evaluate(GPT2* g, Run* run) {
    double tokens = 0, bytes = 0;
    long long micro_batches = run_eval_begin(run);
    device_zero(g->stats, sizeof *g->stats);
    for (long long i = 0; i < micro_batches; i++) {
        dataloader_next(&run->val);
        gpt2_select(g, 0, 0, 0);
        gpt2_load_batch(g, run->val.inputs, run->val.targets, g->max_B, g->seq_len);
        gpt2_forward_only(g);
        head_forward(g, root_view(g->config, unit_params(g, 0)).wte);
        unit_release(g, 0);
        add_sum(&g->stats->loss, g->losses, (size_t)g->B * (size_t)g->T);
        tokens += run->val.valid;
        bytes += run->val.bytes;
    }
    StepStats stats;
    device_to_host(&stats, g->stats, sizeof stats);
    double loss = comm_host_sum(g->pp, comm_host_sum(g->dp, stats.loss)), all_tokens = comm_host_sum(g->dp, tokens);
    EvalLoss mean = { loss / all_tokens, loss / comm_host_sum(g->dp, bytes) };
    return mean;
}

// For samples: logits (V), on the host, of the token that follows tokens (T).
static void next_logits(void* self, const int* tokens, int T, floatX* logits) {
    GPT2* g = (GPT2*)self;
    GPT2Config c = g->config;
    gpt2_select(g, 0, 0, 0);
    gpt2_load_batch(g, tokens, NULL, 1, T);
    gpt2_forward_only(g);
    if (is_last(g)) {
        floatX* last = g->lnf + (size_t)(T - 1)*c.C;
        matmul_forward(g->logits, last, root_view(c, unit_params(g, 0)).wte, NULL, 1, c.C, c.Vp);
    }
    comm_wait(g->pp, comm_broadcast(g->pp, g->logits, (size_t)c.V, COMM_FLOATX, g->pp->size - 1));
    device_to_host(logits, g->logits, (size_t)c.V * sizeof(floatX));
}

// Begins to receive what action number k of a step starts from.
static void gpt2_expect(GPT2* g, int k) {
    if (k == pipeline_actions(g->pipeline, g->pp->rank)) return;
    Action a = pipeline_action(g->pipeline, g->pp->rank, k);
    action_announce(&g->times, a);
    p2p_irecv(&g->p2p, a, message_elements(g));
}

// Action number k of a step: takes what another stage sent, begins to receive what the next action needs, computes, sends.
static void gpt2_act(GPT2* g, Run* run, int k, float dloss) {
    int rank = g->pp->rank;
    Action a = pipeline_action(g->pipeline, rank, k);
    int slot = pipeline_slot(g->pipeline, rank, a.micro, a.chunk);
    action_announce(&g->times, a);
    p2p_wait(&g->p2p, a, stage_input(g, slot, a.chunk), &g->dres);
    gpt2_select(g, slot, pipeline_set(g->pipeline, rank, a, g->recompute), a.chunk);
    gpt2_expect(g, k + 1);
    action_begin(&g->times, a);
    g->action = a;
    gpt2_begin_micro(g, a.micro, g->pipeline.m);
    if (a.kind == ACT_FORWARD) {
        if (a.chunk == stages_data_chunk(&g->stages)) dataloader_next(&run->train);
        if (is_first(g) || is_last(g)) gpt2_load_batch(g, run->train.inputs, run->train.targets, g->max_B, g->seq_len);
        gpt2_forward(g);
    } else if (a.kind == ACT_BACKWARD_WEIGHT) gpt2_backward_weight(g);
    else gpt2_backward(g, dloss);
    action_end(&g->times, a);
    p2p_isend(&g->p2p, a, message_elements(g), &g->dres);
}

// One optimizer step, counted from 0: forward and backward over every micro-batch, clip, update.
static StepStats train_step(GPT2* g, Run* run, long long step) {
    const Options* o = &run->o;
    // A token's share of the mean over the global batch. It includes 1/N, so the sum of the gradients is their average.
    float dloss = (float)(run->scaler.scale / run->divisor);
    device_zero(g->stats, sizeof *g->stats);
    gpt2_begin_step(g);
    gpt2_expect(g, 0);
    for (int k = 0; k < pipeline_actions(g->pipeline, g->pp->rank); k++) gpt2_act(g, run, k, dloss);
    p2p_wait_sends(&g->p2p);
    actions_end(&g->times);
    gpt2_reduce(g);
    trace_compute("update", -1);
    gpt2_clip(g, (float)o->grad_clip, (float)run->scaler.scale);
    run->lr = learning_rate(o, step);
    AdamW adamw = { run->lr, o->beta1, o->beta2, o->eps, o->weight_decay, run->updates + 1 };
    gpt2_update(g, adamw);
    StepStats stats;
    device_to_host(&stats, g->stats, sizeof stats); // the only wait for the device in a step
    if (stats.grad_scale != 0) run->updates++;
    trace_step(step + 1);
    return stats;
}

// For --predict: what the formulas say, and nothing else.
static void gpt2_predict(void* model, Run* run) {
    GPT2* g = (GPT2*)model;
    mesh_predict(run, &g->mesh);
    gpt2_configure(g, run);
    g->recompute = run->o.recompute;
    gpt2_predict_memory(g, run->predicted);
    run->ranks->sent = gpt2_predict_sent(g);
}

int main(int argc, char** argv) {
    static Run run;
    static GPT2 g;
    run_options(&run, "train_gpt2_pp", "train GPT-2 with pipeline parallelism: each rank has some of the blocks");
    options_ranks(&run);
    options_pipeline_parallel(&run.table, &run.ranks->pipeline_parallel, &g.stages.options);
    run_predict(&run, argc, argv, gpt2_predict, &g, sizeof g);
    mesh_start(&run, &g.mesh, argc, argv);

    gpt2_configure(&g, &run);
    gpt2_predict_memory(&g, run.predicted); // first as if nothing were recomputed
    g.recompute = mesh_recompute(&run, gpt2_shapes(&g)); // --recompute auto: blocks, where that has no room
    gpt2_predict_memory(&g, run.predicted);
    gpt2_init(&g);
    run.ranks->sent = gpt2_predict_sent(&g);
    ranks_report(&run);
    report_stages(&g.times, &g.mesh, g.pipeline, g.config, memory_sum(run.predicted));
    gpt2_load(&g, &run);
    ranks_begin(&run);

    for (long long step = run.first; ; step++) {
        if (run_evaluates(&run, step)) logger_eval(&run.log, step, evaluate(&g, &run));
        if (run_samples(&run, step)) run_sample(&run, step, next_logits, &g);
        if (run_saves(&run, step)) gpt2_save(&g, &run, step);
        if (step == run.o.steps) break;

        ranks_step_begin(&run, step, g.params);
        StepStats stats = train_step(&g, &run, step);
        ranks_step_end(&run, step, &stats);
        if (ranks_checks(&run, step + 1)) mesh_check_parts(&run, step + 1, g.units, g.params);
    }
    bool as_predicted = ranks_end(&run);
    report_bubble(&g.times, g.pipeline);
    gpt2_free(&g);
    ranks_stop(&run);
    return as_predicted ? EXIT_SUCCESS : EXIT_FAILURE;
}
