/*
plan.h - predicts what training will cost: bytes per rank, bytes sent, seconds per step, in every stage of the course.

Bytes     are exact, and by the stages' own formulas (plan_stage.h), here for any precision, number of ranks and device;
          test/tools/test_plan.py checks that a run predicts the same. Of the layers' workspace only the fp32 sums of wte's gradient
          are counted, because the rest depends on libraries and threads. fsdp has both prefetches where they have room.
Messages  take alpha + n/bandwidth (Hockney 1994). A ring collective of N ranks has N-1 hops one after the other, and every rank
          sends (N-1)/N of the data; an all-reduce is a reduce-scatter and an all-gather, so twice that (Thakur, Rabenseifner
          and Gropp 2005):
              seconds = k (N-1) alpha + k bytes (N-1)/N / busbw        k = 2 for an all-reduce, else 1
          busbw is defined as in nccl-tests. With several nodes, nodes-1 of the hops are between nodes, and the data that crosses
          there is limited by the network interfaces. Of a mesh, t neighbours share a replica of the model, and ranks that are t
          apart the same part: these groups communicate at the same time, and share their nodes' interfaces. A tree moves the
          same data in (ranks of a node - 1) hops inside and log2(nodes) between nodes; NCCL has a tree for all-reduce and,
          from 2.23 on with one rank per node, for the others.
          Hops are counted as NCCL counts them when it chooses an algorithm (src/graph/tuning.cc).
Overlap   is a timeline of two queues, compute and communication, each doing one thing at a time in order of issue. A unit is
          computed once it has been gathered (plan_micro_batch); time that compute waits is exposed. So exposed <= communication.
          Where fsdp gathers groups of blocks, "unit" means such a group. A third queue has what a communicator of its own
          sends: with tensor parallelism activations, where a sum is exposed except what one product, dW, hides in the backward
          pass; with fsdp's replicas the sums of shards. The queues do not slow each other down.
Offload   moves a group's shard over the link to the host before its gather and after its reduction, and AdamW reads the host's
          memory.
Compute   is FLOPs / (peak x MFU), or measured, and the same for every N, because each rank has its own batch. t ranks that
          share one take 1/t of it. AdamW takes no time, unless the bandwidth of a device's memory is given. Communication
          takes as much from compute beside it as --sm-share says; that smaller products reach less of the peak is ignored.
*/
#ifndef DEV_PLAN_H
#define DEV_PLAN_H
#include "../../llmc/base/folder.h"
#include "../../llmc/device/layers_api.h"
#include "../../llmc/model/gpt2.h"
#include "../../llmc/model/training_options.h"
#include "../../llmc/parallel/pipeline.h"
#include "../../llmc/parallel/split.h"
#include "plan_compress.h"
#include "plan_gpus.h"
#include "plan_stage.h"
#include <jansson.h>

static const char* const plan_stage_names[PLAN_STAGES + 3] = { "ddp", "zero-1", "zero-2", "zero-3", "fsdp", "tp", "pp", "3d" };

// ---- bytes per parameter ----
typedef struct { double parameters, gradients, optimizer; } StateBytes; // per parameter, before anything is sharded

// In 16 bits: 2 + 2 + 12, with an fp32 master copy and two moments (Rajbhandari et al. 2020, section 3.1); in fp32: 4 + 4 + 8.
static inline StateBytes state_bytes(size_t X, bool master) {
    StateBytes s = { (double)X, (double)X, 8 + (master ? 4.0 : 0.0) };
    return s;
}
// The same on one of N ranks: stage 1 shards the optimizer's state, stage 2 also gradients, stage 3 and FSDP everything.
static inline StateBytes state_bytes_sharded(StateBytes s, PlanStage stage, double N) {
    if (stage >= PLAN_ZERO1) s.optimizer /= N;
    if (stage >= PLAN_ZERO2) s.gradients /= N;
    if (stage >= PLAN_ZERO3) s.parameters /= N;
    return s;
}
static inline double state_bytes_sum(StateBytes s) { return s.parameters + s.gradients + s.optimizer; }

// ---- bytes of the stage programs, exactly ----
static inline size_t plan_bytes_total(PlanBytes b) { // of the device
    size_t total = 0;
    for (int k = 0; k < MEMORY_KINDS; k++) total += k == MEMORY_OFFLOADED ? 0 : b.memory[k];
    return total;
}

