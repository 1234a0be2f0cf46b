/*
attention_backward.cu - causal self-attention, backward, in several kernels: dq, dk and dv from dout, and from what forward left,
out and stats.

forward, for query t of a head: S[u] = q[t].k[u] / sqrt(HS) over the keys u <= t, P = softmax(S), out[t] = sum of P[u] v[u]. So

    dv[u] += P[u] dout[t]               dP[u] = dout[t].v[u]            D = sum over u of P[u] dP[u]
    dS[u] = P[u] (dP[u] - D)            dq[t] = sum of dS[u] k[u] / sqrt(HS)     dk[u] += dS[u] q[t] / sqrt(HS)

4 B T T C operations are counted: the derivative of forward's two products is four, each as large as one of those (and half of it
is masked). Kernels that compute the scores again do a fifth, some more, and get no credit for them; papers count five.
*/
#include "attention_common.cuh"

struct Problem : AttentionProblem {
    Both<floatX> dout, dqkv;
    float *delta, *dq_sums;     // (B,NH,T), (B,NH,T,HS); these and the next are owned by both.cuh's list
    float *probabilities, *ds;  // (B,NH,T,T), as a forward that stores them would leave them, and scratch; NULL: too large

    Problem(Shape shape);
    void expect_right() {
        expect_near("dqkv", dqkv, 4 * slack() + (rounded ? 3 * ROUNDING / F32_ROUNDING : 0));
        rounded = false;
    }
};

// matrix = P, computed from stats. One element per thread.
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
Problem::Problem(Shape shape) : AttentionProblem(shape, 4) {
    size_t n = (size_t)B * T * C;
    dout = random_both(n); dqkv = unset_both(3 * n);
    out = as_input(out);
    stats = as_input(stats);
    cpu::attention_backward(dqkv.cpu, dout.cpu, qkv.cpu, out.cpu, stats.cpu, B, T, C, NH);
    delta = (float*)device_bytes((size_t)B * NH * T * sizeof(float));
    dq_sums = (float*)device_bytes(n * sizeof(float));
    probabilities = matrix_or_none();
    ds = matrix_or_none();
    if (fits)
        probabilities_kernel<<<dim3((unsigned)ceil_div(T, 256), T, B * NH), 256, 0, compute_stream>>>(
            probabilities, qkv.gpu, stats.gpu, scale, T, C, NH, HS);
}

// ---- 1: what the textbook says ----
// Forward has stored all of P; dP is as large. Each line of the formulas is a kernel.
// ds = dP. One element per thread; neighbours have keys that lie 3 C elements apart.
__global__ void dp_kernel(float* ds, const floatX* dout, const floatX* qkv, int T, int C, int NH, int HS) {
    int u = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (u >= T) return;
    HeadOffset head = head_offset(blockIdx.z, T, C, NH, HS);
    const floatX *d = dout + head.out + (size_t)t * C, *v = qkv + head.qkv + 2 * C + (size_t)u * 3 * C;
    float sum = 0;
    for (int i = 0; i < HS; i++) sum = fmaf(widen(d[i]), widen(v[i]), sum);
    ds[(head.stats + t) * T + u] = sum;
}
// ds = P (ds - D), D from ds. One row per warp.
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
// dq, dk, dv. One element of each per thread.
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
VARIANT(attention_backward_1_textbook, "one kernel per formula, from stored probabilities") {
    if (p.probabilities == NULL) return not_offered();
    int rows = p.B * p.NH * p.T;
    dim3 grid((unsigned)ceil_div(p.T, threads), p.T, p.B * p.NH);
    unsigned blocks = (unsigned)ceil_div(p.out.n, threads), warps = (unsigned)ceil_div(rows, threads / WARP);
    dp_kernel<<<grid, threads, 0, compute_stream>>>(p.ds, p.dout.gpu, p.qkv.gpu, p.T, p.C, p.NH, p.HS);
    softmax_backward_kernel<<<warps, threads, 0, compute_stream>>>(p.ds, p.probabilities, p.T, rows);
    products_kernel<<<blocks, threads, 0, compute_stream>>>(p.dqkv.gpu, p.probabilities, p.ds, p.dout.gpu, p.qkv.gpu, p.scale,
                                                            p.T, p.C, p.NH, p.HS, p.out.n);
    p.rounded = true; // P is not, but the CPU's layer and all later kernels compute D from out, which was
}

