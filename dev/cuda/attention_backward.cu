/*
attention_backward.cu - causal self-attention, backward, in several kernels: dq, dk and dv from dout, and from what forward left,
out and stats.

forward, for query t of a head: S[u] = q[t].k[u] / sqrt(HS) over the keys u <= t, P = softmax(S), out[t] = sum of P[u] v[u]. So

    dv[u] += P[u] dout[t]               dP[u] = dout[t].v[u]            D = sum over u of P[u] dP[u]
    dS[u] = P[u] (dP[u] - D)            dq[t] = sum of dS[u] k[u] / sqrt(HS)     dk[u] += dS[u] q[t] / sqrt(HS)

Counted are 4 B T T C operations: the derivative of forward's two products is four, each as large as one of those (and half of it
is masked). Kernels that make the scores anew do a fifth, some more, and are not credited for them; papers count five.
*/
#include "attention_common.cuh"

struct Problem {
    int B, T, C, NH, HS;
    double flops;
    float scale;
    Both<floatX> qkv, out, dout, dqkv;
    Both<float> stats;
    float *delta, *dq_sums;     // (B,NH,T), (B,NH,T,HS); these and the next are owned by cuda_both.h's list
    float *probabilities, *ds;  // (B,NH,T,T), what a forward that stores them would have left, and room; NULL: too large
    bool rounded;               // by the variant that runs: P and dS, to floatX, before they are multiplied

    Problem(Shape shape);
    ~Problem() { attention_free(); }
    void begin_again() {
        ::begin_again(dqkv);
        rounded = false;
    }
    void expect_right() {
        double slack = (NEEDS_MASTER ? 4 : 1) * (8 + sqrt(HS) + sqrt(T)); // in 16 bits exp is the GPU's own instruction
        expect_near("dqkv", dqkv, 4 * slack + (rounded ? 3 * ROUNDING / F32_ROUNDING : 0));
    }
};

// matrix = P, made from stats. A thread has an element.
__global__ void probabilities_kernel(float* matrix, const floatX* qkv, const float* stats, float scale, int T, int C, int NH,
                                     int HS) {
    int u = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (u >= T) return;
    HeadOffset head = head_offset(blockIdx.z, T, C, NH, HS);
    const floatX *q = qkv + head.qkv + (size_t)t * 3 * C, *k = qkv + head.qkv + C + (size_t)u * 3 * C;
    float s = 0;
    for (int d = 0; d < HS; d++) s = fmaf(widen(q[d]), widen(k[d]), s);
    matrix[(head.stats + t) * T + u] = u <= t ? fast_exp(s * scale - stats[head.stats + t]) : 0.0f;
}
Problem::Problem(Shape shape) {
    LayerShapes s = attention_shapes(shape);
    attention_start(s);
    B = s.B; T = s.T; C = s.C; NH = s.NH; HS = C / NH;
    flops = 4.0 * B * T * T * C;
    scale = attention_scale(s);
    size_t n = (size_t)B * T * C, rows = (size_t)B * NH * T;
    qkv = random_both(3 * n); dout = random_both(n); dqkv = unset_both(3 * n);
    Both<floatX> o = unset_both(n);
    Both<float> lse = unset_both<float>(rows);
    cpu::attention_forward(o.cpu, lse.cpu, qkv.cpu, B, T, C, NH);
    out = as_input(o);
    stats = as_input(lse);
    cpu::attention_backward(dqkv.cpu, dout.cpu, qkv.cpu, out.cpu, stats.cpu, B, T, C, NH);
    delta = (float*)device_bytes(rows * sizeof(float));
    dq_sums = (float*)device_bytes(n * sizeof(float));
    bool fits = matrix_bytes(s) <= MATRIX_MOST;
    probabilities = fits ? (float*)device_bytes(matrix_bytes(s)) : NULL;
    ds = fits ? (float*)device_bytes(matrix_bytes(s)) : NULL;
    if (fits)
        probabilities_kernel<<<dim3((unsigned)ceil_div(T, 256), T, B * NH), 256, 0, compute_stream>>>(
            probabilities, qkv.gpu, stats.gpu, scale, T, C, NH, HS);
}

