/*
cuda/attention_tensor_cores.cuh - attention.cuh's products on tensor cores: elements of 16 bits, heads of 64 channels.
Included by attention_choice.cuh. dev/kernels/cuda/attention_forward.cu and attention_backward.cu lead to these kernels
step by step.

Tensor cores multiply 16-bit numbers about 16 times as fast as the other units multiply fp32, so nothing else may keep
them waiting:
- A warp owns 16 rows: queries, or keys where dk and dv are summed. Their operands, scores and sums stay in its
  registers.
- Tiles of the other side go through shared memory unconverted, for all warps of a block. While one tile is multiplied,
  the next one is copied there (cp.async).
- A lane holds the result of a product exactly where the next product expects its left operand, rounded to 16 bits. So P
  and dS never leave the registers if their rows are the rows of the sum. For dk and dv they are therefore computed
  transposed.

Products and sums are fp32; P and dS are rounded to floatX, once, as inputs of the second product. Backward is two
kernels, as in attention.cuh: every sum has one owner and one order. (dS is rounded before it is scaled by 1/8, so in
fp16 it overflows three powers of 2 before the result would; the loss scale handles this like every other overflow.)

tensor_cores.cuh describes the layout of fragments: of a result (16,8), a lane holds rows lane/4 and lane/4 + 8 in the
columns 2 (lane%4) and 2 (lane%4) + 1. Below, `wide` such results lie side by side; element [i/4][i%4] belongs to row
i/2%2 of the lane's two.
*/
#ifndef LLMC_CUDA_ATTENTION_TENSOR_CORES_CUH
#define LLMC_CUDA_ATTENTION_TENSOR_CORES_CUH
#include "attention.cuh"
#include "tensor_cores.cuh"

constexpr int HEAD = 64;                      // channels of a head
constexpr int HEAD_STEPS = HEAD / 16;         // of a product over channels, 16 in each
constexpr int TILE_STRIDE = HEAD + VEC;       // between rows of a tile: 16 bytes more than the row, so that the 8 rows
                                              // that ldmatrix reads at a time begin in different banks
constexpr int STAGES = 2;                     // tiles in shared memory: one is multiplied, one is on its way
constexpr int TENSOR_CORE_THREADS = 128;      // of a block: 64 rows. Registers leave room for four such blocks on a
                                              // multiprocessor (dk and dv: two), of which one multiplies while another
                                              // waits for its tile
constexpr int TENSOR_CORE_MOST_THREADS = 256; // that dev/kernels/cuda may try: a thread of dk and dv needs over 128 of
                                              // 65536 registers
constexpr float LOG2_E = 1.44269504f;         // exp(x) is 2^(LOG2_E x), and the hardware computes powers of 2

