/*
Train GPT-2 with context parallelism: c ranks share each sequence, T of its cT tokens each, so that it may be longer
than the memory of one rank allows. Only attention needs the other ranks' tokens. With --context-parallel c, N/c groups
of ranks see different sequences; gradients are summed over all N ranks, as in train_gpt2_ddp.cu.

--cp ulysses    (default) exchanges heads for tokens: an all-to-all gives each rank all tokens of NH/c heads, another
                one returns the output (Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, section 3).
--cp allgather  gathers all keys and values for the rank's own queries (Llama 3, arXiv 2407.21783, section 3.3.2).
--cp ring       passes keys and values from rank to rank during attention (Liu et al., arXiv 2310.01889, section 3).
--cp-balance    cuts each sequence: contiguous (default) into one chunk per rank, zigzag into two, an early and a late
                one, which gives all ranks equal work. Zigzag with c = 2: rank 0 has chunks 0, 3; rank 1 has 1, 2.

T counts this rank's tokens of a sequence, here and in the code, and n = BTC. All activations (B,T,C) lie in the order
(chunks,B,T/chunks,C): the tokens of a rank's first chunk in all sequences, then those of its second.

Memory    parameters and their state as in ddp: 16 bytes each, on every rank. Activations of T tokens per sequence.
          Buffers: ulysses 6n elements of floatX (and n per block); allgather 2cn for keys and values of c ranks, and
          (2c + 3)n in fp32, most of them gradients; ring 4n, and 9n in fp32 (out and dq share memory).
Sent      per rank, micro-batch and block, in elements of floatX: ulysses 4n(c-1)/c forward, and as many backward;
          allgather and ring 2n(c-1) forward; backward as many, and 2n(c-1) in fp32 for gradients. With zigzag, a ring
          sends n(c-1)/2 fewer each time, on average. --recompute block sends the forward part again.
          Per step: as much as train_gpt2_ddp.cu.
Run       make train_gpt2_cp && mpirun -np 4 ./train_gpt2_cp --cp ring            (--help lists the options)
Before    train_gpt2_ddp.cu: every rank has whole sequences. New here: attention across ranks.
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
#include "llmc/parallel/context.h"     // defines: ContextParallel, context_*, options_context_parallel
#include "llmc/parallel/shard.h"       // defines: NO_OP, comm_finish (waits, unless it is NO_OP, and sets it to NO_OP)
#include "llmc/data/dataloader.h"      // defines: DataLoader, dataloader_next
#include "llmc/run/trace.h"            // defines: trace_compute, trace_step
#include "llmc/run/run.h"              // defines: Run, run_*, option_*: options, data, log, checkpoints, reports
#include "llmc/run/ranks_run.h"        // defines: ranks_*, options_ranks: what several ranks add to a run
#include "llmc/run/context_run.h"      // defines: ranks_share_sequences, context_report_pairs
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
    float *att_stats;                   // (B,NH,T); with ulysses (B,NH/c,cT)
    floatX *heads;                      // (B,cT,C/c) ulysses: output for this rank's heads; qkv is (B,cT,3C/c)
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
    ContextParallel cp;             // the ranks that share each sequence, and their buffers; owned
    int max_B, seq_len;             // largest micro-batch: seq_len tokens of each of max_B sequences
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
    a->heads = g->cp.how == CP_ULYSSES ? acts_alloc(g, C) : NULL;
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
        }
    }
}

static LayerShapes gpt2_shapes(const GPT2* g) {
    return context_shapes(&g->cp, g->max_B, g->seq_len * g->cp.c, g->config);
}

// Allocates everything. Call after gpt2_configure.
static void gpt2_init(GPT2* g) {
    gpt2_init_params(g);
    gpt2_init_ranges(g);
    gpt2_init_acts(g);
    gpt2_init_scratch(g);
    context_init(&g->cp, (size_t)g->max_B * (size_t)g->seq_len);
    gpt2_init_buckets(g);
    layers_init(gpt2_shapes(g));
}

static void gpt2_free(GPT2* g) {
    layers_free();
    context_free(&g->cp);
    device_free(g->params); device_free(g->grads); device_free(g->master); device_free(g->m); device_free(g->v);
    device_free_all(MEMORY_ACTIVATIONS);
    free(g->buckets);
}

// Computes how many bytes of each kind gpt2_init will allocate. A run compares these predictions with measurements.
static void gpt2_predict_memory(const GPT2* g, size_t bytes[MEMORY_KINDS]) {
    GPT2Config c = g->config;
    size_t P = g->num_params, X = sizeof(floatX);
    size_t BT = (size_t)g->max_B * (size_t)g->seq_len, C = (size_t)c.C, L = (size_t)c.L;
    size_t blocks_kept = g->recompute == RECOMPUTE_BLOCK ? 1 : L, kept = g->cp.how == CP_ULYSSES ? 16 : 15;
    size_t per_token = L * C*X                                                 // res1
                     + blocks_kept * (kept*C*X + (4 + (size_t)c.NH) * 4)       // the rest of a block, float statistics
                     + 9*C*X + 3 * sizeof(float) + 2 * sizeof(int);            // outside the blocks
    memset(bytes, 0, MEMORY_KINDS * sizeof bytes[0]);
    bytes[MEMORY_PARAMETERS] = X * P;
    bytes[MEMORY_GRADIENTS] = X * P;
    bytes[MEMORY_OPTIMIZER] = (NEEDS_MASTER ? 12 : 8) * P;
    bytes[MEMORY_ACTIVATIONS] = BT * per_token + (size_t)g->logits_rows * (size_t)c.Vp * X + sizeof(StepStats);
    bytes[MEMORY_COMMUNICATION] = comm_world_bytes(g->dp) + context_bytes(&g->cp, g->dp, BT);
    bytes[MEMORY_WORKSPACE] = layers_workspace_bytes(gpt2_shapes(g));
    bytes[MEMORY_SNAPSHOT] = X * P + bytes[MEMORY_OPTIMIZER];
}

// Returns the bytes that this rank will send per step.
static double gpt2_predict_sent(const GPT2* g) {
    double N = g->dp->size, gradients = (double)(g->num_params * sizeof(floatX));
    double BT = (double)g->max_B * g->seq_len;
    double forward = context_sent_forward(&g->cp, BT) * (g->recompute == RECOMPUTE_BLOCK ? 2 : 1);
    double attention = g->config.L * (forward + context_sent_backward(&g->cp, BT));
    return g->accumulation * attention + 2 * (N - 1) / N * (gradients + STEP_SUMS * sizeof(double));
}

// ----------------------------------------------------------------------------
// 4. one transformer block

// ---- attention across the c ranks of g->cp, whose chunks of each sequence are 1 per rank, or 2 (zigzag) ----
// above and below are ranks (rank + 1) mod c and (rank - 1) mod c. Buffers, apart from those of ulysses:
//     kv_all, dkv_all     (c,chunks,B,T/chunks,2C) allgather: keys and values of all ranks; their gradients, in fp32
//     kv[2], dkv[2], dkv_received  (chunks,B,T/chunks,2C) ring: the same for one rank each; gradients from above
//     dkv_own             (chunks,B,T/chunks,2C) fp32 gradients of this rank's keys and values, summed over all queries
//     out, dq             (chunks,B,T/chunks,C) the output so far; gradients of queries. fp32, in the same memory
//
// Ulysses: between two all-to-alls, attention runs as on one device, for this rank's NH/c heads. k = 3: q, k and v.
// in (B,T,k,C), all heads of this rank's tokens; send (c,B,T,k,C/c), a part for the heads of each rank; received
// (c,B,T,k,C/c), a part of each rank's tokens; out (B,cT,k,C/c), all tokens of this rank's heads.
static void ulysses_to_heads(ContextParallel* cp, floatX* out, floatX* in, size_t k) {
    context_pack_heads(cp, cp->send, in, k);
    comm_wait(&cp->comm, comm_all_to_all(&cp->comm, cp->received, cp->send, context_part(cp, k), COMM_FLOATX));
    context_unpack_tokens(cp, out, cp->received, k);
}
// The reverse, from (B,cT,k,C/c) to (B,T,k,C): send has a part for the tokens of each rank.
static void ulysses_to_tokens(ContextParallel* cp, floatX* out, floatX* in, size_t k) {
    context_pack_tokens(cp, cp->send, in, k);
    comm_wait(&cp->comm, comm_all_to_all(&cp->comm, cp->received, cp->send, context_part(cp, k), COMM_FLOATX));
    context_unpack_heads(cp, out, cp->received, k);
}

// Attends with this rank's queries to kv, the keys and values of rank `owner`. A chunk sees itself (causal) and earlier
// ones. Forward (dout is NULL): computes the output o and s = log(sum(exp(scores))), or merges what these keys give (2)
// with what earlier calls gave (1): s = log(exp(s1) + exp(s2)), o = exp(s1 - s) o1 + exp(s2 - s) o2.
// Backward: adds the gradients of queries to cp->dq, and those of kv to dkv.
static void attend(GPT2* g, BlockActs a, const floatX* kv, int owner, const floatX* dout, float* dkv) {
    ContextParallel* cp = &g->cp;
    int B = cp->B, tokens = cp->chunk_tokens, C = g->config.C, NH = g->config.NH;
    for (int j = 0; j < cp->chunks; j++)
        for (int i = 0; i < cp->chunks; i++) {
            int queries = context_chunk(cp, cp->rank, j), keys = context_chunk(cp, owner, i); // chunks of the sequence
            if (keys > queries) continue; // all of them are masked
            size_t q_at = context_offset(cp, j, C), kv_at = context_offset(cp, i, 2*C); // elements before these chunks
            float* stats = a.att_stats + context_offset(cp, j, NH);
            bool causal = keys == queries, merge = owner != cp->rank || i > 0; // a rank's own first chunk comes first
            if (dout == NULL) { // forward
                attention_part_forward(cp->out + q_at, stats, a.qkv + 3*q_at, kv + kv_at, causal, merge,
                                       B, tokens, C, NH);
            } else { // backward
                attention_part_backward(cp->dq + q_at, dkv + kv_at, dout + q_at, a.qkv + 3*q_at, kv + kv_at,
                                        a.atty + q_at, stats, causal, B, tokens, C, NH);
                context_count_pairs(cp, causal); // of query and key: the work, which gpt2_end compares with a formula
            }
        }
}

// All-gather: a rank holds all keys and values of one block at a time. Backward (dout is not NULL): cp->dkv_own becomes
// the gradients of its own keys and values, summed over all ranks.
static void gather_attention(GPT2* g, BlockActs a, const floatX* dout) {
    ContextParallel* cp = &g->cp;
    size_t size = context_elements(cp, 2*g->config.C);
    floatX* own = cp->kv_all + (size_t)cp->rank * size;
    context_take_kv(cp, own, a.qkv); // copies keys and values (2C of 3C) out of qkv
    CommOp gathered = comm_all_gather(&cp->comm, cp->kv_all, own, size, COMM_FLOATX);
    if (dout) device_zero(cp->dkv_all, (size_t)cp->c * size * sizeof(float));
    for (int s = 0; s < cp->c; s++) { // its own come first, while the others arrive
        int owner = (cp->rank + s) % cp->c;
        if (s == 1 || cp->c == 1) comm_wait(&cp->comm, gathered); // before the first keys of another rank
        attend(g, a, cp->kv_all + (size_t)owner * size, owner, dout, cp->dkv_all + (size_t)owner * size);
    }
    if (dout) comm_wait(&cp->comm, comm_reduce_scatter(&cp->comm, cp->dkv_own, cp->dkv_all, size, COMM_F32));
}

// Ring: in step s a rank attends to the keys and values of rank (rank + s) mod c, in kv[s % 2]. At the same time it
// sends them to the rank below, and receives the next ones from above.
typedef struct { CommOp received, sent; } Hop;
static void ring_begin(ContextParallel* cp, int s, Hop* moved) {
    int owner = (cp->rank + s) % cp->c, next = (owner + 1) % cp->c;
    size_t chunk_elements = context_offset(cp, 1, 2*(int)cp->C);
    if (s == cp->c - 1) return;
    // With zigzag, a rank r > owner needs only the owner's early chunk: the late one comes after all queries of r.
    size_t in = chunk_elements * context_chunks_sent(cp, cp->rank, next);
    size_t out = chunk_elements * context_chunks_sent(cp, cp->below, owner);
    moved->received = comm_recv(&cp->comm, cp->kv[(s + 1) % 2], in, COMM_FLOATX, cp->above);
    moved->sent = comm_send(&cp->comm, cp->kv[s % 2], out, COMM_FLOATX, cp->below);
}
static void ring_end(ContextParallel* cp, Hop* moved) { // returns at once if nothing was begun
    comm_finish(&cp->comm, &moved->received);
    comm_finish(&cp->comm, &moved->sent);
}
static void ring_forward(GPT2* g, BlockActs a) {
    ContextParallel* cp = &g->cp;
    Hop moved = { NO_OP, NO_OP };
    context_take_kv(cp, cp->kv[0], a.qkv);
    for (int s = 0; s < cp->c; s++) {
        ring_begin(cp, s, &moved);
        attend(g, a, cp->kv[s % 2], (cp->rank + s) % cp->c, NULL, NULL);
        ring_end(cp, &moved);
    }
}
// Gradients travel one step behind: a rank adds its part for the owner, in dkv[s % 2], to the sum from above, and sends
// it on. After c-1 hops the sum reaches the owner, which adds it to its own part in dkv_own. On rank r, with c = 3:
//     s = 0    dkv_own = gradients of its own keys and values
//     s = 1    dkv[1] = its part for rank r+1, and begins to send it down
//     s = 2    dkv[0] = its part for rank r+2 + the sum received from above, and begins to send it down, to its owner
//     at last  dkv_own += the sum received from above
static void ring_backward(GPT2* g, BlockActs a, const floatX* dout) {
    ContextParallel* cp = &g->cp;
    size_t size = context_elements(cp, 2*g->config.C);
    Hop moved = { NO_OP, NO_OP }, added = { NO_OP, NO_OP }; // keys and values; their gradients
    context_take_kv(cp, cp->kv[0], a.qkv);
    for (int s = 0; s < cp->c; s++) {
        float* part = s == 0 ? cp->dkv_own : cp->dkv[s % 2];
        ring_begin(cp, s, &moved);
        device_zero(part, size * sizeof(float));
        attend(g, a, cp->kv[s % 2], (cp->rank + s) % cp->c, dout, part);
        ring_end(cp, &moved);
        ring_end(cp, &added);
        if (s > 1) add_in_place_fp32(part, cp->dkv_received, size);
        if (s == 0) continue;
        added.received = comm_recv(&cp->comm, cp->dkv_received, size, COMM_F32, cp->above);
        added.sent = comm_send(&cp->comm, part, size, COMM_F32, cp->below);
    }
    if (cp->c == 1) return;
    ring_end(cp, &added);
    add_in_place_fp32(cp->dkv_own, cp->dkv_received, size);
}

// Computes a.atty (B,T,C) from qkv (B,T,3C) for this rank's tokens. Keeps all that the backward pass needs.
static void attention_across_forward(GPT2* g, BlockActs a, floatX* qkv) {
    ContextParallel* cp = &g->cp;
    int C = g->config.C, NH = g->config.NH, c = cp->c;
    if (cp->how == CP_ULYSSES) {
        ulysses_to_heads(cp, a.qkv, qkv, 3);
        attention_forward(a.heads, a.att_stats, a.qkv, g->B, c * g->T, C / c, NH / c);
        ulysses_to_tokens(cp, a.atty, a.heads, 1);
        return;
    }
    if (cp->how == CP_ALLGATHER) gather_attention(g, a, NULL);
    else ring_forward(g, a);
    from_fp32(a.atty, cp->out, context_elements(cp, C));
}
// Computes dqkv (B,T,3C) from dout (B,T,C).
static void attention_across_backward(GPT2* g, BlockActs a, floatX* dqkv, floatX* dout) {
    ContextParallel* cp = &g->cp;
    int C = g->config.C, NH = g->config.NH, c = cp->c;
    if (cp->how == CP_ULYSSES) {
        floatX *dheads = dqkv, *dqkv_heads = cp->received; // for this rank's heads, in memory that is free
        ulysses_to_heads(cp, dheads, dout, 1);
        attention_backward(dqkv_heads, dheads, a.qkv, a.heads, a.att_stats, g->B, c * g->T, C / c, NH / c);
        ulysses_to_tokens(cp, dqkv, dqkv_heads, 3); // packs dqkv_heads before it receives into the same memory
        context_count_pairs(cp, true); // as in attend
        return;
    }
    device_zero(cp->dq, context_elements(cp, C) * sizeof(float));
    if (cp->how == CP_ALLGATHER) gather_attention(g, a, dout);
    else ring_backward(g, a, dout);
    context_put_gradients(cp, dqkv); // from cp->dq and cp->dkv_own
}

// The block's input is x + branch. If branch is NULL, the input is x, and x is a.res1 itself.
static void block_attention_forward(GPT2* g, AttentionParams p, BlockActs a, const floatX* x, const floatX* branch) {
    int BT = g->B * g->T, C = g->config.C;
    floatX* qkv = g->cp.how == CP_ULYSSES ? g->dbt4c : a.qkv; // then exchanged into a.qkv
    residual_layernorm_forward(a.res1, a.ln1, a.ln1_mean, a.ln1_rstd, x, branch, p.ln1w, p.ln1b, BT, C);
    matmul_forward(qkv, a.ln1, p.qkvw, p.qkvb, BT, C, 3*C);
    attention_across_forward(g, a, qkv);
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
    int BT = g->B * g->T, C = g->config.C;
    floatX* dres2 = g->dres;
    // res2 = res1 + atty projw^T + projb
    matmul_backward_input(datty, dres2, p.projw, BT, C, C);
    // atty = attention(qkv)
    attention_across_backward(g, a, dqkv, datty);
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

// Copies T tokens of each sequence to the device: inputs and targets are (B,cT) on the host. targets may be NULL.
static void gpt2_load_batch(GPT2* g, const int* inputs, const int* targets, int B, int T) {
    g->B = B;
    g->T = T;
    context_begin(&g->cp, B, T);
    context_load(&g->cp, g->inputs, inputs);
    if (targets) context_load(&g->cp, g->targets, targets);
}

static void embedding_forward(GPT2* g, RootParams root) {
    int C = g->config.C;
    trace_compute("forward, embedding", -1);
    // res1 of block 0 = wte[inputs] + wpe
    for (int i = 0; i < g->cp.chunks; i++)
        encoder_forward(g->acts[0].res1 + context_offset(&g->cp, i, C), g->inputs + context_offset(&g->cp, i, 1),
                        root.wte, root.wpe + context_position(&g->cp, i, C), g->B, g->cp.chunk_tokens, C);
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
    int C = g->config.C;
    trace_compute("backward, embedding", -1);
    // res1 of block 0 = wte[inputs] + wpe
    // Rows of wpe at other ranks' positions enter the all-reduce as zeros.
    if (g->grad_mode == GRAD_SET) device_zero(droot.wpe, (size_t)g->config.max_T * (size_t)C * sizeof(floatX));
    for (int i = 0; i < g->cp.chunks; i++)
        encoder_backward(droot.wte, droot.wpe + context_position(&g->cp, i, C), g->dres + context_offset(&g->cp, i, C),
                         g->inputs + context_offset(&g->cp, i, 1), g->B, g->cp.chunk_tokens, C, g->grad_mode);
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

// Call after the backward pass. On return, each gradient is the mean over the global batch times the loss scale, the
// same on all replicas. g->stats->loss is the sum over the global batch. train_step explains why a sum of gradients is
// already their mean. All ranks then have the same gradients, whose norm (gpt2_clip) needs no sum over the ranks.
static void gpt2_reduce(GPT2* g) {
    trace_compute("wait for gradients", -1);
    CommOp loss = comm_all_reduce(g->dp, &g->stats->loss, STEP_SUMS, COMM_F64);
    if (g->ddp == DDP_NAIVE) gpt2_reduce_naive(g);
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
    run_options(run, "train_gpt2_cp", "train GPT-2 with context parallelism: ranks share each sequence");
    options_ranks(run);
    g->ddp = DDP_BUCKETED;
    g->bucket_mb = 25;
    option_choice(&run->table, "ddp", &g->ddp, "naive|bucketed",
                  "naive: all-reduce after the backward pass; bucketed: in buckets during it");
    option_float(&run->table, "bucket-mb", &g->bucket_mb, 1e-6, 1e6,
                 "MiB of gradients per bucket, but at most 1 in the first");
    options_context_parallel(&run->table, &g->cp);
    ranks_share_sequences(run, &g->cp);
}

// Sets the fields that gpt2_predict_memory and gpt2_init need, except recompute, which gpt2_predict sets (section 9).
static void gpt2_configure(void* model, Run* run) {
    GPT2* g = (GPT2*)model;
    g->config = run->config;
    g->max_B = (int)run->o.batch_size;
    g->seq_len = context_tokens(&g->cp, (int)run->o.seq_len);
    g->accumulation = run->accumulation;
    g->logits_rows = classifier_rows(g->max_B * g->seq_len, g->config.Vp);
    g->num_units = gpt2_num_units(g->config);
    g->dp = ranks_world(run);
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
    double loss = comm_host_sum(g->dp, stats.loss), c = g->cp.c; // each sequence's tokens are counted on c ranks
    EvalLoss mean = { loss / (comm_host_sum(g->dp, tokens) / c), loss / (comm_host_sum(g->dp, bytes) / c) };
    return mean;
}

// For samples: computes on the host the logits (V) of the token that follows tokens (T).
static void next_logits(void* self, const int* tokens, int T, floatX* logits) {
    GPT2* g = (GPT2*)self;
    GPT2Config c = g->config;
    int chunks = g->cp.c * g->cp.chunks, whole = (int)round_up((size_t)T, (size_t)chunks), row; // no token sees padding
    int* padded = new_array(int, whole);
    memcpy(padded, tokens, (size_t)T * sizeof(int));
    gpt2_load_batch(g, padded, NULL, 1, whole / g->cp.c);
    gpt2_forward(g);
    int owner = context_owner(&g->cp, T - 1, &row);
    if (g->cp.rank == owner) device_copy(g->dbtc, g->lnf + (size_t)row*c.C, (size_t)c.C * sizeof(floatX));
    comm_wait(&g->cp.comm, comm_broadcast(&g->cp.comm, g->dbtc, (size_t)c.C, COMM_FLOATX, owner));
    matmul_forward(g->logits, g->dbtc, root_view(g, unit_params(g, 0)).wte, NULL, 1, c.C, c.Vp);
    unit_release(g, 0);
    device_to_host(logits, g->logits, (size_t)c.V * sizeof(floatX));
    free(padded);
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
    bool as_predicted = context_report_pairs(run, &g->cp);
    return ranks_end(run) && as_predicted;
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