// ---- 1: what the textbook says ----
// P is what forward has stored, all of it; dP is as large. Each line of the formulas is a kernel.
// ds = dP. A thread has an element, and neighbours have keys that lie 3 C elements apart.
__global__ void dp_kernel(float* ds, const floatX* dout, const floatX* qkv, int T, int C, int NH, int HS) {
    int u = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (u >= T) return;
    HeadOffset head = head_offset(blockIdx.z, T, C, NH, HS);
    const floatX *d = dout + head.out + (size_t)t * C, *v = qkv + head.qkv + 2 * C + (size_t)u * 3 * C;
    float sum = 0;
    for (int i = 0; i < HS; i++) sum = fmaf(widen(d[i]), widen(v[i]), sum);
    ds[(head.stats + t) * T + u] = sum;
}
// ds = P (ds - D), D from ds. A warp has a row.
__global__ void softmax_backward_kernel(float* ds, const float* probabilities, int T, int rows) {
    int i = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, lane = threadIdx.x % WARP; // i of (B,NH,T)
    if (i >= rows) return;
    const float* p = probabilities + (size_t)i * T;
    float D = 0;
    ds += (size_t)i * T;
    for (int u = lane; u < T; u += WARP) D = fmaf(p[u], ds[u], D);
    D = warp_sum(D);
    for (int u = lane; u < T; u += WARP) ds[u] = p[u] * (ds[u] - D);
}
// dq, dk, dv. A thread has one element of each.
__global__ void products_kernel(floatX* dqkv, const float* probabilities, const float* ds, const floatX* dout, const floatX* qkv,
                                float scale, int T, int C, int NH, int HS, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; // of (B,T,C)
    if (i >= n) return;
    int b = i / C / T, row = i / C % T, c = i % C; // the row is a query's for dq, a key's for dk and dv
    size_t matrix = ((size_t)b * NH + c / HS) * T * T, sequence = (size_t)b * T;
    const floatX *q = qkv + sequence * 3 * C + c, *k = q + C, *d = dout + sequence * C + c;
    float dq = 0, dk = 0, dv = 0;
    for (int j = 0; j < T; j++) {
        size_t of_query = matrix + (size_t)row * T + j, of_key = matrix + (size_t)j * T + row;
        dq = fmaf(ds[of_query], widen(k[(size_t)j * 3 * C]), dq);
        dk = fmaf(ds[of_key], widen(q[(size_t)j * 3 * C]), dk);
        dv = fmaf(probabilities[of_key], widen(d[(size_t)j * C]), dv);
    }
    dqkv += (sequence + row) * 3 * C + c;
    dqkv[0] = narrow<floatX>(dq * scale);
    dqkv[C] = narrow<floatX>(dk * scale);
    dqkv[2 * C] = narrow<floatX>(dv);
}
static bool attention_backward_1_textbook(Problem& p, int threads) {
    if (p.probabilities == NULL) return false;
    int rows = p.B * p.NH * p.T;
    dim3 grid((unsigned)ceil_div(p.T, threads), p.T, p.B * p.NH);
    unsigned blocks = (unsigned)ceil_div(p.out.n, threads), warps = (unsigned)ceil_div(rows, threads / WARP);
    dp_kernel<<<grid, threads, 0, compute_stream>>>(p.ds, p.dout.gpu, p.qkv.gpu, p.T, p.C, p.NH, p.HS);
    softmax_backward_kernel<<<warps, threads, 0, compute_stream>>>(p.ds, p.probabilities, p.T, rows);
    products_kernel<<<blocks, threads, 0, compute_stream>>>(p.dqkv.gpu, p.probabilities, p.ds, p.dout.gpu, p.qkv.gpu, p.scale,
                                                            p.T, p.C, p.NH, p.HS, p.out.n);
    p.rounded = true; // not P: the CPU's layer, and all kernels that follow, have D from out, which was rounded
    return true;
}

