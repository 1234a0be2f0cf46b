/*
attention_common.cuh - what attention_forward.cu and attention_backward.cu share: the shape, a query a warp, and the products of
attention's tiles on tensor cores.

A sequence has T tokens, each with C channels of q, of k and of v, in heads of 64 channels as in every GPT-2, or in a single head
where C is no multiple of 64. The numbers that a head has for each query and each key, scores or probabilities, are called the
matrix: (T,T), masked above the diagonal.
*/
#ifndef DEV_CUDA_ATTENTION_COMMON_CUH
#define DEV_CUDA_ATTENTION_COMMON_CUH
#include "variants.cuh"
#include "library.cuh"
#include "../../llmc/cuda/tensor_cores.cuh"
#include "../../llmc/cuda/attention_choice.cuh"

constexpr int SEQUENCES = variants_are_timed ? 8 : 2;
constexpr int HEAD = 64;                        // channels of a head on tensor cores
constexpr int MOST_THREADS = 256;               // of their blocks: each needs more than 128 of 65536 registers
constexpr size_t MATRIX_MOST = (size_t)4 << 30; // bytes, of all heads' matrices: kernels that store them do not run beyond
constexpr const char* SHAPE_MEANS = variants_are_timed ? "8 sequences; rows are tokens of each, cols channels, 64 a head"
                                                       : "2 sequences; rows are tokens of each, cols channels, 64 a head";

static LayerShapes attention_shapes(Shape s) {
    return { SEQUENCES, s.rows, s.cols, s.cols % HEAD == 0 ? s.cols / HEAD : 1, 1 };
}
static size_t matrix_bytes(LayerShapes s) { return sizeof(float) * (size_t)s.B * s.NH * s.T * s.T; }

// Both sides ready for these shapes, cuDNN's plans made where cuDNN can be had.
static void attention_start(LayerShapes s) {
    start_cpu(s);
    library_start(s.B * s.T);
    if (s.C / s.NH > ATTENTION_MAX_HS) return; // neither llmc/ nor cuDNN takes these
    size_t bytes = attention_workspace_bytes(s);
    printf("the library: %s\n", attention_description());
    if (bytes > MATMUL_WORKSPACE) cuda_layers.workspace = device_bytes(bytes);
}
// Whether the kernels for tensor cores are for heads of this size, in such blocks.
static bool tensor_cores_take(int HS, int threads) { return FLOATX_HAS_TENSOR_CORES && HS == HEAD && threads <= MOST_THREADS; }
static float attention_scale(LayerShapes s) { return 1.0f / sqrtf((float)(s.C / s.NH)); }

// ---- a warp a row: lane l has channels l, l + 32, ... of a head's row, N of them, 0 from channel HS on ----
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

// ---- tiles on tensor cores: a warp has 16 rows, and walks over tiles of the other side in shared memory ----
// What lies where in fragments is in tensor_cores.cuh: of a result (16,8) this lane has row lane/4, columns 2 (lane%4) and one
// more, and the same of row lane/4 + 8. `wide` below is how many such results lie side by side.
constexpr int STEPS = HEAD / 16;                       // of a product over channels, 16 in each
constexpr int STRIDE = HEAD + VEC;                     // between rows of a tile: 16 bytes more than the row, so that the 8 rows
constexpr size_t ROW_BYTES = STRIDE * sizeof(floatX);  // that ldmatrix reads at a time begin in different banks
constexpr float LOG2_E = 1.44269504f;                  // exp(x) is 2^(LOG2_E x), and powers of 2 are what the hardware has

