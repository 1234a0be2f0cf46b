/*
shard.h - shards of units: their size, and the place of this rank's shards.

Shard r of unit u consists of its elements [r*n, (r+1)*n), n = shard_elements(c, u, N). If N does not divide a unit, its
last shards end in padding: zeros with zero gradients, which stay zero and are never saved.
*/
#ifndef LLMC_SHARD_H
#define LLMC_SHARD_H
#include "../comm/comm.h"
#include "../model/gpt2.h"

enum { NO_UNIT = -1 };
#define SHARD_ALIGNMENT 16 // elements, so that every shard begins at a multiple of 16 bytes in any precision

typedef struct {
    size_t n;      // elements of each rank's shard of a unit
    size_t offset; // of this rank's shard, in memory with one shard of every unit
} Shard;

// Returns the size of each of N shards of `elements` elements.
static inline size_t shard_of(size_t elements, int N) {
    return round_up(ceil_div(elements, (size_t)N), SHARD_ALIGNMENT);
}
static inline size_t shard_elements(GPT2Config c, int u, int N) { return shard_of(unit_elements(c, u), N); }
// Returns the size of one shard of every unit: P/N for P parameters, plus padding.
static inline size_t shard_elements_total(GPT2Config c, int N) {
    return shard_elements(c, 0, N)
         + (size_t)c.L * (shard_elements(c, attention_unit(0), N) + shard_elements(c, mlp_unit(0), N));
}

// Waits for an operation if it is under way, and sets it to NO_OP.
#define NO_OP ((CommOp)-1)
static inline void comm_finish(Comm* c, CommOp* op) {
    if (*op != NO_OP) comm_wait(c, *op);
    *op = NO_OP;
}

// Prints the state that ZeRO shards among N ranks, and the share of padding in it.
static inline void report_zero(int zero_stage, GPT2Config c, int N) {
    static const char* const sharded[] = { "optimizer state", "optimizer state and gradients",
                                           "optimizer state, gradients and parameters" };
    double P = (double)gpt2_num_elements(c), all = (double)N * (double)shard_elements_total(c, N);
    printf("zero       stage %d: each rank keeps 1/%d of %s; %.2f %% of it padding\n", zero_stage, N,
           sharded[zero_stage - 1], 100 * (1 - P / all));
    fflush(stdout);
}
#endif