// ---- 2: nothing of the matrix in memory ----
// P[u] = exp(S[u] - stats[t]): one product more, and forward need not store it. What needs a whole row before its first
// element can be had is D; but D = sum of P[u] (dout[t].v[u]) = dout[t] . sum of P[u] v[u] = dout[t].out[t], for which
// llmc/ has a kernel. Two others follow: dq has a sum over keys for each query, a warp; dk and dv over queries for each key,
// another warp. So each sum has one owner, and P and dP are made twice.
template <int N>
__global__ void dq_kernel(floatX* dqkv, const floatX* dout, const floatX* qkv, const float* stats, const float* delta,
                          float scale, int T, int C, int NH, int HS) {
    int t = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (t >= T) return;
    HeadOffset head = head_offset(blockIdx.y, T, C, NH, HS);
    size_t stride = 3 * (size_t)C;
    qkv += head.qkv;
    LaneRow<N> q = lane_load<N>(qkv + t * stride, HS), d = lane_load<N>(dout + head.out + (size_t)t * C, HS), dq = {};
    float lse = stats[head.stats + t], D = delta[head.stats + t];
    for (int u = 0; u <= t; u++) {
        LaneRow<N> k = lane_load<N>(qkv + C + u * stride, HS), v = lane_load<N>(qkv + 2 * C + u * stride, HS);
        float p = fast_exp(lane_dot(q, k) * scale - lse);
        lane_add(dq, p * (lane_dot(d, v) - D), k);
    }
    lane_store(dqkv + head.qkv + t * stride, dq, scale, HS);
}
template <int N>
__global__ void dkv_kernel(floatX* dqkv, const floatX* dout, const floatX* qkv, const float* stats, const float* delta,
                           float scale, int T, int C, int NH, int HS) {
    int u = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (u >= T) return;
    HeadOffset head = head_offset(blockIdx.y, T, C, NH, HS);
    size_t stride = 3 * (size_t)C;
    qkv += head.qkv;
    LaneRow<N> k = lane_load<N>(qkv + C + u * stride, HS), v = lane_load<N>(qkv + 2 * C + u * stride, HS), dk = {}, dv = {};
    for (int t = u; t < T; t++) {
        LaneRow<N> q = lane_load<N>(qkv + t * stride, HS), d = lane_load<N>(dout + head.out + (size_t)t * C, HS);
        float p = fast_exp(lane_dot(q, k) * scale - stats[head.stats + t]);
        lane_add(dv, p, d);
        lane_add(dk, p * (lane_dot(d, v) - delta[head.stats + t]), q);
    }
    lane_store(dqkv + head.qkv + C + u * stride, dk, scale, HS);
    lane_store(dqkv + head.qkv + 2 * C + u * stride, dv, 1, HS);
}
#define KERNEL_ARGUMENTS(p) (p).dqkv.gpu, (p).dout.gpu, (p).qkv.gpu, (p).stats.gpu, (p).delta, (p).scale, (p).T, (p).C, (p).NH
static void launch_delta(Problem& p, int threads) {
    int rows = p.B * p.T * p.NH;
    dim3 block(WARP, threads / WARP);
    attention_delta_kernel<<<(unsigned)ceil_div(rows, block.y), block, 0, compute_stream>>>(
        p.delta, p.dout.gpu, p.out.gpu, rows, p.T, p.C, p.NH, p.HS);
}
static bool attention_backward_2_recomputed(Problem& p, int threads) {
    if (p.HS > 4 * WARP) return false;
    dim3 grid((unsigned)ceil_div(p.T, threads / WARP), p.B * p.NH);
    auto dq = p.HS <= 2 * WARP ? dq_kernel<2> : dq_kernel<4>;
    auto dkv = p.HS <= 2 * WARP ? dkv_kernel<2> : dkv_kernel<4>;
    launch_delta(p, threads);
    dq<<<grid, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), p.HS);
    dkv<<<grid, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), p.HS);
    return true;
}

// ---- 3: llmc/'s own ----
// The same two sums, each for a tile of queries or keys by a block, with tiles of the other side in shared memory. Made for
// blocks of 256 threads.
static bool attention_backward_3_llmc(Problem& p, int threads) {
    if (threads != ATTENTION_THREADS || p.HS > ATTENTION_MAX_HS) return false;
    attention_own_backward(p.dqkv.gpu, p.dout.gpu, p.qkv.gpu, p.out.gpu, p.stats.gpu, p.B, p.T, p.C, p.NH);
    return true;
}

// ---- 4: all products on tensor cores ----
// A warp has 16 queries, or 16 keys. It keeps their rows and what it sums up in registers, and makes S and dP of each tile there.
// As in forward, P and dS are then where a left operand has to be, if S and dP are made with the rows down that the sums are of:
// for dk and dv they are made transposed. No lane needs another one's P, so there are barriers around tiles alone, of which
// two are in shared memory, as in forward's sixth.
constexpr int ROWS = 32, WIDE = ROWS / 8, STAGES = 2; // rows of a tile; 64 would not leave registers for dk, dv, S and dP
constexpr int TILE = ROWS * STRIDE;
constexpr int STAGE = 2 * TILE + 2 * ROWS * sizeof(float) / sizeof(floatX); // two tiles, and for dk and dv stats and delta