// Of one rank of a pipeline, or with PLAN_3D of each of the ranks that have this stage of a mesh.
static inline PlanBytes plan_rank_bytes(const Plan* p, PlanStage stage, int rank) {
    Plan of = *p;
    of.pipe.rank = rank;
    if (stage == PLAN_3D) return p->X == sizeof(float) ? plan_3d_fp32(&of, stage) : plan_3d_bf16(&of, stage);
    return p->X == sizeof(float) ? plan_pp_fp32(&of, stage) : plan_pp_bf16(&of, stage);
}
static inline PlanBytes pipe_bytes(const Plan* p, int rank) { return plan_rank_bytes(p, PLAN_PP, rank); }
// The rank that keeps most, or that keeps least; of equal ones the first.
static inline int plan_extreme_rank(const Plan* p, PlanStage stage, bool most) {
    size_t extreme = plan_bytes_total(plan_rank_bytes(p, stage, 0));
    int rank = 0;
    for (int r = 1; r < p->pipe.p; r++) {
        size_t bytes = plan_bytes_total(plan_rank_bytes(p, stage, r));
        if (most ? bytes <= extreme : bytes >= extreme) continue;
        extreme = bytes;
        rank = r;
    }
    return rank;
}
static inline int pipe_extreme_rank(const Plan* p, bool most) { return plan_extreme_rank(p, PLAN_PP, most); }

static inline PlanBytes plan_bytes(const Plan* p, PlanStage stage) {
    bool fp32 = p->X == sizeof(float);
    if (stage == PLAN_DDP && is_compressed(p)) return compressed_bytes(p);
    if (stage == PLAN_DDP) return fp32 ? plan_ddp_fp32(p, stage) : plan_ddp_bf16(p, stage);
    if (stage == PLAN_FSDP) return fp32 ? plan_fsdp_fp32(p, stage) : plan_fsdp_bf16(p, stage);
    if (stage == PLAN_TP) return fp32 ? plan_tp_fp32(p, stage) : plan_tp_bf16(p, stage);
    if (stage >= PLAN_PP) {
        return plan_rank_bytes(p, stage, p->pipe.rank == PLAN_MOST ? plan_extreme_rank(p, stage, true) : p->pipe.rank);
    }
    return fp32 ? plan_zero_fp32(p, stage) : plan_zero_bf16(p, stage);
}
static inline size_t plan_memory_total(const Plan* p, PlanStage stage) { return plan_bytes_total(plan_bytes(p, stage)); }
// Bytes that N ranks together send per step. This is a whole number, which one rank's share of it need not be.
static inline double plan_sent(const Plan* p, PlanStage stage) { return round(plan_bytes(p, stage).sent * p->N); }

// Whether t ranks can share a replica of the model. If not, plan_bytes dies and says why.
static inline bool plan_divides(const Plan* p) {
    if (p->N % p->t != 0 || p->config.NH % p->t != 0 || p->config.Vp % p->t != 0) return false;
    return !p->sequence_parallel || p->B * p->T % p->t == 0;
}
// The same of p ranks of a pipeline; a split in numbers is another matter.
static inline bool pipe_divides(const Plan* p) {
    const PlanPipe* l = &p->pipe;
    return p->N % l->p == 0 && l->p * l->v <= p->config.L && (l->schedule != SCHEDULE_INTERLEAVED || p->accumulation % l->p == 0);
}

// The largest dN (N blocks and heads, 64N channels) that a rank with so many bytes can train; 0: none.
static inline int plan_largest_depth(Plan p, PlanStage stage, double bytes) {
    for (int d = MAX_UNITS - 1; d > 0; d--) {
        p.config.L = p.config.NH = d;
        p.config.C = 64 * d;
        if (stage == PLAN_TP && !plan_divides(&p)) continue;
        if (stage == PLAN_PP && !pipe_divides(&p)) continue;
        if ((double)plan_memory_total(&p, stage) <= bytes) return d;
    }
    return 0;
}

// ---- links ----
typedef enum { PLAN_ALL_REDUCE, PLAN_REDUCE_SCATTER, PLAN_ALL_GATHER, PLAN_COLLECTIVES } PlanCollective;
static const char* const plan_collective_names[PLAN_COLLECTIVES] = { "all-reduce", "reduce-scatter", "all-gather" };
static inline int collective_passes(PlanCollective c) { return c == PLAN_ALL_REDUCE ? 2 : 1; }

