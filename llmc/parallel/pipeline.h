/*
pipeline.h - pipeline schedules as numbers: the order of a rank's forward and backward passes, the sender and receiver
of each message, and the activations that a rank keeps. How far a rank runs ahead is in train_gpt2_pp.cu
(pipeline_run_ahead), which also lists its actions (gpt2_init_schedule). Of these schedules gpipe is that of arXiv
1811.06965, section 2, 1f1b and interleaved are those of arXiv 2104.04473, sections 2.2.1 and 2.2.2, and zb-h1 is that
of arXiv 2401.10241, section 2.1, where I is called B. Its authors merge W with I where they can; here W are done first
in, first out, with the same bubble and memory, so that gradients are added up in the order of 1f1b.

A model is cut into p*v chunks of consecutive blocks; chunk c of rank r is number c*p + r. A step has m micro-batches.
An action is one micro-batch in one chunk:

    F  forward
    B  backward: I and W
    I  the gradient of the input, which the chunk before it waits for
    W  the gradients of the weights

F needs the output of F in the chunk before it; I and B need the gradient from I or B in the chunk after it. If all
stages take equal times, and tF, tI, tW are the seconds of an action in all v chunks of a rank, then a step lasts m(tF +
tI + tW) plus the bubble, in which the rank waits:

                   bubble, seconds                 activations that are alive at a time on rank r, at most
    gpipe          (p-1)(tF + tI + tW)             m
    1f1b           (p-1)(tF + tI + tW)             min(m, p-r)
    interleaved    (p-1)(tF + tI + tW) / v         min(mv, 2(p-r-1) + (v-1)p + 1), each of 1/v of the rank's blocks
    zb-h1          (p-1) max(tF + tI - tW, tF)     min(m, p)

Activations are those of a micro-batch in one chunk, from its F to its B or W. Every chunk's gradients of weights are
added up in the order of the micro-batches, so the four schedules give the same bits.

Deadlock: two neighbours may send to each other at the same time. Therefore a rank issues the receive of its next action
before it computes this one. Then no schedule deadlocks, even if a send must have ended before the rank's next send
begins. comm_send returns at once; its CommOp may be waited for when its buffer is needed again. If sends did not return
before the receive is issued, gpipe, 1f1b and zb-h1 still could not deadlock; interleaved could, and would need the
receives of two actions ahead. Messages from one rank to another are received in the order in which they are sent, even
where p = 2 sends both kinds.

All functions are pure, and allocate nothing. (test/unit/test_pipeline.c plays them.)
*/
#ifndef LLMC_PIPELINE_H
#define LLMC_PIPELINE_H
#include "../base/common.h"

typedef enum { ACT_FORWARD, ACT_BACKWARD, ACT_BACKWARD_INPUT, ACT_BACKWARD_WEIGHT } ActionKind; // F, B, I, W
typedef struct { ActionKind kind; int micro, chunk; } Action;          // chunk 0..v-1 of this rank
typedef enum { SCHEDULE_GPIPE, SCHEDULE_1F1B, SCHEDULE_INTERLEAVED, SCHEDULE_ZB_H1 } Schedule;
#define SCHEDULE_WORDS "gpipe|1f1b|interleaved|zb-h1"                  // for option_choice, in the order of Schedule
typedef struct {
    Schedule schedule;
    int p, m, v;       // stages (ranks), micro-batches a step, chunks a rank
    int warmup, delay; // of a rank: so many F come before its turns of F and B; so many turns after its I comes a W
} Pipeline;

// Dies unless the schedule can be played.
static inline void pipeline_check(Pipeline pipe) {
    bool interleaved = pipe.schedule == SCHEDULE_INTERLEAVED;
    require(pipe.p >= 1 && pipe.m >= 1 && pipe.v >= 1, "a pipeline of %d stages, %d micro-batches and %d chunks per"
            " rank is impossible; each number must be at least 1", pipe.p, pipe.m, pipe.v);
    require(interleaved || pipe.v == 1, "--chunks %d: only --schedule interleaved runs several chunks per rank; choose"
            " it, or --chunks 1", pipe.v);
    require(!interleaved || pipe.v > 1, "--schedule interleaved with --chunks 1 interleaves nothing, and keeps more"
            " activations than 1f1b; choose --chunks 2 or more, or --schedule 1f1b");
    require(pipe.v == 1 || pipe.p > 1, "--schedule interleaved with 1 stage interleaves nothing; choose 2 or more, or"
            " --schedule 1f1b");
    require(!interleaved || pipe.m % pipe.p == 0, "--schedule interleaved takes micro-batches in groups of %d, one per"
            " stage, and a step has %d; choose --total-batch-size so that %d divides their number",
            pipe.p, pipe.m, pipe.p);
}

