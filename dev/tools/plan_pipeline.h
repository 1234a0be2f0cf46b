/*
plan_pipeline.h - predicts what a step of train_gpt2_pp takes. (Its bytes are in plan.h.)

Actions   A stage's F, B and W take what its blocks take. Of a block's backward pass W is the four products that make
          gradients of matrices, and B the rest, with recomputation also another F. The last stage's B has the head, its
          forward pass included, because the program computes logits only there. Embedding takes no time.
Schedule  It is played (schedule_play.h): each action begins when its rank is free and its input is there. So the bubble is
          that of these stages, also of unequal ones. A message takes alpha + n/bandwidth. All take as long as on the slowest
          link between neighbours: in 1f1b that link delays every micro-batch, and faster ones matter little.
After it  A stage sums a block's gradients over the replicas of the model once its last micro-batch has left the block, beside
          what it still has to compute. The root's are first summed over the two stages that have it, when both are done.
          Then three numbers are summed over the stages: the loss and two norms.
*/
#ifndef DEV_PLAN_PIPELINE_H
#define DEV_PLAN_PIPELINE_H
#include "plan.h"
#include "schedule_play.h"

static inline Pipeline plan_pipeline(const Plan* p) {
    Pipeline l = { (Schedule)p->pipe.schedule, p->pipe.p, p->accumulation, p->pipe.v };
    return l;
}
// Overwrites blocks (p*v) with those of each part of the model.
static inline void pipe_split(const Plan* p, int* blocks) {
    split_blocks(blocks, p->pipe.split, p->config.L, p->pipe.p, p->pipe.v, split_costs(p->config.Vp, p->config.C));
}
static inline int pipe_blocks_of(const Plan* p, int rank) {
    int blocks[MAX_UNITS], sum = 0;
    pipe_split(p, blocks);
    for (int c = 0; c < p->pipe.v; c++) sum += blocks[c * p->pipe.p + rank];
    return sum;
}
// Without a bubble, the share of the time in which stages compute, as train_gpt2_pp prints it.
static inline double pipe_balance(const Plan* p, const int* blocks) {
    return split_efficiency(blocks, p->pipe.p, p->pipe.v, split_costs(p->config.Vp, p->config.C));
}
static inline double pipe_balance_of_split(const Plan* p) {
    int blocks[MAX_UNITS];
    pipe_split(p, blocks);
    return pipe_balance(p, blocks);
}
static inline double pipe_balance_of_even_split(const Plan* p) {
    int blocks[MAX_UNITS];
    split_even(blocks, p->config.L, p->pipe.p, p->pipe.v);
    return pipe_balance(p, blocks);
}

// ---- messages ----
// Of a replica of the model in a step: how many, and the bytes of each.
static inline int pipe_messages(const Plan* p) {
    return p->pipe.p == 1 ? 0 : 2 * p->accumulation * (p->pipe.p * p->pipe.v - 1);
}
static inline double pipe_message_bytes(const Plan* p) { return (double)p->B * p->T * p->config.C * (double)p->X; }
// How many of them a rank sends.
static inline int pipe_messages_of(const Plan* p, int rank) {
    int last = p->pipe.p - 1;
    return p->accumulation * (2 * p->pipe.v - (rank == 0) - (rank == last)) * (last > 0);
}

// True if some neighbours that share a replica are in different nodes.
static inline bool pipe_crosses_nodes(const Plan* p, const Network* w) {
    return p->pipe.p > 1 && w->ranks_per_node > 0 && w->ranks_per_node < p->N && w->ranks_per_node % p->pipe.p != 0;
}
// Seconds of a message on the slowest link: a rank sends it through an interface of its own.
static inline double pipe_message_seconds(const Plan* p, const Network* w) {
    const Link* link = pipe_crosses_nodes(p, w) ? &w->between : &w->inside;
    return p->pipe.p > 1 ? link->alpha[PLAN_ALL_GATHER] + pipe_message_bytes(p) / link->busbw[PLAN_ALL_GATHER] : 0;
}
// The two ranks of a copy that have the root. If they are in different nodes, they use one of its interfaces.
static inline RankGroup tied_group(const Plan* p, const Network* w) {
    bool apart = pipe_crosses_nodes(p, w);
    RankGroup g = { p->pipe.p > 1 ? 2 : 1, apart ? 1 : 2, apart ? w->nics : 1 };
    return g;
}

