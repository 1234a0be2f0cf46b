/*
Train GPT-2 with data parallelism that sends less: the gradients of matrices travel in fewer bits, as fewer numbers, or
as matrices of low rank. Compression changes the gradients and therefore the training; --measure-error reports how much.

Memory, sent: bytes per rank, with N ranks and P elements of matrices (n,k). Parameters, gradients and AdamW's state are
those of train_gpt2_ddp.cu. Messages and fp32 state are added, (in brackets) only if errors are fed back.
--compress  message                                          sent per step            messages   state
  none      the gradients as in train_gpt2_ddp.cu, in fp32   8P (N-1)/N               0          0
  bf16      16 bits per element                              4P (N-1)/N               2P         (4P)
  int8      8 bits, and a scale for each 256 elements        2P (N-1)/N (1 + 4/256)   2P         (4P + 4P/N)
  int4      4 bits, and a scale for each 256 elements        P (N-1)/N (1 + 8/256)    P          (4P + 4P/N)
  top-k     the largest f = --top-k-fraction of a matrix     8fP (N-1)                8fPN       4P
  sign      one bit per element, and a scale per matrix      P/8 (N-1)                PN/8       4P
  powersgd  two factors with r = --rank columns per matrix   8r(n+k) (N-1)/N each     4r(n+k)    4P, and 4rk for Q
1-D tensors, which are few, travel whole in one message. PRECISION=fp16 takes the state twice. Scratch takes 4 bytes per
element of top-k's largest matrix, or of 1/N of the largest segment of int8 and int4.

--error-feedback    adds what compression lost to the gradients of the next step (default: int4 and powersgd)
--compress-from S   all-reduces the first S steps as ddp does. Default: 0, but 50 with powersgd, which starts from the Q
                    of the step before: early gradients change too fast for that
(Section 5 shows how int8, int4 and powersgd travel. The others are in llmc/parallel/compress_methods.h.)
Run       make train_gpt2_compress && mpirun -np 4 ./train_gpt2_compress --compress int8     (--help lists the options)
Before    train_gpt2_ddp.cu: the same buckets. New here: segments of buckets, which are compressed, and error feedback.
*/
// ----------------------------------------------------------------------------
// 1. libraries, in reading order
#include "llmc/base/common.h"          // defines: require, invariant, die, xcalloc, size_*, ceil_div, round_up
#include "llmc/base/precision.h"       // defines: floatX, to_floatX, NEEDS_MASTER
#include "llmc/model/gpt2.h"           // defines: GPT2Config, Unit, unit_*, tensor_*, attention_unit, mlp_unit, LNFW
#include "llmc/model/param_range.h"    // defines: ParamRange, param_range, param_range_part
#include "llmc/model/lr_schedule.h"    // defines: learning_rate, LossScaler
#include "llmc/device/device.h"        // defines: device_*, host_to_device: memory on the device, and copies
#include "llmc/device/layers.h"        // defines: encoder, layernorm, matmul, attention, classifier, AdamW, StepStats
#include "llmc/device/compress.h"      // defines: *quantise*, add_error, skinny_*, orthonormalise, low_rank_apply
#include "llmc/comm/comm.h"            // defines: Comm, CommOp, comm_*, ring_bytes: collectives, messages and waits
#include "llmc/data/dataloader.h"      // defines: DataLoader, dataloader_next
#include "llmc/parallel/compress_methods.h" // defines: Compress, Segment, compress_*, blocks_part, exchange_other
#include "llmc/run/trace.h"            // defines: trace_compute, trace_step
#include "llmc/run/run.h"              // defines: Run, run_*, option_*: options, data, log, checkpoints, reports
#include "llmc/run/ranks_run.h"        // defines: ranks_*, options_ranks: what several ranks add to a run
#include "llmc/run/predict.h"          // defines: run_predict
#include "llmc/run/compress_run.h"     // defines: compress_options, compress_*_load, compress_step_end, report_compress

// ----------------------------------------------------------------------------
// 2. the model: views of its parameters

// Views carve named tensors out of a unit's memory, in the order of llmc/model/gpt2.h. They own nothing. Parameters and
// gradients use the same views. A block is two units: attention and MLP, each with the layernorm in front of it.
typedef struct { floatX *lnfw, *lnfb, *wpe, *wte; } RootParams; // (C) (C) (max_T,C) (Vp,C)
typedef struct { floatX *ln1w, *ln1b, *qkvb, *projb, *qkvw, *projw; } AttentionParams; // (C) (C) (3C) (C) (3C,C) (C,C)
typedef struct { floatX *ln2w, *ln2b, *fcb, *fcprojb, *fcw, *fcprojw; } MlpParams;     // (C) (C) (4C) (C) (4C,C) (C,4C)

// ----------------------------------------------------------------------------
// 3. the model: buffers and their owners

// The activations that a block's forward pass keeps for its backward pass.
typedef struct {
    floatX *res1;                       // (B,T,C) the residual stream at the block's input
    floatX *ln1, *qkv, *atty;           // (B,T,C) (B,T,3C) (B,T,C)
    floatX *res2, *ln2, *fch, *gelu;    // (B,T,C) (B,T,C) (B,T,4C) (B,T,4C)
    float *ln1_mean, *ln1_rstd;         // (B,T) (B,T)
    float *att_stats;                   // (B,NH,T)
    float *ln2_mean, *ln2_rstd;         // (B,T) (B,T)
} BlockActs;

// Ranks exchange data by operations (comm_*, see llmc/comm/comm_api.h). An operation starts after all layers issued
// before it, and the call returns at once. comm_wait makes later layers wait for the operation, but does not stop the
// host unless the backend must. All ranks of a communicator issue its operations in the same order.
//
// Neighbouring tensors in the gradient memory. They are all-reduced together, in place.
typedef struct {
    size_t begin, size;             // elements of GPT2.grads
    int tensors, missing;           // number of tensors; how many of their gradients are not final yet
    CommOp reduced;                 // the all-reduce, after missing has reached 0
} Bucket;
enum { DDP_NAIVE, DDP_BUCKETED };
#define FIRST_BUCKET_MB 1           // upper bound, so that the first all-reduce starts early with any --bucket-mb

