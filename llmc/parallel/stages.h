/*
stages.h - pipeline parallelism except for its schedules (pipeline.h): options, the stages of each rank, and messages
between stages.

Rank r of the p ranks that share a replica of the model has v chunks: stages r, p + r, 2p + r, ... of p*v. The first
stage, on rank 0, also computes embeddings, and the last one, on rank p-1, also has the head. Both ranks store the root,
because its wte is tied.
*/
#ifndef LLMC_STAGES_H
#define LLMC_STAGES_H
#include "../base/options.h"
#include "../comm/comm.h"
#include "../device/device.h"
#include "../model/gpt2.h"
#include "../model/training_options.h"
#include "pipeline.h"
#include "shard.h"
#include "split.h"

enum { MAX_STAGES = MAX_BLOCKS + 1 }; // one block each, and one stage for the head

// ---- options ----
typedef struct {
    int schedule;              // as Schedule
    bool from_mesh;            // --mesh says how many stages there are
    long long chunks;
    const char *split, *emulate;
    double ms[3];              // --emulate-ms: of F, I and W on all chunks of a rank; 0: as measured
    double head;               // if not 0, ms are those of a block, and the head costs `head` blocks
} PipelineParallel;

// p is NULL for a program that has --mesh.
static inline void options_pipeline_parallel(OptionTable* table, long long* p, PipelineParallel* options) {
    if (p) *p = 0;
    options->from_mesh = p == NULL;
    options->schedule = SCHEDULE_1F1B;
    options->split = "auto";
    options->emulate = "";
    if (p) option_int(table, "pipeline-parallel", p, 0, MAX_STAGES,
                      "neighbouring ranks that share one replica of the model;"
                      " replicas are data parallel; 0: all ranks share one");
    option_choice(table, "schedule", &options->schedule, SCHEDULE_WORDS,
                  "order in which a rank runs the forward and backward passes of its micro-batches");
    option_int(table, "chunks", &options->chunks, 0, MAX_STAGES,
               "parts of the model per rank; 0: 2 with --schedule interleaved, 1 with others");
    option_text(table, "split", &options->split, "auto|N,N,...",
                "blocks of each pipeline stage; auto: balanced, so that the stage with the head takes about as long"
                " as the others");
    option_text(table, "emulate-ms", &options->emulate, "F,I,W[,HEAD]",
                "for tests: sleep after each action until it has taken this many milliseconds: forward, backward for"
                " the input, backward for the weights; with HEAD, these are for one block, and the head costs HEAD"
                " blocks; '': never");
}

// Dies if --emulate-ms is malformed.
static inline void stages_parse_emulation(PipelineParallel* options) {
    int used = 0, all = 0;
    double* ms = options->ms;
    options->head = 0;
    if (options->emulate[0] == '\0') return;
    bool good = sscanf(options->emulate, "%lf,%lf,%lf%n,%lf%n", &ms[0], &ms[1], &ms[2], &used,
                       &options->head, &all) >= 3;
    good = good && options->emulate[size_max((size_t)used, (size_t)all)] == '\0' && options->head >= 0
           && options->head <= 1e6;
    for (int i = 0; i < 3; i++) good = good && ms[i] >= 0 && ms[i] <= 1e6;
    require(good, "--emulate-ms wants three numbers of milliseconds, as in 20,24,16, each from 0 to 1000000, and"
            " perhaps how many blocks the head costs, not '%s'", options->emulate);
}

// ---- the stages of a rank ----
typedef struct {
    int rank, p, v, count;    // this rank of p, with v chunks; count: p*v stages
    int blocks[MAX_STAGES];    // (count) number of blocks in each stage
    int begin[MAX_STAGES + 1]; // (count+1) stage s has blocks [begin[s], begin[s+1])
    int most_blocks;          // in this rank's largest stage
    PipelineParallel options;
} Stages;

// Returns the stage that is this rank's chunk number `chunk`.
static inline int stages_at(const Stages* y, int chunk) { return chunk * y->p + y->rank; }

// Call after the options are set.
static inline void stages_cut(Stages* y, GPT2Config c, int rank, int p) {
    PipelineParallel* options = &y->options;
    stages_parse_emulation(options);
    if (options->chunks == 0) options->chunks = options->schedule == SCHEDULE_INTERLEAVED ? 2 : 1;
    y->rank = rank;
    y->p = p;
    y->v = (int)options->chunks;
    split_check(options->from_mesh ? "--mesh pp=" : "--pipeline-parallel ", c.L, p, y->v); // before arrays of p*v
    y->count = p * y->v;
    split_blocks(y->blocks, options->split, c.L, p, y->v, split_costs(c.Vp, c.C));
    y->begin[0] = y->most_blocks = 0;
    for (int s = 0; s < y->count; s++) y->begin[s + 1] = y->begin[s] + y->blocks[s];
    for (int k = 0; k < y->v; k++)
        if (y->blocks[stages_at(y, k)] > y->most_blocks) y->most_blocks = y->blocks[stages_at(y, k)];
}