// Two tiles, rows t.. of x and y, begin on their way to shared memory, as far as T goes. __pipeline_commit follows.
__device__ inline void fetch_two(floatX* tiles, const floatX* x, size_t x_stride, const floatX* y, size_t y_stride,
                                 int t, int T) {
    if (t >= T) return;
    tile_fetch(tiles, x + t * x_stride, x_stride, ROWS, T - t);
    tile_fetch(tiles + TILE, y + t * y_stride, y_stride, ROWS, T - t);
}
// dq. Grid (heads, tiles of queries), those with the most keys first.
__global__ void __launch_bounds__(MOST_THREADS)
tensor_core_dq_kernel(floatX* dqkv, const floatX* dout, const floatX* qkv, const float* stats, const float* delta,
                      float scale, int T, int C, int NH) {
    extern __shared__ int4 shared_memory[];
    floatX* tiles = (floatX*)shared_memory;
    int queries = blockDim.x / WARP * 16, block_first = (gridDim.y - 1 - blockIdx.y) * queries, lane = threadIdx.x % WARP;
    int first = block_first + threadIdx.x / WARP * 16, keys = min(T, block_first + queries);
    size_t stride = 3 * (size_t)C;
    HeadOffset head = head_offset(blockIdx.x, T, C, NH, HEAD);
    qkv += head.qkv;
    dout += head.out;
    auto fetch = [&](int u) {
        fetch_two(tiles + u / ROWS % STAGES * STAGE, qkv + C, stride, qkv + 2 * C, stride, u, keys);
        __pipeline_commit(); // of nothing, too, so that what is waited for can be counted
    };
    uint32_t q[STEPS][4], d[STEPS][4];
    float dq[HEAD / 8][4] = {}, s[WIDE][4], dp[WIDE][4], lse[2] = {}, D[2] = {};
    rows_fetch(q, qkv + first * stride, stride, T - first);
    rows_fetch(d, dout + (size_t)first * C, C, T - first);
    for (int row = 0; row < 2; row++) {
        int t = first + lane / 4 + row * 8;
        if (t < T) lse[row] = stats[head.stats + t] * LOG2_E;
        if (t < T) D[row] = delta[head.stats + t];
    }
    fetch(0);
    for (int u = 0; u < keys; u += ROWS) {
        const floatX *k = tiles + u / ROWS % STAGES * STAGE, *v = k + TILE;
        fetch(u + ROWS);
        __pipeline_wait_prior(1); // this thread's part of this tile is there
        __syncthreads();          // and all others'
        tile_scores(s, q, k);
        tile_scores(dp, d, v);
        #pragma unroll
        for (int i = 0; i < WIDE * 4; i++) { // s = dS
            int row = i / 2 % 2, key = u + i / 4 * 8 + lane % 4 * 2 + i % 2;
            float p = power_of_2(fmaf(s[i / 4][i % 4], scale * LOG2_E, -lse[row]));
            s[i / 4][i % 4] = key <= first + lane / 4 + row * 8 ? p * (dp[i / 4][i % 4] - D[row]) : 0.0f;
        }
        tile_add(dq, s, k);
        __syncthreads(); // all warps are done with this tile, whose memory is the next one's
    }
    const float factor[2] = { scale, scale };
    rows_store(dqkv + head.qkv + first * stride, dq, factor, stride, T - first);
}
// What dkv's block needs besides its tiles where it adds to dq, too: its own keys, and dS of all its warps.
constexpr int DS_STRIDE = ROWS + VEC; // as STRIDE
static size_t dkv_shared_bytes(int threads, bool with_dq) {
    size_t keys = threads / WARP * 16;
    return STAGES * STAGE * sizeof(floatX) + (with_dq ? keys * (STRIDE + DS_STRIDE) * sizeof(floatX) : 0);
}
// dq_sums (T,HEAD), from query t on, += dS k, of the block's keys: (32,keys) (keys,HEAD), in pieces of (16,16) that the warps
// take in turn. ds is dS transposed, (keys,32), and is read by columns.
__device__ inline void add_to_dq(float* dq_sums, const floatX* ds, const floatX* keys, int t, int T) {
    int warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    for (int piece = threadIdx.x / WARP; piece < ROWS / 16 * (HEAD / 16); piece += warps) {
        int query = piece % 2 * 16, channel = piece / 2 * 16;
        float sum[2][4] = {};
        for (int u = 0; u < warps * 16; u += 16) {
            uint32_t a[4], b[4];
            ldmatrix_trans(a, beside(ds, u, query, DS_STRIDE));
            ldmatrix_trans(b, below(keys, u, channel));
            multiply(sum[0], sum[1], a, b);
        }
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            int row = t + query + lane / 4 + i / 2 % 2 * 8, col = channel + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (row < T) atomicAdd(&dq_sums[(size_t)row * HEAD + col], sum[i / 4][i % 4]);
        }
    }
}
// columns (2,ROWS) in shared memory = stats and delta from query t on: where queries are across, each lane needs many of them.
__device__ inline void fetch_columns(float* columns, const float* stats, const float* delta, int t, int T) {
    for (int i = threadIdx.x; i < 2 * ROWS && t < T; i += blockDim.x) {
        int query = t + i % ROWS;
        const float* src = (i < ROWS ? stats : delta) + min(query, T - 1);
        __pipeline_memcpy_async(columns + i, src, sizeof(float), query < T ? 0 : sizeof(float));
    }
}
// dk and dv; with_dq: dq_sums (B,NH,T,HEAD) +=, too. Grid (heads, tiles of keys), those with the most queries first.
template <bool with_dq>
__global__ void __launch_bounds__(MOST_THREADS)
tensor_core_dkv_kernel(floatX* dqkv, const floatX* dout, const floatX* qkv, const float* stats, const float* delta,
                       float scale, int T, int C, int NH, float* dq_sums) {
    extern __shared__ int4 shared_memory[];
    floatX* tiles = (floatX*)shared_memory;
    int keys = blockDim.x / WARP * 16, block_first = blockIdx.y * keys, lane = threadIdx.x % WARP, own = threadIdx.x / WARP * 16;
    int first = block_first + own;
    floatX *block_keys = tiles + STAGES * STAGE, *ds = block_keys + keys * STRIDE; // there if with_dq
    size_t stride = 3 * (size_t)C;
    HeadOffset head = head_offset(blockIdx.x, T, C, NH, HEAD);
    qkv += head.qkv;
    dout += head.out;
    auto stage_of = [&](int t) { return tiles + (t - block_first) / ROWS % STAGES * STAGE; };
    auto fetch = [&](int t) {
        fetch_two(stage_of(t), qkv, stride, dout, C, t, T);
        fetch_columns((float*)(stage_of(t) + 2 * TILE), stats + head.stats, delta + head.stats, t, T);
        __pipeline_commit(); // of nothing, too, so that what is waited for can be counted
    };
    uint32_t k[STEPS][4], v[STEPS][4];
    float dk[HEAD / 8][4] = {}, dv[HEAD / 8][4] = {}, s[WIDE][4], dp[WIDE][4];
    rows_fetch(k, qkv + C + first * stride, stride, T - first);
    rows_fetch(v, qkv + 2 * C + first * stride, stride, T - first);
    if constexpr (with_dq) tile_fetch(block_keys, qkv + C + block_first * stride, stride, keys, T - block_first);
    fetch(block_first);
    for (int t = block_first; t < T; t += ROWS) {
        const floatX *q = stage_of(t), *d = q + TILE;
        const float *lse = (const float*)(d + TILE), *D = lse + ROWS;
        fetch(t + ROWS);
        __pipeline_wait_prior(1); // this thread's part of this tile is there
        __syncthreads();          // and all others'
        tile_scores(s, k, q);
        tile_scores(dp, v, d);
        #pragma unroll
        for (int i = 0; i < WIDE * 4; i++) { // s = P, dp = dS
            int query = i / 4 * 8 + lane % 4 * 2 + i % 2; // of the tile. From T on all are 0, so whatever P is adds nothing
            float p = power_of_2(fmaf(s[i / 4][i % 4], scale * LOG2_E, -lse[query] * LOG2_E));
            s[i / 4][i % 4] = first + lane / 4 + i / 2 % 2 * 8 <= t + query ? p : 0.0f;
            dp[i / 4][i % 4] = s[i / 4][i % 4] * (dp[i / 4][i % 4] - D[query]);
        }
        tile_add(dv, s, d);
        tile_add(dk, dp, q);
        if constexpr (with_dq) {
            #pragma unroll
            for (int i = 0; i < WIDE * 2; i++) {
                floatX* pair = ds + (own + lane / 4 + i % 2 * 8) * DS_STRIDE + i / 2 * 8 + lane % 4 * 2;
                *(uint32_t*)pair = fragment_of(dp[i / 2][i % 2 * 2], dp[i / 2][i % 2 * 2 + 1]);
            }
            __syncthreads(); // dS of all warps is there
            add_to_dq(dq_sums + head.stats * HEAD, ds, block_keys, t, T);
        }
        __syncthreads(); // all warps are done with this tile, whose memory is the next one's, and with dS
    }
    const float factor[2] = { scale, scale }, one[2] = { 1, 1 };
    rows_store(dqkv + head.qkv + C + first * stride, dk, factor, stride, T - first);
    rows_store(dqkv + head.qkv + 2 * C + first * stride, dv, one, stride, T - first);
}
static bool attention_backward_4_tensor_cores(Problem& p, int threads) {
    if (!tensor_cores_take(p.HS, threads)) return false;
    size_t bytes = dkv_shared_bytes(threads, false);
    dim3 grid(p.B * p.NH, (unsigned)ceil_div(p.T, threads / WARP * 16));
    launch_delta(p, threads);
    tensor_core_dq_kernel<<<grid, threads, bytes, compute_stream>>>(KERNEL_ARGUMENTS(p));
    tensor_core_dkv_kernel<false><<<grid, threads, bytes, compute_stream>>>(KERNEL_ARGUMENTS(p), NULL);
    p.rounded = true;
    return true;
}

