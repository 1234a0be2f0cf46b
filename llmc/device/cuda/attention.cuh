/*
cuda/attention.cuh - causal self-attention without the (T,T) matrix, after FlashAttention-2 (Dao, arXiv 2307.08691), in fp32
arithmetic. Included by attention_choice.cuh, which chooses between these kernels, those on tensor cores, and cuDNN's.

A block has 16x16 threads and owns TILE rows of one head (queries, or keys where dk and dv are summed). It walks over the
tiles of the other side and computes their (TILE,TILE) scores, so that no part of the matrix is ever in memory. Tiles lie
in shared memory in fp32, padded with zeros to D channels. Thread (y,x) has rows y R .. y R + R-1 of a tile, R = TILE/16,
and of the other dimension x, x+16, x+32, ...; so a row of scores belongs to 16 neighbouring lanes of one warp.

Backward is two kernels, one over queries for dq, one over keys for dk and dv. Scores are computed twice, 7 tile products
instead of 5; in return every sum has one owner and one order: no atomics, equal bits from run to run.
This file takes every precision, head size and alignment: read it first. attention_tensor_cores.cuh uses what 16 bits allow.
*/
#ifndef LLMC_CUDA_ATTENTION_CUH
#define LLMC_CUDA_ATTENTION_CUH
#include "common.cuh"

constexpr int SIDE = 16;                  // threads of a block: SIDE x SIDE
constexpr int ATTENTION_THREADS = SIDE * SIDE;
constexpr int PAD = 4;                    // floats between rows of a tile, so that 8 rows of 16 bytes fall in different banks
constexpr int ATTENTION_MAX_HS = 128;

__host__ __device__ constexpr int tile_floats(int rows, int cols) { return rows * (cols + PAD); }

// One head of one sequence: where it begins in tensors of 3C and of C channels, and in (B,NH,T).
typedef struct { size_t qkv, out, stats; } HeadOffset;
__device__ inline HeadOffset head_offset(int head, int T, int C, int NH, int HS) {
    size_t b = head / NH, channel = (size_t)(head % NH) * HS;
    return { b * T * 3 * C + channel, b * T * C + channel, (size_t)head * T };
}

// tile (TILE,D) = rows of src, `stride` elements apart; 0 from row `rows` and channel HS on
template <int TILE, int D, int W>
__device__ inline void tile_load(float* tile, const floatX* src, size_t stride, int rows, int HS) {
    for (int i = threadIdx.x * W; i < TILE * D; i += ATTENTION_THREADS * W) {
        int r = i / D, d = i % D;
        Floats<W> x = {};
        if (r < rows && d < HS) x = load<W>(src + r * stride + d);
        store(tile + r * (D + PAD) + d, x);
    }
}

// s[i][j] = a[y R + i] . b[x + 16 j], rows of two tiles of D channels
template <int D, int R>
__device__ inline void tile_dot(float (&s)[R][R], const float* a, const float* b) {
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    #pragma unroll
    for (int i = 0; i < R * R; i++) s[i / R][i % R] = 0;
    #pragma unroll 1 // 4 channels give enough work, and more would not fit in 128 registers
    for (int d = 0; d < D; d += 4) {
        Floats<4> ar[R], br[R];
        #pragma unroll
        for (int i = 0; i < R; i++) {
            ar[i] = load<4>(a + (y * R + i) * (D + PAD) + d);
            br[i] = load<4>(b + (x + SIDE * i) * (D + PAD) + d);
        }
        #pragma unroll
        for (int k = 0; k < 4; k++)
            #pragma unroll
            for (int i = 0; i < R; i++)
                #pragma unroll
                for (int j = 0; j < R; j++) s[i][j] = fmaf(ar[i].x[k], br[j].x[k], s[i][j]);
    }
}

