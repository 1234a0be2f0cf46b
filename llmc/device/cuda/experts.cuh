/*
cuda/experts.cuh - experts_api.h for a GPU. The router's products are small, so a warp computes them for a few tokens
next to the softmax and the choice. Moving rows is bound by memory: each kernel says how much it reads and writes.
*/
#ifndef LLMC_CUDA_EXPERTS_CUH
#define LLMC_CUDA_EXPERTS_CUH
#include "../experts_api.h"
#include "common.cuh"

constexpr unsigned EXPERTS_THREADS = 256;
constexpr int EXPERTS_OF_LANE = EXPERTS_MOST / WARP; // lane l keeps experts l, l + 32, ... in registers
constexpr size_t EXPERTS_WORKSPACE = 16 << 20;       // bytes that these functions use at most, of the layers' workspace
static inline unsigned blocks_of_warps(int warps) { return (unsigned)ceil_div((size_t)warps, EXPERTS_THREADS / WARP); }

// ---- the router: probabilities ----
// A warp computes TOKENS tokens, and its lanes share the channels: w is read once for all of them.
template <int W, int TOKENS>
__global__ void __launch_bounds__(EXPERTS_THREADS)
router_logits_kernel(float* logits, const floatX* inp, const floatX* w, int N, int C, int E) {
    int lane = threadIdx.x % WARP, first = (int)((blockIdx.x * blockDim.x + threadIdx.x) / WARP) * TOKENS;
    for (int i = 0; i < E; i++) {
        float sum[TOKENS] = {};
        for (int c = lane * W; c < C; c += WARP * W) {
            Floats<W> wi = load<W>(w + (size_t)i * C + c);
            #pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                if (first + t >= N) continue;
                Floats<W> x = load<W>(inp + (size_t)(first + t) * C + c);
                #pragma unroll
                for (int n = 0; n < W; n++) sum[t] = fmaf(x.x[n], wi.x[n], sum[t]);
            }
        }
        #pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float logit = warp_sum(sum[t]);
            if (lane == 0 && first + t < N) logits[(size_t)(first + t) * E + i] = logit;
        }
    }
}

// ---- the router: the choice ----
// Scores become integers of the same order, with a lower index above a higher one. This orders all numbers, even NaN,
// so that all lanes agree.
typedef unsigned long long Ranked; // 0: nothing to choose
__device__ inline Ranked ranked(float score, int expert) {
    uint32_t bits = __float_as_uint(score);
    bits = bits >> 31 ? ~bits : bits | 0x80000000;
    return (Ranked)bits << 32 | (uint32_t)(EXPERTS_MOST - expert);
}
__device__ inline int expert_of(Ranked r) { return EXPERTS_MOST - (int)(uint32_t)r; }
struct Higher { __device__ Ranked operator()(Ranked a, Ranked b) const { return a > b ? a : b; } };

// Takes the best of a warp's candidates, which it removes. Bit n of `candidates` is expert lane + 32 n.
__device__ inline int take_best(const float* scores, uint32_t* candidates, int lane) {
    Ranked best = 0;
    #pragma unroll
    for (int n = 0; n < EXPERTS_OF_LANE; n++)
        if (*candidates >> n & 1) best = Higher()(best, ranked(scores[n], lane + n * WARP));
    int expert = expert_of(combine_lanes<WARP>(best, Higher()));
    if (expert % WARP == lane) *candidates &= ~(1u << expert / WARP);
    return expert;
}