// ---- 5: S and dP once ----
// Five products instead of seven: the blocks of keys, which have dS anyway, add dS k to dq as they go. Each query's sum then has
// many owners, in whatever order they come: fp32 atomics into memory that was zeroed, and a pass at the end that rounds. So do
// FlashAttention-2 and cuDNN where the last bits may differ from run to run; llmc/'s own never differ, so it has no such kernel.
// dS has keys down for dk, and queries for dq: it changes hands in shared memory.
// dq of dqkv = scale * dq_sums. A thread has an element.
__global__ void dq_from_sums_kernel(floatX* dqkv, const float* dq_sums, float scale, int T, int C, int NH, int HS, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; // of (B,NH,T,HS)
    if (i >= n) return;
    size_t row = i / HS;
    HeadOffset head = head_offset(row / T, T, C, NH, HS);
    dqkv[head.qkv + row % T * 3 * C + i % HS] = narrow<floatX>(dq_sums[i] * scale);
}
static bool attention_backward_5_atomics(Problem& p, int threads) {
    size_t bytes = dkv_shared_bytes(threads, true), n = p.out.n;
    if (!tensor_cores_take(p.HS, threads)) return false;
    dim3 grid(p.B * p.NH, (unsigned)ceil_div(p.T, threads / WARP * 16));
    cuda_check(cudaMemsetAsync(p.dq_sums, 0, n * sizeof(float), compute_stream), "zeroing dq");
    launch_delta(p, threads);
    tensor_core_dkv_kernel<true><<<grid, threads, bytes, compute_stream>>>(KERNEL_ARGUMENTS(p), p.dq_sums);
    dq_from_sums_kernel<<<(unsigned)ceil_div(n, threads), threads, 0, compute_stream>>>(p.dqkv.gpu, p.dq_sums, p.scale, p.T, p.C,
                                                                                       p.NH, p.HS, n);
    p.rounded = true;
    return true;
}

