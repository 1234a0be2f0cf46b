/*
Train GPT-2 with fully sharded data parallelism: ZeRO's third stage as it is used in practice (Zhao et al., PyTorch FSDP, arXiv
2304.11277, sections 3 and 4). Each rank keeps fp32 shards of the parameters and AdamW's moments, and shards of the gradients. A
group of units is gathered in floatX, ahead of its use, into one of a few rooms, and freed after it.

A gather costs no time if it ends before its group is needed, and --prefetch says how early it begins. But each group gathered
ahead needs a room: --limit-all-gathers trades memory for overlap. --sharding says how long a group stays gathered, and --wrap how
large a group is.

Memory    per rank, in bytes, with P parameters cut S ways: 16P/S (14P/S where gradients are reduced in 16 bits), and activations.
          Rooms: for the parameters of the root and of --limit-all-gathers blocks (grad-op: of all blocks). Buckets: for the
          gradients of the root and of two blocks, in floatX, and also in fp32 where they are reduced in it.
Sent      per rank and step with A micro-batches, in elements: full: (A(3P - 2root) + root) (S-1)/S, because the root stays
          gathered until the last micro-batch; grad-op: (A+1)P (S-1)/S, because every group does. AP (S-1)/S of these are in
          --reduce-dtype, the others in floatX. hybrid with R = N/S replicas: 2P/S (R-1)/R more, once. Three doubles are summed.
Run       make train_gpt2_fsdp && mpirun -np 4 ./train_gpt2_fsdp            (--help lists the options)
Before    train_gpt2_zero.cu: the same shards, gathered when they are needed. New here: groups, rooms, gathers ahead of use.
Next      tensor and pipeline parallelism cut the computation as well.
*/
// ----------------------------------------------------------------------------
// 1. libraries, in reading order
#include "llmc/base/common.h"     // defines: require, die, xcalloc
#include "llmc/base/options.h"    // defines: Options, OptionTable, options_common, options_parse
#include "llmc/base/precision.h"  // defines: floatX, to_floatX, NEEDS_MASTER
#include "llmc/model/gpt2.h"       // defines: GPT2Config, Unit, unit_tensor, unit_init_weights
#include "llmc/device/device.h"     // defines: device_alloc, device_zero, host_to_device, device_to_host
#include "llmc/device/layers.h"     // defines: encoder, layernorm, matmul, attention, classifier, AdamW, StepStats
#include "llmc/comm/comm.h"       // defines: Comm, CommOp, comm_all_reduce, comm_reduce_scatter, comm_all_gather, comm_wait
#include "llmc/run/world.h"      // defines: World, report_ranks, report_sent
#include "llmc/model/schedule.h"   // defines: learning_rate, LossScaler
#include "llmc/data/tokenizer.h"  // defines: Tokenizer
#include "llmc/data/dataloader.h" // defines: DataLoader
#include "llmc/model/sampler.h"    // defines: sample_token, print_token
#include "llmc/save/checkpoint.h" // defines: CheckpointWriter, CheckpointReader, TrainState
#include "llmc/parallel/shard.h"      // defines: checkpoint_add_up
#include "llmc/parallel/sharding.h"   // defines: Sharding, Layout, Group, Flat, Piece, shard_sizes
#include "llmc/run/trace.h"      // defines: trace_compute, trace_step
#include "llmc/run/start.h"      // defines: open_checkpoint, config_for_run
#include "llmc/run/logger.h"     // defines: Logger, StepLog, EvalLoss
#include "llmc/run/report.h"     // defines: report_run, run_record, report_memory

// ----------------------------------------------------------------------------
// 2. the model: views of its parameters

// Views carve named tensors out of a unit's memory, in the order of llmc/model/gpt2.h. They own nothing. Gradients use the same views.
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
} BlockActs;

// A room holds the gathered parameters of a group, a bucket its whole gradients.
typedef struct {
    floatX* params;                 // (whole) owned
    bool taken;
} Room;
typedef struct {
    floatX* grads;                  // (whole) owned: what the backward pass writes
    float* wide;                    // (whole) owned: grads as fp32, to be reduced; NULL where that needs no copy
    int group;                      // whose they are, or NO_GROUP
} Bucket;