// A warp takes a token, whose logits become probs in place.
__global__ void router_choose_kernel(float* probs, int* chosen, float* weights, const float* bias, int N, int E,
                                     int k) {
    int lane = threadIdx.x % WARP, t = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (t >= N) return; // the whole warp
    float p[EXPERTS_OF_LANE], score[EXPERTS_OF_LANE], max = -3.402823466e38f, sum = 0;
    uint32_t candidates = 0;
    probs += (size_t)t * E;
    #pragma unroll
    for (int n = 0; n < EXPERTS_OF_LANE; n++) {
        int i = lane + n * WARP;
        p[n] = i < E ? probs[i] : 0;
        if (i < E) max = fmaxf(max, p[n]);
    }
    max = warp_max(max);
    #pragma unroll
    for (int n = 0; n < EXPERTS_OF_LANE; n++) {
        p[n] = lane + n * WARP < E ? expf(p[n] - max) : 0;
        sum += p[n];
    }
    sum = warp_sum(sum);
    #pragma unroll
    for (int n = 0; n < EXPERTS_OF_LANE; n++) {
        int i = lane + n * WARP;
        p[n] = __fdiv_rn(p[n], sum);
        score[n] = bias != NULL && i < E ? p[n] + bias[i] : p[n];
        if (i >= E) continue;
        probs[i] = p[n];
        candidates |= 1u << n;
    }
    if (bias != NULL) { // the k best by score; the loop below puts them in the order of their probabilities
        uint32_t others = candidates;
        for (int j = 0; j < k; j++) take_best(score, &others, lane);
        candidates &= ~others;
    }
    sum = 0;
    __syncwarp(); // probs are read below by a lane that has not written them
    for (int j = 0; j < k; j++) {
        int expert = take_best(p, &candidates, lane);
        sum += probs[expert];
        if (lane == 0) chosen[(size_t)t * k + j] = expert;
        if (lane == 0) weights[(size_t)t * k + j] = probs[expert];
    }
    for (int j = 0; lane == 0 && k > 1 && j < k; j++) {
        float* weight = weights + (size_t)t * k + j;
        *weight = sum == 0 ? 0 : __fdiv_rn(*weight, sum);
    }
}

void router_forward(float* probs, int* chosen, float* weights, const floatX* inp, const floatX* w, const float* bias,
                    int N, int C, int E, int k) {
    constexpr int TOKENS = 4;
    experts_check(N, E, k);
    if (N == 0) return;
    auto kernel = rows_are_vectors(C, inp, w) ? router_logits_kernel<VEC, TOKENS> : router_logits_kernel<1, TOKENS>;
    unsigned blocks = blocks_of_warps((N + TOKENS - 1) / TOKENS);
    kernel<<<blocks, EXPERTS_THREADS, 0, compute_stream>>>(probs, inp, w, N, C, E);
    router_choose_kernel<<<blocks_of_warps(N), EXPERTS_THREADS, 0, compute_stream>>>(probs, chosen, weights, bias, N, E,
                                                                                     k);
    check_launch("router_forward");
}

// ---- the router: gradients ----
// A warp takes a token. If g is the gradient of a softmax's results, dlogits_i = p_i (g_i - sum_m p_m g_m). With k = 1
// a weight is one of these results. Otherwise the weights are a softmax over the chosen experts alone.
__global__ void router_dlogits_kernel(float* dlogits, const float* dweights, const float* balance, const float* probs,
                                      const int* chosen, const float* weights, int N, int E, int k) {
    int lane = threadIdx.x % WARP, t = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (t >= N) return; // the whole warp
    float mean = 0, mean_of_chosen = 0;
    chosen += (size_t)t * k;
    weights += (size_t)t * k;
    dweights += (size_t)t * k;
    auto gradient = [&](int i) {
        float g = balance != NULL ? balance[i] : 0;
        return k == 1 && chosen[0] == i ? g + dweights[0] : g;
    };
    for (int i = lane; i < E; i += WARP) mean = fmaf(probs[(size_t)t * E + i], gradient(i), mean);
    mean = warp_sum(mean);
    for (int j = 0; k > 1 && j < k; j++) mean_of_chosen = fmaf(weights[j], dweights[j], mean_of_chosen);
    for (int i = lane; i < E; i += WARP) {
        float dlogit = probs[(size_t)t * E + i] * (gradient(i) - mean);
        for (int j = 0; k > 1 && j < k; j++)
            if (chosen[j] == i) dlogit += weights[j] * (dweights[j] - mean_of_chosen);
        dlogits[(size_t)t * E + i] = dlogit;
    }
}