typedef struct {
    GPT2Config config;
    int max_B, seq_len;             // largest micro-batch: max_B sequences of seq_len tokens
    int B, T;                       // of the current micro-batch
    int accumulation;               // micro-batches per step
    int recompute;                  // RECOMPUTE_NONE or RECOMPUTE_BLOCK
    int num_units;                  // 1 + 2L: the root, and two for each block
    Unit units[MAX_UNITS];
    size_t num_params;
    floatX *params, *grads;         // (num_params) owned
    float *master;                  // (num_params) fp32 weights, owned; NULL where floatX is fp32
    float *m, *v;                   // (num_params) AdamW moments, owned
    int num_ranges;
    ParamRange ranges[MAX_UNITS];   // views of this state, over which the optimizer and checkpoints iterate
    GradMode grad_mode;             // whether this micro-batch overwrites the gradients or adds to them
    BlockActs acts[MAX_BLOCKS];     // owned, one per block; with recomputation, blocks share everything but res1
    floatX *branch;                 // (B,T,C) the output of half a block, before it is added to the residual stream
    floatX *resf, *lnf;             // (B,T,C) (B,T,C) before and after the final layernorm
    float *lnf_mean, *lnf_rstd;     // (B,T) (B,T)
    int logits_rows;                // rows of logits that exist at the same time
    floatX *logits;                 // (logits_rows,Vp)
    float *losses;                  // (B,T)
    floatX *dres, *dbtc, *dbt4c;    // (B,T,C) gradient of the residual stream; (B,T,C) and (B,T,4C) scratch
    int *inputs, *targets;          // (B,T)
    StepStats *stats;               // on the device; the host reads it once per step
    Comm* dp;                       // the data-parallel ranks; a view
    int ddp;                        // DDP_NAIVE or DDP_BUCKETED
    Compress compress;              // the method, the segments and their errors
    double bucket_mb;               // MiB of gradients per bucket
    bool last_micro;                // this micro-batch makes the step's gradients final
    int num_buckets;
    Bucket* buckets;                // (num_buckets) in the order in which the backward pass fills them; owned
    int bucket_of[MAX_UNITS][MAX_TENSORS]; // the bucket of each tensor of a unit
    int segment_of[MAX_UNITS][MAX_TENSORS]; // the segment of each tensor
} GPT2;

static RootParams root_view(const GPT2* g, floatX* base) {
    size_t C = (size_t)g->config.C;
    RootParams p;
    p.lnfw = base; base += C;
    p.lnfb = base; base += C;
    p.wpe  = base; base += (size_t)g->config.max_T*C;
    p.wte  = base;
    return p;
}

static AttentionParams attention_view(const GPT2* g, floatX* base) {
    size_t C = (size_t)g->config.C;
    AttentionParams p;
    p.ln1w  = base; base += C;
    p.ln1b  = base; base += C;
    p.qkvb  = base; base += 3*C;
    p.projb = base; base += C;
    p.qkvw  = base; base += 3*C*C;
    p.projw = base;
    return p;
}

static MlpParams mlp_view(const GPT2* g, floatX* base) {
    size_t C = (size_t)g->config.C;
    MlpParams p;
    p.ln2w    = base; base += C;
    p.ln2b    = base; base += C;
    p.fcb     = base; base += 4*C;
    p.fcprojb = base; base += C;
    p.fcw     = base; base += 4*C*C;
    p.fcprojw = base;
    return p;
}

// Both allocate activations: n elements per token, of floatX or of float.
static floatX* acts_alloc(const GPT2* g, size_t n) {
    return (floatX*)device_alloc((size_t)g->max_B * (size_t)g->seq_len * n * sizeof(floatX), MEMORY_ACTIVATIONS);
}
static float* stats_alloc(const GPT2* g, size_t n) {
    return (float*)device_alloc((size_t)g->max_B * (size_t)g->seq_len * n * sizeof(float), MEMORY_ACTIVATIONS);
}

// Allocates everything except res1, which blocks never share.
static void block_acts_init(const GPT2* g, BlockActs* a) {
    size_t C = (size_t)g->config.C, NH = (size_t)g->config.NH;
    a->ln1 = acts_alloc(g, C);   a->ln1_mean = stats_alloc(g, 1); a->ln1_rstd = stats_alloc(g, 1);
    a->qkv = acts_alloc(g, 3*C); a->att_stats = stats_alloc(g, NH);
    a->atty = acts_alloc(g, C);
    a->res2 = acts_alloc(g, C);
    a->ln2 = acts_alloc(g, C);   a->ln2_mean = stats_alloc(g, 1); a->ln2_rstd = stats_alloc(g, 1);
    a->fch = acts_alloc(g, 4*C);
    a->gelu = acts_alloc(g, 4*C);
}

static void gpt2_init_units(GPT2* g) {
    for (int u = 0; u < g->num_units; u++) {
        g->units[u].offset = g->num_params;
        g->units[u].size = unit_elements(g->config, u);
        g->num_params += g->units[u].size;
    }
}

static void gpt2_init_params(GPT2* g) {
    g->params = (floatX*)device_alloc(g->num_params * sizeof(floatX), MEMORY_PARAMETERS);
    g->grads = (floatX*)device_alloc(g->num_params * sizeof(floatX), MEMORY_GRADIENTS);
    if (NEEDS_MASTER) g->master = (float*)device_alloc(g->num_params * sizeof(float), MEMORY_OPTIMIZER);
    g->m = (float*)device_alloc(g->num_params * sizeof(float), MEMORY_OPTIMIZER);
    g->v = (float*)device_alloc(g->num_params * sizeof(float), MEMORY_OPTIMIZER);
}