// 2^x by one instruction. exp2f needs four: it also gets those right that are below 2^-126, which are 0 here.
__device__ inline float power_of_2(float x) {
#ifdef CUDA_EMULATOR
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// tile (rows,HEAD) in shared memory = rows of src, `stride` elements apart; 0 from row `there` on, so that nothing of what lies
// there, NaN perhaps, gets into a sum. Asynchronous: __pipeline_commit and __pipeline_wait_prior follow.
__device__ inline void tile_fetch(floatX* tile, const floatX* src, size_t stride, int rows, int there) {
    for (int i = threadIdx.x; i < rows * HEAD / VEC; i += blockDim.x) {
        int r = i / (HEAD / VEC), d = i % (HEAD / VEC) * VEC;
        __pipeline_memcpy_async(tile + r * STRIDE + d, src + (r < there ? r * stride : 0) + d, 16, r < there ? 0 : 16);
    }
}
// This warp's 16 rows of src, `stride` elements apart, as left operands, one for each step; 0 from row `there` on. Straight from
// memory: it happens once, and each lane reads what it needs.
__device__ inline void rows_fetch(uint32_t (&a)[STEPS][4], const floatX* src, size_t stride, int there) {
    int row = threadIdx.x % WARP / 4, col = threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < STEPS * 4; i++) {
        int r = row + i % 2 * 8, d = i / 4 * 16 + i / 2 % 2 * 8 + col;
        a[i / 4][i % 4] = r < there ? *(const uint32_t*)(src + r * stride + d) : 0;
    }
}
// Where this lane's row of four matrices lies in shared memory, 16 rows from `row` and 16 columns from `col`: the first two one
// below the other, or side by side.
__device__ inline const floatX* below(const floatX* tile, int row, int col, int stride = STRIDE) {
    int lane = threadIdx.x % WARP;
    return tile + (row + lane % 16) * stride + col + lane / 16 * 8;
}
__device__ inline const floatX* beside(const floatX* tile, int row, int col, int stride = STRIDE) {
    int lane = threadIdx.x % WARP;
    return tile + (row + lane / 16 * 8 + lane % 8) * stride + col + lane / 8 % 2 * 8;
}
// c0, c1 (16,8) += a b, for two results side by side
__device__ inline void multiply(float (&c0)[4], float (&c1)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    const uint32_t b0[2] = { b[0], b[1] }, b1[2] = { b[2], b[3] };
    mma_m16n8k16<TensorElement>(c0, a, b0);
    mma_m16n8k16<TensorElement>(c1, a, b1);
}
// s (16, 8 wide) = a times the transposed tile (8 wide, HEAD): scores of 16 rows. The tile's rows are the operand's columns.
template <int wide> __device__ inline void tile_scores(float (&s)[wide][4], const uint32_t (&a)[STEPS][4], const floatX* tile) {
    #pragma unroll
    for (int i = 0; i < wide * 4; i++) s[i / 4][i % 4] = 0;
    #pragma unroll
    for (int step = 0; step < STEPS; step++)
        #pragma unroll
        for (int j = 0; j < wide; j += 2) {
            uint32_t b[4];
            ldmatrix(b, beside(tile, j * 8, step * 16));
            multiply(s[j], s[j + 1], a[step], b);
        }
}
// sum (16,HEAD) += p (16, 8 wide) times the tile (8 wide, HEAD). What tile_scores leaves in a lane's registers is, rounded to 16
// bits, just what the left operand of the next product needs there: p never leaves them.
template <int wide> __device__ inline void tile_add(float (&sum)[HEAD / 8][4], const float (&p)[wide][4], const floatX* tile) {
    #pragma unroll
    for (int j = 0; j < wide; j += 2) {
        const uint32_t a[4] = { fragment_of(p[j][0], p[j][1]), fragment_of(p[j][2], p[j][3]),
                                fragment_of(p[j + 1][0], p[j + 1][1]), fragment_of(p[j + 1][2], p[j + 1][3]) };
        #pragma unroll
        for (int d = 0; d < HEAD / 8; d += 2) {
            uint32_t b[4];
            ldmatrix_trans(b, below(tile, j * 8, d * 8));
            multiply(sum[d], sum[d + 1], a, b);
        }
    }
}
// 16 rows of dst, `stride` elements apart, = sum * factor, as far as there are rows. Four lanes write 16 bytes side by side.
__device__ inline void rows_store(floatX* dst, const float (&sum)[HEAD / 8][4], const float (&factor)[2], size_t stride,
                                  int there) {
    int row = threadIdx.x % WARP / 4, col = threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < HEAD / 8 * 2; i++) {
        int d = i / 2, half = i % 2, r = row + half * 8;
        uint32_t pair = fragment_of(sum[d][half * 2] * factor[half], sum[d][half * 2 + 1] * factor[half]);
        if (r < there) *(uint32_t*)(dst + r * stride + d * 8 + col) = pair;
    }
}
// Over the four lanes that share a row.
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
#endif