// A block takes a token, a thread a piece of its channels. An expert whose dlogit is 0 is not read: with k > 1 and
// without `balance` most are. Reads and writes dinp, 4 N C bytes in 16 bits, and reads such rows of w.
template <int W>
__global__ void router_dinp_kernel(floatX* dinp, const float* dlogits, const floatX* w, int C, int E) {
    size_t t = blockIdx.x;
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        Floats<W> sum = load<W>(dinp + t * C + c);
        for (int i = 0; i < E; i++) {
            float dlogit = dlogits[t * E + i];
            if (dlogit == 0) continue;
            Floats<W> wi = load<W>(w + (size_t)i * C + c);
            #pragma unroll
            for (int n = 0; n < W; n++) sum.x[n] = fmaf(dlogit, wi.x[n], sum.x[n]);
        }
        store(dinp + t * C + c, sum);
    }
}

// partial (chunks,E,C): blockIdx.x is a chunk of tokens, and a thread sums a channel of AT_ONCE experts. Reads inp once
// for every AT_ONCE experts.
template <int AT_ONCE>
__global__ void router_dw_kernel(float* partial, const float* dlogits, const floatX* inp, int N, int C, int E,
                                 int chunk) {
    int c = blockIdx.y * blockDim.x + threadIdx.x, first = blockIdx.z * AT_ONCE;
    int begin = blockIdx.x * chunk, end = min(N, begin + chunk);
    float sum[AT_ONCE] = {};
    if (c >= C) return;
    for (int t = begin; t < end; t++) {
        float x = widen(inp[(size_t)t * C + c]);
        #pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            if (first + n < E) sum[n] = fmaf(dlogits[(size_t)t * E + first + n], x, sum[n]);
    }
    #pragma unroll
    for (int n = 0; n < AT_ONCE; n++)
        if (first + n < E) partial[((size_t)blockIdx.x * E + first + n) * C + c] = sum[n];
}

void router_backward(floatX* dinp, floatX* dw, float* dlogits, const float* dweights, const float* balance,
                     const float* probs, const int* chosen, const float* weights, const floatX* inp, const floatX* w,
                     int N, int C, int E, int k, GradMode mode) {
    constexpr int AT_ONCE = 8;
    constexpr size_t LEAST_TOKENS = 64;
    experts_check(N, E, k);
    size_t size = (size_t)E * (size_t)C, most = EXPERTS_WORKSPACE / sizeof(float) / size;
    require(most > 0, "a router of %d experts and %d channels is too large", E, C);
    int chunk = (int)size_max(LEAST_TOKENS, ceil_div((size_t)N, most)), chunks = (N + chunk - 1) / chunk;
    float* partial = (float*)cuda_layers.workspace;
    if (N > 0) {
        bool vectors = rows_are_vectors(C, dinp, w);
        auto kernel = vectors ? router_dinp_kernel<VEC> : router_dinp_kernel<1>;
        router_dlogits_kernel<<<blocks_of_warps(N), EXPERTS_THREADS, 0, compute_stream>>>(
            dlogits, dweights, balance, probs, chosen, weights, N, E, k);
        kernel<<<N, row_threads(C, vectors), 0, compute_stream>>>(dinp, dlogits, w, C, E);
        unsigned threads = row_threads(C, false);
        dim3 blocks((unsigned)chunks, (unsigned)ceil_div((size_t)C, threads), (unsigned)ceil_div((size_t)E, AT_ONCE));
        router_dw_kernel<AT_ONCE><<<blocks, threads, 0, compute_stream>>>(partial, dlogits, inp, N, C, E, chunk);
    }
    add_up_chunks(dw, NULL, partial, chunks, (int)size, mode, "router_backward"); // no token: 0
}

// ---- rows: a counting sort without atomics ----
// A block takes a chunk of the slots and a thread an expert: the thread looks at each slot of the chunk, so it finds
// those of its expert in order. That is E N k comparisons, which all lanes make on the same slot.
constexpr int SORT_BLOCKS = 128;
static_assert(SORT_BLOCKS * EXPERTS_MOST * sizeof(int) <= EXPERTS_WORKSPACE, "the chunks' counts");
typedef struct { int slots, chunk, E, capacity; } SortCall;

