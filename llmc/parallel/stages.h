/*
stages.h - pipeline parallelism besides its schedules (pipeline.h): its options, what each rank has of the model, and
messages between stages.

Of p ranks that share a replica of the model, rank r has v chunks: stages r, p + r, 2p + r, ... of p*v. The first stage, on
rank 0, also embeds; the last one, on rank p-1, also has the head. Both of these ranks have the root, whose wte is tied.
*/
#ifndef LLMC_STAGES_H
#define LLMC_STAGES_H
#include "../base/options.h"
#include "../comm/comm.h"
#include "../device/device.h"
#include "../model/gpt2.h"
#include "pipeline.h"
#include "shard.h"
#include "split.h"

// ---- options ----
typedef struct {
    int schedule;              // as Schedule
    bool from_mesh;            // --mesh says how many stages there are
    long long chunks;
    const char *split, *emulate;
    double ms[3];              // --emulate-ms: of F, I and W on all chunks of a rank; 0: they last as long as they last
    double head;               // if it is not 0, ms are those of a block, and the head lasts as long as so many blocks
} PipelineParallel;

// p NULL: the stage has --mesh.
static inline void options_pipeline_parallel(OptionTable* table, long long* p, PipelineParallel* options) {
    if (p) *p = 0;
    options->from_mesh = p == NULL;
    options->schedule = SCHEDULE_1F1B;
    options->split = "auto";
    options->emulate = "";
    if (p) option_int(table, "pipeline-parallel", p, 0, MAX_UNITS, "neighbouring ranks that share one replica of the model;"
                      " replicas are data parallel; 0: all ranks share one");
    option_choice(table, "schedule", &options->schedule, SCHEDULE_WORDS,
                  "order in which a rank runs the forward and backward passes of its micro-batches");
    option_int(table, "chunks", &options->chunks, 0, MAX_UNITS,
               "parts of the model per rank; 0: 2 with --schedule interleaved, 1 with others");
    option_text(table, "split", &options->split, "auto|N,N,...",
                "blocks of each pipeline stage; auto: so that all stages, one of which has the head, take about equal time");
    option_text(table, "emulate-ms", &options->emulate, "F,I,W[,HEAD]",
                "for tests: sleep after each action until it has taken this many milliseconds: forward, backward for the"
                " input, backward for the weights; with HEAD, these are for one block, and the head costs HEAD blocks;"
                " '': never");
}

// Dies if --emulate-ms is malformed.
static inline void stages_parse_emulation(PipelineParallel* options) {
    int used = 0, all = 0;
    double* ms = options->ms;
    options->head = 0;
    if (options->emulate[0] == '\0') return;
    bool good = sscanf(options->emulate, "%lf,%lf,%lf%n,%lf%n", &ms[0], &ms[1], &ms[2], &used, &options->head, &all) >= 3;
    good = good && options->emulate[size_max((size_t)used, (size_t)all)] == '\0' && options->head >= 0 && options->head <= 1e6;
    for (int i = 0; i < 3; i++) good = good && ms[i] >= 0 && ms[i] <= 1e6;
    require(good, "--emulate-ms wants three numbers of milliseconds, as in 20,24,16, each from 0 to 1000000, and perhaps how"
            " many blocks the head costs, not '%s'", options->emulate);
}

// ---- what a rank has ----
typedef struct {
    int rank, p, v, count;    // this rank of p, with v chunks; count: p*v stages
    int blocks[MAX_UNITS];    // (count) how many blocks a stage has
    int begin[MAX_UNITS + 1]; // (count+1) stage s has blocks [begin[s], begin[s+1])
    int most_blocks;          // of this rank's largest stage
    PipelineParallel options;
} Stages;

// Returns the number of a chunk of this rank among all stages.
static inline int stages_at(const Stages* y, int chunk) { return chunk * y->p + y->rank; }

// The options are set.
static inline void stages_cut(Stages* y, GPT2Config c, int rank, int p) {
    PipelineParallel* options = &y->options;
    stages_parse_emulation(options);
    if (options->chunks == 0) options->chunks = options->schedule == SCHEDULE_INTERLEAVED ? 2 : 1;
    y->rank = rank;
    y->p = p;
    y->v = (int)options->chunks;
    split_check(options->from_mesh ? "--mesh pp=" : "--pipeline-parallel ", c.L, p, y->v); // before p*v numbers are written
    y->count = p * y->v;
    split_blocks(y->blocks, options->split, c.L, p, y->v, split_costs(c.Vp, c.C));
    y->begin[0] = y->most_blocks = 0;
    for (int s = 0; s < y->count; s++) y->begin[s + 1] = y->begin[s] + y->blocks[s];
    for (int k = 0; k < y->v; k++) if (y->blocks[stages_at(y, k)] > y->most_blocks) y->most_blocks = y->blocks[stages_at(y, k)];
}

