/*
cuda/classifier.cuh - softmax and cross-entropy over the vocabulary.

One block per row. The maximum and the sum of exponentials come from one pass over the row, which is kept in shared
memory where it fits there: then its gradient is written from that copy, and the logits have been read from memory only
once.
Where it does not fit, they are read a second time; the arithmetic is the same, and so are the bits.

In parts, the two passes are two kernels, and ranks exchange what the first found: the row cannot wait in shared memory.
*/
#ifndef LLMC_CUDA_CLASSIFIER_CUH
#define LLMC_CUDA_CLASSIFIER_CUH
#include "common.cuh"

// A running maximum and the sum of exp(x - max), after Milakov and Gimelshein, arXiv 1805.02867. It starts at the
// lowest finite number: from -Inf the first -Inf logit would make it NaN. A NaN or +Inf among the logits makes the sum
// NaN, and so the loss: nothing hides it.
typedef struct { float max, sum; } RunningSoftmax;

template <int W> __device__ inline void softmax_include(RunningSoftmax* s, Floats<W> x, int count) {
    float max = s->max;
    #pragma unroll
    for (int k = 0; k < W; k++) if (k < count) max = fmaxf(max, x.x[k]);
    s->sum *= fast_exp(s->max - max);
    s->max = max;
    #pragma unroll
    for (int k = 0; k < W; k++) if (k < count) s->sum += fast_exp(x.x[k] - max);
}

// The maximum and the sum over a row's V logits (V may be 0), for each thread of the block.
// It copies them to kept; NULL: it does not.
template <int W>
__device__ inline RunningSoftmax softmax_of_row(const floatX* row, floatX* kept, int V, float* of_warps) {
    RunningSoftmax s = { -3.402823466e38f, 0 };
    for (int v = threadIdx.x * W; v < V; v += blockDim.x * W) {
        Floats<W> x = load<W>(row + v);
        if (kept != NULL) store(kept + v, x); // each thread reads only what it has written here
        softmax_include(&s, x, V - v);
    }
    float max = block_max(s.max, of_warps), sum = block_sum(s.sum * fast_exp(s.max - max), of_warps);
    return { max, sum };
}
// A row (Vp) becomes its gradient, 0 from V on. kept: the logits; target -1: it is in another part.
template <int W>
__device__ inline void write_gradient(floatX* row, const floatX* kept, RunningSoftmax s, int target, float dloss, int V,
                                      int Vp) {
    // loss = log(sum) - logit[target], so dlogit = (exp(logit - max) / sum - onehot) * dloss
    float scale = dloss / s.sum;
    for (int v = threadIdx.x * W; v < Vp; v += blockDim.x * W) {
        Floats<W> x = {};
        if (v < V) x = load<W>(kept + v);
        #pragma unroll
        for (int k = 0; k < W; k++) {
            float gradient = fast_exp(x.x[k] - s.max) * scale - (v + k == target ? dloss : 0.0f);
            x.x[k] = v + k < V ? gradient : 0.0f;
        }
        store(row + v, x);
    }
}

// Reads the logits once where `in_shared`, twice where not, and writes them once where GRADIENT:
// 4, 6 and 2 N Vp bytes in 16 bits for gradients from one and two reads, and for the loss alone.
template <int W, bool GRADIENT>
__global__ void classifier_kernel(float* losses, floatX* logits, const int* targets, float dloss, int V, int Vp,
                                  bool in_shared) {
    extern __shared__ int4 shared_memory[];
    __shared__ float of_warps[WARP];
    floatX *row = logits + (size_t)blockIdx.x * Vp, *kept = in_shared ? (floatX*)shared_memory : NULL;
    int target = targets[blockIdx.x], first = threadIdx.x * W, step = blockDim.x * W;
    if (target < 0) { // the whole block leaves
        for (int v = first; GRADIENT && v < Vp; v += step) store(row + v, Floats<W>{});
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        return;
    }
    float target_logit = widen(row[target]); // before another thread overwrites it: the sums below are a barrier
    RunningSoftmax s = softmax_of_row<W>(row, kept, V, of_warps);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(s.sum) - (target_logit - s.max);
    if (GRADIENT) write_gradient<W>(row, in_shared ? kept : row, s, target, dloss, V, Vp);
}

template <bool GRADIENT>
static inline void classifier_launch(float* losses, floatX* logits, const int* targets, float dloss, int N, int V,
                                     int Vp) {
    if (N == 0) return;
    const char* layer = GRADIENT ? "classifier_forward_backward" : "classifier_forward";
    size_t row_bytes = (size_t)Vp * sizeof(floatX), of_warps = WARP * sizeof(float);
    bool in_shared = GRADIENT && row_bytes + of_warps <= (size_t)cuda_layers.shared_bytes,
         vectors = rows_are_vectors(Vp, logits);
    auto kernel = vectors ? classifier_kernel<VEC, GRADIENT> : classifier_kernel<1, GRADIENT>;
    if (in_shared) allow_shared_memory(kernel, row_bytes, layer);
    kernel<<<N, row_threads(Vp, vectors, 1024), in_shared ? row_bytes : 0, compute_stream>>>(
        losses, logits, targets, dloss, V, Vp, in_shared);
    check_launch(layer);
}
void classifier_forward(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp) {
    classifier_launch<false>(losses, (floatX*)logits, targets, 0, N, V, Vp); // it writes no logits
}
void classifier_forward_backward(float* losses, floatX* logits, const int* targets, float dloss, int N, int V, int Vp) {
    classifier_launch<true>(losses, logits, targets, dloss, N, V, Vp);
}

