/*
attention_forward.cu - causal self-attention, forward, in several kernels: for every query t of a head
S[u] = q[t].k[u] / sqrt(HS) over the keys u <= t, P = softmax(S), out[t] = sum of P[u] v[u], and stats[t] = log of the sum of
exp(S[u]), from which backward computes P again.

2 B T T C operations are counted: two products, each of which takes HS multiplications and additions for a query and a key, and
half of T T such pairs. Inputs and outputs are small beside that. The time goes into (T,T) numbers in memory, and into arithmetic
outside the tensor cores. (T of 1024 is short: the work around the products also counts. Try --rows 8192.)
*/
#include "attention_common.cuh"
#include "attention_hopper.cuh"

struct Problem : AttentionProblem {
    float* matrix; // (B,NH,T,T) for scores, owned by both.cuh's list; NULL: too large

    Problem(Shape shape) : AttentionProblem(shape, 2) { matrix = matrix_or_none(); }
    void expect_right() {
        expect_near("out", out, slack() + (rounded ? 1.5 * ROUNDING / F32_ROUNDING : 0));
        rounded = false;
        expect_near("stats", stats, slack());
    }
};

// ---- 1: what the textbook says ----
// Scores, softmax and weighted sum are a kernel each, with (T,T) fp32 numbers between them, half of them masked. In the first,
// neighbouring threads have neighbouring keys, which lie 3 C elements apart. (Scores rounded to 16 bits would need half the
// memory, but then probabilities are off by a percent.)
// matrix = scores. One score per thread. `causal`: those above the diagonal are not written.
template <bool causal>
__global__ void scores_kernel(float* matrix, const floatX* qkv, float scale, int T, int C, int NH, int HS) {
    int u = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (u >= T || (causal && u > t)) return;
    HeadOffset head = head_offset(blockIdx.z, T, C, NH, HS);
    const floatX *q = qkv + head.qkv + (size_t)t * 3 * C, *k = qkv + head.qkv + C + (size_t)u * 3 * C;
    float s = 0;
    for (int d = 0; d < HS; d++) s = fmaf(widen(q[d]), widen(k[d]), s);
    matrix[(head.stats + t) * T + u] = u <= t ? s * scale : -INFINITY;
}
// Rows of the matrix become probabilities. One row per thread.
__global__ void softmax_kernel(float* matrix, float* stats, int T, int rows) {
    int i = blockIdx.x * blockDim.x + threadIdx.x; // of (B,NH,T)
    if (i >= rows) return;
    float *row = matrix + (size_t)i * T, max = -INFINITY, sum = 0;
    for (int u = 0; u < T; u++) max = fmaxf(max, row[u]);
    for (int u = 0; u < T; u++) sum += row[u] = fast_exp(row[u] - max);
    for (int u = 0; u < T; u++) row[u] /= sum;
    stats[i] = max + logf(sum);
}
// out = P v. One element per thread.
template <bool causal>
__global__ void weighted_sum_kernel(floatX* out, const float* matrix, const floatX* qkv, int T, int C, int NH, int HS, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; // of (B,T,C)
    if (i >= n) return;
    int b = i / C / T, t = i / C % T, c = i % C;
    const float* p = matrix + (((size_t)b * NH + c / HS) * T + t) * T;
    const floatX* v = qkv + (size_t)b * T * 3 * C + 2 * C + c;
    float sum = 0;
    for (int u = 0; u < (causal ? t + 1 : T); u++) sum = fmaf(p[u], widen(v[(size_t)u * 3 * C]), sum);
    out[i] = narrow<floatX>(sum);
}
template <bool causal> static void launch_scores(Problem& p, int threads) {
    dim3 grid((unsigned)ceil_div(p.T, threads), p.T, p.B * p.NH);
    scores_kernel<causal><<<grid, threads, 0, compute_stream>>>(p.matrix, p.qkv.gpu, p.scale, p.T, p.C, p.NH, p.HS);
}
template <bool causal> static void launch_weighted_sum(Problem& p, int threads) {
    unsigned blocks = (unsigned)ceil_div(p.out.n, threads);
    weighted_sum_kernel<causal><<<blocks, threads, 0, compute_stream>>>(p.out.gpu, p.matrix, p.qkv.gpu, p.T, p.C, p.NH, p.HS,
                                                                        p.out.n);
}
VARIANT(attention_forward_1_textbook, "three kernels, the matrix between them") {
    if (p.matrix == NULL) return not_offered();
    int rows = p.B * p.NH * p.T;
    launch_scores<false>(p, threads);
    softmax_kernel<<<(unsigned)ceil_div(rows, threads), threads, 0, compute_stream>>>(p.matrix, p.stats.gpu, p.T, rows);
    launch_weighted_sum<false>(p, threads);
}

// ---- 2: half of it, and a softmax that reads twice ----
// Nothing above the diagonal is computed, stored or read. Maximum and sum come from one pass, by a warp for each row: when a
// larger score comes, the sum so far is scaled down to it (online softmax). The matrix still goes to memory and back three times.
__global__ void causal_softmax_kernel(float* matrix, float* stats, int T, int rows) {
    int i = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, lane = threadIdx.x % WARP; // i of (B,NH,T)
    if (i >= rows) return;
    int keys = i % T + 1;
    float *row = matrix + (size_t)i * T, max = -3.402823466e38f, sum = 0; // finite, for lanes that see no key at all
    for (int u = lane; u < keys; u += WARP) {
        float larger = fmaxf(max, row[u]);
        sum = sum * fast_exp(max - larger) + fast_exp(row[u] - larger);
        max = larger;
    }
    float largest = warp_max(max);
    sum = warp_sum(sum * fast_exp(max - largest));
    for (int u = lane; u < keys; u += WARP) row[u] = fast_exp(row[u] - largest) / sum;
    if (lane == 0) stats[i] = largest + logf(sum);
}
VARIANT(attention_forward_2_causal, "half of the matrix, softmax in two passes") {
    if (p.matrix == NULL) return not_offered();
    int rows = p.B * p.NH * p.T;
    unsigned blocks = (unsigned)ceil_div(rows, threads / WARP);
    launch_scores<true>(p, threads);
    causal_softmax_kernel<<<blocks, threads, 0, compute_stream>>>(p.matrix, p.stats.gpu, p.T, rows);
    launch_weighted_sum<true>(p, threads);
}