// ---- 2: nothing of the matrix in memory ----
// P[u] = exp(S[u] - stats[t]) is one more product, and forward need not store P. Only D needs a whole row before the first
// element of dS; but D = sum of P[u] (dout[t].v[u]) = dout[t] . sum of P[u] v[u] = dout[t].out[t], for which llmc/ has a
// kernel. Two others follow: for dq one warp per query sums over keys, for dk and dv one warp per key sums over queries. So
// each sum has one owner, and P and dP are computed twice.
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
VARIANT(attention_backward_2_recomputed, "P computed again, one warp per query, one per key") {
    if (p.HS > 4 * WARP) return not_offered();
    dim3 grid((unsigned)ceil_div(p.T, threads / WARP), p.B * p.NH);
    auto dq = p.HS <= 2 * WARP ? dq_kernel<2> : dq_kernel<4>;
    auto dkv = p.HS <= 2 * WARP ? dkv_kernel<2> : dkv_kernel<4>;
    launch_delta(p, threads);
    dq<<<grid, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), p.HS);
    dkv<<<grid, threads, 0, compute_stream>>>(KERNEL_ARGUMENTS(p), p.HS);
}

// The problem as llmc/'s kernels take it
static AttentionCall call_of(Problem& p) {
    return { p.dqkv.gpu, p.stats.gpu, p.qkv.gpu, p.dout.gpu, p.out.gpu, p.B, p.T, p.C, p.NH, p.HS };
}

// ---- 3: tiles, llmc/'s own in fp32 ----
// The same two sums. A block has a tile of queries or keys, and tiles of the other side are copied to shared memory. Made for
// blocks of 256 threads.
VARIANT(attention_backward_3_tiles, "tiles in shared memory: llmc/'s own in fp32") {
    if (threads != ATTENTION_THREADS || p.HS > ATTENTION_MAX_HS) return not_offered();
    attention_fp32_arithmetic(call_of(p));
}

// ---- 4: all products on tensor cores, llmc/'s own in 16 bits ----
// A warp has 16 queries, or 16 keys. It keeps their rows and its sums in registers, and computes S and dP of each tile there.
// As in forward, P and dS are then where a left operand has to be, if the rows of S and dP are those of the sums: for dk and dv
// they are computed transposed. No lane needs another lane's P, so only tiles need barriers. Two tiles are in shared memory, as
// in forward's sixth kernel.
VARIANT(attention_backward_4_tensor_cores, "the same on tensor cores: llmc/'s in 16 bits") {
    if (!tensor_cores_take(p.HS, threads)) return not_offered();
    attention_backward_tensor_cores(call_of(p), threads);
    p.rounded = true;
}

// ---- 5: S and dP once ----
// Five products instead of seven: the blocks of keys, which have dS anyway, add dS k to dq as they go. Each query's sum then has
// many owners, which add in any order: fp32 atomics into zeroed memory, and a pass at the end that rounds. FlashAttention-2 and
// cuDNN do this where the last bits may differ from run to run. llmc/'s own never differ, so it has no such kernel. The rows of
// dS are keys for dk, and queries for dq: shared memory passes it from warp to warp.
constexpr int DS_STRIDE = BACKWARD_ROWS + VEC; // as TILE_STRIDE

