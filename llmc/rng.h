/*
rng.h - random numbers that are a function of what they are for, not of who asked before.

Counter-based: the generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11),
keyed by the seed; the counter says which stream and which element. So any rank makes any slice, in any order.
*/
#ifndef LLMC_RNG_H
#define LLMC_RNG_H
#include "common.h"

typedef struct { uint32_t x[4]; } Philox;

static inline Philox philox(uint64_t key, uint64_t counter_high, uint64_t counter_low) {
    Philox c;
    c.x[0] = (uint32_t)counter_low;  c.x[1] = (uint32_t)(counter_low >> 32);
    c.x[2] = (uint32_t)counter_high; c.x[3] = (uint32_t)(counter_high >> 32);
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c.x[0], p1 = (uint64_t)0xCD9E8D57u * c.x[2];
        Philox n;
        n.x[0] = (uint32_t)(p1 >> 32) ^ c.x[1] ^ k0; n.x[1] = (uint32_t)p1;
        n.x[2] = (uint32_t)(p0 >> 32) ^ c.x[3] ^ k1; n.x[3] = (uint32_t)p0;
        c = n;
        k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
    return c;
}

// Streams keep uses of one seed apart.
#define STREAM_WEIGHTS 0ull         // + unit in the low bits
#define STREAM_DATA    (1ull << 32) // + epoch
#define STREAM_SAMPLER (2ull << 32)

// Uniform in [0,1), 24 random bits; element number i of a stream.
static inline float random_uniform(uint64_t seed, uint64_t stream, uint64_t i) {
    return (float)(philox(seed, stream, i).x[0] >> 8) * 0x1p-24f;
}

// Standard normal by Box and Muller in double, so that every libm rounds to the same float (nearly always).
static inline float random_normal(uint64_t seed, uint64_t stream, uint64_t i) {
    Philox r = philox(seed, stream, i);
    double u1 = ((double)r.x[0] + 0.5) * 0x1p-32, u2 = ((double)r.x[1] + 0.5) * 0x1p-32; // in (0,1)
    return (float)(sqrt(-2.0 * log(u1)) * cos(2.0 * 3.14159265358979323846 * u2));
}

// Where element i goes in a pseudo-random permutation of [0,n): a Feistel network over the next even number of bits,
// walked along its cycle until it lands inside (Black and Rogaway 2002). No memory, any element at any time.
static inline uint64_t random_permute(uint64_t seed, uint64_t stream, uint64_t i, uint64_t n) {
    if (n < 2) return 0;
    int half = 1;
    while (half < 32 && (1ull << (2 * half)) < n) half++;
    uint64_t mask = (1ull << half) - 1;
    do {
        uint64_t left = i >> half, right = i & mask;
        for (uint64_t round = 0; round < 8; round++) {
            uint64_t mixed = philox(seed, stream, (round << 32) | right).x[0] & mask;
            uint64_t next = left ^ mixed;
            left = right;
            right = next;
        }
        i = (left << half) | right;
    } while (i >= n);
    return i;
}
#endif