// The (TILE,TILE) tile = s. Its rows are read by the lanes that wrote them and their 15 neighbours.
template <int R> __device__ inline void tile_put(float* tile, const float (&s)[R][R]) {
    constexpr int TILE = R * SIDE;
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    __syncwarp(); // the neighbours are done with what the tile held before
    #pragma unroll
    for (int i = 0; i < R; i++)
        #pragma unroll
        for (int j = 0; j < R; j++) tile[(y * R + i) * (TILE + PAD) + x + SIDE * j] = s[i][j];
    __syncwarp(); // and see what it holds now
}

// sum[i][j] += p[y R + i] . column x + 16 j of m, p (TILE,TILE) and m (TILE,D)
template <int D, int R>
__device__ inline void tile_accumulate(float (&sum)[R][D / SIDE], const float* p, const float* m) {
    constexpr int TILE = R * SIDE;
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    #pragma unroll 2
    for (int u = 0; u < TILE; u += 4) {
        Floats<4> pr[R];
        #pragma unroll
        for (int i = 0; i < R; i++) pr[i] = load<4>(p + (y * R + i) * (TILE + PAD) + u);
        #pragma unroll
        for (int k = 0; k < 4; k++)
            #pragma unroll
            for (int j = 0; j < D / SIDE; j++) {
                float mj = m[(u + k) * (D + PAD) + x + SIDE * j];
                #pragma unroll
                for (int i = 0; i < R; i++) sum[i][j] = fmaf(pr[i].x[k], mj, sum[i][j]);
            }
    }
}

// Rows of dst, `stride` elements apart, = sum * factor[i], as far as there are rows and channels.
template <int D, int R>
__device__ inline void tile_store(floatX* dst, const float (&sum)[R][D / SIDE], const float (&factor)[R],
                                  size_t stride, int rows, int HS) {
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    #pragma unroll
    for (int i = 0; i < R; i++)
        #pragma unroll
        for (int j = 0; j < D / SIDE; j++)
            if (y * R + i < rows && x + SIDE * j < HS)
                dst[(y * R + i) * stride + x + SIDE * j] = narrow<floatX>(sum[i][j] * factor[i]);
}

constexpr int attention_forward_floats(int TILE, int D) { return 3 * tile_floats(TILE, D) + tile_floats(TILE, TILE); }

// out = softmax(q k^T / sqrt(HS), masked so that query t sees keys 0..t) v. Grid (heads, tiles of queries), those with the
// most keys first. Each row keeps the largest score so far and the sum of exp(score - largest); when a larger one comes,
// what has been summed is scaled down to it. Reads q once and k, v once per tile of queries.
template <int TILE, int D, int W>
__global__ void __launch_bounds__(ATTENTION_THREADS)
attention_forward_kernel(floatX* out, float* stats, const floatX* qkv, float scale, int T, int C, int NH, int HS) {
    constexpr int R = TILE / SIDE;
    extern __shared__ int4 shared_memory[];
    constexpr int NEXT = tile_floats(TILE, D);
    float *q = (float*)shared_memory, *k = q + NEXT, *v = k + NEXT, *p = v + NEXT;
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE, first = (gridDim.y - 1 - blockIdx.y) * TILE;
    size_t stride = 3 * (size_t)C;
    HeadOffset head = head_offset(blockIdx.x, T, C, NH, HS);
    float o[R][D / SIDE] = {}, s[R][R], max[R], sum[R] = {};
    for (int i = 0; i < R; i++) max[i] = -3.402823466e38f; // finite, so that max - max is never NaN
    qkv += head.qkv;
    tile_load<TILE, D, W>(q, qkv + first * stride, stride, T - first, HS);
    for (int u = 0; u <= first; u += TILE) {
        __syncthreads(); // all have done their sums over the keys and values before
        tile_load<TILE, D, W>(k, qkv + C + u * stride, stride, T - u, HS);
        tile_load<TILE, D, W>(v, qkv + 2 * C + u * stride, stride, T - u, HS);
        __syncthreads(); // and see the new ones
        tile_dot<D>(s, q, k);
        #pragma unroll
        for (int i = 0; i < R; i++) {
            float before = max[i], part = 0;
            #pragma unroll
            for (int j = 0; j < R; j++) {
                s[i][j] = u + x + SIDE * j <= first + y * R + i ? s[i][j] * scale : -INFINITY;
                max[i] = fmaxf(max[i], s[i][j]);
            }
            max[i] = combine_lanes<SIDE>(max[i], Larger()); // over the lanes that share a row
            #pragma unroll
            for (int j = 0; j < R; j++) part += s[i][j] = fast_exp(s[i][j] - max[i]);
            float correction = fast_exp(before - max[i]);
            sum[i] = sum[i] * correction + combine_lanes<SIDE>(part, Plus());
            #pragma unroll
            for (int j = 0; j < D / SIDE; j++) o[i][j] *= correction;
        }
        tile_put(p, s);
        tile_accumulate<D>(o, p, v);
    }
    for (int i = 0; i < R; i++) {
        if (x == 0 && first + y * R + i < T) stats[head.stats + first + y * R + i] = max[i] + logf(sum[i]);
        sum[i] = 1.0f / sum[i];
    }
    tile_store<D>(out + head.out + (size_t)first * C, o, sum, C, T - first, HS);
}