// ds (keys of the block, BACKWARD_ROWS) in shared memory: rows from `own` on = this warp's.
__device__ inline void ds_put(floatX* ds, const float (&warps)[BACKWARD_ROWS / 8][4], int own) {
    int row = own + threadIdx.x % WARP / 4, col = threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < BACKWARD_ROWS / 8 * 2; i++) {
        floatX* pair = ds + (row + i % 2 * 8) * DS_STRIDE + i / 2 * 8 + col;
        *(uint32_t*)pair = fragment_of(warps[i / 2][i % 2 * 2], warps[i / 2][i % 2 * 2 + 1]);
    }
}
// dq_sums (T,HEAD), from query t on, += dS k, of the block's keys: (32,keys) (keys,HEAD), in pieces of (16,16) that the warps
// take in turn. ds is dS transposed, (keys,32), and is read by columns.
__device__ inline void add_to_dq(float* dq_sums, const floatX* ds, const floatX* keys, int t, int T) {
    int warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    for (int piece = threadIdx.x / WARP; piece < BACKWARD_ROWS / 16 * (HEAD / 16); piece += warps) {
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
// Computes dk and dv as llmc/'s kernel does, and adds to dq_sums (B,NH,T,HEAD): one kernel for all three. Grid (heads, tiles of
// keys).
__global__ void __launch_bounds__(TENSOR_CORE_MOST_THREADS)
dqkv_atomics_kernel(floatX* dqkv, const floatX* dout, const floatX* qkv, const float* stats, const float* delta, float scale,
                    int T, int C, int NH, float* dq_sums) {
    extern __shared__ int4 shared_memory[];
    floatX* stages = (floatX*)shared_memory;
    int keys = blockDim.x / WARP * 16, block_first = blockIdx.y * keys, own = threadIdx.x / WARP * 16, first = block_first + own;
    floatX *block_keys = stages + STAGES * BACKWARD_STAGE, *ds_of_all = block_keys + keys * TILE_STRIDE;
    HeadOffset head = head_offset(blockIdx.x, T, C, NH, HEAD);
    qkv += head.qkv; dout += head.out; stats += head.stats; delta += head.stats;
    auto stage_of = [&](int t) { return stages + (t - block_first) / BACKWARD_ROWS % STAGES * BACKWARD_STAGE; };
    float ds[BACKWARD_ROWS / 8][4];
    KeyRows w = key_rows_begin(qkv + C, first, 3 * C, T, C);
    tile_fetch(block_keys, qkv + C + (size_t)block_first * 3 * C, 3 * C, keys, T - block_first);
    queries_fetch(stage_of(block_first), qkv, dout, stats, delta, block_first, T, C);
    for (int t = block_first; t < T; t += BACKWARD_ROWS) {
        queries_fetch(stage_of(t + BACKWARD_ROWS), qkv, dout, stats, delta, t + BACKWARD_ROWS, T, C);
        __pipeline_wait_prior(1); // this thread's part of this stage is there
        __syncthreads();          // and all others'
        key_rows_add(w, ds, stage_of(t), scale, first - t);
        ds_put(ds_of_all, ds, own);
        __syncthreads(); // dS of all warps is there
        add_to_dq(dq_sums + head.stats * HEAD, ds_of_all, block_keys, t, T);
        __syncthreads(); // all warps are done with this stage, whose memory is the next one's, and with dS
    }
    key_rows_store<false>(dqkv + head.qkv + C, w, scale, first, 3 * C, T, C);
}
// dq of dqkv = scale * dq_sums. One element per thread.
__global__ void dq_from_sums_kernel(floatX* dqkv, const float* dq_sums, float scale, int T, int C, int NH, int HS, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; // of (B,NH,T,HS)
    if (i >= n) return;
    size_t row = i / HS;
    HeadOffset head = head_offset(row / T, T, C, NH, HS);
    dqkv[head.qkv + row % T * 3 * C + i % HS] = narrow<floatX>(dq_sums[i] * scale);
}
VARIANT(attention_backward_5_atomics, "one kernel for all three, dq by atomics") {
    if (!tensor_cores_take(p.HS, threads)) return not_offered();
    int keys = threads / WARP * 16;
    size_t bytes = (STAGES * BACKWARD_STAGE + keys * (TILE_STRIDE + DS_STRIDE)) * sizeof(floatX), n = p.out.n;
    dim3 grid(p.B * p.NH, (unsigned)ceil_div(p.T, keys));
    cuda_check(cudaMemsetAsync(p.dq_sums, 0, n * sizeof(float), compute_stream), "zeroing dq");
    launch_delta(p, threads);
    dqkv_atomics_kernel<<<grid, threads, bytes, compute_stream>>>(KERNEL_ARGUMENTS(p), p.dq_sums);
    dq_from_sums_kernel<<<(unsigned)ceil_div(n, threads), threads, 0, compute_stream>>>(p.dqkv.gpu, p.dq_sums, p.scale, p.T, p.C,
                                                                                       p.NH, p.HS, n);
    p.rounded = true;
}

// ---- 6: the library ----
// cuDNN, through llmc/'s graph of plain operations, as without --deterministic: sums of dq as in 5.
VARIANT(attention_backward_6_cudnn, "cuDNN", OWN_BLOCKS) {
    if (!attention_state.cudnn) return not_offered();
    attention_backward(p.dqkv.gpu, p.dout.gpu, p.qkv.gpu, p.out.gpu, p.stats.gpu, p.B, p.T, p.C, p.NH);
    p.rounded = true;
}

OPERATION(SHAPE_MEANS, { 1024, 768, 0 }, { 70, 128, 0 })