// of_chunks (blocks,E): the slots of each expert in the block's chunk
__global__ void sort_count_kernel(int* of_chunks, const int* chosen, SortCall call) {
    int begin = blockIdx.x * call.chunk, end = min(call.slots, begin + call.chunk), expert = threadIdx.x, count = 0;
    if (expert >= call.E) return;
    for (int slot = begin; slot < end; slot++) count += chosen[slot] == expert;
    of_chunks[blockIdx.x * call.E + expert] = count;
}
// One block, a thread for each expert: counts (E), and of_chunks becomes the first place of each chunk's slots, which
// with a capacity is counted from the expert's first row.
__global__ void sort_begin_kernel(int* counts, int* of_chunks, int chunks, SortCall call) {
    __shared__ int all[EXPERTS_MOST];
    int expert = threadIdx.x, count = 0, begin = 0;
    for (int b = 0; b < chunks && expert < call.E; b++) count += of_chunks[b * call.E + expert];
    all[expert] = count;
    __syncthreads();
    if (expert >= call.E) return;
    counts[expert] = count;
    for (int i = 0; call.capacity == 0 && i < expert; i++) begin += all[i];
    for (int b = 0; b < chunks; b++) {
        int* of_chunk = of_chunks + b * call.E + expert;
        count = *of_chunk;
        *of_chunk = begin;
        begin += count;
    }
}
__global__ void sort_place_kernel(int* places, const int* of_chunks, const int* chosen, SortCall call) {
    int begin = blockIdx.x * call.chunk, end = min(call.slots, begin + call.chunk), expert = threadIdx.x;
    if (expert >= call.E) return;
    int next = of_chunks[blockIdx.x * call.E + expert], capacity = call.capacity;
    for (int slot = begin; slot < end; slot++) {
        if (chosen[slot] != expert) continue;
        places[slot] = capacity == 0 ? next : next < capacity ? expert * capacity + next : -1;
        next++;
    }
}
void experts_sort(int* counts, int* places, const int* chosen, int N, int E, int k, int capacity) {
    experts_check(N, E, k);
    experts_capacity_check(E, capacity);
    const size_t least = 256;
    int slots = N * k, chunk = (int)size_max(least, ceil_div((size_t)slots, SORT_BLOCKS)),
        chunks = (slots + chunk - 1) / chunk, *of_chunks = (int*)cuda_layers.workspace;
    unsigned threads = (unsigned)round_up((size_t)E, WARP);
    SortCall call = { slots, chunk, E, capacity };
    if (chunks > 0) sort_count_kernel<<<chunks, threads, 0, compute_stream>>>(of_chunks, chosen, call);
    sort_begin_kernel<<<1, threads, 0, compute_stream>>>(counts, of_chunks, chunks, call);
    if (chunks > 0) sort_place_kernel<<<chunks, threads, 0, compute_stream>>>(places, of_chunks, chosen, call);
    check_launch("experts_sort");
}

// ---- rows: a block takes a token, a thread a piece of its channels ----
static inline void zero_rows(floatX* out, int rows, int C, const char* layer) {
    size_t bytes = (size_t)rows * (size_t)C * sizeof(floatX);
    if (bytes > 0) cuda_check(cudaMemsetAsync(out, 0, bytes, compute_stream), layer);
}

// Reads a token once and writes its k rows: (1 + k) N C elements
template <int W>
__global__ void permute_forward_kernel(floatX* out, const floatX* inp, const int* places, int C, int k) {
    size_t t = blockIdx.x;
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        Floats<W> x = load<W>(inp + t * C + c);
        for (int j = 0; j < k; j++) {
            int place = places[t * k + j];
            if (place >= 0) store(out + (size_t)place * C + c, x);
        }
    }
}
void experts_permute_forward(floatX* out, const floatX* inp, const int* places, int rows, int N, int C, int k) {
    bool vectors = rows_are_vectors(C, out, inp);
    auto kernel = vectors ? permute_forward_kernel<VEC> : permute_forward_kernel<1>;
    zero_rows(out, rows, C, "experts_permute_forward");
    if (N == 0) return;
    kernel<<<N, row_threads(C, vectors), 0, compute_stream>>>(out, inp, places, C, k);
    check_launch("experts_permute_forward");
}

