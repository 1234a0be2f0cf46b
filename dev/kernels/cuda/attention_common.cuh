/*
attention_common.cuh - what attention_forward.cu and attention_backward.cu share: the shape, and one warp per query.
llmc/device/cuda/attention_tensor_cores.cuh has the products of attention's tiles on tensor cores.

A sequence has T tokens, each with C channels of q, of k and of v, in heads of 64 channels as in every GPT-2, or in a single head
where C is not a multiple of 64. The numbers that a head has for each query and each key, scores or probabilities, are called the
matrix: (T,T), masked above the diagonal.
*/
#ifndef DEV_CUDA_ATTENTION_COMMON_CUH
#define DEV_CUDA_ATTENTION_COMMON_CUH
#include "variants.cuh"
#include "library.cuh"
#include "../../../llmc/device/cuda/attention_choice.cuh"
#include "../../../llmc/device/cuda/attention_tensor_cores.cuh" // also in fp32, where llmc/ leaves it out

constexpr int SEQUENCES = variants_are_timed ? 8 : 2;
constexpr size_t MATRIX_MOST = (size_t)4 << 30; // bytes, of all heads' matrices: kernels that store them do not run above it
constexpr const char* SHAPE_MEANS = variants_are_timed ? "8 sequences; rows are tokens of each, cols channels, 64 a head"
                                                       : "2 sequences; rows are tokens of each, cols channels, 64 a head";

static LayerShapes attention_shapes(Shape s) {
    return layer_shapes(SEQUENCES, s.rows, s.cols, s.cols % HEAD == 0 ? s.cols / HEAD : 1, 1, 1);
}

// Prepares both sides for these shapes, and makes cuDNN's plans where cuDNN is available.
static void attention_start(LayerShapes s) {
    start_cpu(s);
    library_start();
    if (s.C / s.NH > ATTENTION_MAX_HS) return; // neither llmc/ nor cuDNN takes these
    size_t bytes = attention_workspace_bytes(s);
    printf("the library: %s\n", attention_description());
    if (bytes > MATMUL_WORKSPACE) cuda_layers.workspace = device_bytes(bytes);
}
// Returns true if the kernels for tensor cores take heads of this size and blocks of so many threads.
static bool tensor_cores_take(int HS, int threads) {
    return FLOATX_HAS_TENSOR_CORES && HS == HEAD && threads <= TENSOR_CORE_MOST_THREADS;
}
// What both problems have. products: of B T T C operations each.
struct AttentionProblem {
    int B, T, C, NH, HS;
    double flops;
    float scale;
    Both<floatX> qkv, out;
    Both<float> stats;
    bool fits;            // (B,NH,T,T) numbers are not too large
    bool rounded = false; // the running variant rounds P (and dS) to floatX before it multiplies it

    AttentionProblem(Shape shape, int products) {
        LayerShapes s = attention_shapes(shape);
        attention_start(s);
        B = s.B; T = s.T; C = s.C; NH = s.NH; HS = C / NH;
        flops = (double)products * B * T * T * C;
        scale = 1.0f / sqrtf((float)HS);
        fits = matrix_bytes() <= MATRIX_MOST;
        qkv = random_both((size_t)3 * B * T * C);
        out = unset_both((size_t)B * T * C);
        stats = unset_both<float>((size_t)B * NH * T);
        cpu::attention_forward(out.cpu, stats.cpu, qkv.cpu, B, T, C, NH);
    }
    ~AttentionProblem() { attention_free(); }
    size_t matrix_bytes() { return sizeof(float) * (size_t)B * NH * T * T; }
    float* matrix_or_none() { return fits ? (float*)device_bytes(matrix_bytes()) : NULL; }
    // in 16 bits exp is the GPU's own instruction
    double slack() { return (NEEDS_MASTER ? 4 : 1) * (8 + sqrt(HS) + sqrt(T)); }
};

// ---- one warp per row: lane l has channels l, l + 32, ... of a head's row, N of them, 0 from channel HS on ----
template <int N> struct LaneRow { float x[N]; };

template <int N> __device__ inline LaneRow<N> lane_load(const floatX* row, int HS) {
    LaneRow<N> r;
    #pragma unroll
    for (int n = 0; n < N; n++) {
        int d = threadIdx.x % WARP + n * WARP;
        r.x[n] = d < HS ? widen(row[d]) : 0.0f;
    }
    return r;
}
template <int N> __device__ inline void lane_store(floatX* row, LaneRow<N> r, float factor, int HS) {
    #pragma unroll
    for (int n = 0; n < N; n++) {
        int d = threadIdx.x % WARP + n * WARP;
        if (d < HS) row[d] = narrow<floatX>(r.x[n] * factor);
    }
}
template <int N> __device__ inline float lane_dot(LaneRow<N> a, LaneRow<N> b) {
    float sum = 0;
    #pragma unroll
    for (int n = 0; n < N; n++) sum = fmaf(a.x[n], b.x[n], sum);
    return warp_sum(sum);
}
template <int N> __device__ inline void lane_add(LaneRow<N>& sum, float factor, LaneRow<N> row) {
    #pragma unroll
    for (int n = 0; n < N; n++) sum.x[n] = fmaf(factor, row.x[n], sum.x[n]);
}
#endif