// ---- 6: the library ----
// cuDNN, through llmc/'s graph of plain operations, as without --deterministic: sums of dq as in 5.
static bool attention_backward_6_cudnn(Problem& p, int) {
    if (!attention_state.cudnn) return false;
    attention_backward(p.dqkv.gpu, p.dout.gpu, p.qkv.gpu, p.out.gpu, p.stats.gpu, p.B, p.T, p.C, p.NH);
    p.rounded = true;
    return true;
}

static const Variant<Problem> variants[] = {
    { "attention_backward_1_textbook", "a kernel a formula, from stored probabilities", attention_backward_1_textbook },
    { "attention_backward_2_recomputed", "P made again, a warp a query and a warp a key", attention_backward_2_recomputed },
    { "attention_backward_3_llmc", "tiles in shared memory: llmc/'s own", attention_backward_3_llmc },
    { "attention_backward_4_tensor_cores", "the same two sums on tensor cores", attention_backward_4_tensor_cores },
    { "attention_backward_5_atomics", "one kernel for all three, dq by atomics", attention_backward_5_atomics },
    { "attention_backward_6_cudnn", "cuDNN", attention_backward_6_cudnn, true },
};
int main(int argc, char** argv) {
    return run_variants(argc, argv, "attention_backward", SHAPE_MEANS, { 1024, 768 }, { 70, 128 }, variants);
}