// ---- backward ----
// forward, for query t with probabilities P[u] = exp(S[u] - stats[t]) and S[u] = q[t].k[u] / sqrt(HS): out[t] = sum P[u] v[u].
// So dv[u] += P[u] dout[t] and dP[u] = dout[t].v[u]; through the softmax dS[u] = P[u] (dP[u] - delta[t]), with delta[t] =
// sum over u of P[u] dP[u] = dout[t].out[t]; and dq[t] = sum dS[u] k[u] / sqrt(HS), dk[u] += dS[u] q[t] / sqrt(HS).

// delta (B,NH,T), the only thing that needs memory
static inline size_t attention_own_workspace_bytes(LayerShapes s) {
    return (size_t)s.B * (size_t)s.NH * (size_t)s.T * sizeof(float);
}

// One warp for each token and head: delta = dout . out. Reads 4 N C bytes in 16 bits.
__global__ void attention_delta_kernel(float* delta, const floatX* dout, const floatX* out, int rows,
                                       int T, int C, int NH, int HS) {
    int i = blockIdx.x * blockDim.y + threadIdx.y; // of (B,T,NH)
    if (i >= rows) return;
    size_t begin = (size_t)(i / NH) * C + (size_t)(i % NH) * HS;
    float sum = 0;
    for (int d = threadIdx.x; d < HS; d += WARP) sum = fmaf(widen(dout[begin + d]), widen(out[begin + d]), sum);
    sum = warp_sum(sum);
    int b = i / NH / T, t = i / NH % T;
    if (threadIdx.x == 0) delta[((size_t)b * NH + i % NH) * T + t] = sum;
}

constexpr int attention_backward_floats(int TILE, int D) { return 4 * tile_floats(TILE, D) + tile_floats(TILE, TILE); }

