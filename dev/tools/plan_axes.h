/*
plan_axes.h - predicts what a step of train_gpt2_3d takes: copies of p stages of t ranks. (Its bytes are in plan.h.)

Actions   are those of plan_pipeline.h on 1/t of the work, and in each block the sums of plan.h's tensor parallelism. D, a
          whole backward pass, hides what dW can hide; B of zb-h1 hides nothing, because its W comes later. With --emulate-ms
          they last as long as that says.
Messages  between stages are as long as a rank's rows: 1/t where rows are cut.
After it  What a rank has is summed over the replicas, unit by unit as it becomes complete, beside what it still computes; with
          --zero-stage 1 it is reduced and, when the update is over, gathered. The next step's first forward passes hide as
          much of that as they can wait for.
*/
#ifndef DEV_PLAN_AXES_H
#define DEV_PLAN_AXES_H
#include "plan_pipeline.h"

static inline int axes_copies(const Plan* p) { return p->N / (p->t * p->pipe.p); }
static inline bool axes_divide(const Plan* p) {
    const PlanPipe* l = &p->pipe;
    bool micro = l->schedule != SCHEDULE_INTERLEAVED || p->accumulation % l->p == 0;
    bool model = p->config.NH % p->t == 0 && p->config.Vp % p->t == 0 && l->p * l->v <= p->config.L;
    return p->N % (p->t * l->p) == 0 && model && micro && (!p->sequence_parallel || p->B * p->T % p->t == 0);
}

// ---- actions of --emulate-ms: F, B and W of a rank, or if there is a head of a block ----
typedef struct { double ms[3], head; bool is_on; } Emulation;

// Dies if the text is none that a stage accepts.
static inline Emulation emulation_parse(const char* text) {
    Emulation e = { { 0, 0, 0 }, 0, text[0] != '\0' };
    int used = 0, all = 0;
    if (!e.is_on) return e;
    bool good = sscanf(text, "%lf,%lf,%lf%n,%lf%n", &e.ms[0], &e.ms[1], &e.ms[2], &used, &e.head, &all) >= 3;
    good = good && text[all > used ? all : used] == '\0' && e.head >= 0;
    for (int i = 0; i < 3; i++) good = good && e.ms[i] >= 0;
    require(good, "--emulate-ms wants three numbers of milliseconds, as in 20,24,16, and perhaps how many blocks the head"
            " costs, not '%s'", text);
    return e;
}
// Overwrites times (p*v), as train_gpt2_pp and train_gpt2_3d sleep.
static inline void emulated_times(const Plan* p, const Emulation* e, Times* times) {
    int blocks[MAX_UNITS], parts = p->pipe.p * p->pipe.v;
    SplitCosts costs = { 0, e->head };
    pipe_split(p, blocks);
    for (int g = 0; g < parts; g++) {
        double part = 1e-3 * (e->head > 0 ? chunk_cost(blocks, g, parts, costs) : 1.0 / p->pipe.v);
        Times t = { e->ms[0] * part, e->ms[1] * part, e->ms[2] * part };
        times[g] = t;
    }
}

// ---- actions ----
// Of a block of one rank: F, and D, B and W, of which D is one after the other unless --schedule cuts it.
typedef struct { double F, D, B, W; } BlockTimes;
static inline BlockTimes axes_block(const Plan* p, const TensorMessages* m, UnitSeconds s) {
    Timeline t = { 0, 0, 0, 0, 0 };
    BlockTimes b;
    double forward = s.block_forward / p->t, again;
    tensor_forward(m, forward, false, &t);
    b.F = t.now;
    if (p->recompute == RECOMPUTE_BLOCK) tensor_forward(m, forward, true, &t);
    again = t.now - b.F;
    tensor_backward(p, m, forward, &t);
    b.D = t.now - b.F;
    b.W = block_weight_seconds(p, s) / p->t;
    b.B = b.D - b.W;
    if (p->pipe.schedule != SCHEDULE_ZB_H1) return b;
    b.B = again + 2 * forward - b.W + 2 * (m->gather + m->sum);
    b.W += p->keep_gathered ? 0 : 2 * fmax(0, m->gather - b.W / 2);
    return b;
}
// Overwrites times (p*v).
static inline void axes_times(const Plan* p, const TensorMessages* m, UnitSeconds s, Times* times) {
    int blocks[MAX_UNITS], parts = p->pipe.p * p->pipe.v;
    BlockTimes b = axes_block(p, m, s);
    pipe_split(p, blocks);
    for (int g = 0; g < parts; g++) {
        Times t = { blocks[g] * b.F, blocks[g] * b.B, blocks[g] * b.W };
        times[g] = t;
    }
    times[0].F += m->sum;    // of embeddings,
    times[0].B += m->gather; // and the rows of their gradients
    times[parts - 1].F += m->gather;
    times[parts - 1].B += s.head / p->t + m->stats + m->sum;
}

// ---- messages and sums ----
static inline double axes_message_bytes(const Plan* p) { return pipe_message_bytes(p) / (p->sequence_parallel ? p->t : 1); }
static inline bool axes_cross_nodes(const Plan* p, const Network* w) {
    Plan model = *p; // the ranks of a replica of the model are neighbours
    model.pipe.p *= p->t;
    return p->pipe.p > 1 && pipe_crosses_nodes(&model, w);
}
static inline double axes_message_seconds(const Plan* p, const Network* w) {
    const Link* link = axes_cross_nodes(p, w) ? &w->between : &w->inside;
    return p->pipe.p > 1 ? link->alpha[PLAN_ALL_GATHER] + axes_message_bytes(p) / link->busbw[PLAN_ALL_GATHER] : 0;
}

