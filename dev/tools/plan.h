/*
plan.h - predicts what training will cost: bytes per rank, bytes sent, seconds per step, in every stage of the course.

Bytes     are exact, and by the stages' own formulas (plan_stage.h), here for any precision, number of ranks and device;
          test/tools/plan.t checks that a run predicts the same. Of the layers' workspace only the fp32 sums of wte's gradient
          are counted, because the rest depends on libraries and threads. fsdp means --sharding full, with both prefetches and gradients reduced in fp32.
Messages  take alpha + n/bandwidth (Hockney 1994). A ring collective of N ranks has N-1 hops one after the other, and every rank
          sends (N-1)/N of the data; an all-reduce is a reduce-scatter and an all-gather, so twice that (Thakur, Rabenseifner
          and Gropp 2005):
              seconds = k (N-1) alpha + k bytes (N-1)/N / busbw        k = 2 for an all-reduce, else 1
          busbw is defined as in nccl-tests. With several nodes, nodes-1 of the hops are between nodes, and the data that crosses
          there is limited by the network interfaces. A tree moves the same data in (ranks of a node - 1) hops inside and
          log2(nodes) between nodes; NCCL has a tree for all-reduce and, from 2.23 on with one rank per node, for the others.
          Hops are counted as NCCL counts them when it chooses an algorithm (src/graph/tuning.cc).
Overlap   is a timeline of two queues, compute and communication, each doing one thing at a time in order of issue. A unit is
          computed once it has been gathered (plan_micro_batch); time that compute waits is exposed. So exposed <= communication.
          Where fsdp gathers groups of blocks, "unit" means such a group.
Compute   is FLOPs / (peak x MFU), or measured, and the same for every N, because each rank has its own batch. Two effects are
          ignored: AdamW has only 1/N to do in ZeRO, and communication takes a GPU's processors or a CPU's cores from compute.
*/
#ifndef DEV_PLAN_H
#define DEV_PLAN_H
#include "../../llmc/base/folder.h"
#include "../../llmc/model/gpt2.h"
#include "../../llmc/base/options.h"
#include "plan_stage.h"
#include <jansson.h>

static const char* const plan_stage_names[PLAN_STAGES] = { "ddp", "zero-1", "zero-2", "zero-3", "fsdp" };

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
static inline PlanBytes plan_bytes(const Plan* p, PlanStage stage) {
    bool fp32 = p->X == sizeof(float);
    if (stage == PLAN_DDP) return fp32 ? plan_ddp_fp32(p, stage) : plan_ddp_bf16(p, stage);
    if (stage == PLAN_FSDP) return fp32 ? plan_fsdp_fp32(p, stage) : plan_fsdp_bf16(p, stage);
    return fp32 ? plan_zero_fp32(p, stage) : plan_zero_bf16(p, stage);
}
static inline size_t plan_memory_total(const Plan* p, PlanStage stage) {
    PlanBytes b = plan_bytes(p, stage);
    size_t total = 0;
    for (int k = 0; k < MEMORY_KINDS; k++) total += b.memory[k];
    return total;
}
// Bytes that N ranks together send per step. This is a whole number, which one rank's share of it need not be.
static inline double plan_sent(const Plan* p, PlanStage stage) { return round(plan_bytes(p, stage).sent * p->N); }