// Lists the parts of the model that this rank holds, with their memory.
static void gpt2_init_ranges(GPT2* g) {
    for (int u = 0; u < g->num_units; u++) {
        size_t at = g->units[u].offset;
        ParamRange p = param_range(g->config, u, 0, g->units[u].size);
        p.params = g->params + at;
        p.grads = g->grads + at;
        p.master = g->master ? g->master + at : NULL;
        p.m = g->m + at;
        p.v = g->v + at;
        g->ranges[g->num_ranges++] = p;
    }
}

// Allocates the activations that the forward pass keeps for the backward pass.
static void gpt2_init_acts(GPT2* g) {
    size_t BT = (size_t)g->max_B * (size_t)g->seq_len, C = (size_t)g->config.C;
    for (int l = 0; l < g->config.L; l++) {
        if (l > 0 && g->recompute == RECOMPUTE_BLOCK) g->acts[l] = g->acts[0];
        else block_acts_init(g, &g->acts[l]);
        g->acts[l].res1 = acts_alloc(g, C);
    }
    g->resf = acts_alloc(g, C);
    g->lnf = acts_alloc(g, C); g->lnf_mean = stats_alloc(g, 1); g->lnf_rstd = stats_alloc(g, 1);
    g->inputs = (int*)device_alloc(BT * sizeof(int), MEMORY_ACTIVATIONS);
    g->targets = (int*)device_alloc(BT * sizeof(int), MEMORY_ACTIVATIONS);
}

static void gpt2_init_scratch(GPT2* g) {
    size_t C = (size_t)g->config.C, Vp = (size_t)g->config.Vp;
    g->branch = acts_alloc(g, C);
    g->logits = (floatX*)device_alloc((size_t)g->logits_rows * Vp * sizeof(floatX),
                                      MEMORY_ACTIVATIONS);
    g->losses = stats_alloc(g, 1);
    g->dres = acts_alloc(g, C);
    g->dbtc = acts_alloc(g, C);
    g->dbt4c = acts_alloc(g, 4*C);
    g->stats = (StepStats*)device_alloc(sizeof(StepStats), MEMORY_ACTIVATIONS);
}

// Cuts the gradient memory into buckets from its end to its beginning, because the backward pass computes gradients in
// nearly that order. The tensor that fills a bucket closes it. The root differs: lnfw and lnfb are final first, but
// wte, which is tied, only at the very end, in embedding_backward, and so is the bucket that contains it.
// A segment is compressed as one: a matrix, or neighbouring matrices of a bucket. All 1-D tensors are one more segment.
static void gpt2_init_buckets(GPT2* g) {
    double limit = fmin(FIRST_BUCKET_MB, g->bucket_mb);
    g->buckets = new_array(Bucket, g->num_units * MAX_TENSORS); // one per tensor at most
    Bucket* b = NULL;
    for (int u = g->num_units - 1; u >= 0; u--) {
        size_t begin = g->units[u].offset + g->units[u].size; // of the current tensor
        for (int i = unit_tensors(u) - 1; i >= 0; i--) {
            size_t n = tensor_elements(unit_tensor(g->config, u, i));
            begin -= n;
            bool is_full = b != NULL && (double)(b->size * sizeof(floatX)) >= limit * (1 << 20);
            if (is_full) limit = g->bucket_mb; // of all buckets but the first
            if (b == NULL || is_full) b = &g->buckets[g->num_buckets++];
            b->begin = begin;
            b->size += n;
            b->missing = ++b->tensors;
            g->bucket_of[u][i] = g->num_buckets - 1;
            g->segment_of[u][i] = compress_add(&g->compress, g->num_buckets - 1, unit_tensor(g->config, u, i), begin);
        }
    }
}

static LayerShapes gpt2_shapes(const GPT2* g) {
    LayerShapes s = layer_shapes(g->max_B, g->seq_len, g->config.C, g->config.NH, g->config.Vp, 1);
    return s;
}

// Allocates everything. Call after gpt2_configure.
static void gpt2_init(GPT2* g) {
    gpt2_init_params(g);
    gpt2_init_ranges(g);
    gpt2_init_acts(g);
    gpt2_init_scratch(g);
    layers_init(gpt2_shapes(g));
    compress_init(&g->compress, g->grads);
}

static void gpt2_free(GPT2* g) {
    compress_free(&g->compress);
    layers_free();
    device_free(g->params); device_free(g->grads); device_free(g->master); device_free(g->m); device_free(g->v);
    device_free_all(MEMORY_ACTIVATIONS);
    free(g->buckets);
}

// Computes how many bytes of each kind gpt2_init will allocate. A run compares these predictions with measurements.
static void gpt2_predict_memory(const GPT2* g, size_t bytes[MEMORY_KINDS]) {
    GPT2Config c = g->config;
    size_t P = g->num_params, X = sizeof(floatX);
    size_t BT = (size_t)g->max_B * (size_t)g->seq_len, C = (size_t)c.C, L = (size_t)c.L;
    size_t blocks_kept = g->recompute == RECOMPUTE_BLOCK ? 1 : L;
    size_t per_token = L * C*X                                                 // res1
                     + blocks_kept * (15*C*X + (4 + (size_t)c.NH) * 4)         // the rest of a block, float statistics
                     + 9*C*X + 3 * sizeof(float) + 2 * sizeof(int);            // outside the blocks
    memset(bytes, 0, MEMORY_KINDS * sizeof bytes[0]);
    bytes[MEMORY_PARAMETERS] = X * P;
    bytes[MEMORY_GRADIENTS] = X * P;
    bytes[MEMORY_OPTIMIZER] = (NEEDS_MASTER ? 12 : 8) * P;
    bytes[MEMORY_ACTIVATIONS] = BT * per_token + (size_t)g->logits_rows * (size_t)c.Vp * X + sizeof(StepStats);
    bytes[MEMORY_COMMUNICATION] = comm_world_bytes(g->dp);
    bytes[MEMORY_WORKSPACE] = layers_workspace_bytes(gpt2_shapes(g));
    bytes[MEMORY_SNAPSHOT] = X * P + bytes[MEMORY_OPTIMIZER];
    compress_predict_memory(&g->compress, bytes); // messages and errors
}