typedef struct {
    double alpha[PLAN_COLLECTIVES]; // seconds per hop
    double busbw[PLAN_COLLECTIVES]; // bytes per second that a rank sends
    bool measured;                  // between nodes: with all of a node's interfaces, as nccl-tests define it
} Link;

// Nominal values: bandwidths per direction are the vendors', and collectives reach less; alphas are what NCCL assumes for a hop
// of its ring with large messages (hwLat in src/graph/tuning.cc of 2.18 and later).
typedef struct { const char *name, *what; double alpha, busbw; } LinkPreset;
static const LinkPreset link_presets[] = {
    { "nvlink", "NVLink 4, 450 GB/s per direction", 3.4e-6, 450e9 },               // half of the H100's 900 GB/s both ways
    { "nvlink3", "NVLink 3, 300 GB/s per direction", 3.4e-6, 300e9 },              // of the A100's 600
    { "nvlink2", "NVLink 2, 150 GB/s per direction", 3.4e-6, 150e9 },              // of the V100's 300
    { "pcie", "PCIe 4.0 x16, 31.5 GB/s per direction", 5.7e-6, 31.5e9 },           // 16 lanes x 16 GT/s x 128/130 / 8
    { "infiniband", "NDR InfiniBand, 50 GB/s per interface", 14e-6, 50e9 },        // 400 Gb/s
    { "hdr", "HDR InfiniBand, 25 GB/s per interface", 14e-6, 25e9 },               // 200 Gb/s
};
static inline const LinkPreset* link_preset(const char* name) { // NULL: there is none
    for (size_t i = 0; i < sizeof link_presets / sizeof link_presets[0]; i++) {
        if (strcmp(name, link_presets[i].name) == 0) return &link_presets[i];
    }
    return NULL;
}

// Reads what dev/comm measured on ranks of one machine. Its alpha is for a whole call, ours for a hop.
static inline Link link_read(const char* path) {
    size_t n;
    FileSource from = { path, "--link and --inter-link want nvlink, nvlink3, nvlink2, pcie, infiniband, hdr or a file that"
                              " comm_bench --json wrote" };
    char* text = file_read(from, 1 << 20, &n);
    json_error_t error;
    json_t* root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &error);
    require_file(from, root != NULL, "is not JSON: line %d, %s", error.line, error.text);
    double ranks = json_number_value(json_object_get(root, "ranks"));
    require_file(from, ranks >= 2 && ranks <= 1e6, "\"ranks\" must be a number from 2 on");
    Link link;
    link.measured = true;
    for (int c = 0; c < PLAN_COLLECTIVES; c++) {
        const char* name = plan_collective_names[c];
        const json_t* measured = json_object_get(json_object_get(root, "collectives"), name);
        const json_t *alpha = json_object_get(measured, "alpha"), *busbw = json_object_get(measured, "busbw");
        require_file(from, json_is_number(alpha) && json_is_number(busbw),
                     "has no numbers \"alpha\" and \"busbw\" of \"%s\" under \"collectives\"", name);
        link.alpha[c] = json_number_value(alpha) / collective_passes((PlanCollective)c) / (ranks - 1);
        link.busbw[c] = json_number_value(busbw);
        require_file(from, link.alpha[c] >= 0 && link.busbw[c] > 0,
                     "has \"alpha\" below 0 or \"busbw\" not above 0 for \"%s\"", name);
    }
    json_decref(root);
    free(text);
    return link;
}

static inline Link link_of(double alpha, double busbw) { // the same for all collectives
    Link link;
    link.measured = false;
    for (int c = 0; c < PLAN_COLLECTIVES; c++) {
        link.alpha[c] = alpha;
        link.busbw[c] = busbw;
    }
    return link;
}
static inline Link link_open(const char* name) {
    const LinkPreset* preset = link_preset(name);
    return preset ? link_of(preset->alpha, preset->busbw) : link_read(name);
}
static inline const char* link_description(const char* name) { return link_preset(name) ? link_preset(name)->what : name; }

enum { PLAN_RING, PLAN_TREE, PLAN_NCCL };
typedef struct {
    Link inside, between;  // inside a node; between nodes
    int ranks_per_node;    // 0: all ranks are in one node
    int nics;              // network interfaces of a node
    int algorithm;         // PLAN_RING or PLAN_TREE decides the number of hops; PLAN_NCCL: what NCCL takes on `gpu`
    const PlanGpu* gpu;    // NULL: not known
    double efficiency;     // share of the links' bandwidth that collectives reach
    double sm_share;       // share of a device's processors that communication takes beside compute
} Network;

