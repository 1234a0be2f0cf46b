/*
cuda/attention.cuh - causal self-attention without the (T,T) matrix, after FlashAttention-2 (Dao, arXiv 2307.08691), in
fp32 arithmetic. Included by attention_choice.cuh, which chooses between these kernels, those on tensor cores, and
cuDNN's.

A block of 16x16 threads owns TILE rows of one head (queries, or keys where dk and dv are summed). It walks over the
tiles of the other side and computes their (TILE,TILE) scores, so that no part of the matrix is ever in memory. Tiles
lie in shared memory in fp32, padded with zeros to D channels. With R = TILE/16, thread (y,x) computes rows y R to
y R + R-1 of a tile in the columns x, x+16, x+32, ...; so 16 neighbouring lanes of one warp share a row of scores.

Backward is two kernels, one over queries for dq, one over keys for dk and dv. Scores are computed twice, 7 tile
products instead of 5; in return each sum is added in one place and one order: no atomics, equal bits from run to run.

The same kernels compute attention in parts (PART): q and the keys of a chunk, which are another array, give a share of
out, dq, dk and dv. This share is merged with the fp32 results of earlier parts in place, so no part needs extra memory.
This file takes every precision, head size and alignment: read it first. attention_tensor_cores.cuh uses what 16 bits
allow.
*/
#ifndef LLMC_CUDA_ATTENTION_CUH
#define LLMC_CUDA_ATTENTION_CUH
#include "common.cuh"

constexpr int SIDE = 16;                  // threads of a block: SIDE x SIDE
constexpr int ATTENTION_THREADS = SIDE * SIDE;
// Floats between rows of a tile, so that 8 rows of 16 bytes fall in different banks
constexpr int PAD = 4;
constexpr int ATTENTION_MAX_HS = 128;

__host__ __device__ constexpr int tile_floats(int rows, int cols) { return rows * (cols + PAD); }

// Tiles are as large as possible: backward's five must fit in the 99 KB that a block gets from compute capability 8.0
// on. On 7.5 it gets 64 KB, and tiles of half as many rows. Other GPUs never launch the kernels of those, so no
// code is compiled for them.
__host__ __device__ constexpr int largest_tile(int D) { return D <= 64 ? 64 : 32; }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ constexpr bool tile_is_used(int TILE, int D) { return TILE == largest_tile(D); }
#else
__device__ constexpr bool tile_is_used(int, int) { return true; }
#endif

// Offsets of one head of one sequence in tensors of 3C, 2C and C channels, and in (B,NH,T).
typedef struct { size_t qkv, kv, out, stats; } HeadOffset;
__device__ inline HeadOffset head_offset(int head, int T, int C, int NH, int HS) {
    size_t b = head / NH, channel = (size_t)(head % NH) * HS;
    return { b * T * 3 * C + channel, b * T * 2 * C + channel, b * T * C + channel, (size_t)head * T };
}