// Returns the bytes that this rank will send per step.
static double gpt2_predict_sent(const GPT2* g) {
    double N = g->dp->size, gradients = (double)(g->num_params * sizeof(floatX));
    long long last_step = g->compress.steps - 1; // those before --compress-from send what ddp sends
    if (compress_is_active(&g->compress, last_step))
        return 2 * (N - 1) / N * STEP_SUMS * sizeof(double) + compress_predict_sent(&g->compress, last_step);
    return 2 * (N - 1) / N * (gradients + STEP_SUMS * sizeof(double));
}

// ----------------------------------------------------------------------------
// 4. one transformer block

// The block's input is x + branch. If branch is NULL, the input is x, and x is a.res1 itself.
static void block_attention_forward(GPT2* g, AttentionParams p, BlockActs a, const floatX* x, const floatX* branch) {
    int B = g->B, T = g->T, C = g->config.C, NH = g->config.NH, BT = B * T;
    residual_layernorm_forward(a.res1, a.ln1, a.ln1_mean, a.ln1_rstd, x, branch, p.ln1w, p.ln1b, BT, C);
    matmul_forward(a.qkv, a.ln1, p.qkvw, p.qkvb, BT, C, 3*C);
    attention_forward(a.atty, a.att_stats, a.qkv, B, T, C, NH);
    matmul_forward(g->branch, a.atty, p.projw, p.projb, BT, C, C);
}

// Computes all activations of the MLP except its output: the backward pass needs no more.
static void block_mlp_activations(GPT2* g, MlpParams p, BlockActs a) {
    int BT = g->B * g->T, C = g->config.C;
    residual_layernorm_forward(a.res2, a.ln2, a.ln2_mean, a.ln2_rstd, a.res1, g->branch, p.ln2w, p.ln2b,
                               BT, C);
    matmul_gelu_forward(a.gelu, a.fch, a.ln2, p.fcw, p.fcb, BT, C, 4*C);
}

// The block's output is the sum a.res2 + g->branch. The next layernorm computes it.
static void block_mlp_forward(GPT2* g, MlpParams p, BlockActs a) {
    int BT = g->B * g->T, C = g->config.C;
    block_mlp_activations(g, p, a);
    matmul_forward(g->branch, a.gelu, p.fcprojw, p.fcprojb, BT, 4*C, C);
}

// The backward pass calls this when the gradient of tensor i of unit u is complete. In the last micro-batch it is final
// and the last tensor of a bucket starts an all-reduce. Do not read the sums before gpt2_reduce has waited for them.
static void grad_ready(GPT2* g, int u, int i) {
    if (g->ddp == DDP_NAIVE || !g->last_micro) return;
    if (g->compress.active) { // from step --compress-from on, segments are sent instead of buckets
        Segment* s = &g->compress.segments[g->segment_of[u][i]];
        if (--s->missing > 0) return;
        s->missing = s->tensors; // for the next step
        segment_send(&g->compress, s); // section 5
        return;
    }
    Bucket* b = &g->buckets[g->bucket_of[u][i]];
    if (--b->missing > 0) return;
    b->missing = b->tensors; // for the next step
    b->reduced = comm_all_reduce(g->dp, g->grads + b->begin, b->size, COMM_FLOATX);
}

// Computes the gradients of the MLP's matrices and biases. Only the update waits for them.
static void block_mlp_backward_weight(GPT2* g, int u, MlpParams dp, BlockActs a, const floatX* dout,
                                      const floatX* dfch) {
    int BT = g->B * g->T, C = g->config.C;
    // out = res2 + gelu(fch) fcprojw^T + fcprojb
    matmul_backward_weight(dp.fcprojw, dp.fcprojb, dout, a.gelu, BT, 4*C, C, g->grad_mode);
    grad_ready(g, u, FCPROJW);
    grad_ready(g, u, FCPROJB);
    // fch = ln2 fcw^T + fcb
    matmul_backward_weight(dp.fcw, dp.fcb, dfch, a.ln2, BT, C, 4*C, g->grad_mode);
    grad_ready(g, u, FCW);
    grad_ready(g, u, FCB);
}

// g->dres holds the gradient of the block's output on entry, and of res2 on return.
static void block_mlp_backward(GPT2* g, int u, MlpParams p, MlpParams dp, BlockActs a) {
    floatX *dfch = g->dbt4c, *dln2 = g->dbtc;
    int BT = g->B * g->T, C = g->config.C;
    floatX* dout = g->dres;
    // out = res2 + gelu(fch) fcprojw^T + fcprojb
    matmul_gelu_backward_input(dfch, dout, p.fcprojw, a.fch, BT, 4*C, C);
    // fch = ln2 fcw^T + fcb
    matmul_backward_input(dln2, dfch, p.fcw, BT, C, 4*C);
    block_mlp_backward_weight(g, u, dp, a, dout, dfch);
    // ln2 = layernorm(res2)
    layernorm_backward(g->dres, dp.ln2w, dp.ln2b, dln2, a.res2, p.ln2w, a.ln2_mean, a.ln2_rstd,
                       BT, C, g->grad_mode);
    grad_ready(g, u, LN2W);
    grad_ready(g, u, LN2B);
}

// Computes the gradients of attention's matrices and biases.
static void block_attention_backward_weight(GPT2* g, int u, AttentionParams dp, BlockActs a, const floatX* dres2,
                                            const floatX* dqkv) {
    int BT = g->B * g->T, C = g->config.C;
    // res2 = res1 + atty projw^T + projb
    matmul_backward_weight(dp.projw, dp.projb, dres2, a.atty, BT, C, C, g->grad_mode);
    grad_ready(g, u, PROJW);
    grad_ready(g, u, PROJB);
    // qkv = ln1 qkvw^T + qkvb
    matmul_backward_weight(dp.qkvw, dp.qkvb, dqkv, a.ln1, BT, C, 3*C, g->grad_mode);
    grad_ready(g, u, QKVW);
    grad_ready(g, u, QKVB);
}

