/*
Train GPT-2 with tensor parallelism: t ranks share one replica of the model, each with a part of every matrix (Shoeybi
et al., Megatron-LM, arXiv 1909.08053, section 3). They see the same data, and exchange activations inside each block.
--tensor-parallel t gives N/t data-parallel replicas, as in ddp.

                   one device     a rank, D = C/t
Columns   qkvw     (3C,C)         (3D,C)    q, k and v of NH/t heads: outputs are cut, so each rank's gradient of the
          fcw      (4C,C)         (4D,C)    input is one term of a sum over the t ranks (f). Biases are cut alike.
Rows      projw    (C,C)          (C,D)     inputs are cut, as attention and GELU leave them; a rank's output is one
          fcprojw  (C,4C)         (C,4D)    term of a sum (g).
Tokens    wte      (Vp,C)         (Vp/t,C)  embeddings are sums; the loss needs 3 numbers of each row and rank.
Whole     layernorms, projb, fcprojb, wpe: equal on the t ranks, because their gradients come from whole activations.

Seams, Megatron's f and g, in section 4: half a block enters its first matrix and leaves its second one.
                                     by default    --sequence-parallel
          tp_enter (f)               nothing       all-gather         before a column-parallel layer
          tp_leave (g)               all-reduce    reduce-scatter     after a row-parallel layer
          tp_leave_backward          nothing       all-gather
          tp_enter_backward          all-reduce    reduce-scatter     overlaps with the gradients of weights
--sequence-parallel  (arXiv 2205.05198) also cuts layernorms and the residual stream, which lie between the seams, by
          rows of (B,T,C). Skip it at first: without it own_rows is B*T, and at_own_rows, gather_rows, tp_enter and
          tp_leave_backward return x, so that two sums are left in half a block, one forward and one backward.

Memory    per rank, in bytes: 16 for each of ((12C^2 + 7C)/t + 6C) L + (Vp/t + max_T + 2)C parameters in any precision.
          A block keeps (4 + 12/t)C elements per token, with --sequence-parallel 16C/t.
Sent      per rank and micro-batch: 4L + 2 sums of BTC elements, 2BTC (t-1)/t each, and 3BT(t-1) floats. --recompute
          block adds L sums, --sequence-parallel L, both 2.5L. Per step: 4 doubles; with --sequence-parallel
          2C(2L + 1) gradients of layernorms; and over N/t replicas DDP's sum of this rank's parameters.
Run       make train_gpt2_tp && mpirun -np 4 ./train_gpt2_tp --tensor-parallel 2     (--help lists the options)
Before    train_gpt2_ddp.cu: every rank has the whole model. New here: cut tensors, and sums inside a block.
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
#include "llmc/comm/comm.h"            // defines: Comm, CommOp, comm_*, ring_bytes: collectives, messages and waits
#include "llmc/data/dataloader.h"      // defines: DataLoader, dataloader_next
#include "llmc/run/trace.h"            // defines: trace_compute, trace_step
#include "llmc/run/run.h"              // defines: Run, run_*, option_*: options, data, log, checkpoints, reports
#include "llmc/run/mesh_run.h"         // defines: Mesh, ranks_are_mesh, add_range_squares: ranks that share a replica
#include "llmc/run/ranks_run.h"        // defines: ranks_*, options_ranks: what several ranks add to a run
#include "llmc/parallel/shard.h"       // defines: NO_OP, comm_finish
#include "llmc/run/predict.h"          // defines: run_predict

// ----------------------------------------------------------------------------
// 2. the model: views of its parameters

// Views carve named tensors out of a unit's memory, in the order of llmc/model/gpt2.h. They own nothing. Parameters and
// gradients use the same views. A block is two units: attention and MLP, each with the layernorm in front of it.
typedef struct { floatX *lnfw, *lnfb, *wpe, *wte; } RootParams; // (C) (C) (max_T,C) (Vp/t,C); D = C/t
typedef struct { floatX *ln1w, *ln1b, *qkvb, *projb, *qkvw, *projw; } AttentionParams; // (C) (C) (3D) (C) (3D,C) (C,D)
typedef struct { floatX *ln2w, *ln2b, *fcb, *fcprojb, *fcw, *fcprojw; } MlpParams;     // (C) (C) (4D) (C) (4D,C) (C,4D)

// ----------------------------------------------------------------------------
// 3. the model: buffers and their owners

// The activations that a block's forward pass keeps for its backward pass.
// With --sequence-parallel, res1, ln1, res2, ln2 and the statistics of layernorms have only this rank's rows of (B,T).
typedef struct {
    floatX *res1;                       // (B,T,C) the residual stream at the block's input
    floatX *ln1, *qkv, *atty;           // (B,T,C) (B,T,3D) (B,T,D)
    floatX *res2, *ln2, *fch, *gelu;    // (B,T,C) (B,T,C) (B,T,4D) (B,T,4D)
    float *ln1_mean, *ln1_rstd;         // (B,T) (B,T)
    float *att_stats;                   // (B,NH/t,T)
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
    int D;                          // C/t: channels of this rank's NH/t heads; 4D are its channels of the MLP
    TensorParallel options;         // sequence_parallel, overlap: 0 or 1 each
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
    floatX *term;                   // (B,T,C) a rank's term of this output, which is a sum; branch, a view, replaces it
    floatX *gathered;               // (B,T,C) all rows of ln1 or ln2, with --sequence-parallel; else NULL
    floatX *resf, *lnf;             // (B,T,C) (B,T,C) before and after the final layernorm
    float *lnf_mean, *lnf_rstd;     // (B,T) (B,T)
    int logits_rows;                // rows of logits that exist at the same time
    floatX *logits;                 // (logits_rows,Vp/t) for this rank's tokens; (t,Vp/t) for samples
    float *row_stats;               // (t,logits_rows,3) statistics of every rank's logits for the loss
    float *losses;                  // (B,T)
    floatX *dres, *dbtc, *dbt4c;    // (B,T,C) gradient of the residual stream; (B,T,C) and (B,T,4D) scratch
    int *inputs, *targets;          // (B,T)
    StepStats *stats;               // on the device; the host reads it once per step
    Mesh mesh;                      // owned
    Comm *tp, *dp;                  // the t ranks that share this replica; the data-parallel ranks; views
    TokenRange tokens;              // whose rows of wte this rank holds
    int ddp;                        // DDP_NAIVE or DDP_BUCKETED
    double bucket_mb;               // MiB of gradients per bucket
    bool last_micro;                // this micro-batch makes the step's gradients final
    int num_buckets;
    Bucket* buckets;                // (num_buckets) in the order in which the backward pass fills them; owned
    int bucket_of[MAX_UNITS][MAX_TENSORS]; // the bucket of each tensor of a unit
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
    size_t C = (size_t)g->config.C, D = (size_t)g->D;
    AttentionParams p;
    p.ln1w  = base; base += C;
    p.ln1b  = base; base += C;
    p.qkvb  = base; base += 3*D;
    p.projb = base; base += C;
    p.qkvw  = base; base += 3*D*C;
    p.projw = base;
    return p;
}

static MlpParams mlp_view(const GPT2* g, floatX* base) {
    size_t C = (size_t)g->config.C, D = (size_t)g->D;
    MlpParams p;
    p.ln2w    = base; base += C;
    p.ln2b    = base; base += C;
    p.fcb     = base; base += 4*D;
    p.fcprojb = base; base += C;
    p.fcw     = base; base += 4*D*C;
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

// With --sequence-parallel this rank has only some of a micro-batch's B*T rows of layernorms and the residual stream.
static size_t own_rows_of(const GPT2* g, int B, int T) {
    size_t rows = (size_t)B * (size_t)T;
    return g->options.sequence_parallel ? ceil_div(rows, (size_t)g->tp->size) : rows;
}
// As above, for this rank's rows; then for all rows, where the t ranks exchange them (comm_alloc registers memory).
static floatX* own_acts_alloc(const GPT2* g, size_t n) {
    if (!g->options.sequence_parallel) return acts_alloc(g, n);
    return (floatX*)comm_alloc(g->tp, own_rows_of(g, g->max_B, g->seq_len) * n * sizeof(floatX), MEMORY_ACTIVATIONS);
}
static float* own_stats_alloc(const GPT2* g) {
    return (float*)device_alloc(own_rows_of(g, g->max_B, g->seq_len) * sizeof(float), MEMORY_ACTIVATIONS);
}
static floatX* tp_acts_alloc(const GPT2* g, size_t n) {
    return (floatX*)comm_alloc(g->tp, (size_t)g->max_B * (size_t)g->seq_len * n * sizeof(floatX), MEMORY_ACTIVATIONS);
}

// Allocates everything except res1, which blocks never share.
static void block_acts_init(const GPT2* g, BlockActs* a) {
    size_t C = (size_t)g->config.C, D = (size_t)g->D, NH = (size_t)(g->config.NH / g->tp->size);
    a->ln1 = own_acts_alloc(g, C);  a->ln1_mean = own_stats_alloc(g); a->ln1_rstd = own_stats_alloc(g);
    a->qkv = acts_alloc(g, 3*D); a->att_stats = stats_alloc(g, NH);
    a->atty = acts_alloc(g, D);
    a->res2 = own_acts_alloc(g, C);
    a->ln2 = own_acts_alloc(g, C);  a->ln2_mean = own_stats_alloc(g); a->ln2_rstd = own_stats_alloc(g);
    a->fch = acts_alloc(g, 4*D);
    a->gelu = acts_alloc(g, 4*D);
}

static void gpt2_init_units(GPT2* g) {
    for (int u = 0; u < g->num_units; u++) {
        g->units[u].offset = g->num_params;
        g->units[u].size = unit_part_elements(g->config, u, g->tp->size);
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
        ParamRange p = param_range_part(g->config, u, g->tp->rank, g->tp->size);
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
        g->acts[l].res1 = own_acts_alloc(g, C);
    }
    g->resf = own_acts_alloc(g, C);
    g->lnf = tp_acts_alloc(g, C); g->lnf_mean = own_stats_alloc(g); g->lnf_rstd = own_stats_alloc(g);
    g->inputs = (int*)device_alloc(BT * sizeof(int), MEMORY_ACTIVATIONS);
    g->targets = (int*)device_alloc(BT * sizeof(int), MEMORY_ACTIVATIONS);
}

static void gpt2_init_scratch(GPT2* g) {
    size_t C = (size_t)g->config.C, t = (size_t)g->tp->size;
    g->term = tp_acts_alloc(g, C);
    if (g->options.sequence_parallel) g->gathered = tp_acts_alloc(g, C);
    g->logits = (floatX*)device_alloc((size_t)g->logits_rows * (size_t)g->tokens.count * sizeof(floatX),
                                      MEMORY_ACTIVATIONS);
    g->row_stats = (float*)device_alloc(t * (size_t)g->logits_rows * 3 * sizeof(float), MEMORY_ACTIVATIONS);
    g->losses = stats_alloc(g, 1);
    g->dres = own_acts_alloc(g, C);
    g->dbtc = tp_acts_alloc(g, C);
    g->dbt4c = acts_alloc(g, (size_t)(4*g->D));
    g->stats = (StepStats*)device_alloc(sizeof(StepStats), MEMORY_ACTIVATIONS);
}

// Cuts the gradient memory into buckets from its end to its beginning, because the backward pass computes gradients in
// nearly that order. The tensor that fills a bucket closes it. The root differs: lnfw and lnfb are final first, but
// wte, which is tied, only at the very end, in embedding_backward, and so is the bucket that contains it.
static void gpt2_init_buckets(GPT2* g) {
    double limit = fmin(FIRST_BUCKET_MB, g->bucket_mb);
    g->buckets = new_array(Bucket, g->num_units * MAX_TENSORS); // one per tensor at most
    Bucket* b = NULL;
    for (int u = g->num_units - 1; u >= 0; u--) {
        size_t begin = g->units[u].offset + g->units[u].size; // of the current tensor
        for (int i = unit_tensors(u) - 1; i >= 0; i--) {
            size_t n = tensor_part_elements(unit_tensor(g->config, u, i), g->tp->size);
            begin -= n;
            bool is_full = b != NULL && (double)(b->size * sizeof(floatX)) >= limit * (1 << 20);
            if (is_full) limit = g->bucket_mb; // of all buckets but the first
            if (b == NULL || is_full) b = &g->buckets[g->num_buckets++];
            b->begin = begin;
            b->size += n;
            b->missing = ++b->tensors;
            g->bucket_of[u][i] = g->num_buckets - 1;
        }
    }
}

static LayerShapes gpt2_shapes(const GPT2* g) {
    LayerShapes s = layer_shapes(g->max_B, g->seq_len, g->config.C, g->config.NH, g->tokens.count, g->tp->size);
    return s;
}

// Allocates everything. Call after gpt2_configure.
static void gpt2_init(GPT2* g) {
    gpt2_init_params(g);
    gpt2_init_ranges(g);
    gpt2_init_acts(g);
    gpt2_init_scratch(g);
    gpt2_init_buckets(g);
    layers_init(gpt2_shapes(g));
}

static void gpt2_free(GPT2* g) {
    layers_free();
    device_free(g->params); device_free(g->grads); device_free(g->master); device_free(g->m); device_free(g->v);
    device_free_all(MEMORY_ACTIVATIONS);
    free(g->buckets);
    mesh_free(&g->mesh);
}

// Computes how many bytes of each kind gpt2_init will allocate. A run compares these predictions with measurements.
static void gpt2_predict_memory(const GPT2* g, size_t bytes[MEMORY_KINDS]) {
    GPT2Config c = g->config;
    size_t t = (size_t)g->tp->size, P = g->num_params, X = sizeof(floatX), F = sizeof(float);
    size_t BT = (size_t)g->max_B * (size_t)g->seq_len, C = (size_t)c.C, D = (size_t)g->D, L = (size_t)c.L;
    size_t blocks_kept = g->recompute == RECOMPUTE_BLOCK ? 1 : L;
    size_t own = own_rows_of(g, g->max_B, g->seq_len), gathers = (size_t)g->options.sequence_parallel;
    size_t per_row = (L + 3*blocks_kept + 2) * C*X + (4*blocks_kept + 2) * F; // res1, res2, ln1, ln2; resf, dres
    size_t per_token = blocks_kept * (12*D*X + (size_t)c.NH / t * F)          // the rest of a block
                     + ((3 + gathers) * C + 4*D)*X + F + 2 * sizeof(int);     // term, dbtc, lnf, gathered; dbt4c; ...
    memset(bytes, 0, MEMORY_KINDS * sizeof bytes[0]);
    bytes[MEMORY_PARAMETERS] = X * P;
    bytes[MEMORY_GRADIENTS] = X * P;
    bytes[MEMORY_OPTIMIZER] = (NEEDS_MASTER ? 12 : 8) * P;
    bytes[MEMORY_ACTIVATIONS] = own * per_row + BT * per_token + sizeof(StepStats)
                              + (size_t)g->logits_rows * ((size_t)g->tokens.count * X + 3*t * sizeof(float));
    bytes[MEMORY_COMMUNICATION] = mesh_bytes(&g->mesh);
    bytes[MEMORY_WORKSPACE] = layers_workspace_bytes(gpt2_shapes(g));
    bytes[MEMORY_SNAPSHOT] = X * P + bytes[MEMORY_OPTIMIZER];
}

// Returns the bytes that this rank will send per step.
// Over tp: sums of BTC elements, 3 floats per row for the loss, layernorms, 4 doubles. Over dp: gradients, 3 doubles.
static double gpt2_predict_sent(const GPT2* g) {
    int t = g->tp->size, sequence = g->options.sequence_parallel;
    double BT = (double)g->max_B * g->seq_len, C = g->config.C, X = sizeof(floatX), L = g->config.L;
    double sums = 4*L + 2, again = g->recompute == RECOMPUTE_BLOCK ? L : 0;
    sums += again + sequence * (again / 2 + L); // a gather or a reduce-scatter is half a sum
    double micro = ring_bytes(sums * BT*C * X, t) + (t - 1) * BT * 3*sizeof(float);
    double step = ring_bytes(sequence * (2*L + 1) * 2*C * X + (STEP_SUMS + 1) * sizeof(double), t);
    return g->accumulation * micro + step
         + ring_bytes((double)g->num_params * X + STEP_SUMS * sizeof(double), g->dp->size);
}

// ----------------------------------------------------------------------------
// 4. one transformer block

// ---- rows, for --sequence-parallel only: without it own_rows is B*T, at_own_rows and gather_rows return x ----
static int own_rows(const GPT2* g) { return (int)own_rows_of(g, g->B, g->T); }
static size_t own_row_elements(const GPT2* g) { return (size_t)own_rows(g) * (size_t)g->config.C; }
// Returns where this rank's rows are in x (B,T,C), which has all rows.
static floatX* at_own_rows(const GPT2* g, floatX* x) {
    return g->options.sequence_parallel ? x + (size_t)g->tp->rank * own_row_elements(g) : x;
}
// Gathers all rows from every rank's own. Layers between _begin and _end overlap with it, unless --no-overlap is given.
static CommOp gather_rows_begin(GPT2* g, floatX* all, floatX* own) {
    if (!g->options.sequence_parallel) return NO_OP;
    CommOp gather = comm_all_gather(g->tp, all, own, own_row_elements(g), COMM_FLOATX);
    if (!g->options.overlap) comm_finish(g->tp, &gather);
    return gather;
}
static floatX* gather_rows_end(GPT2* g, floatX* all, floatX* own, CommOp gather) {
    comm_finish(g->tp, &gather);
    return g->options.sequence_parallel ? all : own;
}
static floatX* gather_rows(GPT2* g, floatX* all, floatX* own) {
    return gather_rows_end(g, all, own, gather_rows_begin(g, all, own));
}

// ---- seams: where the t ranks communicate ----
// Megatron's f: returns the whole input x of a column-parallel layer.
static floatX* tp_enter(GPT2* g, floatX* x) { return gather_rows(g, g->gathered, x); }
// For a bias or wpe, which one of the t ranks adds to its term: returns x there and NULL on the others.
static floatX* added_once(const GPT2* g, floatX* x) { return g->tp->rank == 0 ? x : NULL; }
// Megatron's g: sums the ranks' terms (B,T,C) of a row-parallel layer's output. Returns `sum`, this rank's rows of it.
// By default these are all rows, and the sum replaces the term: sum == term.
static floatX* tp_leave(GPT2* g, floatX* sum, floatX* term) {
    size_t n = own_row_elements(g);
    if (g->options.sequence_parallel) comm_wait(g->tp, comm_reduce_scatter(g->tp, sum, term, n, COMM_FLOATX));
    else comm_wait(g->tp, comm_all_reduce(g->tp, term, n, COMM_FLOATX));
    return sum;
}
// The gradient of a sum is that of each of its terms: returns the whole of it.
static floatX* tp_leave_backward(GPT2* g, floatX* dsum) { return gather_rows(g, g->term, dsum); }
// Each rank's columns have used all of the input x, so dx is the sum of the ranks' terms (B,T,C). Begins this sum, in
// place; layers before tp_enter_backward_end, which returns this rank's rows of it, overlap with the sum.
static CommOp tp_enter_backward_begin(GPT2* g, floatX* dx) {
    size_t n = own_row_elements(g);
    CommOp sum = g->options.sequence_parallel ? comm_reduce_scatter(g->tp, at_own_rows(g, dx), dx, n, COMM_FLOATX)
                                              : comm_all_reduce(g->tp, dx, n, COMM_FLOATX);
    if (g->options.overlap) layers_overlap_sum(comm_has_kernels(g->tp)); // its kernels need some multiprocessors
    else comm_finish(g->tp, &sum);
    return sum;
}
static floatX* tp_enter_backward_end(GPT2* g, floatX* dx, CommOp sum) {
    layers_overlap_sum(false); // layers may use all multiprocessors again
    comm_finish(g->tp, &sum);
    return at_own_rows(g, dx);
}

// The block's input is x + branch. If branch is NULL, the input is x, and x is a.res1 itself.
static void block_attention_forward(GPT2* g, AttentionParams p, BlockActs a, const floatX* x, const floatX* branch) {
    int B = g->B, T = g->T, C = g->config.C, NH = g->config.NH, BT = B * T;
    residual_layernorm_forward(a.res1, a.ln1, a.ln1_mean, a.ln1_rstd, x, branch, p.ln1w, p.ln1b, own_rows(g), C);
    matmul_forward(a.qkv, tp_enter(g, a.ln1), p.qkvw, p.qkvb, BT, C, 3*g->D); // column-parallel
    attention_forward(a.atty, a.att_stats, a.qkv, B, T, g->D, NH / g->tp->size);
    matmul_forward(g->term, a.atty, p.projw, added_once(g, p.projb), BT, g->D, C); // row-parallel
    g->branch = tp_leave(g, at_own_rows(g, g->term), g->term);
}

// Computes all activations of the MLP except its output: the backward pass needs no more.
static void block_mlp_activations(GPT2* g, MlpParams p, BlockActs a) {
    int BT = g->B * g->T, C = g->config.C;
    residual_layernorm_forward(a.res2, a.ln2, a.ln2_mean, a.ln2_rstd, a.res1, g->branch, p.ln2w, p.ln2b,
                               own_rows(g), C);
    matmul_gelu_forward(a.gelu, a.fch, tp_enter(g, a.ln2), p.fcw, p.fcb, BT, C, 4*g->D); // column-parallel
}

// The block's output is the sum a.res2 + g->branch. The next layernorm computes it.
static void block_mlp_forward(GPT2* g, MlpParams p, BlockActs a) {
    int BT = g->B * g->T, C = g->config.C;
    block_mlp_activations(g, p, a);
    matmul_forward(g->term, a.gelu, p.fcprojw, added_once(g, p.fcprojb), BT, 4*g->D, C); // row-parallel
    g->branch = tp_leave(g, at_own_rows(g, g->term), g->term);
}

// The backward pass calls this when the gradient of tensor i of unit u is complete. In the last micro-batch it is final
// and the last tensor of a bucket starts an all-reduce. Do not read the sums before gpt2_reduce has waited for them.
static void grad_ready(GPT2* g, int u, int i) {
    if (g->ddp == DDP_NAIVE || !g->last_micro) return;
    Bucket* b = &g->buckets[g->bucket_of[u][i]];
    if (--b->missing > 0) return;
    b->missing = b->tensors; // for the next step
    b->reduced = comm_all_reduce(g->dp, g->grads + b->begin, b->size, COMM_FLOATX);
}

// Computes the gradients of the MLP's matrices and biases. Only the update waits for them.
static void block_mlp_backward_weight(GPT2* g, int u, MlpParams dp, BlockActs a, const floatX* dout,
                                      const floatX* dfch) {
    int BT = g->B * g->T, C = g->config.C;
    CommOp gather = gather_rows_begin(g, g->gathered, a.ln2); // again, because only this rank's rows have been kept
    // out = res2 + gelu(fch) fcprojw^T + fcprojb
    matmul_backward_weight(dp.fcprojw, dp.fcprojb, dout, a.gelu, BT, 4*g->D, C, g->grad_mode);
    grad_ready(g, u, FCPROJW);
    grad_ready(g, u, FCPROJB);
    // fch = ln2 fcw^T + fcb
    const floatX* ln2 = gather_rows_end(g, g->gathered, a.ln2, gather);
    matmul_backward_weight(dp.fcw, dp.fcb, dfch, ln2, BT, C, 4*g->D, g->grad_mode);
    grad_ready(g, u, FCW);
    grad_ready(g, u, FCB);
}

// g->dres holds the gradient of the block's output on entry, and of res2 on return.
static void block_mlp_backward(GPT2* g, int u, MlpParams p, MlpParams dp, BlockActs a) {
    floatX *dfch = g->dbt4c, *dln2 = g->dbtc;
    int BT = g->B * g->T, C = g->config.C;
    floatX* dout = tp_leave_backward(g, g->dres);
    // out = res2 + gelu(fch) fcprojw^T + fcprojb
    matmul_gelu_backward_input(dfch, dout, p.fcprojw, a.fch, BT, 4*g->D, C);
    // fch = ln2 fcw^T + fcb
    matmul_backward_input(dln2, dfch, p.fcw, BT, C, 4*g->D);
    CommOp sum = tp_enter_backward_begin(g, dln2); // overlaps with the weights' gradients, which need no sum over ranks
    block_mlp_backward_weight(g, u, dp, a, dout, dfch);
    dln2 = tp_enter_backward_end(g, dln2, sum);
    // ln2 = layernorm(res2)
    layernorm_backward(g->dres, dp.ln2w, dp.ln2b, dln2, a.res2, p.ln2w, a.ln2_mean, a.ln2_rstd,
                       own_rows(g), C, g->grad_mode);
    grad_ready(g, u, LN2W);
    grad_ready(g, u, LN2B);
}

// Computes the gradients of attention's matrices and biases.
static void block_attention_backward_weight(GPT2* g, int u, AttentionParams dp, BlockActs a, const floatX* dres2,
                                            const floatX* dqkv) {
    int BT = g->B * g->T, C = g->config.C;
    CommOp gather = gather_rows_begin(g, g->gathered, a.ln1); // as in the MLP
    // res2 = res1 + atty projw^T + projb
    matmul_backward_weight(dp.projw, dp.projb, dres2, a.atty, BT, g->D, C, g->grad_mode);
    grad_ready(g, u, PROJW);
    grad_ready(g, u, PROJB);
    // qkv = ln1 qkvw^T + qkvb
    const floatX* ln1 = gather_rows_end(g, g->gathered, a.ln1, gather);
    matmul_backward_weight(dp.qkvw, dp.qkvb, dqkv, ln1, BT, C, 3*g->D, g->grad_mode);
    grad_ready(g, u, QKVW);
    grad_ready(g, u, QKVB);
}

// g->dres holds the gradient of res2 on entry, and of the block's input on return.
static void block_attention_backward(GPT2* g, int u, AttentionParams p, AttentionParams dp, BlockActs a) {
    floatX *datty = g->dbtc, *dqkv = g->dbt4c, *dln1 = g->dbtc; // datty is read before dln1 is written
    int B = g->B, T = g->T, C = g->config.C, NH = g->config.NH, BT = B * T;
    floatX* dres2 = tp_leave_backward(g, g->dres);
    // res2 = res1 + atty projw^T + projb
    matmul_backward_input(datty, dres2, p.projw, BT, g->D, C);
    // atty = attention(qkv)
    attention_backward(dqkv, datty, a.qkv, a.atty, a.att_stats, B, T, g->D, NH / g->tp->size);
    // qkv = ln1 qkvw^T + qkvb
    matmul_backward_input(dln1, dqkv, p.qkvw, BT, C, 3*g->D);
    CommOp sum = tp_enter_backward_begin(g, dln1);
    block_attention_backward_weight(g, u, dp, a, dres2, dqkv);
    dln1 = tp_enter_backward_end(g, dln1, sum);
    // ln1 = layernorm(res1)
    layernorm_backward(g->dres, dp.ln1w, dp.ln1b, dln1, a.res1, p.ln1w, a.ln1_mean, a.ln1_rstd,
                       own_rows(g), C, g->grad_mode);
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
    floatX* term = g->options.sequence_parallel ? g->term : g->acts[0].res1; // whose sum is res1
    encoder_part_forward(term, g->inputs, root.wte, added_once(g, root.wpe), g->tokens, g->B, g->T, g->config.C);
    tp_leave(g, g->acts[0].res1, term); // exact: wte[token] is 0 on all ranks but the one that has the token
}

// The last block's output is x + branch.
static void final_layernorm_forward(GPT2* g, RootParams root, const floatX* x, const floatX* branch) {
    trace_compute("head", -1);
    floatX* lnf = at_own_rows(g, g->lnf);
    residual_layernorm_forward(g->resf, lnf, g->lnf_mean, g->lnf_rstd, x, branch, root.lnfw, root.lnfb, own_rows(g),
                               g->config.C);
    gather_rows(g, g->lnf, lnf); // the head needs all rows
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

// Computes this rank's logits z for n rows of g->lnf, from `row` on, and (max, sum of exp(z - max), z of the target, if
// it is one of this rank's tokens) for each row. Returns those of all ranks. The classifier merges them: with M the
// largest max and S = the sum of sum * exp(max - M), the loss is log(S) + M - z of the target, as if on one rank.
static const float* head_logits(GPT2* g, const floatX* wte, int row, int n) {
    float* own = g->row_stats + (size_t)g->tp->rank * (size_t)n * 3;
    matmul_forward(g->logits, g->lnf + (size_t)row * (size_t)g->config.C, wte, NULL, n, g->config.C, g->tokens.count);
    classifier_part_stats(own, g->logits, g->targets + row, g->tokens, n, g->config.V);
    comm_wait(g->tp, comm_all_gather(g->tp, g->row_stats, own, (size_t)n * 3, COMM_F32));
    return g->row_stats;
}

// Computes g->losses. The classifier takes a few rows at a time, so that no (B,T,V) tensor exists.
static void head_forward(GPT2* g, const floatX* wte) {
    int BT = g->B * g->T;
    for (int row = 0; row < BT; row += g->logits_rows) {
        int n = row + g->logits_rows < BT ? g->logits_rows : BT - row;
        const float* all = head_logits(g, wte, row, n);
        classifier_part_forward(g->losses + row, all, g->targets + row, g->tp->size, n);
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
        const float* all = head_logits(g, wte, row, n);
        classifier_part_forward_backward(g->losses + row, g->logits, all, g->targets + row, dloss, g->tokens,
                                         g->tp->size, n, c.V);
        // logits = lnf wte^T
        matmul_backward_weight_chunk(dwte, g->logits, lnf, row, n, BT, c.C, g->tokens.count, g->grad_mode);
        matmul_backward_input(g->dbtc + (size_t)row*c.C, g->logits, wte, n, c.C, g->tokens.count);
    }
}

// Adds this micro-batch's losses to g->stats. g->dres becomes the gradient of resf, the output of the last block.
static void head_backward(GPT2* g, RootParams root, RootParams droot, float dloss) {
    int BT = g->B * g->T, C = g->config.C;
    head_forward_backward(g, root.wte, droot.wte, dloss);
    CommOp sum = tp_enter_backward_begin(g, g->dbtc); // a rank's term comes from the logits of its tokens
    add_sum(&g->stats->loss, g->losses, (size_t)BT);
    floatX* dlnf = tp_enter_backward_end(g, g->dbtc, sum);
    // lnf = layernorm(resf)
    device_zero(g->dres, own_row_elements(g) * sizeof(floatX));
    layernorm_backward(g->dres, droot.lnfw, droot.lnfb, dlnf, g->resf, root.lnfw, g->lnf_mean, g->lnf_rstd,
                       own_rows(g), C, g->grad_mode);
    grad_ready(g, 0, LNFW);
    grad_ready(g, 0, LNFB);
}

// Always adds to the gradient of wte: the head has written it in the same micro-batch, because wte is tied.
static void embedding_backward(GPT2* g, RootParams droot) {
    trace_compute("backward, embedding", -1);
    // res1 of block 0 = wte[inputs] + wpe
    const floatX* dres = tp_leave_backward(g, g->dres);
    encoder_part_backward(droot.wte, droot.wpe, dres, g->inputs, g->tokens, g->B, g->T, g->config.C, g->grad_mode);
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

// With --sequence-parallel a rank's gradients of layernorms, the first two tensors of every unit, come from its own
// rows. Sums them over the t ranks: copied to dbtc, because one large all-reduce takes less time than many small ones.
static void gpt2_reduce_layernorms(GPT2* g) {
    floatX* layernorms[MAX_UNITS];
    size_t n = 2 * (size_t)g->config.C, bytes = n * sizeof(floatX); // of each
    int count = 0, most = g->B * g->T / 2; // how many fit into dbtc (B,T,C): all, unless a micro-batch is tiny
    for (int u = 0; u < g->num_units; u++) layernorms[count++] = unit_grads(g, u);
    for (int first = 0; first < count && g->tp->size > 1; first += most) {
        int end = first + most < count ? first + most : count;
        for (int i = first; i < end; i++) device_copy(g->dbtc + (size_t)(i - first) * n, layernorms[i], bytes);
        comm_wait(g->tp, comm_all_reduce(g->tp, g->dbtc, (size_t)(end - first) * n, COMM_FLOATX));
        for (int i = first; i < end; i++) device_copy(layernorms[i], g->dbtc + (size_t)(i - first) * n, bytes);
    }
}

// The naive method: sums the gradients over the ranks after the backward pass, one unit after another.
static void gpt2_reduce_naive(GPT2* g) {
    for (int u = 0; u < g->num_units; u++)
        comm_wait(g->dp, comm_all_reduce(g->dp, unit_grads(g, u), g->units[u].size, COMM_FLOATX));
}

// Call after the backward pass. On return, each gradient is the mean over the global batch times the loss scale, the
// same on all replicas. g->stats->loss is the sum over the global batch. train_step explains why a sum of gradients is
// already their mean.
static void gpt2_reduce(GPT2* g) {
    trace_compute("wait for gradients", -1);
    comm_wait(g->tp, comm_all_reduce(g->tp, &g->stats->stopping, STEP_SUMS - 1, COMM_F64)); // they have one loss
    CommOp loss = comm_all_reduce(g->dp, &g->stats->loss, STEP_SUMS, COMM_F64);
    if (g->ddp == DDP_NAIVE) gpt2_reduce_naive(g);
    else for (int i = 0; i < g->num_buckets; i++) comm_wait(g->dp, g->buckets[i].reduced);
    if (g->options.sequence_parallel) gpt2_reduce_layernorms(g);
    comm_wait(g->dp, loss);
}

// ----------------------------------------------------------------------------
// 6. the optimizer

// *acc += the sum of squares of x over the whole model; x has the layout of the parameters. Each parameter counts once:
// of the ranks of a replica that hold the same tensor, add_range_squares adds it on the first one only.
static void add_squares(GPT2* g, double* acc, const floatX* x) {
    for (int i = 0; i < g->num_ranges; i++)
        add_range_squares(acc, g->config, &g->ranges[i], x + (g->ranges[i].params - g->params));
    comm_wait(g->tp, comm_all_reduce(g->tp, acc, 1, COMM_F64));
}

// Computes the global gradient norm and the factor by which AdamW scales the gradients. Both stay on the device.
static void gpt2_clip(GPT2* g, float max_norm, float loss_scale) {
    add_squares(g, &g->stats->grad_square, g->grads);
    clip_gradients(g->stats, max_norm, loss_scale);
}

// Calls AdamW once per range, and sums the squares of the new parameters for their norm.
static void gpt2_update(GPT2* g, AdamW adamw) {
    snapshot_hold(); // it may still be copying what changes now
    for (int i = 0; i < g->num_ranges; i++) {
        ParamRange p = g->ranges[i];
        adamw_update(adamw, p.params, p.master, p.m, p.v, p.grads, &g->stats->grad_scale, p.n, p.no_decay,
                     NULL); // add_squares counts what several ranks have once
    }
    add_squares(g, &g->stats->param_square, g->params);
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
    ranks_load(run, g->ranges, g->dp->rank == 0 ? g->num_ranges : 0);
    gpt2_broadcast(g);
}

// All replicas hold the same state, and the first one saves it.
static void gpt2_save(GPT2* g, Run* run, long long step) {
    ranks_save(run, step, g->ranges, g->num_ranges);
}

// ----------------------------------------------------------------------------
// 8. training

// Declares the options of this program.
static void gpt2_options(GPT2* g, Run* run) {
    run_options(run, "train_gpt2_tp", "train GPT-2 with tensor parallelism: each rank stores a part of every matrix");
    options_ranks(run);
    options_tensor_parallel(&run->table, &run->ranks->along[AXIS_TP], &g->options);
    g->ddp = DDP_BUCKETED;
    g->bucket_mb = 25;
    option_choice(&run->table, "ddp", &g->ddp, "naive|bucketed",
                  "naive: all-reduce after the backward pass; bucketed: in buckets during it");
    option_float(&run->table, "bucket-mb", &g->bucket_mb, 1e-6, 1e6,
                 "MiB of gradients per bucket, but at most 1 in the first");
    // The mesh: rank = (dp p + pp) t + tp, where an axis that a program does not have has size 1. mesh.tp has the ranks
    // that differ in tp only; mesh.pp and mesh.dp likewise; mesh.tied the first and last of mesh.pp (mesh_plan_axes).
    ranks_are_mesh(run, &g->mesh);
}

// Sets the fields that gpt2_predict_memory and gpt2_init need, except recompute, which gpt2_predict sets (section 9).
static void gpt2_configure(void* model, Run* run) {
    GPT2* g = (GPT2*)model;
    g->config = run->config;
    g->max_B = (int)run->o.batch_size;
    g->seq_len = (int)run->o.seq_len;
    g->accumulation = run->accumulation;
    g->num_units = gpt2_num_units(g->config);
    g->tp = g->mesh.tp;
    g->D = g->config.C / g->tp->size;
    g->dp = g->mesh.dp;
    g->tokens = token_range(g->config.Vp, g->tp->size, g->tp->rank);
    int rows = classifier_rows(g->max_B * g->seq_len, g->tokens.count);
    g->logits_rows = rows > g->tp->size ? rows : g->tp->size; // for samples: one row of all ranks' logits
    mesh_check_rows(g->options, g->tp->size, g->max_B, g->seq_len);
    gpt2_init_units(g);
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
    floatX *last = g->lnf + (size_t)(T - 1)*c.C, *own = g->logits + g->tokens.first;
    matmul_forward(own, last, root_view(g, unit_params(g, 0)).wte, NULL, 1, c.C, g->tokens.count);
    comm_wait(g->tp, comm_all_gather(g->tp, g->logits, own, (size_t)g->tokens.count, COMM_FLOATX));
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
    trace_step(step + 1);
    return stats;
}

// Reports the model, the parallel layout and the predictions before training begins.
static void gpt2_report(const GPT2* g, Run* run) {
    (void)g;
    ranks_report(run);
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
