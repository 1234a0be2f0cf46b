/*
host_adamw.h - AdamW and the sums around it over fp32 arrays in host memory. Included by layers.h in every build, never on its
own: the CPU's layers are made of them, and on a GPU they update shards that are kept on the host (--cpu-offload).

Everything is elementwise or one sum, and limited only by memory bandwidth. AdamW needs -fno-math-errno for that: without it each
sqrtf may set errno, the loop does not become vector code, and it takes six times as long.
*/
#ifndef LLMC_HOST_ADAMW_H
#define LLMC_HOST_ADAMW_H

// ---- sums ----
// An array of n elements is cut into at most STATS_CHUNKS equal chunks of 16384 elements at least, so that the order of
// summation is a function of n. Each chunk is summed in double by one thread; the chunks' sums are added in order.
#define STATS_CHUNKS 1024
static inline size_t stats_chunk(size_t n) { return size_max(16384, round_up(ceil_div(n, STATS_CHUNKS), 16)); }

typedef double (*ChunkSum)(const void* x, size_t begin, size_t end); // over elements [begin, end) of x
static inline double host_sum_chunks(ChunkSum sum_of, const void* x, size_t n) {
    double partial[STATS_CHUNKS], sum = 0;
    size_t chunk = stats_chunk(n), chunks = ceil_div(n, chunk);
    #pragma omp parallel for schedule(static)
    for (size_t k = 0; k < chunks; k++) partial[k] = sum_of(x, k * chunk, size_min(n, (k + 1) * chunk));
    for (size_t k = 0; k < chunks; k++) sum += partial[k];
    return sum;
}

static inline double chunk_squares_fp32(const void* array, size_t begin, size_t end) {
    const float* x = (const float*)array;
    double sum = 0;
    #pragma omp simd reduction(+:sum)
    for (size_t i = begin; i < end; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}
// The sum of x^2 over x (n)
static inline double host_sum_squares(const float* x, size_t n) { return host_sum_chunks(chunk_squares_fp32, x, n); }

// x (n) += y (n); they must not overlap
static inline void host_add(float* x, const float* y, size_t n) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) x[i] += y[i];
}

// ---- AdamW ----
// Factors that every element needs, computed once in double and rounded where PyTorch's AdamW rounds. (GPUs use them as well.)
typedef struct { float beta1_rest, beta2, beta2_rest, step_size, root_correction, eps, decay; } AdamWFactors;

static inline AdamWFactors adamw_factors(AdamW a) {
    AdamWFactors f;
    f.beta1_rest = (float)(1.0 - (double)a.beta1);
    f.beta2 = a.beta2;
    f.beta2_rest = (float)(1.0 - (double)a.beta2);
    f.step_size = (float)((double)a.lr / (1.0 - pow((double)a.beta1, a.t)));
    f.root_correction = (float)sqrt(1.0 - pow((double)a.beta2, a.t));
    f.eps = a.eps;
    f.decay = (float)(1.0 - (double)a.lr * (double)a.weight_decay);
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

// layers.h's adamw_update_fp32 for host memory, with grad_scale on the host; grad_scale 0: nothing changes.
static inline void host_adamw_update(AdamW a, float* params, float* m, float* v, const float* grads, float grad_scale,
                                     size_t n, size_t no_decay) {
    const size_t slice = 8192;
    AdamWFactors f = adamw_factors(a);
    if (grad_scale == 0) return;
    #pragma omp parallel for schedule(static)
    for (size_t s = 0; s < ceil_div(n, slice); s++) {
        size_t at = s * slice, count = size_min(slice, n - at);
        host_adamw_piece(f, grad_scale, params + at, m + at, v + at, grads + at, count, no_decay - size_min(no_decay, at));
    }
}
#endif