// g->dres holds the gradient of res2 on entry, and of the block's input on return.
static void block_attention_backward(GPT2* g, int u, AttentionParams p, AttentionParams dp, BlockActs a) {
    floatX *datty = g->dbtc, *dqkv = g->dbt4c, *dln1 = g->dbtc; // datty is read before dln1 is written
    int B = g->B, T = g->T, C = g->config.C, NH = g->config.NH, BT = B * T;
    floatX* dres2 = g->dres;
    // res2 = res1 + atty projw^T + projb
    matmul_backward_input(datty, dres2, p.projw, BT, C, C);
    // atty = attention(qkv)
    attention_backward(dqkv, datty, a.qkv, a.atty, a.att_stats, B, T, C, NH);
    // qkv = ln1 qkvw^T + qkvb
    matmul_backward_input(dln1, dqkv, p.qkvw, BT, C, 3*C);
    block_attention_backward_weight(g, u, dp, a, dres2, dqkv);
    // ln1 = layernorm(res1)
    layernorm_backward(g->dres, dp.ln1w, dp.ln1b, dln1, a.res1, p.ln1w, a.ln1_mean, a.ln1_rstd,
                       BT, C, g->grad_mode);
    grad_ready(g, u, LN1W);
    grad_ready(g, u, LN1B);
}

// ----------------------------------------------------------------------------
// 5. the whole model: access to units, forward, backward

// Returns the parameters of unit u. They may be used until unit_release.
static floatX* unit_params(GPT2* g, int u) {
    return g->params + g->units[u].offset;
}

// Ends the use of unit u's parameters until the next unit_params. In this program they always stay in memory.
static void unit_release(GPT2* g, int u) {
    (void)g;
    (void)u;
}

// Returns the memory for the gradients of unit u.
static floatX* unit_grads(GPT2* g, int u) {
    return g->grads + g->units[u].offset;
}

// Copies a micro-batch to the device: inputs and targets are (B,T) on the host. targets may be NULL.
static void gpt2_load_batch(GPT2* g, const int* inputs, const int* targets, int B, int T) {
    size_t bytes = (size_t)B * (size_t)T * sizeof(int);
    g->B = B;
    g->T = T;
    host_to_device(g->inputs, inputs, bytes);
    if (targets) host_to_device(g->targets, targets, bytes);
}

static void embedding_forward(GPT2* g, RootParams root) {
    trace_compute("forward, embedding", -1);
    // res1 of block 0 = wte[inputs] + wpe
    encoder_forward(g->acts[0].res1, g->inputs, root.wte, root.wpe, g->B, g->T, g->config.C);
}

// The last block's output is x + branch.
static void final_layernorm_forward(GPT2* g, RootParams root, const floatX* x, const floatX* branch) {
    trace_compute("head", -1);
    residual_layernorm_forward(g->resf, g->lnf, g->lnf_mean, g->lnf_rstd, x, branch, root.lnfw, root.lnfb, g->B * g->T,
                               g->config.C);
}

// Computes g->lnf, the input of the classifier, from g->inputs.
static void gpt2_forward(GPT2* g) {
    RootParams root = root_view(g, unit_params(g, 0));
    embedding_forward(g, root);
    const floatX *x = g->acts[0].res1, *branch = NULL;
    for (int l = 0; l < g->config.L; l++) {
        trace_compute("forward, block", l);
        AttentionParams attention = attention_view(g, unit_params(g, attention_unit(l)));
        block_attention_forward(g, attention, g->acts[l], x, branch);
        unit_release(g, attention_unit(l));
        MlpParams mlp = mlp_view(g, unit_params(g, mlp_unit(l)));
        block_mlp_forward(g, mlp, g->acts[l]);
        unit_release(g, mlp_unit(l));
        x = g->acts[l].res2;
        branch = g->branch;
    }
    final_layernorm_forward(g, root, x, branch);
    unit_release(g, 0);
}

// Computes g->losses. The classifier takes a few rows at a time, so that no (B,T,V) tensor exists.
static void head_forward(GPT2* g, const floatX* wte) {
    GPT2Config c = g->config;
    int BT = g->B * g->T;
    for (int row = 0; row < BT; row += g->logits_rows) {
        int n = row + g->logits_rows < BT ? g->logits_rows : BT - row;
        matmul_forward(g->logits, g->lnf + (size_t)row*c.C, wte, NULL, n, c.C, c.Vp);
        classifier_forward(g->losses + row, g->logits, g->targets + row, n, c.V, c.Vp);
    }
}

// Computes g->losses and, while the logits still exist, their gradients: g->dbtc becomes the gradient of g->lnf.
// dloss is the weight of one token's loss.
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

// Adds this micro-batch's losses to g->stats. g->dres becomes the gradient of resf, the output of the last block.
static void head_backward(GPT2* g, RootParams root, RootParams droot, float dloss) {
    int BT = g->B * g->T, C = g->config.C;
    head_forward_backward(g, root.wte, droot.wte, dloss);
    add_sum(&g->stats->loss, g->losses, (size_t)BT);
    // lnf = layernorm(resf)
    device_zero(g->dres, (size_t)BT * (size_t)C * sizeof(floatX));
    layernorm_backward(g->dres, droot.lnfw, droot.lnfb, g->dbtc, g->resf, root.lnfw, g->lnf_mean, g->lnf_rstd, BT, C,
                       g->grad_mode);
    grad_ready(g, 0, LNFW);
    grad_ready(g, 0, LNFB);
}