// 2^x in one instruction. exp2f needs four, because it also computes results below 2^-126, which this one flushes to 0.
__device__ inline float power_of_2(float x) {
#ifdef CUDA_EMULATOR
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// ---- tiles and rows ----
// tile (rows,HEAD) in shared memory = rows of src, `stride` elements apart; 0 from row `there` on, so that whatever
// lies beyond, perhaps NaN, does not get into a sum. Asynchronous: the caller goes on with __pipeline_commit and
// __pipeline_wait_prior.
__device__ inline void tile_fetch(floatX* tile, const floatX* src, int stride, int rows, int there) {
    for (int i = threadIdx.x; i < rows * HEAD / VEC; i += blockDim.x) {
        int r = i / (HEAD / VEC), d = i % (HEAD / VEC) * VEC;
        __pipeline_memcpy_async(tile + r * TILE_STRIDE + d, src + (r < there ? r * stride : 0) + d, 16,
                                r < there ? 0 : 16);
    }
}
// This warp's 16 rows of src, `stride` elements apart, as left operands, one for each step; 0 from row `there` on.
// Straight from memory: it happens once, and each lane reads what it needs.
__device__ inline void rows_fetch(uint32_t (&a)[HEAD_STEPS][4], const floatX* src, int stride, int there) {
    int row = threadIdx.x % WARP / 4, col = threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < HEAD_STEPS * 4; i++) {
        int r = row + i % 2 * 8, d = i / 4 * 16 + i / 2 % 2 * 8 + col;
        a[i / 4][i % 4] = r < there ? *(const uint32_t*)(src + r * stride + d) : 0;
    }
}
// Stores sum in 16 rows of dst, `stride` elements apart; skips rows from `there` on.
// Four lanes write 16 bytes side by side.
template <bool PART>
__device__ inline void rows_store(Result<PART>* dst, const float (&sum)[HEAD / 8][4], const RowFactors (&factors)[2],
                                  int stride, int there) {
    int row = threadIdx.x % WARP / 4, col = threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < HEAD / 8 * 2; i++) {
        int d = i / 2, half = i % 2, r = row + half * 8;
        float x = sum[d][half * 2], y = sum[d][half * 2 + 1];
        if (r >= there) continue;
        if constexpr (PART) {
            row_store<PART>(dst + r * stride + d * 8 + col, x, factors[half]);
            row_store<PART>(dst + r * stride + d * 8 + col + 1, y, factors[half]);
        } else *(uint32_t*)(dst + r * stride + d * 8 + col) = fragment_of(x * factors[half].sum, y * factors[half].sum);
    }
}
// Returns the place in shared memory of this lane's row of four matrices, 16 rows from `row` and 16 columns from `col`:
// the first two one below the other, or side by side.
__device__ inline const floatX* below(const floatX* tile, int row, int col, int stride = TILE_STRIDE) {
    int lane = threadIdx.x % WARP;
    return tile + (row + lane % 16) * stride + col + lane / 16 * 8;
}
__device__ inline const floatX* beside(const floatX* tile, int row, int col, int stride = TILE_STRIDE) {
    int lane = threadIdx.x % WARP;
    return tile + (row + lane / 16 * 8 + lane % 8) * stride + col + lane / 8 % 2 * 8;
}
// c0, c1 (16,8) += a b, for two results side by side
__device__ inline void multiply(float (&c0)[4], float (&c1)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    const uint32_t b0[2] = { b[0], b[1] }, b1[2] = { b[2], b[3] };
    mma_m16n8k16<TensorElement>(c0, a, b0);
    mma_m16n8k16<TensorElement>(c1, a, b1);
}
// s (16, 8 wide) = a times the transposed tile (8 wide, HEAD): scores of 16 rows.
// The tile's rows are the operand's columns.
template <int wide>
__device__ inline void tile_scores(float (&s)[wide][4], const uint32_t (&a)[HEAD_STEPS][4], const floatX* tile) {
    #pragma unroll
    for (int i = 0; i < wide * 4; i++) s[i / 4][i % 4] = 0;
    #pragma unroll
    for (int step = 0; step < HEAD_STEPS; step++)
        #pragma unroll
        for (int j = 0; j < wide; j += 2) {
            uint32_t b[4];
            ldmatrix(b, beside(tile, j * 8, step * 16));
            multiply(s[j], s[j + 1], a[step], b);
        }
}
// sum (16,HEAD) += p (16, 8 wide), rounded, times the tile (8 wide, HEAD)
template <int wide>
__device__ inline void tile_add(float (&sum)[HEAD / 8][4], const float (&p)[wide][4], const floatX* tile) {
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
// Scores of keys after the query become -Inf. before: how far this warp's first query lies behind the tile's first key.
// If not causal: after the key that lies so far behind the first one.
template <int wide> __device__ inline void mask_later_keys(float (&s)[wide][4], int before, bool causal = true) {
    int lane = threadIdx.x % WARP;
    #pragma unroll
    for (int i = 0; i < wide * 4; i++) {
        int key = i / 4 * 8 + lane % 4 * 2 + i % 2, query = lane / 4 + i / 2 % 2 * 8;
        if (key > (causal ? query : 0) + before) s[i / 4][i % 4] = -INFINITY;
    }
}
// Over the four lanes that share a row.
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// ---- forward ----
constexpr int FORWARD_KEYS = 64; // of a tile
constexpr int FORWARD_TILE = FORWARD_KEYS * TILE_STRIDE;

// s = 2^(scale2 (s - largest so far)); sum and o are scaled down to it. Next to the products, the main work is
// exponentials, one per query and key: a multiprocessor has units for 16 per cycle, while its tensor cores do thousands
// of operations. So they are powers of 2, and the scale is a part of the exponent.
template <int wide>
__device__ inline void softmax_step(float (&s)[wide][4], float (&o)[HEAD / 8][4], float (&max)[2], float (&sum)[2],
                                    float scale2) {
    float before[2] = { max[0], max[1] };
    #pragma unroll
    for (int i = 0; i < wide * 4; i++) max[i / 2 % 2] = fmaxf(max[i / 2 % 2], s[i / 4][i % 4]);
    #pragma unroll
    for (int row = 0; row < 2; row++) {
        max[row] = combine_lanes<4>(max[row], Larger());
        before[row] = power_of_2((before[row] - max[row]) * scale2);
        sum[row] *= before[row];
    }
    #pragma unroll
    for (int i = 0; i < wide * 4; i++) {
        int row = i / 2 % 2;
        s[i / 4][i % 4] = power_of_2(fmaf(s[i / 4][i % 4], scale2, -max[row] * scale2));
        sum[row] += s[i / 4][i % 4]; // this lane's part: the four of a row are added up at the end
    }
    #pragma unroll
    for (int i = 0; i < HEAD / 8 * 4; i++) o[i / 4][i % 4] *= before[i / 2 % 2];
}
// Computes out and stats. Grid (heads, tiles of queries), most keys first. `stages` is STAGES;
// dev/kernels/cuda shows the effect of 1.
template <int stages, bool PART>
__global__ void __launch_bounds__(TENSOR_CORE_MOST_THREADS)
    attention_forward_tensor_cores_kernel(Result<PART>* out, float* stats, const floatX* qkv, AttentionPart part,
                                          float scale, int T, int C, int NH) {
    extern __shared__ int4 shared_memory[];
    floatX* tiles = (floatX*)shared_memory;
    int queries = blockDim.x / WARP * 16, block_first = (gridDim.y - 1 - blockIdx.y) * queries;
    int first = block_first + threadIdx.x / WARP * 16;
    bool full = PART && !part.causal; // every query sees every key
    // The last key of this warp's first query
    int keys = full ? T : min(T, block_first + queries), seen = full ? T - 1 : first;
    int stride = 3 * C, kv_stride = kv_channels<PART>(C);
    HeadOffset head = head_offset(blockIdx.x, T, C, NH, HEAD);
    qkv += head.qkv;
    auto rows_from = [&](int u, int which) { // 1: keys, 2: values
        return (PART ? part.kv + head.kv + (which - 1) * C : qkv + which * C) + (size_t)u * kv_stride;
    };
    auto tile_of = [&](int u) { return tiles + u / FORWARD_KEYS % stages * 2 * FORWARD_TILE; };
    auto fetch = [&](int u) { // keys from u on, and their values
        if (u < keys) {
            tile_fetch(tile_of(u), rows_from(u, 1), kv_stride, FORWARD_KEYS, T - u);
            tile_fetch(tile_of(u) + FORWARD_TILE, rows_from(u, 2), kv_stride, FORWARD_KEYS, T - u);
        }
        __pipeline_commit(); // even of nothing, so that the wait can count commits
    };
    uint32_t q[HEAD_STEPS][4];
    float o[HEAD / 8][4] = {}, s[FORWARD_KEYS / 8][4], max[2] = { -INFINITY, -INFINITY }, sum[2] = {};
    RowFactors factors[2];
    rows_fetch(q, qkv + (size_t)first * stride, stride, T - first);
    for (int stage = 0; stage < stages - 1; stage++) fetch(stage * FORWARD_KEYS);
    for (int u = 0; u < keys; u += FORWARD_KEYS) {
        fetch(u + (stages - 1) * FORWARD_KEYS);
        __pipeline_wait_prior(stages - 1); // this thread's part of this tile has arrived
        __syncthreads();                   // and the parts of all others
        if (u < seen + 16) {              // otherwise this warp's queries see none of these keys
            tile_scores(s, q, tile_of(u));
            if (u + FORWARD_KEYS > seen) mask_later_keys(s, seen - u, !full);
            softmax_step(s, o, max, sum, scale * LOG2_E);
            tile_add(o, s, tile_of(u) + FORWARD_TILE);
        }
        __syncthreads(); // all warps are done with this tile, before the next one overwrites it
    }
    for (int row = 0; row < 2; row++) {
        int t = first + threadIdx.x % WARP / 4 + row * 8;
        float* row_stats = t < T ? stats + head.stats + t : NULL;
        factors[row] = row_end<PART>(row_stats, max[row] * scale, quad_sum(sum[row]), part.merge, threadIdx.x % 4 == 0);
    }
    rows_store<PART>(out + head.out + (size_t)first * C, o, factors, C, T - first);
}

// ---- backward: the formulas are attention.cuh's ----
constexpr int BACKWARD_ROWS = 32; // of a tile: 64 would not leave registers for dk, dv, P and dS
constexpr int BACKWARD_TILE = BACKWARD_ROWS * TILE_STRIDE;
// A stage holds two tiles: k and v, or q and dout together with the queries' stats and delta.
constexpr int BACKWARD_STAGE = 2 * BACKWARD_TILE + 2 * BACKWARD_ROWS * sizeof(float) / sizeof(floatX);

// Computes dq. Grid (heads, tiles of queries), those with the most keys first.
template <bool PART>
__global__ void __launch_bounds__(TENSOR_CORE_MOST_THREADS)
attention_dq_tensor_cores_kernel(Result<PART>* dq_out, const floatX* dout, const floatX* qkv, AttentionPart part,
                                 const float* stats, const float* delta, float scale, int T, int C, int NH) {
    extern __shared__ int4 shared_memory[];
    floatX* tiles = (floatX*)shared_memory;
    int queries = blockDim.x / WARP * 16, block_first = (gridDim.y - 1 - blockIdx.y) * queries;
    int first = block_first + threadIdx.x / WARP * 16;
    bool full = PART && !part.causal; // every query sees every key
    // The last key of this warp's first query
    int keys = full ? T : min(T, block_first + queries), seen = full ? T - 1 : first;
    int stride = 3 * C, kv_stride = kv_channels<PART>(C);
    HeadOffset head = head_offset(blockIdx.x, T, C, NH, HEAD);
    qkv += head.qkv;
    auto rows_from = [&](int u, int which) { // 1: keys, 2: values
        return (PART ? part.kv + head.kv + (which - 1) * C : qkv + which * C) + (size_t)u * kv_stride;
    };
    auto stage_of = [&](int u) { return tiles + u / BACKWARD_ROWS % STAGES * BACKWARD_STAGE; };
    auto fetch = [&](int u) { // keys from u on, and their values
        if (u < keys) {
            tile_fetch(stage_of(u), rows_from(u, 1), kv_stride, BACKWARD_ROWS, T - u);
            tile_fetch(stage_of(u) + BACKWARD_TILE, rows_from(u, 2), kv_stride, BACKWARD_ROWS, T - u);
        }
        __pipeline_commit(); // even of nothing, so that the wait can count commits
    };
    uint32_t q[HEAD_STEPS][4], d[HEAD_STEPS][4];
    float dq[HEAD / 8][4] = {}, s[BACKWARD_ROWS / 8][4], dp[BACKWARD_ROWS / 8][4], lse2[2] = {}, row_delta[2] = {};
    rows_fetch(q, qkv + (size_t)first * stride, stride, T - first);
    rows_fetch(d, dout + head.out + (size_t)first * C, C, T - first);
    for (int row = 0; row < 2; row++) {
        int t = first + threadIdx.x % WARP / 4 + row * 8;
        if (t < T) lse2[row] = stats[head.stats + t] * LOG2_E;
        if (t < T) row_delta[row] = delta[head.stats + t];
    }
    fetch(0);
    for (int u = 0; u < keys; u += BACKWARD_ROWS) {
        const floatX *k = stage_of(u), *v = k + BACKWARD_TILE;
        fetch(u + BACKWARD_ROWS);
        __pipeline_wait_prior(1); // this thread's part of this tile has arrived
        __syncthreads();          // and the parts of all others
        if (u < seen + 16) {     // otherwise this warp's queries see none of these keys
            tile_scores(s, q, k);
            tile_scores(dp, d, v);
            if (u + BACKWARD_ROWS > seen) mask_later_keys(s, seen - u, !full);
            #pragma unroll
            for (int i = 0; i < BACKWARD_ROWS / 8 * 4; i++) { // s = dS
                int row = i / 2 % 2;
                float p = power_of_2(fmaf(s[i / 4][i % 4], scale * LOG2_E, -lse2[row]));
                s[i / 4][i % 4] = p * (dp[i / 4][i % 4] - row_delta[row]);
            }
            tile_add(dq, s, k);
        }
        __syncthreads(); // all warps are done with this tile, before the next one overwrites it
    }
    const RowFactors factors[2] = { { scale, 1 }, { scale, 1 } };
    int dq_stride = PART ? C : stride;
    rows_store<PART>(dq_out + (PART ? head.out : head.qkv) + (size_t)first * dq_stride, dq, factors, dq_stride,
                     T - first);
}

// A warp's operands and sums for its 16 keys.
struct KeyRows {
    uint32_t k[HEAD_STEPS][4], v[HEAD_STEPS][4]; // left operands
    float dk[HEAD / 8][4], dv[HEAD / 8][4];      // sums so far, dk not scaled
};
// k: the keys of this head, as below; its values lie C behind them, and rows `stride` apart.
__device__ inline KeyRows key_rows_begin(const floatX* k, int first, int stride, int T, int C) {
    KeyRows w = {};
    rows_fetch(w.k, k + (size_t)first * stride, stride, T - first);
    rows_fetch(w.v, k + C + (size_t)first * stride, stride, T - first);
    return w;
}
template <bool PART>
__device__ inline void key_rows_store(Result<PART>* dk, const KeyRows& w, float scale, int first, int stride, int T,
                                      int C) {
    const RowFactors factors[2] = { { scale, 1 }, { scale, 1 } }, one[2] = { { 1, 1 }, { 1, 1 } };
    rows_store<PART>(dk + (size_t)first * stride, w.dk, factors, stride, T - first);
    rows_store<PART>(dk + C + (size_t)first * stride, w.dv, one, stride, T - first);
}
// A stage of queries from t on: q, dout, stats and delta of this head.
// Queries are columns, so each lane needs the stats of many.
__device__ inline void queries_fetch(floatX* stage, const floatX* qkv, const floatX* dout, const float* stats,
                                     const float* delta, int t, int T, int C) {
    if (t < T) {
        tile_fetch(stage, qkv + (size_t)t * 3 * C, 3 * C, BACKWARD_ROWS, T - t);
        tile_fetch(stage + BACKWARD_TILE, dout + t * (size_t)C, C, BACKWARD_ROWS, T - t);
        float* columns = (float*)(stage + 2 * BACKWARD_TILE);
        for (int i = threadIdx.x; i < 2 * BACKWARD_ROWS; i += blockDim.x) {
            int query = t + i % BACKWARD_ROWS;
            const float* src = (i < BACKWARD_ROWS ? stats : delta) + min(query, T - 1);
            __pipeline_memcpy_async(columns + i, src, sizeof(float), query < T ? 0 : sizeof(float));
        }
    }
    __pipeline_commit(); // even of nothing, so that the wait can count commits
}
// Adds the terms of a stage's queries to w.dk and w.dv; ds = their dS, transposed like everything here, (16 keys,
// queries). before: how far this warp's first key lies behind the first query of the stage.
__device__ inline void key_rows_add(KeyRows& w, float (&ds)[BACKWARD_ROWS / 8][4], const floatX* stage, float scale,
                                    int before) {
    const floatX *q = stage, *d = q + BACKWARD_TILE;
    const float *lse = (const float*)(d + BACKWARD_TILE), *delta = lse + BACKWARD_ROWS;
    float p[BACKWARD_ROWS / 8][4];
    int lane = threadIdx.x % WARP;
    tile_scores(p, w.k, q);
    tile_scores(ds, w.v, d);
    #pragma unroll
    for (int i = 0; i < BACKWARD_ROWS / 8 * 4; i++) {
        int key = lane / 4 + i / 2 % 2 * 8, query = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float e = power_of_2(fmaf(p[i / 4][i % 4], scale * LOG2_E, -lse[query] * LOG2_E));
        p[i / 4][i % 4] = key + before <= query ? e : 0.0f; // from T on q and dout are 0, so whatever P is adds nothing
        ds[i / 4][i % 4] = p[i / 4][i % 4] * (ds[i / 4][i % 4] - delta[query]);
    }
    tile_add(w.dv, p, d);
    tile_add(w.dk, ds, q);
}
// Computes dk and dv. Grid (heads, tiles of keys), those with the most queries first.
template <bool PART>
__global__ void __launch_bounds__(TENSOR_CORE_MOST_THREADS)
attention_dkv_tensor_cores_kernel(Result<PART>* dkv, const floatX* dout, const floatX* qkv, AttentionPart part,
                                  const float* stats, const float* delta, float scale, int T, int C, int NH) {
    extern __shared__ int4 shared_memory[];
    floatX* stages = (floatX*)shared_memory;
    int keys = blockDim.x / WARP * 16, block_first = blockIdx.y * keys, first = block_first + threadIdx.x / WARP * 16;
    bool full = PART && !part.causal; // every query sees every key, as if the keys lay before them
    int begin = full ? 0 : block_first, place = full ? -16 : first, stride = kv_channels<PART>(C);
    HeadOffset head = head_offset(blockIdx.x, T, C, NH, HEAD);
    qkv += head.qkv; dout += head.out; stats += head.stats; delta += head.stats;
    auto stage_of = [&](int t) { return stages + (t - begin) / BACKWARD_ROWS % STAGES * BACKWARD_STAGE; };
    float ds[BACKWARD_ROWS / 8][4];
    KeyRows w = key_rows_begin(PART ? part.kv + head.kv : qkv + C, first, stride, T, C);
    queries_fetch(stage_of(begin), qkv, dout, stats, delta, begin, T, C);
    for (int t = begin; t < T; t += BACKWARD_ROWS) {
        queries_fetch(stage_of(t + BACKWARD_ROWS), qkv, dout, stats, delta, t + BACKWARD_ROWS, T, C);
        __pipeline_wait_prior(1); // this thread's part of this stage has arrived
        __syncthreads();          // and the parts of all others
        // Otherwise none of the queries sees this warp's keys
        if (t + BACKWARD_ROWS > place) key_rows_add(w, ds, stage_of(t), scale, place - t);
        __syncthreads(); // all warps are done with this stage, before the next one overwrites it
    }
    key_rows_store<PART>(dkv + (PART ? head.kv : head.qkv + C), w, scale, first, stride, T, C);
}

// ---- launches ----
// a.HS is HEAD, arrays begin on 16 bytes; threads: whole warps, of 16 rows each.
template <int stages, bool PART = false>
static inline void attention_forward_tensor_cores(AttentionCall a, int threads) {
    constexpr size_t shared = stages * 2 * FORWARD_TILE * sizeof(floatX);
    static_assert(shared <= 48 << 10, "more shared memory than a kernel has without asking");
    dim3 grid(a.B * a.NH, (unsigned)ceil_div(a.T, threads / WARP * 16));
    attention_forward_tensor_cores_kernel<stages, PART><<<grid, threads, shared, compute_stream>>>(
        (Result<PART>*)a.result, a.stats, a.qkv, a.part, 1.0f / sqrtf((float)a.HS), a.T, a.C, a.NH);
    check_launch("attention_forward");
}
template <bool PART = false> static inline void attention_backward_tensor_cores(AttentionCall a, int threads) {
    constexpr size_t shared = STAGES * BACKWARD_STAGE * sizeof(floatX);
    static_assert(shared <= 48 << 10, "more shared memory than a kernel has without asking");
    const float *delta = attention_delta(a), scale = 1.0f / sqrtf((float)a.HS);
    Result<PART>*result = (Result<PART>*)a.result, *dkv = PART ? (Result<PART>*)a.part.dkv : result;
    dim3 grid(a.B * a.NH, (unsigned)ceil_div(a.T, threads / WARP * 16));
    attention_dq_tensor_cores_kernel<PART><<<grid, threads, shared, compute_stream>>>(
        result, a.dout, a.qkv, a.part, a.stats, delta, scale, a.T, a.C, a.NH);
    check_launch("attention_backward, dq");
    attention_dkv_tensor_cores_kernel<PART><<<grid, threads, shared, compute_stream>>>(
        dkv, a.dout, a.qkv, a.part, a.stats, delta, scale, a.T, a.C, a.NH);
    check_launch("attention_backward, dk and dv");
}
template <bool PART> static inline void attention_on_tensor_cores(AttentionCall a) {
    if (a.dout == NULL) attention_forward_tensor_cores<STAGES, PART>(a, TENSOR_CORE_THREADS);
    else attention_backward_tensor_cores<PART>(a, TENSOR_CORE_THREADS);
}
static inline void attention_tensor_cores(AttentionCall a) {
    if (a.part.kv != NULL) attention_on_tensor_cores<true>(a);
    else attention_on_tensor_cores<false>(a);
}
#endif
