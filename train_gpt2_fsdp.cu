/*
Train GPT-2 with fully sharded data parallelism: ZeRO-3 as it is used in practice (Zhao et al., PyTorch FSDP,
arXiv 2304.11277, sections 3 and 4). Each rank keeps shards of the gradients, the fp32 parameters and AdamW's moments.
A group of units is gathered before its use, into one of a few gather buffers, and freed after it. A gather costs no
time if it ends before its group is needed, but each group gathered ahead needs a gather buffer.

--sharding full|grad-op|hybrid  full (default): a group is freed after each use; grad-op: at the update; hybrid: full
          within each replica of the model, which is --shard-group ranks.
--prefetch backward-pre|backward-post|none  when the backward pass begins the next gather: before it computes the
          gradients of this group (default), after that, or when it needs the group. --forward-prefetch (on): like pre.
--limit-all-gathers 2  how many groups may be gathered at a time, besides the root: memory for overlap.
Less important: --wrap-blocks and --wrap-halves set the size of a group (one block), --reduce-dtype the type in which
gradients are sent and summed (fp32); --cpu-offload keeps shards on the host, where AdamW then runs (off).

Memory    per rank, in bytes, with P parameters cut S ways: 16P/S (14P/S if gradients are reduced in 16 bits), and
          activations. Gather buffers hold the parameters of the root and --limit-all-gathers groups (grad-op: of all).
          Buckets hold the gradients of the root and two groups in floatX, and again in fp32 if they are reduced in it.
Sent      per rank and step with A micro-batches, in elements: full: (A(3P - 2root) + root) (S-1)/S, as the root stays
          gathered until the update; grad-op: (A+1)P (S-1)/S, as every group does. AP (S-1)/S of these are in
          --reduce-dtype, the others in floatX. hybrid: its R = N/S replicas add 2P/S (R-1)/R in --reduce-dtype. All sum
          five doubles.
Run       make train_gpt2_fsdp && mpirun -np 4 ./train_gpt2_fsdp            (--help lists the options)
Before    train_gpt2_zero.cu: shards that are gathered when they are needed. New here: groups, and gathers ahead of use.
          Weights are stored in fp32 only, and rounded for a gather. Gone: --zero-stage 1 and 2.
Next      train_gpt2_tp.cu and train_gpt2_pp.cu cut the computation as well; train_gpt2_zeropp.cu is for slow links.
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
#include "llmc/parallel/layout.h"      // defines: Sharding, Layout, Group, layout_*, gathers_at, comm_finish, ...
#include "llmc/parallel/shard_state.h" // defines: Shards, shards_*, grads_as_sent: this rank's state
#include "llmc/run/trace.h"            // defines: trace_compute, trace_step
#include "llmc/run/run.h"              // defines: Run, run_*, option_*: options, data, log, checkpoints, reports
#include "llmc/run/ranks_run.h"        // defines: ranks_*, options_ranks: what several ranks add to a run
#include "llmc/run/predict.h"          // defines: run_predict

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
// Units are gathered, reduced and freed in groups: group 0 is the root, and the others are one block each, unless
// --wrap-blocks or --wrap-halves say otherwise. layout.h defines
//     Group { first_unit, num_units, elements, tensors;  shard { n, offset };  buffer, released; }
// The units of a group lie one after another in its memory, cut into S shards of n elements. One of them is this
// rank's, at element `offset` of its own state. If the group is gathered, `buffer` is the number of its gather buffer.
// (PyTorch calls a group an FSDP unit, and its memory a FlatParameter.)
//
// The gradients of a whole group, until each rank has its shard of their sum.
typedef struct {
    floatX* grads;                  // (S,shard) owned, and behind them the same in --reduce-dtype if that is wider
    int group;                      // whose gradients are being reduced
    int missing;                    // number of tensors whose gradients are not final yet
    CommOp reduced;                 // the reduce-scatter, while it is under way; NO_OP otherwise
    bool adds;                      // the step has an earlier sum, to which this one will be added
    bool last_micro;                // they are the step's last; bucket_finish may run in a later micro-batch
    void* own_sum;                  // (shard) receives this rank's shard of the sum; a view
} Bucket;

// Holds the parameters of one group at a time.
typedef struct {
    floatX* params;                 // (S,shard) owned
    int group;                      // to which they belong; NO_GROUP after its release
} GatherBuffer;

typedef struct {
    GPT2Config config;
    int max_B, seq_len;             // largest micro-batch: max_B sequences of seq_len tokens
    int B, T;                       // of the current micro-batch
    int accumulation;               // micro-batches per step
    int recompute;                  // RECOMPUTE_NONE or RECOMPUTE_BLOCK
    int num_units;                  // 1 + 2L: the root, and two for each block
    Sharding options;               // --sharding, --prefetch and the like, and the S that follows from them
    Layout layout;                  // the groups, and two communicators: shard_ranks, the S ranks that together hold
                                    // one replica of the model, and replicas, the ranks that have the same shards
    const Unit* units;              // where they lie in the memory of their whole group; a view
    Shards state;                   // this rank's shard of every group, 1/S of the model: fp32 params, grads in
                                    // --reduce-dtype, m and v; on the device, or with --cpu-offload on the host; owned
    int num_ranges;
    ParamRange ranges[MAX_UNITS];   // views of this rank's shards, over which the optimizer and checkpoints iterate
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
    bool first_micro, last_micro;   // true in the first micro-batch of a step; in the last
    int num_buckets;
    Bucket buckets[3];              // one for the root, and two that the other groups take in turn
    CommOp gathering[MAX_UNITS];    // the all-gather of a group's parameters, while it is under way
    CommOp replicating[MAX_UNITS];  // the all-reduce of a group's shard over the replicas, while it is under way
    int num_gather_buffers;
    GatherBuffer gather_buffers[MAX_UNITS]; // one for the root, and others that all groups take in turn
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

// Cuts groups of units into S shards, as train_gpt2_zero.cu cuts units. With S = 2 and a block (two units) per group:
//     the whole model   | root: shard 0 | shard 1, padding | block 0: shard 0 | shard 1, padding | ...
//     one rank keeps                    | shard 1, padding |                  | shard 1, padding | ...
static void gpt2_init_units(GPT2* g) {
    layout_group(&g->layout, &g->options, g->config); // units into groups, each with its number of elements
    for (int k = 0; k < g->layout.num_groups; k++) {
        Group* group = &g->layout.groups[k];
        group->shard.n = shard_of(group->elements, g->options.shards); // 1/S of these, rounded up
        group->shard.offset = g->layout.own_elements;
        g->layout.own_elements += group->shard.n;
        g->gathering[k] = g->replicating[k] = NO_OP;
    }
    g->units = g->layout.units;
    g->num_buckets = g->layout.num_groups < 3 ? g->layout.num_groups : 3;
    g->num_gather_buffers = layout_gather_buffers(&g->layout, &g->options);
}

static void gpt2_init_params(GPT2* g) {
    layout_split(&g->layout, &g->options, g->dp); // shard_ranks: S neighbours; replicas: N/S ranks, S apart
    shards_init(&g->state, &g->options, &g->layout, g->dp);
}

// Lists the parts of the model that this rank holds, with their memory: what its shard of a group has of each unit.
static void gpt2_init_ranges(GPT2* g) {
    for (int u = 0; u < g->num_units; u++) {
        ParamRange p;
        if (!shards_range(&g->state, g->config, u, &p)) continue; // other ranks hold all of it
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

// Allocates buckets and gather buffers. Groups take the last two buckets in turn; each is as large as its first group.
static void gpt2_init_buckets(GPT2* g) {
    size_t S = (size_t)g->options.shards;
    for (int k = 0; k < g->num_buckets; k++) {
        Bucket* b = &g->buckets[k];
        size_t whole = S * g->layout.groups[k].shard.n;
        b->grads = (floatX*)device_alloc(whole * bucket_element_bytes(&g->options), MEMORY_COMMUNICATION);
        b->reduced = NO_OP;
    }
    for (int r = 0; r < g->num_gather_buffers; r++) {
        size_t whole = S * gather_buffer_shard(&g->layout, &g->options, r);
        g->gather_buffers[r].params = (floatX*)device_alloc(whole * sizeof(floatX), MEMORY_COMMUNICATION);
        g->gather_buffers[r].group = NO_GROUP;
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
    gpt2_init_buckets(g);
    layers_init(gpt2_shapes(g));
}

static void gpt2_free(GPT2* g) {
    layers_free();
    shards_free(&g->state);
    device_free_all(MEMORY_ACTIVATIONS);
    for (int k = 0; k < g->num_buckets; k++) device_free(g->buckets[k].grads);
    for (int r = 0; r < g->num_gather_buffers; r++) device_free(g->gather_buffers[r].params);
    layout_free(&g->layout);
}

// Computes how many bytes of each kind gpt2_init will allocate. A run compares these predictions with measurements.
static void gpt2_predict_memory(const GPT2* g, size_t bytes[MEMORY_KINDS]) {
    GPT2Config c = g->config;
    size_t S = (size_t)g->options.shards, own = g->layout.own_elements, X = sizeof(floatX);
    size_t in_buckets = 0, in_gather_buffers = 0; // elements of whole groups
    for (int k = 0; k < g->num_buckets; k++) in_buckets += S * g->layout.groups[k].shard.n;
    for (int r = 0; r < g->num_gather_buffers; r++)
        in_gather_buffers += S * gather_buffer_shard(&g->layout, &g->options, r);
    size_t BT = (size_t)g->max_B * (size_t)g->seq_len, C = (size_t)c.C, L = (size_t)c.L;
    size_t blocks_kept = g->recompute == RECOMPUTE_BLOCK ? 1 : L;
    size_t per_token = L * C*X                                                 // res1
                     + blocks_kept * (15*C*X + (4 + (size_t)c.NH) * 4)         // the rest of a block, float statistics
                     + 9*C*X + 3 * sizeof(float) + 2 * sizeof(int);            // outside the blocks
    memset(bytes, 0, MEMORY_KINDS * sizeof bytes[0]);
    bytes[MEMORY_PARAMETERS] = 4 * own;
    bytes[MEMORY_GRADIENTS] = reduce_size(&g->options) * own;
    bytes[MEMORY_OPTIMIZER] = 8 * own;
    shards_predict_offload(&g->options, own, bytes); // moves these three to MEMORY_OFFLOADED
    bytes[MEMORY_ACTIVATIONS] = BT * per_token + (size_t)g->logits_rows * (size_t)c.Vp * X + sizeof(StepStats);
    bytes[MEMORY_COMMUNICATION] = layout_comm_bytes(&g->options, g->dp);
    bytes[MEMORY_COMMUNICATION] += bucket_element_bytes(&g->options) * in_buckets + X * in_gather_buffers;
    bytes[MEMORY_WORKSPACE] = layers_workspace_bytes(gpt2_shapes(g));
    bytes[MEMORY_SNAPSHOT] = (g->options.offload && NEEDS_MASTER ? 14 : 12) * own; // fp32 weights, moments
}

// Returns the bytes that this rank will send per step.
// Each reduce-scatter and each all-gather sends S-1 shards of every group. Groups that stay gathered after their
// forward pass are gathered once per step, the rest twice per micro-batch. Replicas all-reduce every shard once.
static double gpt2_predict_sent(const GPT2* g) {
    double S = g->options.shards, N = g->dp->size, R = N / S, A = g->accumulation;
    double own = (double)g->layout.own_elements, root = (double)g->layout.groups[0].shard.n;
    double freed = reshards_after_forward(&g->options) ? own - root : 0; // after the forward pass
    double gathered = (own - freed + 2 * A * freed) * sizeof(floatX), grads = own * (double)reduce_size(&g->options);
    return (S - 1) * (gathered + A * grads) + 2 * (R - 1) / R * grads
         + 2 * (N - 1) / N * STEP_SUMS * sizeof(double) + 2 * 2 * (S - 1) / S * sizeof(double);
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

// Returns a free gather buffer for a group, or NO_BUFFER. A group that stays until the update has a buffer of its own;
// others take any.
static int find_free_buffer(GPT2* g, int k) {
    if (k == 0 || !reshards_after_forward(&g->options)) return k;
    for (int r = 1; r < g->num_gather_buffers; r++) if (g->gather_buffers[r].group == NO_GROUP) return r;
    return NO_BUFFER;
}

// Begins to gather a group's parameters, unless they are there or on their way. The gather waits for all layer calls
// that have been issued, because these may still read the gather buffer. Weights are kept in fp32, and a gather sends
// them rounded to floatX.
static void group_gather(GPT2* g, int k) {
    Group* group = &g->layout.groups[k];
    if (group->buffer != NO_BUFFER) return;
    group->buffer = find_free_buffer(g, k);
    invariant(group->buffer != NO_BUFFER, "no gather buffer for group %d: all %d are taken", k, g->num_gather_buffers);
    g->gather_buffers[group->buffer].group = k;
    floatX* whole = g->gather_buffers[group->buffer].params;
    const floatX* mine = shards_rounded(&g->state, whole, group->shard); // in 16 bits: into its place in `whole`
    g->gathering[k] = comm_all_gather(g->layout.shard_ranks, whole, mine, group->shard.n, COMM_FLOATX);
}

// Begins to gather the groups that come after unit u's (0 1 2 3 forward, 0 3 2 1 backward), as far as there are free
// gather buffers, if the options name this moment: FORWARD_PRE is before unit u's forward pass (--forward-prefetch),
// BACKWARD_PRE before its backward pass (--prefetch backward-pre), BACKWARD_POST after it, in grad_ready.
// A backward pass with the defaults, where a root and three groups share two gather buffers, x and y:
//     layers        | head       | group 3    | group 2    | group 1    | embedding  | gpt2_reduce
//     all-gathers   | of 3, to x | of 2, to y | of 1, to x |            |            |
//     reductions    |            |            | of 3       | of 2       | of 1       | of the root
static void gather_ahead(GPT2* g, GatherMoment moment, int u) {
    if (!gathers_at(&g->options, moment)) return;
    for (int d = 1; d < g->options.limit_all_gathers; d++) { // one buffer is for the group in use
        int next = group_after(&g->layout, moment, g->layout.group_of[u], d);
        if (next == NO_GROUP) return;
        if (g->layout.groups[next].buffer == NO_BUFFER && find_free_buffer(g, next) == NO_BUFFER) return;
        group_gather(g, next);
    }
}

// Two buckets take turns, so that one can be sent while the other is filled. The root's is filled all along.
static Bucket* group_bucket(GPT2* g, int k) { return &g->buckets[k == 0 ? 0 : 1 + (k - 1) % 2]; }

// Waits until the gradients of a bucket have been reduced. Then its memory may be used again. If the model has several
// replicas, begins to sum this rank's shard over them, after the last micro-batch. gpt2_reduce waits for that.
static void bucket_finish(GPT2* g, Bucket* b) {
    if (b->reduced == NO_OP) return;
    Comm* replicas = g->layout.replicas;
    Shard shard = g->layout.groups[b->group].shard;
    comm_finish(g->layout.shard_ranks, &b->reduced); // waits unless it is NO_OP, and sets it to NO_OP
    if (b->adds) shards_add_grads(&g->state, b->own_sum, shard);
    if (!b->last_micro || replicas->size == 1) return;
    void* grads = shards_grads(&g->state, shard);
    g->replicating[b->group] = comm_all_reduce(replicas, grads, shard.n, g->state.grad_type);
}

// The backward pass calls this when the gradient of tensor i of unit u is complete. The last tensor of a group starts
// its reduction. The sum of the first micro-batch goes straight into this rank's shard, and later ones into its part of
// the bucket, from where bucket_finish adds them to the shard.
static void grad_ready(GPT2* g, int u, int i) {
    (void)i;
    int k = g->layout.group_of[u];
    Bucket* b = group_bucket(g, k);
    if (--b->missing > 0) return; // not all its gradients are final
    if (u > 0) gather_ahead(g, BACKWARD_POST, u); // before the reduction, which is needed later
    Shard shard = g->layout.groups[k].shard;
    void* sent = grads_as_sent(&g->state, b->grads, shard); // in --reduce-dtype
    b->group = k;
    b->adds = !g->first_micro;
    b->last_micro = g->last_micro;
    void* own_part = shards_own_part(&g->state, sent, shard); // of the bucket: a sum in place
    b->own_sum = b->adds ? own_part : shards_grads(&g->state, shard);
    b->reduced = comm_reduce_scatter(g->layout.shard_ranks, b->own_sum, sent, shard.n, g->state.grad_type);
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
// Gathers their group, unless that has been done ahead.
static floatX* unit_params(GPT2* g, int u) {
    int k = g->layout.group_of[u];
    Group* group = &g->layout.groups[k];
    group_gather(g, k);
    comm_finish(g->layout.shard_ranks, &g->gathering[k]);
    return g->gather_buffers[group->buffer].params + g->units[u].offset;
}

static void group_free(GPT2* g, Group* group) {
    if (group->buffer != NO_BUFFER) g->gather_buffers[group->buffer].group = NO_GROUP;
    group->buffer = NO_BUFFER;
    group->released = 0;
}

// Ends the use of unit u's parameters until the next unit_params. The last unit of a group frees its gather buffer. The
// root, and groups that are not resharded after their forward pass, stay until the update.
static void unit_release(GPT2* g, int u) {
    int k = g->layout.group_of[u];
    Group* group = &g->layout.groups[k];
    if (k == 0 || !reshards_after_forward(&g->options)) return;
    if (++group->released == group->num_units) group_free(g, group);
}

// Returns the memory for the gradients of unit u. The first unit of a group waits until the bucket's old gradients have
// been reduced, and starts the count of missing gradients.
static floatX* unit_grads(GPT2* g, int u) {
    int k = g->layout.group_of[u];
    Bucket* b = group_bucket(g, k);
    if (b->missing == 0) { // this is the first unit of its group
        bucket_finish(g, b); // the backward pass would overwrite what is still being sent
        b->missing = g->layout.groups[k].tensors;
        // No layer writes padding, or wpe behind T. Here another group may have, and the norm would count that.
        layout_zero_unwritten(&g->layout, g->config, g->T, k, b->grads);
    }
    return b->grads + g->units[u].offset;
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
    gather_ahead(g, FORWARD_PRE, 0);
    embedding_forward(g, root);
    const floatX *x = g->acts[0].res1, *branch = NULL;
    for (int l = 0; l < g->config.L; l++) {
        trace_compute("forward, block", l);
        AttentionParams attention = attention_view(g, unit_params(g, attention_unit(l)));
        gather_ahead(g, FORWARD_PRE, attention_unit(l));
        block_attention_forward(g, attention, g->acts[l], x, branch);
        unit_release(g, attention_unit(l));
        MlpParams mlp = mlp_view(g, unit_params(g, mlp_unit(l)));
        gather_ahead(g, FORWARD_PRE, mlp_unit(l));
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
    gather_ahead(g, BACKWARD_PRE, 0);
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
        gather_ahead(g, BACKWARD_PRE, mlp);
        block_mlp_backward(g, mlp, m, dm, g->acts[l]);
        unit_release(g, mlp);
        AttentionParams a = attention_view(g, unit_params(g, attention));
        AttentionParams da = attention_view(g, unit_grads(g, attention));
        gather_ahead(g, BACKWARD_PRE, attention);
        block_attention_backward(g, attention, a, da, g->acts[l]);
        unit_release(g, attention);
    }
    embedding_backward(g, droot);
    unit_release(g, 0);
}

// Call before working on micro-batch `micro` of a step.
// Each micro-batch overwrites the buckets, and only shards are added up. The first one frees the gather buffers,
// except the root's: an evaluation may have left groups in them, and every step is to send the same bytes.
static void gpt2_begin_micro(GPT2* g, int micro) {
    g->grad_mode = GRAD_SET;
    g->first_micro = micro == 0;
    g->last_micro = micro == g->accumulation - 1;
    if (!g->first_micro) return;
    for (int k = 1; k < g->layout.num_groups; k++) group_free(g, &g->layout.groups[k]);
}

// Call after the backward pass. On return, this rank's shards of the gradients are means over the global batch times
// the loss scale. g->stats->loss is the sum over the global batch. train_step explains why a sum of gradients is
// already their mean.
static void gpt2_reduce(GPT2* g) {
    trace_compute("wait for gradients", -1);
    CommOp loss = comm_all_reduce(g->dp, &g->stats->loss, STEP_SUMS, COMM_F64);
    for (int k = 0; k < g->num_buckets; k++) bucket_finish(g, &g->buckets[k]);
    for (int k = 0; k < g->layout.num_groups; k++) comm_finish(g->layout.replicas, &g->replicating[k]);
    comm_wait(g->dp, loss);
}

// Begins to gather the root, because the next forward pass needs it first.
static void gpt2_gather(GPT2* g) {
    group_gather(g, 0);
}

// Waits for the gathers after the last update, unless a forward pass has done so.
static void gpt2_gather_finish(GPT2* g) {
    comm_finish(g->layout.shard_ranks, &g->gathering[0]);
}

// ----------------------------------------------------------------------------
// 6. the optimizer

// Computes the global gradient norm and the factor by which AdamW scales the gradients. Both stay on the device.
static void gpt2_clip(GPT2* g, float max_norm, float loss_scale) {
    shards_add_grad_squares(&g->state, &g->stats->grad_square);
    comm_wait(g->layout.shard_ranks, comm_all_reduce(g->layout.shard_ranks, &g->stats->grad_square, 1, COMM_F64));
    clip_gradients(g->stats, max_norm, loss_scale);
}

// Calls AdamW once per range, and sums the squares of the new parameters for their norm. The all-reduce of the norm is
// issued first, so that it does not queue behind the gathers.
static void gpt2_update(GPT2* g, AdamW adamw) {
    snapshot_hold(); // it may still be copying what changes now
    for (int k = 0; k < g->layout.num_groups; k++) group_free(g, &g->layout.groups[k]); // what is still there gets old
    for (int i = 0; i < g->num_ranges; i++) shards_adamw_update(&g->state, adamw, g->ranges[i], g->stats);
    shards_add_param_squares(&g->state, &g->stats->param_square);
    Comm* shard_ranks = g->layout.shard_ranks;
    CommOp square = comm_all_reduce(shard_ranks, &g->stats->param_square, 1, COMM_F64); // before the gathers
    gpt2_gather(g);
    comm_wait(shard_ranks, square);
}

// ----------------------------------------------------------------------------
// 7. weights and state: initial, loaded, saved

// Sets the weights: random, or from a checkpoint. A resumed run loads its whole state.
static void gpt2_load(GPT2* g, Run* run) {
    ranks_load(run, g->ranges, g->num_ranges);
    shards_loaded(&g->state); // with --cpu-offload optimizer: copies the weights to the device
    gpt2_gather(g);
}

// Nothing is gathered: ranks write their shards. (gpt2_configure chooses the ranks.)
static void gpt2_save(GPT2* g, Run* run, long long step) {
    ranks_save(run, step, g->ranges, g->num_ranges);
}

// ----------------------------------------------------------------------------
// 8. training

// Declares the options of this program.
static void gpt2_options(GPT2* g, Run* run) {
    run_options(run, "train_gpt2_fsdp",
                "train GPT-2 with FSDP: each rank stores a part of everything, and gathers parameters ahead of use");
    options_ranks(run);
    options_sharding(&run->table, &g->options);
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
    sharding_check(&g->options, g->dp->size, g->accumulation);
    gpt2_init_units(g);
    run->ranks->share.writer = g->dp->rank < g->options.shards ? g->dp->rank : -1; // only the first replica saves
    run->ranks->share.writers = g->options.shards;
    run->ranks->share.sharded = g->options.checkpoint == CHECKPOINT_SHARDED;
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
    ranks_report(run);
    report_sharding(&g->layout, &g->options, g->dp->size);
}

// Call after the last step. Returns true if all measurements agree with the predictions.
static bool gpt2_end(GPT2* g, Run* run) {
    gpt2_gather_finish(g);
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