// Always adds to the gradient of wte: the head has written it in the same micro-batch, because wte is tied.
static void embedding_backward(GPT2* g, RootParams droot) {
    trace_compute("backward, embedding", -1);
    // res1 of block 0 = wte[inputs] + wpe
    encoder_backward(droot.wte, droot.wpe, g->dres, g->inputs, g->B, g->T, g->config.C, g->grad_mode);
    grad_ready(g, 0, WPE);
    grad_ready(g, 0, WTE);
}

// Computes the gradients of this micro-batch.
static void gpt2_backward(GPT2* g, float dloss) {
    RootParams root = root_view(g, unit_params(g, 0));
    RootParams droot = root_view(g, unit_grads(g, 0));
    head_backward(g, root, droot, dloss);
    for (int l = g->config.L - 1; l >= 0; l--) {
        trace_compute("backward, block", l);
        int attention = attention_unit(l), mlp = mlp_unit(l);
        if (g->recompute == RECOMPUTE_BLOCK) {
            block_attention_forward(g, attention_view(g, unit_params(g, attention)), g->acts[l], g->acts[l].res1, NULL);
            block_mlp_activations(g, mlp_view(g, unit_params(g, mlp)), g->acts[l]);
        }
        MlpParams m = mlp_view(g, unit_params(g, mlp));
        MlpParams dm = mlp_view(g, unit_grads(g, mlp));
        block_mlp_backward(g, mlp, m, dm, g->acts[l]);
        unit_release(g, mlp);
        AttentionParams a = attention_view(g, unit_params(g, attention));
        AttentionParams da = attention_view(g, unit_grads(g, attention));
        block_attention_backward(g, attention, a, da, g->acts[l]);
        unit_release(g, attention);
    }
    embedding_backward(g, droot);
    unit_release(g, 0);
}

// Call before working on micro-batch `micro` of a step.
static void gpt2_begin_micro(GPT2* g, int micro) {
    g->grad_mode = micro == 0 ? GRAD_SET : GRAD_ADD;
    g->last_micro = micro == g->accumulation - 1;
}

// The naive method: sums the gradients over the ranks after the backward pass, one unit after another.
static void gpt2_reduce_naive(GPT2* g) {
    for (int u = 0; u < g->num_units; u++)
        comm_wait(g->dp, comm_all_reduce(g->dp, unit_grads(g, u), g->units[u].size, COMM_FLOATX));
}

// ---- how the gradients of a segment are summed over the ranks ----
// A segment is a matrix, or for bf16, int8 and int4 neighbouring matrices of a bucket. Fields of the struct Segment
// (compress_methods.h) that are used here:
//     grads               (n) this rank's gradients; after the last round their sum over the ranks, which is the mean
//     messages            1 or 2; as many rounds pack and send one. A last round sets the gradients from what arrived
//     round, op           the next round, from 0; the message that the round before has sent
//     packed, received    memory of messages
//     error, new_error    (n) what the last step's message lost, and what this one loses; NULL without error feedback
//     corrected           (n) gradient + error. The three are one memory, overwritten in this order. (With fp16, error
//                         is apart, so that it survives a step that is skipped.)
//     sum_error, new_sum_error  like error and new_error, for the part of the sum that this rank owns
//     rows, cols, last_q, next_q  of powersgd: the matrix, and its Q before and after this step
// Error feedback:  corrected = gradient + error;  sent = compress(corrected);  new_error = corrected - sent
//
// int8, int4: integers, and a scale for each block of 256. These cannot be summed on the way: 100 + 100 is no int8, and
// the ranks have different scales. So each rank owns a part of the segment, which it sums in fp32 and quantises again.
// This has an error of its own. Each of the two messages takes (N-1) part_bytes. (QSGD, Alistarh et al. 2017, arXiv
// 1610.02132; two messages as in ZeRO++, arXiv 2306.10209.)
static void exchange_blocks(Compress* c, Segment* s) {
    int bits = compress_bits(c);
    size_t part = blocks_part(c, s), part_bytes = quantised_bytes(part, bits);
    char* mine = s->packed + (size_t)c->comm->rank * part_bytes;
    float* sum = c->scratch; // (part)
    switch (s->round) {
    case 0: // packed = gradient + error, quantised; new_error is the rest. Each rank receives its part from all ranks.
        quantise(s->packed, s->new_error, s->grads, FLOATX_DTYPE, s->error, s->n, bits);
        s->op = comm_all_to_all(c->comm, s->received, s->packed, part_bytes, COMM_BYTE);
        break;
    case 1: // mine = sum + sum_error, quantised; the sum is in rank order. All ranks receive all parts.
        dequantise_sum(sum, DTYPE_F32, s->received, c->comm->size, part, bits);
        quantise(mine, s->new_sum_error, sum, DTYPE_F32, s->sum_error, part, bits);
        s->op = comm_all_gather(c->comm, s->packed, mine, part_bytes, COMM_BYTE);
        break;
    case 2: // Parts end where blocks end, so that all parts together are one row of blocks.
        dequantise_sum(s->grads, FLOATX_DTYPE, s->packed, 1, s->n, bits);
    }
}

// powersgd: P Q^T of rank r approximates a matrix M (Vogels et al. 2019, arXiv 1905.13727). P = M Q and Q = M^T P are
// linear in M, so that two all-reduces can sum them over the ranks. Between the two, P is made orthonormal: P Q^T is
// then the projection of M. The first Q is random, later steps start from the last Q: one power iteration per step.
// The two messages take 2(N-1)/N times 4r rows and 4r cols bytes. M would take 2(N-1)/N times 4 rows cols.
static void exchange_low_rank(Compress* c, Segment* s) {
    int rows = (int)s->rows, cols = (int)s->cols, r = (int)c->o.low_rank;
    float *M = s->corrected, *P = (float*)s->packed, *Q = (float*)s->received; // (rows,cols) (rows,r) (cols,r)
    switch (s->round) {
    case 0: // M = gradient + error; P = M Q, with the Q of the last step
        add_error(M, s->grads, s->error, s->n);
        skinny_product(P, M, s->last_q, rows, cols, r);
        s->op = comm_all_reduce(c->comm, P, s->rows * (size_t)r, COMM_F32);
        break;
    case 1: // Q = M^T P
        orthonormalise(P, rows, r);
        skinny_product_transposed(Q, M, P, rows, cols, r);
        s->op = comm_all_reduce(c->comm, Q, s->cols * (size_t)r, COMM_F32);
        break;
    case 2: // grads = P Q^T, the sum over the ranks; new_error = M - P Q^T / N
        low_rank_apply(s->grads, s->new_error, M, P, Q, 1.0f / (float)c->comm->size, rows, cols, r);
        device_copy(s->next_q, Q, s->cols * (size_t)r * sizeof(float));
    }
}