// Ranks of a group: N, of which at most per_node are in a node, whose interfaces `sharing` such groups use at the same time.
typedef struct { int N, per_node, sharing; } RankGroup;

static inline RankGroup world_group(const Network* w, int N) {
    RankGroup g = { N, w->ranks_per_node && w->ranks_per_node < N ? w->ranks_per_node : N, 1 };
    return g;
}
// t neighbours. If t does not divide a node's ranks, some of the groups are in two nodes, and the others wait for them.
static inline RankGroup neighbours_group(const Network* w, int N, int t) {
    RankGroup g = world_group(w, t);
    if (w->ranks_per_node > t && w->ranks_per_node < N && w->ranks_per_node % t != 0) g.per_node = t - 1;
    return g;
}
// N/t ranks, each t ranks after the one before
static inline RankGroup ranks_apart_group(const Network* w, int N, int t) {
    int n = N / t, all = w->ranks_per_node ? w->ranks_per_node : N;
    RankGroup g = { n, all / t < 1 ? 1 : all / t < n ? all / t : n, t < all ? t : all };
    return g;
}

// The same group as NCCL sees it. Where a node has other interfaces than the preset's, these are they.
static inline NcclGroup group_of_nccl(const Network* w, RankGroup g) {
    PlanGpu gpu = *w->gpu;
    gpu.nics = w->nics > 0 ? w->nics : 1;
    return plan_gpu_group(&gpu, g.N, g.per_node, g.sharing);
}

// Seconds of a collective of a group; bytes: of its largest buffer.
static inline double group_seconds(const Network* w, PlanCollective c, double bytes, RankGroup g) {
    int N = g.N, per_node = g.per_node;
    if (N == 1) return 0;
    if (w->algorithm == PLAN_NCCL) {
        NcclGroup group = group_of_nccl(w, g);
        return nccl_choose(&group, c == PLAN_ALL_REDUCE, bytes / w->efficiency).seconds;
    }
    int nodes = (int)ceil_div((size_t)N, (size_t)per_node);
    double between = nodes - 1, inside = N - 1 - between;
    if (w->algorithm == PLAN_TREE) {
        between = ceil(log2(nodes));
        inside = per_node - 1;
    }
    double busbw = per_node > 1 ? w->inside.busbw[c] : INFINITY;
    if (nodes > 1) busbw = fmin(busbw, (w->between.measured ? 1 : w->nics) * w->between.busbw[c] / g.sharing);
    double hops = inside * w->inside.alpha[c] + between * w->between.alpha[c];
    return collective_passes(c) * (hops + bytes * (N - 1) / N / (busbw * w->efficiency));
}

static inline double network_seconds(const Network* w, PlanCollective c, double bytes, int N) {
    return group_seconds(w, c, bytes, world_group(w, N));
}

// ---- compressed gradients ----
// Of `n` such collectives with `bytes` in all.
static inline double network_seconds_of(const Network* w, PlanCollective c, double bytes, double n, int N) {
    return n > 0 ? n * network_seconds(w, c, bytes / n, N) : 0;
}
// Seconds in which N ranks send packets. Exchanged parts take as long as in a reduce-scatter.
static inline double packets_seconds(const PlanPackets* u, const Network* w, int N) {
    return network_seconds_of(w, PLAN_ALL_REDUCE, u->summed, u->sums, N) +
           network_seconds_of(w, PLAN_REDUCE_SCATTER, u->exchanged, u->exchanges, N) +
           network_seconds_of(w, PLAN_ALL_GATHER, u->gathered, u->gathers, N);
}
static inline double touched_seconds(const Plan* p, double bytes) {
    return p->memory_bandwidth > 0 ? bytes / p->memory_bandwidth : 0;
}

// ---- a step ----

// Seconds of compute for each kind of unit, in one micro-batch.
typedef struct { double block_forward, block_backward, head; } UnitSeconds; // head: the root's, forward and backward

