/*
host_adamw.h - AdamW and the sums around it over arrays in host memory, in every build: the CPU's layers are made of
them, and on a GPU they update shards that are kept on the host (--cpu-offload).

Numbers that may be fp32 or floatX are given with their type, and are widened on the way: no array is ever copied.
Everything is elementwise or one sum, and limited only by memory bandwidth. AdamW needs -fno-math-errno for that:
without it each sqrtf may set errno, the loop does not become vector code, and it takes six times as long.
*/
#ifndef LLMC_HOST_ADAMW_H
#define LLMC_HOST_ADAMW_H
#include "layers_api.h"

#define HOST_SLICE 8192 // elements that one thread takes at a time; as fp32 they stay in its cache

// Returns elements [begin, begin + n) of x, of type fp32 or floatX,
// in fp32: where they lie if they are fp32, else in copy (n).
static inline const float* host_widened(float* copy, const void* x, DType t, size_t begin, size_t n) {
    if (t == DTYPE_F32) return (const float*)x + begin;
    convert_slice(copy, DTYPE_F32, (const floatX*)x + begin, t, n);
    return copy;
}

// ---- sums ----
// An array of n elements is cut into at most STATS_CHUNKS equal chunks of 16384 elements at least. One
// thread sums a chunk in double; the chunks' sums are added in order. In a sum of squares, element i of a chunk is
// added to lane i % SUM_LANES, and then the lanes are added in pairs. So the order is a function of n, whatever vectors
// a compiler makes of the lanes.
#define STATS_CHUNKS 1024
#define SUM_LANES 16
static inline size_t stats_chunk(size_t n) { return size_max(16384, round_up(ceil_div(n, STATS_CHUNKS), 16)); }

// A sum over elements [begin, end) of x, of type fp32 or floatX.
typedef double (*ChunkSum)(const void* x, DType t, size_t begin, size_t end);
static inline double host_sum_chunks(ChunkSum sum_of, const void* x, DType t, size_t n) {
    double partial[STATS_CHUNKS], sum = 0;
    size_t chunk = stats_chunk(n), chunks = ceil_div(n, chunk);
    #pragma omp parallel for schedule(static)
    for (size_t k = 0; k < chunks; k++) partial[k] = sum_of(x, t, k * chunk, size_min(n, (k + 1) * chunk));
    for (size_t k = 0; k < chunks; k++) sum += partial[k];
    return sum;
}
static inline double chunk_squares(const void* x, DType t, size_t begin, size_t end) {
    double lanes[SUM_LANES] = { 0 };
    for (size_t at = begin; at < end; at += HOST_SLICE) {
        float copy[HOST_SLICE];
        size_t n = size_min(HOST_SLICE, end - at), whole = n - n % SUM_LANES;
        const float* w = host_widened(copy, x, t, at, n);
        for (size_t i = 0; i < whole; i += SUM_LANES) {
            #pragma omp simd
            for (int l = 0; l < SUM_LANES; l++) lanes[l] += (double)w[i + l] * (double)w[i + l];
        }
        for (size_t i = whole; i < n; i++) lanes[i - whole] += (double)w[i] * (double)w[i];
    }
    for (int half = SUM_LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}
// Returns the sum of x^2 over x (n), of type fp32 or floatX: the same bits for the same numbers in either.
static inline double host_sum_squares(const void* x, DType t, size_t n) {
    return host_sum_chunks(chunk_squares, x, t, n);
}

// ---- AdamW ----
// Factors that every element needs, computed once in double and rounded where PyTorch's AdamW rounds. (GPUs use them as
// well.)
typedef struct { float beta1_rest, beta2, beta2_rest, step_size, root_correction, eps, decay; } AdamWFactors;

static inline AdamWFactors adamw_factors(AdamW a) {
    AdamWFactors f;
    f.beta1_rest = (float)(1 - a.beta1);
    f.beta2 = (float)a.beta2;
    f.beta2_rest = (float)(1 - a.beta2);
    f.step_size = (float)(a.lr / (1 - pow(a.beta1, a.t)));
    f.root_correction = (float)sqrt(1 - pow(a.beta2, a.t));
    f.eps = (float)a.eps;
    f.decay = (float)(1 - a.lr * a.weight_decay);
    return f;
}

// n elements, with p multiplied by `decay` first:
// m = b1 m + (1-b1) g, v = b2 v + (1-b2) g^2, p = p decay - lr/(1-b1^t) m / (sqrt(v) / sqrt(1-b2^t) + eps)
static inline void host_adamw_range(AdamWFactors f, float decay, float scale, float* params, float* m, float* v,
                                    const float* grads, size_t n) {
    #pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float g = grads[i] * scale;
        float mi = m[i] + f.beta1_rest * (g - m[i]);
        float vi = v[i] * f.beta2 + f.beta2_rest * g * g;
        float denominator = sqrtf(vi) / f.root_correction + f.eps;
        params[i] = params[i] * decay - f.step_size * mi / denominator;
        m[i] = mi;
        v[i] = vi;
    }
}
// n elements, of which the first no_decay are not decayed
static inline void host_adamw_piece(AdamWFactors f, float scale, float* params, float* m, float* v, const float* grads,
                                    size_t n, size_t no_decay) {
    size_t split = size_min(n, no_decay);
    host_adamw_range(f, 1.0f, scale, params, m, v, grads, split);
    host_adamw_range(f, f.decay, scale, params + split, m + split, v + split, grads + split, n - split);
}

// adamw_update for host memory. master, m, v (n) fp32, grads (n) fp32 or floatX; params (n) floatX become master's new
// values, rounded, or are NULL. Where floatX is fp32, master is the weights and params is NULL. The first no_decay
// elements are not decayed. grad_scale 0: nothing changes at all. *square += host_sum_squares of params (of master if
// params is NULL): each chunk is summed while the cache still holds it. square NULL: no sum.
static inline void host_adamw_update(AdamW a, floatX* params, float* master, float* m, float* v, const void* grads,
                                     DType grad_type, float grad_scale, size_t n, size_t no_decay, double* square) {
    AdamWFactors f = adamw_factors(a);
    double partial[STATS_CHUNKS] = { 0 }, sum = 0;
    size_t chunk = stats_chunk(n), chunks = ceil_div(n, chunk);
    #pragma omp parallel for schedule(static)
    for (size_t k = 0; k < chunks; k++) {
        size_t begin = k * chunk, end = size_min(n, begin + chunk);
        for (size_t at = begin; at < end && grad_scale != 0; at += HOST_SLICE) {
            float copy[HOST_SLICE];
            size_t count = size_min(HOST_SLICE, end - at);
            const float* g = host_widened(copy, grads, grad_type, at, count);
            host_adamw_piece(f, grad_scale, master + at, m + at, v + at, g, count, no_decay - size_min(no_decay, at));
            for (size_t i = 0; i < count && params != NULL; i++) params[at + i] = to_floatX(master[at + i]);
        }
        if (square)
            partial[k] = params ? chunk_squares(params, FLOATX_DTYPE, begin, end)
                                : chunk_squares(master, DTYPE_F32, begin, end);
    }
    for (size_t k = 0; k < chunks; k++) sum += partial[k];
    if (square) *square += sum;
}
#endif
