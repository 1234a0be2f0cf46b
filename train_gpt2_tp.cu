/*
Train GPT-2 with tensor parallelism: t ranks share one replica of the model, and each has a part of every matrix, of the heads
and of the vocabulary (Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3). They see the same data, and send
activations inside a block. With --tensor-parallel t, N/t replicas of the model are data parallel, as in train_gpt2_ddp.cu.

Columns   A rank makes some of the outputs of qkvw and fcw, from whole inputs. The gradient of these inputs is a sum over the t
          ranks (the paper's f). Attention by heads and GELU need only what the rank has.
Rows      projw and fcprojw take what the rank has, and their output is a sum over the t ranks (the paper's g).
wte       is cut by tokens: an embedding is a sum over the ranks, too, and the loss needs three numbers of each rank and row.
--sequence-parallel  cuts layernorms and the residual stream by rows: a sum is a reduce-scatter and an all-gather (2205.05198).

Memory    per rank, in bytes: 16 for each of ((12C^2 + 7C)/t + 6C) L + (Vp/t + max_T + 2)C parameters (fp32 or 16 bits). A
          block keeps (4 + 12/t)C elements per token, with --sequence-parallel 16C/t (with --keep-gathered (2 + 14/t)C).
Sent      per rank and micro-batch: 4L + 2 sums of BTC elements, 2BTC (t-1)/t each, and 3BT(t-1) floats; L more sums with
          --recompute block, and where rows are gathered twice. Per step: the norms, and what DDP sends, of this rank's part.
Run       make train_gpt2_tp && mpirun -np 4 ./train_gpt2_tp --tensor-parallel 2     (--help lists the options)
Before    train_gpt2_ddp.cu: every rank has the whole model. New here: cut tensors, and sums inside a block.
*/
// ----------------------------------------------------------------------------
// 1. libraries, in reading order
#include "llmc/base/common.h"          // defines: require, die, xcalloc
#include "llmc/base/precision.h"       // defines: floatX, to_floatX, NEEDS_MASTER
#include "llmc/model/gpt2.h"           // defines: GPT2Config, Unit, unit_elements, LNFW, ..., FCPROJW
#include "llmc/model/param_range.h"    // defines: ParamRange, param_range_part
#include "llmc/model/lr_schedule.h"    // defines: learning_rate, LossScaler
#include "llmc/device/device.h"        // defines: device_alloc, device_zero, host_to_device, device_to_host
#include "llmc/device/layers.h"        // defines: encoder, layernorm, matmul, attention, classifier, AdamW, StepStats
#include "llmc/comm/comm.h"            // defines: Comm, CommOp, comm_all_reduce, comm_broadcast, comm_wait
#include "llmc/data/dataloader.h"      // defines: DataLoader, dataloader_next
#include "llmc/parallel/mesh.h"        // defines: Mesh, TensorParallel, add_range_squares
#include "llmc/parallel/tp_rows.h"     // defines: TpRows, tp_own, tp_gather, tp_reduce: rows and sums of t ranks
#include "llmc/run/trace.h"            // defines: trace_compute, trace_step
#include "llmc/run/run.h"              // defines: Run: options, data, log, checkpoints and reports, alike in all stages
#include "llmc/run/ranks_run.h"        // defines: ranks_start, ranks_load, ...: what several ranks add to a run
#include "llmc/run/mesh_run.h"         // defines: mesh_start, mesh_recompute: what a mesh of ranks adds
#include "llmc/run/predict.h"          // defines: run_predict

// ----------------------------------------------------------------------------
// 2. the model: views of its parameters