// A block's FLOPs per token are a third forward and two thirds backward; recomputation does the forward third again.
static inline double plan_block_flops(const Plan* p) {
    return 6.0 * (double)unit_elements(p->config, 1) + 6.0 * (double)p->config.C * p->T;
}
// FLOPs per token, including recomputed ones, which gpt2_flops_per_token and so MFU leave out.
static inline double plan_flops_done(const Plan* p) {
    double recomputed = p->recompute == RECOMPUTE_BLOCK ? p->config.L * plan_block_flops(p) / 3 : 0;
    return gpt2_flops_per_token(p->config, p->T) + recomputed;
}
static inline UnitSeconds plan_unit_seconds(const Plan* p, double micro_batch_seconds) {
    double block = plan_block_flops(p), per_flop = micro_batch_seconds / plan_flops_done(p);
    UnitSeconds s;
    s.block_forward = per_flop * block / 3;
    s.block_backward = per_flop * block * (p->recompute == RECOMPUTE_BLOCK ? 3 : 2) / 3;
    s.head = per_flop * (gpt2_flops_per_token(p->config, p->T) - p->config.L * block);
    return s;
}

// All queues. now: when compute has finished all it was given; arrived: when everything sent so far will have arrived;
// shared_arrived: the same of what tensor parallelism sends among t ranks.
typedef struct { double now, arrived, shared_arrived, communication, exposed; } Timeline;
// Returns when the message will have arrived.
static inline double timeline_enqueue(Timeline* t, double* arrived, double seconds) {
    *arrived = fmax(*arrived, t->now) + seconds;
    t->communication += seconds;
    return *arrived;
}
static inline double timeline_send(Timeline* t, double seconds) { return timeline_enqueue(t, &t->arrived, seconds); }
static inline void timeline_wait(Timeline* t, double until) {
    if (until <= t->now) return;
    t->exposed += until - t->now;
    t->now = until;
}

// compressing: of this, what compressing takes from compute.
typedef struct { double compute, communication, exposed, seconds, efficiency, tokens_per_s, compressing; } StepTime;

// What a stage gathers and reduces at a time: units, or fsdp's groups of units.
typedef struct {
    int num_groups;
    int blocks[MAX_UNITS];                       // of each group; the root's, group 0, has none unless it is the whole model
    double gather[MAX_UNITS], reduce[MAX_UNITS]; // seconds
    double replicate[MAX_UNITS];                 // of summing a shard over the replicas of the model; 0: there is one
    double packing[MAX_UNITS], unpacking;        // of compressing what is reduced, and of setting all gradients
    bool stays;                                  // what is gathered stays until the step's end
    bool late;                                   // nothing is reduced before backward is over
} Messages;

// Bytes of an element of gradients where they are sent.
static inline size_t plan_gradient(const Plan* p, PlanStage stage) {
    return stage == PLAN_FSDP && p->fsdp.reduce_dtype == REDUCE_FP32 ? sizeof(float) : p->X;
}

// How a stage shards; those that have no options for it cut every unit among all ranks.
static inline Sharding plan_stage_sharding(const Plan* p, PlanStage stage) {
    if (stage == PLAN_FSDP) return plan_sharding(p);
    Sharding how;
    memset(&how, 0, sizeof how);
    how.wrap_blocks = 1;
    how.shards = p->N;
    return how;
}
// The seconds in which fsdp gathers and reduces a group, by its shard's size. Offloaded shards pass the link to the host first
// or last; of their replicas' sums both ways.
static inline void fsdp_messages(Messages* m, int k, const Plan* p, const Sharding* how, const Network* w, double shard) {
    RankGroup ranks = neighbours_group(w, p->N, how->shards), replicas = ranks_apart_group(w, p->N, how->shards);
    double X = (double)p->X, gradient = (double)plan_gradient(p, PLAN_FSDP), S = how->shards;
    double host = how->offload && p->fsdp.host_link > 0 ? shard / p->fsdp.host_link : 0; // for each byte of an element
    bool home = S == 1 && p->X == sizeof(float) && !how->offload;
    m->gather[k] = home ? 0 : group_seconds(w, PLAN_ALL_GATHER, S * shard * X, ranks) + X * host;
    m->reduce[k] = group_seconds(w, PLAN_REDUCE_SCATTER, S * shard * gradient, ranks) + gradient * host;
    m->replicate[k] = group_seconds(w, PLAN_ALL_REDUCE, shard * gradient, replicas);
    if (m->replicate[k] > 0) m->replicate[k] += 2 * gradient * host;
}