// ---- in parts ----
// One block per row, with as many threads as above, so one part has the bits of the whole. Reads 2 N range.count bytes
// in 16 bits.
template <int W>
__global__ void classifier_part_stats_kernel(float* stats, const floatX* logits, const int* targets, TokenRange range,
                                             int tokens) {
    __shared__ float of_warps[WARP];
    const floatX* row = logits + (size_t)blockIdx.x * range.count;
    RunningSoftmax s = softmax_of_row<W>(row, NULL, tokens, of_warps);
    if (threadIdx.x != 0) return;
    int target = token_row(range, targets[blockIdx.x]);
    float* of_row = stats + 3 * (size_t)blockIdx.x;
    of_row[0] = s.max;
    of_row[1] = s.sum;
    of_row[2] = target >= 0 ? widen(row[target]) : 0.0f;
}

void classifier_part_stats(float* stats, const floatX* logits, const int* targets, TokenRange range, int N, int V) {
    if (N == 0) return;
    bool vectors = rows_are_vectors(range.count, logits);
    auto kernel = vectors ? classifier_part_stats_kernel<VEC> : classifier_part_stats_kernel<1>;
    kernel<<<N, row_threads(range.count, vectors, 1024), 0, compute_stream>>>(stats, logits, targets, range,
                                                                             tokens_in_range(range, V));
    check_launch("classifier_part_stats");
}

// Returns the loss of row i, and its maximum and sum over the whole vocabulary, from all (parts,N,3),
// as cpu/classifier.h does.
__device__ inline float loss_of_parts(RunningSoftmax* whole, const float* all, int i, int parts, int N) {
    RunningSoftmax s = { -3.402823466e38f, 0 };
    float target_logit = 0; // only one part has one that is not 0
    const float* stats = all + 3 * (size_t)i;
    size_t part = 3 * (size_t)N;
    for (int q = 0; q < parts; q++) s.max = fmaxf(s.max, stats[q * part]);
    for (int q = 0; q < parts; q++) {
        s.sum += stats[q * part + 1] * fast_exp(stats[q * part] - s.max);
        target_logit += stats[q * part + 2];
    }
    *whole = s;
    return logf(s.sum) - (target_logit - s.max);
}

// One thread per row. Reads 12 N parts bytes.
__global__ void classifier_part_forward_kernel(float* losses, const float* all, const int* targets, int parts, int N) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) return;
    RunningSoftmax s;
    float loss = loss_of_parts(&s, all, i, parts, N);
    losses[i] = targets[i] < 0 ? 0.0f : loss;
}

void classifier_part_forward(float* losses, const float* all, const int* targets, int parts, int N) {
    if (N == 0) return;
    classifier_part_forward_kernel<<<(unsigned)ceil_div(N, 256), 256, 0, compute_stream>>>(losses, all, targets, parts,
                                                                                           N);
    check_launch("classifier_part_forward");
}

// One block per row, each thread of which makes the row's sum for itself.
// Reads and writes 4 N range.count bytes in 16 bits.
template <int W>
__global__ void classifier_part_kernel(float* losses, floatX* logits, const float* all, const int* targets, float dloss,
                                       TokenRange range, int parts, int tokens) {
    floatX* row = logits + (size_t)blockIdx.x * range.count;
    int target = targets[blockIdx.x];
    RunningSoftmax s;
    float loss = loss_of_parts(&s, all, blockIdx.x, parts, gridDim.x);
    if (threadIdx.x == 0) losses[blockIdx.x] = target < 0 ? 0.0f : loss;
    if (target < 0) tokens = 0; // then all are treated as padding: the gradient is 0
    write_gradient<W>(row, row, s, token_row(range, target), dloss, tokens, range.count);
}

void classifier_part_forward_backward(float* losses, floatX* logits, const float* all, const int* targets, float dloss,
                                      TokenRange range, int parts, int N, int V) {
    if (N == 0) return;
    bool vectors = rows_are_vectors(range.count, logits);
    auto kernel = vectors ? classifier_part_kernel<VEC> : classifier_part_kernel<1>;
    kernel<<<N, row_threads(range.count, vectors, 1024), 0, compute_stream>>>(losses, logits, all, targets, dloss,
                                                                              range, parts, tokens_in_range(range, V));
    check_launch("classifier_part_forward_backward");
}
#endif
