/*
encoder_backward.cu - gradients of the embeddings, in several kernels: dwte (V,C) += for each token the rows of dout (B,T,C)
where it occurs, dwpe (T,C) = the sum of dout over B.

dwpe is a plain sum. dwte is not: which rows belong together depends on the data, a few tokens are in every sequence, and most
of the vocabulary is in none. Either every row goes to its token, and rows get in one another's way, or every token looks for
its rows. One read of dout, a read and a write of the rows of dwte that change, and a write of dwpe are counted.
*/
#include "encoder_common.cuh"

// Tokens as uneven as those of a text: of 50304 tokens the most frequent has 3 % of the positions.
static std::vector<int> uneven_tokens(int n, int V) {
    std::vector<int> tokens((size_t)n);
    for (int i = 0; i < n; i++) {
        float u = random_uniform(7, 0, (uint64_t)i);
        tokens[(size_t)i] = (int)(u * u * u * (float)V);
    }
    return tokens;
}
static size_t count_distinct(std::vector<int> tokens) {
    std::sort(tokens.begin(), tokens.end());
    return (size_t)(std::unique(tokens.begin(), tokens.end()) - tokens.begin());
}
struct Problem {
    int T, B, C, V;
    double bytes; // that must be moved once
    Both<int> tokens;
    Both<floatX> dout, dwte, dwpe;
    float *sum_wte, *sum_wpe; // (V,C), (T,C) in fp32 for the kernels that need them, owned by both.cuh's list

    Problem(Shape s) : T(sequence_length(s.rows)), B(s.rows / T), C(s.cols), V((int)size_min(2 * (size_t)s.rows, 50304)) {
        LayerShapes shapes = layer_shapes(B, T, C, 1, V, 1);
        start_cpu(shapes);
        tokens = both_of(uneven_tokens(B * T, V));
        dout = random_both((size_t)B * T * C);
        dwte = random_both((size_t)V * C); // the classifier has left its gradient there
        dwpe = unset_both((size_t)T * C);
        bytes = (double)((size_t)B * T + 2 * count_distinct(tokens.start) + T) * C * sizeof(floatX);
        sum_wte = (float*)device_bytes((size_t)V * C * sizeof(float));
        sum_wpe = (float*)device_bytes((size_t)T * C * sizeof(float));
        cuda_layers.shapes = shapes;
        cuda_layers.workspace = device_bytes(encoder_workspace_bytes(shapes));
        cpu::encoder_backward(dwte.cpu, dwpe.cpu, dout.cpu, tokens.cpu, B, T, C, GRAD_SET);
    }
    void expect_right() {
        double slack = 32 + 2 * sqrt(B * T); // a sum in one thread's order is off by about sqrt(N) roundings
        expect_near("dwte", dwte, slack);
        expect_near("dwpe", dwpe, slack);
    }
};

// ---- 1: what one would write first ----
// An atomic adds every element of dout to its sum. The sums are fp32, because in 16 bits each of a thousand additions would
// round, and a common word's gradient would stop growing; so the whole of (V,C) is cleared before and read after, for the few
// rows that change. Atomics at a common word queue up, and the order in which they come decides the last bits.
__global__ void scatter_kernel(float* sum_wte, float* sum_wpe, const floatX* dout, const int* tokens, size_t n, int T, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    size_t row = i / C, c = i % C, t = row % T;
    atomicAdd(&sum_wte[(size_t)tokens[row] * C + c], widen(dout[i]));
    atomicAdd(&sum_wpe[t * C + c], widen(dout[i]));
}
__global__ void add_sums_kernel(floatX* dwte, floatX* dwpe, const float* sum_wte, const float* sum_wpe,
                                size_t n_wte, size_t n_wpe) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n_wte) dwte[i] = narrow<floatX>(widen(dwte[i]) + sum_wte[i]);
    if (i < n_wpe) dwpe[i] = narrow<floatX>(sum_wpe[i]);
}
VARIANT(encoder_backward_1_atomics, "an atomic for every element of dout") {
    size_t n = p.dout.n, larger = size_max(p.dwte.n, p.dwpe.n);
    cuda_check(cudaMemsetAsync(p.sum_wte, 0, p.dwte.n * sizeof(float), compute_stream), "encoder_backward_1_atomics");
    cuda_check(cudaMemsetAsync(p.sum_wpe, 0, p.dwpe.n * sizeof(float), compute_stream), "encoder_backward_1_atomics");
    scatter_kernel<<<(unsigned)ceil_div(n, threads), threads, 0, compute_stream>>>(
        p.sum_wte, p.sum_wpe, p.dout.gpu, p.tokens.gpu, n, p.T, p.C);
    add_sums_kernel<<<(unsigned)ceil_div(larger, threads), threads, 0, compute_stream>>>(
        p.dwte.gpu, p.dwpe.gpu, p.sum_wte, p.sum_wpe, p.dwte.n, p.dwpe.n);
}