// The same of ddp's compressed gradients. All blocks are alike, though the first bucket is smaller.
static inline void compressed_messages(Messages* m, const Plan* p, const Network* w) {
    PlanBytes b = plan_bytes(p, PLAN_DDP);
    int L = p->config.L;
    double blocks = packets_seconds(&b.blocks, w, p->N);
    for (int k = 0; k < m->num_groups; k++) {
        m->reduce[k] = k == 0 ? packets_seconds(&b.root, w, p->N) : blocks / L;
        m->packing[k] = touched_seconds(p, k == 0 ? b.root.packing : b.blocks.packing / L);
    }
    m->late = p->compress.method == COMPRESS_ONEBIT_ADAM; // ranks clip their gradients before momentum is made of them
    m->unpacking = touched_seconds(p, b.root.unpacking + b.blocks.unpacking);
}

static inline void messages_init(Messages* m, const Plan* p, PlanStage stage, const Network* w) {
    Layout y;
    Unit units[MAX_UNITS];
    Sharding how = plan_stage_sharding(p, stage);
    layout_cut(&y, &how, p->config, units);
    memset(m, 0, sizeof *m);
    m->num_groups = y.num_groups;
    m->stays = stage == PLAN_FSDP && !reshards_after_forward(&how);
    for (int k = 0; k < y.num_groups; k++) {
        Group group = y.groups[k];
        Unit last = units[group.first_unit + group.num_units - 1];
        double whole = (double)(last.offset + last.size), padded = (double)p->N * (double)group.shard.n;
        m->blocks[k] = group.num_units - (k == 0);
        if (stage == PLAN_FSDP) fsdp_messages(m, k, p, &how, w, (double)group.shard.n);
        else {
            m->gather[k] = network_seconds(w, PLAN_ALL_GATHER, padded * (double)p->X, p->N);
            m->reduce[k] = stage == PLAN_DDP ? network_seconds(w, PLAN_ALL_REDUCE, whole * (double)p->X, p->N)
                                             : network_seconds(w, PLAN_REDUCE_SCATTER, padded * (double)p->X, p->N);
        }
    }
    if (stage == PLAN_DDP && is_compressed(p)) compressed_messages(m, p, w);
}

// Which group a use is of: 0, 1, ..., and after the root's second use, number `head`, back to 1.
static inline int group_of_use(int use, int head) { return use < head ? use : use == head ? 0 : 2 * head - use; }

// Reduces a group's gradients; compressing them comes first. Where there are replicas, they sum the shard on a communicator of
// their own, in the step's last micro-batch.
static inline void messages_reduce(const Messages* m, int k, bool last, Timeline* t) {
    t->now += m->packing[k];
    double reduced = timeline_send(t, m->reduce[k]);
    if (!last || m->replicate[k] == 0) return;
    t->shared_arrived = fmax(t->shared_arrived, reduced) + m->replicate[k];
    t->communication += m->replicate[k];
}

// One micro-batch. Units are used in the order root (embedding), blocks 1..L, root (head, both passes), blocks L..1. A stage
// that gathers does so `ahead` uses early: ZeRO-1 and -2 gather all parameters at once after the update, so only in the first
// micro-batch; ZeRO-3 gathers a unit when it is needed; FSDP gathers as early as it has memory, and the root only once a step,
// while the blocks are updated. How long the update takes is not known here, so none of the root's gather is counted as hidden.
// What stays after its forward pass (grad-op, none) is gathered once a step.
// Gradients are sent when a unit's backward pass ends, the root's at the end.
static inline void plan_micro_batch(const Plan* p, PlanStage stage, const Messages* m, UnitSeconds s, int micro, Timeline* t) {
    int head = m->num_groups, uses = 2 * head;
    int ahead = stage == PLAN_ZERO3 ? 0 : stage == PLAN_FSDP ? p->rooms - 1 : uses;
    int gathers = stage >= PLAN_ZERO3 ? uses : stage >= PLAN_ZERO1 && micro == 0 ? head : 0;
    bool last = micro == p->accumulation - 1, reduces = stage >= PLAN_ZERO2 || last;
    double* arrives = (double*)xcalloc((size_t)uses, sizeof(double)); // (uses) owned
    for (int use = 0, gathered = 0; use < uses; use++) {
        for (; gathered < gathers && gathered <= use + ahead; gathered++) {
            bool is_root = group_of_use(gathered, head) == 0, again = gathered >= head || micro > 0;
            bool is_here = stage == PLAN_FSDP && again && (is_root || m->stays);
            arrives[gathered] = is_here ? 0 : timeline_send(t, m->gather[group_of_use(gathered, head)]);
        }
        timeline_wait(t, arrives[use]);
        int k = group_of_use(use, head);
        if (use == head) t->now += s.head;
        t->now += m->blocks[k] * (use < head ? s.block_forward : s.block_backward);
        if (reduces && use > head && !m->late) messages_reduce(m, k, last, t);
    }
    for (int k = head - 1; k > 0 && reduces && m->late; k--) messages_reduce(m, k, last, t);
    if (reduces) messages_reduce(m, 0, last, t);
    free(arrives);
}