// ---- a step ----
// Seconds of W in a block: 2 FLOPs for each weight of its matrices and token.
static inline double block_weight_seconds(const Plan* p, UnitSeconds s) {
    double C = p->config.C;
    return s.block_forward * 24 * C * C / (plan_block_flops(p) / 3);
}
// Overwrites times (p*v), those of each part of the model.
static inline void pipe_times(const Plan* p, UnitSeconds s, Times* times) {
    int blocks[MAX_UNITS], parts = p->pipe.p * p->pipe.v;
    double W = block_weight_seconds(p, s);
    pipe_split(p, blocks);
    for (int g = 0; g < parts; g++) {
        Times t = { blocks[g] * s.block_forward, blocks[g] * (s.block_backward - W), blocks[g] * W };
        times[g] = t;
    }
    times[parts - 1].B += s.head;
}
// The mean of ranks.
static inline Times pipe_mean(const Plan* p, const Times* times) {
    Times sum = { 0, 0, 0 };
    for (int g = 0; g < p->pipe.p * p->pipe.v; g++) {
        sum.F += times[g].F / p->pipe.p;
        sum.B += times[g].B / p->pipe.p;
        sum.W += times[g].W / p->pipe.p;
    }
    return sum;
}

static inline double play_end(const Play* y, int rank) { return y->boxes[rank][y->counts[rank] - 1].end; }

// Sums rank's blocks over the copies, each when it is complete, in t's queue; t->now becomes the time when the rank has
// computed all. sum: seconds of one. backward, weight: of a block in an action; 0: all blocks take equal parts of it, and as
// much comes before them.
static inline void pipe_sum_blocks(const Plan* p, const Play* y, int rank, double sum, double backward, double weight,
                                   Timeline* t) {
    int blocks[MAX_UNITS];
    pipe_split(p, blocks);
    for (int k = 0; k < y->counts[rank]; k++) {
        const Box* box = &y->boxes[rank][k];
        ActionKind kind = box->action.kind;
        if (box->action.micro < y->l.m - 1 || (kind != ACT_BACKWARD && kind != ACT_BACKWARD_WEIGHT)) continue;
        int n = blocks[box->action.chunk * p->pipe.p + rank];
        double each = kind == ACT_BACKWARD ? backward : weight;
        if (each == 0) each = (box->end - box->begin) / (n + 1);
        for (int left = n - 1; left >= 0; left--) { // the head, if it is there, comes before the blocks
            t->now = box->end - left * each;
            timeline_send(t, sum);
        }
    }
    t->now = play_end(y, rank);
}

// bubble: without messages. formula: of equal stages; NAN: there is none. exposed: what messages and sums add.
typedef struct { double compute, bubble, formula, communication, exposed, seconds, efficiency, tokens_per_s; } PipelineTime;

// When all ranks have what the update needs. *communication: of the rank that communicates longest.
static inline double pipe_end(const Plan* p, const Network* w, const Play* y, UnitSeconds s, double* communication) {
    RankGroup dp = ranks_apart_group(w, p->N, p->pipe.p), pp = neighbours_group(w, p->N, p->pipe.p);
    double X = (double)p->X, end = 0, number = group_seconds(w, PLAN_ALL_REDUCE, sizeof(double), pp);
    double block = group_seconds(w, PLAN_ALL_REDUCE, (double)unit_elements(p->config, 1) * X, dp);
    double root_bytes = (double)unit_elements(p->config, 0) * X;
    int last = p->pipe.p - 1;
    for (int r = 0; r <= last; r++) {
        Timeline t = { 0, 0, 0, pipe_messages_of(p, r) * pipe_message_seconds(p, w), 0 };
        pipe_sum_blocks(p, y, r, block, s.block_backward, block_weight_seconds(p, s), &t);
        if (r == 0 || r == last) {
            timeline_wait(&t, fmax(play_end(y, 0), play_end(y, last)));
            shared_wait(&t, group_seconds(w, PLAN_ALL_REDUCE, root_bytes, tied_group(p, w)));
            timeline_send(&t, group_seconds(w, PLAN_ALL_REDUCE, root_bytes, dp));
        }
        timeline_wait(&t, t.arrived);
        end = fmax(end, t.now);
        *communication = fmax(*communication, t.communication + 3 * number);
    }
    return end + 3 * number;
}

// A step of p->N ranks. s: of a whole model on one rank.
static inline PipelineTime pipeline_step(const Plan* p, const Network* w, UnitSeconds s) {
    Times times[PLAY_CHUNKS];
    Pipeline l = plan_pipeline(p);
    PlayTimes silent = { times, NULL, 0 }, with = { times, NULL, pipe_message_seconds(p, w) };
    PipelineTime t;
    Play y;
    memset(&t, 0, sizeof t);
    pipe_times(p, s, times);
    play(&y, l, silent);
    for (int r = 0; r < l.p; r++) t.compute += y.busy[r] / l.p;
    t.bubble = y.step - t.compute;
    t.formula = schedule_bubble(l, pipe_mean(p, times));
    play_free(&y);
    play(&y, l, with);
    t.seconds = pipe_end(p, w, &y, s, &t.communication);
    play_free(&y);
    t.exposed = t.seconds - t.compute - t.bubble;
    t.seconds += plan_update_seconds(p, PLAN_PP);
    t.efficiency = t.compute / t.seconds;
    t.tokens_per_s = (double)(p->N / l.p) * l.m * p->B * p->T / t.seconds;
    return t;
}
#endif