// The largest dN (N blocks and heads, 64N channels) that a rank with so many bytes can train; 0: none.
static inline int plan_largest_depth(Plan p, PlanStage stage, double bytes) {
    for (int d = MAX_UNITS - 1; d > 0; d--) {
        p.config.L = p.config.NH = d;
        p.config.C = 64 * d;
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
} Link;

// Nominal values: bandwidths per direction are the vendors', and collectives reach less; alphas are what NCCL assumes for a hop
// of its ring with large messages (hwLat in src/graph/tuning.cc of 2.18 and later).
typedef struct { const char *name, *what; double alpha, busbw; } LinkPreset;
static const LinkPreset link_presets[] = {
    { "nvlink", "NVLink 4, 450 GB/s per direction", 3.4e-6, 450e9 },               // half of the H100's 900 GB/s both ways
    { "pcie", "PCIe 4.0 x16, 31.5 GB/s per direction", 5.7e-6, 31.5e9 },           // 16 lanes x 16 GT/s x 128/130 / 8
    { "infiniband", "NDR InfiniBand, 50 GB/s per interface", 14e-6, 50e9 },        // 400 Gb/s
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
    FileSource from = { path, "--link and --inter-link want nvlink, pcie, infiniband or a file that comm_bench --json wrote" };
    char* text = file_read(from, 1 << 20, &n);
    json_error_t error;
    json_t* root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &error);
    require_file(from, root != NULL, "is not JSON: line %d, %s", error.line, error.text);
    double ranks = json_number_value(json_object_get(root, "ranks"));
    require_file(from, ranks >= 2 && ranks <= 1e6, "\"ranks\" must be a number from 2 on");
    Link link;
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

static inline Link link_open(const char* name) {
    const LinkPreset* preset = link_preset(name);
    if (preset == NULL) return link_read(name);
    Link link;
    for (int c = 0; c < PLAN_COLLECTIVES; c++) {
        link.alpha[c] = preset->alpha;
        link.busbw[c] = preset->busbw;
    }
    return link;
}
static inline const char* link_description(const char* name) { return link_preset(name) ? link_preset(name)->what : name; }

enum { PLAN_RING, PLAN_TREE };
typedef struct {
    Link inside, between;  // inside a node; between nodes
    int ranks_per_node;    // 0: all ranks are in one node
    int nics;              // network interfaces of a node
    int algorithm;         // PLAN_RING or PLAN_TREE; decides the number of hops
} Network;

// Seconds of a collective on N ranks; bytes: of its largest buffer.
static inline double network_seconds(const Network* w, PlanCollective c, double bytes, int N) {
    if (N == 1) return 0;
    int per_node = w->ranks_per_node && w->ranks_per_node < N ? w->ranks_per_node : N;
    int nodes = (int)ceil_div((size_t)N, (size_t)per_node);
    double between = nodes - 1, inside = N - 1 - between;
    if (w->algorithm == PLAN_TREE) {
        between = ceil(log2(nodes));
        inside = per_node - 1;
    }
    double busbw = per_node > 1 ? w->inside.busbw[c] : INFINITY;
    if (nodes > 1) busbw = fmin(busbw, w->nics * w->between.busbw[c]);
    return collective_passes(c) * (inside * w->inside.alpha[c] + between * w->between.alpha[c] + bytes * (N - 1) / N / busbw);
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

// Both queues. now: when compute has finished all it was given; arrived: when everything sent so far will have arrived.
typedef struct { double now, arrived, communication, exposed; } Timeline;
static inline double timeline_send(Timeline* t, double seconds) { // returns when the message will have arrived
    t->arrived = fmax(t->arrived, t->now) + seconds;
    t->communication += seconds;
    return t->arrived;
}
static inline void timeline_wait(Timeline* t, double until) {
    if (until <= t->now) return;
    t->exposed += until - t->now;
    t->now = until;
}

typedef struct { double compute, communication, exposed, seconds, efficiency, tokens_per_s; } StepTime;

// What a stage gathers and reduces at a time: units, or fsdp's groups of units.
typedef struct {
    int num_groups;
    int blocks[MAX_UNITS];                       // of each group; the root's, group 0, has none unless it is the whole model
    double gather[MAX_UNITS], reduce[MAX_UNITS]; // seconds
} Messages;

// Bytes of an element of gradients where they are sent.
static inline size_t plan_gradient(const Plan* p, PlanStage stage) { return stage == PLAN_FSDP ? sizeof(float) : p->X; }

static inline void messages_init(Messages* m, const Plan* p, PlanStage stage, const Network* w) {
    PlanCollective reduction = stage == PLAN_DDP ? PLAN_ALL_REDUCE : PLAN_REDUCE_SCATTER;
    Layout y;
    Unit units[MAX_UNITS];
    Sharding how = plan_sharding(p);
    if (stage != PLAN_FSDP) how.wrap_blocks = 1;
    layout_cut(&y, &how, p->config, units);
    m->num_groups = y.num_groups;
    for (int k = 0; k < y.num_groups; k++) {
        Group group = y.groups[k];
        Unit last = units[group.first_unit + group.num_units - 1];
        double elements = stage == PLAN_DDP ? (double)(last.offset + last.size) // not padded
                                            : (double)p->N * (double)group.shard.n;
        m->blocks[k] = group.num_units - (k == 0);
        m->gather[k] = network_seconds(w, PLAN_ALL_GATHER, elements * (double)p->X, p->N);
        m->reduce[k] = network_seconds(w, reduction, elements * (double)plan_gradient(p, stage), p->N);
    }
}

// Which group a use is of: 0, 1, ..., and after the root's second use, number `head`, back to 1.
static inline int group_of_use(int use, int head) { return use < head ? use : use == head ? 0 : 2 * head - use; }

// One micro-batch. Units are used in the order root (embedding), blocks 1..L, root (head, both passes), blocks L..1. A stage
// that gathers does so `ahead` uses early: ZeRO-1 and -2 gather all parameters at once after the update, so only in the first
// micro-batch; ZeRO-3 gathers a unit when it is needed; FSDP gathers as early as it has memory, and the root only once a step,
// while the blocks are updated. How long the update takes is not known here, so none of the root's gather is counted as hidden.
// Gradients are sent when a unit's backward pass ends, the root's at the end.
static inline void plan_micro_batch(const Plan* p, PlanStage stage, const Messages* m, UnitSeconds s, int micro, Timeline* t) {
    int head = m->num_groups, uses = 2 * head;
    int ahead = stage == PLAN_ZERO3 ? 0 : stage == PLAN_FSDP ? p->rooms - 1 : uses;
    int gathers = stage >= PLAN_ZERO3 ? uses : stage >= PLAN_ZERO1 && micro == 0 ? head : 0;
    bool reduces = stage >= PLAN_ZERO2 || micro == p->accumulation - 1;
    double* arrives = (double*)xcalloc((size_t)uses, sizeof(double)); // (uses) owned
    for (int use = 0, gathered = 0; use < uses; use++) {
        for (; gathered < gathers && gathered <= use + ahead; gathered++) {
            bool is_here = stage == PLAN_FSDP && (gathered == head || (gathered == 0 && micro > 0)); // the root
            arrives[gathered] = is_here ? 0 : timeline_send(t, m->gather[group_of_use(gathered, head)]);
        }
        timeline_wait(t, arrives[use]);
        int k = group_of_use(use, head);
        if (use == head) t->now += s.head;
        t->now += m->blocks[k] * (use < head ? s.block_forward : s.block_backward);
        if (reduces && use > head) timeline_send(t, m->reduce[k]);
    }
    if (reduces) timeline_send(t, m->reduce[0]);
    free(arrives);
}

// A step of p->N ranks.
static inline StepTime plan_step(const Plan* p, PlanStage stage, const Network* w, UnitSeconds s) {
    Timeline t = { 0, 0, 0, 0 };
    Messages messages;
    messages_init(&messages, p, stage, w);
    for (int micro = 0; micro < p->accumulation; micro++) plan_micro_batch(p, stage, &messages, s, micro, &t);
    timeline_wait(&t, t.arrived); // the update needs all gradients
    StepTime step;
    step.compute = p->accumulation * (p->config.L * (s.block_forward + s.block_backward) + s.head);
    step.communication = t.communication;
    step.exposed = t.exposed;
    step.seconds = step.compute + step.exposed;
    step.efficiency = step.compute / step.seconds;
    step.tokens_per_s = (double)p->N * p->B * p->T * p->accumulation / step.seconds;
    return step;
}
#endif
