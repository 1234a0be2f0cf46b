/*
cuda/classifier.cuh - softmax and cross-entropy over the vocabulary.

One block per row. The maximum and the sum of exponentials come from one pass over the row, which is kept in shared memory
where it fits there: then its gradient is written from that copy, and the logits have been read from memory only once.
Where it does not fit, they are read a second time; the arithmetic is the same, and so are the bits.
*/
#ifndef LLMC_CUDA_CLASSIFIER_CUH
#define LLMC_CUDA_CLASSIFIER_CUH
#include "common.cuh"

// A running maximum and the sum of exp(x - max), after Milakov and Gimelshein, arXiv 1805.02867. It starts at the lowest
// finite number: from -Inf the first -Inf logit would make it NaN. A NaN or +Inf among the logits makes the sum NaN, and
// so the loss: nothing hides it.
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

// Reads the logits once where `in_shared`, twice where not, and writes them once where GRADIENT:
// 4, 6 and 2 N Vp bytes in 16 bits for gradients from one and two reads, and for the loss alone.
template <int W, bool GRADIENT>
__global__ void classifier_kernel(float* losses, floatX* logits, const int* targets, float dloss, int V, int Vp,
                                  bool in_shared) {
    extern __shared__ int4 shared_memory[];
    __shared__ float of_warps[WARP];
    floatX *row = logits + (size_t)blockIdx.x * Vp, *kept = in_shared ? (floatX*)shared_memory : row;
    int target = targets[blockIdx.x], first = threadIdx.x * W, step = blockDim.x * W;
    if (target < 0) { // the whole block leaves
        for (int v = first; GRADIENT && v < Vp; v += step) store(row + v, Floats<W>{});
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        return;
    }
    float target_logit = widen(row[target]); // before another thread overwrites it: the sums below are a barrier
    RunningSoftmax s = { -3.402823466e38f, 0 };
    for (int v = first; v < V; v += step) {
        Floats<W> x = load<W>(row + v);
        if (in_shared) store(kept + v, x); // each thread reads only what it has written here
        softmax_include(&s, x, V - v);
    }
    float max = block_max(s.max, of_warps), sum = block_sum(s.sum * fast_exp(s.max - max), of_warps);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) - (target_logit - max);
    if (!GRADIENT) return;
    // loss = log(sum) - logit[target], so dlogit = (exp(logit - max) / sum - onehot) * dloss
    float scale = dloss / sum;
    for (int v = first; v < Vp; v += step) {
        Floats<W> x = {};
        if (v < V) x = load<W>(kept + v);
        #pragma unroll
        for (int k = 0; k < W; k++) {
            float gradient = fast_exp(x.x[k] - max) * scale - (v + k == target ? dloss : 0.0f);
            x.x[k] = v + k < V ? gradient : 0.0f;
        }
        store(row + v, x);
    }
}

template <int W, bool GRADIENT>
static inline void classifier_launch(float* losses, floatX* logits, const int* targets, float dloss, int N, int V, int Vp) {
    const char* layer = GRADIENT ? "classifier_forward_backward" : "classifier_forward";
    size_t row_bytes = (size_t)Vp * sizeof(floatX), of_warps = WARP * sizeof(float);
    bool in_shared = GRADIENT && row_bytes + of_warps <= (size_t)cuda_layers.shared_bytes;
    if (in_shared) allow_shared_memory(classifier_kernel<W, GRADIENT>, row_bytes, layer);
    unsigned threads = row_threads(Vp, W == VEC, 1024);
    classifier_kernel<W, GRADIENT><<<N, threads, in_shared ? row_bytes : 0, compute_stream>>>(
        losses, logits, targets, dloss, V, Vp, in_shared);
    check_launch(layer);
}

void classifier_forward(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp) {
    floatX* x = (floatX*)logits; // this variant of the kernel writes no logits
    if (rows_are_vectors(Vp, x)) classifier_launch<VEC, false>(losses, x, targets, 0, N, V, Vp);
    else classifier_launch<1, false>(losses, x, targets, 0, N, V, Vp);
}

void classifier_forward_backward(float* losses, floatX* logits, const int* targets, float dloss, int N, int V, int Vp) {
    if (rows_are_vectors(Vp, logits)) classifier_launch<VEC, true>(losses, logits, targets, dloss, N, V, Vp);
    else classifier_launch<1, true>(losses, logits, targets, dloss, N, V, Vp);
}
#endif