// ---- 2: every token looks for its rows ----
// One block per token goes through all positions, and adds up those of its token in order: no atomics, the same bits every
// time. But V blocks read all N tokens, which is V N reads where N would do.
__global__ void search_kernel(floatX* dwte, const floatX* dout, const int* tokens, int N, int C) {
    extern __shared__ int4 shared_memory[];
    float* sum = (float*)shared_memory; // (C), each thread has channels of its own
    int v = blockIdx.x;
    bool found = false;
    for (int c = threadIdx.x; c < C; c += blockDim.x) sum[c] = 0;
    for (int begin = 0; begin < N; begin += blockDim.x) {
        int mine = begin + threadIdx.x, end = min(begin + (int)blockDim.x, N);
        if (!__syncthreads_or(mine < N && tokens[mine] == v)) continue; // none of these positions has the token
        found = true;
        for (int i = begin; i < end; i++) {
            if (tokens[i] != v) continue;
            for (int c = threadIdx.x; c < C; c += blockDim.x) sum[c] += widen(dout[(size_t)i * C + c]);
        }
    }
    if (!found) return;
    floatX* gradient = dwte + (size_t)v * C;
    for (int c = threadIdx.x; c < C; c += blockDim.x) gradient[c] = narrow<floatX>(widen(gradient[c]) + sum[c]);
}
static void sum_positions(Problem& p, int threads) { // dwpe, by llmc/'s kernel with one element a load
    position_sum_kernel<1><<<p.T, threads, 0, compute_stream>>>(p.dwpe.gpu, p.dout.gpu, p.B, p.T, p.C, GRAD_SET);
}
VARIANT(encoder_backward_2_search, "one block per token, which looks through all positions") {
    size_t bytes = (size_t)p.C * sizeof(float);
    if (bytes > 48 << 10) return not_offered();
    search_kernel<<<p.V, threads, bytes, compute_stream>>>(p.dwte.gpu, p.dout.gpu, p.tokens.gpu, p.B * p.T, p.C);
    sum_positions(p, threads);
}

// ---- 3: positions are put into groups first ----
// A counting sort counts each token, finds where its group begins, and puts every position into its group. It moves N integers
// instead of reading V N. But the order in a group is that in which threads came, so the last bits change from run to run.
// llmc/'s kernel adds up a group, with one element a load; its blocks have 256 threads.
VARIANT(encoder_backward_3_groups, "positions grouped by token; the last bits vary") {
    if (threads != WARP * ENCODER_WARPS) return not_offered();
    int N = p.B * p.T;
    unsigned blocks = (unsigned)ceil_div(N, threads);
    TokenGroups g = token_groups(N, TokenRange{ 0, p.V });
    cuda_check(cudaMemsetAsync(g.count, 0, 2 * (size_t)p.V * sizeof(int), compute_stream), "encoder_backward_3_groups");
    token_count_kernel<<<blocks, threads, 0, compute_stream>>>(g, p.tokens.gpu, N);
    token_begin_kernel<<<1, SCAN_THREADS, 0, compute_stream>>>(g, p.V);
    token_place_kernel<<<blocks, threads, 0, compute_stream>>>(g, p.tokens.gpu, N);
    g.sorted = g.unsorted; // llmc/ also sorts each group
    dim3 grid(p.V, (unsigned)ceil_div(p.C, WARP));
    token_sum_kernel<1><<<grid, dim3(WARP, ENCODER_WARPS), 0, compute_stream>>>(p.dwte.gpu, p.dout.gpu, g, p.C);
    sum_positions(p, threads);
}

// ---- 4: llmc/'s ----
// Each group is sorted, so that sums are formed in a fixed order, and rows are read 16 bytes a load.
VARIANT(encoder_backward_4_llmc, "groups sorted: the same bits every time; 16 bytes a load") {
    if (threads != WARP * ENCODER_WARPS) return not_offered();
    encoder_backward(p.dwte.gpu, p.dwpe.gpu, p.dout.gpu, p.tokens.gpu, p.B, p.T, p.C, GRAD_SET);
}

OPERATION("rows are tokens, cols channels", { 32768, 768, 0 }, { 14, 72, 0 })