static inline bool stages_have_head(const Stages* y) { return y->rank == y->p - 1; }
// Returns the chunk whose forward passes take the next micro-batch of the data: that of the embedding, else that of the head.
// (Where one rank has both, forward passes of a micro-batch follow one another.)
static inline int stages_data_chunk(const Stages* y) { return y->rank > 0 && stages_have_head(y) ? y->v - 1 : 0; }
// True if this rank has unit u.
static inline bool stages_have(const Stages* y, int u) {
    if (u == 0) return y->rank == 0 || stages_have_head(y);
    int s = 0;
    while (y->begin[s + 1] < u) s++;
    return s % y->p == y->rank;
}
// Sleeps until an action that began at `began` has lasted as long as --emulate-ms says. All of the head is in the last stage's B or I.
static inline void stages_emulate(const Stages* y, Action a, double began) {
    const PipelineParallel* options = &y->options;
    double F = options->ms[0], I = options->ms[1], W = options->ms[2], of[] = { F, I + W, I, W }; // in the order of ActionKind
    int stage = stages_at(y, a.chunk);
    bool has_head = stage == y->count - 1 && (a.kind == ACT_BACKWARD || a.kind == ACT_BACKWARD_INPUT);
    double ms = of[a.kind] * (options->head > 0 ? y->blocks[stage] : 1.0 / (double)options->chunks);
    if (has_head) ms += options->head * (F + I + W);
    if (options->emulate[0] == '\0') return;
    device_synchronize();
    sleep_until(began + 1e-3 * ms);
}
// Returns the number of blocks that this rank has, and the elements of all that it has.
static inline int stages_num_blocks(const Stages* y) {
    int n = 0;
    for (int k = 0; k < y->v; k++) n += y->blocks[stages_at(y, k)];
    return n;
}
static inline size_t stages_elements(const Stages* y, GPT2Config c) {
    size_t n = 0;
    for (int u = 0; u <= c.L; u++) if (stages_have(y, u)) n += unit_elements(c, u);
    return n;
}

// Returns the schedule of m micro-batches. Dies unless it can be played.
static inline Pipeline stages_pipeline(const Stages* y, int m) {
    Pipeline l = { (Schedule)y->options.schedule, y->p, m, y->v };
    pipeline_check(l);
    return l;
}

// ---- messages between stages: (B,T,C) activations forward, and their gradients back ----
typedef struct { floatX* data; CommOp op; } Message; // memory of MEMORY_ACTIVATIONS; what is under way there, or NO_OP
typedef struct {
    Comm* pp;                   // a view
    Pipeline pipeline;
    Message inbox, forth, back; // what comes next; what goes on to the next stage; what goes back
    int held[2];                // marks before and after the last wait of p2p_send_buffer, which is in an action; -1: none
} P2P;

// n: elements of the longest message. Nothing is allocated where one stage is all there is.
static inline void p2p_init(P2P* m, Comm* pp, Pipeline l, size_t n) {
    Message empty = { NULL, NO_OP };
    Message* all[] = { &m->inbox, &m->forth, &m->back };
    m->pp = pp;
    m->pipeline = l;
    m->held[0] = m->held[1] = -1;
    for (int i = 0; i < 3; i++) {
        *all[i] = empty;
        if (l.p * l.v > 1) all[i]->data = (floatX*)device_alloc(n * sizeof(floatX), MEMORY_ACTIVATIONS);
    }
    comm_connect(pp, pipeline_are_neighbours);
}
static inline size_t p2p_elements(Pipeline l, size_t n) { return l.p * l.v > 1 ? 3 * n : 0; }

// Exchanges the message's memory and *there, so that nothing is copied.
static inline void message_swap(Message* m, floatX** there) {
    floatX* data = m->data;
    m->data = *there;
    *there = data;
}

// Begins to receive what an action starts from, n elements.
static inline void p2p_irecv(P2P* m, Action a, size_t n) {
    int from = pipeline_from(m->pipeline, m->pp->rank, a);
    if (from != NO_NEIGHBOUR && from != m->pp->rank) m->inbox.op = (comm_recv)(m->pp, m->inbox.data, n, COMM_FLOATX, from);
}
// Waits for it: *input becomes the stage's input, or *gradient that of its output. Their memory takes the next message.
static inline void p2p_wait(P2P* m, Action a, floatX** input, floatX** gradient) {
    int from = pipeline_from(m->pipeline, m->pp->rank, a);
    if (from == NO_NEIGHBOUR) return;
    bool alone = from == m->pp->rank; // it has made this input itself, just before; the gradient is in its place
    comm_finish(m->pp, &m->inbox.op);
    if (a.kind == ACT_FORWARD) message_swap(alone ? &m->forth : &m->inbox, input);
    else if (!alone) message_swap(&m->inbox, gradient);
}

// Returns where a stage's output may be written: the message before it has been sent.
static inline floatX* p2p_send_buffer(P2P* m) {
    for (int i = 0; i < 2; i++) { // those of an evaluation, which nobody has taken
        if (m->held[i] >= 0) device_event_free(m->held[i]);
        m->held[i] = -1;
    }
    if (m->forth.op == NO_OP) return m->forth.data;
    m->held[0] = device_event();
    comm_finish(m->pp, &m->forth.op);
    m->held[1] = device_event();
    return m->forth.data;
}
// Sends what an action has made: that output, or *gradient, which gets other memory and may be written at once.
static inline void p2p_isend(P2P* m, Action a, size_t n, floatX** gradient) {
    int to = pipeline_to(m->pipeline, m->pp->rank, a);
    Message* out = a.kind == ACT_FORWARD ? &m->forth : &m->back;
    if (to == NO_NEIGHBOUR || to == m->pp->rank) return;
    comm_finish(m->pp, &out->op);
    if (out == &m->back) message_swap(out, gradient);
    out->op = (comm_send)(m->pp, out->data, n, COMM_FLOATX, to);
}
// Waits until all has been sent.
static inline void p2p_wait_sends(P2P* m) {
    comm_finish(m->pp, &m->forth.op);
    comm_finish(m->pp, &m->back.op);
}

// For the timeline, the caller of these is who communicates.
#define p2p_irecv(m, ...) (comm_from((m)->pp, __func__), p2p_irecv(m, __VA_ARGS__))
#define p2p_isend(m, ...) (comm_from((m)->pp, __func__), p2p_isend(m, __VA_ARGS__))
#endif