// ---- a step of tensor parallelism ----

// Seconds of what t ranks send to each other in a micro-batch, and N/t ranks at its end.
typedef struct {
    double sum;             // of an activation (B,T,C): an all-reduce, or a reduce-scatter where rows are cut
    double gather;          // of its rows, where they are cut; else 0
    double stats;           // what the losses of a micro-batch need
    double layernorms;      // gradients of a layernorm, once a step, where rows are cut; else 0
    double block, root;     // all-reduce of a unit's gradients among the copies
    double hides[2];        // the share of a block's forward compute that makes the weight gradient of qkv, of fc
} TensorMessages;

static inline TensorMessages tensor_messages(const Plan* p, const Network* w) {
    TensorMessages m;
    RankGroup tp = neighbours_group(w, p->N, p->t), dp = ranks_apart_group(w, p->N, p->t);
    double C = p->config.C, rows = (double)p->B * p->T, X = (double)p->X, activation = rows * C * X;
    int elements = p->gpu ? CLASSIFIER_ELEMENTS_CUDA : CLASSIFIER_ELEMENTS_CPU, BT = p->B * p->T;
    int chunk = classifier_rows_of(elements, BT, p->config.Vp / p->t), chunks = (BT + chunk - 1) / chunk;
    m.sum = group_seconds(w, p->sequence_parallel ? PLAN_REDUCE_SCATTER : PLAN_ALL_REDUCE, activation, tp);
    m.gather = p->sequence_parallel ? group_seconds(w, PLAN_ALL_GATHER, activation, tp) : 0;
    m.stats = chunks * group_seconds(w, PLAN_ALL_GATHER, rows / chunks * p->t * 3 * sizeof(float), tp);
    m.layernorms = p->sequence_parallel ? group_seconds(w, PLAN_ALL_REDUCE, 2 * C * X, tp) : 0;
    m.block = group_seconds(w, PLAN_ALL_REDUCE, (double)unit_part_elements(p->config, 1, p->t) * X, dp);
    m.root = group_seconds(w, PLAN_ALL_REDUCE, (double)unit_part_elements(p->config, 0, p->t) * X, dp);
    double forward = plan_block_flops(p) / 6; // in multiply-adds per token, as are the weights of a matrix
    m.hides[0] = 3 * C * C / forward;
    m.hides[1] = 4 * C * C / forward;
    return m;
}

static inline double shared_send(Timeline* t, double seconds) { return timeline_enqueue(t, &t->shared_arrived, seconds); }
static inline void shared_wait(Timeline* t, double seconds) { timeline_wait(t, shared_send(t, seconds)); }

// Both halves of a block's forward pass: rows are gathered, computed with, and summed. Recomputation omits the last sum.
static inline void tensor_forward(const TensorMessages* m, double seconds, bool recomputed, Timeline* t) {
    for (int half = 0; half < 2; half++) {
        shared_wait(t, m->gather);
        t->now += seconds / 2;
        if (half == 0 || !recomputed) shared_wait(t, m->sum);
    }
}
// Both halves of its backward pass, which takes 2 x `forward` seconds. The sum of dX travels beside dW; layernorm's output, if
// it is gathered again, beside dX.
static inline void tensor_backward(const Plan* p, const TensorMessages* m, double forward, Timeline* t) {
    for (int half = 1; half >= 0; half--) {
        double product = m->hides[half] * forward; // as long for dX as for dW
        shared_wait(t, m->gather);
        t->now += (1 - m->hides[0] - m->hides[1]) * forward; // all that is not one of these four products
        double again = p->keep_gathered ? 0 : shared_send(t, m->gather);
        t->now += product;
        double summed = shared_send(t, m->sum);
        timeline_wait(t, again);
        t->now += product;
        timeline_wait(t, summed);
    }
}

