/*
shard.h - shards of units: how long they are, and where this rank's lie.

Shard r of unit u is its elements [r*n, (r+1)*n), n = shard_elements(c, u, N). Where a unit does not divide, its last shards
end in padding: zeros that have zero gradients and stay zero. They are in no file.
*/
#ifndef LLMC_SHARD_H
#define LLMC_SHARD_H
#include "../comm/comm.h"
#include "../model/gpt2.h"

enum { NO_UNIT = -1 };
#define SHARD_ALIGNMENT 16 // elements: every shard begins at an address that kernels may read 16 bytes at a time

typedef struct {
    size_t n;  // elements of each rank's shard of a unit
    size_t at; // where this rank's begins in memory that has one shard of every unit
} Shard;

// Returns the elements of each of N shards of `elements`.
static inline size_t shard_of(size_t elements, int N) { return round_up(ceil_div(elements, (size_t)N), SHARD_ALIGNMENT); }
static inline size_t shard_elements(GPT2Config c, int u, int N) { return shard_of(unit_elements(c, u), N); }
// All units together: what each rank keeps of P parameters, P/N plus padding.
static inline size_t shard_elements_total(GPT2Config c, int N) {
    return shard_elements(c, 0, N) + (size_t)c.L * shard_elements(c, 1, N);
}

// Waits for an operation if it is under way; then it is not.
#define NO_OP ((CommOp)-1)
static inline void comm_finish(Comm* c, CommOp* op) {
    if (*op != NO_OP) comm_wait(c, *op);
    *op = NO_OP;
}

// Prints what ZeRO shards among N ranks, and how much of it is padding.
static inline void report_zero(int zero_stage, GPT2Config c, int N) {
    static const char* const sharded[] = { "optimizer state", "optimizer state and gradients",
                                           "optimizer state, gradients and parameters" };
    double P = (double)gpt2_num_elements(c), all = (double)N * (double)shard_elements_total(c, N);
    printf("zero       stage %d: each rank keeps 1/%d of %s; %.2f %% of it padding\n", zero_stage, N,
           sharded[zero_stage - 1], 100 * (1 - P / all));
    fflush(stdout);
}
#endif
