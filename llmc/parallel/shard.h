/*
shard.h - shared by stages that cut every unit into as many shards as there are ranks: the length of a shard, and how the
ranks' shares of a checkpoint become one.

Shard r of unit u is its elements [r*n, (r+1)*n), n = shard_elements(c, u, N). Where a unit does not divide, its last shards
end in padding: zeros that have zero gradients and stay zero. They are in no file.
*/
#ifndef LLMC_SHARD_H
#define LLMC_SHARD_H
#include "../save/checkpoint.h"
#include "../comm/comm.h"

#define SHARD_ALIGNMENT 16 // elements: every shard begins at an address that kernels may read 16 bytes at a time

static inline size_t shard_elements(GPT2Config c, int u, int N) {
    return round_up(ceil_div(unit_elements(c, u), (size_t)N), SHARD_ALIGNMENT);
}
// All units together: what each rank keeps of P parameters, P/N plus padding.
static inline size_t shard_elements_total(GPT2Config c, int N) {
    size_t n = 0;
    for (int u = 0; u <= c.L; u++) n += shard_elements(c, u, N);
    return n;
}
// How many elements of rank r's shard are not padding. The unit has `size` elements, a shard n.
static inline size_t shard_filled(size_t size, size_t n, int r) { return size_min(n, size - size_min(size, (size_t)r * n)); }

// After each rank has written or read its share of a checkpoint: checksum and elements become those of all ranks together.
static inline void checkpoint_add_up(Comm* c, uint64_t checksum[CHECKPOINT_PARTS], uint64_t elements[CHECKPOINT_PARTS]) {
    enum { NUMBERS = 2 * CHECKPOINT_PARTS };
    Control* control = c->world->control;
    uint64_t sum[NUMBERS], theirs[NUMBERS];
    memcpy(sum, checksum, sizeof sum / 2);
    memcpy(sum + CHECKPOINT_PARTS, elements, sizeof sum / 2);
    ControlBytes* shares = (ControlBytes*)xcalloc((size_t)c->size, sizeof(ControlBytes));
    control_gather(control, sum, sizeof sum, c->rank == 0 ? shares : NULL);
    for (int q = 1; c->rank == 0 && q < c->size; q++) {
        memcpy(theirs, shares[q].data, sizeof theirs);
        for (int k = 0; k < NUMBERS; k++) sum[k] += theirs[k];
    }
    ControlBytes told = control_broadcast(control, sum, sizeof sum);
    if (c->rank > 0) memcpy(sum, told.data, sizeof sum);
    memcpy(checksum, sum, sizeof sum / 2);
    memcpy(elements, sum + CHECKPOINT_PARTS, sizeof sum / 2);
    for (int q = 0; q < c->size; q++) free(shares[q].data);
    free(shares);
    free(told.data);
}
#endif