// ---- 3: nothing of the matrix in memory ----
// The idea of flash attention: if one pass is enough for softmax, it is enough for the weighted sum, which is scaled down with
// the sum when a larger score comes. One query per warp. But each query reads all its keys and values for itself, from a cache
// at best, and for each score a warp does more in its reduction than in its product.
template <int N>
__global__ void online_kernel(floatX* out, float* stats, const floatX* qkv, float scale, int T, int C, int NH, int HS) {
    int t = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (t >= T) return;
    HeadOffset head = head_offset(blockIdx.y, T, C, NH, HS);
    size_t stride = 3 * (size_t)C;
    qkv += head.qkv;
    LaneRow<N> q = lane_load<N>(qkv + t * stride, HS), o = {};
    float max = -INFINITY, sum = 0;
    for (int u = 0; u <= t; u++) {
        float s = lane_dot(q, lane_load<N>(qkv + C + u * stride, HS)) * scale;
        float larger = fmaxf(max, s), correction = fast_exp(max - larger), p = fast_exp(s - larger);
        #pragma unroll
        for (int n = 0; n < N; n++) o.x[n] *= correction;
        lane_add(o, p, lane_load<N>(qkv + 2 * C + u * stride, HS));
        sum = sum * correction + p;
        max = larger;
    }
    lane_store(out + head.out + (size_t)t * C, o, 1.0f / sum, HS);
    if (threadIdx.x % WARP == 0) stats[head.stats + t] = max + logf(sum);
}
VARIANT(attention_forward_3_online, "one warp per query, nothing of the matrix in memory") {
    if (p.HS > 4 * WARP) return not_offered();
    dim3 grid((unsigned)ceil_div(p.T, threads / WARP), p.B * p.NH);
    auto kernel = p.HS <= 2 * WARP ? online_kernel<2> : online_kernel<4>;
    kernel<<<grid, threads, 0, compute_stream>>>(p.out.gpu, p.stats.gpu, p.qkv.gpu, p.scale, p.T, p.C, p.NH, p.HS);
}

// The problem as llmc/'s kernels take it
static AttentionCall call_of(Problem& p) {
    return { p.out.gpu, p.stats.gpu, p.qkv.gpu, NULL, NULL, p.B, p.T, p.C, p.NH, p.HS };
}

// ---- 4: tiles, llmc/'s own in fp32 ----
// A block of many queries reads keys and values together, a tile at a time into shared memory. Each thread has several queries
// and several keys, so that it uses each number that it reads there more than once. Made for blocks of 256 threads.
VARIANT(attention_forward_4_tiles, "tiles in shared memory: llmc/'s own in fp32") {
    if (threads != ATTENTION_THREADS || p.HS > ATTENTION_MAX_HS) return not_offered();
    attention_fp32_arithmetic(call_of(p));
}

// ---- 5: both products on tensor cores ----
// Tensor cores multiply 16-bit numbers about 16 times as fast as the other units multiply fp32. A warp has 16 queries, and
// keeps their q, scores and sums in registers: only keys and values go through shared memory. P is rounded to 16 bits, as an
// input of the second product. What remains is exponentials. The kernel is llmc/'s, with room for one tile.
VARIANT(attention_forward_5_tensor_cores, "tensor cores, scores stay in registers") {
    if (!tensor_cores_take(p.HS, threads)) return not_offered();
    attention_forward_tensor_cores<1>(call_of(p), threads);
    p.rounded = true;
}

// ---- 6: the next tile is on its way, llmc/'s own in 16 bits ----
// With one tile in shared memory, the block waits for memory at each tile. With two, the next tile comes while this one is
// computed. The copies and the products are the same.
VARIANT(attention_forward_6_prefetch, "the same, the next tile on its way: llmc/'s in 16 bits") {
    if (!tensor_cores_take(p.HS, threads)) return not_offered();
    attention_forward_tensor_cores<STAGES>(call_of(p), threads);
    p.rounded = true;
}

// ---- 7: Hopper's own instructions ----
// In 6 each warp fetches the operands of every product for its 16 queries. Here four warps together multiply 64 queries by a
// tile in shared memory (wgmma), and one thread asks for the copy of the tile (TMA). attention_hopper.cuh has the kernel.
VARIANT(attention_forward_7_hopper, "Hopper's own: tiles by TMA, products by wgmma", OWN_BLOCKS) {
    p.rounded = true;
    is_offered = attention_forward_hopper(call_of(p));
}

// ---- 8: the library ----
// cuDNN, through llmc/'s graph of plain operations. On Hopper it has what 7 lacks: warpgroups that take turns, so that one
// computes exponentials while another multiplies.
VARIANT(attention_forward_8_cudnn, "cuDNN", OWN_BLOCKS) {
    if (!attention_state.cudnn) return not_offered();
    attention_forward(p.out.gpu, p.stats.gpu, p.qkv.gpu, p.B, p.T, p.C, p.NH);
    p.rounded = true;
}

OPERATION(SHAPE_MEANS, { 1024, 768, 0 }, { 70, 128, 0 })