// Waits for the last message of a segment, if it has sent one, and begins its next round. exchange_other has the
// methods of one message. bf16 all-reduces rounded gradients. top-k all-gathers the largest elements of each rank and
// where they are. sign all-gathers the signs of each rank and one scale, the mean of |corrected|. All ranks add up what
// they have gathered. 1-D tensors are all-reduced as they are.
static void segment_advance(Compress* c, Segment* s) {
    if (s->round > 0) comm_wait(c->comm, s->op);
    compress_observe(c, s); // for --measure-error and --trace
    switch (s->method) {
    case COMPRESS_INT8:
    case COMPRESS_INT4: exchange_blocks(c, s); break;
    case COMPRESS_POWERSGD: exchange_low_rank(c, s); break;
    default: exchange_other(c, s);
    }
    s->round = s->round < s->messages ? s->round + 1 : 0; // 0 for the next step
}

// Sends the first message of a segment whose gradients are final, and then the second message of the segment before it,
// if it has two. By then its first message has had time to arrive, while the backward pass went on.
static void segment_send(Compress* c, Segment* s) {
    segment_advance(c, s);
    if (s->messages == 1) return;
    if (c->previous) segment_advance(c, c->previous);
    c->previous = s;
}

// Finishes all segments. On return, their gradients are the same on all ranks.
static void segments_finish(Compress* c) {
    if (c->previous) segment_advance(c, c->previous);
    c->previous = NULL; // for the next step
    for (int i = 0; i < c->num_segments; i++) segment_advance(c, &c->segments[i]); // the last round sets the gradients
}

// Call after the backward pass. On return, each gradient is the mean over the global batch times the loss scale, the
// same on all replicas. g->stats->loss is the sum over the global batch. train_step explains why a sum of gradients is
// already their mean. All ranks then have the same gradients, whose norm (gpt2_clip) needs no sum over the ranks.
static void gpt2_reduce(GPT2* g) {
    trace_compute("wait for gradients", -1);
    CommOp loss = comm_all_reduce(g->dp, &g->stats->loss, STEP_SUMS, COMM_F64);
    if (g->ddp == DDP_NAIVE) gpt2_reduce_naive(g);
    else if (g->compress.active) segments_finish(&g->compress);
    else for (int i = 0; i < g->num_buckets; i++) comm_wait(g->dp, g->buckets[i].reduced);
    comm_wait(g->dp, loss);
}

// ----------------------------------------------------------------------------
// 6. the optimizer

// Computes the global gradient norm and the factor by which AdamW scales the gradients. Both stay on the device.
static void gpt2_clip(GPT2* g, float max_norm, float loss_scale) {
    for (int i = 0; i < g->num_ranges; i++) add_sum_squares(&g->stats->grad_square, g->ranges[i].grads, g->ranges[i].n);
    clip_gradients(g->stats, max_norm, loss_scale);
}

// Calls AdamW once per range, and sums the squares of the new parameters for their norm.
static void gpt2_update(GPT2* g, AdamW adamw) {
    snapshot_hold(); // it may still be copying what changes now
    for (int i = 0; i < g->num_ranges; i++) {
        ParamRange p = g->ranges[i];
        adamw_update(adamw, p.params, p.master, p.m, p.v, p.grads, &g->stats->grad_scale, p.n, p.no_decay,
                     &g->stats->param_square);
    }
}

// ----------------------------------------------------------------------------
// 7. weights and state: initial, loaded, saved

// Sends the weights, master weights and moments of the first replica, which has loaded them, to the others.
static void gpt2_broadcast(GPT2* g) {
    size_t n = g->num_params;
    comm_wait(g->dp, comm_broadcast(g->dp, g->params, n, COMM_FLOATX, 0));
    if (g->master) comm_wait(g->dp, comm_broadcast(g->dp, g->master, n, COMM_F32, 0));
    comm_wait(g->dp, comm_broadcast(g->dp, g->m, n, COMM_F32, 0));
    comm_wait(g->dp, comm_broadcast(g->dp, g->v, n, COMM_F32, 0));
}

// Sets the weights: random, or from a checkpoint. A resumed run loads its whole state.
static void gpt2_load(GPT2* g, Run* run) {
    compress_before_load(&g->compress, run, g->m); // each rank has its own errors; m tells whose they are
    ranks_load(run, g->ranges, g->dp->rank == 0 ? g->num_ranges : 0);
    gpt2_broadcast(g);
    compress_after_load(&g->compress);
}

// All replicas hold the same state, and the first one saves it.
static void gpt2_save(GPT2* g, Run* run, long long step) {
    ranks_save(run, step, g->ranges, g->num_ranges);
}

// ----------------------------------------------------------------------------
// 8. training

// Declares the options of this program.
static void gpt2_options(GPT2* g, Run* run) {
    run_options(run, "train_gpt2_compress", "train GPT-2 with data parallelism that compresses gradients");
    options_ranks(run);
    g->ddp = DDP_BUCKETED;
    g->bucket_mb = 25;
    compress_options(&g->compress, run);
    option_choice(&run->table, "ddp", &g->ddp, "naive|bucketed",
                  "naive: all-reduce after the backward pass; bucketed: in buckets during it");
    option_float(&run->table, "bucket-mb", &g->bucket_mb, 1e-6, 1e6,
                 "MiB of gradients per bucket, but at most 1 in the first");
}