// out (N,C) = the sum over a token's slots of weights (N,k) times the rows of x; weights NULL: all are 1. A sum that
// begins at -0 is one that starts with its first term, because -0 + x is x for every x. (1 + k) N C elements.
template <int W>
__global__ void add_up_slots_kernel(floatX* out, const floatX* x, const float* weights, const int* places, int C,
                                    int k) {
    size_t t = blockIdx.x;
    float start = 0;
    for (int j = 0; j < k; j++) if (places[t * k + j] >= 0) start = -0.0f;
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        Floats<W> sum;
        #pragma unroll
        for (int n = 0; n < W; n++) sum.x[n] = start;
        for (int j = 0; j < k; j++) {
            int place = places[t * k + j];
            if (place < 0) continue;
            float weight = weights != NULL ? weights[t * k + j] : 1;
            Floats<W> row = load<W>(x + (size_t)place * C + c);
            #pragma unroll
            for (int n = 0; n < W; n++) sum.x[n] = fmaf(weight, row.x[n], sum.x[n]);
        }
        store(out + t * C + c, sum);
    }
}
static inline void add_up_slots(floatX* out, const floatX* x, const float* weights, const int* places, int N, int C,
                                int k, const char* layer) {
    bool vectors = rows_are_vectors(C, out, x);
    auto kernel = vectors ? add_up_slots_kernel<VEC> : add_up_slots_kernel<1>;
    if (N == 0) return;
    kernel<<<N, row_threads(C, vectors), 0, compute_stream>>>(out, x, weights, places, C, k);
    check_launch(layer);
}
void experts_permute_backward(floatX* dinp, const floatX* dout, const int* places, int N, int C, int k) {
    add_up_slots(dinp, dout, NULL, places, N, C, k, "experts_permute_backward");
}
void experts_combine_forward(floatX* out, const floatX* y, const float* weights, const int* places, int N, int C,
                             int k) {
    add_up_slots(out, y, weights, places, N, C, k, "experts_combine_forward");
}

// Reads y and writes dy, (1 + 2 k) N C elements: dout stays in the cache from slot to slot.
template <int W>
__global__ void combine_backward_kernel(floatX* dy, float* dweights, const floatX* dout, const floatX* y,
                                        const float* weights, const int* places, int C, int k) {
    __shared__ float of_warps[WARP];
    size_t t = blockIdx.x;
    for (int j = 0; j < k; j++) {
        size_t slot = t * k + j;
        int place = places[slot];
        float weight = weights[slot], sum = 0;
        for (int c = threadIdx.x * W; place >= 0 && c < C; c += blockDim.x * W) {
            Floats<W> d = load<W>(dout + t * C + c), yi = load<W>(y + (size_t)place * C + c);
            #pragma unroll
            for (int n = 0; n < W; n++) {
                sum = fmaf(d.x[n], yi.x[n], sum);
                d.x[n] *= weight;
            }
            store(dy + (size_t)place * C + c, d);
        }
        sum = block_sum(sum, of_warps);
        if (threadIdx.x == 0) dweights[slot] = sum;
    }
}
void experts_combine_backward(floatX* dy, float* dweights, const floatX* dout, const floatX* y, const float* weights,
                              const int* places, int rows, int N, int C, int k) {
    bool vectors = rows_are_vectors(C, dy, dout, y);
    auto kernel = vectors ? combine_backward_kernel<VEC> : combine_backward_kernel<1>;
    zero_rows(dy, rows, C, "experts_combine_backward");
    if (N == 0) return;
    kernel<<<N, row_threads(C, vectors), 0, compute_stream>>>(dy, dweights, dout, y, weights, places, C, k);
    check_launch("experts_combine_backward");
}
#endif