// ---- a part ----
// The additional arguments of attention_part_forward and _backward.
typedef struct {
    const floatX* kv; // (B,T,2C); NULL: not a part, keys and values are those of qkv
    float* dkv;       // (B,T,2C), += in backward
    bool causal, merge;
} AttentionPart;
template <bool PART> using Result = std::conditional_t<PART, float, floatX>; // in which out, dq, dk and dv are stored
// Between keys; v is C behind k
template <bool PART> __host__ __device__ constexpr int kv_channels(int C) { return (PART ? 2 : 3) * C; }
// A row is stored as `sum` times what was summed up, and in a part that plus `stored` times what it held.
typedef struct { float sum, stored; } RowFactors;
template <bool PART> __device__ inline void row_store(Result<PART>* dst, float sum, RowFactors f) {
    sum *= f.sum;
    if (PART && f.stored != 0) sum = fmaf(f.stored, widen(*dst), sum); // with the factor 0, dst may hold anything
    *dst = narrow<Result<PART>>(sum);
}
// A row's sum of exp(score) is exp(lse) over these keys: writes its stats. Returns what makes out of sum, that of
// exp(score - max). All lanes of the row's warp call it; stats is NULL if there is no such row, and one lane of each
// row writes.
template <bool PART> __device__ inline RowFactors row_end(float* stats, float max, float sum, bool merge, bool writes) {
    RowFactors f = { 1.0f / sum, 0 };
    float lse = max + logf(sum);
    if (PART && merge && stats != NULL) {
        float larger = fmaxf(*stats, lse), all = larger + logf(expf(*stats - larger) + expf(lse - larger));
        f = { expf(lse - all) / sum, expf(*stats - all) };
        lse = all;
    }
    if (PART) __syncwarp(); // the other lanes of the row have read the stats that are now overwritten
    if (writes && stats != NULL) *stats = lse;
    return f;
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
    __syncwarp(); // the neighbours are done with the previous values
    #pragma unroll
    for (int i = 0; i < R; i++)
        #pragma unroll
        for (int j = 0; j < R; j++) tile[(y * R + i) * (TILE + PAD) + x + SIDE * j] = s[i][j];
    __syncwarp(); // and see the new ones
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

// Stores sum in rows of dst, `stride` elements apart; skips rows from `rows` and channels from HS on.
template <int D, bool PART, int R>
__device__ inline void tile_store(Result<PART>* dst, const float (&sum)[R][D / SIDE], const RowFactors (&factors)[R],
                                  size_t stride, int rows, int HS) {
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    #pragma unroll
    for (int i = 0; i < R; i++)
        #pragma unroll
        for (int j = 0; j < D / SIDE; j++)
            if (y * R + i < rows && x + SIDE * j < HS)
                row_store<PART>(dst + (y * R + i) * stride + x + SIDE * j, sum[i][j], factors[i]);
}

constexpr int attention_forward_floats(int TILE, int D) { return 3 * tile_floats(TILE, D) + tile_floats(TILE, TILE); }

// out = softmax(q k^T / sqrt(HS), masked so that query t sees keys 0..t) v. Grid (heads, tiles of queries), those with
// the most keys first. Each row keeps the largest score so far and the sum of exp(score - largest); when a larger one
// comes, what has been summed is scaled down to it. Reads q once and k, v once per tile of queries.
template <int TILE, int D, int W, bool PART>
__global__ void __launch_bounds__(ATTENTION_THREADS)
attention_forward_kernel(Result<PART>* out, float* stats, const floatX* qkv, AttentionPart part,
                         float scale, int T, int C, int NH, int HS) {
    if (!tile_is_used(TILE, D)) return;
    constexpr int R = TILE / SIDE;
    extern __shared__ int4 shared_memory[];
    constexpr int NEXT = tile_floats(TILE, D);
    float *q = (float*)shared_memory, *k = q + NEXT, *v = k + NEXT, *p = v + NEXT;
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE, first = (gridDim.y - 1 - blockIdx.y) * TILE;
    size_t stride = 3 * (size_t)C, kv_stride = PART ? (size_t)(2 * C) : stride;
    HeadOffset head = head_offset(blockIdx.x, T, C, NH, HS);
    bool full = PART && !part.causal; // every query sees every key
    float o[R][D / SIDE] = {}, s[R][R], max[R], sum[R] = {};
    RowFactors factors[R];
    for (int i = 0; i < R; i++) max[i] = -3.402823466e38f; // finite, so that max - max is never NaN
    qkv += head.qkv;
    auto keys = [&](int u) { return PART ? part.kv + head.kv + u * kv_stride : qkv + C + u * stride; };
    auto values = [&](int u) { return PART ? part.kv + head.kv + C + u * kv_stride : qkv + 2 * C + u * stride; };
    tile_load<TILE, D, W>(q, qkv + first * stride, stride, T - first, HS);
    for (int u = 0; u < (full ? T : first + 1); u += TILE) {
        __syncthreads(); // all have done their sums over the keys and values before
        tile_load<TILE, D, W>(k, keys(u), kv_stride, T - u, HS);
        tile_load<TILE, D, W>(v, values(u), kv_stride, T - u, HS);
        __syncthreads(); // and see the new ones
        tile_dot<D>(s, q, k);
        #pragma unroll
        for (int i = 0; i < R; i++) {
            float before = max[i], part = 0;
            #pragma unroll
            for (int j = 0; j < R; j++) {
                s[i][j] = u + x + SIDE * j <= (full ? T - 1 : first + y * R + i) ? s[i][j] * scale : -INFINITY;
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
        int t = first + y * R + i;
        factors[i] = row_end<PART>(t < T ? stats + head.stats + t : NULL, max[i], sum[i], part.merge, x == 0);
    }
    tile_store<D, PART>(out + head.out + (size_t)first * C, o, factors, C, T - first, HS);
}

// ---- backward ----
// forward, for query t with probabilities P[u] = exp(S[u] - stats[t]) and S[u] = q[t].k[u] / sqrt(HS): out[t] = sum
// P[u] v[u]. So dv[u] += P[u] dout[t] and dP[u] = dout[t].v[u]; through the softmax dS[u] = P[u] (dP[u] - delta[t]),
// with delta[t] = sum over u of P[u] dP[u] = dout[t].out[t]; and dq[t] = sum dS[u] k[u] / sqrt(HS), dk[u] += dS[u] q[t]
// / sqrt(HS).

// delta (B,NH,T), the only thing that needs memory
static inline size_t attention_own_workspace_bytes(LayerShapes s) {
    return (size_t)layer_rows(s) * (size_t)s.NH * sizeof(float);
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
template <int TILE, int D, int W, bool PART>
__global__ void __launch_bounds__(ATTENTION_THREADS)
attention_dq_kernel(Result<PART>* dq_out, const floatX* dout, const floatX* qkv, AttentionPart part, const float* stats,
                    const float* delta, float scale, int T, int C, int NH, int HS) {
    if (!tile_is_used(TILE, D)) return;
    constexpr int R = TILE / SIDE;
    extern __shared__ int4 shared_memory[];
    constexpr int NEXT = tile_floats(TILE, D);
    float *q = (float*)shared_memory, *d = q + NEXT, *k = d + NEXT, *v = k + NEXT, *ds = v + NEXT;
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE, first = (gridDim.y - 1 - blockIdx.y) * TILE;
    size_t stride = 3 * (size_t)C, kv_stride = PART ? (size_t)(2 * C) : stride;
    HeadOffset head = head_offset(blockIdx.x, T, C, NH, HS);
    bool full = PART && !part.causal; // every query sees every key
    float dq[R][D / SIDE] = {}, s[R][R], dp[R][R], lse[R] = {}, row_delta[R] = {};
    RowFactors factors[R];
    for (int i = 0; i < R; i++) {
        int t = first + y * R + i;
        factors[i] = { scale, 1 };
        if (t < T) lse[i] = stats[head.stats + t];
        if (t < T) row_delta[i] = delta[head.stats + t];
    }
    qkv += head.qkv;
    auto keys = [&](int u) { return PART ? part.kv + head.kv + u * kv_stride : qkv + C + u * stride; };
    auto values = [&](int u) { return PART ? part.kv + head.kv + C + u * kv_stride : qkv + 2 * C + u * stride; };
    tile_load<TILE, D, W>(q, qkv + first * stride, stride, T - first, HS);
    tile_load<TILE, D, W>(d, dout + head.out + (size_t)first * C, C, T - first, HS);
    for (int u = 0; u < (full ? T : first + 1); u += TILE) {
        __syncthreads(); // all have done their sums over the keys and values before
        tile_load<TILE, D, W>(k, keys(u), kv_stride, T - u, HS);
        tile_load<TILE, D, W>(v, values(u), kv_stride, T - u, HS);
        __syncthreads(); // and see the new ones
        tile_dot<D>(s, q, k);
        tile_dot<D>(dp, d, v);
        #pragma unroll
        for (int i = 0; i < R; i++)
            #pragma unroll
            for (int j = 0; j < R; j++) {
                bool seen = u + x + SIDE * j <= (full ? T - 1 : first + y * R + i);
                s[i][j] = seen ? fast_exp(s[i][j] * scale - lse[i]) * (dp[i][j] - row_delta[i]) : 0.0f;
            }
        tile_put(ds, s);
        tile_accumulate<D>(dq, ds, k);
    }
    size_t dq_stride = PART ? C : stride;
    tile_store<D, PART>(dq_out + (PART ? head.out : head.qkv) + first * dq_stride, dq, factors, dq_stride, T - first,
                        HS);
}

// dk and dv of TILE keys. Grid (heads, tiles of keys), most queries first.
// Reads k, v once, q and dout once per tile of keys.
template <int TILE, int D, int W, bool PART>
__global__ void __launch_bounds__(ATTENTION_THREADS)
attention_dkv_kernel(Result<PART>* dkv, const floatX* dout, const floatX* qkv, AttentionPart part, const float* stats,
                     const float* delta, float scale, int T, int C, int NH, int HS) {
    if (!tile_is_used(TILE, D)) return;
    constexpr int R = TILE / SIDE;
    extern __shared__ int4 shared_memory[];
    constexpr int NEXT = tile_floats(TILE, D);
    float *q = (float*)shared_memory, *d = q + NEXT, *k = d + NEXT, *v = k + NEXT, *p = v + NEXT;
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE, first = blockIdx.y * TILE;
    size_t stride = 3 * (size_t)C, kv_stride = PART ? (size_t)(2 * C) : stride;
    HeadOffset head = head_offset(blockIdx.x, T, C, NH, HS);
    bool full = PART && !part.causal; // every query sees every key
    float dk[R][D / SIDE] = {}, dv[R][D / SIDE] = {}, s[R][R], dp[R][R];
    RowFactors dk_factors[R], dv_factors[R];
    for (int i = 0; i < R; i++) {
        dk_factors[i] = { scale, 1 };
        dv_factors[i] = { 1, 1 };
    }
    qkv += head.qkv;
    auto keys = [&](int u) { return PART ? part.kv + head.kv + u * kv_stride : qkv + C + u * stride; };
    auto values = [&](int u) { return PART ? part.kv + head.kv + C + u * kv_stride : qkv + 2 * C + u * stride; };
    tile_load<TILE, D, W>(k, keys(first), kv_stride, T - first, HS);
    tile_load<TILE, D, W>(v, values(first), kv_stride, T - first, HS);
    for (int t = full ? 0 : first; t < T; t += TILE) {
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
                s[i][j] = full || first + y * R + i <= query ? fast_exp(s[i][j] * scale - lse) : 0.0f;
                dp[i][j] = s[i][j] * (dp[i][j] - column_delta);
            }
        }
        tile_put(p, s);
        tile_accumulate<D>(dv, p, d);
        tile_put(p, dp);
        tile_accumulate<D>(dk, p, q);
    }
    dkv += (PART ? head.kv : head.qkv + C) + first * kv_stride;
    tile_store<D, PART>(dkv, dk, dk_factors, kv_stride, T - first, HS);
    tile_store<D, PART>(dkv + C, dv, dv_factors, kv_stride, T - first, HS);
}

// ---- launches ----
// One call of attention_forward, attention_backward, or attention_part_*.
struct AttentionCall {
    void* result;                     // forward: out, backward: dqkv, or dq of a part; floatX, in a part fp32
    float* stats;                     // written by forward, read by backward
    const floatX *qkv, *dout, *out;   // the last two are NULL in forward
    int B, T, C, NH, HS;
    AttentionPart part = {};
};

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
static inline void attention_run(const char* what, Kernel* kernel, int tile, int shared_floats, AttentionCall a,
                                 A... arguments) {
    const size_t shared = shared_floats * sizeof(float);
    dim3 grid(a.B * a.NH, (unsigned)ceil_div(a.T, tile));
    allow_shared_memory(kernel, shared, what);
    kernel<<<grid, ATTENTION_THREADS, shared, compute_stream>>>(arguments..., 1.0f / sqrtf((float)a.HS), a.T, a.C, a.NH,
                                                                a.HS);
    check_launch(what);
}
template <int TILE, int D, int W, bool PART> static inline void attention_launch(AttentionCall a) {
    constexpr int floats = attention_forward_floats(TILE, D), backward_floats = attention_backward_floats(TILE, D);
    Result<PART>*result = (Result<PART>*)a.result, *dkv = PART ? (Result<PART>*)a.part.dkv : result;
    if (a.dout == NULL) {
        attention_run("attention_forward", attention_forward_kernel<TILE, D, W, PART>, TILE, floats, a,
                      result, a.stats, a.qkv, a.part);
        return;
    }
    const float *delta = attention_delta(a), *stats = a.stats;
    attention_run("attention_backward, dq", attention_dq_kernel<TILE, D, W, PART>, TILE, backward_floats, a,
                  result, a.dout, a.qkv, a.part, stats, delta);
    attention_run("attention_backward, dk and dv", attention_dkv_kernel<TILE, D, W, PART>, TILE, backward_floats, a,
                  dkv, a.dout, a.qkv, a.part, stats, delta);
}
template <int D, int W, bool PART> static inline void attention_by_tile(AttentionCall a) {
    constexpr int TILE = largest_tile(D);
    constexpr size_t shared = attention_backward_floats(TILE, D) * sizeof(float);
    if constexpr (shared <= 64 << 10) attention_launch<TILE, D, W, PART>(a);
    else if (shared <= (size_t)cuda_layers.shared_bytes) attention_launch<TILE, D, W, PART>(a);
    else attention_launch<TILE / 2, D, W, PART>(a);
}
template <int W, bool PART> static inline void attention_by_head_size(AttentionCall a) {
    require(a.HS <= ATTENTION_MAX_HS,
            "attention: heads of %d channels, but at most %d are supported; choose more --heads", a.HS,
            ATTENTION_MAX_HS);
    if (a.HS <= 32) attention_by_tile<32, W, PART>(a);
    else if (a.HS <= 64) attention_by_tile<64, W, PART>(a);
    else attention_by_tile<ATTENTION_MAX_HS, W, PART>(a);
}
template <bool PART> static inline void attention_by_alignment(AttentionCall a) {
    if (rows_are_vectors(a.HS, a.result, a.qkv, a.dout, a.part.kv)) attention_by_head_size<VEC, PART>(a);
    else attention_by_head_size<1, PART>(a);
}
static inline void attention_fp32_arithmetic(AttentionCall a) {
    if (a.part.kv != NULL) attention_by_alignment<true>(a);
    else attention_by_alignment<false>(a);
}
#endif