// s: of a rank that has 1/t of the compute. Gradients are sent as ddp's are, on a queue of their own.
static inline void tensor_micro_batch(const Plan* p, const TensorMessages* m, UnitSeconds s, bool last, Timeline* t) {
    shared_wait(t, m->sum); // of embeddings
    for (int l = 0; l < p->config.L; l++) tensor_forward(m, s.block_forward, false, t);
    shared_wait(t, m->gather);
    shared_wait(t, m->stats);
    t->now += s.head;
    shared_wait(t, m->sum);
    for (int l = 0; l < p->config.L; l++) {
        if (p->recompute == RECOMPUTE_BLOCK) tensor_forward(m, s.block_forward, true, t);
        tensor_backward(p, m, s.block_forward, t);
        if (last) timeline_send(t, m->block);
    }
    shared_wait(t, m->gather);
    if (last) timeline_send(t, m->root);
}

// The step, and what a rank computes of s in a micro-batch.
static inline UnitSeconds tensor_step(const Plan* p, const Network* w, UnitSeconds s, Timeline* t) {
    TensorMessages m = tensor_messages(p, w);
    s.block_forward /= p->t;
    s.block_backward /= p->t;
    s.head /= p->t;
    for (int micro = 0; micro < p->accumulation; micro++) tensor_micro_batch(p, &m, s, micro == p->accumulation - 1, t);
    timeline_wait(t, t->arrived);
    for (int k = 0; k < 2 * p->config.L + 1; k++) shared_send(t, m.layernorms);
    timeline_wait(t, t->shared_arrived);
    return s;
}

// Seconds of AdamW, on the rank that has most to update. It reads and writes 28 bytes for each parameter: in fp32 a gradient, and
// a weight and two moments twice; in 16 bits a gradient and a weight of 2 bytes, and a master copy and two moments twice.
static inline double plan_update_seconds(const Plan* p, PlanStage stage) {
    double most = 0, kept = p->X == sizeof(float) || stage == PLAN_FSDP ? 8 : 12; // bytes of its state
    if (stage == PLAN_FSDP && p->fsdp.offload) {
        Sharding how = plan_sharding(p);
        return p->fsdp.host_bandwidth > 0 ? 28 * (double)shard_sizes(p->config, &how).all / p->fsdp.host_bandwidth : 0;
    }
    if (p->memory_bandwidth == 0) return 0;
    for (int r = 0; r < (stage >= PLAN_PP ? p->pipe.p : 1); r++) {
        PlanBytes b = stage >= PLAN_PP ? plan_rank_bytes(p, stage, r) : plan_bytes(p, stage);
        most = fmax(most, (double)b.memory[MEMORY_OPTIMIZER] / kept);
    }
    return 28 * most / p->memory_bandwidth;
}

// A step of p->N ranks.
static inline StepTime plan_step(const Plan* p, PlanStage stage, const Network* w, UnitSeconds s) {
    Timeline t = { 0, 0, 0, 0, 0 };
    Messages messages;
    if (stage == PLAN_TP) s = tensor_step(p, w, s, &t);
    else {
        messages_init(&messages, p, stage, w);
        for (int micro = 0; micro < p->accumulation; micro++) plan_micro_batch(p, stage, &messages, s, micro, &t);
    }
    timeline_wait(&t, fmax(t.arrived, t.shared_arrived)); // the update needs all gradients
    StepTime step;
    step.compute = p->accumulation * (p->config.L * (s.block_forward + s.block_backward) + s.head);
    step.communication = t.communication;
    step.exposed = t.exposed;
    double slowed = w->sm_share * (step.communication - step.exposed); // compute, while something is sent beside it
    step.compressing = stage == PLAN_TP ? 0 : messages.unpacking;
    for (int k = 0; k < (stage == PLAN_TP ? 0 : messages.num_groups); k++) step.compressing += messages.packing[k];
    step.seconds = step.compute + step.compressing + step.exposed + slowed + plan_update_seconds(p, stage);
    step.efficiency = step.compute / step.seconds;
    double batches = stage == PLAN_TP ? p->N / p->t : p->N; // micro-batches at the same time
    step.tokens_per_s = batches * p->B * p->T * p->accumulation / step.seconds;
    return step;
}
#endif
