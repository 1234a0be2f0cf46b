/*
Train GPT-2 on several nodes with ZeRO++ (Wang et al., arXiv 2306.10209): fully sharded, and of what ranks send little crosses between
nodes, in few bits. N ranks are K nodes of g ranks each (llmc/parallel/zeropp.h, which also says who has which shard).

Weights cross once a step, in int8 (the paper's qwZ): after the update ranks with the same number on their nodes gather their shards. So
each node has all weights, of which a rank keeps 1/g (hpZ), and all gathers stay within nodes. Gradients cross in int4, in two hops (qgZ): a
rank adds up its part of what its node has, then of that, with its like on other nodes, its shard. Sums, shards and AdamW are fp32.

Memory    per rank, in bytes, with P parameters in matrices: 16P/N, weights as they travel P/g * 260/256, and activations. 1-D tensors, V
          elements, are on every rank: 20V. Gather buffers: as fsdp's, also as they travel. Buckets: as fsdp's in floatX, and
          messages to and fro; fp32 sums of 1/g of the largest.
Sent      per rank and step with A micro-batches, in bytes, where w = 260/256 (none: floatX) and q = 132/256 (int8: 260/256, none: 4):
          between nodes w (K-1)P/N + Aq (K-1)P/N + 8V/g (K-1)/K; within a node, full: w (A(2P - 2root) + root) (g-1)/g, grad-op:
          wP (g-1)/g; and (AqP + 8V) (g-1)/g. Also three doubles.
Run       make train_gpt2_zeropp && mpirun -np 4 ./train_gpt2_zeropp --node-ranks 2       (--help lists the options)
Before    train_gpt2_fsdp.cu: the same groups, gather buffers and gathers ahead of use, without replicas and offload.
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
#include "llmc/comm/comm.h"            // defines: Comm, CommOp, comm_reduce_scatter, comm_all_gather, comm_wait
#include "llmc/data/dataloader.h"      // defines: DataLoader, dataloader_next
#include "llmc/parallel/layout.h"      // defines: Sharding, Layout, Group, options_sharding, comm_finish
#include "llmc/parallel/shard_state.h" // defines: Shards: this rank's state, on the device or the host
#include "llmc/parallel/zeropp.h"      // defines: ZeroPP: nodes, what travels as what, and 1-D tensors
#include "llmc/run/trace.h"            // defines: trace_compute, trace_step
#include "llmc/run/run.h"              // defines: Run: options, data, log, checkpoints and reports, alike in all stages
#include "llmc/run/ranks_run.h"        // defines: ranks_start, ranks_load, ...: what several ranks add to a run
#include "llmc/run/predict.h"          // defines: run_predict

// ----------------------------------------------------------------------------
// 2. the model: views of its parameters

// Views carve named tensors out of a unit's memory, in the order of llmc/model/gpt2.h. They own nothing. Gradients use the
// same views. A block's attention and its MLP, each with the layernorm before it, are units of their own.
typedef struct { floatX *vectors, *matrices; } UnitMemory; // its 1-D tensors, and its 2-D ones, which are gathered
typedef struct { floatX *lnfw, *lnfb, *wpe, *wte; } RootParams; // (C) (C) (max_T,C) (Vp,C)
typedef struct { floatX *ln1w, *ln1b, *qkvb, *projb, *qkvw, *projw; } AttentionParams; // (C) (C) (3C) (C) (3C,C) (C,C)
typedef struct { floatX *ln2w, *ln2b, *fcb, *fcprojb, *fcw, *fcprojw; } MlpParams;      // (C) (C) (4C) (C) (4C,C) (C,4C)

static RootParams root_view(GPT2Config c, UnitMemory unit) {
    size_t C = (size_t)c.C;
    floatX* base = unit.vectors;
    RootParams p;
    p.lnfw = base; base += C;
    p.lnfb = base; base = unit.matrices;
    p.wpe  = base; base += (size_t)c.max_T*C;
    p.wte  = base;
    return p;
}

static AttentionParams attention_view(GPT2Config c, UnitMemory unit) {
    size_t C = (size_t)c.C;
    floatX* base = unit.vectors;
    AttentionParams p;
    p.ln1w    = base; base += C;
    p.ln1b    = base; base += C;
    p.qkvb    = base; base += 3*C;
    p.projb   = base; base = unit.matrices;
    p.qkvw    = base; base += 3*C*C;
    p.projw   = base;
    return p;
}

static MlpParams mlp_view(GPT2Config c, UnitMemory unit) {
    size_t C = (size_t)c.C;
    floatX* base = unit.vectors;
    MlpParams p;
    p.ln2w    = base; base += C;
    p.ln2b    = base; base += C;
    p.fcb     = base; base += 4*C;
    p.fcprojb = base; base = unit.matrices;
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
} BlockActs;

typedef enum { PASS_FORWARD, PASS_HEAD, PASS_BACKWARD } Pass;

// A group's whole gradients, and those on their way to every rank's shard, which may still be an earlier group's.
typedef struct {
    floatX* grads;                  // (S,shard) owned
    char *sent, *received;          // (S,shard) messages of either hop, owned
    int group;                      // whose they are
    int missing;                    // how many of its tensors' gradients are not final yet
    CommOp hop;                     // the all-to-all, while it is under way; else NO_OP
    int rows;                       // in the last hop: how many rows of shards are received; else 0
    Shard shard;                    // of the group that is on its way,
    bool first;                     // from the step's first micro-batch
} Bucket;

// Holds the parameters of one group at a time.
typedef struct {
    floatX* params;                 // (S,shard) owned
    char* arrived;                  // (S,shard) as they travel, behind params; params where that is the same
    int group;                      // whose they are, NO_GROUP after its release
} GatherBuffer;

typedef struct {
    GPT2Config config;
    int max_B, seq_len;             // largest micro-batch: max_B sequences of seq_len tokens
    int B, T;                       // of the current micro-batch
    Pass pass;                      // what is being computed
    int recompute;                  // RECOMPUTE_NONE or RECOMPUTE_BLOCK
    int num_units;                  // L + 1
    Sharding options;
    Layout layout;                  // units, groups, and the S ranks that share a replica of the model
    Shards state;                   // this rank's shards of all groups, (num_sharded) each
    ZeroPP zpp;                     // nodes, what they have of the weights, and 1-D tensors
    int num_ranges, shard_ranges;   // how many there are; how many are of shards: those before the 1-D tensors'
    ParamRange ranges[2*MAX_FSDP_UNITS];         // this rank's shards, as the optimizer and checkpoints walk them; views
    GradMode grad_mode;             // whether this micro-batch's gradients overwrite or add
    BlockActs acts[MAX_UNITS];      // acts[l] for block l, owned; with recomputation the blocks share all but res1
    floatX *branch;                 // (B,T,C) a block's output that is not yet added to the residual stream
    floatX *resf, *lnf;             // (B,T,C) (B,T,C) before and after the final layernorm
    float *lnf_mean, *lnf_rstd;     // (B,T) (B,T)
    int logits_rows;                // rows of logits that exist at a time
    floatX *logits;                 // (logits_rows,Vp)
    float *losses;                  // (B,T)
    floatX *dres, *dbtc, *dbt4c;    // (B,T,C) gradient of the residual stream; (B,T,C) and (B,T,4C) scratch
    int *inputs, *targets;          // (B,T)
    StepStats *stats;               // on the device, read once a step
    Comm* dp;                       // the data-parallel ranks, not owned
    int accumulation;               // micro-batches per step
    bool first_micro, last_micro;   // the current micro-batch is the step's first; its last
    int num_buckets;
    Bucket buckets[3];              // the root's, and two that the other groups take in turn
    Bucket* last;                   // the one in its first hop; NULL: none
    CommOp gathering[MAX_FSDP_UNITS];            // the all-gather of a group's parameters, while it is under way
    CommOp refreshing[MAX_FSDP_UNITS];           // the same between nodes, after the update
    int num_gather_buffers;
    GatherBuffer gather_buffers[MAX_FSDP_UNITS]; // the root's, and those that other groups take in turn
} GPT2;

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

static void gpt2_init_params(GPT2* g) {
    layout_cut(&g->layout, &g->options, g->config);
    shards_init(&g->state, &g->options, g->dp, g->layout.num_sharded, g->accumulation > 1);
    zeropp_init(&g->zpp, &g->layout, g->config, g->dp, shard_sizes(g->config, &g->options));
    for (int k = 0; k < g->layout.num_groups; k++) g->gathering[k] = g->refreshing[k] = NO_OP;
}

// Lists what this rank keeps of the model, and where: its shard of every group, without padding, and all 1-D tensors.
static void gpt2_init_ranges(GPT2* g) {
    for (int i = 0; i < 2 * g->layout.num_units; i++) { // two runs of elements each
        ParamRange p;
        size_t at;
        if (!layout_range(&g->layout, g->config, i / 2, i % 2, &p, &at)) continue; // it is in other ranks' shards
        shards_place(&g->state, &p, at);
        g->ranges[g->num_ranges++] = p;
    }
    g->shard_ranges = g->num_ranges;
    for (int u = 0; u < g->num_units; u++) g->ranges[g->num_ranges++] = vectors_range(&g->zpp.vectors, g->config, u, g->dp->rank);
}

static void gpt2_init_acts(GPT2* g) {
    GPT2Config c = g->config;
    size_t BT = (size_t)g->max_B * (size_t)g->seq_len, C = (size_t)c.C;
    for (int l = 0; l < c.L; l++) {
        if (l > 0 && g->recompute == RECOMPUTE_BLOCK) g->acts[l] = g->acts[0];
        else block_acts_init(&g->acts[l], c, BT);
        g->acts[l].res1 = acts_alloc(BT*C);
    }
    g->branch = acts_alloc(BT*C);
    g->resf = acts_alloc(BT*C);
    g->lnf = acts_alloc(BT*C);   g->lnf_mean = stats_alloc(BT); g->lnf_rstd = stats_alloc(BT);
    g->logits_rows = classifier_rows((int)BT, c.Vp);
    g->logits = acts_alloc((size_t)g->logits_rows * (size_t)c.Vp);
    g->losses = stats_alloc(BT);
    g->dres = acts_alloc(BT*C);
    g->dbtc = acts_alloc(BT*C);
    g->dbt4c = acts_alloc(BT*4*C);
    g->inputs = (int*)device_alloc(BT * sizeof(int), MEMORY_ACTIVATIONS);
    g->targets = (int*)device_alloc(BT * sizeof(int), MEMORY_ACTIVATIONS);
    g->stats = (StepStats*)device_alloc(sizeof(StepStats), MEMORY_ACTIVATIONS);
}

// Allocates memory for whole gradients and parameters while they are needed. Groups take the last two buckets in turn, of which each
// has room for its first group.
static void gpt2_init_buckets(GPT2* g) {
    ShardSizes own = shard_sizes(g->config, &g->options);
    size_t S = (size_t)g->layout.shard_ranks->size;
    g->num_buckets = g->layout.num_groups < 3 ? g->layout.num_groups : 3;
    g->num_gather_buffers = 1 + (int)sharding_buffers(&g->options, own);
    for (int k = 0; k < g->num_buckets; k++) {
        Bucket* b = &g->buckets[k];
        size_t whole = S * g->layout.groups[k].shard.n;
        b->grads = (floatX*)device_alloc(whole * sizeof(floatX), MEMORY_COMMUNICATION);
        b->sent = (char*)device_alloc(2 * gradient_bytes(&g->zpp, whole), MEMORY_COMMUNICATION);
        b->received = b->sent + gradient_bytes(&g->zpp, whole);
        b->hop = NO_OP;
    }
    for (int r = 0; r < g->num_gather_buffers; r++) {
        bool has_any = r > 0 && reshards_after_forward(&g->options);
        size_t whole = S * (has_any ? own.other : g->layout.groups[r].shard.n);
        size_t bytes = whole * sizeof(floatX), packed = g->zpp.weight_bits ? weight_bytes(&g->zpp, whole) : 0;
        g->gather_buffers[r].params = (floatX*)device_alloc(bytes + packed, MEMORY_COMMUNICATION);
        g->gather_buffers[r].arrived = (char*)g->gather_buffers[r].params + (packed ? bytes : 0);
        g->gather_buffers[r].group = NO_GROUP;
    }
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
    gpt2_init_buckets(g);
    layers_init(gpt2_shapes(g));
}

static void gpt2_free(GPT2* g) {
    layers_free();
    shards_free(&g->state);
    for (int l = 0; l < g->config.L; l++) {
        BlockActs a = g->acts[l];
        device_free(a.res1);
        if (l > 0 && g->recompute == RECOMPUTE_BLOCK) continue; // the rest belongs to block 0
        device_free(a.ln1); device_free(a.qkv); device_free(a.atty); device_free(a.res2); device_free(a.ln2);
        device_free(a.fch); device_free(a.gelu); device_free(a.ln1_mean); device_free(a.ln1_rstd);
        device_free(a.att_stats); device_free(a.ln2_mean); device_free(a.ln2_rstd);
    }
    device_free(g->branch); device_free(g->resf); device_free(g->lnf); device_free(g->lnf_mean); device_free(g->lnf_rstd);
    device_free(g->logits); device_free(g->losses); device_free(g->dres); device_free(g->dbtc); device_free(g->dbt4c);
    device_free(g->inputs); device_free(g->targets); device_free(g->stats);
    for (int k = 0; k < g->num_buckets; k++) { device_free(g->buckets[k].grads); device_free(g->buckets[k].sent); }
    for (int r = 0; r < g->num_gather_buffers; r++) device_free(g->gather_buffers[r].params);
    zeropp_free(&g->zpp);
}

// Bytes by kind that gpt2_init will allocate, from formulas: a run compares them with what it measured.
static void gpt2_predict_memory(const GPT2* g, size_t bytes[MEMORY_KINDS]) {
    GPT2Config c = g->config;
    ShardSizes own = shard_sizes(c, &g->options);
    size_t S = (size_t)g->options.shards, X = sizeof(floatX);
    size_t buckets = S * (own.root + own.pair), gathered = S * sharding_gathered(&g->options, own);
    size_t BT = (size_t)g->max_B * (size_t)g->seq_len, C = (size_t)c.C, L = (size_t)c.L;
    size_t blocks_kept = g->recompute == RECOMPUTE_BLOCK ? 1 : L;
    size_t per_token = L * C*X                                                 // res1
                     + blocks_kept * (15*C*X + (4 + (size_t)c.NH) * 4)         // the rest of a block, its float statistics
                     + 9*C*X + 3 * sizeof(float) + 2 * sizeof(int);            // outside the blocks
    memset(bytes, 0, MEMORY_KINDS * sizeof bytes[0]);
    shards_predict(&g->options, own.all, g->accumulation > 1, bytes);
    bytes[MEMORY_ACTIVATIONS] = BT * per_token + (size_t)classifier_rows((int)BT, c.Vp) * (size_t)c.Vp * X
                              + sizeof(StepStats);
    zeropp_predict(&g->zpp, c, g->dp, own, bytes);
    bytes[MEMORY_COMMUNICATION] += X * buckets + 2 * gradient_bytes(&g->zpp, buckets);
    bytes[MEMORY_COMMUNICATION] += X * gathered + (g->zpp.weight_bits ? weight_bytes(&g->zpp, gathered) : 0);
    bytes[MEMORY_WORKSPACE] = layers_workspace_bytes(gpt2_shapes(g));
}

// Bytes that this rank will send per step. Within its node it sends K shards of every group to each other rank: gradients in each
// micro-batch, weights once a step if they stay gathered after their forward pass, and the rest twice a micro-batch.
// Three doubles are summed as well: the loss, and two norms.
static double gpt2_predict_sent(const GPT2* g) {
    ShardSizes own = shard_sizes(g->config, &g->options);
    size_t A = (size_t)g->accumulation, K = (size_t)g->zpp.nodes, others = (size_t)g->zpp.ranks - 1;
    size_t returns = reshards_after_forward(&g->options) ? own.all - own.root : 0;
    size_t rows = K * (weight_bytes(&g->zpp, own.all - returns + 2 * A * returns) + A * gradient_bytes(&g->zpp, own.all));
    return between_nodes(&g->zpp, g->config, &g->options, g->accumulation).all + (double)(others * rows)
         + ring_bytes((double)(vectors_size(&g->zpp, g->config) * sizeof(float)), g->zpp.ranks)
         + 3 * ring_bytes(sizeof(double), g->dp->size);
}

// ----------------------------------------------------------------------------
// 4. one transformer block

// Computes everything in a block's forward pass that its backward pass needs, in two halves. The block's input is x + branch.
// branch NULL: the input is x alone, which is then a.res1 itself.
static void block_attention_activations(GPT2* g, AttentionParams p, BlockActs a, const floatX* x, const floatX* branch) {
    int B = g->B, T = g->T, C = g->config.C, NH = g->config.NH, BT = B * T;
    residual_layernorm_forward(a.res1, a.ln1, a.ln1_mean, a.ln1_rstd, x, branch, p.ln1w, p.ln1b, BT, C);
    matmul_forward(a.qkv, a.ln1, p.qkvw, p.qkvb, BT, C, 3*C);
    attention_forward(a.atty, a.att_stats, a.qkv, B, T, C, NH);
    matmul_forward(g->branch, a.atty, p.projw, p.projb, BT, C, C);
}
static void block_mlp_activations(GPT2* g, MlpParams p, BlockActs a) {
    int BT = g->B * g->T, C = g->config.C;
    residual_layernorm_forward(a.res2, a.ln2, a.ln2_mean, a.ln2_rstd, a.res1, g->branch, p.ln2w, p.ln2b, BT, C);
    matmul_gelu_forward(a.gelu, a.fch, a.ln2, p.fcw, p.fcb, BT, C, 4*C);
}

// The block's output is the pair a.res2, g->branch: the next layernorm adds the two.
static void block_mlp_forward(GPT2* g, MlpParams p, BlockActs a) {
    int BT = g->B * g->T, C = g->config.C;
    block_mlp_activations(g, p, a);
    matmul_forward(g->branch, a.gelu, p.fcprojw, p.fcprojb, BT, 4*C, C);
}

// Returns a free room for a group, or NO_BUFFER. A group that stays until its backward pass has its own, others take any.
static int find_free_buffer(GPT2* g, int k) {
    bool has_own = k == 0 || !reshards_after_forward(&g->options);
    for (int r = has_own ? k : 1; r < g->num_gather_buffers; r++) if (g->gather_buffers[r].group == NO_GROUP) return r;
    return NO_BUFFER;
}

// Begins to gather a group's parameters, unless they are there or on their way. Layer calls that have been issued may still
// read the gather buffer: the gather waits for them.
static void group_gather(GPT2* g, int k) {
    Group* group = &g->layout.groups[k];
    if (group->buffer != NO_BUFFER) return;
    group->buffer = find_free_buffer(g, k);
    invariant(group->buffer != NO_BUFFER, "no room to gather group %d: all %d are taken", k, g->num_gather_buffers);
    g->gather_buffers[group->buffer].group = k;
    comm_finish(&g->zpp.across, &g->refreshing[k]); // other nodes' shards would be those before the update
    g->gathering[k] = secondary_gather(&g->zpp, &g->state, g->gather_buffers[group->buffer].arrived, group->shard);
}

// Begins to gather what comes after group k, as far ahead as there are gather buffers. Forward 0, 1, 2, ...; backward 0, ..., 2, 1.
static void gather_ahead(GPT2* g, int k) {
    int last = g->layout.num_groups - 1;
    for (int d = 1; d < g->options.limit_all_gathers; d++) {
        int next = g->pass == PASS_FORWARD ? k + d : k == 0 ? last + 1 - d : k - d;
        if (next < 1 || next > last) return;
        if (g->layout.groups[next].buffer == NO_BUFFER && find_free_buffer(g, next) == NO_BUFFER) return;
        group_gather(g, next);
    }
}

static Bucket* group_bucket(GPT2* g, int k) { return &g->buckets[k == 0 ? 0 : 1 + (k - 1) % 2]; }

// Begins a hop of a bucket's gradients: x (rows,n) of type t is packed, and each rank of c gets its part of the rows from all.
static void bucket_hop(GPT2* g, Bucket* b, Comm* c, const void* x, DType t, int rows) {
    size_t n = (size_t)rows * b->shard.n;
    pack_gradients(&g->zpp, b->sent, x, t, n);
    comm_trace_data(c, g->state.params + b->shard.at, b->shard.n * sizeof(float)); // whose gradients they are
    b->hop = comm_all_to_all(c, b->received, b->sent, gradient_bytes(&g->zpp, n) / (size_t)c->size, COMM_BYTE);
}

// Ends the first hop of the last group, if it is under way, and begins its second: what this rank has of its node's sum goes to the
// nodes where it is kept. On one node it is there.
static void bucket_turn(GPT2* g) {
    Bucket* b = g->last;
    if (b == NULL) return;
    g->last = NULL;
    comm_finish(&g->zpp.node, &b->hop);
    b->rows = g->zpp.nodes > 1 ? g->zpp.nodes : g->zpp.ranks;
    if (g->zpp.nodes == 1) return;
    sum_gradients(&g->zpp, g->zpp.sum, b->received, g->zpp.ranks, (size_t)g->zpp.nodes * b->shard.n);
    bucket_hop(g, b, &g->zpp.across, g->zpp.sum, DTYPE_F32, g->zpp.nodes);
}

// Waits for the last hop of a bucket's gradients, and adds them to this rank's shard.
static void bucket_finish(GPT2* g, Bucket* b) {
    if (b->rows == 0) return;
    float* grads = (float*)g->state.grads + b->shard.at;
    comm_finish(&g->zpp.across, &b->hop);
    sum_gradients(&g->zpp, b->first ? grads : g->zpp.sum, b->received, b->rows, b->shard.n);
    if (!b->first) add_in_place_fp32(grads, g->zpp.sum, b->shard.n);
    b->rows = 0;
}

// The backward pass calls this when the gradient of tensor i of unit u is complete. After its last tensor a group begins its first
// hop, and the group before it its second: each has the time of a group's backward pass.
static void grad_ready(GPT2* g, int u, int i) {
    (void)i;
    int k = g->layout.group_of[u];
    Bucket* b = group_bucket(g, k);
    if (--b->missing > 0) return;
    if (k > 0 && g->options.prefetch == PREFETCH_POST) gather_ahead(g, k); // first, because the reduction is needed later
    bucket_turn(g);
    bucket_finish(g, b); // its messages are needed
    b->shard = g->layout.groups[k].shard;
    b->first = g->first_micro;
    bucket_hop(g, b, &g->zpp.node, b->grads, FLOATX_DTYPE, g->dp->size);
    g->last = b;
}

// g->dres holds the gradient of the block's output on entry; of res2 when the first of the two returns, of the block's input at last.
static void block_mlp_backward(GPT2* g, int u, MlpParams p, MlpParams dp, BlockActs a) {
    int BT = g->B * g->T, C = g->config.C;
    GradMode mode = g->grad_mode;
    floatX* dgelu = g->dbt4c;
    // out = res2 + gelu(fch) fcprojw^T + fcprojb
    matmul_backward_weight(dp.fcprojw, dp.fcprojb, g->dres, a.gelu, BT, 4*C, C, mode);
    grad_ready(g, u, FCPROJW);
    grad_ready(g, u, FCPROJB);
    matmul_gelu_backward_input(dgelu, g->dres, p.fcprojw, a.fch, BT, 4*C, C);
    // fch = ln2 fcw^T + fcb
    matmul_backward_weight(dp.fcw, dp.fcb, dgelu, a.ln2, BT, C, 4*C, mode);
    grad_ready(g, u, FCW);
    grad_ready(g, u, FCB);
    matmul_backward_input(g->dbtc, dgelu, p.fcw, BT, C, 4*C);
    // ln2 = layernorm(res2)
    layernorm_backward(g->dres, dp.ln2w, dp.ln2b, g->dbtc, a.res2, p.ln2w, a.ln2_mean, a.ln2_rstd, BT, C, mode);
    grad_ready(g, u, LN2W);
    grad_ready(g, u, LN2B);
}
static void block_attention_backward(GPT2* g, int u, AttentionParams p, AttentionParams dp, BlockActs a) {
    int B = g->B, T = g->T, C = g->config.C, NH = g->config.NH, BT = B * T;
    GradMode mode = g->grad_mode;
    floatX* dqkv = g->dbt4c;
    // res2 = res1 + atty projw^T + projb
    matmul_backward_weight(dp.projw, dp.projb, g->dres, a.atty, BT, C, C, mode);
    grad_ready(g, u, PROJW);
    grad_ready(g, u, PROJB);
    matmul_backward_input(g->dbtc, g->dres, p.projw, BT, C, C);
    // atty = attention(qkv)
    attention_backward(dqkv, g->dbtc, a.qkv, a.atty, a.att_stats, B, T, C, NH);
    // qkv = ln1 qkvw^T + qkvb
    matmul_backward_weight(dp.qkvw, dp.qkvb, dqkv, a.ln1, BT, C, 3*C, mode);
    grad_ready(g, u, QKVW);
    grad_ready(g, u, QKVB);
    matmul_backward_input(g->dbtc, dqkv, p.qkvw, BT, C, 3*C);
    // ln1 = layernorm(res1)
    layernorm_backward(g->dres, dp.ln1w, dp.ln1b, g->dbtc, a.res1, p.ln1w, a.ln1_mean, a.ln1_rstd, BT, C, mode);
    grad_ready(g, u, LN1W);
    grad_ready(g, u, LN1B);
}

// ----------------------------------------------------------------------------
// 5. the whole model: where a unit lives, forward, backward

// Returns unit u's parameters, ready for use until unit_release. Gathers its group if that is not there. Who waits for it unpacks it.
static UnitMemory unit_params(GPT2* g, int u) {
    int k = g->layout.group_of[u];
    Group* group = &g->layout.groups[k];
    group_gather(g, k);
    if (g->pass == PASS_FORWARD && g->options.forward_prefetch) gather_ahead(g, k);
    GatherBuffer b = g->gather_buffers[group->buffer];
    bool arrives = g->gathering[k] != NO_OP;
    comm_finish(&g->zpp.node, &g->gathering[k]);
    if (arrives && g->zpp.weight_bits)
        dequantise_sum(b.params, FLOATX_DTYPE, b.arrived, 1, (size_t)g->dp->size * group->shard.n, g->zpp.weight_bits);
    UnitMemory unit = { g->zpp.vectors.params + vectors_at(g->config, u), b.params + g->layout.units[u].offset };
    return unit;
}

static void group_free(GPT2* g, Group* group) {
    if (group->buffer != NO_BUFFER) g->gather_buffers[group->buffer].group = NO_GROUP;
    group->buffer = NO_BUFFER;
}

// Ends the use of unit u's parameters until the next unit_params. The root stays until the step's last backward pass, and
// so does every group that is not resharded after its forward pass. Another group may take a freed gather buffer.
static void unit_release(GPT2* g, int u) {
    int k = g->layout.group_of[u];
    Group* group = &g->layout.groups[k];
    bool is_backward = g->pass == PASS_BACKWARD;
    bool stays = (k == 0 || !reshards_after_forward(&g->options)) && !(is_backward && g->last_micro);
    int last_used = is_backward ? group->first_unit : group->first_unit + group->num_units - 1;
    if (u == last_used && !stays) group_free(g, group);
}

// What no layer writes must be zero, and the last reduction may have left something in it: a bucket's padding, and in the
// root's the gradients of the positions behind the last token.
static void bucket_zero_unwritten(GPT2* g, Bucket* b) {
    Group* group = &g->layout.groups[b->group];
    FsdpUnit last = g->layout.units[group->first_unit + group->num_units - 1];
    size_t end = last.offset + last.size, whole = (size_t)g->layout.shard_ranks->size * group->shard.n;
    size_t C = (size_t)g->config.C, behind = (size_t)(g->config.max_T - g->T) * C;
    if (end < whole) device_zero(b->grads + end, (whole - end) * sizeof(floatX));
    if (b->group > 0 || behind == 0) return;
    device_zero(b->grads + (size_t)g->T*C, behind * sizeof(floatX)); // wpe is the root's first matrix
}

// Returns the memory that unit u's gradients go to.
static UnitMemory unit_grads(GPT2* g, int u) {
    int k = g->layout.group_of[u];
    Bucket* b = group_bucket(g, k);
    if (b->missing == 0) { // this unit is the first that asks
        b->group = k;
        b->missing = g->layout.groups[k].tensors;
        bucket_zero_unwritten(g, b);
    }
    if (g->options.prefetch == PREFETCH_PRE) gather_ahead(g, k);
    UnitMemory unit = { g->zpp.vectors.grads + vectors_at(g->config, u), b->grads + g->layout.units[u].offset };
    return unit;
}

// Copies a micro-batch to the device: inputs and targets are (B,T) on the host. targets NULL: none.
static void gpt2_load_batch(GPT2* g, const int* inputs, const int* targets, int B, int T) {
    size_t bytes = (size_t)B * (size_t)T * sizeof(int);
    g->B = B;
    g->T = T;
    host_to_device(g->inputs, inputs, bytes);
    if (targets) host_to_device(g->targets, targets, bytes);
}

// Computes g->lnf, the classifier's input, from g->inputs.
static void gpt2_forward(GPT2* g) {
    GPT2Config c = g->config;
    int BT = g->B * g->T;
    g->pass = PASS_FORWARD;
    RootParams root = root_view(c, unit_params(g, 0));
    trace_compute("forward, embedding", -1);
    encoder_forward(g->acts[0].res1, g->inputs, root.wte, root.wpe, g->B, g->T, c.C);
    const floatX *x = g->acts[0].res1, *branch = NULL;
    for (int l = 0; l < c.L; l++) {
        trace_compute("forward, block", l);
        AttentionParams attention = attention_view(c, unit_params(g, attention_unit(l)));
        block_attention_activations(g, attention, g->acts[l], x, branch);
        unit_release(g, attention_unit(l));
        MlpParams mlp = mlp_view(c, unit_params(g, mlp_unit(l)));
        block_mlp_forward(g, mlp, g->acts[l]);
        unit_release(g, mlp_unit(l));
        x = g->acts[l].res2;
        branch = g->branch;
    }
    g->pass = PASS_HEAD;
    trace_compute("head", -1);
    residual_layernorm_forward(g->resf, g->lnf, g->lnf_mean, g->lnf_rstd, x, branch, root.lnfw, root.lnfb, BT, c.C);
    unit_release(g, 0);
}

// Computes g->losses. The classifier runs on a few rows at a time, so that no (B,T,V) tensor exists.
static void head_forward(GPT2* g, const floatX* wte) {
    GPT2Config c = g->config;
    int BT = g->B * g->T;
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

// Adds this micro-batch's losses to g->stats, and computes its gradients.
static void gpt2_backward(GPT2* g, float dloss) {
    GPT2Config c = g->config;
    int BT = g->B * g->T;
    g->pass = PASS_BACKWARD;
    RootParams root = root_view(c, unit_params(g, 0));
    RootParams droot = root_view(c, unit_grads(g, 0));
    head_forward_backward(g, root.wte, droot.wte, dloss);
    add_sum(&g->stats->loss, g->losses, (size_t)BT);
    // lnf = layernorm(resf)
    device_zero(g->dres, (size_t)BT * (size_t)c.C * sizeof(floatX));
    layernorm_backward(g->dres, droot.lnfw, droot.lnfb, g->dbtc, g->resf, root.lnfw, g->lnf_mean, g->lnf_rstd, BT, c.C,
                       g->grad_mode);
    grad_ready(g, 0, LNFW);
    grad_ready(g, 0, LNFB);
    for (int l = c.L - 1; l >= 0; l--) {
        trace_compute("backward, block", l);
        int attention = attention_unit(l), mlp = mlp_unit(l);
        if (g->recompute == RECOMPUTE_BLOCK) {
            block_attention_activations(g, attention_view(c, unit_params(g, attention)), g->acts[l], g->acts[l].res1, NULL);
            block_mlp_activations(g, mlp_view(c, unit_params(g, mlp)), g->acts[l]);
        }
        MlpParams m = mlp_view(c, unit_params(g, mlp)), dm = mlp_view(c, unit_grads(g, mlp));
        block_mlp_backward(g, mlp, m, dm, g->acts[l]);
        unit_release(g, mlp);
        AttentionParams a = attention_view(c, unit_params(g, attention)), da = attention_view(c, unit_grads(g, attention));
        block_attention_backward(g, attention, a, da, g->acts[l]);
        unit_release(g, attention);
    }
    trace_compute("backward, embedding", -1);
    // res1 of block 0 = wte[inputs] + wpe
    encoder_backward(droot.wte, droot.wpe, g->dres, g->inputs, g->B, g->T, c.C, g->grad_mode);
    grad_ready(g, 0, WPE);
    grad_ready(g, 0, WTE);
    unit_release(g, 0);
    vectors_add(&g->zpp, g->first_micro);
}

// Call before micro-batch `micro` of a step's `accumulation`. Each micro-batch overwrites the buckets, and shards are added
// up. A step begins with the blocks' gather buffers free, because an evaluation may have left groups in them.
static void gpt2_begin_micro(GPT2* g, int micro, int accumulation) {
    g->grad_mode = GRAD_SET;
    g->first_micro = micro == 0;
    g->last_micro = micro == accumulation - 1;
    for (int k = 1; k < g->layout.num_groups && g->first_micro; k++) group_free(g, &g->layout.groups[k]);
}

// Call after the backward pass. On return this rank's shard of each gradient is that of the mean over the global batch, and
// g->stats->loss is the sum over all ranks. dloss contains the division by the number of ranks (see train_step).
static void gpt2_reduce(GPT2* g) {
    trace_compute("wait for gradients", -1);
    CommOp loss = comm_all_reduce(g->dp, &g->stats->loss, 1, COMM_F64);
    bucket_turn(g);
    vectors_reduce(&g->zpp); // while the root's gradients are in their last hop
    for (int k = 0; k < g->num_buckets; k++) bucket_finish(g, &g->buckets[k]);
    comm_wait(g->dp, loss);
}

// Begins to bring the shards that this rank has changed to the other nodes, in the order in which the next forward pass asks for
// them. The root is gathered as soon as it is there.
static void gpt2_gather(GPT2* g) {
    for (int k = 0; k < g->layout.num_groups; k++)
        g->refreshing[k] = secondary_refresh(&g->zpp, &g->state, g->layout.groups[k].shard);
    group_gather(g, 0);
}

// Waits for what the last update began, if no forward pass has.
static void gpt2_gather_finish(GPT2* g) {
    for (int k = 0; k < g->layout.num_groups; k++) comm_finish(&g->zpp.across, &g->refreshing[k]);
    comm_finish(&g->zpp.node, &g->gathering[0]);
}

// ----------------------------------------------------------------------------
// 6. the optimizer

// Computes the global gradient norm, to which each rank adds its shards' part, and from it the factor that AdamW multiplies
// gradients by. Both stay on the device.
static void gpt2_clip(GPT2* g, float max_norm, float loss_scale) {
    shards_add_grad_squares(&g->state, &g->stats->grad_square);
    if (g->dp->rank == 0) shards_add_grad_squares(&g->zpp.vectors.state, &g->stats->grad_square); // they count once
    comm_wait(g->layout.shard_ranks, comm_all_reduce(g->layout.shard_ranks, &g->stats->grad_square, 1, COMM_F64));
    clip_gradients(g->stats, max_norm, loss_scale);
}

// Calls AdamW once per range, then sums the squares of the new parameters for their norm. The log waits for that sum, so it is sent
// before the weights.
static void gpt2_update(GPT2* g, AdamW adamw) {
    shards_begin_update(&g->state, g->stats);
    for (int i = 0; i < g->num_ranges; i++)
        shards_update(i < g->shard_ranges ? &g->state : &g->zpp.vectors.state, &g->ranges[i], adamw, g->stats);
    vectors_renew(&g->zpp.vectors);
    shards_add_param_squares(&g->state, &g->stats->param_square);
    if (g->dp->rank == 0) shards_add_param_squares(&g->zpp.vectors.state, &g->stats->param_square);
    CommOp norm = comm_all_reduce(g->dp, &g->stats->param_square, 1, COMM_F64);
    gpt2_gather(g);
    comm_wait(g->dp, norm);
}

// ----------------------------------------------------------------------------
// 7. weights and state: initial, loaded, saved

// Sets the weights: random ones, or a checkpoint's; a resumed run loads all its state. Each rank makes or reads only its
// shards.
static void gpt2_load(GPT2* g, Run* run) {
    ranks_load(run, g->ranges, g->num_ranges);
    gpt2_gather(g);
}

// Each rank of one replica of the model writes its shards, so nothing is gathered.
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
    g->dp = &run->ranks->context.comm;
    g->accumulation = run->accumulation;
    zeropp_check(&g->zpp, &g->options, g->dp);
    run->ranks->share.writer = g->dp->rank < g->options.shards ? g->dp->rank : -1; // other replicas hold the same
    run->ranks->share.writers = g->options.shards;
    run->ranks->share.sharded = g->options.checkpoint == CHECKPOINT_SHARDED;
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
    floatX* last = g->lnf + (size_t)(T - 1)*c.C;
    matmul_forward(g->logits, last, root_view(c, unit_params(g, 0)).wte, NULL, 1, c.C, c.Vp);
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

// For --check-every: a number that is the same on all ranks if their parameters of gpt2.h's unit u, the root or a block, are.
static uint64_t unit_checksum(void* self, int u) {
    GPT2* g = (GPT2*)self;
    ParamRange vectors = vectors_range(&g->zpp.vectors, g->config, u, 0);
    uint64_t sum = device_checksum(vectors.params, sizeof(floatX), vectors.n);
    g->pass = PASS_FORWARD; // in whose order the units are asked for
    for (int i = 0; i < g->layout.num_units; i++) {
        if (g->layout.units[i].unit != u) continue;
        sum += device_checksum(unit_params(g, i).matrices, sizeof(floatX), g->layout.units[i].size);
        unit_release(g, i);
    }
    return sum;
}

// For --predict: what the formulas say, and nothing else.
static void gpt2_predict(void* model, Run* run) {
    GPT2* g = (GPT2*)model;
    ranks_predict(run);
    gpt2_configure(g, run);
    g->recompute = run->o.recompute;
    gpt2_predict_memory(g, run->predicted);
    run->ranks->sent = gpt2_predict_sent(g);
}

int main(int argc, char** argv) {
    static Run run;
    static GPT2 g;
    run_options(&run, "train_gpt2_zeropp",
                "train GPT-2 fully sharded over nodes: each rank keeps a part of everything, and little crosses between nodes");
    options_ranks(&run);
    options_zeropp(&run.table, &g.zpp, &g.options);
    run_predict(&run, argc, argv, gpt2_predict, &g, sizeof g);
    ranks_start(&run, argc, argv);

    gpt2_configure(&g, &run);
    gpt2_predict_memory(&g, run.predicted); // first as if nothing were recomputed
    g.recompute = ranks_recompute(&run, gpt2_shapes(&g)); // --recompute auto: blocks, where that has no room
    gpt2_predict_memory(&g, run.predicted);
    gpt2_init(&g);
    run.ranks->sent = gpt2_predict_sent(&g);
    ranks_report(&run);
    report_sharding(g.config, &g.options, g.dp->size);
    BetweenNodes between = between_nodes(&g.zpp, g.config, &g.options, g.accumulation);
    context_count_along(&run.ranks->context, "nodes", &g.zpp.across, NULL, between.all);
    report_zeropp(&g.zpp, between);
    gpt2_load(&g, &run);
    ranks_begin(&run);

    for (long long step = run.first; ; step++) {
        if (run_evaluates(&run, step)) logger_eval(&run.log, step, evaluate(&g, &run));
        if (run_samples(&run, step)) run_sample(&run, step, next_logits, &g);
        if (run_saves(&run, step)) gpt2_save(&g, &run, step);
        if (step == run.o.steps) break;

        ranks_step_begin(&run, step, g.zpp.vectors.state.params);
        StepStats stats = train_step(&g, &run, step);
        ranks_step_end(&run, step, &stats);
        if (ranks_checks(&run, step + 1)) context_check_units(&run.ranks->context, step + 1, g.num_units, unit_checksum, &g);
    }
    gpt2_gather_finish(&g);
    bool as_predicted = ranks_end(&run);
    gpt2_free(&g);
    ranks_stop(&run);
    return as_predicted ? EXIT_SUCCESS : EXIT_FAILURE;
}