// dq of TILE queries. Grid (heads, tiles of queries), those with the most keys first. Reads as forward does, and dout.
template <int TILE, int D, int W>
__global__ void __launch_bounds__(ATTENTION_THREADS)
attention_dq_kernel(floatX* dqkv, const floatX* dout, const floatX* qkv, const float* stats, const float* delta,
                    float scale, int T, int C, int NH, int HS) {
    constexpr int R = TILE / SIDE;
    extern __shared__ int4 shared_memory[];
    constexpr int NEXT = tile_floats(TILE, D);
    float *q = (float*)shared_memory, *d = q + NEXT, *k = d + NEXT, *v = k + NEXT, *ds = v + NEXT;
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE, first = (gridDim.y - 1 - blockIdx.y) * TILE;
    size_t stride = 3 * (size_t)C;
    HeadOffset head = head_offset(blockIdx.x, T, C, NH, HS);
    float dq[R][D / SIDE] = {}, s[R][R], dp[R][R], lse[R] = {}, row_delta[R] = {}, factor[R];
    for (int i = 0; i < R; i++) {
        int t = first + y * R + i;
        factor[i] = scale;
        if (t < T) lse[i] = stats[head.stats + t];
        if (t < T) row_delta[i] = delta[head.stats + t];
    }
    qkv += head.qkv;
    tile_load<TILE, D, W>(q, qkv + first * stride, stride, T - first, HS);
    tile_load<TILE, D, W>(d, dout + head.out + (size_t)first * C, C, T - first, HS);
    for (int u = 0; u <= first; u += TILE) {
        __syncthreads(); // all have done their sums over the keys and values before
        tile_load<TILE, D, W>(k, qkv + C + u * stride, stride, T - u, HS);
        tile_load<TILE, D, W>(v, qkv + 2 * C + u * stride, stride, T - u, HS);
        __syncthreads(); // and see the new ones
        tile_dot<D>(s, q, k);
        tile_dot<D>(dp, d, v);
        #pragma unroll
        for (int i = 0; i < R; i++)
            #pragma unroll
            for (int j = 0; j < R; j++) {
                bool seen = u + x + SIDE * j <= first + y * R + i;
                s[i][j] = seen ? fast_exp(s[i][j] * scale - lse[i]) * (dp[i][j] - row_delta[i]) : 0.0f;
            }
        tile_put(ds, s);
        tile_accumulate<D>(dq, ds, k);
    }
    tile_store<D>(dqkv + head.qkv + first * stride, dq, factor, stride, T - first, HS);
}

// dk and dv of TILE keys. Grid (heads, tiles of keys), most queries first. Reads k, v once, q and dout once per tile of keys.
template <int TILE, int D, int W>
__global__ void __launch_bounds__(ATTENTION_THREADS)
attention_dkv_kernel(floatX* dqkv, const floatX* dout, const floatX* qkv, const float* stats, const float* delta,
                     float scale, int T, int C, int NH, int HS) {
    constexpr int R = TILE / SIDE;
    extern __shared__ int4 shared_memory[];
    constexpr int NEXT = tile_floats(TILE, D);
    float *q = (float*)shared_memory, *d = q + NEXT, *k = d + NEXT, *v = k + NEXT, *p = v + NEXT;
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE, first = blockIdx.y * TILE;
    size_t stride = 3 * (size_t)C;
    HeadOffset head = head_offset(blockIdx.x, T, C, NH, HS);
    float dk[R][D / SIDE] = {}, dv[R][D / SIDE] = {}, s[R][R], dp[R][R], one[R], factor[R];
    for (int i = 0; i < R; i++) {
        one[i] = 1;
        factor[i] = scale;
    }
    qkv += head.qkv;
    tile_load<TILE, D, W>(k, qkv + C + first * stride, stride, T - first, HS);
    tile_load<TILE, D, W>(v, qkv + 2 * C + first * stride, stride, T - first, HS);
    for (int t = first; t < T; t += TILE) {
        __syncthreads(); // all have done their sums over the queries before
        tile_load<TILE, D, W>(q, qkv + t * stride, stride, T - t, HS);
        tile_load<TILE, D, W>(d, dout + head.out + (size_t)t * C, C, T - t, HS);
        __syncthreads(); // and see the new ones
        tile_dot<D>(s, k, q);
        tile_dot<D>(dp, v, d);
        #pragma unroll
        for (int j = 0; j < R; j++) {
            int query = t + x + SIDE * j; // from T on, q and dout are 0, so whatever P is adds nothing
            float lse = query < T ? stats[head.stats + query] : 0.0f;
            float column_delta = query < T ? delta[head.stats + query] : 0.0f;
            #pragma unroll
            for (int i = 0; i < R; i++) {
                s[i][j] = first + y * R + i <= query ? fast_exp(s[i][j] * scale - lse) : 0.0f;
                dp[i][j] = s[i][j] * (dp[i][j] - column_delta);
            }
        }
        tile_put(p, s);
        tile_accumulate<D>(dv, p, d);
        tile_put(p, dp);
        tile_accumulate<D>(dk, p, q);
    }
    tile_store<D>(dqkv + head.qkv + C + first * stride, dk, factor, stride, T - first, HS);
    tile_store<D>(dqkv + head.qkv + 2 * C + first * stride, dv, one, stride, T - first, HS);
}