// Views carve named tensors out of a unit's memory, in the order of llmc/model/gpt2.h. They own nothing. Gradients use the
// same views. Of t ranks, each has D = C/t channels where a tensor is cut (TensorCut in llmc/model/gpt2.h).
typedef struct { floatX *lnfw, *lnfb, *wpe, *wte; } RootParams; // (C) (C) (max_T,C) (Vp/t,C)
typedef struct {
    floatX *ln1w, *ln1b, *qkvb, *projb;     // (C) (C) (3D) (C)
    floatX *ln2w, *ln2b, *fcb, *fcprojb;    // (C) (C) (4D) (C)
    floatX *qkvw, *projw, *fcw, *fcprojw;   // (3D,C) (C,D) (4D,C) (C,4D)
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

static BlockParams block_view(GPT2Config c, int t, floatX* base) {
    size_t C = (size_t)c.C, D = C / (size_t)t;
    BlockParams p;
    p.ln1w    = base; base += C;
    p.ln1b    = base; base += C;
    p.qkvb    = base; base += 3*D;
    p.projb   = base; base += C;
    p.ln2w    = base; base += C;
    p.ln2b    = base; base += C;
    p.fcb     = base; base += 4*D;
    p.fcprojb = base; base += C;
    p.qkvw    = base; base += 3*D*C;
    p.projw   = base; base += C*D;
    p.fcw     = base; base += 4*D*C;
    p.fcprojw = base;
    return p;
}

// ----------------------------------------------------------------------------
// 3. the model: buffers and their owners

// The activations that a block's forward pass keeps for its backward pass.
typedef struct {
    floatX *res1;                       // (B,T,C) the residual stream as it enters
    floatX *ln1, *qkv, *atty;           // (B,T,C) (B,T,3D) (B,T,D)
    floatX *res2, *ln2, *fch, *gelu;    // (B,T,C) (B,T,C) (B,T,4D) (B,T,4D)
    float *ln1_mean, *ln1_rstd;         // (B,T) (B,T)
    float *att_stats;                   // (B,NH/t,T)
    float *ln2_mean, *ln2_rstd;         // (B,T) (B,T)
} BlockActs;

typedef struct {
    GPT2Config config;
    int max_B, seq_len;             // largest micro-batch: max_B sequences of seq_len tokens
    int B, T;                       // of the current micro-batch
    TpRows rows;                    // this rank's of its B*T, by --sequence-parallel, --keep-gathered, --overlap
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
    BlockActs acts[MAX_UNITS];      // acts[l] for block l, owned; with recomputation the blocks share all but res1
    floatX *branch;                 // (B,T,C) a block's output that is not yet added to the residual stream
    floatX *resf, *lnf;             // (B,T,C) (B,T,C) before and after the final layernorm
    float *lnf_mean, *lnf_rstd;     // (B,T) (B,T)
    int logits_rows;                // rows of logits that exist at a time
    floatX *logits;                 // (logits_rows,Vp/t) of this rank's tokens; for samples (t,Vp/t)
    float *row_stats;               // (t,logits_rows,3) what the loss needs to know of every rank's logits
    float *losses;                  // (B,T)
    floatX *dres, *dbtc, *dbt4c;    // (B,T,C) gradient of the residual stream; (B,T,C) and (B,T,4D) scratch
    int *inputs, *targets;          // (B,T)
    StepStats *stats;               // on the device, read once a step
    Mesh mesh;                      // owned
    Comm *tp, *dp;                  // the t ranks that share this replica of the model; the data-parallel ranks; views
    TokenRange tokens;              // whose rows of wte this rank has
    int accumulation;               // micro-batches per step
    bool last_micro;                // this micro-batch makes the step's gradients final
    int missing[MAX_UNITS];         // how many of a unit's gradients are not final yet
    CommOp reduced[MAX_UNITS];      // the sum of its gradients over dp, once missing is 0
} GPT2;

static floatX* acts_alloc(size_t n) { return (floatX*)device_alloc(n * sizeof(floatX), MEMORY_ACTIVATIONS); }
static float* stats_alloc(size_t n) { return (float*)device_alloc(n * sizeof(float), MEMORY_ACTIVATIONS); }

// Allocates everything except res1, which every block has for itself even when the rest is shared.
static void block_acts_init(BlockActs* a, const GPT2* g, size_t BT) {
    size_t t = (size_t)g->tp->size, C = (size_t)g->config.C, D = C / t, NH = (size_t)g->config.NH / t;
    size_t R = tp_count(&g->rows, BT), ln = g->rows.options.keep_gathered ? BT*C : R*C;
    a->ln1 = tp_gather_alloc(&g->rows, ln); a->ln1_mean = stats_alloc(R); a->ln1_rstd = stats_alloc(R);
    a->qkv = acts_alloc(BT*3*D); a->att_stats = stats_alloc(BT*NH);
    a->atty = acts_alloc(BT*D);
    a->res2 = acts_alloc(R*C);
    a->ln2 = tp_gather_alloc(&g->rows, ln); a->ln2_mean = stats_alloc(R); a->ln2_rstd = stats_alloc(R);
    a->fch = acts_alloc(BT*4*D);
    a->gelu = acts_alloc(BT*4*D);
}

static void gpt2_init_params(GPT2* g) {
    for (int u = 0; u < g->num_units; u++) {
        g->units[u].offset = g->num_params;
        g->units[u].size = unit_part_elements(g->config, u, g->tp->size);
        g->num_params += g->units[u].size;
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
        ParamRange p = param_range_part(g->config, u, g->tp->rank, g->tp->size);
        p.params = g->params + at;
        p.grads = g->grads + at;
        p.master = g->master ? g->master + at : NULL;
        p.m = g->m + at;
        p.v = g->v + at;
        g->ranges[g->num_ranges++] = p;
    }
}

static void gpt2_init_acts(GPT2* g) {
    GPT2Config c = g->config;
    size_t BT = (size_t)g->max_B * (size_t)g->seq_len, R = tp_count(&g->rows, BT), C = (size_t)c.C, t = (size_t)g->tp->size;
    for (int l = 0; l < c.L; l++) {
        if (l > 0 && g->recompute == RECOMPUTE_BLOCK) g->acts[l] = g->acts[0];
        else block_acts_init(&g->acts[l], g, BT);
        g->acts[l].res1 = acts_alloc(R*C);
    }
    g->branch = g->rows.gathered = tp_alloc(&g->rows, BT*C); // never needed at the same time
    g->resf = acts_alloc(R*C);
    g->lnf = tp_gather_alloc(&g->rows, BT*C); g->lnf_mean = stats_alloc(R); g->lnf_rstd = stats_alloc(R);
    g->logits = acts_alloc((size_t)g->logits_rows * (size_t)g->tokens.count);
    g->row_stats = stats_alloc(t * (size_t)g->logits_rows * 3);
    g->losses = stats_alloc(BT);
    g->dres = tp_gather_alloc(&g->rows, R*C);
    g->dbtc = tp_alloc(&g->rows, BT*C);
    g->dbt4c = acts_alloc(BT*4*C / t);
    g->inputs = (int*)device_alloc(BT * sizeof(int), MEMORY_ACTIVATIONS);
    g->targets = (int*)device_alloc(BT * sizeof(int), MEMORY_ACTIVATIONS);
    g->stats = (StepStats*)device_alloc(sizeof(StepStats), MEMORY_ACTIVATIONS);
}

static LayerShapes gpt2_shapes(const GPT2* g) {
    LayerShapes s = layer_shapes(g->max_B, g->seq_len, g->config.C, g->config.NH, g->tokens.count, g->tp->size);
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
    for (int l = 0; l < g->config.L; l++) {
        BlockActs a = g->acts[l];
        device_free(a.res1);
        if (l > 0 && g->recompute == RECOMPUTE_BLOCK) continue; // the rest belongs to block 0
        device_free(a.ln1); device_free(a.qkv); device_free(a.atty); device_free(a.res2); device_free(a.ln2);
        device_free(a.fch); device_free(a.gelu); device_free(a.ln1_mean); device_free(a.ln1_rstd);
        device_free(a.att_stats); device_free(a.ln2_mean); device_free(a.ln2_rstd);
    }
    device_free(g->branch); device_free(g->resf); device_free(g->lnf); device_free(g->lnf_mean); device_free(g->lnf_rstd);
    device_free(g->row_stats);
    device_free(g->logits); device_free(g->losses); device_free(g->dres); device_free(g->dbtc); device_free(g->dbt4c);
    device_free(g->inputs); device_free(g->targets); device_free(g->stats);
    mesh_free(&g->mesh);
}

// Bytes by kind that gpt2_init will allocate, from formulas: a run compares them with what it measured.
static void gpt2_predict_memory(const GPT2* g, size_t bytes[MEMORY_KINDS]) {
    GPT2Config c = g->config;
    size_t t = (size_t)g->tp->size, P = gpt2_part_elements(c, g->tp->size), X = sizeof(floatX);
    size_t BT = (size_t)g->max_B * (size_t)g->seq_len, C = (size_t)c.C, D = C / t, L = (size_t)c.L;
    size_t blocks_kept = g->recompute == RECOMPUTE_BLOCK ? 1 : L;
    size_t R = tp_count(&g->rows, BT), ln_rows = g->rows.options.keep_gathered ? BT : R, F = sizeof(float);
    size_t per_row = (L + blocks_kept + 2) * C*X + (4 * blocks_kept + 2) * F; // res1, res2; resf, dres; layernorms
    size_t per_token = blocks_kept * (12*D*X + (size_t)c.NH / t * F)          // the rest of a block but for ln1 and ln2
                     + (3*C + 4*D)*X + F + 2 * sizeof(int);                   // the rest outside the blocks
    memset(bytes, 0, MEMORY_KINDS * sizeof bytes[0]);
    bytes[MEMORY_PARAMETERS] = X * P;
    bytes[MEMORY_GRADIENTS] = X * P;
    bytes[MEMORY_OPTIMIZER] = (NEEDS_MASTER ? 12 : 8) * P;
    bytes[MEMORY_ACTIVATIONS] = R * per_row + ln_rows * blocks_kept * 2*C*X + BT * per_token + sizeof(StepStats)
                              + (size_t)g->logits_rows * ((size_t)g->tokens.count * X + 3*t * sizeof(float));
    bytes[MEMORY_COMMUNICATION] = mesh_bytes(&g->mesh);
    bytes[MEMORY_WORKSPACE] = layers_workspace_bytes(gpt2_shapes(g));
}

// Bytes that this rank will send per step: sums of BTC elements, 3 floats per row for the loss, layernorms and two norms, among
// the t ranks; all gradients and the loss among the data-parallel ones.
static double gpt2_predict_sent(const GPT2* g) {
    int t = g->tp->size, cut = g->rows.options.sequence_parallel;
    double BT = (double)g->max_B * g->seq_len, C = g->config.C, X = sizeof(floatX), L = g->config.L;
    double sums = 4*L + 2, again = g->recompute == RECOMPUTE_BLOCK ? L : 0;
    sums += again + (cut ? again / 2 : 0) + (g->rows.options.keep_gathered ? 0 : L); // half a sum is a gather or a scattered sum
    double micro = ring_bytes(sums * BT*C * X, t) + (t - 1) * BT * 3*sizeof(float);
    double step = ring_bytes(cut * (2*L + 1) * 2*C * X + 2*sizeof(double), t);
    return g->accumulation * micro + step + ring_bytes((double)gpt2_part_elements(g->config, t) * X + sizeof(double), g->dp->size);
}

// ----------------------------------------------------------------------------
// 4. one transformer block

// Computes everything in a block's forward pass that its backward pass needs. The block's input is x + branch. branch NULL:
// the input is x alone, which is then a.res1 itself.
static void block_activations(GPT2* g, BlockParams p, BlockActs a, const floatX* x, const floatX* branch) {
    int B = g->B, T = g->T, C = g->config.C, t = g->tp->size, D = C / t, NH = g->config.NH / t, BT = B * T;
    const TpRows* r = &g->rows;
    residual_layernorm_forward(a.res1, tp_kept(r, a.ln1), a.ln1_mean, a.ln1_rstd, x, branch, p.ln1w, p.ln1b, r->count, C);
    matmul_forward(a.qkv, tp_gather_norm(r, a.ln1), p.qkvw, p.qkvb, BT, C, 3*D); // column-parallel
    attention_forward(a.atty, a.att_stats, a.qkv, B, T, D, NH);
    matmul_forward(g->branch, a.atty, p.projw, tp_bias(r, p.projb), BT, D, C); // row-parallel
    branch = tp_reduce(r, g->branch);
    residual_layernorm_forward(a.res2, tp_kept(r, a.ln2), a.ln2_mean, a.ln2_rstd, a.res1, branch, p.ln2w, p.ln2b, r->count, C);
    matmul_gelu_forward(a.gelu, a.fch, tp_gather_norm(r, a.ln2), p.fcw, p.fcb, BT, C, 4*D); // column-parallel
}

// The block's output is the pair a.res2, g->branch: the next layernorm adds the two.
static void block_forward(GPT2* g, BlockParams p, BlockActs a, const floatX* x, const floatX* branch) {
    int BT = g->B * g->T, C = g->config.C, D = C / g->tp->size;
    block_activations(g, p, a, x, branch);
    matmul_forward(g->branch, a.gelu, p.fcprojw, tp_bias(&g->rows, p.fcprojb), BT, 4*D, C); // row-parallel
    tp_reduce(&g->rows, g->branch);
}

// The backward pass calls this when the gradient of tensor i of unit u is complete. In the last micro-batch it is final, and
// after a unit's last tensor the sum over dp begins. It must not be read before gpt2_reduce has waited.
static void grad_ready(GPT2* g, int u, int i) {
    (void)i;
    if (!g->last_micro || --g->missing[u] > 0) return;
    g->reduced[u] = comm_all_reduce(g->dp, g->grads + g->units[u].offset, g->units[u].size, COMM_FLOATX);
}

// g->dres holds the gradient of the block's output on entry, of its input on return.
// What a column-parallel layer gathers and sums travels while it computes the gradients of its input and of its weights.
static void block_backward(GPT2* g, int u, BlockParams p, BlockParams dp, BlockActs a) {
    int B = g->B, T = g->T, C = g->config.C, t = g->tp->size, D = C / t, NH = g->config.NH / t, BT = B * T;
    const TpRows* r = &g->rows;
    GradMode mode = g->grad_mode;
    floatX *dgelu = g->dbt4c, *dqkv = g->dbt4c; // never needed at the same time
    // out = res2 + gelu(fch) fcprojw^T + fcprojb
    floatX* dout = tp_gather(r, g->branch, g->dres);
    matmul_backward_weight(dp.fcprojw, dp.fcprojb, dout, a.gelu, BT, 4*D, C, mode);
    grad_ready(g, u, FCPROJW);
    grad_ready(g, u, FCPROJB);
    matmul_gelu_backward_input(dgelu, dout, p.fcprojw, a.fch, BT, 4*D, C);
    // fch = ln2 fcw^T + fcb
    CommOp regather = tp_regather_begin(r, a.ln2);
    matmul_backward_input(g->dbtc, dgelu, p.fcw, BT, C, 4*D);
    CommOp sum = tp_reduce_begin(r, g->dbtc);
    matmul_backward_weight(dp.fcw, dp.fcb, dgelu, tp_regathered(r, &regather, a.ln2), BT, C, 4*D, mode);
    grad_ready(g, u, FCW);
    grad_ready(g, u, FCB);
    // ln2 = layernorm(res2)
    layernorm_backward(g->dres, dp.ln2w, dp.ln2b, tp_reduced(r, &sum, g->dbtc), a.res2, p.ln2w, a.ln2_mean, a.ln2_rstd, r->count, C, mode);
    grad_ready(g, u, LN2W);
    grad_ready(g, u, LN2B);
    // res2 = res1 + atty projw^T + projb
    floatX* dmid = tp_gather(r, g->branch, g->dres);
    matmul_backward_weight(dp.projw, dp.projb, dmid, a.atty, BT, D, C, mode);
    grad_ready(g, u, PROJW);
    grad_ready(g, u, PROJB);
    matmul_backward_input(g->dbtc, dmid, p.projw, BT, D, C);
    // atty = attention(qkv)
    attention_backward(dqkv, g->dbtc, a.qkv, a.atty, a.att_stats, B, T, D, NH);
    // qkv = ln1 qkvw^T + qkvb
    regather = tp_regather_begin(r, a.ln1);
    matmul_backward_input(g->dbtc, dqkv, p.qkvw, BT, C, 3*D);
    sum = tp_reduce_begin(r, g->dbtc);
    matmul_backward_weight(dp.qkvw, dp.qkvb, dqkv, tp_regathered(r, &regather, a.ln1), BT, C, 3*D, mode);
    grad_ready(g, u, QKVW);
    grad_ready(g, u, QKVB);
    // ln1 = layernorm(res1)
    layernorm_backward(g->dres, dp.ln1w, dp.ln1b, tp_reduced(r, &sum, g->dbtc), a.res1, p.ln1w, a.ln1_mean, a.ln1_rstd, r->count, C, mode);
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
    tp_begin(&g->rows, B * T);
    host_to_device(g->inputs, inputs, bytes);
    if (targets) host_to_device(g->targets, targets, bytes);
}

// Computes g->lnf, the classifier's input, from g->inputs.
static void gpt2_forward(GPT2* g) {
    GPT2Config c = g->config;
    RootParams root = root_view(c, unit_params(g, 0));
    trace_compute("forward, embedding", -1);
    floatX* embedded = g->rows.options.sequence_parallel ? g->branch : g->acts[0].res1;
    encoder_part_forward(embedded, g->inputs, root.wte, tp_bias(&g->rows, root.wpe), g->tokens, g->B, g->T, c.C);
    tp_reduce_to(&g->rows, g->acts[0].res1, embedded); // exact: only one rank has a token's row
    const floatX *x = g->acts[0].res1, *branch = NULL;
    for (int l = 0; l < c.L; l++) {
        trace_compute("forward, block", l);
        BlockParams p = block_view(c, g->tp->size, unit_params(g, 1 + l));
        block_forward(g, p, g->acts[l], x, branch);
        unit_release(g, 1 + l);
        x = g->acts[l].res2;
        branch = tp_own(&g->rows, g->branch);
    }
    trace_compute("head", -1);
    floatX* lnf = tp_own(&g->rows, g->lnf);
    residual_layernorm_forward(g->resf, lnf, g->lnf_mean, g->lnf_rstd, x, branch, root.lnfw, root.lnfb, g->rows.count, c.C);
    tp_gather(&g->rows, g->lnf, lnf);
    unit_release(g, 0);
}

// Computes this rank's logits for n rows of g->lnf from `row` on, and returns what the loss needs of all ranks' logits.
static const float* head_logits(GPT2* g, const floatX* wte, int row, int n) {
    float* own = g->row_stats + (size_t)g->tp->rank * (size_t)n * 3;
    matmul_forward(g->logits, g->lnf + (size_t)row * (size_t)g->config.C, wte, NULL, n, g->config.C, g->tokens.count);
    classifier_part_stats(own, g->logits, g->targets + row, g->tokens, n, g->config.V);
    comm_wait(g->tp, comm_all_gather(g->tp, g->row_stats, own, (size_t)n * 3, COMM_F32));
    return g->row_stats;
}

// Computes g->losses. The classifier runs on a few rows at a time, so that no (B,T,V) tensor exists.
static void head_forward(GPT2* g, const floatX* wte) {
    int BT = g->B * g->T;
    for (int row = 0; row < BT; row += g->logits_rows) {
        int n = row + g->logits_rows < BT ? g->logits_rows : BT - row;
        const float* all = head_logits(g, wte, row, n);
        classifier_part_forward(g->losses + row, all, g->targets + row, g->tp->size, n);
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
        const float* all = head_logits(g, wte, row, n);
        classifier_part_forward_backward(g->losses + row, g->logits, all, g->targets + row, dloss, g->tokens, g->tp->size, n, c.V);
        // logits = lnf wte^T
        matmul_backward_weight_chunk(dwte, g->logits, lnf, row, n, BT, c.C, g->tokens.count, g->grad_mode);
        matmul_backward_input(g->dbtc + (size_t)row*c.C, g->logits, wte, n, c.C, g->tokens.count);
    }
    tp_reduce(&g->rows, g->dbtc);
}

// Adds this micro-batch's losses to g->stats, and computes its gradients.
static void gpt2_backward(GPT2* g, float dloss) {
    GPT2Config c = g->config;
    int BT = g->B * g->T;
    RootParams root = root_view(c, unit_params(g, 0));
    RootParams droot = root_view(c, unit_grads(g, 0));
    head_forward_backward(g, root.wte, droot.wte, dloss);
    add_sum(&g->stats->loss, g->losses, (size_t)BT);
    // lnf = layernorm(resf)
    device_zero(g->dres, tp_elements(&g->rows) * sizeof(floatX));
    layernorm_backward(g->dres, droot.lnfw, droot.lnfb, tp_own(&g->rows, g->dbtc), g->resf, root.lnfw, g->lnf_mean, g->lnf_rstd,
                       g->rows.count, c.C, g->grad_mode);
    grad_ready(g, 0, LNFW);
    grad_ready(g, 0, LNFB);
    for (int l = c.L - 1; l >= 0; l--) {
        trace_compute("backward, block", l);
        BlockParams p = block_view(c, g->tp->size, unit_params(g, 1 + l));
        BlockParams dp = block_view(c, g->tp->size, unit_grads(g, 1 + l));
        if (g->recompute == RECOMPUTE_BLOCK) block_activations(g, p, g->acts[l], g->acts[l].res1, NULL);
        block_backward(g, 1 + l, p, dp, g->acts[l]);
        unit_release(g, 1 + l);
    }
    trace_compute("backward, embedding", -1);
    // res1 of block 0 = wte[inputs] + wpe
    const floatX* dres = tp_gather(&g->rows, g->branch, g->dres);
    encoder_part_backward(droot.wte, droot.wpe, dres, g->inputs, g->tokens, g->B, g->T, c.C, g->grad_mode);
    grad_ready(g, 0, WPE);
    grad_ready(g, 0, WTE);
    unit_release(g, 0);
}

// Call before micro-batch `micro` of a step's `accumulation`. The backward pass of the last one makes the gradients final.
static void gpt2_begin_micro(GPT2* g, int micro, int accumulation) {
    g->grad_mode = micro == 0 ? GRAD_SET : GRAD_ADD;
    g->last_micro = micro == accumulation - 1;
    for (int u = 0; u < g->num_units; u++) g->missing[u] = unit_tensors(u);
}

// With --sequence-parallel a rank's gradients of layernorms are its rows' alone. Weight and bias are side by side.
static void gpt2_reduce_layernorms(GPT2* g) {
    floatX* of[2*MAX_UNITS];
    int count = 0;
    for (int u = 0; u < g->num_units; u++) {
        of[count++] = unit_grads(g, u);
        if (u > 0) of[count++] = block_view(g->config, g->tp->size, unit_grads(g, u)).ln2w;
    }
    tp_reduce_together(&g->rows, of, count, 2 * (size_t)g->config.C, g->dbtc, g->B * g->T / 2);
}

// Call after the last backward pass. On return each gradient in g->ranges is the mean over the global batch, the same on every
// rank that has it, and g->stats->loss is the sum over all replicas. dloss contains the division by their number.
static void gpt2_reduce(GPT2* g) {
    trace_compute("wait for gradients", -1);
    CommOp loss = comm_all_reduce(g->dp, &g->stats->loss, 1, COMM_F64);
    for (int u = 0; u < g->num_units; u++) comm_wait(g->dp, g->reduced[u]);
    comm_wait(g->dp, loss);
    if (g->rows.options.sequence_parallel) gpt2_reduce_layernorms(g);
}

// ----------------------------------------------------------------------------
// 6. the optimizer

// *acc += the sum of squares over the whole model of x, which is laid out like the parameters. Copies count once.
static void add_squares(GPT2* g, double* acc, const floatX* x) {
    for (int i = 0; i < g->num_ranges; i++)
        add_range_squares(acc, g->config, &g->ranges[i], x + (g->ranges[i].params - g->params));
    comm_wait(g->tp, comm_all_reduce(g->tp, acc, 1, COMM_F64));
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
    g->tp = g->mesh.tp;
    g->dp = g->mesh.dp;
    g->tokens = token_range(g->config.Vp, g->tp->size, g->tp->rank);
    g->accumulation = run->accumulation;
    int rows = classifier_rows(g->max_B * g->seq_len, g->tokens.count);
    g->logits_rows = rows > g->tp->size ? rows : g->tp->size; // there is also room for a row of all ranks' logits
    tp_init(&g->rows, g->tp, g->config, g->max_B, g->seq_len);
    mesh_choose_writers(run, false);
}

// Mean loss over the first --eval-steps global batches of the validation data, which are divided as in training.
static EvalLoss evaluate(GPT2* g, Run* run) {
    double tokens = 0, bytes = 0;
    long long micro_batches = run_eval_begin(run);
    device_zero(g->stats, sizeof *g->stats);
    for (long long i = 0; i < micro_batches; i++) {
        dataloader_next(&run->val);
        gpt2_load_batch(g, run->val.inputs, run->val.targets, g->max_B, g->seq_len);
        gpt2_forward(g);
        head_forward(g, root_view(g->config, unit_params(g, 0)).wte);
        unit_release(g, 0);
        add_sum(&g->stats->loss, g->losses, (size_t)g->B * (size_t)g->T);
        tokens += run->val.valid;
        bytes += run->val.bytes;
    }
    StepStats stats;
    device_to_host(&stats, g->stats, sizeof stats);
    double loss = comm_host_sum(g->dp, stats.loss), all_tokens = comm_host_sum(g->dp, tokens);
    EvalLoss mean = { loss / all_tokens, loss / comm_host_sum(g->dp, bytes) };
    return mean;
}

// For samples: logits (V), on the host, of the token that follows tokens (T).
static void next_logits(void* self, const int* tokens, int T, floatX* logits) {
    GPT2* g = (GPT2*)self;
    GPT2Config c = g->config;
    gpt2_load_batch(g, tokens, NULL, 1, T);
    gpt2_forward(g);
    floatX *last = g->lnf + (size_t)(T - 1)*c.C, *own = g->logits + g->tokens.first;
    matmul_forward(own, last, root_view(c, unit_params(g, 0)).wte, NULL, 1, c.C, g->tokens.count);
    comm_wait(g->tp, comm_all_gather(g->tp, g->logits, own, (size_t)g->tokens.count, COMM_FLOATX));
    unit_release(g, 0);
    device_to_host(logits, g->logits, (size_t)c.V * sizeof(floatX));
}

// One optimizer step, counted from 0: forward and backward over every micro-batch, clip, update.
static StepStats train_step(GPT2* g, Run* run, long long step) {
    const Options* o = &run->o;
    // A token's share of the mean over the global batch. It includes 1/N, so the sum of the gradients is their average.
    float dloss = (float)(run->scaler.scale / run->divisor);
    device_zero(g->stats, sizeof *g->stats);
    for (int micro = 0; micro < run->accumulation; micro++) {
        dataloader_next(&run->train);
        gpt2_load_batch(g, run->train.inputs, run->train.targets, g->max_B, g->seq_len);
        gpt2_begin_micro(g, micro, run->accumulation);
        gpt2_forward(g);
        gpt2_backward(g, dloss);
    }
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
    run_options(&run, "train_gpt2_tp", "train GPT-2 with tensor parallelism: each rank has a part of every matrix");
    options_ranks(&run);
    options_tensor_parallel(&run.table, &run.ranks->tensor_parallel, &g.rows.options);
    run_predict(&run, argc, argv, gpt2_predict, &g, sizeof g);
    mesh_start(&run, &g.mesh, argc, argv);

    gpt2_configure(&g, &run);
    gpt2_predict_memory(&g, run.predicted); // first as if nothing were recomputed
    g.recompute = mesh_recompute(&run, gpt2_shapes(&g)); // --recompute auto: blocks, where that has no room
    gpt2_predict_memory(&g, run.predicted);
    gpt2_init(&g);
    run.ranks->sent = gpt2_predict_sent(&g);
    ranks_report(&run);
    mesh_report(&run);
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
    gpt2_free(&g);
    ranks_stop(&run);
    return as_predicted ? EXIT_SUCCESS : EXIT_FAILURE;
}