// Sets the fields that gpt2_predict_memory and gpt2_init need, except recompute, which gpt2_predict sets (section 9).
static void gpt2_configure(void* model, Run* run) {
    GPT2* g = (GPT2*)model;
    g->config = run->config;
    g->max_B = (int)run->o.batch_size;
    g->seq_len = (int)run->o.seq_len;
    g->accumulation = run->accumulation;
    g->logits_rows = classifier_rows(g->max_B * g->seq_len, g->config.Vp);
    g->num_units = gpt2_num_units(g->config);
    g->dp = ranks_world(run); // rank r's micro-batch m: sequences (mN + r)B to (mN + r + 1)B - 1 of the global batch
    gpt2_init_units(g);
    compress_configure(&g->compress, &run->table, g->dp, run->o.seed, run->o.steps, g->num_params);
    require(g->ddp == DDP_BUCKETED || g->compress.o.method == COMPRESS_NONE,
            "--compress sends segments of buckets: leave out --ddp naive");
    gpt2_init_buckets(g);
}

// Returns the mean loss over the first --eval-steps global batches of the validation data.
static EvalLoss evaluate(GPT2* g, Run* run) {
    double tokens = 0, bytes = 0;
    long long micro_batches = run_eval_begin(run);
    device_zero(g->stats, sizeof *g->stats);
    for (long long i = 0; i < micro_batches; i++) {
        dataloader_next(&run->val);
        gpt2_load_batch(g, run->val.inputs, run->val.targets, g->max_B, g->seq_len);
        gpt2_forward(g);
        head_forward(g, root_view(g, unit_params(g, 0)).wte);
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

// For samples: computes on the host the logits (V) of the token that follows tokens (T).
static void next_logits(void* self, const int* tokens, int T, floatX* logits) {
    GPT2* g = (GPT2*)self;
    GPT2Config c = g->config;
    gpt2_load_batch(g, tokens, NULL, 1, T);
    gpt2_forward(g);
    floatX* last = g->lnf + (size_t)(T - 1)*c.C;
    matmul_forward(g->logits, last, root_view(g, unit_params(g, 0)).wte, NULL, 1, c.C, c.Vp);
    unit_release(g, 0);
    device_to_host(logits, g->logits, (size_t)c.V * sizeof(floatX));
}

// Runs one optimizer step, counted from 0: forward and backward for every micro-batch, clip, update.
static StepStats train_step(GPT2* g, Run* run, long long step) {
    const Options* o = &run->o;
    // The share of one token in the mean over the global batch. loss_tokens counts the tokens of all ranks, so summing
    // gradients over the ranks averages them.
    float dloss = (float)(run->scaler.scale / run->loss_tokens);
    run_begin_stats(run, g->stats);
    compress_step_begin(&g->compress, step, run->scaler.scale); // scales the errors like the gradients
    for (int micro = 0; micro < g->accumulation; micro++) {
        dataloader_next(&run->train);
        gpt2_load_batch(g, run->train.inputs, run->train.targets, g->max_B, g->seq_len);
        gpt2_begin_micro(g, micro);
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
    compress_step_end(&g->compress, run, step, stats.grad_scale == 0); // keeps new errors unless it was skipped
    trace_step(step + 1);
    return stats;
}

// Reports the model, the parallel layout and the predictions before training begins.
static void gpt2_report(const GPT2* g, Run* run) {
    ranks_report(run);
    report_compress(&g->compress, run);
}

// Call after the last step. Returns true if all measurements agree with the predictions.
static bool gpt2_end(GPT2* g, Run* run) {
    (void)g;
    return ranks_end(run);
}

// ----------------------------------------------------------------------------
// 9. plumbing: the same text in every program for several ranks

// Evaluates the formulas for this model: for --predict, and before anything is allocated.
static void gpt2_predict(void* model, Run* run) {
    GPT2* g = (GPT2*)model;
    g->recompute = run->o.recompute == RECOMPUTE_BLOCK;
    gpt2_predict_memory(g, run->predicted);
    run->ranks->sent = gpt2_predict_sent(g);
}

// For --check-every: returns a checksum of unit u, which must be equal on all ranks that hold the same part of it.
static uint64_t unit_checksum(void* model, const Run* run, int u, bool is_replicated) {
    GPT2* g = (GPT2*)model;
    if (g->units[u].size == 0) return UNIT_ELSEWHERE;
    uint64_t sum = ranks_checksum(run, u, unit_params(g, u), g->units[u].size, is_replicated);
    unit_release(g, u);
    return sum;
}

int main(int argc, char** argv) {
    static Run run;
    static GPT2 g;
    gpt2_options(&g, &run);
    run_predict(&run, argc, argv, gpt2_configure, gpt2_predict, &g, sizeof g); // with --predict the program ends here
    ranks_start(&run, argc, argv);
    gpt2_configure(&g, &run);
    ranks_plan(&run, gpt2_predict, &g, gpt2_shapes(&g)); // --recompute auto: block if memory is too small
    gpt2_init(&g);
    gpt2_report(&g, &run);
    gpt2_load(&g, &run);
    ranks_begin(&run);

    for (long long step = run.first; ; step++) {
        if (run_evaluates(&run, step)) logger_eval(&run.log, step, evaluate(&g, &run));
        if (run_samples(&run, step)) run_sample(&run, step, next_logits, &g);
        if (run_saves(&run, step)) gpt2_save(&g, &run, step);
        if (run_ends(&run, step)) break;

        ranks_step_begin(&run, step);
        StepStats stats = train_step(&g, &run, step);
        ranks_step_end(&run, step, &stats);
        ranks_check(&run, step + 1, unit_checksum, &g);
    }
    int status = run_status(&run, gpt2_end(&g, &run));
    gpt2_free(&g);
    ranks_stop(&run);
    return status;
}