static inline bool stages_have_head(const Stages* y) { return y->rank == y->p - 1; }
// Returns the chunk whose forward passes load micro-batches: the one with the embedding or the head, if there is one.
// (A rank with both has a single chunk.)
static inline int stages_data_chunk(const Stages* y) { return stages_have_head(y) ? y->v - 1 : 0; }
// Returns true if this rank has unit u.
static inline bool stages_have(const Stages* y, int u) {
    if (u == 0) return y->rank == 0 || stages_have_head(y);
    int s = 0;
    while (y->begin[s + 1] <= unit_block(u)) s++;
    return s % y->p == y->rank;
}
// Sleeps until an action that began at `began` has taken as long as --emulate-ms says. The whole head counts in B or I
// of the last stage.
static inline void stages_emulate(const Stages* y, Action a, double began) {
    const PipelineParallel* options = &y->options;
    double F = options->ms[0], I = options->ms[1], W = options->ms[2];
    double of[] = { F, I + W, I, W }; // in the order of ActionKind
    int stage = stages_at(y, a.chunk);
    bool has_head = stage == y->count - 1 && (a.kind == ACT_BACKWARD || a.kind == ACT_BACKWARD_INPUT);
    double ms = of[a.kind] * (options->head > 0 ? y->blocks[stage] : 1.0 / (double)options->chunks);
    if (has_head) ms += options->head * (F + I + W);
    if (options->emulate[0] == '\0') return;
    device_synchronize();
    sleep_until(began + 1e-3 * ms);
}
// Returns the number of blocks that this rank has.
static inline int stages_num_blocks(const Stages* y) {
    int n = 0;
    for (int k = 0; k < y->v; k++) n += y->blocks[stages_at(y, k)];
    return n;
}

// Returns the schedule of m micro-batches, for pipeline_run_ahead. Dies if m or --recompute does not suit it: zb-h1's W
// needs activations long after the F that makes them, so it keeps all of them. --recompute auto then becomes none.
static inline Pipeline stages_pipeline(const Stages* y, int m, int* recompute) {
    Pipeline pipe = { (Schedule)y->options.schedule, y->p, m, y->v, 0, 0 };
    pipeline_check(pipe);
    if (pipe.schedule != SCHEDULE_ZB_H1) return pipe;
    require(*recompute != RECOMPUTE_BLOCK, "--recompute block: --schedule zb-h1 keeps all activations for its W; choose"
            " --schedule 1f1b, or --recompute none");
    *recompute = RECOMPUTE_NONE;
    return pipe;
}

// ---- messages between stages: (B,T,C) activations forward, and their gradients back ----
typedef struct {
    floatX* buffer;                     // (B,T,C) owned
    CommOp sent;                        // the send under way from the buffer; NO_OP otherwise
} Outbox;
typedef struct {
    Comm* pp;                           // a view
    Pipeline pipeline;
    floatX* inbox;                      // (B,T,C) from another stage; owned
    CommOp received;                    // the receive under way into the inbox; NO_OP otherwise
    Outbox forward, back;               // activations for the next stage; gradients for the one before
    void (*announce)(void* times, Action a); // NULL, or called before the rank waits or receives for an action,
    void (*finished)(void* times);           // and when everything has been sent (report_pipeline.h)
    void* times;
} Messages;

// n: elements of the longest message. Allocates nothing for a pipeline of one stage.
static inline void messages_init(Messages* m, Comm* pp, Pipeline pipe, size_t n) {
    floatX** const all[] = { &m->inbox, &m->forward.buffer, &m->back.buffer };
    m->pp = pp;
    m->pipeline = pipe;
    m->received = m->forward.sent = m->back.sent = NO_OP;
    for (int i = 0; i < 3 && pipe.p > 1; i++)
        *all[i] = (floatX*)device_alloc(n * sizeof(floatX), MEMORY_ACTIVATIONS);
    comm_connect(pp, pipeline_are_neighbours);
}
static inline size_t messages_elements(Pipeline pipe, size_t n) { return pipe.p > 1 ? 3 * n : 0; }

// Return the ranks that send the input of an action, and that receive its result, or NO_NEIGHBOUR. From the first call
// on, the log and the timeline say that the rank waits for this action.
static inline int messages_from(const Messages* m, Action a) {
    if (m->announce) m->announce(m->times, a);
    return pipeline_from(m->pipeline, m->pp->rank, a);
}
static inline int messages_to(const Messages* m, Action a) { return pipeline_to(m->pipeline, m->pp->rank, a); }

// Returns the outbox of an action's result.
static inline Outbox* messages_outbox(Messages* m, Action a) {
    return a.kind == ACT_FORWARD ? &m->forward : &m->back;
}

// Waits until everything has been sent.
static inline void messages_finish(Messages* m) {
    comm_finish(m->pp, &m->forward.sent);
    comm_finish(m->pp, &m->back.sent);
    if (m->finished) m->finished(m->times);
}
#endif