typedef struct {
    GPT2Config config;
    int max_B, seq_len;             // largest micro-batch: max_B sequences of seq_len tokens
    int B, T;                       // of the current micro-batch
    int recompute;                  // RECOMPUTE_NONE or RECOMPUTE_BLOCK
    int num_units;                  // L + 1
    Sharding how;
    Comm *shards, *replicas;        // ranks that hold the shards of one copy; those that hold the same shard; not owned
    Layout layout;                  // groups, their flats, and this rank's pieces of them
    // this rank's shards, owned: on the device, or with --cpu-offload on the host
    float *params, *m, *v;          // (num_sharded) weights and AdamW's moments
    char *grads;                    // (num_sharded) of type reduce_type
    char *arrived;                  // (num_sharded) grads of a later micro-batch; NULL without offload or accumulation
    floatX *rounded;                // (num_sharded) params as they are gathered; NULL without offload or in fp32
    float *wide;                    // (a group's shard) its gradients as AdamW takes them; NULL where they are fp32
    GradMode grad_mode;             // whether this micro-batch's gradients overwrite or add
    int updates;                    // AdamW updates so far
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
    Comm* comm;                     // not owned
    bool first_micro, last_micro;   // the current micro-batch is the step's first; its last
    bool backward;                  // the current pass is a backward pass
    int num_rooms, num_buckets;
    Room rooms[MAX_UNITS];          // the root's, and those that other groups take in turn
    Bucket buckets[3];              // the root's, and two that the other groups take in turn
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

// Both allocate elements of `size` bytes where the shards are: n of them; one for each element of this rank's shards.
static void* state_alloc_n(const GPT2* g, size_t n, size_t size, MemoryKind kind) {
    return g->how.offload ? offload_alloc(n * size) : device_alloc(n * size, kind);
}
static void* state_alloc(const GPT2* g, size_t size, MemoryKind kind) {
    return state_alloc_n(g, g->layout.num_sharded, size, kind);
}
static void state_free(const GPT2* g, void* p) {
    if (g->how.offload) offload_free(p);
    else device_free(p);
}

static void gpt2_init_params(GPT2* g) {
    layout_init(&g->layout, g->config, g->how.wrap, g->shards->size, g->shards->rank);
    g->params = (float*)state_alloc(g, sizeof(float), MEMORY_PARAMETERS);
    g->grads = (char*)state_alloc(g, reduce_size(&g->how), MEMORY_GRADIENTS);
    g->m = (float*)state_alloc(g, sizeof(float), MEMORY_OPTIMIZER);
    g->v = (float*)state_alloc(g, sizeof(float), MEMORY_OPTIMIZER);
    if (g->how.offload && g->how.accumulation > 1) g->arrived = (char*)state_alloc(g, reduce_size(&g->how), MEMORY_GRADIENTS);
    if (g->how.offload && NEEDS_MASTER) g->rounded = (floatX*)state_alloc(g, sizeof(floatX), MEMORY_PARAMETERS);
    ShardSizes s = shard_sizes(g->config, &g->how);
    if (updates_wider(&g->how)) g->wide = (float*)state_alloc_n(g, size_max(s.root, s.other), sizeof(float), MEMORY_OPTIMIZER);
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

// Allocates memory for whole parameters and gradients while they are needed. All groups except the root's have the same size.
static void gpt2_init_rooms(GPT2* g) {
    int others = g->layout.num_groups - 1;
    g->num_rooms = is_at_home(&g->how) ? 0 : 1 + (int)sharding_rooms(&g->how, shard_sizes(g->config, &g->how));
    g->num_buckets = 1 + (others < 2 ? others : 2);
    for (int r = 0; r < g->num_rooms; r++)
        g->rooms[r].params = (floatX*)device_alloc(g->layout.groups[r > 0].whole * sizeof(floatX), MEMORY_COMMUNICATION);
    for (int k = 0; k < g->num_buckets; k++) {
        size_t whole = g->layout.groups[k > 0].whole;
        g->buckets[k].grads = (floatX*)device_alloc(whole * sizeof(floatX), MEMORY_COMMUNICATION);
        if (reduces_wider(&g->how)) g->buckets[k].wide = (float*)device_alloc(whole * sizeof(float), MEMORY_COMMUNICATION);
        g->buckets[k].group = NO_GROUP;
    }
}

static LayerShapes gpt2_shapes(GPT2Config c, int B, int T) {
    LayerShapes s = { B, T, c.C, c.NH, c.Vp };
    return s;
}

static void gpt2_init(GPT2* g, GPT2Config c, int B, int T, int recompute, Comm* comm, Comm* shards, Comm* replicas,
                      Sharding how) {
    memset(g, 0, sizeof *g);
    g->comm = comm;
    g->shards = shards;
    g->replicas = replicas;
    g->how = how;
    g->config = c;
    g->max_B = g->B = B;
    g->seq_len = g->T = T;
    g->recompute = recompute;
    g->num_units = c.L + 1;
    gpt2_init_params(g);
    gpt2_init_rooms(g);
    gpt2_init_acts(g);
    layers_init(gpt2_shapes(c, B, T));
}

static void gpt2_free(GPT2* g) {
    layers_free();
    state_free(g, g->params); state_free(g, g->grads); state_free(g, g->m); state_free(g, g->v);
    state_free(g, g->arrived); state_free(g, g->rounded); state_free(g, g->wide);
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
    for (int r = 0; r < g->num_rooms; r++) device_free(g->rooms[r].params);
    for (int k = 0; k < g->num_buckets; k++) { device_free(g->buckets[k].grads); device_free(g->buckets[k].wide); }
    layout_free(&g->layout);
}

// Bytes by kind that gpt2_init will allocate, from formulas: a run compares them with what it measured.
static void gpt2_predict_memory(GPT2Config c, int B, int T, int recompute, const Comm* comm, const Sharding* how,
                                size_t bytes[MEMORY_KINDS]) {
    ShardSizes s = shard_sizes(c, how);
    size_t S = (size_t)how->shards, X = sizeof(floatX), reduced = reduce_size(how);
    size_t BT = (size_t)B * (size_t)T, C = (size_t)c.C, L = (size_t)c.L;
    size_t blocks_kept = recompute == RECOMPUTE_BLOCK ? 1 : L;
    size_t per_token = L * C*X                                                 // res1
                     + blocks_kept * (15*C*X + (4 + (size_t)c.NH) * 4)         // the rest of a block, its float statistics
                     + 9*C*X + 3 * sizeof(float) + 2 * sizeof(int);            // outside the blocks
    size_t wide = updates_wider(how) ? 4 * size_max(s.root, s.other) : 0;
    memset(bytes, 0, MEMORY_KINDS * sizeof bytes[0]);
    if (how->offload) {
        size_t copies = (how->accumulation > 1 ? reduced : 0) + (NEEDS_MASTER ? X : 0);
        bytes[MEMORY_OFFLOADED] = (4 + reduced + 8 + copies) * s.all + wide;
    } else {
        bytes[MEMORY_PARAMETERS] = 4 * s.all;
        bytes[MEMORY_GRADIENTS] = reduced * s.all;
        bytes[MEMORY_OPTIMIZER] = 8 * s.all + wide;
    }
    bytes[MEMORY_ACTIVATIONS] = BT * per_token + (size_t)classifier_rows((int)BT, c.Vp) * (size_t)c.Vp * X + sizeof(StepStats);
    bytes[MEMORY_COMMUNICATION] = comm_world_bytes(comm);
    if (how->sharding == SHARD_HYBRID) // has communicators of its own
        bytes[MEMORY_COMMUNICATION] += comm_split_bytes(comm, (int)S) + comm_split_bytes(comm, comm->size / (int)S);
    if (!is_at_home(how)) bytes[MEMORY_COMMUNICATION] += X * S * (s.root + sharding_rooms(how, s) * s.other);
    bytes[MEMORY_COMMUNICATION] += (X + (reduces_wider(how) ? 4 : 0)) * S * (s.root + size_min(2, s.others) * s.other); // buckets
    bytes[MEMORY_WORKSPACE] = layers_workspace_bytes(gpt2_shapes(c, B, T));
}

// Bytes that all ranks together will send per step. S ranks hold one copy of the model: each gather and each reduction of a
// shard sends it S-1 times. What stays gathered after its forward pass is gathered once a step, the rest twice a micro-batch.
// Replicas all-reduce each shard once. The loss and two norms, which are doubles, are summed as well.
static unsigned long long gpt2_predict_sent(GPT2Config c, int N, const Sharding* how) {
    ShardSizes s = shard_sizes(c, how);
    unsigned long long S = (unsigned long long)how->shards, replicas = (unsigned long long)N / S;
    unsigned long long A = (unsigned long long)how->accumulation, returns = reshards_after_forward(how) ? s.others * s.other : 0;
    unsigned long long gathers = s.all - returns + 2 * A * returns;
    return (unsigned long long)N * (S - 1) * (gathers * sizeof(floatX) + A * s.all * reduce_size(how))
         + 2 * S * (replicas - 1) * s.all * reduce_size(how)
         + 2 * ((unsigned long long)N - 1) * sizeof(double) + 2 * 2 * replicas * (S - 1) * sizeof(double);
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

static Flat* flats_begin(GPT2* g, const Group* k) { return g->layout.flats + k->first_flat; }
static Flat* flats_end(GPT2* g, const Group* k) { return flats_begin(g, k) + k->num_flats; }

// Returns a free room for a group, or NO_ROOM. A group that stays until its backward pass has its own, others take any.
static int free_room(GPT2* g, int group) {
    bool has_own = group == 0 || !reshards_after_forward(&g->how);
    for (int r = has_own ? group : 1; r < g->num_rooms; r++) if (!g->rooms[r].taken) return r;
    return NO_ROOM;
}

// Begins to gather a group's parameters, unless they are there or on their way. Layer calls that have been issued may still
// read the room: the gather waits for them.
static void group_gather(GPT2* g, int group) {
    Group* k = &g->layout.groups[group];
    if (k->room != NO_ROOM || is_at_home(&g->how)) return;
    k->room = free_room(g, group);
    require(k->room != NO_ROOM, "no room to gather group %d: all %d are taken", group, g->num_rooms);
    g->rooms[k->room].taken = true;
    for (Flat* f = flats_begin(g, k); f < flats_end(g, k); f++) {
        floatX *whole = g->rooms[k->room].params + f->begin, *own = whole + (size_t)g->shards->rank * f->shard;
        if (g->how.offload) {
            const void* shard = g->rounded ? (const void*)(g->rounded + f->offset) : g->params + f->offset;
            f->gathered = comm_all_gather_from_host(g->shards, whole, shard, f->shard, COMM_FLOATX);
        } else {
            from_fp32(own, g->params + f->offset, f->shard);
            f->gathered = comm_all_gather(g->shards, whole, own, f->shard, COMM_FLOATX);
        }
    }
}

// Begins to gather what comes after unit u, as far ahead as there are rooms. Forward 0, 1, ..., L; backward 0, L, ..., 1.
static void gather_ahead(GPT2* g, int u) {
    int L = g->config.L;
    for (int d = 1; d < g->how.rooms; d++) {
        int next = !g->backward ? u + d : u == 0 ? L + 1 - d : u - d;
        if (next < 1 || next > L) return;
        int group = g->layout.group_of[next];
        if (g->layout.groups[group].room == NO_ROOM && free_room(g, group) == NO_ROOM) return;
        group_gather(g, group);
    }
}

static Bucket* group_bucket(GPT2* g, int group) { return &g->buckets[group == 0 ? 0 : 1 + (group - 1) % 2]; }
static char* grad_shard(GPT2* g, const Flat* f) { return g->grads + f->offset * reduce_size(&g->how); }

// Waits until a flat's gradients have been reduced, and adds a later micro-batch's to this rank's shard.
static void flat_finish(GPT2* g, Flat* f) {
    if (f->reduced == NO_OP) return;
    comm_wait(g->shards, f->reduced);
    f->reduced = NO_OP;
    char* shard = grad_shard(g, f);
    if (f->sum == shard) {
        // the first micro-batch's sum is in its place
    } else if (g->how.offload) {
        device_synchronize(); // the host is about to read it
        comm_add(shard, f->sum, f->shard, reduce_type(&g->how));
    } else if (g->how.reduce_dtype == REDUCE_FP32) add_in_place_fp32((float*)shard, (const float*)f->sum, f->shard);
    else add_in_place((floatX*)shard, (const floatX*)f->sum, f->shard);
    if (f->is_final && g->replicas->size > 1 && !g->how.offload)
        f->replicated = comm_all_reduce(g->replicas, shard, f->shard, reduce_type(&g->how));
}

static void group_finish(GPT2* g, const Group* k) {
    for (Flat* f = flats_begin(g, k); f < flats_end(g, k); f++) flat_finish(g, f);
}

// Begins to reduce a flat whose gradients are complete. The result is this rank's shard of their sum.
static void flat_reduce(GPT2* g, int group, Flat* f) {
    Bucket* b = group_bucket(g, group);
    size_t size = reduce_size(&g->how);
    char* whole = (char*)(b->grads + f->begin);
    if (b->wide) {
        to_fp32(b->wide + f->begin, b->grads + f->begin, (size_t)g->shards->size * f->shard);
        whole = (char*)(b->wide + f->begin);
    }
    f->is_final = g->last_micro;
    f->sum = g->first_micro ? grad_shard(g, f) : g->how.offload ? g->arrived + f->offset * size
           : whole + (size_t)g->shards->rank * f->shard * size;
    f->reduced = g->how.offload ? comm_reduce_scatter_to_host(g->shards, f->sum, whole, f->shard, reduce_type(&g->how))
               : comm_reduce_scatter(g->shards, f->sum, whole, f->shard, reduce_type(&g->how));
    if (g->shards->size == 1) flat_finish(g, f); // there is nothing to wait for
}

// The backward pass calls this when the gradient of tensor i of unit u is complete. After its last tensor a flat is reduced.
static void grad_ready(GPT2* g, int u, int i) {
    int group = g->layout.group_of[u];
    Group* k = &g->layout.groups[group];
    TensorInfo t = unit_tensor(g->config, u, i);
    size_t begin = g->layout.units[u].offset + t.offset;
    bool was_last = --k->missing == 0;
    if (was_last && u > 0 && g->how.prefetch == PREFETCH_POST) gather_ahead(g, u); // first, because the reduction is needed later
    for (Flat* f = flats_begin(g, k); f < flats_end(g, k); f++)
        if (flat_meets(&g->layout, f, begin, tensor_elements(t)) && --f->missing == 0) flat_reduce(g, group, f);
}

// g->dres holds the gradient of the block's output on entry, of its input on return.
static void block_backward(GPT2* g, int u, BlockParams p, BlockParams dp, BlockActs a) {
    int B = g->B, T = g->T, C = g->config.C, NH = g->config.NH, BT = B * T;
    GradMode mode = g->grad_mode;
    floatX *dgelu = g->dbt4c, *dqkv = g->dbt4c; // never needed at the same time
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

// Waits for a group's gather: layer calls issued later see its parameters.
static void group_wait(GPT2* g, const Group* k) {
    for (Flat* f = flats_begin(g, k); f < flats_end(g, k); f++) {
        if (f->gathered != NO_OP) comm_wait(g->shards, f->gathered);
        f->gathered = NO_OP;
    }
}

// Returns unit u's parameters, ready for use until unit_release. Gathers its group if that is not there.
static floatX* unit_params(GPT2* g, int u) {
    int group = g->layout.group_of[u];
    Group* k = &g->layout.groups[group];
    bool ahead = g->how.forward_prefetch && (u > 0 || g->backward); // not when the head asks for the root
    if (u == 0) g->backward = false; // unit_grads sets it in a backward pass
    if (is_at_home(&g->how)) return (floatX*)g->params + g->layout.flats[k->first_flat].offset + g->layout.units[u].offset;
    group_gather(g, group);
    if (ahead && !g->backward) gather_ahead(g, u);
    group_wait(g, k);
    return g->rooms[k->room].params + g->layout.units[u].offset;
}

static void group_free(GPT2* g, Group* k) {
    if (k->room != NO_ROOM) g->rooms[k->room].taken = false;
    k->room = NO_ROOM;
}

// Ends the use of unit u's parameters until the next unit_params. The root stays until the step's last backward pass, and so does
// every group that is not resharded after its forward pass. Another group may take a freed room.
static void unit_release(GPT2* g, int u) {
    int group = g->layout.group_of[u];
    bool stays = !(g->backward && g->last_micro) && (group == 0 || !reshards_after_forward(&g->how));
    if (u == g->layout.groups[group].first_unit && !stays) group_free(g, &g->layout.groups[group]);
}

// The padding of a bucket is zero. The backward pass never writes it, but a reduction to the host may leave anything in it.
static void bucket_zero_padding(GPT2* g, Bucket* b, const Group* k) {
    const Unit* last = &g->layout.units[k->first_unit + k->num_units - 1];
    size_t end = last->offset + last->size;
    if (end < k->whole) device_zero(b->grads + end, (k->whole - end) * sizeof(floatX));
}

// Returns the memory that unit u's gradients go to: its group's bucket, once the gradients in it have been reduced.
static floatX* unit_grads(GPT2* g, int u) {
    int group = g->layout.group_of[u];
    Group* k = &g->layout.groups[group];
    Bucket* b = group_bucket(g, group);
    g->backward = true;
    if (u == k->first_unit) { // the backward pass asks for it first
        if (b->group != NO_GROUP) group_finish(g, &g->layout.groups[b->group]); // still being sent
        b->group = group;
        if (g->how.offload) bucket_zero_padding(g, b, k);
        k->missing = 0;
        for (int n = u; n < u + k->num_units; n++) k->missing += unit_tensors(n);
        for (Flat* f = flats_begin(g, k); f < flats_end(g, k); f++) f->missing = f->tensors;
    }
    if (g->how.prefetch == PREFETCH_PRE) gather_ahead(g, u);
    return b->grads + g->layout.units[u].offset;
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
    RootParams root = root_view(c, unit_params(g, 0));
    trace_compute("forward, embedding", -1);
    encoder_forward(g->acts[0].res1, g->inputs, root.wte, root.wpe, g->B, g->T, c.C);
    const floatX *x = g->acts[0].res1, *branch = NULL;
    for (int l = 0; l < c.L; l++) {
        trace_compute("forward, block", l);
        BlockParams p = block_view(c, unit_params(g, 1 + l));
        block_forward(g, p, g->acts[l], x, branch);
        unit_release(g, 1 + l);
        x = g->acts[l].res2;
        branch = g->branch;
    }
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
        matmul_backward_weight(dwte, NULL, g->logits, lnf, n, c.C, c.Vp, row == 0 ? g->grad_mode : GRAD_ADD);
        matmul_backward_input(g->dbtc + (size_t)row*c.C, g->logits, wte, n, c.C, c.Vp);
    }
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
    device_zero(g->dres, (size_t)BT * (size_t)c.C * sizeof(floatX));
    layernorm_backward(g->dres, droot.lnfw, droot.lnfb, g->dbtc, g->resf, root.lnfw, g->lnf_mean, g->lnf_rstd, BT, c.C, g->grad_mode);
    grad_ready(g, 0, LNFW);
    grad_ready(g, 0, LNFB);
    for (int l = c.L - 1; l >= 0; l--) {
        trace_compute("backward, block", l);
        BlockParams p = block_view(c, unit_params(g, 1 + l));
        BlockParams dp = block_view(c, unit_grads(g, 1 + l));
        if (g->recompute == RECOMPUTE_BLOCK) block_activations(g, p, g->acts[l], g->acts[l].res1, NULL);
        block_backward(g, 1 + l, p, dp, g->acts[l]);
        unit_release(g, 1 + l);
    }
    trace_compute("backward, embedding", -1);
    // res1 of block 0 = wte[inputs] + wpe
    encoder_backward(droot.wte, droot.wpe, g->dres, g->inputs, g->B, g->T, c.C, g->grad_mode);
    grad_ready(g, 0, WPE);
    grad_ready(g, 0, WTE);
    unit_release(g, 0);
}

// Call before micro-batch `micro` of a step's `accumulation`. Each micro-batch overwrites the buckets. Each step begins with the
// blocks' rooms free, because an evaluation may have left groups in them.
static void gpt2_begin_micro(GPT2* g, int micro, int accumulation) {
    g->first_micro = micro == 0;
    g->last_micro = micro == accumulation - 1;
    g->backward = true; // as after a backward pass, even if an evaluation came between
    g->grad_mode = GRAD_SET;
    for (int k = 1; k < g->layout.num_groups && g->first_micro; k++) group_free(g, &g->layout.groups[k]);
}

// Sums a flat's shard on the host over the replicas, by way of a bucket that is no longer needed.
static void flat_replicate_from_host(GPT2* g, Flat* f) {
    size_t bytes = f->shard * reduce_size(&g->how);
    char *shard = grad_shard(g, f), *there = g->buckets[0].wide ? (char*)g->buckets[0].wide : (char*)g->buckets[0].grads;
    host_to_device(there, shard, bytes);
    comm_wait(g->replicas, comm_all_reduce(g->replicas, there, f->shard, reduce_type(&g->how)));
    device_to_host(shard, there, bytes);
}

// Call after the backward pass. On return this rank's shard of each gradient is that of the mean over the global batch, and
// g->stats->loss is the sum over all ranks. dloss contains the division by the number of ranks (see train_step).
static void gpt2_reduce(GPT2* g) {
    trace_compute("wait for gradients", -1);
    CommOp loss = comm_all_reduce(g->comm, &g->stats->loss, 1, COMM_F64);
    for (int k = 0; k < g->layout.num_groups; k++) group_finish(g, &g->layout.groups[k]);
    if (g->how.offload) device_synchronize(); // the host is about to read them
    for (Flat* f = g->layout.flats; f < g->layout.flats + g->layout.num_flats; f++) {
        if (g->how.offload && g->replicas->size > 1) flat_replicate_from_host(g, f);
        if (f->replicated != NO_OP) comm_wait(g->replicas, f->replicated);
        f->replicated = NO_OP;
    }
    comm_wait(g->comm, loss);
}

// Begins to gather the root, which the next forward pass asks for first.
static void gpt2_gather(GPT2* g) {
    group_gather(g, 0);
}

// Waits for the gather that the last update began, if no forward pass has.
static void gpt2_gather_finish(GPT2* g) {
    group_wait(g, &g->layout.groups[0]);
}

// ----------------------------------------------------------------------------
// 6. the optimizer

// Returns a flat's shard of gradients as AdamW takes it: in fp32, and on the host with --cpu-offload.
static const float* flat_grads(GPT2* g, const Flat* f) {
    char* shard = grad_shard(g, f);
    if (!updates_wider(&g->how)) return (const float*)shard;
    if (g->how.offload) convert_dtype(g->wide, DTYPE_F32, shard, FLOATX_DTYPE, f->shard);
    else to_fp32(g->wide, (const floatX*)shard, f->shard);
    return g->wide;
}

// Adds the sum of squares of x (n), which is where the shards are, to *acc, which is on the device.
static void add_state_squares(GPT2* g, double* acc, const float* x, size_t n) {
    if (!g->how.offload) { add_sum_squares_fp32(acc, x, n); return; }
    double sum;
    device_to_host(&sum, acc, sizeof sum);
    sum += host_sum_squares(x, n);
    host_to_device(acc, &sum, sizeof sum);
    device_synchronize(); // the copy reads sum
}

// Computes the global gradient norm, to which each rank adds its shards' part, and from it the factor that AdamW multiplies
// gradients by. Both stay on the device.
static void gpt2_clip(GPT2* g, float max_norm, float loss_scale) {
    for (Flat* f = g->layout.flats; f < g->layout.flats + g->layout.num_flats; f++)
        add_state_squares(g, &g->stats->grad_square, flat_grads(g, f), f->shard);
    comm_wait(g->shards, comm_all_reduce(g->shards, &g->stats->grad_square, 1, COMM_F64));
    clip_gradients(g->stats, max_norm, loss_scale);
}

// Runs AdamW on the elements of a unit that are in this rank's shard of a flat; grads are the flat's.
static void piece_update(GPT2* g, AdamW adamw, const Piece* p, const float* grads, float host_grad_scale) {
    const Unit* unit = &g->layout.units[p->unit];
    size_t no_decay = unit->no_decay - size_min(unit->no_decay, p->begin);
    float *params = g->params + p->at, *m = g->m + p->at, *v = g->v + p->at;
    grads += p->at - g->layout.flats[p->flat].offset;
    if (g->how.offload) host_adamw_update(adamw, params, m, v, grads, host_grad_scale, p->n, no_decay);
    else adamw_update_fp32(adamw, params, m, v, grads, &g->stats->grad_scale, p->n, no_decay);
}

// Calls AdamW once per piece of this rank's shards, then sums the squares of the new parameters for their norm. The root comes
// first, and is gathered while blocks are updated.
static void gpt2_update(GPT2* g, AdamW adamw) {
    float host_grad_scale = 0;
    if (g->how.offload) device_to_host(&host_grad_scale, &g->stats->grad_scale, sizeof host_grad_scale);
    const Piece *p = g->layout.pieces, *end = p + g->layout.num_pieces;
    for (int i = 0; i < g->layout.num_flats; i++) {
        const Flat* f = &g->layout.flats[i];
        const float* grads = flat_grads(g, f);
        for (; p < end && p->flat == i; p++) piece_update(g, adamw, p, grads, host_grad_scale);
        if (g->rounded) convert_dtype(g->rounded + f->offset, FLOATX_DTYPE, g->params + f->offset, DTYPE_F32, f->shard);
        if (i == g->layout.groups[0].num_flats - 1) gpt2_gather(g);
    }
    add_state_squares(g, &g->stats->param_square, g->params, g->layout.num_sharded);
    comm_wait(g->shards, comm_all_reduce(g->shards, &g->stats->param_square, 1, COMM_F64));
}

// ----------------------------------------------------------------------------
// 7. weights and state: initial, saved, loaded

// Weights and state pass through a host buffer of this many elements at most.
#define STAGED ((size_t)1 << 20)

// Shards are on the device, or with --cpu-offload on the host. Both return when host may be used again.
static void host_to_state(GPT2* g, void* state, const void* host, size_t bytes) {
    if (g->how.offload) { memcpy(state, host, bytes); return; }
    host_to_device(state, host, bytes);
    device_synchronize();
}
static void state_to_host(GPT2* g, void* host, const void* state, size_t bytes) {
    if (g->how.offload) memcpy(host, state, bytes);
    else device_to_host(host, state, bytes);
}

// Sets the weights. r NULL: random by --seed; else those of a checkpoint. part: its model, or its masters. Each rank makes or
// reads only its own shards.
static void gpt2_set_weights(GPT2* g, uint64_t seed, CheckpointReader* r, CheckpointPart part) {
    float* host = (float*)xcalloc(STAGED, sizeof(float));
    for (const Piece* p = g->layout.pieces; p < g->layout.pieces + g->layout.num_pieces; p++) {
        for (size_t begin = p->begin, end = p->begin + p->n, n; begin < end; begin += n) {
            n = size_min(STAGED, end - begin);
            if (r) checkpoint_read_unit(r, part, p->unit, begin, begin + n, host);
            else unit_init_weights(g->config, seed, p->unit, begin, begin + n, host);
            host_to_state(g, g->params + p->at + (begin - p->begin), host, n * sizeof(float));
        }
    }
    free(host);
    if (g->rounded) convert_dtype(g->rounded, FLOATX_DTYPE, g->params, DTYPE_F32, g->layout.num_sharded);
    gpt2_gather(g);
}

// Loads all that a resumed run needs. Each rank loads its shards.
static void gpt2_load_state(GPT2* g, CheckpointReader* r) {
    g->updates = (int)r->state.adamw_t;
    gpt2_set_weights(g, 0, r, CHECKPOINT_MASTER);
    float* host = (float*)xcalloc(STAGED, sizeof(float));
    for (const Piece* p = g->layout.pieces; p < g->layout.pieces + g->layout.num_pieces; p++) {
        for (size_t begin = p->begin, end = p->begin + p->n, n; begin < end; begin += n) {
            size_t at = p->at + (begin - p->begin);
            n = size_min(STAGED, end - begin);
            checkpoint_read_unit(r, CHECKPOINT_M, p->unit, begin, begin + n, host);
            host_to_state(g, g->m + at, host, n * sizeof(float));
            checkpoint_read_unit(r, CHECKPOINT_V, p->unit, begin, begin + n, host);
            host_to_state(g, g->v + at, host, n * sizeof(float));
        }
    }
    free(host);
}

// Writes this rank's shards into a checkpoint: the model in floatX and, where that is not fp32, also the fp32 weights.
static void gpt2_write_shards(GPT2* g, CheckpointWriter* w) {
    float* host = (float*)xcalloc(STAGED, sizeof(float));
    floatX* rounded = (floatX*)xcalloc(STAGED, sizeof(floatX));
    for (const Piece* p = g->layout.pieces; p < g->layout.pieces + g->layout.num_pieces; p++) {
        for (size_t begin = p->begin, end = p->begin + p->n, n; begin < end; begin += n) {
            size_t at = p->at + (begin - p->begin);
            n = size_min(STAGED, end - begin);
            state_to_host(g, host, g->params + at, n * sizeof(float));
            convert_dtype(rounded, FLOATX_DTYPE, host, DTYPE_F32, n);
            checkpoint_write_unit(w, CHECKPOINT_MODEL, p->unit, begin, begin + n, rounded);
            if (NEEDS_MASTER) checkpoint_write_unit(w, CHECKPOINT_MASTER, p->unit, begin, begin + n, host);
            state_to_host(g, host, g->m + at, n * sizeof(float));
            checkpoint_write_unit(w, CHECKPOINT_M, p->unit, begin, begin + n, host);
            state_to_host(g, host, g->v + at, n * sizeof(float));
            checkpoint_write_unit(w, CHECKPOINT_V, p->unit, begin, begin + n, host);
        }
    }
    free(host);
    free(rounded);
}

// Opens the files that this rank writes to: the checkpoint's two files, which rank 0 has made, or two of its own.
static void gpt2_attach(GPT2* g, CheckpointWriter* w, const char* out, const TrainState* state) {
    if (g->how.checkpoint == CHECKPOINT_SHARDED) {
        CheckpointRange* ranges = (CheckpointRange*)xcalloc((size_t)g->layout.num_pieces, sizeof(CheckpointRange));
        for (int i = 0; i < g->layout.num_pieces; i++) {
            const Piece* p = &g->layout.pieces[i];
            CheckpointRange range = { p->unit, p->begin, p->begin + p->n };
            ranges[i] = range;
        }
        checkpoint_attach_shard(w, out, state, g->comm->rank, g->shards->size, ranges, g->layout.num_pieces);
        free(ranges);
    } else if (g->comm->rank > 0) checkpoint_attach(w, out, state);
}

// Saves a checkpoint. Each rank of one copy of the model writes its shards, so nothing is gathered.
static void gpt2_save(GPT2* g, const char* out, const TrainState* state, long long keep) {
    CheckpointWriter w;
    memset(&w, 0, sizeof w);
    bool writes = g->comm->rank < g->shards->size; // other replicas hold the same
    if (g->comm->rank == 0 && g->how.checkpoint == CHECKPOINT_SHARDED) checkpoint_begin_sharded(out, state);
    else if (g->comm->rank == 0) checkpoint_begin(&w, out, state);
    comm_barrier(g->comm); // now the folder exists
    if (writes) gpt2_attach(g, &w, out, state);
    if (writes) gpt2_write_shards(g, &w);
    if (writes && g->comm->rank > 0) checkpoint_detach(&w);
    checkpoint_add_up(g->comm, w.checksum, w.elements); // all ranks have written
    if (g->comm->rank == 0) checkpoint_commit(&w, keep);
}

// ----------------------------------------------------------------------------
// 8. training

// Everything that a run has, except the model.
typedef struct {
    Options o;
    World world;
    Sharding how;
    Comm groups[2];                 // communicators beside the world's
    Comm *shards, *replicas;        // the ranks of one copy of the model; those that hold the same shard; views
    Tokenizer tokenizer;
    DataLoader train, val;          // val only if --val-data is not empty
    LossScaler scaler;
    Logger log;
    long long tokens_per_step;
    int accumulation;               // micro-batches per step
    floatX* row;                    // (V) one position's logits on the host, for sampling, owned
    float* logits;                  // (V) the same as floats, owned
} Run;

static void open_data(Run* run, GPT2Config c) {
    const Options* o = &run->o;
    int rank = run->world.comm.rank, N = run->world.comm.size;
    long long micro = o->batch_size * o->seq_len * N; // of all ranks together
    run->tokens_per_step = o->total_batch_size ? o->total_batch_size : micro;
    require(run->tokens_per_step % micro == 0, "--total-batch-size %lld must be a multiple of --batch-size %lld x --seq-len %lld x %d ranks = %lld tokens",
            run->tokens_per_step, o->batch_size, o->seq_len, N, micro);
    run->accumulation = (int)(run->tokens_per_step / micro);
    DataShape shape = { (int)o->batch_size, (int)o->seq_len, c.V, run->tokens_per_step / o->seq_len, rank, N, (uint64_t)o->seed };
    dataloader_init(&run->train, "--data", o->data, &run->tokenizer, shape, DATA_TRAIN);
    if (o->val_data[0]) dataloader_init(&run->val, "--val-data", o->val_data, &run->tokenizer, shape, DATA_EVAL);
}

// Mean loss over the first --eval-steps global batches of the validation data. Each rank sees its part of them.
static EvalLoss evaluate(GPT2* g, Run* run) {
    long long micro_batches = (run->o.eval_steps < run->val.num_batches ? run->o.eval_steps : run->val.num_batches) * run->accumulation;
    double tokens = 0, bytes = 0;
    dataloader_seek(&run->val, 0, 0);
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
    double loss = comm_host_sum(g->comm, stats.loss);
    EvalLoss mean = { loss / comm_host_sum(g->comm, tokens), loss / comm_host_sum(g->comm, bytes) };
    return mean;
}

// Prints --sample-tokens tokens that follow --prompt, each drawn from the model's distribution.
static void print_sample(GPT2* g, Run* run, long long step) {
    const Options* o = &run->o;
    GPT2Config c = g->config;
    size_t prompt_tokens;
    int* prompt = tokenizer_encode(&run->tokenizer, o->prompt, strlen(o->prompt), &prompt_tokens);
    size_t n = 1 + prompt_tokens, total = n + (size_t)o->sample_tokens;
    int* tokens = (int*)xcalloc(total, sizeof(int));
    tokens[0] = run->tokenizer.eot;
    memcpy(tokens + 1, prompt, prompt_tokens * sizeof(int));
    TokenPrinter printer;
    memset(&printer, 0, sizeof printer);
    logger_say("sample after step %lld:\n%s", step, o->prompt);
    for (; n < total; n++) {
        int T = (int)size_min(n, (size_t)g->seq_len);
        gpt2_load_batch(g, tokens + n - T, NULL, 1, T);
        gpt2_forward(g);
        floatX* last = g->lnf + (size_t)(T - 1)*c.C;
        matmul_forward(g->logits, last, root_view(c, unit_params(g, 0)).wte, NULL, 1, c.C, c.Vp);
        unit_release(g, 0);
        device_to_host(run->row, g->logits, (size_t)c.V * sizeof(floatX));
        convert_dtype(run->logits, DTYPE_F32, run->row, FLOATX_DTYPE, (size_t)c.V);
        float u = random_uniform((uint64_t)o->seed, STREAM_SAMPLER + (uint64_t)step, n);
        tokens[n] = sample_token(run->logits, run->tokenizer.vocab_size, o->temperature, o->top_k, u);
        size_t length;
        const char* bytes = tokenizer_decode(&run->tokenizer, tokens[n], &length);
        print_token(&printer, bytes, length);
    }
    print_token_end(&printer);
    printf("\n");
    free(tokens);
    free(prompt);
}

// One optimizer step, counted from 0: forward and backward over every micro-batch, clip, update.
static StepStats train_step(GPT2* g, Run* run, long long step) {
    const Options* o = &run->o;
    // A token's share of the mean over the global batch. It includes 1/N, so the sum of the gradients is their average.
    float dloss = (float)(run->scaler.scale / (double)run->tokens_per_step);
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
    AdamW adamw = { (float)learning_rate(o, step), (float)o->beta1, (float)o->beta2, (float)o->eps, (float)o->weight_decay, g->updates + 1 };
    gpt2_update(g, adamw);
    StepStats stats;
    device_to_host(&stats, g->stats, sizeof stats); // the only wait for the device in a step
    if (stats.grad_scale != 0) g->updates++;
    trace_step(step + 1);
    return stats;
}

static StepLog step_log(GPT2* g, const Run* run, const StepStats* s, long long step, double seconds) {
    StepLog l;
    memset(&l, 0, sizeof l);
    l.step = step + 1;
    l.loss = s->loss / (double)run->tokens_per_step;
    l.grad_norm = fabs(s->grad_norm); // so that the log does not show a NaN's sign
    l.param_norm = (float)sqrt(s->param_square); // more digits would depend on the order of summation
    l.lr = learning_rate(&run->o, step);
    l.loss_scale = run->scaler.scale;
    l.tokens = l.step * run->tokens_per_step;
    l.tokens_per_s = (double)run->tokens_per_step / seconds;
    l.step_ms = 1e3 * seconds;
    l.flops = gpt2_flops_per_token(g->config, g->seq_len) * (double)run->tokens_per_step;
    l.mem_bytes = device_memory_total();
    l.mem_peak_bytes = device_memory_peak();
    l.comm_bytes = (size_t)(run->world.bytes / (unsigned)g->comm->size);
    l.comm_exposed_ms = 1e3 * run->world.exposed;
    l.skipped = s->grad_scale == 0;
    return l;
}

static void save(GPT2* g, Run* run, OptionTable* table, long long step) {
    TrainState state;
    memset(&state, 0, sizeof state);
    state.config = g->config;
    state.dtype = FLOATX_DTYPE;
    state.has_optimizer = true;
    state.step = step;
    state.epoch = run->train.epoch;
    state.position = run->train.position;
    state.adamw_t = g->updates;
    state.loss_scale = run->scaler.scale;
    state.good_steps = run->scaler.good_steps;
    state.seed = run->o.seed;
    state.seq_len = run->o.seq_len;
    json_t* options = options_to_json(table);
    state.options = json_dumps(options, 0);
    gpt2_save(g, run->o.out, &state, run->o.keep);
    comm_barrier(g->comm);
    free(state.options);
    json_decref(options);
    logger_say("saved step %lld under %s\n", step, run->o.out);
}

// All ranks gather the same parameters, so they must be equal to the bit.
static void check_ranks(GPT2* g, World* world, long long step) {
    uint64_t sums[MAX_UNITS];
    float* host = (float*)xcalloc(STAGED, sizeof(float));
    for (int u = 0; u < g->num_units; u++) {
        sums[u] = device_checksum(unit_params(g, u), sizeof(floatX), g->layout.units[u].size, 0, host, STAGED * sizeof(float));
        unit_release(g, u);
    }
    free(host);
    require_same_units(&world->control, "parameters", sums, g->num_units, step);
}

// The ranks that together hold one copy of the model are neighbours. The ranks with the same shard are S apart.
static void join_groups(Run* run) {
    Comm* world = &run->world.comm;
    int S = run->how.shards;
    run->shards = S == world->size ? world : &run->groups[0];
    run->replicas = S == 1 && world->size > 1 ? world : &run->groups[1];
    if (run->how.sharding == SHARD_HYBRID) {
        comm_split(&run->groups[0], world, "shard", world->rank / S);
        comm_split(&run->groups[1], world, "replica", world->rank % S);
        run->shards = &run->groups[0];
        run->replicas = &run->groups[1];
    } else if (run->shards != world) comm_alone(run->shards, world, "shard");
    else comm_alone(run->replicas, world, "replica");
}

static bool is_due(long long every, long long step, long long last) { return every > 0 && (step % every == 0 || step == last); }

int main(int argc, char** argv) {
    static Run run;
    static GPT2 g;
    run.o = options_defaults();
    const Options* o = &run.o;
    OptionTable table = options_table("train_gpt2_fsdp", "train GPT-2 fully sharded: each rank keeps a part of everything, and gathers ahead what it uses");
    options_common(&table, &run.o);
    options_world(&table, &run.world);
    options_sharding(&table, &run.how);
    options_parse(&table, argc, argv);
    RankInfo ranks = ranks_find();
    device_init(ranks.local_rank, ranks.local_size);
    device_memory_limit((size_t)ceil(o->memory_limit * 1e9)); // rounded up, because 0 means no limit
    world_start(&run.world, o, ranks);
    int rank = ranks.rank, N = ranks.size;
    sharding_check(&run.how, N);
    join_groups(&run);
    layers_choose((AttentionChoice)o->attention, o->deterministic);

    tokenizer_open(&run.tokenizer, o->tokenizer);
    CheckpointReader checkpoint;
    bool from_checkpoint = open_checkpoint(o, &checkpoint);
    GPT2Config config = config_for_run(o, &table, &run.tokenizer, from_checkpoint ? &checkpoint : NULL);
    open_data(&run, config);
    require_agreement(&run.world.control, run_facts(&table, config, &run.train));

    run.how.accumulation = run.accumulation;
    size_t predicted[MEMORY_KINDS]; // first as if --recompute auto kept everything
    gpt2_predict_memory(config, (int)o->batch_size, (int)o->seq_len, o->recompute, &run.world.comm, &run.how, predicted);
    if (o->recompute == RECOMPUTE_AUTO) run.o.recompute = world_memory_fits(&run.world, predicted) ? RECOMPUTE_NONE : RECOMPUTE_BLOCK;
    gpt2_predict_memory(config, (int)o->batch_size, (int)o->seq_len, o->recompute, &run.world.comm, &run.how, predicted);
    gpt2_init(&g, config, (int)o->batch_size, (int)o->seq_len, o->recompute, &run.world.comm,
              run.shards, run.replicas, run.how);
    comm_share_memory(run.shards); // --nccl-windows
    report_run(config, predicted, run.tokens_per_step, run.accumulation, o->recompute);
    unsigned long long sent = gpt2_predict_sent(config, N, &run.how);
    report_ranks(&run.world, sent);
    report_sharding(config, &run.how, N);
    run.row = (floatX*)xcalloc((size_t)config.V, sizeof(floatX));
    run.logits = (float*)xcalloc((size_t)config.V, sizeof(float));
    run.scaler = loss_scaler_init(o);

    long long first = 0;
    if (!o->resume) gpt2_set_weights(&g, (uint64_t)o->seed, from_checkpoint ? &checkpoint : NULL, CHECKPOINT_MODEL);
    else {
        gpt2_load_state(&g, &checkpoint);
        first = checkpoint.state.step;
        dataloader_seek(&run.train, checkpoint.state.epoch, checkpoint.state.position);
        if (checkpoint.state.dtype == FLOATX_DTYPE) { // a loss scale of another precision is useless here
            run.scaler.scale = checkpoint.state.loss_scale;
            run.scaler.good_steps = checkpoint.state.good_steps;
        }
    }
    if (from_checkpoint) {
        printf("start      step %lld of %lld, from %s\n", first, o->steps, checkpoint.path);
        checkpoint_add_up(&run.world.comm, checkpoint.checksum, checkpoint.elements);
        checkpoint_close(&checkpoint);
    }
    json_t* record = world_record(run_record(config, predicted, N), &run.world, sent);
    logger_open(&run.log, &table, o, rank == 0 ? o->out : "", first, record);
    run.log.ranks = N;

    world_trace(&run.world, o->trace);
    size_t allocations = device_allocations();
    for (long long step = first; ; step++) {
        bool fresh = step > first || first == 0; // a resumed run does not repeat what the previous one did
        if (o->val_data[0] && fresh && is_due(o->eval_every, step, o->steps)) logger_eval(&run.log, step, evaluate(&g, &run));
        if (fresh && (step > 0 || o->steps == 0) && is_due(o->sample_every, step, o->steps)) print_sample(&g, &run, step);
        if (o->out[0] && step > first && (is_due(o->save_every, step, o->steps) || step == o->steps)) save(&g, &run, &table, step);
        if (step == o->steps) break;

        world_step_begin(&run.world, step + 1, g.params);
        double start = now_seconds();
        StepStats stats = train_step(&g, &run, step);
        world_step_end(&run.world, now_seconds() - start);
        StepLog l = step_log(&g, &run, &stats, step, now_seconds() - start);
        logger_step(&run.log, &l);
        loss_scaler_update(&run.scaler, !l.skipped);
        require_progress(&run.scaler, o, l.step, l.loss);
        if (is_due(run.world.check_every, step + 1, o->steps)) check_ranks(&g, &run.world, step + 1);
    }
    logger_close(&run.log);
    gpt2_gather_finish(&g);
    trace_close();
    comm_barrier(&run.world.comm); // all parts are written
    if (rank == 0) trace_merge(o->trace, N);

    bool as_predicted = report_memory(predicted);
    as_predicted &= report_sent(&run.world, sent);
    printf("allocations while training: %zu; times a step waited for data: %lld\n", device_allocations() - allocations, run.train.waits);
    dataloader_free(&run.train);
    if (o->val_data[0]) dataloader_free(&run.val);
    tokenizer_free(&run.tokenizer);
    gpt2_free(&g);
    free(run.row);
    free(run.logits);
    for (int k = 1; k >= 0; k--) if (run.groups[k].world) comm_free(&run.groups[k]);
    world_stop(&run.world);
    device_shutdown();
    return as_predicted ? EXIT_SUCCESS : EXIT_FAILURE;
}