// Seconds of what is sent of a unit over the copies before the update, and after it.
typedef struct { double reduce, gather; } UnitSent;
static inline UnitSent axes_unit_sent(const Plan* p, const Network* w, int unit) {
    RankGroup dp = ranks_apart_group(w, p->N, p->t * p->pipe.p);
    double bytes = (double)unit_part_elements(p->config, unit, p->t) * (double)p->X;
    UnitSent u = { group_seconds(w, p->zero_stage ? PLAN_REDUCE_SCATTER : PLAN_ALL_REDUCE, bytes, dp), 0 };
    if (p->zero_stage) u.gather = group_seconds(w, PLAN_ALL_GATHER, bytes, dp);
    return u;
}

// By how much the gathers of an update delay the next step: a rank computes its first blocks as they arrive.
static inline double axes_gather_delay(const Plan* p, const Play* y, UnitSent block, UnitSent root) {
    double most = 0;
    for (int r = 0; r < p->pipe.p && p->zero_stage; r++) {
        const Box* first = &y->boxes[r][0];
        int n = pipe_blocks_of(p, r);
        double arrived = r == 0 || r == p->pipe.p - 1 ? root.gather : 0, computes = first->end - first->begin;
        for (int i = 0; i < n; i++) {
            arrived += block.gather;
            most = fmax(most, arrived - first->begin - i * computes * p->pipe.v / n);
        }
    }
    return most;
}

// ---- a step ----
// tensor: what an average rank waits for inside its actions; bubble: without messages; exposed: what messages and the sums and
// gathers over replicas add; communication: these alone.
typedef struct { double compute, tensor, bubble, communication, exposed, seconds, efficiency, tokens_per_s; } AxesTime;

// When all ranks have what the update needs. *communication: of the rank that communicates longest.
static inline double axes_end(const Plan* p, const Network* w, const Play* y, double* communication) {
    RankGroup pp = { p->pipe.p, axes_cross_nodes(p, w) ? 1 : p->pipe.p, p->t };
    RankGroup tied = { p->pipe.p > 1 ? 2 : 1, axes_cross_nodes(p, w) ? 1 : 2, p->t };
    UnitSent block = axes_unit_sent(p, w, 1), root = axes_unit_sent(p, w, 0);
    TensorMessages m = tensor_messages(p, w);
    double root_bytes = (double)unit_part_elements(p->config, 0, p->t) * (double)p->X, end = 0;
    double number = group_seconds(w, PLAN_ALL_REDUCE, sizeof(double), pp);
    int last = p->pipe.p - 1;
    for (int r = 0; r <= last; r++) {
        Timeline t = { 0, 0, 0, pipe_messages_of(p, r) * axes_message_seconds(p, w), 0 };
        pipe_sum_blocks(p, y, r, block.reduce, 0, 0, &t);
        if (r == 0 || r == last) {
            timeline_wait(&t, fmax(play_end(y, 0), play_end(y, last)));
            shared_wait(&t, group_seconds(w, PLAN_ALL_REDUCE, root_bytes, tied));
            timeline_send(&t, root.reduce);
        }
        timeline_wait(&t, t.arrived);
        for (int k = 0; k < 2 * pipe_blocks_of(p, r) + 1; k++) shared_wait(&t, m.layernorms);
        end = fmax(end, t.now);
        *communication = fmax(*communication, t.communication + 3 * number);
    }
    return end + 3 * number + axes_gather_delay(p, y, block, root);
}

// A step of p->N ranks. s: of a whole model on one rank; e: the times of actions instead, if it is on.
static inline AxesTime axes_step(const Plan* p, const Network* w, UnitSeconds s, const Emulation* e) {
    Times times[PLAY_CHUNKS];
    Pipeline l = plan_pipeline(p);
    PlayTimes silent = { times, NULL, 0 }, with = { times, NULL, axes_message_seconds(p, w) };
    TensorMessages m = tensor_messages(p, w);
    double busy = 0;
    AxesTime t;
    Play y;
    memset(&t, 0, sizeof t);
    if (e->is_on) emulated_times(p, e, times);
    else axes_times(p, &m, s, times);
    play(&y, l, silent);
    for (int r = 0; r < l.p; r++) busy += y.busy[r] / l.p;
    t.compute = e->is_on ? busy : l.m * (p->config.L * (s.block_forward + s.block_backward) + s.head) / (p->t * l.p);
    t.tensor = busy - t.compute;
    t.bubble = y.step - busy;
    play_free(&y);
    play(&y, l, with);
    t.seconds = axes_end(p, w, &y, &t.communication);
    play_free(&y);
    t.exposed = t.seconds - busy - t.bubble;
    t.seconds += w->sm_share * fmax(0, t.communication - t.exposed); // compute, while something is sent beside it
    t.seconds += plan_update_seconds(p, PLAN_3D);
    t.tokens_per_s = (double)axes_copies(p) * l.m * p->B * p->T / t.seconds;
    t.efficiency = t.compute / t.seconds;
    return t;
}
#endif
