/*
rng.h - random numbers that depend on their purpose, not on the numbers drawn before.

Counter-based: the generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11),
keyed by the seed; the counter says which stream and which element. So any rank can make any slice, in any order.
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
#define STREAM_COMPRESS (3ull << 32) // + matrix that is compressed

// Uniform in [0,1), 24 random bits; element number i of a stream.
static inline float random_uniform(uint64_t seed, uint64_t stream, uint64_t i) {
    return (float)(philox(seed, stream, i).x[0] >> 8) * 0x1p-24f;
}

// ln of a normal positive float: ln(m 2^e) with m in [sqrt(1/2), sqrt(2)), and ln m = 2 atanh(t), t = (m-1)/(m+1),
// by its series.
static inline float random_log(float x) {
    uint32_t bits, mantissa;
    memcpy(&bits, &x, sizeof bits);
    int32_t exponent = (int32_t)(bits - 0x3f3504f3u) >> 23; // 0x3f3504f3 is sqrt(1/2)
    mantissa = bits - ((uint32_t)exponent << 23);
    float m;
    memcpy(&m, &mantissa, sizeof m);
    float t = (m - 1) / (m + 1), t2 = t * t;
    return (float)exponent * 0.69314718f
           + 2 * t * (1 + t2 * (1 / 3.0f + t2 * (1 / 5.0f + t2 * (1 / 7.0f + t2 * (1 / 9.0f)))));
}

// cos(2 pi u) for u in [0,1): the quarter of the circle tells whether it is +-cos or +-sin of the rest,
// which Taylor's series computes.
static inline float random_cosine_turn(float u) {
    int32_t quarter = (int32_t)(4 * u);
    float x = (4 * u - (float)quarter) * 1.57079633f, x2 = x * x;
    float cosine = 1 - x2 * (1 / 2.0f - x2 * (1 / 24.0f - x2 * (1 / 720.0f - x2 * (1 / 40320.0f
                     - x2 * (1 / 3628800.0f)))));
    float sine = x * (1 - x2 * (1 / 6.0f - x2 * (1 / 120.0f - x2 * (1 / 5040.0f - x2 * (1 / 362880.0f
                   - x2 * (1 / 39916800.0f))))));
    float value = quarter & 1 ? sine : cosine;
    return quarter == 1 || quarter == 2 ? -value : value;
}

// Standard normal by Box and Muller, element number i of a stream. It takes only additions, multiplications, one
// division and one square root, which IEEE 754 defines to the bit: the same number on every machine. And loops over it
// become vector code.
static inline float random_normal(uint64_t seed, uint64_t stream, uint64_t i) {
    Philox r = philox(seed, stream, i);
    float u1 = ((float)(r.x[0] >> 8) + 0.5f) * 0x1p-24f, u2 = (float)(r.x[1] >> 8) * 0x1p-24f; // (0,1), [0,1)
    return sqrtf(-2 * random_log(u1)) * random_cosine_turn(u2);
}

// Returns where element i goes in a pseudo-random permutation of [0,n): a Feistel network over the next even number of
// bits, walked along its cycle until it lands inside (Black and Rogaway 2002). It needs no memory, and gives any
// element at any time.
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
