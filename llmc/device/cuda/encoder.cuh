/*
cuda/encoder.cuh - token and position embeddings.

Backward has to add up, for each token, the rows of dout where it occurs. The positions are first grouped by token with
a counting sort on the device; because the order inside a group must not depend on which thread came first, each
position's place in its group is the number of smaller positions there.
*/
#ifndef LLMC_CUDA_ENCODER_CUH
#define LLMC_CUDA_ENCODER_CUH
#include "common.cuh"

// One block per row, one piece of W channels per thread. Reads up to 2 rows, writes 1: 6 N C bytes in 16 bits.
template <int W>
__global__ void encoder_forward_kernel(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe,
                                       TokenRange range, int T, int C) {
    size_t i = blockIdx.x;
    int row = token_row(range, tokens[i]);
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        Floats<W> sum = {};
        if (row >= 0) sum = load<W>(wte + (size_t)row * C + c);
        if (wpe != NULL) sum += load<W>(wpe + i % T * C + c);
        store(out + i * C + c, sum);
    }
}

void encoder_part_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, TokenRange range,
                          int B, int T, int C) {
    unsigned rows = (unsigned)(B * T);
    if (rows == 0) return;
    bool vectors = rows_are_vectors(C, out, wte, wpe);
    auto kernel = vectors ? encoder_forward_kernel<VEC> : encoder_forward_kernel<1>;
    kernel<<<rows, row_threads(C, vectors), 0, compute_stream>>>(out, tokens, wte, wpe, range, T, C);
    check_launch("encoder_forward");
}
void encoder_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C) {
    encoder_part_forward(out, tokens, wte, wpe, { 0, cuda_layers.shapes.Vp }, B, T, C);
}

// ---- positions grouped by token ----
typedef struct {
    TokenRange range; // tokens that are grouped, each by its row in a matrix of this range; others are left out
    int* count;    // (Vp), of which the first range.count are used: positions with this token
    int* taken;    // (Vp) how many of them have a slot already
    int* begin;    // (Vp+1) where each token's group begins in `unsorted` and `sorted`
    int* unsorted; // (N) positions grouped by token, in any order
    int* sorted;   // (N) the same, ascending within each group; the groups together may have fewer than N positions
} TokenGroups;

static inline size_t encoder_workspace_bytes(LayerShapes s) {
    return (3 * (size_t)s.Vp + 1 + 2 * (size_t)layer_rows(s)) * sizeof(int);
}
static inline TokenGroups token_groups(int N, TokenRange range) {
    int Vp = cuda_layers.shapes.Vp;
    TokenGroups g;
    g.range = range;
    g.count = (int*)cuda_layers.workspace;
    g.taken = g.count + Vp;
    g.begin = g.taken + Vp;
    g.unsorted = g.begin + Vp + 1;
    g.sorted = g.unsorted + N;
    return g;
}

// One thread per position. (Integers may be added up in any order.)
__global__ void token_count_kernel(TokenGroups g, const int* tokens, int N) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, row = i < N ? token_row(g.range, tokens[i]) : -1;
    if (row >= 0) atomicAdd(&g.count[row], 1);
}

// begin (rows+1) = exclusive prefix sums of count (rows), and behind them the sum of all. A single block: each thread
// has a slice of the rows, and the slices' sums are added up by doubling distances.
constexpr int SCAN_THREADS = 1024;
__global__ void token_begin_kernel(TokenGroups g, int rows) {
    __shared__ int sums[SCAN_THREADS];
    int slice = (rows + SCAN_THREADS - 1) / SCAN_THREADS, first = threadIdx.x * slice, last = min(first + slice, rows),
        sum = 0;
    for (int v = first; v < last; v++) sum += g.count[v];
    sums[threadIdx.x] = sum;
    for (int distance = 1; distance < SCAN_THREADS; distance *= 2) {
        __syncthreads();
        int before = (int)threadIdx.x >= distance ? sums[threadIdx.x - distance] : 0;
        __syncthreads(); // all have read what the next line changes
        sums[threadIdx.x] += before;
    }
    int at = sums[threadIdx.x] - sum;
    for (int v = first; v < last; v++) {
        g.begin[v] = at;
        at += g.count[v];
    }
    if (threadIdx.x == SCAN_THREADS - 1) g.begin[rows] = sums[threadIdx.x];
}