// ---- launches ----
// One call of attention_forward or attention_backward.
typedef struct {
    floatX* result;                   // forward: out, backward: dqkv
    float* stats;                     // written by forward, read by backward
    const floatX *qkv, *dout, *out;   // the last two are NULL in forward
    int B, T, C, NH, HS;
} AttentionCall;

// delta (B,NH,T) of a call, in the workspace
static inline float* attention_delta(AttentionCall a) {
    const int warps = 8, rows = a.B * a.T * a.NH;
    float* delta = (float*)cuda_layers.workspace;
    attention_delta_kernel<<<(unsigned)ceil_div(rows, warps), dim3(WARP, warps), 0, compute_stream>>>(
        delta, a.dout, a.out, rows, a.T, a.C, a.NH, a.HS);
    check_launch("attention_backward, delta");
    return delta;
}

// Launches a kernel of forward or backward, whose arguments end with the scale and the shape.
template <typename Kernel, typename... A>
static inline void attention_run(const char* what, Kernel* kernel, int tile, int shared_floats, AttentionCall a, A... arguments) {
    const size_t shared = shared_floats * sizeof(float);
    dim3 grid(a.B * a.NH, (unsigned)ceil_div(a.T, tile));
    allow_shared_memory(kernel, shared, what);
    kernel<<<grid, ATTENTION_THREADS, shared, compute_stream>>>(arguments..., 1.0f / sqrtf((float)a.HS), a.T, a.C, a.NH, a.HS);
    check_launch(what);
}
template <int TILE, int D, int W> static inline void attention_launch(AttentionCall a) {
    constexpr int floats = attention_forward_floats(TILE, D), backward_floats = attention_backward_floats(TILE, D);
    if (a.dout == NULL) {
        attention_run("attention_forward", attention_forward_kernel<TILE, D, W>, TILE, floats, a, a.result, a.stats, a.qkv);
        return;
    }
    const float *delta = attention_delta(a), *stats = a.stats;
    attention_run("attention_backward, dq", attention_dq_kernel<TILE, D, W>, TILE, backward_floats, a,
                  a.result, a.dout, a.qkv, stats, delta);
    attention_run("attention_backward, dk and dv", attention_dkv_kernel<TILE, D, W>, TILE, backward_floats, a,
                  a.result, a.dout, a.qkv, stats, delta);
}
// Tiles are as large as possible: backward's five must fit in the 99 KB that the smallest of these GPUs gives a block.
template <int W> static inline void attention_by_head_size(AttentionCall a) {
    require(a.HS <= ATTENTION_MAX_HS, "attention: heads of %d channels, but at most %d are supported; choose more --heads",
            a.HS, ATTENTION_MAX_HS);
    if (a.HS <= 32) attention_launch<64, 32, W>(a);
    else if (a.HS <= 64) attention_launch<64, 64, W>(a);
    else attention_launch<32, ATTENTION_MAX_HS, W>(a);
}
static inline void attention_fp32_arithmetic(AttentionCall a) {
    if (rows_are_vectors(a.HS, a.result, a.qkv, a.dout)) attention_by_head_size<VEC>(a);
    else attention_by_head_size<1>(a);
}
#endif