// ---- the order of passes: of micro-batches, or with several chunks that of interleaved ----
static inline Action pipeline_act(ActionKind kind, int micro) {
    Action a = { kind, micro, 0 };
    return a;
}
// A rank's forward pass number j: p micro-batches in chunk 0, the same p in chunk 1, and so on; then the next p. With
// one chunk it is that of micro-batch j.
static inline Action pipeline_forward(Pipeline pipe, int j) {
    Action a = { ACT_FORWARD, j / (pipe.p * pipe.v) * pipe.p + j % pipe.p, j / pipe.p % pipe.v };
    return a;
}
// Its backward pass number j, B or I: the same micro-batches, from the last chunk to the first. (GPipe's figure has the
// micro-batches in the opposite order. In this order gradients are added up as on one device.)
static inline Action pipeline_backward(Pipeline pipe, int j) {
    ActionKind kind = pipe.schedule == SCHEDULE_ZB_H1 ? ACT_BACKWARD_INPUT : ACT_BACKWARD;
    Action a = { kind, j / (pipe.p * pipe.v) * pipe.p + j % pipe.p, pipe.v - 1 - j / pipe.p % pipe.v };
    return a;
}
// Returns the number of a micro-batch's forward pass in a chunk.
static inline int pipeline_number(Pipeline pipe, int micro, int chunk) {
    return micro / pipe.p * pipe.p * pipe.v + chunk * pipe.p + micro % pipe.p;
}

// ---- what a rank keeps, once pipeline_run_ahead has set its warmup and delay ----
// Returns the most (micro-batch, chunk) whose activations are alive at a time: those of the warm-up and one more, and
// those whose W is delayed.
static inline int pipeline_slots(Pipeline pipe) {
    int alive = pipe.warmup + 1 + pipe.delay, all = pipe.m * pipe.v;
    return alive < all ? alive : all;
}

// Returns the slot, from 0, of the activations of an action's micro-batch in its chunk. The first forward passes take
// the slots in turn; each later one takes the slot that was freed last. With one chunk that is micro % slots.
static inline int pipeline_slot(Pipeline pipe, Action a) {
    int slots = pipeline_slots(pipe), j = pipeline_number(pipe, a.micro, a.chunk);
    while (j >= slots) {
        Action freed = pipeline_backward(pipe, j - slots);
        j = pipeline_number(pipe, freed.micro, freed.chunk);
    }
    return j;
}

// ---- between ranks ----
// Before a rank computes action k, it has issued the receives of actions up to k + RECEIVES_AHEAD.
enum { RECEIVES_AHEAD = 1 };
enum { NO_NEIGHBOUR = -1 };
// Returns the rank from which an action's input comes, and the one to which its output goes. NO_NEIGHBOUR: none, as for
// W, for F of the first chunk, which reads tokens, and for I of the last, which begins at the loss.
static inline int pipeline_from(Pipeline pipe, int rank, Action a) {
    int number = a.chunk * pipe.p + rank;
    if (a.kind == ACT_FORWARD) return number == 0 ? NO_NEIGHBOUR : (rank + pipe.p - 1) % pipe.p;
    return a.kind == ACT_BACKWARD_WEIGHT || number == pipe.p * pipe.v - 1 ? NO_NEIGHBOUR : (rank + 1) % pipe.p;
}
static inline int pipeline_to(Pipeline pipe, int rank, Action a) {
    int number = a.chunk * pipe.p + rank;
    if (a.kind == ACT_FORWARD) return number == pipe.p * pipe.v - 1 ? NO_NEIGHBOUR : (rank + 1) % pipe.p;
    return a.kind == ACT_BACKWARD_WEIGHT || number == 0 ? NO_NEIGHBOUR : (rank + pipe.p - 1) % pipe.p;
}

// Returns whether ranks a and b of p send each other messages: the last one and the first do where there are several
// chunks.
static inline bool pipeline_are_neighbours(int a, int b, int p) { return (a + 1) % p == b || (b + 1) % p == a; }

// ---- the bubble ----
// Returns the seconds of a step in which a rank of a balanced pipeline waits, by the formulas above; that of zb-h1
// needs m >= p. One paper gives its share of the work m(tF + tI + tW), another that of the whole step.
static inline double pipeline_bubble(Pipeline pipe, double tF, double tI, double tW) {
    double zb_h1 = tF + tI - tW > tF ? tF + tI - tW : tF; // no W fills the time before the last stage's first F
    return (pipe.p - 1) * (pipe.schedule == SCHEDULE_ZB_H1 ? zb_h1 : (tF + tI + tW) / pipe.v);
}
#endif