// One thread per position: which slot of its group it gets depends on timing.
__global__ void token_place_kernel(TokenGroups g, const int* tokens, int N) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, row = i < N ? token_row(g.range, tokens[i]) : -1;
    if (row >= 0) g.unsorted[g.begin[row] + atomicAdd(&g.taken[row], 1)] = i;
}
// One thread per slot. The work is the sum of the groups' squared sizes: for text nothing,
// for 64 thousand equal tokens a millisecond.
__global__ void token_sort_kernel(TokenGroups g, const int* tokens) {
    int slot = blockIdx.x * blockDim.x + threadIdx.x;
    if (slot >= g.begin[g.range.count]) return; // positions of tokens elsewhere have no slot
    int i = g.unsorted[slot], row = token_row(g.range, tokens[i]), begin = g.begin[row], end = g.begin[row + 1],
        smaller = 0;
    for (int other = begin; other < end; other++) smaller += g.unsorted[other] < i;
    g.sorted[begin + smaller] = i;
}

// dwte[v] += sum of dout over the group of v. Block (32,8) for one token and 32 W channels: each of the 8 warps takes
// every 8th position of the group, lanes take W channels each, then the first warp adds up the warps.
// Reads 2 N C bytes in 16 bits, and reads and writes the rows of the tokens that occur.
constexpr int ENCODER_WARPS = 8;
template <int W>
__global__ void token_sum_kernel(floatX* dwte, const floatX* dout, TokenGroups g, int C) {
    __shared__ float sums[ENCODER_WARPS][WARP * W];
    int v = blockIdx.x, begin = g.begin[v], end = g.begin[v + 1], c = (blockIdx.y * WARP + threadIdx.x) * W;
    if (begin == end) return;
    Floats<W> sum = {};
    for (int i = begin + threadIdx.y; i < end && c < C; i += ENCODER_WARPS)
        sum += load<W>(dout + (size_t)g.sorted[i] * C + c);
    sum_of_warps(&sum, sums);
    if (threadIdx.y != 0 || c >= C) return;
    Floats<W> total = load<W>(dwte + (size_t)v * C + c);
    total += sum;
    store(dwte + (size_t)v * C + c, total);
}

// dwpe[t] set or += sum of dout[b,t] over b, in order. One block per t, W channels per thread.
// Reads 2 N C bytes in 16 bits.
template <int W>
__global__ void position_sum_kernel(floatX* dwpe, const floatX* dout, int B, int T, int C, GradMode mode) {
    size_t t = blockIdx.x;
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        Floats<W> sum = {};
        for (int b = 0; b < B; b++) sum += load<W>(dout + ((size_t)b * T + t) * C + c);
        if (mode == GRAD_ADD) sum += load<W>(dwpe + t * C + c);
        store(dwpe + t * C + c, sum);
    }
}

// forward: out[b,t] = wte[tokens[b,t]] + wpe[t]
void encoder_part_backward(floatX* dwte, floatX* dwpe, const floatX* dout, const int* tokens, TokenRange range,
                           int B, int T, int C, GradMode mode) {
    int N = B * T, Vp = cuda_layers.shapes.Vp;
    bool vectors = rows_are_vectors(C, dwte, dwpe, dout);
    unsigned strips = (unsigned)ceil_div(C, WARP * (vectors ? VEC : 1));
    unsigned blocks = (unsigned)size_max(1, ceil_div(N, 256)); // without positions the groups are empty
    TokenGroups g = token_groups(N, range);
    // count and taken, which are neighbours
    cuda_check(cudaMemsetAsync(g.count, 0, 2 * (size_t)Vp * sizeof(int), compute_stream), "encoder_backward");
    token_count_kernel<<<blocks, 256, 0, compute_stream>>>(g, tokens, N);
    token_begin_kernel<<<1, SCAN_THREADS, 0, compute_stream>>>(g, range.count);
    token_place_kernel<<<blocks, 256, 0, compute_stream>>>(g, tokens, N);
    token_sort_kernel<<<blocks, 256, 0, compute_stream>>>(g, tokens);
    check_launch("encoder_backward, grouping");
    auto token_sum = vectors ? token_sum_kernel<VEC> : token_sum_kernel<1>;
    token_sum<<<dim3(range.count, strips), dim3(WARP, ENCODER_WARPS), 0, compute_stream>>>(dwte, dout, g, C);
    check_launch("encoder_backward, tokens");
    if (dwpe == NULL || T == 0) return;
    auto position_sum = vectors ? position_sum_kernel<VEC> : position_sum_kernel<1>;
    position_sum<<<T, row_threads(C, vectors), 0, compute_stream>>>(dwpe, dout, B, T, C, mode);
    check_launch("encoder_backward, positions");
}
void encoder_backward(floatX* dwte, floatX* dwpe, const floatX* dout, const int* tokens, int B, int T, int C,
                      GradMode mode) {
    encoder_part_backward(dwte, dwpe, dout, tokens, { 0, cuda_layers.shapes.Vp }, B, T, C, mode);
}
#endif
